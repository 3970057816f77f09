/*
 * Progress without polls: what the peer of a process observes after that process polled and then computes or sleeps.
 *
 *     progress claims ADDR CHECK            checks by the order of events: order, computing, timewait or rnr
 *     progress ack|one-sided ADDR SECONDS   prints latencies, each next to that of a UDP echo by a thread asleep in epoll
 *     progress pingpong|udp ADDR ROUNDS     prints the slowest rounds of a long ping-pong, and how long each side did not poll
 *
 * The parent is the peer, the child the target. They share a page. ADDR is the device's address.
 */
#define _GNU_SOURCE
#include "common.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>

enum { BYTES = 64, DEPTH = 64, SAMPLES = 1 << 18, WORST = 3, GAPS = 1 << 14 };
enum load { ACK, WRITE, READ, ECHO, ASLEEP, END };

/* A period without a poll, in microseconds since 1970, and the part of it that the thread was runnable but not running. */
struct gap { double begin, end, waited; };

struct side {
	atomic_int arrived;
	uint32_t number, key;
	uint64_t address;
	struct sockaddr_in udp;
	int gaps;
	struct gap gap[GAPS];
};

static struct shared {
	struct side sides[2];
	/* The current round, and what the target does in it. */
	atomic_int round;
	enum load load;
	double compute;
	/* The last round whose computation began, whose computation ended, whose operation completed. */
	atomic_int begun, ended, completed;
} *shared;

static struct side *local, *remote;
static const char *address;
static char *buffer;
static struct ibv_mr *mr;
static struct ibv_qp *qp;
static int udp, schedstat, timeout = 14, retries = 7;
static double latency[SAMPLES];
/* Completions that await() has not consumed. */
static int sent, received;

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_REALTIME, &t);
	return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

/* Waits until the other process arrives too. */
static void barrier(void)
{
	int mine = ++local->arrived;

	while (remote->arrived < mine)
		usleep(50);
}

static struct ibv_qp *create(struct ibv_cq *queue)
{
	struct ibv_qp_init_attr init = { .send_cq = queue, .recv_cq = queue, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
					 .cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1,
						  .max_recv_sge = 1 } };
	struct ibv_qp *made = ibv_create_qp(pd, &init);

	MUST(made);
	return made;
}

