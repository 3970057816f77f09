/*
 * Two of these make mistakes towards each other. Each prints its queue pair and memory and reads the other's, mistake by
 * mistake; "## NAME" on standard error comes before each. The second argument says who asks and who answers.
 *
 *     wire ask|answer
 */
#include "common.h"

#include <poll.h>

enum { ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC };

static const struct mistake {
	const char *name;
	enum ibv_wr_opcode opcode;
	/* Rights of the responder's queue pair and memory. */
	int queue_pair, region;
	/* Of the message, and into the responder's memory, bytes. */
	uint32_t length, offset;
	/* Of the responder's receive; 0: there is none. */
	uint32_t receive;
	/* Added to keys: of the responder's memory, of its receive, and of the requester's memory. */
	uint32_t rkey, receive_key, lkey;
	enum ibv_wc_status requester;
	/* The responder gets a completion, an event or nothing. */
	enum { COMPLETION, EVENT, NOTHING } responder;
} mistakes[] = {
	{ "beyond", IBV_WR_RDMA_WRITE, ALL, ALL, 4096, 96, 0, 0, 0, 0, IBV_WC_REM_ACCESS_ERR, EVENT },
	{ "no right to the region", IBV_WR_RDMA_READ, ALL, IBV_ACCESS_LOCAL_WRITE, 64, 0, 0, 0, 0, 0,
	  IBV_WC_REM_ACCESS_ERR, EVENT },
	{ "unknown key", IBV_WR_RDMA_WRITE, ALL, ALL, 64, 0, 0, 1, 0, 0, IBV_WC_REM_ACCESS_ERR, EVENT },
	{ "no right to the queue pair", IBV_WR_RDMA_WRITE, IBV_ACCESS_REMOTE_READ, ALL, 64, 0, 0, 0, 0, 0,
	  IBV_WC_REM_INV_REQ_ERR, EVENT },
	{ "misaligned", IBV_WR_ATOMIC_FETCH_AND_ADD, ALL, ALL, 8, 4, 0, 0, 0, 0, IBV_WC_REM_INV_REQ_ERR, EVENT },
	{ "receive too short", IBV_WR_SEND, ALL, ALL, 200, 0, 64, 0, 0, 0, IBV_WC_REM_INV_REQ_ERR, COMPLETION },
	{ "receive of a wrong key", IBV_WR_SEND, ALL, ALL, 64, 0, 64, 0, 1, 0, IBV_WC_REM_OP_ERR, COMPLETION },
	{ "no receive", IBV_WR_SEND, ALL, ALL, 64, 0, 0, 0, 0, 0, IBV_WC_RNR_RETRY_EXC_ERR, NOTHING },
	{ "wrong local key", IBV_WR_SEND, ALL, ALL, 64, 0, 64, 0, 0, 1, IBV_WC_LOC_PROT_ERR, NOTHING },
	{ "nobody there", IBV_WR_SEND, ALL, ALL, 64, 0, 64, 0, 0, 0, IBV_WC_RETRY_EXC_ERR, NOTHING },
};

/* What the two tell each other. */
struct side {
	uint32_t qpn, rkey;
	uint64_t addr;
	union ibv_gid gid;
};

static char memory[8192];

static struct side exchange(const struct side *mine)
{
	struct side theirs;
	unsigned int qpn, rkey, byte;
	unsigned long long addr;
	char gid[33] = "";

	for (int i = 0; i < 16; i++)
		sprintf(gid + 2 * i, "%02x", mine->gid.raw[i]);
	printf("%x %x %llx %s\n", mine->qpn, mine->rkey, (unsigned long long)mine->addr, gid);
	fflush(stdout);
	MUST(scanf("%x %x %llx %32s", &qpn, &rkey, &addr, gid) == 4);
	theirs = (struct side){ .qpn = qpn, .rkey = rkey, .addr = addr };
	for (int i = 0; i < 16; i++) {
		MUST(sscanf(gid + 2 * i, "%2x", &byte) == 1);
		theirs.gid.raw[i] = byte;
	}
	return theirs;
}

