/*
 * Calls with objects whose handle or context was changed, objects of another context, objects that were destroyed, and
 * pointers to no object. Calls that destroy one, or make something from one, fail with ENOENT as uverbs' lookup does; others
 * fail with EINVAL. Nothing is freed or used: afterwards everything still works, and can be destroyed. Posting does not compare
 * handles.
 *
 *     strangers [--each [BUT …]]
 */
#include "common.h"

#include <fcntl.h>
#include <stddef.h>

/* Both have the same objects, so that their handles are equal. */
static struct ibv_context *first_context, *other_context;
static char memory[4096];

/* An object of each kind, in one context. */
struct set {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_td *td;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_cq_ex *cq_ex;
	struct ibv_srq *srq, *xsrq;
	struct ibv_qp *qp, *ud, *ex;
	struct ibv_mr *mr;
	struct ibv_mw *mw, *mw2;
	struct ibv_ah *ah;
	struct ibv_xrcd *xrcd;
};

/* Of the first context, and of the other one. */
static struct set one, two;
/* Error of calls that look up an object to destroy it, or to make something from it. */
static int missing = ENOENT;
/* The objects were destroyed: posting fails, too. */
static int gone;

#define FAILS(call, wanted) do { \
		errno = 0; \
		int got_ = (call); \
		if (got_ != (wanted) && !(got_ == -1 && errno == (wanted))) { \
			fprintf(stderr, "line %d: %s is %d, errno %d, with %s\n", __LINE__, #call, got_, errno, what); \
			exit(1); \
		} \
	} while (0)
#define REFUSED(call) FAILS(call, EINVAL)
#define MISSING(call) FAILS(call, missing)
#define NO_OBJECT(call, wanted) do { \
		errno = 0; \
		if ((call) || errno != (wanted)) { \
			fprintf(stderr, "line %d: %s: errno %d, with %s\n", __LINE__, #call, errno, what); \
			exit(1); \
		} \
	} while (0)
#define NONE(call) NO_OBJECT(call, missing)

static struct ibv_qp_init_attr how(const struct set *s, enum ibv_qp_type type)
{
	return (struct ibv_qp_init_attr){ .send_cq = s->cq, .recv_cq = s->cq, .qp_type = type,
					  .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1,
						   .max_recv_sge = 1 } };
}

static struct ibv_ah_attr where(void)
{
	return (struct ibv_ah_attr){ .is_global = 1, .port_num = 1, .grh = { .dgid = own, .sgid_index = own_index, .hop_limit = 64 } };
}

/* Makes an object of each kind that the device has. */
static struct set make(struct ibv_context *in)
{
	struct set s = { .context = in };
	struct ibv_td_init_attr td = { 0 };
	struct ibv_cq_init_attr_ex ex = { .cqe = 8 };
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_xrcd_init_attr xrcd = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1,
					   .oflags = O_CREAT };
	struct ibv_ah_attr to = where();
	struct ibv_qp_init_attr init;
	struct ibv_qp_init_attr_ex qp_ex;
	struct ibv_srq_init_attr_ex xsrq;

	MUST(s.pd = ibv_alloc_pd(in));
	MUST((s.td = ibv_alloc_td(in, &td)) || errno == EOPNOTSUPP);
	MUST(s.channel = ibv_create_comp_channel(in));
	MUST(s.cq = ibv_create_cq(in, 16, NULL, s.channel, 0));
	MUST(s.cq_ex = ibv_create_cq_ex(in, &ex));
	MUST(s.srq = ibv_create_srq(s.pd, &srq));
	MUST((s.xrcd = ibv_open_xrcd(in, &xrcd)) || errno == EOPNOTSUPP);
	xsrq = (struct ibv_srq_init_attr_ex){ .attr = { .max_wr = 4, .max_sge = 1 }, .srq_type = IBV_SRQT_XRC,
					      .pd = s.pd, .xrcd = s.xrcd, .cq = s.cq,
					      .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
							   IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ };
	MUST(!s.xrcd || (s.xsrq = ibv_create_srq_ex(in, &xsrq)));
	init = how(&s, IBV_QPT_RC);
	MUST(s.qp = ibv_create_qp(s.pd, &init));
	init = how(&s, IBV_QPT_UD);
	MUST(s.ud = ibv_create_qp(s.pd, &init));
	qp_ex = (struct ibv_qp_init_attr_ex){ .send_cq = s.cq, .recv_cq = s.cq, .qp_type = IBV_QPT_RC, .pd = s.pd,
					      .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
					      .send_ops_flags = IBV_QP_EX_WITH_SEND,
					      .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1,
						       .max_recv_sge = 1 } };
	MUST(s.ex = ibv_create_qp_ex(in, &qp_ex));
	MUST(s.mr = ibv_reg_mr(s.pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND));
	MUST(s.mw = ibv_alloc_mw(s.pd, IBV_MW_TYPE_1));
	MUST(s.mw2 = ibv_alloc_mw(s.pd, IBV_MW_TYPE_2));
	MUST(s.ah = ibv_create_ah(s.pd, &to));
	return s;
}

