/* AF_RDS sockets for the guests.
 *   rds-echo serve ADDRESS PORT          sends back what comes, until it is killed
 *   rds-echo call ADDRESS PEER PORT LEN… sends messages of these lengths, and compares what comes back
 * Prints a line for each message; exit status 0 if all came back as they were sent. */
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>

#define MOST (1 << 20)

static void fail(const char *what)
{
	fprintf(stderr, "rds-echo: %s: %s\n", what, strerror(errno));
	exit(1);
}

static socklen_t address(struct sockaddr_storage *out, const char *host, const char *port)
{
	struct addrinfo hints = { .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV, .ai_socktype = SOCK_DGRAM }, *found;
	if (getaddrinfo(host, port, &hints, &found)) {
		fprintf(stderr, "rds-echo: no address: %s port %s\n", host, port);
		exit(2);
	}
	memcpy(out, found->ai_addr, found->ai_addrlen);
	return found->ai_addrlen;
}

static int bound(const char *host, const char *port)
{
	struct sockaddr_storage own;
	socklen_t len = address(&own, host, port);
	int size = MOST, s = socket(21 /* AF_RDS */, SOCK_SEQPACKET, 0);
	struct timeval limit = { .tv_sec = 60 };
	if (s < 0)
		fail("socket");
	/* The kernel doubles it, and RDS halves it. */
	if (setsockopt(s, SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size) || setsockopt(s, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof size))
		fail("buffers");
	if (setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit))
		fail("timeout");
	if (bind(s, (struct sockaddr *)&own, len))
		fail("bind");
	return s;
}

static unsigned char data[MOST], back[MOST];

static _Noreturn void serve(char **args)
{
	int s = bound(args[0], args[1]);
	for (;;) {
		struct sockaddr_storage from;
		socklen_t len = sizeof from;
		ssize_t got = recvfrom(s, data, sizeof data, 0, (struct sockaddr *)&from, &len);
		if (got < 0 && errno == ETIMEDOUT)
			continue;
		if (got < 0)
			fail("receive");
		if (sendto(s, data, got, 0, (struct sockaddr *)&from, len) != got)
			fail("send");
		printf("%zd bytes sent back\n", got);
		fflush(stdout);
	}
}

static int call(char **args)
{
	struct sockaddr_storage to;
	socklen_t to_len = address(&to, args[1], args[2]);
	int s = bound(args[0], "0");
	for (char **arg = args + 3; *arg; arg++) {
		size_t len = strtoul(*arg, NULL, 10);
		for (size_t i = 0; i < len; i++)
			data[i] = i * 7 + len;
		if (sendto(s, data, len, 0, (struct sockaddr *)&to, to_len) != (ssize_t)len)
			fail("send");
		ssize_t got = recv(s, back, sizeof back, 0);
		if (got < 0)
			fail("receive");
		if (got != (ssize_t)len || memcmp(data, back, len)) {
			printf("%zu bytes sent, other %zd came back\n", len, got);
			return 1;
		}
		printf("%zu bytes came back\n", len);
		fflush(stdout);
	}
	return 0;
}

int main(int argc, char **argv)
{
	if (argc == 4 && !strcmp(argv[1], "serve"))
		serve(argv + 2);
	if (argc > 5 && !strcmp(argv[1], "call"))
		return call(argv + 2);
	fprintf(stderr, "usage: rds-echo serve ADDRESS PORT | call ADDRESS PEER PORT LEN...\n");
	return 2;
}
