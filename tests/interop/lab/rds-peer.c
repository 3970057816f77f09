/* AF_RDS sockets: the same program in the guests, on the kernel's RDS, and here under `ferroce run`. ADDRESS is the own one.
 *   rds-peer serve ADDRESS PORT                  sends back what comes, until it is killed
 *   rds-peer call ADDRESS PEER PORT TOS LEN…     sends messages of these lengths, and compares what comes back
 *   rds-peer ping ADDRESS PEER COUNT             sends to port 0, with and without data, and takes the answers
 *   rds-peer take ADDRESS PORT COUNT             takes numbered messages: each once, in order, whole; then tells their sender
 *   rds-peer send ADDRESS PEER PORT COUNT MOST PAUSE   sends them, up to MOST bytes long, PAUSE us apart, and waits for that word
 *   rds-peer slow ADDRESS PORT                   is congested at PORT until it is told otherwise at PORT + 1
 *   rds-peer fill ADDRESS PEER PORT              sends to it until it is congested, and waits for the end of that
 *   rds-peer cancel ADDRESS PEER PORT TOS        cancels what it sent before there was a connection
 *   rds-peer cross ADDRESS PEER FIRST LAST DELAY connects with each of these types of service at the time when the peer does; both run it,
 *                                                one of them with the packets' delay, us, the other one with 0
 *   rds-peer count ADDRESS PORT                  counts messages, and tells their sender when an empty one comes
 *   rds-peer rate ADDRESS PEER PORT LEN SECONDS  sends to it, and prints how many came in a second
 *   rds-peer connections ADDRESS PEER            how many connections there are, and how many are up
 *   rds-peer counter NAME                        a counter of RDS
 * Exit status 0 if all was as it should be. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define MOST (1 << 20)
#define SOL_RDS 276
enum { CANCEL_SENT_TO = 1, CONG_MONITOR = 6, CMSG_CONG_UPDATE = 5 };
enum { INFO_COUNTERS = 10000, INFO_CONNECTIONS = 10001, INFO6_CONNECTIONS = 10011 };
#define SIOCRDSSETTOS 0x89e0

struct address { struct sockaddr_storage at; socklen_t len; };

static unsigned char data[MOST], back[MOST];

__attribute__((format(printf, 1, 2))) static _Noreturn void wrong(const char *text, ...)
{
	va_list list;
	va_start(list, text);
	fputs("rds-peer: ", stdout);
	vprintf(text, list);
	va_end(list);
	putchar('\n');
	exit(1);
}

static _Noreturn void fail(const char *what)
{
	wrong("%s: %s", what, strerror(errno));
}

static struct address address(const char *host, const char *port)
{
	struct addrinfo hints = { .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV, .ai_socktype = SOCK_DGRAM }, *found;
	struct address out = { 0 };
	if (getaddrinfo(host, port, &hints, &found))
		wrong("no address: %s port %s", host, port);
	memcpy(&out.at, found->ai_addr, found->ai_addrlen);
	out.len = found->ai_addrlen;
	return out;
}

static struct address at_port(const char *host, int port)
{
	char text[16];
	snprintf(text, sizeof text, "%d", port);
	return address(host, text);
}

/* Both families have the port at the same place. */
static int port_of(const struct address *a)
{
	return ntohs(((const struct sockaddr_in *)&a->at)->sin_port);
}

static void limit(int s, int seconds)
{
	struct timeval limit = { .tv_sec = seconds };
	if (setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit))
		fail("timeout");
}

static int bound(const char *host, int port, int tos)
{
	struct address own = at_port(host, port);
	unsigned char byte = tos;
	int size = MOST, s = socket(21 /* AF_RDS */, SOCK_SEQPACKET, 0);
	if (s < 0)
		fail("socket");
	/* The kernel doubles it, and RDS halves it. */
	if (setsockopt(s, SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size) || setsockopt(s, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof size))
		fail("buffers");
	limit(s, 60);
	if (bind(s, (struct sockaddr *)&own.at, own.len))
		fail("bind");
	if (tos && ioctl(s, SIOCRDSSETTOS, &byte))
		fail("type of service");
	return s;
}

static void send_to(int s, const void *what, size_t len, const struct address *to)
{
	if (sendto(s, what, len, 0, (const struct sockaddr *)&to->at, to->len) != (ssize_t)len)
		fail("send");
}

static size_t take(int s, struct address *from)
{
	from->len = sizeof from->at;
	ssize_t got = recvfrom(s, back, sizeof back, 0, (struct sockaddr *)&from->at, &from->len);
	if (got < 0)
		fail("receive");
	return got;
}

static void expect(int s, const char *text)
{
	struct address from;
	size_t got = take(s, &from);
	if (got != strlen(text) || memcmp(back, text, got))
		wrong("%.*s came instead of %s", got > 40 ? 40 : (int)got, (char *)back, text);
}

