/*
 * How work requests end that can be posted and can't be done, and what a memory window is between its binding and its end:
 * mostly on queue pairs that are connected with themselves.
 *
 *     posting [--each [BUT …]]
 */
#include "common.h"

#define RIGHTS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)
#define MANY 4

static uint64_t memory[512];
static struct ibv_mr *mr;
static struct ibv_cq *receives;
static struct ibv_ah *way;

static struct ibv_qp *create(enum ibv_qp_type type)
{
	struct ibv_qp_init_attr_ex init = { .send_cq = cq, .recv_cq = receives, .qp_type = type, .pd = pd,
					    .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
					    .send_ops_flags = IBV_QP_EX_WITH_SEND, .sq_sig_all = 1,
					    .cap = { .max_send_wr = MANY, .max_recv_wr = MANY, .max_send_sge = 2,
						     .max_recv_sge = 1 } };
	struct ibv_qp *qp;

	if (type == IBV_QPT_RC)
		init.send_ops_flags |= IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
	MUST(qp = ibv_create_qp_ex(context, &init));
	return qp;
}

static void connect(struct ibv_qp *qp, struct ibv_qp *peer)
{
	int ud = qp->qp_type == IBV_QPT_UD, rc = qp->qp_type == IBV_QPT_RC;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7, .qp_access_flags = RIGHTS };

	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				       (ud ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_256, .dest_qp_num = peer->qp_num,
				     .max_dest_rd_atomic = 1,
				     .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = own, .sgid_index = own_index, .hop_limit = 64 } } };
	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | (ud ? 0 : IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN) |
				       (rc ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0)));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
				     .max_rd_atomic = 1 };
	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN |
				       (rc ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : 0)));
}

static struct ibv_qp *ready(enum ibv_qp_type type)
{
	struct ibv_qp *qp = create(type);

	connect(qp, qp);
	return qp;
}

/* Two that are connected with each other: what ends one as a responder does not flush the requests of the other. */
static struct ibv_qp *ready_with(struct ibv_qp **peer)
{
	struct ibv_qp *qp = create(IBV_QPT_RC);

	*peer = create(IBV_QPT_RC);
	connect(qp, *peer);
	connect(*peer, qp);
	return qp;
}

static struct ibv_wc next(struct ibv_cq *from)
{
	time_t end = time(NULL) + 60;
	struct ibv_wc wc;
	int got;

	while (!(got = ibv_poll_cq(from, 1, &wc)))
		MUST(time(NULL) < end);
	MUST(got == 1);
	return wc;
}

#define ENDS(from, id, how) do { \
		struct ibv_wc ended = next(from); \
		if (ended.wr_id != (id) || ended.status != (how)) { \
			fprintf(stderr, "line %d: %d: %s\n", __LINE__, (int)ended.wr_id, ibv_wc_status_str(ended.status)); \
			exit(1); \
		} \
	} while (0)

static enum ibv_qp_state state(struct ibv_qp *qp)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;

	MUST(!ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
	return attr.qp_state;
}

static int post(struct ibv_qp *qp, struct ibv_send_wr wr, struct ibv_sge *sge, int count)
{
	struct ibv_send_wr *bad = NULL;

	wr.sg_list = sge;
	wr.num_sge = count;
	return ibv_post_send(qp, &wr, &bad);
}

