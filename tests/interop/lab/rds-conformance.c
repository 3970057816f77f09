/* What AF_RDS does, a fact a line: `SECTION FACT: RESULT`. The same program runs on a kernel's RDS and under `ferroce run`.
 *   rds-conformance ADDRESS ABSENT [SECTION]…
 * ADDRESS is one of this host, ABSENT an address on its network that nobody has. Results have no addresses, random ports or times.
 * Each section runs in a process of its own, which ends after a minute. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SOL_RDS 276
#define RDS_CANCEL_SENT_TO 1
#define RDS_GET_MR 2
#define RDS_FREE_MR 3
#define RDS_RECVERR 5
#define RDS_CONG_MONITOR 6
#define RDS_GET_MR_FOR_DEST 7
#define SO_RDS_TRANSPORT 8
#define SO_RDS_MSG_RXPATH_LATENCY 10
#define RDS_CMSG_CONG_UPDATE 5
#define RDS_CMSG_RXPATH_LATENCY 11
#define RDS_INFO_COUNTERS 10000
#define RDS_INFO_CONNECTIONS 10001
#define RDS_INFO_SEND_MESSAGES 10003
#define RDS_INFO_RETRANS_MESSAGES 10004
#define RDS_INFO_RECV_MESSAGES 10005
#define RDS_INFO_SOCKETS 10006
#define RDS6_INFO_SEND_MESSAGES 10012
#define RDS6_INFO_RETRANS_MESSAGES 10013
#define RDS_INFO_LAST 10017
#define SIOCRDSSETTOS 0x89e0
#define SIOCRDSGETTOS 0x89e1
/* A port in the range of these tests, below those that the kernel hands out. */
#define PORT 4000

static const char *section, *program, *own_text, *absent_text;
static unsigned char data[2 << 20];

__attribute__((format(printf, 2, 3))) static void row(const char *fact, const char *result, ...)
{
	va_list list;
	va_start(list, result);
	printf("%s %s: ", section, fact);
	vprintf(result, list);
	va_end(list);
	putchar('\n');
	fflush(stdout);
}

static const char *text_of(long result)
{
	static char text[64];
	if (result < 0)
		snprintf(text, sizeof text, "%s", errno ? strerrorname_np(errno) : "no errno");
	else
		snprintf(text, sizeof text, "%ld", result);
	return text;
}

/* A call's return value, or the name of its errno. */
#define TRY(fact, call) do { errno = 0; long result_ = (call); row(fact, "%s", text_of(result_)); } while (0)
/* A call that gives something whose number says nothing. */
#define WORKS(fact, call) do { errno = 0; long result_ = (call); row(fact, "%s", result_ < 0 ? text_of(result_) : "works"); } while (0)
#define MUST(call) do { errno = 0; if ((call) < 0) { row("line", "%d: %s: %s", __LINE__, #call, text_of(-1)); _exit(1); } } while (0)

static struct sockaddr_in at(const char *host, int port)
{
	struct sockaddr_in sin = { .sin_family = AF_INET, .sin_port = htons(port) };
	inet_pton(AF_INET, host, &sin.sin_addr);
	return sin;
}

static struct sockaddr_in6 at6(const char *host, int port)
{
	struct sockaddr_in6 sin6 = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
	inet_pton(AF_INET6, host, &sin6.sin6_addr);
	return sin6;
}

static int bind_to(int s, const char *host, int port)
{
	struct sockaddr_in sin = at(host, port);
	return bind(s, (struct sockaddr *)&sin, sizeof sin);
}

static int connect_to(int s, const char *host, int port)
{
	struct sockaddr_in sin = at(host, port);
	return connect(s, (struct sockaddr *)&sin, sizeof sin);
}

static ssize_t send_to(int s, size_t len, int flags, const char *host, int port)
{
	struct sockaddr_in sin = at(host, port);
	return sendto(s, data, len, flags, (struct sockaddr *)&sin, sizeof sin);
}

static int unbound(void)
{
	int s;
	MUST(s = socket(AF_RDS, SOCK_SEQPACKET, 0));
	return s;
}

static void limit(int s, int option, int milliseconds)
{
	struct timeval t = { milliseconds / 1000, milliseconds % 1000 * 1000 };
	MUST(setsockopt(s, SOL_SOCKET, option, &t, sizeof t));
}

static int opened(int port)
{
	int s = unbound();
	MUST(bind_to(s, own_text, port));
	limit(s, SO_RCVTIMEO, 10000);
	return s;
}

static void set_int(int s, int level, int option, int value)
{
	MUST(setsockopt(s, level, option, &value, sizeof value));
}

/* A socket's name: its family, and which address and port it has. */
static void row_name(const char *fact, int result, const struct sockaddr_storage *name, socklen_t len)
{
	const struct sockaddr_in *sin = (const void *)name;
	char host[64] = "";
	if (result < 0 || name->ss_family != AF_INET) {
		row(fact, "%s, family %d, length %u", text_of(result), result < 0 ? -1 : name->ss_family, len);
		return;
	}
	inet_ntop(AF_INET, &sin->sin_addr, host, sizeof host);
	row(fact, "%s, %s port %d, length %u", text_of(result), strcmp(host, own_text) ? host : "own", ntohs(sin->sin_port), len);
}

static void row_own(const char *fact, int s, int (*call)(int, struct sockaddr *, socklen_t *), socklen_t len)
{
	struct sockaddr_storage name = { .ss_family = 99 };
	errno = 0;
	int result = call(s, (struct sockaddr *)&name, &len);
	row_name(fact, result, &name, len);
}

static int own_name(int s, struct sockaddr *name, socklen_t *len) { return getsockname(s, name, len); }
static int peer_name(int s, struct sockaddr *name, socklen_t *len) { return getpeername(s, name, len); }

static const char *bits_text(short bits)
{
	static char text[128];
	static const struct { short bit; const char *name; } names[] = {
		{ POLLIN, "IN" }, { POLLPRI, "PRI" }, { POLLOUT, "OUT" }, { POLLERR, "ERR" }, { POLLHUP, "HUP" }, { POLLNVAL, "NVAL" },
		{ POLLRDNORM, "RDNORM" }, { POLLRDBAND, "RDBAND" }, { POLLWRNORM, "WRNORM" }, { POLLWRBAND, "WRBAND" }, { POLLRDHUP, "RDHUP" },
	};
	text[0] = 0;
	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		if (bits & names[i].bit)
			sprintf(text + strlen(text), "%s%s", *text ? "|" : "", names[i].name);
	return *text ? text : "none";
}

static void wait_for(struct pollfd *p, int milliseconds)
{
	while (poll(p, 1, milliseconds) < 0)
		if (errno != EINTR)
			_exit(1);
}

static short bits(int s, int milliseconds)
{
	struct pollfd p = { .fd = s, .events = POLLIN | POLLPRI | POLLOUT | POLLRDNORM | POLLRDBAND | POLLWRNORM | POLLWRBAND | POLLRDHUP };
	wait_for(&p, milliseconds);
	return p.revents;
}

static int writable(int s, int milliseconds)
{
	struct pollfd p = { .fd = s, .events = POLLOUT };
	wait_for(&p, milliseconds);
	return (p.revents & POLLOUT) != 0;
}

static void row_bits(const char *fact, int s)
{
	row(fact, "%s", bits_text(bits(s, 0)));
}

static short readable(int s, int milliseconds)
{
	struct pollfd p = { .fd = s, .events = POLLIN };
	wait_for(&p, milliseconds);
	return p.revents;
}

/* Receives with all that recvmsg gives, and prints it. */
static void row_message(const char *fact, int s, size_t room, size_t control_room, int flags)
{
	struct sockaddr_storage from = { .ss_family = 99 };
	union { char bytes[512]; struct cmsghdr align; } control;
	struct iovec iov = { data, room };
	struct msghdr m = { &from, sizeof from, &iov, 1, control.bytes, control_room, 0 };
	char text[512];
	errno = 0;
	ssize_t got = recvmsg(s, &m, flags);
	if (got < 0) {
		row(fact, "%s", text_of(got));
		return;
	}
	int at = sprintf(text, "%zd bytes, flags %x, name %u %s", got, m.msg_flags & ~MSG_CMSG_CLOEXEC, m.msg_namelen,
		m.msg_namelen && from.ss_family == AF_INET ? "IPv4" : "none");
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
		at += sprintf(text + at, ", cmsg %d/%d of %zu", c->cmsg_level, c->cmsg_type, (size_t)(c->cmsg_len - CMSG_LEN(0)));
		if (c->cmsg_level == SOL_RDS && c->cmsg_type == RDS_CMSG_CONG_UPDATE)
			at += sprintf(text + at, " %llx", *(unsigned long long *)CMSG_DATA(c));
	}
	row(fact, "%s", text);
}

/* Sends with a control message. */
static ssize_t send_control(int s, int level, int type, const void *what, size_t len, int flags)
{
	union { char bytes[256]; struct cmsghdr align; } control = { .bytes = "" };
	struct sockaddr_in to = at(own_text, PORT);
	struct iovec iov = { data, 10 };
	struct msghdr m = { &to, sizeof to, &iov, 1, control.bytes, CMSG_SPACE(len), 0 };
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	*c = (struct cmsghdr){ CMSG_LEN(len), level, type };
	memcpy(CMSG_DATA(c), what, len);
	return sendmsg(s, &m, flags);
}

