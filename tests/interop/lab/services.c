/* What one rdma_rxe does with UD, UC, shared receive queues and a few things of RC, between queue pairs of the same device.
 *
 *   services -g IPV4-ADDRESS
 *
 * Every property is a line "ok …" or "FAILED …", in the words of ../../../specs/kernel.md; the last line says "passed" if none
 * failed.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define QKEY 0x1234
#define MTU 1024
#define SLOT 4096
/* How long what shall not come is waited for. */
#define QUIET_MS 150

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static uint8_t buf[64 * SLOT] __attribute__((aligned(4096)));
static union ibv_gid gid;
static int gid_index, port_num, good, bad;

static void must(int ok, const char *what) { if (!ok) { perror(what); printf("FAILED to set up: %s\n", what); exit(1); } }

static void property(int holds, const char *what)
{
	printf("%s %s\n", holds ? "ok" : "FAILED", what);
	if (holds) good++; else bad++;
}

struct end { struct ibv_qp *qp; struct ibv_cq *scq, *rcq; };

static struct end create(enum ibv_qp_type type, struct ibv_srq *srq)
{
	struct end e = { .scq = ibv_create_cq(ctx, 64, NULL, NULL, 0), .rcq = ibv_create_cq(ctx, 64, NULL, NULL, 0) };
	must(e.scq && e.rcq, "create_cq");
	struct ibv_qp_init_attr ia = { .send_cq = e.scq, .recv_cq = e.rcq, .srq = srq, .qp_type = type,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 4, .max_recv_sge = 4 } };
	must(!!(e.qp = ibv_create_qp(pd, &ia)), "create_qp");
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = port_num, .qkey = QKEY,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC };
	int own = type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS;
	must(!ibv_modify_qp(e.qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | own), "init");
	return e;
}

static struct ibv_ah_attr own_address(void)
{
	struct ibv_ah_attr ah = { .is_global = 1, .port_num = port_num, .grh = { .hop_limit = 64, .sgid_index = gid_index, .dgid = gid } };
	return ah;
}

/* To RTS; UD needs no more than its first PSN. */
static void start(struct end *e, struct end *to, unsigned rq_psn, unsigned sq_psn)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .rq_psn = rq_psn, .max_dest_rd_atomic = 4,
		.min_rnr_timer = 12, .dest_qp_num = to ? to->qp->qp_num : 0, .ah_attr = own_address() };
	int mask = IBV_QP_STATE, type = e->qp->qp_type;
	if (type != IBV_QPT_UD) mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	if (type == IBV_QPT_RC) mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	must(!ibv_modify_qp(e->qp, &a, mask), "rtr");
	a.qp_state = IBV_QPS_RTS; a.sq_psn = sq_psn; a.timeout = 14; a.retry_cnt = 3; a.rnr_retry = 3; a.max_rd_atomic = 4;
	mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
	if (type == IBV_QPT_RC) mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	must(!ibv_modify_qp(e->qp, &a, mask), "rts");
}

/* A sender of UC whose next packet has this PSN. */
static struct end uc_sender(struct end *to, unsigned psn)
{
	struct end e = create(IBV_QPT_UC, NULL);
	start(&e, to, 0, psn);
	return e;
}

static struct ibv_sge slot(int n, unsigned len, unsigned spoil)
{
	struct ibv_sge s = { .addr = (uintptr_t)buf + n * SLOT, .length = len, .lkey = mr->lkey + spoil };
	return s;
}

/* Receive number ID into slot ID. */
static void receive(struct end *e, struct ibv_srq *srq, int id, unsigned len)
{
	struct ibv_sge s = slot(id, len, 0);
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &s, .num_sge = 1 }, *no;
	must(!(srq ? ibv_post_srq_recv(srq, &wr, &no) : ibv_post_recv(e->qp, &wr, &no)), "post_recv");
}

/* Waits so long for a completion; its status, -1 if none comes. */
static int completion(struct ibv_cq *cq, struct ibv_wc *wc, int ms)
{
	struct timespec t0, t; clock_gettime(CLOCK_MONOTONIC, &t0);
	for (;;) {
		if (ibv_poll_cq(cq, 1, wc) > 0) return wc->status;
		clock_gettime(CLOCK_MONOTONIC, &t);
		if ((t.tv_sec - t0.tv_sec) * 1000 + (t.tv_nsec - t0.tv_nsec) / 1000000 > ms) return -1;
		usleep(1000);
	}
}

static int quiet(struct ibv_cq *cq) { struct ibv_wc wc; return completion(cq, &wc, QUIET_MS) == -1; }

