/* A verbs program that is driven over TCP, line by line: the peer of `ferroce-lab ops` and of `ferroce pcap play --agent`, on any
 * host with libibverbs.
 *
 *   verbs-agent [-d DEVICE] [-p TCP-PORT] [-g IPV4-OR-IPV6-ADDRESS] [-l | -c]
 *
 * It uses the RoCEv2 GID of that address, on whatever device and port has it; -l says which, and ends; -c says what that
 * device can do, and ends. One client at a
 * time; every command line gets one answer line ("ok …" or "err …"), `poll` several.
 * The commands are in ../README.md; `ferroce-lab agent` is the same program on our own transport.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "listen.h"
#include "rxe-flush.h"

#define MAX_MEM 2048
#define MAX_MW 16

struct mem { uint8_t *buf; size_t len; struct ibv_mr *mr; };
static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *scq, *rcq;
static struct ibv_qp *qp;
static struct ibv_qp_ex *qpx; /* the same, where the device has work requests beyond ibv_post_send's */
static struct mem mems[MAX_MEM];
static struct ibv_mw *mws[MAX_MW];
static int nmem, nmw, gid_index, port_num;
static unsigned qp_access;
static union ibv_gid my_gid;
static struct ibv_device_attr attr;
static FILE *out;

/* Rights that the device can grant: some refuse to register memory with others. */
static unsigned can_grant(unsigned access)
{
	if (attr.atomic_cap == IBV_ATOMIC_NONE) access &= ~IBV_ACCESS_REMOTE_ATOMIC;
	if (!(attr.device_cap_flags & (IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B)))
		access &= ~IBV_ACCESS_MW_BIND;
	return access;
}

static void fail(const char *what) { fprintf(out, "err %s: %s\n", what, strerror(errno)); }

static void teardown(void)
{
	if (qp) ibv_destroy_qp(qp);
	for (int i = 0; i < nmw; i++) ibv_dealloc_mw(mws[i]);
	for (int i = 0; i < nmem; i++) { if (mems[i].mr) ibv_dereg_mr(mems[i].mr); free(mems[i].buf); }
	if (scq) ibv_destroy_cq(scq);
	if (rcq) ibv_destroy_cq(rcq);
	qp = NULL; qpx = NULL; scq = rcq = NULL; nmem = nmw = 0;
}

static uint64_t pattern(uint64_t seed, uint64_t i)
{
	uint64_t x = seed * 0x9e3779b97f4a7c15ull + i;
	x ^= x >> 30; x *= 0xbf58476d1ce4e5b9ull; x ^= x >> 27; x *= 0x94d049bb133111ebull;
	return x ^ (x >> 31);
}

static struct mem *get_mem(unsigned id, uint64_t off, uint64_t len)
{
	if (id >= (unsigned)nmem || off > mems[id].len || len > mems[id].len - off) { errno = ERANGE; return NULL; }
	return &mems[id];
}

/* ATOMIC WRITE and (rxe-flush.h) FLUSH take the newer interface, which not every device has. */
static void create_qp(enum ibv_qp_type type, const struct ibv_qp_cap *cap)
{
	struct ibv_qp_init_attr_ex ex = { .send_cq = scq, .recv_cq = rcq, .qp_type = type, .cap = *cap, .pd = pd,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_ATOMIC_WRITE };
	struct ibv_qp_init_attr ia = { .send_cq = scq, .recv_cq = rcq, .qp_type = type, .cap = *cap };
	qp = type == IBV_QPT_RC ? ibv_create_qp_ex(ctx, &ex) : NULL;
	qpx = qp ? ibv_qp_to_qp_ex(qp) : NULL;
	if (!qp) qp = ibv_create_qp(pd, &ia);
}

static int to_init(void)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = port_num, .qp_access_flags = can_grant(qp_access) };
	return ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

