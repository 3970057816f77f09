//! Clients of an RTRS server, some that keep to the protocol and some that don't: connect requests, the handshake,
//! messages and immediates, requests in chunks, ends of connections at any time, and the parsers by themselves. The server
//! hands its user nothing that is out of bounds, answers what it accepts, sends only what somebody asked for, and leaves
//! nothing behind. What the transport must not be asked for is in `provider.rs`.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use roce_verbs::{
    WcStatus,
    provider::{CmEventKind, RejectReason},
};
use rtrs::{
    Direction,
    proto::{ChunkLayout, Imm, InfoReq, MAX_HDR_SIZE, info::check_name},
    server::{Request, Server, ServerConfig, ServerOps, SessionHandle},
};
use zerocopy::IntoBytes;

use crate::{
    input::Input,
    peers::{Ask, Peers, parse},
    provider::{Fake, Message},
};

const DEPTH: u32 = 4;
const CHUNK: u32 = 8192;
/// Steps of a run: more are left out, so that no input takes long.
const STEPS: usize = 96;

/// The server's user: keeps requests until the input says what becomes of them.
#[derive(Default)]
struct Ops {
    held: Mutex<Vec<Request<Fake>>>,
    open: Mutex<BTreeMap<u64, String>>,
}

impl ServerOps<Fake> for Ops {
    fn session_opened(&self, session: &SessionHandle) {
        assert_eq!(check_name(session.name()), Ok(()));
        let mut open = self.open.lock().unwrap();
        let twice = open.values().any(|name| name == session.name());
        assert!(!twice, "two sessions of one name");
        assert!(open.insert(session.id(), session.name().to_owned()).is_none());
    }

    fn rdma_request(&self, request: Request<Fake>) {
        let known = self.open.lock().unwrap().contains_key(&request.session().id());
        assert!(known, "a request of no open session");
        let (header, data) = (request.user_header().len(), request.data_len());
        assert!(header <= MAX_HDR_SIZE as usize && data + header < CHUNK as usize);
        let mut bytes = vec![0; data];
        assert!(request.read_data(0, &mut bytes).is_ok());
        assert!(request.read_data(data, &mut [0]).is_err() && request.write_data(data, &[0]).is_err());
        assert!(request.write_data(usize::MAX, &[0]).is_err());
        self.held.lock().unwrap().push(request);
    }

    fn session_closed(&self, session: &SessionHandle) {
        assert!(self.open.lock().unwrap().remove(&session.id()).is_some());
    }
}

impl Ops {
    fn held(&self) -> usize {
        self.held.lock().unwrap().len()
    }

    /// One of the requests, to be answered.
    fn take(&self, which: u8) -> Option<Request<Fake>> {
        let mut held = self.held.lock().unwrap();
        let index = usize::from(which) % held.len().max(1);
        (index < held.len()).then(|| held.swap_remove(index))
    }
}

fn config(bits: u8) -> ServerConfig {
    ServerConfig {
        addr: [10, 1, 0, 1].into(),
        max_sessions: 3,
        max_sessions_per_client: 2,
        max_connections: 4,
        queue_depth: DEPTH,
        max_chunk_size: CHUNK,
        always_invalidate: bits & 1 == 0,
        progress_threads: 1 + usize::from(bits >> 1 & 1),
        spin: Duration::ZERO,
        ..ServerConfig::default()
    }
}

/// See the module.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let bits = input.byte();
    if bits >> 5 == 7 {
        return parse(&mut input);
    }
    let (fake, ops) = (Fake::new(), Arc::new(Ops::default()));
    let server = Server::listen(&fake, config(bits), ops.clone()).expect("a server");
    let layout = ChunkLayout::new(DEPTH, CHUNK).expect("a layout");
    let mut run = Run {
        peers: Peers::new(fake.clone(), layout),
        ops: ops.clone(),
    };
    for _ in 0..STEPS {
        if input.0.is_empty() {
            break;
        }
        run.step(&server, &mut input);
        let ops = run.ops.clone();
        let _ = run.peers.collect(&|| ops.held());
    }
    fake.hold(false);
    // What waited for sends to complete comes now.
    fake.quiet(&|| ops.held());
    while let Some(request) = ops.take(0) {
        drop(request);
        fake.quiet(&|| ops.held());
    }
    fake.end();
    drop(server);
    drop(run);
    fake.empty();
    assert!(ops.open.lock().unwrap().is_empty(), "a session that is not closed");
}

struct Run {
    peers: Peers,
    ops: Arc<Ops>,
}

