/*
 * What ibv_query_device, ibv_query_device_ex and ibv_query_port say is true: so much works, and no more.
 *
 *     limits [--each [BUT …]]
 */
#include "common.h"

#include <stddef.h>

#define RIGHTS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND)
/* How many objects of a kind are made in a test. */
#define CHEAP 0x10000

static unsigned char memory[8192];
static struct ibv_mr *mr;

static struct ibv_qp_init_attr sizes(enum ibv_qp_type type)
{
	return (struct ibv_qp_init_attr){ .send_cq = cq, .recv_cq = cq, .qp_type = type,
					  .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1,
						   .max_recv_sge = 1 } };
}

static struct ibv_qp *initialized(struct ibv_qp_init_attr *init)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7, .qp_access_flags = RIGHTS & 7 };
	struct ibv_qp *qp = ibv_create_qp(pd, init);
	int own_mask = init->qp_type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS;

	MUST(qp && !ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | own_mask));
	return qp;
}

static int to_rtr(struct ibv_qp *qp, int reads)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_256, .dest_qp_num = qp->qp_num,
				    .max_dest_rd_atomic = reads,
				    .ah_attr = { .is_global = 1, .port_num = 1,
						 .grh = { .dgid = own, .sgid_index = own_index, .hop_limit = 64 } } };

	return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

static int to_rts(struct ibv_qp *qp, int reads)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
				    .max_rd_atomic = reads };

	return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
					IBV_QP_MAX_QP_RD_ATOMIC);
}

/* Connected with itself. */
static struct ibv_qp *connected(struct ibv_qp_init_attr *init)
{
	struct ibv_qp *qp = initialized(init);

	MUST(!to_rtr(qp, 1) && !to_rts(qp, 1));
	return qp;
}

static void complete_with(enum ibv_wc_status status, int count)
{
	time_t end = time(NULL) + 60;
	struct ibv_wc wc;

	while (count) {
		int got = ibv_poll_cq(cq, 1, &wc);

		MUST(got >= 0 && time(NULL) < end);
		MUST(!got || wc.status == status);
		count -= got;
	}
}

static void complete(int count)
{
	complete_with(IBV_WC_SUCCESS, count);
}

static struct ibv_qp *refused(enum ibv_qp_type type)
{
	struct ibv_qp_init_attr init = sizes(type);

	return ibv_create_qp(pd, &init);
}

/* max_qp_wr, as many as were granted. Returns what one more does. */
static int fill_receives(int asked)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_recv_wr wr = { 0 }, *bad = NULL;
	struct ibv_qp *qp;
	int more;

	init.cap.max_recv_wr = asked;
	qp = initialized(&init);
	MUST(init.cap.max_recv_wr >= (unsigned)asked);
	for (unsigned i = 0; i < init.cap.max_recv_wr; i++)
		MUST(!ibv_post_recv(qp, &wr, &bad));
	more = ibv_post_recv(qp, &wr, &bad);
	MUST(!more || bad == &wr);
	MUST(!ibv_destroy_qp(qp));
	return more;
}

static void receive_queues_are_as_long_as_granted(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);

	fill_receives(limits.max_qp_wr);
	init.cap.max_recv_wr = limits.max_qp_wr + 1;
	MUST(!ibv_create_qp(pd, &init) && errno == EINVAL);
}

static void receive_queues_are_no_longer_than_granted(void)
{
	MUST(fill_receives(4) == ENOMEM);
	MUST(fill_receives(limits.max_qp_wr) == ENOMEM);
}

/* The first waits for a receive, and all others for it. */
static int fill_sends(int asked)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND }, *bad = NULL;
	struct ibv_qp *qp;
	int more;

	init.cap.max_send_wr = asked;
	qp = initialized(&init);
	MUST(init.cap.max_send_wr >= (unsigned)asked);
	MUST(!to_rtr(qp, 1) && !to_rts(qp, 1));
	for (unsigned i = 0; i < init.cap.max_send_wr; i++)
		MUST(!ibv_post_send(qp, &wr, &bad));
	more = ibv_post_send(qp, &wr, &bad);
	MUST(!more || bad == &wr);
	MUST(!ibv_destroy_qp(qp));
	return more;
}