/* create SEND-WRS RECV-WRS SGES INLINE [ACCESS [TYPE]]: TYPE is the number of ibv_qp_type. */
static void cmd_create(char *line)
{
	unsigned swr, rwr, sge, inl, type = IBV_QPT_RC, access = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
	if (sscanf(line, "%u %u %u %u %u %u", &swr, &rwr, &sge, &inl, &access, &type) < 4) { fprintf(out, "err usage\n"); return; }
	teardown();
	scq = ibv_create_cq(ctx, swr + 16, NULL, NULL, 0);
	rcq = ibv_create_cq(ctx, rwr + 16, NULL, NULL, 0);
	if (!scq || !rcq) { fail("create_cq"); return; }
	create_qp(type, &(struct ibv_qp_cap){ .max_send_wr = swr, .max_recv_wr = rwr, .max_send_sge = sge, .max_recv_sge = sge,
		.max_inline_data = inl });
	if (!qp) { fail("create_qp"); return; }
	qp_access = access;
	if (to_init()) { fail("init"); return; }
	char g[INET6_ADDRSTRLEN];
	inet_ntop(AF_INET6, my_gid.raw, g, sizeof g);
	fprintf(out, "ok %u %s\n", qp->qp_num, g);
}

static void cmd_mem(char *line)
{
	size_t len; unsigned access;
	if (sscanf(line, "%zu %u", &len, &access) != 2 || nmem == MAX_MEM) { fprintf(out, "err usage\n"); return; }
	struct mem *m = &mems[nmem];
	m->len = len;
	if (posix_memalign((void **)&m->buf, 4096, len ? len : 1)) { fail("memalign"); return; }
	memset(m->buf, 0, len);
	m->mr = ibv_reg_mr(pd, m->buf, len, can_grant(access));
	if (!m->mr) { fail("reg_mr"); free(m->buf); return; }
	fprintf(out, "ok %d %" PRIu64 " %u\n", nmem++, (uint64_t)(uintptr_t)m->buf, m->mr->rkey);
}

static void cmd_rtr(char *line)
{
	unsigned dqpn, psn, mtu, rnr, rd; char g[64];
	if (sscanf(line, "%u %63s %u %u %u %u", &dqpn, g, &psn, &mtu, &rnr, &rd) != 6) { fprintf(out, "err usage\n"); return; }
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR, .path_mtu = mtu, .dest_qp_num = dqpn, .rq_psn = psn,
		.max_dest_rd_atomic = rd, .min_rnr_timer = rnr,
		.ah_attr = { .is_global = 1, .port_num = port_num, .grh = { .hop_limit = 64, .sgid_index = gid_index } } };
	if (inet_pton(AF_INET6, g, a.ah_attr.grh.dgid.raw) != 1) { fprintf(out, "err gid\n"); return; }
	int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	if (qp->qp_type == IBV_QPT_RC) mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	if (ibv_modify_qp(qp, &a, mask)) { fail("rtr"); return; }
	fprintf(out, "ok\n");
}

static void cmd_rts(char *line)
{
	unsigned psn, timeout, retry, rnr, rd;
	if (sscanf(line, "%u %u %u %u %u", &psn, &timeout, &retry, &rnr, &rd) != 5) { fprintf(out, "err usage\n"); return; }
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTS, .sq_psn = psn, .timeout = timeout, .retry_cnt = retry,
		.rnr_retry = rnr, .max_rd_atomic = rd };
	int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
	if (qp->qp_type == IBV_QPT_RC) mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	if (ibv_modify_qp(qp, &a, mask)) { fail("rts"); return; }
	fprintf(out, "ok\n");
}

/* recv ID MEM OFF LEN [KEY]: KEY is added to the local key. */
static void cmd_recv(char *line)
{
	uint64_t id, off; unsigned mem, len, key = 0;
	if (sscanf(line, "%" SCNu64 " %u %" SCNu64 " %u %u", &id, &mem, &off, &len, &key) < 4) { fprintf(out, "err usage\n"); return; }
	struct mem *m = get_mem(mem, off, len);
	if (!m || !m->mr) { errno = EINVAL; fail("recv"); return; }
	struct ibv_sge sge = { .addr = (uintptr_t)m->buf + off, .length = len, .lkey = m->mr->lkey + key };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = len ? 1 : 0 }, *bad;
	int e = ibv_post_recv(qp, &wr, &bad);
	if (e) { errno = e; fail("post_recv"); return; }
	fprintf(out, "ok\n");
}

static int atomic_write(uint64_t id, unsigned flags, const void *word, uint64_t raddr, unsigned rkey)
{
	if (!qpx) return EOPNOTSUPP;
	ibv_wr_start(qpx);
	qpx->wr_id = id; qpx->wr_flags = flags;
	ibv_wr_atomic_write(qpx, rkey, raddr, word);
	return ibv_wr_complete(qpx);
}

