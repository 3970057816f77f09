/*
 * Threads that are cancelled (pthread_cancel(3)) in calls that block, and in others: they are joined as cancelled, their clean-up
 * handlers run, nothing is lost or left, and the device works afterwards.
 *
 *     cancel ADDRESS TIMES [--each [BUT …]]
 */
#define _GNU_SOURCE
#include "common.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdatomic.h>
#include <sys/stat.h>

static const char *address;
static int times;
static char memory[4096];
static struct ibv_comp_channel *channel;
static struct ibv_cq *armed;
static struct ibv_mr *mr;
/* Connected with itself, on the armed queue. */
static struct ibv_qp *qp;
static struct rdma_event_channel *cm;
static atomic_int started, cleaned, taken;

static void clean_up(void *unused)
{
	(void)unused;
	cleaned++;
}

static void *run_body(void *body)
{
	pthread_cleanup_push(clean_up, NULL);
	started = 1;
	((void (*)(void))body)();
	pthread_cleanup_pop(0);
	return NULL;
}

/* Cancels a thread that runs BODY, which must not return, after about that many microseconds. */
static void cancel_after(void (*body)(void), int us)
{
	pthread_t thread;
	void *result;

	started = cleaned = 0;
	MUST(!pthread_create(&thread, NULL, run_body, (void *)body));
	while (!started)
		sched_yield();
	if (us)
		usleep(us);
	MUST(!pthread_cancel(thread));
	MUST(!pthread_join(thread, &result));
	if (result != PTHREAD_CANCELED || cleaned != 1) {
		fprintf(stderr, "the thread returned %p, and %d clean-up handlers ran\n", result, cleaned);
		exit(1);
	}
}

/* Cancels threads sooner and later: before the call, in it, and while it sleeps. */
static void cancel_often(void (*body)(void))
{
	for (int i = 0; i < times; i++)
		cancel_after(body, i % 4 ? i % 97 : 0);
}

static void wait_for_completion(void)
{
	struct ibv_cq *of;
	void *cookie;

	MUST(!ibv_get_cq_event(channel, &of, &cookie));
	ibv_ack_cq_events(of, 1);
	taken++;
}

static void wait_for_completions(void)
{
	for (;;)
		wait_for_completion();
}

static void wait_for_asynchronous_event(void)
{
	struct ibv_async_event event;

	ibv_get_async_event(context, &event);
}

static void wait_for_connection(void)
{
	struct rdma_cm_event *event;

	rdma_get_cm_event(cm, &event);
}

/* Sends a message to itself. */
static void send_one(void)
{
	struct ibv_sge sge = { (uintptr_t)memory, 64, mr->lkey };
	struct ibv_recv_wr recv = { .sg_list = &sge, .num_sge = 1 }, *bad_recv;
	struct ibv_send_wr send = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
				    .send_flags = IBV_SEND_SIGNALED }, *bad_send;

	MUST(!ibv_post_recv(qp, &recv, &bad_recv));
	MUST(!ibv_post_send(qp, &send, &bad_send));
}

static void poll_both(void)
{
	time_t end = time(NULL) + 60;
	struct ibv_wc wc;

	for (int left = 2, got; left; left -= got) {
		MUST((got = ibv_poll_cq(armed, 1, &wc)) >= 0 && time(NULL) < end);
		MUST(!got || wc.status == IBV_WC_SUCCESS);
	}
}

/* Completions still come, by events. */
static void works(void)
{
	MUST(!ibv_req_notify_cq(armed, 0));
	send_one();
	wait_for_completion();
	poll_both();
}

static void waiting_for_completions(void)
{
	cancel_often(wait_for_completions);
	works();
}

/* Each event is taken by a thread that is cancelled then, or is still there. */
static void waiting_while_events_come(void)
{
	for (int i = 0; i < times; i++) {
		pthread_t thread;
		void *result;

		taken = started = 0;
		MUST(!ibv_req_notify_cq(armed, 0));
		MUST(!pthread_create(&thread, NULL, run_body, (void *)wait_for_completions));
		while (!started)
			sched_yield();
		if (i % 3)
			usleep(i % 61);
		send_one();
		MUST(!pthread_cancel(thread) && !pthread_join(thread, &result) && result == PTHREAD_CANCELED);
		if (!taken)
			wait_for_completion();
		poll_both();
		MUST(taken == 1);
	}
	works();
}

static void waiting_for_asynchronous_events(void)
{
	cancel_often(wait_for_asynchronous_event);
	works();
}

static void waiting_for_connections(void)
{
	struct sockaddr_in to = { .sin_family = AF_INET };
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	MUST(inet_pton(AF_INET, address, &to.sin_addr) == 1);
	to.sin_port = htons(7);
	cancel_often(wait_for_connection);
	MUST(!rdma_create_id(cm, &id, NULL, RDMA_PS_TCP) && !rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 2000));
	MUST(!rdma_get_cm_event(cm, &event) && event->event == RDMA_CM_EVENT_ADDR_RESOLVED && !rdma_ack_cm_event(event));
	MUST(!rdma_destroy_id(id));
}

static char fifo[] = "/tmp/ferroce-cancel-XXXXXX/fifo";

static void open_fifo(void)
{
	open(fifo, O_RDONLY);
}

