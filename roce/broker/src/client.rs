//! The side of a member.

mod ask;
mod links;
mod state;

use std::{
    io,
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex, MutexGuard};
use roce_net::OpenSockets;
use roce_port::{PortChange, QpnParts, QpnSlot, RxMeta};

pub use self::ask::{running_broker, statistics};
use self::{
    ask::{REQUEST_TIME, accepted, ask, say_hello},
    links::Links,
    state::{State, given_back, undo},
};
use crate::{
    page::{Page, Snapshot},
    proto::{Binding, Connection, Parts, Place, Rejoin, Reply, Request, ToBroker, ToClient},
    start::{self, JoinConfig, JoinError, join_io},
    wire::{self, MAX_RECORD, Record, RecvError},
};

/// Pause between two attempts to find a broker again.
const RETRY: Duration = Duration::from_millis(200);
/// Connections or ports of one record.
const RESTORED: usize = 256;
/// Attempts to join a broker that ends just then.
const ATTEMPTS: usize = 20;

/// Takes a packet that another socket received: for QP1, or one that was merged behind another process's. Called by the membership's
/// thread.
pub type Inbox = dyn Fn(&RxMeta, &[u8]) + Send + Sync;

/// State that has been restored at the next broker.
struct Rejoined {
    link: OwnedFd,
    bindings: Vec<Binding>,
    /// Messages that it sent to this member meanwhile.
    early: Vec<Record<ToClient>>,
}

struct Shared {
    config: JoinConfig,
    pid: u32,
    place: Place,
    /// Gets the place again from the next broker.
    token: u64,
    parts: Parts,
    state: Mutex<State>,
    changed: Condvar,
    inbox: OnceLock<Box<Inbox>>,
    links: Links,
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
            .field("place", &self.shared.place)
            .finish_non_exhaustive()
    }
}

/// Becomes a member, starting a broker if none runs.
///
/// # Errors
/// When there is no broker and none can be started, or when it has no place left.
pub fn join(config: &JoinConfig) -> Result<Membership, JoinError> {
    let mut attempt = 0;
    let (link, (given, page)) = loop {
        attempt += 1;
        let link = start::connect_or_start(&config.dir, config.program.as_deref())?;
        match say_hello(&link, &config.name, None) {
            Ok(given) => break (link, given),
            // It was about to end.
            Err(JoinError::Io { .. }) if attempt < ATTEMPTS => {}
            Err(e) => return Err(e),
        }
    };
    let link = Arc::new(link);
    let shared = Shared::new(config.clone(), given, page, link.clone()).map_err(join_io("making an event counter"))?;
    let shared = Arc::new(shared);
    let theirs = shared.clone();
    roce_net::start_thread("ferroce broker", move || theirs.serve(link))
        .map_err(join_io("starting the thread that listens to the broker"))?;
    Ok(Membership { shared })
}

impl Membership {
    /// The place.
    pub fn place(&self) -> Place {
        self.shared.place
    }

    /// The part of all queue pair numbers and communication IDs that is this member's.
    pub fn numbers(&self) -> QpnSlot {
        self.shared.place.numbers()
    }

    /// Which of these numbers the member draws from, if it has a whole slot.
    pub fn parts(&self) -> Option<QpnParts> {
        let Parts { home, resting, .. } = self.shared.parts;
        self.shared.place.is_whole().then_some(QpnParts { home, resting })
    }

    /// Sets the handler of the broker's messages. Only the first call counts; earlier messages are lost, as in a
    /// network.
    pub fn set_inbox(&self, inbox: Box<Inbox>) {
        let _ = self.shared.inbox.set(inbox);
    }

    /// Publishes the status of the member's devices for other processes. Returns whether it differs from the last one. Stores a few
    /// words, which stay when the process ends.
    pub fn publish(&self, status: &Snapshot) -> bool {
        self.shared
            .page
            .lock()
            .as_ref()
            .is_some_and(|page| page.publish(status))
    }

    /// The sockets of an address: the member's, and what holds the groups. `::` means IPv4 too.
    ///
    /// # Errors
    /// When the address is not ours, or somebody else has its port.
    pub fn open(&self, addr: IpAddr) -> Result<OpenSockets, JoinError> {
        let addr = addr.to_canonical();
        let given = || self.shared.state.lock().given.remove(&addr);
        // They may have come too late for who asked before.
        if let Some(sockets) = given() {
            return Ok(sockets);
        }
        let asked = self.shared.call(&Request::Open { addr, again: false });
        if let Some(sockets) = given() {
            return Ok(sockets);
        }
        asked.and(Err(JoinError::Protocol))
    }

