//! A provider of verbs without a network. The server's threads work on it as on any other; one thread plays all clients,
//! hands in what they send, and waits after each step until the server has nothing left to do. What a server must not do
//! whoever its clients are is checked here: local memory outside its regions or of another protection domain, queues that
//! overflow, objects that stay behind.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    fs::File,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc, Condvar, LazyLock, Mutex, MutexGuard,
        atomic::{
            AtomicU8, AtomicU32,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::{Duration, Instant},
};

use roce_verbs::{
    AccessFlags, Completion, DeviceLimits, LKey, Payload, QpAttr, QpCaps, Qpn, RKey, RecvWr, SendFlags, SendOp, SendWr,
    Sge, WcFlags, WcOpcode, WcStatus,
    provider::{
        CmChannel, CmEvent, CmEventKind, CmId, CompletionChannel, CompletionQueue, ConnParams, Grant, MemoryRegion,
        Provider, QpInit, QueuePair, RangeError, RevocableRegion, VerbsError,
    },
    wr::PostError,
};
use rtrs::proto::Imm;

/// Far more than a server takes for any step. Whoever takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(20);

/// What the descriptors of channels are: nobody polls them here.
static NO_FILE: LazyLock<File> = LazyLock::new(|| File::open("/dev/null").expect("/dev/null"));

type Bytes = Arc<[AtomicU8]>;

/// A thread waits here for events.
struct Waiter<E> {
    events: VecDeque<E>,
    waiting: bool,
    /// A thread has looked for something.
    started: bool,
    wake: Arc<Condvar>,
}

impl<E> Waiter<E> {
    fn new() -> Self {
        Self {
            events: VecDeque::new(),
            waiting: false,
            started: false,
            wake: Arc::new(Condvar::new()),
        }
    }

    fn push(&mut self, event: E) {
        self.events.push_back(event);
        self.wake.notify_all();
    }

    fn idle(&self) -> bool {
        self.waiting && self.events.is_empty()
    }
}

struct CqState {
    entries: usize,
    channel: Option<u64>,
    cookie: u64,
    armed: bool,
    queue: VecDeque<Completion>,
}

/// A work request in a send queue.
struct Posted {
    wr_id: u64,
    opcode: WcOpcode,
    signalled: bool,
}

struct QpState {
    pd: u64,
    send_cq: u64,
    recv_cq: u64,
    caps: QpCaps,
    recvs: VecDeque<(u64, Option<Sge>)>,
    sq: VecDeque<Posted>,
    /// In the error state.
    dead: bool,
    /// Because the peer used what is not its own.
    violated: bool,
    /// The server has ended its connection: it will be gone soon.
    ended: bool,
    /// Requests that came and are not answered.
    open: usize,
    sent: Vec<Sent>,
}

struct RegionState {
    bytes: Bytes,
    addr: u64,
    pd: u64,
}

/// What a key opens to peers.
struct Opened {
    bytes: Bytes,
    /// The address of the first of the bytes.
    base: u64,
    start: u64,
    len: u64,
}

#[derive(Default)]
struct IdState {
    qp: Option<u32>,
    answer: Option<Answer>,
}

#[derive(Default)]
struct State {
    next: u64,
    /// Waits end at once.
    ending: bool,
    /// Sends are executed but complete only when this ends.
    hold: bool,
    channels: BTreeMap<u64, Waiter<u64>>,
    cm: BTreeMap<u64, Waiter<CmEvent<Id>>>,
    listening: Option<u64>,
    cqs: BTreeMap<u64, CqState>,
    qps: BTreeMap<u32, QpState>,
    regions: BTreeMap<u32, RegionState>,
    opened: BTreeMap<u32, Opened>,
    ids: BTreeMap<u64, IdState>,
}

struct Shared {
    state: Mutex<State>,
    /// Something that [`Fake::quiet`] waits for may have come.
    quiet: Condvar,
}

/// How a connect request was answered; with the private data.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    Accepted(Vec<u8>),
    Rejected(Vec<u8>),
}