static void send_queues_are_as_long_as_granted(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);

	fill_sends(limits.max_qp_wr);
	init.cap.max_send_wr = limits.max_qp_wr + 1;
	MUST(!ibv_create_qp(pd, &init) && errno == EINVAL);
}

static void send_queues_are_no_longer_than_granted(void)
{
	MUST(fill_sends(4) == ENOMEM);
	MUST(fill_sends(limits.max_qp_wr) == ENOMEM);
}

/* The elements of a list, each of one byte, from the end of the first half of the memory backwards. */
static void list(struct ibv_sge *sges, int count)
{
	for (int i = 0; i < count; i++)
		sges[i] = (struct ibv_sge){ (uintptr_t)memory + 2 * i, 1, mr->lkey };
}

static void fill(int count)
{
	memset(memory, 0, sizeof(memory));
	for (int i = 0; i < count; i++)
		memory[2 * i] = i + 1;
}

/* max_sge and max_sge_rd. */
static void lists_are_as_long_as_promised(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_sge sges[256];
	struct ibv_send_wr wr = { .sg_list = sges, .num_sge = limits.max_sge, .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_SIGNALED, .wr.rdma = { (uintptr_t)memory + 4096, mr->rkey } }, *bad;
	struct ibv_qp *qp;

	MUST(limits.max_sge <= 256 && limits.max_sge_rd > 0 && limits.max_sge_rd <= limits.max_sge);
	init.cap.max_send_sge = init.cap.max_recv_sge = limits.max_sge;
	qp = connected(&init);
	list(sges, limits.max_sge);
	fill(limits.max_sge);
	MUST(!ibv_post_send(qp, &wr, &bad));
	complete(1);
	for (int i = 0; i < limits.max_sge; i++)
		MUST(memory[4096 + i] == i + 1);
	memset(memory, 0, 4096);
	wr.opcode = IBV_WR_RDMA_READ;
	wr.num_sge = limits.max_sge_rd;
	MUST(!ibv_post_send(qp, &wr, &bad));
	complete(1);
	for (int i = 0; i < limits.max_sge_rd; i++)
		MUST(memory[2 * i] == i + 1);
	MUST(!ibv_destroy_qp(qp));
	init.cap.max_send_sge = limits.max_sge + 1;
	MUST(!ibv_create_qp(pd, &init) && errno == EINVAL);
}

/* max_qp_init_rd_atom. */
static void reads_of_a_requester_are_as_many_as_promised(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_qp *qp = initialized(&init);

	MUST(!to_rtr(qp, 1));
	MUST(to_rts(qp, limits.max_qp_init_rd_atom + 1) == EINVAL);
	MUST(!to_rts(qp, limits.max_qp_init_rd_atom));
	MUST(!ibv_destroy_qp(qp));
}

/* max_qp_rd_atom. */
static void reads_of_a_responder_are_as_many_as_promised(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_qp *qp = initialized(&init);

	MUST(!to_rtr(qp, limits.max_qp_rd_atom));
	MUST(!ibv_destroy_qp(qp));
}

static void reads_of_a_responder_are_no_more_than_promised(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_qp *qp = initialized(&init);

	MUST(to_rtr(qp, limits.max_qp_rd_atom + 1) == EINVAL);
	MUST(!ibv_destroy_qp(qp));
}

/* max_res_rd_atom: each queue pair has as many as it asks for, whatever the others have. */
static void reads_of_all_responders_are_those_of_each(void)
{
	MUST(limits.max_res_rd_atom == limits.max_qp * limits.max_qp_rd_atom);
}

/* max_cqe. */
static void completion_queues_are_as_long_as_promised(void)
{
	struct ibv_cq *longest = ibv_create_cq(context, limits.max_cqe, NULL, NULL, 0), *other;

	MUST(longest && longest->cqe >= limits.max_cqe);
	MUST(!ibv_create_cq(context, limits.max_cqe + 1, NULL, NULL, 0) && errno == EINVAL);
	MUST(other = ibv_create_cq(context, 1, NULL, NULL, 0));
	MUST(!ibv_resize_cq(other, limits.max_cqe) && other->cqe >= limits.max_cqe);
	MUST(ibv_resize_cq(other, limits.max_cqe + 1) == EINVAL);
	MUST(!ibv_destroy_cq(longest) && !ibv_destroy_cq(other));
}

