//! Information of the node as `getsockopt(RDS_INFO_*)` has it: arrays of the kernel's structures.
//!
//! Ports and IPv4 addresses are big-endian, numbers the host's.

use std::net::IpAddr;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// `RDS_INFO_COUNTERS`: [`Counter`], those of the kernel in its order.
pub const COUNTERS: u32 = 10_000;
/// [`Counter`]s of the node that the kernel does not have.
pub const OWN_COUNTERS: u32 = 1;
/// `RDS_INFO_CONNECTIONS`: [`Connection`] of IPv4.
pub const CONNECTIONS: u32 = 10_001;
/// `RDS_INFO_SEND_MESSAGES`: [`Message`]s that wait to be sent.
pub const SEND_MESSAGES: u32 = 10_003;
/// `RDS_INFO_RETRANS_MESSAGES`: [`Message`]s that were not acknowledged.
pub const RETRANS_MESSAGES: u32 = 10_004;
/// `RDS_INFO_RECV_MESSAGES`: [`Message`]s that were not read.
pub const RECV_MESSAGES: u32 = 10_005;
/// `RDS_INFO_SOCKETS`: [`Socket`].
pub const SOCKETS: u32 = 10_006;
/// `RDS_INFO_TCP_SOCKETS`: always empty.
pub const TCP_SOCKETS: u32 = 10_007;
/// `RDS_INFO_IB_CONNECTIONS`: [`IbConnection`] of IPv4.
pub const IB_CONNECTIONS: u32 = 10_008;
/// `RDS6_INFO_CONNECTIONS`: [`Connection6`], as all that follow of both families.
pub const CONNECTIONS6: u32 = 10_011;
/// `RDS6_INFO_SEND_MESSAGES`: [`Message`] with addresses of 16 bytes.
pub const SEND_MESSAGES6: u32 = 10_012;
/// `RDS6_INFO_RETRANS_MESSAGES`: [`Message`] with addresses of 16 bytes.
pub const RETRANS_MESSAGES6: u32 = 10_013;
/// `RDS6_INFO_RECV_MESSAGES`: [`Message`] with addresses of 16 bytes.
pub const RECV_MESSAGES6: u32 = 10_014;
/// `RDS6_INFO_SOCKETS`: [`Socket`] with addresses of 16 bytes.
pub const SOCKETS6: u32 = 10_015;
/// `RDS6_INFO_IB_CONNECTIONS`: [`IbConnection`] with addresses of 16 bytes.
pub const IB_CONNECTIONS6: u32 = 10_017;

/// A connection sends at the moment.
pub const SENDING: u8 = 1;
/// It is being connected.
pub const CONNECTING: u8 = 2;
/// It stands.
pub const CONNECTED: u8 = 4;

/// Name of the transport of all connections.
pub const TRANSPORT: &str = "infiniband";

