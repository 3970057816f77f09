//! Counters of a port's queue pairs.

use roce_verbs::counters;

counters! {
    /// Counters; the names are rdma_rxe's where it has them (`rxe_hw_counters.c`).
    pub struct Counters;

    /// Requests that had been received before.
    duplicate_request,
    /// Requests beyond a gap in the PSNs.
    out_of_seq_request,
    /// RNR NAKs received.
    rcvd_rnr_err,
    /// RNR NAKs sent.
    send_rnr_err,
    /// Sequence error NAKs received.
    rcvd_seq_err,
    /// Acknowledgements that one later acknowledgement stood for.
    ack_deferred,
    /// Work requests that failed because retries ran out.
    retry_exceeded_err,
    /// Work requests that failed because RNR retries ran out.
    retry_rnr_exceeded_err,
    /// Times the requester went back to retransmit.
    completer_retry_err,
    /// Packets that could not be built because memory was gone.
    send_err,
    /// SENDs completed.
    rdma_sends,
    /// Receives completed.
    rdma_recvs,
    /// Packets sent again.
    retransmits,
    /// Silences so long that everything in flight was taken for lost.
    timeouts,
    /// Timeouts after which an acknowledgement of the first transmission came.
    spurious_timeouts,
    /// Newest packets sent once more after a silence, to learn whether something was lost.
    tail_probes,
    /// Acknowledgements received that say what has arrived beyond a gap.
    selective_acks,
    /// Parts of READs that were asked for again while others were being sent.
    duplicate_parts,
    /// NAKs sent for any other reason than a gap or a missing receive.
    naks_sent,
    /// NAKs received for any other reason than a gap or a missing receive.
    naks_received,
    /// Packets dropped because the queue pair's state does not take them.
    dropped_state,
    /// Acknowledgements and responses that fit nothing outstanding.
    dropped_responses,
    /// Requests dropped: behind a gap that was reported already or is too large to be one, or duplicates that can't be
    /// answered.
    dropped_requests,
    /// Packets of an operation or service that the queue pair does not do.
    dropped_opcode,
    /// Datagrams with a queue key other than the queue pair's.
    qkey_violations,
    /// Datagrams and messages of unreliable connections that found no receive work request.
    dropped_no_receive,
    /// Datagrams that were longer than their receive work request, or than the port's MTU.
    dropped_length,
    /// Messages of unreliable connections that were broken off, or refused without a word.
    dropped_messages,
    /// Completion queue overflows.
    cq_overflow,
    /// Errors that moved a queue pair to the error state, or its send queue to SQE.
    qp_failures,
}
