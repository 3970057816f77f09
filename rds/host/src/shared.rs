//! State that the thread of a node and its sockets share.

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc,
        mpsc::{Sender, channel},
    },
    task::Waker,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};
use rds::{Error, Node, Output, RdmaStatus, RegionRights, SocketId, proto::RdmaCookie};
use roce::reactor::Handle;
use roce_verbs::mem::Pages;

/// Command to the thread of a node.
#[derive(Debug)]
pub(crate) enum Command {
    /// There is something to post.
    Work,
    /// Register memory.
    Register(Box<Register>),
    /// End the connections, then the thread.
    Stop,
}

/// Memory to register, all of it.
#[derive(Debug)]
pub(crate) struct Register {
    pub(crate) socket: SocketId,
    pub(crate) memory: Arc<Pages>,
    pub(crate) rights: RegionRights,
    pub(crate) answer: Sender<Result<RdmaCookie, Error>>,
}

/// See the module.
pub(crate) struct Shared {
    state: Mutex<State>,
    /// Somebody's socket may have changed.
    changed: Condvar,
    handle: Handle<Command, ()>,
}

/// State behind the lock, which is never held while something waits.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// `None` before the first turn and after the last.
    pub(crate) node: Option<Node>,
    /// Tasks to wake when a socket changes.
    wakers: HashMap<SocketId, Vec<Waker>>,
    /// Operations that a program wants to know the end of, with that.
    operations: HashMap<u64, Option<RdmaStatus>>,
    next_operation: u64,
    /// Why the node has ended.
    ended: Option<(io::ErrorKind, String)>,
}

impl State {
    /// The node.
    ///
    /// # Errors
    /// Why it has ended.
    pub(crate) fn node(&mut self) -> io::Result<&mut Node> {
        match (&mut self.node, &self.ended) {
            (Some(node), _) => Ok(node),
            (None, Some((kind, text))) => Err(io::Error::new(*kind, text.clone())),
            (None, None) => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Returns the end of an operation, if it has ended.
    ///
    /// # Errors
    /// Why the node has ended.
    fn operation(&mut self, token: u64) -> io::Result<Option<RdmaStatus>> {
        match self.operations.get(&token).copied().flatten() {
            None => self.node().map(|_| None),
            status => Ok(status),
        }
    }

    /// Takes what the node has to tell. Returns whether a socket has changed.
    pub(crate) fn take_outputs(&mut self) -> bool {
        let Some(node) = &mut self.node else { return false };
        let mut changed = false;
        while let Some(output) = node.poll_output() {
            match output {
                Output::Changed(id) => {
                    changed = true;
                    // From now on it is told again.
                    let _ = node.poll(id);
                    while let Ok(notice) = node.notice(id) {
                        if let Some(end) = self.operations.get_mut(&notice.token) {
                            *end = Some(notice.status);
                        }
                    }
                    self.wakers.remove(&id).into_iter().flatten().for_each(Waker::wake);
                }
                Output::Up(key) => tracing::info!("RDS: connected, {key}"),
                Output::Down(key, why) => tracing::info!("RDS: not connected, {key}: {why}"),
                Output::Restarted(key) => tracing::info!("RDS: the peer was started again, {key}"),
                Output::Congested(addr) => tracing::debug!("RDS: the port {addr} is congested"),
                Output::PeerCongested(peer) => tracing::debug!("RDS: {peer} has congested ports"),
                Output::Refused { peer, why } => tracing::debug!("RDS: a request of {peer} was refused: {why}"),
            }
        }
        changed
    }
}

impl Shared {
    pub(crate) fn new(handle: Handle<Command, ()>) -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            handle,
        }
    }