/* Waits for the other side to come as far. */
static void meet(void)
{
	struct side none = { 0 };

	exchange(&none);
}

static void connect(struct ibv_qp *qp, const struct side *peer, int access, const struct mistake *of)
{
	/* Only who waits for an answer that never comes gives up soon: others' answers may be late on a busy machine. */
	int nobody = of->requester == IBV_WC_RETRY_EXC_ERR;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = access };

	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer->qpn,
				     .max_dest_rd_atomic = 1, .min_rnr_timer = 1,
				     .ah_attr = { .is_global = 1, .port_num = 1,
						  .grh = { .dgid = peer->gid, .sgid_index = own_index } } };
	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = nobody ? 8 : 14,
				     .retry_cnt = nobody ? 1 : 7, .rnr_retry = 1, .max_rd_atomic = 1 };
	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					       IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

static struct ibv_wc completion(void)
{
	struct ibv_wc wc;
	int got;

	while (!(got = ibv_poll_cq(cq, 1, &wc)))
		;
	MUST(got == 1);
	return wc;
}

static void ask(struct ibv_qp *qp, const struct ibv_mr *mr, const struct mistake *of, const struct side *peer)
{
	struct ibv_sge sge = { .addr = (uintptr_t)memory, .length = of->length, .lkey = mr->lkey + of->lkey };
	struct ibv_send_wr wr = { .wr_id = 0x77, .opcode = of->opcode, .sg_list = &sge, .num_sge = 1,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;

	if (of->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = peer->addr + of->offset;
		wr.wr.atomic.rkey = peer->rkey + of->rkey;
	} else {
		wr.wr.rdma.remote_addr = peer->addr + of->offset;
		wr.wr.rdma.rkey = peer->rkey + of->rkey;
	}
	MUST(!ibv_post_send(qp, &wr, &bad));
	MUST(completion().status == of->requester);
}

/* Waits for what the mistake of the other side causes here. */
static void suffer(const struct mistake *of)
{
	struct ibv_async_event event;

	if (of->responder == COMPLETION)
		MUST(completion().status != IBV_WC_SUCCESS);
	if (of->responder != EVENT)
		return;
	do {
		MUST(!ibv_get_async_event(context, &event));
		ibv_ack_async_event(&event);
	} while (event.event_type == IBV_EVENT_COMM_EST);
}

static void make(const struct mistake *of, int asks)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					 .cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1,
						  .max_recv_sge = 1 } };
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, asks ? sizeof(memory) : 4096, asks ? ALL : of->region);
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	struct side mine, peer;
	struct ibv_wc wc;

	MUST(mr && qp);
	fprintf(stderr, "## %s\n", of->name);
	mine = (struct side){ qp->qp_num, mr->rkey, (uintptr_t)memory, own };
	peer = exchange(&mine);
	connect(qp, &peer, asks ? ALL : of->queue_pair, of);
	if (!asks && of->receive) {
		struct ibv_sge sge = { .addr = (uintptr_t)memory, .length = of->receive,
				       .lkey = mr->lkey + of->receive_key };
		struct ibv_recv_wr wr = { .wr_id = 0x99, .sg_list = &sge, .num_sge = 1 }, *bad;

		MUST(!ibv_post_recv(qp, &wr, &bad));
	}
	if (!asks && of->requester == IBV_WC_RETRY_EXC_ERR) {
		MUST(!ibv_destroy_qp(qp));
		qp = NULL;
	}
	meet();
	if (asks)
		ask(qp, mr, of, &peer);
	else
		suffer(of);
	meet();
	while (ibv_poll_cq(cq, 1, &wc) > 0)
		;
	MUST(!qp || !ibv_destroy_qp(qp));
	MUST(!ibv_dereg_mr(mr));
}

int main(int argc, char **argv)
{
	MUST(argc == 2);
	alarm(120);
	set_up();
	for (unsigned int i = 0; i < sizeof(mistakes) / sizeof(*mistakes); i++)
		make(&mistakes[i], !strcmp(argv[1], "ask"));
	fprintf(stderr, "## end\n");
	tear_down("every mistake was made");
	return 0;
}
