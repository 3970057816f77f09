/* RDMA of AF_RDS, on a kernel's RDS and under `ferroce run`.
 *   rds-rdma ADDRESS PEER PORT    offers memory to the peer, which reads and writes it; then reads and writes what the peer offers
 *   rds-rdma ADDRESS PORT         is such a peer
 * Prints a line for each step; exit status 0 if all bytes are where they should be. */
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define SOL_RDS 276
#define LEN 60000
enum { ARGS = 1, DEST = 2, MAP = 3, STATUS = 4 };
enum { READWRITE = 1, FENCE = 2, NOTIFY_ME = 0x20 };

struct iov { uint64_t addr, bytes; };
struct map { struct iov vec; uint64_t cookie_addr, flags; };
struct args { uint64_t cookie; struct iov remote; uint64_t local, nr_local, flags, token; };
struct status { uint64_t token; int32_t status; };

static int s;
static struct sockaddr_storage peer;
static socklen_t peer_len;

static _Noreturn void fail(const char *what)
{
	printf("%s: %s\n", what, strerror(errno));
	exit(1);
}

static socklen_t address(struct sockaddr_storage *out, const char *host, const char *port)
{
	struct addrinfo hints = { .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV, .ai_socktype = SOCK_DGRAM }, *found;
	if (getaddrinfo(host, port, &hints, &found))
		fail("address");
	memcpy(out, found->ai_addr, found->ai_addrlen);
	return found->ai_addrlen;
}

static void send_with(const char *text, int type, void *what, size_t len)
{
	union { char bytes[CMSG_SPACE(64)]; struct cmsghdr align; } control = { 0 };
	struct iovec data = { (void *)text, strlen(text) };
	struct msghdr m = { .msg_name = &peer, .msg_namelen = peer_len, .msg_iov = &data, .msg_iovlen = 1,
			    .msg_control = &control, .msg_controllen = CMSG_SPACE(len) };
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	c->cmsg_level = SOL_RDS;
	c->cmsg_type = type;
	c->cmsg_len = CMSG_LEN(len);
	memcpy(CMSG_DATA(c), what, len);
	/* Before the first connection there is no device to register with, and while it begins the queue pair takes no registration. */
	for (int tries = 0; sendmsg(s, &m, 0) < 0; tries++) {
		int too_early = errno == EAGAIN || (errno == EINVAL && type == MAP);
		if (!too_early || tries > 300)
			fail(text);
		usleep(100000);
	}
}

/* Receives the message `text` with a control message of a type, or a control message alone. */
static void receive(const char *text, int type, void *what, size_t len)
{
	char got[64] = { 0 };
	union { char bytes[CMSG_SPACE(64)]; struct cmsghdr align; } control;
	struct iovec data = { got, sizeof got - 1 };
	struct msghdr m = { .msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control };
	if (type == DEST && !peer_len)
		m.msg_name = &peer, m.msg_namelen = sizeof peer;
	if (recvmsg(s, &m, 0) < 0)
		fail(text);
	if (m.msg_name)
		peer_len = m.msg_namelen;
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	if (strcmp(got, text) || (type && (!c || c->cmsg_level != SOL_RDS || c->cmsg_type != type))) {
		printf("`%s` came instead of `%s` with control message %d\n", got, text, type);
		exit(1);
	}
	if (type)
		memcpy(what, CMSG_DATA(c), len);
}

static void fill(unsigned char *at, int seed)
{
	for (int i = 0; i < LEN; i++)
		at[i] = i * 7 + i / 256 + seed;
}

static void check(const unsigned char *at, int seed, const char *what)
{
	for (int i = 0; i < LEN; i++)
		if (at[i] != (unsigned char)(i * 7 + i / 256 + seed)) {
			printf("%s: byte %d is %02x\n", what, i, at[i]);
			exit(1);
		}
	printf("%s: %d bytes\n", what, LEN);
	fflush(stdout);
}

/* Operates on a part of the peer's memory, and of ours. A message goes with it: the kernel reports an operation without one only when
 * another has completed. */
static void operate_at(uint64_t cookie, unsigned char *memory, size_t at, size_t len, uint64_t flags, const char *text)
{
	/* Two pieces. */
	struct iov local[2] = { { (uintptr_t)memory + at, 1000 }, { (uintptr_t)memory + at + 1000, len - 1000 } };
	struct args args = { cookie, { at, len }, (uintptr_t)local, 2, flags | NOTIFY_ME, 77 };
	struct status status;
	send_with(text, ARGS, &args, sizeof args);
	receive("", STATUS, &status, sizeof status);
	if (status.token != 77 || status.status) {
		printf("%s: status %d of operation %d\n", text, status.status, (int)status.token);
		exit(1);
	}
}

static void operate(uint64_t cookie, unsigned char *memory, uint64_t flags, const char *text)
{
	operate_at(cookie, memory, 0, LEN, flags, text);
}

static void offer(unsigned char *memory, int seed)
{
	uint64_t cookie;
	fill(memory, seed);
	struct map map = { { (uintptr_t)memory, LEN }, (uintptr_t)&cookie, READWRITE };
	send_with("offer", MAP, &map, sizeof map);
}

static void call(unsigned char *offered, unsigned char *own)
{
	uint64_t theirs;
	offer(offered, 1);
	receive("got", 0, NULL, 0);
	receive("end", 0, NULL, 0);
	receive("written", 0, NULL, 0);
	check(offered, 2, "WRITE of the peer");
	receive("offer", DEST, &theirs, sizeof theirs);
	operate(theirs, own, FENCE, "read");
	check(own, 3, "READ");
	fill(own, 4);
	operate(theirs, own, READWRITE, "wrote");
	printf("WRITE: %d bytes\n", LEN);
}

static void answer(unsigned char *offered, unsigned char *own)
{
	uint64_t theirs;
	printf("waiting\n");
	fflush(stdout);
	receive("offer", DEST, &theirs, sizeof theirs);
	operate(theirs, own, 0, "got");
	check(own, 1, "READ");
	fill(own, 2);
	/* The end first, so that the offset counts. */
	operate_at(theirs, own, 5000, LEN - 5000, READWRITE, "end");
	operate_at(theirs, own, 0, 5000, READWRITE, "written");
	offer(offered, 3);
	receive("read", 0, NULL, 0);
	receive("wrote", 0, NULL, 0);
	check(offered, 4, "WRITE of the peer");
}

int main(int argc, char **argv)
{
	static unsigned char offered[LEN + 100], own[LEN + 100];
	struct sockaddr_storage local;
	struct timeval limit = { .tv_sec = 60 };
	if (argc != 3 && argc != 4)
		return 2;
	s = socket(21 /* AF_RDS */, SOCK_SEQPACKET, 0);
	if (argc == 4)
		peer_len = address(&peer, argv[2], argv[3]);
	if (s < 0 || bind(s, (struct sockaddr *)&local, address(&local, argv[1], argc == 4 ? "0" : argv[2])))
		fail("bind");
	if (setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit))
		fail("timeout");
	/* Not at the beginning of a page: the cookie has an offset. */
	(argc == 4 ? call : answer)(offered + 100, own + 3);
	return 0;
}
