//! A node in threads of the test: sockets of this process, and whatever else a test has it send.

use std::{
    io::IoSlice,
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

use rds_local::{
    Answer, MAX_MESSAGE, Op, Page, Record, RecvHeader, RecvKind, Request, SendHeader, SocketFlags, SocketKey,
    SocketOption, memory_file, receive, send,
};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags as Flags, SocketType, accept, listen, socket_with,
    socketpair,
};
use zerocopy::IntoBytes as _;

/// Time that all messages come at, nanoseconds.
pub(crate) const TIME: i64 = 1_000_000_007_000;

struct Socket {
    key: SocketKey,
    end: Arc<OwnedFd>,
    page: Page,
    page_file: OwnedFd,
}

#[derive(Default)]
struct State {
    sockets: Vec<Socket>,
    made: u64,
    is_congested: bool,
    waiting: usize,
    /// Operations that came with messages.
    ops: Vec<Op>,
    cancelled: Vec<SocketAddr>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone, Default)]
pub(crate) struct Node(Arc<Shared>);

impl Node {
    /// Serves the directory as long as the process lives.
    pub(crate) fn start(dir: &Path) -> Self {
        let node = Self::default();
        let path = SocketAddrUnix::new(dir.join(rds_local::SOCKET)).unwrap();
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, Flags::CLOEXEC, None).unwrap();
        rustix::net::bind(&listener, &path).unwrap();
        listen(&listener, 16).unwrap();
        let this = node.clone();
        thread::spawn(move || {
            while let Ok(connection) = accept(&listener) {
                let this = this.clone();
                thread::spawn(move || this.serve(&connection));
            }
        });
        node
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, connection: &OwnedFd) {
        let mut bytes = [0; Request::LEN];
        while let Ok(Some(record)) = receive(connection, &mut bytes, RecvFlags::empty()) {
            let request = Request::parse(&bytes[..record.len]).unwrap();
            let (answer, fds) = self
                .answer(request, &record)
                .unwrap_or_else(|errno| (Answer::error(errno), Vec::new()));
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            if send(
                connection,
                &[IoSlice::new(&answer.to_bytes())],
                &fds,
                SendFlags::empty(),
            )
            .is_err()
            {
                return;
            }
        }
    }

    fn answer(&self, request: Request, record: &Record) -> Result<(Answer, Vec<OwnedFd>), i32> {
        let mut answer = Answer::default();
        let mut fds = Vec::new();
        let mut state = self.state();
        let taken = |state: &State, addr| state.sockets.iter().any(|socket| socket.page.bound() == Some(addr));
        let by_key = |state: &State, key| {
            state
                .sockets
                .iter()
                .position(|socket| socket.key == key)
                .ok_or(libc::ENOTSOCK)
        };
        match request {
            Request::Socket => (answer.value, fds) = self.open(&mut state),
            Request::Attach(key) => {
                if record.fds.first().map(SocketKey::of_peer) != Some(Some(key)) {
                    return Err(libc::ENOTSOCK);
                }
                fds.push(state.sockets[by_key(&state, key)?].page_file.try_clone().unwrap());
            }
            Request::Bind(_, addr) if taken(&state, addr) => return Err(libc::EADDRINUSE),
            Request::Bind(key, mut addr) => {
                let at = by_key(&state, key)?;
                if addr.port() == 0 {
                    state.made += 1;
                    addr.set_port(10_000 + state.made as u16);
                }
                state.sockets[at].page.set_bound(addr);
                answer.addr = Some(addr);
            }
            Request::Connect(key, addr) => state.sockets[by_key(&state, key)?].page.set_peer(addr),
            Request::SetTos(key, tos) => {
                let page = &state.sockets[by_key(&state, key)?].page;
                match page.tos() {
                    0 => page.set_tos(tos),
                    _ => return Err(libc::EINVAL),
                }
            }
            Request::SetOption(key, option, value) => {
                let page = &state.sockets[by_key(&state, key)?].page;
                let (send, recv) = page.buffers();
                match option {
                    SocketOption::SendBuffer => page.set_buffers(value as usize, recv),
                    SocketOption::RecvBuffer => page.set_buffers(send, value as usize),
                    SocketOption::RecvErr => page.set_flag(SocketFlags::RecvErr, value != 0),
                    SocketOption::CongMonitor => page.set_flag(SocketFlags::CongMonitor, value != 0),
                    SocketOption::Transport => page.set_transport(value as u32),
                }
            }
            Request::Cancel(_, addr) => state.cancelled.push(addr),
            Request::Congestion { wait: false, .. } if state.is_congested => return Err(libc::ENOBUFS),
            Request::Congestion { wait, .. } => {
                state.waiting += usize::from(wait);
                let is_congested = |state: &mut State| state.is_congested;
                drop(self.0.changed.wait_while(state, is_congested).unwrap());
            }
            Request::Info(10006) => {
                (answer.value, answer.len) = (28, 56);
                fds.push(memory_file(&[7; 56]).unwrap());
            }
            Request::Info(_) => return Err(libc::ENOPROTOOPT),
            Request::Map { len, .. } => answer.value = len << 32 | 0x77,
            Request::Unmap { cookie: 0x77, .. } | Request::Region(_, 0x77) => {}
            Request::Unmap { .. } | Request::Region(..) => return Err(libc::EINVAL),
            // What a descriptor of the process's memory is the node knows.
            Request::Memory => answer.value = 4 + record.fds.len() as u64,
        }
        Ok((answer, fds))
    }

    /// A new socket: its key, and descriptors for the program.
    fn open(&self, state: &mut State) -> (u64, Vec<OwnedFd>) {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, Flags::CLOEXEC, None).unwrap();
        state.made += 1;
        let key = SocketKey(u64::from(std::process::id()) << 32 | state.made);
        key.name_end(ours.as_fd()).unwrap();
        let (page, page_file) = Page::create().unwrap();
        page.set_buffers(106_496, 106_496);
        let end = Arc::new(ours);
        let files = vec![theirs, page_file.try_clone().unwrap()];
        state.sockets.push(Socket {
            key,
            end: end.clone(),
            page,
            page_file,
        });
        let this = self.clone();
        thread::spawn(move || this.forward(key, &end));
        (key.0, files)
    }

    /// Takes messages of a program's socket to where they go, until it is closed.
    fn forward(&self, key: SocketKey, end: &OwnedFd) {
        let mut bytes = vec![0; 2 * MAX_MESSAGE];
        while let Ok(Some(record)) = receive(end, &mut bytes, RecvFlags::empty()) {
            let (to, op, data) = SendHeader::parse(&bytes[..record.len]).unwrap();
            let mut state = self.state();
            let own = state.sockets.iter().find(|socket| socket.key == key);
            let Some((from, peer)) = own.map(|socket| (socket.page.bound(), socket.page.peer())) else {
                return;
            };
            let cookie = if let Op::Dest(cookie) = op { Some(cookie) } else { None };
            state.ops.push(op);
            drop(state);
            self.push(to.or(peer).unwrap(), RecvKind::Message(cookie), from, data);
        }
        self.state().sockets.retain(|socket| socket.key != key);
        self.0.changed.notify_all();
    }

    fn end_of(&self, addr: SocketAddr) -> Option<Arc<OwnedFd>> {
        let state = self.state();
        let found = state.sockets.iter().find(|socket| socket.page.bound() == Some(addr));
        found.map(|socket| socket.end.clone())
    }

    /// Sends a packet to a program's socket, if there is one of this address.
    pub(crate) fn push(&self, to: SocketAddr, kind: RecvKind, from: Option<SocketAddr>, data: &[u8]) {
        if let Some(end) = self.end_of(to) {
            let header = RecvHeader::new(kind, from, TIME, data.len());
            // Its program may have closed it.
            let _ = send(
                &end,
                &[IoSlice::new(header.as_bytes()), IoSlice::new(data)],
                &[],
                SendFlags::empty(),
            );
        }
    }

    /// Sends a message whose data is in a file.
    pub(crate) fn push_file(&self, to: SocketAddr, data: &[u8]) {
        let header = RecvHeader::new(RecvKind::Message(None), Some(to), TIME, data.len()).in_file();
        let file = memory_file(data).unwrap();
        let end = self.end_of(to).unwrap();
        send(
            &end,
            &[IoSlice::new(header.as_bytes())],
            &[file.as_fd()],
            SendFlags::empty(),
        )
        .unwrap();
    }

    /// Ports of all peers are congested, or free.
    pub(crate) fn set_congested(&self, is_congested: bool) {
        let mut state = self.state();
        state.is_congested = is_congested;
        state.waiting = 0;
        for socket in &state.sockets {
            socket.page.set_some_port_is_congested(is_congested);
        }
        drop(state);
        self.0.changed.notify_all();
    }

    /// Waits until a program waits for a port.
    pub(crate) fn await_waiting(&self) {
        while self.state().waiting == 0 {
            thread::yield_now();
        }
    }

    /// Waits until no program has a socket.
    pub(crate) fn await_closed(&self) {
        drop(
            self.0
                .changed
                .wait_while(self.state(), |state| !state.sockets.is_empty())
                .unwrap(),
        );
    }

    /// Ends as far as a socket sees.
    pub(crate) fn leave(&self, addr: SocketAddr) {
        let end = self.end_of(addr).unwrap();
        rustix::net::shutdown(&*end, rustix::net::Shutdown::Both).unwrap();
    }

    /// Bytes that programs have taken from a socket.
    pub(crate) fn received(&self, addr: SocketAddr) -> u64 {
        let state = self.state();
        let found = state.sockets.iter().find(|socket| socket.page.bound() == Some(addr));
        found.unwrap().page.received()
    }

    /// The last operation of a message.
    pub(crate) fn last_op(&self) -> Op {
        self.state().ops.last().cloned().unwrap_or_default()
    }

    /// Addresses that messages to were cancelled.
    pub(crate) fn cancelled(&self) -> Vec<SocketAddr> {
        self.state().cancelled.clone()
    }
}
