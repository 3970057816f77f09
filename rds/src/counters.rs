//! Counters.

/// Counters of a node. The names are those of the kernel's `RDS_INFO_COUNTERS`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[allow(missing_docs, reason = "names of the kernel")]
pub struct Counters {
    pub conn_reset: u64,
    pub recv_drop_bad_checksum: u64,
    pub recv_drop_old_seq: u64,
    pub recv_drop_no_sock: u64,
    pub recv_ack_required: u64,
    pub recv_ping: u64,
    pub send_queued: u64,
    pub send_pong: u64,
    pub cong_update_queued: u64,
    pub cong_update_received: u64,
    pub cong_send_error: u64,
    /// Acknowledgements of messages that were never sent.
    pub recv_bad_ack: u64,
    pub ib_connect_raced: u64,
    pub ib_listen_closed_stale: u64,
}
