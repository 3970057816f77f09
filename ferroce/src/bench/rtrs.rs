//! RTRS without a block device: a fixed number of requests of one size in flight to a server with its data in memory.

use std::{
    io::{BufRead, BufReader},
    net::{IpAddr, SocketAddr},
    process::{self, Child, Stdio},
    sync::mpsc::{Receiver, Sender, channel},
    thread::{Builder, JoinHandle},
    time::Duration,
};

use ::rtrs::{
    Direction, IoError,
    addr::PathAddr,
    client::{Buffer, Client, ConType, Output, SessionConfig, SessionId, Submission},
};
use roce::reactor::{Handle, Reactor, ReactorConfig, Service, TurnCx};
use roce::{Completion, LocalDevice};
use roce_verbs::{
    Instant,
    provider::{Event, QpId},
};
use serde::Serialize;

use super::{
    report::Latency,
    rtrs_server::{HEADER, REPORT, Spent, header},
    usage::{self, Random, cx, random},
};
use crate::output::{self, Failure};

/// Settings of a measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Load {
    pub(crate) bytes: u32,
    pub(crate) depth: u32,
    pub(crate) write: bool,
    pub(crate) time: Duration,
}

/// Result of a measurement. Field names are stable.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Measurement {
    pub(crate) op: &'static str,
    /// Bytes of a request's data.
    pub(crate) bytes: u32,
    pub(crate) depth: u32,
    /// The server invalidates a chunk's key with every request.
    pub(crate) always_invalidate: bool,
    pub(crate) seconds: f64,
    pub(crate) requests: u64,
    pub(crate) failed: u64,
    pub(crate) iops: f64,
    pub(crate) gbytes_per_s: f64,
    /// Time from submission to the answer.
    pub(crate) latency_us: Latency,
    /// CPU time of a request, microseconds.
    pub(crate) client_cpu_us: f64,
    pub(crate) server_cpu_us: f64,
    /// System calls of a request.
    pub(crate) client_calls: f64,
    pub(crate) server_calls: f64,
}

impl std::fmt::Display for Measurement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Latency { p50, p99 } = self.latency_us;
        write!(
            f,
            "{:<11} {:>9}  depth {:<3} always_invalidate {:<3} {:>9.0} IOPS {:7.3} GB/s  p50 {p50:.1} us  p99 {p99:.1} us  \
             CPU {:.1} + {:.1} us, calls {:.2} + {:.2} (client + server)",
            self.op,
            output::bytes(self.bytes.into()),
            self.depth,
            if self.always_invalidate { "on" } else { "off" },
            self.iops,
            self.gbytes_per_s,
            self.client_cpu_us,
            self.server_cpu_us,
            self.client_calls,
            self.server_calls,
        )?;
        match self.failed {
            0 => Ok(()),
            n => write!(f, "  {n} FAILED"),
        }
    }
}

/// Command to the loop.
enum Command {
    Run(Load, Sender<Result<Ran, String>>),
    Stop,
}

/// Result of a run.
#[derive(Debug, Default)]
struct Ran {
    requests: u64,
    failed: u64,
    time: Duration,
    /// Nanoseconds.
    samples: Vec<u64>,
    calls: u64,
    /// CPU time of this process, nanoseconds.
    cpu: u64,
    /// Usage of the server before and after.
    server: [Spent; 2],
}

/// Run in progress.
struct Running {
    load: Load,
    result: Sender<Result<Ran, String>>,
    begun: Instant,
    /// Submission times of requests in flight.
    sent: Vec<Instant>,
    in_flight: u32,
    ran: Ran,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Waits for the server's usage.
    Before,
    Running,
    /// Waits for requests in flight.
    Ending,
    After,
}

/// Tag of a request for the server's usage.
const REPORT_TAG: u64 = u64::MAX;

/// RTRS client on a loop.
struct Bench {
    rtrs: Client,
    session: SessionId,
    always_invalidate: bool,
    random: Random,
    opened: Option<Sender<Result<bool, String>>>,
    running: Option<Running>,
    stopping: bool,
    /// Bytes of the server's data.
    space: u64,
}

impl Bench {
    fn on_output(&mut self, turn: &mut TurnCx<'_, ()>, output: Output) {
        match output {
            Output::Opened(_, info) => {
                self.always_invalidate = info.new_rkeys;
                if let Some(opened) = self.opened.take() {
                    let _ = opened.send(Ok(info.new_rkeys));
                }
            }
            Output::OpenFailed(_, e) => self.fail(&e.to_string(), turn),
            Output::Down(_, why) => self.fail(&why.to_string(), turn),
            Output::Closed(_) => turn.stop(),
            Output::Up(..) | Output::Path { .. } => {}
            // The server has not answered it.
            Output::Done {
                result: Err(e @ (IoError::Path(_) | IoError::TooLong { .. })),
                data,
                ..
            } => {
                self.give(data);
                self.fail(&e.to_string(), turn);
            }
            Output::Done { tag, result, data, .. } => {
                if tag == REPORT_TAG {
                    self.reported(turn, data);
                } else {
                    self.done(turn, tag, result.is_ok(), data);
                }
            }
        }
    }