    /// Binds a port of a port space: `service` is port space and port, port 0 any that is free. Returns it with the port.
    ///
    /// # Errors
    /// When the port is taken.
    pub fn bind(&self, service: u64, addr: Option<IpAddr>, reuse: bool) -> Result<u64, JoinError> {
        let request = Request::Bind { service, addr, reuse };
        let Reply::Bound { service } = self.shared.call(&request)?.message else {
            return Err(JoinError::Protocol);
        };
        Ok(service)
    }

    /// Gives a port back: whoever asks for it after this returns may have it. While there is no broker nobody has it: the next
    /// one is not told of it.
    ///
    /// # Errors
    /// In a child of the process that joined.
    pub fn unbind(&self, service: u64, addr: Option<IpAddr>) -> Result<(), JoinError> {
        self.shared.change(service, addr, |b| b.bound, |b| b.bound = false);
        self.shared.tell(Request::Unbind { service, addr })
    }

    /// Takes the connect requests for a service ID, on one address or all, from now on.
    ///
    /// # Errors
    /// When another process has the port.
    pub fn listen(&self, service: u64, addr: Option<IpAddr>) -> Result<(), JoinError> {
        self.shared.call(&Request::Listen { service, addr }).map(drop)
    }

    /// No longer takes them. While there is no broker they go nowhere, and the next one is not told of them.
    ///
    /// # Errors
    /// In a child of the process that joined.
    pub fn unlisten(&self, service: u64, addr: Option<IpAddr>) -> Result<(), JoinError> {
        self.shared
            .change(service, addr, |b| b.listening, |b| b.listening = false);
        self.shared.tell(Request::Unlisten { service, addr })
    }

    /// The member's port has changed. Doesn't wait: what the broker has no room for now it is told later.
    pub fn port_change(&self, change: &PortChange) {
        if self.shared.is_ours() {
            self.shared.links.change(change);
        }
    }

    /// Hands a packet over to the member whose queue pair it is for. Doesn't wait. False: it is lost.
    pub fn hand_over(&self, meta: &RxMeta, bytes: &[u8]) -> bool {
        let link = self.shared.links.link();
        let message = wire::encode(&ToBroker::Datagram(meta.into()), bytes);
        match (link, message) {
            (Some(link), Ok(message)) if self.shared.is_ours() => {
                wire::send(link.as_fd(), &message, &[], false).is_ok()
            }
            _ => false,
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if !self.shared.is_ours() {
            // A child of the process that joined: the connection is the parent's.
            return;
        }
        let link = {
            let mut state = self.shared.state.lock();
            state.closing = true;
            self.shared.links.set_link(None);
            state.link.take()
        };
        self.shared.changed.notify_all();
        if let Some(link) = link {
            if let Ok(bytes) = wire::encode(&ToBroker::Goodbye, &[]) {
                // If it does not get through the broker sees that we are gone, and treats us as killed.
                let _ = wire::send(link.as_fd(), &bytes, &[], false);
            }
            // Ends the thread's wait.
            let _ = rustix::net::shutdown(&*link, rustix::net::Shutdown::Both);
        }
    }
}

impl Shared {
    fn new(config: JoinConfig, given: Rejoin, page: Option<Page>, link: Arc<OwnedFd>) -> io::Result<Self> {
        Ok(Self {
            links: Links::new(link.clone())?,
            config,
            pid: std::process::id(),
            place: given.place,
            token: given.token,
            parts: given.parts,
            state: Mutex::new(State {
                link: Some(link),
                ..State::default()
            }),
            changed: Condvar::new(),
            inbox: OnceLock::new(),
            page: Mutex::new(page),
        })
    }