static void receive(struct ibv_qp *qp, uint64_t id)
{
	struct ibv_sge sge = { (uintptr_t)&memory[256], 256, mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;

	MUST(!ibv_post_recv(qp, &wr, &bad));
}

static struct ibv_send_wr remote(enum ibv_wr_opcode opcode, uint64_t addr, uint32_t rkey)
{
	struct ibv_send_wr wr = { .wr_id = 1, .opcode = opcode };

	if (opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = addr;
		wr.wr.atomic.rkey = rkey;
	} else {
		wr.wr.rdma.remote_addr = addr;
		wr.wr.rdma.rkey = rkey;
	}
	return wr;
}

static const enum ibv_wr_opcode atomics[] = { IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD };

static void atomics_end(const int (*lengths)[2], int count, enum ibv_wc_status how)
{
	for (int i = 0; i < 2; i++) {
		for (int n = 0; n < count; n++) {
			struct ibv_sge list[2] = { { (uintptr_t)memory, lengths[n][0], mr->lkey },
						   { (uintptr_t)&memory[8], lengths[n][1], mr->lkey } };
			struct ibv_qp *qp = ready(IBV_QPT_RC);

			MUST(!post(qp, remote(atomics[i], (uintptr_t)&memory[64], mr->rkey), list, lengths[n][1] ? 2 : !!lengths[n][0]));
			ENDS(cq, 1, how);
			MUST(state(qp) == (how ? IBV_QPS_ERR : IBV_QPS_RTS) && !ibv_destroy_qp(qp));
		}
	}
}

static void atomics_of_eight_bytes_may_be_scattered(void)
{
	static const int halves[][2] = { { 8, 0 }, { 4, 4 } };

	atomics_end(halves, 2, IBV_WC_SUCCESS);
}

static void atomics_of_less_than_eight_bytes_fail(void)
{
	static const int lengths[][2] = { { 0, 0 }, { 4, 0 }, { 3, 4 } };

	atomics_end(lengths, 3, IBV_WC_LOC_LEN_ERR);
}

static void atomics_of_more_than_eight_bytes_fail(void)
{
	static const int lengths[][2] = { { 16, 0 }, { 8, 8 } };
	struct ibv_qp_ex *ex;
	struct ibv_qp *qp;

	atomics_end(lengths, 2, IBV_WC_LOC_LEN_ERR);
	qp = ready(IBV_QPT_RC);
	ex = ibv_qp_to_qp_ex(qp);
	ibv_wr_start(ex);
	ex->wr_id = 5;
	ibv_wr_atomic_fetch_add(ex, mr->rkey, (uintptr_t)&memory[64], 1);
	ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, 16);
	MUST(!ibv_wr_complete(ex));
	ENDS(cq, 5, IBV_WC_LOC_LEN_ERR);
	MUST(!ibv_destroy_qp(qp));
}

static void atomic_ends(enum ibv_wr_opcode opcode, int offset, uint32_t key, enum ibv_wc_status how)
{
	struct ibv_sge word = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_qp *peer, *qp = ready_with(&peer);

	MUST(!post(qp, remote(opcode, (uintptr_t)&memory[64] + offset, key), &word, 1));
	ENDS(cq, 1, how);
	MUST(!ibv_destroy_qp(qp) && !ibv_destroy_qp(peer));
}

static void atomics_need_a_key(void)
{
	for (int i = 0; i < 2; i++)
		atomic_ends(atomics[i], 0, mr->rkey ^ 0x100, IBV_WC_REM_ACCESS_ERR);
}

/* The word's place is looked at before its key. */
static void alignment_goes_before_the_key(void)
{
	for (int i = 0; i < 2; i++) {
		atomic_ends(atomics[i], 4, mr->rkey, IBV_WC_REM_INV_REQ_ERR);
		atomic_ends(atomics[i], 4, mr->rkey ^ 0x100, IBV_WC_REM_INV_REQ_ERR);
	}
}

static void a_refused_write_with_immediate_ends_its_receive(void)
{
	struct ibv_sge sge = { (uintptr_t)memory, 64, mr->lkey };
	struct ibv_qp *peer, *qp = ready_with(&peer);

	receive(peer, 10);
	receive(peer, 11);
	MUST(!post(qp, remote(IBV_WR_RDMA_WRITE_WITH_IMM, (uintptr_t)&memory[64], mr->rkey ^ 0x100), &sge, 1));
	ENDS(cq, 1, IBV_WC_REM_ACCESS_ERR);
	ENDS(receives, 10, IBV_WC_LOC_ACCESS_ERR);
	ENDS(receives, 11, IBV_WC_WR_FLUSH_ERR);
	MUST(!ibv_destroy_qp(qp) && !ibv_destroy_qp(peer));
}

static void sends_again(struct ibv_qp *qp)
{
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 3, .opcode = IBV_WR_SEND };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS };

	if (qp->qp_type == IBV_QPT_UD)
		wr.wr.ud = (typeof(wr.wr.ud)){ way, qp->qp_num, 7 };
	MUST(!post(qp, wr, &sge, 1));
	ENDS(cq, 3, IBV_WC_WR_FLUSH_ERR);
	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	receive(qp, 10);
	MUST(!post(qp, wr, &sge, 1));
	ENDS(cq, 3, IBV_WC_SUCCESS);
	ENDS(receives, 10, IBV_WC_SUCCESS);
}

static struct ibv_qp *fails_in_its_turn(enum ibv_qp_type type, enum ibv_wr_opcode opcode)
{
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_qp *qp = ready(type);

