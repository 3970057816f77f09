//! The side of a member.

mod links;

use std::{
    collections::HashMap,
    io,
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc, Once, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex, MutexGuard};
use roce_net::{
    OpenSockets, environment,
    holder::{BROKER_DIR_VARIABLE, BROKER_VARIABLE},
};
use roce_port::{PortChange, QpnParts, QpnSlot, RxMeta};

use self::links::Links;
use crate::{
    group,
    proto::{
        Binding, Connection, Parts, Place, Refusal, Rejoin, Reply, Report, Request, Statistics, ToBroker, ToClient,
        UNASKED, VERSION,
    },
    start::{self, StartError},
    sys,
    wire::{self, MAX_RECORD, Record, RecvError},
};

/// Which program is the broker; `off`: don't share.
const PROGRAM_VARIABLE: &str = BROKER_VARIABLE;
/// Environment variable with the directory of the broker's socket.
const DIR_VARIABLE: &str = BROKER_DIR_VARIABLE;
/// How long a request may take, the start of another broker included.
const REQUEST_TIME: Duration = Duration::from_secs(30);
/// Requests that are given up while the broker lives and does not answer; of more it keeps what it gives.
const MAX_GIVEN_UP: usize = 1024;
/// Pause between two attempts to find a broker again.
const RETRY: Duration = Duration::from_millis(200);
/// Connections or ports of one record.
const RESTORED: usize = 256;
/// How long a process that exits may wait until the broker knows what it has counted.
const EXIT_TIME: Duration = Duration::from_secs(2);
/// Attempts to join a broker that ends just then.
const ATTEMPTS: usize = 20;

/// Why a process is not a member.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// There is no broker.
    #[error(transparent)]
    Start(#[from] StartError),
    /// It refuses.
    #[error("{text}")]
    Refused {
        /// Why, for programs.
        why: Refusal,
        /// Why, for people.
        text: String,
    },
    /// It does not answer.
    #[error("the broker does not answer")]
    Timeout,
    /// It answers something else.
    #[error("the broker's answer makes no sense")]
    Protocol,
    /// The connection belongs to the process that this one was forked from.
    #[error("joined by the parent process, not by this one")]
    Forked,
    /// A system call failed.
    #[error("{context}: {source}")]
    Io {
        /// Operation that failed.
        context: &'static str,
        /// Error of the system.
        source: io::Error,
    },
}

fn context(context: &'static str) -> impl Fn(io::Error) -> JoinError {
    move |source| JoinError::Io { context, source }
}

/// How to join.
#[derive(Clone, Debug)]
pub struct JoinConfig {
    /// Directory of the broker's socket.
    pub dir: PathBuf,
    /// The program to start as `PROGRAM broker …`; `None`: this one if it is called `ferroce`, or else that of the search
    /// path.
    pub program: Option<PathBuf>,
    /// Name of this process.
    pub name: String,
}

impl JoinConfig {
    /// How many queue pairs a process is sure to be able to have, as far as can be told before it joins.
    pub fn sure_numbers(&self) -> u32 {
        let place = match start::is_of_others(&self.dir) {
            // A broker of several users gives a process a generation at least.
            true => Place { slot: 1, generation: 0 },
            false => Place::whole(1),
        };
        place.numbers().qpns().count()
    }

    /// By the environment: `FERROCE_BROKER` (a program, or `off`) and `FERROCE_BROKER_DIR`, neither of which a program with
    /// rights that its user hasn't believes. `None` when it is switched off.
    pub fn from_env() -> Option<Self> {
        let program = environment::var_os(PROGRAM_VARIABLE).map(PathBuf::from);
        if program.as_deref() == Some(Path::new("off")) {
            return None;
        }
        let dir = environment::var_os(DIR_VARIABLE).map(PathBuf::from);
        let exe = std::env::current_exe().unwrap_or_default();
        Some(Self {
            dir: dir.unwrap_or_else(start::runtime_dir),
            program,
            name: exe.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        })
    }
}

/// Handler of the broker's messages to a member. Called by the membership's thread.
pub trait Inbox: Send + Sync {
    /// A packet that another socket received: for QP1, or one that was merged behind another process's.
    fn datagram(&self, meta: &RxMeta, bytes: &[u8]);
    /// Returns the member's report; `None`: it has none (any more).
    fn report(&self) -> Option<Report>;
}