/* max_srq_wr, as many as were granted. Returns what one more does. */
static int fill_shared(int asked)
{
	struct ibv_srq_init_attr how = { .attr = { .max_wr = asked, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &how);
	struct ibv_recv_wr wr = { 0 }, *bad = NULL;
	int more;

	MUST(srq && how.attr.max_wr >= (unsigned)asked);
	for (unsigned i = 0; i < how.attr.max_wr; i++)
		MUST(!ibv_post_srq_recv(srq, &wr, &bad));
	more = ibv_post_srq_recv(srq, &wr, &bad);
	MUST(!more || bad == &wr);
	MUST(!ibv_destroy_srq(srq));
	return more;
}

static void shared_queues_are_as_long_as_promised(void)
{
	struct ibv_srq_init_attr how = { .attr = { .max_wr = limits.max_srq_wr + 1, .max_sge = 1 } };

	fill_shared(limits.max_srq_wr);
	MUST(!ibv_create_srq(pd, &how) && errno == EINVAL);
}

static void shared_queues_are_no_longer_than_granted(void)
{
	MUST(fill_shared(4) == ENOMEM);
	MUST(fill_shared(limits.max_srq_wr) == ENOMEM);
}

/* IBV_DEVICE_SRQ_RESIZE. */
static void shared_queues_grow_as_promised(void)
{
	struct ibv_srq_init_attr how = { .attr = { .max_wr = 1, .max_sge = 1 } };
	struct ibv_srq_attr attr = { .max_wr = limits.max_srq_wr + 1 };
	struct ibv_srq *srq = ibv_create_srq(pd, &how);

	MUST(srq);
	MUST(ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR) == EINVAL);
	attr.max_wr = limits.max_srq_wr;
	MUST(!ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR));
	MUST(!ibv_query_srq(srq, &attr) && attr.max_wr >= (unsigned)limits.max_srq_wr);
	MUST(!ibv_destroy_srq(srq));
}

/* max_srq_sge. */
static void lists_of_shared_receives_are_as_long_as_promised(void)
{
	struct ibv_srq_init_attr how = { .attr = { .max_wr = 1, .max_sge = limits.max_srq_sge } };
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_sge sges[256], out = { (uintptr_t)memory + 4096, limits.max_srq_sge, mr->lkey };
	struct ibv_recv_wr recv = { .sg_list = sges, .num_sge = limits.max_srq_sge }, *bad_recv;
	struct ibv_send_wr send = { .sg_list = &out, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_qp *qp;

	MUST(limits.max_srq_sge <= 256);
	MUST(init.srq = ibv_create_srq(pd, &how));
	qp = connected(&init);
	memset(memory, 0, sizeof(memory));
	for (int i = 0; i < limits.max_srq_sge; i++)
		memory[4096 + i] = i + 1;
	list(sges, limits.max_srq_sge);
	MUST(!ibv_post_srq_recv(init.srq, &recv, &bad_recv));
	MUST(!ibv_post_send(qp, &send, &bad));
	complete(2);
	for (int i = 0; i < limits.max_srq_sge; i++)
		MUST(memory[2 * i] == i + 1);
	recv.num_sge++;
	MUST(ibv_post_srq_recv(init.srq, &recv, &bad_recv) == EINVAL);
	MUST(!ibv_destroy_qp(qp) && !ibv_destroy_srq(init.srq));
	how.attr.max_sge = limits.max_srq_sge + 1;
	MUST(!ibv_create_srq(pd, &how) && errno == EINVAL);
}

/* Makes objects of a kind until there is no more, of which some are there already, and ends them. */
#define AS_MANY_AS(limit, already, type, make, end) do { \
		int count = (limit) - (already); \
		type **all = calloc(count, sizeof(*all)); \
		\
		MUST(all && (limit) <= CHEAP); \
		for (int i = 0; i < count; i++) \
			MUST(all[i] = (make)); \
		MUST(!(make) && errno == ENOMEM); \
		for (int i = 0; i < count; i++) \
			MUST(!end(all[i])); \
		free(all); \
		MUST((all = malloc(sizeof(*all))) && (*all = (make)) && !end(*all)); \
		free(all); \
	} while (0)

