/*
 * What the manual pages and the kernel promise, and programs seldom try: sizes that are ignored, work requests that are
 * used again for another operation, batches of ibv_wr_* with a bad one, memory that can't be written, error numbers.
 *
 *     contract [--each]
 */
#include "common.h"

#include <sys/mman.h>

static char memory[4096];
static struct ibv_mr *mr;

static struct ibv_qp_init_attr sizes(enum ibv_qp_type type)
{
	return (struct ibv_qp_init_attr){ .send_cq = cq, .recv_cq = cq, .qp_type = type,
					  .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1,
						   .max_recv_sge = 1 } };
}

static struct ibv_qp *extended(enum ibv_qp_type type, uint64_t ops)
{
	struct ibv_qp_init_attr_ex init = { .send_cq = cq, .recv_cq = cq, .qp_type = type, .pd = pd,
					    .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
					    .send_ops_flags = ops,
					    .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1,
						     .max_recv_sge = 1 } };

	return ibv_create_qp_ex(context, &init);
}

/* Connects a queue pair with itself. */
static void connect(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1,
				    .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };

	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_256, .dest_qp_num = qp->qp_num,
				     .max_dest_rd_atomic = 1,
				     .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = own, .sgid_index = own_index, .hop_limit = 64 } } };
	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
				     .max_rd_atomic = 1 };
	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				       IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

static void completes(uint64_t id, enum ibv_wc_status status)
{
	time_t end = time(NULL) + 60;
	struct ibv_wc wc;
	int got;

	while (!(got = ibv_poll_cq(cq, 1, &wc)))
		MUST(time(NULL) < end);
	MUST(got == 1);
	if (wc.wr_id != id || wc.status != status) {
		fprintf(stderr, "completion of %d: %s\n", (int)wc.wr_id, ibv_wc_status_str(wc.status));
		exit(1);
	}
}

/* With a shared receive queue the sizes of a receive queue may be anything: there is none. */
static void sizes_of_no_queue_are_ignored(void)
{
	struct ibv_srq_init_attr how = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &how);
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC), told;
	struct ibv_qp_init_attr_ex xrc = { .send_cq = cq, .qp_type = IBV_QPT_XRC_SEND, .pd = pd,
					   .comp_mask = IBV_QP_INIT_ATTR_PD,
					   .cap = { .max_send_wr = 4, .max_send_sge = 1, .max_recv_wr = ~0u,
						    .max_recv_sge = ~0u } };
	struct ibv_qp_attr attr;
	struct ibv_qp *qp;

	MUST(srq);
	init.srq = srq;
	init.cap.max_recv_wr = init.cap.max_recv_sge = 0xa5a5a5a5;
	MUST(qp = ibv_create_qp(pd, &init));
	MUST(!ibv_query_qp(qp, &attr, IBV_QP_CAP, &told));
	MUST(!attr.cap.max_recv_wr && !attr.cap.max_recv_sge && attr.cap.max_send_wr >= 4);
	MUST(!ibv_destroy_qp(qp) && !ibv_destroy_srq(srq));
	MUST(qp = ibv_create_qp_ex(context, &xrc));
	MUST(!ibv_destroy_qp(qp));
}

/* rdma_rxe's error numbers: what no device could do is invalid. */
static void too_much_is_invalid(void)
{
	struct ibv_srq_init_attr how = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_qp_init_attr init;

#define TOO_MUCH(field, value) do { \
		init = sizes(IBV_QPT_RC); \
		init.cap.field = (value) + 1; \
		MUST(!ibv_create_qp(pd, &init) && errno == EINVAL); \
	} while (0)
	TOO_MUCH(max_send_wr, limits.max_qp_wr);
	TOO_MUCH(max_recv_wr, limits.max_qp_wr);
	TOO_MUCH(max_send_sge, limits.max_sge);
	TOO_MUCH(max_recv_sge, limits.max_sge);
	TOO_MUCH(max_inline_data, 1 << 20);
	MUST(!ibv_create_cq(context, limits.max_cqe + 1, NULL, NULL, 0) && errno == EINVAL);
	MUST(ibv_resize_cq(cq, limits.max_cqe + 1) == EINVAL);
	how.attr.max_wr = limits.max_srq_wr + 1;
	MUST(!ibv_create_srq(pd, &how) && errno == EINVAL);
	how.attr = (struct ibv_srq_attr){ .max_wr = 4, .max_sge = limits.max_srq_sge + 1 };
	MUST(!ibv_create_srq(pd, &how) && errno == EINVAL);
}

