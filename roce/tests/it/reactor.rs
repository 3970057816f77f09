//! Loops on devices of this process, seen from the threads beside them.

use std::{
    io::{Read, Write},
    net::{IpAddr, SocketAddr},
    os::{fd::AsFd, unix::net::UnixStream},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use roce::reactor::{
    Counters, Handle, Interest, JobResult, JobTicket, Panicked, Reactor, ReactorConfig, Readiness, Service, SpinMode,
    StartedJob, Token, TurnCx,
};
use roce::{
    AccessFlags, Completion, ConnParams, DeviceConfig, LocalDevice, Pages, Payload, QpCaps, RecvWr, SendFlags, SendOp,
    SendWr, Sge, WcOpcode, WcStatus,
    verbs::{
        Instant,
        provider::{CmKind, CqId, DeviceIx, Event, MrInfo, PdId, QpId, QpSpec, Registration},
    },
};

const SERVICE: u16 = 7000;
const SLOT: usize = 256;
const SLOTS: usize = 16;
/// Time after which an expected event counts as missing.
const TIMEOUT: Duration = Duration::from_secs(60);

fn address() -> IpAddr {
    ferroce_loopback::address().into()
}

fn device(addr: IpAddr) -> LocalDevice {
    LocalDevice::open(&[DeviceConfig::new(addr)]).unwrap()
}

/// A service that runs on a loop of its own.
struct Running<S: Service> {
    handle: Handle<S::Command, S::Output>,
    thread: JoinHandle<S>,
}

fn run<S: Service + Send + 'static>(
    spin: SpinMode,
    addr: IpAddr,
    start: impl FnOnce(&mut TurnCx<'_, S::Output>) -> S + Send + 'static,
) -> Running<S> {
    let config = ReactorConfig {
        spin,
        ..ReactorConfig::default()
    };
    let reactor = Reactor::<S>::new(config).unwrap();
    Running {
        handle: reactor.handle(),
        thread: thread::spawn(move || reactor.run(device(addr), start).unwrap()),
    }
}

/// Sends and receives through slots of one registration: those below `SLOTS` receive, the others send.
struct Messages {
    pages: Arc<Pages>,
    pd: PdId,
    cq: CqId,
    mr: MrInfo,
}

impl Messages {
    fn new<J>(cx: &mut TurnCx<'_, J>) -> Self {
        let pages = Pages::allocate(2 * SLOTS * SLOT).unwrap();
        let provider = cx.provider();
        let pd = provider.alloc_pd(DeviceIx(0)).unwrap();
        let cq = provider.create_cq(DeviceIx(0), 1000).unwrap();
        let whole = Registration {
            memory: pages.clone(),
            offset: 0,
            len: pages.len(),
            iova: None,
            access: AccessFlags::LOCAL_WRITE,
        };
        let mr = provider.register(pd, &whole).unwrap();
        Self { pages, pd, cq, mr }
    }

    fn qp<J>(&self, cx: &mut TurnCx<'_, J>) -> QpId {
        let spec = QpSpec {
            pd: self.pd,
            cq: self.cq,
            caps: QpCaps::default(),
            signal_all: true,
        };
        let qp = cx.provider().create_qp(&spec).unwrap();
        (0..SLOTS).for_each(|slot| self.receive(cx, qp, slot));
        qp
    }

    fn sge(&self, slot: usize, len: usize) -> [Sge; 1] {
        [Sge {
            addr: self.mr.addr + (slot * SLOT) as u64,
            length: len as u32,
            lkey: self.mr.lkey,
        }]
    }

    fn receive<J>(&self, cx: &mut TurnCx<'_, J>, qp: QpId, slot: usize) {
        let wr = RecvWr {
            wr_id: slot as u64,
            sges: &self.sge(slot, SLOT),
        };
        cx.provider().post_recv(qp, &[wr]).unwrap();
    }

    fn send<J>(&self, cx: &mut TurnCx<'_, J>, qp: QpId, slot: usize, bytes: &[u8]) {
        self.pages.write(slot * SLOT, bytes).unwrap();
        let wr = SendWr {
            wr_id: slot as u64,
            op: SendOp::Send,
            flags: SendFlags::empty(),
            payload: Payload::Sges(&self.sge(slot, bytes.len())),
        };
        cx.provider().post_send(qp, &[wr]).unwrap();
    }

    /// Returns the bytes of a completed receive.
    fn received(&self, wc: &Completion) -> Vec<u8> {
        let mut bytes = vec![0; wc.byte_len as usize];
        self.pages.read(wc.wr_id as usize * SLOT, &mut bytes).unwrap();
        bytes
    }
}

/// Sends back what comes.
struct Echo {
    messages: Messages,
    counters: Counters,
}

impl Echo {
    fn start(addr: IpAddr) -> impl FnOnce(&mut TurnCx<'_, ()>) -> Self + Send + 'static {
        move |cx| {
            cx.provider().cm_listen(SocketAddr::new(addr, SERVICE), 8).unwrap();
            Self {
                messages: Messages::new(cx),
                counters: Counters::default(),
            }
        }
    }
}

impl Service for Echo {
    /// Stop.
    type Command = ();
    type Output = ();

    fn command(&mut self, cx: &mut TurnCx<'_, ()>, (): ()) {
        cx.stop();
    }

    fn completions(&mut self, cx: &mut TurnCx<'_, ()>, completions: &[(QpId, Completion)]) {
        for (qp, wc) in completions {
            if wc.status == WcStatus::Success && wc.opcode == WcOpcode::Recv {
                let bytes = self.messages.received(wc);
                let slot = wc.wr_id as usize;
                self.messages.receive(cx, *qp, slot);
                self.messages.send(cx, *qp, SLOTS + slot, &bytes);
            }
        }
    }

    fn event(&mut self, cx: &mut TurnCx<'_, ()>, event: Event) {
        if let Event::Cm {
            id,
            kind: CmKind::ConnectRequest { .. },
        } = event
        {
            let qp = self.messages.qp(cx);
            cx.provider().cm_accept(id, qp, &ConnParams::default()).unwrap();
        }
    }

    fn end(&mut self, cx: &mut TurnCx<'_, ()>) {
        self.counters = *cx.counters;
    }
}

enum Ask {
    Say(Vec<u8>),
    Stop,
}

/// Says what it is told to, and tells what comes back.
struct Caller {
    messages: Messages,
    qp: Option<QpId>,
    said: usize,
    up: bool,
    heard: Sender<Vec<u8>>,
    waiting: Vec<Vec<u8>>,
    counters: Counters,
}

impl Caller {
    fn start(to: IpAddr, heard: Sender<Vec<u8>>) -> impl FnOnce(&mut TurnCx<'_, ()>) -> Self + Send + 'static {
        move |cx| {
            cx.provider().cm_resolve(None, SocketAddr::new(to, SERVICE)).unwrap();
            Self {
                messages: Messages::new(cx),
                qp: None,
                said: 0,
                up: false,
                heard,
                waiting: Vec::new(),
                counters: Counters::default(),
            }
        }
    }
}

impl Service for Caller {
    type Command = Ask;
    type Output = ();

    fn command(&mut self, cx: &mut TurnCx<'_, ()>, command: Ask) {
        match command {
            Ask::Say(bytes) => self.waiting.push(bytes),
            Ask::Stop => cx.stop(),
        }
    }

    fn completions(&mut self, cx: &mut TurnCx<'_, ()>, completions: &[(QpId, Completion)]) {
        for (qp, wc) in completions {
            assert_eq!(wc.status, WcStatus::Success);
            if wc.opcode == WcOpcode::Recv {
                self.heard.send(self.messages.received(wc)).unwrap();
                self.messages.receive(cx, *qp, wc.wr_id as usize);
            }
        }
    }

    fn event(&mut self, cx: &mut TurnCx<'_, ()>, event: Event) {
        match event {
            Event::Cm {
                id,
                kind: CmKind::Resolved { .. },
            } => {
                let qp = self.messages.qp(cx);
                cx.provider().cm_connect(id, qp, &ConnParams::default()).unwrap();
                self.qp = Some(qp);
            }
            Event::Cm {
                kind: CmKind::Established { .. },
                ..
            } => self.up = true,
            _ => {}
        }
    }

    fn end(&mut self, cx: &mut TurnCx<'_, ()>) {
        self.counters = *cx.counters;
        let Some(qp) = self.qp.filter(|_| self.up) else { return };
        for bytes in self.waiting.drain(..) {
            self.messages.send(cx, qp, SLOTS + self.said % SLOTS, &bytes);
            self.said += 1;
        }
    }
}

/// An echo and its caller.
fn pair(spin: SpinMode) -> (Running<Echo>, Running<Caller>, Receiver<Vec<u8>>) {
    let addr = address();
    let (listening, is_up) = channel();
    let echo = run(spin, addr, move |cx| {
        let echo = Echo::start(addr)(cx);
        listening.send(()).unwrap();
        echo
    });
    is_up.recv_timeout(TIMEOUT).unwrap();
    let (heard, hears) = channel();
    let caller = run(spin, address(), Caller::start(addr, heard));
    (echo, caller, hears)
}

fn talk(spin: SpinMode, rounds: u32) -> (Counters, Counters) {
    let (echo, caller, hears) = pair(spin);
    for n in 0..rounds {
        let text = format!("message {n}").into_bytes();
        caller.handle.command(Ask::Say(text.clone()));
        assert_eq!(hears.recv_timeout(TIMEOUT).unwrap(), text);
    }
    // Several at once.
    for n in 0..8u8 {
        caller.handle.command(Ask::Say(vec![n; 100]));
    }
    for n in 0..8u8 {
        assert_eq!(hears.recv_timeout(TIMEOUT).unwrap(), [n; 100]);
    }
    caller.handle.command(Ask::Stop);
    echo.handle.command(());
    (
        echo.thread.join().unwrap().counters,
        caller.thread.join().unwrap().counters,
    )
}

#[test]
fn an_echo_answers() {
    let (echo, caller) = talk(SpinMode::Off, 200);
    assert!(echo.completions >= 208, "{echo:?}");
    assert!(caller.commands >= 208, "{caller:?}");
    assert!(caller.sleeps > 0 && echo.sleeps > 0);
    assert_eq!((caller.spins, caller.yields), (0, 0));
}

#[test]
fn an_echo_answers_a_caller_that_spins() {
    for spin in [SpinMode::For(Duration::from_micros(30)), SpinMode::Auto] {
        let (echo, caller) = talk(spin, 200);
        assert!(caller.spins_won <= caller.spins && echo.spins_won <= echo.spins);
        if spin != SpinMode::Auto {
            assert!(echo.spins > 0 && echo.looks > 0, "{echo:?}");
        }
    }
}

#[test]
fn a_loop_with_nothing_to_do_sleeps_without_end() {
    let (echo, caller, hears) = pair(SpinMode::Off);
    caller.handle.command(Ask::Say(b"up".to_vec()));
    hears.recv_timeout(TIMEOUT).unwrap();
    let before = echo.handle.rings();
    thread::sleep(Duration::from_millis(300));
    caller.handle.command(Ask::Stop);
    echo.handle.command(());
    let echo_counters = echo.thread.join().unwrap().counters;
    assert_eq!(before, 0, "nobody has asked it anything");
    // Connecting, one message, timers of the engine: and then silence.
    assert!(echo_counters.turns < 200, "{echo_counters:?}");
    caller.thread.join().unwrap();
}

/// Command of the tests below.
enum Order {
    /// Says the number back.
    Answer(u32),
    /// Wants a timer.
    Timer(Duration),
    /// Begins a job that this does.
    Job(u64, Sender<StartedJob<u64>>),
    /// Watches a socket under a token.
    Watch(UnixStream, usize),
    /// Turns so many times without an event.
    Spend(u32),
    Stop,
}

#[derive(Debug, PartialEq)]
enum Heard {
    Answer(u32),
    Timer,
    Job(u64, Result<u64, Panicked>),
    Watched(bool),
    Ready(usize, Readiness, Vec<u8>),
    Spent,
}

struct Listener {
    told: Sender<Heard>,
    timer: Option<Instant>,
    sockets: Vec<(usize, UnixStream)>,
    left: u32,
}

impl Listener {
    fn start(told: Sender<Heard>) -> impl FnOnce(&mut TurnCx<'_, u64>) -> Self + Send + 'static {
        |_| Self {
            told,
            timer: None,
            sockets: Vec::new(),
            left: 0,
        }
    }

    fn tell(&self, what: Heard) {
        self.told.send(what).unwrap();
    }
}

impl Service for Listener {
    type Command = Order;
    type Output = u64;

    fn command(&mut self, cx: &mut TurnCx<'_, u64>, order: Order) {
        match order {
            Order::Answer(n) => self.tell(Heard::Answer(n)),
            Order::Timer(after) => self.timer = Some(cx.now + after),
            Order::Job(n, to) => to.send(cx.jobs.begin(JobTicket(n))).unwrap(),
            Order::Watch(socket, token) => {
                socket.set_nonblocking(true).unwrap();
                let watched = cx.sockets.register(socket.as_fd(), Token(token), Interest::READABLE);
                self.tell(Heard::Watched(watched.is_ok()));
                self.sockets.push((token, socket));
            }
            Order::Spend(turns) => self.left = turns,
            Order::Stop => cx.stop(),
        }
    }

    fn ready(&mut self, cx: &mut TurnCx<'_, u64>, token: Token, readiness: Readiness) {
        let mut bytes = Vec::new();
        let (_, socket) = self.sockets.iter_mut().find(|(t, _)| *t == token.0).unwrap();
        // Up to the end, or until there is no more.
        let _ = socket.read_to_end(&mut bytes);
        if readiness.closed {
            cx.sockets.deregister(socket.as_fd()).unwrap();
        }
        self.tell(Heard::Ready(token.0, readiness, bytes));
    }

    fn completions(&mut self, _: &mut TurnCx<'_, u64>, _: &[(QpId, Completion)]) {}

    fn event(&mut self, _: &mut TurnCx<'_, u64>, _: Event) {}

    fn job_done(&mut self, _: &mut TurnCx<'_, u64>, done: JobResult<u64>) {
        self.tell(Heard::Job(done.ticket.0, done.result));
    }

    fn timeout(&mut self, cx: &mut TurnCx<'_, u64>) {
        assert!(self.timer.take().is_some_and(|at| at <= cx.now));
        self.tell(Heard::Timer);
    }

    fn work(&mut self, _: &mut TurnCx<'_, u64>) -> bool {
        if self.left == 0 {
            return false;
        }
        self.left -= 1;
        if self.left == 0 {
            self.tell(Heard::Spent);
        }
        true
    }

    fn next_timeout(&self) -> Option<Instant> {
        self.timer
    }
}

fn listen() -> (Running<Listener>, impl Fn() -> Heard) {
    let (told, hears) = channel();
    let running = run(SpinMode::Off, address(), Listener::start(told));
    (running, move || hears.recv_timeout(TIMEOUT).unwrap())
}

fn stop(running: Running<Listener>) -> Listener {
    running.handle.command(Order::Stop);
    running.thread.join().unwrap()
}

#[test]
fn a_command_wakes_a_loop_that_sleeps() {
    let (l, hear) = listen();
    for n in 0.. {
        // Long enough to fall asleep, most times.
        thread::sleep(Duration::from_millis(5));
        l.handle.command(Order::Answer(n));
        assert_eq!(hear(), Heard::Answer(n));
        if n >= 20 && l.handle.rings() > 0 {
            break;
        }
        assert!(n < 2000, "it is never asleep");
    }
    stop(l);
}

#[test]
fn a_timer_fires_without_anything_else() {
    let (l, hear) = listen();
    for ms in [0, 1, 20] {
        l.handle.command(Order::Timer(Duration::from_millis(ms)));
        assert_eq!(hear(), Heard::Timer);
    }
    assert!(stop(l).timer.is_none());
}

#[test]
fn jobs_are_done_beside_the_loop_and_their_results_arrive() {
    let (l, hear) = listen();
    let (begin, begun) = channel();
    let jobs: Vec<_> = (0..100)
        .map(|n| {
            l.handle.command(Order::Job(n, begin.clone()));
            begun.recv_timeout(TIMEOUT).unwrap()
        })
        .collect();
    // Nothing is done before somebody does it, and the loop goes on meanwhile.
    l.handle.command(Order::Answer(1));
    assert_eq!(hear(), Heard::Answer(1));
    for (n, job) in (0..).zip(jobs) {
        let helper = thread::spawn(move || match n {
            7 => panic!("as it is to be: {job:?}"),
            _ => job.finish(n * 2),
        });
        let expected = if n == 7 { Err(Panicked) } else { Ok(n * 2) };
        assert_eq!(hear(), Heard::Job(n, expected));
        assert_eq!(helper.join().is_err(), n == 7);
    }
    stop(l);
}

#[test]
fn sockets_of_the_service_are_watched() {
    let (l, hear) = listen();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    l.handle.command(Order::Watch(theirs, 5));
    assert_eq!(hear(), Heard::Watched(true));
    for text in ["one", "two"] {
        ours.write_all(text.as_bytes()).unwrap();
        let Heard::Ready(5, readiness, bytes) = hear() else {
            panic!("not ready");
        };
        assert!(readiness.readable && !readiness.closed);
        assert_eq!(bytes, text.as_bytes());
    }
    drop(ours);
    let Heard::Ready(5, readiness, bytes) = hear() else {
        panic!("not ready");
    };
    assert!(readiness.readable && readiness.closed && bytes.is_empty());
    stop(l);
}

#[test]
fn the_loops_own_tokens_are_nobodys() {
    let (l, hear) = listen();
    let (_ours, theirs) = UnixStream::pair().unwrap();
    l.handle.command(Order::Watch(theirs, usize::MAX - 16));
    assert_eq!(hear(), Heard::Watched(false));
    stop(l);
}

#[test]
fn work_that_goes_on_does_not_stop_the_rest() {
    let (l, hear) = listen();
    l.handle.command(Order::Spend(u32::MAX));
    for n in 0..3 {
        l.handle.command(Order::Answer(n));
        assert_eq!(hear(), Heard::Answer(n));
    }
    l.handle.command(Order::Timer(Duration::from_millis(1)));
    assert_eq!(hear(), Heard::Timer);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    l.handle.command(Order::Watch(theirs, 1));
    assert_eq!(hear(), Heard::Watched(true));
    ours.write_all(b"x").unwrap();
    assert!(matches!(hear(), Heard::Ready(1, _, _)));
    l.handle.command(Order::Spend(10));
    assert_eq!(hear(), Heard::Spent);
    stop(l);
}
