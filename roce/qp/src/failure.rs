//! Why a queue pair failed, in words for the person who debugs the program.
//!
//! Completions and events carry a status only. A [`Failure`] adds what was asked of whom and what was wrong with it. It is
//! made once, when the queue pair fails, and stays until it is taken.

use core::{
    fmt::{self, Display, Formatter},
    net::IpAddr,
};

use roce_bth::Class;
use roce_mem::{KeyError, PdHandle};
use roce_verbs::{AccessFlags, QpAttr, Qpn, RemoteAddr, SendOp, Sge, Target, WcStatus};

use crate::{
    ctx::{Ctx, QpConfig},
    refusal::Refusal,
    sendq::{Data, Kind, SendWqe, kind_of},
};

/// First error that moved a queue pair to the error state (or a send queue to SQE), for people. Its text is one line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    qpn: Qpn,
    peer: Option<IpAddr>,
    what: What,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum What {
    /// A send work request completed with an error.
    Send(SendFailure),
    /// A request of the peer was refused, or its receive failed.
    Request {
        operation: &'static str,
        refusal: Refusal,
        detail: Detail,
    },
    /// A completion was lost.
    Overflow,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct SendFailure {
    operation: &'static str,
    kind: Kind,
    status: WcStatus,
    /// Mark of the work request.
    wr_id: u64,
    /// Bytes of the message.
    len: u32,
    /// Queue pair that it went to.
    dest: Option<Qpn>,
    /// Memory that it named at the peer.
    remote: Option<RemoteAddr>,
    /// Memory that it named here.
    local: Option<NamedMemory>,
    /// `timeout` and `retry_cnt` attributes.
    timeout: (u8, u8),
}

/// Facts that explain a refusal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Detail {
    None,
    /// The memory that the request named.
    Memory(NamedMemory),
    /// Rights of the queue pair, and those that the operation needs.
    Rights {
        have: AccessFlags,
        need: AccessFlags,
    },
    /// Bytes of the message so far, and of the receive with this mark.
    Receive {
        message: usize,
        room: usize,
        wr_id: u64,
    },
    /// Address that is not a multiple of 8.
    Address(u64),
    /// `max_dest_rd_atomic`.
    Limit(u8),
}

/// A range of memory by its key, and what is wrong with it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct NamedMemory {
    pub(crate) key: u32,
    pub(crate) addr: u64,
    pub(crate) len: u64,
    /// `None`: it was valid, but can't be accessed any more.
    pub(crate) error: Option<KeyError>,
    /// Address and length of what is open under the key.
    pub(crate) open: Option<(u64, u64)>,
    pub(crate) need: AccessFlags,
}

impl Display for NamedMemory {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { key, addr, len, .. } = self;
        write!(f, "key {key:#x}, {len} bytes at {addr:#x}")?;
        match (self.error, self.open) {
            (Some(KeyError::Range), Some((start, size))) => {
                let end = u128::from(*addr) + u128::from(*len);
                let limit = u128::from(start) + u128::from(size);
                match (u128::from(start).checked_sub(u128::from(*addr)), end.checked_sub(limit)) {
                    (Some(before), _) if before > 0 => write!(f, " begin {before} bytes before the region")?,
                    (_, Some(beyond)) => write!(f, " are beyond the region by {beyond}")?,
                    _ => f.write_str(" are not in the region")?,
                }
                write!(f, " ({size} bytes at {start:#x})")
            }
            (Some(KeyError::Access), _) => write!(f, ": the region was registered without {}", Rights(self.need)),
            (Some(error), _) => write!(f, ": {error}"),
            (None, _) => f.write_str(": the memory was deregistered, unmapped or protected meanwhile"),
        }
    }
}

/// Access rights by the names that programs use.
struct Rights(AccessFlags);

impl Display for Rights {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no rights");
        }
        for (index, (name, _)) in self.0.iter_names().enumerate() {
            let separator = if index == 0 { "" } else { " | " };
            write!(f, "{separator}IBV_ACCESS_{name}")?;
        }
        Ok(())
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let qpn = self.qpn.value();
        match &self.what {
            What::Send(send) => send.fmt(f, self),
            What::Request {
                operation,
                refusal,
                detail,
            } => {
                let peer = Peer(self.peer);
                match refusal {
                    Refusal::LocalProtection => write!(
                        f,
                        "QP {qpn:#x} can't receive {operation} of {peer}: local protection error"
                    )?,
                    Refusal::Invalidate => write!(
                        f,
                        "QP {qpn:#x} failed after {operation} of {peer}: remote invalid request error"
                    )?,
                    _ => write!(f, "QP {qpn:#x} refused {operation} of {peer}: {}", refusal.status())?,
                }
                write!(f, ": {}", Reason(*refusal, detail))
            }
            What::Overflow => write!(
                f,
                "QP {qpn:#x} failed: a completion was lost because the completion queue is full (create it with more entries, or \
                 poll it more often)"
            ),
        }
    }
}

