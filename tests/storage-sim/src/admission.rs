//! Server that verifies before it allocates: `rtrs::admission` decides which requests are accepted, real clients connect, and an
//! adversary that knows the protocol floods the server with requests in the name of unused addresses.
//!
//! Checked after every event: only sessions of real clients have memory (a client is real once it has received an answer of
//! the server's); half-open paths and queue pairs stay within their limits. Checked at the end: each client was accepted within
//! two seconds, and nothing of the flood is left.

use std::collections::{BTreeMap, BTreeSet};

use roce_port::{CmEventKind, ConnId};
use roce_sim::{
    Check, Failure, LISTEN_PORT, MS, PRIVATE_LEN, Program, Rng, RunConfig, SEC, Stats, World, simulate_program,
};
use roce_verbs::{
    Qpn,
    provider::{ConnParams, RejectReason},
};
use rtrs::{
    admission::{AccessList, Admission, Admitted, ConnectRequest, Limits, PathKey},
    proto::{ConnReq, ConnRsp, MsgFlags, Uuid},
};
use zerocopy::IntoBytes;

/// The host that serves; the others are clients.
const SERVER: usize = 0;
/// Connections of a path.
const CONNECTIONS: u16 = 3;
/// Longest time from a client's first request until it is accepted, nanoseconds.
const ACCEPT_TIME: u64 = 2 * SEC;
/// Timer of the server's handshakes; smaller numbers are clients' timers.
const HANDSHAKES: usize = usize::MAX;

const _: () = assert!(PRIVATE_LEN == size_of::<ConnReq>());

/// Runs the clients and the flood of one seed.
pub(crate) fn run(config: &RunConfig) -> Result<Stats, Failure> {
    simulate_program(config, "admission", " --storage -- --admission", |world, rng| {
        let program = AdmissionTest::new(rng, world.hosts());
        for client in 0..program.clients.len() {
            world.set_timer(rng.range(0, 500 * MS), client);
        }
        Box::new(program)
    })
}

/// Connection of a path, on the server.
struct Accepted {
    id: ConnId,
    qpn: Qpn,
    cid: u16,
    established: bool,
}

#[derive(Default)]
struct Path {
    accepted: Vec<Accepted>,
    waiting: Vec<(ConnId, ConnectRequest)>,
    session: Option<Uuid>,
}

struct Client {
    host: usize,
    uuid: Uuid,
    first_attempt: u64,
    attempts: u32,
    conns: Vec<(ConnId, Qpn)>,
    established: u16,
    /// It has had an answer, so its requests are its own.
    is_real: bool,
    is_accepted: bool,
}

/// The server's and its clients' programs.
struct AdmissionTest {
    admission: Admission,
    paths: BTreeMap<PathKey, Path>,
    by_conn: BTreeMap<ConnId, PathKey>,
    /// Sessions that have their chunks.
    allocated: BTreeSet<Uuid>,
    clients: Vec<Client>,
}

fn uuid(rng: &mut Rng) -> Uuid {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&rng.bytes(16));
    Uuid(bytes)
}

impl AdmissionTest {
    fn new(rng: &mut Rng, hosts: usize) -> Self {
        let client = |rng: &mut Rng| Client {
            host: rng.range(1, hosts as u64 - 1) as usize,
            uuid: uuid(rng),
            first_attempt: 0,
            attempts: 0,
            conns: Vec::new(),
            established: 0,
            is_real: false,
            is_accepted: false,
        };
        let limits = Limits {
            half_open: rng.pick(&[64, 256]),
            half_open_per_client: rng.pick(&[8, 32]),
            handshake: core::time::Duration::from_secs(3),
            ..Limits::default()
        };
        Self {
            admission: Admission::new(limits, AccessList::default()),
            paths: BTreeMap::new(),
            by_conn: BTreeMap::new(),
            allocated: BTreeSet::new(),
            clients: (0..rng.range(1, 6)).map(|_| client(rng)).collect(),
        }
    }

    /// Starts the first attempt of a client, or another one.
    fn start_client(&mut self, world: &mut World, n: usize) -> Check {
        let client = &mut self.clients[n];
        if client.attempts == 0 {
            client.first_attempt = world.instant().as_nanos();
        }
        client.attempts += 1;
        self.connect(world, n, 0)
    }

    fn connect(&mut self, world: &mut World, n: usize, cid: u16) -> Check {
        let client = &mut self.clients[n];
        let (host, uuid) = (client.host, client.uuid);
        let request = ConnReq::new(cid, CONNECTIONS, 0, uuid, uuid, true);
        let qpn = world.spare_qp(host)?;
        let [local, remote] = [host, SERVER].map(|h| world.addr(h));
        let params = ConnParams {
            private_data: request.as_bytes().to_vec(),
            ..ConnParams::default()
        };
        let now = world.instant();
        let id = world
            .port(host)
            .connect_qp(now, (local, 0).into(), (remote, LISTEN_PORT).into(), qpn, params);
        let id = id.map_err(|e| format!("client {n}: {e}"))?;
        client.conns.push((id, qpn));
        Ok(())
    }