/// What a server has sent.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) op: SendOp,
    pub(crate) bytes: Vec<u8>,
}

/// What a client sends to a queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Message<'a> {
    Send(&'a [u8]),
    SendWithImm(&'a [u8], u32),
    /// An RDMA WRITE with immediate data, after its data.
    WriteWithImm(u32),
}

/// The provider.
#[derive(Clone)]
pub(crate) struct Fake(Arc<Shared>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere is reported there.
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn wait<E>(
        &self,
        timeout: Option<Duration>,
        find: impl Fn(&mut State) -> Option<&mut Waiter<E>>,
    ) -> Result<Option<E>, VerbsError> {
        let until = timeout.map(|t| Instant::now() + t);
        let mut state = self.lock();
        loop {
            let ending = state.ending;
            let waiter = find(&mut state).ok_or(VerbsError::Closed)?;
            waiter.started = true;
            let event = waiter.events.pop_front();
            let left = until.map_or(PATIENCE, |t| t.saturating_duration_since(Instant::now()));
            if event.is_some() || ending || left.is_zero() {
                waiter.waiting = false;
                return Ok(event);
            }
            waiter.waiting = true;
            let wake = waiter.wake.clone();
            self.quiet.notify_all();
            state = match wake.wait_timeout(state, left) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }
}

impl State {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn complete(&mut self, cq: u64, wc: Completion) {
        let Some(cq) = self.cqs.get_mut(&cq) else { return };
        cq.queue.push_back(wc);
        assert!(cq.queue.len() <= cq.entries, "a completion queue overflows");
        if std::mem::take(&mut cq.armed)
            && let Some(channel) = cq.channel.and_then(|c| self.channels.get_mut(&c))
        {
            channel.push(cq.cookie);
        }
    }

    /// Moves a queue pair to error: everything is flushed.
    fn kill(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        qp.dead = true;
        qp.open = 0;
        let (send_cq, recv_cq) = (qp.send_cq, qp.recv_cq);
        let sends: Vec<u64> = qp.sq.drain(..).map(|p| p.wr_id).collect();
        let recvs: Vec<u64> = qp.recvs.drain(..).map(|(wr_id, _)| wr_id).collect();
        for (cq, wr_ids) in [(send_cq, sends), (recv_cq, recvs)] {
            for wr_id in wr_ids {
                self.complete(cq, failed(qpn, wr_id, WcStatus::FlushError));
            }
        }
    }

    /// Puts a work request into a send queue, where it is executed at once.
    fn post(&mut self, qpn: u32, posted: Posted) -> Result<(), PostError> {
        let hold = self.hold;
        let qp = self.qps.get_mut(&qpn).ok_or(PostError::NoQueuePair)?;
        if qp.dead {
            let cq = qp.send_cq;
            self.complete(cq, failed(qpn, posted.wr_id, WcStatus::FlushError));
            return Ok(());
        }
        assert!(qp.sq.len() < qp.caps.max_send_wr as usize, "a send queue overflows");
        qp.sq.push_back(posted);
        if !hold {
            self.acknowledge(qpn);
        }
        Ok(())
    }

    /// Completes the sends of a queue pair, as far as the last signalled one.
    fn acknowledge(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        let cq = qp.send_cq;
        let Some(last) = qp.sq.iter().rposition(|p| p.signalled) else {
            return;
        };
        let done: Vec<Posted> = qp.sq.drain(..=last).filter(|p| p.signalled).collect();
        for p in done {
            let wc = Completion {
                wr_id: p.wr_id,
                opcode: p.opcode,
                qpn: Qpn::new(qpn),
                ..Completion::default()
            };
            self.complete(cq, wc);
        }
    }

    /// The bytes that a work request of a queue pair may use: the queue pair's domain and the region's must be one.
    fn local(&self, pd: u64, sge: &Sge) -> &[AtomicU8] {
        let region = self.regions.get(&sge.lkey.0).expect("a local key of a region");
        assert_eq!(region.pd, pd, "memory of another protection domain");
        let start = sge.addr.checked_sub(region.addr).expect("an address in the region") as usize;
        let range = start..start + sge.length as usize;
        region.bytes.get(range).expect("a range in the region")
    }

    fn gather(&self, pd: u64, payload: &Payload<'_>) -> Vec<u8> {
        match payload {
            Payload::Inline(bytes) => bytes.to_vec(),
            Payload::Sges(sges) => {
                let parts = sges.iter().flat_map(|sge| self.local(pd, sge));
                parts.map(|b| b.load(Relaxed)).collect()
            }
        }
    }

    /// Why the server is not at rest.
    fn busy(&self, held: usize) -> Option<&'static str> {
        // A channel without a thread may get one later; nothing is done with it until then.
        let untouched = |(number, w): (&u64, &Waiter<u64>)| {
            let empty = |cq: &CqState| cq.channel != Some(*number) || cq.queue.is_empty();
            !w.started && w.events.is_empty() && self.cqs.values().all(empty)
        };
        if !self.channels.iter().all(|(n, w)| w.idle() || untouched((n, w))) {
            return Some("a thread works on completions");
        }
        if !self.cm.values().all(Waiter::idle) {
            return Some("a thread works on connection events");
        }
        let open: usize = self.qps.values().map(|qp| qp.open).sum();
        if open > held && !self.hold {
            return Some("a request is not answered");
        }
        let ended = self.qps.values().any(|qp| qp.ended);
        (ended && held == 0).then_some("a connection that was ended is still there")
    }

    fn left(&self) -> [usize; 6] {
        [
            self.channels.len(),
            self.cm.len(),
            self.cqs.len(),
            self.qps.len(),
            self.regions.len(),
            self.opened.len(),
        ]
    }
}

fn failed(qpn: u32, wr_id: u64, status: WcStatus) -> Completion {
    Completion {
        wr_id,
        status,
        qpn: Qpn::new(qpn),
        ..Completion::default()
    }
}

/// What the thread does that plays the clients.
impl Fake {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Shared {
            state: Mutex::default(),
            quiet: Condvar::new(),
        }))
    }

    /// A client wants to connect.
    pub(crate) fn request(&self, local: SocketAddr, peer: SocketAddr, private_data: &[u8]) -> Id {
        let (id, listener) = (self.id(local, Some(peer)), self.id(local, None));
        let event = CmEvent {
            id: listener,
            kind: CmEventKind::ConnectRequest {
                id: id.clone(),
                private_data: private_data.to_vec(),
                initiator_depth: 0,
                responder_resources: 0,
            },
        };
        self.push(event);
        id
    }

    /// Something happens to a connection.
    pub(crate) fn event(&self, id: &Id, kind: CmEventKind<Id>) {
        self.push(CmEvent { id: id.clone(), kind });
    }

    fn push(&self, event: CmEvent<Id>) {
        let mut state = self.0.lock();
        let channel = state.listening;
        match channel.and_then(|c| state.cm.get_mut(&c)) {
            Some(channel) => channel.push(event),
            None => {
                // Its ids take the lock when they go.
                drop(state);
                drop(event);
            }
        }
    }

    pub(crate) fn answer(&self, id: &Id) -> Option<Answer> {
        self.0.lock().ids.get(&id.0.handle)?.answer.clone()
    }

    /// A message comes. Without a receive for it nothing happens; one that does not fit ends the queue pair.
    pub(crate) fn deliver(&self, id: &Id, message: Message<'_>) -> bool {
        let mut state = self.0.lock();
        let Some(qpn) = state.ids.get(&id.0.handle).and_then(|i| i.qp) else {
            return false;
        };
        let Some(qp) = state.qps.get_mut(&qpn).filter(|qp| !qp.dead) else {
            return false;
        };
        let Some((wr_id, sge)) = qp.recvs.pop_front() else {
            return false;
        };
        let (cq, pd) = (qp.recv_cq, qp.pd);
        let (bytes, imm, opcode) = match message {
            Message::Send(bytes) => (bytes, None, WcOpcode::Recv),
            Message::SendWithImm(bytes, imm) => (bytes, Some(imm), WcOpcode::Recv),
            Message::WriteWithImm(imm) => (&[][..], Some(imm), WcOpcode::RecvRdmaWithImm),
        };
        if opcode == WcOpcode::RecvRdmaWithImm && matches!(imm.map(Imm::decode), Some(Ok(Imm::IoReq(_)))) {
            qp.open += 1;
        }
        if bytes.len() > sge.map_or(0, |s| s.length as usize) {
            state.complete(cq, failed(qpn, wr_id, WcStatus::LocalLengthError));
            state.kill(qpn);
            return true;
        }
        if let Some(sge) = sge.filter(|_| !bytes.is_empty()) {
            let room = state.local(pd, &sge);
            room.iter().zip(bytes).for_each(|(to, from)| to.store(*from, Relaxed));
        }
        let wc = Completion {
            wr_id,
            opcode,
            byte_len: bytes.len() as u32,
            imm: imm.unwrap_or(0),
            qpn: Qpn::new(qpn),
            flags: if imm.is_some() {
                WcFlags::WITH_IMM
            } else {
                WcFlags::empty()
            },
            ..Completion::default()
        };
        state.complete(cq, wc);
        true
    }

    /// An RDMA WRITE of a client. False, and nothing is written, if the key does not open the range.
    pub(crate) fn write(&self, key: u32, addr: u64, bytes: &[u8]) -> bool {
        let state = self.0.lock();
        let Some(o) = state.opened.get(&key) else { return false };
        let end = addr.checked_add(bytes.len() as u64);
        if addr < o.start || end.is_none_or(|e| e > o.start + o.len) {
            return false;
        }
        let there = &o.bytes[(addr - o.base) as usize..];
        there.iter().zip(bytes).for_each(|(to, from)| to.store(*from, Relaxed));
        true
    }

    /// The transport gives a connection up: its oldest send fails with this status, everything else is flushed.
    pub(crate) fn fail(&self, id: &Id, status: WcStatus) {
        let mut state = self.0.lock();
        let Some(qpn) = state.ids.get(&id.0.handle).and_then(|i| i.qp) else {
            return;
        };
        let Some(qp) = state.qps.get_mut(&qpn).filter(|qp| !qp.dead) else {
            return;
        };
        let cq = qp.send_cq;
        if let Some(oldest) = qp.sq.pop_front() {
            state.complete(cq, failed(qpn, oldest.wr_id, status));
        }
        state.kill(qpn);
    }

    /// The client has used a key that opens nothing to it: its connection fails.
    pub(crate) fn violate(&self, id: &Id) {
        let mut state = self.0.lock();
        let qpn = state.ids.get(&id.0.handle).and_then(|i| i.qp);
        if let Some((qpn, qp)) = qpn.and_then(|n| Some((n, state.qps.get_mut(&n)?))) {
            qp.violated = true;
            state.kill(qpn);
        }
    }

    /// From now on sends complete or, if held, do not.
    pub(crate) fn hold(&self, hold: bool) {
        let mut state = self.0.lock();
        state.hold = hold;
        if !hold {
            let all: Vec<u32> = state.qps.keys().copied().collect();
            for qpn in all {
                state.acknowledge(qpn);
            }
        }
    }

    pub(crate) fn take_sent(&self, id: &Id) -> Vec<Sent> {
        let mut state = self.0.lock();
        let qpn = state.ids.get(&id.0.handle).and_then(|i| i.qp);
        qpn.and_then(|n| state.qps.get_mut(&n))
            .map_or(Vec::new(), |qp| std::mem::take(&mut qp.sent))
    }

    /// Waits until all threads of the server wait for something, and only so many requests as `held` says are open.
    pub(crate) fn quiet(&self, held: &dyn Fn() -> usize) {
        self.until(|state| state.busy(held()));
    }

    /// Waits from now on end at once: the server is about to be told to stop.
    pub(crate) fn end(&self) {
        let mut state = self.0.lock();
        state.ending = true;
        state.channels.values().for_each(|w| w.wake.notify_all());
        state.cm.values().for_each(|w| w.wake.notify_all());
    }

    /// Waits until nothing is left of the server's objects.
    pub(crate) fn empty(&self) {
        self.until(|state| (state.left() != [0; 6]).then_some("objects are left of a server that has ended"));
    }

    fn until(&self, busy: impl Fn(&State) -> Option<&'static str>) {
        let until = Instant::now() + PATIENCE;
        let mut state = self.0.lock();
        while let Some(why) = busy(&state) {
            assert!(Instant::now() < until, "{why}: {:?}", state.left());
            state = match self.0.quiet.wait_timeout(state, Duration::from_millis(100)) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    fn id(&self, local: SocketAddr, peer: Option<SocketAddr>) -> Id {
        let mut state = self.0.lock();
        let handle = state.number();
        state.ids.insert(handle, IdState::default());
        Id(Arc::new(IdInner {
            handle,
            local,
            peer,
            shared: self.0.clone(),
        }))
    }
}

impl Provider for Fake {
    type Pd = u64;
    type Channel = Channel;
    type Cq = Cq;
    type Mr = Region;
    type Revocable = Revocable;
    type Qp = Qp;
    type CmId = Id;
    type CmChannel = Events;

    fn limits(&self) -> DeviceLimits {
        DeviceLimits::software(1)
    }

    fn alloc_pd(&self) -> Result<u64, VerbsError> {
        Ok(self.0.lock().number())
    }

    fn create_channel(&self) -> Result<Channel, VerbsError> {
        let mut state = self.0.lock();
        let number = state.number();
        state.channels.insert(number, Waiter::new());
        Ok(Channel(Arc::new(Handle(number, self.0.clone(), |state, n| {
            state.channels.remove(&n);
        }))))
    }

    fn create_cq(&self, entries: u32, channel: Option<&Channel>, cookie: u64) -> Result<Cq, VerbsError> {
        let mut state = self.0.lock();
        let number = state.number();
        let cq = CqState {
            entries: entries as usize,
            channel: channel.map(|c| c.0.0),
            cookie,
            armed: false,
            queue: VecDeque::new(),
        };
        state.cqs.insert(number, cq);
        Ok(Cq(Arc::new(Handle(number, self.0.clone(), |state, n| {
            state.cqs.remove(&n);
        }))))
    }

    fn alloc_mr(&self, pd: &u64, len: usize, access: AccessFlags) -> Result<Region, VerbsError> {
        let bytes: Bytes = (0..len).map(|_| AtomicU8::new(0)).collect();
        let mut state = self.0.lock();
        let key = state.number() as u32;
        let addr = bytes.as_ptr() as u64;
        let region = RegionState {
            bytes: bytes.clone(),
            addr,
            pd: *pd,
        };
        state.regions.insert(key, region);
        if access.contains(AccessFlags::REMOTE_WRITE) {
            let opened = Opened {
                bytes: bytes.clone(),
                base: addr,
                start: addr,
                len: len as u64,
            };
            state.opened.insert(key, opened);
        }
        Ok(Region {
            bytes,
            pd: *pd,
            handle: Handle(key.into(), self.0.clone(), |state, n| {
                state.regions.remove(&(n as u32));
                state.opened.remove(&(n as u32));
            }),
        })
    }

    fn alloc_revocable(&self, pd: &u64) -> Result<Revocable, VerbsError> {
        Ok(Revocable {
            key: AtomicU32::new(0),
            pd: *pd,
            shared: self.0.clone(),
        })
    }

    fn create_qp(&self, pd: &u64, init: &QpInit<'_, Cq>) -> Result<Qp, VerbsError> {
        let mut state = self.0.lock();
        let number = state.number();
        let qp = QpState {
            pd: *pd,
            send_cq: init.send_cq.0.0,
            recv_cq: init.recv_cq.0.0,
            caps: init.caps,
            recvs: VecDeque::new(),
            sq: VecDeque::new(),
            dead: false,
            violated: false,
            ended: false,
            open: 0,
            sent: Vec::new(),
        };
        state.qps.insert(number as u32, qp);
        Ok(Qp(Arc::new(Handle(number, self.0.clone(), |state, n| {
            state.qps.remove(&(n as u32));
        }))))
    }

    fn create_cm_channel(&self) -> Result<Events, VerbsError> {
        let mut state = self.0.lock();
        let number = state.number();
        state.cm.insert(number, Waiter::new());
        Ok(Events(Arc::new(EventsInner(number, self.0.clone()))))
    }

    fn listen(&self, channel: &Events, addr: SocketAddr, _backlog: u32) -> Result<Id, VerbsError> {
        self.0.lock().listening = Some(channel.0.0);
        Ok(self.id(addr, None))
    }

    fn connect(&self, _: &Events, _: Option<IpAddr>, _: SocketAddr, _: &Qp, _: ConnParams) -> Result<Id, VerbsError> {
        Err(VerbsError::Unsupported("a server connects to nobody"))
    }
}

/// A number whose object goes with the last owner.
pub(crate) struct Handle(u64, Arc<Shared>, fn(&mut State, u64));

impl Drop for Handle {
    fn drop(&mut self) {
        (self.2)(&mut self.1.lock(), self.0);
        self.1.quiet.notify_all();
    }
}

#[derive(Clone)]
pub(crate) struct Channel(Arc<Handle>);

impl CompletionChannel for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        NO_FILE.as_fd()
    }

    fn wait(&self, timeout: Option<Duration>) -> Result<Option<u64>, VerbsError> {
        self.0.1.wait(timeout, |state| state.channels.get_mut(&self.0.0))
    }
}