/* Posts a SEND from slot 0 and waits for its completion; -2 if it can't be posted. */
static int send_wr(struct end *e, struct ibv_send_wr *wr)
{
	struct ibv_send_wr *no; struct ibv_wc wc;
	wr->send_flags |= IBV_SEND_SIGNALED;
	if (ibv_post_send(e->qp, wr, &no)) return -2;
	return completion(e->scq, &wc, 10000);
}

static int send_only(struct end *e, unsigned len, unsigned spoil)
{
	struct ibv_sge s = slot(0, len, spoil);
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND, .sg_list = &s, .num_sge = 1 };
	return send_wr(e, &wr);
}

/* The first packet of a message and no more: the second can't be read. */
static int send_first(struct end *e)
{
	struct ibv_sge s[2] = { slot(0, MTU, 0), slot(1, MTU, 0x55) };
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND, .sg_list = s, .num_sge = 2 };
	return send_wr(e, &wr);
}

static int datagram(struct end *e, struct end *to, unsigned len, unsigned qkey, unsigned spoil)
{
	static struct ibv_ah *ah;
	struct ibv_ah_attr at = own_address();
	if (!ah) must(!!(ah = ibv_create_ah(pd, &at)), "create_ah");
	struct ibv_sge s = slot(0, len, spoil);
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND, .sg_list = &s, .num_sge = 1,
		.wr.ud = { .ah = ah, .remote_qpn = to->qp->qp_num, .remote_qkey = qkey } };
	return send_wr(e, &wr);
}

static int state(struct end *e)
{
	struct ibv_qp_attr a; struct ibv_qp_init_attr ia;
	must(!ibv_query_qp(e->qp, &a, IBV_QP_STATE, &ia), "query_qp");
	return a.qp_state;
}

static struct ibv_srq *shared(void)
{
	struct ibv_srq_init_attr ia = { .attr = { .max_wr = 16, .max_sge = 2 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &ia);
	must(!!srq, "create_srq");
	return srq;
}

/* The next event of the device within so long; -1 if there is none. */
static int event(int ms)
{
	struct pollfd p = { .fd = ctx->async_fd, .events = POLLIN };
	struct ibv_async_event ev;
	if (poll(&p, 1, ms) < 1 || ibv_get_async_event(ctx, &ev)) return -1;
	int type = ev.event_type;
	ibv_ack_async_event(&ev);
	return type;
}

static void datagrams(void)
{
	struct ibv_wc wc;
	struct end a = create(IBV_QPT_UD, NULL), b = create(IBV_QPT_UD, NULL);
	start(&a, NULL, 0, 1); start(&b, NULL, 0, 1);
	receive(&b, NULL, 1, 40 + 60);
	property(datagram(&a, &b, 50, QKEY + 1, 0) == 0 && quiet(b.rcq), "UD, another Q_Key: dropped");
	int sent = datagram(&a, &b, 50, QKEY, 0), got = completion(b.rcq, &wc, 10000);
	property(sent == 0 && got == 0 && wc.wr_id == 1 && wc.byte_len == 90 && wc.src_qp == a.qp->qp_num && (wc.wc_flags & IBV_WC_GRH),
		 "UD: the right Q_Key arrives, with 40 bytes more than the message");
	const uint8_t *at = buf + SLOT;
	property(at[20] == 0x45 && at[29] == 17 && !memcmp(at + 32, gid.raw + 12, 4) && !memcmp(at + 36, gid.raw + 12, 4) &&
		 !memcmp(at + 40, buf, 50), "UD over IPv4: bytes 20 to 39 are the IPv4 header, then the message");
	receive(&b, NULL, 2, SLOT);
	property(datagram(&a, &b, 3000, QKEY, 0) == 0 && quiet(b.rcq), "UD, longer than the MTU: as if sent");

	struct end c = create(IBV_QPT_UD, NULL);
	start(&c, NULL, 0, 1);
	receive(&c, NULL, 3, 100);
	property(datagram(&a, &c, 200, QKEY, 0) == 0 && completion(c.rcq, &wc, 10000) == IBV_WC_LOC_QP_OP_ERR && wc.wr_id == 3 &&
		 state(&c) == IBV_QPS_ERR, "UD, longer than the receive: it completes with LOC_QP_OP_ERR, queue pair in ERR");
	struct ibv_srq *srq = shared();
	c = create(IBV_QPT_UD, srq);
	start(&c, NULL, 0, 1);
	receive(&c, srq, 4, 100);
	property(datagram(&a, &c, 200, QKEY, 0) == 0 && completion(c.rcq, &wc, 10000) == IBV_WC_LOC_QP_OP_ERR && wc.wr_id == 4 &&
		 state(&c) == IBV_QPS_ERR, "UD, longer than the receive of a shared queue: the same");

	struct end d = create(IBV_QPT_UD, NULL);
	start(&d, NULL, 0, 1);
	int status = datagram(&d, &b, 50, QKEY, 0x55);
	property(status > 0 && state(&d) == IBV_QPS_ERR, "UD, a send that fails: queue pair in ERR");
	struct end e = create(IBV_QPT_UD, NULL);
	start(&e, NULL, 0, 1);
	struct ibv_ah_attr address = own_address();
	struct ibv_sge s = slot(0, 50, 0);
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND_WITH_INV, .sg_list = &s, .num_sge = 1, .invalidate_rkey = 1,
		.wr.ud = { .ah = ibv_create_ah(pd, &address), .remote_qpn = b.qp->qp_num, .remote_qkey = QKEY } };
	property(send_wr(&e, &wr) > 0, "UD, SEND with invalidate: posted, then fails");
}

