//! Sets a queue pair up with the capture's numbers.

use std::{collections::VecDeque, sync::Arc};

use roce_bth::{Class, NakCode, Psn, Syndrome};
use roce_qp::{CompletionQueue, Counters, FreePaces, QpConfig, QueuePair, Window, WindowConfig};
use roce_verbs::mem::{MemoryTable, PdHandle};
use roce_verbs::{AccessFlags, AddressVector, DeviceLimits, Instant, Mtu, QpAttr, QpCaps, QpType, Qpn, RnrTimer};

use super::{CQ_LEN, Outcome, Player, Settings, index::Index, requester::Asking};
use crate::{
    compare::Answers,
    connection::{Connection, Event, lower},
    error::Error,
    model::Model,
    requests::messages,
};

/// Stands for a queue pair number that the capture does not show. Nobody needs it.
const NO_NUMBER: u32 = 0x80_0000;
/// Least bytes of a receive, if the settings don't say.
const RECEIVE: usize = 1 << 20;
/// Bytes in flight that the window allows: more than any capture has.
const WIDE: usize = 1 << 30;

impl<'a> Player<'a> {
    /// Creates the player of an endpoint, with its queue pair in RTS.
    pub(super) fn new(
        connection: &'a Connection,
        side: usize,
        mtu: usize,
        settings: &'a Settings,
    ) -> Result<Self, Error> {
        let events = &connection.events;
        let own = (0..).zip(events).filter(|(_, e)| e.sender == side && e.is_request());
        let messages = messages(own, mtu)?;
        let mem = MemoryTable::new([7; 32], &DeviceLimits::software(1));
        let pd = mem.alloc_pd().map_err(Error::of("protection domain"))?;
        let refused = refused(events, side);
        let theirs = events.iter().filter(|e| e.sender != side && e.is_request());
        let good = theirs
            .map(Event::packet)
            .filter(|p| refused.is_none_or(|at| p.header.bth.psn.is_before(at)));
        let model = Model::new(&mem, pd, good)?;
        let lengths = messages.by_start.values().map(|m| m.data.len().next_multiple_of(8));
        let region = |len: usize| {
            mem.alloc_region(pd, len.max(8), AccessFlags::LOCAL_WRITE)
                .map_err(Error::of("memory"))
        };
        let receive_len = match settings.receive {
            Some(len) => len as usize,
            None => longest_send(events, side).max(RECEIVE),
        };
        let (local, receive) = (region(lengths.sum())?, region(receive_len)?);
        let cqs = [1, 2].map(|number| CompletionQueue::new(number, CQ_LEN as u32, None));
        let qp = queue_pair(connection.ends[side].qpn, pd, &cqs)?;
        let [send_cq, recv_cq] = cqs;
        let window = WindowConfig {
            initial: WIDE,
            min: WIDE,
            max: WIDE,
        };
        let mut player = Self {
            connection,
            side,
            index: Index::new(connection, side),
            mtu,
            settings,
            mem,
            qp,
            window: Window::new(window),
            paces: FreePaces::new(None),
            events: VecDeque::new(),
            counters: Counters::default(),
            send_cq,
            recv_cq,
            model,
            messages,
            local,
            local_used: 0,
            reads: Vec::new(),
            receive,
            receive_len: receive_len as u32,
            incoming: None,
            expected: None,
            answers: Answers::default(),
            answers_len: 0,
            frame: 0,
            at: 0,
            sent: [Vec::new(), Vec::new()],
            asking: Asking::default(),
            not_ready: None,
            msn_offset: None,
            outcome: Outcome::default(),
        };
        player.connect()?;
        Ok(player)
    }