/* Destroys all of them, each of which must exist. */
static void unmake(struct set *s)
{
	MUST(!ibv_destroy_ah(s->ah) && !ibv_dealloc_mw(s->mw) && !ibv_dealloc_mw(s->mw2) && !ibv_dereg_mr(s->mr));
	MUST(!ibv_destroy_qp(s->ex) && !ibv_destroy_qp(s->ud) && !ibv_destroy_qp(s->qp));
	MUST(!s->xrcd || (!ibv_destroy_srq(s->xsrq) && !ibv_close_xrcd(s->xrcd)));
	MUST(!ibv_destroy_srq(s->srq));
	MUST(!ibv_destroy_cq(ibv_cq_ex_to_cq(s->cq_ex)) && !ibv_destroy_cq(s->cq));
	MUST(!s->td || !ibv_dealloc_td(s->td));
	MUST(!ibv_destroy_comp_channel(s->channel) && !ibv_dealloc_pd(s->pd));
}

static int rereg_to(struct ibv_mr *mr, struct ibv_pd *to)
{
	int wanted = to ? IBV_REREG_MR_ERR_CMD : IBV_REREG_MR_ERR_INPUT;

	return ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, to, NULL, 0, 0) == wanted ? errno : 0;
}

/* Calls that make something in a protection domain, but for those of its context's table. */
static void no_domain(struct set *s, struct ibv_pd *pd, const char *what)
{
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_parent_domain_init_attr parent = { .pd = pd };
	struct ibv_qp_init_attr init = how(s, IBV_QPT_RC);
	struct ibv_qp_init_attr_ex ex = { .send_cq = s->cq, .recv_cq = s->cq, .qp_type = IBV_QPT_RC, .pd = pd,
					  .comp_mask = IBV_QP_INIT_ATTR_PD, .cap = init.cap };
	struct ibv_ah_attr to = where();
	struct ibv_wc wc = { .wc_flags = IBV_WC_GRH };
	struct ibv_grh grh = { 0 };

	NONE(ibv_create_qp(pd, &init));
	NONE(ibv_create_srq(pd, &srq));
	NONE(ibv_create_ah(pd, &to));
	NONE(ibv_create_ah_from_wc(pd, &wc, &grh, 1));
	NONE((ibv_reg_mr)(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE));
	NONE(ibv_reg_mr_iova2(pd, memory, sizeof(memory), 0, IBV_ACCESS_LOCAL_WRITE));
	NONE(ibv_alloc_parent_domain(s->context, &parent));
	NONE(ibv_create_qp_ex(s->context, &ex));
	REFUSED(rereg_to(s->mr, pd));
	MISSING(ibv_dealloc_pd(pd));
}

