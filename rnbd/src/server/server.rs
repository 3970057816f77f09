//! The server's state machine: what clients ask for becomes opens, closes and operations of disks, and their ends become
//! answers.

use core::fmt::Display;
use std::collections::{BTreeMap, VecDeque};

use roce_verbs::Instant;
use rtrs::{
    Direction,
    server::{
        Share,
        request::{Output, Request, RequestKey, SessionKey, SessionOpened},
    },
};
use smallvec::SmallVec;
use zerocopy::IntoBytes;

use super::{
    action::{Action, Identity, OpenRefused, Opened, Ticket},
    device::{Device, Tenancy},
    disk::{DiskOp, IoTicket, StoreId},
    limits::{Limits, OwnPlaces, Places, ServerCounters},
    logs::Logs,
    parts::{Coming, Letter, Original, Part},
    request::Io,
    session::{OpenRequest, Session},
};
use crate::{
    block::BlockOp,
    errno::Errno,
    proto::{AccessMode, ClientMsg, IoOp, MsgIo, MsgOpen, MsgOpenRsp, MsgSessInfo, VERSION_MAJOR},
    slab::Slab,
};

/// Job of the loop that concerns a device.
#[derive(Debug)]
pub(super) enum Job {
    /// Opens it, for this request.
    Open(Box<OpenRequest>, AccessMode, Tenancy),
    /// Closes it; then the request is answered, and whoever had it open may open it again.
    Close(Option<RequestKey>, Option<Tenancy>),
    /// Takes over one that another share has opened.
    TakeOver(Box<Coming>),
    /// Closes the part of another share's device.
    ClosePart(Original),
}

/// A block request that the disk works on.
#[derive(Clone, Copy, Debug)]
struct Flight {
    request: RequestKey,
    device: u64,
    store: StoreId,
    io: Io,
    /// The flush that comes first is under way.
    flushing: bool,
}

impl Flight {
    fn operation(&self) -> DiskOp {
        let (op, offset, len, data) = match self.flushing {
            true => (BlockOp::Flush, 0, 0, 0),
            false => (self.io.operation(), self.io.offset, self.io.len, self.io.data),
        };
        DiskOp {
            store: self.store,
            op,
            offset,
            len,
            data,
        }
    }
}

/// RNBD's part of a server, without I/O: it is told what RTRS tells its user and how the disks' work went, and says by
/// [`poll_action`](Self::poll_action) what is to be done. Each request is answered once, those of a session that is gone as
/// well.
#[derive(Debug)]
pub struct Server {
    limits: Limits,
    /// Allocator of the devices' numbers.
    places: Box<dyn Places>,
    pub(super) sessions: BTreeMap<SessionKey, Session>,
    /// Open devices, and those that are to be closed after their last request.
    pub(super) devices: Slab<Device>,
    flights: Slab<Flight>,
    pub(super) jobs: Slab<Job>,
    /// Devices that are being closed.
    leaving: Vec<Tenancy>,
    pub(super) share: Share,
    /// Parts of other shares' devices.
    pub(super) parts: BTreeMap<Original, Part>,
    pub(super) letters: VecDeque<(usize, Letter)>,
    counters: ServerCounters,
    logs: Logs,
    pub(super) actions: VecDeque<Action>,
}

impl Server {
    /// A server without sessions.
    pub fn new(limits: Limits) -> Self {
        let places = OwnPlaces {
            taken: 0,
            most: limits.max_open,
        };
        Self::with_share(limits, Box::new(places), Share::WHOLE)
    }

    /// One share of a server that is in several loops, as the RTRS server beside it is. All ask the same one whether one more device
    /// may be open.
    pub fn with_share(limits: Limits, places: Box<dyn Places>, share: Share) -> Self {
        Self {
            share,
            parts: BTreeMap::new(),
            letters: VecDeque::new(),
            limits,
            places,
            sessions: BTreeMap::new(),
            devices: Slab::default(),
            flights: Slab::default(),
            jobs: Slab::default(),
            leaving: Vec::new(),
            counters: ServerCounters::default(),
            logs: Logs::new(),
            actions: VecDeque::new(),
        }
    }

    /// Returns the counters.
    pub fn counters(&self) -> ServerCounters {
        self.counters
    }

    /// Whether no device is open, or being opened or closed: what was written is durable.
    pub fn is_idle(&self) -> bool {
        self.devices.len() == 0 && self.jobs.len() == 0 && self.flights.len() == 0
    }