static void waiting(void)
{
	printf("waiting\n");
	fflush(stdout);
}

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static int serve(char **args)
{
	int s = bound(args[0], atoi(args[1]), 0);
	waiting();
	for (;;) {
		struct address from = { .len = sizeof from.at };
		ssize_t got = recvfrom(s, back, sizeof back, 0, (struct sockaddr *)&from.at, &from.len);
		if (got < 0 && errno == ETIMEDOUT)
			continue;
		if (got < 0)
			fail("receive");
		send_to(s, back, got, &from);
		printf("%zd bytes sent back\n", got);
		fflush(stdout);
	}
}

static int call(char **args)
{
	struct address to = address(args[1], args[2]), from;
	int s = bound(args[0], 0, atoi(args[3]));
	for (char **arg = args + 4; *arg; arg++) {
		size_t len = strtoul(*arg, NULL, 10);
		for (size_t i = 0; i < len; i++)
			data[i] = i * 7 + len;
		send_to(s, data, len, &to);
		size_t got = take(s, &from);
		if (got != len || memcmp(data, back, len))
			wrong("%zu bytes sent, other %zu came back", len, got);
		printf("%zu bytes came back\n", len);
		fflush(stdout);
	}
	return 0;
}

static int ping(char **args)
{
	struct address to = address(args[1], "0"), from;
	int s = bound(args[0], 0, 0), count = atoi(args[2]);
	for (int i = 0; i < count; i++) {
		send_to(s, data, i % 2 * 32, &to);
		size_t got = take(s, &from);
		if (got || port_of(&from))
			wrong("%zu bytes from port %d came instead of an answer", got, port_of(&from));
	}
	printf("%d pings answered\n", count);
	return 0;
}

/* Message `n` of a stream, and its length. */
static size_t numbered(uint32_t n, size_t most)
{
	size_t len = 4 + n * 2654435761u % (most - 3);
	memcpy(data, &n, 4);
	for (size_t i = 4; i < len; i++)
		data[i] = i * 3 + n;
	return len;
}

static int take_all(char **args)
{
	int s = bound(args[0], atoi(args[1]), 0);
	uint32_t count = atoi(args[2]), most = 0;
	struct address from;
	waiting();
	limit(s, 120);
	for (uint32_t n = 0; n < count; n++) {
		size_t got = take(s, &from);
		if (!n)
			memcpy(&most, back + 4, 4);
		else if (got != numbered(n, most) || memcmp(data, back, got))
			wrong("message %u of %zu bytes came instead of message %u", *(uint32_t *)back, got, n);
	}
	send_to(s, "all", 3, &from);
	/* What is not acknowledged goes with its socket. */
	expect(s, "good");
	printf("%u messages in order\n", count);
	return 0;
}

static int send_all(char **args)
{
	struct address to = address(args[1], args[2]);
	int s = bound(args[0], 0, 0);
	uint32_t count = atoi(args[3]), most = atoi(args[4]), first[2] = { 0, most };
	send_to(s, first, sizeof first, &to);
	for (uint32_t n = 1; n < count; n++) {
		send_to(s, data, numbered(n, most), &to);
		if (atoi(args[5]))
			usleep(atoi(args[5]));
		if (n == count / 8) {
			printf("under way\n");
			fflush(stdout);
		}
	}
	limit(s, 120);
	expect(s, "all");
	send_to(s, "good", 4, &to);
	printf("%u messages sent\n", count);
	sleep(1);
	return 0;
}

static int slow(char **args)
{
	int port = atoi(args[1]), s = bound(args[0], port, 0), other = bound(args[0], port + 1, 0), size = 16384;
	struct address from;
	uint32_t n = 0;
	if (setsockopt(s, SOL_SOCKET, SO_RCVBUF, &size, sizeof size))
		fail("buffer");
	waiting();
	/* Other ports of the host are open. */
	expect(other, "open");
	take(other, &from);
	uint32_t total = *(uint32_t *)back;
	send_to(other, "open", 4, &from);
	expect(other, "read");
	for (; n < total; n++) {
		take(s, &from);
		if (*(uint32_t *)back != n)
			wrong("message %u came instead of message %u", *(uint32_t *)back, n);
	}
	take(s, &from);
	send_to(s, "free", 4, &from);
	expect(other, "close");
	close(s);
	expect(other, "over");
	printf("%u messages read in order\n", n + 1);
	return 0;
}