static void no_queue_pair(struct set *s, struct ibv_qp *qp, struct ibv_qp *ex, const char *what)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };
	struct ibv_qp_init_attr init;
	struct ibv_mw_bind bind = { .bind_info = { s->mr, (uintptr_t)memory, 64, 0 } };
	struct ibv_recv_wr recv = { 0 }, *bad_recv = NULL;
	struct ibv_send_wr send = { .opcode = IBV_WR_SEND }, *bad_send = NULL;
	union ibv_gid group = { .raw = { [10] = 0xff, [11] = 0xff, [12] = 224, [15] = 77 } };
	struct ibv_qp_ex *wr = (struct ibv_qp_ex *)ex;

	REFUSED(ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	REFUSED(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
	REFUSED(ibv_attach_mcast(qp, &group, 0));
	REFUSED(ibv_detach_mcast(qp, &group, 0));
	MUST(!ibv_qp_to_qp_ex(ex));
	if (gone) {
		REFUSED(s->context->ops.post_send(qp, &send, &bad_send));
		MUST(bad_send == &send);
		REFUSED(s->context->ops.post_recv(qp, &recv, &bad_recv));
		MUST(bad_recv == &recv);
		REFUSED(s->context->ops.bind_mw(qp, s->mw, &bind));
		ibv_wr_start(wr);
		ibv_wr_send(wr);
		ibv_wr_set_sge(wr, s->mr->lkey, (uintptr_t)memory, 8);
		REFUSED(ibv_wr_complete(wr));
		ibv_wr_start(wr);
		ibv_wr_abort(wr);
	}
	MISSING(ibv_destroy_qp(qp));
}

static void no_queue(struct set *s, struct ibv_cq *cq, struct ibv_cq_ex *ex, const char *what)
{
	struct ibv_qp_init_attr init = how(s, IBV_QPT_RC);
	struct ibv_modify_cq_attr moderate = { 0 };
	struct ibv_poll_cq_attr poll = { 0 };
	struct ibv_wc wc;
	struct ibv_srq_init_attr_ex xsrq = { .attr = { .max_wr = 4, .max_sge = 1 }, .srq_type = IBV_SRQT_XRC, .pd = s->pd,
					     .xrcd = s->xrcd, .cq = cq,
					     .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
							  IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ };

	init.send_cq = cq;
	NONE(ibv_create_qp(s->pd, &init));
	init = how(s, IBV_QPT_RC);
	init.recv_cq = cq;
	NONE(ibv_create_qp(s->pd, &init));
	NONE(ibv_create_srq_ex(s->context, &xsrq));
	REFUSED(ibv_resize_cq(cq, 32));
	REFUSED(s->context->ops.req_notify_cq(cq, 0));
	REFUSED(s->context->ops.poll_cq(cq, 1, &wc));
	REFUSED(verbs_get_ctx(s->context)->modify_cq(cq, &moderate));
	REFUSED(ibv_start_poll(ex, &poll));
	MISSING(ibv_destroy_cq(cq));
}

static void no_shared_queue(struct set *s, struct ibv_srq *srq, const char *what)
{
	struct ibv_qp_init_attr init = how(s, IBV_QPT_RC);
	struct ibv_srq_attr attr = { .srq_limit = 1 };
	struct ibv_recv_wr recv = { 0 }, *bad = NULL;
	uint32_t number;

	init.srq = srq;
	NONE(ibv_create_qp(s->pd, &init));
	REFUSED(ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT));
	REFUSED(ibv_query_srq(srq, &attr));
	REFUSED(verbs_get_ctx(s->context)->get_srq_num(srq, &number));
	if (gone) {
		REFUSED(s->context->ops.post_srq_recv(srq, &recv, &bad));
		MUST(bad == &recv);
	}
	MISSING(ibv_destroy_srq(srq));
}

static void no_region(struct set *s, struct ibv_mr *mr, const char *what)
{
	struct ibv_mw_bind bind = { .bind_info = { mr, (uintptr_t)memory, 64, 0 } };

	MISSING(rereg_to(mr, s->pd));
	if (gone)
		REFUSED(s->context->ops.bind_mw(s->qp, s->mw, &bind));
	MISSING(ibv_dereg_mr(mr));
}

static void no_window(struct set *s, struct ibv_mw *mw, struct ibv_mw *mw2, const char *what)
{
	struct ibv_mw_bind bind = { .bind_info = { s->mr, (uintptr_t)memory, 64, 0 } };
	struct ibv_send_wr wr = { .opcode = IBV_WR_BIND_MW, .bind_mw = { .mw = mw2, .bind_info = bind.bind_info } }, *bad = NULL;

	if (gone) {
		REFUSED(s->context->ops.bind_mw(s->qp, mw, &bind));
		REFUSED(ibv_post_send(s->qp, &wr, &bad));
		MUST(bad == &wr);
	}
	MISSING(s->context->ops.dealloc_mw(mw));
	MISSING(s->context->ops.dealloc_mw(mw2));
}

