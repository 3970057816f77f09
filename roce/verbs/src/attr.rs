//! Attributes of queue pairs and devices.

use bitflags::bitflags;
use core::{net::IpAddr, str::FromStr, time::Duration};
use roce_bth::{Psn, Qpn, RnrTimer, Service};
use std::sync::Arc;

bitflags! {
    /// Rights that a memory region, window or queue pair gives to a peer (`ibv_access_flags`; same bits).
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct AccessFlags: u32 {
        /// The local device may write (receives, READ responses, atomic results).
        const LOCAL_WRITE = 1;
        /// A peer may RDMA WRITE.
        const REMOTE_WRITE = 1 << 1;
        /// A peer may RDMA READ.
        const REMOTE_READ = 1 << 2;
        /// A peer may use atomics.
        const REMOTE_ATOMIC = 1 << 3;
        /// A memory window may be bound to the region.
        const MW_BIND = 1 << 4;
        /// Addresses in the region start at zero.
        const ZERO_BASED = 1 << 5;
        /// A peer may FLUSH for global visibility.
        const FLUSH_GLOBAL = 1 << 8;
        /// A peer may FLUSH to persistence.
        const FLUSH_PERSISTENT = 1 << 9;
    }
}

/// RoCE path MTU (`ibv_mtu`; same numbers).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Mtu {
    B256 = 1,
    B512 = 2,
    B1024 = 3,
    B2048 = 4,
    B4096 = 5,
}

impl Mtu {
    /// All, ascending.
    pub const ALL: [Self; 5] = [Self::B256, Self::B512, Self::B1024, Self::B2048, Self::B4096];
    /// Bytes that rdma_cm takes off the interface MTU for all headers and the ICRC.
    pub const HEADERS: u32 = 96;

    /// Payload bytes of a full packet.
    pub const fn bytes(self) -> usize {
        128 << self as usize
    }

    /// The MTU with this code (1 to 5).
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|m| *m as u8 == code)
    }

    /// The MTU with this payload, if RoCE has one.
    pub fn from_bytes(bytes: usize) -> Option<Self> {
        Self::ALL.into_iter().find(|m| m.bytes() == bytes)
    }

    /// The largest that fits an interface MTU less 96 bytes, or `None` below 352 (`iboe_get_mtu`).
    pub fn for_interface(interface_mtu: u32) -> Option<Self> {
        let room = interface_mtu.checked_sub(Self::HEADERS)? as usize;
        Self::ALL.into_iter().rev().find(|m| m.bytes() <= room)
    }
}

/// A text that is not a path MTU.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0:?} is not a RoCE path MTU: 256, 512, 1024, 2048 or 4096 bytes")]
pub struct InvalidMtu(String);

impl FromStr for Mtu {
    type Err = InvalidMtu;

    /// Reads the payload in bytes.
    fn from_str(text: &str) -> Result<Self, InvalidMtu> {
        let bytes = text.parse().ok();
        bytes
            .and_then(Self::from_bytes)
            .ok_or_else(|| InvalidMtu(text.to_owned()))
    }
}

/// The largest path MTU by local address: of the interface that has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PathMtus {
    usual: Mtu,
    /// Shared: it is cloned for each post.
    by_addr: Arc<[(IpAddr, Mtu)]>,
}

impl PathMtus {
    /// `usual` holds for every address that is not named.
    pub fn new(usual: Mtu, by_addr: Vec<(IpAddr, Mtu)>) -> Self {
        Self {
            usual,
            by_addr: by_addr.into(),
        }
    }

    /// The largest that paths from a local address carry. All of 127.0.0.0/8 is one interface's.
    pub fn of(&self, local: IpAddr) -> Mtu {
        let local = local.to_canonical();
        let find = |fits: &dyn Fn(IpAddr) -> bool| self.by_addr.iter().find(|(ip, _)| fits(*ip)).map(|(_, mtu)| *mtu);
        find(&|ip| ip == local)
            .or_else(|| find(&|ip| ip.is_ipv4() && ip.is_loopback() && local.is_ipv4() && local.is_loopback()))
            .unwrap_or(self.usual)
    }

    /// Returns the MTU of addresses that are not named.
    pub fn usual(&self) -> Mtu {
        self.usual
    }

    /// The largest of all.
    pub fn most(&self) -> Mtu {
        self.by_addr.iter().map(|(_, mtu)| *mtu).fold(self.usual, Mtu::max)
    }

    /// Returns the same path MTUs, none above `most`.
    pub fn at_most(&self, most: Mtu) -> Self {
        Self {
            usual: self.usual.min(most),
            by_addr: self.by_addr.iter().map(|(ip, mtu)| (*ip, most.min(*mtu))).collect(),
        }
    }
}