struct Peer(Option<IpAddr>);

impl Display for Peer {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(addr) => addr.fmt(f),
            None => f.write_str("the peer"),
        }
    }
}

impl SendFailure {
    fn fmt(&self, f: &mut Formatter<'_>, of: &Failure) -> fmt::Result {
        let (qpn, peer) = (of.qpn.value(), Peer(of.peer));
        let Self {
            operation,
            status,
            wr_id,
            len,
            ..
        } = self;
        write!(f, "{operation} of QP {qpn:#x} (wr_id {wr_id:#x}) ")?;
        let refused = matches!(
            status,
            WcStatus::RemoteAccessError | WcStatus::RemoteInvalidRequestError | WcStatus::RemoteOperationError
        );
        match (refused, self.remote) {
            (true, Some(to)) => write!(
                f,
                "refused by {peer}: {status}: rkey {:#x}, {len} bytes at {:#x}",
                to.rkey.0, to.addr
            )?,
            (true, None) => write!(f, "refused by {peer}: {status}: {len} bytes")?,
            (false, _) => write!(f, "failed: {status}: ")?,
        }
        self.explain(f, peer)
    }

    fn explain(&self, f: &mut Formatter<'_>, peer: Peer) -> fmt::Result {
        let dest = self.dest.map_or(0, Qpn::value);
        match self.status {
            WcStatus::RemoteAccessError => {
                f.write_str("; the peer has no such memory open to it, or without the right (its log says which)")
            }
            WcStatus::RemoteInvalidRequestError if self.kind == Kind::Send => {
                f.write_str("; probably more than the peer's receive holds")
            }
            WcStatus::RemoteInvalidRequestError if matches!(self.kind, Kind::Atomic | Kind::AtomicWrite) => f.write_str(
                "; probably the address is not a multiple of 8, or the peer's queue pair does not permit the operation \
                 (qp_access_flags, max_dest_rd_atomic)",
            ),
            WcStatus::RemoteInvalidRequestError => f.write_str(
                "; probably the peer's queue pair does not permit the operation (qp_access_flags, max_dest_rd_atomic)",
            ),
            WcStatus::RemoteOperationError => f.write_str("; the peer could not access its own memory"),
            WcStatus::RetryExceeded => {
                let (timeout, retries) = self.timeout;
                write!(
                    f,
                    "no acknowledgement from {peer}, QP {dest:#x} (timeout {timeout}, retry_cnt {retries}): it is gone, in another state, \
                     or packets to or from UDP port 4791 are lost (`ferroce doctor --peer {peer}`)"
                )
            }
            WcStatus::RnrRetryExceeded => write!(
                f,
                "QP {dest:#x} of {peer} had no receive posted, also not after the last retry (rnr_retry 7 waits for ever)"
            ),
            WcStatus::BadResponseError => write!(f, "the answer of {peer} does not fit the request"),
            WcStatus::LocalLengthError => write!(f, "{} bytes, but an atomic has 8", self.len),
            WcStatus::LocalQpOperationError if self.local.is_none() => f.write_str(
                "this type of queue pair does not have the operation, or there is no path to the destination",
            ),
            _ => match &self.local {
                Some(memory) => memory.fmt(f),
                None => f.write_str("memory of the work request was deregistered, unmapped or protected meanwhile"),
            },
        }
    }
}

/// Reason of a refusal.
struct Reason<'a>(Refusal, &'a Detail);

impl Display for Reason<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match (self.0, self.1) {
            (_, Detail::Memory(memory)) => memory.fmt(f),
            (_, Detail::Rights { have, need }) => write!(
                f,
                "the queue pair does not permit it: qp_access_flags {}, needed {}",
                Rights(*have),
                Rights(*need)
            ),
            (Refusal::ReceiveTooShort, Detail::Receive { message, room, wr_id }) => {
                let beyond = message - room;
                write!(
                    f,
                    "{message} bytes or more are beyond the receive by {beyond} (wr_id {wr_id:#x}, {room} bytes)"
                )
            }
            (Refusal::LocalProtection, Detail::Receive { wr_id, .. }) => write!(
                f,
                "the memory of the receive (wr_id {wr_id:#x}) has a wrong lkey or length, or is not there any more"
            ),
            (_, Detail::Address(addr)) => write!(f, "the address {addr:#x} is not a multiple of 8"),
            (_, Detail::Limit(max)) => {
                write!(
                    f,
                    "more READs and atomics at once than max_dest_rd_atomic, {max}, permits"
                )
            }
            (Refusal::RKey, _) => f.write_str("its memory was deregistered, unmapped or protected meanwhile"),
            (refusal, _) => f.write_str(refusal.text()),
        }
    }
}