/* The library stands in front of the C library's file calls, which block as ever. */
static void waiting_in_open(void)
{
	char *slash = strrchr(fifo, '/');

	*slash = 0;
	MUST(mkdtemp(fifo));
	*slash = '/';
	MUST(!mkfifo(fifo, 0600));
	cancel_often(open_fifo);
	MUST(!unlink(fifo));
	*slash = 0;
	MUST(!rmdir(fifo));
	works();
}

/* The calls below have no cancellation points, so that each loop is cancelled at its end, when nothing is left. */
static void send_and_poll(void)
{
	for (;;) {
		send_one();
		poll_both();
		pthread_testcancel();
	}
}

static void make_and_destroy(void)
{
	struct ibv_qp_init_attr how = { .qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 1, .max_recv_wr = 1,
					.max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_srq_init_attr shared = { .attr = { .max_wr = 1, .max_sge = 1 } };
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1, .grh = { .dgid = own, .sgid_index = own_index, .hop_limit = 64 } };

	for (;;) {
		struct ibv_pd *in = ibv_alloc_pd(context);
		struct ibv_comp_channel *on = ibv_create_comp_channel(context);
		struct ibv_cq *queue = ibv_create_cq(context, 4, NULL, on, 0);
		struct ibv_mr *region = ibv_reg_mr(in, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE);
		struct ibv_srq *srq = ibv_create_srq(in, &shared);
		struct ibv_ah *ah = ibv_create_ah(in, &to);
		struct ibv_qp *made;

		how.send_cq = how.recv_cq = queue;
		MUST(in && on && queue && region && srq && ah && (made = ibv_create_qp(in, &how)));
		MUST(!ibv_destroy_qp(made) && !ibv_destroy_ah(ah) && !ibv_destroy_srq(srq) && !ibv_dereg_mr(region));
		MUST(!ibv_destroy_cq(queue) && !ibv_destroy_comp_channel(on) && !ibv_dealloc_pd(in));
		pthread_testcancel();
	}
}

static void query(void)
{
	struct ibv_device_attr device;
	struct ibv_port_attr port;
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	union ibv_gid gid;

	for (;;) {
		MUST(!ibv_query_device(context, &device) && !ibv_query_port(context, 1, &port));
		MUST(!ibv_query_gid(context, 1, 0, &gid) && !ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
		pthread_testcancel();
	}
}

static void open_and_close(void)
{
	for (;;) {
		struct ibv_device **list = ibv_get_device_list(NULL);
		struct ibv_context *opened;

		MUST(list && list[0] && (opened = ibv_open_device(list[0])));
		ibv_free_device_list(list);
		MUST(!ibv_close_device(opened));
		pthread_testcancel();
	}
}

static void channels_of_connections(void)
{
	for (;;) {
		struct rdma_event_channel *made = rdma_create_event_channel();

		MUST(made);
		rdma_destroy_event_channel(made);
		pthread_testcancel();
	}
}

static void identifiers(void)
{
	struct sockaddr_in any = { .sin_family = AF_INET };

	for (;;) {
		struct rdma_cm_id *id;

		MUST(!rdma_create_id(cm, &id, NULL, RDMA_PS_TCP) && !rdma_bind_addr(id, (struct sockaddr *)&any));
		MUST(!rdma_listen(id, 1) && !rdma_destroy_id(id));
		pthread_testcancel();
	}
}

static void other_calls(void)
{
	static void (*const bodies[])(void) = { send_and_poll, make_and_destroy, query, open_and_close,
						channels_of_connections, identifiers };

	for (int i = 0; i < COUNT(bodies); i++) {
		cancel_often(bodies[i]);
		works();
	}
}

static void begin(void)
{
	struct ibv_qp_init_attr how = { .qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 8, .max_recv_wr = 8,
					.max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1 }, rtr, rts;

	set_up();
	MUST(channel = ibv_create_comp_channel(context));
	MUST(armed = ibv_create_cq(context, 16, NULL, channel, 0));
	MUST(mr = ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE));
	how.send_cq = how.recv_cq = armed;
	MUST(qp = ibv_create_qp(pd, &how));
	MUST(!ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	rtr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qp->qp_num,
				    .max_dest_rd_atomic = 1, .min_rnr_timer = 1,
				    .ah_attr = { .is_global = 1, .port_num = 1,
						 .grh = { .dgid = own, .sgid_index = own_index, .hop_limit = 64 } } };
	MUST(!ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	rts = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
				    .max_rd_atomic = 1 };
	MUST(!ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				      IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
	MUST(cm = rdma_create_event_channel());
}

static void end(void)
{
	works();
	rdma_destroy_event_channel(cm);
	MUST(!ibv_destroy_qp(qp) && !ibv_dereg_mr(mr) && !ibv_destroy_cq(armed) && !ibv_destroy_comp_channel(channel));
	tear_down("cancelled threads leave a working device");
}

int main(int argc, char **argv)
{
	static const struct check checks[] = {
		CHECK(waiting_for_completions),
		CHECK(waiting_while_events_come),
		CHECK(waiting_for_asynchronous_events),
		CHECK(waiting_for_connections),
		CHECK(waiting_in_open),
		CHECK(other_calls),
	};

	MUST(argc > 2);
	address = argv[1];
	times = atoi(argv[2]);
	return run(each(argv), checks, COUNT(checks), begin, end);
}
