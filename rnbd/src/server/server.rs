//! The server's state machine: requests of clients become operations of its disks, and their ends become answers. Devices are opened
//! and closed by the host.

use core::{fmt::Display, ops::Range, time::Duration};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use roce_verbs::Instant;
use rtrs::{
    Cx, Direction,
    server::{
        Server as Rtrs,
        request::{Output as RtrsOutput, Request, RequestKey, SessionKey, SessionOpened},
    },
    throttle::Throttle,
};
use zerocopy::IntoBytes;

use super::{
    action::{Identity, OpenRefused, Opened, Output, Ticket},
    device::{Device, Tenancy},
    disk::{DiskOp, Disks, Op, StoreId},
    limits::{Limits, ServerCounters},
    session::{OpenRequest, Session},
    transport::{OverRtrs, Transport},
};
use crate::{
    block::BlockOp,
    errno::Errno,
    proto::{AccessMode, ClientMsg, MsgIo, MsgOpen, MsgOpenRsp, MsgSessInfo, VERSION_MAJOR},
    slab::Slab,
};

/// One log line of a kind that clients can cause is written as often as this at most.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// Ended operations that are kept to be used again.
const MAX_SPARE: usize = 256;

/// Job of the host that concerns a device.
#[derive(Debug)]
pub(super) enum Job {
    /// Opens it, for this request.
    Open(Box<OpenRequest>, AccessMode, Tenancy),
    /// Closes it; then the request is answered, and whoever had it open may open it again.
    Close(Option<RequestKey>, Option<Tenancy>),
}

/// Log lines that clients can cause, of all sessions: those of one would start again with the next.
#[derive(Debug)]
struct Logs {
    sessions: Throttle,
    devices: Throttle,
    refused: Throttle,
    malformed: Throttle,
}

/// RNBD's part of a server, without I/O: takes requests from RTRS, gives operations to its disks, and answers. Each request is answered
/// once, those of a session that is gone as well.
#[derive(Debug)]
pub struct Server<D: Disks> {
    disks: D,
    limits: Limits,
    /// Devices open, being opened or being closed: of all servers that share the limit.
    open: Arc<AtomicUsize>,
    pub(super) sessions: BTreeMap<SessionKey, Session>,
    /// Open devices, and those that are to be closed after their last request.
    pub(super) devices: Slab<Device>,
    /// Operations that the disks have.
    in_flight: usize,
    /// Operations that have ended, to be used again.
    spare: Vec<Box<Op<D::Part>>>,
    jobs: Slab<Job>,
    /// Devices that are being closed.
    leaving: Vec<Tenancy>,
    counters: ServerCounters,
    logs: Logs,
    outputs: VecDeque<Output>,
}

impl<D: Disks> Server<D> {
    /// A server without sessions, and with these disks.
    pub fn new(limits: Limits, disks: D) -> Self {
        Self::sharing(limits, Arc::default(), disks)
    }

    /// One of the servers of several loops, which together have no more devices open than [`Limits::max_open`]: they share the count.
    pub fn sharing(limits: Limits, open: Arc<AtomicUsize>, disks: D) -> Self {
        Self {
            disks,
            limits,
            open,
            sessions: BTreeMap::new(),
            devices: Slab::default(),
            in_flight: 0,
            spare: Vec::new(),
            jobs: Slab::default(),
            leaving: Vec::new(),
            counters: ServerCounters::default(),
            logs: Logs {
                sessions: Throttle::new(LOG_INTERVAL),
                devices: Throttle::new(LOG_INTERVAL),
                refused: Throttle::new(LOG_INTERVAL),
                malformed: Throttle::new(LOG_INTERVAL),
            },
            outputs: VecDeque::new(),
        }
    }

    /// Returns the counters.
    pub fn counters(&self) -> ServerCounters {
        self.counters
    }

    /// Whether no device is open, or being opened or closed: what was written is durable.
    pub fn is_idle(&self) -> bool {
        self.devices.len() == 0 && self.jobs.len() == 0 && self.in_flight == 0
    }

    /// The disks.
    pub fn disks(&self) -> &D {
        &self.disks
    }

    /// The disks, to open and close devices, and to run.
    pub fn disks_mut(&mut self) -> &mut D {
        &mut self.disks
    }

