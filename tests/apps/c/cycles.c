/*
 * Every object that verbs and RDMA_CM have, made and destroyed many times: nothing may be left of it, and the device's
 * limits can be reached as before.
 *
 *     cycles ADDRESS COUNT [NAME]
 *
 * Each kind goes through COUNT cycles twice. What the first round leaves may be tables that have grown to their size; the
 * second may leave nothing: no descriptor, no mapping, no memory.
 */
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <malloc.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* The smallest allocation is 32 bytes, so that one in each of 1,000 cycles is twice as much. */
#define SLACK_BYTES (16 << 10)
/* Stacks of threads that the C library keeps for the next one, and heaps of theirs. */
#define SLACK_MAPS 16
/* Seconds in which everything is gone that goes by itself, as connections in TIMEWAIT do. */
#define SETTLE 60
/* Seconds without a change after which nothing more is expected to go: longer than answers are kept for repetition. */
#define STILL 25
/* So often may more be in use after the cycles than before. */
#define ROUNDS 3

#define BUFFER 4096

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static struct ibv_device_attr limits;
static char buffer[BUFFER] __attribute__((aligned(4096)));
static union ibv_gid own;
static struct sockaddr_in address;
static const char *doing = "starting";

static void fail(const char *what, int line)
{
	fprintf(stderr, "%s: line %d: %s: %s\n", doing, line, what, strerror(errno));
	exit(1);
}

#define MUST(x) do { if (!(x)) fail(#x, __LINE__); } while (0)
/* For calls that return an error number. */
#define OK(x) do { int e_ = (x); if (e_) { if (e_ > 0) errno = e_; fail(#x, __LINE__); } } while (0)

struct usage {
	long fds, maps, bytes;
};

static struct usage usage(void)
{
	struct usage u = { 0, 0, 0 };
	struct mallinfo2 heap = mallinfo2();
	DIR *dir = opendir("/proc/self/fd");
	FILE *maps = fopen("/proc/self/maps", "r");
	int c;

	MUST(dir && maps);
	while (readdir(dir))
		u.fds++;
	closedir(dir);
	while ((c = fgetc(maps)) != EOF)
		u.maps += c == '\n';
	fclose(maps);
	u.bytes = heap.uordblks + heap.hblkhd;
	return u;
}

static struct ibv_qp *make_qp(enum ibv_qp_type type, struct ibv_cq *to, int wrs)
{
	struct ibv_qp_init_attr init = {
		.send_cq = to, .recv_cq = to, .qp_type = type,
		.cap = { .max_send_wr = wrs, .max_recv_wr = wrs, .max_send_sge = 1, .max_recv_sge = 1 },
	};

	return ibv_create_qp(pd, &init);
}

static struct ibv_qp *must_qp(enum ibv_qp_type type)
{
	struct ibv_qp *qp = make_qp(type, cq, 4);

	MUST(qp);
	return qp;
}

static void to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 0x11111111,
				    .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE };
	int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;

	OK(ibv_modify_qp(qp, &attr, mask | (qp->qp_type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)));
}

static void connect_qp(struct ibv_qp *qp, uint32_t peer)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer,
				    .max_dest_rd_atomic = 1, .max_rd_atomic = 1, .min_rnr_timer = 12, .timeout = 14,
				    .retry_cnt = 7, .rnr_retry = 7,
				    .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = own, .hop_limit = 1 } } };
	int reliable = qp->qp_type == IBV_QPT_RC, datagram = qp->qp_type == IBV_QPT_UD;

	to_init(qp);
	OK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | (datagram ? 0 : IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
			 IBV_QP_RQ_PSN) | (reliable ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0)));
	attr.qp_state = IBV_QPS_RTS;
	OK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | (reliable ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			 IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : 0)));
}

static void wait_for(struct ibv_cq *from, int count)
{
	time_t end = time(NULL) + 60;
	struct ibv_wc wc;

	while (count) {
		int got = ibv_poll_cq(from, 1, &wc);

		MUST(got >= 0 && time(NULL) < end);
		if (got && wc.status != IBV_WC_SUCCESS) {
			fprintf(stderr, "%s: %s\n", doing, ibv_wc_status_str(wc.status));
			exit(1);
		}
		count -= got;
	}
}

