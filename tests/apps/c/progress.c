/*
 * Progress without polls: what a peer sees of a process that has polled and now computes, or sleeps.
 *
 *     progress claims ADDR CHECK          order, computing, timewait or rnr
 *     progress ack|one-sided ADDR SECONDS print the latency of each load, beside that of a thread that sleeps in epoll
 *     progress pingpong|udp ADDR ROUNDS   print the slowest rounds of a long ping-pong, and which side waited for a processor
 *
 * Two processes share a page: the peer, whose view counts, and the target. ADDR is the device's address.
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

enum { BYTES = 64, DEPTH = 64, SAMPLES = 1 << 18, WORST = 3, ABSENCES = 1 << 14 };
enum load { ACK, WRITE, READ, ECHO, ASLEEP, END };

/* A time in which a polling thread did not run its loop, microseconds since 1970, and how much of it the scheduler let it wait. */
struct absence { double begin, end, waited; };

struct side {
	atomic_int arrived;
	uint32_t number, key;
	uint64_t address;
	struct sockaddr_in udp;
	int absences;
	struct absence absence[ABSENCES];
};

static struct shared {
	struct side sides[2];
	/* The next round, and what the target does in it. */
	atomic_int round;
	enum load load;
	double compute;
	/* Rounds whose computing has begun, and ended; whose operation has completed. */
	atomic_int begun, ended, completed;
} *shared;

static struct side *here, *there;
static const char *address;
static char *buffer;
static struct ibv_mr *mr;
static struct ibv_qp *qp;
static int udp, schedstat, timeout = 14, retries = 7;
static double latency[SAMPLES];
/* Completions. */
static int sent, received;

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_REALTIME, &t);
	return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

/* Waits for the other process. */
static void meet(void)
{
	int mine = ++here->arrived;

	while (there->arrived < mine)
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

/* A refusal for want of a receive holds for 655 ms (timer 0). */
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
				  .wr.rdma = { there->address + BYTES, there->key } }, *bad;

	MUST(!ibv_post_send(of, &wr, &bad));
}

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

/* Polls until so many sends and receives have completed, which then count no more. */
static void await(int sends, int receives)
{
	while (sent < sends || received < receives)
		poll_once();
	sent -= sends;
	received -= receives;
}

/* A device, a connected queue pair and a connected socket, with the like of which the other process begins too. */
static void begin(void)
{
	socklen_t length = sizeof(here->udp);

	set_up();
	MUST(!posix_memalign((void **)&buffer, 4096, 4096));
	memset(buffer, 0, 4096);
	MUST(mr = ibv_reg_mr(pd, buffer, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ));
	qp = create(cq);
	here->number = qp->qp_num;
	here->key = mr->rkey;
	here->address = (uintptr_t)buffer;
	here->udp = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = inet_addr(address) };
	MUST((udp = socket(AF_INET, SOCK_DGRAM, 0)) >= 0 && !bind(udp, (void *)&here->udp, sizeof(here->udp)));
	MUST(!getsockname(udp, (void *)&here->udp, &length));
	meet();
	connect_to(qp, there->number);
	MUST(!connect(udp, (void *)&there->udp, sizeof(there->udp)));
	for (int i = 0; i < DEPTH; i++)
		post_recv();
	meet();
}

/* Sends datagrams back, asleep in epoll in between. */
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

/* The target: does what each round asks for, until one that is the last. */
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
			for (int i = 0; i < 500; i++)
				poll_once();
			/* Fall through. */
		case ECHO:
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

/* Begins a round; one whose operation comes once the target computes waits for that. */
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

/* One round. Its latency, microseconds; whether the operation completed before the target had computed. */
static double play(enum load load, double compute_us, int *in_time)
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

/* What makes a driver attentive: a ping-pong. */
static void warm_up(void)
{
	int in_time;

	for (int i = 0; i < 1000; i++)
		play(ACK, 0, &in_time);
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

	warm_up();
	end = now() + seconds * 1e6;
	while (n < SAMPLES && (n < 20 || now() < end))
		latency[n++] = play(load, compute_us, &in_time);
	qsort(latency, n, sizeof(*latency), ascending);
	printf("{\"name\": \"%s\", \"rounds\": %d, \"p50\": %.1f, \"p99\": %.1f}\n", name, n, latency[n / 2],
	       latency[n * 99 / 100]);
	fflush(stdout);
}

/* A SEND that waits for a receive for as long as the process lives. */
static void wait_for_a_receive(void)
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

/* A connection between both processes that the target ends, which leaves it in timewait there. */
static void connection(int target)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 1, .max_recv_wr = 1,
					 .max_send_sge = 1, .max_recv_sge = 1 } };
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = target ? 0 : RAI_PASSIVE }, *found;
	struct rdma_cm_id *id, *listener;

	if (target)
		meet();
	MUST(!rdma_getaddrinfo(address, "7991", &hints, &found) && !rdma_create_ep(&id, found, NULL, &init));
	if (target) {
		MUST(!rdma_connect(id, NULL) && !rdma_disconnect(id));
		usleep(400000);
	} else {
		MUST(!rdma_listen(listener = id, 1));
		meet();
		MUST(!rdma_get_request(listener, &id) && !rdma_accept(id, NULL));
	}
	meet();
}