    /// Processes what RTRS and the disks have. Appends to `outputs` what is for the host. Returns whether there was anything.
    pub fn work(&mut self, rtrs: &mut Rtrs, cx: &mut Cx<'_>, outputs: &mut Vec<Output>) -> bool {
        let mut worked = false;
        while let Some(output) = rtrs.poll_output() {
            worked = true;
            let transport = &mut OverRtrs { rtrs, cx };
            self.rtrs(transport, output);
        }
        worked |= self.poll_disks(&mut OverRtrs { rtrs, cx });
        worked |= !self.outputs.is_empty();
        outputs.extend(self.outputs.drain(..));
        worked
    }

    /// Takes an output of RTRS.
    pub fn rtrs(&mut self, transport: &mut impl Transport, output: RtrsOutput) {
        match &output {
            RtrsOutput::Request(request) => return self.request(transport, request),
            RtrsOutput::SessionOpened(opened) => self.session_opened(transport.now(), opened),
            RtrsOutput::SessionClosed { session, .. } => self.session_closed(transport, *session),
            _ => {}
        }
        self.outputs.push_back(Output::Rtrs(output));
    }

    /// Takes what the disks have ended. Returns whether there was anything.
    pub fn poll_disks(&mut self, transport: &mut impl Transport) -> bool {
        let mut worked = false;
        while let Some(op) = self.disks.poll() {
            worked = true;
            self.ended(transport, op);
        }
        while let Some((store, size)) = self.disks.poll_resized() {
            self.resized(store, size);
        }
        worked
    }

    /// Returns the next output for the host.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    fn session_opened(&mut self, now: Instant, opened: &SessionOpened) {
        let (name, peer) = (opened.name.clone(), opened.peer);
        if let Some(suppressed) = self.logs.sessions.pass(now) {
            tracing::info!(session = name, %peer, suppressed, "session opened");
        }
        // A client that comes back may have requests of before on the way, which must not find another device under their number.
        let first = (now.as_nanos() / 1000) as u32;
        self.sessions.insert(opened.session, Session::new(name, peer, first));
    }

    /// Its devices are closed, each after its last request; one that is being opened is closed when it has come.
    fn session_closed(&mut self, transport: &mut impl Transport, key: SessionKey) {
        self.disks.forget(key);
        let Some(session) = self.sessions.remove(&key) else {
            return;
        };
        if let Some(suppressed) = self.logs.sessions.pass(transport.now()) {
            tracing::info!(session = session.name, peer = %session.peer, suppressed, "session closed");
        }
        for (_, device) in session.devices() {
            self.finish_device(device, None);
        }
        let opening = self.jobs.iter().filter_map(|(_, job)| match job {
            Job::Open(open, _, tenancy) if open.request.session == key => Some(tenancy.clone()),
            _ => None,
        });
        self.leaving.extend(opening);
        for open in session.into_waiting() {
            answer(transport, open.request, Err(Errno::ENODEV));
        }
    }

    fn complain(&mut self, now: Instant, session: SessionKey, what: impl Display) {
        self.counters.malformed += 1;
        if let Some(suppressed) = self.logs.malformed.pass(now) {
            tracing::warn!(session = self.name(session), suppressed, "{what}");
        }
    }

    fn name(&self, session: SessionKey) -> &str {
        self.sessions.get(&session).map_or("", |s| &s.name)
    }

    fn request(&mut self, transport: &mut impl Transport, request: &Request) {
        let (key, now) = (request.key, transport.now());
        if !self.sessions.contains_key(&key.session) {
            return answer(transport, key, Err(Errno::ENODEV));
        }
        match ClientMsg::parse(&request.header) {
            Ok(ClientMsg::Io(m)) => self.io(transport, &m, request),
            Ok(ClientMsg::SessInfo(m)) => {
                let response = MsgSessInfo::response(m.ver.min(VERSION_MAJOR));
                match room(request, size_of_val(&response)) {
                    Some(at) => answer_with(transport, key, at, response.as_bytes()),
                    None => answer(transport, key, Err(Errno::EINVAL)),
                }
            }
            Ok(ClientMsg::Open(m)) => self.open(transport, m, request),
            Ok(ClientMsg::Close(m)) => self.close(transport, m.device_id.get(), key),
            Err(e) => {
                self.complain(now, key.session, e);
                answer(transport, key, Err(Errno::EINVAL));
            }
        }
    }
}

fn answer(transport: &mut impl Transport, request: RequestKey, result: Result<(), Errno>) {
    transport.answer(request, result.map_or_else(Errno::raw, |()| 0));
}