/* flush ID PLACEMENT SELECTIVITY ADDRESS LENGTH RKEY: numbers of the FETH (IBTA Annex A19). */
static void cmd_flush(char *line)
{
	uint64_t id, addr; unsigned placement, selectivity, len, rkey;
	if (sscanf(line, "%" SCNu64 " %u %u %" SCNu64 " %u %u", &id, &placement, &selectivity, &addr, &len, &rkey) != 6) { fprintf(out, "err usage\n"); return; }
	int e = qpx ? rxe_flush(qpx, id, &(struct rxe_flush){ addr, len, rkey, placement, selectivity }) : EOPNOTSUPP;
	if (e) { errno = e; fail("flush"); return; }
	fprintf(out, "ok\n");
}

/* post ID OP FLAGS MEM OFF LEN RADDR RKEY IMM COMPARE SWAP [KEY]; OP is the number of ibv_wr_opcode, KEY is added to the
 * local key. The range may be outside the memory: the device refuses that. */
static void cmd_post(char *line)
{
	uint64_t id, off, raddr, cmp, swap; unsigned op, flags, mem, len, rkey, imm, key = 0;
	if (sscanf(line, "%" SCNu64 " %u %u %u %" SCNu64 " %u %" SCNu64 " %u %u %" SCNu64 " %" SCNu64 " %u", &id, &op, &flags, &mem, &off,
		   &len, &raddr, &rkey, &imm, &cmp, &swap, &key) < 11) { fprintf(out, "err usage\n"); return; }
	struct mem *m = get_mem(mem, 0, 0);
	if (!m || !m->mr) { errno = EINVAL; fail("post"); return; }
	struct ibv_sge sge = { .addr = (uintptr_t)m->buf + off, .length = len, .lkey = m->mr->lkey + key };
	struct ibv_send_wr wr = { .wr_id = id, .opcode = op, .send_flags = flags, .sg_list = &sge, .num_sge = len ? 1 : 0 }, *bad;
	switch (op) {
	case IBV_WR_SEND_WITH_INV: case IBV_WR_LOCAL_INV: wr.invalidate_rkey = rkey; break;
	default: wr.imm_data = htonl(imm);
	}
	if (op == IBV_WR_ATOMIC_CMP_AND_SWP || op == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = raddr; wr.wr.atomic.rkey = rkey;
		wr.wr.atomic.compare_add = op == IBV_WR_ATOMIC_CMP_AND_SWP ? cmp : swap; wr.wr.atomic.swap = swap;
	} else {
		wr.wr.rdma.remote_addr = raddr; wr.wr.rdma.rkey = rkey;
	}
	/* What is copied at once has to be there. */
	int here = (op != IBV_WR_ATOMIC_WRITE && !(flags & IBV_SEND_INLINE)) || get_mem(mem, off, len);
	int e = !here ? ERANGE : op != IBV_WR_ATOMIC_WRITE ? ibv_post_send(qp, &wr, &bad)
		: len == 8 ? atomic_write(id, flags, m->buf + off, raddr, rkey) : EINVAL;
	if (e) { errno = e; fail("post_send"); return; }
	fprintf(out, "ok\n");
}

/* mw MEM OFF LEN ACCESS: a type-2 window, bound through the send queue (its completion is taken here). */
static void cmd_mw(char *line)
{
	unsigned mem, access; uint64_t off, len;
	if (sscanf(line, "%u %" SCNu64 " %" SCNu64 " %u", &mem, &off, &len, &access) != 4 || nmw == MAX_MW) { fprintf(out, "err usage\n"); return; }
	struct mem *m = get_mem(mem, off, len);
	if (!m || !m->mr) { errno = EINVAL; fail("mw"); return; }
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	if (!mw) { fail("alloc_mw"); return; }
	mws[nmw++] = mw;
	struct ibv_send_wr wr = { .wr_id = ~0ull, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED }, *bad;
	wr.bind_mw.mw = mw; wr.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
	wr.bind_mw.bind_info = (struct ibv_mw_bind_info){ .mr = m->mr, .addr = (uintptr_t)m->buf + off, .length = len, .mw_access_flags = access };
	int e = ibv_post_send(qp, &wr, &bad);
	if (e) { errno = e; fail("bind"); return; }
	struct ibv_wc wc; int n;
	while (!(n = ibv_poll_cq(scq, 1, &wc))) ;
	if (n < 0 || wc.status) { fprintf(out, "err bind status %d\n", wc.status); return; }
	fprintf(out, "ok %u\n", wr.bind_mw.rkey);
}

