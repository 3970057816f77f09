/* What the programs about the interface begin and end with: a device, and objects of it that every test needs. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void fail(const char *what, int line)
{
	fprintf(stderr, "line %d: %s: %s\n", line, what, strerror(errno));
	exit(1);
}

#define MUST(x) do { errno = 0; if (!(x)) fail(#x, __LINE__); } while (0)

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static union ibv_gid own;
static struct ibv_device_attr limits;

static void set_up(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	MUST(list && list[0] && (context = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	MUST(!ibv_query_gid(context, 1, 0, &own));
	MUST(!ibv_query_device(context, &limits));
	MUST(pd = ibv_alloc_pd(context));
	MUST(cq = ibv_create_cq(context, 64, NULL, NULL, 0));
}

static void tear_down(const char *says)
{
	MUST(!ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd));
	MUST(!ibv_close_device(context));
	puts(says);
}
