/*
 * Checks guarantees of the manual pages and the kernel that programs seldom use: ignored sizes, work requests reused for
 * another operation, batches of ibv_wr_* with an invalid request, memory that is not writable, error numbers.
 *
 *     contract [--each [BUT …]]
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

/* Waits up to 60 s for the next completion, which must have this wr_id and status. */
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

/* Scatter/gather list longer than max_sge. */
static struct ibv_sge many[256];

static struct ibv_qp *connected(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	MUST(qp);
	connect(qp);
	return qp;
}

static struct ibv_send_wr write_of(uint64_t id, struct ibv_sge *sge)
{
	return (struct ibv_send_wr){ .wr_id = id, .sg_list = sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				     .send_flags = IBV_SEND_SIGNALED, .wr.rdma = { (uintptr_t)memory + 64, mr->rkey } };
}

static struct ibv_send_wr binding(struct ibv_mw *mw)
{
	return (struct ibv_send_wr){ .wr_id = 2, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED,
				     .bind_mw = { mw, mw ? ibv_inc_rkey(mw->rkey) : 0,
						  { mr, (uintptr_t)memory, 64, IBV_ACCESS_REMOTE_WRITE } } };
}

static struct ibv_send_wr invalidation(uint32_t key)
{
	return (struct ibv_send_wr){ .wr_id = 3, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED,
				     .invalidate_rkey = key };
}

/* Posts a work request, which must succeed. */
static void done(struct ibv_qp *qp, struct ibv_send_wr wr)
{
	struct ibv_send_wr *bad;

	MUST(!ibv_post_send(qp, &wr, &bad));
	completes(wr.wr_id, IBV_WC_SUCCESS);
}

/* Posts a work request, which must fail with EINVAL. */
static void refused(struct ibv_qp *qp, struct ibv_send_wr wr)
{
	struct ibv_send_wr *bad = NULL;

	MUST(ibv_post_send(qp, &wr, &bad) == EINVAL && bad == &wr);
}

/* With a shared receive queue, max_recv_wr and max_recv_sge are ignored. */
static void sizes_of_absent_queues_are_ignored(void)
{
	struct ibv_srq_init_attr srq_init = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &srq_init);
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC), queried;
	struct ibv_qp_attr attr;
	struct ibv_qp *qp;

	MUST(srq);
	init.srq = srq;
	init.cap.max_recv_wr = init.cap.max_recv_sge = 0xa5a5a5a5;
	MUST(qp = ibv_create_qp(pd, &init));
	MUST(!ibv_query_qp(qp, &attr, IBV_QP_CAP, &queried));
	MUST(!attr.cap.max_recv_wr && !attr.cap.max_recv_sge && attr.cap.max_send_wr >= 4);
	MUST(!ibv_destroy_qp(qp) && !ibv_destroy_srq(srq));
}

/* An XRC initiator has no receive queue either. */
static void sizes_of_xrc_senders_are_ignored(void)
{
	struct ibv_qp_init_attr_ex xrc = { .send_cq = cq, .qp_type = IBV_QPT_XRC_SEND, .pd = pd,
					   .comp_mask = IBV_QP_INIT_ATTR_PD,
					   .cap = { .max_send_wr = 4, .max_send_sge = 1, .max_recv_wr = ~0u,
						    .max_recv_sge = ~0u } };
	struct ibv_qp *qp;

	MUST(qp = ibv_create_qp_ex(context, &xrc));
	MUST(!ibv_destroy_qp(qp));
}

/* Sizes beyond the device's limits are EINVAL, as with rdma_rxe. */
static void too_much_is_invalid(void)
{
	struct ibv_srq_init_attr srq_init = { .attr = { .max_wr = 4, .max_sge = 1 } };
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
	srq_init.attr.max_wr = limits.max_srq_wr + 1;
	MUST(!ibv_create_srq(pd, &srq_init) && errno == EINVAL);
	srq_init.attr = (struct ibv_srq_attr){ .max_wr = 4, .max_sge = limits.max_srq_sge + 1 };
	MUST(!ibv_create_srq(pd, &srq_init) && errno == EINVAL);
}

/* `cqe` is at least the number of entries requested, and one less than a power of two. */
static void completion_queues_are_rounded_up(void)
{
	struct ibv_cq *queue;

	for (int entries = 1; entries < 20; entries++) {
		MUST((queue = ibv_create_cq(context, entries, NULL, NULL, 0)) && queue->cqe >= entries);
		MUST(queue->cqe < 2 * entries + 1 && !(queue->cqe & (queue->cqe + 1)));
		MUST(!ibv_resize_cq(queue, 2 * entries) && queue->cqe >= 2 * entries && !(queue->cqe & (queue->cqe + 1)));
		MUST(!ibv_destroy_cq(queue));
	}
}

