/*
 * Opens the device of a name, as perftest and ibv_rc_pingpong do with -d, and fails with a message of its own if there is none.
 *
 *     named NAME
 */
#include <infiniband/verbs.h>
#include <stdio.h>
#include <string.h>

int main(int argc, char **argv)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	for (; argc > 1 && list && *list; list++)
		if (!strcmp(ibv_get_device_name(*list), argv[1]))
			return !ibv_open_device(*list);
	fprintf(stderr, "IB device %s not found\n", argc > 1 ? argv[1] : "");
	return 1;
}
