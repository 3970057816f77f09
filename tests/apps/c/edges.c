/*
 * Checks calls that no manual describes or few programs make: calls with NULL, XRC target queue pairs that are opened again,
 * attributes that XRC ignores, hop limits of datagrams.
 *
 *     edges [--each [BUT …]]
 */
#include "common.h"

#include <fcntl.h>

/* qperf destroys queue pairs that it has not created. */
static void nothing_is_no_object(void)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC };
	char memory[64];

	MUST(ibv_destroy_qp(NULL) == EINVAL);
	MUST(ibv_destroy_cq(NULL) == EINVAL);
	MUST(ibv_destroy_srq(NULL) == EINVAL);
	MUST(ibv_destroy_ah(NULL) == EINVAL);
	MUST(ibv_destroy_comp_channel(NULL) == EINVAL);
	MUST(ibv_dealloc_pd(NULL) == EINVAL);
	MUST(ibv_dereg_mr(NULL) == EINVAL);
	MUST(ibv_modify_qp(NULL, &attr, IBV_QP_STATE) == EINVAL);
	MUST(ibv_close_device(NULL) == -1 && errno == EINVAL);
	MUST(!ibv_create_qp(NULL, &init) && errno == EINVAL);
	MUST(!(ibv_reg_mr)(NULL, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE) && errno == EINVAL);
	MUST(!ibv_open_device(NULL) && errno == EINVAL);
	/* A queue pair without any queue for its completions. */
	init.send_cq = init.recv_cq = NULL;
	MUST(!ibv_create_qp(pd, &init) && errno == EINVAL);
}

/* Test suites of programs make device structures of their own, which are in no list. */
static void a_name_is_what_its_structure_has(void)
{
	struct ibv_device mine = { .name = "mine" };

	MUST(!strcmp(ibv_get_device_name(&mine), "mine"));
}

static struct ibv_xrcd *domain(int fd, int flags)
{
	struct ibv_xrcd_init_attr how = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = fd,
					  .oflags = flags };

	return ibv_open_xrcd(context, &how);
}

static struct ibv_qp *target_again(struct ibv_xrcd *of, uint32_t number, void *cookie)
{
	struct ibv_qp_open_attr attr = { .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE |
						      IBV_QP_OPEN_ATTR_CONTEXT,
					 .qp_num = number, .xrcd = of, .qp_type = IBV_QPT_XRC_RECV,
					 .qp_context = cookie };

	return ibv_open_qp(context, &attr);
}

