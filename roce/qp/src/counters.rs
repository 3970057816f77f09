//! Counters of a port's queue pairs.

/// What happened, counted; the names are rdma_rxe's where it has them (`rxe_hw_counters.c`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Requests that had been received before.
    pub duplicate_request: u64,
    /// Requests beyond a gap in the PSNs.
    pub out_of_seq_request: u64,
    /// RNR NAKs received.
    pub rcvd_rnr_err: u64,
    /// RNR NAKs sent.
    pub send_rnr_err: u64,
    /// Sequence error NAKs received.
    pub rcvd_seq_err: u64,
    /// Acknowledgements that one later acknowledgement stood for.
    pub ack_deferred: u64,
    /// Work requests that failed because retries ran out.
    pub retry_exceeded_err: u64,
    /// Work requests that failed because RNR retries ran out.
    pub retry_rnr_exceeded_err: u64,
    /// Times the requester went back to retransmit.
    pub completer_retry_err: u64,
    /// Packets that could not be built because memory was gone.
    pub send_err: u64,
    /// SENDs completed.
    pub rdma_sends: u64,
    /// Receives completed.
    pub rdma_recvs: u64,
    /// Packets sent again.
    pub retransmits: u64,
    /// Silences so long that everything in flight was taken for lost.
    pub timeouts: u64,
    /// Timeouts after which an acknowledgement of the first transmission came.
    pub spurious_timeouts: u64,
    /// Newest packets sent once more after a silence, to learn whether something was lost.
    pub tail_probes: u64,
    /// NAKs sent for any other reason than a gap or a missing receive.
    pub naks_sent: u64,
    /// NAKs received for any other reason than a gap or a missing receive.
    pub naks_received: u64,
    /// Packets dropped because the queue pair's state does not take them.
    pub dropped_state: u64,
    /// Acknowledgements and responses that fit nothing outstanding.
    pub dropped_responses: u64,
    /// Requests dropped: behind a gap that was reported already or is too large to be one, or duplicates that can't be
    /// answered.
    pub dropped_requests: u64,
    /// Packets of an operation or service that the queue pair does not do.
    pub dropped_opcode: u64,
    /// Datagrams with a queue key other than the queue pair's.
    pub qkey_violations: u64,
    /// Datagrams and messages of unreliable connections that found no receive work request.
    pub dropped_no_receive: u64,
    /// Datagrams that were longer than their receive work request, or than the port's MTU.
    pub dropped_length: u64,
    /// Messages of unreliable connections that were broken off, or refused without a word.
    pub dropped_messages: u64,
    /// Completion queue overflows.
    pub cq_overflow: u64,
}
