//! Counters.

use crate::rdma::OperationKind;

macro_rules! counters {
    ($($name:ident,)* ; $($(#[$meta:meta])* $own:ident,)*) => {
        /// Counters of a node: those of the kernel, under its names and in its order, and some that it does not have.
        ///
        /// `specs/rds-counters.tsv` says what each counts here. Some are always 0: what they are about does not exist here.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[allow(missing_docs, reason = "names of the kernel")]
        pub struct Counters {
            $(pub $name: u64,)*
            $($(#[$meta])* pub $own: u64,)*
        }

        impl Counters {
            /// Counters of the kernel, in its order (`RDS_INFO_COUNTERS`).
            pub fn of_kernel(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }

            /// Counters that the kernel does not have.
            pub fn own(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$((stringify!($own), self.$own),)*].into_iter()
            }
        }

        impl core::ops::Add for Counters {
            type Output = Self;

            fn add(self, other: Self) -> Self {
                Self { $($name: self.$name + other.$name,)* $($own: self.$own + other.$own,)* }
            }
        }
    };
}

counters! {
    conn_reset,
    recv_drop_bad_checksum,
    recv_drop_old_seq,
    recv_drop_no_sock,
    recv_drop_dead_sock,
    recv_deliver_raced,
    recv_delivered,
    recv_queued,
    recv_immediate_retry,
    recv_delayed_retry,
    recv_ack_required,
    recv_rdma_bytes,
    recv_ping,
    send_queue_empty,
    send_queue_full,
    send_lock_contention,
    send_lock_queue_raced,
    send_immediate_retry,
    send_delayed_retry,
    send_drop_acked,
    send_ack_required,
    send_queued,
    send_rdma,
    send_rdma_bytes,
    send_pong,
    page_remainder_hit,
    page_remainder_miss,
    copy_to_user,
    copy_from_user,
    cong_update_queued,
    cong_update_received,
    cong_send_error,
    cong_send_blocked,
    recv_bytes_added_to_sock,
    recv_bytes_freed_fromsock,
    send_stuck_rm,
    ib_connect_raced,
    ib_listen_closed_stale,
    ib_evt_handler_call,
    ib_tasklet_call,
    ib_tx_cq_event,
    ib_tx_ring_full,
    ib_tx_throttle,
    ib_tx_sg_mapping_failure,
    ib_tx_stalled,
    ib_tx_credit_updates,
    ib_rx_cq_event,
    ib_rx_ring_empty,
    ib_rx_refill_from_cq,
    ib_rx_refill_from_thread,
    ib_rx_alloc_limit,
    ib_rx_total_frags,
    ib_rx_total_incs,
    ib_rx_credit_updates,
    ib_ack_sent,
    ib_ack_send_failure,
    ib_ack_send_delayed,
    ib_ack_send_piggybacked,
    ib_ack_received,
    ib_rdma_mr_8k_alloc,
    ib_rdma_mr_8k_free,
    ib_rdma_mr_8k_used,
    ib_rdma_mr_8k_pool_flush,
    ib_rdma_mr_8k_pool_wait,
    ib_rdma_mr_8k_pool_depleted,
    ib_rdma_mr_1m_alloc,
    ib_rdma_mr_1m_free,
    ib_rdma_mr_1m_used,
    ib_rdma_mr_1m_pool_flush,
    ib_rdma_mr_1m_pool_wait,
    ib_rdma_mr_1m_pool_depleted,
    ib_rdma_mr_8k_reused,
    ib_rdma_mr_1m_reused,
    ib_atomic_cswp,
    ib_atomic_fadd,
    ;
    /// Acknowledgements of messages that were never sent.
    recv_bad_ack,
    /// Connections over which a peer counted from the beginning again: it was started again.
    recv_peer_restarted,
}

/// Bytes of a region that the kernel takes from its pool of small ones.
const SMALL_REGION: usize = 8192;

impl Counters {
    /// Counts a region of a socket.
    pub(crate) fn count_registered(&mut self, len: usize) {
        let (alloc, used) = match len {
            ..=SMALL_REGION => (&mut self.ib_rdma_mr_8k_alloc, &mut self.ib_rdma_mr_8k_used),
            _ => (&mut self.ib_rdma_mr_1m_alloc, &mut self.ib_rdma_mr_1m_used),
        };
        *alloc += 1;
        *used += 1;
    }

    /// Counts a region that is freed.
    pub(crate) fn count_freed(&mut self, len: usize) {
        match len {
            ..=SMALL_REGION => self.ib_rdma_mr_8k_free += 1,
            _ => self.ib_rdma_mr_1m_free += 1,
        }
    }

    /// Counts a message that a program has queued, and its operation with that one's bytes.
    pub(crate) fn count_queued(&mut self, len: usize, operation: Option<(OperationKind, usize)>) {
        self.send_queued += 1;
        self.copy_from_user += len as u64;
        let Some((kind, bytes)) = operation else { return };
        match kind {
            OperationKind::FetchAdd { .. } => self.ib_atomic_fadd += 1,
            OperationKind::CompareSwap { .. } => self.ib_atomic_cswp += 1,
            OperationKind::Write | OperationKind::Read => {
                self.send_rdma += 1;
                let total = match kind {
                    OperationKind::Write => &mut self.send_rdma_bytes,
                    _ => &mut self.recv_rdma_bytes,
                };
                *total += bytes as u64;
            }
        }
    }
}