/// An address that was opened.
struct Opened {
    addr: IpAddr,
    /// Descriptors for the next broker: the groups' vaults or, when this process has none, its own sockets.
    for_next: Vec<Arc<OwnedFd>>,
}

#[derive(Default)]
struct State {
    /// The connection; `None` while there is none.
    link: Option<Arc<OwnedFd>>,
    /// Counts connections: answers of a former one don't come any more.
    epoch: u64,
    seq: u64,
    /// Requests that somebody waits for the answers of.
    awaited: HashMap<u64, Request>,
    replies: HashMap<u64, Record<Reply>>,
    /// Requests that nobody waits for any more, whose answers must be undone.
    given_up: HashMap<u64, Request>,
    opened: Vec<Opened>,
    /// Sockets that nobody has taken yet: a broker gives a member those of an address once.
    given: HashMap<IpAddr, OpenSockets>,
    bindings: Vec<Binding>,
    /// The next broker is being told of `bindings` as they were: what is given back meanwhile it is told when that is done.
    restoring: bool,
    closing: bool,
}

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
    inbox: OnceLock<Arc<dyn Inbox>>,
    links: Links,
    /// The last report is given: none follows.
    reported: AtomicBool,
    /// The broker has been told what it asked for by [`UNASKED`].
    told: AtomicBool,
    /// [`ToBroker::Exiting`], encoded.
    exiting: Vec<u8>,
}

/// The members of this process, for its exit.
static MEMBERS: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());
static AT_EXIT: Once = Once::new();
static EXITS: AtomicBool = AtomicBool::new(false);

/// Whether this process has called `exit()`, and tells the broker what it has counted. Its other threads run on meanwhile.
pub fn exits() -> bool {
    EXITS.load(Ordering::Acquire)
}

/// Many programs end without closing their devices. This may run in a signal handler, with the locks of whoever it
/// interrupted held for ever: the thread that listens to the broker does what needs them, and is not waited for for long.
extern "C" fn exiting() {
    EXITS.store(true, Ordering::Release);
    let until = Instant::now() + EXIT_TIME;
    for index in 0.. {
        let members = MEMBERS.try_lock_until(until);
        let next = members.and_then(|members| members.get(index).cloned());
        let Some(member) = next else { return };
        if let Some(member) = member.upgrade() {
            member.ask_to_be_asked(until);
        }
    }
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
    let (link, given) = loop {
        attempt += 1;
        let link = start::connect_or_start(&config.dir, config.program.as_deref())?;
        match say_hello(&link, &config.name, None) {
            Ok(given) => break (link, given),
            // It was about to end.
            Err(JoinError::Io { .. }) if attempt < ATTEMPTS => {}
            Err(e) => return Err(e),
        }
    };
    let exiting = wire::encode(&ToBroker::Exiting, &[]).map_err(context("preparing the last message"))?;
    let link = Arc::new(link);
    let shared =
        Shared::new(config.clone(), given, link.clone(), exiting).map_err(context("making an event counter"))?;
    let shared = Arc::new(shared);
    let theirs = shared.clone();
    roce_net::start_thread("ferroce broker", move || theirs.serve(link))
        .map_err(context("starting the thread that listens to the broker"))?;
    shared.register();
    Ok(Membership { shared })
}

/// The number of requests over a connection that nobody else uses.
const SEQ: u64 = 0;

/// Sends a request over a connection that nobody else uses, and waits for the answer. What comes besides is passed to
/// `other`.
fn ask(
    link: &OwnedFd,
    request: Request,
    fds: &[BorrowedFd<'_>],
    other: &mut dyn FnMut(Record<ToClient>),
) -> Result<Record<Reply>, JoinError> {
    let bytes = wire::encode(&ToBroker::Request { seq: SEQ, request }, &[]).map_err(context("asking the broker"))?;
    wire::send(link.as_fd(), &bytes, fds, true).map_err(context("asking the broker"))?;
    answer(link, other)
}

/// Waits for the answer to a request of [`ask`], or for another one to the same.
fn answer(link: &OwnedFd, other: &mut dyn FnMut(Record<ToClient>)) -> Result<Record<Reply>, JoinError> {
    let mut buffer = vec![0; MAX_RECORD];
    let deadline = Instant::now() + REQUEST_TIME;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(JoinError::Timeout);
        }
        if !roce_net::wait_readable(link.as_fd(), Some(left)).map_err(context("waiting for the broker"))? {
            continue;
        }
        match wire::receive(link.as_fd(), &mut buffer, false) {
            Ok(Record {
                message: ToClient::Reply { seq: SEQ, reply },
                fds,
                lacks_fds,
                ..
            }) => {
                return accepted(Record {
                    message: reply,
                    payload: vec![],
                    fds,
                    lacks_fds,
                });
            }
            Ok(record) => other(record),
            Err(RecvError::Empty) => {}
            Err(RecvError::Closed) => {
                return Err(context("asking the broker")(io::ErrorKind::ConnectionReset.into()));
            }
            Err(RecvError::Malformed(_)) => return Err(JoinError::Protocol),
        }
    }
}