static void message(struct ibv_qp *from, struct ibv_qp *to, struct ibv_ah *ah)
{
	struct ibv_sge in = { (uintptr_t)buffer, BUFFER / 2, mr->lkey };
	struct ibv_sge out = { (uintptr_t)buffer + BUFFER / 2, 64, mr->lkey };
	struct ibv_recv_wr recv = { .sg_list = &in, .num_sge = 1 }, *bad_recv;
	struct ibv_send_wr send = { .sg_list = &out, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED,
				    .wr.ud = { ah, to->qp_num, 0x11111111 } }, *bad_send;

	OK(ibv_post_recv(to, &recv, &bad_recv));
	OK(ibv_post_send(from, &send, &bad_send));
	wait_for(from->send_cq, 2);
}

static void a_device(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *other;
	struct ibv_pd *in;

	MUST(list && list[0]);
	MUST(other = ibv_open_device(list[0]));
	ibv_free_device_list(list);
	MUST(in = ibv_alloc_pd(other));
	OK(ibv_dealloc_pd(in));
	OK(ibv_close_device(other));
}

static void a_pd(void)
{
	struct ibv_parent_domain_init_attr attr = { 0 };
	struct ibv_td_init_attr none = { 0 };
	struct ibv_pd *parent;

	MUST(attr.pd = ibv_alloc_pd(context));
	MUST(attr.td = ibv_alloc_td(context, &none));
	MUST(parent = ibv_alloc_parent_domain(context, &attr));
	OK(ibv_dealloc_pd(parent));
	OK(ibv_dealloc_td(attr.td));
	OK(ibv_dealloc_pd(attr.pd));
}

static void an_mr(void)
{
	struct ibv_mr *region = ibv_reg_mr(pd, buffer, BUFFER, IBV_ACCESS_LOCAL_WRITE);

	MUST(region);
	OK(ibv_rereg_mr(region, IBV_REREG_MR_CHANGE_ACCESS | IBV_REREG_MR_CHANGE_TRANSLATION, NULL, buffer, BUFFER / 2,
			IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ));
	OK(ibv_dereg_mr(region));
}

static void an_mw(void)
{
	struct ibv_mw *one = ibv_alloc_mw(pd, IBV_MW_TYPE_1), *two = ibv_alloc_mw(pd, IBV_MW_TYPE_2);

	MUST(one && two);
	OK(ibv_dealloc_mw(one));
	OK(ibv_dealloc_mw(two));
}

static void a_cq(void)
{
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	struct ibv_cq *queue, *of;
	struct ibv_qp *qp;
	void *cookie;

	MUST(channel);
	MUST(queue = ibv_create_cq(context, 16, NULL, channel, 0));
	OK(ibv_req_notify_cq(queue, 0));
	MUST(qp = make_qp(IBV_QPT_RC, queue, 4));
	connect_qp(qp, qp->qp_num);
	message(qp, qp, NULL);
	OK(ibv_get_cq_event(channel, &of, &cookie));
	ibv_ack_cq_events(of, 1);
	OK(ibv_destroy_qp(qp));
	OK(ibv_resize_cq(queue, 64));
	OK(ibv_destroy_cq(queue));
	OK(ibv_destroy_comp_channel(channel));
}

static void a_cq_ex(void)
{
	struct ibv_cq_init_attr_ex init = { .cqe = 16, .wc_flags = IBV_WC_STANDARD_FLAGS };
	struct ibv_poll_cq_attr poll = { 0 };
	struct ibv_cq_ex *queue = ibv_create_cq_ex(context, &init);

	MUST(queue);
	MUST(ibv_start_poll(queue, &poll) == ENOENT);
	OK(ibv_destroy_cq(ibv_cq_ex_to_cq(queue)));
}

static void an_srq(void)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 16, .max_sge = 1 } };
	struct ibv_srq_attr more = { .max_wr = 64 };
	struct ibv_sge in = { (uintptr_t)buffer, BUFFER, mr->lkey };
	struct ibv_recv_wr recv = { .sg_list = &in, .num_sge = 1 }, *bad;
	struct ibv_srq *srq = ibv_create_srq(pd, &init);

	MUST(srq);
	OK(ibv_post_srq_recv(srq, &recv, &bad));
	OK(ibv_modify_srq(srq, &more, IBV_SRQ_MAX_WR));
	OK(ibv_destroy_srq(srq));
}

