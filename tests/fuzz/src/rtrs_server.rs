//! Clients of an RTRS server, some that keep to the protocol and some that don't: connect requests, the handshake,
//! messages and immediates, requests in chunks, ends of connections at any time, and the parsers by themselves. The server
//! hands its user nothing that is out of bounds, answers what it accepts, sends only what somebody asked for, and leaves
//! nothing behind. What the transport must not be asked for is in `provider.rs`.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use roce_verbs::mem::{MemError, Pages};
use roce_verbs::{
    WcStatus,
    provider::{CmKind, NoAnswer, RejectReason},
};
use rtrs::{
    Cx, Direction,
    proto::{ChunkLayout, Imm, InfoReq, MAX_HDR_SIZE, info::check_name},
    server::{
        Server, ServerConfig,
        request::{Output, Request, SessionKey},
    },
};
use zerocopy::IntoBytes;

use crate::{
    host::{Host, User},
    input::Input,
    peers::{Ask, Message, Peers, conn_req, parse},
    provider::Keys,
};

const DEPTH: u32 = 4;
const CHUNK: u32 = 8192;
/// Steps of a run: more are left out, so that no input takes long.
const STEPS: usize = 96;

/// The server's user: keeps requests until the input says what becomes of them.
#[derive(Default)]
struct Ops {
    held: Vec<Request>,
    open: BTreeMap<SessionKey, String>,
    /// Sessions whose name another has got, since they are only being cleaned up.
    followed: BTreeSet<SessionKey>,
    /// There is no memory for sessions.
    poor: bool,
}

impl User for Ops {
    fn told(&mut self, server: &mut Server, cx: &mut Cx<'_>, output: Output) {
        match output {
            Output::SessionOpened(session) => {
                assert_eq!(check_name(&session.name), Ok(()));
                let others = self.open.iter().filter(|(_, name)| **name == session.name);
                self.followed.extend(others.map(|(key, _)| *key));
                assert!(self.open.insert(session.session, session.name).is_none());
            }
            Output::SessionClosed { session, .. } => {
                assert!(self.open.remove(&session).is_some());
                let mut held = self.held.iter();
                assert!(
                    !held.any(|r| r.key.session == session),
                    "it is over before its requests"
                );
            }
            Output::PathUp { session, .. } | Output::PathDown { session, .. } => {
                assert!(self.open.contains_key(&session), "a path of no open session");
            }
            Output::Request(request) => self.request(server, request),
            Output::Allocate { ticket, bytes } => {
                let memory = match self.poor {
                    true => Err(MemError::OutOfMemory(bytes)),
                    false => Pages::allocate(bytes),
                };
                server.ready(cx, ticket, memory);
            }
            Output::Free(memory) => assert_eq!(std::sync::Arc::strong_count(&memory), 1),
        }
    }
}

impl Ops {
    fn request(&mut self, server: &Server, request: Request) {
        let key = request.key;
        assert!(self.open.contains_key(&key.session), "a request of no open session");
        assert!(!self.followed.contains(&key.session), "two sessions of one name");
        let mut held = self.held.iter().map(|r| (r.key.session, r.key.chunk));
        assert!(
            !held.any(|at| at == (key.session, key.chunk)),
            "two requests in a chunk"
        );
        let (header, data) = (request.header.len(), request.data_len as usize);
        assert!(header <= MAX_HDR_SIZE as usize && data + header < CHUNK as usize);
        assert_eq!(request.data_offset / CHUNK as usize, usize::from(key.chunk));
        let memory = server.memory(key.session).expect("the session's memory");
        assert!(memory.read(request.data_offset, &mut vec![0; data]).is_ok());
        assert!(server.write_data(key, data, &[0]).is_err() && server.write_data(key, usize::MAX, &[0]).is_err());
        self.held.push(request);
    }

    /// One of the requests, to be answered.
    fn take(&mut self, which: u8) -> Option<Request> {
        let index = usize::from(which) % self.held.len().max(1);
        (index < self.held.len()).then(|| self.held.swap_remove(index))
    }
}

