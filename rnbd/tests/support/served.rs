//! A server whose transport, disks and host are the test's: what it does is a list of actions.
#![allow(dead_code)]

use std::{
    cell::RefCell,
    collections::{BTreeMap, VecDeque},
    ops::{Deref, DerefMut},
    rc::Rc,
    sync::Arc,
};

use rnbd::{
    Errno,
    proto::AccessMode,
    server::{
        Limits, Server,
        action::{OpenRefused, Opened, Output, Ticket},
        disk::{DiskOp, Disks, Op, StoreId},
        transport::Transport,
    },
};
use roce_verbs::{Instant, mem::Pages};
use rtrs::server::request::{Output as RtrsOutput, RequestKey, SessionKey};

/// Action of a server.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Action {
    /// Answers a request with an error number.
    Answer(RequestKey, i32),
    /// Answers a read with a message at this place of the session's memory.
    AnswerWith {
        request: RequestKey,
        at: usize,
        message: Vec<u8>,
    },
    /// Clears a part of the session's memory; the answer follows.
    Zero {
        request: RequestKey,
        from: usize,
        len: usize,
    },
    /// Submits an operation.
    Io(RequestKey, SessionKey, DiskOp),
    /// Has a device opened.
    Open {
        ticket: Ticket,
        session_name: String,
        name: Vec<u8>,
        mode: AccessMode,
    },
    /// Has a device closed.
    Close { ticket: Ticket, store: StoreId },
}

type Log = Rc<RefCell<VecDeque<Action>>>;

/// Disks that work when the test says so.
#[derive(Debug)]
pub(crate) struct Disk {
    log: Log,
    running: BTreeMap<RequestKey, Box<Op<()>>>,
    ended: VecDeque<Box<Op<()>>>,
    resized: Vec<(StoreId, u64)>,
}

impl Disks for Disk {
    type Part = ();

    fn submit(&mut self, op: Box<Op<()>>) {
        assert!(op.memory.is_some(), "{op:?}");
        self.log
            .borrow_mut()
            .push_back(Action::Io(op.id, op.id.session, op.disk));
        assert!(self.running.insert(op.id, op).is_none(), "twice");
    }

    fn poll(&mut self) -> Option<Box<Op<()>>> {
        self.ended.pop_front()
    }

    fn poll_resized(&mut self) -> Option<(StoreId, u64)> {
        self.resized.pop()
    }
}

struct Below {
    now: Instant,
    memory: Arc<Pages>,
    writes_fail: bool,
    log: Log,
    /// Bytes written for the next answer.
    written: Option<(usize, Vec<u8>)>,
}

impl Transport for Below {
    fn now(&self) -> Instant {
        self.now
    }

    fn memory(&self, _: SessionKey) -> Option<&Arc<Pages>> {
        Some(&self.memory)
    }

    fn write(&mut self, _: RequestKey, at: usize, bytes: &[u8]) -> bool {
        if self.writes_fail {
            return false;
        }
        let (from, written) = self.written.get_or_insert((at, Vec::new()));
        assert_eq!(*from + written.len(), at, "there is a gap");
        written.extend(bytes);
        true
    }

    fn answer(&mut self, request: RequestKey, errno: i32) {
        let mut log = self.log.borrow_mut();
        match self.written.take() {
            Some((from, zeroes)) if zeroes.iter().all(|b| *b == 0) => {
                let len = zeroes.len();
                log.push_back(Action::Zero { request, from, len });
                log.push_back(Action::Answer(request, errno));
            }
            Some((at, message)) => {
                assert_eq!(errno, 0);
                log.push_back(Action::AnswerWith { request, at, message });
            }
            None => log.push_back(Action::Answer(request, errno)),
        }
    }
}

/// See the module.
pub(crate) struct Served {
    server: Server<Disk>,
    memory: Arc<Pages>,
    /// No bytes of an answer can be written.
    pub(crate) writes_fail: bool,
    log: Log,
}

impl Deref for Served {
    type Target = Server<Disk>;

    fn deref(&self) -> &Server<Disk> {
        &self.server
    }
}

impl DerefMut for Served {
    fn deref_mut(&mut self) -> &mut Server<Disk> {
        &mut self.server
    }
}

impl Served {
    pub(crate) fn new(limits: Limits) -> Self {
        let log = Log::default();
        let disk = Disk {
            log: log.clone(),
            running: BTreeMap::new(),
            ended: VecDeque::new(),
            resized: Vec::new(),
        };
        Self {
            server: Server::new(limits, disk),
            memory: Pages::allocate(4096).unwrap(),
            writes_fail: false,
            log,
        }
    }

    fn call(&mut self, now: Instant, f: impl FnOnce(&mut Server<Disk>, &mut Below)) {
        let mut below = Below {
            now,
            memory: self.memory.clone(),
            writes_fail: self.writes_fail,
            log: self.log.clone(),
            written: None,
        };
        f(&mut self.server, &mut below);
        self.collect();
    }

    /// Takes what the server wants of its host.
    fn collect(&mut self) {
        while let Some(output) = self.server.poll_output() {
            let action = match output {
                Output::Rtrs(_) => continue,
                Output::Open {
                    ticket,
                    session_name,
                    name,
                    mode,
                } => Action::Open {
                    ticket,
                    session_name,
                    name,
                    mode,
                },
                Output::Close { ticket, store } => Action::Close { ticket, store },
            };
            self.log.borrow_mut().push_back(action);
        }
    }

    pub(crate) fn rtrs(&mut self, now: Instant, output: RtrsOutput) {
        self.call(now, |server, below| server.rtrs(below, output));
    }

    pub(crate) fn opened(&mut self, now: Instant, ticket: Ticket, result: Result<Opened, OpenRefused>) {
        self.call(now, |server, below| server.opened(below, ticket, result));
    }

    pub(crate) fn closed(&mut self, now: Instant, ticket: Ticket) {
        self.call(now, |server, below| server.closed(below, ticket));
    }

    /// The disk ends an operation.
    pub(crate) fn io_done(&mut self, id: RequestKey, result: Result<(), Errno>) {
        let disk = self.server.disks_mut();
        let mut op = disk.running.remove(&id).expect("an operation in flight");
        op.result = result;
        disk.ended.push_back(op);
        self.call(Instant::ZERO, |server, below| assert!(server.poll_disks(below)));
    }

    /// The disk finds that a device has another size.
    pub(crate) fn resized(&mut self, store: StoreId, size: u64) {
        self.server.disks_mut().resized.push((store, size));
        self.call(Instant::ZERO, |server, below| assert!(!server.poll_disks(below)));
    }

    pub(crate) fn poll_action(&mut self) -> Option<Action> {
        self.collect();
        self.log.borrow_mut().pop_front()
    }
}