    fn on_client_event(&mut self, world: &mut World, host: usize, event: &CmEventKind) -> Check {
        let id = event.conn();
        let is_its = |c: &Client| c.host == host && c.conns.iter().any(|(conn, _)| *conn == id);
        let Some(n) = self.clients.iter().position(is_its) else {
            // Clients reject requests to connect.
            return match event {
                CmEventKind::Request { .. } => world.refuse(host, id, RejectReason::CONSUMER),
                _ => Ok(()),
            };
        };
        match event {
            CmEventKind::Established { .. } => self.on_client_established(world, n),
            CmEventKind::TimewaitExit { .. } => Ok(()),
            other => self.retry_client(world, n, &format!("{other:?}")),
        }
    }

    fn on_client_established(&mut self, world: &mut World, n: usize) -> Check {
        let client = &mut self.clients[n];
        client.established += 1;
        client.is_real = true;
        if client.established < CONNECTIONS {
            let next = client.established;
            return self.connect(world, n, next);
        }
        client.is_accepted = true;
        let took = world.instant().as_nanos() - client.first_attempt;
        world.count_admission(took);
        match took > ACCEPT_TIME {
            true => Err(format!(
                "client {n} on host {} was accepted only after {took} ns",
                client.host
            )),
            false => Ok(()),
        }
    }

    /// Closes a client's connections and schedules its next attempt.
    fn retry_client(&mut self, world: &mut World, n: usize, reason: &str) -> Check {
        let client = &mut self.clients[n];
        if client.is_accepted {
            return Err(format!("client {n} was accepted, and lost its connection: {reason}"));
        }
        client.established = 0;
        world.note(|| format!("client {n}: {reason}"));
        for (id, qpn) in std::mem::take(&mut client.conns) {
            destroy(world, client.host, id, qpn)?;
        }
        world.set_timer(20 * MS, n);
        Ok(())
    }

    fn on_server_event(&mut self, world: &mut World, event: &CmEventKind) -> Check {
        let id = event.conn();
        if let CmEventKind::Request {
            remote,
            local,
            private_data,
            ..
        } = event
        {
            let Ok(hello) = ConnReq::parse(private_data) else {
                return world.refuse(SERVER, id, RejectReason::CONSUMER);
            };
            let request = ConnectRequest {
                peer: remote.ip(),
                local: local.ip(),
                session: hello.session_uuid,
                path: hello.path_uuid,
                cid: hello.cid.get(),
                connections: hello.cid_num.get(),
                first_conn: hello.first_conn(),
                recon_cnt: hello.recon_cnt.get(),
            };
            return self.on_request(world, id, &request);
        }
        let Some(path) = self.by_conn.get(&id).copied() else {
            return Ok(());
        };
        match event {
            CmEventKind::Established { .. } => self.on_server_established(world, path, id),
            CmEventKind::TimewaitExit { .. } => Ok(()),
            _ => self.close_path(world, path),
        }
    }

    fn on_request(&mut self, world: &mut World, id: ConnId, request: &ConnectRequest) -> Check {
        let path = match self.admission.request(world.instant(), 0, request) {
            Err(_) => return world.refuse(SERVER, id, RejectReason::CONSUMER),
            Ok(Admitted::HalfOpen { path, evicted }) => {
                if let Some(evicted) = evicted {
                    self.close_path(world, evicted)?;
                }
                path
            }
            Ok(Admitted::GivenUp(path, _)) => {
                self.close_path(world, path)?;
                return world.refuse(SERVER, id, RejectReason::CONSUMER);
            }
            Ok(Admitted::Connection(path, _)) => path,
            Ok(Admitted::Held(path)) => {
                self.by_conn.insert(id, path);
                self.paths.entry(path).or_default().waiting.push((id, *request));
                return Ok(());
            }
        };
        self.accept(world, id, path, request.cid)
    }

    fn accept(&mut self, world: &mut World, id: ConnId, path: PathKey, cid: u16) -> Check {
        let qpn = world.spare_qp(SERVER)?;
        self.by_conn.insert(id, path);
        self.paths.entry(path).or_default().accepted.push(Accepted {
            id,
            qpn,
            cid,
            established: false,
        });
        let answer = ConnRsp::accept(512, 128 << 10, 4096, MsgFlags::NEW_RKEY);
        let params = ConnParams {
            private_data: answer.as_bytes().to_vec(),
            ..ConnParams::default()
        };
        let now = world.instant();
        match world.port(SERVER).accept_qp(now, id, qpn, params) {
            Ok(()) => {
                self.watch_handshakes(world);
                Ok(())
            }
            // The connection manager has evicted the request meanwhile.
            Err(_) => self.close_path(world, path),
        }
    }

