/*
 * Messages one way between two sockets, for as long as is asked for: AF_RDS, UDP or TCP.
 *
 *   flow rds|udp|tcp receive ADDRESS PORT SIZE          prints a line of JSON: messages, bytes, seconds
 *   flow rds|udp|tcp send ADDRESS PORT SIZE FROM SECONDS
 *
 * An empty message, or the end of the stream, ends it. Of UDP what has come counts. The time is that from the first message to the last.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#ifndef AF_RDS
#define AF_RDS 21
#endif

static void check(int failed, const char *what) {
	if (failed) {
		perror(what);
		exit(1);
	}
}

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static struct sockaddr_in address(const char *text, const char *port) {
	struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(atoi(port))};
	check(inet_pton(AF_INET, text, &in.sin_addr) != 1, text);
	return in;
}

static int open_socket(const char *kind, struct sockaddr_in at) {
	int rds = !strcmp(kind, "rds"), tcp = !strcmp(kind, "tcp");
	int fd = socket(rds ? AF_RDS : AF_INET, rds ? SOCK_SEQPACKET : tcp ? SOCK_STREAM : SOCK_DGRAM, 0);
	check(fd < 0, "socket");
	/* The system's limit decides. TCP chooses for itself. */
	int bytes = 4 << 20, on = 1;
	if (!tcp) {
		check(setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes), "SO_SNDBUF");
		check(setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes), "SO_RCVBUF");
	} else {
		check(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on), "SO_REUSEADDR");
	}
	check(bind(fd, (struct sockaddr *)&at, sizeof at), "bind");
	return fd;
}

static void receive(const char *kind, struct sockaddr_in at, size_t size) {
	int tcp = !strcmp(kind, "tcp"), fd = open_socket(kind, at);
	if (tcp)
		check(listen(fd, 1), "listen");
	printf("ready\n");
	fflush(stdout);
	if (tcp)
		check((fd = accept(fd, NULL, NULL)) < 0, "accept");
	char *buffer = malloc(size);
	double first = 0, last = 0;
	unsigned long long messages = 0, bytes = 0;
	for (;;) {
		ssize_t got = recv(fd, buffer, size, tcp ? MSG_WAITALL : 0);
		check(got < 0, "recv");
		if (got == 0)
			break;
		/* The clock is read now and then: it costs as much as a small message. */
		if (messages == 0)
			first = now();
		messages++;
		bytes += got;
	}
	last = now();
	printf("{\"messages\": %llu, \"bytes\": %llu, \"seconds\": %.6f}\n", messages, bytes, last - first);
}

static void send_all(const char *kind, struct sockaddr_in at, struct sockaddr_in to, size_t size, double seconds) {
	int fd = open_socket(kind, at);
	check(connect(fd, (struct sockaddr *)&to, sizeof to), "connect");
	char *buffer = calloc(1, size);
	double end = now() + seconds;
	do {
		for (int i = 0; i < 16; i++) {
			ssize_t sent = 0;
			/* A stream takes parts; a full queue of a device is UDP's loss. */
			while (sent < (ssize_t)size) {
				ssize_t n = send(fd, buffer + sent, size - sent, 0);
				check(n < 0 && errno != ENOBUFS, "send");
				sent += n < 0 ? (ssize_t)size : n;
			}
		}
	} while (now() < end);
	if (!strcmp(kind, "tcp"))
		return;
	/* Datagrams may be lost, and the end must not. */
	for (int i = 0; i < (strcmp(kind, "udp") ? 1 : 100); i++) {
		send(fd, buffer, 0, 0);
		if (!strcmp(kind, "udp"))
			usleep(2000);
	}
}

int main(int argc, char **argv) {
	if (argc == 6 && !strcmp(argv[2], "receive")) {
		receive(argv[1], address(argv[3], argv[4]), strtoul(argv[5], NULL, 10));
	} else if (argc == 8 && !strcmp(argv[2], "send")) {
		send_all(argv[1], address(argv[6], "0"), address(argv[3], argv[4]), strtoul(argv[5], NULL, 10), atof(argv[7]));
	} else {
		fprintf(stderr, "usage: flow rds|udp|tcp receive ADDRESS PORT SIZE | send ADDRESS PORT SIZE FROM SECONDS\n");
		return 2;
	}
	return 0;
}