/// Answers a read with a message, for which there is room.
fn answer_with(transport: &mut impl Transport, request: RequestKey, at: usize, message: &[u8]) {
    let written = transport.write(request, at, message);
    answer(transport, request, written.then_some(()).ok_or(Errno::EINVAL));
}

/// Returns the offset in the session's memory of an answer of `len` bytes to a request, if there is room.
fn room(request: &Request, len: usize) -> Option<usize> {
    let fits = request.direction == Direction::Read && request.data_len as usize >= len;
    fits.then_some(request.data_offset)
}

/// Block requests.
impl<D: Disks> Server<D> {
    fn io(&mut self, transport: &mut impl Transport, m: &MsgIo, request: &Request) {
        let key = request.key;
        let id = m.device_id.get();
        let found = self.sessions.get(&key.session).and_then(|s| s.device(id));
        let (Some(found), Some(device)) = (found, found.and_then(|d| self.devices.get_mut(d))) else {
            let text = format_args!("request for device {id}, which is not open");
            self.complain(transport.now(), key.session, text);
            return answer(transport, key, Err(Errno::ENOTCONN));
        };
        let mut op = self.spare.pop().unwrap_or_else(|| {
            let flush = DiskOp::flush(device.store);
            Box::new(Op::new(key, flush, None))
        });
        let filled = op.fill(m, request, device.store);
        self.counters.malformed += u64::from(filled.is_err());
        // A session has its memory as long as it has requests.
        let memory = transport.memory(key.session).ok_or(Errno::ECONNABORTED);
        let checked = filled.and_then(|()| op.check(&device.geometry)).and(memory);
        match checked {
            Ok(memory) => {
                device.begin();
                op.device = found;
                op.memory = Some(Arc::clone(memory));
                self.in_flight += 1;
                self.disks.submit(op);
            }
            Err(e) => {
                self.spare.push(op);
                self.counters.requests += 1;
                self.counters.failed += 1;
                answer(transport, key, Err(e));
            }
        }
    }

    /// An operation has ended.
    fn ended(&mut self, transport: &mut impl Transport, mut op: Box<Op<D::Part>>) {
        if let (Some(next), Ok(())) = (op.next.take(), op.result) {
            op.disk = next;
            return self.disks.submit(op);
        }
        self.in_flight -= 1;
        // All of the client's room is sent: nothing of earlier requests shall be.
        if op.result.is_ok() && !zero(transport, op.id, op.tail.clone()) {
            op.result = Err(Errno::EIO);
        }
        let counters = &mut self.counters;
        counters.requests += 1;
        match (op.result, op.disk.op) {
            (Err(_), _) => counters.failed += 1,
            (Ok(()), BlockOp::Read) => counters.read_bytes += op.disk.len,
            (Ok(()), BlockOp::Write { .. }) => counters.written_bytes += op.disk.len,
            (Ok(()), _) => {}
        }
        answer(transport, op.id, op.result);
        if let Some(device) = self.devices.get_mut(op.device) {
            device.end();
        }
        // After the answer, which need not wait for it.
        self.close_if_unused(op.device);
        if self.spare.len() < MAX_SPARE {
            op.memory = None;
            self.spare.push(op);
        }
    }
}

/// Clears bytes of a session's memory. False: they are not all in it.
fn zero(transport: &mut impl Transport, request: RequestKey, range: Range<usize>) -> bool {
    const ZEROES: [u8; 4096] = [0; 4096];
    range.clone().step_by(ZEROES.len()).all(|at| {
        let len = ZEROES.len().min(range.end - at);
        transport.write(request, at, &ZEROES[..len])
    })
}

/// Opening and closing.
impl<D: Disks> Server<D> {
    fn open(&mut self, transport: &mut impl Transport, message: MsgOpen, request: &Request) {
        let key = request.key;
        // An answer that does not fit must not leave a device open.
        let Some(at) = room(request, size_of::<MsgOpenRsp>()) else {
            return answer(transport, key, Err(Errno::EINVAL));
        };
        if let Some(session) = self.sessions.get_mut(&key.session) {
            session.wait(OpenRequest {
                request: key,
                at,
                message,
            });
        }
        self.next_open(transport, key.session);
    }