/* One structure for everything: the list is still there when the operation has no data. */
static void leftover_lists_are_ignored(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	struct ibv_mw *window = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE,
				  .wr.rdma = { (uintptr_t)memory + 64, mr->rkey } }, *bad;

	MUST(qp && window);
	connect(qp);
	MUST(!ibv_post_send(qp, &wr, &bad));
	completes(1, IBV_WC_SUCCESS);
	wr.wr_id = 2;
	wr.opcode = IBV_WR_BIND_MW;
	wr.bind_mw.mw = window;
	wr.bind_mw.rkey = ibv_inc_rkey(window->rkey);
	wr.bind_mw.bind_info = (struct ibv_mw_bind_info){ mr, (uintptr_t)memory, 64, IBV_ACCESS_REMOTE_WRITE };
	MUST(!ibv_post_send(qp, &wr, &bad));
	completes(2, IBV_WC_SUCCESS);
	wr.wr_id = 3;
	wr.opcode = IBV_WR_LOCAL_INV;
	wr.invalidate_rkey = window->rkey;
	MUST(!ibv_post_send(qp, &wr, &bad));
	completes(3, IBV_WC_SUCCESS);
	/* The number of elements counts, as rdma_rxe checks it. */
	wr.num_sge = limits.max_sge + 1;
	MUST(ibv_post_send(qp, &wr, &bad) == EINVAL && bad == &wr);
	MUST(!ibv_dealloc_mw(window) && !ibv_destroy_qp(qp));
}

/* Only windows of type 2 are bound by work requests; of the new key the program chooses the last byte. */
static void windows_keep_their_place(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	struct ibv_mw *one = ibv_alloc_mw(pd, IBV_MW_TYPE_1), *two = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	struct ibv_send_wr wr = { .wr_id = 1, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED,
				  .bind_mw = { .bind_info = { mr, (uintptr_t)memory, 64, IBV_ACCESS_REMOTE_WRITE } } }, *bad;
	uint32_t key;

	MUST(qp && one && two);
	connect(qp);
	wr.bind_mw.mw = one;
	wr.bind_mw.rkey = ibv_inc_rkey(one->rkey);
	MUST(ibv_post_send(qp, &wr, &bad) == EINVAL && bad == &wr);
	wr.bind_mw.mw = NULL;
	MUST(ibv_post_send(qp, &wr, &bad) == EINVAL && bad == &wr);
	key = ibv_inc_rkey(two->rkey);
	wr.bind_mw.mw = two;
	wr.bind_mw.rkey = (one->rkey & ~0xffu) | (key & 0xff);
	MUST(!ibv_post_send(qp, &wr, &bad));
	MUST(two->rkey == key);
	completes(1, IBV_WC_SUCCESS);
	wr = (struct ibv_send_wr){ .wr_id = 2, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED,
				   .invalidate_rkey = key };
	MUST(!ibv_post_send(qp, &wr, &bad));
	completes(2, IBV_WC_SUCCESS);
	MUST(!ibv_dealloc_mw(one) && !ibv_dealloc_mw(two) && !ibv_destroy_qp(qp));
}

static void begin_write(struct ibv_qp_ex *ex, uint64_t id)
{
	ex->wr_id = id;
	ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_write(ex, mr->rkey, (uintptr_t)memory + 64);
}