static void sockets(void)
{
	int s, value;
	socklen_t len;
	struct stat st;
	WORKS("seqpacket", s = socket(AF_RDS, SOCK_SEQPACKET, 0));
	TRY("dgram", socket(AF_RDS, SOCK_DGRAM, 0));
	TRY("stream", socket(AF_RDS, SOCK_STREAM, 0));
	TRY("protocol 1", socket(AF_RDS, SOCK_SEQPACKET, 1));
	TRY("unknown flags", socket(AF_RDS, SOCK_SEQPACKET | 0x100, 0));
	MUST(s = socket(AF_RDS, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
	TRY("flags of nonblock", (fcntl(s, F_GETFL) & O_NONBLOCK) != 0);
	TRY("flags of cloexec", fcntl(s, F_GETFD));
	TRY("access mode", fcntl(s, F_GETFL) & O_ACCMODE);
	row("is a socket", "%d", !fstat(s, &st) && S_ISSOCK(st.st_mode));
	static const struct { const char *name; int option; } options[] = {
		{ "SO_DOMAIN", SO_DOMAIN }, { "SO_TYPE", SO_TYPE }, { "SO_PROTOCOL", SO_PROTOCOL }, { "SO_ACCEPTCONN", SO_ACCEPTCONN },
		{ "SO_ERROR", SO_ERROR }, { "SO_REUSEADDR", SO_REUSEADDR }, { "SO_KEEPALIVE", SO_KEEPALIVE }, { "SO_BROADCAST", SO_BROADCAST },
		{ "SO_SNDLOWAT", SO_SNDLOWAT }, { "SO_RCVLOWAT", SO_RCVLOWAT }, { "SO_TIMESTAMP", SO_TIMESTAMP }, { "SO_ZEROCOPY", SO_ZEROCOPY },
	};
	for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
		value = -1;
		len = sizeof value;
		errno = 0;
		int result = getsockopt(s, SOL_SOCKET, options[i].option, &value, &len);
		row(options[i].name, "%s, value %d, length %u", text_of(result), value, len);
	}
	TRY("close", close(s));
	TRY("close again", close(s));
}

static void binds(void)
{
	struct sockaddr_in sin = at(own_text, PORT);
	struct sockaddr_in6 sin6;
	int s = unbound(), other;
	row_own("getsockname unbound", s, own_name, sizeof(struct sockaddr_storage));
	row_own("getpeername unbound", s, peer_name, sizeof(struct sockaddr_storage));
	TRY("any", bind_to(s, "0.0.0.0", PORT));
	TRY("broadcast", bind_to(s, "255.255.255.255", PORT));
	TRY("multicast", bind_to(s, "224.0.0.1", PORT));
	TRY("not ours", bind_to(s, "192.0.2.77", PORT));
	TRY("port 1", bind_to(s, own_text, 1));
	TRY("length 0", bind(s, (struct sockaddr *)&sin, 0));
	TRY("length 1", bind(s, (struct sockaddr *)&sin, 1));
	TRY("length 8", bind(s, (struct sockaddr *)&sin, 8));
	TRY("length 15", bind(s, (struct sockaddr *)&sin, 15));
	sin.sin_family = AF_UNSPEC;
	TRY("AF_UNSPEC", bind(s, (struct sockaddr *)&sin, sizeof sin));
	sin.sin_family = AF_UNIX;
	TRY("AF_UNIX", bind(s, (struct sockaddr *)&sin, sizeof sin));
	TRY("bad pointer", bind(s, (struct sockaddr *)8, sizeof sin));
	sin6 = at6("::", PORT);
	TRY("IPv6 any", bind(s, (struct sockaddr *)&sin6, sizeof sin6));
	sin6 = at6("ff02::1", PORT);
	TRY("IPv6 multicast", bind(s, (struct sockaddr *)&sin6, sizeof sin6));
	sin6 = at6("fe80::1", PORT);
	TRY("IPv6 link-local without scope", bind(s, (struct sockaddr *)&sin6, sizeof sin6));
	sin6 = at6("2001:db8::77", PORT);
	TRY("IPv6 not ours", bind(s, (struct sockaddr *)&sin6, sizeof sin6));
	TRY("IPv6 length 16", bind(s, (struct sockaddr *)&sin6, 16));
	row_own("getsockname after refusals", s, own_name, sizeof(struct sockaddr_storage));
	sin = at(own_text, PORT);
	TRY("longer", bind(s, (struct sockaddr *)&sin, sizeof(struct sockaddr_in) + 4));
	row_own("getsockname", s, own_name, sizeof(struct sockaddr_storage));
	row_own("getsockname length 8", s, own_name, 8);
	row_own("getpeername of a bound one", s, peer_name, sizeof(struct sockaddr_storage));
	TRY("again", bind_to(s, own_text, PORT + 1));
	TRY("again the same", bind_to(s, own_text, PORT));
	other = unbound();
	TRY("taken", bind_to(other, own_text, PORT));
	set_int(other, SOL_SOCKET, SO_REUSEADDR, 1);
	TRY("taken with SO_REUSEADDR", bind_to(other, own_text, PORT));
	TRY("after being refused", bind_to(other, own_text, PORT + 1));
	TRY("close", close(s));
	s = unbound();
	TRY("taken by a closed one", bind_to(s, own_text, PORT));
	close(s);
	s = unbound();
	MUST(bind_to(s, own_text, 0));
	socklen_t len = sizeof sin;
	MUST(getsockname(s, (struct sockaddr *)&sin, &len));
	row("port 0 gives one above 1", "%d", ntohs(sin.sin_port) > 1);
	close(s);
	s = unbound();
	TRY("port 2", bind_to(s, own_text, 2));
	close(s);
	s = unbound();
	TRY("port 65535", bind_to(s, own_text, 65535));
}

static void connects(void)
{
	struct sockaddr_in sin;
	struct sockaddr_in6 sin6;
	int s = unbound();
	TRY("any", connect_to(s, "0.0.0.0", PORT));
	TRY("broadcast", connect_to(s, "255.255.255.255", PORT));
	TRY("multicast", connect_to(s, "224.0.0.1", PORT));
	sin = at(own_text, PORT);
	TRY("length 0", connect(s, (struct sockaddr *)&sin, 0));
	TRY("length 8", connect(s, (struct sockaddr *)&sin, 8));
	sin.sin_family = AF_UNSPEC;
	TRY("AF_UNSPEC", connect(s, (struct sockaddr *)&sin, sizeof sin));
	sin.sin_family = AF_UNIX;
	TRY("AF_UNIX", connect(s, (struct sockaddr *)&sin, sizeof sin));
	sin6 = at6("::", PORT);
	TRY("IPv6 any", connect(s, (struct sockaddr *)&sin6, sizeof sin6));
	sin6 = at6("ff02::1", PORT);
	TRY("IPv6 multicast", connect(s, (struct sockaddr *)&sin6, sizeof sin6));
	TRY("unbound", connect_to(s, own_text, PORT));
	row_own("getpeername", s, peer_name, sizeof(struct sockaddr_storage));
	row_own("getpeername length 4", s, peer_name, 4);
	row_own("getsockname of an unbound one", s, own_name, sizeof(struct sockaddr_storage));
	TRY("again", connect_to(s, own_text, PORT + 1));
	row_own("getpeername again", s, peer_name, sizeof(struct sockaddr_storage));
	TRY("refused afterwards", connect_to(s, "0.0.0.0", PORT));
	row_own("getpeername after refusal", s, peer_name, sizeof(struct sockaddr_storage));
	TRY("send unbound", send(s, data, 1, 0));
	TRY("bind afterwards", bind_to(s, own_text, PORT));
	sin6 = at6("2001:db8::77", PORT);
	TRY("IPv6 of a bound one", connect(s, (struct sockaddr *)&sin6, sizeof sin6));
	row_own("getpeername after IPv6", s, peer_name, sizeof(struct sockaddr_storage));
	TRY("port 0", connect_to(s, own_text, 0));
	row_own("getpeername port 0", s, peer_name, sizeof(struct sockaddr_storage));
	s = unbound();
	sin6 = at6("2001:db8::77", PORT);
	TRY("unbound IPv6", connect(s, (struct sockaddr *)&sin6, sizeof sin6));
	row_own("getsockname of an unbound IPv6 one", s, own_name, sizeof(struct sockaddr_storage));
	TRY("bind to IPv4 afterwards", bind_to(s, own_text, PORT + 1));
}

static void refused_calls(void)
{
	int s = opened(PORT), pair[2];
	struct sockaddr_storage name;
	socklen_t len = sizeof name;
	TRY("listen", listen(s, 1));
	TRY("accept", accept(s, NULL, NULL));
	TRY("accept4", accept4(s, (struct sockaddr *)&name, &len, SOCK_CLOEXEC));
	TRY("shutdown read", shutdown(s, SHUT_RD));
	TRY("shutdown write", shutdown(s, SHUT_WR));
	TRY("shutdown both", shutdown(s, SHUT_RDWR));
	TRY("shutdown 9", shutdown(s, 9));
	TRY("socketpair", socketpair(AF_RDS, SOCK_SEQPACKET, 0, pair));
	TRY("mmap", mmap(NULL, 4096, PROT_READ, MAP_SHARED, s, 0) == MAP_FAILED ? -1 : 0);
	TRY("lseek", lseek(s, 0, SEEK_SET));
	row_bits("poll afterwards", s);
}

static void sends(void)
{
	struct sockaddr_in6 sin6 = at6("2001:db8::77", PORT);
	struct sockaddr_in to = at(own_text, PORT);
	int s = unbound();
	TRY("unbound", send_to(s, 1, 0, own_text, PORT));
	TRY("unbound without destination", send(s, data, 1, 0));
	s = opened(PORT);
	TRY("without destination", send(s, data, 1, 0));
	TRY("write without destination", write(s, data, 1));
	static const struct { const char *name; int flag; } flags[] = {
		{ "MSG_NOSIGNAL", MSG_NOSIGNAL }, { "MSG_EOR", MSG_EOR }, { "MSG_OOB", MSG_OOB }, { "MSG_MORE", MSG_MORE }, { "MSG_CONFIRM", MSG_CONFIRM },
		{ "MSG_DONTROUTE", MSG_DONTROUTE }, { "MSG_PEEK", MSG_PEEK }, { "MSG_ZEROCOPY", MSG_ZEROCOPY }, { "MSG_DONTWAIT", MSG_DONTWAIT },
		{ "MSG_CMSG_CLOEXEC", MSG_CMSG_CLOEXEC }, { "MSG_TRUNC", MSG_TRUNC },
	};
	for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
		TRY(flags[i].name, send_to(s, 1, flags[i].flag, own_text, PORT + 9));
	TRY("IPv6 destination", sendto(s, data, 1, 0, (struct sockaddr *)&sin6, sizeof sin6));
	TRY("destination any", send_to(s, 1, 0, "0.0.0.0", PORT));
	TRY("destination broadcast", send_to(s, 1, 0, "255.255.255.255", PORT));
	TRY("destination multicast", send_to(s, 1, 0, "224.0.0.1", PORT));
	TRY("destination length 0", sendto(s, data, 1, 0, (struct sockaddr *)&to, 0));
	TRY("destination length 8", sendto(s, data, 1, 0, (struct sockaddr *)&to, 8));
	to.sin_family = AF_UNSPEC;
	TRY("destination AF_UNSPEC", sendto(s, data, 1, 0, (struct sockaddr *)&to, sizeof to));
	to.sin_family = AF_UNIX;
	TRY("destination AF_UNIX", sendto(s, data, 1, 0, (struct sockaddr *)&to, sizeof to));
	TRY("106496 bytes", send_to(s, 106496, 0, own_text, PORT));
	row_message("106496 bytes come", s, sizeof data, 0, 0);
	TRY("106497 bytes", send_to(s, 106497, 0, own_text, PORT));
	TRY("2 MiB", send_to(s, sizeof data, 0, own_text, PORT));
	TRY("0 bytes", send_to(s, 0, 0, own_text, PORT));
	row_message("0 bytes come", s, 10, 0, 0);
	to = at(own_text, PORT);
	TRY("bad pointer", sendto(s, (void *)8, 10, 0, (struct sockaddr *)&to, sizeof to));
	TRY("nobody there", send_to(s, 1, 0, own_text, PORT + 9));
	TRY("port 0 is a ping", send_to(s, 0, 0, own_text, 0));
	row_message("its answer", s, 10, 0, 0);
	TRY("port 0 with data", send_to(s, 10, 0, own_text, 0));
	row_message("its answer with data", s, 10, 0, 0);
	MUST(connect_to(s, own_text, PORT));
	TRY("send", send(s, data, 5, 0));
	TRY("write", write(s, data, 6));
	struct iovec iov[3] = { { data, 3 }, { data, 0 }, { data, 4 } };
	TRY("writev", writev(s, iov, 3));
	struct mmsghdr many[2] = { { .msg_hdr = { .msg_iov = iov, .msg_iovlen = 1 } }, { .msg_hdr = { .msg_iov = iov + 2, .msg_iovlen = 1 } } };
	TRY("sendmmsg", sendmmsg(s, many, 2, 0));
	row("sendmmsg's lengths", "%u %u", many[0].msg_len, many[1].msg_len);
	TRY("sendmmsg of one", sendmmsg(s, many, 1, 0));
	row_message("comes", s, 100, 0, 0);
	row_message("comes next", s, 100, 0, 0);
	TRY("nothing else", recv(s, data, 10, MSG_DONTWAIT));
	unsigned long long eight[9] = { 0 };
	TRY("unknown control message", send_control(s, SOL_RDS, 99, eight, 8, 0));
	TRY("control message of another level", send_control(s, SOL_IP, 99, eight, 8, 0));
	row_message("it comes", s, 100, 100, 0);
	TRY("zero copy without cookie", send_control(s, SOL_IP, 99, eight, 8, MSG_ZEROCOPY));
	TRY("RDMA_ARGS too short", send_control(s, SOL_RDS, 1, eight, 8, 0));
	TRY("RDMA_DEST too short", send_control(s, SOL_RDS, 2, eight, 4, 0));
	TRY("RDMA_MAP too short", send_control(s, SOL_RDS, 3, eight, 8, 0));
	TRY("RDMA_STATUS sent", send_control(s, SOL_RDS, 4, eight, 16, 0));
	TRY("CONG_UPDATE sent", send_control(s, SOL_RDS, 5, eight, 8, 0));
	TRY("RDMA_ARGS without segments", send_control(s, SOL_RDS, 1, eight, 56, 0));
	TRY("RDMA_DEST without key", send_control(s, SOL_RDS, 2, eight, 8, 0));
	row_bits("poll afterwards", s);
}

static void receives(void)
{
	int s = opened(PORT), from = opened(PORT + 1);
	MUST(connect_to(from, own_text, PORT));
	struct sockaddr_storage name = { .ss_family = 99 };
	socklen_t len = sizeof name;
	int value = 1;
	MUST(send(from, data, 100, 0));
	errno = 0;
	long got = recvfrom(s, data, 200, 0, (struct sockaddr *)&name, &len);
	row("recvfrom", "%s", text_of(got));
	row_name("its sender", 0, &name, len);
	MUST(send(from, data, 100, 0));
	len = 8;
	memset(&name, 0x55, sizeof name);
	TRY("recvfrom with room for 8 bytes of name", recvfrom(s, data, 200, 0, (struct sockaddr *)&name, &len));
	row("its name", "family %d, length %u, then %x", name.ss_family, len, ((unsigned char *)&name)[8]);
	MUST(send(from, data, 100, 0));
	TRY("too small a buffer", recv(s, data, 40, 0));
	TRY("the rest is gone", recv(s, data, 40, MSG_DONTWAIT));
	MUST(send(from, data, 100, 0));
	row_message("too small by recvmsg", s, 40, 0, 0);
	MUST(send(from, data, 100, 0));
	row_message("MSG_TRUNC", s, 40, 0, MSG_TRUNC);
	MUST(send(from, data, 100, 0));
	row_message("MSG_PEEK", s, 200, 0, MSG_PEEK);
	row_message("MSG_PEEK too small", s, 50, 0, MSG_PEEK);
	row_message("MSG_PEEK and MSG_TRUNC", s, 50, 0, MSG_PEEK | MSG_TRUNC);
	row_message("after MSG_PEEK", s, 200, 0, 0);
	MUST(send(from, data, 100, 0));
	TRY("no room", recv(s, NULL, 0, 0));
	TRY("gone", recv(s, data, 10, MSG_DONTWAIT));
	MUST(send(from, data, 100, 0));
	TRY("bad pointer", recv(s, (void *)8, 10, 0));
	WORKS("after a bad pointer", recv(s, data, 10, MSG_DONTWAIT));
	while (recv(s, data, 10, MSG_DONTWAIT) >= 0)
		;
	TRY("MSG_DONTWAIT", recv(s, data, 10, MSG_DONTWAIT));
	TRY("MSG_OOB", recv(s, data, 10, MSG_OOB));
	TRY("MSG_ERRQUEUE", recv(s, data, 10, MSG_ERRQUEUE | MSG_DONTWAIT));
	MUST(send(from, data, 100, 0));
	TRY("MSG_WAITALL", recv(s, data, 200, MSG_WAITALL));
	MUST(send(from, data, 7, 0));
	TRY("read", read(s, data, 100));
	MUST(send(from, data, 8, 0));
	struct iovec iov[2] = { { data, 3 }, { data + 100, 100 } };
	TRY("readv", readv(s, iov, 2));
	for (int i = 0; i < 3; i++)
		MUST(send(from, data, 9 + i, 0));
	struct mmsghdr many[4];
	memset(many, 0, sizeof many);
	for (int i = 0; i < 4; i++)
		many[i].msg_hdr = (struct msghdr){ .msg_iov = iov, .msg_iovlen = 2 };
	readable(s, 5000);
	usleep(200000);
	TRY("recvmmsg", recvmmsg(s, many, 4, MSG_WAITFORONE, NULL));
	row("recvmmsg's lengths", "%u %u %u", many[0].msg_len, many[1].msg_len, many[2].msg_len);
	MUST(ioctl(s, FIONBIO, &value));
	TRY("nonblocking by FIONBIO", recv(s, data, 10, 0));
	value = 0;
	MUST(ioctl(s, FIONBIO, &value));
	MUST(fcntl(s, F_SETFL, O_NONBLOCK));
	TRY("nonblocking by fcntl", recv(s, data, 10, 0));
	TRY("read nonblocking", read(s, data, 10));
	MUST(fcntl(s, F_SETFL, 0));
	set_int(s, SOL_SOCKET, SO_TIMESTAMP, 1);
	MUST(send(from, data, 100, 0));
	row_message("with SO_TIMESTAMP", s, 200, 200, 0);
	MUST(send(from, data, 100, 0));
	row_message("with SO_TIMESTAMP and no room for it", s, 200, 8, 0);
	MUST(send(from, data, 100, 0));
	row_message("with SO_TIMESTAMP, peeked", s, 200, 200, MSG_PEEK);
	row_message("with SO_TIMESTAMP, after that", s, 200, 200, 0);
	set_int(s, SOL_SOCKET, SO_TIMESTAMP, 0);
	struct { unsigned char n, at[3]; } trace = { 1, { 0 } };
	TRY("SO_RDS_MSG_RXPATH_LATENCY", setsockopt(s, SOL_RDS, SO_RDS_MSG_RXPATH_LATENCY, &trace, sizeof trace));
	MUST(send(from, data, 100, 0));
	row_message("with it", s, 200, 200, 0);
	/* Messages of a closed sender stay. */
	MUST(send(from, data, 11, 0));
	readable(s, 5000);
	usleep(200000);
	close(from);
	row_message("of a closed sender", s, 200, 0, 0);
}

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static void nothing(int signal) { (void)signal; }

static void on_alarm(int flags, int milliseconds, int again)
{
	struct sigaction action = { .sa_handler = nothing, .sa_flags = flags };
	struct itimerval timer = { { again / 1000, again % 1000 * 1000 }, { milliseconds / 1000, milliseconds % 1000 * 1000 } };
	MUST(sigaction(SIGALRM, &action, NULL));
	MUST(setitimer(ITIMER_REAL, &timer, NULL));
}

static void timeouts(void)
{
	int s = unbound(), r;
	MUST(bind_to(s, own_text, PORT));
	struct timeval t;
	socklen_t len = sizeof t;
	limit(s, SO_RCVTIMEO, 300);
	TRY("SO_RCVTIMEO read back", getsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &t, &len));
	row("its value", "%ld.%06ld, length %u", t.tv_sec, t.tv_usec, len);
	double begin = now();
	TRY("recv", recv(s, data, 10, 0));
	row("it waited", "%s", now() - begin >= 0.29 ? "as long as it should" : "too short");
	TRY("read", read(s, data, 10));
	row_message("recvmsg", s, 10, 0, 0);
	struct iovec iov = { data, 10 };
	struct mmsghdr one = { .msg_hdr = { .msg_iov = &iov, .msg_iovlen = 1 } };
	TRY("recvmmsg", recvmmsg(s, &one, 1, 0, NULL));
	TRY("MSG_DONTWAIT", recv(s, data, 10, MSG_DONTWAIT));
	limit(s, SO_RCVTIMEO, 0);
	on_alarm(0, 200, 0);
	TRY("recv and a signal", recv(s, data, 10, 0));
	on_alarm(0, 200, 0);
	TRY("read and a signal", read(s, data, 10));
	limit(s, SO_RCVTIMEO, 5000);
	on_alarm(0, 200, 0);
	TRY("recv with SO_RCVTIMEO and a signal", recv(s, data, 10, 0));
	limit(s, SO_RCVTIMEO, 0);
	MUST(r = fork());
	if (!r) {
		int from = opened(PORT + 1);
		usleep(600000);
		MUST(send_to(from, 3, 0, own_text, PORT));
		sleep(1);
		_exit(0);
	}
	on_alarm(SA_RESTART, 200, 0);
	TRY("recv and a signal with SA_RESTART", recv(s, data, 10, 0));
	waitpid(r, NULL, 0);
	limit(s, SO_RCVTIMEO, 700);
	on_alarm(SA_RESTART, 200, 0);
	TRY("recv with SO_RCVTIMEO and a signal with SA_RESTART", recv(s, data, 10, 0));
}