    /// Brings the queue pair to RTS with the capture's numbers.
    fn connect(&mut self) -> Result<(), Error> {
        let events = &self.connection.events;
        // The lowest: the very first packet may be lost.
        let first = |side: usize| {
            let asked = events.iter().filter(|e| e.sender == side && e.is_request());
            asked.map(Event::psn).reduce(lower)
        };
        let (rq_psn, sq_psn) = (first(1 - self.side), first(self.side));
        self.asking.first = sq_psn.unwrap_or_default();
        self.expected = rq_psn;
        let mut mine = events.iter().filter(|e| e.sender == self.side);
        let rnr = mine.find_map(|e| match e.packet().header.aeth()?.syndrome {
            Syndrome::Rnr(timer) => Some(timer),
            _ => None,
        });
        let path_mtu = Mtu::from_bytes(self.mtu).ok_or_else(|| Error(format!("a path MTU of {} bytes", self.mtu)))?;
        let (ours, theirs) = (self.connection.ends[self.side], self.connection.ends[1 - self.side]);
        let dest_qpn = Qpn::new(theirs.qpn.unwrap_or(NO_NUMBER));
        let usual = QpAttr::to_rts(AddressVector::new(ours.addr, theirs.addr), path_mtu, dest_qpn);
        let way = QpAttr {
            rq_psn: Some(rq_psn.unwrap_or_default()),
            sq_psn: Some(sq_psn.unwrap_or_default()),
            max_dest_rd_atomic: Some(16),
            max_rd_atomic: Some(16),
            min_rnr_timer: Some(rnr.unwrap_or(RnrTimer::new(12))),
            timeout: Some(self.settings.timeout),
            retry_cnt: Some(self.settings.retry_cnt),
            rnr_retry: Some(self.settings.rnr_retry),
            // What is refused is refused for the region's rights.
            access: usual
                .access
                .map(|access| access | AccessFlags::FLUSH_GLOBAL | AccessFlags::FLUSH_PERSISTENT),
            ..usual
        };
        for attr in way.steps(QpType::Rc) {
            let (qp, mut ctx) = self.ctx(Instant::ZERO);
            qp.modify(&mut ctx, &attr).map_err(Error::of("queue pair"))?;
        }
        // What the captured side sends does not depend on the peer's source port, which it never checks.
        self.qp.set_peer_source(0);
        Ok(())
    }
}

fn queue_pair(
    qpn: Option<u32>,
    pd: PdHandle,
    [send_cq, recv_cq]: &[Arc<CompletionQueue>; 2],
) -> Result<QueuePair, Error> {
    let caps = QpCaps {
        max_send_wr: 4096,
        max_recv_wr: 16,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    };
    let config = QpConfig {
        qpn: Qpn::new(qpn.unwrap_or(NO_NUMBER)),
        pd,
        qp_type: QpType::Rc,
        send_cq: send_cq.clone(),
        recv_cq: recv_cq.clone(),
        caps,
        signal_all: true,
        max_msg_size: 1 << 31,
        port_mtu: Mtu::B4096,
        srq: None,
        xrcd: None,
    };
    QueuePair::new(config).map_err(Error::of("queue pair"))
}

/// Returns the bytes of the longest SEND that a side gets.
fn longest_send(events: &[Event], side: usize) -> usize {
    let (mut longest, mut len) = (0, 0);
    for event in events.iter().filter(|e| e.sender != side) {
        let packet = event.packet();
        let info = packet.header.bth.opcode.info();
        if info.class == Class::Send {
            len = if info.position.starts() { 0 } else { len } + packet.payload.len();
            longest = longest.max(len);
        }
    }
    longest
}

/// Returns the PSN of the first request that the side refused for good.
fn refused(events: &[Event], side: usize) -> Option<Psn> {
    let mine = events.iter().filter(|e| e.sender == side).map(|e| e.packet().header);
    mine.filter_map(|h| Some((h.bth.psn, h.aeth()?.syndrome)))
        .find(|(_, s)| matches!(s, Syndrome::Nak(code) if *code != NakCode::PsnSequenceError))
        .map(|(psn, _)| psn)
}