/* ibv_wr_post(3): what complete refuses has not been done, not even in part. */
static void batches_are_whole(void)
{
	struct ibv_qp *qp = extended(IBV_QPT_RC, IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ);
	struct ibv_qp_ex *ex;
	struct ibv_wc wc;

	MUST(qp);
	MUST(ex = ibv_qp_to_qp_ex(qp));
	connect(qp);
	ibv_wr_start(ex);
	for (int i = 0; i < 5; i++) {
		begin_write(ex, 10 + i);
		ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, 8);
	}
	MUST(ibv_wr_complete(ex) == ENOMEM);
	ibv_wr_start(ex);
	begin_write(ex, 20);
	ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, 8);
	begin_write(ex, 21);
	ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, 0xffffffff);
	MUST(ibv_wr_complete(ex) == EINVAL);
	ibv_wr_start(ex);
	for (int i = 0; i < 4; i++) {
		begin_write(ex, 30 + i);
		ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, 8);
	}
	MUST(!ibv_wr_complete(ex));
	for (int i = 0; i < 4; i++)
		completes(30 + i, IBV_WC_SUCCESS);
	MUST(!ibv_poll_cq(cq, 1, &wc));
	MUST(!ibv_destroy_qp(qp));
}

static void operations_fit_the_service(void)
{
	struct ibv_qp *qp;

	MUST(!extended(IBV_QPT_UD, IBV_QP_EX_WITH_RDMA_WRITE) && errno == EOPNOTSUPP);
	MUST(!extended(IBV_QPT_UC, IBV_QP_EX_WITH_RDMA_READ) && errno == EOPNOTSUPP);
	MUST(!extended(IBV_QPT_RC, IBV_QP_EX_WITH_TSO) && errno == EOPNOTSUPP);
	MUST(qp = extended(IBV_QPT_UD, IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM));
	MUST(!ibv_destroy_qp(qp));
	MUST(qp = extended(IBV_QPT_UC, IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_SEND));
	MUST(!ibv_destroy_qp(qp));
}

/* Registration pins, for writing if anybody may write. */
static void memory_must_allow_what_is_asked(void)
{
	const int everything = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
	size_t page = sysconf(_SC_PAGESIZE);
	char *at = mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *other;

	MUST(at != MAP_FAILED);
	MUST(!mprotect(at + page, page, PROT_READ) && !mprotect(at + 2 * page, page, PROT_NONE));
	MUST(!munmap(at + 3 * page, page));
	MUST(other = ibv_reg_mr(pd, at + 8, page - 8, everything));
	MUST(ibv_rereg_mr(other, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, at, 2 * page, 0) && errno == EFAULT);
	MUST(!ibv_dereg_mr(other));
	MUST(!ibv_reg_mr(pd, at, 2 * page, everything) && errno == EFAULT);
	MUST(!ibv_reg_mr(pd, at + page, 1, IBV_ACCESS_LOCAL_WRITE) && errno == EFAULT);
	MUST(other = ibv_reg_mr(pd, at, 2 * page, IBV_ACCESS_REMOTE_READ));
	/* It becomes writable only if all of it is. */
	MUST(ibv_rereg_mr(other, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE) && errno == EFAULT);
	MUST(!ibv_dereg_mr(other));
	MUST(!ibv_reg_mr(pd, at, 3 * page, IBV_ACCESS_REMOTE_READ) && errno == EFAULT);
	MUST(!ibv_reg_mr(pd, at + 2 * page, page, 0) && errno == EFAULT);
	MUST(!ibv_reg_mr(pd, at + 3 * page, page, 0) && errno == EFAULT);
	MUST(!munmap(at, 3 * page));
}

/* The number of elements is checked before any of them is looked at. */
static void lists_too_long_are_not_read(void)
{
	struct ibv_srq_init_attr how = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &how);
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	size_t page = sysconf(_SC_PAGESIZE);
	char *at = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_sge *last = (struct ibv_sge *)(at + page) - 1;
	struct ibv_recv_wr recv = { .sg_list = last, .num_sge = limits.max_sge + 1 }, *bad_recv = NULL;
	struct ibv_send_wr send = { .sg_list = last, .num_sge = limits.max_sge + 1, .opcode = IBV_WR_SEND }, *bad_send;

	MUST(srq && qp && at != MAP_FAILED);
	MUST(!munmap(at + page, page));
	*last = (struct ibv_sge){ (uintptr_t)memory, 8, mr->lkey };
	connect(qp);
	MUST(ibv_post_send(qp, &send, &bad_send) == EINVAL && bad_send == &send);
	MUST(ibv_post_recv(qp, &recv, &bad_recv) == EINVAL && bad_recv == &recv);
	bad_recv = NULL;
	MUST(ibv_post_srq_recv(srq, &recv, &bad_recv) == EINVAL && bad_recv == &recv);
	recv.num_sge = 1;
	MUST(!ibv_post_recv(qp, &recv, &bad_recv) && !ibv_post_srq_recv(srq, &recv, &bad_recv));
	MUST(!ibv_destroy_qp(qp) && !ibv_destroy_srq(srq) && !munmap(at, page));
}