/* Programs reuse a work request with its list for operations without data, which ignore the list. */
static void bindings_ignore_leftover_lists(void)
{
	struct ibv_qp *qp = connected();
	struct ibv_mw *window = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_send_wr wr = write_of(1, &sge);

	MUST(window);
	wr.send_flags |= IBV_SEND_INLINE;
	done(qp, wr);
	wr.opcode = IBV_WR_BIND_MW;
	wr.bind_mw = binding(window).bind_mw;
	done(qp, wr);
	MUST(!ibv_dealloc_mw(window) && !ibv_destroy_qp(qp));
}

static void invalidations_ignore_leftover_lists(void)
{
	struct ibv_qp *qp = connected();
	struct ibv_mw *window = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_send_wr wr = write_of(3, &sge);

	MUST(window);
	wr.opcode = IBV_WR_LOCAL_INV;
	wr.send_flags |= IBV_SEND_INLINE;
	wr.invalidate_rkey = ibv_inc_rkey(window->rkey);
	done(qp, binding(window));
	done(qp, wr);
	MUST(!ibv_dealloc_mw(window) && !ibv_destroy_qp(qp));
}

/* But the number of elements is checked, as in rdma_rxe. */
static void lists_of_invalidations_are_limited(void)
{
	struct ibv_qp *qp = connected();
	struct ibv_send_wr wr = invalidation(mr->rkey);

	wr.sg_list = many;
	wr.num_sge = limits.max_sge + 1;
	refused(qp, wr);
	MUST(!ibv_destroy_qp(qp));
}

static void null_windows_are_refused(void)
{
	struct ibv_qp *qp = connected();

	refused(qp, binding(NULL));
	MUST(!ibv_destroy_qp(qp));
}

/* The program chooses only the last byte of the new key. The index in the upper bytes stays the window's own. */
static void windows_keep_their_index(void)
{
	struct ibv_qp *qp = connected();
	struct ibv_mw *one = ibv_alloc_mw(pd, IBV_MW_TYPE_1), *two = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	struct ibv_send_wr wr;
	uint32_t key;

	MUST(one && two);
	key = ibv_inc_rkey(two->rkey);
	wr = binding(two);
	wr.bind_mw.rkey = (one->rkey & ~0xffu) | (key & 0xff);
	done(qp, wr);
	done(qp, invalidation(key));
	MUST(!ibv_dealloc_mw(one) && !ibv_dealloc_mw(two) && !ibv_destroy_qp(qp));
}

static void begin_write(struct ibv_qp_ex *ex, uint64_t id)
{
	ex->wr_id = id;
	ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_write(ex, mr->rkey, (uintptr_t)memory + 64);
}

static struct ibv_qp_ex *batching(void)
{
	struct ibv_qp *qp = extended(IBV_QPT_RC, IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ);
	struct ibv_qp_ex *ex;

	MUST(qp);
	MUST(ex = ibv_qp_to_qp_ex(qp));
	connect(qp);
	return ex;
}

/* Returns the number of requests that fit into the send queue. */
static int room(struct ibv_qp_ex *ex)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;

	MUST(!ibv_query_qp(&ex->qp_base, &attr, IBV_QP_CAP, &init) && attr.cap.max_send_wr < 64);
	return attr.cap.max_send_wr;
}

static int batch(struct ibv_qp_ex *ex, int first, int count)
{
	ibv_wr_start(ex);
	for (int i = 0; i < count; i++) {
		begin_write(ex, first + i);
		ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, 8);
	}
	return ibv_wr_complete(ex);
}

/* ibv_wr_post(3): if ibv_wr_complete fails, none of the requests is posted. */
static void batches_are_atomic(void)
{
	struct ibv_qp_ex *ex = batching();
	int max = room(ex);
	struct ibv_wc wc;

	MUST(batch(ex, 10, max + 1));
	MUST(!batch(ex, 100, max));
	for (int i = 0; i < max; i++)
		completes(100 + i, IBV_WC_SUCCESS);
	MUST(!ibv_poll_cq(cq, 1, &wc));
	MUST(!ibv_destroy_qp(&ex->qp_base));
}