static void domains_are_as_many_as_promised(void)
{
	AS_MANY_AS(limits.max_pd, 1, struct ibv_pd, ibv_alloc_pd(context), ibv_dealloc_pd);
}

static void address_handles_are_as_many_as_promised(void)
{
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1,
				  .grh = { .dgid = own, .sgid_index = own_index, .hop_limit = 64 } };

	AS_MANY_AS(limits.max_ah, 0, struct ibv_ah, ibv_create_ah(pd, &to), ibv_destroy_ah);
}

static void windows_are_as_many_as_promised(void)
{
	AS_MANY_AS(limits.max_mw, 0, struct ibv_mw, ibv_alloc_mw(pd, IBV_MW_TYPE_2), ibv_dealloc_mw);
}

static void completion_queues_are_as_many_as_promised(void)
{
	AS_MANY_AS(limits.max_cq, 1, struct ibv_cq, ibv_create_cq(context, 1, NULL, NULL, 0), ibv_destroy_cq);
}

static void shared_queues_are_as_many_as_promised(void)
{
	struct ibv_srq_init_attr how = { .attr = { .max_wr = 1, .max_sge = 1 } };

	AS_MANY_AS(limits.max_srq, 0, struct ibv_srq, ibv_create_srq(pd, &how), ibv_destroy_srq);
}

static union ibv_gid group(int number)
{
	union ibv_gid gid = { .raw = { [10] = 0xff, [11] = 0xff, [12] = 239, [13] = 77, [14] = number >> 8, [15] = number } };

	return gid;
}

/* max_mcast_qp_attach. */
static void groups_are_as_large_as_promised(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_UD);
	union ibv_gid gid = group(1);
	struct ibv_qp *qps[256];
	int most = limits.max_mcast_qp_attach;

	MUST(most > 0 && most < 256);
	for (int i = 0; i <= most; i++) {
		qps[i] = initialized(&init);
		MUST(ibv_attach_mcast(qps[i], &gid, 0) == (i < most ? 0 : ENOMEM));
	}
	MUST(!ibv_detach_mcast(qps[0], &gid, 0) && !ibv_attach_mcast(qps[most], &gid, 0));
	for (int i = 1; i <= most; i++)
		MUST(!ibv_detach_mcast(qps[i], &gid, 0));
	for (int i = 0; i <= most; i++)
		MUST(!ibv_destroy_qp(qps[i]));
}

/* max_mcast_grp; a queue pair may be in all of them. */
static void groups_are_as_many_as_promised(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_UD);
	struct ibv_qp *qp = initialized(&init);
	union ibv_gid gid;

	MUST(limits.max_total_mcast_qp_attach >= limits.max_mcast_grp);
	for (int i = 0; i <= limits.max_mcast_grp; i++) {
		gid = group(i);
		MUST(ibv_attach_mcast(qp, &gid, 0) == (i < limits.max_mcast_grp ? 0 : ENOMEM));
	}
	for (int i = 0; i < limits.max_mcast_grp; i++) {
		gid = group(i);
		MUST(!ibv_detach_mcast(qp, &gid, 0));
	}
	MUST(!ibv_destroy_qp(qp));
}

/* max_mr_size: more than that is refused whatever there is; that much is more than a process has. */
static void regions_are_no_longer_than_promised(void)
{
	if (limits.max_mr_size != UINT64_MAX)
		MUST(!ibv_reg_mr(pd, memory, limits.max_mr_size + 1, IBV_ACCESS_LOCAL_WRITE));
	MUST(limits.max_mr_size >= 1ull << 47);
	MUST(limits.page_size_cap & sysconf(_SC_PAGESIZE));
}

