//! Membership of a process: its requests to the broker, and its place at the next broker when one has ended.

mod ask;
mod resources;

use std::{
    collections::{BTreeSet, HashMap},
    io,
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, OnceLock, mpsc},
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex, MutexGuard};
use roce_net::{EventFd, OpenSockets};
use roce_port::{PortChange, QpnParts, QpnSlot, RxMeta};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};

pub use self::ask::{running_broker, statistics};
use self::{
    ask::{REQUEST_TIME, accepted, ask, say, say_hello},
    resources::{Resources, undo},
};
use crate::{
    error::{Error, context},
    page::{Page, Snapshot},
    proto::{Connection, Grant, Parts, Place, Reply, Request, ToBroker, ToClient},
    start::{self, JoinConfig},
    wire::{self, MAX_RECORD, Outbox, Record, RecvError},
};

/// Pause between two attempts to find a broker again, or to wait for one.
const RETRY: Duration = Duration::from_millis(200);
/// Connections or ports in one record.
const RESTORED: usize = 256;
/// Attempts to join a broker that is about to end.
const ATTEMPTS: usize = 20;
/// Largest number of requests whose answers are awaited, or must be undone. Beyond it, what is given too late is kept.
const MAX_PENDING: usize = 1024;

/// Receiver of packets that another socket received: for QP1, or merged behind another process's. Called by the membership's
/// thread.
pub type Inbox = dyn Fn(&RxMeta, &[u8]) + Send + Sync;

/// Request without an answer so far, and the sender of its answer. Nobody receives that when the request has timed out.
type Pending = (Request, mpsc::Sender<Result<Reply, Error>>);

/// Communication of a member with its broker.
#[derive(Default)]
struct State {
    /// The connection; `None` while there is none, or while a new broker is told what this member has.
    link: Option<Arc<OwnedFd>>,
    /// A broker knows, or is being told, what this member has, and must be told of changes.
    joined: bool,
    outbox: Outbox,
    /// Connections whose changes the broker has not been told, by our communication IDs. Peers make as many changes as they like, so
    /// each connection is in it once.
    untold: BTreeSet<u32>,
    seq: u64,
    pending: HashMap<u64, Pending>,
    resources: Resources,
    closing: bool,
}

impl State {
    /// Uses a connection from now on.
    fn connect(&mut self, link: Arc<OwnedFd>) {
        self.joined = true;
        self.link = Some(link);
    }

    /// The broker is gone: what it has answered is done, the rest is asked again.
    fn disconnect(&mut self) {
        self.joined = false;
        self.link = None;
        self.outbox.clear();
        self.untold.clear();
        self.pending.clear();
    }

    /// Sends what waits. Returns whether the broker has had room for all of it.
    fn flush(&mut self) -> bool {
        let Some(link) = self.link.clone() else { return true };
        loop {
            // An error means that the broker is gone; the thread finds that out as well.
            if self.outbox.flush(link.as_fd()).is_err() {
                self.outbox.clear();
                self.untold.clear();
            }
            if !self.outbox.is_empty() || self.untold.is_empty() {
                return self.outbox.is_empty();
            }
            let (mut up, mut down) = (vec![], vec![]);
            for id in (0..RESTORED).map_while(|_| self.untold.pop_first()) {
                match self.resources.established.get(&id) {
                    Some(conn) => up.push(*conn),
                    None => down.push(id),
                }
            }
            self.push(&ToBroker::Connections { up, down });
        }
    }

    fn push(&mut self, message: &ToBroker) {
        match wire::encode(message, &[]) {
            Ok(bytes) => self.outbox.push(bytes, vec![]),
            Err(e) => tracing::warn!("a message to the broker is left out: {e}"),
        }
    }
}

struct Shared {
    config: JoinConfig,
    pid: u32,
    /// Place, and what gets it again from the next broker.
    given: Grant,
    /// Held for moments only, and nobody waits for the broker while holding it: the thread that takes it may hold a device's lock.
    state: Mutex<State>,
    changed: Condvar,
    /// Wakes the thread when the broker had no room.
    stuck: EventFd,
    inbox: OnceLock<Box<Inbox>>,
    /// Page for counters, which the broker reads.
    page: Mutex<Option<Page>>,
}

/// A place among the processes that share an address. Dropping it leaves.
pub struct Membership {
    shared: Arc<Shared>,
}

impl core::fmt::Debug for Membership {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Membership")
            .field("place", &self.place())
            .finish_non_exhaustive()
    }
}