static void xrc(void)
{
	struct ibv_xrcd_init_attr how = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1,
					  .oflags = O_CREAT };
	struct ibv_srq_init_attr_ex srq_init = { .attr = { .max_wr = 16, .max_sge = 1 }, .srq_type = IBV_SRQT_XRC,
						 .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
							      IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
						 .pd = pd, .cq = cq };
	struct ibv_qp_init_attr_ex in = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD };
	struct ibv_qp_init_attr_ex out = { .qp_type = IBV_QPT_XRC_SEND, .comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd,
					   .send_cq = cq, .cap = { .max_send_wr = 4, .max_send_sge = 1 } };
	struct ibv_xrcd *xrcd = ibv_open_xrcd(context, &how);
	struct ibv_srq *srq;
	struct ibv_qp *target, *initiator;

	MUST(xrcd);
	srq_init.xrcd = in.xrcd = xrcd;
	MUST(srq = ibv_create_srq_ex(context, &srq_init));
	MUST(target = ibv_create_qp_ex(context, &in));
	MUST(initiator = ibv_create_qp_ex(context, &out));
	OK(ibv_destroy_qp(initiator));
	OK(ibv_destroy_qp(target));
	OK(ibv_destroy_srq(srq));
	OK(ibv_close_xrcd(xrcd));
}

static void unused_qps(void)
{
	struct ibv_qp *rc = must_qp(IBV_QPT_RC), *uc = must_qp(IBV_QPT_UC), *ud = must_qp(IBV_QPT_UD);

	OK(ibv_destroy_qp(rc));
	OK(ibv_destroy_qp(uc));
	OK(ibv_destroy_qp(ud));
}

static void pair(enum ibv_qp_type type)
{
	struct ibv_qp *a = must_qp(type), *b = must_qp(type);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };

	connect_qp(a, b->qp_num);
	connect_qp(b, a->qp_num);
	message(a, b, NULL);
	message(b, a, NULL);
	OK(ibv_modify_qp(a, &attr, IBV_QP_STATE));
	OK(ibv_destroy_qp(a));
	OK(ibv_destroy_qp(b));
}

static void an_rc_pair(void)
{
	pair(IBV_QPT_RC);
}

static void a_uc_pair(void)
{
	pair(IBV_QPT_UC);
}

static struct ibv_ah *make_ah(void)
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = own, .hop_limit = 1 } };

	return ibv_create_ah(pd, &attr);
}

static void a_datagram(void)
{
	struct ibv_qp *a = must_qp(IBV_QPT_UD), *b = must_qp(IBV_QPT_UD);
	struct ibv_ah *ah = make_ah();

	MUST(ah);
	connect_qp(a, 0);
	connect_qp(b, 0);
	message(a, b, ah);
	OK(ibv_destroy_ah(ah));
	OK(ibv_destroy_qp(a));
	OK(ibv_destroy_qp(b));
}

static void a_group(void)
{
	union ibv_gid group = { .raw = { [10] = 0xff, 0xff, 239, 77, 1, 3 } };
	struct ibv_qp *qp = must_qp(IBV_QPT_UD);

	to_init(qp);
	OK(ibv_attach_mcast(qp, &group, 0));
	OK(ibv_detach_mcast(qp, &group, 0));
	OK(ibv_destroy_qp(qp));
}

static void unused_ids(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *tcp, *udp;

	MUST(channel);
	OK(rdma_create_id(channel, &tcp, NULL, RDMA_PS_TCP));
	OK(rdma_create_id(channel, &udp, NULL, RDMA_PS_UDP));
	OK(rdma_bind_addr(tcp, (struct sockaddr *)&address));
	OK(rdma_listen(tcp, 4));
	OK(rdma_destroy_id(tcp));
	OK(rdma_destroy_id(udp));
	rdma_destroy_event_channel(channel);
}

/* The next event of a channel, which must be this one. Returns the id that it is about. */
static struct rdma_cm_id *expect(struct rdma_event_channel *channel, enum rdma_cm_event_type wanted)
{
	struct pollfd fd = { .fd = channel->fd, .events = POLLIN };
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	if (poll(&fd, 1, 60000) != 1) {
		fprintf(stderr, "%s: no %s\n", doing, rdma_event_str(wanted));
		exit(1);
	}
	OK(rdma_get_cm_event(channel, &event));
	if (event->event != wanted) {
		fprintf(stderr, "%s: %s (status %d) instead of %s\n", doing, rdma_event_str(event->event), event->status,
			rdma_event_str(wanted));
		exit(1);
	}
	id = event->id;
	OK(rdma_ack_cm_event(event));
	return id;
}

