//! Information for `RDS_INFO_*`.

use std::net::{IpAddr, SocketAddr};

use rds::{ConnectionInfo, Counters, MessageInfo};
use rds_local::info::{self as raw, Octets};
use zerocopy::{Immutable, IntoBytes};

/// State of a socket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SocketInfo {
    pub(crate) bound: Option<SocketAddr>,
    pub(crate) peer: Option<SocketAddr>,
    pub(crate) buffers: (usize, usize),
    pub(crate) inode: u64,
}

/// Everything that can be asked for, at one moment.
pub(crate) trait Source {
    fn counters(&self) -> Counters;
    fn own_counters(&self) -> Vec<(&'static str, u64)>;
    fn connections(&self) -> Vec<ConnectionInfo>;
    /// Messages that wait, those that were not acknowledged, or those that were not read, by the number of the information.
    fn messages(&self, number: u32) -> Vec<MessageInfo>;
    fn sockets(&self) -> Vec<SocketInfo>;
    /// Work requests of a connection: send and receive.
    fn rings(&self) -> (u32, u32);
}

/// Returns the bytes of information and the size of an element; `None`: there is none of this number.
pub(crate) fn bytes(number: u32, source: &impl Source) -> Option<(Vec<u8>, usize)> {
    let size = raw::element_size(number)?;
    let bytes = match number {
        raw::COUNTERS => counters(source.counters().of_kernel()),
        raw::OWN_COUNTERS => counters(source.counters().own().chain(source.own_counters())),
        raw::CONNECTIONS => all(source.connections(), |c| connection(&c)),
        raw::CONNECTIONS6 => all(source.connections(), |c| connection6(&c)),
        raw::IB_CONNECTIONS => all(source.connections(), |c| ib_connection::<4>(&c, source.rings())),
        raw::IB_CONNECTIONS6 => all(source.connections(), |c| ib_connection::<16>(&c, source.rings())),
        raw::SEND_MESSAGES | raw::RETRANS_MESSAGES | raw::RECV_MESSAGES => {
            all(source.messages(number), |m| message::<4>(&m))
        }
        raw::SEND_MESSAGES6 => all(source.messages(raw::SEND_MESSAGES), |m| message::<16>(&m)),
        raw::RETRANS_MESSAGES6 => all(source.messages(raw::RETRANS_MESSAGES), |m| message::<16>(&m)),
        raw::RECV_MESSAGES6 => all(source.messages(raw::RECV_MESSAGES), |m| message::<16>(&m)),
        raw::SOCKETS => all(source.sockets(), |s| socket::<4>(&s)),
        raw::SOCKETS6 => all(source.sockets(), |s| socket::<16>(&s)),
        _ => return None,
    };
    Some((bytes, size))
}

fn all<I, T: IntoBytes + Immutable>(items: Vec<I>, f: impl Fn(I) -> Option<T>) -> Vec<u8> {
    let mut out = Vec::new();
    for item in items.into_iter().filter_map(f) {
        out.extend_from_slice(item.as_bytes());
    }
    out
}

fn counters(counters: impl Iterator<Item = (&'static str, u64)>) -> Vec<u8> {
    all(counters.collect(), |(name, value)| {
        Some(raw::Counter {
            name: raw::name(name),
            value,
        })
    })
}

fn flags(c: &ConnectionInfo) -> u8 {
    let flag = |is: bool, flag: u8| if is { flag } else { 0 };
    flag(c.is_up && c.waiting > 0, raw::SENDING)
        | flag(c.is_connecting, raw::CONNECTING)
        | flag(c.is_up, raw::CONNECTED)
}

fn connection(c: &ConnectionInfo) -> Option<raw::Connection> {
    Some(raw::Connection {
        next_tx_seq: c.sequences.next_send,
        next_rx_seq: c.sequences.next_receive,
        laddr: Octets::of(c.key.local)?,
        faddr: Octets::of(c.key.remote)?,
        transport: raw::name(raw::TRANSPORT),
        flags: flags(c),
        tos: c.key.tos,
    })
}

fn connection6(c: &ConnectionInfo) -> Option<raw::Connection6> {
    Some(raw::Connection6 {
        next_tx_seq: c.sequences.next_send,
        next_rx_seq: c.sequences.next_receive,
        laddr: Octets::of(c.key.local)?,
        faddr: Octets::of(c.key.remote)?,
        transport: raw::name(raw::TRANSPORT),
        flags: flags(c),
    })
}

/// Memory regions and pages of each that a connection may have: as many as there is room for.
const MR: (u32, u32) = (8192, 257);

fn ib_connection<const N: usize>(c: &ConnectionInfo, (send, recv): (u32, u32)) -> Option<raw::IbConnection<N>>
where
    [u8; N]: Octets,
{
    let gid = |addr: IpAddr| if c.is_up { Octets::of(addr) } else { Some([0; 16]) };
    Some(raw::IbConnection {
        src_addr: Octets::of(c.key.local)?,
        dst_addr: Octets::of(c.key.remote)?,
        src_gid: gid(c.key.local)?,
        dst_gid: gid(c.key.remote)?,
        max_send_wr: send,
        max_recv_wr: recv,
        max_send_sge: 8,
        rdma_mr_max: MR.0,
        rdma_mr_size: MR.1,
        tos: c.key.tos,
        sl: c.key.tos & 15,
        padding: [0; 2],
        cache_allocs: 0,
    })
}

fn message<const N: usize>(m: &MessageInfo) -> Option<raw::Message<N>>
where
    [u8; N]: Octets,
{
    Some(raw::Message {
        seq: m.sequence,
        len: m.len as u32,
        laddr: Octets::of(m.from.ip())?,
        faddr: Octets::of(m.to.ip())?,
        lport: m.from.port().to_be_bytes(),
        fport: m.to.port().to_be_bytes(),
        flags: 0,
        tos: m.tos,
    })
}

fn socket<const N: usize>(s: &SocketInfo) -> Option<raw::Socket<N>>
where
    [u8; N]: Octets,
{
    let ip = |addr: Option<SocketAddr>| addr.map_or(Some(Octets::UNSET), |addr| Octets::of(addr.ip()));
    let port = |addr: Option<SocketAddr>| addr.map_or(0, |addr| addr.port()).to_be_bytes();
    Some(raw::Socket {
        sndbuf: s.buffers.0 as u32,
        bound_addr: ip(s.bound)?,
        connected_addr: ip(s.peer)?,
        bound_port: port(s.bound),
        connected_port: port(s.peer),
        rcvbuf: s.buffers.1 as u32,
        inum: s.inode,
    })
}
