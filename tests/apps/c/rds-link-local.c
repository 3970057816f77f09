/*
 * RDS at a link-local address: sockets have an interface, a port is taken once, and names have the interface that the socket has.
 *
 *   rds-link-local ADDRESS INTERFACE OTHER      prints a line for each fact
 */
#include <arpa/inet.h>
#include <errno.h>
#include <net/if.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#ifndef AF_RDS
#define AF_RDS 21
#endif

static const char *text;

static struct sockaddr_in6 address(int port, const char *interface) {
	struct sockaddr_in6 in = {.sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_scope_id = if_nametoindex(interface)};
	inet_pton(AF_INET6, text, &in.sin6_addr);
	return in;
}

static int bound(int port, const char *interface) {
	int fd = socket(AF_RDS, SOCK_SEQPACKET, 0);
	struct sockaddr_in6 at = address(port, interface);
	int failed = bind(fd, (struct sockaddr *)&at, sizeof at);
	printf("bind %d: %s\n", port, failed ? strerror(errno) : "done");
	return fd;
}

int main(int argc, char **argv) {
	if (argc != 4)
		return 2;
	text = argv[1];
	int reader = bound(4000, argv[2]);
	bound(4000, argv[2]);
	bound(4001, argv[3]);
	int sender = bound(4002, argv[2]);
	struct sockaddr_in6 to = address(4000, argv[2]), from = {0};
	socklen_t len = sizeof to;
	char buffer[8];
	if (sendto(sender, "hello", 5, 0, (struct sockaddr *)&to, len) < 0)
		printf("sendto: %s\n", strerror(errno));
	ssize_t got = recvfrom(reader, buffer, sizeof buffer, 0, (struct sockaddr *)&from, &len);
	printf("%zd bytes from port %d, %s\n", got, ntohs(from.sin6_port),
	       from.sin6_scope_id == to.sin6_scope_id ? "its interface" : "another interface");
	return 0;
}
