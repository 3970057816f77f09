/*
 * A library may close what it has opened when the program unloads it, as libdaplofa does: its destructors run under the dynamic
 * linker's lock, which a thread that has only just been started may be waiting for.
 *
 *     cc -shared -fPIC -DLIBRARY      the library
 *     unloaded LIBRARY ADDRESS        loads and unloads it
 */
#include <arpa/inet.h>
#include <dlfcn.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>

#define MUST(what) ((what) ? (void)0 : (perror(#what), exit(1)))

#ifdef LIBRARY

struct use {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *listener;
	struct ibv_context *context;
	struct ibv_comp_channel *completions;
	struct ibv_cq *cq;
};

static struct use held;

void begin(const char *address)
{
	struct use *use = &held;
	struct sockaddr_in at = { .sin_family = AF_INET };
	struct ibv_device **list;

	MUST(inet_pton(AF_INET, address, &at.sin_addr) == 1);
	MUST(use->channel = rdma_create_event_channel());
	MUST(!rdma_create_id(use->channel, &use->listener, NULL, RDMA_PS_TCP));
	MUST(!rdma_bind_addr(use->listener, (struct sockaddr *)&at) && !rdma_listen(use->listener, 1));
	MUST((list = ibv_get_device_list(NULL)) && list[0]);
	MUST(use->context = ibv_open_device(list[0]));
	ibv_free_device_list(list);
	MUST(use->completions = ibv_create_comp_channel(use->context));
	MUST(use->cq = ibv_create_cq(use->context, 16, NULL, use->completions, 0));
}

__attribute__((destructor)) static void end(void)
{
	struct use *use = &held;

	MUST(!ibv_destroy_cq(use->cq) && !ibv_destroy_comp_channel(use->completions) && !ibv_close_device(use->context));
	MUST(!rdma_destroy_id(use->listener));
	rdma_destroy_event_channel(use->channel);
}

#else

int main(int argc, char **argv)
{
	MUST(argc == 3);
	for (int time = 0; time < 50; time++) {
		void *library = dlopen(argv[1], RTLD_NOW), (*begin)(const char *);

		if (!library || !(begin = dlsym(library, "begin"))) {
			fprintf(stderr, "%s\n", dlerror());
			return 1;
		}
		begin(argv[2]);
		MUST(!dlclose(library));
	}
	puts("it came and went");
	return 0;
}

#endif
