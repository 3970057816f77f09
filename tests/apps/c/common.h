/* What the programs about the interface begin and end with: a device, and objects of it that every test needs. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void fail(const char *what, int line)
{
	fprintf(stderr, "line %d: %s: %s\n", line, what, strerror(errno));
	exit(1);
}

#define MUST(x) do { errno = 0; if (!(x)) fail(#x, __LINE__); } while (0)

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
/* An IPv4 address if the device has one, and where its table has it. */
static union ibv_gid own;
static int own_index;
static struct ibv_device_attr limits;

static void find_own(void)
{
	static const unsigned char mapped[12] = { [10] = 0xff, [11] = 0xff };
	struct ibv_gid_entry entry;

	for (int i = 0; i < 16; i++)
		if (!ibv_query_gid_ex(context, 1, i, &entry, 0) && !memcmp(entry.gid.raw, mapped, sizeof(mapped))) {
			own = entry.gid;
			own_index = i;
			return;
		}
	MUST(!ibv_query_gid(context, 1, 0, &own));
}

static inline void set_up(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	MUST(list && list[0] && (context = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	find_own();
	MUST(!ibv_query_device(context, &limits));
	MUST(pd = ibv_alloc_pd(context));
	MUST(cq = ibv_create_cq(context, 64, NULL, NULL, 0));
}

static inline void tear_down(const char *says)
{
	MUST(!ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd));
	MUST(!ibv_close_device(context));
	puts(says);
}

/* What a program tries, one after the other. */
struct check {
	const char *name;
	void (*of)(void);
};

#define CHECK(function) { #function, function }

/* In a process of its own, which ends after two minutes. Prints "ok NAME", or "failed NAME: " and why. */
static inline void try_alone(const struct check *check, void (*begin)(void))
{
	char said[512] = "", *why = said;
	int ends[2], status, got, length = 0;
	pid_t child;

	fflush(stdout);
	MUST(!pipe(ends));
	MUST((child = fork()) >= 0);
	if (!child) {
		MUST(dup2(ends[1], 2) == 2);
		alarm(120);
		begin();
		check->of();
		_exit(0);
	}
	close(ends[1]);
	while (length < (int)sizeof(said) - 1 && (got = read(ends[0], said + length, sizeof(said) - 1 - length)) > 0)
		length += got;
	close(ends[0]);
	MUST(waitpid(child, &status, 0) == child);
	said[strcspn(said, "\n")] = 0;
	/* The number of the line changes with every change of the program. */
	if (!strncmp(said, "line ", 5) && strstr(said, ": "))
		why = strstr(said, ": ") + 2;
	if (WIFEXITED(status) && !WEXITSTATUS(status))
		printf("ok %s\n", check->name);
	else if (WIFSIGNALED(status))
		printf("failed %s: signal %d\n", check->name, WTERMSIG(status));
	else
		printf("failed %s: %s\n", check->name, why);
}

/* All of them in this process, of which the first that fails is the end; or each for itself, but for those that are named. */
static inline int run(char **but, const struct check *checks, int count, void (*begin)(void), void (*end)(void))
{
	if (but) {
		for (int i = 0; i < count; i++) {
			char **name = but;

			while (*name && strcmp(*name, checks[i].name))
				name++;
			if (!*name)
				try_alone(&checks[i], begin);
		}
		return 0;
	}
	begin();
	for (int i = 0; i < count; i++)
		checks[i].of();
	end();
	return 0;
}

/* What follows --each, which a NULL ends; NULL without it. */
static inline char **each(char **argv)
{
	while (*argv && strcmp(*argv, "--each"))
		argv++;
	return *argv ? argv + 1 : NULL;
}

#define COUNT(array) (int)(sizeof(array) / sizeof(*(array)))