	MUST(!post(qp, remote(opcode, 0x10, mr->rkey), &sge, opcode != IBV_WR_LOCAL_INV));
	ENDS(cq, 1, IBV_WC_LOC_QP_OP_ERR);
	return qp;
}

static const enum ibv_wr_opcode uc_lacks[] = { IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD,
					       IBV_WR_SEND_WITH_INV };

/* What a service lacks is taken when it is posted. */
static void what_uc_lacks_fails_in_its_turn(void)
{
	for (int i = 0; i < COUNT(uc_lacks); i++)
		MUST(!ibv_destroy_qp(fails_in_its_turn(IBV_QPT_UC, uc_lacks[i])));
}

static void what_fails_stops_the_sends_of_uc_alone(void)
{
	for (int i = 0; i < COUNT(uc_lacks); i++) {
		struct ibv_qp *qp = fails_in_its_turn(IBV_QPT_UC, uc_lacks[i]);

		MUST(state(qp) == IBV_QPS_SQE);
		sends_again(qp);
		MUST(!ibv_destroy_qp(qp));
	}
}

/* No pointer of a datagram is looked for where the operation has an address. */
static void what_ud_lacks_fails_in_its_turn(void)
{
	static const enum ibv_wr_opcode lacks[] = { IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ,
						    IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD,
						    IBV_WR_SEND_WITH_INV, IBV_WR_LOCAL_INV };

	for (int i = 0; i < COUNT(lacks); i++) {
		struct ibv_qp *qp = fails_in_its_turn(IBV_QPT_UD, lacks[i]);

		MUST(state(qp) == IBV_QPS_SQE);
		sends_again(qp);
		MUST(!ibv_destroy_qp(qp));
	}
}

static struct ibv_send_wr binding(struct ibv_mw *mw, struct ibv_mr *region, int at, int length, int rights)
{
	return (struct ibv_send_wr){ .wr_id = 1, .opcode = IBV_WR_BIND_MW,
				     .bind_mw = { mw, ibv_inc_rkey(mw->rkey),
						  { region, (uintptr_t)&memory[at], length, rights } } };
}

/* Sets the window's key, which not every library does. */
static void bind(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mr *region, int at, int length, int rights)
{
	struct ibv_send_wr wr = binding(mw, region, at, length, rights);

	MUST(!post(qp, wr, NULL, 0));
	ENDS(cq, 1, IBV_WC_SUCCESS);
	mw->rkey = wr.bind_mw.rkey;
}

static void invalidate(struct ibv_qp *qp, uint32_t key, enum ibv_wc_status how)
{
	struct ibv_send_wr wr = { .wr_id = 2, .opcode = IBV_WR_LOCAL_INV, .invalidate_rkey = key };

	MUST(!post(qp, wr, NULL, 0));
	ENDS(cq, 2, how);
}

static void writes(struct ibv_qp *qp, uint32_t key, uint64_t addr, int length, enum ibv_wc_status how)
{
	struct ibv_sge sge = { (uintptr_t)memory, length, mr->lkey };

	MUST(!post(qp, remote(IBV_WR_RDMA_WRITE, addr, key), &sge, 1));
	ENDS(cq, 1, how);
}

static struct ibv_mr *bindable(void)
{
	struct ibv_mr *region = ibv_reg_mr(pd, memory, sizeof(memory), RIGHTS | IBV_ACCESS_MW_BIND);

	MUST(region);
	return region;
}

#define OPEN (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ)

static struct ibv_mw *window(void)
{
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);

	MUST(mw);
	return mw;
}

/* What the window's structure says when posting returns. If the binding fails later, the program puts the old key back. */
static void keys_are_those_of_what_was_posted(void)
{
	struct ibv_mr *region = bindable();
	struct ibv_qp *qp = ready(IBV_QPT_RC);
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
	struct ibv_mw *a = window(), *b = window();
	struct ibv_mw_bind_info info = { region, (uintptr_t)memory, 64, OPEN };
	uint32_t old = b->rkey, key = ibv_inc_rkey(a->rkey);

	MUST(!post(qp, binding(a, region, 0, 64, OPEN), NULL, 0));
	MUST(a->rkey == key);
	ENDS(cq, 1, IBV_WC_SUCCESS);
	ibv_wr_start(ex);
	ex->wr_id = 7;
	ibv_wr_bind_mw(ex, b, ibv_inc_rkey(old), &info);
	MUST(b->rkey == old);
	MUST(!ibv_wr_complete(ex));
	MUST(b->rkey == ibv_inc_rkey(old));
	ENDS(cq, 7, IBV_WC_SUCCESS);
	invalidate(qp, b->rkey, IBV_WC_SUCCESS);
	old = b->rkey;
	MUST(!post(qp, binding(b, region, 0, 1 << 20, OPEN), NULL, 0));
	MUST(b->rkey == ibv_inc_rkey(old));
	ENDS(cq, 1, IBV_WC_MW_BIND_ERR);
	MUST(!ibv_dealloc_mw(a) && !ibv_dealloc_mw(b) && !ibv_dereg_mr(region) && !ibv_destroy_qp(qp));
}

