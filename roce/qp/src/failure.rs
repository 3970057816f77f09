//! Why a queue pair failed, in words for the person who debugs the program.
//!
//! Completions and events carry a status only. A [`Failure`] adds what was asked of whom and what was wrong with it. It is
//! made once, when the queue pair fails, and stays until it is taken.

use core::{
    fmt::{self, Display, Formatter},
    net::IpAddr,
};

use roce_bth::Class;
use roce_verbs::mem::{KeyError, MemoryTable, PdHandle};
use roce_verbs::{AccessFlags, QpAttr, Qpn, SendOp, Sge, Target, WcStatus};

use crate::{
    ctx::QpConfig,
    refusal::Refusal,
    sendq::{Data, Kind, SendWqe},
};

/// First error that moved a queue pair to the error state (or a send queue to SQE), for people. Its text is one line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure(Box<str>);

impl Display for Failure {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Failure {
    /// Explains why the oldest send work request fails.
    pub(crate) fn of_send(
        mem: &MemoryTable,
        config: &QpConfig,
        attr: &QpAttr,
        (wqe, target): (&SendWqe, &Target),
        status: WcStatus,
    ) -> Self {
        let (peer, dest) = match *target {
            Target::Datagram(to) => (Some(to.av.remote), Some(to.qpn)),
            Target::Peer | Target::Srq(_) => (attr.av.map(|av| av.remote), attr.dest_qpn),
        };
        let (qpn, peer, dest) = (config.qpn.value(), peer_name(peer), dest.map_or(0, Qpn::value));
        let (operation, wr_id, len) = (operation_name(wqe), wqe.wr_id, wqe.len);
        let refused = matches!(
            status,
            WcStatus::RemoteAccessError | WcStatus::RemoteInvalidRequestError | WcStatus::RemoteOperationError
        );
        let outcome = match (refused, wqe.remote()) {
            (true, Some(to)) => {
                let (rkey, addr) = (to.rkey.0, to.addr);
                format!("refused by {peer}: {status}: rkey {rkey:#x}, {len} bytes at {addr:#x}")
            }
            (true, None) => format!("refused by {peer}: {status}: {len} bytes"),
            (false, _) => format!("failed: {status}: "),
        };
        let explanation = match status {
            WcStatus::RetryExceeded => {
                let (timeout, retries) = (attr.timeout.unwrap_or(0), attr.retry_cnt.unwrap_or(0));
                format!(
                    "no acknowledgement from {peer}, QP {dest:#x} (timeout {timeout}, retry_cnt {retries}): it is gone, in another state, \
                     or packets to or from UDP port 4791 are lost (`ferroce doctor --peer {peer}`)"
                )
            }
            WcStatus::RnrRetryExceeded => format!(
                "QP {dest:#x} of {peer} had no receive posted, also not after the last retry (rnr_retry 7 waits for ever)"
            ),
            WcStatus::BadResponseError => format!("the answer of {peer} does not fit the request"),
            WcStatus::LocalLengthError => format!("{len} bytes, but an atomic has 8"),
            _ if refused => refused_because(status, wqe.kind()).to_owned(),
            _ => local_memory(mem, config.pd, wqe).unwrap_or_else(|| {
                let unsupported = status == WcStatus::LocalQpOperationError;
                (if unsupported { NO_OPERATION_OR_PATH } else { NO_MEMORY }).to_owned()
            }),
        };
        Self(format!("{operation} of QP {qpn:#x} (wr_id {wr_id:#x}) {outcome}{explanation}").into())
    }

    /// Explains why a request of the peer is refused.
    pub(crate) fn of_request(qpn: Qpn, peer: Option<IpAddr>, class: Class, refusal: Refusal, reason: &str) -> Self {
        let (qpn, peer, operation) = (qpn.value(), peer_name(peer), class_name(class));
        let outcome = match refusal {
            Refusal::LocalProtection => format!("can't receive {operation} of {peer}: local protection error"),
            Refusal::Invalidate => format!("failed after {operation} of {peer}: remote invalid request error"),
            _ => format!("refused {operation} of {peer}: {}", refusal.status()),
        };
        Self(format!("QP {qpn:#x} {outcome}: {reason}").into())
    }