impl From<Mtu> for PathMtus {
    fn from(mtu: Mtu) -> Self {
        Self::new(mtu, Vec::new())
    }
}

/// Transport type of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum QpType {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// The general service interface: unreliable datagrams on queue pair 1.
    Gsi,
    /// The sending end of an extended reliable connection (IBTA Annex A14).
    XrcIni,
    /// The receiving end of an extended reliable connection.
    XrcTgt,
}

impl QpType {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::Rc, Self::Uc, Self::Ud, Self::Gsi, Self::XrcIni, Self::XrcTgt];

    /// The service of its packets.
    pub const fn service(self) -> Service {
        match self {
            Self::Rc => Service::Rc,
            Self::Uc => Service::Uc,
            Self::Ud | Self::Gsi => Service::Ud,
            Self::XrcIni | Self::XrcTgt => Service::Xrc,
        }
    }

    /// Whether each work request names its own destination.
    pub const fn is_datagram(self) -> bool {
        matches!(self, Self::Ud | Self::Gsi)
    }

    /// Whether what is sent is acknowledged and sent again when it is lost.
    pub const fn is_reliable(self) -> bool {
        matches!(self, Self::Rc | Self::XrcIni | Self::XrcTgt)
    }

    /// Whether it has a send queue.
    pub const fn sends(self) -> bool {
        !matches!(self, Self::XrcTgt)
    }

    /// Whether it has a receive queue, of its own or shared: an XRC target finds one for each message.
    pub const fn receives(self) -> bool {
        !matches!(self, Self::XrcIni | Self::XrcTgt)
    }
}

/// State of a queue pair (`ibv_qp_state`; same numbers).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[repr(u8)]
pub enum QpState {
    /// Just created.
    #[default]
    Reset = 0,
    /// Receives may be posted.
    Init = 1,
    /// Ready to receive.
    Rtr = 2,
    /// Ready to send.
    Rts = 3,
    /// Send queue drains (or is drained).
    Sqd = 4,
    /// Send queue error.
    Sqe = 5,
    /// Error: work requests are flushed.
    Err = 6,
}

/// The path of a connected queue pair's packets, or of one datagram: what an address handle holds (`ibv_ah_attr`). On RoCE
/// a GID is an IP address; a flow label given by the program becomes the UDP source port
/// (`ibv_flow_label_to_udp_sport`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct AddressVector {
    /// Our address.
    pub local: IpAddr,
    /// The peer's address, same family.
    pub remote: IpAddr,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// TOS or traffic class.
    pub traffic_class: u8,
    /// UDP source port (for ECMP and RSS), or 0: derived from the two queue pair numbers.
    pub udp_sport: u16,
}

impl AddressVector {
    /// A path with default hop limit (64), traffic class 0 and derived source port.
    pub const fn new(local: IpAddr, remote: IpAddr) -> Self {
        Self {
            local,
            remote,
            hop_limit: 64,
            traffic_class: 0,
            udp_sport: 0,
        }
    }

    /// Whether it leads to a multicast group.
    pub const fn is_multicast(&self) -> bool {
        self.remote.is_multicast()
    }
}

/// State of path migration (`ibv_mig_state`; same numbers). RoCE has none: a queue pair stays migrated.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[repr(u8)]
pub enum PathMigState {
    /// On its path.
    #[default]
    Migrated = 0,
    /// To be armed.
    Rearm = 1,
    /// Ready to migrate.
    Armed = 2,
}

/// Sizes of a queue pair's queues.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct QpCaps {
    /// Send work requests outstanding.
    pub max_send_wr: u32,
    /// Receive work requests outstanding.
    pub max_recv_wr: u32,
    /// Elements of a send.
    pub max_send_sge: u32,
    /// Elements of a receive.
    pub max_recv_sge: u32,
    /// Bytes of inline data.
    pub max_inline_data: u32,
}

impl QpCaps {
    /// The sizes without those of queues that a queue pair of this type does not have, whatever they say
    /// (`ibv_create_qp(3)`: with a shared receive queue the receive queue's are ignored).
    pub const fn of_queues(mut self, qp_type: QpType, shares_receives: bool) -> Self {
        if shares_receives || !qp_type.receives() {
            (self.max_recv_wr, self.max_recv_sge) = (0, 0);
        }
        if matches!(qp_type, QpType::XrcTgt) {
            (self.max_send_wr, self.max_send_sge, self.max_inline_data) = (0, 0, 0);
        }
        self
    }
}

