//! Counters.

macro_rules! counters {
    ($($(#[$meta:meta])* $name:ident,)*) => {
        /// Counters of a node. The names are those of the kernel's `RDS_INFO_COUNTERS`.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[allow(missing_docs, reason = "names of the kernel")]
        pub struct Counters {
            $($(#[$meta])* pub $name: u64,)*
        }

        impl Counters {
            /// All with their names.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }

        impl core::ops::Add for Counters {
            type Output = Self;

            fn add(self, other: Self) -> Self {
                Self { $($name: self.$name + other.$name,)* }
            }
        }
    };
}

counters! {
    conn_reset,
    recv_drop_bad_checksum,
    recv_drop_old_seq,
    recv_drop_no_sock,
    recv_ack_required,
    recv_ping,
    send_queued,
    send_pong,
    cong_update_queued,
    cong_update_received,
    cong_send_error,
    /// Acknowledgements of messages that were never sent.
    recv_bad_ack,
    ib_connect_raced,
    ib_listen_closed_stale,
}
