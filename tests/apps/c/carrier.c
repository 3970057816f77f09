/*
 * A port is active only with a carrier: waits until port 1 of the first device, and its files, say so, or the opposite.
 *
 *     carrier up|down
 */
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void file(const struct ibv_device *device, const char *name, char *text, size_t size)
{
	char path[512];
	ssize_t count;
	int fd;

	snprintf(path, sizeof(path), "%s/ports/1/%s", device->ibdev_path, name);
	fd = open(path, O_RDONLY);
	count = fd < 0 ? -1 : read(fd, text, size - 1);
	text[count < 0 ? 0 : count] = 0;
	close(fd);
}

int main(int argc, char **argv)
{
	int up = argc > 1 && !strcmp(argv[1], "up");
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;
	time_t end = time(NULL) + 60;
	char state[64], phys[64];
	struct ibv_port_attr port;

	if (!context)
		return 1;
	do {
		if (ibv_query_port(context, 1, &port))
			return 1;
		file(list[0], "state", state, sizeof(state));
		file(list[0], "phys_state", phys, sizeof(phys));
		/* 2: polling, 5: link up. */
		if (port.state == (up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN) && port.phys_state == (up ? 5 : 2) &&
		    !strcmp(state, up ? "4: ACTIVE\n" : "1: DOWN\n") && !strcmp(phys, up ? "5: LinkUp\n" : "2: Polling\n")) {
			printf("the link is %s\n", up ? "up" : "down");
			return 0;
		}
		usleep(20000);
	} while (time(NULL) < end);
	fprintf(stderr, "state %d, %d; %s%s", port.state, port.phys_state, state, phys);
	return 1;
}
