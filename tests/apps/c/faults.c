/*
 * Registered memory that the program unmaps, protects, or truncates the file of: work requests that need it end with an error at the
 * right end, the program lives, and its own faults reach its own handlers, whenever it has set them.
 *
 *     faults [--each [BUT …]]
 */
#define _GNU_SOURCE
#include "common.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>

#define PAGE 4096
/* A message that begins on the first page and ends on the second, which is lost. */
#define AT (PAGE - 2000)
#define LENGTH 3000
/* Of each kind of thread, under load. */
#define THREADS 2
#define ROUNDS 100

/* How the second page is lost. */
enum loss { UNMAPPED, PROTECTED, TRUNCATED, LOSSES };
enum op { SEND, WRITE, WRITE_IMM, READ, FETCH_ADD, COMPARE_SWAP, OPS };

/* Two queue pairs, connected with each other. */
struct pair {
	struct ibv_cq *cq[2];
	struct ibv_qp *qp[2];
};

/* Two pages of a file, registered. */
struct region {
	char *at;
	int file;
	struct ibv_mr *mr;
};

static const int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
			  IBV_ACCESS_REMOTE_ATOMIC;

static void connect_with(struct ibv_qp *qp, struct ibv_qp *peer)
{
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = rights };
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer->qp_num,
				   .max_dest_rd_atomic = 1, .min_rnr_timer = 1,
				   .ah_attr = { .is_global = 1, .port_num = 1,
						.grh = { .dgid = own, .sgid_index = own_index, .hop_limit = 64 } } };
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
				   .max_rd_atomic = 1 };

	MUST(!ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	MUST(!ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	MUST(!ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				      IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

static void make_pair(struct pair *pair)
{
	struct ibv_qp_init_attr how = { .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
					.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };

	for (int i = 0; i < 2; i++) {
		MUST(pair->cq[i] = ibv_create_cq(context, 16, NULL, NULL, 0));
		how.send_cq = how.recv_cq = pair->cq[i];
		MUST(pair->qp[i] = ibv_create_qp(pd, &how));
	}
	connect_with(pair->qp[0], pair->qp[1]);
	connect_with(pair->qp[1], pair->qp[0]);
}

static void destroy_pair(struct pair *pair)
{
	for (int i = 0; i < 2; i++)
		MUST(!ibv_destroy_qp(pair->qp[i]) && !ibv_destroy_cq(pair->cq[i]));
}

static void make_region(struct region *region, int more)
{
	MUST((region->file = memfd_create("faults", MFD_CLOEXEC)) >= 0);
	MUST(!ftruncate(region->file, 2 * PAGE));
	region->at = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, region->file, 0);
	MUST(region->at != MAP_FAILED);
	MUST(region->mr = ibv_reg_mr(pd, region->at, 2 * PAGE, rights | more));
}

static void destroy_region(struct region *region)
{
	MUST(!ibv_dereg_mr(region->mr));
	MUST(!munmap(region->at, 2 * PAGE) && !close(region->file));
}

static void lose(struct region *region, enum loss how)
{
	if (how == UNMAPPED)
		MUST(!munmap(region->at + PAGE, PAGE));
	else if (how == PROTECTED)
		MUST(!mprotect(region->at + PAGE, PAGE, PROT_NONE));
	else
		MUST(!ftruncate(region->file, PAGE));
}

/* Gives a page back that is not unmapped. */
static void restore(struct region *region)
{
	MUST(!ftruncate(region->file, 2 * PAGE) && !mprotect(region->at + PAGE, PAGE, PROT_READ | PROT_WRITE));
}

static void post(struct pair *pair, enum op op, struct region *local, struct region *remote)
{
	static const enum ibv_wr_opcode opcodes[] = { IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
						      IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD,
						      IBV_WR_ATOMIC_CMP_AND_SWP };
	int is_atomic = op >= FETCH_ADD, at = is_atomic ? PAGE : AT, length = is_atomic ? 8 : LENGTH;
	struct ibv_sge sge = { .addr = (uintptr_t)local->at + at, .length = length, .lkey = local->mr->lkey };
	struct ibv_sge to = { .addr = (uintptr_t)remote->at + at, .length = length, .lkey = remote->mr->lkey };
	struct ibv_send_wr *bad, wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = opcodes[op] };
	struct ibv_recv_wr *worse, receive = { .wr_id = 2, .sg_list = &to, .num_sge = 1 };

	if (is_atomic) {
		wr.wr.atomic.remote_addr = to.addr;
		wr.wr.atomic.rkey = remote->mr->rkey;
	} else {
		wr.wr.rdma.remote_addr = to.addr;
		wr.wr.rdma.rkey = remote->mr->rkey;
	}
	if (op == WRITE_IMM)
		receive.num_sge = 0;
	if (op == SEND || op == WRITE_IMM)
		MUST(!ibv_post_recv(pair->qp[1], &receive, &worse));
	MUST(!ibv_post_send(pair->qp[0], &wr, &bad));
}

/* The status of the next completion. */
static enum ibv_wc_status completed(struct ibv_cq *of)
{
	time_t end = time(NULL) + 60;
	struct ibv_wc wc;
	int got;

	while (!(got = ibv_poll_cq(of, 1, &wc)))
		MUST(time(NULL) < end);
	MUST(got == 1);
	return wc.status;
}

static void expect(struct ibv_cq *of, enum ibv_wc_status status)
{
	enum ibv_wc_status found = completed(of);

	if (found != status) {
		fprintf(stderr, "%s, expected %s\n", ibv_wc_status_str(found), ibv_wc_status_str(status));
		exit(1);
	}
}

/* One operation, of which the memory of one end is lost: ours, or the peer's. */
static void fails(enum op op, enum loss how, int is_ours, int more)
{
	struct region local, remote;
	struct pair pair;
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	make_pair(&pair);
	make_region(&local, more);
	make_region(&remote, more);
	lose(is_ours ? &local : &remote, how);
	post(&pair, op, &local, &remote);
	if (is_ours) {
		expect(pair.cq[0], IBV_WC_LOC_PROT_ERR);
	} else if (op == SEND) {
		expect(pair.cq[0], IBV_WC_REM_OP_ERR);
		expect(pair.cq[1], IBV_WC_LOC_PROT_ERR);
	} else {
		expect(pair.cq[0], IBV_WC_REM_ACCESS_ERR);
	}
	MUST(!ibv_query_qp(pair.qp[!is_ours], &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_ERR);
	destroy_pair(&pair);
	destroy_region(&local);
	destroy_region(&remote);
}

static void our_memory(void)
{
	for (enum op op = 0; op < OPS; op++)
		for (enum loss how = 0; how < LOSSES; how++)
			fails(op, how, 1, 0);
}

static void the_peers_memory(void)
{
	for (enum op op = 0; op < OPS; op++)
		for (enum loss how = 0; how < LOSSES; how++)
			fails(op, how, 0, 0);
}

static void memory_on_demand(void)
{
	for (int is_ours = 0; is_ours < 2; is_ours++)
		for (enum loss how = 0; how < LOSSES; how++)
			fails(WRITE, how, is_ours, IBV_ACCESS_ON_DEMAND);
}

/* The program's own faults. */
static sigjmp_buf back;
static atomic_int first_got, second_got;

static void first(int number)
{
	first_got += number == SIGSEGV || number == SIGBUS;
	siglongjmp(back, 1);
}

static void second(int number, siginfo_t *info, void *context)
{
	second_got += (number == SIGSEGV || number == SIGBUS) && info->si_addr && context;
	siglongjmp(back, 1);
}

/* Reads a page that is not there. */
static void fault(enum loss how)
{
	struct region region;

	make_region(&region, 0);
	lose(&region, how);
	if (!sigsetjmp(back, 1)) {
		(void)*(volatile char *)(region.at + PAGE);
		fail("a fault has no effect", __LINE__);
	}
	destroy_region(&region);
}

/* The program gets its faults, and the library those of its copies. */
static void both(atomic_int *got)
{
	for (enum loss how = 0; how < LOSSES; how++) {
		int before = *got;

		fault(how);
		MUST(*got == before + 1);
		fails(WRITE, how, 0, 0);
		fails(SEND, how, 1, 0);
		MUST(*got == before + 1);
	}
}

static const int faults[] = { SIGSEGV, SIGBUS };

static void a_handler_from_before(void)
{
	both(&first_got);
}

static void handlers_that_are_set_later(void)
{
	struct sigaction action = { .sa_sigaction = second, .sa_flags = SA_SIGINFO }, old[2], found;

	sigemptyset(&action.sa_mask);
	sigaddset(&action.sa_mask, SIGUSR1);
	for (int i = 0; i < 2; i++) {
		MUST(!sigaction(faults[i], &action, &old[i]) && old[i].sa_handler == first);
		MUST(!sigaction(faults[i], NULL, &found));
		MUST(found.sa_sigaction == second && found.sa_flags & SA_SIGINFO && sigismember(&found.sa_mask, SIGUSR1));
	}
	both(&second_got);
	for (int i = 0; i < 2; i++)
		MUST(signal(faults[i], first) == (void (*)(int))second);
	both(&first_got);
	for (int i = 0; i < 2; i++)
		MUST(!sigaction(faults[i], &old[i], NULL));
	both(&first_got);
}

/* Ends a child as it would without the library. */
static void ends(int how)
{
	int status;
	pid_t child;

	MUST((child = fork()) >= 0);
	if (!child) {
		for (int i = 0; i < 2; i++)
			signal(faults[i], SIG_DFL);
		if (how == SIGUSR1)
			raise(SIGSEGV);
		else
			*(volatile char *)NULL = 1;
		_exit(0);
	}
	MUST(waitpid(child, &status, 0) == child);
	MUST(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

static void without_a_handler(void)
{
	ends(SIGSEGV);
	ends(SIGUSR1);
	for (int i = 0; i < 2; i++)
		MUST(signal(faults[i], SIG_DFL) == first);
	fails(WRITE, TRUNCATED, 0, 0);
	fails(READ, UNMAPPED, 1, 0);
	for (int i = 0; i < 2; i++)
		MUST(signal(faults[i], SIG_IGN) == SIG_DFL);
	fails(WRITE, TRUNCATED, 0, 0);
	MUST(!raise(SIGSEGV));
	for (int i = 0; i < 2; i++)
		MUST(signal(faults[i], first) == SIG_IGN);
}

static void *with_all_signals_blocked(void *late)
{
	sigset_t all;

	sigfillset(&all);
	if (late)
		fails(WRITE, PROTECTED, 0, 0);
	MUST(!pthread_sigmask(SIG_SETMASK, &all, NULL));
	for (enum loss how = 0; how < LOSSES; how++) {
		fails(WRITE, how, 0, 0);
		fails(READ, how, 1, 0);
	}
	return NULL;
}

static void threads_that_block_all_signals(void)
{
	pthread_t thread;

	for (int late = 0; late < 2; late++) {
		MUST(!pthread_create(&thread, NULL, with_all_signals_blocked, late ? &late : NULL));
		MUST(!pthread_join(thread, NULL));
	}
}

/* Memory comes and goes while messages are under way; a connection that has failed is made again. */
static struct region shared;
static atomic_int running, failures, successes;

static void *takes_away(void *unused)
{
	(void)unused;
	while (running) {
		lose(&shared, PROTECTED);
		usleep(100);
		restore(&shared);
		usleep(400);
		lose(&shared, TRUNCATED);
		usleep(100);
		restore(&shared);
		usleep(400);
	}
	return NULL;
}

static void *writes(void *argument)
{
	int is_ours = argument != NULL, failed = 0, done = 0;
	struct region steady;
	struct pair pair;

	make_pair(&pair);
	make_region(&steady, 0);
	while (failed < ROUNDS || done < ROUNDS) {
		enum ibv_wc_status expected = is_ours ? IBV_WC_LOC_PROT_ERR : IBV_WC_REM_ACCESS_ERR, found;

		post(&pair, WRITE, is_ours ? &shared : &steady, is_ours ? &steady : &shared);
		found = completed(pair.cq[0]);
		if (found == IBV_WC_SUCCESS) {
			done++;
			continue;
		}
		if (found != expected)
			fail(ibv_wc_status_str(found), __LINE__);
		failed++;
		destroy_pair(&pair);
		make_pair(&pair);
	}
	failures += failed;
	successes += done;
	destroy_pair(&pair);
	destroy_region(&steady);
	return NULL;
}

static void memory_that_comes_and_goes(void)
{
	pthread_t taker, writers[2 * THREADS];

	make_region(&shared, 0);
	running = 1;
	MUST(!pthread_create(&taker, NULL, takes_away, NULL));
	for (int i = 0; i < 2 * THREADS; i++)
		MUST(!pthread_create(&writers[i], NULL, writes, i % 2 ? &shared : NULL));
	for (int i = 0; i < 2 * THREADS; i++)
		MUST(!pthread_join(writers[i], NULL));
	running = 0;
	MUST(!pthread_join(taker, NULL));
	MUST(failures >= 2 * THREADS * ROUNDS && successes >= 2 * THREADS * ROUNDS);
	destroy_region(&shared);
}

static void begin(void)
{
	for (int i = 0; i < 2; i++)
		MUST(signal(faults[i], first) != SIG_ERR);
	set_up();
}

static void end(void)
{
	tear_down("missing memory is an error of its work request");
}

int main(int argc, char **argv)
{
	static const struct check checks[] = {
		CHECK(our_memory),
		CHECK(the_peers_memory),
		CHECK(memory_on_demand),
		CHECK(a_handler_from_before),
		CHECK(handlers_that_are_set_later),
		CHECK(without_a_handler),
		CHECK(threads_that_block_all_signals),
		CHECK(memory_that_comes_and_goes),
	};

	MUST(argc > 0);
	return run(each(argv), checks, COUNT(checks), begin, end);
}