/* Messages to an address that nobody has wait in the queue. */
static void queue(void)
{
	int s = opened(PORT), sent, value = 8192;
	struct sockaddr_in to = at(absent_text, PORT);
	MUST(setsockopt(s, SOL_SOCKET, SO_SNDBUF, &value, sizeof value));
	TRY("more than the buffer", send_to(s, 8193, 0, absent_text, PORT));
	for (sent = 0; sent < 100; sent++) {
		if (sent == 2)
			row("writable with 6000 of 8192 bytes", "%d", writable(s, 5000));
		if (send_to(s, 3000, MSG_DONTWAIT, absent_text, PORT) == 3000)
			continue;
		/* Full for good? */
		usleep(200000);
		if (send_to(s, 3000, MSG_DONTWAIT, absent_text, PORT) != 3000)
			break;
	}
	row("messages of 3000 in 8192 bytes", "%d, then %s", sent, text_of(-1));
	row("writable when full", "%d", writable(s, 0));
	TRY("full for others, too", send_to(s, 10, MSG_DONTWAIT, own_text, PORT));
	TRY("0 bytes when full", send_to(s, 0, MSG_DONTWAIT, own_text, PORT));
	limit(s, SO_SNDTIMEO, 300);
	double begin = now();
	TRY("SO_SNDTIMEO", send_to(s, 10, 0, absent_text, PORT));
	row("it waited", "%s", now() - begin >= 0.29 ? "as long as it should" : "too short");
	limit(s, SO_SNDTIMEO, 0);
	on_alarm(0, 200, 0);
	TRY("a signal", send_to(s, 10, 0, absent_text, PORT));
	MUST(fcntl(s, F_SETFL, O_NONBLOCK));
	TRY("nonblocking", send_to(s, 10, 0, absent_text, PORT));
	MUST(fcntl(s, F_SETFL, 0));
	TRY("cancel with 15 bytes", setsockopt(s, SOL_RDS, RDS_CANCEL_SENT_TO, &to, 15));
	TRY("cancel with 0 bytes", setsockopt(s, SOL_RDS, RDS_CANCEL_SENT_TO, NULL, 0));
	to.sin_port = htons(PORT + 1);
	TRY("cancel of another port", setsockopt(s, SOL_RDS, RDS_CANCEL_SENT_TO, &to, sizeof to));
	row("writable afterwards", "%d", writable(s, 0));
	to.sin_port = htons(PORT);
	TRY("cancel", setsockopt(s, SOL_RDS, RDS_CANCEL_SENT_TO, &to, sizeof to));
	row("writable after it", "%d", writable(s, 0));
	TRY("send after it", send_to(s, 3000, MSG_DONTWAIT, absent_text, PORT));
	TRY("close with messages in the queue", close(s));
	s = opened(PORT);
	TRY("cancel of nothing", setsockopt(s, SOL_RDS, RDS_CANCEL_SENT_TO, &to, sizeof to));
	s = unbound();
	TRY("cancel unbound", setsockopt(s, SOL_RDS, RDS_CANCEL_SENT_TO, &to, sizeof to));
}