/* What is refused has not begun: neither it nor what follows is done, and what came before is. */
static void refused_in_a_list(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	struct ibv_mw *one = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr->lkey }, long_inline = { (uintptr_t)memory, 0, 0 };
	struct ibv_sge in = { (uintptr_t)memory + 512, 64, mr->lkey };
	struct ibv_recv_wr recv = { .wr_id = 100, .sg_list = &in, .num_sge = 1 }, *bad_recv;
	struct ibv_send_wr wr[3], *bad;
	struct ibv_wc wc;

	MUST(qp && one);
	connect(qp);
	long_inline.length = init.cap.max_inline_data + 1;
	MUST(!ibv_post_recv(qp, &recv, &bad_recv));
	for (int what = 0; what < 6; what++) {
		for (int i = 0; i < 3; i++)
			wr[i] = (struct ibv_send_wr){ .wr_id = i, .next = i < 2 ? &wr[i + 1] : NULL, .sg_list = &sge, .num_sge = 1,
						      .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
						      .wr.rdma = { (uintptr_t)memory + 64, mr->rkey } };
		wr[1].opcode = IBV_WR_SEND;
		switch (what) {
		case 0: wr[1].sg_list = &long_inline; wr[1].send_flags |= IBV_SEND_INLINE; break;
		case 1: wr[1].num_sge = limits.max_sge + 1; break;
		case 2: wr[1].num_sge = -1; break;
		case 3: wr[1].opcode = 0x7f; break;
		case 4: wr[1].send_flags |= IBV_SEND_IP_CSUM; break;
		case 5: wr[1].opcode = IBV_WR_BIND_MW; wr[1].bind_mw.mw = one; break;
		}
		bad = NULL;
		MUST(ibv_post_send(qp, wr, &bad) == EINVAL && bad == &wr[1]);
		completes(0, IBV_WC_SUCCESS);
		/* Had the second one gone, it would come before this. */
		wr[0].next = NULL;
		MUST(!ibv_post_send(qp, wr, &bad));
		completes(0, IBV_WC_SUCCESS);
	}
	/* The receive is still there, for a message of the greatest length. */
	long_inline.length = init.cap.max_inline_data;
	wr[1] = (struct ibv_send_wr){ .wr_id = 1, .sg_list = &long_inline, .num_sge = 1, .opcode = IBV_WR_SEND,
				      .send_flags = IBV_SEND_INLINE };
	MUST(!ibv_post_send(qp, &wr[1], &bad));
	completes(100, IBV_WC_SUCCESS);
	MUST(!ibv_poll_cq(cq, 1, &wc));
	MUST(!ibv_dealloc_mw(one) && !ibv_destroy_qp(qp));
}

/* Receives: those before the refused one are posted, the others are not. */
static void refused_receives(void)
{
	struct ibv_srq_init_attr how = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &how);
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_recv_wr wr[3], *bad;
	struct ibv_wc wc;

	MUST(srq && qp);
	connect(qp);
	for (int i = 0; i < 3; i++)
		wr[i] = (struct ibv_recv_wr){ .wr_id = i, .next = i < 2 ? &wr[i + 1] : NULL, .sg_list = &sge, .num_sge = 1 };
	wr[1].num_sge = limits.max_srq_sge + 1;
	MUST(ibv_post_srq_recv(srq, wr, &bad) == EINVAL && bad == &wr[1]);
	MUST(ibv_post_recv(qp, wr, &bad) == EINVAL && bad == &wr[1]);
	MUST(!ibv_modify_qp(qp, &error, IBV_QP_STATE));
	completes(0, IBV_WC_WR_FLUSH_ERR);
	MUST(!ibv_poll_cq(cq, 1, &wc));
	MUST(!ibv_destroy_qp(qp) && !ibv_destroy_srq(srq));
}