static void no_handle(struct set *s, struct ibv_ah *ah, const char *what)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND, .wr.ud = { ah, 1, 1 } }, *bad = NULL;

	if (gone) {
		REFUSED(ibv_post_send(s->ud, &wr, &bad));
		MUST(bad == &wr);
	}
	MISSING(ibv_destroy_ah(ah));
}

static void no_xrc_domain(struct set *s, struct ibv_xrcd *xrcd, const char *what)
{
	struct ibv_qp_init_attr_ex init = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = xrcd };
	struct ibv_qp_open_attr open = { .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
					 .qp_num = 17, .xrcd = xrcd, .qp_type = IBV_QPT_XRC_RECV };
	struct ibv_srq_init_attr_ex xsrq = { .attr = { .max_wr = 4, .max_sge = 1 }, .srq_type = IBV_SRQT_XRC, .pd = s->pd,
					     .xrcd = xrcd, .cq = s->cq,
					     .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
							  IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ };

	NONE(ibv_create_qp_ex(s->context, &init));
	NONE(ibv_open_qp(s->context, &open));
	NONE(ibv_create_srq_ex(s->context, &xsrq));
	MISSING(verbs_get_ctx(s->context)->close_xrcd(xrcd));
}

static void no_channel(struct set *s, struct ibv_comp_channel *channel, const char *what)
{
	struct ibv_cq_init_attr_ex ex = { .cqe = 8, .channel = channel };
	struct ibv_cq *cq;
	void *cookie;

	/* A channel is looked up by its descriptor. */
	NO_OBJECT(ibv_create_cq(s->context, 16, NULL, channel, 0), EBADF);
	NO_OBJECT(ibv_create_cq_ex(s->context, &ex), EBADF);
	REFUSED(ibv_get_cq_event(channel, &cq, &cookie));
	MISSING(ibv_destroy_comp_channel(channel));
}

static void no_thread_domain(struct set *s, struct ibv_td *td, const char *what)
{
	struct ibv_parent_domain_init_attr parent = { .pd = s->pd, .td = td };

	NONE(ibv_alloc_parent_domain(s->context, &parent));
	MISSING(verbs_get_ctx(s->context)->dealloc_td(td));
}

static void no_context(struct ibv_context *c, const char *what)
{
	struct verbs_context *table = verbs_get_ctx(context);
	struct ibv_device_attr_ex attr_ex;
	struct ibv_values_ex values = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };
	struct ibv_cq_init_attr_ex cq_ex = { .cqe = 8 };
	struct ibv_srq_init_attr_ex srq = { .attr = { .max_wr = 4, .max_sge = 1 }, .pd = pd, .comp_mask = IBV_SRQ_INIT_ATTR_PD };
	struct ibv_qp_init_attr_ex qp = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .pd = pd,
					  .comp_mask = IBV_QP_INIT_ATTR_PD };
	struct ibv_xrcd_init_attr xrcd = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1,
					   .oflags = O_CREAT };
	struct ibv_td_init_attr td = { 0 };
	struct ibv_parent_domain_init_attr parent = { .pd = pd };
	struct ibv_async_event event;
	struct ibv_device_attr attr;
	struct ibv_port_attr port;
	union ibv_gid gid;
	__be16 pkey;

	REFUSED(ibv_query_device(c, &attr));
	REFUSED(table->query_device_ex(c, NULL, &attr_ex, sizeof(attr_ex)));
	REFUSED(table->query_port(c, 1, &port, sizeof(port)));
	REFUSED(table->query_rt_values(c, &values));
	REFUSED(ibv_query_gid(c, 1, 0, &gid));
	REFUSED(ibv_query_pkey(c, 1, 0, &pkey));
	REFUSED(ibv_get_pkey_index(c, 1, 0xffff));
	REFUSED(ibv_get_async_event(c, &event));
	NO_OBJECT(ibv_alloc_pd(c), EINVAL);
	NO_OBJECT(table->alloc_td(c, &td), EINVAL);
	NO_OBJECT(table->alloc_parent_domain(c, &parent), EINVAL);
	NO_OBJECT(ibv_create_comp_channel(c), EINVAL);
	NO_OBJECT((ibv_create_cq)(c, 16, NULL, NULL, 0), EINVAL);
	NO_OBJECT(table->create_cq_ex(c, &cq_ex), EINVAL);
	NO_OBJECT(table->create_srq_ex(c, &srq), EINVAL);
	NO_OBJECT(table->create_qp_ex(c, &qp), EINVAL);
	NO_OBJECT(table->open_xrcd(c, &xrcd), EINVAL);
	REFUSED(ibv_close_device(c));
}