static void polls(void)
{
	int s = unbound(), ep, got;
	row_bits("unbound", s);
	MUST(bind_to(s, own_text, PORT));
	limit(s, SO_RCVTIMEO, 10000);
	/* The first message brings the congestion maps. */
	MUST(send_to(s, 1, 0, own_text, PORT));
	MUST(recv(s, data, 10, 0));
	usleep(300000);
	bits(s, 0);
	row_bits("bound", s);
	MUST(send_to(s, 1, 0, own_text, PORT));
	readable(s, 5000);
	row_bits("with a message", s);
	struct epoll_event event = { .events = EPOLLIN | EPOLLOUT | EPOLLPRI | EPOLLRDHUP, .data.u64 = 5 }, found;
	MUST(ep = epoll_create1(0));
	TRY("epoll_ctl", epoll_ctl(ep, EPOLL_CTL_ADD, s, &event));
	TRY("epoll_wait", got = epoll_wait(ep, &found, 1, 0));
	row("its events", "%x", found.events);
	fd_set in, out, bad;
	struct timeval none = { 0, 0 };
	FD_ZERO(&in);
	FD_ZERO(&out);
	FD_ZERO(&bad);
	FD_SET(s, &in);
	FD_SET(s, &out);
	FD_SET(s, &bad);
	TRY("select", select(s + 1, &in, &out, &bad, &none));
	row("its sets", "%d %d %d", FD_ISSET(s, &in) != 0, FD_ISSET(s, &out) != 0, FD_ISSET(s, &bad) != 0);
	MUST(recv(s, data, 10, 0));
	row_bits("after it", s);
	event.events = EPOLLIN | EPOLLET;
	MUST(epoll_ctl(ep, EPOLL_CTL_MOD, s, &event));
	epoll_wait(ep, &found, 1, 0);
	TRY("an edge without message", epoll_wait(ep, &found, 1, 0));
	MUST(send_to(s, 1, 0, own_text, PORT));
	TRY("an edge", epoll_wait(ep, &found, 1, 5000));
	usleep(100000);
	epoll_wait(ep, &found, 1, 0);
	TRY("no second edge", epoll_wait(ep, &found, 1, 0));
	MUST(send_to(s, 1, 0, own_text, PORT));
	TRY("an edge for a second message", epoll_wait(ep, &found, 1, 5000));
	MUST(recv(s, data, 10, 0));
	MUST(recv(s, data, 10, 0));
	event.events = EPOLLOUT;
	MUST(epoll_ctl(ep, EPOLL_CTL_MOD, s, &event));
	TRY("EPOLLOUT", epoll_wait(ep, &found, 1, 0));
	MUST(close(s));
	TRY("epoll_wait after close", epoll_wait(ep, &found, 1, 0));
}

static void ioctls(void)
{
	int s = unbound(), value = 0;
	unsigned char tos = 5;
	TRY("SIOCRDSSETTOS unbound", ioctl(s, SIOCRDSSETTOS, &tos));
	TRY("SIOCRDSGETTOS unbound", ioctl(s, SIOCRDSGETTOS, &tos));
	row("its tos", "%d", tos);
	MUST(bind_to(s, own_text, PORT));
	limit(s, SO_RCVTIMEO, 10000);
	tos = 99;
	TRY("SIOCRDSGETTOS", ioctl(s, SIOCRDSGETTOS, &tos));
	row("its tos bound", "%d", tos);
	tos = 5;
	TRY("SIOCRDSSETTOS", ioctl(s, SIOCRDSSETTOS, &tos));
	TRY("SIOCRDSSETTOS again", ioctl(s, SIOCRDSSETTOS, &tos));
	TRY("SIOCRDSSETTOS bad pointer", ioctl(s, SIOCRDSSETTOS, 8));
	tos = 0;
	TRY("SIOCRDSGETTOS set", ioctl(s, SIOCRDSGETTOS, &tos));
	row("its tos set", "%d", tos);
	TRY("send with it", send_to(s, 1, 0, own_text, PORT));
	row_message("comes", s, 10, 0, 0);
	int other = opened(PORT + 1);
	MUST(send_to(other, 1, 0, own_text, PORT + 1));
	TRY("SIOCRDSSETTOS after a send", ioctl(other, SIOCRDSSETTOS, &tos));
	TRY("SIOCRDSGETTOS bad pointer", ioctl(s, SIOCRDSGETTOS, 8));
	TRY("FIONREAD", ioctl(s, FIONREAD, &value));
	TRY("SIOCOUTQ", ioctl(s, 0x5411, &value));
	TRY("SIOCATMARK", ioctl(s, 0x8905, &value));
	TRY("TCGETS", ioctl(s, 0x5401, data));
	TRY("unknown", ioctl(s, 0x89e7, &value));
}