/* Connects a queue pair. Its RNR timer is the longest, 655 ms (code 0). */
static void connect_to(struct ibv_qp *of, uint32_t number)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1,
				    .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

	MUST(!ibv_modify_qp(of, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = number,
				     .max_dest_rd_atomic = 1,
				     .ah_attr = { .is_global = 1, .port_num = 1,
						  .grh = { .dgid = own, .sgid_index = own_index, .hop_limit = 64 } } };
	MUST(!ibv_modify_qp(of, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = timeout, .retry_cnt = retries, .rnr_retry = 7,
				     .max_rd_atomic = 1 };
	MUST(!ibv_modify_qp(of, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				       IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

static void post_recv(void)
{
	struct ibv_sge to = { (uintptr_t)buffer, BYTES, mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &to, .num_sge = 1 }, *bad;

	MUST(!ibv_post_recv(qp, &wr, &bad));
}

static void post(struct ibv_qp *of, enum ibv_wr_opcode opcode)
{
	struct ibv_sge from = { (uintptr_t)buffer, BYTES, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &from, .num_sge = 1, .opcode = opcode,
				  .wr.rdma = { remote->address + BYTES, remote->key } }, *bad;

	MUST(!ibv_post_send(of, &wr, &bad));
}

/* Polls once and counts the completion. */
static void poll_once(void)
{
	struct ibv_wc wc;
	int got = ibv_poll_cq(cq, 1, &wc);

	MUST(got >= 0);
	if (got && wc.status) {
		fprintf(stderr, "a completion with %s\n", ibv_wc_status_str(wc.status));
		exit(1);
	}
	if (got)
		++*(wc.opcode & IBV_WC_RECV ? &received : &sent);
}

/* Polls until that many sends and receives have completed, and consumes them. */
static void await(int sends, int receives)
{
	while (sent < sends || received < receives)
		poll_once();
	sent -= sends;
	received -= receives;
}

/* Opens the device, a queue pair and a socket, and connects them to those of the other process. */
static void begin(void)
{
	socklen_t length = sizeof(local->udp);

	set_up();
	MUST(!posix_memalign((void **)&buffer, 4096, 4096));
	memset(buffer, 0, 4096);
	MUST(mr = ibv_reg_mr(pd, buffer, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ));
	qp = create(cq);
	local->number = qp->qp_num;
	local->key = mr->rkey;
	local->address = (uintptr_t)buffer;
	local->udp = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = inet_addr(address) };
	MUST((udp = socket(AF_INET, SOCK_DGRAM, 0)) >= 0 && !bind(udp, (void *)&local->udp, sizeof(local->udp)));
	MUST(!getsockname(udp, (void *)&local->udp, &length));
	barrier();
	connect_to(qp, remote->number);
	MUST(!connect(udp, (void *)&remote->udp, sizeof(remote->udp)));
	for (int i = 0; i < DEPTH; i++)
		post_recv();
	barrier();
}

/* Echoes datagrams; sleeps in epoll. */
static void *echo(void *unused)
{
	int epoll = epoll_create1(0), n;
	struct epoll_event event = { .events = EPOLLIN };
	char datagram[BYTES];

	(void)unused;
	MUST(epoll >= 0 && !epoll_ctl(epoll, EPOLL_CTL_ADD, udp, &event));
	for (;;)
		if (epoll_wait(epoll, &event, 1, -1) == 1 && (n = recv(udp, datagram, BYTES, MSG_DONTWAIT)) > 0)
			MUST(send(udp, datagram, n, 0) == n);
	return NULL;
}

static void compute(int round)
{
	double end = now() + shared->compute;

	shared->begun = round;
	while (now() < end)
		;
	shared->ended = round;
}

/* Runs the target's side of each round until END. */
static void serve(void)
{
	static int round;

	for (;;) {
		while (shared->round == round)
			sched_yield();
		round = shared->round;
		switch (shared->load) {
		case ACK:
			await(0, 1);
			compute(round);
			post_recv();
			post(qp, IBV_WR_SEND);
			await(1, 0);
			break;
		case WRITE:
		case READ:
		case ECHO:
			/* The initiator yields meanwhile, to whatever else runs: for the echo as well. */
			for (int i = 0; i < 500; i++)
				poll_once();
			compute(round);
			break;
		case ASLEEP:
			for (int i = 0; i < 20; i++)
				poll_once();
			shared->begun = round;
			while (shared->completed < round)
				usleep(1000);
			break;
		case END:
			return;
		}
	}
}

/* Starts a round. Waits until the target computes or sleeps, unless it has to receive a SEND first. */
static int start(enum load load, double compute_us)
{
	int round = shared->round + 1;

	shared->load = load;
	shared->compute = compute_us;
	shared->round = round;
	while (load != ACK && load != END && shared->begun < round)
		sched_yield();
	return round;
}

/* Runs a round. Returns the operation's latency in microseconds, and whether it completed before the computation ended. */
static double run_round(enum load load, double compute_us, int *in_time)
{
	int round = start(load, compute_us);
	char datagram[BYTES] = { 0 };
	double began = now(), took;

	if (load == ECHO) {
		MUST(send(udp, datagram, BYTES, 0) == BYTES);
		while (recv(udp, datagram, BYTES, MSG_DONTWAIT) != BYTES)
			;
	} else {
		post(qp, load == ACK ? IBV_WR_SEND : load == WRITE ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ);
		await(1, 0);
	}
	took = now() - began;
	*in_time = shared->ended < round;
	shared->completed = round;
	if (load == ACK) {
		await(0, 1);
		post_recv();
	}
	while (load != ASLEEP && shared->ended < round)
		sched_yield();
	return took;
}

/* Plays ping-pong, to which a driver may adapt. */
static void warm_up(int rounds)
{
	int in_time;

	for (int i = 0; i < rounds; i++)
		run_round(ACK, 0, &in_time);
}

static int ascending(const void *a, const void *b)
{
	double x = *(double *)a, y = *(double *)b;

	return (x > y) - (x < y);
}

static void measure(const char *name, enum load load, double compute_us, double seconds)
{
	int n = 0, in_time;
	double end;

	warm_up(1000);
	end = now() + seconds * 1e6;
	while (n < SAMPLES && (n < 20 || now() < end))
		latency[n++] = run_round(load, compute_us, &in_time);
	qsort(latency, n, sizeof(*latency), ascending);
	printf("{\"name\": \"%s\", \"rounds\": %d, \"p50\": %.1f, \"p99\": %.1f}\n", name, n, latency[n / 2],
	       latency[n * 99 / 100]);
	fflush(stdout);
}

/* Leaves a queue pair waiting for an RNR timer until the process exits. */
static void leave_in_rnr_wait(void)
{
	struct ibv_cq *queue = ibv_create_cq(context, 16, NULL, NULL, 0);
	struct ibv_qp *a, *b;

	MUST(queue);
	a = create(queue);
	b = create(queue);
	connect_to(a, b->qp_num);
	connect_to(b, a->qp_num);
	post(a, IBV_WR_SEND);
	usleep(50000);
}

/* Connects both processes by RDMA_CM. The target disconnects, which leaves its connection in timewait. */
static void leave_in_timewait(int target)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 1, .max_recv_wr = 1,
					 .max_send_sge = 1, .max_recv_sge = 1 } };
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = target ? 0 : RAI_PASSIVE }, *found;
	struct rdma_cm_id *id, *listener;

	if (target)
		barrier();
	MUST(!rdma_getaddrinfo(address, "7991", &hints, &found) && !rdma_create_ep(&id, found, NULL, &init));
	if (target) {
		MUST(!rdma_connect(id, NULL) && !rdma_disconnect(id));
		usleep(400000);
	} else {
		MUST(!rdma_listen(listener = id, 1));
		barrier();
		MUST(!rdma_get_request(listener, &id) && !rdma_accept(id, NULL));
	}
	barrier();
}