/* Runs CHECK with a field of OBJECT that has another value, and puts it back. */
#define CHANGED(object, field, value, check) do { \
		__typeof__((object)->field) was_ = (object)->field; \
		(object)->field = (value); \
		check; \
		(object)->field = was_; \
	} while (0)
/* With a handle that nobody has, one of a neighbour, and another context. */
#define UNLIKE(kind, object, check) do { \
		const char *what __attribute__((unused)) = kind " whose handle nobody has"; \
		CHANGED(object, handle, 0x7fffff77, check); \
		what = kind " whose handle is one less"; \
		CHANGED(object, handle, (object)->handle - 1, check); \
		what = kind " with another context"; \
		CHANGED(object, context, other_context, check); \
		what = kind " without a context"; \
		CHANGED(object, context, NULL, check); \
	} while (0)

#define NOBODY 0x7fffff77

/* By the calls that ask the kernel, where it drives the device. */
static void handles_that_nobody_has_are_refused(void)
{
	const char *what = "a handle that nobody has";
	struct set *s = &one;
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_qp_init_attr init = how(s, IBV_QPT_RC), told;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };
	struct ibv_srq_attr limit = { .srq_limit = 1 };
	struct ibv_ah_attr to = where();
	union ibv_gid group = { .raw = { [10] = 0xff, [11] = 0xff, [12] = 224, [15] = 77 } };

	CHANGED(s->pd, handle, NOBODY, ({
		NONE(ibv_create_qp(s->pd, &init));
		NONE(ibv_create_srq(s->pd, &srq));
		NONE(ibv_create_ah(s->pd, &to));
		NONE((ibv_reg_mr)(s->pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE));
		NONE(ibv_alloc_mw(s->pd, IBV_MW_TYPE_2));
	}));
	CHANGED(s->qp, handle, NOBODY, ({
		REFUSED(ibv_modify_qp(s->qp, &attr, IBV_QP_STATE));
		REFUSED(ibv_query_qp(s->qp, &attr, IBV_QP_STATE, &told));
	}));
	CHANGED(s->ud, handle, NOBODY, ({
		REFUSED(ibv_attach_mcast(s->ud, &group, 0));
		REFUSED(ibv_detach_mcast(s->ud, &group, 0));
	}));
	CHANGED(s->cq, handle, NOBODY, ({
		NONE(ibv_create_qp(s->pd, &init));
		REFUSED(ibv_resize_cq(s->cq, 32));
		REFUSED(ibv_req_notify_cq(s->cq, 0));
	}));
	init.srq = s->srq;
	CHANGED(s->srq, handle, NOBODY, ({
		NONE(ibv_create_qp(s->pd, &init));
		REFUSED(ibv_modify_srq(s->srq, &limit, IBV_SRQ_LIMIT));
		REFUSED(ibv_query_srq(s->srq, &limit));
	}));
}

static void what_nobody_has_is_not_destroyed(void)
{
	const char *what = "a handle that nobody has";
	struct set *s = &one;

	CHANGED(s->pd, handle, NOBODY, MISSING(ibv_dealloc_pd(s->pd)));
	CHANGED(s->qp, handle, NOBODY, MISSING(ibv_destroy_qp(s->qp)));
	CHANGED(s->cq, handle, NOBODY, MISSING(ibv_destroy_cq(s->cq)));
	CHANGED(s->srq, handle, NOBODY, MISSING(ibv_destroy_srq(s->srq)));
	CHANGED(s->mr, handle, NOBODY, MISSING(ibv_dereg_mr(s->mr)));
	CHANGED(s->mw, handle, NOBODY, MISSING(ibv_dealloc_mw(s->mw)));
	CHANGED(s->ah, handle, NOBODY, MISSING(ibv_destroy_ah(s->ah)));
}