static void row_option(const char *fact, int s, int level, int option, socklen_t len)
{
	int value[2] = { -1, -1 };
	errno = 0;
	int result = getsockopt(s, level, option, value, &len);
	row(fact, "%s, value %d, length %u", text_of(result), value[0], len);
}

static void options(void)
{
	int s = unbound(), value, small;
	row_option("SO_SNDBUF", s, SOL_SOCKET, SO_SNDBUF, 4);
	row_option("SO_RCVBUF", s, SOL_SOCKET, SO_RCVBUF, 4);
	for (int i = 0; i < 2; i++) {
		int option = i ? SO_RCVBUF : SO_SNDBUF;
		set_int(s, SOL_SOCKET, option, 20000);
		row_option(i ? "SO_RCVBUF 20000" : "SO_SNDBUF 20000", s, SOL_SOCKET, option, 4);
		set_int(s, SOL_SOCKET, option, 1);
		row_option(i ? "SO_RCVBUF 1" : "SO_SNDBUF 1", s, SOL_SOCKET, option, 4);
		set_int(s, SOL_SOCKET, option, 200000);
		row_option(i ? "SO_RCVBUF 200000" : "SO_SNDBUF 200000", s, SOL_SOCKET, option, 4);
	}
	value = 1;
	small = 1;
	TRY("RDS_RECVERR", setsockopt(s, SOL_RDS, RDS_RECVERR, &value, 4));
	row_option("RDS_RECVERR read", s, SOL_RDS, RDS_RECVERR, 4);
	row_option("RDS_RECVERR read into 3 bytes", s, SOL_RDS, RDS_RECVERR, 3);
	row_option("RDS_RECVERR read into 8 bytes", s, SOL_RDS, RDS_RECVERR, 8);
	TRY("RDS_RECVERR of 2 bytes", setsockopt(s, SOL_RDS, RDS_RECVERR, &small, 2));
	value = 7;
	TRY("RDS_RECVERR 7", setsockopt(s, SOL_RDS, RDS_RECVERR, &value, 4));
	row_option("RDS_RECVERR 7 read", s, SOL_RDS, RDS_RECVERR, 4);
	TRY("RDS_CONG_MONITOR", setsockopt(s, SOL_RDS, RDS_CONG_MONITOR, &value, 4));
	TRY("RDS_CONG_MONITOR of 2 bytes", setsockopt(s, SOL_RDS, RDS_CONG_MONITOR, &value, 2));
	row_option("RDS_CONG_MONITOR read", s, SOL_RDS, RDS_CONG_MONITOR, 4);
	row_option("SO_RDS_TRANSPORT read", s, SOL_RDS, SO_RDS_TRANSPORT, 4);
	row_option("SO_RDS_TRANSPORT read into 2 bytes", s, SOL_RDS, SO_RDS_TRANSPORT, 2);
	value = 99;
	TRY("SO_RDS_TRANSPORT 99", setsockopt(s, SOL_RDS, SO_RDS_TRANSPORT, &value, 4));
	value = 1;
	TRY("SO_RDS_TRANSPORT GAP", setsockopt(s, SOL_RDS, SO_RDS_TRANSPORT, &value, 4));
	TRY("SO_RDS_TRANSPORT of 2 bytes", setsockopt(s, SOL_RDS, SO_RDS_TRANSPORT, &value, 2));
	value = 0;
	TRY("SO_RDS_TRANSPORT IB", setsockopt(s, SOL_RDS, SO_RDS_TRANSPORT, &value, 4));
	row_option("SO_RDS_TRANSPORT IB read", s, SOL_RDS, SO_RDS_TRANSPORT, 4);
	TRY("SO_RDS_TRANSPORT again", setsockopt(s, SOL_RDS, SO_RDS_TRANSPORT, &value, 4));
	TRY("bind after SO_RDS_TRANSPORT IB", bind_to(s, own_text, PORT));
	s = opened(PORT + 1);
	row_option("SO_RDS_TRANSPORT read bound", s, SOL_RDS, SO_RDS_TRANSPORT, 4);
	TRY("SO_RDS_TRANSPORT bound", setsockopt(s, SOL_RDS, SO_RDS_TRANSPORT, &value, 4));
	TRY("SO_TIMESTAMP at SOL_RDS", setsockopt(s, SOL_RDS, SO_TIMESTAMP, &small, 4));
	row_option("SO_TIMESTAMP at SOL_RDS read", s, SOL_SOCKET, SO_TIMESTAMP, 4);
	TRY("SO_ZEROCOPY", setsockopt(s, SOL_SOCKET, SO_ZEROCOPY, &small, 4));
	unsigned char trace[4] = { 1, 9, 0, 0 };
	TRY("SO_RDS_MSG_RXPATH_LATENCY of 2 bytes", setsockopt(s, SOL_RDS, SO_RDS_MSG_RXPATH_LATENCY, trace, 2));
	TRY("SO_RDS_MSG_RXPATH_LATENCY at 9", setsockopt(s, SOL_RDS, SO_RDS_MSG_RXPATH_LATENCY, trace, 4));
	trace[0] = 4;
	TRY("SO_RDS_MSG_RXPATH_LATENCY of 4", setsockopt(s, SOL_RDS, SO_RDS_MSG_RXPATH_LATENCY, trace, 4));
	TRY("unknown option set", setsockopt(s, SOL_RDS, 99, &value, 4));
	row_option("unknown option read", s, SOL_RDS, 99, 4);
	TRY("unknown level set", setsockopt(s, SOL_IP, 99, &value, 4));
	row_option("unknown level read", s, SOL_IP, 99, 4);
	row_option("negative length", s, SOL_RDS, RDS_RECVERR, -1);
	TRY("bad pointer", setsockopt(s, SOL_RDS, RDS_RECVERR, (void *)8, 4));
}

/* A child sends by what it has inherited. */
static void in_child(const char *fact, int s, void (*what)(int))
{
	int status;
	pid_t child;
	MUST(child = fork());
	if (!child) {
		what(s);
		_exit(0);
	}
	waitpid(child, &status, 0);
	row(fact, "%s", WIFEXITED(status) && !WEXITSTATUS(status) ? "ended well" : "ended badly");
}

static void child_sends(int s)
{
	TRY("child sends", send_to(s, 21, 0, own_text, PORT));
	row_own("child's name", s, own_name, sizeof(struct sockaddr_storage));
	TRY("child closes", close(s));
}

static void child_binds(int s)
{
	(void)s;
	int own = unbound();
	TRY("child binds the same port", bind_to(own, own_text, PORT));
	TRY("child binds another", bind_to(own, own_text, PORT + 7));
	TRY("child's other sends", send_to(own, 22, 0, own_text, PORT));
	/* A close would take an unsent message with it. */
	usleep(500000);
}

static void child_executes(int s)
{
	char number[16];
	sprintf(number, "%d", s);
	execl(program, program, "--executed", own_text, number, NULL);
	_exit(1);
}

/* What the child of `child_executes` is. */
static void executed(int s)
{
	section = "sharing";
	row_own("executed program's name", s, own_name, sizeof(struct sockaddr_storage));
	TRY("executed program sends", send_to(s, 23, 0, own_text, PORT));
	row_option("executed program's RDS_RECVERR", s, SOL_RDS, RDS_RECVERR, 4);
	usleep(200000);
}

static void pass(int over, int fd)
{
	union { char bytes[CMSG_SPACE(sizeof(int))]; struct cmsghdr align; } control;
	char byte = 0;
	struct iovec iov = { &byte, 1 };
	struct msghdr m = { NULL, 0, &iov, 1, control.bytes, sizeof control.bytes, 0 };
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	*c = (struct cmsghdr){ CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS };
	memcpy(CMSG_DATA(c), &fd, sizeof fd);
	MUST(sendmsg(over, &m, 0));
}

static int passed(int over)
{
	union { char bytes[CMSG_SPACE(sizeof(int))]; struct cmsghdr align; } control;
	char byte;
	int fd;
	struct iovec iov = { &byte, 1 };
	struct msghdr m = { NULL, 0, &iov, 1, control.bytes, sizeof control.bytes, 0 };
	MUST(recvmsg(over, &m, 0));
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
	return fd;
}

static void child_gets(int over)
{
	int s = passed(over);
	row_own("passed one's name", s, own_name, sizeof(struct sockaddr_storage));
	TRY("passed one sends", send_to(s, 24, 0, own_text, PORT));
	usleep(200000);
}