static void oversized_batches_are_enomem(void)
{
	struct ibv_qp_ex *ex = batching();

	MUST(batch(ex, 10, room(ex) + 1) == ENOMEM);
	MUST(!ibv_destroy_qp(&ex->qp_base));
}

static void batches_with_a_bad_request_are_refused(void)
{
	struct ibv_qp_ex *ex = batching();
	struct ibv_wc wc;

	ibv_wr_start(ex);
	begin_write(ex, 20);
	ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, 8);
	begin_write(ex, 21);
	ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, 0xffffffff);
	MUST(ibv_wr_complete(ex) == EINVAL);
	MUST(!batch(ex, 30, 1));
	completes(30, IBV_WC_SUCCESS);
	MUST(!ibv_poll_cq(cq, 1, &wc));
	MUST(!ibv_destroy_qp(&ex->qp_base));
}

static void operations_must_match_the_service(void)
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

#define ALL_ACCESS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ)

/* Returns four pages: read-write, read-only, PROT_NONE and unmapped. */
static char *four_pages(size_t page)
{
	char *at = mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	MUST(at != MAP_FAILED);
	MUST(!mprotect(at + page, page, PROT_READ) && !mprotect(at + 2 * page, page, PROT_NONE));
	MUST(!munmap(at + 3 * page, page));
	return at;
}

/* Registration pins memory, for writing if the access flags permit writing. */
static void memory_must_be_writable_for_write_access(void)
{
	size_t page = sysconf(_SC_PAGESIZE);
	char *at = four_pages(page);
	struct ibv_mr *other;

	MUST(other = ibv_reg_mr(pd, at + 8, page - 8, ALL_ACCESS));
	MUST(!ibv_dereg_mr(other));
	MUST(!ibv_reg_mr(pd, at, 2 * page, ALL_ACCESS) && errno == EFAULT);
	MUST(!ibv_reg_mr(pd, at + page, 1, IBV_ACCESS_LOCAL_WRITE) && errno == EFAULT);
	MUST(other = ibv_reg_mr(pd, at, 2 * page, IBV_ACCESS_REMOTE_READ));
	MUST(!ibv_dereg_mr(other) && !munmap(at, 3 * page));
}

static void memory_must_be_mapped(void)
{
	size_t page = sysconf(_SC_PAGESIZE);
	char *at = four_pages(page);

	MUST(!ibv_reg_mr(pd, at + 3 * page, page, 0) && errno == EFAULT);
	MUST(!munmap(at, 3 * page));
}

static void memory_must_be_readable(void)
{
	size_t page = sysconf(_SC_PAGESIZE);
	char *at = four_pages(page);

	MUST(!ibv_reg_mr(pd, at, 3 * page, IBV_ACCESS_REMOTE_READ) && errno == EFAULT);
	MUST(!ibv_reg_mr(pd, at + 2 * page, page, 0) && errno == EFAULT);
	MUST(!munmap(at, 3 * page));
}

/* Reregistration with write access fails unless all of the memory is writable. */
static void reregistered_memory_must_be_writable(void)
{
	size_t page = sysconf(_SC_PAGESIZE);
	char *at = four_pages(page);
	struct ibv_mr *other;

	MUST(other = ibv_reg_mr(pd, at + 8, page - 8, ALL_ACCESS));
	MUST(ibv_rereg_mr(other, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, at, 2 * page, 0) && errno == EFAULT);
	MUST(!ibv_dereg_mr(other));
	MUST(other = ibv_reg_mr(pd, at, 2 * page, IBV_ACCESS_REMOTE_READ));
	MUST(ibv_rereg_mr(other, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE) && errno == EFAULT);
	MUST(!ibv_dereg_mr(other) && !munmap(at, 3 * page));
}

/* Returns a list of one element at the end of a page, followed by an unmapped one. */
static struct ibv_sge *list_before_unmapped(void)
{
	size_t page = sysconf(_SC_PAGESIZE);
	char *at = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_sge *last = (struct ibv_sge *)(at + page) - 1;

	MUST(at != MAP_FAILED && !munmap(at + page, page));
	*last = (struct ibv_sge){ (uintptr_t)memory, 8, mr->lkey };
	return last;
}

/* The number of elements is checked before any of them is read. */
static void lists_too_long_are_not_read(void)
{
	struct ibv_qp *qp = connected();
	struct ibv_send_wr wr = write_of(1, list_before_unmapped());

	wr.num_sge = limits.max_sge + 1;
	refused(qp, wr);
	wr.num_sge = 1;
	done(qp, wr);
	MUST(!ibv_destroy_qp(qp));
}