#[derive(Clone)]
pub(crate) struct Cq(Arc<Handle>);

impl CompletionQueue for Cq {
    fn poll(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize, VerbsError> {
        let mut guard = self.0.1.lock();
        let state = &mut *guard;
        let cq = state.cqs.get_mut(&self.0.0).ok_or(VerbsError::Closed)?;
        if let Some(channel) = cq.channel.and_then(|c| state.channels.get_mut(&c)) {
            channel.started = true;
        }
        let n = cq.queue.len().min(max);
        out.extend(cq.queue.drain(..n));
        Ok(n)
    }

    fn arm(&self, _solicited_only: bool) -> Result<(), VerbsError> {
        if let Some(cq) = self.0.1.lock().cqs.get_mut(&self.0.0) {
            cq.armed = true;
        }
        Ok(())
    }
}

pub(crate) struct Region {
    bytes: Bytes,
    pd: u64,
    handle: Handle,
}

impl Region {
    fn part(&self, offset: usize, len: usize) -> Result<&[AtomicU8], RangeError> {
        let end = offset.checked_add(len);
        let part = end.and_then(|end| self.bytes.get(offset..end));
        part.ok_or(RangeError {
            offset,
            len,
            size: self.bytes.len(),
        })
    }
}

impl MemoryRegion for Region {
    fn addr(&self) -> u64 {
        self.bytes.as_ptr() as u64
    }

