/*
 * Calls that succeed leave errno as it was, and calls with too much private data set EINVAL.
 *
 *     errno ADDRESS [--each [BUT …]]
 */
#include "common.h"

#include <arpa/inet.h>
#include <rdma/rdma_cma.h>

/* No error has this number. */
#define UNTOUCHED 12345
/* Runs a call that succeeds and must not change errno. */
#define KEEPS(call) do { \
		errno = UNTOUCHED; \
		if (!(call)) \
			fail(#call, __LINE__); \
		if (errno != UNTOUCHED) \
			fail("errno is changed by " #call, __LINE__); \
	} while (0)
/* Runs a call that fails with EINVAL. */
#define INVALID(call) do { \
		errno = UNTOUCHED; \
		if ((call) != -1 || errno != EINVAL) \
			fail(#call, __LINE__); \
	} while (0)

/* Most bytes of private data of each message in the port space TCP (rdma_connect(3), rdma_accept(3), rdma_reject(3)). */
enum { OF_CONNECT = 56, OF_ACCEPT = 196, OF_REJECT = 148 };

static const char *address;
static char memory[4096];
static const struct ibv_qp_cap sizes = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 };

/* Connects a queue pair with itself. */
static void connect_to_itself(struct ibv_qp *qp)
{
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qp->qp_num,
				   .max_dest_rd_atomic = 1,
				   .ah_attr = { .is_global = 1, .port_num = 1,
						.grh = { .dgid = own, .sgid_index = own_index, .hop_limit = 64 } } };
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
				   .max_rd_atomic = 1 };

	KEEPS(!ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	KEEPS(!ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	KEEPS(!ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				       IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

/* Polls until a work request has completed; polls that find nothing keep errno, too. */
static void completes(struct ibv_cq *on)
{
	time_t end = time(NULL) + 60;
	struct ibv_wc wc;
	int got = 0;

	while (!got) {
		KEEPS((got = ibv_poll_cq(on, 1, &wc)) >= 0);
		MUST(time(NULL) < end);
	}
	MUST(wc.status == IBV_WC_SUCCESS);
}

static void verbs_that_succeed_leave_errno(void)
{
	struct ibv_qp_init_attr how = { .qp_type = IBV_QPT_RC, .cap = sizes }, told;
	struct ibv_qp_attr attr;
	struct ibv_sge sge = { (uintptr_t)memory, 64 };
	struct ibv_recv_wr recv = { .sg_list = &sge, .num_sge = 1 }, *bad_recv;
	struct ibv_send_wr send = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
				    .send_flags = IBV_SEND_SIGNALED }, *bad_send;
	struct ibv_context *other;
	struct ibv_comp_channel *channel;
	struct ibv_cq *armed, *from;
	struct ibv_mr *mr;
	struct ibv_qp *qp;
	struct ibv_pd *in;
	void *cookie;

	KEEPS(other = ibv_open_device(context->device));
	KEEPS(in = ibv_alloc_pd(other));
	KEEPS(channel = ibv_create_comp_channel(other));
	KEEPS(armed = ibv_create_cq(other, 16, NULL, channel, 0));
	KEEPS(mr = ibv_reg_mr(in, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE));
	sge.lkey = mr->lkey;
	how.send_cq = how.recv_cq = armed;
	KEEPS(qp = ibv_create_qp(in, &how));
	connect_to_itself(qp);
	for (int i = 0; i < 100; i++) {
		KEEPS(!ibv_req_notify_cq(armed, 0));
		KEEPS(!ibv_post_recv(qp, &recv, &bad_recv));
		KEEPS(!ibv_post_send(qp, &send, &bad_send));
		KEEPS(!ibv_get_cq_event(channel, &from, &cookie));
		ibv_ack_cq_events(from, 1);
		completes(armed);
		completes(armed);
	}
	KEEPS(!ibv_query_qp(qp, &attr, IBV_QP_STATE, &told));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_ERR };
	KEEPS(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	KEEPS(!ibv_destroy_qp(qp));
	KEEPS(!ibv_dereg_mr(mr));
	KEEPS(!ibv_destroy_cq(armed));
	KEEPS(!ibv_destroy_comp_channel(channel));
	KEEPS(!ibv_dealloc_pd(in));
	KEEPS(!ibv_close_device(other));
}

/* Two ends of a connection, and their identifiers. */
static struct rdma_event_channel *ours, *theirs;
static struct rdma_cm_id *listener, *client, *server;
static unsigned char data[255];

/* Takes the next event, which must be of this kind, and acknowledges it. */
static struct rdma_cm_id *next(struct rdma_event_channel *on, enum rdma_cm_event_type kind)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	KEEPS(!rdma_get_cm_event(on, &event));
	if (event->event != kind) {
		fprintf(stderr, "%s, not %s\n", rdma_event_str(event->event), rdma_event_str(kind));
		exit(1);
	}
	id = event->id;
	KEEPS(!rdma_ack_cm_event(event));
	return id;
}

static void listen_and_resolve(void)
{
	struct sockaddr_in to = { .sin_family = AF_INET };
	struct ibv_qp_init_attr how = { .qp_type = IBV_QPT_RC, .cap = sizes };

	MUST(inet_pton(AF_INET, address, &to.sin_addr) == 1);
	KEEPS(ours = rdma_create_event_channel());
	KEEPS(theirs = rdma_create_event_channel());
	/* The first identifier loads what librdmacm knows of devices. */
	MUST(!rdma_create_id(ours, &listener, NULL, RDMA_PS_TCP) && !rdma_destroy_id(listener));
	KEEPS(!rdma_create_id(ours, &listener, NULL, RDMA_PS_TCP));
	KEEPS(!rdma_bind_addr(listener, (struct sockaddr *)&to));
	KEEPS(!rdma_listen(listener, 4));
	to.sin_port = rdma_get_src_port(listener);
	KEEPS(!rdma_create_id(theirs, &client, NULL, RDMA_PS_TCP));
	KEEPS(!rdma_resolve_addr(client, NULL, (struct sockaddr *)&to, 2000));
	next(theirs, RDMA_CM_EVENT_ADDR_RESOLVED);
	KEEPS(!rdma_resolve_route(client, 2000));
	next(theirs, RDMA_CM_EVENT_ROUTE_RESOLVED);
	MUST(!rdma_create_qp(client, NULL, &how));
}

static struct rdma_conn_param with_data(int bytes)
{
	return (struct rdma_conn_param){ .private_data = data, .private_data_len = bytes, .responder_resources = 1,
					 .initiator_depth = 1, .retry_count = 7, .rnr_retry_count = 7 };
}

/* Sends a request with as much private data as it may have, and makes the server's queue pair. */
static void request(void)
{
	struct ibv_qp_init_attr how = { .qp_type = IBV_QPT_RC, .cap = sizes };
	struct rdma_conn_param param = with_data(OF_CONNECT + 1);

	listen_and_resolve();
	INVALID(rdma_connect(client, &param));
	param.private_data_len--;
	KEEPS(!rdma_connect(client, &param));
	server = next(ours, RDMA_CM_EVENT_CONNECT_REQUEST);
	MUST(!rdma_create_qp(server, NULL, &how));
}

static void close_all(void)
{
	rdma_destroy_qp(server);
	rdma_destroy_qp(client);
	KEEPS(!rdma_destroy_id(server));
	KEEPS(!rdma_destroy_id(client));
	KEEPS(!rdma_destroy_id(listener));
	errno = UNTOUCHED;
	rdma_destroy_event_channel(theirs);
	rdma_destroy_event_channel(ours);
	if (errno != UNTOUCHED)
		fail("errno is changed by rdma_destroy_event_channel", __LINE__);
}

static void connections_leave_errno(void)
{
	struct rdma_conn_param param = with_data(OF_ACCEPT);

	request();
	KEEPS(!rdma_accept(server, &param));
	next(theirs, RDMA_CM_EVENT_ESTABLISHED);
	next(ours, RDMA_CM_EVENT_ESTABLISHED);
	KEEPS(!rdma_disconnect(client));
	next(ours, RDMA_CM_EVENT_DISCONNECTED);
	close_all();
}

static void accepting_with_too_much_data_is_invalid(void)
{
	struct rdma_conn_param param = with_data(OF_ACCEPT + 1);

	request();
	INVALID(rdma_accept(server, &param));
	close_all();
}

static void rejecting_with_too_much_data_is_invalid(void)
{
	request();
	INVALID(rdma_reject(server, data, OF_REJECT + 1));
	KEEPS(!rdma_reject(server, data, OF_REJECT));
	next(theirs, RDMA_CM_EVENT_REJECTED);
	close_all();
}

static void end(void)
{
	tear_down("errno is kept");
}

int main(int argc, char **argv)
{
	static const struct check checks[] = {
		CHECK(verbs_that_succeed_leave_errno),
		CHECK(connections_leave_errno),
		CHECK(accepting_with_too_much_data_is_invalid),
		CHECK(rejecting_with_too_much_data_is_invalid),
	};

	MUST(argc > 1);
	address = argv[1];
	return run(each(argv), checks, COUNT(checks), set_up, end);
}