    /// Begins with the opens that wait, until there is one that takes time.
    fn next_open(&mut self, transport: &mut impl Transport, key: SessionKey) {
        while let Some(open) = self.sessions.get_mut(&key).and_then(Session::begin_open) {
            if self.is_leaving(key, &open) {
                if let Some(session) = self.sessions.get_mut(&key) {
                    session.put_back(open);
                }
                return;
            }
            match self.begin_open(key, &open) {
                Ok(None) => return,
                Ok(Some((id, device))) => self.open_succeeded(transport, &open, id, device),
                Err(e) => self.open_refused(transport, &open, e),
            }
            if let Some(session) = self.sessions.get_mut(&key) {
                session.end_open();
            }
        }
    }

    /// Whether the client has still to leave what it wants to open: it would be in its own way.
    fn is_leaving(&self, key: SessionKey, open: &OpenRequest) -> bool {
        let (session, device) = (self.name(key), open.message.name());
        let is_it = |of: &Tenancy| of.session == session && Some(&of.device[..]) == device;
        self.leaving.iter().any(is_it)
    }

    /// Returns the device if it is open already; else it is being opened.
    fn begin_open(&mut self, key: SessionKey, open: &OpenRequest) -> Result<Option<(u32, u64)>, Errno> {
        let name = open.message.name().ok_or(Errno::EINVAL)?;
        let mode = AccessMode::from_wire(open.message.access_mode).ok_or(Errno::EINVAL)?;
        let session = self.sessions.get(&key).ok_or(Errno::ENODEV)?;
        let named = |device: u64| self.devices.get(device).is_some_and(|d| d.name == name);
        // A client that reconnects opens again what it has open.
        if let Some(found) = session.devices().find(|(_, device)| named(*device)) {
            return Ok(Some(found));
        }
        let full = if session.open() >= self.limits.max_devices {
            Some(Errno::EMFILE)
        } else if !self.take_place() {
            Some(Errno::ENFILE)
        } else {
            None
        };
        if let Some(e) = full {
            self.counters.refused_limit += 1;
            return Err(e);
        }
        let (session_name, name) = (session.name.clone(), name.to_vec());
        let tenancy = Tenancy {
            session: session_name.clone(),
            device: name.clone(),
        };
        self.counters.open += 1;
        self.outputs.push_back(Output::Open {
            ticket: Ticket(self.jobs.insert(Job::Open(Box::new(open.clone()), mode, tenancy))),
            session_name,
            name,
            mode,
        });
        Ok(None)
    }

    /// A device has been opened, or not.
    pub fn opened(&mut self, transport: &mut impl Transport, ticket: Ticket, result: Result<Opened, OpenRefused>) {
        let Some(Job::Open(open, mode, tenancy)) = self.jobs.remove(ticket.0) else {
            return;
        };
        let key = open.request.session;
        match result {
            Ok(opened) if !self.sessions.contains_key(&key) => {
                self.close_by(opened.store, Job::Close(None, Some(tenancy)));
                answer(transport, open.request, Err(Errno::ENODEV));
            }
            // One device under two spellings would be closed under both with the first.
            Ok(opened) if self.has_open(key, &opened.identity) => {
                self.close_by(opened.store, Job::Close(None, None));
                self.open_refused(transport, &open, Errno::EEXIST);
            }
            Ok(opened) => self.enter(transport, &open, mode, opened),
            Err(OpenRefused { errno, identity }) => {
                self.left();
                let twice = identity.is_some_and(|i| self.has_open(key, &i));
                self.open_refused(transport, &open, if twice { Errno::EEXIST } else { errno });
                if !self.sessions.contains_key(&key) {
                    self.has_left(transport, &tenancy);
                }
            }
        }
        if let Some(session) = self.sessions.get_mut(&key) {
            session.end_open();
        }
        self.next_open(transport, key);
    }

    fn has_open(&self, key: SessionKey, identity: &Identity) -> bool {
        let is_it = |device: u64| self.devices.get(device).is_some_and(|d| d.identity == *identity);
        let session = self.sessions.get(&key);
        session.is_some_and(|s| s.devices().any(|(_, device)| is_it(device)))
    }

    fn enter(&mut self, transport: &mut impl Transport, open: &OpenRequest, mode: AccessMode, opened: Opened) {
        let key = open.request.session;
        if let Some(suppressed) = self.logs.devices.pass(transport.now()) {
            tracing::info!(session = self.name(key), image = opened.label, %mode, suppressed, "device opened");
        }
        let name = open.message.name().unwrap_or_default().to_vec();
        let owner = self.name(key).to_owned();
        let device = self.devices.insert(Device::new(name, mode, owner, opened));
        if let Some(session) = self.sessions.get_mut(&key) {
            let id = session.enter(device);
            self.open_succeeded(transport, open, id, device);
        }
    }