    fn fail(&mut self, why: &str, turn: &mut TurnCx<'_, ()>) {
        if let Some(opened) = self.opened.take() {
            let _ = opened.send(Err(why.to_owned()));
            turn.stop();
        }
        if let Some(running) = self.running.take() {
            let _ = running.result.send(Err(why.to_owned()));
        }
    }

    /// Submits a request for data at an offset. False: there is no buffer, and the run has failed.
    fn submit(
        &mut self,
        turn: &mut TurnCx<'_, ()>,
        (tag, con, direction): (u64, ConType, Direction),
        (at, len): (u64, usize),
    ) -> bool {
        let (session, mut cx) = (self.session, cx(turn, &mut self.random));
        let Ok(data) = self.rtrs.take_buffer(&mut cx, session, len) else {
            self.fail("no buffer", turn);
            return false;
        };
        let request = Submission {
            tag,
            con,
            direction,
            header: header(at).into_iter().collect(),
            data: Some(data),
        };
        self.rtrs.submit(&mut cx, session, request);
        true
    }

    /// Requests the server's usage.
    fn ask_report(&mut self, turn: &mut TurnCx<'_, ()>) {
        let of = (REPORT_TAG, ConType::Admin, Direction::Read);
        self.submit(turn, of, (REPORT, size_of::<Spent>()));
    }

    fn give(&mut self, buffer: Option<Buffer>) {
        if let Some(buffer) = buffer {
            self.rtrs.give_buffer(self.session, buffer);
        }
    }

    fn reported(&mut self, turn: &mut TurnCx<'_, ()>, data: Option<Buffer>) {
        let mut bytes = [0; size_of::<Spent>()];
        if let (Some(data), Some(buffers)) = (&data, self.rtrs.buffers(self.session)) {
            // As long as requested.
            let _ = buffers.read(data, 0, &mut bytes);
        }
        self.give(data);
        let spent = Spent::from_bytes(&bytes);
        let Some(running) = &mut self.running else { return };
        match running.stage {
            Stage::Before => {
                running.ran.server[0] = spent;
                running.ran.calls = usage::calls(turn);
                running.ran.cpu = usage::cpu();
                running.begun = roce::now();
                running.stage = Stage::Running;
                for slot in 0..running.load.depth {
                    self.send(turn, slot.into());
                }
            }
            Stage::After => {
                running.ran.server[1] = spent;
                if let Some(running) = self.running.take() {
                    let _ = running.result.send(Ok(running.ran));
                }
            }
            Stage::Running | Stage::Ending => {}
        }
    }

    fn send(&mut self, turn: &mut TurnCx<'_, ()>, slot: u64) {
        let Some(load) = self.running.as_ref().map(|r| r.load) else {
            return;
        };
        let unit = u64::from(load.bytes).next_multiple_of(512);
        let at = cx(turn, &mut self.random).below((self.space / unit).max(1)) * unit;
        let direction = match load.write {
            true => Direction::Write,
            false => Direction::Read,
        };
        let of = (slot, ConType::Io(slot as usize), direction);
        if self.submit(turn, of, (at, load.bytes as usize))
            && let Some(running) = &mut self.running
        {
            running.sent[slot as usize] = roce::now();
            running.in_flight += 1;
        }
    }

    fn done(&mut self, turn: &mut TurnCx<'_, ()>, slot: u64, success: bool, data: Option<Buffer>) {
        self.give(data);
        let Some(running) = &mut self.running else { return };
        let now = roce::now();
        running.in_flight -= 1;
        running.ran.requests += 1;
        running.ran.failed += u64::from(!success);
        let took = now.saturating_since(running.sent[slot as usize]);
        running.ran.samples.push(took.as_nanos() as u64);
        let passed = now.saturating_since(running.begun);
        if running.stage == Stage::Running && passed < running.load.time {
            return self.send(turn, slot);
        }
        running.stage = Stage::Ending;
        if running.in_flight == 0 {
            running.ran.time = passed;
            running.ran.calls = usage::calls(turn) - running.ran.calls;
            running.ran.cpu = usage::cpu() - running.ran.cpu;
            running.stage = Stage::After;
            self.ask_report(turn);
        }
    }
}

impl Service for Bench {
    type Command = Command;
    type Output = ();

    fn command(&mut self, turn: &mut TurnCx<'_, ()>, command: Command) {
        match command {
            Command::Run(load, result) => {
                self.running = Some(Running {
                    load,
                    result,
                    begun: turn.now,
                    sent: vec![turn.now; load.depth as usize],
                    in_flight: 0,
                    ran: Ran::default(),
                    stage: Stage::Before,
                });
                self.ask_report(turn);
            }
            Command::Stop if self.stopping => {}
            Command::Stop => {
                self.stopping = true;
                self.rtrs.close(&mut cx(turn, &mut self.random), self.session);
            }
        }
    }

    fn completions(&mut self, turn: &mut TurnCx<'_, ()>, completions: &[(QpId, Completion)]) {
        let cx = &mut cx(turn, &mut self.random);
        for (qp, wc) in completions {
            self.rtrs.completion(cx, *qp, wc);
        }
    }

