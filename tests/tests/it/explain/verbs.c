/*
 * Makes one mistake after the other, and says before each which one: "## NAME" on standard error. What ferroce says about it
 * follows there.
 *
 *     verbs NAME-OF-RDMA_CM-PEER
 */
#include "common.h"

#include <arpa/inet.h>
#include <rdma/rdma_cma.h>
#include <sys/mman.h>

static char memory[4096];
static struct ibv_mr *mr;

#define MISTAKE(name, call, number) do {							\
	fprintf(stderr, "## %s\n", name);							\
	errno = 0;										\
	MUST(!!(call) && errno == (number));							\
} while (0)

static struct ibv_qp_init_attr sizes(uint32_t sends, enum ibv_qp_type type)
{
	return (struct ibv_qp_init_attr){ .send_cq = cq, .recv_cq = cq, .qp_type = type,
					  .cap = { .max_send_wr = sends, .max_recv_wr = 1, .max_send_sge = 1,
						   .max_recv_sge = 1 } };
}

static struct ibv_qp *queue_pair(uint32_t sends, enum ibv_qp_type type)
{
	struct ibv_qp_init_attr init = sizes(sends, type);

	return ibv_create_qp(pd, &init);
}

static int post(struct ibv_qp *qp, int elements)
{
	struct ibv_sge list[2] = { { .addr = (uintptr_t)memory, .length = 8, .lkey = mr->lkey } };
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND, .sg_list = list, .num_sge = elements,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;

	return ibv_post_send(qp, &wr, &bad);
}

static int to_init(struct ibv_qp *qp, int mask)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };

	return ibv_modify_qp(qp, &attr, mask);
}

static const int INIT = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
static const int RTR = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
static const int RTS = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
		       IBV_QP_MAX_QP_RD_ATOMIC;

static int to_rtr(struct ibv_qp *qp, int global, int index, int mtu)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = mtu, .dest_qp_num = qp->qp_num,
				    .max_dest_rd_atomic = 1,
				    .ah_attr = { .is_global = global, .port_num = 1,
						 .grh = { .dgid = own, .sgid_index = index } } };

	return ibv_modify_qp(qp, &attr, RTR);
}

static int to_rts(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
				    .max_rd_atomic = 1 };

	return ibv_modify_qp(qp, &attr, RTS);
}

/* Of a program that connects a queue pair step by step. */
static void connecting(void)
{
	struct ibv_qp *qp = queue_pair(1, IBV_QPT_RC);

	MUST(qp);
	MISTAKE("post in RESET", post(qp, 1), EINVAL);
	MISTAKE("RESET to RTS", to_rts(qp), EINVAL);
	MISTAKE("INIT without a port", to_init(qp, IBV_QP_STATE | IBV_QP_PKEY_INDEX), EINVAL);
	MUST(!to_init(qp, INIT));
	MISTAKE("RTR without GRH", to_rtr(qp, 0, own_index, IBV_MTU_256), EINVAL);
	MISTAKE("RTR with an unused GID", to_rtr(qp, 1, 100, IBV_MTU_256), EINVAL);
	MISTAKE("RTR with MTU 1500", to_rtr(qp, 1, own_index, 1500), EINVAL);
	MUST(!to_rtr(qp, 1, own_index, IBV_MTU_256));
	MUST(!to_rts(qp));
	MISTAKE("two elements", post(qp, 2), EINVAL);
	/* There is no receive: it stays in the queue. */
	MUST(!post(qp, 1));
	MISTAKE("full queue", post(qp, 1), ENOMEM);
	MUST(!ibv_destroy_qp(qp));
	MISTAKE("destroyed twice", ibv_destroy_qp(qp), ENOENT);
}

/* Bytes of a gap between mappings. */
#define HOLE (256UL << 20)

static void objects(void)
{
	struct ibv_qp_init_attr huge = sizes(1 << 30, IBV_QPT_RC);
	/* So large that what other threads map meanwhile does not begin right behind the page that is left. */
	char *hole = mmap(NULL, 4096 + HOLE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	MUST(hole != MAP_FAILED && !munmap(hole + 4096, HOLE));
	MISTAKE("memory that ends early", !ibv_reg_mr(pd, hole, 8192, IBV_ACCESS_LOCAL_WRITE), EFAULT);
	MISTAKE("remote write alone", !ibv_reg_mr(pd, memory, 4096, IBV_ACCESS_REMOTE_WRITE), EINVAL);
	MISTAKE("no entries", !ibv_create_cq(context, 0, NULL, NULL, 0), EINVAL);
	MISTAKE("raw packets", !queue_pair(1, IBV_QPT_RAW_PACKET), EOPNOTSUPP);
	MISTAKE("a billion sends", !ibv_create_qp(pd, &huge), errno);
	MISTAKE("domain in use", ibv_dealloc_pd(pd), EBUSY);
	MISTAKE("port 2", ({ struct ibv_port_attr port; ibv_query_port(context, 2, &port); }), EINVAL);
}

static void connection_manager(const char *peer)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(7471) };
	struct sockaddr_in foreign = { .sin_family = AF_INET, .sin_port = htons(7471), .sin_addr.s_addr = htonl(0xc0000201) };
	struct rdma_event_channel *channel = rdma_create_event_channel();
	/* Without a number no peer can answer: the id has no queue pair of its own. */
	struct rdma_conn_param param = { .retry_count = 1, .qp_num = 0x123456 };
	struct rdma_cm_event *event;
	struct rdma_cm_id *id, *bound;

	MUST(channel && inet_pton(AF_INET, peer, &to.sin_addr) == 1);
	MUST(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	MISTAKE("foreign address", rdma_bind_addr(id, (struct sockaddr *)&foreign), EADDRNOTAVAIL);
	MUST(!rdma_create_id(channel, &bound, NULL, RDMA_PS_TCP) && !rdma_bind_addr(bound, (struct sockaddr *)&to));
	MISTAKE("bound twice", rdma_bind_addr(bound, (struct sockaddr *)&to), EINVAL);
	MUST(!rdma_destroy_id(bound));
	MUST(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 2000));
	MUST(!rdma_get_cm_event(channel, &event) && event->event == RDMA_CM_EVENT_ADDR_RESOLVED);
	rdma_ack_cm_event(event);
	MUST(!rdma_resolve_route(id, 2000));
	MUST(!rdma_get_cm_event(channel, &event) && event->event == RDMA_CM_EVENT_ROUTE_RESOLVED);
	rdma_ack_cm_event(event);
	fprintf(stderr, "## nobody listens\n");
	MUST(!rdma_connect(id, &param));
	MUST(!rdma_get_cm_event(channel, &event) && event->status && event->event == RDMA_CM_EVENT_REJECTED);
	rdma_ack_cm_event(event);
	MUST(!rdma_destroy_id(id));
	rdma_destroy_event_channel(channel);
}

int main(int argc, char **argv)
{
	MUST(argc == 2);
	set_up();
	MUST(mr = ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE));
	connecting();
	objects();
	connection_manager(argv[1]);
	fprintf(stderr, "## end\n");
	MUST(!ibv_dereg_mr(mr));
	tear_down("every mistake was made");
	return 0;
}
