/*
 * Remote memory by librpma: the server's region is read, overwritten, flushed and changed by an atomic write, and both sides
 * compare every byte.
 *
 *     rpma server ADDRESS PORT
 *     rpma client ADDRESS PORT
 */
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <librpma.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define REGION (4 << 20)
#define CHUNK 65536
/* Work requests at once, fewer than a send queue has by default. */
#define DEPTH 8
/* What comes with the last write, and what the answer is. */
#define WRITTEN 0x77
#define ANSWER "as it was written"

static void fail(const char *what, int line, int ret)
{
	fprintf(stderr, "line %d: %s: %s\n", line, what, rpma_err_2str(ret));
	exit(1);
}

#define RPMA(call) do { int ret_ = (call); if (ret_) fail(#call, __LINE__, ret_); } while (0)
#define MUST(x) do { if (!(x)) fail(#x, __LINE__, 0); } while (0)

static struct rpma_peer *peer;
static struct rpma_conn *conn;
static struct rpma_cq *cq;
static struct rpma_mr_local *mr, *message_mr;
static uint8_t *region, *message;

/* What a byte of the region is, in the first and in the second of two patterns. */
static uint8_t byte_of(int pattern, size_t at)
{
	return (uint8_t)(pattern * 101 + at * 7 + (at >> 8) * 13 + (at >> 16) * 29);
}

static void fill(int pattern)
{
	for (size_t at = 0; at < REGION; at++)
		region[at] = byte_of(pattern, at);
}

static void check(int pattern, size_t end)
{
	for (size_t at = 0; at < end; at++)
		if (region[at] != byte_of(pattern, at)) {
			fprintf(stderr, "pattern %d: byte %zu is %#x\n", pattern, at, region[at]);
			exit(1);
		}
}

/* Takes one completion, which has to be of this operation. */
static struct ibv_wc completion(enum ibv_wc_opcode opcode)
{
	struct ibv_wc wc;
	int ret;

	while ((ret = rpma_cq_get_wc(cq, 1, &wc, NULL)) == RPMA_E_NO_COMPLETION)
		RPMA(rpma_cq_wait(cq));
	RPMA(ret);
	if (wc.status || wc.opcode != opcode) {
		fprintf(stderr, "%s of opcode %d, not %d\n", ibv_wc_status_str(wc.status), wc.opcode, opcode);
		exit(1);
	}
	return wc;
}

static void event(enum rpma_conn_event wanted)
{
	enum rpma_conn_event got;

	RPMA(rpma_conn_next_event(conn, &got));
	if (got != wanted) {
		fprintf(stderr, "event %s\n", rpma_utils_conn_event_2str(got));
		exit(1);
	}
}

static void *pages(size_t size)
{
	void *out = aligned_alloc(sysconf(_SC_PAGESIZE), size);

	MUST(out);
	memset(out, 0, size);
	return out;
}

static void set_up(const char *addr, enum rpma_util_ibv_context_type where, int usage)
{
	struct ibv_context *context;

	RPMA(rpma_utils_get_ibv_context(addr, where, &context));
	RPMA(rpma_peer_new(context, &peer));
	region = pages(REGION);
	message = pages(4096);
	RPMA(rpma_mr_reg(peer, region, REGION, usage, &mr));
	RPMA(rpma_mr_reg(peer, message, 4096, RPMA_MR_USAGE_SEND | RPMA_MR_USAGE_RECV, &message_mr));
}

static void tear_down(void)
{
	RPMA(rpma_conn_delete(&conn));
	RPMA(rpma_mr_dereg(&mr));
	RPMA(rpma_mr_dereg(&message_mr));
	RPMA(rpma_peer_delete(&peer));
	free(region);
	free(message);
}