/* poll s|r COUNT MILLISECONDS: "wc ID STATUS OPCODE LEN IMM FLAGS RKEY" a line each, then "end". */
static void cmd_poll(char *line)
{
	char which; int count, ms;
	if (sscanf(line, " %c %d %d", &which, &count, &ms) != 3) { fprintf(out, "err usage\n"); return; }
	struct timespec t0, t; clock_gettime(CLOCK_MONOTONIC, &t0);
	for (int got = 0; got < count;) {
		struct ibv_wc wc; int n = ibv_poll_cq(which == 's' ? scq : rcq, 1, &wc);
		if (n < 0) break;
		if (n) {
			got++;
			fprintf(out, "wc %" PRIu64 " %d %d %u %u %u %u\n", wc.wr_id, wc.status, wc.opcode, wc.byte_len,
				wc.wc_flags & IBV_WC_WITH_IMM ? ntohl(wc.imm_data) : 0, wc.wc_flags,
				wc.wc_flags & IBV_WC_WITH_INV ? wc.invalidated_rkey : 0);
			continue;
		}
		clock_gettime(CLOCK_MONOTONIC, &t);
		if ((t.tv_sec - t0.tv_sec) * 1000 + (t.tv_nsec - t0.tv_nsec) / 1000000 > ms) break;
		usleep(200);
	}
	fprintf(out, "end\n");
}

static void cmd_fill(char *line, int check)
{
	unsigned mem; uint64_t off, len, seed;
	if (sscanf(line, "%u %" SCNu64 " %" SCNu64 " %" SCNu64, &mem, &off, &len, &seed) != 4) { fprintf(out, "err usage\n"); return; }
	struct mem *m = get_mem(mem, off, len);
	if (!m) { fail("range"); return; }
	for (uint64_t i = 0; i < len; i++) {
		uint8_t b = pattern(seed, i / 8) >> (8 * (i % 8));
		if (!check) m->buf[off + i] = b;
		else if (m->buf[off + i] != b) { fprintf(out, "err byte %" PRIu64 " is %02x, not %02x\n", i, m->buf[off + i], b); return; }
	}
	fprintf(out, "ok\n");
}

/* read MEM OFF LEN: the bytes in hexadecimal. */
static void cmd_read(char *line)
{
	unsigned mem; uint64_t off, len;
	if (sscanf(line, "%u %" SCNu64 " %" SCNu64, &mem, &off, &len) != 3) { fprintf(out, "err usage\n"); return; }
	struct mem *m = get_mem(mem, off, len);
	if (!m) { fail("range"); return; }
	fprintf(out, "ok ");
	for (uint64_t i = 0; i < len; i++) fprintf(out, "%02x", m->buf[off + i]);
	fprintf(out, "\n");
}

/* dereg MEM: its key goes, the bytes stay. */
static void cmd_dereg(char *line)
{
	unsigned mem;
	if (sscanf(line, "%u", &mem) != 1 || mem >= (unsigned)nmem || !mems[mem].mr) { fprintf(out, "err usage\n"); return; }
	int e = ibv_dereg_mr(mems[mem].mr);
	if (e) { errno = e; fail("dereg_mr"); return; }
	mems[mem].mr = NULL;
	fprintf(out, "ok\n");
}

static void cmd_word(char *line)
{
	unsigned mem; uint64_t off, value; int n = sscanf(line, "%u %" SCNu64 " %" SCNu64, &mem, &off, &value);
	struct mem *m = n >= 2 ? get_mem(mem, off, 8) : NULL;
	if (!m) { fprintf(out, "err usage\n"); return; }
	if (n == 3) memcpy(m->buf + off, &value, 8);
	memcpy(&value, m->buf + off, 8);
	fprintf(out, "ok %" PRIu64 "\n", value);
}

static void cmd_state(void)
{
	struct ibv_qp_attr a; struct ibv_qp_init_attr ia;
	if (!qp || ibv_query_qp(qp, &a, IBV_QP_STATE, &ia)) { fail("query"); return; }
	fprintf(out, "ok %d\n", a.qp_state);
}