    fn len(&self) -> usize {
        self.bytes.len()
    }

    fn lkey(&self) -> LKey {
        LKey(self.handle.0 as u32)
    }

    fn rkey(&self) -> RKey {
        RKey(self.handle.0 as u32)
    }

    fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), RangeError> {
        let part = self.part(offset, out.len())?;
        out.iter_mut().zip(part).for_each(|(to, from)| *to = from.load(Relaxed));
        Ok(())
    }

    fn write(&self, offset: usize, data: &[u8]) -> Result<(), RangeError> {
        let part = self.part(offset, data.len())?;
        part.iter().zip(data).for_each(|(to, from)| to.store(*from, Relaxed));
        Ok(())
    }

    fn as_ptr(&self) -> *mut u8 {
        self.bytes.as_ptr().cast::<u8>().cast_mut()
    }
}

pub(crate) struct Revocable {
    /// 0 while it is closed.
    key: AtomicU32,
    pd: u64,
    shared: Arc<Shared>,
}

impl RevocableRegion for Revocable {
    fn rkey(&self) -> RKey {
        RKey(self.key.load(SeqCst))
    }
}

impl Drop for Revocable {
    fn drop(&mut self) {
        self.shared.lock().opened.remove(self.key.get_mut());
        self.shared.quiet.notify_all();
    }
}

