/* RDMA of AF_RDS for the guests.
 *   rds-rdma ADDRESS PEER PORT    offers memory to the peer, which reads and writes it; then reads and writes what the peer offers
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
	if (recvmsg(s, &m, 0) < 0)
		fail(text);
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

static void operate(uint64_t cookie, unsigned char *at, uint64_t flags, const char *text)
{
	/* Two pieces. */
	struct iov local[2] = { { (uintptr_t)at, 1000 }, { (uintptr_t)at + 1000, LEN - 1000 } };
	struct args args = { cookie, { 0, LEN }, (uintptr_t)local, 2, flags | NOTIFY_ME, 77 };
	struct status status;
	send_with(text, ARGS, &args, sizeof args);
	receive("", STATUS, &status, sizeof status);
	if (status.token != 77 || status.status) {
		printf("%s: status %d of operation %d\n", text, status.status, (int)status.token);
		exit(1);
	}
}

int main(int argc, char **argv)
{
	static unsigned char offered[LEN + 100], own[LEN + 100];
	struct sockaddr_storage local;
	struct timeval limit = { .tv_sec = 60 };
	uint64_t cookie, theirs;
	if (argc != 4)
		return 2;
	s = socket(21 /* AF_RDS */, SOCK_SEQPACKET, 0);
	peer_len = address(&peer, argv[2], argv[3]);
	if (s < 0 || bind(s, (struct sockaddr *)&local, address(&local, argv[1], "0")))
		fail("bind");
	if (setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit))
		fail("timeout");
	/* Not at the beginning of a page: the cookie has an offset. */
	fill(offered + 100, 1);
	struct map map = { { (uintptr_t)offered + 100, LEN }, (uintptr_t)&cookie, READWRITE };
	send_with("offer", MAP, &map, sizeof map);
	receive("written", 0, NULL, 0);
	check(offered + 100, 2, "WRITE to the kernel");
	receive("offer", DEST, &theirs, sizeof theirs);
	operate(theirs, own + 3, FENCE, "read");
	check(own + 3, 3, "READ by the kernel");
	fill(own + 3, 4);
	operate(theirs, own + 3, READWRITE, "wrote");
	printf("WRITE by the kernel: %d bytes\n", LEN);
	return 0;
}