static void serve(const char *addr, const char *port)
{
	uint8_t descriptor[64];
	size_t size;
	struct rpma_conn_private_data told = { .ptr = descriptor };
	struct rpma_conn_req *request;
	struct rpma_ep *ep;
	struct ibv_wc wc;

	set_up(addr, RPMA_UTIL_IBV_CONTEXT_LOCAL,
	       RPMA_MR_USAGE_READ_SRC | RPMA_MR_USAGE_WRITE_DST | RPMA_MR_USAGE_FLUSH_TYPE_VISIBILITY);
	fill(1);
	RPMA(rpma_mr_get_descriptor_size(mr, &size));
	MUST(size <= sizeof(descriptor));
	RPMA(rpma_mr_get_descriptor(mr, descriptor));
	told.len = size;

	RPMA(rpma_ep_listen(peer, addr, port, &ep));
	RPMA(rpma_ep_next_conn_req(ep, NULL, &request));
	RPMA(rpma_conn_req_recv(request, message_mr, 0, 0, NULL));
	RPMA(rpma_conn_req_connect(&request, &told, &conn));
	event(RPMA_CONN_ESTABLISHED);
	RPMA(rpma_conn_get_cq(conn, &cq));

	wc = completion(IBV_WC_RECV_RDMA_WITH_IMM);
	MUST(wc.wc_flags & IBV_WC_WITH_IMM && ntohl(wc.imm_data) == WRITTEN);
	check(2, REGION - 8);
	MUST(!memcmp(region + REGION - 8, "8 bytes!", 8));
	strcpy((char *)message, ANSWER);
	RPMA(rpma_send(conn, message_mr, 0, sizeof(ANSWER), RPMA_F_COMPLETION_ALWAYS, NULL));
	completion(IBV_WC_SEND);
	event(RPMA_CONN_CLOSED);
	RPMA(rpma_conn_disconnect(conn));
	RPMA(rpma_ep_shutdown(&ep));
	tear_down();
}

/* Moves the whole region, a chunk at a time. */
static void move(struct rpma_mr_remote *remote, int read)
{
	for (size_t at = 0, done = 0; done < REGION; done += CHUNK) {
		for (; at < REGION && at < done + DEPTH * CHUNK; at += CHUNK)
			RPMA(read ? rpma_read(conn, mr, at, remote, at, CHUNK, RPMA_F_COMPLETION_ALWAYS, NULL)
				  : rpma_write(conn, remote, at, mr, at, CHUNK, RPMA_F_COMPLETION_ALWAYS, NULL));
		completion(read ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE);
	}
}

static void use(const char *addr, const char *port)
{
	struct rpma_conn_private_data told;
	struct rpma_mr_remote *remote;
	struct rpma_conn_req *request;
	size_t size;

	set_up(addr, RPMA_UTIL_IBV_CONTEXT_REMOTE, RPMA_MR_USAGE_READ_DST | RPMA_MR_USAGE_WRITE_SRC);
	RPMA(rpma_conn_req_new(peer, addr, port, NULL, &request));
	RPMA(rpma_conn_req_connect(&request, NULL, &conn));
	event(RPMA_CONN_ESTABLISHED);
	RPMA(rpma_conn_get_cq(conn, &cq));
	RPMA(rpma_conn_get_private_data(conn, &told));
	MUST(told.ptr);
	RPMA(rpma_mr_remote_from_descriptor(told.ptr, told.len, &remote));
	RPMA(rpma_mr_remote_get_size(remote, &size));
	MUST(size == REGION);

	move(remote, 1);
	check(1, REGION);
	fill(2);
	move(remote, 0);
	RPMA(rpma_atomic_write(conn, remote, REGION - 8, "8 bytes!", RPMA_F_COMPLETION_ALWAYS, NULL));
	completion(IBV_WC_RDMA_WRITE);
	RPMA(rpma_flush(conn, remote, 0, REGION, RPMA_FLUSH_TYPE_VISIBILITY, RPMA_F_COMPLETION_ALWAYS, NULL));
	completion(IBV_WC_RDMA_READ);
	/* What is in the server's memory, not in ours. */
	memset(region, 0, REGION);
	move(remote, 1);
	check(2, REGION - 8);
	MUST(!memcmp(region + REGION - 8, "8 bytes!", 8));

	RPMA(rpma_recv(conn, message_mr, 0, 4096, NULL));
	RPMA(rpma_write_with_imm(conn, remote, 0, mr, 0, 8, RPMA_F_COMPLETION_ON_ERROR, WRITTEN, NULL));
	MUST(completion(IBV_WC_RECV).byte_len == sizeof(ANSWER) && !strcmp((char *)message, ANSWER));
	RPMA(rpma_mr_remote_delete(&remote));
	RPMA(rpma_conn_disconnect(conn));
	event(RPMA_CONN_CLOSED);
	tear_down();
	puts("every byte is the same");
}

int main(int argc, char **argv)
{
	MUST(argc == 4);
	rpma_log_set_threshold(RPMA_LOG_THRESHOLD_AUX, RPMA_LOG_LEVEL_WARNING);
	if (!strcmp(argv[1], "server"))
		serve(argv[2], argv[3]);
	else
		use(argv[2], argv[3]);
	return 0;
}