static void receive_lists_too_long_are_not_read(void)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &init);
	struct ibv_qp *qp = connected();
	struct ibv_recv_wr wr = { .sg_list = list_before_unmapped(), .num_sge = limits.max_sge + 1 }, *bad = NULL;

	MUST(srq);
	MUST(ibv_post_recv(qp, &wr, &bad) == EINVAL && bad == &wr);
	bad = NULL;
	MUST(ibv_post_srq_recv(srq, &wr, &bad) == EINVAL && bad == &wr);
	wr.num_sge = 1;
	MUST(!ibv_post_recv(qp, &wr, &bad) && !ibv_post_srq_recv(srq, &wr, &bad));
	MUST(!ibv_destroy_qp(qp) && !ibv_destroy_srq(srq));
}

/*
 * Posts three work requests of which `corrupt` makes the second one invalid. Only the first one may execute.
 */
static void refused_in_a_list(void (*corrupt)(struct ibv_send_wr *, int max_inline))
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_sge in = { (uintptr_t)memory + 512, 64, mr->lkey }, out = { (uintptr_t)memory, init.cap.max_inline_data, 0 };
	struct ibv_recv_wr recv = { .wr_id = 100, .sg_list = &in, .num_sge = 1 }, *bad_recv;
	struct ibv_send_wr wr[3], *bad = NULL;
	struct ibv_wc wc;

	MUST(qp);
	connect(qp);
	MUST(!ibv_post_recv(qp, &recv, &bad_recv));
	for (int i = 0; i < 3; i++) {
		wr[i] = write_of(i, &sge);
		wr[i].next = i < 2 ? &wr[i + 1] : NULL;
	}
	wr[1].opcode = IBV_WR_SEND;
	corrupt(&wr[1], init.cap.max_inline_data);
	MUST(ibv_post_send(qp, wr, &bad) == EINVAL && bad == &wr[1]);
	completes(0, IBV_WC_SUCCESS);
	/* If the second one had been posted, it would complete before this one. */
	wr[0].next = NULL;
	done(qp, wr[0]);
	/* The receive is still posted: it takes an inline message of the maximum length. */
	wr[1] = (struct ibv_send_wr){ .wr_id = 1, .sg_list = &out, .num_sge = 1, .opcode = IBV_WR_SEND,
				      .send_flags = IBV_SEND_INLINE };
	MUST(!ibv_post_send(qp, &wr[1], &bad));
	completes(100, IBV_WC_SUCCESS);
	MUST(!ibv_poll_cq(cq, 1, &wc));
	MUST(!ibv_destroy_qp(qp));
}

static void too_much_inline(struct ibv_send_wr *wr, int max_inline)
{
	wr->sg_list = many;
	many[0] = (struct ibv_sge){ (uintptr_t)memory, max_inline + 1, 0 };
	wr->send_flags |= IBV_SEND_INLINE;
}

static void too_many_elements(struct ibv_send_wr *wr, int max_inline)
{
	wr->sg_list = many;
	wr->num_sge = limits.max_sge + 1;
}

static void negative_elements(struct ibv_send_wr *wr, int max_inline)
{
	wr->num_sge = -1;
}

static void an_unknown_operation(struct ibv_send_wr *wr, int max_inline)
{
	wr->opcode = 0x7f;
}

/* Only ibv_bind_mw binds windows of type 1. */
static struct ibv_mw *type_1;

static void a_binding_of_type_1(struct ibv_send_wr *wr, int max_inline)
{
	struct ibv_send_wr *next = wr->next;

	*wr = binding(type_1);
	wr->next = next;
}

/* Checksum offload: the device does not report the capability. */
static void checksums(struct ibv_send_wr *wr, int max_inline)
{
	wr->send_flags |= IBV_SEND_IP_CSUM;
}

static void too_much_inline_data_is_refused(void)
{
	refused_in_a_list(too_much_inline);
}

static void lists_too_long_are_refused(void)
{
	refused_in_a_list(too_many_elements);
}

static void negative_list_lengths_are_refused(void)
{
	refused_in_a_list(negative_elements);
}

static void unknown_operations_are_refused(void)
{
	refused_in_a_list(an_unknown_operation);
}

static void bindings_of_type_1_are_refused(void)
{
	MUST(type_1 = ibv_alloc_mw(pd, IBV_MW_TYPE_1));
	refused_in_a_list(a_binding_of_type_1);
	MUST(!ibv_dealloc_mw(type_1));
}