    fn open_succeeded(&mut self, transport: &mut impl Transport, open: &OpenRequest, id: u32, device: u64) {
        let Some(response) = self.devices.get(device).map(|d| d.response(id)) else {
            return;
        };
        self.counters.opens += 1;
        answer_with(transport, open.request, open.at, response.as_bytes());
    }

    fn open_refused(&mut self, transport: &mut impl Transport, open: &OpenRequest, e: Errno) {
        self.counters.refused += 1;
        if let Some(suppressed) = self.logs.refused.pass(transport.now()) {
            let session = self.name(open.request.session);
            tracing::warn!(session, request = ?open.message, suppressed, "open refused: {e}");
        }
        answer(transport, open.request, Err(e));
    }

    /// The kernel's server answers success also for a device that is not open.
    fn close(&mut self, transport: &mut impl Transport, id: u32, request: RequestKey) {
        let session = self.sessions.get_mut(&request.session);
        let Some(device) = session.and_then(|s| s.leave(id)) else {
            return answer(transport, request, Ok(()));
        };
        self.log_close(transport.now(), request.session, device);
        self.finish_device(device, Some(request));
    }

    pub(super) fn log_close(&mut self, now: Instant, session: SessionKey, device: u64) {
        if let (Some(suppressed), Some(d)) = (self.logs.devices.pass(now), self.devices.get(device)) {
            let session = self.name(session);
            tracing::info!(session, image = d.label, suppressed, "device closed");
        }
    }

    /// Closes a device after its last request, and answers this request then.
    pub(super) fn finish_device(&mut self, device: u64, request: Option<RequestKey>) {
        if let Some(d) = self.devices.get_mut(device).filter(|d| !d.is_closing()) {
            d.finish(request);
            self.leaving.push(d.tenancy());
        }
        self.close_if_unused(device);
    }

    pub(super) fn close_if_unused(&mut self, device: u64) {
        if self.devices.get(device).is_some_and(Device::may_close)
            && let Some(d) = self.devices.remove(device)
        {
            let tenancy = d.tenancy();
            let (store, request) = d.into_close();
            self.close_by(store, Job::Close(request, Some(tenancy)));
        }
    }

    /// Takes the place of one more device, if there is one.
    fn take_place(&self) -> bool {
        let one_more = |open| (open < self.limits.max_open).then_some(open + 1);
        self.open.fetch_update(SeqCst, SeqCst, one_more).is_ok()
    }

    /// A device has been closed, or was not opened.
    fn left(&mut self) {
        self.counters.open -= 1;
        self.open.fetch_sub(1, SeqCst);
    }

    fn close_by(&mut self, store: StoreId, job: Job) {
        let ticket = Ticket(self.jobs.insert(job));
        self.outputs.push_back(Output::Close { ticket, store });
    }

    /// A device has been closed, as well as that could be done: what could not be made durable stays so.
    pub fn closed(&mut self, transport: &mut impl Transport, ticket: Ticket) {
        let Some(Job::Close(request, tenancy)) = self.jobs.remove(ticket.0) else {
            return;
        };
        self.left();
        if let Some(request) = request {
            answer(transport, request, Ok(()));
        }
        if let Some(of) = tenancy {
            self.has_left(transport, &of);
        }
    }

    /// A client has left a device: it may open it again.
    fn has_left(&mut self, transport: &mut impl Transport, of: &Tenancy) {
        let Some(at) = self.leaving.iter().position(|known| known == of) else {
            return;
        };
        self.leaving.swap_remove(at);
        let named = self.sessions.iter().filter(|(_, s)| s.name == of.session);
        let waiting: Vec<SessionKey> = named.map(|(key, _)| *key).collect();
        for session in waiting {
            self.next_open(transport, session);
        }
    }

    /// An open device has another size than it had, in bytes: clients that open it again are told.
    fn resized(&mut self, store: StoreId, size: u64) {
        let found = self.devices.iter().find(|(_, d)| d.store == store).map(|(key, _)| key);
        if let Some(device) = found.and_then(|key| self.devices.get_mut(key)) {
            device.geometry.size = size;
        }
    }
}