/* gid_tbl_len, pkey_tbl_len. */
static void tables_end_where_they_say(void)
{
	struct ibv_port_attr port;
	union ibv_gid gid;
	uint16_t pkey;

	MUST(!ibv_query_port(context, 1, &port) && limits.phys_port_cnt == 1);
	MUST(ibv_query_port(context, 2, &port) == EINVAL);
	MUST(!ibv_query_gid(context, 1, port.gid_tbl_len - 1, &gid));
	MUST(ibv_query_gid(context, 1, port.gid_tbl_len, &gid) == -1);
	MUST(!ibv_query_pkey(context, 1, port.pkey_tbl_len - 1, &pkey) && pkey == 0xffff);
	MUST(ibv_query_pkey(context, 1, port.pkey_tbl_len, &pkey) == -1);
}

static void partitions_end_with_their_table(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	const int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
	struct ibv_port_attr port;
	struct ibv_qp *qp;

	MUST(!ibv_query_port(context, 1, &port));
	MUST(qp = ibv_create_qp(pd, &init));
	attr.pkey_index = port.pkey_tbl_len;
	MUST(ibv_modify_qp(qp, &attr, mask) == EINVAL);
	attr.pkey_index = port.pkey_tbl_len - 1;
	MUST(!ibv_modify_qp(qp, &attr, mask));
	MUST(!ibv_destroy_qp(qp));
}

/* max_pkeys. */
static void partitions_are_as_many_as_promised(void)
{
	struct ibv_port_attr port;

	MUST(!ibv_query_port(context, 1, &port));
	MUST(limits.max_pkeys == port.pkey_tbl_len);
}

/* max_msg_sz: the list is longer than any region. */
static void messages_are_no_longer_than_promised(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_port_attr port;
	struct ibv_sge sge = { (uintptr_t)memory, 0, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .wr.rdma = { (uintptr_t)memory, mr->rkey } }, *bad;
	struct ibv_qp *qp;

	MUST(!ibv_query_port(context, 1, &port));
	qp = connected(&init);
	sge.length = port.max_msg_sz + 1;
	MUST(ibv_post_send(qp, &wr, &bad) == EINVAL);
	MUST(!ibv_destroy_qp(qp));
}

/* That much can be posted; what is wrong is the range. */
static void messages_are_as_long_as_promised(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_port_attr port;
	struct ibv_sge sge = { (uintptr_t)memory, 0, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .wr.rdma = { (uintptr_t)memory, mr->rkey } }, *bad;
	struct ibv_qp *qp;

	MUST(!ibv_query_port(context, 1, &port));
	qp = connected(&init);
	sge.length = port.max_msg_sz;
	MUST(!ibv_post_send(qp, &wr, &bad));
	complete_with(IBV_WC_LOC_PROT_ERR, 1);
	MUST(!ibv_destroy_qp(qp));
}

static struct ibv_device_attr_ex extended(void)
{
	struct ibv_device_attr_ex attr;

	MUST(!ibv_query_device_ex(context, NULL, &attr));
	MUST(!memcmp(&attr.orig_attr, &limits, offsetof(struct ibv_device_attr, phys_port_cnt) + 1));
	MUST((uint32_t)attr.device_cap_flags_ex == limits.device_cap_flags && attr.phys_port_cnt_ex == limits.phys_port_cnt);
	return attr;
}

#define CAN(flag) MUST(limits.device_cap_flags & (flag))
#define CANNOT(flag) MUST(!(limits.device_cap_flags & (flag)))

/* Until the send queue has drained there is nothing to be modified. */
static void drain(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_SQD };
	struct ibv_qp_init_attr init;
	time_t end = time(NULL) + 60;

	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	do
		MUST(!ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_SQD && time(NULL) < end);
	while (attr.sq_draining);
}

/* IBV_DEVICE_CHANGE_PHY_PORT. */
static void ports_are_modified_as_promised(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_qp *qp = connected(&init);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_SQD, .port_num = 1 };

	drain(qp);
	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PORT));
	attr.port_num = 2;
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PORT) == EINVAL);
	MUST(!ibv_destroy_qp(qp));
	CAN(IBV_DEVICE_CHANGE_PHY_PORT);
}