/* In a list, on a service without windows, in a batch that is given up. */
static void keys_of_what_was_not_posted_stay(void)
{
	struct ibv_mr *region = bindable();
	struct ibv_qp *qp = ready(IBV_QPT_RC), *ud = ready(IBV_QPT_UD);
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
	struct ibv_mw *mw[3] = { window(), window(), window() };
	struct ibv_mw_bind_info info = { region, (uintptr_t)memory, 64, OPEN };
	struct ibv_sge elements[3] = { { 0 } };
	struct ibv_send_wr list[3], *bad;
	uint32_t keys[3];

	for (int i = 0; i < 3; i++) {
		list[i] = binding(mw[i], region, 0, 64, OPEN);
		list[i].next = i < 2 ? &list[i + 1] : NULL;
		keys[i] = mw[i]->rkey;
	}
	/* Too many elements. */
	list[1].sg_list = elements;
	list[1].num_sge = 3;
	MUST(ibv_post_send(qp, list, &bad) == EINVAL && bad == &list[1]);
	MUST(mw[1]->rkey == keys[1] && mw[2]->rkey == keys[2]);
	ENDS(cq, 1, IBV_WC_SUCCESS);
	MUST(post(ud, binding(mw[1], region, 0, 64, OPEN), NULL, 0) == EINVAL && mw[1]->rkey == keys[1]);
	ibv_wr_start(ex);
	ibv_wr_bind_mw(ex, mw[2], ibv_inc_rkey(keys[2]), &info);
	ibv_wr_abort(ex);
	MUST(mw[2]->rkey == keys[2]);
	for (int i = 0; i < 3; i++)
		MUST(!ibv_dealloc_mw(mw[i]));
	MUST(!ibv_dereg_mr(region) && !ibv_destroy_qp(qp) && !ibv_destroy_qp(ud));
}

/* Until it is taken back by the peer, and bound again elsewhere: then the old key is nothing. */
static void windows_open_memory_until_they_are_taken_back(void)
{
	struct ibv_mr *region = bindable();
	struct ibv_qp *peer, *qp = ready_with(&peer);
	struct ibv_mw *mw = window();
	uint64_t at = (uintptr_t)&memory[64];
	struct ibv_send_wr wr = { .wr_id = 4, .opcode = IBV_WR_SEND_WITH_INV };
	uint32_t key;

	bind(peer, mw, region, 64, 64, OPEN);
	key = mw->rkey;
	writes(qp, key, at, 64, IBV_WC_SUCCESS);
	receive(peer, 11);
	wr.invalidate_rkey = key;
	MUST(!post(qp, wr, NULL, 0));
	ENDS(cq, 4, IBV_WC_SUCCESS);
	ENDS(receives, 11, IBV_WC_SUCCESS);
	bind(peer, mw, region, 128, 64, OPEN);
	writes(qp, mw->rkey, (uintptr_t)&memory[128], 64, IBV_WC_SUCCESS);
	writes(qp, key, at, 8, IBV_WC_REM_ACCESS_ERR);
	MUST(!ibv_dealloc_mw(mw) && !ibv_dereg_mr(region) && !ibv_destroy_qp(qp) && !ibv_destroy_qp(peer));
}

static void receives_tell_which_window_was_taken_back(void)
{
	struct ibv_mr *region = bindable();
	struct ibv_qp *qp = ready(IBV_QPT_RC);
	struct ibv_mw *mw = window();
	struct ibv_send_wr wr = { .wr_id = 4, .opcode = IBV_WR_SEND_WITH_INV };
	struct ibv_wc wc;

	bind(qp, mw, region, 64, 64, OPEN);
	receive(qp, 11);
	wr.invalidate_rkey = mw->rkey;
	MUST(!post(qp, wr, NULL, 0));
	ENDS(cq, 4, IBV_WC_SUCCESS);
	wc = next(receives);
	MUST(wc.status == IBV_WC_SUCCESS && wc.wc_flags & IBV_WC_WITH_INV && wc.invalidated_rkey == mw->rkey);
	MUST(!ibv_dealloc_mw(mw) && !ibv_dereg_mr(region) && !ibv_destroy_qp(qp));
}