/* Sends until the port is congested. Returns how many messages it took. */
static uint32_t fill_port(int s, const struct address *to)
{
	for (uint32_t n = 0; n < 10000;) {
		struct pollfd p = { .fd = s, .events = POLLOUT };
		memcpy(data, &n, 4);
		if (sendto(s, data, 4096, MSG_DONTWAIT, (const struct sockaddr *)&to->at, to->len) == 4096)
			n++;
		else if (errno == ENOBUFS)
			return n;
		else if (errno != EAGAIN || poll(&p, 1, 10000) != 1)
			fail("send to a port that nobody reads");
	}
	wrong("a port that nobody reads takes everything");
}

/* Takes a report of ports that are free again. */
static void expect_free(int s, int port)
{
	union { char bytes[64]; struct cmsghdr align; } control = { 0 };
	struct msghdr m = { .msg_control = &control, .msg_controllen = sizeof control };
	uint64_t mask = 0;
	ssize_t got = recvmsg(s, &m, 0);
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	if (got)
		fail("report of free ports");
	if (c && c->cmsg_level == SOL_RDS && c->cmsg_type == CMSG_CONG_UPDATE)
		memcpy(&mask, CMSG_DATA(c), sizeof mask);
	if (mask != 1ull << port % 64)
		wrong("ports %llx are free", (unsigned long long)mask);
}

static int fill(char **args)
{
	int port = atoi(args[2]), s = bound(args[0], 0, 0), second = bound(args[0], 0, 0), on = 1;
	struct address to = at_port(args[1], port), other = at_port(args[1], port + 1);
	if (setsockopt(s, SOL_RDS, CONG_MONITOR, &on, sizeof on))
		fail("monitor");
	uint32_t count = fill_port(s, &to);
	send_to(second, "open", 4, &other);
	send_to(second, &count, sizeof count, &other);
	expect(second, "open");
	if (sendto(s, data, 1, MSG_DONTWAIT, (struct sockaddr *)&to.at, to.len) != -1 || errno != ENOBUFS)
		wrong("the port is free before it is read");
	send_to(second, "read", 4, &other);
	expect_free(s, port);
	send_to(s, "last", 4, &to);
	expect(s, "free");
	fill_port(s, &to);
	send_to(second, "close", 5, &other);
	expect_free(s, port);
	send_to(second, "over", 4, &other);
	printf("congested after %u messages of 4096 bytes; free by reading, and by closing\n", count);
	sleep(1);
	return 0;
}

static int cancel(char **args)
{
	struct address to = address(args[1], args[2]), from;
	int s = bound(args[0], 0, atoi(args[3]));
	for (int i = 0; i < 5; i++)
		send_to(s, "gone", 4, &to);
	if (setsockopt(s, SOL_RDS, CANCEL_SENT_TO, &to.at, to.len))
		fail("cancel");
	for (int i = 0; i < 3; i++)
		send_to(s, &i, sizeof i, &to);
	for (int i = 0; i < 3; i++)
		if (take(s, &from) != sizeof i || memcmp(back, &i, sizeof i))
			wrong("%.4s came instead of message %d", (char *)back, i);
	limit(s, 1);
	if (recv(s, back, sizeof back, 0) != -1 || errno != ETIMEDOUT)
		wrong("a message came after the last");
	printf("5 messages cancelled, the 3 after them came back\n");
	return 0;
}

/* Takes messages until this one comes. */
static void wait_for(int s, const char *word)
{
	struct address from;
	while (take(s, &from) != strlen(word) || memcmp(back, word, strlen(word)))
		;
}

/* Both say that they are ready until they hear it. */
static void meet(int s, const struct address *to)
{
	struct timeval timeout = { .tv_usec = 300000 };
	setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
	for (int tries = 0;; tries++) {
		send_to(s, "ready", 5, to);
		if (recv(s, back, sizeof back, 0) > 0)
			break;
		if (tries > 200)
			wrong("the peer is not there");
	}
	/* The first may have come before the peer's socket. */
	send_to(s, "ready", 5, to);
	limit(s, 60);
}

