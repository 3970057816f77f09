/* A TCP listener that the programs of this folder share. */
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

/* Listens on all addresses of the host: of both families, or of IPv4 where there is no IPv6. -1 with errno. */
static int listen_on(int port)
{
	struct sockaddr_in6 v6 = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
	struct sockaddr_in v4 = { .sin_family = AF_INET, .sin_port = htons(port) };
	int one = 1, off = 0, l = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0), six = l >= 0;
	if (!six) l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (l < 0) return -1;
	setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	if (six) setsockopt(l, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
	if (bind(l, six ? (struct sockaddr *)&v6 : (struct sockaddr *)&v4, six ? sizeof v6 : sizeof v4)) return -1;
	return listen(l, 16) ? -1 : l;
}