/* ibv_rereg_mr(3): what libibverbs refuses and what the kernel refuses; the region is as it was. */
static void reregistering_says_who_refused(void)
{
	struct ibv_mr *other = ibv_reg_mr(pd, memory, 64, IBV_ACCESS_LOCAL_WRITE), before;
	const int everything = IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
	size_t page = sysconf(_SC_PAGESIZE);
	char *gone = mmap(NULL, page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	MUST(other && gone != MAP_FAILED && !munmap(gone, page));
	before = *other;
#define REREG(why, number, ...) \
	MUST(ibv_rereg_mr(other, __VA_ARGS__) == (why) && errno == (number) && !memcmp(&before, other, sizeof(before)))
	REREG(IBV_REREG_MR_ERR_INPUT, EINVAL, 1 << 3, pd, memory, 64, 0);
	REREG(IBV_REREG_MR_ERR_INPUT, EINVAL, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, NULL, 64, 0);
	REREG(IBV_REREG_MR_ERR_INPUT, EINVAL, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, memory, 0, 0);
	REREG(IBV_REREG_MR_ERR_INPUT, EINVAL, IBV_REREG_MR_CHANGE_PD, pd, NULL, 0, IBV_ACCESS_LOCAL_WRITE);
	REREG(IBV_REREG_MR_ERR_CMD, EINVAL, 0, NULL, NULL, 0, 0);
	REREG(IBV_REREG_MR_ERR_CMD, EFAULT, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, gone, page, 0);
	REREG(IBV_REREG_MR_ERR_CMD, EFAULT, everything, pd, gone, page, IBV_ACCESS_REMOTE_READ);
	REREG(IBV_REREG_MR_ERR_CMD, EINVAL, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_REMOTE_WRITE);
	MUST(!ibv_rereg_mr(other, everything, pd, memory + 64, 128, IBV_ACCESS_REMOTE_READ));
	MUST(other->addr == memory + 64 && other->length == 128);
	MUST(!ibv_dereg_mr(other));
}

/* Rights that ask for nothing that has to be done: nothing is pinned, and all of it is in order. */
static void rights_that_cost_nothing(void)
{
	const int rights[] = { IBV_ACCESS_RELAXED_ORDERING, IBV_ACCESS_HUGETLB, IBV_ACCESS_ON_DEMAND };
	struct ibv_device_attr_ex attr;
	struct ibv_mr *other;

	MUST(!ibv_query_device_ex(context, NULL, &attr) && !attr.odp_caps.general_caps);
	for (int i = 0; i < 3; i++) {
		MUST(other = ibv_reg_mr(pd, memory, 64, IBV_ACCESS_LOCAL_WRITE | rights[i]));
		MUST(!ibv_dereg_mr(other));
	}
	/* But not all memory there is, and none of another device. */
	MUST(!ibv_reg_mr(pd, NULL, SIZE_MAX, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND) && errno == EOPNOTSUPP);
	MUST(!ibv_reg_dmabuf_mr(pd, 0, 64, 0, 0, IBV_ACCESS_LOCAL_WRITE) && errno == EOPNOTSUPP);
}

static uint64_t nanoseconds(struct timespec t)
{
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static uint64_t raw_clock(void)
{
	struct ibv_values_ex values = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };

	MUST(!ibv_query_rt_values_ex(context, &values) && values.comp_mask == IBV_VALUES_MASK_RAW_CLOCK);
	return nanoseconds(values.raw_clock);
}

/* Completions are stamped with the clock that ibv_query_rt_values_ex reads, and with the wall's. */
static void completions_know_the_time(void)
{
	const uint64_t minute = 60000000000ull;
	struct ibv_cq_init_attr_ex how = { .cqe = 4, .wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP |
								 IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK };
	struct ibv_cq_ex *stamped = ibv_create_cq_ex(context, &how);
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_SIGNALED, .wr.rdma = { (uintptr_t)memory + 64, mr->rkey } }, *bad;
	struct ibv_poll_cq_attr poll = { 0 };
	time_t give_up = time(NULL) + 60;
	uint64_t before, wall;
	struct timespec now;
	struct ibv_qp *qp;
	int got;

	MUST(stamped);
	init.send_cq = init.recv_cq = ibv_cq_ex_to_cq(stamped);
	MUST(qp = ibv_create_qp(pd, &init));
	connect(qp);
	before = raw_clock();
	MUST(!ibv_post_send(qp, &wr, &bad));
	while ((got = ibv_start_poll(stamped, &poll)) == ENOENT)
		MUST(time(NULL) < give_up);
	MUST(!got && stamped->status == IBV_WC_SUCCESS);
	MUST(before <= ibv_wc_read_completion_ts(stamped) && ibv_wc_read_completion_ts(stamped) <= raw_clock());
	wall = ibv_wc_read_completion_wallclock_ns(stamped);
	MUST(!clock_gettime(CLOCK_REALTIME, &now));
	/* Somebody may be setting that clock, but not by much. */
	MUST(nanoseconds(now) - minute < wall && wall < nanoseconds(now) + minute);
	ibv_end_poll(stamped);
	MUST(!ibv_destroy_qp(qp) && !ibv_destroy_cq(ibv_cq_ex_to_cq(stamped)));
}