/* Checks that the operation completes while the target computes, at least a quarter as often as a UDP echo returns. A try proves nothing on a
 * machine that is too busy for the echo; three others without a success are no coincidence. */
static void completes_while_computing(const char *what, enum load load, double compute_us)
{
	int in_time, possible, done, failed = 0;

	for (int tries = 0; tries < 10 && failed < 3; tries++) {
		possible = done = 0;
		warm_up(200);
		for (int i = 0; i < 100; i++)
			run_round(load, compute_us, &in_time), done += in_time;
		for (int i = 0; i < 100; i++)
			run_round(ECHO, compute_us, &in_time), possible += in_time;
		if (possible >= 50 && 4 * done >= possible)
			return;
		failed += possible >= 50;
	}
	if (failed < 3)
		return;
	fprintf(stderr, "while its target computed a %s completed %d times, a datagram came back %d times\n", what, done, possible);
	exit(1);
}

/* Checks that no answer overtakes the acknowledgement of what it answers: programs take it as proof that their SEND completed. */
static void acknowledgements_precede_answers(void)
{
	for (int i = 0; i < 2000; i++) {
		start(ACK, 0);
		post(qp, IBV_WR_SEND);
		await(0, 1);
		if (!sent) {
			fprintf(stderr, "the answer to SEND %d came before its acknowledgement\n", i);
			exit(1);
		}
		await(1, 0);
		post_recv();
	}
}

static void reads_complete_with_a_timer_pending(void)
{
	int in_time;

	for (int i = 0; i < 5; i++)
		run_round(ASLEEP, 0, &in_time);
}

static void check_computing(void)
{
	warm_up(1000);
	completes_while_computing("SEND", ACK, 300);
	/* The progress thread takes over within 150 us, and has to be woken, for which a busy machine needs as long again. */
	completes_while_computing("WRITE", WRITE, 800);
	completes_while_computing("READ", READ, 800);
}

static void claims(int target, const char *check)
{
	static const struct { const char *name; void (*of)(void); } checks[] = {
		{ "order", acknowledgements_precede_answers },
		{ "computing", check_computing },
		{ "timewait", reads_complete_with_a_timer_pending },
		{ "rnr", reads_complete_with_a_timer_pending },
	};

	if (!strcmp(check, "timewait"))
		leave_in_timewait(target);
	if (!strcmp(check, "rnr") && target)
		leave_in_rnr_wait();
	barrier();
	if (target)
		return serve();
	for (int i = 0; i < COUNT(checks); i++)
		if (!strcmp(check, checks[i].name))
			checks[i].of();
	start(END, 0);
}

static void acknowledgements(double seconds)
{
	static const struct { const char *what; double us; } times[] = { { "300 us", 300 }, { "3 ms", 3000 }, { "20 ms", 20000 } };
	char name[64];

	for (int i = 0; i < COUNT(times); i++) {
		snprintf(name, sizeof(name), "SEND, %s", times[i].what);
		measure(name, ACK, times[i].us, seconds);
		snprintf(name, sizeof(name), "echo, %s", times[i].what);
		measure(name, ECHO, times[i].us, seconds);
	}
}

static void figures(int target, int one_sided, double seconds)
{
	if (target) {
		serve();
		leave_in_rnr_wait();
		barrier();
		return serve();
	}
	if (one_sided) {
		measure("echo", ECHO, 3000, seconds);
		measure("WRITE", WRITE, 3000, seconds);
		measure("READ", READ, 3000, seconds);
		measure("READ, asleep", ASLEEP, 0, seconds);
	} else {
		acknowledgements(seconds);
	}
	start(END, 0);
	barrier();
	if (one_sided)
		measure("READ, asleep, timer", ASLEEP, 0, seconds);
	start(END, 0);
}