impl Default for QpCaps {
    fn default() -> Self {
        Self {
            max_send_wr: 128,
            max_recv_wr: 128,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline_data: 256,
        }
    }
}

bitflags! {
    /// Which attributes a [`QpAttr`] sets (`ibv_qp_attr_mask`; same bits).
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct QpAttrMask: u32 {
        /// Next state.
        const STATE = 1;
        /// Assumed current state.
        const CUR_STATE = 1 << 1;
        /// Event when drained.
        const EN_SQD_ASYNC_NOTIFY = 1 << 2;
        /// Rights of the peer.
        const ACCESS_FLAGS = 1 << 3;
        /// Partition key.
        const PKEY_INDEX = 1 << 4;
        /// Port number.
        const PORT = 1 << 5;
        /// Queue key.
        const QKEY = 1 << 6;
        /// Path to the peer.
        const AV = 1 << 7;
        /// Path MTU.
        const PATH_MTU = 1 << 8;
        /// Local ACK timeout.
        const TIMEOUT = 1 << 9;
        /// Retries.
        const RETRY_CNT = 1 << 10;
        /// RNR retries.
        const RNR_RETRY = 1 << 11;
        /// First PSN expected.
        const RQ_PSN = 1 << 12;
        /// READs and atomics as requester.
        const MAX_RD_ATOMIC = 1 << 13;
        /// Alternate path (not on RoCE).
        const ALT_PATH = 1 << 14;
        /// RNR NAK time.
        const MIN_RNR_TIMER = 1 << 15;
        /// First PSN sent.
        const SQ_PSN = 1 << 16;
        /// READs and atomics as responder.
        const MAX_DEST_RD_ATOMIC = 1 << 17;
        /// Path migration (not on RoCE).
        const PATH_MIG_STATE = 1 << 18;
        /// Queue sizes.
        const CAP = 1 << 19;
        /// The peer's queue pair.
        const DEST_QPN = 1 << 20;
    }
}