fn config(bits: u8) -> ServerConfig {
    ServerConfig {
        addr: [192, 0, 2, 1].into(),
        max_sessions: 3,
        max_sessions_per_client: 2,
        max_connections: 4,
        queue_depth: DEPTH,
        max_chunk_size: CHUNK,
        always_invalidate: bits & 1 == 0,
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
    let keys = [Keys::INSTANT, Keys::QUEUED, Keys::WINDOWS, Keys::STATIC][usize::from(bits >> 1 & 3)];
    let ops = Ops {
        poor: bits >> 3 & 3 == 3,
        ..Ops::default()
    };
    let layout = ChunkLayout::new(DEPTH, CHUNK).expect("a layout");
    let mut run = Run {
        peers: Peers::new(Host::new(config(bits), keys, ops), layout),
    };
    for _ in 0..STEPS {
        if input.0.is_empty() {
            break;
        }
        run.step(&mut input);
        let _ = run.peers.collect();
        if run.peers.host.user.held.is_empty() && run.peers.host.provider.auto_complete {
            run.peers.check_rest();
        }
    }
    // What waited for sends to complete comes now.
    run.peers.host.provider.auto_complete = true;
    run.peers.host.quiet();
    while let Some(request) = run.peers.host.user.take(0) {
        run.answer(&request, 5);
        let _ = run.peers.collect();
    }
    run.peers.check_rest();
    let ops = run.peers.host.stop();
    assert!(ops.open.is_empty(), "a session that is not closed");
}

struct Run {
    peers: Peers<Ops>,
}

impl Run {
    fn step(&mut self, input: &mut Input<'_>) {
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
                self.peers.deliver(conn, Message::WriteWithImm(imm));
            }
            9 => {
                let n = input.byte();
                self.peers.host.provider.auto_complete = n & 1 == 0;
                if n & 128 != 0 {
                    self.peers
                        .host
                        .wait(Duration::from_millis(250) * u32::from(n >> 1 & 63));
                }
            }
            10 | 11 => self.finish(input),
            12 => {
                let sessions = self.peers.host.server.sessions();
                if let Some(session) = sessions.get(input.below(4)).map(|s| s.session) {
                    assert!(self.peers.host.call(|server, cx, _| server.close_session(cx, session)));
                }
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
        let mut req = conn_req(
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
        if conn >= self.peers.conns.len() {
            return;
        }
        let kind = match input.byte() % 7 {
            0 | 1 => CmKind::Disconnected,
            2 => CmKind::Rejected {
                reason: RejectReason::CONSUMER,
                private_data: Vec::new(),
            },
            3 => CmKind::Unreachable(NoAnswer::Timeout),
            4 => CmKind::ConnectError("broken".into()),
            5 => CmKind::TimewaitExit,
            _ => {
                self.peers.fail(conn, WcStatus::RemoteAccessError);
                CmKind::Disconnected
            }
        };
        self.peers.event(conn, kind);
    }

    fn send(&mut self, conn: usize, input: &mut Input<'_>) {
        if conn >= self.peers.conns.len() {
            return;
        }
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
        self.peers.deliver(conn, message);
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
        let Some(&(start, key)) = chunks.get(chunk) else { return };
        let layout = ChunkLayout::new(DEPTH, CHUNK).expect("a layout");
        if !self.peers.write(conn, key, start + offset, input.short()) {
            return self.peers.violate(conn);
        }
        let named = if input.byte() & 1 == 0 {
            offset as u32
        } else {
            input.number_or_zeros(2) as u32
        };
        let imm = Imm::IoReq(layout.pack(chunk as u32, named % (2 * CHUNK)));
        self.peers.deliver(conn, Message::WriteWithImm(imm.encode()));
    }

    /// The user is done with a request.
    fn finish(&mut self, input: &mut Input<'_>) {
        let [which, errno] = [(); 2].map(|()| input.byte());
        let Some(request) = self.peers.host.user.take(which) else {
            return;
        };
        if request.direction == Direction::Read {
            let _ = self
                .peers
                .host
                .server
                .write_data(request.key, usize::from(errno), input.short());
        }
        self.answer(&request, i32::from(errno / 16));
    }

    fn answer(&mut self, request: &Request, errno: i32) {
        let key = request.key;
        self.peers.host.call(|server, cx, _| {
            server.answer(cx, key, errno);
            // It is answered once.
            assert!(server.write_data(key, 0, &[]).is_err());
            server.answer(cx, key, 1);
        });
    }
}