impl Run {
    fn step(&mut self, server: &Server<Fake>, input: &mut Input<'_>) {
        let op = input.byte();
        let conn = input.below(self.peers.conns.len());
        match op % 16 {
            0 => self.connect(input),
            1 => {
                let private_data = input.short();
                self.peers.raw = true;
                self.peers.connect(9, 9, private_data, 1, 1);
            }
            2 => self.peers.established(conn),
            3 => self.end(conn, input),
            4 => self.send(conn, input),
            5 | 6 => self.ask(conn, input),
            7 => self.scribble(conn, input),
            8 => {
                let imm = input.number_or_zeros(4) as u32;
                if let Some(c) = self.peers.conns.get(conn) {
                    self.peers.fake.deliver(&c.id, Message::WriteWithImm(imm));
                }
            }
            9 => self.peers.fake.hold(input.byte() & 1 != 0),
            10 | 11 => self.finish(input),
            12 => {
                let session = server.sessions().get(input.below(4)).map(SessionHandle::id);
                session.map(|id| server.close_session(id));
            }
            _ => {
                let [session, number, count] = [input.byte() % 5, input.byte() % 3, 2 + input.byte() % 2];
                let name = ["a", "b", "c", "d", "e"][usize::from(session)];
                let up = self.peers.handshake(session, number, count.into(), op >> 6, name);
                if up {
                    // Deep from here on.
                    self.ask(self.peers.conns.len() - 1, input);
                }
            }
        }
    }

    fn connect(&mut self, input: &mut Input<'_>) {
        let [session, number, shape, host] = [(); 4].map(|()| input.byte());
        let (session, number) = (session % 5, number % 4);
        let mut req = Peers::conn_req(
            session,
            number,
            (shape & 7).into(),
            (shape >> 3 & 7).into(),
            shape & 64 != 0,
        );
        if shape & 128 != 0 {
            req[input.below(56)] = input.byte();
        }
        if self.peers.connect(session, number, &req, host % 32, host >> 6) && host & 32 == 0 {
            self.peers.established(self.peers.conns.len() - 1);
        }
    }

    fn end(&mut self, conn: usize, input: &mut Input<'_>) {
        let Some(c) = self.peers.conns.get(conn) else { return };
        let kind = match input.byte() % 7 {
            0 | 1 => CmEventKind::Disconnected,
            2 => CmEventKind::Rejected {
                reason: RejectReason::CONSUMER,
                private_data: Vec::new(),
            },
            3 => CmEventKind::Unreachable,
            4 => CmEventKind::ConnectError("broken".into()),
            5 => CmEventKind::TimewaitExit,
            _ => {
                self.peers.fake.fail(&c.id, WcStatus::RemoteAccessError);
                CmEventKind::Disconnected
            }
        };
        self.peers.fake.event(&c.id, kind);
    }

    fn send(&mut self, conn: usize, input: &mut Input<'_>) {
        let Some(c) = self.peers.conns.get(conn) else { return };
        let kind = input.byte();
        let text = String::from_utf8_lossy(input.short());
        let message = match InfoReq::new(&text) {
            Ok(info) if kind & 3 != 0 => info.as_bytes().to_vec(),
            _ => input.short().to_vec(),
        };
        let message = match kind & 8 {
            0 => Message::Send(&message),
            _ => Message::SendWithImm(&message, input.number_or_zeros(4) as u32),
        };
        self.peers.fake.deliver(&c.id, message);
    }

    /// A whole request, of possible lengths and impossible ones.
    fn ask(&mut self, conn: usize, input: &mut Input<'_>) {
        let [chunk, kind, len, user] = [(); 4].map(|()| input.byte());
        let user = vec![kind; usize::from(user) * usize::from(kind >> 4)];
        let len = u32::from(len) * 32;
        let bytes = vec![len as u8; len as usize];
        let ask = Ask {
            chunk: usize::from(chunk) % (DEPTH as usize + 1),
            data: if kind & 1 == 0 { Ok(&bytes) } else { Err(len) },
            user: &user,
            invalidate: kind & 2 != 0,
        };
        self.peers.ask(conn, &ask);
    }

    /// Bytes anywhere in a chunk, and an immediate that names that place or another.
    fn scribble(&mut self, conn: usize, input: &mut Input<'_>) {
        self.peers.raw = true;
        let offset = input.number_or_zeros(2);
        let Some(c) = self.peers.conns.get(conn) else { return };
        let chunks = &self.peers.paths[c.path].chunks;
        let chunk = input.below(chunks.len());
        let Some((start, key)) = chunks.get(chunk) else { return };
        let layout = ChunkLayout::new(DEPTH, CHUNK).expect("a layout");
        if !self.peers.fake.write(*key, start + offset, input.short()) {
            self.peers.fake.violate(&c.id);
            self.peers.fake.event(&c.id, CmEventKind::Disconnected);
            return;
        }
        let named = if input.byte() & 1 == 0 {
            offset as u32
        } else {
            input.number_or_zeros(2) as u32
        };
        let imm = Imm::IoReq(layout.pack(chunk as u32, named % (2 * CHUNK)));
        self.peers.fake.deliver(&c.id, Message::WriteWithImm(imm.encode()));
    }

    /// The user is done with a request.
    fn finish(&mut self, input: &mut Input<'_>) {
        let [which, errno] = [(); 2].map(|()| input.byte());
        let Some(request) = self.ops.take(which) else { return };
        if errno == 255 {
            return drop(request);
        }
        if request.direction() == Direction::Read {
            let _ = request.write_data(usize::from(errno), input.short());
        }
        request.complete(i32::from(errno / 16));
    }
}