#[derive(Clone)]
pub(crate) struct Qp(Arc<Handle>);

impl Qp {
    fn number(&self) -> u32 {
        self.0.0 as u32
    }

    fn domain(&self, state: &State) -> Result<u64, PostError> {
        state
            .qps
            .get(&self.number())
            .map(|qp| qp.pd)
            .ok_or(PostError::NoQueuePair)
    }

    fn post_one(&self, wr: &SendWr<'_>) -> Result<(), PostError> {
        let mut state = self.0.1.lock();
        let pd = self.domain(&state)?;
        let bytes = state.gather(pd, &wr.payload);
        let (imm, opcode) = match wr.op {
            SendOp::Send | SendOp::SendWithInv(_) => (None, WcOpcode::Send),
            SendOp::SendWithImm(imm) => (Some(imm), WcOpcode::Send),
            SendOp::Write(_) => (None, WcOpcode::RdmaWrite),
            SendOp::WriteWithImm(_, imm) => (Some(imm), WcOpcode::RdmaWrite),
            op => panic!("a server that posts {op:?}"),
        };
        if let Some(qp) = state.qps.get_mut(&self.number()).filter(|qp| !qp.dead) {
            if matches!(imm.map(Imm::decode), Some(Ok(Imm::IoRsp(_)))) {
                qp.open = qp.open.checked_sub(1).expect("an answer to a request");
            }
            qp.sent.push(Sent { op: wr.op, bytes });
        }
        state.post(self.number(), posted(wr.wr_id, opcode, wr.flags))?;
        self.0.1.quiet.notify_all();
        Ok(())
    }
}