/* Each kind by each call. */
static void objects_that_were_changed_are_refused(void)
{
	struct set *s = &one;
	struct ibv_cq *ex = ibv_cq_ex_to_cq(s->cq_ex);
	const char *what;

	MUST(s->xrcd && s->td);

	UNLIKE("a protection domain", s->pd, no_domain(s, s->pd, what));
	/* Both at once, since calls of both are made. */
	UNLIKE("a queue pair", s->qp, UNLIKE("and an extended one", s->ex, no_queue_pair(s, s->qp, s->ex, what)));
	UNLIKE("a completion queue", s->cq, UNLIKE("and an extended one", ex, no_queue(s, s->cq, s->cq_ex, what)));
	UNLIKE("a shared queue", s->srq, no_shared_queue(s, s->srq, what));
	UNLIKE("a shared queue of XRC", s->xsrq, no_shared_queue(s, s->xsrq, what));
	UNLIKE("a region", s->mr, no_region(s, s->mr, what));
	UNLIKE("a window", s->mw, UNLIKE("and one of type 2", s->mw2, no_window(s, s->mw, s->mw2, what)));
	UNLIKE("an address handle", s->ah, no_handle(s, s->ah, what));
	what = "an XRC domain with another context";
	CHANGED(s->xrcd, context, other_context, no_xrc_domain(s, s->xrcd, what));
	what = "a thread domain with another context";
	CHANGED(s->td, context, other_context, no_thread_domain(s, s->td, what));
	what = "a channel with another context";
	CHANGED(s->channel, context, other_context, no_channel(s, s->channel, what));
	what = "a channel with another descriptor";
	CHANGED(s->channel, fd, 0, no_channel(s, s->channel, what));
	what = "a context of another device";
	CHANGED(s->context, device, NULL, no_context(s->context, what));
}

/* A context does not find objects of another one. */
static void objects_of_two_contexts_are_refused(void)
{
	const char *what = "objects of two contexts";
	struct set *s = &one, *o = &two;
	struct ibv_qp_init_attr init = how(s, IBV_QPT_RC);
	struct ibv_qp_init_attr_ex ex = { .send_cq = s->cq, .recv_cq = s->cq, .qp_type = IBV_QPT_RC, .pd = o->pd,
					  .comp_mask = IBV_QP_INIT_ATTR_PD, .cap = init.cap };
	struct ibv_qp_init_attr_ex target = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD,
					      .xrcd = o->xrcd };
	struct ibv_qp_open_attr open = { .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
					 .xrcd = o->xrcd, .qp_type = IBV_QPT_XRC_RECV };
	struct ibv_srq_init_attr_ex xsrq = { .attr = { .max_wr = 4, .max_sge = 1 }, .srq_type = IBV_SRQT_XRC, .pd = s->pd,
					     .xrcd = s->xrcd, .cq = s->cq,
					     .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
							  IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ };
	struct ibv_parent_domain_init_attr parent = { .pd = o->pd };
	struct ibv_mw_bind bind = { .bind_info = { s->mr, (uintptr_t)memory, 64, 0 } };
	struct ibv_send_wr send = { .opcode = IBV_WR_SEND, .wr.ud = { o->ah, 1, 1 } }, *bad;
	struct ibv_qp *theirs;

	NONE(ibv_create_qp(o->pd, &init));
	init.send_cq = o->cq;
	NONE(ibv_create_qp(s->pd, &init));
	init = how(s, IBV_QPT_RC);
	init.recv_cq = o->cq;
	NONE(ibv_create_qp(s->pd, &init));
	init = how(s, IBV_QPT_RC);
	init.srq = o->srq;
	NONE(ibv_create_qp(s->pd, &init));
	NONE(ibv_create_qp_ex(s->context, &ex));
	NONE(ibv_create_qp_ex(s->context, &target));
	MUST(theirs = ibv_create_qp_ex(o->context, &target));
	open.qp_num = theirs->qp_num;
	NONE(ibv_open_qp(s->context, &open));
	MUST(!ibv_destroy_qp(theirs));
	NONE(ibv_create_srq_ex(o->context, &xsrq));
	xsrq.cq = o->cq;
	NONE(ibv_create_srq_ex(s->context, &xsrq));
	xsrq.cq = s->cq;
	xsrq.xrcd = o->xrcd;
	NONE(ibv_create_srq_ex(s->context, &xsrq));
	NO_OBJECT(ibv_create_cq(s->context, 16, NULL, o->channel, 0), EBADF);
	NONE(ibv_alloc_parent_domain(s->context, &parent));
	parent.pd = s->pd;
	parent.td = o->td;
	NONE(ibv_alloc_parent_domain(s->context, &parent));
	REFUSED(rereg_to(s->mr, o->pd));
	REFUSED(s->context->ops.bind_mw(s->qp, o->mw, &bind));
	REFUSED(s->context->ops.bind_mw(o->qp, s->mw, &bind));
	bind.bind_info.mr = o->mr;
	REFUSED(s->context->ops.bind_mw(s->qp, s->mw, &bind));
	REFUSED(ibv_post_send(s->ud, &send, &bad));
}

