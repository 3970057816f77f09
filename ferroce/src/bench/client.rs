//! The active side's connection.

use std::{net::SocketAddr, time::Duration};

use roce::{
    AccessFlags, Channel, CmEventKind, Completion, ConnParams, Cq, Device, EventChannel, Id, Mr, NoAnswer, Pd, Qp,
    QpCaps, QpInit, RecvWr, RejectReason, RemoteAddr, VerbsError, WcStatus,
};

use super::{
    failed,
    wire::{Hello, Role, credit_at, parse_memory},
};
use crate::output::Failure;

/// Until a peer must have answered.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Settings and objects shared by the connections of a measurement.
pub(crate) struct Endpoint<'a> {
    pub(crate) device: &'a Device,
    pub(crate) pd: Pd,
    pub(crate) cq: Cq,
    /// Channel that a thread sleeps on that waits for completions.
    pub(crate) events: Option<Channel>,
    channel: EventChannel,
}

/// A connection to the passive side.
pub(crate) struct Connection {
    pub(crate) qp: Qp,
    /// Our memory: messages come from here, and answers land here.
    pub(crate) mr: Mr,
    /// The peer's.
    pub(crate) memory: RemoteAddr,
    _id: Id,
}

impl<'a> Endpoint<'a> {
    pub(crate) fn new(device: &'a Device, completions: u32) -> Result<Self, Failure> {
        Self::of(device, completions, None)
    }

    /// One whose thread may sleep until there are completions.
    pub(crate) fn sleeping(device: &'a Device, completions: u32) -> Result<Self, Failure> {
        let events = device.create_channel().map_err(failed("making a completion channel"))?;
        Self::of(device, completions, Some(events))
    }

    fn of(device: &'a Device, completions: u32, events: Option<Channel>) -> Result<Self, Failure> {
        let cq = device
            .create_cq(completions, events.as_ref(), 0)
            .map_err(failed("making a completion queue"))?;
        Ok(Self {
            device,
            events,
            pd: device.alloc_pd().map_err(failed("making a protection domain"))?,
            cq,
            channel: device.create_cm_channel().map_err(failed("making an event channel"))?,
        })
    }

    /// Connects, with `memory` bytes of our own.
    pub(crate) fn connect(&self, peer: SocketAddr, role: Role, bytes: u32, depth: u32) -> Result<Connection, Failure> {
        let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
        let mr = self
            .device
            .alloc_mr(&self.pd, credit_at(bytes) + size_of::<u64>(), access)
            .map_err(failed("registering memory"))?;
        let init = QpInit {
            send_cq: &self.cq,
            recv_cq: &self.cq,
            caps: QpCaps {
                max_send_wr: depth + 1,
                max_recv_wr: depth + 1,
                ..QpCaps::default()
            },
            signal_all: false,
        };
        let qp = self
            .device
            .create_qp(&self.pd, &init)
            .map_err(failed("making a queue pair"))?;
        let hello = Hello {
            role,
            bytes,
            depth,
            memory: RemoteAddr {
                addr: mr.addr(),
                rkey: mr.rkey(),
            },
        };
        let params = ConnParams {
            private_data: hello.emit(),
            ..ConnParams::default()
        };
        let connecting = format!("connecting to {peer}");
        let id = self
            .device
            .connect(&self.channel, None, peer, &qp, params)
            .map_err(failed(&connecting))?;
        let event = self.channel.wait(Some(CONNECT_TIMEOUT)).map_err(failed(&connecting))?;
        let reason = match event.map(|e| e.kind) {
            Some(CmEventKind::Established { private_data, .. }) => match parse_memory(&private_data) {
                Some(memory) => {
                    return Ok(Connection {
                        qp,
                        mr,
                        memory,
                        _id: id,
                    });
                }
                None => "the peer is not a `ferroce bench --server`".to_owned(),
            },
            Some(CmEventKind::Rejected { reason, .. }) if reason == RejectReason::INVALID_SERVICE_ID => {
                "nothing listens there: start `ferroce bench --server` first".to_owned()
            }
            Some(CmEventKind::Rejected { reason, .. }) => format!("the peer refused: {reason}"),
            Some(CmEventKind::Failed { text, .. }) => text,
            None
            | Some(CmEventKind::Unreachable {
                why: NoAnswer::Timeout, ..
            }) => "no answer: is UDP port 4791 open on the way, and `ferroce bench --server` running there?".to_owned(),
            Some(CmEventKind::Unreachable {
                why: NoAnswer::PortUnreachable,
                ..
            }) => {
                format!("{}: start `ferroce bench --server` first", NoAnswer::PortUnreachable)
            }
            Some(CmEventKind::Unreachable { why, .. }) => why.to_string(),
            Some(_) => "the connection ended".to_owned(),
        };
        Err(Failure::failed(format!("{connecting}: {reason}")))
    }
}

/// Takes completions, up to 8, asleep until there are some or for `patience`.
pub(crate) fn sleep_and_poll(
    cq: &Cq,
    events: &Channel,
    out: &mut Vec<Completion>,
    patience: Duration,
) -> Result<(), Failure> {
    let mut poll = || {
        out.clear();
        cq.poll(out, 8).map_err(failed("polling"))
    };
    if poll()? > 0 {
        return Ok(());
    }
    cq.arm(false).map_err(failed("arming a completion queue"))?;
    // One that came before that makes no event.
    if poll()? > 0 {
        return Ok(());
    }
    events
        .wait(Some(patience))
        .map_err(failed("waiting for a completion"))?;
    poll().map(drop)
}

/// An error if a completion is one.
pub(crate) fn check(completion: &Completion) -> Result<(), Failure> {
    let why = match completion.status {
        WcStatus::Success => return Ok(()),
        WcStatus::RetryExceeded => "the peer does not answer any more",
        WcStatus::FlushError => "the connection ended",
        _ => "the connection failed",
    };
    Err(Failure::failed(format!("{why} ({:?})", completion.status)))
}

/// Posts a receive for a whole region.
pub(crate) fn post_recv(qp: &Qp, mr: &Mr, count: usize) -> Result<(), Failure> {
    let sges = [mr.sge(0, mr.len())];
    let wr = RecvWr { wr_id: 0, sges: &sges };
    qp.post_recv(&vec![wr; count])
        .map_err(|(_, e)| failed("posting a receive")(VerbsError::Post(e)))
}