fn accepted(record: Record<Reply>) -> Result<Record<Reply>, JoinError> {
    match record.message {
        Reply::Refused { why, text } => Err(JoinError::Refused { why, text }),
        _ if record.lacks_fds => Err(context("receiving sockets of the broker")(
            io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error()),
        )),
        _ => Ok(record),
    }
}

fn say_hello(link: &OwnedFd, name: &str, rejoin: Option<Rejoin>) -> Result<Rejoin, JoinError> {
    let hello = Request::Hello {
        version: VERSION,
        name: name.to_owned(),
        rejoin,
    };
    match ask(link, hello, &[], &mut |_| {})?.message {
        Reply::Welcome { place, token, parts } if place.is_valid() => Ok(Rejoin { place, token, parts }),
        _ => Err(JoinError::Protocol),
    }
}

/// Asks a running broker who is there; `None` when none runs.
///
/// # Errors
/// When it does not answer.
pub fn statistics(dir: &Path) -> Result<Option<Statistics>, JoinError> {
    let Some(link) = start::connect(dir)? else {
        return Ok(None);
    };
    let mut all: Option<Statistics> = None;
    let mut record = ask(&link, Request::Statistics, &[], &mut |_| {})?;
    while let Reply::Statistics { part, more } = record.message {
        match &mut all {
            None => all = Some(part),
            Some(all) => all.append(part),
        }
        if !more {
            return Ok(all);
        }
        record = answer(&link, &mut |_| {})?;
    }
    Err(JoinError::Protocol)
}

