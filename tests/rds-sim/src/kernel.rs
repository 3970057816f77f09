//! Model of the kernel's node at one address with one peer: what `net/rds` of Linux 6.1 does with a connection, its messages and
//! acknowledgements, written from `specs/kernel.md` and captures and not from our node. It has no congestion, and messages of a fragment.

use std::{
    collections::VecDeque,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use rds::proto::{
    BITMAP_FRAGMENTS, CongestionMap, ConnCommon, ConnV4, Flags, Header, Kind, MAX_SEND, PORT_V4, Reject, Version,
};
use roce_bth::RnrTimer;
use roce_verbs::{
    AccessFlags, Completion, Instant, Payload, QpCaps, RecvWr, SendFlags, SendOp, SendWr, Sge,
    mem::Pages,
    provider::{
        CmKind, CmRef, ConnParams, CqId, Cx, DeviceIx, Event, MrInfo, PdId, Provider, QpId, QpSpec, Registration,
        RejectReason, VerbsError,
    },
};
use zerocopy::IntoBytes as _;

/// Message of a program.
pub(crate) type Number = u32;

/// Buffers of a queue pair, each way. A run has fewer messages.
const RING: u32 = 64;
/// Bytes between the starts of two buffers.
const STRIDE: usize = MAX_SEND.next_multiple_of(64);
/// Marks receives.
const RECV: u64 = 1 << 32;
/// Ports of all messages.
const PORTS: (u16, u16) = (4000, 4000);
/// Messages without a request for an acknowledgement (`max_unacked_packets`).
const UNACKED: u32 = 8;
/// `reconnect_min_delay_ms`, a jiffy at 250 Hz, and `reconnect_max_delay_ms`.
const RECONNECT: [Duration; 2] = [Duration::from_millis(4), Duration::from_secs(1)];

/// `rds_conn_path::cp_state`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// `Some`: it connects then. `None`: with the first message.
    Down(Option<Instant>),
    Connecting,
    Up,
    Disconnecting,
    /// The module is gone.
    Unloaded,
}

/// Queue pair with its memory.
#[derive(Debug)]
struct Objects {
    qp: QpId,
    cq: CqId,
    mr: MrInfo,
    memory: Arc<Pages>,
    posted: u32,
}

/// See the module.
pub(crate) struct Kernel {
    addr: IpAddr,
    peer: IpAddr,
    listener: CmRef,
    pd: PdId,
    state: State,
    cm: Option<CmRef>,
    objects: Option<Objects>,
    backoff: Duration,
    next_tx: u64,
    /// Sequence numbers, whether they were sent before, and messages.
    waiting: VecDeque<(u64, bool, Number)>,
    unacked: VecDeque<(u64, bool, Number)>,
    /// Messages until one asks for an acknowledgement.
    until_asked: u32,
    next_rx: u64,
    /// Sequence number of the last message that was looked at: what it acknowledges.
    last_seen: u64,
    ack_due: bool,
    map_due: bool,
    received: Vec<Number>,
    /// Requests that it refused because it was connecting itself.
    pub(crate) raced: u64,
}

impl Kernel {
    pub(crate) fn listen(cx: &mut Cx<'_>, addr: IpAddr, peer: IpAddr) -> Result<Self, VerbsError> {
        Ok(Self {
            addr,
            peer,
            listener: cx.provider.cm_listen(SocketAddr::new(addr, PORT_V4), 128)?,
            pd: cx.provider.alloc_pd(DeviceIx(0))?,
            state: State::Down(None),
            cm: None,
            objects: None,
            backoff: Duration::ZERO,
            next_tx: 1,
            waiting: VecDeque::new(),
            unacked: VecDeque::new(),
            until_asked: 0,
            next_rx: 1,
            last_seen: 0,
            ack_due: false,
            map_due: false,
            received: Vec::new(),
            raced: 0,
        })
    }

    /// A program sends a message.
    pub(crate) fn send(&mut self, number: Number) {
        self.waiting.push_back((self.next_tx, false, number));
        self.next_tx += 1;
    }

    /// Messages that have come since the last call.
    pub(crate) fn take_received(&mut self) -> Vec<Number> {
        core::mem::take(&mut self.received)
    }

