//! The passive side of the measurement of RTRS.

use std::{
    io::{self, Read},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, Builder},
    time::Duration,
};

use ::rtrs::{
    Cx, Direction, errno,
    proto::MAX_HDR_SIZE,
    server::{
        Server, ServerConfig,
        request::{Output, Request, Ticket},
    },
};
use roce::reactor::{JobResult, JobTicket, Reactor, ReactorConfig, Service, TurnCx};
use roce::{Completion, LocalDevice};
use roce_verbs::mem::{MemError, Pages};
use roce_verbs::{
    Instant,
    provider::{Event, QpId},
};

use super::{
    active::Stopped,
    usage::{self, Random, cx, random},
};
use crate::output::Failure;

/// Bytes of data.
pub(crate) const SPACE: usize = 64 << 20;
/// Bytes of a request's header: the offset of the data.
pub(crate) const HEADER: usize = 8;
/// Offset whose data is the server's usage.
pub(crate) const REPORT: u64 = u64::MAX;

/// Returns a request's header.
pub(crate) fn header(at: u64) -> [u8; HEADER] {
    at.to_le_bytes()
}

/// Resources that the server has used.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Spent {
    /// System calls of its loop.
    pub(crate) calls: u64,
    /// CPU time of its process, nanoseconds.
    pub(crate) cpu: u64,
}

impl Spent {
    fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.calls.to_le_bytes());
        bytes[8..].copy_from_slice(&self.cpu.to_le_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8; 16]) -> Self {
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        Self {
            calls: number(0),
            cpu: number(8),
        }
    }
}

type Memory = (Ticket, Result<Arc<Pages>, MemError>);

/// RTRS server on a loop, with data in memory.
struct Memories {
    rtrs: Server,
    random: Random,
    data: Vec<u8>,
    jobs: u64,
    stopping: bool,
}

impl Memories {
    fn answer(&mut self, turn: &mut TurnCx<'_, Memory>, request: &Request) {
        let done = self.transfer(turn, request);
        let errno = if done.is_some() { 0 } else { errno::EINVAL };
        self.rtrs.answer(&mut cx(turn, &mut self.random), request.key, errno);
    }

    fn transfer(&mut self, turn: &mut TurnCx<'_, Memory>, request: &Request) -> Option<()> {
        let at = u64::from_le_bytes(request.header.as_slice().try_into().ok()?);
        let memory = self.rtrs.memory(request.key.session)?;
        if at == REPORT {
            let spent = Spent {
                calls: usage::calls(turn),
                cpu: usage::cpu(),
            };
            return memory.write(request.data_offset, &spent.to_bytes()).ok();
        }
        let at = usize::try_from(at).ok()?;
        let data = self.data.get_mut(at..at.checked_add(request.data_len as usize)?)?;
        match request.direction {
            Direction::Read => memory.write(request.data_offset, data).ok(),
            Direction::Write => memory.read(request.data_offset, data).ok(),
        }
    }
}

impl Service for Memories {
    type Command = ();
    type Output = Memory;

    /// Stops.
    fn command(&mut self, turn: &mut TurnCx<'_, Memory>, (): ()) {
        self.stopping = true;
        self.rtrs.stop(&mut cx(turn, &mut self.random));
    }

    fn completions(&mut self, turn: &mut TurnCx<'_, Memory>, completions: &[(QpId, Completion)]) {
        let cx = &mut cx(turn, &mut self.random);
        for (qp, wc) in completions {
            self.rtrs.completion(cx, *qp, wc);
        }
    }

    fn event(&mut self, turn: &mut TurnCx<'_, Memory>, event: Event) {
        self.rtrs.event(&mut cx(turn, &mut self.random), &event);
    }

    fn job_done(&mut self, turn: &mut TurnCx<'_, Memory>, done: JobResult<Memory>) {
        if let Ok((ticket, memory)) = done.result {
            self.rtrs.ready(&mut cx(turn, &mut self.random), ticket, memory);
        }
    }

    fn timeout(&mut self, turn: &mut TurnCx<'_, Memory>) {
        self.rtrs.timeout(&mut cx(turn, &mut self.random));
    }

    fn work(&mut self, turn: &mut TurnCx<'_, Memory>) -> bool {
        let mut worked = false;
        while let Some(output) = self.rtrs.poll_output() {
            worked = true;
            match output {
                Output::Request(request) => self.answer(turn, &request),
                Output::Allocate { ticket, bytes } => {
                    self.jobs += 1;
                    let started = turn.jobs.begin(JobTicket(self.jobs));
                    let job = move || started.finish((ticket, Pages::allocate(bytes)));
                    if Builder::new().spawn(job).is_err() {
                        let refused = Err(MemError::Limit("threads"));
                        self.rtrs.ready(&mut cx(turn, &mut self.random), ticket, refused);
                    }
                }
                _ => {}
            }
        }
        worked
    }

    fn end(&mut self, turn: &mut TurnCx<'_, Memory>) {
        self.rtrs.end_batch(&mut cx(turn, &mut self.random));
        if self.stopping && self.rtrs.is_idle() {
            turn.stop();
        }
    }

    fn next_timeout(&self) -> Option<Instant> {
        self.rtrs.next_timeout()
    }
}

/// Returns the settings of a server.
pub(crate) fn config(addr: SocketAddr, always_invalidate: bool) -> ServerConfig {
    ServerConfig {
        addr: addr.ip(),
        port: addr.port(),
        queue_depth: 128,
        max_chunk_size: ((1 << 20) + MAX_HDR_SIZE).next_power_of_two(),
        always_invalidate,
        ..ServerConfig::default()
    }
}

/// Serves until `stopped`, and with `until_eof` until standard input ends. Calls `ready` when it listens.
pub(crate) fn run(
    mut device: LocalDevice,
    config: ServerConfig,
    reactor: ReactorConfig,
    until_eof: bool,
    stopped: Stopped<'_>,
    ready: impl FnOnce() -> Result<(), Failure>,
) -> Result<(), Failure> {
    let reactor = Reactor::<Memories>::new(reactor).map_err(Failure::of)?;
    let (handle, mut random) = (reactor.handle(), random()?);
    let mut cx = Cx {
        now: roce::now(),
        provider: device.provider(),
        random: &mut random,
    };
    let (rtrs, _) = Server::listen(&mut cx, config).map_err(Failure::of)?;
    ready()?;
    if until_eof {
        let end = handle.clone();
        // A thread that waits for input can't be ended; it goes with the process.
        let input = Builder::new().name("input".into()).spawn(move || {
            let _ = io::stdin().read_to_end(&mut Vec::new());
            end.command(());
        });
        input.map_err(Failure::of)?;
    }
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) && !stopped() {
                thread::sleep(Duration::from_millis(100));
            }
            handle.command(());
        });
        let ran = reactor.run(device, |_| Memories {
            rtrs,
            random,
            data: vec![0x5a; SPACE],
            jobs: 0,
            stopping: false,
        });
        ended.store(true, Ordering::Relaxed);
        ran.map(drop).map_err(Failure::of)
    })
}