static void regions_beneath_windows_are_in_use(void)
{
	struct ibv_mr *region = bindable();
	struct ibv_qp *peer, *qp = ready_with(&peer);
	struct ibv_mw *mw = window();

	bind(peer, mw, region, 64, 64, OPEN);
	MUST(ibv_dereg_mr(region) == EBUSY);
	writes(qp, mw->rkey, (uintptr_t)&memory[64], 64, IBV_WC_SUCCESS);
	MUST(!ibv_dealloc_mw(mw) && !ibv_dereg_mr(region) && !ibv_destroy_qp(qp) && !ibv_destroy_qp(peer));
}

/* Another queue pair of the domain can't use the key. */
static void windows_are_their_queue_pairs(void)
{
	struct ibv_mr *region = bindable();
	struct ibv_qp *qp = ready(IBV_QPT_RC), *others, *other = ready_with(&others);
	struct ibv_mw *mw = window();

	bind(qp, mw, region, 64, 64, OPEN);
	writes(other, mw->rkey, (uintptr_t)&memory[64], 8, IBV_WC_REM_ACCESS_ERR);
	writes(qp, mw->rkey, (uintptr_t)&memory[64], 8, IBV_WC_SUCCESS);
	MUST(!ibv_dealloc_mw(mw) && !ibv_dereg_mr(region));
	MUST(!ibv_destroy_qp(qp) && !ibv_destroy_qp(other) && !ibv_destroy_qp(others));
}

/* Nor take it back, itself or asked by its peer. */
static void others_do_not_take_windows_back(void)
{
	struct ibv_mr *region = bindable();
	struct ibv_qp *qp = ready(IBV_QPT_RC), *other = ready(IBV_QPT_RC);
	struct ibv_mw *mw = window();

	bind(qp, mw, region, 64, 64, OPEN);
	invalidate(other, mw->rkey, IBV_WC_LOC_QP_OP_ERR);
	writes(qp, mw->rkey, (uintptr_t)&memory[64], 8, IBV_WC_SUCCESS);
	MUST(!ibv_dealloc_mw(mw) && !ibv_dereg_mr(region) && !ibv_destroy_qp(qp) && !ibv_destroy_qp(other));
}

static void others_are_not_asked_to_take_windows_back(void)
{
	struct ibv_mr *region = bindable();
	struct ibv_qp *qp = ready(IBV_QPT_RC), *others, *other = ready_with(&others);
	struct ibv_mw *mw = window();
	struct ibv_send_wr wr = { .wr_id = 4, .opcode = IBV_WR_SEND_WITH_INV };

	bind(qp, mw, region, 64, 64, OPEN);
	receive(others, 10);
	wr.invalidate_rkey = mw->rkey;
	MUST(!post(other, wr, NULL, 0));
	ENDS(cq, 4, IBV_WC_SUCCESS);
	ENDS(receives, 10, IBV_WC_REM_INV_REQ_ERR);
	writes(qp, mw->rkey, (uintptr_t)&memory[64], 8, IBV_WC_SUCCESS);
	MUST(!ibv_dealloc_mw(mw) && !ibv_dereg_mr(region));
	MUST(!ibv_destroy_qp(qp) && !ibv_destroy_qp(other) && !ibv_destroy_qp(others));
}

static void windows_are_bound_once_at_a_time(void)
{
	struct ibv_mr *region = bindable();
	struct ibv_qp *qp = ready(IBV_QPT_RC);
	struct ibv_mw *mw = window();

	bind(qp, mw, region, 0, 64, OPEN);
	invalidate(qp, mw->rkey, IBV_WC_SUCCESS);
	bind(qp, mw, region, 0, 64, OPEN);
	MUST(!post(qp, binding(mw, region, 0, 64, OPEN), NULL, 0));
	ENDS(cq, 1, IBV_WC_MW_BIND_ERR);
	MUST(!ibv_dealloc_mw(mw) && !ibv_dereg_mr(region) && !ibv_destroy_qp(qp));
}

