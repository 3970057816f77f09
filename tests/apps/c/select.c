/*
 * select() by poll() without waiting, in front of librspreload. Of rdma-core 44's rsockets, select() reports the library's own
 * descriptors instead of the program's (mended in 7ea19e136), and a poll() whose time runs out leaves a count behind
 * that makes the next ones spin for ever (a1747742e).
 */
#include <poll.h>
#include <sys/select.h>
#include <time.h>

#define NAP_NS 50000
#define FAILED (POLLHUP | POLLERR)

static long long now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int keep(int fd, fd_set *set, int ready)
{
	if (!ready)
		FD_CLR(fd, set);
	return !!ready;
}

int select(int nfds, fd_set *readable, fd_set *writable, fd_set *exceptional, struct timeval *timeout)
{
	long long end = timeout ? now_ns() + timeout->tv_sec * 1000000000LL + timeout->tv_usec * 1000LL : 0;
	struct pollfd fds[FD_SETSIZE];
	int count = 0, found = 0, ready;

	for (int fd = 0; fd < nfds && fd < FD_SETSIZE; fd++) {
		short events = (readable && FD_ISSET(fd, readable) ? POLLIN : 0) |
			       (writable && FD_ISSET(fd, writable) ? POLLOUT : 0) |
			       (exceptional && FD_ISSET(fd, exceptional) ? POLLPRI : 0);
		if (events)
			fds[count++] = (struct pollfd){ .fd = fd, .events = events };
	}
	while (!(ready = poll(fds, count, 0)) && (!timeout || now_ns() < end))
		nanosleep(&(struct timespec){ .tv_nsec = NAP_NS }, NULL);
	if (ready < 0)
		return -1;

	for (int i = 0; i < count; i++) {
		const struct pollfd *p = &fds[i];

		if (p->events & POLLIN)
			found += keep(p->fd, readable, p->revents & (POLLIN | FAILED));
		if (p->events & POLLOUT)
			found += keep(p->fd, writable, p->revents & (POLLOUT | POLLERR));
		if (p->events & POLLPRI)
			found += keep(p->fd, exceptional, p->revents & POLLPRI);
	}
	return found;
}