    /// Returns the next action.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// RTRS has something to tell. Returns what is not for its user's user: paths that come and go, and memory
    /// that is wanted or not wanted any more.
    pub fn rtrs(&mut self, now: Instant, output: Output) -> Option<Output> {
        match output {
            Output::SessionOpened(opened) => self.session_opened(now, opened),
            Output::Request(request) => self.request(now, &request),
            Output::SessionClosed { session, .. } => self.session_closed(now, session),
            Output::PathUp {
                session, connections, ..
            } => {
                self.path_up(session, connections);
                return Some(output);
            }
            Output::PathDown { .. } | Output::Allocate { .. } | Output::Free(_) => {
                return Some(output);
            }
        }
        None
    }

    fn session_opened(&mut self, now: Instant, opened: SessionOpened) {
        let SessionOpened {
            session,
            name,
            peer,
            connections,
        } = opened;
        if let Some(suppressed) = self.logs.sessions.pass(now) {
            tracing::info!(session = name, %peer, suppressed, "session opened");
        }
        let shares = self.share.others_of_path(connections).collect();
        // A client that comes back may have requests of before on the way, which must not find another device under their number.
        let first = (now.as_nanos() / 1000) as u32;
        self.sessions.insert(session, Session::new(name, peer, shares, first));
    }

    /// Its devices are closed, each after its last request; one that is being opened is closed when it has come.
    fn session_closed(&mut self, now: Instant, key: SessionKey) {
        let Some(session) = self.sessions.remove(&key) else {
            return;
        };
        if let Some(suppressed) = self.logs.sessions.pass(now) {
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
            self.answer(open.request, Err(Errno::ENODEV));
        }
    }

    pub(super) fn answer(&mut self, request: RequestKey, result: Result<(), Errno>) {
        let errno = result.map_or_else(Errno::raw, |()| 0);
        self.actions.push_back(Action::Answer(request, errno));
    }

    fn answer_with(&mut self, request: RequestKey, at: usize, message: &[u8]) {
        self.actions.push_back(Action::AnswerWith {
            request,
            at,
            message: SmallVec::from_slice(message),
        });
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

    fn request(&mut self, now: Instant, request: &Request) {
        let key = request.key;
        if !self.sessions.contains_key(&key.session) {
            return self.answer(key, Err(Errno::ENODEV));
        }
        match ClientMsg::parse(&request.header) {
            Ok(ClientMsg::Io(m)) => self.io(now, &m, request),
            Ok(ClientMsg::SessInfo(m)) => {
                let response = MsgSessInfo::response(m.ver.min(VERSION_MAJOR));
                match room(request, size_of_val(&response)) {
                    Some(at) => self.answer_with(key, at, response.as_bytes()),
                    None => self.answer(key, Err(Errno::EINVAL)),
                }
            }
            Ok(ClientMsg::Open(_) | ClientMsg::Close(_)) if !self.is_home(key.session) => {
                self.complain(
                    now,
                    key.session,
                    "a device is opened or closed over a connection for I/O",
                );
                self.answer(key, Err(Errno::EINVAL));
            }
            Ok(ClientMsg::Open(m)) => self.open(now, m, request),
            Ok(ClientMsg::Close(m)) => self.close(now, m.device_id.get(), key),
            Err(e) => {
                self.complain(now, key.session, e);
                self.answer(key, Err(Errno::EINVAL));
            }
        }
    }
}

/// Returns the offset in the session's memory of an answer of `len` bytes to a request, if there is room.
fn room(request: &Request, len: usize) -> Option<usize> {
    let fits = request.direction == Direction::Read && request.data_len as usize >= len;
    fits.then_some(request.data_offset)
}

/// Block requests.
impl Server {
    fn io(&mut self, now: Instant, m: &MsgIo, request: &Request) {
        let key = request.key;
        let id = m.device_id.get();
        let found = self.sessions.get(&key.session).and_then(|s| s.device(id));
        let (Some(found), Some(device)) = (found, found.and_then(|d| self.devices.get_mut(d))) else {
            self.complain(
                now,
                key.session,
                format_args!("request for device {id}, which is not open"),
            );
            return self.answer(key, Err(Errno::ENOTCONN));
        };
        let io = match Io::check(m, request) {
            Ok(io) => io,
            Err(e) => {
                self.counters.malformed += 1;
                return self.io_ended(key, None, Err(e));
            }
        };
        if let Err(e) = io.permitted(&device.geometry) {
            return self.io_ended(key, None, Err(e));
        }
        device.begin();
        let flight = Flight {
            request: key,
            device: found,
            store: device.store,
            io,
            flushing: io.flush_first(),
        };
        self.start(flight);
    }