static void checksums_are_refused(void)
{
	refused_in_a_list(checksums);
}

/* Receive work requests before an invalid one are posted, the others are not. */
static void receives_before_an_invalid_one_are_posted(void)
{
	struct ibv_srq_init_attr srq_init = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &srq_init);
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

#define REREG(why, number, ...) \
	MUST(ibv_rereg_mr(other, __VA_ARGS__) == (why) && errno == (number) && !memcmp(&before, other, sizeof(before)))

/* ibv_rereg_mr(3): libibverbs refuses invalid arguments, and the region stays as it was. */
static void reregistering_checks_arguments(void)
{
	struct ibv_mr *other = ibv_reg_mr(pd, memory, 64, IBV_ACCESS_LOCAL_WRITE), before;

	MUST(other);
	before = *other;
	REREG(IBV_REREG_MR_ERR_INPUT, EINVAL, 1 << 3, pd, memory, 64, 0);
	REREG(IBV_REREG_MR_ERR_INPUT, EINVAL, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, NULL, 64, 0);
	REREG(IBV_REREG_MR_ERR_INPUT, EINVAL, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, memory, 0, 0);
	REREG(IBV_REREG_MR_ERR_INPUT, EINVAL, IBV_REREG_MR_CHANGE_PD, pd, NULL, 0, IBV_ACCESS_LOCAL_WRITE);
	MUST(!ibv_dereg_mr(other));
}

/* The kernel's errors are reported with IBV_REREG_MR_ERR_CMD, and the region stays as it was. */
static void reregistering_reports_kernel_errors(void)
{
	struct ibv_mr *other = ibv_reg_mr(pd, memory, 64, IBV_ACCESS_LOCAL_WRITE), before;
	const int all = IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
	size_t page = sysconf(_SC_PAGESIZE);
	char *gone = mmap(NULL, page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	MUST(other && gone != MAP_FAILED && !munmap(gone, page));
	before = *other;
	REREG(IBV_REREG_MR_ERR_CMD, EINVAL, 0, NULL, NULL, 0, 0);
	REREG(IBV_REREG_MR_ERR_CMD, EFAULT, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, gone, page, 0);
	REREG(IBV_REREG_MR_ERR_CMD, EFAULT, all, pd, gone, page, IBV_ACCESS_REMOTE_READ);
	REREG(IBV_REREG_MR_ERR_CMD, EINVAL, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_REMOTE_WRITE);
	MUST(!ibv_rereg_mr(other, all, pd, memory + 64, 128, IBV_ACCESS_REMOTE_READ));
	MUST(other->addr == memory + 64 && other->length == 128);
	MUST(!ibv_dereg_mr(other));
}

/* Access flags that require no action of the device. */
static void optional_access_flags_are_accepted(void)
{
	const int rights[] = { IBV_ACCESS_RELAXED_ORDERING, IBV_ACCESS_HUGETLB };
	struct ibv_mr *other;

	for (int i = 0; i < 2; i++) {
		MUST(other = ibv_reg_mr(pd, memory, 64, IBV_ACCESS_LOCAL_WRITE | rights[i]));
		MUST(!ibv_dereg_mr(other));
	}
}

/* All memory is on demand, because none is pinned. But the device does not report the capability. */
static void on_demand_access_is_accepted(void)
{
	struct ibv_device_attr_ex attr;
	struct ibv_mr *other;

	MUST(!ibv_query_device_ex(context, NULL, &attr) && !attr.odp_caps.general_caps);
	MUST(other = ibv_reg_mr(pd, memory, 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND));
	MUST(!ibv_dereg_mr(other));
}

/* Implicit on-demand regions, which cover the whole address space, are not supported. */
static void implicit_on_demand_regions_are_refused(void)
{
	MUST(!ibv_reg_mr(pd, NULL, SIZE_MAX, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND) && errno == EOPNOTSUPP);
}

static void dma_bufs_are_refused(void)
{
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

/* Completions have timestamps of the raw clock (ibv_query_rt_values_ex) and of the wall clock. */
static void completions_have_timestamps(void)
{
	const uint64_t minute = 60000000000ull;
	struct ibv_cq_init_attr_ex cq_init = { .cqe = 4, .wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP |
								     IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK };
	struct ibv_cq_ex *stamped;
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_SIGNALED, .wr.rdma = { (uintptr_t)memory + 64, mr->rkey } }, *bad;
	struct ibv_poll_cq_attr poll = { 0 };
	time_t deadline = time(NULL) + 60;
	uint64_t before, wall;
	struct timespec now;
	struct ibv_qp *qp;
	int got;

	MUST(stamped = ibv_create_cq_ex(context, &cq_init));
	init.send_cq = init.recv_cq = ibv_cq_ex_to_cq(stamped);
	MUST(qp = ibv_create_qp(pd, &init));
	connect(qp);
	before = raw_clock();
	MUST(!ibv_post_send(qp, &wr, &bad));
	while ((got = ibv_start_poll(stamped, &poll)) == ENOENT)
		MUST(time(NULL) < deadline);
	MUST(!got && stamped->status == IBV_WC_SUCCESS);
	MUST(before <= ibv_wc_read_completion_ts(stamped) && ibv_wc_read_completion_ts(stamped) <= raw_clock());
	wall = ibv_wc_read_completion_wallclock_ns(stamped);
	MUST(!clock_gettime(CLOCK_REALTIME, &now));
	/* The wall clock may be adjusted meanwhile, by less than a minute. */
	MUST(nanoseconds(now) - minute < wall && wall < nanoseconds(now) + minute);
	ibv_end_poll(stamped);
	MUST(!ibv_destroy_qp(qp) && !ibv_destroy_cq(ibv_cq_ex_to_cq(stamped)));
}

static void thread_domains_are_busy_under_a_parent_domain(void)
{
	struct ibv_td_init_attr none = { 0 };
	struct ibv_parent_domain_init_attr with = { .pd = pd };
	struct ibv_pd *parent;

	MUST(with.td = ibv_alloc_td(context, &none));
	MUST(parent = ibv_alloc_parent_domain(context, &with));
	MUST(ibv_dealloc_td(with.td) == EBUSY);
	MUST(!ibv_dealloc_pd(parent) && !ibv_dealloc_td(with.td));
}

static void other_error_numbers(void)
{
	struct ibv_ah_attr nowhere = { .is_global = 1, .port_num = 0, .grh = { .dgid = own } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .cap = { .max_send_wr = 8 } };
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	MUST(qp);
	MUST(!ibv_create_ah(pd, &nowhere) && errno == EINVAL);
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS | IBV_QP_CAP) ==
	     EINVAL);
	MUST(!ibv_destroy_qp(qp));
	/* Rates that are not a multiple of 2.5 Gbit/s, and unknown rates. */
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
	tear_down("all contract checks passed");
}