static void small_print(void)
{
	struct ibv_td_init_attr none = { 0 };
	struct ibv_td *td = ibv_alloc_td(context, &none);
	struct ibv_parent_domain_init_attr with = { .pd = pd, .td = td };
	struct ibv_pd *parent = ibv_alloc_parent_domain(context, &with);
	struct ibv_ah_attr nowhere = { .is_global = 1, .port_num = 0, .grh = { .dgid = own } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .cap = { .max_send_wr = 8 } };
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	MUST(td && parent && qp);
	MUST(ibv_dealloc_td(td) == EBUSY);
	MUST(!ibv_dealloc_pd(parent) && !ibv_dealloc_td(td));
	MUST(!ibv_create_ah(pd, &nowhere) && errno == EINVAL);
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS | IBV_QP_CAP) ==
	     EINVAL);
	MUST(!ibv_destroy_qp(qp));
	/* Rates that are no multiple of 2.5 Gbit/s, and none at all. */
	MUST(ibv_rate_to_mult(IBV_RATE_14_GBPS) == -1 && mult_to_ibv_rate(5) == IBV_RATE_MAX);
	MUST(mult_to_ibv_rate(-1) == IBV_RATE_MAX && ibv_rate_to_mult(IBV_RATE_28_GBPS) == 11);
	MUST(!strcmp(ibv_port_state_str(6), "unknown"));
	MUST(!(limits.device_cap_flags & (IBV_DEVICE_N_NOTIFY_CQ | IBV_DEVICE_SHUTDOWN_PORT)));
}

static void begin(void)
{
	set_up();
	MUST(mr = ibv_reg_mr(pd, memory, sizeof(memory),
			     IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_MW_BIND));
}

static void end(void)
{
	MUST(!ibv_dereg_mr(mr));
	tear_down("the contract holds");
}

int main(int argc, char **argv)
{
	static const struct check checks[] = {
		CHECK(sizes_of_no_queue_are_ignored),
		CHECK(leftover_lists_are_ignored),
		CHECK(windows_keep_their_place),
		CHECK(batches_are_whole),
		CHECK(memory_must_allow_what_is_asked),
		CHECK(lists_too_long_are_not_read),
		CHECK(refused_in_a_list),
		CHECK(refused_receives),
		CHECK(reregistering_says_who_refused),
		CHECK(rights_that_cost_nothing),
		CHECK(too_much_is_invalid),
		CHECK(operations_fit_the_service),
		CHECK(completions_know_the_time),
		CHECK(small_print),
	};

	return run(EACH(argc, argv), checks, COUNT(checks), begin, end);
}