static void broken_messages(void)
{
	struct ibv_wc wc;
	struct end r = create(IBV_QPT_UC, NULL);
	start(&r, &r, 5, 0);
	for (int n = 1; n <= 3; n++) receive(&r, NULL, n, SLOT);
	struct end first = uc_sender(&r, 5), second = uc_sender(&r, 6), third = uc_sender(&r, 7), again = uc_sender(&r, 7);
	int broken = send_first(&first);
	property(broken > 0 && state(&first) == IBV_QPS_ERR, "UC, a send that fails: queue pair in ERR");
	property(send_only(&second, 100, 0) == 0 && quiet(r.rcq), "UC, a new message where another should go on: dropped with it");
	property(send_only(&third, 300, 0) == 0 && completion(r.rcq, &wc, 10000) == 0 && wc.wr_id == 1 && wc.byte_len == 300,
		 "UC, the message after that: taken, with the first receive");
	property(send_only(&again, 200, 0) == 0 && completion(r.rcq, &wc, 10000) == 0 && wc.wr_id == 2 && wc.byte_len == 200,
		 "UC, a message of one packet with a PSN that was there before: taken");
	struct end far = uc_sender(&r, 5000);
	property(send_only(&far, 2500, 0) == 0 && completion(r.rcq, &wc, 10000) == 0 && wc.wr_id == 3 && wc.byte_len == 2500,
		 "UC, a message that starts with any PSN: taken");

	struct end small = create(IBV_QPT_UC, NULL);
	start(&small, &small, 5, 0);
	receive(&small, NULL, 1, 50);
	struct end p = uc_sender(&small, 5);
	property(send_only(&p, 100, 0) == 0 && completion(small.rcq, &wc, 10000) == IBV_WC_LOC_QP_OP_ERR && state(&small) == IBV_QPS_ERR,
		 "UC, longer than the receive: it completes with LOC_QP_OP_ERR, queue pair in ERR");

	struct ibv_srq *srq = shared();
	struct end s = create(IBV_QPT_UC, srq);
	start(&s, &s, 5, 0);
	for (int n = 1; n <= 4; n++) receive(&s, srq, n, SLOT);
	struct end p5 = uc_sender(&s, 5), p6 = uc_sender(&s, 6), p7 = uc_sender(&s, 7);
	broken = send_first(&p5);
	property(broken > 0 && send_only(&p6, 100, 0) == 0 && completion(s.rcq, &wc, 10000) == IBV_WC_REM_INV_REQ_ERR && wc.wr_id == 1,
		 "UC, a message that breaks off, from a shared queue: its receive completes with REM_INV_REQ_ERR");
	int sent = send_only(&p7, 100, 0), dead = quiet(s.rcq);
	property(sent == 0 && dead && state(&s) == IBV_QPS_RTS, "UC, after that: the queue pair stays in RTS, and takes no message any more");
}

static void shared_queues(void)
{
	struct ibv_wc wc;
	while (event(0) >= 0) ;
	struct ibv_srq *srq = shared();
	struct end r = create(IBV_QPT_UC, srq);
	start(&r, &r, 5, 0);
	for (int n = 1; n <= 3; n++) receive(&r, srq, n, SLOT);
	struct ibv_srq_attr limit = { .srq_limit = 8 };
	must(!ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT), "modify_srq");
	property(event(QUIET_MS) == -1, "SRQ, armed with a limit above what it holds: no event");
	struct end s = uc_sender(&r, 5);
	property(send_only(&s, 10, 0) == 0 && completion(r.rcq, &wc, 10000) == 0 && event(10000) == IBV_EVENT_SRQ_LIMIT_REACHED,
		 "SRQ, a receive taken: the event");
	property(send_only(&s, 10, 0) == 0 && completion(r.rcq, &wc, 10000) == 0 && event(QUIET_MS) == -1, "SRQ, another one: no event");
	struct ibv_qp_attr err = { .qp_state = IBV_QPS_ERR };
	must(!ibv_modify_qp(r.qp, &err, IBV_QP_STATE), "error");
	property(event(QUIET_MS) == -1, "SRQ, its queue pair in ERR: no event");
}