/// Becomes a member, starting a broker if none runs.
///
/// # Errors
/// When there is no broker and none can be started, or when it has no place left.
pub fn join(config: &JoinConfig) -> Result<Membership, Error> {
    let mut attempt = 0;
    let (link, (given, page)) = loop {
        attempt += 1;
        let link = start::connect_or_start(&config.dir, config.program.as_deref())?;
        match say_hello(&link, &config.name, None) {
            Ok(given) => break (link, given),
            // It was about to end.
            Err(Error::Io { .. }) if attempt < ATTEMPTS => {}
            Err(e) => return Err(e),
        }
    };
    let link = Arc::new(link);
    let shared = Shared::new(config.clone(), given, page, link.clone()).map_err(context("making an event counter"))?;
    let shared = Arc::new(shared);
    let theirs = shared.clone();
    roce_net::start_thread("ferroce broker", move || theirs.serve(link))
        .map_err(context("starting the thread that listens to the broker"))?;
    Ok(Membership { shared })
}

impl Membership {
    /// Returns the place.
    pub fn place(&self) -> Place {
        self.shared.given.place
    }

    /// Returns this member's part of all queue pair numbers and communication IDs.
    pub fn numbers(&self) -> QpnSlot {
        self.place().numbers()
    }

    /// Returns which of these numbers the member draws from, if it has a whole slot.
    pub fn parts(&self) -> Option<QpnParts> {
        let Parts { home, resting, .. } = self.shared.given.parts;
        self.place().is_whole().then_some(QpnParts { home, resting })
    }

    /// Sets the receiver of packets. Only the first call counts; earlier packets are lost, as in a network.
    pub fn set_inbox(&self, inbox: Box<Inbox>) {
        let _ = self.shared.inbox.set(inbox);
    }

    /// Publishes the status of the member's devices for other processes. Returns whether it differs from the last one. Stores a few
    /// words, which stay when the process ends.
    pub fn publish(&self, status: &Snapshot) -> bool {
        let page = self.shared.page.lock();
        page.as_ref().is_some_and(|page| page.publish(status))
    }

    /// Returns the sockets of an address: the member's, and what holds the groups. `::` means IPv4 too.
    ///
    /// # Errors
    /// When the address is not ours, or another program has its port.
    pub fn open(&self, addr: IpAddr) -> Result<OpenSockets, Error> {
        let addr = addr.to_canonical();
        let given = || self.shared.own_state()?.resources.given.remove(&addr);
        // They may have come too late for an earlier request.
        if let Some(sockets) = given() {
            return Ok(sockets);
        }
        let asked = self.shared.call(&Request::Open { addr, again: false });
        match given() {
            Some(sockets) => Ok(sockets),
            None => asked.and(Err(Error::Protocol)),
        }
    }

    /// Binds a port of a port space: `service` is port space and port, port 0 any that is free. Returns it with the port.
    ///
    /// # Errors
    /// When the port is taken.
    pub fn bind(&self, service: u64, addr: Option<IpAddr>, reuse: bool) -> Result<u64, Error> {
        match self.shared.call(&Request::Bind { service, addr, reuse })? {
            Reply::Bound { service } => Ok(service),
            _ => Err(Error::Protocol),
        }
    }

    /// Gives a port back: a process that asks for it after this returns may have it. While there is no broker nobody has it: the
    /// next one is not told of it.
    ///
    /// # Errors
    /// In a child of the process that joined.
    pub fn unbind(&self, service: u64, addr: Option<IpAddr>) -> Result<(), Error> {
        self.shared.release(service, addr, false)
    }

    /// Takes the connect requests for a service ID, on one address or all, from now on.
    ///
    /// # Errors
    /// When another process has the port.
    pub fn listen(&self, service: u64, addr: Option<IpAddr>) -> Result<(), Error> {
        self.shared.call(&Request::Listen { service, addr }).map(drop)
    }

    /// No longer takes them. While there is no broker they go nowhere, and the next one is not told of them.
    ///
    /// # Errors
    /// In a child of the process that joined.
    pub fn unlisten(&self, service: u64, addr: Option<IpAddr>) -> Result<(), Error> {
        self.shared.release(service, addr, true)
    }

    /// Reports a change of the member's port. Doesn't wait: what the broker has no room for now it is told later.
    pub fn port_change(&self, change: &PortChange) {
        let Some(mut state) = self.shared.own_state() else {
            return;
        };
        match change {
            PortChange::Spread => {
                state.resources.spread = true;
                self.shared.say(&mut state, &ToBroker::Spread);
            }
            PortChange::Connection(change) => {
                state.resources.change(change);
                if state.joined {
                    state.untold.insert(change.local_id);
                    self.shared.flush(&mut state);
                }
            }
        }
    }