static void xrc_is_shared(void)
{
	struct ibv_qp_init_attr_ex init = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD };
	struct ibv_qp_init_attr told;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct ibv_xrcd *a, *b, *other;
	struct ibv_qp *first, *second;
	char path[] = "/tmp/ferroce-edges-XXXXXX";
	int file = mkstemp(path);

	MUST(file >= 0 && !unlink(path));
	MUST(!domain(file, 0) && errno == EAGAIN);
	MUST(a = domain(file, O_CREAT));
	MUST(!domain(file, O_CREAT | O_EXCL) && errno == EINVAL);
	MUST(b = domain(file, 0));
	MUST(other = domain(-1, O_CREAT));
	init.xrcd = a;
	MUST(first = ibv_create_qp_ex(context, &init));
	MUST(!target_again(other, first->qp_num, NULL) && errno == EINVAL);
	MUST(!target_again(b, first->qp_num ^ 1, NULL) && errno == EINVAL);
	MUST(second = target_again(b, first->qp_num, &attr));
	MUST(second->qp_num == first->qp_num && second->qp_context == &attr);
	MUST(!ibv_modify_qp(first, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	/* It exists until its last object is destroyed. */
	MUST(!ibv_destroy_qp(first));
	MUST(!ibv_query_qp(second, &attr, IBV_QP_STATE, &told) && attr.qp_state == IBV_QPS_INIT);
	MUST(ibv_close_xrcd(b) == EBUSY);
	MUST(!ibv_destroy_qp(second));
	MUST(!ibv_close_xrcd(a) && !ibv_close_xrcd(b) && !ibv_close_xrcd(other));
	MUST(!domain(file, 0) && errno == EAGAIN);
	close(file);
}

static struct ibv_qp_attr path_to(uint32_t number)
{
	return (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = number,
				     .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
				     .ah_attr = { .is_global = 1, .port_num = 1,
						  .grh = { .dgid = own, .sgid_index = own_index, .hop_limit = 64 } } };
}

/* Programs set the attributes of both halves; each half ignores those of the other. */
static void xrc_halves_ignore_attributes_of_the_other(void)
{
	struct ibv_qp_init_attr_ex of_target = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD };
	struct ibv_qp_init_attr_ex of_sender = { .qp_type = IBV_QPT_XRC_SEND, .send_cq = cq, .pd = pd,
						 .comp_mask = IBV_QP_INIT_ATTR_PD,
						 .cap = { .max_send_wr = 4, .max_send_sge = 1 } };
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
				   .max_rd_atomic = 1 };
	struct ibv_qp_attr timer = { .min_rnr_timer = 5 }, retries = { .retry_cnt = 5, .rnr_retry = 5 }, rtr;
	struct ibv_qp *sender, *target, *halves[2];
	struct ibv_xrcd *in;

	MUST(in = domain(-1, O_CREAT));
	of_target.xrcd = in;
	MUST(target = ibv_create_qp_ex(context, &of_target));
	MUST(sender = ibv_create_qp_ex(context, &of_sender));
	halves[0] = sender;
	halves[1] = target;
	for (int i = 0; i < 2; i++) {
		rtr = path_to(halves[!i]->qp_num);
		MUST(!ibv_modify_qp(halves[i], &init,
				    IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
		MUST(!ibv_modify_qp(halves[i], &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
						     IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
		MUST(!ibv_modify_qp(halves[i], &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
						     IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
	}
	MUST(!ibv_modify_qp(sender, &timer, IBV_QP_MIN_RNR_TIMER));
	MUST(!ibv_modify_qp(target, &retries, IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY));
	MUST(!ibv_destroy_qp(sender) && !ibv_destroy_qp(target) && !ibv_close_xrcd(in));
}

static struct ibv_qp *datagrams(void)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UD,
					 .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 0x11111111 };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	MUST(qp);
	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
	attr.qp_state = IBV_QPS_RTR;
	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
	return qp;
}

/* Checks that the network header in front of a datagram has the sender's hop limit and traffic class. */
static void headers_are_real(int hops, int wanted, int class)
{
	static char memory[256];
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1,
				  .grh = { .dgid = own, .sgid_index = own_index, .hop_limit = hops,
					   .traffic_class = class } };
	struct ibv_qp *qp = datagrams();
	struct ibv_ah *ah = ibv_create_ah(pd, &to);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE);
	struct ibv_sge in = { (uintptr_t)memory, 128, mr->lkey }, out = { (uintptr_t)memory + 128, 8, mr->lkey };
	struct ibv_recv_wr recv = { .sg_list = &in, .num_sge = 1 }, *bad_recv;
	struct ibv_send_wr send = { .sg_list = &out, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED,
				    .wr.ud = { ah, qp->qp_num, 0x11111111 } }, *bad_send;
	time_t end = time(NULL) + 60;
	struct ibv_wc wc;
	int count = 2;

	MUST(ah);
	MUST(!ibv_post_recv(qp, &recv, &bad_recv));
	MUST(!ibv_post_send(qp, &send, &bad_send));
	while (count) {
		int got = ibv_poll_cq(cq, 1, &wc);

		MUST(got >= 0 && time(NULL) < end && (!got || wc.status == IBV_WC_SUCCESS));
		count -= got;
	}
	/* The last 20 of 40 bytes are the IPv4 header. */
	if ((memory[20] & 0xff) != 0x45 || (memory[28] & 0xff) != wanted || (memory[21] & 0xff) != class) {
		fprintf(stderr, "hop limit %d, not %d; class %d, not %d\n", memory[28] & 0xff, wanted, memory[21] & 0xff, class);
		exit(1);
	}
	MUST(!ibv_destroy_ah(ah) && !ibv_destroy_qp(qp) && !ibv_dereg_mr(mr));
}

/* The route's hop limit replaces a lower one, as in the kernel. */
static void low_hop_limits_are_the_routes(void)
{
	headers_are_real(0, 64, 0);
	headers_are_real(1, 64, 8);
}

static void hop_limits_and_classes_arrive(void)
{
	headers_are_real(77, 77, 0x20);
}

static void end(void)
{
	tear_down("the edges hold");
}

int main(int argc, char **argv)
{
	static const struct check checks[] = {
		CHECK(nothing_is_no_object),
		CHECK(a_name_is_what_its_structure_has),
		CHECK(xrc_is_shared),
		CHECK(xrc_halves_ignore_attributes_of_the_other),
		CHECK(low_hop_limits_are_the_routes),
		CHECK(hop_limits_and_classes_arrive),
	};

	return run(each(argv), checks, COUNT(checks), set_up, end);
}