    /// Works on the node in a turn of its thread.
    pub(crate) fn in_turn<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock();
        let result = f(&mut state);
        if state.take_outputs() {
            self.changed.notify_all();
        }
        result
    }

    /// Works on the node for a socket.
    ///
    /// # Errors
    /// The errors of `f`, and why the node has ended.
    pub(crate) fn call<T>(&self, f: impl FnOnce(&mut Node) -> Result<T, Error>) -> io::Result<T> {
        self.attempt(&mut self.state.lock(), f)?.map_err(errno)
    }

    /// Works on the node once. What is to be posted leaves by the node's thread.
    ///
    /// # Errors
    /// Why the node has ended.
    fn attempt<T>(
        &self,
        state: &mut State,
        f: impl FnOnce(&mut Node) -> Result<T, Error>,
    ) -> io::Result<Result<T, Error>> {
        let node = state.node()?;
        let result = f(node);
        if node.wants_turn() {
            self.handle.command(Command::Work);
        }
        if state.take_outputs() {
            self.changed.notify_all();
        }
        Ok(result)
    }

    /// Calls `f` until it no longer would block, or the time is over.
    ///
    /// # Errors
    /// `TimedOut`, and the errors of [`call`](Self::call).
    pub(crate) fn wait<T>(
        &self,
        timeout: Option<Duration>,
        mut f: impl FnMut(&mut Node) -> Result<T, Error>,
    ) -> io::Result<T> {
        let end = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = self.state.lock();
        loop {
            match self.attempt(&mut state, &mut f)? {
                Err(Error::WouldBlock | Error::Congested) => {}
                result => return result.map_err(errno),
            }
            match end {
                Some(end) if self.changed.wait_until(&mut state, end).timed_out() => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Some(_) => {}
                None => self.changed.wait(&mut state),
            }
        }
    }

    /// Registers memory for a socket, in a turn of the node's thread.
    ///
    /// # Errors
    /// Errors of the node, and `NotConnected` when it has ended.
    pub(crate) fn register(
        &self,
        socket: SocketId,
        memory: Arc<Pages>,
        rights: RegionRights,
    ) -> io::Result<RdmaCookie> {
        let (answer, registered) = channel();
        let register = Register {
            socket,
            memory,
            rights,
            answer,
        };
        self.handle.command(Command::Register(Box::new(register)));
        let registered = registered.recv().map_err(|_| io::ErrorKind::NotConnected)?;
        registered.map_err(errno)
    }

    /// Returns the number of a new operation.
    pub(crate) fn new_operation(&self) -> u64 {
        let mut state = self.state.lock();
        let token = state.next_operation;
        state.next_operation += 1;
        state.operations.insert(token, None);
        token
    }

    /// Forgets an operation, ended or not.
    pub(crate) fn forget_operation(&self, token: u64) {
        self.state.lock().operations.remove(&token);
    }

    /// Returns the end of an operation, if it has ended.
    ///
    /// # Errors
    /// Why the node has ended.
    pub(crate) fn operation(&self, token: u64) -> io::Result<Option<RdmaStatus>> {
        self.state.lock().operation(token)
    }

    /// Waits for the end of an operation.
    ///
    /// # Errors
    /// Why the node has ended.
    pub(crate) fn wait_for_operation(&self, token: u64) -> io::Result<RdmaStatus> {
        let mut state = self.state.lock();
        loop {
            match state.operation(token)? {
                Some(status) => return Ok(status),
                None => self.changed.wait(&mut state),
            }
        }
    }

    /// Has a task woken when a socket changes.
    pub(crate) fn wake(&self, id: SocketId, waker: &Waker) {
        let mut state = self.state.lock();
        let wakers = state.wakers.entry(id).or_default();
        if !wakers.iter().any(|known| known.will_wake(waker)) {
            wakers.push(waker.clone());
        }
    }

    /// Forgets the tasks of a socket.
    pub(crate) fn forget(&self, id: SocketId) {
        self.state.lock().wakers.remove(&id);
    }

    /// The node has ended.
    pub(crate) fn end(&self, why: &io::Error) {
        let mut state = self.state.lock();
        state.node = None;
        state.ended.get_or_insert_with(|| (why.kind(), why.to_string()));
        state
            .wakers
            .drain()
            .flat_map(|(_, wakers)| wakers)
            .for_each(Waker::wake);
        drop(state);
        self.changed.notify_all();
    }

    /// Ends the node.
    pub(crate) fn stop(&self) {
        self.handle.command(Command::Stop);
    }
}

/// Returns an error as the kernel's.
fn errno(error: Error) -> io::Error {
    io::Error::from_raw_os_error(error.errno())
}

/// Whether a call is to be tried again once the socket has changed.
pub(crate) fn would_block(e: &io::Error) -> bool {
    let of = |error: Error| Some(error.errno());
    e.raw_os_error() == of(Error::WouldBlock) || e.raw_os_error() == of(Error::Congested)
}