    /// Returns whether it is connected, and all that it had to send is acknowledged.
    pub(crate) fn is_settled(&self) -> bool {
        self.state == State::Up && self.waiting.is_empty() && self.unacked.is_empty()
    }

    pub(crate) fn situation(&self) -> String {
        let (waiting, unacked) = (self.waiting.len(), self.unacked.len());
        format!(
            "kernel {}: {:?}, {waiting} waiting, {unacked} unacked",
            self.addr, self.state
        )
    }

    fn params(&self) -> ConnParams {
        let common = ConnCommon::new(Version::V3_1, 0, 0, 0);
        let private_data = match (self.addr, self.peer) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => ConnV4::new(src, dst, common).as_bytes().to_vec(),
            _ => Vec::new(),
        };
        ConnParams {
            private_data,
            retry_count: 1,
            timeout: Some(Duration::from_secs(100)),
            tos: Some(0),
            min_rnr_timer: Some(RnrTimer::new(10)),
            ..ConnParams::default()
        }
    }

    /// Creates the queue pair (`rds_ib_setup_qp`). Receives are posted when it is connected.
    fn create(&mut self, provider: &mut dyn Provider) -> Result<QpId, VerbsError> {
        let invalid = |e: roce_verbs::mem::MemError| VerbsError::Invalid(e.to_string());
        let memory = Pages::allocate(2 * RING as usize * STRIDE).map_err(invalid)?;
        let what = Registration {
            memory: memory.clone(),
            offset: 0,
            len: memory.len(),
            iova: None,
            access: AccessFlags::LOCAL_WRITE,
        };
        let mr = provider.register(self.pd, &what)?;
        let cq = provider.create_cq(DeviceIx(0), 2 * RING)?;
        let caps = QpCaps {
            max_send_wr: RING,
            max_recv_wr: RING,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let pd = self.pd;
        let qp = provider.create_qp(&QpSpec {
            pd,
            cq,
            caps,
            signal_all: true,
        })?;
        let posted = 0;
        self.objects = Some(Objects {
            qp,
            cq,
            mr,
            memory,
            posted,
        });
        Ok(qp)
    }

    fn connect(&mut self, cx: &mut Cx<'_>) {
        self.state = State::Connecting;
        match cx
            .provider
            .cm_resolve(Some(self.addr), SocketAddr::new(self.peer, PORT_V4))
        {
            Ok(cm) => self.cm = Some(cm),
            Err(_) => self.drop_connection(cx),
        }
    }

    /// `rds_conn_drop`, and as much of `rds_conn_shutdown` as can be done at once.
    fn drop_connection(&mut self, cx: &mut Cx<'_>) {
        if !matches!(self.state, State::Connecting | State::Up) {
            return;
        }
        self.state = State::Disconnecting;
        match (&self.objects, self.cm) {
            (Some(objects), Some(cm)) => {
                cx.provider.cm_disconnect(cm);
                cx.provider.drain(objects.qp);
            }
            _ => self.shut_down(cx),
        }
    }

    /// Nothing is under way any more: connects again, at once at first, then after random times.
    fn shut_down(&mut self, cx: &mut Cx<'_>) {
        if let Some(Objects { qp, cq, mr, .. }) = self.objects.take() {
            cx.provider.destroy_qp(qp);
            cx.provider.destroy_cq(cq);
            cx.provider.deregister(mr.id);
        }
        if let Some(cm) = self.cm.take() {
            cx.provider.cm_destroy(cm);
        }
        while let Some((sequence, _, number)) = self.unacked.pop_back() {
            self.waiting.push_front((sequence, true, number));
        }
        (self.ack_due, self.map_due) = (false, false);
        let after = Duration::from_nanos(cx.below(self.backoff.as_nanos() as u64));
        self.backoff = (self.backoff * 2).clamp(RECONNECT[0], RECONNECT[1]);
        // After a failed attempt the first message does not ask for an acknowledgement.
        self.until_asked = UNACKED;
        self.state = State::Down(Some(cx.now + after));
    }

    fn request(&mut self, cx: &mut Cx<'_>, cm: CmRef) -> Result<(), VerbsError> {
        match self.state {
            State::Down(_) => {
                self.cm = Some(cm);
                self.state = State::Connecting;
                let qp = self.create(cx.provider)?;
                return cx.provider.cm_accept(cm, qp, &self.params());
            }
            State::Connecting => self.raced += 1,
            State::Up => self.drop_connection(cx),
            State::Disconnecting | State::Unloaded => {}
        }
        let data = Reject::INCOMPATIBLE.to_bytes();
        cx.provider.cm_reject(cm, RejectReason::CONSUMER, &data)
    }

    fn established(&mut self, cx: &mut Cx<'_>) -> Result<(), VerbsError> {
        if self.state != State::Connecting {
            self.drop_connection(cx);
            return Ok(());
        }
        self.state = State::Up;
        (self.map_due, self.backoff) = (true, Duration::ZERO);
        let Some(objects) = &self.objects else { return Ok(()) };
        for buffer in 0..RING {
            objects.post_receive(cx.provider, buffer)?;
        }
        Ok(())
    }

    fn cm_event(&mut self, cx: &mut Cx<'_>, id: CmRef, kind: &CmKind) -> Result<(), VerbsError> {
        if let CmKind::ConnectRequest { .. } = kind {
            return self.request(cx, id);
        }
        if self.cm != Some(id) {
            return Ok(());
        }
        match kind {
            CmKind::Resolved { .. } => {
                let qp = self.create(cx.provider)?;
                return cx.provider.cm_connect(id, qp, &self.params());
            }
            CmKind::Established { .. } => return self.established(cx),
            // It believes that the peer means another version, and waits for ever.
            CmKind::Rejected { reason, private_data }
                if *reason == RejectReason::CONSUMER && Reject::parse(private_data).is_ok_and(|data| data.0 > 1) => {}
            _ => self.drop_connection(cx),
        }
        Ok(())
    }

    fn take(&mut self, cx: &mut Cx<'_>, wc: &Completion) -> Result<(), VerbsError> {
        let (buffer, len) = ((wc.wr_id & !RECV) as u32, wc.byte_len as usize);
        let Some(objects) = &self.objects else { return Ok(()) };
        let mut bytes = vec![0; len];
        let read = objects.memory.read((RING + buffer) as usize * STRIDE, &mut bytes);
        objects.post_receive(cx.provider, buffer)?;
        let Some((header, data)) = read.ok().and_then(|()| Header::parse(&bytes).ok()) else {
            self.drop_connection(cx);
            return Ok(());
        };
        let ack = header.ack.get();
        while self.unacked.front().is_some_and(|(sequence, ..)| *sequence <= ack) {
            self.unacked.pop_front();
        }
        let sequence = header.sequence.get();
        match header.kind() {
            Kind::Bitmap | Kind::Ack => return Ok(()),
            Kind::Data if sequence < self.next_rx && header.flags().contains(Flags::RETRANSMITTED) => {}
            Kind::Data => {
                self.next_rx = sequence + 1;
                let number = data.try_into().map(Number::from_be_bytes);
                self.received.extend(number.ok());
            }
            Kind::Ping | Kind::Pong => self.next_rx = sequence + 1,
        }
        self.last_seen = sequence;
        self.ack_due |= header.flags().contains(Flags::ACK_REQUIRED);
        Ok(())
    }

    /// `rds_send_xmit`.
    fn transmit(&mut self, cx: &mut Cx<'_>) -> Result<(), VerbsError> {
        let Some(objects) = self.objects.as_mut().filter(|_| self.state == State::Up) else {
            return Ok(());
        };
        if core::mem::take(&mut self.map_due) {
            let map = CongestionMap::default();
            for index in 0..BITMAP_FRAGMENTS {
                let part = map
                    .fragment(index)
                    .map(|part| part.bytes().to_vec())
                    .unwrap_or_default();
                objects.post(
                    cx.provider,
                    &Header::bitmap(self.last_seen),
                    &part,
                    index + 1 == BITMAP_FRAGMENTS,
                )?;
            }
        }
        while let Some((sequence, again, number)) = self.waiting.pop_front() {
            let mut flags = Flags::empty();
            flags.set(Flags::RETRANSMITTED, again);
            flags.set(Flags::ACK_REQUIRED, again || self.until_asked == 0);
            self.until_asked = self.until_asked.checked_sub(1).unwrap_or(UNACKED);
            let bytes = number.to_be_bytes();
            let header = Header::new(sequence, self.last_seen, bytes.len() as u32, PORTS, flags);
            objects.post(cx.provider, &header, &bytes, true)?;
            self.unacked.push_back((sequence, again, number));
        }
        if core::mem::take(&mut self.ack_due) {
            objects.post(cx.provider, &Header::ack_only(self.last_seen), &[], true)?;
        }
        Ok(())
    }

    fn check(&mut self, cx: &mut Cx<'_>, done: Result<(), VerbsError>) {
        if done.is_err() {
            self.drop_connection(cx);
        }
    }

    pub(crate) fn completion(&mut self, cx: &mut Cx<'_>, qp: QpId, wc: &Completion) {
        if self.objects.as_ref().is_none_or(|objects| objects.qp != qp) {
            return;
        }
        if !wc.is_ok() {
            self.drop_connection(cx);
        } else if wc.wr_id & RECV != 0 {
            let taken = self.take(cx, wc);
            self.check(cx, taken);
        }
    }

    pub(crate) fn event(&mut self, cx: &mut Cx<'_>, event: &Event) {
        match event {
            Event::Cm { id, kind } => {
                let done = self.cm_event(cx, *id, kind);
                self.check(cx, done);
            }
            Event::Drained(qp) if self.objects.as_ref().is_some_and(|objects| objects.qp == *qp) => {
                // It was drained only if it was dropped.
                self.shut_down(cx);
            }
            _ => {}
        }
    }

    pub(crate) fn end_batch(&mut self, cx: &mut Cx<'_>) {
        let due = match self.state {
            State::Down(None) => !self.waiting.is_empty(),
            State::Down(Some(at)) => at <= cx.now,
            _ => false,
        };
        if due {
            self.connect(cx);
        }
        let sent = self.transmit(cx);
        self.check(cx, sent);
    }

    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        match self.state {
            State::Down(at) => at,
            _ => None,
        }
    }

    /// Its module is unloaded: drops the connection, then gives the rest back.
    pub(crate) fn stop(&mut self, cx: &mut Cx<'_>) {
        if self.state == State::Up || self.state == State::Connecting {
            self.waiting.clear();
            cx.provider.cm_destroy(self.listener);
            self.drop_connection(cx);
        }
        if let State::Down(_) = self.state {
            cx.provider.free_pd(self.pd);
            self.state = State::Unloaded;
        }
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.state == State::Unloaded
    }
}