    fn is_ours(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Asks the broker, the next one if this one ends meanwhile.
    fn call(&self, request: &Request) -> Result<Record<Reply>, JoinError> {
        self.call_until(request, Instant::now() + REQUEST_TIME)
    }

    fn call_until(&self, request: &Request, deadline: Instant) -> Result<Record<Reply>, JoinError> {
        if !self.is_ours() {
            return Err(JoinError::Forked);
        }
        let mut state = self.state.lock();
        loop {
            let Some(link) = state.link.clone() else {
                self.wait(&mut state, deadline)?;
                continue;
            };
            state.seq += 1;
            let (seq, epoch) = (state.seq, state.epoch);
            let message = ToBroker::Request {
                seq,
                request: request.clone(),
            };
            let bytes = wire::encode(&message, &[]).map_err(join_io("asking the broker"))?;
            state.awaited.insert(seq, request.clone());
            // If this fails the thread finds the connection at its end as well.
            let sent = MutexGuard::unlocked(&mut state, || wire::send(link.as_fd(), &bytes, &[], true));
            if let Err(e) = sent {
                tracing::debug!("the broker is gone: {e}");
            }
            loop {
                if let Some(reply) = state.replies.remove(&seq) {
                    return accepted(reply);
                }
                if state.epoch != epoch {
                    break;
                }
                if let Err(e) = self.wait(&mut state, deadline) {
                    // It may have come just then.
                    if let Some(reply) = state.replies.remove(&seq) {
                        return accepted(reply);
                    }
                    state.give_up(seq);
                    return Err(e);
                }
            }
        }
    }

    /// Tells the broker something that it does not refuse, without waiting for its answer. One that is being told what there
    /// was is waited for.
    fn tell(&self, request: Request) -> Result<(), JoinError> {
        if !self.is_ours() {
            return Err(JoinError::Forked);
        }
        let (link, seq) = {
            let mut state = self.state.lock();
            let deadline = Instant::now() + REQUEST_TIME;
            // Another process may ask for what was given back as soon as this returns.
            while state.restoring && self.wait(&mut state, deadline).is_ok() {}
            state.seq += 1;
            (state.link.clone(), state.seq)
        };
        let Some(link) = link else { return Ok(()) };
        let bytes = wire::encode(
            &ToBroker::Request {
                seq,
                request: request.clone(),
            },
            &[],
        );
        match bytes.and_then(|bytes| wire::send(link.as_fd(), &bytes, &[], false)) {
            // It has much to do: then in turn.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.call(&request).map(drop),
            // Otherwise it is gone, and the next one is not told.
            _ => Ok(()),
        }
    }

    fn wait(&self, state: &mut MutexGuard<'_, State>, deadline: Instant) -> Result<(), JoinError> {
        if self.changed.wait_until(state, deadline).timed_out() {
            return Err(JoinError::Timeout);
        }
        Ok(())
    }

    fn change(
        &self,
        service: u64,
        addr: Option<IpAddr>,
        which: impl Fn(&Binding) -> bool,
        change: impl Fn(&mut Binding),
    ) {
        let mut state = self.state.lock();
        let found = state
            .bindings
            .iter_mut()
            .find(|b| b.service == service && b.addr == addr && which(b));
        if let Some(binding) = found {
            change(binding);
        }
        state.bindings.retain(|b| b.bound || b.listening);
    }

    /// The thread: listens to the broker, and finds or starts another when it is gone.
    fn serve(&self, mut link: Arc<OwnedFd>) {
        let mut buffer = vec![0; MAX_RECORD];
        loop {
            match wire::receive(link.as_fd(), &mut buffer, false) {
                Ok(record) => self.take(&link, record),
                Err(RecvError::Empty) => self.links.wait(&link),
                Err(RecvError::Malformed(text)) => tracing::warn!("the broker says what makes no sense: {text}"),
                Err(RecvError::Closed) => match self.reconnect() {
                    Some(new) => link = new,
                    None => return,
                },
            }
        }
    }

    fn take(&self, link: &OwnedFd, record: Record<ToClient>) {
        match record.message {
            ToClient::Reply { seq, reply } => {
                let mut record = Record {
                    message: reply,
                    payload: vec![],
                    fds: record.fds,
                    lacks_fds: record.lacks_fds,
                };
                let mut state = self.state.lock();
                let asked = state.awaited.get(&seq).or_else(|| state.given_up.get(&seq)).cloned();
                if let (Some(Request::Open { addr, .. }), false) = (asked, record.lacks_fds) {
                    // Whether somebody waits for it or not: the broker has noted that this member has the address.
                    state.open(addr, &record.message, std::mem::take(&mut record.fds));
                }
                if let Some(request) = state.awaited.remove(&seq) {
                    // At once: a broker may be gone before whoever waits has woken, and the next one must be told.
                    state.note(&request, &record.message);
                    state.replies.insert(seq, record);
                    drop(state);
                    self.changed.notify_all();
                } else if let Some(request) = state.given_up.remove(&seq).and_then(|r| undo(&r, &record.message)) {
                    // It comes too late: nobody has what is given. Descriptors go with the record.
                    state.seq += 1;
                    let seq = state.seq;
                    drop(state);
                    let message = wire::encode(&ToBroker::Request { seq, request }, &[]);
                    if let Err(e) = message.and_then(|bytes| wire::send(link.as_fd(), &bytes, &[], true)) {
                        tracing::debug!("the broker is gone: {e}");
                    }
                }
            }
            ToClient::Datagram(meta) => {
                if let Some(inbox) = self.inbox.get() {
                    inbox(&RxMeta::from(&meta), &record.payload);
                }
            }
        }
    }

    /// The broker is gone. Returns the connection to the next one; `None` when the member leaves.
    fn reconnect(&self) -> Option<Arc<OwnedFd>> {
        self.links.set_link(None);
        {
            let mut state = self.state.lock();
            state.link = None;
            // What was answered was done; the rest is asked again.
            state.awaited.clear();
            state.given_up.clear();
        }
        let mut warned = false;
        loop {
            if self.state.lock().closing {
                return None;
            }
            match self.rejoin() {
                Ok(rejoined) => return self.go_on(rejoined),
                Err(e) if !std::mem::replace(&mut warned, true) => {
                    tracing::warn!("the broker is gone, and there is no other yet: {e}");
                }
                Err(_) => {}
            }
            let mut state = self.state.lock();
            if std::mem::take(&mut state.restoring) {
                self.changed.notify_all();
            }
            if !state.closing {
                self.changed.wait_for(&mut state, RETRY);
            }
        }
    }

    /// Tells the next broker what was given back while it was told, and uses the connection to it from now on. `None` when
    /// the member leaves.
    fn go_on(&self, Rejoined { link, bindings, early }: Rejoined) -> Option<Arc<OwnedFd>> {
        let link = Arc::new(link);
        let mut state = self.state.lock();
        if state.closing {
            return None;
        }
        // The lock is held until the link is there: what is given back from now on is told over it.
        for request in given_back(&bindings, &state.bindings) {
            state.seq += 1;
            let seq = state.seq;
            let message = wire::encode(&ToBroker::Request { seq, request }, &[]);
            if let Err(e) = message.and_then(|bytes| wire::send(link.as_fd(), &bytes, &[], true)) {
                tracing::debug!("the broker is gone again: {e}");
            }
        }
        state.restoring = false;
        state.link = Some(link.clone());
        self.links.set_link(Some(link.clone()));
        state.epoch += 1;
        drop(state);
        self.changed.notify_all();
        // The inbox may wait for somebody who waits for the link.
        for record in early {
            self.take(&link, record);
        }
        Some(link)
    }

    /// Goes on in the page of the next broker.
    fn replace_page(&self, new: Option<Page>) {
        let mut page = self.page.lock();
        if let (Some(new), Some(former)) = (&new, &*page) {
            new.copy(former);
        }
        *page = new;
    }

    /// Joins another broker with the place, sockets, ports and connections that this process has.
    fn rejoin(&self) -> Result<Rejoined, JoinError> {
        let link = start::connect_or_start(&self.config.dir, self.config.program.as_deref())?;
        let rejoin = Rejoin {
            place: self.place,
            token: self.token,
            parts: Parts {
                spread: self.links.is_spread(),
                ..self.parts
            },
        };
        let (_, page) = say_hello(&link, &self.config.name, Some(rejoin))?;
        self.replace_page(page);
        let (opened, bindings) = {
            let mut state = self.state.lock();
            state.restoring = true;
            let opened: Vec<_> = state.opened.iter().map(|o| (o.addr, o.for_next.clone())).collect();
            (opened, state.bindings.clone())
        };
        let mut early = Vec::new();
        let mut other = |record: Record<ToClient>| early.push(record);
        for (addr, given) in opened {
            let fds: Vec<BorrowedFd<'_>> = given.iter().map(|v| v.as_fd()).collect();
            ask(&link, Request::Open { addr, again: true }, &fds, &mut other)?;
        }
        let connections = self.links.established();
        let mut chunks: Vec<(Vec<Binding>, Vec<Connection>)> =
            bindings.chunks(RESTORED).map(|b| (b.to_vec(), vec![])).collect();
        chunks.extend(connections.chunks(RESTORED).map(|c| (vec![], c.to_vec())));
        let restore = |(bindings, connections), done| Request::Restore {
            bindings,
            connections,
            done,
        };
        for chunk in chunks {
            ask(&link, restore(chunk, false), &[], &mut other)?;
        }
        ask(&link, restore((vec![], vec![]), true), &[], &mut other)?;
        Ok(Rejoined { link, bindings, early })
    }
}

#[cfg(test)]
mod tests;
