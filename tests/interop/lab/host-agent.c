/* Runs the programs that a test asks for over TCP: how the lab drives a guest, and the other half of `--peer`.
 *
 *   host-agent [-p PORT] [-s] [FOLDER]
 *
 * A request is one of
 *   exec SECONDS PROGRAM ARGUMENT…\n    PROGRAM is one of a fixed table, with -s any; those of ours are in FOLDER
 *   run SECONDS LENGTH\n<LENGTH bytes>  a bash script (only with -s: for virtual machines)
 * The answer is any number of `out LENGTH\n` with bytes of its output, then `exit CODE\n` (124: the time ran out). A program
 * ends when its client goes away, and all end with host-agent.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "listen.h"

#define MAX_SCRIPT (1 << 20)
#define MAX_ARGS 40

static const char *const PROGRAMS[] = { "verbs-agent", "cm-agent", "rping", "ucmatose", "ibv_rc_pingpong", "host-facts",
	"rdma-end" };
static const char *folder = ".";
static int scripts;

static int send_all(int fd, const char *p, size_t n)
{
	while (n) {
		ssize_t k = send(fd, p, n, MSG_NOSIGNAL);
		if (k <= 0) return -1;
		p += k; n -= k;
	}
	return 0;
}

static int read_line(int fd, char *line, size_t max)
{
	for (size_t n = 0; n + 1 < max; n++) {
		if (recv(fd, line + n, 1, 0) != 1) return -1;
		if (line[n] == '\n') { line[n] = 0; return 0; }
	}
	return -1;
}

static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }

/* Starts a program in a process group of its own, its output in a pipe. */
static pid_t start(char *const argv[], int *from)
{
	int p[2];
	if (pipe(p)) return -1;
	pid_t us = getpid(), pid = fork();
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != us) _exit(126);
		setpgid(0, 0);
		dup2(p[1], 1); dup2(p[1], 2);
		close(p[0]); close(p[1]);
		if (!freopen("/dev/null", "r", stdin)) _exit(126);
		execvp(argv[0], argv);
		fprintf(stderr, "%s: %s\n", argv[0], strerror(errno));
		_exit(127);
	}
	setpgid(pid, pid);
	close(p[1]);
	*from = p[0];
	return pid;
}

/* Passes output on until the program ends, its time runs out or the client goes away. */
static int relay(int client, char *const argv[], double seconds)
{
	int from, status, gone = 0, late = 0;
	char buf[4096], head[32];
	pid_t pid = start(argv, &from);
	if (pid < 0) return -1;
	double until = now() + seconds;
	for (;;) {
		struct pollfd p[2] = { { .fd = from, .events = POLLIN }, { .fd = client, .events = POLLIN } };
		double left = until - now();
		if (left <= 0) { late = 1; break; }
		if (poll(p, 2, left > 1000 ? 1000000 : (int)(left * 1000) + 1) < 0) break;
		if (p[1].revents && recv(client, buf, 1, MSG_PEEK) <= 0) { gone = 1; break; }
		if (!p[0].revents) continue;
		ssize_t n = read(from, buf, sizeof buf);
		if (n <= 0) break;
		int k = snprintf(head, sizeof head, "out %zd\n", n);
		if (send_all(client, head, k) || send_all(client, buf, n)) { gone = 1; break; }
	}
	if (gone || late) {
		kill(-pid, SIGTERM);
		for (int i = 0; i < 20 && waitpid(pid, &status, WNOHANG) == 0; i++) usleep(100000);
		kill(-pid, SIGKILL);
	}
	close(from);
	waitpid(pid, &status, 0);
	int code = late ? 124 : WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
	int k = snprintf(head, sizeof head, "exit %d\n", code);
	return gone ? -1 : send_all(client, head, k);
}

static int exec_request(int client, char *rest, double seconds)
{
	static char path[4096];
	/* Lines shall come when they are written, not when a buffer is full. */
	char *line[MAX_ARGS + 4] = { "stdbuf", "-o", "L" }, **argv = line + 3;
	int n = 0, known = scripts;
	for (char *w = strtok(rest, " "); w && n < MAX_ARGS; w = strtok(NULL, " ")) argv[n++] = w;
	argv[n] = NULL;
	for (size_t i = 0; n && i < sizeof PROGRAMS / sizeof *PROGRAMS; i++) known |= !strcmp(argv[0], PROGRAMS[i]);
	if (!known) return -1;
	snprintf(path, sizeof path, "%s/%s", folder, argv[0]);
	if (!strchr(argv[0], '/') && !access(path, X_OK)) argv[0] = path;
	return relay(client, line, seconds);
}

static int run_request(int client, const char *rest, double seconds)
{
	static char script[MAX_SCRIPT + 64];
	static const char HEAD[] = "exec 2>&1 </dev/null\n";
	long len = atol(rest);
	if (!scripts || len < 0 || len > MAX_SCRIPT) return -1;
	strcpy(script, HEAD);
	char *at = script + sizeof HEAD - 1;
	for (long have = 0; have < len;) {
		ssize_t k = recv(client, at + have, len - have, 0);
		if (k <= 0) return -1;
		have += k;
	}
	at[len] = 0;
	char *argv[] = { "bash", "-c", script, NULL };
	return relay(client, argv, seconds);
}

static void serve(int client)
{
	char line[4096];
	while (!read_line(client, line, sizeof line)) {
		int at = 0; double seconds;
		if (sscanf(line, "exec %lf %n", &seconds, &at) == 1 && at) { if (exec_request(client, line + at, seconds)) return; }
		else if (sscanf(line, "run %lf %n", &seconds, &at) == 1 && at) { if (run_request(client, line + at, seconds)) return; }
		else return;
	}
}

int main(int argc, char **argv)
{
	int port = 7001, opt, one = 1;
	while ((opt = getopt(argc, argv, "p:s")) != -1) {
		if (opt == 'p') port = atoi(optarg);
		else if (opt == 's') scripts = 1;
		else return 2;
	}
	if (optind < argc) folder = argv[optind];
	int l = listen_on(port);
	if (l < 0) { perror("host-agent"); return 1; }
	printf("host-agent: waiting on TCP port %d\n", port); fflush(stdout);
	pid_t us = getpid();
	for (int fd; (fd = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0 || errno == EINTR;) {
		while (waitpid(-1, NULL, WNOHANG) > 0) ;
		if (fd < 0) continue;
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
		if (fork() == 0) {
			prctl(PR_SET_PDEATHSIG, SIGTERM);
			close(l);
			if (getppid() == us) serve(fd);
			_exit(0);
		}
		close(fd);
	}
	return 0;
}