static void sharing(void)
{
	int s = opened(PORT), copy, over[2], other;
	WORKS("dup", copy = dup(s));
	TRY("send by a copy", send_to(copy, 20, 0, own_text, PORT));
	row_message("comes", s, 100, 0, 0);
	TRY("dup2", dup2(s, 77) == 77);
	TRY("close of the first", close(s));
	row_own("name of a copy", copy, own_name, sizeof(struct sockaddr_storage));
	TRY("send by the second", send_to(77, 20, 0, own_text, PORT));
	row_message("comes by the second", copy, 100, 0, 0);
	/* Another file takes the number. */
	MUST(other = open("/dev/null", O_RDWR));
	MUST(dup2(other, 77));
	TRY("write to another file of its number", write(77, data, 5));
	WORKS("F_DUPFD", s = fcntl(copy, F_DUPFD_CLOEXEC, 50));
	close(copy);
	in_child("fork", s, child_sends);
	row_message("comes from the child", s, 100, 0, 0);
	in_child("its own", s, child_binds);
	row_message("comes from the child's own", s, 100, 0, 0);
	set_int(s, SOL_RDS, RDS_RECVERR, 1);
	MUST(fcntl(s, F_SETFD, 0));
	in_child("exec", s, child_executes);
	row_message("comes from the executed program", s, 100, 0, 0);
	MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, over));
	pass(over[0], s);
	in_child("SCM_RIGHTS", over[1], child_gets);
	row_message("comes by the passed one", s, 100, 0, 0);
	pass(over[0], s);
	close(s);
	s = unbound();
	TRY("bind while it is in flight", bind_to(s, own_text, PORT));
	close(s);
	s = passed(over[1]);
	row_own("name after it was in flight", s, own_name, sizeof(struct sockaddr_storage));
	close(s);
	s = unbound();
	TRY("bind when all are closed", bind_to(s, own_text, PORT));
}

static void congestion(void)
{
	int s = opened(PORT), from = opened(PORT + 1), other = opened(PORT + 2), sent, got;
	set_int(s, SOL_SOCKET, SO_RCVBUF, 8192);
	MUST(connect_to(from, own_text, PORT));
	MUST(send(from, data, 1, 0));
	MUST(recv(s, data, 10, 0));
	for (sent = 0; sent < 50 && send(from, data, 4096, MSG_DONTWAIT) == 4096; sent++)
		usleep(50000);
	row("messages until refused", "%s", sent < 50 ? text_of(-1) : "all go");
	row("more than its buffer", "%d", sent >= 3);
	row_bits("poll of the sender", from);
	TRY("others go", send_to(from, 10, MSG_DONTWAIT, own_text, PORT + 2));
	row_message("others come", other, 100, 0, 0);
	limit(from, SO_SNDTIMEO, 200);
	on_alarm(0, 700, 0);
	double begin = now();
	TRY("blocking", send(from, data, 10, 0));
	row("SO_SNDTIMEO", "%s", now() - begin >= 0.6 ? "is not looked at" : "ended it");
	bits(from, 0);
	row_bits("poll before it is free", from);
	for (got = 0; recv(s, data, 4096, MSG_DONTWAIT) == 4096; got++)
		;
	row("all sent come", "%d", got == sent);
	readable(from, 5000);
	TRY("after reading", send(from, data, 10, MSG_DONTWAIT));
	MUST(recv(s, data, 10, 0));
	/* Now with notifications. */
	set_int(from, SOL_RDS, RDS_CONG_MONITOR, 1);
	while (recv(from, data, 10, MSG_DONTWAIT) >= 0)
		;
	row_bits("poll with RDS_CONG_MONITOR", from);
	for (sent = 0; sent < 50 && send(from, data, 4096, MSG_DONTWAIT) == 4096; sent++)
		usleep(50000);
	row("refused again", "%s", sent < 50 ? text_of(-1) : "all go");
	row_bits("poll when refused", from);
	while (recv(s, data, 4096, MSG_DONTWAIT) == 4096)
		;
	TRY("readable when it is free", readable(from, 5000) == POLLIN);
	row_bits("poll when it is free", from);
	row_message("notification peeked", from, 100, 100, MSG_PEEK);
	row_message("notification", from, 100, 100, 0);
	row_message("only one", from, 100, 100, MSG_DONTWAIT);
	TRY("send", send(from, data, 10, MSG_DONTWAIT));
	MUST(recv(s, data, 10, 0));
	/* A closed receiver is free. */
	for (sent = 0; sent < 50 && send(from, data, 4096, MSG_DONTWAIT) == 4096; sent++)
		usleep(50000);
	close(s);
	TRY("readable when the receiver is closed", readable(from, 5000) == POLLIN);
	row_message("notification of the close", from, 100, 100, 0);
	TRY("send to nobody", send(from, data, 10, MSG_DONTWAIT));
}

/* Element size and length of what RDS_INFO gives. */
static int info(int s, int which, socklen_t *len)
{
	static unsigned char none[1];
	*len = 0;
	int result = getsockopt(s, SOL_RDS, which, none, len);
	if (result >= 0 || errno != ENOSPC)
		return result;
	*len = sizeof data;
	return getsockopt(s, SOL_RDS, which, data, len);
}

static void infos(void)
{
	socklen_t len;
	char fact[64];
	int s = opened(PORT);
	MUST(send_to(s, 10, 0, own_text, PORT));
	MUST(recv(s, data, 10, 0));
	MUST(send_to(s, 33, 0, own_text, PORT));
	readable(s, 5000);
	usleep(200000);
	for (int which = RDS_INFO_COUNTERS; which <= RDS_INFO_LAST + 1; which++) {
		len = 0;
		errno = 0;
		int result = getsockopt(s, SOL_RDS, which, NULL, &len);
		/* Whether messages wait depends on when they were acknowledged. */
		if (which != RDS_INFO_SEND_MESSAGES && which != RDS_INFO_RETRANS_MESSAGES && which != RDS6_INFO_SEND_MESSAGES &&
		    which != RDS6_INFO_RETRANS_MESSAGES) {
			sprintf(fact, "%d of no bytes", which);
			row(fact, "%s, length %s", text_of(result), len ? "given" : "0");
		}
		errno = 0;
		sprintf(fact, "%d element size", which);
		result = info(s, which, &len);
		row(fact, "%s", text_of(result));
	}
	len = sizeof data;
	TRY("bad pointer", getsockopt(s, SOL_RDS, RDS_INFO_COUNTERS, (void *)8, &len));
	len = 39;
	TRY("too little room", getsockopt(s, SOL_RDS, RDS_INFO_COUNTERS, data, &len));
	len = -1;
	TRY("negative length", getsockopt(s, SOL_RDS, RDS_INFO_COUNTERS, data, &len));
	MUST(info(s, RDS_INFO_COUNTERS, &len));
	for (socklen_t i = 0; i + 40 <= len; i += 40)
		row("counter", "%.32s", data + i);
	struct in_addr own;
	inet_pton(AF_INET, own_text, &own);
	int size = info(s, RDS_INFO_SOCKETS, &len), found = 0;
	for (socklen_t i = 0; size > 0 && i + size <= len; i += size) {
		unsigned char *at = data + i;
		/* sndbuf, bound address, connected address, bound port, connected port, rcvbuf, inode */
		if (!memcmp(at + 4, &own, 4) && *(uint16_t *)(at + 12) == htons(PORT)) {
			found++;
			row("socket", "sndbuf %u, connected %s port %d, rcvbuf %u, inode %s", *(uint32_t *)at, *(uint32_t *)(at + 8) ? "set" : "none",
				ntohs(*(uint16_t *)(at + 14)), *(uint32_t *)(at + 16), *(uint64_t *)(at + 20) ? "given" : "0");
		}
	}
	row("sockets", "%d", found);
	size = info(s, RDS_INFO_RECV_MESSAGES, &len), found = 0;
	for (socklen_t i = 0; size > 0 && i + size <= len; i += size) {
		/* sequence, length, local, remote address, local, remote port, flags, tos */
		unsigned char *at = data + i;
		if (*(uint32_t *)(at + 8) == 33 && !found++) {
			row("received message", "%u bytes, ports %d %d, flags %d", *(uint32_t *)(at + 8), ntohs(*(uint16_t *)(at + 20)), ntohs(*(uint16_t *)(at + 22)),
				at[24]);
		}
	}
	MUST(send_to(s, 44, 0, absent_text, PORT));
	usleep(200000);
	size = info(s, RDS_INFO_SEND_MESSAGES, &len), found = 0;
	for (socklen_t i = 0; size > 0 && i + size <= len; i += size)
		if (*(uint32_t *)(data + i + 8) == 44) {
			found++;
			row("message in the queue", "ports %d %d, flags %d", ntohs(*(uint16_t *)(data + i + 20)), ntohs(*(uint16_t *)(data + i + 22)), data[i + 24]);
		}
	row("messages in the queue", "%d", found);
	size = info(s, RDS_INFO_CONNECTIONS, &len), found = 0;
	for (socklen_t i = 0; size > 0 && i + size <= len; i += size)
		/* next_tx, next_rx, local, remote address, transport (16), flags, tos */
		if (!memcmp(data + i + 16, &own, 4) && !memcmp(data + i + 20, &own, 4)) {
			if (!found++)
				row("connection to itself", "%.16s, flags %x", data + i + 24, data[i + 40]);
		}
	row("connections to itself", "%s", found ? "some" : "none");
}

/* Structures of linux/rds.h. */
struct vec { uint64_t addr, bytes; };
struct map { struct vec vec; uint64_t cookie_addr, flags; };
struct rdma { uint64_t cookie; struct vec remote; uint64_t local, nr_local, flags, token; };
struct atomic { uint64_t cookie, local_addr, remote_addr, values[4], flags, token; };
struct status { uint64_t token; int32_t status; };
enum { ARGS = 1, DEST = 2, MAP = 3, STATUS = 4, FADD = 6, CSWP = 7, MASKED_FADD = 8, MASKED_CSWP = 9 };
enum { READWRITE = 1, FENCE = 2, INVALIDATE = 4, USE_ONCE = 8, NOTIFY_ME = 0x20, SILENT = 0x40 };

static uint64_t address_of(const void *what) { return (uintptr_t)what; }