macro_rules! attributes {
    ($( $(#[$doc:meta])* $name:ident: $type:ty = $flag:ident; )*) => {
        /// Attributes to set with modify, or as query returns them. What is `None` is left alone.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct QpAttr {
            $( $(#[$doc])* pub $name: Option<$type>, )*
            /// The send queue is draining (returned by query only).
            pub sq_draining: bool,
        }

        impl QpAttr {
            /// Which attributes are set.
            pub fn mask(&self) -> QpAttrMask {
                let set = [$( (self.$name.is_some(), QpAttrMask::$flag), )*];
                set.into_iter().filter(|(on, _)| *on).map(|(_, flag)| flag).collect()
            }

            /// Returns the attributes with those of `other` where they are not set.
            #[must_use]
            pub fn or(self, other: Self) -> Self {
                Self {
                    $( $name: self.$name.or(other.$name), )*
                    ..other
                }
            }

            /// Returns these of the attributes alone.
            #[must_use]
            pub fn only(self, mask: QpAttrMask) -> Self {
                Self {
                    $( $name: self.$name.filter(|_| mask.contains(QpAttrMask::$flag)), )*
                    ..Self::default()
                }
            }
        }
    };
}

attributes! {
    /// Next state.
    state: QpState = STATE;
    /// The state that the program believes the queue pair to be in.
    cur_state: QpState = CUR_STATE;
    /// Report the drained send queue with an event.
    en_sqd_async_notify: bool = EN_SQD_ASYNC_NOTIFY;
    /// Rights of the peer.
    access: AccessFlags = ACCESS_FLAGS;
    /// Index of the partition key: 0.
    pkey_index: u16 = PKEY_INDEX;
    /// Port number: 1.
    port: u8 = PORT;
    /// Queue key (UD).
    qkey: u32 = QKEY;
    /// Path to the peer.
    av: AddressVector = AV;
    /// Path MTU.
    path_mtu: Mtu = PATH_MTU;
    /// Local ACK timeout code: 4.096 us * 2^code, 0 = for ever.
    timeout: u8 = TIMEOUT;
    /// Retries after timeouts and sequence errors, 0 to 7.
    retry_cnt: u8 = RETRY_CNT;
    /// Retries after RNR NAK, 7 = for ever.
    rnr_retry: u8 = RNR_RETRY;
    /// First PSN expected.
    rq_psn: Psn = RQ_PSN;
    /// Outstanding READs and atomics as requester.
    max_rd_atomic: u8 = MAX_RD_ATOMIC;
    /// Waiting time that RNR NAKs ask for.
    min_rnr_timer: RnrTimer = MIN_RNR_TIMER;
    /// First PSN sent.
    sq_psn: Psn = SQ_PSN;
    /// Outstanding READs and atomics as responder.
    max_dest_rd_atomic: u8 = MAX_DEST_RD_ATOMIC;
    /// The peer's queue pair.
    dest_qpn: Qpn = DEST_QPN;
    /// Path migration: only [`PathMigState::Migrated`].
    path_mig_state: PathMigState = PATH_MIG_STATE;
}

impl QpAttr {
    /// Whether they stop the queue pair: what is under way is given up.
    pub fn stops(&self) -> bool {
        matches!(self.state, Some(QpState::Reset | QpState::Err))
    }
}

/// The local ACK timeout that a code stands for: 4.096 us * 2^code; `None` (for ever) for 0 (IBA 9.9.2.1.4).
pub fn ack_timeout(code: u8) -> Option<Duration> {
    (code != 0).then(|| Duration::from_nanos(4096 << u32::from(code & 0x1f)))
}

macro_rules! limits {
    ($( $(#[$doc:meta])* $name:ident: $type:ty = $software:expr, )*) => {
        /// Limits of a device (`ibv_device_attr`).
        #[derive(Clone, Debug)]
        #[allow(missing_docs)]
        pub struct DeviceLimits {
            pub node_guid: u64,
            $( $(#[$doc])* pub $name: $type, )*
        }

        impl DeviceLimits {
            /// The limits of the software device; rdma_rxe's orders of magnitude.
            pub const fn software(node_guid: u64) -> Self {
                Self { node_guid, $( $name: $software, )* }
            }
        }
    };
}

limits! {
    max_qp: u32 = 0x1_0000,
    max_qp_wr: u32 = 0x4000,
    max_sge: u32 = 32,
    max_inline_data: u32 = 512,
    max_cq: u32 = 0x1_0000,
    max_cqe: u32 = 0x8_0000,
    max_mr: u32 = 0x8_0000,
    max_mr_size: u64 = 1 << 47,
    max_mw: u32 = 0x1_0000,
    max_pd: u32 = 0x8000,
    max_qp_rd_atom: u8 = 128,
    max_qp_init_rd_atom: u8 = 128,
    max_msg_size: u32 = 1 << 31,
    page_size: u32 = 4096,
    /// Elements of an RDMA READ.
    max_sge_rd: u32 = 32,
    max_srq: u32 = 0x1_0000,
    max_srq_wr: u32 = 0x8000,
    max_srq_sge: u32 = 27,
    /// Address handles.
    max_ah: u32 = 0x7fff,
    /// XRC domains.
    max_xrcd: u32 = 0x1000,
    /// Multicast groups. One may take a socket: a quarter of the descriptors that a process usually may have.
    max_mcast_grp: u32 = 256,
    /// Queue pairs in one multicast group.
    max_mcast_qp_attach: u32 = 56,
    /// Memberships of queue pairs in multicast groups.
    max_total_mcast_qp_attach: u32 = 256 * 56,
    /// Entries of the partition table.
    max_pkeys: u16 = 1,
    /// Longest delay of an acknowledgement, as a code: 4.096 us * 2^code.
    local_ca_ack_delay: u8 = 15,
}

impl DeviceLimits {
    /// READs and atomics that all queue pairs together answer at a time: what each may have does not depend on the others
    /// (`max_res_rd_atom`).
    pub const fn max_res_rd_atom(&self) -> u32 {
        self.max_qp.saturating_mul(self.max_qp_rd_atom as u32)
    }
}

/// The two kinds of shared receive queue (`ibv_srq_type`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum SrqType {
    /// Named by queue pairs when they are made.
    #[default]
    Basic,
    /// Named by number in each message of an extended reliable connection.
    Xrc,
}

/// Sizes and limit of a shared receive queue (`ibv_srq_attr`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct SrqAttr {
    /// Receive work requests outstanding.
    pub max_wr: u32,
    /// Elements of a receive.
    pub max_sge: u32,
    /// Fewer receives than this raise one event and reset the limit; 0: none.
    pub limit: u32,
}

/// Attributes of a shared receive queue to set. What is `None` is left alone.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct SrqModify {
    /// New size.
    pub max_wr: Option<u32>,
    /// Limit to arm; 0 disarms.
    pub limit: Option<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_mtus_are_read_in_bytes() {
        for mtu in Mtu::ALL {
            assert_eq!(mtu.bytes().to_string().parse(), Ok(mtu));
        }
        for wrong in ["", "x", "0", "1500", "1024 ", "-256", "8192"] {
            let e = wrong.parse::<Mtu>().unwrap_err().to_string();
            assert!(e.contains("256, 512, 1024, 2048 or 4096"), "{e}");
        }
    }
}
