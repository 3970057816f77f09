/*
 * Signals that a program has blocked on all of its threads to take them by signalfd reach no thread of the library, where
 * they would end the process: a device, a queue pair, and a listener of RDMA_CM are open while they come.
 *
 *     signals ADDRESS
 */
#include "common.h"

#include <arpa/inet.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <sys/signalfd.h>

/* How often each signal comes. */
#define TIMES 100

static const int OURS[] = { SIGUSR1, SIGUSR2, SIGALRM, SIGCHLD, SIGIO, SIGHUP };

/* The next signal that the descriptor has, within a minute. */
static int next_signal(int fd)
{
	struct pollfd entry = { .fd = fd, .events = POLLIN };
	struct signalfd_siginfo info;

	MUST(poll(&entry, 1, 60000) == 1);
	MUST(read(fd, &info, sizeof(info)) == sizeof(info));
	return info.ssi_signo;
}

int main(int argc, char **argv)
{
	struct sockaddr_in at = { .sin_family = AF_INET };
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC,
					 .cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct rdma_event_channel *channel;
	struct rdma_cm_id *listener;
	struct ibv_qp *qp;
	sigset_t set;
	int fd;

	MUST(argc == 2 && inet_pton(AF_INET, argv[1], &at.sin_addr) == 1);
	set_up();
	init.send_cq = init.recv_cq = cq;
	MUST(qp = ibv_create_qp(pd, &init));
	MUST(channel = rdma_create_event_channel());
	MUST(!rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP));
	MUST(!rdma_bind_addr(listener, (struct sockaddr *)&at) && !rdma_listen(listener, 1));

	sigemptyset(&set);
	for (size_t n = 0; n < (size_t)COUNT(OURS); n++)
		sigaddset(&set, OURS[n]);
	MUST(!sigprocmask(SIG_BLOCK, &set, NULL));
	MUST((fd = signalfd(-1, &set, 0)) >= 0);
	for (int time = 0; time < TIMES; time++)
		for (size_t n = 0; n < (size_t)COUNT(OURS); n++) {
			MUST(!kill(getpid(), OURS[n]));
			MUST(next_signal(fd) == OURS[n]);
		}

	MUST(!close(fd));
	MUST(!rdma_destroy_id(listener));
	rdma_destroy_event_channel(channel);
	MUST(!ibv_destroy_qp(qp));
	tear_down("the signals are the program's");
	return 0;
}