/* Sends 10 bytes to PORT + 1 with one or two control messages. */
static ssize_t send_with(int s, int type, const void *what, size_t len, int other, const void *that, size_t length)
{
	union { char bytes[512]; struct cmsghdr align; } control = { .bytes = "" };
	struct sockaddr_in to = at(own_text, PORT + 1);
	struct iovec iov = { data, 10 };
	struct msghdr m = { &to, sizeof to, &iov, 1, control.bytes, CMSG_SPACE(len) + (other ? CMSG_SPACE(length) : 0), 0 };
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	*c = (struct cmsghdr){ CMSG_LEN(len), SOL_RDS, type };
	memcpy(CMSG_DATA(c), what, len);
	if (other) {
		c = CMSG_NXTHDR(&m, c);
		*c = (struct cmsghdr){ CMSG_LEN(length), SOL_RDS, other };
		memcpy(CMSG_DATA(c), that, length);
	}
	return sendmsg(s, &m, 0);
}

static ssize_t operate(int s, const struct rdma *args) { return send_with(s, ARGS, args, sizeof *args, 0, NULL, 0); }

/* Prints the reports of operations, as many as there is room for. */
static void row_status(const char *fact, int s, size_t room, int flags)
{
	union { char bytes[512]; struct cmsghdr align; } control;
	struct sockaddr_storage from;
	struct iovec iov = { data, 100 };
	struct msghdr m = { &from, sizeof from, &iov, 1, control.bytes, room, 0 };
	char text[512];
	errno = 0;
	ssize_t got = recvmsg(s, &m, flags);
	if (got < 0) {
		row(fact, "%s", text_of(got));
		return;
	}
	int at = sprintf(text, "%zd bytes, flags %x, name %u", got, m.msg_flags & ~MSG_CMSG_CLOEXEC, m.msg_namelen);
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
		const struct status *status = (void *)CMSG_DATA(c);
		at += sprintf(text + at, ", cmsg %d of %zu", c->cmsg_type, (size_t)(c->cmsg_len - CMSG_LEN(0)));
		if (c->cmsg_len >= CMSG_LEN(sizeof *status))
			at += sprintf(text + at, " token %llu status %d", (unsigned long long)status->token, status->status);
	}
	row(fact, "%s", text);
}

/* Receives a message with a cookie. */
static uint64_t offered(int s)
{
	union { char bytes[64]; struct cmsghdr align; } control;
	struct iovec iov = { data, 100 };
	struct msghdr m = { NULL, 0, &iov, 1, control.bytes, sizeof control.bytes, 0 };
	uint64_t cookie;
	MUST(recvmsg(s, &m, 0));
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	if (!c || c->cmsg_level != SOL_RDS || c->cmsg_type != DEST) {
		row("cookie", "none");
		_exit(1);
	}
	memcpy(&cookie, CMSG_DATA(c), sizeof cookie);
	return cookie;
}

/* Registers by a message. A connection that begins takes no registrations, and that to the host itself by 127.0.0.1 never. */
static uint64_t offer(int owner, void *memory, size_t len, uint64_t flags)
{
	uint64_t cookie = 0;
	struct map map = { { address_of(memory), len }, address_of(&cookie), flags };
	struct sockaddr_in name = at(own_text, PORT);
	union { char bytes[CMSG_SPACE(sizeof map)]; struct cmsghdr align; } control = { .bytes = "" };
	struct iovec iov = { data, 10 };
	struct msghdr m = { &name, sizeof name, &iov, 1, control.bytes, sizeof control.bytes, 0 };
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	*c = (struct cmsghdr){ CMSG_LEN(sizeof map), SOL_RDS, MAP };
	memcpy(CMSG_DATA(c), &map, sizeof map);
	for (int tries = 0; sendmsg(owner, &m, 0) < 0; tries++) {
		if (errno == EOPNOTSUPP || tries > 300)
			return 0;
		usleep(20000);
	}
	return cookie;
}

static int free_mr(int s, uint64_t cookie, uint64_t flags)
{
	uint64_t args[2] = { cookie, flags };
	return setsockopt(s, SOL_RDS, RDS_FREE_MR, args, sizeof args);
}

static unsigned char *mapped(int rights)
{
	return mmap(NULL, 8192, rights, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

/* What is wrong with an operation is said by the call. */
static void bad_rdma(void)
{
	static unsigned char memory[8192] __attribute__((aligned(4096)));
	unsigned char *gone = mapped(PROT_NONE), *read_only = mapped(PROT_READ);
	struct vec local = { address_of(memory), 100 };
	struct rdma args = { 7, { 0, 100 }, address_of(&local), 1, 0, 1 };
	struct map map = { { address_of(memory), 100 }, 0, READWRITE };
	struct { struct sockaddr_storage dest; struct map map; } for_dest = { .map = map };
	uint64_t cookie = 7;
	int s = unbound();
	TRY("GET_MR unbound", setsockopt(s, SOL_RDS, RDS_GET_MR, &map, sizeof map));
	TRY("FREE_MR unbound", free_mr(s, 7, 0));
	TRY("FREE_MR of all unbound", free_mr(s, 0, 0));
	s = opened(PORT);
	opened(PORT + 1);
	TRY("GET_MR too short", setsockopt(s, SOL_RDS, RDS_GET_MR, &map, 31));
	TRY("GET_MR too long", setsockopt(s, SOL_RDS, RDS_GET_MR, &for_dest, 33));
	TRY("GET_MR bad pointer", setsockopt(s, SOL_RDS, RDS_GET_MR, (void *)8, 32));
	TRY("GET_MR_FOR_DEST too short", setsockopt(s, SOL_RDS, RDS_GET_MR_FOR_DEST, &for_dest, 159));
	TRY("GET_MR_FOR_DEST bad pointer", setsockopt(s, SOL_RDS, RDS_GET_MR_FOR_DEST, (void *)8, 160));
	static const struct { const char *name; uint64_t at, len; } ranges[] = {
		{ "no bytes", 0, 0 }, { "the end of addresses", -4096ull, 8192 }, { "all bytes up to the end", -4096ull, 4095 }, { "5 GiB", 4096, 5ull << 30 },
		{ "1 MiB and 8 KiB", 4096, (1 << 20) + 8192 },
	};
	for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
		char fact[64];
		map.vec = (struct vec){ ranges[i].at, ranges[i].len };
		sprintf(fact, "GET_MR of %s", ranges[i].name);
		TRY(fact, setsockopt(s, SOL_RDS, RDS_GET_MR, &map, sizeof map));
		sprintf(fact, "MAP of %s", ranges[i].name);
		TRY(fact, send_with(s, MAP, &map, sizeof map, 0, NULL, 0));
		/* What comes of the third one is not the same in all kernels. */
		if (!ranges[i].at || i == 2)
			continue;
		local = map.vec;
		sprintf(fact, "ARGS of %s", ranges[i].name);
		args.remote.bytes = 1 << 20;
		TRY(fact, operate(s, &args));
	}
	args.remote.bytes = 100;
	map.vec = (struct vec){ address_of(gone), 100 };
	TRY("GET_MR of no memory", setsockopt(s, SOL_RDS, RDS_GET_MR, &map, sizeof map));
	TRY("MAP of no memory", send_with(s, MAP, &map, sizeof map, 0, NULL, 0));
	map = (struct map){ { address_of(read_only), 100 }, 0, 0 };
	TRY("MAP of constant memory", send_with(s, MAP, &map, sizeof map, 0, NULL, 0));
	TRY("FREE_MR too short", setsockopt(s, SOL_RDS, RDS_FREE_MR, &for_dest, 15));
	TRY("FREE_MR too long", setsockopt(s, SOL_RDS, RDS_FREE_MR, &for_dest, 17));
	TRY("FREE_MR bad pointer", setsockopt(s, SOL_RDS, RDS_FREE_MR, (void *)8, 16));
	TRY("FREE_MR of no region", free_mr(s, 7, 0));
	TRY("FREE_MR of no region with flags", free_mr(s, 7, -1ull));
	TRY("FREE_MR of all", free_mr(s, 0, 0));
	TRY("DEST of no region", send_with(s, DEST, &cookie, 8, 0, NULL, 0));
	local = (struct vec){ address_of(memory), 100 };
	args.nr_local = 1025;
	TRY("ARGS of 1025 pieces", operate(s, &args));
	args.nr_local = 1ull << 40;
	TRY("ARGS of too many pieces", operate(s, &args));
	args.nr_local = 1;
	args.local = 8;
	TRY("ARGS bad pointer", operate(s, &args));
	args.local = address_of(&local);
	local.bytes = 0;
	TRY("ARGS of an empty piece", operate(s, &args));
	local.bytes = 101;
	TRY("ARGS above the peer's", operate(s, &args));
	local.bytes = 100;
	args.remote.bytes = (1 << 20) + 1;
	TRY("ARGS above 1 MiB of the peer's", operate(s, &args));
	args.remote.bytes = 100;
	local.addr = address_of(gone);
	TRY("ARGS to read without memory", operate(s, &args));
	args.flags = READWRITE;
	TRY("ARGS to write without memory", operate(s, &args));
	local.addr = address_of(read_only);
	args.flags = 0;
	TRY("ARGS to read to constant memory", operate(s, &args));
	local.addr = address_of(memory);
	map.vec = local;
	TRY("ARGS twice", send_with(s, ARGS, &args, sizeof args, ARGS, &args, sizeof args));
	TRY("ARGS and DEST", send_with(s, ARGS, &args, sizeof args, DEST, &cookie, 8));
	TRY("ARGS and MAP", send_with(s, ARGS, &args, sizeof args, MAP, &map, sizeof map));
	TRY("DEST twice", send_with(s, DEST, &cookie, 8, DEST, &cookie, 8));
	struct atomic word = { 7, address_of(memory), 0, { 1, 2, 3, 4 }, 0, 1 };
	static const struct { const char *name; int type; } kinds[] = {
		{ "FADD", FADD }, { "CSWP", CSWP }, { "MASKED_FADD", MASKED_FADD }, { "MASKED_CSWP", MASKED_CSWP },
	};
	for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
		char fact[64];
		sprintf(fact, "%s too short", kinds[i].name);
		TRY(fact, send_with(s, kinds[i].type, &word, 71, 0, NULL, 0));
		word.local_addr = address_of(memory) + 4;
		sprintf(fact, "%s on no word", kinds[i].name);
		TRY(fact, send_with(s, kinds[i].type, &word, sizeof word, 0, NULL, 0));
		word.local_addr = address_of(gone);
		sprintf(fact, "%s without memory", kinds[i].name);
		TRY(fact, send_with(s, kinds[i].type, &word, sizeof word, 0, NULL, 0));
		word.local_addr = address_of(memory);
		sprintf(fact, "%s and DEST", kinds[i].name);
		TRY(fact, send_with(s, kinds[i].type, &word, sizeof word, DEST, &cookie, 8));
	}
}