/* IBV_DEVICE_CURR_QP_STATE_MOD. */
static void states_are_modified_as_promised(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_qp *qp = connected(&init);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS, .cur_qp_state = IBV_QPS_RTS, .min_rnr_timer = 3 };

	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_CUR_STATE | IBV_QP_MIN_RNR_TIMER));
	MUST(!ibv_destroy_qp(qp));
	CAN(IBV_DEVICE_CURR_QP_STATE_MOD);
}

/* IBV_DEVICE_UD_AV_PORT_ENFORCE: an address handle of another port is none. */
static void ports_of_addresses_are_enforced(void)
{
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 2,
				  .grh = { .dgid = own, .sgid_index = own_index, .hop_limit = 64 } };

	MUST(!ibv_create_ah(pd, &to) && errno == EINVAL);
	CAN(IBV_DEVICE_UD_AV_PORT_ENFORCE);
}

/* IBV_DEVICE_MEM_WINDOW and type 2B, IBV_DEVICE_MEM_MGT_EXTENSIONS. */
static void windows_are_of_the_promised_types(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_mw *one = ibv_alloc_mw(pd, IBV_MW_TYPE_1), *two = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	struct ibv_mw_bind bind = { .send_flags = IBV_SEND_SIGNALED,
				    .bind_info = { mr, (uintptr_t)memory, 64, IBV_ACCESS_REMOTE_READ } };
	struct ibv_send_wr wr = { .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_qp *qp = connected(&init);

	MUST(one && two);
	MUST(!ibv_bind_mw(qp, one, &bind));
	complete(1);
	wr.bind_mw.mw = two;
	wr.bind_mw.rkey = ibv_inc_rkey(two->rkey);
	wr.bind_mw.bind_info = bind.bind_info;
	MUST(!ibv_post_send(qp, &wr, &bad));
	complete(1);
	wr = (struct ibv_send_wr){ .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = wr.bind_mw.rkey };
	MUST(!ibv_post_send(qp, &wr, &bad));
	complete(1);
	MUST(!ibv_dealloc_mw(one) && !ibv_dealloc_mw(two) && !ibv_destroy_qp(qp));
	CAN(IBV_DEVICE_MEM_WINDOW);
	CAN(IBV_DEVICE_MEM_WINDOW_TYPE_2B);
	CAN(IBV_DEVICE_MEM_MGT_EXTENSIONS);
	CANNOT(IBV_DEVICE_MEM_WINDOW_TYPE_2A);
}

/* IBV_DEVICE_XRC. */
static void xrc_is_there_if_promised(void)
{
	struct ibv_xrcd_init_attr how = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1, .oflags = 0100 };
	struct ibv_xrcd *domain = ibv_open_xrcd(context, &how);

	MUST(!domain == !(limits.device_cap_flags & IBV_DEVICE_XRC));
	MUST(!domain || !ibv_close_xrcd(domain));
}

static void xrc_is_promised(void)
{
	CAN(IBV_DEVICE_XRC);
}

/* IBV_DEVICE_BAD_PKEY_CNTR and the like say that the numbers are there; what they count, and events, other tests show. */
static void numbers_are_there_as_promised(void)
{
	struct ibv_port_attr port;

	MUST(!ibv_query_port(context, 1, &port));
	CAN(IBV_DEVICE_BAD_PKEY_CNTR);
	CAN(IBV_DEVICE_BAD_QKEY_CNTR);
	CAN(IBV_DEVICE_PORT_ACTIVE_EVENT);
	CAN(IBV_DEVICE_SRQ_RESIZE);
	CAN(IBV_DEVICE_RC_RNR_NAK_GEN);
	CAN(IBV_DEVICE_SYS_IMAGE_GUID);
	MUST(limits.sys_image_guid && limits.node_guid);
}

/* RESIZE_MAX_WR, raw packets and more. */
static void what_is_not_promised_is_refused(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_UD);
	struct ibv_qp *qp = initialized(&init);
	struct ibv_qp_attr attr = { .cap = init.cap };
	const uint32_t never = IBV_DEVICE_RAW_MULTI | IBV_DEVICE_SHUTDOWN_PORT | IBV_DEVICE_INIT_TYPE | IBV_DEVICE_N_NOTIFY_CQ |
			       IBV_DEVICE_MANAGED_FLOW_STEERING | IBV_DEVICE_RESIZE_MAX_WR;

	CANNOT(never);
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_CAP));
	MUST(!ibv_destroy_qp(qp));
	MUST(!refused(IBV_QPT_RAW_PACKET));
}

