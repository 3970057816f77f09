/*
 * How work requests end that can be posted and can't be done, and what a memory window is between its binding and its end:
 * mostly on queue pairs that are connected with themselves.
 *
 *     posting [--each]
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

static void atomics_have_eight_bytes(void)
{
	static const int lengths[][2] = { { 0, 0 }, { 4, 0 }, { 16, 0 }, { 8, 8 }, { 3, 4 } };
	struct ibv_qp_ex *ex;
	struct ibv_qp *qp;

	for (int i = 0; i < 2; i++) {
		for (unsigned n = 0; n < sizeof(lengths) / sizeof(*lengths); n++) {
			struct ibv_sge list[2] = { { (uintptr_t)memory, lengths[n][0], mr->lkey },
						   { (uintptr_t)&memory[8], lengths[n][1], mr->lkey } };

			qp = ready(IBV_QPT_RC);
			MUST(!post(qp, remote(atomics[i], (uintptr_t)&memory[64], mr->rkey), list, lengths[n][1] ? 2 : !!lengths[n][0]));
			ENDS(cq, 1, IBV_WC_LOC_LEN_ERR);
			MUST(state(qp) == IBV_QPS_ERR && !ibv_destroy_qp(qp));
		}
		struct ibv_sge halves[2] = { { (uintptr_t)memory, 4, mr->lkey }, { (uintptr_t)&memory[8], 4, mr->lkey } };

		qp = ready(IBV_QPT_RC);
		MUST(!post(qp, remote(atomics[i], (uintptr_t)&memory[64], mr->rkey), halves, 2));
		ENDS(cq, 1, IBV_WC_SUCCESS);
		MUST(!ibv_destroy_qp(qp));
	}
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

/* The word's place is looked at before its key. */
static void alignment_goes_before_the_key(void)
{
	struct ibv_sge word = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_qp *qp, *peer;

	for (int i = 0; i < 2; i++) {
		for (int bad = 0; bad < 2; bad++) {
			qp = ready_with(&peer);
			MUST(!post(qp, remote(atomics[i], (uintptr_t)&memory[64] + 4, mr->rkey ^ (bad << 8)), &word, 1));
			ENDS(cq, 1, IBV_WC_REM_INV_REQ_ERR);
			MUST(!ibv_destroy_qp(qp) && !ibv_destroy_qp(peer));
			qp = ready_with(&peer);
			MUST(!post(qp, remote(atomics[i], (uintptr_t)&memory[64], mr->rkey ^ 0x100), &word, 1));
			ENDS(cq, 1, IBV_WC_REM_ACCESS_ERR);
			MUST(!ibv_destroy_qp(qp) && !ibv_destroy_qp(peer));
		}
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

/* Taken at posting, and no pointer of a datagram is looked for where the operation has an address. */
static void what_a_service_lacks_fails_in_its_turn(void)
{
	static const struct {
		enum ibv_qp_type type;
		enum ibv_wr_opcode opcode;
	} lacking[] = {
		{ IBV_QPT_UD, IBV_WR_RDMA_WRITE }, { IBV_QPT_UD, IBV_WR_RDMA_WRITE_WITH_IMM }, { IBV_QPT_UD, IBV_WR_RDMA_READ },
		{ IBV_QPT_UD, IBV_WR_ATOMIC_CMP_AND_SWP }, { IBV_QPT_UD, IBV_WR_ATOMIC_FETCH_AND_ADD },
		{ IBV_QPT_UD, IBV_WR_SEND_WITH_INV }, { IBV_QPT_UD, IBV_WR_LOCAL_INV }, { IBV_QPT_UC, IBV_WR_RDMA_READ },
		{ IBV_QPT_UC, IBV_WR_ATOMIC_CMP_AND_SWP }, { IBV_QPT_UC, IBV_WR_ATOMIC_FETCH_AND_ADD },
		{ IBV_QPT_UC, IBV_WR_SEND_WITH_INV },
	};
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr->lkey };

	for (unsigned i = 0; i < sizeof(lacking) / sizeof(*lacking); i++) {
		struct ibv_qp *qp = ready(lacking[i].type);

		MUST(!post(qp, remote(lacking[i].opcode, 0x10, mr->rkey), &sge, lacking[i].opcode != IBV_WR_LOCAL_INV));
		ENDS(cq, 1, IBV_WC_LOC_QP_OP_ERR);
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

static void bind(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mr *region, int at, int length, int rights)
{
	uint32_t key = ibv_inc_rkey(mw->rkey);

	MUST(!post(qp, binding(mw, region, at, length, rights), NULL, 0));
	MUST(mw->rkey == key);
	ENDS(cq, 1, IBV_WC_SUCCESS);
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

/* What the window's structure says when posting returns. */
static void keys_are_those_of_what_was_posted(void)
{
	struct ibv_mr *region = bindable();
	struct ibv_mw *a = ibv_alloc_mw(pd, IBV_MW_TYPE_2), *b = ibv_alloc_mw(pd, IBV_MW_TYPE_2), *c = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	struct ibv_mw_bind_info info = { region, (uintptr_t)memory, 64, OPEN };
	struct ibv_qp *qp = ready(IBV_QPT_RC), *ud = ready(IBV_QPT_UD);
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
	struct ibv_send_wr list[3], *bad;
	uint32_t old, keys[3];

	MUST(a && b && c);
	/* Of a list the first: the second has too many elements. */
	list[0] = binding(a, region, 0, 64, OPEN);
	list[1] = binding(b, region, 0, 64, OPEN);
	list[2] = binding(c, region, 0, 64, OPEN);
	list[0].next = &list[1];
	list[1].next = &list[2];
	list[1].num_sge = 3;
	keys[0] = ibv_inc_rkey(a->rkey), keys[1] = b->rkey, keys[2] = c->rkey;
	MUST(ibv_post_send(qp, list, &bad) && bad == &list[1]);
	MUST(a->rkey == keys[0] && b->rkey == keys[1] && c->rkey == keys[2]);
	ENDS(cq, 1, IBV_WC_SUCCESS);
	/* The extended way, given up and completed. */
	ibv_wr_start(ex);
	ex->wr_id = 7;
	ibv_wr_bind_mw(ex, b, ibv_inc_rkey(b->rkey), &info);
	MUST(b->rkey == keys[1]);
	ibv_wr_abort(ex);
	MUST(b->rkey == keys[1]);
	ibv_wr_start(ex);
	ibv_wr_bind_mw(ex, b, ibv_inc_rkey(b->rkey), &info);
	MUST(!ibv_wr_complete(ex));
	MUST(b->rkey == ibv_inc_rkey(keys[1]));
	ENDS(cq, 7, IBV_WC_SUCCESS);
	/* Services without windows. */
	old = c->rkey;
	MUST(post(ud, binding(c, region, 0, 64, OPEN), NULL, 0) == EINVAL && c->rkey == old);
	/* A binding that fails later: the program puts the old key back. */
	MUST(!post(qp, binding(c, region, 0, 1 << 20, OPEN), NULL, 0));
	MUST(c->rkey == ibv_inc_rkey(old));
	ENDS(cq, 1, IBV_WC_MW_BIND_ERR);
	MUST(!ibv_destroy_qp(qp) && !ibv_destroy_qp(ud));
	MUST(!ibv_dealloc_mw(a) && !ibv_dealloc_mw(b) && !ibv_dealloc_mw(c) && !ibv_dereg_mr(region));
}

static void windows_are_bound_and_end(void)
{
	struct ibv_mr *region = bindable();
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	struct ibv_qp *peer, *qp = ready_with(&peer), *other, *others;
	uint64_t at = (uintptr_t)&memory[64];
	struct ibv_send_wr wr = { .wr_id = 4, .opcode = IBV_WR_SEND_WITH_INV };
	struct ibv_wc wc;
	uint32_t key;

	MUST(mw);
	bind(peer, mw, region, 64, 64, OPEN);
	key = mw->rkey;
	writes(qp, key, at, 64, IBV_WC_SUCCESS);
	/* The region beneath stays. */
	MUST(ibv_dereg_mr(region) == EBUSY);
	writes(qp, key, at, 64, IBV_WC_SUCCESS);
	/* Another queue pair of the domain neither uses the key nor takes it back. */
	other = ready_with(&others);
	writes(other, key, at, 8, IBV_WC_REM_ACCESS_ERR);
	MUST(!ibv_destroy_qp(other) && !ibv_destroy_qp(others));
	other = ready(IBV_QPT_RC);
	invalidate(other, key, IBV_WC_LOC_QP_OP_ERR);
	MUST(!ibv_destroy_qp(other));
	other = ready_with(&others);
	receive(others, 10);
	wr.invalidate_rkey = key;
	MUST(!post(other, wr, NULL, 0));
	ENDS(cq, 4, IBV_WC_SUCCESS);
	ENDS(receives, 10, IBV_WC_REM_INV_REQ_ERR);
	MUST(!ibv_destroy_qp(other) && !ibv_destroy_qp(others));
	writes(qp, key, at, 8, IBV_WC_SUCCESS);
	/* Taken back by the peer, bound again elsewhere: the old key is nothing. */
	receive(peer, 11);
	MUST(!post(qp, wr, NULL, 0));
	ENDS(cq, 4, IBV_WC_SUCCESS);
	wc = next(receives);
	MUST(wc.status == IBV_WC_SUCCESS && wc.wc_flags & IBV_WC_WITH_INV && wc.invalidated_rkey == key);
	bind(peer, mw, region, 128, 64, OPEN);
	writes(qp, mw->rkey, (uintptr_t)&memory[128], 64, IBV_WC_SUCCESS);
	writes(qp, key, at, 8, IBV_WC_REM_ACCESS_ERR);
	MUST(!ibv_destroy_qp(qp) && !ibv_destroy_qp(peer));
	/* With its queue pair the binding is over. */
	MUST(!ibv_dereg_mr(region));
	/* Bound while it is bound: refused. */
	region = bindable();
	qp = ready(IBV_QPT_RC);
	bind(qp, mw, region, 0, 64, OPEN);
	invalidate(qp, mw->rkey, IBV_WC_SUCCESS);
	bind(qp, mw, region, 0, 64, OPEN);
	MUST(!post(qp, binding(mw, region, 0, 64, OPEN), NULL, 0));
	ENDS(cq, 1, IBV_WC_MW_BIND_ERR);
	MUST(ibv_dereg_mr(region) == EBUSY && !ibv_dealloc_mw(mw) && !ibv_dereg_mr(region) && !ibv_destroy_qp(qp));
}

static void zero_based_windows_count_from_their_start(void)
{
	static const struct {
		uint64_t at;
		int length;
		enum ibv_wc_status how;
	} tries[] = {
		{ 0, 64, IBV_WC_SUCCESS }, { 63, 1, IBV_WC_SUCCESS }, { 0, 65, IBV_WC_REM_ACCESS_ERR },
		{ 64, 1, IBV_WC_REM_ACCESS_ERR }, { (uintptr_t)&memory[64], 8, IBV_WC_REM_ACCESS_ERR },
		{ ~0ULL - 3, 8, IBV_WC_REM_ACCESS_ERR },
	};
	struct ibv_mr *region = bindable();

	for (unsigned i = 0; i < sizeof(tries) / sizeof(*tries); i++) {
		struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
		struct ibv_qp *peer, *qp = ready_with(&peer);

		memset(&memory[64], 0, 64);
		memset(memory, 0xa5, 64);
		bind(peer, mw, region, 64, 64, OPEN | IBV_ACCESS_ZERO_BASED);
		writes(qp, mw->rkey, tries[i].at, tries[i].length, tries[i].how);
		for (int n = 0; n < 64; n++) {
			int inside = tries[i].how == IBV_WC_SUCCESS && n >= (int)tries[i].at && n < (int)tries[i].at + tries[i].length;

			MUST(((unsigned char *)&memory[64])[n] == (inside ? 0xa5 : 0));
		}
		MUST(!ibv_dealloc_mw(mw) && !ibv_destroy_qp(qp) && !ibv_destroy_qp(peer));
	}
	MUST(!ibv_dereg_mr(region));
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
		CHECK(atomics_have_eight_bytes),
		CHECK(alignment_goes_before_the_key),
		CHECK(a_refused_write_with_immediate_ends_its_receive),
		CHECK(what_a_service_lacks_fails_in_its_turn),
		CHECK(keys_are_those_of_what_was_posted),
		CHECK(windows_are_bound_and_end),
		CHECK(zero_based_windows_count_from_their_start),
	};

	return run(EACH(argc, argv), checks, COUNT(checks), begin, end);
}