/* psn: the PSNs of the queue pair as the device tells them, sending and receiving. */
static void cmd_psn(void)
{
	struct ibv_qp_attr a; struct ibv_qp_init_attr ia;
	if (!qp || ibv_query_qp(qp, &a, IBV_QP_SQ_PSN | IBV_QP_RQ_PSN, &ia)) { fail("query"); return; }
	fprintf(out, "ok %u %u\n", a.sq_psn, a.rq_psn);
}

/* The queue pair (but not the memory) goes away. */
static void cmd_destroy(void)
{
	ibv_destroy_qp(qp);
	qp = NULL; qpx = NULL;
	fprintf(out, "ok\n");
}

/* modify STATE: a number of ibv_qp_state, where nothing else is needed: RESET, INIT, RTS (from SQD), SQD, ERR. */
static void cmd_modify(char *line)
{
	int state = -1, e;
	sscanf(line, "%d", &state);
	if (state == IBV_QPS_INIT) e = to_init();
	else {
		struct ibv_qp_attr a = { .qp_state = state, .en_sqd_async_notify = 1 };
		e = ibv_modify_qp(qp, &a, IBV_QP_STATE | (state == IBV_QPS_SQD ? IBV_QP_EN_SQD_ASYNC_NOTIFY : 0));
	}
	if (e) { fail("modify"); return; }
	fprintf(out, "ok\n");
}

/* event MILLISECONDS: the number in ibv_event_type of the queue pair's next event; those of devices and ports are passed over. */
static void cmd_event(char *line)
{
	int ms = 0, found = -1;
	sscanf(line, "%d", &ms);
	for (struct pollfd p = { .fd = ctx->async_fd, .events = POLLIN }; found < 0 && poll(&p, 1, ms) > 0;) {
		struct ibv_async_event e;
		if (ibv_get_async_event(ctx, &e)) { fail("get_async_event"); return; }
		if (e.event_type < IBV_EVENT_PATH_MIG) found = e.event_type;
		ibv_ack_async_event(&e);
	}
	if (found < 0) fprintf(out, "ok none\n");
	else fprintf(out, "ok %d\n", found);
}

/* device: its name, the index of the GID in use, the MTU that its port carries, the port's number. */
static void cmd_device(void)
{
	struct ibv_port_attr p;
	if (ibv_query_port(ctx, port_num, &p)) { fail("query_port"); return; }
	fprintf(out, "ok %s %d %d %d\n", ibv_get_device_name(ctx->device), gid_index, 128 << p.active_mtu, port_num);
}

/* caps: what the device can do. */
static void cmd_caps(void)
{
	unsigned f = attr.device_cap_flags;
	struct ibv_device_attr_ex ex = { .device_cap_flags_ex = 0 };
	if (ibv_query_device_ex(ctx, NULL, &ex)) ex.device_cap_flags_ex = 0;
	/* Bits of <rdma/ib_user_verbs.h>: FLUSH for visibility, ATOMIC WRITE (Annex A19). */
	fprintf(out, "ok flush=%d atomic_write=%d ", (int)(ex.device_cap_flags_ex >> 38 & 1), (int)(ex.device_cap_flags_ex >> 40 & 1));
	fprintf(out, "fw=%s vendor=%#x part=%u atomics=%d windows1=%d windows2=%d reads=%d sge=%d qp_wr=%d cqe=%d mr_size=%" PRIu64
		"\n", *attr.fw_ver ? attr.fw_ver : "-", attr.vendor_id, attr.vendor_part_id, attr.atomic_cap != IBV_ATOMIC_NONE,
		!!(f & IBV_DEVICE_MEM_WINDOW), !!(f & (IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B)),
		attr.max_qp_rd_atom < attr.max_qp_init_rd_atom ? attr.max_qp_rd_atom : attr.max_qp_init_rd_atom, attr.max_sge,
		attr.max_qp_wr, attr.max_cqe, attr.max_mr_size);
}

