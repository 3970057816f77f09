/* A connection of the RDMA connection manager, event by event, for comparison with `ferroce-lab cm`.
 *
 *   cm-agent listen  ADDRESS PORT accept|reject HEX HOLD     waits for one request and answers it
 *   cm-agent connect ADDRESS PORT -             HEX HOLD     connects
 *
 * HEX is the private data that it sends ("-": none). HOLD: after so many milliseconds it disconnects; -1 waits for the
 * peer to do that. Every event is a line: its name, its status, the READ depths (where they mean something), the length of
 * the private data, and that without trailing zeros. The program ends with 0 when the connection has ended in any regular way.
 */
#include <errno.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct rdma_event_channel *channel;
static uint8_t data[256];
static uint8_t data_len;

static int fail(const char *what) { printf("failed %s: %s\n", what, strerror(errno)); return 1; }

static void parse_hex(const char *hex)
{
	unsigned byte;
	for (; strlen(hex) >= 2 && data_len < sizeof data - 1 && sscanf(hex, "%2x", &byte) == 1; hex += 2) data[data_len++] = byte;
}

static struct rdma_conn_param params(void)
{
	struct rdma_conn_param p = { .private_data = data, .private_data_len = data_len, .responder_resources = 3,
		.initiator_depth = 5, .retry_count = 7, .rnr_retry_count = 7 };
	return p;
}

static int make_qp(struct rdma_cm_id *id)
{
	struct ibv_cq *cq = ibv_create_cq(id->verbs, 8, NULL, NULL, 0);
	struct ibv_pd *pd = ibv_alloc_pd(id->verbs);
	struct ibv_qp_init_attr ia = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1 } };
	return !cq || !pd || rdma_create_qp(id, pd, &ia);
}

static void print_event(const struct rdma_cm_event *e)
{
	const struct rdma_conn_param *c = &e->param.conn;
	int len = c->private_data_len;
	const uint8_t *d = c->private_data;
	while (len && !d[len - 1]) len--;
	printf("%s status %d", rdma_event_str(e->event), e->status);
	if (e->event == RDMA_CM_EVENT_CONNECT_REQUEST) printf(" depth %d %d", c->responder_resources, c->initiator_depth);
	printf(" data %d ", c->private_data_len);
	for (int i = 0; i < len; i++) printf("%02x", d[i]);
	printf("\n");
	fflush(stdout);
}

/* 0: wait on; 1: over; 2: failed */
static int handle(struct rdma_cm_event *e, struct rdma_cm_id **id, int reject, int *established)
{
	struct rdma_conn_param p = params();
	switch (e->event) {
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		return rdma_resolve_route(*id, 5000) ? 2 * fail("resolve_route") : 0;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		if (make_qp(*id)) return 2 * fail("create_qp");
		return rdma_connect(*id, &p) ? 2 * fail("connect") : 0;
	case RDMA_CM_EVENT_CONNECT_REQUEST:
		*id = e->id;
		if (reject) return rdma_reject(e->id, data, data_len) ? 2 * fail("reject") : 1;
		if (make_qp(e->id)) return 2 * fail("create_qp");
		return rdma_accept(e->id, &p) ? 2 * fail("accept") : 0;
	case RDMA_CM_EVENT_ESTABLISHED:
		*established = 1;
		return 0;
	case RDMA_CM_EVENT_DISCONNECTED:
		rdma_disconnect(*id);
		return 1;
	case RDMA_CM_EVENT_REJECTED: case RDMA_CM_EVENT_UNREACHABLE:
	case RDMA_CM_EVENT_CONNECT_ERROR: case RDMA_CM_EVENT_ADDR_ERROR: case RDMA_CM_EVENT_ROUTE_ERROR:
		return 1;
	default:
		return 0;
	}
}

int main(int argc, char **argv)
{
	if (argc != 7) { fprintf(stderr, "cm-agent: see the comment at the top of cm-agent.c\n"); return 2; }
	int listening = !strcmp(argv[1], "listen"), reject = !strcmp(argv[4], "reject"), hold = atoi(argv[6]), established = 0, over = 0;
	struct rdma_cm_id *listener = NULL, *id;
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = listening ? RAI_PASSIVE : 0 }, *ai;
	parse_hex(argv[5]);
	channel = rdma_create_event_channel();
	if (!channel || rdma_getaddrinfo(argv[2], argv[3], &hints, &ai)) return fail("getaddrinfo");
	if (rdma_create_id(channel, &id, NULL, RDMA_PS_TCP)) return fail("create_id");
	if (listening) {
		listener = id;
		if (rdma_bind_addr(id, ai->ai_src_addr) || rdma_listen(id, 4)) return fail("listen");
		printf("listening\n");
	} else if (rdma_resolve_addr(id, NULL, ai->ai_dst_addr, 5000)) return fail("resolve_addr");
	fflush(stdout);
	while (!over) {
		struct pollfd p = { .fd = channel->fd, .events = POLLIN };
		int n = poll(&p, 1, established && hold >= 0 ? hold : 200000);
		if (n == 0 && established && hold >= 0) { rdma_disconnect(id); hold = -1; continue; }
		if (n == 0) { printf("failed: no event\n"); return 1; }
		struct rdma_cm_event *e;
		if (rdma_get_cm_event(channel, &e)) return fail("get_cm_event");
		if (e->event != RDMA_CM_EVENT_ADDR_RESOLVED && e->event != RDMA_CM_EVENT_ROUTE_RESOLVED) print_event(e);
		over = handle(e, &id, reject, &established);
		rdma_ack_cm_event(e);
	}
	printf("over\n");
	fflush(stdout);
	(void)listener;
	return over == 2;
}