static unsigned char memory[20000], own[20000];
static uint64_t cookie;

/* A child's memory is its own. */
static void child_writes(int s)
{
	struct vec local = { address_of(own), 100 };
	struct rdma args = { cookie, { 0, 100 }, address_of(&local), 1, NOTIFY_ME | READWRITE, 51 };
	memset(own, 9, sizeof own);
	TRY("child's WRITE", operate(s, &args));
	row_status("child's report", s, 200, 0);
	args.flags = NOTIFY_ME;
	args.remote.addr = 5000;
	TRY("child's READ", operate(s, &args));
	row_status("child's report", s, 200, 0);
	row("child's bytes", "%d", memcmp(own, memory + 5100, 100));
}

static void child_gets_and_writes(int over)
{
	child_writes(passed(over));
}

static void rdma(void)
{
	int over[2], owner = opened(PORT + 1), s = opened(PORT);
	for (size_t i = 0; i < sizeof memory; i++)
		memory[i] = i * 7 + i / 256;
	/* The first message brings the connection. */
	MUST(send_to(s, 1, 0, own_text, PORT + 1));
	MUST(recv(owner, data, 10, 0));
	MUST(send_to(owner, 1, 0, own_text, PORT));
	MUST(recv(s, data, 10, 0));
	uint64_t told = offer(owner, memory + 100, 10000, READWRITE);
	if (!told) {
		row("MAP", "%s", text_of(-1));
		return;
	}
	cookie = offered(s);
	row("cookie", "%s", told == cookie ? "is what was told" : "another one");
	struct vec local[2] = { { address_of(own + 1), 1000 }, { address_of(own + 2001), 500 } };
	struct rdma args = { cookie, { 50, 10000 }, address_of(local), 2, NOTIFY_ME | FENCE, 11 };
	TRY("READ", operate(s, &args));
	row_status("its report", s, 200, 0);
	row("its bytes", "%d %d", memcmp(own + 1, memory + 150, 1000), memcmp(own + 2001, memory + 1150, 500));
	row_message("its message", owner, 100, 200, 0);
	memset(own, 5, sizeof own);
	args.flags = NOTIFY_ME | READWRITE;
	args.token = 12;
	TRY("WRITE", operate(s, &args));
	row_message("its message", owner, 100, 200, 0);
	row_status("its report", s, 200, 0);
	row("its bytes", "%d %d", memcmp(memory + 150, own, 1500), memory[149] == (unsigned char)(149 * 7) && memory[1650] == (unsigned char)(1650 * 7 + 6));
	args.flags = READWRITE;
	TRY("WRITE without report", operate(s, &args));
	row_message("its message", owner, 100, 200, 0);
	row_status("no report", s, 200, MSG_DONTWAIT);
	args.flags = NOTIFY_ME | READWRITE;
	for (args.token = 21; args.token <= 25; args.token++) {
		MUST(operate(s, &args));
		MUST(recv(owner, data, 100, 0));
	}
	usleep(300000);
	row_bits("poll with reports", s);
	row_status("a report without room", s, 0, 0);
	row_status("a report with room for its half", s, CMSG_LEN(8), 0);
	row_status("a report with room for one", s, CMSG_SPACE(sizeof(struct status)), 0);
	row_status("reports peeked at", s, 200, MSG_PEEK);
	row_status("reports afterwards", s, 200, MSG_DONTWAIT);
	in_child("fork", s, child_writes);
	row("what it wrote", "%d, own %d", memory[100], own[0]);
	memset(memory + 100, 0, 100);
	MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, over));
	pass(over[0], s);
	in_child("SCM_RIGHTS", over[1], child_gets_and_writes);
	row("what that wrote", "%d, own %d", memory[100], own[0]);
	for (int i = 0; i < 4; i++)
		MUST(recv(owner, data, 100, 0));
	MUST(send_to(owner, 33, 0, own_text, PORT));
	readable(s, 5000);
	TRY("a second message with the cookie", send_with(owner, DEST, &cookie, 8, 0, NULL, 0));
	row_message("comes to itself", owner, 100, 200, 0);
	TRY("MAP and DEST", send_with(owner, MAP, &(struct map){ { address_of(memory), 100 }, 0, 0 }, sizeof(struct map), DEST, &cookie, 8));
	TRY("another's FREE_MR", free_mr(s, cookie, 0));
	TRY("another's DEST", send_with(s, DEST, &cookie, 8, 0, NULL, 0));
	TRY("FREE_MR", free_mr(owner, cookie, INVALIDATE));
	TRY("FREE_MR again", free_mr(owner, cookie, 0));
	TRY("DEST of what was freed", send_with(owner, DEST, &cookie, 8, 0, NULL, 0));
	MUST(recv(s, data, 100, 0));
	offer(owner, memory, 100, USE_ONCE);
	args = (struct rdma){ offered(s), { 0, 100 }, address_of(local), 1, NOTIFY_ME, 31 };
	local[0].bytes = 100;
	TRY("READ of a region for use once", operate(s, &args));
	row_message("its message", owner, 100, 200, 0);
	row_status("its report", s, 200, 0);
	TRY("FREE_MR of it", free_mr(owner, args.cookie, 0));
	offer(owner, memory, 100, 0xff00000000000001ull);
	TRY("FREE_MR of one with unknown flags", free_mr(owner, offered(s), 0));
	uint64_t none = 0;
	struct map map = { { address_of(memory), 100 }, address_of(&none), 0 };
	TRY("GET_MR", setsockopt(owner, SOL_RDS, RDS_GET_MR, &map, sizeof map));
	row("its cookie", "%s", none ? "given" : "none");
	TRY("close", close(owner));
}

static void sysctls(void)
{
	static const char *const names[] = {
		"reconnect_min_delay_ms", "reconnect_max_delay_ms", "max_unacked_packets", "max_unacked_bytes", "ping_enable",
		"ib/max_send_wr", "ib/max_recv_wr", "ib/max_unsignaled_wr", "ib/flow_control", "pf_rds",
	};
	char path[128], line[64];
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		snprintf(path, sizeof path, "/proc/sys/net/rds/%s", names[i]);
		errno = 0;
		FILE *f = fopen(path, "r");
		if (f && fgets(line, sizeof line, f))
			row(names[i], "%.*s", (int)strcspn(line, "\n"), line);
		else
			row(names[i], "%s", text_of(-1));
		if (f)
			fclose(f);
	}
	TRY("access", access("/proc/sys/net/rds", F_OK));
	TRY("max_recv_allocation", access("/proc/sys/net/rds/ib/max_recv_allocation", F_OK));
}

static const struct { const char *name; void (*run)(void); } sections[] = {
	{ "sockets", sockets }, { "bind", binds }, { "connect", connects }, { "refused", refused_calls }, { "send", sends }, { "receive", receives },
	{ "timeouts", timeouts }, { "queue", queue }, { "poll", polls }, { "ioctl", ioctls }, { "options", options }, { "sharing", sharing },
	{ "congestion", congestion }, { "info", infos }, { "sysctl", sysctls }, { "bad-rdma", bad_rdma }, { "rdma", rdma },
};

static int wanted(const char *name, char **only)
{
	if (!*only)
		return 1;
	for (; *only; only++)
		if (!strcmp(*only, name))
			return 1;
	return 0;
}

int main(int argc, char **argv)
{
	program = argv[0];
	if (argc == 4 && !strcmp(argv[1], "--executed")) {
		own_text = argv[2];
		executed(atoi(argv[3]));
		return 0;
	}
	if (argc < 3) {
		fprintf(stderr, "usage: rds-conformance ADDRESS ABSENT [SECTION]...\n");
		return 2;
	}
	own_text = argv[1];
	absent_text = argv[2];
	for (size_t i = 0; i < sizeof sections / sizeof *sections; i++) {
		if (!wanted(sections[i].name, argv + 3))
			continue;
		section = sections[i].name;
		int status;
		pid_t child = fork();
		if (!child) {
			/* SIGALRM is for what the sections measure. */
			struct sigevent at_end = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGXCPU };
			struct itimerspec minute = { .it_value = { 60, 0 } };
			timer_t timer;
			MUST(timer_create(CLOCK_MONOTONIC, &at_end, &timer));
			MUST(timer_settime(timer, 0, &minute, NULL));
			sections[i].run();
			_exit(0);
		}
		waitpid(child, &status, 0);
		if (!WIFEXITED(status) || WEXITSTATUS(status))
			row("end", "%s %d", WIFSIGNALED(status) ? "by signal" : "exit status", WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
	}
	return 0;
}
