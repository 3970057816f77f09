//! A client's host and a server's, and what a test can do with them.

use core::time::Duration;
use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use roce_port::fabric::Usage;
use roce_verbs::{Instant, mem::Pages};
use rtrs::{
    Direction, IoError,
    addr::PathAddr,
    client::{Buffer, Client, ConType, Output, PathId, PathNews, SessionConfig, SessionId, Submission},
    server::{Server, ServerConfig, request},
};

use crate::host::{Host, KeyMode};

fn ip(last: u8) -> IpAddr {
    IpAddr::from([192, 0, 2, last])
}

/// The addresses of a host: as many ways lead from one to another.
pub(crate) fn addresses(last: u8) -> Vec<IpAddr> {
    [last, last + 10, last + 20].map(ip).to_vec()
}

/// A host whose addresses are spread over so many devices. Of the same number with another seed: as it is after a restart.
fn host(last: u8, keys: KeyMode, devices: usize, seed: u64) -> Host {
    let all = addresses(last);
    let of = |device: usize| all.iter().copied().skip(device).step_by(devices).collect();
    let devices: Vec<Vec<IpAddr>> = (0..devices).map(of).collect();
    Host::new(keys, &devices, seed)
}

/// A client's host and a server's.
pub(crate) struct Pair {
    pub(crate) now: Instant,
    pub(crate) near: Host,
    pub(crate) far: Host,
    pub(crate) client: Client,
    pub(crate) server: Server,
    session: Option<SessionId>,
    /// What the server's user keeps, by the first byte of the header.
    files: BTreeMap<u8, Vec<u8>>,
    /// The server's user answers everything with this.
    pub(crate) answer_with: Option<i32>,
    /// It answers nothing.
    pub(crate) hold: bool,
    pub(crate) held: Vec<request::Request>,
    /// The server's loop does nothing, while its device acknowledges what comes.
    pub(crate) deaf: bool,
    /// Nothing goes over the wire.
    pub(crate) cut: bool,
    /// Nothing goes to or from these addresses.
    pub(crate) cut_off: Vec<IpAddr>,
    pub(crate) done: Vec<(u64, Result<(), IoError>, Option<Buffer>)>,
    pub(crate) told: Vec<Output>,
    /// Of paths.
    pub(crate) news: Vec<(PathId, PathNews)>,
    pub(crate) server_told: Vec<request::Output>,
    pub(crate) empty: [Usage; 2],
    /// Of the server.
    listeners: usize,
}

impl Pair {
    pub(crate) fn new(keys: KeyMode, config: ServerConfig) -> Self {
        Self::over(1, keys, config)
    }

    /// Both hosts' addresses are spread over so many devices; the server listens at all of its own.
    pub(crate) fn over(devices: usize, keys: KeyMode, config: ServerConfig) -> Self {
        let near = host(1, keys, devices, 1);
        let now = Instant::from_nanos(1_000_000);
        let mut far = host(2, keys, devices, 2);
        let empty = [near.usage(), far.usage()];
        let at = |addr| SocketAddr::new(addr, config.port);
        let all = addresses(2).into_iter().map(at);
        let further: Vec<SocketAddr> = all.skip(1).filter(|_| devices > 1).collect();
        let listeners = 1 + further.len();
        let config = ServerConfig {
            addr: ip(2),
            further,
            ..config
        };
        let (server, _) = far.with(now, |cx| Server::listen(cx, config)).unwrap();
        Self {
            now,
            near,
            far,
            client: Client::new(),
            server,
            session: None,
            files: BTreeMap::new(),
            answer_with: None,
            hold: false,
            held: Vec::new(),
            cut: false,
            cut_off: Vec::new(),
            deaf: false,
            done: Vec::new(),
            told: Vec::new(),
            news: Vec::new(),
            server_told: Vec::new(),
            empty,
            listeners,
        }
    }

    /// The server dies, and another one is there at once.
    pub(crate) fn restart_server(&mut self, keys: KeyMode, config: ServerConfig) {
        self.far = host(2, keys, 1, 1002);
        self.empty[1] = self.far.usage();
        let config = ServerConfig { addr: ip(2), ..config };
        self.server = self.far.with(self.now, |cx| Server::listen(cx, config)).unwrap().0;
        self.listeners = 1;
    }

    pub(crate) fn path(&self) -> PathAddr {
        PathAddr::to(SocketAddr::new(ip(2), 1234))
    }

    fn begin(&mut self, change: impl FnOnce(&mut SessionConfig)) {
        self.ask_open(change);
        self.settle();
    }