    /// Explains that a completion was lost.
    pub(crate) fn of_overflow(qpn: Qpn) -> Self {
        let qpn = qpn.value();
        let text = format!(
            "QP {qpn:#x} failed: a completion was lost because the completion queue is full (create it with more entries, or \
             poll it more often)"
        );
        Self(text.into())
    }
}

const NO_OPERATION_OR_PATH: &str =
    "this type of queue pair does not have the operation, or there is no path to the destination";
const NO_MEMORY: &str = "memory of the work request was deregistered, unmapped or protected meanwhile";

/// Returns the probable reason of a refusal, which the peer does not tell.
const fn refused_because(status: WcStatus, kind: Kind) -> &'static str {
    match (status, kind) {
        (WcStatus::RemoteAccessError, _) => {
            "; the peer has no such memory open to it, or without the right (its log says which)"
        }
        (WcStatus::RemoteOperationError, _) => "; the peer could not access its own memory",
        (_, Kind::Send) => "; probably more than the peer's receive holds",
        (_, Kind::Atomic | Kind::AtomicWrite) => {
            "; probably the address is not a multiple of 8, or the peer's queue pair does not permit the operation \
             (qp_access_flags, max_dest_rd_atomic)"
        }
        _ => "; probably the peer's queue pair does not permit the operation (qp_access_flags, max_dest_rd_atomic)",
    }
}

fn peer_name(peer: Option<IpAddr>) -> String {
    peer.map_or_else(|| "the peer".to_owned(), |addr| addr.to_string())
}

/// A range of memory by its key.
#[derive(Clone, Copy)]
pub(crate) struct NamedMemory {
    pub(crate) key: u32,
    pub(crate) addr: u64,
    pub(crate) len: u64,
}

impl NamedMemory {
    /// Describes what is wrong with it. No `error`: it was valid, but can't be accessed any more.
    pub(crate) fn describe(self, mem: &MemoryTable, error: Option<KeyError>, need: AccessFlags) -> String {
        let Self { key, addr, len } = self;
        let fault = match (error, mem.open_range(key)) {
            (Some(KeyError::Range), Some((start, size))) => {
                let end = u128::from(addr) + u128::from(len);
                let limit = u128::from(start) + u128::from(size);
                let place = match (u128::from(start).checked_sub(u128::from(addr)), end.checked_sub(limit)) {
                    (Some(before), _) if before > 0 => format!("begin {before} bytes before the region"),
                    (_, Some(beyond)) => format!("are beyond the region by {beyond}"),
                    _ => "are not in the region".to_owned(),
                };
                format!(" {place} ({size} bytes at {start:#x})")
            }
            (Some(KeyError::Access), _) => format!(": the region was registered without {}", Rights(need)),
            (Some(error), _) => format!(": {error}"),
            (None, _) => ": the memory was deregistered, unmapped or protected meanwhile".to_owned(),
        };
        format!("key {key:#x}, {len} bytes at {addr:#x}{fault}")
    }
}

/// Access rights by the names that programs use.
pub(crate) struct Rights(pub(crate) AccessFlags);

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
fn operation_name(wqe: &SendWqe) -> &'static str {
    match wqe.op {
        SendOp::LocalInvalidate(_) => "LOCAL_INV",
        SendOp::FastRegister(_) => "REG_MR",
        SendOp::BindWindow(_) => "BIND_MW",
        _ => class_name(wqe.opcode(0).info().class),
    }
}

/// Describes the first piece of a work request's memory that is invalid, or of a bind the region.
fn local_memory(mem: &MemoryTable, pd: PdHandle, wqe: &SendWqe) -> Option<String> {
    let (key, addr, len, need) = match &wqe.op {
        SendOp::BindWindow(args) => (args.lkey.0, args.addr, args.length, args.access),
        SendOp::FastRegister(args) => (args.lkey.0, args.addr, args.length, args.access),
        SendOp::LocalInvalidate(key) => (key.0, 0, 0, AccessFlags::empty()),
        _ => {
            let Data::Sges(sges) = &wqe.data else { return None };
            let need = wqe.local_rights();
            let invalid = |sge: &Sge| {
                let error = mem.resolve_local(pd, sge, need).err()?;
                let (key, addr, len) = (sge.lkey.0, sge.addr, sge.length.into());
                Some(NamedMemory { key, addr, len }.describe(mem, Some(error), need))
            };
            return sges.iter().filter(|sge| sge.length > 0).find_map(invalid);
        }
    };
    Some(NamedMemory { key, addr, len }.describe(mem, wqe.key_error, need))
}