macro_rules! raw {
    ($($(#[$meta:meta])* $name:ident $(<const $len:ident: usize>)? { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(C, packed)]
        #[allow(missing_docs, reason = "names of the kernel")]
        pub struct $name $(<const $len: usize>)? { $(pub $field: $type,)* }
    )*};
}

// `N` is the length of an address: 4 in `struct rds_info_*`, 16 in `struct rds6_info_*`.
raw! {
    /// `struct rds_info_counter`.
    Counter {
        name: [u8; 32],
        value: u64,
    }
    /// `struct rds_info_connection`.
    Connection {
        next_tx_seq: u64,
        next_rx_seq: u64,
        laddr: [u8; 4],
        faddr: [u8; 4],
        transport: [u8; 16],
        flags: u8,
        tos: u8,
    }
    /// `struct rds6_info_connection`.
    Connection6 {
        next_tx_seq: u64,
        next_rx_seq: u64,
        laddr: [u8; 16],
        faddr: [u8; 16],
        transport: [u8; 16],
        flags: u8,
    }
    /// `struct rds_info_message`, `struct rds6_info_message`.
    Message<const N: usize> {
        seq: u64,
        len: u32,
        laddr: [u8; N],
        faddr: [u8; N],
        lport: [u8; 2],
        fport: [u8; 2],
        flags: u8,
        tos: u8,
    }
    /// `struct rds_info_socket`, `struct rds6_info_socket`.
    Socket<const N: usize> {
        sndbuf: u32,
        bound_addr: [u8; N],
        connected_addr: [u8; N],
        bound_port: [u8; 2],
        connected_port: [u8; 2],
        rcvbuf: u32,
        inum: u64,
    }
    /// `struct rds_info_rdma_connection`, `struct rds6_info_rdma_connection`.
    IbConnection<const N: usize> {
        src_addr: [u8; N],
        dst_addr: [u8; N],
        src_gid: [u8; 16],
        dst_gid: [u8; 16],
        max_send_wr: u32,
        max_recv_wr: u32,
        max_send_sge: u32,
        rdma_mr_max: u32,
        rdma_mr_size: u32,
        tos: u8,
        sl: u8,
        padding: [u8; 2],
        cache_allocs: u32,
    }
}

const _: () = {
    assert!(size_of::<Counter>() == 40 && size_of::<Connection>() == 42 && size_of::<Connection6>() == 65);
    assert!(size_of::<Message<4>>() == 26 && size_of::<Message<16>>() == 50);
    assert!(size_of::<Socket<4>>() == 28 && size_of::<Socket<16>>() == 52);
    assert!(size_of::<IbConnection<4>>() == 68 && size_of::<IbConnection<16>>() == 92);
};

/// Size of an element of this information; `None`: there is no such information.
pub fn element_size(number: u32) -> Option<usize> {
    Some(match number {
        COUNTERS | OWN_COUNTERS => size_of::<Counter>(),
        CONNECTIONS => size_of::<Connection>(),
        SEND_MESSAGES | RETRANS_MESSAGES | RECV_MESSAGES => size_of::<Message<4>>(),
        SOCKETS => size_of::<Socket<4>>(),
        IB_CONNECTIONS => size_of::<IbConnection<4>>(),
        CONNECTIONS6 => size_of::<Connection6>(),
        SEND_MESSAGES6 | RETRANS_MESSAGES6 | RECV_MESSAGES6 => size_of::<Message<16>>(),
        SOCKETS6 => size_of::<Socket<16>>(),
        IB_CONNECTIONS6 => size_of::<IbConnection<16>>(),
        _ => return None,
    })
}

/// Bytes of an address in a structure.
pub trait Octets: Sized {
    /// Address that is not set.
    const UNSET: Self;

    /// Returns the bytes of an address, in 16 bytes an IPv4 one mapped; `None`: it has no such form.
    fn of(addr: IpAddr) -> Option<Self>;
}

impl Octets for [u8; 4] {
    const UNSET: Self = [0; 4];

    fn of(addr: IpAddr) -> Option<Self> {
        match addr {
            IpAddr::V4(v4) => Some(v4.octets()),
            IpAddr::V6(_) => None,
        }
    }
}

impl Octets for [u8; 16] {
    const UNSET: Self = [0; 16];

    fn of(addr: IpAddr) -> Option<Self> {
        Some(match addr {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        })
    }
}

/// Bytes of a name, followed by zeros.
pub fn name<const N: usize>(text: &str) -> [u8; N] {
    let mut out = [0; N];
    let len = text.len().min(N - 1);
    out[..len].copy_from_slice(&text.as_bytes()[..len]);
    out
}

/// The elements of an array; bytes that are no whole element are left out.
pub fn elements<T: FromBytes + Immutable>(bytes: &[u8]) -> impl Iterator<Item = T> + use<'_, T> {
    bytes
        .chunks_exact(size_of::<T>().max(1))
        .filter_map(|bytes| T::read_from_bytes(bytes).ok())
}