/* The operation completes while the target computes, at least half as often as a datagram comes back from a thread in epoll. A
 * machine on which few datagrams do proves nothing. */
static void completes_meanwhile(const char *what, enum load load)
{
	int in_time, possible = 0, done = 0;

	for (int tries = 0; tries < 20 && possible < 50; tries++) {
		warm_up();
		possible = done = 0;
		for (int i = 0; i < 100; i++)
			play(load, 300, &in_time), done += in_time;
		for (int i = 0; i < 100; i++)
			play(ECHO, 300, &in_time), possible += in_time;
	}
	if (possible >= 50 && 2 * done < possible) {
		fprintf(stderr, "while its target computed a %s completed %d times, a datagram came back %d times\n", what, done,
			possible);
		exit(1);
	}
}

/* Programs take an answer as proof that their send is done, and a queue for one completion as long enough. */
static void an_answer_comes_after_the_acknowledgement(void)
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

static void a_read_is_answered_whatever_timer_runs(void)
{
	int in_time;

	for (int i = 0; i < 5; i++)
		play(ASLEEP, 0, &in_time);
}

static void check_computing(void)
{
	completes_meanwhile("SEND", ACK);
	completes_meanwhile("WRITE", WRITE);
	completes_meanwhile("READ", READ);
}

static void claims(int target, const char *check)
{
	static const struct { const char *name; void (*of)(void); } checks[] = {
		{ "order", an_answer_comes_after_the_acknowledgement },
		{ "computing", check_computing },
		{ "timewait", a_read_is_answered_whatever_timer_runs },
		{ "rnr", a_read_is_answered_whatever_timer_runs },
	};

	if (!strcmp(check, "timewait"))
		connection(target);
	if (!strcmp(check, "rnr") && target)
		wait_for_a_receive();
	meet();
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
		wait_for_a_receive();
		meet();
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
	meet();
	if (one_sided)
		measure("READ, asleep, timer", ASLEEP, 0, seconds);
	start(END, 0);
}

/* How long this thread has waited for a processor, microseconds. */
static double waited(void)
{
	char text[64] = "";
	unsigned long long ran, waits = 0;

	MUST(pread(schedstat, text, sizeof(text) - 1, 0) > 0 && sscanf(text, "%llu %llu", &ran, &waits) == 2);
	return waits / 1e3;
}

/* How much of a time a side was not in its loop, and how much of that it waited for a processor. */
static double away(const struct side *side, double begin, double end, double *waits)
{
	double all = *waits = 0;

	for (int i = 0; i < side->absences; i++) {
		const struct absence *a = &side->absence[i];
		double from = a->begin > begin ? a->begin : begin, to = a->end < end ? a->end : end;

		if (to > from) {
			all += to - from;
			*waits += (to - from) * a->waited / (a->end - a->begin);
		}
	}
	return all;
}

/* Waits for a message. A millisecond between two looks is an absence. */
static void look(int bare)
{
	static double last, before;
	char datagram[BYTES];

	while (!received) {
		double at = now();

		if (last && at - last > 1000 && here->absences < ABSENCES) {
			double by = waited();

			here->absence[here->absences++] = (struct absence){ last, at, by - before < at - last ? by - before : at - last };
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

static void hit(int bare)
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
			hit(bare);
		look(bare);
		if (!bare)
			post_recv();
		if (target)
			hit(bare);
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
	meet();
	for (int i = 0; i < WORST && !target; i++) {
		double waits[2], begin = worst[i].begin, end = begin + worst[i].took, mine = away(here, begin, end, &waits[0]),
		       its = away(there, begin, end, &waits[1]);

		printf("{\"round\": %d, \"begin\": %.1f, \"took\": %.1f, \"away\": [%.1f, %.1f], \"waited\": [%.1f, %.1f]}\n",
		       worst[i].round, begin, worst[i].took, mine, its, waits[0], waits[1]);
	}
}

static pid_t child;

/* The target has ended. If it failed, so does all. */
static void ended(int signal)
{
	int status;

	(void)signal;
	if (waitpid(child, &status, WNOHANG) == child && status)
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
	/* Four times 34 ms without an answer and the peer counts as dead. */
	if (claim)
		timeout = 13, retries = 3;
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	MUST(shared != MAP_FAILED);
	signal(SIGCHLD, ended);
	MUST((child = fork()) >= 0);
	target = !child;
	if (target)
		prctl(PR_SET_PDEATHSIG, SIGKILL);
	here = &shared->sides[target];
	there = &shared->sides[!target];
	begin();
	if (bare || !strcmp(argv[1], "pingpong")) {
		pingpong(target, bare, atoi(argv[3]));
	} else {
		MUST(!target || !pthread_create(&thread, NULL, echo, NULL));
		claim ? claims(target, argv[3]) : figures(target, !strcmp(argv[1], "one-sided"), atof(argv[3]));
	}
	meet();
	if (target)
		_exit(0);
	MUST(!ibv_destroy_qp(qp) && !ibv_dereg_mr(mr));
	tear_down("the device is never deaf");
	return 0;
}