    /// Hands a packet over to the member whose queue pair it is for. Doesn't wait: it is lost if the broker has no room.
    pub fn hand_over(&self, meta: &RxMeta, bytes: &[u8]) {
        // Sent without the lock, which the holder of a device's lock may want.
        let link = self.shared.own_state().and_then(|state| state.link.clone());
        if let (Some(link), Ok(record)) = (link, wire::encode(&ToBroker::Datagram(*meta), bytes)) {
            let _ = wire::send(link.as_fd(), &record, &[], false);
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let Some(mut state) = self.shared.own_state() else {
            return;
        };
        state.closing = true;
        // If it does not get through, the broker sees that the connection is closed and treats this process as killed.
        self.shared.say(&mut state, &ToBroker::Goodbye);
        if let Some(link) = state.link.take() {
            // Ends the thread's wait.
            let _ = rustix::net::shutdown(&*link, rustix::net::Shutdown::Both);
        }
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn new(config: JoinConfig, given: Grant, page: Option<Page>, link: Arc<OwnedFd>) -> io::Result<Self> {
        let mut state = State::default();
        state.connect(link);
        Ok(Self {
            config,
            pid: std::process::id(),
            given,
            state: Mutex::new(state),
            changed: Condvar::new(),
            stuck: EventFd::new()?,
            inbox: OnceLock::new(),
            page: Mutex::new(page),
        })
    }

    /// Returns the state; `None` in a child of the process that joined, as the connection is the parent's.
    fn own_state(&self) -> Option<MutexGuard<'_, State>> {
        (self.pid == std::process::id()).then(|| self.state.lock())
    }

    /// Sends a message, now or when the broker has room for it. Without a broker it is not sent: the next one is told all.
    fn say(&self, state: &mut State, message: &ToBroker) {
        if !state.joined {
            return;
        }
        state.push(message);
        self.flush(state);
    }

    fn flush(&self, state: &mut State) {
        if !state.flush() {
            self.stuck.raise();
        }
    }

    /// Asks the broker, the next one if this one ends before it has answered.
    fn call(&self, request: &Request) -> Result<Reply, Error> {
        self.call_until(request, Instant::now() + REQUEST_TIME)
    }

    fn call_until(&self, request: &Request, deadline: Instant) -> Result<Reply, Error> {
        loop {
            let mut state = self.own_state().ok_or(Error::Forked)?;
            while state.link.is_none() {
                self.wait(&mut state, deadline)?;
            }
            let (sender, answer) = mpsc::channel();
            state.seq += 1;
            let (seq, request) = (state.seq, request.clone());
            let pending = (request.clone(), sender);
            self.say(&mut state, &ToBroker::Request { seq, request });
            state.pending.insert(seq, pending);
            drop(state);
            let left = deadline.saturating_duration_since(Instant::now());
            match answer.recv_timeout(left) {
                Ok(reply) => return reply,
                Err(mpsc::RecvTimeoutError::Disconnected) => continue,
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
            let mut state = self.state.lock();
            // It may have come just then. From here on nobody receives it.
            let last = answer.try_recv();
            drop(answer);
            if state.pending.len() > MAX_PENDING {
                state.pending.remove(&seq);
            }
            return last.unwrap_or(Err(Error::Timeout));
        }
    }

    /// Gives a port or a listener back. Waits until the broker has that in its socket: it handles it before what another process
    /// asks for from now on.
    fn release(&self, service: u64, addr: Option<IpAddr>, listening: bool) -> Result<(), Error> {
        let deadline = Instant::now() + REQUEST_TIME;
        let mut state = self.own_state().ok_or(Error::Forked)?;
        self.release_in(&mut state, service, addr, listening);
        while state.joined && !state.outbox.is_empty() {
            self.wait(&mut state, deadline)?;
        }
        Ok(())
    }

    fn release_in(&self, state: &mut State, service: u64, addr: Option<IpAddr>, listening: bool) {
        state.resources.release(service, addr, listening);
        let request = Request::Release {
            service,
            addr,
            listening,
        };
        // Nobody awaits the answer.
        self.say(state, &ToBroker::Request { seq: 0, request });
    }

    fn wait(&self, state: &mut MutexGuard<'_, State>, deadline: Instant) -> Result<(), Error> {
        match self.changed.wait_until(state, deadline).timed_out() {
            true => Err(Error::Timeout),
            false => Ok(()),
        }
    }

    /// Body of the thread: listens to the broker, and finds or starts another one when it is gone.
    fn serve(&self, mut link: Arc<OwnedFd>) {
        let mut buffer = vec![0; MAX_RECORD];
        loop {
            match wire::receive(link.as_fd(), &mut buffer, false) {
                Ok(record) => self.take(record),
                Err(RecvError::Empty) => self.wait_for_broker(&link),
                Err(RecvError::Malformed(text)) => tracing::warn!("the broker sends an invalid record: {text}"),
                Err(RecvError::Closed) => match self.reconnect() {
                    Some(new) => link = new,
                    None => return,
                },
            }
        }
    }

    /// Waits until the broker has sent something. Sends what it had no room for when it has.
    fn wait_for_broker(&self, link: &OwnedFd) {
        self.stuck.clear();
        let flushed = self.state.lock().flush();
        if flushed {
            self.changed.notify_all();
        }
        let room = if flushed { PollFlags::empty() } else { PollFlags::OUT };
        let mut all = [
            PollFd::new(link, PollFlags::IN | room),
            PollFd::from_borrowed_fd(self.stuck.as_fd(), PollFlags::IN),
        ];
        match poll(&mut all, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => {
                tracing::warn!("waiting for the broker failed: {e}");
                std::thread::sleep(RETRY);
            }
        }
    }

    fn take(&self, record: Record<ToClient>) {
        let (seq, reply) = match record.message {
            ToClient::Reply { seq, reply } => (seq, reply),
            ToClient::Datagram(meta) => {
                if let Some(inbox) = self.inbox.get() {
                    inbox(&meta, &record.payload);
                }
                return;
            }
        };
        let mut state = self.state.lock();
        let Some((request, answer)) = state.pending.remove(&seq) else {
            return;
        };
        let reply = accepted(reply, record.lacks_fds);
        let mut given_back = None;
        if let Ok(reply) = &reply {
            // Whether a thread waits or not: the broker may end before one that waits wakes up.
            state.resources.note(&request, reply, record.fds);
            given_back = undo(&request, reply);
        }
        if let (Err(_), Some((service, addr, listening))) = (answer.send(reply), given_back) {
            // The thread that asked no longer waits.
            self.release_in(&mut state, service, addr, listening);
        }
    }

    /// Finds or starts another broker. Returns the connection to it; `None` when the member leaves.
    fn reconnect(&self) -> Option<Arc<OwnedFd>> {
        let mut warned = false;
        loop {
            let closing = {
                let mut state = self.state.lock();
                state.disconnect();
                state.closing
            };
            self.changed.notify_all();
            if closing {
                return None;
            }
            let rejoined = self.rejoin();
            let mut state = self.state.lock();
            match rejoined {
                Ok(_) if state.closing => {}
                Ok(link) => {
                    let link = Arc::new(link);
                    state.connect(link.clone());
                    self.changed.notify_all();
                    return Some(link);
                }
                Err(e) if !std::mem::replace(&mut warned, true) => {
                    tracing::warn!("the broker is gone, and there is no other yet: {e}");
                }
                Err(_) => {}
            }
            if !state.closing {
                self.changed.wait_for(&mut state, RETRY);
            }
        }
    }

    /// Joins another broker with the place, sockets, ports and connections that this process has. Changes from then on wait in
    /// the outbox.
    fn rejoin(&self) -> Result<OwnedFd, Error> {
        let link = start::connect_or_start(&self.config.dir, self.config.program.as_deref())?;
        let (opened, bindings, established, spread) = {
            let mut state = self.state.lock();
            state.joined = true;
            state.untold.clear();
            let all = &state.resources;
            let established: Vec<Connection> = all.established.values().copied().collect();
            (all.opened.clone(), all.bindings.clone(), established, all.spread)
        };
        let parts = Parts {
            spread,
            ..self.given.parts
        };
        let (_, page) = say_hello(&link, &self.config.name, Some(Grant { parts, ..self.given }))?;
        self.replace_page(page);
        for one in opened {
            let fds: Vec<BorrowedFd<'_>> = one.for_next.iter().map(|fd| fd.as_fd()).collect();
            let addr = one.addr;
            ask(&link, Request::Open { addr, again: true }, &fds)?;
        }
        for bindings in bindings.chunks(RESTORED) {
            ask(&link, Request::Restore(bindings.to_vec()), &[])?;
        }
        for up in established.chunks(RESTORED) {
            let (up, down) = (up.to_vec(), vec![]);
            say(&link, &ToBroker::Connections { up, down }, &[])?;
        }
        ask(&link, Request::Restored, &[])?;
        Ok(link)
    }

    /// Uses the page of the next broker from now on, and copies the counters there.
    fn replace_page(&self, new: Option<Page>) {
        let mut page = self.page.lock();
        if let (Some(new), Some(former)) = (&new, &*page) {
            new.copy(former);
        }
        *page = new;
    }
}

#[cfg(test)]
mod tests;