static void checksums_are_neither_promised_nor_made(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_qp *qp = connected(&init);
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_IP_CSUM }, *bad;

	CANNOT(IBV_DEVICE_RC_IP_CSUM | IBV_DEVICE_RAW_IP_CSUM | IBV_DEVICE_UD_IP_CSUM);
	MUST(ibv_post_send(qp, &wr, &bad) == EINVAL);
	MUST(!ibv_destroy_qp(qp));
}

/* IBV_DEVICE_AUTO_PATH_MIG. */
static void alternate_paths_are_neither_promised_nor_taken(void)
{
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_qp *qp = connected(&init);
	struct ibv_qp_attr attr = { .alt_port_num = 1 };

	MUST(ibv_modify_qp(qp, &attr, IBV_QP_ALT_PATH));
	MUST(!ibv_destroy_qp(qp));
	CANNOT(IBV_DEVICE_AUTO_PATH_MIG);
}

/* Of ibv_query_device_ex: what is zero is refused. */
static void extensions_that_are_not_there_are_refused(void)
{
	struct ibv_device_attr_ex attr = extended();
	struct ibv_qp_init_attr_ex tso = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UD, .pd = pd, .max_tso_header = 64,
					   .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_MAX_TSO_HEADER };
	struct ibv_wq_init_attr wq = { .wq_type = IBV_WQT_RQ, .max_wr = 1, .max_sge = 1, .pd = pd, .cq = cq };
	struct ibv_srq_init_attr_ex tm = { .attr = { .max_wr = 1, .max_sge = 1 }, .srq_type = IBV_SRQT_TM, .pd = pd, .cq = cq,
					   .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ |
							IBV_SRQ_INIT_ATTR_TM, .tm_cap = { 8, 8 } };
	struct ibv_modify_cq_attr moderation = { .attr_mask = IBV_CQ_ATTR_MODERATE, .moderate = { 4, 4 } };
	struct ibv_qp_rate_limit_attr rate = { .rate_limit = 1000 };
	struct ibv_alloc_dm_attr dm = { .length = 64 };
	struct ibv_qp_init_attr init = sizes(IBV_QPT_RC);
	struct ibv_qp *qp = initialized(&init);

	MUST(!attr.odp_caps.general_caps && !attr.xrc_odp_caps);
	MUST(!attr.tso_caps.max_tso && !ibv_create_qp_ex(context, &tso) && errno);
	MUST(!attr.rss_caps.supported_qpts && !attr.max_wq_type_rq && !ibv_create_wq(context, &wq) && errno);
	MUST(!attr.packet_pacing_caps.supported_qpts && ibv_modify_qp_rate_limit(qp, &rate));
	MUST(!attr.raw_packet_caps);
	MUST(!attr.tm_caps.max_num_tags && !ibv_create_srq_ex(context, &tm) && errno);
	MUST(!attr.cq_mod_caps.max_cq_count && ibv_modify_cq(cq, &moderation));
	MUST(!attr.max_dm_size && !ibv_alloc_dm(context, &dm) && errno);
	MUST(!attr.pci_atomic_caps.fetch_add && !attr.pci_atomic_caps.swap && !attr.pci_atomic_caps.compare_swap);
	MUST(!ibv_destroy_qp(qp));
}

/* completion_timestamp_mask. */
static void stamps_are_there_if_promised(void)
{
	struct ibv_device_attr_ex attr = extended();
	struct ibv_cq_init_attr_ex stamped = { .cqe = 1, .wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP };
	struct ibv_cq_ex *with = ibv_create_cq_ex(context, &stamped);

	MUST(!with == !attr.completion_timestamp_mask);
	MUST(!with || !ibv_destroy_cq(ibv_cq_ex_to_cq(with)));
}

