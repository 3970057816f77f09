/*
 * The descriptors that events come by, as the kernel's behave in poll, select and epoll, with O_NONBLOCK and when copied: the
 * completion channel, the one of asynchronous events, and the event channel of RDMA_CM.
 *
 *     channels ADDRESS [--each [BUT …]]
 */
#include "common.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <sys/epoll.h>
#include <sys/select.h>

static struct ibv_comp_channel *channel;
static struct ibv_cq *armed;
static struct ibv_srq *srq;
static struct ibv_qp *taker;
static int receives;
static struct rdma_event_channel *cm;
static struct rdma_cm_id *ids[3];
static struct sockaddr_in to = { .sin_family = AF_INET };

/* A kind of descriptor: how an event is made, and how the oldest is taken; the taker returns 0 or an error number. */
struct kind {
	int fd;
	void (*make)(int number);
	int (*take)(void);
};

/* A flushed receive completes on a queue that is armed. */
static void make_completion(int number)
{
	struct ibv_qp_init_attr init = { .send_cq = armed, .recv_cq = armed, .qp_type = IBV_QPT_RC,
					 .cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct ibv_recv_wr wr = { .wr_id = number }, *bad;
	time_t end = time(NULL) + 60;
	struct ibv_qp *qp;
	struct ibv_wc wc;

	MUST(!ibv_req_notify_cq(armed, 0));
	MUST(qp = ibv_create_qp(pd, &init));
	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	MUST(!ibv_post_recv(qp, &wr, &bad));
	attr.qp_state = IBV_QPS_ERR;
	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	while (!ibv_poll_cq(armed, 1, &wc))
		MUST(time(NULL) < end);
	MUST(!ibv_destroy_qp(qp));
}

static int take_completion(void)
{
	struct ibv_cq *of;
	void *cookie;

	if (ibv_get_cq_event(channel, &of, &cookie))
		return errno;
	MUST(of == armed && cookie == &armed);
	ibv_ack_cq_events(of, 1);
	return 0;
}

/* A message to itself takes one of two receives, of which there shall be two. */
static void make_asynchronous(int number)
{
	struct ibv_srq_attr attr = { .srq_limit = 2 };
	struct ibv_recv_wr recv = { .wr_id = number }, *bad_recv;
	struct ibv_send_wr send = { .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad;
	time_t end = time(NULL) + 60;
	struct ibv_wc wc;

	for (; receives < 2; receives++)
		MUST(!ibv_post_srq_recv(srq, &recv, &bad_recv));
	MUST(!ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT));
	MUST(!ibv_post_send(taker, &send, &bad));
	for (int count = 2, got; count; count -= got) {
		MUST((got = ibv_poll_cq(cq, 1, &wc)) >= 0 && time(NULL) < end);
		MUST(!got || wc.status == IBV_WC_SUCCESS);
	}
	receives--;
}

/* The queue pair that takes receives of the shared queue, connected with itself. */
static void connect_taker(void)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = IBV_QPT_RC,
					 .cap = { .max_send_wr = 4, .max_send_sge = 1 } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };

	MUST(taker = ibv_create_qp(pd, &init));
	MUST(!ibv_modify_qp(taker, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_256, .dest_qp_num = taker->qp_num,
				     .ah_attr = { .is_global = 1, .port_num = 1,
						  .grh = { .dgid = own, .sgid_index = own_index, .hop_limit = 64 } } };
	MUST(!ibv_modify_qp(taker, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					  IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7 };
	MUST(!ibv_modify_qp(taker, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					  IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

static int take_asynchronous(void)
{
	struct ibv_async_event event;

	if (ibv_get_async_event(context, &event))
		return errno;
	MUST(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && event.element.srq == srq);
	ibv_ack_async_event(&event);
	return 0;
}

static void make_cm(int number)
{
	MUST(!rdma_create_id(cm, &ids[number], NULL, RDMA_PS_TCP));
	MUST(!rdma_resolve_addr(ids[number], NULL, (struct sockaddr *)&to, 2000));
}

static int take_cm(void)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	if (rdma_get_cm_event(cm, &event))
		return errno;
	MUST(event->event == RDMA_CM_EVENT_ADDR_RESOLVED);
	id = event->id;
	MUST(!rdma_ack_cm_event(event) && !rdma_destroy_id(id));
	return 0;
}

/* What poll and select say of a descriptor after waiting so long. */
static int polled(int fd, int ms)
{
	struct pollfd entry = { .fd = fd, .events = POLLIN | POLLOUT | POLLPRI };

	MUST(poll(&entry, 1, ms) >= 0);
	return entry.revents;
}

static int selected(int fd)
{
	struct timeval none = { 0 };
	fd_set in, out, other;

	FD_ZERO(&in);
	FD_ZERO(&out);
	FD_ZERO(&other);
	FD_SET(fd, &in);
	FD_SET(fd, &out);
	FD_SET(fd, &other);
	MUST(select(fd + 1, &in, &out, &other, &none) >= 0);
	return (FD_ISSET(fd, &in) ? 1 : 0) + (FD_ISSET(fd, &out) ? 2 : 0) + (FD_ISSET(fd, &other) ? 4 : 0);
}

static int watch(int fd, unsigned how)
{
	struct epoll_event want = { .events = EPOLLIN | EPOLLOUT | how };
	int epoll = epoll_create1(0);

	MUST(epoll >= 0 && !epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &want));
	return epoll;
}

static unsigned waited(int epoll, int ms)
{
	struct epoll_event got = { 0 };

	MUST(epoll_wait(epoll, &got, 1, ms) >= 0);
	return got.events;
}

static void behaves(const struct kind *k)
{
	int copy = dup(k->fd), flags = fcntl(k->fd, F_GETFL);
	int level = watch(k->fd, 0), edge = watch(k->fd, EPOLLET), copied = watch(copy, EPOLLET);

	MUST(copy >= 0 && flags >= 0 && !(flags & O_NONBLOCK));
	MUST(!fcntl(copy, F_SETFL, flags | O_NONBLOCK) && (fcntl(k->fd, F_GETFL) & O_NONBLOCK));
	for (int round = 0; round < 2; round++) {
		MUST(!polled(k->fd, 0) && !polled(copy, 0) && !selected(k->fd));
		MUST(!waited(level, 0) && !waited(edge, 0) && !waited(copied, 0));
		MUST(k->take() == EAGAIN);
		k->make(0);
		MUST(polled(k->fd, 60000) == POLLIN && polled(copy, 0) == POLLIN && selected(k->fd) == 1);
		MUST(waited(level, 0) == EPOLLIN && waited(level, 0) == EPOLLIN);
		MUST(waited(edge, 0) == EPOLLIN && !waited(edge, 0) && waited(copied, 0) == EPOLLIN);
		/* One more is an edge, although the first still waits. */
		k->make(1);
		MUST(waited(edge, 60000) == EPOLLIN && !waited(edge, 0));
		MUST(!k->take());
		MUST(polled(k->fd, 0) == POLLIN && waited(level, 0) == EPOLLIN);
		MUST(!k->take() && k->take() == EAGAIN);
		MUST(!polled(k->fd, 0) && !waited(level, 0));
		waited(edge, 0), waited(copied, 0);
	}
	MUST(!fcntl(k->fd, F_SETFL, flags));
	k->make(2);
	/* It waits. */
	MUST(!k->take());
	close(level), close(edge), close(copied), close(copy);
}

static void begin(void)
{
	struct ibv_srq_init_attr how = { .attr = { .max_wr = 4, .max_sge = 1 } };

	set_up();
	MUST(channel = ibv_create_comp_channel(context));
	MUST(armed = ibv_create_cq(context, 16, &armed, channel, 0));
	MUST(srq = ibv_create_srq(pd, &how));
	connect_taker();
	MUST(cm = rdma_create_event_channel());
}

static void end(void)
{
	rdma_destroy_event_channel(cm);
	MUST(!ibv_destroy_qp(taker) && !ibv_destroy_srq(srq) && !ibv_destroy_cq(armed) && !ibv_destroy_comp_channel(channel));
	tear_down("events come as they should");
}

static void completion_channels(void)
{
	behaves(&(struct kind){ channel->fd, make_completion, take_completion });
}

static void asynchronous_events(void)
{
	behaves(&(struct kind){ context->async_fd, make_asynchronous, take_asynchronous });
}

static void event_channels_of_rdma_cm(void)
{
	behaves(&(struct kind){ cm->fd, make_cm, take_cm });
}

int main(int argc, char **argv)
{
	static const struct check checks[] = {
		CHECK(completion_channels),
		CHECK(asynchronous_events),
		CHECK(event_channels_of_rdma_cm),
	};

	MUST(argc >= 2 && inet_pton(AF_INET, argv[1], &to.sin_addr) == 1);
	return run(each(argv), checks, COUNT(checks), begin, end);
}