    /// The client is asked for a session, and has not done anything yet.
    pub(crate) fn ask_open(&mut self, change: impl FnOnce(&mut SessionConfig)) {
        let mut config = SessionConfig::new("pair", self.path());
        change(&mut config);
        let client = &mut self.client;
        let session = self.near.with(self.now, |cx| client.open(cx, config)).unwrap();
        self.session = Some(session);
    }

    pub(crate) fn open(&mut self, change: impl FnOnce(&mut SessionConfig)) {
        self.begin(change);
        let told = std::mem::take(&mut self.told);
        assert!(matches!(told[..], [Output::Opened(..)]), "{told:?}");
    }

    /// The text of the error.
    pub(crate) fn open_fails(&mut self, change: impl FnOnce(&mut SessionConfig)) -> String {
        self.begin(change);
        match &std::mem::take(&mut self.told)[..] {
            [Output::OpenFailed(_, error)] => error.to_string(),
            told => panic!("{told:?}"),
        }
    }

    pub(crate) fn session(&self) -> SessionId {
        self.session.unwrap()
    }

    pub(crate) fn buffer(&mut self, len: usize) -> Option<Buffer> {
        let (session, client) = (self.session(), &mut self.client);
        let taken = self.near.with(self.now, |cx| client.take_buffer(cx, session, len));
        Some(taken.unwrap())
    }

    pub(crate) fn give(&mut self, buffer: Option<Buffer>) {
        if let Some(buffer) = buffer {
            self.client.give_buffer(self.session.unwrap(), buffer);
        }
    }

    pub(crate) fn submit(&mut self, request: Submission) {
        let (session, client) = (self.session(), &mut self.client);
        self.near.with(self.now, |cx| client.submit(cx, session, request));
    }

    /// The server's user has so many bytes under this number.
    pub(crate) fn store(&mut self, file: usize, len: usize) {
        self.files.insert(file as u8, vec![0; len]);
    }

    /// Content of the server's file of this number.
    pub(crate) fn file(&self, file: usize) -> &[u8] {
        &self.files[&(file as u8)]
    }

    /// One request to its end; the data of a read.
    pub(crate) fn request(
        &mut self,
        direction: Direction,
        file: u8,
        data: Option<&[u8]>,
        len: usize,
    ) -> (Result<(), IoError>, Vec<u8>) {
        let buffer = self.buffer(len);
        let (session, client) = (self.session(), &mut self.client);
        if let (Some(data), Some(buffer)) = (data, &buffer) {
            client.buffers(session).unwrap().write(buffer, 0, data).unwrap();
        }
        self.submit(Submission {
            tag: 77,
            con: ConType::Io(0),
            direction,
            header: [file].into_iter().collect(),
            data: buffer,
        });
        self.settle();
        assert_eq!(self.done.len(), 1, "{:?}", self.done);
        let (tag, result, buffer) = self.done.remove(0);
        assert_eq!(tag, 77);
        let mut back = vec![0; len];
        let buffer = buffer.unwrap();
        let buffers = self.client.buffers(self.session.unwrap()).unwrap();
        buffers.read(&buffer, 0, &mut back).unwrap();
        self.give(Some(buffer));
        (result, back)
    }

    pub(crate) fn close(&mut self) {
        let (session, client) = (self.session(), &mut self.client);
        self.near.with(self.now, |cx| client.close(cx, session));
        self.settle();
        assert!(matches!(self.told.last(), Some(Output::Closed(_))), "{:?}", self.told);
    }

    pub(crate) fn server_closes(&mut self) {
        let key = self.server.sessions()[0].session;
        let server = &mut self.server;
        assert!(self.far.with(self.now, |cx| server.close_session(cx, key)));
        self.settle();
    }

    /// The server's user answers what it has held.
    pub(crate) fn release(&mut self) {
        self.hold = false;
        for request in std::mem::take(&mut self.held) {
            self.answer(&request);
        }
        self.settle();
    }

    /// Both sides are as they were before the session, but for the listener.
    pub(crate) fn assert_empty(&mut self) {
        self.pass(Duration::from_secs(400));
        assert_eq!(self.client.sessions().count(), 0);
        assert_eq!(self.near.usage(), self.empty[0]);
        let [_, mut far] = self.empty;
        far.cms += self.listeners;
        assert_eq!(self.far.usage(), far);
    }