    fn start(&mut self, flight: Flight) {
        let ticket = IoTicket(self.flights.insert(flight));
        let action = Action::Io(ticket, flight.request.session, flight.operation());
        self.actions.push_back(action);
    }

    /// An operation has ended. What was read is in the session's memory.
    pub fn io_done(&mut self, ticket: IoTicket, result: Result<(), Errno>) {
        let Some(flight) = self.flights.remove(ticket.0) else {
            return;
        };
        if flight.flushing && result.is_ok() {
            return self.start(Flight {
                flushing: false,
                ..flight
            });
        }
        self.io_ended(flight.request, Some(&flight.io), result);
        if let Some(device) = self.devices.get_mut(flight.device) {
            device.end();
        }
        // After the answer, which need not wait for it.
        self.close_if_unused(flight.device);
    }

    fn io_ended(&mut self, request: RequestKey, io: Option<&Io>, result: Result<(), Errno>) {
        let counters = &mut self.counters;
        counters.requests += 1;
        match (result, io) {
            (Err(_), _) => counters.failed += 1,
            (Ok(()), Some(io)) if io.rw.op == IoOp::Read => counters.read_bytes += io.len,
            (Ok(()), Some(io)) if io.rw.op == IoOp::Write => counters.written_bytes += io.len,
            (Ok(()), _) => {}
        }
        // All of the client's room is sent: nothing of earlier requests shall be.
        if let (Ok(()), Some(io)) = (result, io)
            && io.tail > 0
        {
            self.actions.push_back(Action::Zero {
                request,
                from: io.data + io.read,
                len: io.tail,
            });
        }
        self.answer(request, result);
    }
}

/// Opening and closing.
impl Server {
    fn open(&mut self, now: Instant, message: MsgOpen, request: &Request) {
        let key = request.key;
        // An answer that does not fit must not leave a device open.
        let Some(at) = room(request, size_of::<MsgOpenRsp>()) else {
            return self.answer(key, Err(Errno::EINVAL));
        };
        if let Some(session) = self.sessions.get_mut(&key.session) {
            session.wait(OpenRequest {
                request: key,
                at,
                message,
            });
        }
        self.next_open(now, key.session);
    }