    fn event(&mut self, turn: &mut TurnCx<'_, ()>, event: Event) {
        self.rtrs.event(&mut cx(turn, &mut self.random), &event);
    }

    fn timeout(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.rtrs.timeout(&mut cx(turn, &mut self.random));
    }

    fn work(&mut self, turn: &mut TurnCx<'_, ()>) -> bool {
        let mut worked = false;
        while let Some(output) = self.rtrs.poll_output() {
            worked = true;
            self.on_output(turn, output);
        }
        worked
    }

    fn end(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.rtrs.end_batch(&mut cx(turn, &mut self.random));
    }

    fn next_timeout(&self) -> Option<Instant> {
        self.rtrs.next_timeout()
    }
}

/// Client with a session.
pub(crate) struct Rtrs {
    handle: Handle<Command, ()>,
    thread: Option<JoinHandle<()>>,
    always_invalidate: bool,
}

impl Rtrs {
    /// Opens a session with a server.
    pub(crate) fn connect(
        device: LocalDevice,
        (from, server): (IpAddr, SocketAddr),
        connections: u16,
        reactor: ReactorConfig,
    ) -> Result<Self, Failure> {
        let mut config = SessionConfig::new(
            "bench",
            PathAddr {
                src: Some(from),
                dst: server,
            },
        );
        config.connections = connections;
        config.max_user_header = HEADER as u16;
        let reactor = Reactor::<Bench>::new(reactor).map_err(Failure::of)?;
        let handle = reactor.handle();
        let (open, opened) = channel();
        let random = random()?;
        let thread = Builder::new().name("ferroce-io".into()).spawn(move || {
            let ended = reactor.run(device, |turn| {
                let mut bench = Bench {
                    rtrs: Client::new(),
                    session: SessionId(0),
                    always_invalidate: false,
                    random,
                    opened: Some(open),
                    running: None,
                    stopping: false,
                    space: super::rtrs_server::SPACE as u64,
                };
                match bench.rtrs.open(&mut cx(turn, &mut bench.random), config) {
                    Ok(session) => bench.session = session,
                    Err(e) => bench.fail(&e.to_string(), turn),
                }
                bench
            });
            if let Err(e) = ended {
                tracing::error!("the loop has ended: {e}");
            }
        });
        let mut made = Self {
            handle,
            thread: Some(thread.map_err(Failure::of)?),
            always_invalidate: false,
        };
        let opened = opened.recv().unwrap_or_else(|_| Err("the loop has ended".into()));
        made.always_invalidate = opened.map_err(|e| Failure::failed(format!("no session with {server}: {e}")))?;
        Ok(made)
    }

    /// Measures.
    pub(crate) fn run(&self, load: Load) -> Result<Measurement, Failure> {
        let (result, ran): (_, Receiver<Result<Ran, String>>) = channel();
        self.handle.command(Command::Run(load, result));
        let ran = ran.recv().unwrap_or_else(|_| Err("the loop has ended".into()));
        let mut ran = ran.map_err(Failure::failed)?;
        let seconds = ran.time.as_secs_f64();
        let each = |n: u64| n as f64 / ran.requests.max(1) as f64;
        let [before, after] = ran.server;
        Ok(Measurement {
            op: if load.write { "rtrs write" } else { "rtrs read" },
            bytes: load.bytes,
            depth: load.depth,
            always_invalidate: self.always_invalidate,
            seconds,
            requests: ran.requests,
            failed: ran.failed,
            iops: ran.requests as f64 / seconds.max(1e-9),
            gbytes_per_s: ran.requests as f64 * f64::from(load.bytes) / seconds.max(1e-9) / 1e9,
            client_cpu_us: each(ran.cpu) / 1e3,
            server_cpu_us: each(after.cpu.saturating_sub(before.cpu)) / 1e3,
            client_calls: each(ran.calls),
            server_calls: each(after.calls.saturating_sub(before.calls)),
            latency_us: Latency::of(&mut ran.samples),
        })
    }
}

impl Drop for Rtrs {
    fn drop(&mut self) {
        self.handle.command(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Server in a process of its own. The drop ends it.
pub(crate) struct ServerProcess(Child);

impl ServerProcess {
    /// Starts this program as a server.
    pub(crate) fn start(listen: SocketAddr, options: &[String]) -> Result<Self, Failure> {
        let program = std::env::current_exe().map_err(Failure::of)?;
        let mut child = process::Command::new(program)
            .args(["bench", "rtrs", "--server", "--addr", &listen.to_string()])
            .args(options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| Failure::failed(format!("starting the server: {e}")))?;
        let stdout = child.stdout.take();
        let made = Self(child);
        let mut line = String::new();
        if let Some(stdout) = stdout {
            BufReader::new(stdout).read_line(&mut line).map_err(Failure::of)?;
        }
        match line.is_empty() {
            true => Err(Failure::failed("the server did not start".to_owned())),
            false => Ok(made),
        }
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // The server exits at the end of its standard input.
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}