static void windows_end_with_their_queue_pair(void)
{
	struct ibv_mr *region = bindable();
	struct ibv_qp *qp = ready(IBV_QPT_RC);
	struct ibv_mw *mw = window();

	bind(qp, mw, region, 0, 64, OPEN);
	MUST(!ibv_destroy_qp(qp) && !ibv_dereg_mr(region) && !ibv_dealloc_mw(mw));
}

/* Through a window on the second 64 bytes of the memory. What succeeds is written there, and nothing elsewhere. */
static void through_a_window(int rights, uint64_t at, int length, enum ibv_wc_status how)
{
	uint64_t start = rights & IBV_ACCESS_ZERO_BASED ? 0 : (uintptr_t)&memory[64];
	unsigned char *open = (unsigned char *)&memory[64];
	struct ibv_mr *region = bindable();
	struct ibv_qp *peer, *qp = ready_with(&peer);
	struct ibv_mw *mw = window();

	memset(memory, 0, sizeof(memory));
	memset(memory, 0xa5, 128);
	bind(peer, mw, region, 64, 64, OPEN | rights);
	writes(qp, mw->rkey, start + at, length, how);
	for (int n = -64; n < 128; n++) {
		int inside = how == IBV_WC_SUCCESS && n >= (int)at && n < (int)at + length;

		MUST(open[n] == (inside ? 0xa5 : 0));
	}
	MUST(!ibv_dealloc_mw(mw) && !ibv_dereg_mr(region) && !ibv_destroy_qp(qp) && !ibv_destroy_qp(peer));
}

static void zero_based_windows_count_from_their_start(void)
{
	for (int rights = 0; rights <= IBV_ACCESS_ZERO_BASED; rights += IBV_ACCESS_ZERO_BASED) {
		through_a_window(rights, 0, 64, IBV_WC_SUCCESS);
		through_a_window(rights, 63, 1, IBV_WC_SUCCESS);
	}
	through_a_window(IBV_ACCESS_ZERO_BASED, (uintptr_t)&memory[64], 8, IBV_WC_REM_ACCESS_ERR);
}

static void windows_open_their_range_and_no_more(void)
{
	for (int rights = 0; rights <= IBV_ACCESS_ZERO_BASED; rights += IBV_ACCESS_ZERO_BASED) {
		through_a_window(rights, 0, 65, IBV_WC_REM_ACCESS_ERR);
		through_a_window(rights, 64, 1, IBV_WC_REM_ACCESS_ERR);
		through_a_window(rights, ~0ULL - 3, 8, IBV_WC_REM_ACCESS_ERR);
	}
}

static void begin(void)
{
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64 } };

	set_up();
	MUST(mr = ibv_reg_mr(pd, memory, sizeof(memory), RIGHTS));
	MUST(receives = ibv_create_cq(context, 64, NULL, NULL, 0));
	to.grh.dgid = own;
	to.grh.sgid_index = own_index;
	MUST(way = ibv_create_ah(pd, &to));
}

static void end(void)
{
	MUST(!ibv_destroy_ah(way) && !ibv_dereg_mr(mr) && !ibv_destroy_cq(receives));
	tear_down("work requests end as on hardware");
}

int main(int argc, char **argv)
{
	static const struct check checks[] = {
		CHECK(atomics_of_eight_bytes_may_be_scattered),
		CHECK(atomics_of_less_than_eight_bytes_fail),
		CHECK(atomics_of_more_than_eight_bytes_fail),
		CHECK(atomics_need_a_key),
		CHECK(alignment_goes_before_the_key),
		CHECK(a_refused_write_with_immediate_ends_its_receive),
		CHECK(what_uc_lacks_fails_in_its_turn),
		CHECK(what_fails_stops_the_sends_of_uc_alone),
		CHECK(what_ud_lacks_fails_in_its_turn),
		CHECK(keys_are_those_of_what_was_posted),
		CHECK(keys_of_what_was_not_posted_stay),
		CHECK(windows_open_memory_until_they_are_taken_back),
		CHECK(receives_tell_which_window_was_taken_back),
		CHECK(regions_beneath_windows_are_in_use),
		CHECK(windows_are_their_queue_pairs),
		CHECK(others_do_not_take_windows_back),
		CHECK(others_are_not_asked_to_take_windows_back),
		CHECK(windows_are_bound_once_at_a_time),
		CHECK(windows_end_with_their_queue_pair),
		CHECK(zero_based_windows_count_from_their_start),
		CHECK(windows_open_their_range_and_no_more),
	};

	return run(each(argv), checks, COUNT(checks), begin, end);
}
