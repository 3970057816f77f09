/*
 * Too few file descriptors: whatever needs one fails with EMFILE, and works once there are more.
 *
 *     nofile ADDRESS
 */
#include "common.h"

#include <arpa/inet.h>
#include <rdma/rdma_cma.h>
#include <stdbool.h>
#include <sys/resource.h>

/* More descriptors than a device with its objects needs. */
enum { MOST = 64 };

static const char *address;

static void allow(int descriptors)
{
	struct rlimit limit;

	MUST(!getrlimit(RLIMIT_NOFILE, &limit));
	limit.rlim_cur = descriptors;
	MUST(!setrlimit(RLIMIT_NOFILE, &limit));
}

/* Whether a call has succeeded; if not it must have been for want of descriptors. */
static bool done(const char *what, bool success, bool enough)
{
	if (success)
		return true;
	if (errno != EMFILE || enough)
		fail(what, __LINE__);
	return false;
}

#define DONE(call) (errno = 0, done(#call, call, enough))
/* Of librdmacm, which says ENODEV for whatever keeps it from opening a device. */
#define LISTENS(call) (errno = 0, (call) || (errno == ENODEV && !enough ? false : done(#call, false, enough)))

/* Opens a device and makes what needs descriptors; frees all of it. Returns whether everything worked. */
static bool uses_a_device(bool enough)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_addr.s_addr = inet_addr(address) };
	struct ibv_device **list = NULL;
	struct ibv_comp_channel *channel = NULL;
	struct rdma_event_channel *events = NULL;
	struct rdma_cm_id *id = NULL;
	struct ibv_context *with = NULL;
	struct ibv_pd *in = NULL;
	struct ibv_cq *queue = NULL;
	bool all = DONE((list = ibv_get_device_list(NULL)) != NULL) && DONE((with = ibv_open_device(list[0])) != NULL) &&
		   DONE((in = ibv_alloc_pd(with)) != NULL) && DONE((channel = ibv_create_comp_channel(with)) != NULL) &&
		   DONE((queue = ibv_create_cq(with, 16, NULL, channel, 0)) != NULL) &&
		   DONE((events = rdma_create_event_channel()) != NULL) &&
		   LISTENS(!rdma_create_id(events, &id, NULL, RDMA_PS_TCP)) &&
		   LISTENS(!rdma_bind_addr(id, (struct sockaddr *)&to)) && LISTENS(!rdma_listen(id, 1));

	if (id)
		MUST(!rdma_destroy_id(id));
	if (events)
		rdma_destroy_event_channel(events);
	if (queue)
		MUST(!ibv_destroy_cq(queue));
	if (channel)
		MUST(!ibv_destroy_comp_channel(channel));
	if (in)
		MUST(!ibv_dealloc_pd(in));
	if (with)
		MUST(!ibv_close_device(with));
	if (list)
		ibv_free_device_list(list);
	return all;
}

/* In a process of its own, since what is opened once stays open. Returns whether the descriptors were enough. */
static bool suffices(int descriptors)
{
	pid_t child = fork();
	int status;
	bool all;

	MUST(child >= 0);
	if (!child) {
		alarm(60);
		allow(descriptors);
		all = uses_a_device(false);
		allow(MOST);
		uses_a_device(true);
		_exit(all ? 0 : 2);
	}
	MUST(waitpid(child, &status, 0) == child);
	if (!WIFEXITED(status) || (WEXITSTATUS(status) && WEXITSTATUS(status) != 2)) {
		fprintf(stderr, "with %d descriptors\n", descriptors);
		exit(1);
	}
	return !WEXITSTATUS(status);
}

static void too_few_descriptors_are_emfile(void)
{
	int few = 4;

	while (!suffices(few))
		MUST(++few < MOST);
	printf("%d descriptors are enough, and fewer are EMFILE\n", few);
}

int main(int argc, char **argv)
{
	MUST(argc > 1);
	address = argv[1];
	too_few_descriptors_are_emfile();
	return 0;
}