fn posted(wr_id: u64, opcode: WcOpcode, flags: SendFlags) -> Posted {
    Posted {
        wr_id,
        opcode,
        signalled: flags.contains(SendFlags::SIGNALED),
    }
}

impl QueuePair for Qp {
    type Mr = Region;
    type Revocable = Revocable;

    fn qpn(&self) -> Qpn {
        Qpn::new(self.number())
    }

    fn post_send(&self, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        wrs.iter()
            .enumerate()
            .try_for_each(|(i, wr)| self.post_one(wr).map_err(|e| (i, e)))
    }

    fn post_recv(&self, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        let mut state = self.0.1.lock();
        let qpn = self.number();
        for wr in wrs {
            let Some(qp) = state.qps.get_mut(&qpn) else {
                return Err((0, PostError::NoQueuePair));
            };
            if qp.dead {
                let cq = qp.recv_cq;
                state.complete(cq, failed(qpn, wr.wr_id, WcStatus::FlushError));
                continue;
            }
            assert!(
                qp.recvs.len() < qp.caps.max_recv_wr as usize,
                "a receive queue overflows"
            );
            qp.recvs.push_back((wr.wr_id, wr.sges.first().copied()));
        }
        Ok(())
    }

    fn post_grant(
        &self,
        region: &Revocable,
        grant: &Grant<'_, Region>,
        wr_id: u64,
        flags: SendFlags,
    ) -> Result<RKey, PostError> {
        let mut state = self.0.1.lock();
        let pd = self.domain(&state)?;
        assert!(
            region.pd == pd && grant.region.pd == pd,
            "a key of another protection domain"
        );
        assert!(
            grant.region.part(grant.offset, grant.len).is_ok(),
            "a key for what is outside"
        );
        let key = state.number() as u32;
        let former = region.key.swap(key, SeqCst);
        state.opened.remove(&former);
        let base = grant.region.addr();
        let opened = Opened {
            bytes: grant.region.bytes.clone(),
            base,
            start: base + grant.offset as u64,
            len: grant.len as u64,
        };
        state.opened.insert(key, opened);
        state.post(self.number(), posted(wr_id, WcOpcode::FastRegister, flags))?;
        Ok(RKey(key))
    }

