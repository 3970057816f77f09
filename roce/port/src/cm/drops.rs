//! Reasons for which MADs are dropped.

macro_rules! drop_reasons {
    ($( $(#[$doc:meta])* $reason:ident $name:literal, )*) => {
        /// Reason for which a MAD is dropped without effect.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(usize)]
        pub enum DropReason {
            $( $(#[$doc])* $reason, )*
        }

        impl DropReason {
            /// All reasons.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$reason),*];

            /// Returns a stable name for reports.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$reason => $name,)* }
            }
        }
    };
}

drop_reasons! {
    /// Not 256 bytes.
    Length "length",
    /// Not base version 1, class 7 (communication management), class version 2, method Send.
    Header "header",
    /// Attribute that no CM message has, or that RoCE doesn't use (LAP, APR).
    Attribute "attribute",
    /// Field with an invalid value.
    Field "field",
    /// Unknown connection.
    UnknownConnection "unknown_connection",
    /// Source address other than the connection's peer.
    WrongAddress "wrong_address",
    /// DREQ for another queue pair than the connection's.
    WrongQp "wrong_qp",
    /// Unexpected in the connection's state.
    State "state",
    /// Duplicate that needs no answer.
    Duplicate "duplicate",
    /// Request beyond the listener's backlog and the quarter more of all addresses together.
    Backlog "backlog",
    /// Request beyond the listener's backlog, which its peer address fills alone.
    BacklogPeer "backlog_peer",
    /// Request beyond [`CmConfig::max_half_open`](crate::cm::CmConfig::max_half_open), and no connection can be evicted.
    HalfOpen "half_open",
    /// Request beyond [`CmConfig::max_half_open_per_peer`](crate::cm::CmConfig::max_half_open_per_peer), and no connection can be evicted
    /// (yet).
    HalfOpenPeer "half_open_peer",
    /// Beyond [`CmConfig::mad_rate`](crate::cm::CmConfig::mad_rate), or repeated too often.
    Rate "rate",
    /// Request beyond [`CmConfig::max_connections`](crate::cm::CmConfig::max_connections).
    Connections "connections",
    /// Answer that did not fit into the queue of outgoing MADs.
    OutQueueFull "out_queue_full",
}
