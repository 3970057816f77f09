//! A server that verifies before it allocates: `rtrs::admission` decides who gets in, real clients come, and somebody who
//! knows the protocol floods it with requests that nobody stands behind.
//!
//! What is checked, after everything that happens: memory is there for sessions of real clients only (a client is real
//! when it has received what the server sent to it); half-open paths and queue pairs stay within their limits; and at the
//! end: each client got in within two seconds, nothing of the flood is left.

use std::collections::{BTreeMap, BTreeSet};

use roce_port::{CmEventKind, ConnId};
use roce_verbs::{
    Qpn,
    provider::{ConnParams, RejectReason},
};
use rtrs::{
    admission::{AccessList, Admission, Admitted, ConnectRequest, Limits, PathKey},
    proto::{ConnReq, ConnRsp, MsgFlags, Uuid},
};
use zerocopy::IntoBytes;

use crate::{
    rng::Rng,
    scenario::{MS, SEC},
    world::{Check, Event, LISTEN_PORT, World},
};

/// The host that serves; the others are clients.
const SERVER: usize = 0;
/// Connections of a path.
const CONNECTIONS: u16 = 3;
/// From a client's first request until it is in, nanoseconds.
const PATIENCE: u64 = 2 * SEC;

/// A connection of a path, on the server.
struct Made {
    id: ConnId,
    qpn: Qpn,
    cid: u16,
    established: bool,
}

#[derive(Default)]
struct Path {
    made: Vec<Made>,
    held: Vec<(ConnId, ConnectRequest)>,
    session: Option<Uuid>,
}

struct Client {
    host: usize,
    uuid: Uuid,
    begun: u64,
    attempts: u32,
    conns: Vec<(ConnId, Qpn)>,
    established: u16,
    /// It has had an answer, so its requests are its own.
    is_real: bool,
    is_in: bool,
}

/// The server's and its clients' programs.
pub(crate) struct Gate {
    admission: Admission,
    paths: BTreeMap<PathKey, Path>,
    by_conn: BTreeMap<ConnId, PathKey>,
    /// Sessions that have their chunks.
    allocated: BTreeSet<Uuid>,
    clients: Vec<Client>,
}

impl Gate {
    pub(crate) fn new(rng: &mut Rng, hosts: usize) -> Self {
        let client = |rng: &mut Rng| Client {
            host: rng.range(1, hosts as u64 - 1) as usize,
            uuid: uuid(rng),
            begun: 0,
            attempts: 0,
            conns: Vec::new(),
            established: 0,
            is_real: false,
            is_in: false,
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

    pub(crate) fn clients(&self) -> usize {
        self.clients.len()
    }

    /// Where everything stands, for reports.
    pub(crate) fn situation(&self) -> String {
        let clients: Vec<_> = self
            .clients
            .iter()
            .map(|c| (c.attempts, c.established, c.is_in))
            .collect();
        format!(
            "\n  {:?}; clients (attempts, connections, in): {clients:?}",
            self.admission
        )
    }

    /// Every client is in, and nothing is half-open any more.
    pub(crate) fn is_done(&self) -> bool {
        self.clients.iter().all(|c| c.is_in) && self.admission.half_open() == 0
    }
}

/// A session or path of anybody.
pub(crate) fn uuid(rng: &mut Rng) -> Uuid {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&rng.bytes(16));
    Uuid(bytes)
}

impl World {
    fn gate(&mut self) -> &mut Gate {
        self.gate.as_mut().expect("a server")
    }

    /// A client begins, or begins anew.
    pub(crate) fn client_connects(&mut self, n: usize) -> Check {
        let now = self.now;
        let c = &mut self.gate().clients[n];
        if c.attempts == 0 {
            c.begun = now;
        }
        c.attempts += 1;
        self.client_connection(n, 0)
    }

    fn client_connection(&mut self, n: usize, cid: u16) -> Check {
        let now = self.instant();
        let c = &self.gate().clients[n];
        let (h, uuid) = (c.host, c.uuid);
        let hello = ConnReq::new(cid, CONNECTIONS, 0, uuid, uuid, true);
        let qpn = self.spare_qp(h)?;
        let [local, remote] = [h, SERVER].map(|h| self.hosts[h].plan.addr);
        let params = ConnParams {
            private_data: hello.as_bytes().to_vec(),
            ..ConnParams::default()
        };
        let port = &mut self.hosts[h].port;
        let id = port.connect_qp(now, (local, 0).into(), (remote, LISTEN_PORT).into(), qpn, params);
        let id = id.map_err(|e| format!("client {n}: {e}"))?;
        self.gate().clients[n].conns.push((id, qpn));
        self.service(h)
    }