/// Name of a request's operation.
const fn class_name(class: Class) -> &'static str {
    match class {
        Class::Send => "SEND",
        Class::Write => "WRITE",
        Class::ReadRequest => "READ",
        Class::Atomic => "atomic",
        Class::AtomicWrite => "ATOMIC WRITE",
        Class::Flush => "FLUSH",
        _ => "request",
    }
}

/// Name of a send work request's operation.
const fn operation_name(op: &SendOp) -> &'static str {
    match op {
        SendOp::LocalInvalidate(_) => "LOCAL_INV",
        SendOp::FastRegister(_) => "REG_MR",
        SendOp::BindWindow(_) => "BIND_MW",
        other => match kind_of(other) {
            Kind::Send => "SEND",
            Kind::Write => "WRITE",
            Kind::Read => "READ",
            Kind::Atomic => "atomic",
            Kind::AtomicWrite => "ATOMIC WRITE",
            Kind::Flush => "FLUSH",
            Kind::Local => "local operation",
        },
    }
}

const fn remote_of(op: &SendOp) -> Option<RemoteAddr> {
    match op {
        SendOp::Write(to)
        | SendOp::WriteWithImm(to, _)
        | SendOp::Read(to)
        | SendOp::AtomicWrite(to)
        | SendOp::CompareSwap { remote: to, .. }
        | SendOp::FetchAdd { remote: to, .. } => Some(*to),
        SendOp::Flush(flush) => Some(flush.remote),
        _ => None,
    }
}

impl Failure {
    /// Explains why the oldest send work request fails.
    pub(crate) fn of_send(
        ctx: &Ctx<'_>,
        config: &QpConfig,
        attr: &QpAttr,
        (wqe, target): (&SendWqe, &Target),
        status: WcStatus,
    ) -> Self {
        let (peer, dest) = match *target {
            Target::Datagram(to) => (Some(to.av.remote), Some(to.qpn)),
            Target::Peer | Target::Srq(_) => (attr.av.map(|av| av.remote), attr.dest_qpn),
        };
        let send = SendFailure {
            operation: operation_name(&wqe.op),
            kind: wqe.kind(),
            status,
            wr_id: wqe.wr_id,
            len: wqe.len,
            dest,
            remote: remote_of(&wqe.op),
            local: local_memory(ctx, config.pd, wqe),
            timeout: (attr.timeout.unwrap_or(0), attr.retry_cnt.unwrap_or(0)),
        };
        Self {
            qpn: config.qpn,
            peer,
            what: What::Send(send),
        }
    }

    /// Explains why a request of the peer is refused.
    pub(crate) fn of_request(qpn: Qpn, peer: Option<IpAddr>, class: Class, refusal: Refusal, detail: Detail) -> Self {
        let what = What::Request {
            operation: class_name(class),
            refusal,
            detail,
        };
        Self { qpn, peer, what }
    }

    /// Explains that a completion was lost.
    pub(crate) fn of_overflow(qpn: Qpn, peer: Option<IpAddr>) -> Self {
        let what = What::Overflow;
        Self { qpn, peer, what }
    }
}

/// The first piece of a work request's memory that is invalid, or of a bind the region.
fn local_memory(ctx: &Ctx<'_>, pd: PdHandle, wqe: &SendWqe) -> Option<NamedMemory> {
    let named = |key: u32, addr: u64, len: u64, error, need| NamedMemory {
        key,
        addr,
        len,
        error,
        open: ctx.mem.open_range(key),
        need,
    };
    match &wqe.op {
        SendOp::BindWindow(args) => {
            return Some(named(args.lkey.0, args.addr, args.length, wqe.key_error, args.access));
        }
        SendOp::FastRegister(args) => {
            return Some(named(args.lkey.0, args.addr, args.length, wqe.key_error, args.access));
        }
        SendOp::LocalInvalidate(key) => return Some(named(key.0, 0, 0, wqe.key_error, AccessFlags::empty())),
        _ => {}
    }
    let Data::Sges(sges) = &wqe.data else { return None };
    let need = match wqe.is_answered_with_data() {
        true => AccessFlags::LOCAL_WRITE,
        false => AccessFlags::empty(),
    };
    let invalid = |sge: &Sge| {
        let error = ctx.mem.resolve_local(pd, sge, need).err()?;
        Some(named(sge.lkey.0, sge.addr, sge.length.into(), Some(error), need))
    };
    sges.iter().filter(|sge| sge.length > 0).find_map(invalid)
}