    fn post_revoke(&self, region: &Revocable, wr_id: u64, flags: SendFlags) -> Result<(), PostError> {
        let mut state = self.0.1.lock();
        assert_eq!(region.pd, self.domain(&state)?, "a key of another protection domain");
        state.opened.remove(&region.key.load(SeqCst));
        state.post(self.number(), posted(wr_id, WcOpcode::LocalInvalidate, flags))
    }

    fn modify(&self, _: &QpAttr) -> Result<(), VerbsError> {
        Ok(())
    }

    fn query(&self) -> Result<QpAttr, VerbsError> {
        Ok(QpAttr::default())
    }

    fn access_violated(&self) -> bool {
        self.0.1.lock().qps.get(&self.number()).is_some_and(|qp| qp.violated)
    }
}

struct IdInner {
    handle: u64,
    local: SocketAddr,
    peer: Option<SocketAddr>,
    shared: Arc<Shared>,
}

impl Drop for IdInner {
    fn drop(&mut self) {
        self.shared.lock().ids.remove(&self.handle);
    }
}

#[derive(Clone)]
pub(crate) struct Id(Arc<IdInner>);

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Id({})", self.0.handle)
    }
}

impl Id {
    fn set_answer(&self, answer: Answer, qp: Option<u32>) -> Result<(), VerbsError> {
        let mut state = self.0.shared.lock();
        let id = state.ids.get_mut(&self.0.handle).ok_or(VerbsError::Closed)?;
        if id.answer.is_some() || self.0.peer.is_none() {
            return Err(VerbsError::State("not a waiting request".into()));
        }
        (id.answer, id.qp) = (Some(answer), qp);
        Ok(())
    }
}