impl Objects {
    fn post_receive(&self, provider: &mut dyn Provider, buffer: u32) -> Result<(), VerbsError> {
        let sge = Sge {
            addr: self.mr.addr + u64::from(RING + buffer) * STRIDE as u64,
            length: MAX_SEND as u32,
            lkey: self.mr.lkey,
        };
        let wr = RecvWr {
            wr_id: RECV | u64::from(buffer),
            sges: &[sge],
        };
        Ok(provider.post_recv(self.qp, &[wr]).map_err(|(_, e)| e)?)
    }

    fn post(
        &mut self,
        provider: &mut dyn Provider,
        header: &Header,
        data: &[u8],
        is_last: bool,
    ) -> Result<(), VerbsError> {
        let at = (self.posted % RING) as usize * STRIDE;
        self.posted += 1;
        let bytes = [header.as_bytes(), data].concat();
        self.memory
            .write(at, &bytes)
            .map_err(|e| VerbsError::Invalid(e.to_string()))?;
        let sge = Sge {
            addr: self.mr.addr + at as u64,
            length: bytes.len() as u32,
            lkey: self.mr.lkey,
        };
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SOLICITED, is_last);
        let wr = SendWr {
            wr_id: 0,
            op: SendOp::Send,
            flags,
            payload: Payload::Sges(&[sge]),
        };
        Ok(provider.post_send(self.qp, &[wr]).map_err(|(_, e)| e)?)
    }
}