/* Pointers to an object of another kind, into the middle of an object, and to no object. */
static void nothing_of_ours_is_refused(void)
{
	static uint64_t zeroes[128];
	struct set *s = &one;
	void *pointers[] = { zeroes, (char *)s->pd + 8, s->td, NULL };
	const char *what = "nothing of ours";

	for (int i = 0; i < 4; i++) {
		void *p = pointers[i];

		missing = p ? ENOENT : EINVAL;
		no_domain(s, p, what);
		MISSING(ibv_destroy_qp(p));
		MISSING(ibv_destroy_cq(p));
		MISSING(ibv_destroy_srq(p));
		MISSING(ibv_dereg_mr(p));
		MISSING(ibv_destroy_ah(p));
		MISSING(ibv_destroy_comp_channel(p));
		MISSING(s->context->ops.dealloc_mw(p));
		MISSING(verbs_get_ctx(s->context)->close_xrcd(p));
		REFUSED(ibv_close_device(p));
		NO_OBJECT(ibv_open_device(p), EINVAL);
		MUST(!ibv_qp_to_qp_ex(p));
		if (p)
			no_thread_domain(s, i == 2 ? (void *)s->pd : p, what);
	}
	missing = ENOENT;
}

static void what_was_destroyed_is_refused(void)
{
	const char *what = "what was destroyed";
	struct set *s = &one, was = make(first_context);

	unmake(&was);
	gone = 1;
	no_domain(s, was.pd, what);
	no_queue_pair(s, was.qp, was.ex, what);
	no_queue(s, was.cq, was.cq_ex, what);
	no_shared_queue(s, was.srq, what);
	no_region(s, was.mr, what);
	no_window(s, was.mw, was.mw2, what);
	no_handle(s, was.ah, what);
	no_xrc_domain(s, was.xrcd, what);
	no_channel(s, was.channel, what);
	no_thread_domain(s, was.td, what);
	gone = 0;
}

/* Takes a queue pair to RTS: of UD, or of RC connected with itself. */
static void to_rts(struct ibv_qp *qp)
{
	int ud = qp->qp_type == IBV_QPT_UD;
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 0x11111111 };
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qp->qp_num,
				   .max_dest_rd_atomic = 1, .ah_attr = where() };
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
				   .max_rd_atomic = 1 };

	MUST(!ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				       (ud ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)));
	MUST(!ibv_modify_qp(qp, &rtr, IBV_QP_STATE | (ud ? 0 : IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
							       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)));
	MUST(!ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_SQ_PSN | (ud ? 0 : IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
							       IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC)));
}

static void completes(struct ibv_cq *on)
{
	time_t end = time(NULL) + 60;
	struct ibv_wc wc = { 0 };

	while (!ibv_poll_cq(on, 1, &wc))
		MUST(time(NULL) < end);
	MUST(wc.status == IBV_WC_SUCCESS);
}