static struct rdma_cm_id *resolve(struct rdma_event_channel *channel, enum rdma_port_space space, struct sockaddr *to)
{
	struct rdma_cm_id *id;

	OK(rdma_create_id(channel, &id, NULL, space));
	OK(rdma_resolve_addr(id, NULL, to, 2000));
	expect(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
	OK(rdma_resolve_route(id, 2000));
	expect(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
	return id;
}

static void a_connection(enum rdma_port_space space)
{
	int connected = space == RDMA_PS_TCP;
	struct ibv_qp_init_attr init = { .qp_type = connected ? IBV_QPT_RC : IBV_QPT_UD,
					 .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };
	/* The library writes the completion queues that it makes into the attributes. */
	struct ibv_qp_init_attr init_server = init;
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1, .retry_count = 7 };
	struct rdma_event_channel *ours = rdma_create_event_channel(), *theirs = rdma_create_event_channel();
	struct rdma_cm_id *listener, *client, *server;

	MUST(ours && theirs);
	OK(rdma_create_id(ours, &listener, NULL, space));
	OK(rdma_bind_addr(listener, (struct sockaddr *)&address));
	OK(rdma_listen(listener, 4));
	client = resolve(theirs, space, rdma_get_local_addr(listener));
	OK(rdma_create_qp(client, NULL, &init));
	param.qp_num = client->qp->qp_num;
	OK(rdma_connect(client, &param));
	server = expect(ours, RDMA_CM_EVENT_CONNECT_REQUEST);
	OK(rdma_create_qp(server, NULL, &init_server));
	param.qp_num = server->qp->qp_num;
	OK(rdma_accept(server, &param));
	expect(theirs, RDMA_CM_EVENT_ESTABLISHED);
	if (connected) {
		expect(ours, RDMA_CM_EVENT_ESTABLISHED);
		OK(rdma_disconnect(client));
		expect(ours, RDMA_CM_EVENT_DISCONNECTED);
		OK(rdma_disconnect(server));
		expect(theirs, RDMA_CM_EVENT_DISCONNECTED);
	}
	rdma_destroy_qp(client);
	rdma_destroy_qp(server);
	OK(rdma_destroy_id(client));
	OK(rdma_destroy_id(server));
	OK(rdma_destroy_id(listener));
	rdma_destroy_event_channel(ours);
	rdma_destroy_event_channel(theirs);
}

static void a_cm_pair(void)
{
	a_connection(RDMA_PS_TCP);
}

static void a_cm_datagram(void)
{
	a_connection(RDMA_PS_UDP);
}

static void a_cm_group(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct sockaddr_in group = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(0xef4d0104) };
	struct rdma_cm_id *id;

	MUST(channel);
	OK(rdma_create_id(channel, &id, NULL, RDMA_PS_UDP));
	OK(rdma_bind_addr(id, (struct sockaddr *)&address));
	OK(rdma_join_multicast(id, (struct sockaddr *)&group, NULL));
	expect(channel, RDMA_CM_EVENT_MULTICAST_JOIN);
	OK(rdma_leave_multicast(id, (struct sockaddr *)&group));
	OK(rdma_destroy_id(id));
	rdma_destroy_event_channel(channel);
}

static const struct kind {
	const char *name;
	void (*cycle)(void);
} kinds[] = {
	{ "device", a_device }, { "pd", a_pd }, { "mr", an_mr }, { "mw", an_mw }, { "cq", a_cq }, { "cq_ex", a_cq_ex },
	{ "srq", an_srq }, { "xrc", xrc }, { "qp", unused_qps }, { "rc pair", an_rc_pair }, { "uc pair", a_uc_pair },
	{ "datagram", a_datagram }, { "group", a_group }, { "cm id", unused_ids }, { "cm pair", a_cm_pair },
	{ "cm datagram", a_cm_datagram }, { "cm group", a_cm_group },
};

/* Whether `now` is no more than `before`. */
static int settled(struct usage now, struct usage before)
{
	return now.fds <= before.fds && now.maps <= before.maps + SLACK_MAPS && now.bytes <= before.bytes + SLACK_BYTES;
}

/* Waits until no more is in use than `before`, or until nothing seems to change that any more. */
static struct usage settle(struct usage before)
{
	time_t begin = time(NULL), changed = begin;
	struct usage last = usage(), now = last;

	while (!settled(now, before) && time(NULL) < begin + SETTLE && time(NULL) < changed + STILL) {
		usleep(100000);
		now = usage();
		if (memcmp(&now, &last, sizeof(now)))
			changed = time(NULL);
		last = now;
	}
	return now;
}