int main(int argc, char **argv)
{
	static const struct check checks[] = {
		CHECK(sizes_of_absent_queues_are_ignored),
		CHECK(sizes_of_xrc_senders_are_ignored),
		CHECK(bindings_ignore_leftover_lists),
		CHECK(invalidations_ignore_leftover_lists),
		CHECK(lists_of_invalidations_are_limited),
		CHECK(null_windows_are_refused),
		CHECK(windows_keep_their_index),
		CHECK(batches_are_atomic),
		CHECK(oversized_batches_are_enomem),
		CHECK(batches_with_a_bad_request_are_refused),
		CHECK(memory_must_be_writable_for_write_access),
		CHECK(memory_must_be_mapped),
		CHECK(memory_must_be_readable),
		CHECK(reregistered_memory_must_be_writable),
		CHECK(lists_too_long_are_not_read),
		CHECK(receive_lists_too_long_are_not_read),
		CHECK(too_much_inline_data_is_refused),
		CHECK(lists_too_long_are_refused),
		CHECK(negative_list_lengths_are_refused),
		CHECK(unknown_operations_are_refused),
		CHECK(bindings_of_type_1_are_refused),
		CHECK(checksums_are_refused),
		CHECK(receives_before_an_invalid_one_are_posted),
		CHECK(reregistering_checks_arguments),
		CHECK(reregistering_reports_kernel_errors),
		CHECK(optional_access_flags_are_accepted),
		CHECK(on_demand_access_is_accepted),
		CHECK(implicit_on_demand_regions_are_refused),
		CHECK(dma_bufs_are_refused),
		CHECK(too_much_is_invalid),
		CHECK(completion_queues_are_rounded_up),
		CHECK(operations_must_match_the_service),
		CHECK(completions_have_timestamps),
		CHECK(thread_domains_are_busy_under_a_parent_domain),
		CHECK(other_error_numbers),
	};

	return run(each(argv), checks, COUNT(checks), begin, end);
}
