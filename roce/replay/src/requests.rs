//! Work requests, derived from the request packets of a side.

use std::collections::BTreeMap;

use roce_bth::{Class, ExtHeader, HeaderView, Opcode, Psn};
use roce_verbs::{Flush, RemoteAddr, SendFlags, SendOp};

use crate::{connection::Event, error::Error, model::MAX_MEMORY};

/// Message that a side sent.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    pub(crate) psn: Psn,
    pub(crate) packets: u32,
    pub(crate) op: SendOp,
    pub(crate) flags: SendFlags,
    /// Bytes to send, or room for what comes back.
    pub(crate) data: Vec<u8>,
    /// Length according to the RETH of a WRITE.
    announced: Option<u32>,
}

/// Messages of a flow, each keyed by the index of the event that starts it.
#[derive(Debug, Default)]
pub(crate) struct Messages {
    pub(crate) by_start: BTreeMap<usize, Message>,
    /// One past the last PSN used.
    pub(crate) end: Option<Psn>,
    /// The last message has no end.
    pub(crate) breaks_off: bool,
}

/// Puts the request packets of one direction together. Packets with a PSN from before are retransmissions.
pub(crate) fn messages<'a>(events: impl Iterator<Item = (usize, &'a Event)>, mtu: usize) -> Result<Messages, Error> {
    let mut found = Messages::default();
    let mut open: Option<(usize, Message, bool)> = None;
    let mut room = MAX_MEMORY as usize;
    for (index, event) in events {
        let packet = event.packet();
        let (header, bth) = (packet.header, packet.header.bth);
        let next = *found.end.get_or_insert(bth.psn);
        if bth.psn.is_before(next) {
            continue;
        }
        if bth.psn != next {
            return Err(Error(format!(
                "frame {}: PSN {} where {} was due: the capture is not this side's view, or the path MTU is another",
                event.frame,
                bth.psn.value(),
                next.value()
            )));
        }
        let info = bth.opcode.info();
        if info.position.starts() {
            if let Some((at, message, _)) = open.take() {
                found.by_start.insert(at, message);
            }
            // A READ's length is the peer's word.
            let read = header.reth().filter(|_| info.class == Class::ReadRequest);
            room = take(room, read.map_or(0, |reth| reth.dma_len as usize))?;
            open = Some((index, start(event, mtu), false));
        }
        let Some((_, message, complete)) = open.as_mut() else {
            return Err(Error(format!("frame {}: a message without its start", event.frame)));
        };
        found.end = Some(match info.class {
            Class::ReadRequest => bth.psn.add(message.packets),
            _ => bth.psn.next(),
        });
        if matches!(info.class, Class::Send | Class::Write | Class::AtomicWrite) {
            message.data.extend(packet.payload);
            message.packets = found.end.map_or(0, |end| end.offset_from(message.psn));
        }
        *complete = info.position.ends();
        if info.position.ends() {
            message.op = closed(message.op, bth.opcode, header.imm(), header.ieth());
            message.flags.set(SendFlags::SOLICITED, bth.solicited);
        }
        if *complete && let Some((at, message, _)) = open.take() {
            found.by_start.insert(at, message);
        }
    }
    // Cut off by an error: as long as the RETH says, or longer than what was seen.
    if let Some((at, mut message, _)) = open {
        let len = message.announced.map_or(message.data.len() + 1, |n| n as usize);
        take(room, len)?;
        found.breaks_off = true;
        message.data.resize(len, 0);
        message.packets = len.div_ceil(mtu).max(1) as u32;
        found.by_start.insert(at, message);
    }
    Ok(found)
}

/// Returns the room that is left for the data of work requests.
fn take(room: usize, len: usize) -> Result<usize, Error> {
    room.checked_sub(len).ok_or_else(|| {
        Error(format!(
            "READs of more than {} MiB together: a replay has no memory for them",
            MAX_MEMORY >> 20
        ))
    })
}

fn start(event: &Event, mtu: usize) -> Message {
    let header = event.packet().header;
    let remote = match (header.reth(), header.atomic_eth()) {
        (Some(reth), _) => RemoteAddr {
            addr: reth.va,
            rkey: reth.rkey,
        },
        (_, Some(eth)) => RemoteAddr {
            addr: eth.va,
            rkey: eth.rkey,
        },
        _ => RemoteAddr::default(),
    };
    let eth = header.atomic_eth().unwrap_or_default();
    let (op, len) = match header.bth.opcode {
        Opcode::RcReadRequest => (SendOp::Read(remote), header.reth().map_or(0, |r| r.dma_len)),
        Opcode::RcCompareSwap => {
            let (compare, swap) = (eth.compare, eth.swap_add);
            (SendOp::CompareSwap { remote, compare, swap }, 8)
        }
        Opcode::RcFetchAdd => (
            SendOp::FetchAdd {
                remote,
                add: eth.swap_add,
            },
            8,
        ),
        Opcode::RcAtomicWrite => (SendOp::AtomicWrite(remote), 0),
        Opcode::RcFlush => (SendOp::Flush(flush(header)), 0),
        o if o.info().class == Class::Write => (SendOp::Write(remote), 0),
        _ => (SendOp::Send, 0),
    };
    Message {
        psn: header.bth.psn,
        packets: len.div_ceil(mtu as u32).max(1),
        op,
        flags: SendFlags::SIGNALED,
        data: vec![0; len as usize],
        announced: header.reth().map(|r| r.dma_len),
    }
}

fn flush(header: HeaderView<'_>) -> Flush {
    let (reth, feth) = (header.reth().unwrap_or_default(), header.feth().unwrap_or_default());
    Flush {
        remote: RemoteAddr {
            addr: reth.va,
            rkey: reth.rkey,
        },
        length: reth.dma_len,
        placement: feth.placement,
        selectivity: feth.selectivity,
    }
}

/// Adds what the last packet has: immediate data, or a key to invalidate.
fn closed(op: SendOp, opcode: Opcode, imm: Option<u32>, ieth: Option<roce_verbs::RKey>) -> SendOp {
    let info = opcode.info();
    match (
        op,
        imm.filter(|_| info.has(ExtHeader::Imm)),
        ieth.filter(|_| info.has(ExtHeader::Ieth)),
    ) {
        (SendOp::Send, Some(imm), _) => SendOp::SendWithImm(imm),
        (SendOp::Send, _, Some(key)) => SendOp::SendWithInv(key),
        (SendOp::Write(to), Some(imm), _) => SendOp::WriteWithImm(to, imm),
        (op, ..) => op,
    }
}