/* Returns how long this thread has been runnable but not running, in microseconds. */
static double run_delay(void)
{
	char text[64] = "";
	unsigned long long ran, waits = 0;

	MUST(pread(schedstat, text, sizeof(text) - 1, 0) > 0 && sscanf(text, "%llu %llu", &ran, &waits) == 2);
	return waits / 1e3;
}

/* Returns how long a side did not poll in a period, and how much of that it was runnable but not running. */
static double time_away(const struct side *side, double begin, double end, double *waits)
{
	double all = *waits = 0;

	for (int i = 0; i < side->gaps; i++) {
		const struct gap *a = &side->gap[i];
		double from = a->begin > begin ? a->begin : begin, to = a->end < end ? a->end : end;

		if (to > from) {
			all += to - from;
			*waits += (to - from) * a->waited / (a->end - a->begin);
		}
	}
	return all;
}

/* Waits for a message. Records a gap when a millisecond passes between two polls. */
static void await_message(int bare)
{
	static double last, before;
	char datagram[BYTES];

	while (!received) {
		double at = now();

		if (last && at - last > 1000 && local->gaps < GAPS) {
			double by = run_delay();

			local->gap[local->gaps++] = (struct gap){ last, at, by - before < at - last ? by - before : at - last };
			before = by;
		}
		last = at;
		if (!bare)
			poll_once();
		else if (recv(udp, datagram, BYTES, MSG_DONTWAIT) == BYTES)
			received = 1;
	}
	received = 0;
}

static void send_message(int bare)
{
	char datagram[BYTES] = { 0 };

	if (bare)
		MUST(send(udp, datagram, BYTES, 0) == BYTES);
	else
		post(qp, IBV_WR_SEND);
}

static void pingpong(int target, int bare, int rounds)
{
	struct { double begin, took; int round; } worst[WORST] = { { 0 } };

	MUST((schedstat = open("/proc/thread-self/schedstat", O_RDONLY)) >= 0);
	for (int i = 0; i < rounds; i++) {
		double begin = now(), took;
		int n = WORST;

		if (!target)
			send_message(bare);
		await_message(bare);
		if (!bare)
			post_recv();
		if (target)
			send_message(bare);
		took = now() - begin;
		while (n > 0 && took > worst[n - 1].took)
			n--;
		if (n == WORST)
			continue;
		memmove(&worst[n + 1], &worst[n], (WORST - 1 - n) * sizeof(*worst));
		worst[n].begin = begin;
		worst[n].took = took;
		worst[n].round = i;
	}
	if (!bare)
		await(rounds, 0);
	barrier();
	for (int i = 0; i < WORST && !target; i++) {
		double waits[2], begin = worst[i].begin, end = begin + worst[i].took, mine = time_away(local, begin, end, &waits[0]),
		       its = time_away(remote, begin, end, &waits[1]);

		printf("{\"round\": %d, \"begin\": %.1f, \"took\": %.1f, \"away\": [%.1f, %.1f], \"waited\": [%.1f, %.1f]}\n",
		       worst[i].round, begin, worst[i].took, mine, its, waits[0], waits[1]);
	}
}

static pid_t target_pid;

/* Exits if the target failed. */
static void ended(int signal)
{
	int status;

	(void)signal;
	if (waitpid(target_pid, &status, WNOHANG) == target_pid && status)
		_exit(1);
}

int main(int argc, char **argv)
{
	int target, bare, claim;
	pthread_t thread;

	MUST(argc > 3);
	address = argv[2];
	claim = !strcmp(argv[1], "claims");
	bare = !strcmp(argv[1], "udp");
	/* RETRY_EXC after four timeouts of 34 ms. */
	if (claim)
		timeout = 13, retries = 3;
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	MUST(shared != MAP_FAILED);
	signal(SIGCHLD, ended);
	MUST((target_pid = fork()) >= 0);
	target = !target_pid;
	if (target)
		prctl(PR_SET_PDEATHSIG, SIGKILL);
	local = &shared->sides[target];
	remote = &shared->sides[!target];
	begin();
	if (bare || !strcmp(argv[1], "pingpong")) {
		pingpong(target, bare, atoi(argv[3]));
	} else {
		MUST(!target || !pthread_create(&thread, NULL, echo, NULL));
		claim ? claims(target, argv[3]) : figures(target, !strcmp(argv[1], "one-sided"), atof(argv[3]));
	}
	barrier();
	if (target)
		_exit(0);
	MUST(!ibv_destroy_qp(qp) && !ibv_dereg_mr(mr));
	tear_down("progress is made without polls");
	return 0;
}