/* No provider compares the handles of what is posted. rdma_rxe's doorbell alone names a queue pair by its handle. */
static void posting_compares_no_handles(void)
{
	struct set s = make(first_context);
	struct ibv_mw_bind bind = { .send_flags = IBV_SEND_SIGNALED, .bind_info = { s.mr, (uintptr_t)memory, 64, 0 } };
	struct ibv_send_wr send = { .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED,
				    .wr.ud = { s.ah, s.ud->qp_num, 0x11111111 } }, *bad;
	struct ibv_send_wr second = { .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED,
				      .bind_mw = { .mw = s.mw2, .rkey = s.mw2->rkey + 1, .bind_info = bind.bind_info } };
	struct ibv_recv_wr recv = { 0 }, *bad_recv;

	to_rts(s.ud);
	to_rts(s.qp);
	CHANGED(s.ah, handle, NOBODY, MUST(!ibv_post_send(s.ud, &send, &bad)));
	completes(s.cq);
	CHANGED(s.mw, handle, NOBODY, CHANGED(s.mr, handle, NOBODY, MUST(!s.context->ops.bind_mw(s.qp, s.mw, &bind))));
	completes(s.cq);
	CHANGED(s.mw2, handle, NOBODY, MUST(!ibv_post_send(s.qp, &second, &bad)));
	completes(s.cq);
	CHANGED(s.qp, handle, NOBODY, MUST(!ibv_post_recv(s.qp, &recv, &bad_recv)));
	CHANGED(s.srq, handle, NOBODY, MUST(!ibv_post_srq_recv(s.srq, &recv, &bad_recv)));
	unmake(&s);
}

/* Refused requests of a list leave no trace, and what came before them is done. */
static void works(struct set *s)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct ibv_sge sge = { (uintptr_t)memory, 8, s->mr->lkey };
	struct ibv_recv_wr recv = { .wr_id = 5, .sg_list = &sge, .num_sge = 1 }, *bad;
	struct ibv_srq_attr now;
	struct ibv_wc wc;

	MUST(!ibv_modify_qp(s->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	MUST(!ibv_post_recv(s->qp, &recv, &bad));
	attr.qp_state = IBV_QPS_ERR;
	MUST(!ibv_modify_qp(s->qp, &attr, IBV_QP_STATE));
	for (int i = 0; i < 1000 && !ibv_poll_cq(s->cq, 1, &wc); i++)
		usleep(10000);
	MUST(wc.wr_id == 5 && wc.status == IBV_WC_WR_FLUSH_ERR && !ibv_poll_cq(s->cq, 1, &wc));
	MUST(!ibv_query_srq(s->srq, &now) && now.max_wr >= 4 && !now.srq_limit);
	MUST(!ibv_req_notify_cq(s->cq, 0));
}

static void contexts_that_were_closed_are_refused(void)
{
	struct ibv_context *closed = ibv_open_device(context->device);

	MUST(closed && !ibv_close_device(closed));
	no_context(closed, "a context that was closed");
}

static void begin(void)
{
	set_up();
	MUST(first_context = ibv_open_device(context->device));
	MUST(other_context = ibv_open_device(context->device));
	one = make(first_context);
	two = make(other_context);
}

static void end(void)
{
	works(&one);
	works(&two);
	unmake(&one);
	unmake(&two);
	MUST(!ibv_close_device(first_context) && !ibv_close_device(other_context));
	tear_down("no stranger gets in");
}

int main(int argc, char **argv)
{
	static const struct check checks[] = {
		CHECK(handles_that_nobody_has_are_refused),
		CHECK(what_nobody_has_is_not_destroyed),
		CHECK(objects_that_were_changed_are_refused),
		CHECK(objects_of_two_contexts_are_refused),
		CHECK(nothing_of_ours_is_refused),
		CHECK(what_was_destroyed_is_refused),
		CHECK(posting_compares_no_handles),
		CHECK(contexts_that_were_closed_are_refused),
	};

	return run(each(argv), checks, COUNT(checks), begin, end);
}