    /// What the connection manager tells the server or a client.
    pub(crate) fn on_gate_event(&mut self, h: usize, event: &CmEventKind) -> Check {
        match h {
            SERVER => self.on_server_event(event)?,
            _ => self.on_client_event(h, event)?,
        }
        self.check_gate()
    }

    fn on_client_event(&mut self, h: usize, event: &CmEventKind) -> Check {
        let id = event.conn();
        let gate = self.gate();
        let mine = |c: &Client| c.host == h && c.conns.iter().any(|(conn, _)| *conn == id);
        let Some(n) = gate.clients.iter().position(mine) else {
            // Requests to connect to a client are refused.
            return match event {
                CmEventKind::Request { .. } => self.refuse(h, id, RejectReason::CONSUMER),
                _ => Ok(()),
            };
        };
        match event {
            CmEventKind::Established { .. } => {
                let c = &mut gate.clients[n];
                c.established += 1;
                c.is_real = true;
                let (next, begun) = (c.established, c.begun);
                if next < CONNECTIONS {
                    return self.client_connection(n, next);
                }
                c.is_in = true;
                self.stats.admitted += 1;
                let took = self.now - begun;
                self.stats.longest_admission_ns = self.stats.longest_admission_ns.max(took);
                match took > PATIENCE {
                    true => Err(format!("client {n} on host {h} got in only after {took} ns")),
                    false => Ok(()),
                }
            }
            CmEventKind::TimewaitExit { .. } => Ok(()),
            other => self.client_gives_up(n, &format!("{other:?}")),
        }
    }

    fn client_gives_up(&mut self, n: usize, why: &str) -> Check {
        let now = self.instant();
        let c = &mut self.gate().clients[n];
        if c.is_in {
            return Err(format!("client {n} was in, and lost its connection: {why}"));
        }
        let (h, conns) = (c.host, std::mem::take(&mut c.conns));
        c.established = 0;
        self.trace.note(self.now, || format!("client {n}: {why}"));
        for (id, qpn) in conns {
            self.end_of_both(h, id, Some(qpn), now)?;
        }
        self.schedule(20 * MS, Event::Client { n });
        self.service(h)
    }

    fn end_of_both(&mut self, h: usize, id: ConnId, qpn: Option<Qpn>, now: roce_verbs::Instant) -> Check {
        let port = &mut self.hosts[h].port;
        port.cm_destroy(now, id);
        match qpn {
            Some(qpn) => port.destroy_qp(now, qpn).map_err(|e| format!("host {h}: destroy: {e}")),
            None => Ok(()),
        }
    }