    /// Begins with the opens that wait, until there is one that takes time.
    pub(super) fn next_open(&mut self, now: Instant, key: SessionKey) {
        while let Some(open) = self.sessions.get_mut(&key).and_then(Session::begin_open) {
            if self.is_leaving(key, &open) {
                if let Some(session) = self.sessions.get_mut(&key) {
                    session.put_back(open);
                }
                return;
            }
            match self.begin_open(key, &open) {
                Ok(None) => return,
                Ok(Some((id, device))) => self.open_succeeded(&open, id, device),
                Err(e) => self.open_refused(now, &open, e),
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
        } else if !self.places.take() {
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
        self.actions.push_back(Action::Open {
            ticket: Ticket(self.jobs.insert(Job::Open(Box::new(open.clone()), mode, tenancy))),
            session_name,
            name,
            mode,
        });
        Ok(None)
    }

    /// A device has been opened, or not.
    pub fn opened(&mut self, now: Instant, ticket: Ticket, result: Result<Opened, OpenRefused>) {
        let Some(Job::Open(open, mode, tenancy)) = self.jobs.remove(ticket.0) else {
            return;
        };
        let key = open.request.session;
        let mut done = true;
        match result {
            Ok(opened) if !self.sessions.contains_key(&key) => {
                self.close_by(opened.store, Job::Close(None, Some(tenancy)));
                self.answer(open.request, Err(Errno::ENODEV));
            }
            // One device under two spellings would be closed under both with the first.
            Ok(opened) if self.has_open(key, &opened.identity) => {
                self.close_by(opened.store, Job::Close(None, None));
                self.open_refused(now, &open, Errno::EEXIST);
            }
            Ok(opened) => done = self.enter(now, &open, mode, opened),
            Err(OpenRefused { errno, identity }) => {
                self.left();
                let twice = identity.is_some_and(|i| self.has_open(key, &i));
                self.open_refused(now, &open, if twice { Errno::EEXIST } else { errno });
                if !self.sessions.contains_key(&key) {
                    self.has_left(now, &tenancy);
                }
            }
        }
        if !done {
            return;
        }
        if let Some(session) = self.sessions.get_mut(&key) {
            session.end_open();
        }
        self.next_open(now, key);
    }

    fn has_open(&self, key: SessionKey, identity: &Identity) -> bool {
        let is_it = |device: u64| self.devices.get(device).is_some_and(|d| d.identity == *identity);
        let session = self.sessions.get(&key);
        session.is_some_and(|s| s.devices().any(|(_, device)| is_it(device)))
    }

    /// True: the client is answered. Else other shares have to be asked first.
    fn enter(&mut self, now: Instant, open: &OpenRequest, mode: AccessMode, opened: Opened) -> bool {
        let key = open.request.session;
        if let Some(suppressed) = self.logs.devices.pass(now) {
            tracing::info!(session = self.name(key), image = opened.label, %mode, suppressed, "device opened");
        }
        let name = open.message.name().unwrap_or_default().to_vec();
        let owner = self.name(key).to_owned();
        let device = self.devices.insert(Device::new(name, mode, owner, opened));
        if let Some(session) = self.sessions.get_mut(&key) {
            let id = session.enter(device);
            if !self.tell_shares(open, id, device) {
                return false;
            }
            self.open_succeeded(open, id, device);
        }
        true
    }

    pub(super) fn open_succeeded(&mut self, open: &OpenRequest, id: u32, device: u64) {
        let Some(response) = self.devices.get(device).map(|d| d.response(id)) else {
            return;
        };
        self.counters.opens += 1;
        self.answer_with(open.request, open.at, response.as_bytes());
    }

    pub(super) fn open_refused(&mut self, now: Instant, open: &OpenRequest, e: Errno) {
        self.counters.refused += 1;
        if let Some(suppressed) = self.logs.refused.pass(now) {
            let session = self.name(open.request.session);
            tracing::warn!(session, request = ?open.message, suppressed, "open refused: {e}");
        }
        self.answer(open.request, Err(e));
    }

    /// The kernel's server answers success also for a device that is not open.
    fn close(&mut self, now: Instant, id: u32, request: RequestKey) {
        let session = self.sessions.get_mut(&request.session);
        let Some(device) = session.and_then(|s| s.leave(id)) else {
            return self.answer(request, Ok(()));
        };
        self.log_close(now, request.session, device);
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
            if d.part_of.is_none() {
                self.leaving.push(d.tenancy());
            }
        }
        self.close_parts(device);
        self.close_if_unused(device);
    }

    pub(super) fn close_if_unused(&mut self, device: u64) {
        if self.devices.get(device).is_some_and(Device::may_close)
            && let Some(d) = self.devices.remove(device)
        {
            let (of, tenancy) = (d.part_of, d.tenancy());
            let (store, request) = d.into_close();
            match of {
                Some(of) => {
                    self.part_goes(of);
                    self.close_by(store, Job::ClosePart(of));
                }
                None => self.close_by(store, Job::Close(request, Some(tenancy))),
            }
        }
    }

    /// A device is open no more.
    fn left(&mut self) {
        self.counters.open -= 1;
        self.places.give_back();
    }

    fn close_by(&mut self, store: StoreId, job: Job) {
        let ticket = Ticket(self.jobs.insert(job));
        self.actions.push_back(Action::Close { ticket, store });
    }

    /// A device has been closed, as well as that could be done: what could not be made durable stays so.
    pub fn closed(&mut self, now: Instant, ticket: Ticket) {
        let (request, tenancy) = match self.jobs.remove(ticket.0) {
            Some(Job::Close(request, tenancy)) => (request, tenancy),
            Some(Job::ClosePart(of)) => return self.part_closed(of),
            _ => return,
        };
        self.left();
        if let Some(request) = request {
            self.answer(request, Ok(()));
        }
        if let Some(of) = tenancy {
            self.has_left(now, &of);
        }
    }

    /// A client has left a device: it may open it again.
    fn has_left(&mut self, now: Instant, of: &Tenancy) {
        let Some(at) = self.leaving.iter().position(|known| known == of) else {
            return;
        };
        self.leaving.swap_remove(at);
        let named = self.sessions.iter().filter(|(_, s)| s.name == of.session);
        let waiting: Vec<SessionKey> = named.map(|(key, _)| *key).collect();
        for session in waiting {
            self.next_open(now, session);
        }
    }

    /// An open device has another size than it had, in bytes: clients that open it again are told.
    pub fn resized(&mut self, store: StoreId, size: u64) {
        let found = self.devices.iter().find(|(_, d)| d.store == store).map(|(key, _)| key);
        if let Some(device) = found.and_then(|key| self.devices.get_mut(key)) {
            device.geometry.size = size;
            if let Some(of) = device.part_of {
                self.tell_size(of, size);
            }
        }
    }
}
