//! A server on a host of its own, and the wire to its clients by hand, which a test cuts and whose messages it holds back.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::Duration,
};

use roce_port::RxMeta;
use roce_verbs::mem::{MemError, Pages};
use roce_verbs::{
    Instant, QpAttr, QpState,
    provider::{Provider, QpId},
};
use rtrs::{
    Cx,
    heartbeat::HeartbeatConfig,
    server::{
        Server, ServerConfig,
        request::{Output, Request, RequestKey, SessionKey, Ticket},
    },
};

use crate::{
    host::{Host, KeyMode},
    station::Station,
};

/// Chunks of the usual configuration, and their bytes.
pub(crate) const DEPTH: u32 = 8;
pub(crate) const CHUNK: u32 = 8192;
/// Messages follow each other at the latest after such a delay: of acknowledgements, or of a receiver that is not ready.
const SOON: Duration = Duration::from_millis(2);
/// Shortest time between two timers.
const STEP: Duration = Duration::from_micros(1);
/// Attribute of an RTU, the last message of a connection's handshake.
const RTU: [u8; 2] = [0, 0x14];
/// Places of a management datagram's class and attribute in a packet.
const CLASS: usize = 21;
const ATTRIBUTE: usize = 36;
/// Class of the connection manager.
const CM_CLASS: u8 = 7;

/// Few small chunks, and the kernel's heartbeats.
pub(crate) fn config() -> ServerConfig {
    ServerConfig {
        addr: Ipv4Addr::UNSPECIFIED.into(),
        queue_depth: DEPTH,
        max_chunk_size: CHUNK,
        heartbeat: HeartbeatConfig::default(),
        ..ServerConfig::default()
    }
}

pub(crate) fn fixed_keys() -> ServerConfig {
    ServerConfig {
        always_invalidate: false,
        ..config()
    }
}

/// Second address of the server's first device.
pub(crate) const OTHER_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 101));

/// The first address of a device of the server's.
pub(crate) fn address(device: u8) -> IpAddr {
    [192, 0, 2, device + 1].into()
}

pub(crate) struct Bed {
    pub(crate) host: Host,
    pub(crate) server: Server,
    pub(crate) stations: BTreeMap<IpAddr, Station>,
    pub(crate) now: Instant,
    /// Reports of the server that the test has not taken. Memory is granted at once unless [`hold_memory`](Self::hold_memory) is set.
    pub(crate) outputs: Vec<Output>,
    pub(crate) hold_memory: bool,
    /// Nothing gets to the server.
    pub(crate) cut: bool,
    /// Addresses of clients whose RTUs wait, and these.
    pub(crate) unestablished: BTreeSet<IpAddr>,
    pub(crate) rtus: Vec<(RxMeta, Vec<u8>)>,
}

impl Bed {
    pub(crate) fn new(config: ServerConfig) -> Self {
        Self::over(config, KeyMode::Instant, 1)
    }

    pub(crate) fn with(config: ServerConfig, keys: KeyMode) -> Self {
        Self::over(config, keys, 1)
    }

    /// The server has so many devices.
    pub(crate) fn over(config: ServerConfig, keys: KeyMode, devices: u8) -> Self {
        let now = Instant::ZERO + Duration::from_secs(1);
        let more = |device| (device == 0).then_some(OTHER_ADDRESS);
        let addrs = |device| [address(device)].into_iter().chain(more(device)).collect();
        let addrs: Vec<Vec<IpAddr>> = (0..devices).map(addrs).collect();
        let mut host = Host::new(keys, &addrs, 2);
        let (server, local) = host.with(now, |cx| Server::listen(cx, config)).unwrap();
        assert_eq!(local.port(), 1234);
        Self {
            host,
            server,
            stations: BTreeMap::new(),
            now,
            outputs: Vec::new(),
            hold_memory: false,
            cut: false,
            unestablished: BTreeSet::new(),
            rtus: Vec::new(),
        }
    }

    pub(crate) fn station(&mut self, addr: IpAddr) -> &mut Station {
        let now = self.now;
        let station = self.stations.entry(addr).or_insert_with(|| Station::new(addr));
        station.host.fabric.set_now(now);
        station
    }

