/*
 * rdma_resolve_addr towards hosts that exist, do not exist and come later.
 *
 *     resolve PRESENT ABSENT LATE COMMAND [--each [BUT …]]
 *
 * COMMAND makes LATE exist.
 */
#include "common.h"

#include <arpa/inet.h>
#include <poll.h>
#include <rdma/rdma_cma.h>

enum { SECOND = 1000, TIMEOUT = 30 * SECOND };

static const char *present, *absent, *late, *command;

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

static struct rdma_cm_id *resolve(struct rdma_event_channel *on, struct rdma_cm_id *id, const char *host, int ms)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(7471) };

	MUST(inet_pton(AF_INET, host, &to.sin_addr) == 1);
	if (!id)
		MUST(!rdma_create_id(on, &id, NULL, RDMA_PS_TCP));
	MUST(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, ms));
	return id;
}

/* Takes the next event, which must be this one of this identifier. */
static void ends(struct rdma_event_channel *on, struct rdma_cm_id *id, enum rdma_cm_event_type kind, int status)
{
	struct pollfd ready = { .fd = on->fd, .events = POLLIN };
	struct rdma_cm_event *event;

	MUST(poll(&ready, 1, TIMEOUT) == 1 && !rdma_get_cm_event(on, &event));
	if (event->event != kind || event->status != status) {
		fprintf(stderr, "%s (%d), not %s (%d)\n", rdma_event_str(event->event), event->status,
			rdma_event_str(kind), status);
		exit(1);
	}
	MUST(event->id == id);
	MUST(!rdma_ack_cm_event(event));
}

static void hosts_that_exist_are_resolved(void)
{
	struct rdma_event_channel *on = rdma_create_event_channel();
	struct rdma_cm_id *id;

	/* The second time its link address is known. */
	for (int i = 0; i < 2; i++) {
		id = resolve(on, NULL, present, TIMEOUT);
		ends(on, id, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
		MUST(!rdma_resolve_route(id, TIMEOUT));
		ends(on, id, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
		MUST(!rdma_destroy_id(id));
	}
	rdma_destroy_event_channel(on);
}

static void hosts_that_do_not_exist_end_with_the_timeout(void)
{
	struct rdma_event_channel *on = rdma_create_event_channel();
	struct pollfd ready = { .fd = on->fd, .events = POLLIN };
	double begin = now();
	struct rdma_cm_id *slow = resolve(on, NULL, absent, 2 * SECOND), *quick = resolve(on, NULL, absent, SECOND / 2);

	/* Neither call has waited. */
	MUST(!poll(&ready, 1, 0) && now() - begin < SECOND / 2);
	ends(on, quick, RDMA_CM_EVENT_ADDR_ERROR, -ETIMEDOUT);
	MUST(now() - begin >= SECOND / 2);
	ends(on, slow, RDMA_CM_EVENT_ADDR_ERROR, -ETIMEDOUT);
	MUST(now() - begin >= 2 * SECOND && now() - begin < TIMEOUT);
	resolve(on, slow, absent, 0);
	ends(on, slow, RDMA_CM_EVENT_ADDR_ERROR, -ETIMEDOUT);
	/* An identifier can try another host then. */
	resolve(on, quick, present, TIMEOUT);
	ends(on, quick, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	MUST(!rdma_destroy_id(slow) && !rdma_destroy_id(quick));
	rdma_destroy_event_channel(on);
}

static void hosts_that_come_later_are_resolved(void)
{
	struct rdma_event_channel *on = rdma_create_event_channel();
	struct rdma_cm_id *id = resolve(on, NULL, late, TIMEOUT);

	usleep(SECOND * 1000 / 2);
	MUST(!system(command));
	ends(on, id, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	MUST(!rdma_destroy_id(id));
	rdma_destroy_event_channel(on);
}

static void identifiers_that_are_being_resolved_can_be_destroyed(void)
{
	struct rdma_event_channel *on = rdma_create_event_channel();
	struct rdma_cm_id *id = resolve(on, NULL, absent, TIMEOUT), *other = resolve(on, NULL, absent, -1);

	MUST(!rdma_destroy_id(id) && !rdma_destroy_id(other));
	id = resolve(on, NULL, present, TIMEOUT);
	ends(on, id, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	MUST(!rdma_destroy_id(id));
	rdma_destroy_event_channel(on);
}

static void end(void)
{
	tear_down("addresses are resolved in time");
}

int main(int argc, char **argv)
{
	static const struct check checks[] = {
		CHECK(hosts_that_exist_are_resolved),
		CHECK(hosts_that_do_not_exist_end_with_the_timeout),
		CHECK(hosts_that_come_later_are_resolved),
		CHECK(identifiers_that_are_being_resolved_can_be_destroyed),
	};

	MUST(argc > 4);
	present = argv[1];
	absent = argv[2];
	late = argv[3];
	command = argv[4];
	return run(each(argv), checks, COUNT(checks), set_up, end);
}