impl CmId for Id {
    type Qp = Qp;

    fn handle(&self) -> u64 {
        self.0.handle
    }

    fn local_addr(&self) -> SocketAddr {
        self.0.local
    }

    fn peer_addr(&self) -> Option<SocketAddr> {
        self.0.peer
    }

    fn accept(&self, qp: &Qp, params: ConnParams) -> Result<(), VerbsError> {
        self.set_answer(Answer::Accepted(params.private_data), Some(qp.number()))
    }

    fn reject(&self, private_data: &[u8]) -> Result<(), VerbsError> {
        self.set_answer(Answer::Rejected(private_data.to_vec()), None)
    }

    fn disconnect(&self) -> Result<(), VerbsError> {
        let mut state = self.0.shared.lock();
        if let Some(qpn) = state.ids.get(&self.0.handle).and_then(|i| i.qp) {
            state.kill(qpn);
            if let Some(qp) = state.qps.get_mut(&qpn) {
                qp.ended = true;
            }
        }
        Ok(())
    }
}

struct EventsInner(u64, Arc<Shared>);

impl Drop for EventsInner {
    fn drop(&mut self) {
        let events = self.1.lock().cm.remove(&self.0);
        self.1.quiet.notify_all();
        // Its ids take the lock when they go.
        drop(events);
    }
}

#[derive(Clone)]
pub(crate) struct Events(Arc<EventsInner>);

impl CmChannel for Events {
    type Id = Id;

    fn as_fd(&self) -> BorrowedFd<'_> {
        NO_FILE.as_fd()
    }

    fn wait(&self, timeout: Option<Duration>) -> Result<Option<CmEvent<Id>>, VerbsError> {
        self.0.1.wait(timeout, |state| state.cm.get_mut(&self.0.0))
    }
}