/* And hca_core_clock (kHz): the clock of ibv_query_rt_values_ex is nanoseconds. */
static void the_clock_is_as_promised(void)
{
	struct ibv_device_attr_ex attr = extended();

	MUST(attr.completion_timestamp_mask == UINT64_MAX && attr.hca_core_clock == 1000000);
}

/* IB_UVERBS_DEVICE_ATOMIC_WRITE of the kernel's headers: IBV_WR_ATOMIC_WRITE is an operation. */
static void atomic_writes_are_there_if_promised(void)
{
	struct ibv_device_attr_ex attr = extended();
	struct ibv_qp_init_attr_ex init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .pd = pd,
					    .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
					    .send_ops_flags = 1 << 12,
					    .cap = { .max_send_wr = 4, .max_send_sge = 1 } };
	struct ibv_qp *qp = ibv_create_qp_ex(context, &init);

	MUST(!qp == !(attr.device_cap_flags_ex >> 40 & 1));
	MUST(!qp || !ibv_destroy_qp(qp));
}

static void atomic_writes_are_promised(void)
{
	struct ibv_device_attr_ex attr = extended();

	MUST(attr.device_cap_flags_ex >> 32 == 1 << 8);
}

static void begin(void)
{
	set_up();
	/* How many queue pairs a process may have is known when it has made its first object. */
	MUST(!ibv_query_device(context, &limits));
	MUST(mr = ibv_reg_mr(pd, memory, sizeof(memory), RIGHTS));
}

static void end(void)
{
	MUST(!ibv_dereg_mr(mr));
	tear_down("the limits hold");
}

int main(int argc, char **argv)
{
	static const struct check checks[] = {
		CHECK(receive_queues_are_as_long_as_granted),
		CHECK(receive_queues_are_no_longer_than_granted),
		CHECK(send_queues_are_as_long_as_granted),
		CHECK(send_queues_are_no_longer_than_granted),
		CHECK(lists_are_as_long_as_promised),
		CHECK(reads_of_a_requester_are_as_many_as_promised),
		CHECK(reads_of_a_responder_are_as_many_as_promised),
		CHECK(reads_of_a_responder_are_no_more_than_promised),
		CHECK(reads_of_all_responders_are_those_of_each),
		CHECK(completion_queues_are_as_long_as_promised),
		CHECK(shared_queues_are_as_long_as_promised),
		CHECK(shared_queues_are_no_longer_than_granted),
		CHECK(shared_queues_grow_as_promised),
		CHECK(lists_of_shared_receives_are_as_long_as_promised),
		CHECK(domains_are_as_many_as_promised),
		CHECK(address_handles_are_as_many_as_promised),
		CHECK(windows_are_as_many_as_promised),
		CHECK(completion_queues_are_as_many_as_promised),
		CHECK(shared_queues_are_as_many_as_promised),
		CHECK(groups_are_as_large_as_promised),
		CHECK(groups_are_as_many_as_promised),
		CHECK(regions_are_no_longer_than_promised),
		CHECK(tables_end_where_they_say),
		CHECK(partitions_end_with_their_table),
		CHECK(partitions_are_as_many_as_promised),
		CHECK(messages_are_as_long_as_promised),
		CHECK(messages_are_no_longer_than_promised),
		CHECK(states_are_modified_as_promised),
		CHECK(ports_are_modified_as_promised),
		CHECK(ports_of_addresses_are_enforced),
		CHECK(windows_are_of_the_promised_types),
		CHECK(xrc_is_there_if_promised),
		CHECK(xrc_is_promised),
		CHECK(numbers_are_there_as_promised),
		CHECK(what_is_not_promised_is_refused),
		CHECK(checksums_are_neither_promised_nor_made),
		CHECK(alternate_paths_are_neither_promised_nor_taken),
		CHECK(extensions_that_are_not_there_are_refused),
		CHECK(stamps_are_there_if_promised),
		CHECK(the_clock_is_as_promised),
		CHECK(atomic_writes_are_there_if_promised),
		CHECK(atomic_writes_are_promised),
	};

	return run(each(argv), checks, COUNT(checks), begin, end);
}