static void serve(int fd)
{
	char line[512];
	FILE *in = fdopen(fd, "r");
	out = fdopen(dup(fd), "w");
	while (fgets(line, sizeof line, in)) {
		char *rest = strchr(line, ' ');
		rest = rest ? rest + 1 : line + strlen(line);
		if (!strncmp(line, "create ", 7)) cmd_create(rest);
		else if (!strncmp(line, "mem ", 4)) cmd_mem(rest);
		else if (!strncmp(line, "device", 6)) cmd_device();
		else if (!strncmp(line, "caps", 4)) cmd_caps();
		else if (!strncmp(line, "quit", 4)) { fprintf(out, "ok\n"); fflush(out); teardown(); exit(0); }
		else if (!qp) fprintf(out, "err no qp\n");
		else if (!strncmp(line, "rtr ", 4)) cmd_rtr(rest);
		else if (!strncmp(line, "rts ", 4)) cmd_rts(rest);
		else if (!strncmp(line, "recv ", 5)) cmd_recv(rest);
		else if (!strncmp(line, "post ", 5)) cmd_post(rest);
		else if (!strncmp(line, "flush ", 6)) cmd_flush(rest);
		else if (!strncmp(line, "mw ", 3)) cmd_mw(rest);
		else if (!strncmp(line, "poll ", 5)) cmd_poll(rest);
		else if (!strncmp(line, "fill ", 5)) cmd_fill(rest, 0);
		else if (!strncmp(line, "check ", 6)) cmd_fill(rest, 1);
		else if (!strncmp(line, "word ", 5)) cmd_word(rest);
		else if (!strncmp(line, "state", 5)) cmd_state();
		else if (!strncmp(line, "psn", 3)) cmd_psn();
		else if (!strncmp(line, "destroy", 7)) cmd_destroy();
		else if (!strncmp(line, "modify ", 7)) cmd_modify(rest);
		else if (!strncmp(line, "event ", 6)) cmd_event(rest);
		else if (!strncmp(line, "read ", 5)) cmd_read(rest);
		else if (!strncmp(line, "dereg ", 6)) cmd_dereg(rest);
		else fprintf(out, "err unknown command\n");
		fflush(out);
	}
	fclose(in); fclose(out);
	teardown();
}

/* Opens the device if it has the GID (any, if that is NULL) as a RoCEv2 one. */
static int use_device(struct ibv_device *device, const union ibv_gid *want)
{
	static struct ibv_gid_entry entries[512];
	ctx = ibv_open_device(device);
	if (!ctx) return 0;
	ssize_t n = ibv_query_gid_table(ctx, entries, sizeof entries / sizeof *entries, 0);
	for (ssize_t i = 0; i < n; i++) {
		if (entries[i].gid_type != IBV_GID_TYPE_ROCE_V2 || (want && memcmp(&entries[i].gid, want, 16))) continue;
		my_gid = entries[i].gid; gid_index = entries[i].gid_index; port_num = entries[i].port_num;
		return 1;
	}
	ibv_close_device(ctx);
	ctx = NULL;
	return 0;
}

int main(int argc, char **argv)
{
	const char *dev = NULL, *addr = NULL; int port = 18600, opt, n = 0, look = 0;
	while ((opt = getopt(argc, argv, "d:p:g:lc")) != -1) {
		if (opt == 'd') dev = optarg;
		else if (opt == 'p') port = atoi(optarg);
		else if (opt == 'g') addr = optarg;
		else if (opt == 'l' || opt == 'c') look = opt;
		else return 2;
	}
	union ibv_gid want = { 0 };
	if (addr && inet_pton(AF_INET6, addr, want.raw) != 1) {
		want.raw[10] = want.raw[11] = 0xff;
		if (inet_pton(AF_INET, addr, want.raw + 12) != 1) { fprintf(stderr, "verbs-agent: bad address %s\n", addr); return 2; }
	}
	struct ibv_device **list = ibv_get_device_list(&n);
	for (int i = 0; i < n && !ctx; i++)
		if (!dev || !strcmp(dev, ibv_get_device_name(list[i]))) use_device(list[i], addr ? &want : NULL);
	if (!ctx) {
		fprintf(stderr, "verbs-agent: none of %d RDMA devices%s%s has a RoCEv2 GID %s\n", n, dev ? " named " : "", dev ? dev : "",
			addr ? addr : "");
		return 1;
	}
	out = stdout;
	if (ibv_query_device(ctx, &attr)) { perror("verbs-agent: query_device"); return 1; }
	if (look) { look == 'l' ? cmd_device() : cmd_caps(); return 0; }
	pd = ibv_alloc_pd(ctx);
	int l = pd ? listen_on(port) : -1, one = 1;
	if (l < 0) { perror(pd ? "verbs-agent: listen" : "verbs-agent: alloc_pd"); return 1; }
	printf("verbs-agent ready\n"); fflush(stdout);
	for (int fd; (fd = accept(l, NULL, NULL)) >= 0;) {
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
		serve(fd);
	}
	return 0;
}
