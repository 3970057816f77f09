/*
 * Requests of one host that fill a listener's backlog, and requests that the program collects before it answers any.
 *
 *     backlog ADDRESS [--each [BUT …]]
 */
#include "common.h"

#include <arpa/inet.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdbool.h>

enum { MOST = 128, SECOND = 1000, TIMEOUT = 30 * SECOND };

static const char *address;
static struct rdma_event_channel *ours, *theirs;
static struct rdma_cm_id *listener;
static struct sockaddr_in to = { .sin_family = AF_INET };
static struct ibv_qp_init_attr how = { .qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 1, .max_recv_wr = 1,
									.max_send_sge = 1, .max_recv_sge = 1 } };
static struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1, .retry_count = 7,
					.rnr_retry_count = 7 };

/* Takes the next event, which must be of this kind, and acknowledges it. */
static struct rdma_cm_id *next(struct rdma_event_channel *on, enum rdma_cm_event_type kind)
{
	struct pollfd ready = { .fd = on->fd, .events = POLLIN };
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	MUST(poll(&ready, 1, TIMEOUT) == 1 && !rdma_get_cm_event(on, &event));
	if (event->event != kind) {
		fprintf(stderr, "%s (%d), not %s\n", rdma_event_str(event->event), event->status, rdma_event_str(kind));
		exit(1);
	}
	id = event->id;
	MUST(!rdma_ack_cm_event(event));
	return id;
}

static void begin(int backlog, enum rdma_port_space space)
{
	MUST(inet_pton(AF_INET, address, &to.sin_addr) == 1);
	to.sin_port = 0;
	MUST((ours = rdma_create_event_channel()) && (theirs = rdma_create_event_channel()));
	MUST(!rdma_create_id(ours, &listener, NULL, space));
	MUST(!rdma_bind_addr(listener, (struct sockaddr *)&to));
	MUST(!rdma_listen(listener, backlog));
	to.sin_port = rdma_get_src_port(listener);
}

static void end(struct rdma_cm_id **ids, int count)
{
	for (int i = 0; i < count; i++) {
		rdma_destroy_qp(ids[i]);
		MUST(!rdma_destroy_id(ids[i]));
	}
}

static void finish(void)
{
	MUST(!rdma_destroy_id(listener));
	rdma_destroy_event_channel(theirs);
	rdma_destroy_event_channel(ours);
}

static void connect_all(struct rdma_cm_id **clients, int count, enum rdma_port_space space)
{
	for (int i = 0; i < count; i++) {
		MUST(!rdma_create_id(theirs, &clients[i], NULL, space));
		MUST(!rdma_resolve_addr(clients[i], NULL, (struct sockaddr *)&to, TIMEOUT));
		next(theirs, RDMA_CM_EVENT_ADDR_RESOLVED);
		MUST(!rdma_resolve_route(clients[i], TIMEOUT));
		next(theirs, RDMA_CM_EVENT_ROUTE_RESOLVED);
		MUST(!rdma_create_qp(clients[i], NULL, &how));
	}
	for (int i = 0; i < count; i++)
		MUST(!rdma_connect(clients[i], &param));
}

/* Fetches all requests before it answers any. */
static void collect_and_accept(struct rdma_cm_id **servers, int count, bool datagrams)
{
	for (int i = 0; i < count; i++) {
		servers[i] = next(ours, RDMA_CM_EVENT_CONNECT_REQUEST);
		MUST(!rdma_create_qp(servers[i], NULL, &how));
	}
	for (int i = 0; i < count; i++) {
		param.qp_num = servers[i]->qp->qp_num;
		MUST(!rdma_accept(servers[i], &param));
	}
	for (int i = 0; i < count; i++)
		next(theirs, RDMA_CM_EVENT_ESTABLISHED);
	for (int i = 0; !datagrams && i < count; i++)
		next(ours, RDMA_CM_EVENT_ESTABLISHED);
}

/* A program that takes no event until all its clients have asked. */
static void one_host_fills(int backlog)
{
	struct rdma_cm_id *clients[MOST], *servers[MOST];

	begin(backlog, RDMA_PS_TCP);
	connect_all(clients, backlog, RDMA_PS_TCP);
	usleep(SECOND * 1000 / 2);
	collect_and_accept(servers, backlog, false);
	end(clients, backlog);
	end(servers, backlog);
	finish();
}

static void one_host_fills_a_backlog_of_1(void)
{
	one_host_fills(1);
}

static void one_host_fills_a_backlog_of_4(void)
{
	one_host_fills(4);
}

static void one_host_fills_a_backlog_of_8(void)
{
	one_host_fills(8);
}

static void one_host_fills_a_backlog_of_32(void)
{
	one_host_fills(32);
}

static void one_host_fills_a_backlog_of_128(void)
{
	one_host_fills(128);
}

/* The backlog counts requests that the program has not fetched, not those that it has not answered. */
static void collects(int backlog, int count, enum rdma_port_space space)
{
	struct rdma_cm_id *clients[MOST], *servers[MOST];

	how.qp_type = space == RDMA_PS_UDP ? IBV_QPT_UD : IBV_QPT_RC;
	begin(backlog, space);
	connect_all(clients, count, space);
	collect_and_accept(servers, count, space == RDMA_PS_UDP);
	end(clients, count);
	end(servers, count);
	finish();
	how.qp_type = IBV_QPT_RC;
}

static void requests_that_are_fetched_leave_the_backlog(void)
{
	collects(1, 8, RDMA_PS_TCP);
}

static void datagram_requests_that_are_fetched_leave_the_backlog(void)
{
	collects(1, 8, RDMA_PS_UDP);
}

static void done(void)
{
	tear_down("every request has arrived");
}

int main(int argc, char **argv)
{
	static const struct check checks[] = {
		CHECK(one_host_fills_a_backlog_of_1),
		CHECK(one_host_fills_a_backlog_of_4),
		CHECK(one_host_fills_a_backlog_of_8),
		CHECK(one_host_fills_a_backlog_of_32),
		CHECK(one_host_fills_a_backlog_of_128),
		CHECK(requests_that_are_fetched_leave_the_backlog),
		CHECK(datagram_requests_that_are_fetched_leave_the_backlog),
	};

	MUST(argc > 1);
	address = argv[1];
	return run(each(argv), checks, COUNT(checks), set_up, done);
}