    /// Time passes, with everything that is due.
    pub(crate) fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            self.settle();
            let near = self.near.poll_timeout();
            let far = self.far.poll_timeout();
            let server = self.server.next_timeout().filter(|_| !self.deaf);
            let all = [near, far, self.client.next_timeout(), server];
            match all.into_iter().flatten().min().filter(|at| *at <= end) {
                Some(at) => self.now = at.max(self.now + Duration::from_micros(1)),
                None => break,
            }
        }
        self.now = end;
        self.settle();
    }

    /// Turns of both loops until nothing moves.
    pub(crate) fn settle(&mut self) {
        for _ in 0..10_000 {
            let mut moved = self.client_turn();
            moved |= self.server_turn();
            moved |= self.carry();
            if !moved {
                return;
            }
        }
        panic!("it does not come to rest");
    }

    /// Carries what both hosts have sent. Returns whether anything arrived.
    pub(crate) fn carry(&mut self) -> bool {
        let cut = |addr: IpAddr| self.cut || self.cut_off.contains(&addr);
        let moved = carry(self.now, &mut self.near, &mut self.far, cut);
        moved | carry(self.now, &mut self.far, &mut self.near, cut)
    }

    pub(crate) fn client_turn(&mut self) -> bool {
        let (now, client) = (self.now, &mut self.client);
        self.near.timers(now);
        let mut moved = self.near.with(now, |cx| {
            let mut moved = false;
            let mut wcs = Vec::new();
            while cx.provider.poll_completions(&mut wcs, 64).unwrap() > 0 {
                moved = true;
                for (qp, wc) in wcs.drain(..) {
                    client.completion(cx, qp, &wc);
                }
            }
            while let Some(event) = cx.provider.poll_event() {
                moved = true;
                client.event(cx, &event);
            }
            client.timeout(cx);
            client.end_batch(cx);
            moved
        });
        while let Some(output) = self.client.poll_output() {
            moved = true;
            match output {
                Output::Done { tag, result, data, .. } => self.done.push((tag, result, data)),
                Output::Path { session, path, news } => {
                    let gone = |told: &Output| matches!(told, Output::Closed(of) if *of == session);
                    assert!(!self.told.iter().any(gone), "{news:?} of a session that is gone");
                    self.news.push((path, news));
                }
                other => self.told.push(other),
            }
        }
        moved
    }

    pub(crate) fn server_turn(&mut self) -> bool {
        if self.deaf {
            self.far.timers(self.now);
            return false;
        }
        let (now, server) = (self.now, &mut self.server);
        self.far.timers(now);
        let mut moved = self.far.with(now, |cx| {
            let mut moved = false;
            let mut wcs = Vec::new();
            while cx.provider.poll_completions(&mut wcs, 64).unwrap() > 0 {
                moved = true;
                for (qp, wc) in wcs.drain(..) {
                    server.completion(cx, qp, &wc);
                }
            }
            while let Some(event) = cx.provider.poll_event() {
                moved = true;
                server.event(cx, &event);
            }
            server.timeout(cx);
            moved
        });
        while let Some(output) = self.server.poll_output() {
            moved = true;
            match output {
                request::Output::Allocate { ticket, bytes } => {
                    let server = &mut self.server;
                    self.far
                        .with(now, |cx| server.ready(cx, ticket, Pages::allocate(bytes)));
                }
                request::Output::Free(_) => {}
                request::Output::Request(request) if self.hold => self.held.push(request),
                request::Output::Request(request) => self.answer(&request),
                other => self.server_told.push(other),
            }
        }
        let server = &mut self.server;
        self.far.with(now, |cx| server.end_batch(cx));
        moved
    }

    /// What the server's user does with a request.
    pub(crate) fn answer(&mut self, request: &request::Request) {
        let memory = self.server.memory(request.key.session).cloned();
        let file = request.header.first().and_then(|file| self.files.get_mut(file));
        let errno = match (self.answer_with, memory, file) {
            (Some(errno), ..) => errno,
            (None, Some(memory), Some(file)) => {
                let len = (request.data_len as usize).min(file.len());
                match request.direction {
                    Direction::Write => memory.read(request.data_offset, &mut file[..len]).unwrap(),
                    Direction::Read => memory.write(request.data_offset, &file[..len]).unwrap(),
                }
                0
            }
            _ => 5,
        };
        let (now, server) = (self.now, &mut self.server);
        self.far.with(now, |cx| server.answer(cx, request.key, errno));
    }
}

/// Moves packets; those from or to an address for which `cut` is true are lost.
pub(crate) fn carry(now: Instant, from: &mut Host, to: &mut Host, cut: impl Fn(IpAddr) -> bool) -> bool {
    let mut moved = false;
    from.drain(now, |meta, bytes| {
        if cut(meta.local) || cut(meta.remote.ip()) {
            return;
        }
        moved = true;
        to.receive(now, meta, bytes);
    });
    moved
}
