//! The passive side: does what each connection's first word asks for.

use std::{
    collections::HashMap,
    mem,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use roce::{
    AccessFlags, Channel, CmEventKind, Completion, ConnParams, Cq, Device, EventChannel, Id, Mr, Payload, Pd, Qp,
    QpCaps, QpInit, RemoteAddr, SendFlags, SendOp, SendWr, VerbsError,
};

use super::{
    client::{check, post_recv, sleep_and_poll},
    failed,
    latency::{ANSWER, mark},
    wire::{Hello, Role, credit_at, emit_memory, receives},
};
use crate::output::Failure;

/// The most memory that a connection may ask for.
pub(crate) const MAX_BYTES: u32 = 1 << 30;
/// And all together: anybody may ask.
pub(crate) const MAX_TOTAL: u64 = 4 << 30;
pub(crate) const MAX_DEPTH: u32 = 4096;
pub(crate) const MAX_CONNECTIONS: usize = 20_000;
/// How long it sleeps when no connection needs its thread.
const IDLE: Duration = Duration::from_millis(50);

/// A connection.
struct Peer {
    id: Id,
    qp: Qp,
    cq: Cq,
    mr: Mr,
    hello: Hello,
    /// Rounds of a WRITE ping-pong.
    round: u64,
    credit: Credit,
}

/// Who serves a connection.
enum Served {
    /// The server's thread, in turns.
    InTurns(Peer),
    Asleep(Sleeper),
}

impl Served {
    fn hello(&self) -> &Hello {
        match self {
            Self::InTurns(peer) => &peer.hello,
            Self::Asleep(sleeper) => &sleeper.hello,
        }
    }
}

/// A connection with a thread of its own.
struct Sleeper {
    hello: Hello,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Sleeper {
    fn start(mut peer: Peer, events: Channel) -> Result<Self, Failure> {
        let (hello, ended) = (peer.hello, Arc::new(AtomicBool::new(false)));
        let flag = ended.clone();
        let serve = move || {
            let mut completions = vec![];
            while !flag.load(Ordering::Relaxed) {
                let served =
                    sleep_and_poll(&peer.cq, &events, &mut completions, IDLE).and_then(|()| peer.answer(&completions));
                if let Err(e) = served {
                    peer.end(&e);
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("echo".into()).spawn(serve);
        let thread = thread.map_err(|e| Failure::failed(format!("starting a thread: {e}")))?;
        Ok(Self {
            hello,
            ended,
            thread: Some(thread),
        })
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Receives of a [`Role::Sink`].
#[derive(Clone, Copy, Default)]
struct Credit {
    posted: u64,
    /// Last number that the sender was given.
    told: u64,
    /// WRITEs to it under way.
    telling: usize,
}

/// Of these at most.
const TELLING: usize = 4;

/// Listens, and serves connections.
pub(crate) struct Server {
    device: Device,
    pd: Pd,
    channel: EventChannel,
    _listener: Id,
    peers: HashMap<u64, Served>,
    completions: Vec<Completion>,
    /// When it complained last, and what was not said since.
    told: Option<Instant>,
    untold: u64,
}

fn posting(e: roce::PostError) -> Failure {
    failed("posting")(VerbsError::Post(e))
}

impl Server {
    pub(crate) fn new(device: &Device, addr: SocketAddr) -> Result<Self, Failure> {
        let channel = device.create_cm_channel().map_err(failed("making an event channel"))?;
        let listener = device
            .listen(&channel, addr, 128)
            .map_err(failed(&format!("listening on {addr}")))?;
        Ok(Self {
            device: device.clone(),
            pd: device.alloc_pd().map_err(failed("making a protection domain"))?,
            channel,
            _listener: listener,
            peers: HashMap::new(),
            completions: vec![],
            told: None,
            untold: 0,
        })
    }

    /// Serves until told to stop. A connection that fails ends, no more.
    pub(crate) fn run(mut self, stopped: &dyn Fn() -> bool) -> Result<(), Failure> {
        while !stopped() {
            // Only some roles need this thread; the memory of the others is written and read without it.
            let needed =
                |s: &Served| matches!(s, Served::InTurns(p) if !matches!(p.hello.role, Role::Target | Role::Source));
            let busy = self.peers.values().any(needed);
            let sleep = if busy { Duration::ZERO } else { IDLE };
            let event = self
                .channel
                .wait(Some(sleep))
                .map_err(failed("waiting for connections"))?;
            if let Some(event) = event {
                self.on_event(&event.id, event.kind);
            }
            for _ in 0..if busy { 256 } else { 0 } {
                self.work();
            }
            if busy {
                thread::yield_now();
            }
        }
        Ok(())
    }

    fn on_event(&mut self, id: &Id, kind: CmEventKind) {
        match kind {
            CmEventKind::Request { private_data, .. } => {
                let hello = Hello::parse(&private_data).filter(|h| h.bytes <= MAX_BYTES && h.depth <= MAX_DEPTH);
                let Some(hello) = hello else {
                    self.complain("a connect request that is no `ferroce bench` of this version: refused");
                    let _ = id.reject(b"not understood");
                    return;
                };
                let total: u64 = self.peers.values().map(|s| u64::from(s.hello().bytes)).sum();
                if self.peers.len() >= MAX_CONNECTIONS || total + u64::from(hello.bytes) > MAX_TOTAL {
                    self.complain("a connect request beyond 20,000 connections or 4 GiB of their memory: refused");
                    let _ = id.reject(b"too many");
                    return;
                }
                match self.accept(id, hello) {
                    Ok(peer) => {
                        self.peers.insert(id.handle(), peer);
                    }
                    Err(e) => self.complain(&format!(
                        "accepting a connection failed: {}",
                        e.text().unwrap_or_default()
                    )),
                }
            }
            CmEventKind::Established { .. } => {}
            _ => {
                self.peers.remove(&id.handle());
            }
        }
    }

    /// One line a second: anybody may ask.
    fn complain(&mut self, what: &str) {
        if self.told.is_some_and(|at| at.elapsed() < Duration::from_secs(1)) {
            self.untold += 1;
            return;
        }
        self.told = Some(Instant::now());
        tracing::warn!(suppressed = mem::take(&mut self.untold), "{what}");
    }

    fn accept(&self, id: &Id, hello: Hello) -> Result<Served, Failure> {
        let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
        let device = &self.device;
        let mr = device
            .alloc_mr(&self.pd, hello.bytes.max(1) as usize, access)
            .map_err(failed("registering memory"))?;
        let depth = hello.depth.max(8);
        let receives = receives(hello.depth);
        let channel = hello.role.sleeps().then(|| device.create_channel()).transpose();
        let events = channel.map_err(failed("making a completion channel"))?;
        let cq = device
            .create_cq(depth + receives + 8, events.as_ref(), 0)
            .map_err(failed("making a completion queue"))?;
        let init = QpInit {
            send_cq: &cq,
            recv_cq: &cq,
            caps: QpCaps {
                max_send_wr: depth,
                max_recv_wr: receives,
                ..QpCaps::default()
            },
            signal_all: false,
        };
        let qp = device
            .create_qp(&self.pd, &init)
            .map_err(failed("making a queue pair"))?;
        let params = ConnParams {
            private_data: emit_memory(RemoteAddr {
                addr: mr.addr(),
                rkey: mr.rkey(),
            }),
            ..ConnParams::default()
        };
        if hello.role.receives() {
            post_recv(&qp, &mr, receives as usize)?;
        }
        id.accept(&qp, params).map_err(failed("accepting"))?;
        let peer = Peer {
            id: id.clone(),
            qp,
            cq,
            mr,
            hello,
            round: 0,
            credit: Credit {
                posted: receives.into(),
                told: receives.into(),
                telling: 0,
            },
        };
        match events {
            Some(events) => Sleeper::start(peer, events).map(Served::Asleep),
            None => Ok(Served::InTurns(peer)),
        }
    }

    /// Lets each connection that needs it have its turn.
    fn work(&mut self) {
        let mut failed = vec![];
        for (handle, served) in &mut self.peers {
            let Served::InTurns(peer) = served else { continue };
            if let Err(e) = peer.turn(&mut self.completions) {
                peer.end(&e);
                failed.push(*handle);
            }
        }
        for handle in failed {
            self.peers.remove(&handle);
        }
    }
}

impl Peer {
    /// It has failed.
    fn end(&self, why: &Failure) {
        tracing::info!("a connection ended: {}", why.text().unwrap_or_default());
        let _ = self.id.disconnect();
    }

    fn turn(&mut self, completions: &mut Vec<Completion>) -> Result<(), Failure> {
        completions.clear();
        self.cq.poll(completions, 64).map_err(failed("polling"))?;
        self.answer(completions)
    }

    fn answer(&mut self, completions: &[Completion]) -> Result<(), Failure> {
        let mut received = 0;
        for c in completions {
            check(c)?;
            received += usize::from(c.wr_id == 0);
        }
        match self.hello.role {
            Role::WriteEcho => self.echo_write(),
            Role::SendEcho | Role::SleepingSendEcho => self.echo(received, SendOp::Send),
            Role::SleepingWriteEcho => self.echo(received, SendOp::WriteWithImm(self.hello.memory, 0)),
            Role::Sink => {
                self.credit.telling -= (completions.len() - received).min(self.credit.telling);
                if received > 0 {
                    post_recv(&self.qp, &self.mr, received)?;
                    self.credit.posted += received as u64;
                }
                self.tell()
            }
            Role::Target | Role::Source => Ok(()),
        }
    }

    /// Answers messages that have consumed receives.
    fn echo(&self, received: usize, op: SendOp) -> Result<(), Failure> {
        for _ in 0..received {
            post_recv(&self.qp, &self.mr, 1)?;
            self.post(op)?;
        }
        Ok(())
    }

    /// Tells the sender how many receives there are, when it is worth a packet.
    fn tell(&mut self) -> Result<(), Failure> {
        let Credit { posted, told, telling } = self.credit;
        if posted - told < u64::from(receives(self.hello.depth)) / 4 || telling >= TELLING {
            return Ok(());
        }
        let memory = self.hello.memory;
        let to = RemoteAddr {
            addr: memory.addr.wrapping_add(credit_at(self.hello.bytes) as u64),
            ..memory
        };
        self.credit.told = posted;
        self.credit.telling += 1;
        self.post_payload(SendOp::Write(to), Payload::Inline(&posted.to_le_bytes()))
    }

    fn post(&self, op: SendOp) -> Result<(), Failure> {
        let sges = [self.mr.sge(0, self.hello.bytes as usize)];
        self.post_payload(op, Payload::Sges(&sges))
    }

    fn post_payload(&self, op: SendOp, payload: Payload<'_>) -> Result<(), Failure> {
        let wr = SendWr {
            wr_id: 1,
            op,
            flags: SendFlags::SIGNALED,
            payload,
        };
        self.qp.post_send(&[wr]).map_err(|(_, e)| posting(e))
    }

    /// Answers a WRITE whose mark has arrived with one that carries the answer's mark.
    fn echo_write(&mut self) -> Result<(), Failure> {
        let last = self.hello.bytes.max(1) as usize - 1;
        let out = |e| Failure::failed(format!("{e}"));
        let mut seen = [0];
        self.mr.read(last, &mut seen).map_err(out)?;
        if seen[0] != mark(self.round) {
            return Ok(());
        }
        self.mr.write(last, &[seen[0] | ANSWER]).map_err(out)?;
        self.round += 1;
        self.post(SendOp::Write(self.hello.memory))
    }
}
