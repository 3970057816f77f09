/*
 * Sends numbered messages from one queue pair to another over a ring of buffers, and checks what arrives.
 *
 * It has a mistake that no test on a good network finds (docs/verbs/faults.md). -DFIXED compiles it without.
 *
 *   cc -o ring ring.c -libverbs && ferroce run -- ./ring
 *   ferroce run --fault loss=2%,dir=tx,kind=send,seed=7 -- ./ring
 */
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
	MESSAGES = 2000,
	SIZE = 256,
	BUFFERS = 8,	/* of the sender */
	DEPTH = 64,	/* of the send queue, and buffers of the receiver */
	EVERY = 4,	/* each fourth send makes a completion, and the first */
	PSN = 100,
};

static char out[BUFFERS][SIZE], in[DEPTH][SIZE];
static struct ibv_qp *sender, *receiver;
static struct ibv_mr *out_mr, *in_mr;

static void must(int ok, const char *what)
{
	if (!ok) {
		fprintf(stderr, "ring: %s failed\n", what);
		exit(2);
	}
}

static struct ibv_qp *create_qp(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	must(qp && !ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
	     "creating a queue pair");
	return qp;
}

static void connect_to(struct ibv_qp *qp, struct ibv_qp *peer, union ibv_gid gid)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer->qp_num, .rq_psn = PSN,
		.min_rnr_timer = 1, .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .hop_limit = 64 } },
	};

	must(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
			    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), "moving a queue pair to RTR");
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .sq_psn = PSN };
	must(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
			    IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC), "moving a queue pair to RTS");
}

static void receive_into(int buffer)
{
	struct ibv_sge sge = { .addr = (uintptr_t)in[buffer], .length = SIZE, .lkey = in_mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = buffer, .sg_list = &sge, .num_sge = 1 }, *bad;

	must(!ibv_post_recv(receiver, &wr, &bad), "posting a receive");
}

static void send_message(uint32_t number)
{
	char *buffer = out[number % BUFFERS];
	struct ibv_sge sge = { .addr = (uintptr_t)buffer, .length = SIZE, .lkey = out_mr->lkey };
	struct ibv_send_wr wr = {
		.wr_id = number, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
		.send_flags = number == 0 || number % EVERY == EVERY - 1 ? IBV_SEND_SIGNALED : 0,
	}, *bad;

	for (int i = 0; i < SIZE; i += sizeof(number))
		memcpy(buffer + i, &number, sizeof(number));
	must(!ibv_post_send(sender, &wr, &bad), "posting a send");
}

/* Whether one more message may be sent when so many have been, and that many are known to be complete. */
static int may_send(uint32_t sent, uint32_t completed)
{
	/* The first message opens the connection: nothing is sent before it has arrived. */
	if (sent == 1 && !completed)
		return 0;
#ifdef FIXED
	/* A buffer is free when its message is complete. */
	return sent - completed < BUFFERS;
#else
	/* There is room in the send queue. */
	return sent - completed < DEPTH;
#endif
}

static void check(const char *buffer, uint32_t expected)
{
	for (int i = 0; i < SIZE; i += sizeof(expected)) {
		uint32_t got;

		memcpy(&got, buffer + i, sizeof(got));
		if (got != expected) {
			printf("message %u has the data of message %u\n", expected, got);
			exit(1);
		}
	}
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = NULL;
	struct ibv_pd *pd = NULL;
	struct ibv_cq *cq = NULL;
	union ibv_gid gid;
	uint32_t sent = 0, completed = 0, received = 0;
	struct ibv_wc wc;

	must(list && list[0] && (context = ibv_open_device(list[0])) != NULL, "opening a device");
	must(!ibv_query_gid(context, 1, 0, &gid), "asking for a GID");
	must((pd = ibv_alloc_pd(context)) && (cq = ibv_create_cq(context, 4 * DEPTH, NULL, NULL, 0)), "creating objects");
	must((out_mr = ibv_reg_mr(pd, out, sizeof(out), 0)) != NULL, "registering memory");
	must((in_mr = ibv_reg_mr(pd, in, sizeof(in), IBV_ACCESS_LOCAL_WRITE)) != NULL, "registering memory");
	sender = create_qp(pd, cq);
	receiver = create_qp(pd, cq);
	connect_to(sender, receiver, gid);
	connect_to(receiver, sender, gid);
	for (int i = 0; i < DEPTH; i++)
		receive_into(i);

	while (received < MESSAGES || completed < MESSAGES) {
		while (sent < MESSAGES && may_send(sent, completed))
			send_message(sent++);
		while (ibv_poll_cq(cq, 1, &wc) == 1) {
			if (wc.status != IBV_WC_SUCCESS) {
				fprintf(stderr, "ring: %s\n", ibv_wc_status_str(wc.status));
				return 2;
			}
			if (wc.opcode == IBV_WC_RECV) {
				check(in[wc.wr_id], received++);
				receive_into(wc.wr_id);
			} else {
				completed = wc.wr_id + 1;
			}
		}
	}
	printf("%u messages arrived\n", received);
	ibv_destroy_qp(sender);
	ibv_destroy_qp(receiver);
	ibv_dereg_mr(out_mr);
	ibv_dereg_mr(in_mr);
	ibv_destroy_cq(cq);
	ibv_dealloc_pd(pd);
	ibv_close_device(context);
	ibv_free_device_list(list);
	return 0;
}