/// Whether a broker runs that this user may use.
pub fn running_broker(dir: &Path) -> bool {
    matches!(start::connect(dir), Ok(Some(_)))
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
    pub fn set_inbox(&self, inbox: Arc<dyn Inbox>) {
        let _ = self.shared.inbox.set(inbox);
    }

    /// Tells what the member has counted in all, before it leaves: the broker keeps that, and nothing that comes later.
    pub fn report_last(&self, report: Report) {
        if !self.shared.is_ours() || self.shared.reported.swap(true, Ordering::AcqRel) {
            return;
        }
        let link = self.shared.state.lock().link.clone();
        if let Some(link) = link {
            tell_report(&link, UNASKED, Some(report));
        }
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

/// Nobody dies of statistics that are not complete.
fn tell_report(link: &OwnedFd, token: u64, report: Option<Report>) {
    let message = ToBroker::Report { token, report };
    let sent = wire::encode(&message, &[]).and_then(|bytes| wire::send(link.as_fd(), &bytes, &[], false));
    if let Err(e) = sent {
        tracing::debug!("the broker is not told what was counted: {e}");
    }
}

impl Shared {
    fn new(config: JoinConfig, given: Rejoin, link: Arc<OwnedFd>, exiting: Vec<u8>) -> io::Result<Self> {
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
            reported: AtomicBool::new(false),
            told: AtomicBool::new(false),
            exiting,
        })
    }

    /// Has the process tell at its exit what it has counted.
    fn register(self: &Arc<Self>) {
        AT_EXIT.call_once(|| {
            if let Err(e) = sys::at_exit(exiting) {
                tracing::info!("what this process counts is not told at its exit: {e}");
            }
        });
        // A fork may have left it locked, which then is for ever.
        if let Some(mut members) = MEMBERS.try_lock_for(EXIT_TIME) {
            members.retain(|m| m.strong_count() > 0);
            members.push(Arc::downgrade(self));
        }
    }

    /// Waits until the broker has asked for a report and got it, or has no time for that. Allocates nothing.
    fn ask_to_be_asked(&self, until: Instant) {
        if !self.is_ours() {
            return;
        }
        let state = self.state.try_lock_until(until);
        let Some(link) = state.and_then(|state| state.link.clone()) else {
            return;
        };
        if wire::send(link.as_fd(), &self.exiting, &[], false).is_err() {
            return;
        }
        while !self.told.load(Ordering::Acquire) && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
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
            let bytes = wire::encode(&message, &[]).map_err(context("asking the broker"))?;
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
                    inbox.datagram(&RxMeta::from(&meta), &record.payload);
                }
            }
            ToClient::Query { token } => {
                let report = self.inbox.get().and_then(|i| i.report());
                // The report may have ended the device, which then has told more.
                let report = report.filter(|_| !self.reported.load(Ordering::Acquire));
                tell_report(link, token, report);
                if token == UNASKED {
                    self.told.store(true, Ordering::Release);
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
        say_hello(&link, &self.config.name, Some(rejoin))?;
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

impl State {
    /// A broker has given sockets of an address. The next one will be told.
    fn open(&mut self, addr: IpAddr, reply: &Reply, fds: Vec<OwnedFd>) {
        let Reply::Opened { vault, addrs } = reply else { return };
        let (mut receivers, mut held) = (Vec::new(), Vec::new());
        let mut fds = fds.into_iter().map(Arc::new);
        while let Some(socket) = fds.next() {
            receivers.push(socket);
            if *vault {
                held.extend(fds.next());
            }
        }
        if receivers.is_empty() {
            // One for all addresses, which this process has already, brings what comes to this one.
            let has = |socket: &&Arc<OwnedFd>| group::bound_to(socket).is_some_and(|at| addrs.contains(&at));
            receivers.extend(self.opened.iter().flat_map(|o| &o.for_next).find(has).cloned());
        }
        if receivers.is_empty() {
            return;
        }
        let for_next = if held.is_empty() { &receivers } else { &held }.clone();
        self.opened.push(Opened { addr, for_next });
        self.given.insert(addr, OpenSockets { receivers, held });
    }

    /// Nobody waits for the answer to a request any more.
    fn give_up(&mut self, seq: u64) {
        if let Some(request) = self.awaited.remove(&seq)
            && self.given_up.len() < MAX_GIVEN_UP
        {
            self.given_up.insert(seq, request);
        }
    }

    /// Writes down what a broker has done.
    fn note(&mut self, request: &Request, reply: &Reply) {
        match (request, reply) {
            (Request::Bind { addr, reuse, .. }, Reply::Bound { service }) => self.bindings.push(Binding {
                service: *service,
                addr: *addr,
                reuse: *reuse,
                bound: true,
                listening: false,
            }),
            (Request::Listen { service, addr }, Reply::Done) => {
                let ours = |b: &&mut Binding| b.service == *service && b.addr == *addr && !b.listening;
                match self.bindings.iter_mut().find(ours) {
                    Some(binding) => binding.listening = true,
                    None => self.bindings.push(Binding {
                        service: *service,
                        addr: *addr,
                        reuse: false,
                        bound: false,
                        listening: true,
                    }),
                }
            }
            _ => {}
        }
    }
}

/// Returns the request that undoes one whose caller has given up.
fn undo(request: &Request, reply: &Reply) -> Option<Request> {
    match (request, reply) {
        (Request::Bind { addr, .. }, Reply::Bound { service }) => Some(Request::Unbind {
            service: *service,
            addr: *addr,
        }),
        (Request::Listen { service, addr }, Reply::Done) => Some(Request::Unlisten {
            service: *service,
            addr: *addr,
        }),
        _ => None,
    }
}

/// Returns the requests that give back the bindings in `told` that are not in `left`.
fn given_back(told: &[Binding], left: &[Binding]) -> Vec<Request> {
    let count = |all: &[Binding], of: &Binding, which: fn(&Binding) -> bool| {
        let same = all
            .iter()
            .filter(|b| b.service == of.service && b.addr == of.addr && which(b));
        same.count()
    };
    let mut out = Vec::new();
    for (n, b) in told.iter().enumerate() {
        // The n-th of several like it is over when fewer are left.
        let is_over = |which: fn(&Binding) -> bool| which(b) && count(&told[..=n], b, which) > count(left, b, which);
        let (service, addr) = (b.service, b.addr);
        if is_over(|b| b.listening) {
            out.push(Request::Unlisten { service, addr });
        }
        if is_over(|b| b.bound) {
            out.push(Request::Unbind { service, addr });
        }
    }
    out
}

#[cfg(test)]
mod tests;