    fn on_server_event(&mut self, event: &CmEventKind) -> Check {
        let id = event.conn();
        if let CmEventKind::Request {
            remote,
            local,
            private_data,
            ..
        } = event
        {
            let Ok(hello) = ConnReq::parse(private_data) else {
                return self.refuse(SERVER, id, RejectReason::CONSUMER);
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
            return self.on_hello(id, &request);
        }
        let Some(path) = self.gate().by_conn.get(&id).copied() else {
            return Ok(());
        };
        match event {
            CmEventKind::Established { .. } => self.on_path_established(path, id),
            CmEventKind::TimewaitExit { .. } => Ok(()),
            _ => self.end_path(path),
        }
    }

    fn on_hello(&mut self, id: ConnId, request: &ConnectRequest) -> Check {
        let now = self.instant();
        let admitted = self.gate().admission.request(now, request);
        let path = match admitted {
            Err(_) => return self.refuse(SERVER, id, RejectReason::CONSUMER),
            Ok(Admitted::HalfOpen { path, gives_way }) => {
                if let Some(other) = gives_way {
                    self.end_path(other)?;
                }
                path
            }
            Ok(Admitted::GivenUp(path)) => {
                self.end_path(path)?;
                return self.refuse(SERVER, id, RejectReason::CONSUMER);
            }
            Ok(Admitted::Connection(path)) => path,
            Ok(Admitted::Held(path)) => {
                let gate = self.gate();
                gate.by_conn.insert(id, path);
                gate.paths.entry(path).or_default().held.push((id, *request));
                return Ok(());
            }
        };
        let qpn = self.spare_qp(SERVER)?;
        let made = Made {
            id,
            qpn,
            cid: request.cid,
            established: false,
        };
        let gate = self.gate();
        gate.by_conn.insert(id, path);
        gate.paths.entry(path).or_default().made.push(made);
        let answer = ConnRsp::accept(512, 128 << 10, 4096, MsgFlags::NEW_RKEY);
        let params = ConnParams {
            private_data: answer.as_bytes().to_vec(),
            ..ConnParams::default()
        };
        match self.hosts[SERVER].port.accept_qp(now, id, qpn, params) {
            Ok(()) => self.watch_deadline(),
            // It gave way in the connection manager meanwhile.
            Err(_) => self.end_path(path),
        }
    }

    fn on_path_established(&mut self, path: PathKey, id: ConnId) -> Check {
        let gate = self.gate();
        let Some(p) = gate.paths.get_mut(&path) else {
            return Ok(());
        };
        let Some(made) = p.made.iter_mut().find(|m| m.id == id) else {
            return Ok(());
        };
        made.established = true;
        let first = made.cid == 0;
        let all = p.made.iter().filter(|m| m.established).count() == usize::from(CONNECTIONS);
        if first {
            match gate.admission.established(path) {
                Some(Ok(opened)) => {
                    p.session = Some(opened.session);
                    gate.allocated.insert(opened.session);
                }
                Some(Err(_)) => return self.end_path(path),
                None => {}
            }
            let held = gate.paths.get_mut(&path).map(|p| std::mem::take(&mut p.held));
            for (id, request) in held.unwrap_or_default() {
                self.on_hello(id, &request)?;
            }
        }
        if all {
            self.gate().admission.up(path);
        }
        Ok(())
    }

    /// Everything of a path goes.
    fn end_path(&mut self, path: PathKey) -> Check {
        let now = self.instant();
        let gate = self.gate();
        gate.admission.closing(path);
        gate.admission.ended(path);
        let Some(p) = gate.paths.remove(&path) else {
            return Ok(());
        };
        if let Some(session) = p.session {
            gate.allocated.remove(&session);
        }
        gate.by_conn.retain(|_, of| *of != path);
        for made in p.made {
            self.end_of_both(SERVER, made.id, Some(made.qpn), now)?;
        }
        for (id, _) in p.held {
            self.refuse(SERVER, id, RejectReason::CONSUMER)?;
        }
        Ok(())
    }

    fn watch_deadline(&mut self) -> Check {
        let now = self.now;
        if let Some(at) = self.gate().admission.next_deadline() {
            self.schedule(at.as_nanos().saturating_sub(now), Event::Deadline);
        }
        Ok(())
    }

    /// Handshakes that took too long end.
    pub(crate) fn on_deadline(&mut self) -> Check {
        let now = self.instant();
        while let Some(path) = self.gate().admission.expired(now) {
            self.end_path(path)?;
        }
        self.service(SERVER)?;
        self.check_gate()
    }

    /// What holds at all times.
    fn check_gate(&self) -> Check {
        let Some(gate) = &self.gate else { return Ok(()) };
        let a = &gate.admission;
        // Whoever has an answer is real: an adversary that sees nothing never sends what proves it.
        let real = |uuid: &Uuid| gate.clients.iter().any(|c| c.uuid == *uuid && c.is_real);
        let unverified = gate.allocated.iter().filter(|uuid| !real(uuid)).count();
        let most = gate.clients.iter().filter(|c| c.is_real).count();
        if unverified > 0 || a.sessions() > most {
            let (have, n) = (a.sessions(), gate.allocated.len());
            return Err(format!(
                "memory for {n} of {have} sessions, {unverified} of nobody's: only {most} clients have an answer"
            ));
        }
        let limits = a.limits();
        let (half_open, qps) = (a.half_open(), self.hosts[SERVER].port.queue_pairs());
        let room = half_open + a.connections() + gate.clients.len();
        if half_open > limits.half_open || a.held() > limits.held || qps > room {
            return Err(format!(
                "{half_open} half-open paths, {} held requests, {qps} queue pairs for {room} at most",
                a.held()
            ));
        }
        Ok(())
    }

    /// At the end.
    pub(crate) fn check_gate_end(&self) -> Check {
        let Some(gate) = &self.gate else { return Ok(()) };
        let (paths, clients) = (gate.paths.len(), gate.clients.len());
        match paths == clients && gate.admission.paths() == clients && gate.allocated.len() == clients {
            true => Ok(()),
            false => Err(format!(
                "{paths} paths and {} sessions of {clients} clients: {:?}",
                gate.allocated.len(),
                gate.admission
            )),
        }
    }
}