    fn on_server_established(&mut self, world: &mut World, path: PathKey, id: ConnId) -> Check {
        let Some(p) = self.paths.get_mut(&path) else {
            return Ok(());
        };
        let Some(conn) = p.accepted.iter_mut().find(|c| c.id == id) else {
            return Ok(());
        };
        conn.established = true;
        let first = conn.cid == 0;
        let all = p.accepted.iter().filter(|c| c.established).count() == usize::from(CONNECTIONS);
        if first {
            match self.admission.established(path) {
                Some(Ok(opened)) => {
                    p.session = Some(opened.session);
                    self.allocated.insert(opened.session);
                }
                Some(Err(_)) => return self.close_path(world, path),
                None => {}
            }
            for (id, request) in std::mem::take(&mut p.waiting) {
                self.on_request(world, id, &request)?;
            }
        }
        if all {
            self.admission.up(path);
        }
        Ok(())
    }

    /// Closes a path and everything that belongs to it.
    fn close_path(&mut self, world: &mut World, path: PathKey) -> Check {
        self.admission.closing(path);
        self.admission.ended(path);
        let Some(p) = self.paths.remove(&path) else {
            return Ok(());
        };
        if let Some(session) = p.session {
            self.allocated.remove(&session);
        }
        self.by_conn.retain(|_, of| *of != path);
        for conn in p.accepted {
            destroy(world, SERVER, conn.id, conn.qpn)?;
        }
        for (id, _) in p.waiting {
            world.refuse(SERVER, id, RejectReason::CONSUMER)?;
        }
        Ok(())
    }

    fn watch_handshakes(&self, world: &mut World) {
        if let Some(at) = self.admission.next_deadline(0) {
            let now = world.instant().as_nanos();
            world.set_timer(at.as_nanos().saturating_sub(now), HANDSHAKES);
        }
    }

    /// Checks what holds at all times.
    fn check(&self, world: &mut World) -> Check {
        let a = &self.admission;
        // A client with an answer is real: an adversary that sees nothing never sends what proves it.
        let is_real = |uuid: &Uuid| self.clients.iter().any(|c| c.uuid == *uuid && c.is_real);
        let unverified = self.allocated.iter().filter(|uuid| !is_real(uuid)).count();
        let most = self.clients.iter().filter(|c| c.is_real).count();
        if unverified > 0 || a.sessions() > most {
            let (have, n) = (a.sessions(), self.allocated.len());
            return Err(format!(
                "memory for {n} of {have} sessions, {unverified} of them forged: only {most} clients have an answer"
            ));
        }
        let limits = a.limits();
        let (half_open, qps) = (a.half_open(), world.port(SERVER).queue_pairs());
        let room = half_open + a.connections() + self.clients.len();
        if half_open > limits.half_open || a.held() > limits.held || qps > room {
            return Err(format!(
                "{half_open} half-open paths, {} held requests, {qps} queue pairs for {room} at most",
                a.held()
            ));
        }
        Ok(())
    }
}

fn destroy(world: &mut World, host: usize, id: ConnId, qpn: Qpn) -> Check {
    let now = world.instant();
    let port = world.port(host);
    port.cm_destroy(now, id);
    port.destroy_qp(now, qpn)
        .map_err(|e| format!("host {host}: destroy: {e}"))
}

impl Program for AdmissionTest {
    fn on_timer(&mut self, world: &mut World, timer: usize) -> Check {
        if timer != HANDSHAKES {
            return self.start_client(world, timer);
        }
        while let Some((path, _)) = self.admission.expired(world.instant(), 0) {
            self.close_path(world, path)?;
        }
        self.check(world)
    }

    fn on_event(&mut self, world: &mut World, host: usize, event: &CmEventKind) -> Check {
        match host {
            SERVER => self.on_server_event(world, event)?,
            _ => self.on_client_event(world, host, event)?,
        }
        self.check(world)
    }

    fn forged_request(&self, rng: &mut Rng) -> [u8; PRIVATE_LEN] {
        let (path, session) = (uuid(rng), uuid(rng));
        let cid = rng.pick(&[0, 0, 0, 1]);
        let request = ConnReq::new(cid, rng.pick(&[3, 3, 2, 65]), 0, path, session, true);
        let mut bytes = [0; PRIVATE_LEN];
        bytes.copy_from_slice(request.as_bytes());
        bytes
    }

    fn is_done(&self) -> bool {
        self.clients.iter().all(|c| c.is_accepted) && self.admission.half_open() == 0
    }

    fn check_end(&self) -> Check {
        let (paths, clients) = (self.paths.len(), self.clients.len());
        match paths == clients && self.admission.paths() == clients && self.allocated.len() == clients {
            true => Ok(()),
            false => Err(format!(
                "{paths} paths and {} sessions of {clients} clients: {:?}",
                self.allocated.len(),
                self.admission
            )),
        }
    }

    fn situation(&self) -> String {
        let clients: Vec<_> = self
            .clients
            .iter()
            .map(|c| (c.attempts, c.established, c.is_accepted))
            .collect();
        format!(
            "\n  {:?}; clients (attempts, connections, accepted): {clients:?}",
            self.admission
        )
    }
}