static int cross(char **args)
{
	/* ms between them; how many at a time: a guest takes seconds for hundreds. */
	enum { CONTROL = 5999, PORT = 6000, APART = 40, BATCH = 20 };
	static int sockets[256];
	int first = atoi(args[2]), last = atoi(args[3]), control = bound(args[0], CONTROL, 0);
	double delay = atof(args[4]) / 1e6;
	struct address to = at_port(args[1], CONTROL);
	for (int tos = first; tos <= last; tos++)
		sockets[tos] = bound(args[0], PORT + tos, tos);
	meet(control, &to);
	for (int begin = first; begin <= last; begin += BATCH) {
		int end = begin + BATCH - 1 < last ? begin + BATCH - 1 : last;
		if (delay > 0)
			send_to(control, "go", 2, &to);
		else
			wait_for(control, "go");
		double start = now() + delay;
		for (int tos = begin; tos <= end; tos++) {
			/* One of them by turns a little earlier and later. */
			double at = start + (tos - begin + 1) * APART / 1e3 + (delay > 0 ? tos % 11 - 5 : 0) * delay / 10;
			struct address peer = at_port(args[1], PORT + tos);
			while (now() < at)
				usleep(100);
			send_to(sockets[tos], &tos, sizeof tos, &peer);
		}
		for (int tos = begin; tos <= end; tos++) {
			int got = -1;
			if (recv(sockets[tos], &got, sizeof got, 0) != sizeof got || got != tos)
				wrong("type of service %d: %s", tos, got == -1 ? strerror(errno) : "another message");
		}
		if (delay > 0)
			wait_for(control, "done");
		else
			send_to(control, "done", 4, &to);
	}
	for (int tos = first; tos <= last; tos++)
		if (recv(sockets[tos], back, sizeof back, MSG_DONTWAIT) != -1 || errno != EAGAIN)
			wrong("type of service %d: a message came twice", tos);
	printf("%d connections, a message by each\n", last - first + 1);
	sleep(1);
	return 0;
}

/* Sends for some seconds. Returns how many the peer had got then, and in what time. */
static int rate(char **args)
{
	struct address to = address(args[1], args[2]);
	int s = bound(args[0], 0, 0);
	size_t len = strtoul(args[3], NULL, 10);
	double end, got[2];
	send_to(s, data, len, &to);
	for (end = now() + atof(args[4]); now() < end;)
		send_to(s, data, len, &to);
	send_to(s, data, 0, &to);
	limit(s, 120);
	if (recv(s, got, sizeof got, 0) != sizeof got)
		fail("count");
	printf("%.0f messages of %zu bytes, %.0f/s, %.3f MB/s\n", got[0], len, got[0] / got[1], got[0] * len / got[1] / 1e6);
	return 0;
}

/* Counts messages from the first one to an empty one. */
static int count(char **args)
{
	int s = bound(args[0], atoi(args[1]), 0);
	struct address from;
	double got[2] = { 0 }, start;
	waiting();
	take(s, &from);
	for (start = now(); take(s, &from);)
		got[0]++;
	got[1] = now() - start;
	send_to(s, got, sizeof got, &from);
	sleep(1);
	return 0;
}

static socklen_t info(int what)
{
	int s = socket(21, SOCK_SEQPACKET, 0);
	socklen_t len = sizeof back;
	if (s < 0 || getsockopt(s, SOL_RDS, what, back, &len) < 0)
		fail("info");
	return len;
}

static int connections(char **args)
{
	struct address peer = address(args[1], "0");
	int is_v4 = peer.at.ss_family == AF_INET, count = 0, up = 0;
	const void *want = is_v4 ? (void *)&((struct sockaddr_in *)&peer.at)->sin_addr : (void *)&((struct sockaddr_in6 *)&peer.at)->sin6_addr;
	/* Two sequence numbers, two addresses, the transport's name, flags; with IPv4 the type of service. */
	size_t address_len = is_v4 ? 4 : 16, size = 16 + 2 * address_len + 16 + 1 + (is_v4 ? 1 : 0);
	socklen_t len = info(is_v4 ? INFO_CONNECTIONS : INFO6_CONNECTIONS);
	for (unsigned char *at = back; at + size <= back + len; at += size)
		if (!memcmp(at + 16 + address_len, want, address_len)) {
			count++;
			up += at[16 + 2 * address_len + 16] >> 2 & 1;
		}
	printf("%d connections, %d up\n", count, up);
	return 0;
}

static int counter(char **args)
{
	socklen_t len = info(INFO_COUNTERS);
	for (unsigned char *at = back; at + 40 <= back + len; at += 40)
		if (!strncmp((char *)at, args[0], 32)) {
			printf("%llu\n", *(unsigned long long *)(at + 32));
			return 0;
		}
	wrong("no counter %s", args[0]);
}

int main(int argc, char **argv)
{
	static const struct { const char *name; int least; int (*run)(char **); } commands[] = {
		{ "serve", 2, serve }, { "call", 5, call }, { "ping", 3, ping }, { "take", 3, take_all }, { "send", 6, send_all },
		{ "slow", 2, slow }, { "fill", 3, fill }, { "cancel", 4, cancel }, { "cross", 5, cross }, { "rate", 5, rate }, { "count", 2, count },
		{ "connections", 2, connections }, { "counter", 1, counter },
	};
	for (size_t i = 0; argc > 1 && i < sizeof commands / sizeof *commands; i++)
		if (!strcmp(argv[1], commands[i].name) && argc - 2 >= commands[i].least)
			return commands[i].run(argv + 2);
	fprintf(stderr, "usage: see the head of rds-peer.c\n");
	return 2;
}
