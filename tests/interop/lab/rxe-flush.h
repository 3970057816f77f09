/* FLUSH (IBTA Annex A19) of rdma_rxe, which libibverbs 44 can't post: its queue, that is mapped here, gets one all the same. */
#include <rdma/rdma_user_rxe.h>

/* The arguments in struct rxe_send_wr, as headers of Linux 6.3 and later have them. */
struct rxe_flush { uint64_t addr; uint32_t length, rkey; uint8_t placement, selectivity; };
enum { RXE_WR_FLUSH = 14 };

/* The only queue of the process whose entries are large enough for sends; NULL if there is none, or no telling. */
static struct rxe_queue_buf *rxe_send_queue(void)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	struct rxe_queue_buf *found = NULL;
	int n = 0;
	char line[512];
	while (maps && fgets(line, sizeof line, maps)) {
		uint64_t start;
		if (!strstr(line, "/uverbs") || sscanf(line, "%" SCNx64, &start) != 1) continue;
		struct rxe_queue_buf *q = (void *)(uintptr_t)start;
		if (1ul << q->log2_elem_size >= sizeof(struct rxe_send_wqe)) { found = q; n++; }
	}
	if (maps) fclose(maps);
	return n == 1 ? found : NULL;
}

/* Builds a WRITE of no bytes and makes it a FLUSH before the device is told of it. Returns an errno. */
static int rxe_flush(struct ibv_qp_ex *qp, uint64_t id, const struct rxe_flush *flush)
{
	struct ibv_device_attr a;
	/* Of others nobody knows what their queues look like. */
	if (ibv_query_device(qp->qp_base.context, &a) || a.vendor_id != 0xffffff) return EOPNOTSUPP;
	struct rxe_queue_buf *q = rxe_send_queue();
	if (!q) return EOPNOTSUPP;
	ibv_wr_start(qp);
	qp->wr_id = id; qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_write(qp, flush->rkey, flush->addr);
	struct rxe_send_wqe *wqe = (void *)(q->data + ((size_t)(q->producer_index & q->index_mask) << q->log2_elem_size));
	if (wqe->wr.wr_id != id) { ibv_wr_abort(qp); return EIO; }
	wqe->wr.opcode = RXE_WR_FLUSH;
	memcpy(&wqe->wr.wr, flush, sizeof *flush);
	wqe->dma.length = wqe->dma.resid = flush->length; /* what the RETH will say */
	return ibv_wr_complete(qp);
}