/* What is left is left by each round; a table that has grown to its size by the most that there was at a time is not. */
static int run(const struct kind *kind, int count)
{
	struct usage before = usage(), now;

	doing = kind->name;
	for (int i = 0; i < count; i++)
		kind->cycle();
	now = settle(before);
	for (int round = 1; round <= ROUNDS; round++) {
		before = now;
		for (int i = 0; i < count; i++)
			kind->cycle();
		now = settle(before);
		printf("%-12s %d cycles, round %d: %+ld descriptors, %+ld mappings, %+ld bytes\n", kind->name, count, round,
		       now.fds - before.fds, now.maps - before.maps, now.bytes - before.bytes);
		fflush(stdout);
		if (settled(now, before))
			return 1;
	}
	return 0;
}

static void *new_pd(void)
{
	return ibv_alloc_pd(context);
}

static void *new_ah(void)
{
	return make_ah();
}

static void *new_cq(void)
{
	return ibv_create_cq(context, 1, NULL, NULL, 0);
}

static void *new_qp(void)
{
	return make_qp(IBV_QPT_RC, cq, 1);
}

static void *new_srq(void)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 1, .max_sge = 1 } };

	return ibv_create_srq(pd, &init);
}

static void *new_mw(void)
{
	return ibv_alloc_mw(pd, IBV_MW_TYPE_2);
}

typedef int end_fn(void *);

/* As many of a kind as there can be, then none, twice: the second time there must be as many, up to the limit. */
static int fill(const char *name, void *(*begin)(void), end_fn *end, int limit)
{
	void **all = calloc(limit + 1, sizeof(*all));
	int count[2];

	MUST(all);
	doing = name;
	for (int round = 0; round < 2; round++) {
		int n = 0;

		/* Queue pair numbers rest for a moment. */
		sleep(1);
		errno = 0;
		while (n <= limit && (all[n] = begin()))
			n++;
		MUST(errno == ENOMEM);
		count[round] = n;
		while (n)
			OK(end(all[--n]));
	}
	free(all);
	printf("%-12s limit %d: %d, then %d\n", name, limit, count[0], count[1]);
	fflush(stdout);
	/* A few are in use by this program; never more than the limit. */
	return count[0] == count[1] && count[0] <= limit && count[0] >= limit - 4;
}

static int limits_hold(void)
{
	return fill("pd", new_pd, (end_fn *)ibv_dealloc_pd, limits.max_pd) &
	       fill("ah", new_ah, (end_fn *)ibv_destroy_ah, limits.max_ah) &
	       fill("mw", new_mw, (end_fn *)ibv_dealloc_mw, limits.max_mw) &
	       fill("cq", new_cq, (end_fn *)ibv_destroy_cq, limits.max_cq) &
	       fill("srq", new_srq, (end_fn *)ibv_destroy_srq, limits.max_srq) &
	       fill("qp", new_qp, (end_fn *)ibv_destroy_qp, limits.max_qp);
}

int main(int argc, char **argv)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	int count, well = 1;

	if (argc < 3 || (count = atoi(argv[2])) <= 0) {
		fprintf(stderr, "usage: %s ADDRESS COUNT [NAME]\n", argv[0]);
		return 2;
	}
	address.sin_family = AF_INET;
	MUST(inet_pton(AF_INET, argv[1], &address.sin_addr) == 1);
	MUST(list && list[0] && (context = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	OK(ibv_query_gid(context, 1, 0, &own));
	MUST(pd = ibv_alloc_pd(context));
	MUST(cq = ibv_create_cq(context, 64, NULL, NULL, 0));
	MUST(mr = ibv_reg_mr(pd, buffer, BUFFER, IBV_ACCESS_LOCAL_WRITE));
	OK(ibv_query_device(context, &limits));
	/* First, since the tables of numbers grow to their size. */
	if (argc < 4 || !strcmp(argv[3], "limits"))
		well &= limits_hold();
	for (size_t i = 0; i < sizeof(kinds) / sizeof(*kinds); i++)
		if (argc < 4 || !strcmp(argv[3], kinds[i].name))
			well &= run(&kinds[i], count);
	OK(ibv_dereg_mr(mr));
	OK(ibv_destroy_cq(cq));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(context));
	puts(well ? "nothing is left" : "something is left");
	return !well;
}