/* Binds a window and invalidates it. */
static int invalidate_locally(struct end *e)
{
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	must(!!mw, "alloc_mw");
	struct ibv_send_wr bind = { .opcode = IBV_WR_BIND_MW, .bind_mw = { .mw = mw, .rkey = ibv_inc_rkey(mw->rkey),
		.bind_info = { .mr = mr, .addr = (uintptr_t)buf, .length = SLOT, .mw_access_flags = IBV_ACCESS_REMOTE_READ } } };
	must(!send_wr(e, &bind), "bind");
	struct ibv_send_wr inv = { .opcode = IBV_WR_LOCAL_INV, .invalidate_rkey = bind.bind_mw.rkey };
	return send_wr(e, &inv);
}

static void connections(void)
{
	struct end a = create(IBV_QPT_RC, NULL), b = create(IBV_QPT_RC, NULL), u = create(IBV_QPT_UC, NULL);
	start(&a, &b, 0, 0); start(&b, &a, 0, 0); start(&u, &u, 0, 0);
	property(invalidate_locally(&a) == 0, "RC, local invalidate: done");
	property(invalidate_locally(&u) > 0, "UC, local invalidate: fails");
	struct end v = uc_sender(&u, 0);
	struct ibv_sge s = slot(0, 16, 0);
	struct ibv_send_wr inv = { .opcode = IBV_WR_SEND_WITH_INV, .sg_list = &s, .num_sge = 1, .invalidate_rkey = 1 };
	property(send_wr(&v, &inv) > 0, "UC, SEND with invalidate: posted, then fails");
	struct ibv_send_wr add = { .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .sg_list = &s, .num_sge = 1,
		.wr.atomic = { .remote_addr = (uintptr_t)buf + 8 * SLOT, .rkey = mr->rkey, .compare_add = 3 } };
	memset(buf, 0x5a, 16); memset(buf + 8 * SLOT, 0, 16);
	property(send_wr(&a, &add) == 0 && buf[8 * SLOT] == 3 && buf[0] == 0 && buf[8] == 0x5a,
		 "RC, an atomic into 16 bytes: done, the first 8 have the result");
	struct ibv_qp_attr alt = { .alt_ah_attr = own_address(), .alt_port_num = port_num, .alt_timeout = 14, .path_mig_state = IBV_MIG_REARM };
	property(ibv_modify_qp(a.qp, &alt, IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE) == EINVAL, "RC, an alternate path: refused with EINVAL");
	struct ibv_device_attr d;
	must(!ibv_query_device(ctx, &d), "query_device");
	property(!!(d.device_cap_flags & IBV_DEVICE_AUTO_PATH_MIG), "automatic path migration: among the device's capabilities all the same");
	property((d.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B) && !(d.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2A),
		 "windows of type 2B, not 2A");
	property(d.max_res_rd_atom == 0x3f000 && d.max_qp_rd_atom == 128, "READs and atomics: 128 of a queue pair, 0x3f000 of the device");
}

static int use_device(struct ibv_device *device)
{
	static struct ibv_gid_entry entries[64];
	ctx = ibv_open_device(device);
	ssize_t n = ctx ? ibv_query_gid_table(ctx, entries, 64, 0) : 0;
	for (ssize_t i = 0; i < n; i++) {
		if (entries[i].gid_type != IBV_GID_TYPE_ROCE_V2 || memcmp(&entries[i].gid, &gid, 16)) continue;
		gid_index = entries[i].gid_index; port_num = entries[i].port_num;
		return 1;
	}
	return 0;
}

int main(int argc, char **argv)
{
	gid.raw[10] = gid.raw[11] = 0xff;
	if (argc != 3 || strcmp(argv[1], "-g") || inet_pton(AF_INET, argv[2], gid.raw + 12) != 1) return 2;
	setlinebuf(stdout);
	int n = 0, found = 0;
	struct ibv_device **list = ibv_get_device_list(&n);
	for (int i = 0; i < n && !found; i++) found = use_device(list[i]);
	must(found, "no device has this RoCEv2 GID");
	must(!!(pd = ibv_alloc_pd(ctx)), "alloc_pd");
	mr = ibv_reg_mr(pd, buf, sizeof buf, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
			IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND);
	must(!!mr, "reg_mr");
	for (unsigned i = 0; i < SLOT; i++) buf[i] = i * 7 + i / 256;
	datagrams();
	broken_messages();
	shared_queues();
	connections();
	printf("services: %d properties hold, %d do not%s\n", good, bad, bad ? "" : ": passed");
	return bad != 0;
}