    /// Calls the server, then lets it finish its turn.
    pub(crate) fn call<T>(&mut self, f: impl FnOnce(&mut Server, &mut Cx<'_>) -> T) -> T {
        let out = self.machine(f);
        self.turn();
        out
    }

    fn machine<T>(&mut self, f: impl FnOnce(&mut Server, &mut Cx<'_>) -> T) -> T {
        let server = &mut self.server;
        self.host.with(self.now, |cx| f(server, cx))
    }

    /// Everything goes over and is worked off, while no time passes.
    pub(crate) fn settle(&mut self) {
        while self.round() {}
    }

    /// Everything goes over and is worked off, also what comes a little later.
    pub(crate) fn turn(&mut self) {
        let end = self.now + SOON;
        loop {
            self.settle();
            let stations = self.stations.values_mut().map(|station| &mut station.host);
            let due = stations.chain([&mut self.host]).filter_map(Host::poll_timeout).min();
            match due.filter(|at| *at <= end) {
                Some(at) => self.now = at.max(self.now + STEP),
                None => return,
            }
        }
    }

    fn round(&mut self) -> bool {
        let mut moved = self.carry_to_server();
        moved |= self.server_turn();
        moved | self.carry_to_clients()
    }

    /// Carries what clients have sent. Returns whether anything arrived.
    pub(crate) fn carry_to_server(&mut self) -> bool {
        let (now, mut moved) = (self.now, false);
        for (addr, station) in &mut self.stations {
            let held = self.unestablished.contains(addr);
            station.host.timers(now);
            station.host.drain(now, |meta, bytes| {
                let rtu = bytes.get(CLASS) == Some(&CM_CLASS) && bytes.get(ATTRIBUTE..ATTRIBUTE + 2) == Some(&RTU);
                match (self.cut, rtu && held) {
                    (true, _) => {}
                    (false, true) => self.rtus.push((*meta, bytes.to_vec())),
                    (false, false) => {
                        moved = true;
                        self.host.receive(now, meta, bytes);
                    }
                }
            });
        }
        moved
    }

    fn carry_to_clients(&mut self) -> bool {
        let (now, mut moved) = (self.now, false);
        self.host.drain(now, |meta, bytes| {
            moved = true;
            if let Some(station) = self.stations.get_mut(&meta.local) {
                station.host.receive(now, meta, bytes);
            }
        });
        for station in self.stations.values_mut() {
            moved |= station.poll(now);
        }
        moved
    }

    /// A turn of the server's loop. Returns whether anything happened.
    fn server_turn(&mut self) -> bool {
        let mut wcs = Vec::new();
        self.host.timers(self.now);
        self.host.fabric.set_now(self.now);
        self.host.fabric.poll_completions(&mut wcs, 64).unwrap();
        for (qp, wc) in &wcs {
            assert!(self.machine(|server, cx| server.completion(cx, *qp, wc)));
        }
        let event = if wcs.is_empty() {
            self.host.fabric.poll_event()
        } else {
            None
        };
        if let Some(event) = &event {
            self.machine(|server, cx| server.event(cx, event));
        }
        if self.server.next_timeout().is_some_and(|due| due <= self.now) {
            self.machine(|server, cx| server.timeout(cx));
            let next = self.server.next_timeout();
            assert!(next.is_none_or(|next| next > self.now), "timers stand still");
        }
        let told = self.take_outputs();
        self.machine(|server, cx| server.end_batch(cx));
        told || event.is_some() || !wcs.is_empty()
    }

    /// Takes what the server reports. Returns whether there was something.
    fn take_outputs(&mut self) -> bool {
        let mut told = false;
        while let Some(output) = self.server.poll_output() {
            told = true;
            match output {
                Output::Allocate { ticket, bytes } if !self.hold_memory => {
                    self.machine(|server, cx| server.ready(cx, ticket, Pages::allocate(bytes)));
                }
                // Nobody else has it any more.
                Output::Free(memory) => assert_eq!(Arc::strong_count(&memory), 1),
                output => self.outputs.push(output),
            }
        }
        told
    }

    /// The memory that was asked for comes, or does not.
    pub(crate) fn memory(&mut self, there: bool) -> Ticket {
        let at = self.outputs.iter().position(|o| matches!(o, Output::Allocate { .. }));
        let Output::Allocate { ticket, bytes } = self.outputs.remove(at.expect("memory is asked for")) else {
            unreachable!();
        };
        let memory = match there {
            true => Pages::allocate(bytes),
            false => Err(MemError::OutOfMemory(bytes)),
        };
        self.call(|server, cx| server.ready(cx, ticket, memory));
        ticket
    }

    /// Time goes by, with all its timers.
    pub(crate) fn wait(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            self.turn();
            let stations = self.stations.values_mut().map(|station| &mut station.host);
            let ports = stations.chain([&mut self.host]).filter_map(Host::poll_timeout);
            let due = ports.chain(self.server.next_timeout()).min();
            match due.filter(|at| *at <= end) {
                Some(at) => self.now = at.max(self.now + STEP),
                None => break,
            }
        }
        self.now = self.now.max(end);
    }

    /// The requests that have come to the user, taken out.
    pub(crate) fn requests(&mut self) -> Vec<Request> {
        let mut requests = Vec::new();
        for output in core::mem::take(&mut self.outputs) {
            match output {
                Output::Request(request) => requests.push(request),
                other => self.outputs.push(other),
            }
        }
        requests
    }

    /// The one request that has come.
    pub(crate) fn request(&mut self) -> Request {
        let mut requests = self.requests();
        assert_eq!(requests.len(), 1, "{requests:?}");
        requests.remove(0)
    }

    pub(crate) fn answer(&mut self, key: RequestKey, errno: i32) {
        self.answer_all(&[key], errno);
    }

    /// Answers; what comes of it leaves with the next turn.
    pub(crate) fn answer_later(&mut self, key: RequestKey, errno: i32) {
        self.machine(|server, cx| server.answer(cx, key, errno));
    }

    /// Answers within one turn.
    pub(crate) fn answer_all(&mut self, keys: &[RequestKey], errno: i32) {
        self.call(|server, cx| {
            for key in keys {
                server.answer(cx, *key, errno);
            }
        });
    }

    /// Takes the events of sessions and paths, as words.
    pub(crate) fn news(&mut self) -> Vec<String> {
        let word = |output| match output {
            Output::SessionOpened(s) => format!("opened {}", s.name),
            Output::SessionClosed { why, .. } => format!("closed: {why}"),
            Output::PathUp { .. } => "path up".into(),
            Output::PathDown { why, .. } => format!("path down: {why}"),
            Output::Request(r) => format!("request in {}", r.key.chunk),
            Output::Allocate { .. } => "memory".into(),
            Output::Free(_) => "free".into(),
        };
        self.outputs.drain(..).map(word).collect()
    }

    /// The number of the only session.
    pub(crate) fn session(&self) -> SessionKey {
        let sessions = self.server.sessions();
        assert_eq!(sessions.len(), 1, "{sessions:?}");
        sessions[0].session
    }

    /// A queue pair of the server's fails, and nothing says why.
    pub(crate) fn break_qp(&mut self, qp: QpId) {
        let failed = QpAttr {
            state: Some(QpState::Err),
            ..QpAttr::default()
        };
        let (now, qpn) = (self.now, Provider::qpn(&self.host.fabric, qp));
        let mut ports = self.host.fabric.ports().all();
        let found = qpn.is_some_and(|qpn| ports.any(|port| port.modify_qp(now, qpn, &failed).is_ok()));
        assert!(found, "{qp:?} is not there");
    }

    /// Queue pairs whose drain was held up are drained.
    pub(crate) fn finish_drains(&mut self) {
        self.host.fabric.set_now(self.now);
        for qp in self.host.fabric.draining.clone() {
            self.host.fabric.finish_drain(qp);
        }
        self.turn();
    }

    /// Everything has been given back but the listener.
    pub(crate) fn is_clean(&mut self) {
        let usage = self.host.usage();
        assert_eq!((usage.pds, usage.mrs, usage.keys), (0, 0, 0), "{usage:?}");
        assert_eq!((usage.cqs, usage.qps, usage.cms), (0, 0, 1), "{usage:?}");
        assert!(self.server.sessions().is_empty());
    }

    /// The server goes, and nothing is left.
    pub(crate) fn stop(&mut self) {
        self.call(|server, cx| server.stop(cx));
        assert!(self.server.is_idle());
        assert_eq!(self.host.usage(), Default::default());
    }
}
