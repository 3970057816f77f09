//! ATOMIC WRITE and FLUSH (IBTA Annex A19) between two agents: what they do, and what is refused.
//!
//! FLUSH is done between two rdma_rxe only: it computes the ICRC of this packet wrongly, on both ends, so that towards others none
//! arrives.

use std::time::Duration;

use crate::{
    Error,
    agent::{ALL_ACCESS, ATOMIC_WRITE, Agent, AgentFlush, AgentMem, AgentPost, Ends, READ, SEND, WRITE},
    errors::{state_name, status_name},
};

/// Arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    ends: Ends,
    /// Which of them is rdma_rxe.
    #[arg(long, value_enum)]
    rxe: Rxe,
    /// The agents go on afterwards.
    #[arg(long)]
    stay: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum, Debug)]
enum Rxe {
    Requester,
    Responder,
    Both,
}

const SIZE: u32 = 64 << 10;
const TIMEOUT_MS: u32 = 60_000;
// Numbers of ibv_wc_opcode.
const WC_SEND: u32 = 0;
const WC_WRITE: u32 = 1;
const WC_READ: u32 = 2;
const WC_FLUSH: u32 = 8;
const WC_ATOMIC_WRITE: u32 = 9;
// Numbers of ibv_access_flags.
const LOCAL_WRITE: u32 = 1;
const REMOTE_WRITE: u32 = 2;
const REMOTE_READ: u32 = 4;
const FLUSH_GLOBAL: u32 = 0x100;
const FLUSH_PERSISTENT: u32 = 0x200;
/// What a queue pair may permit.
const ALL_OF_QP: u32 = 0xe | FLUSH_GLOBAL | FLUSH_PERSISTENT;
/// What memory may that does not survive the loss of power.
const ALL_OF_MEMORY: u32 = ALL_ACCESS | FLUSH_GLOBAL;
// Numbers of the FETH.
const VISIBLE: u8 = 1;
const PERSISTENT: u8 = 2;
const RANGE: u8 = 0;
const REGION: u8 = 1;

/// What is asked for: at which offset of the responder's memory (it may be outside), and whether with a wrong key.
#[derive(Clone, Copy)]
enum Request {
    AtomicWrite { at: i64, wrong_key: bool },
    Flush(Range, u8, u8),
}

#[derive(Clone, Copy)]
struct Range {
    at: i64,
    len: u32,
    wrong_key: bool,
}

const fn word(at: i64) -> Request {
    Request::AtomicWrite { at, wrong_key: false }
}

const fn flush(placement: u8, selectivity: u8, at: i64, len: u32) -> Request {
    let range = Range {
        at,
        len,
        wrong_key: false,
    };
    Request::Flush(range, placement, selectivity)
}

const fn wrong_key(request: Request) -> Request {
    match request {
        Request::AtomicWrite { at, .. } => Request::AtomicWrite { at, wrong_key: true },
        Request::Flush(range, placement, selectivity) => Request::Flush(
            Range {
                wrong_key: true,
                ..range
            },
            placement,
            selectivity,
        ),
    }
}

/// How a request ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Done,
    /// NAK "remote access error".
    Access,
    /// NAK "invalid request".
    Invalid,
    /// Nothing answers.
    Silence,
}

impl End {
    const fn status(self) -> &'static str {
        match self {
            Self::Done => "SUCCESS",
            Self::Access => "REM_ACCESS_ERR",
            Self::Invalid => "REM_INV_REQ_ERR",
            Self::Silence => "RETRY_EXC_ERR",
        }
    }
}

/// One request over a new connection.
struct Case {
    name: &'static str,
    request: Request,
    memory: u32,
    qp: u32,
    /// How it ends with us as the responder.
    ours: End,
    /// How it ends with rdma_rxe as the responder.
    rxe: End,
}

const fn case(name: &'static str, request: Request, end: End) -> Case {
    Case {
        name,
        request,
        memory: ALL_OF_MEMORY,
        qp: ALL_OF_QP,
        ours: end,
        rxe: end,
    }
}

impl Case {
    const fn memory(mut self, access: u32) -> Self {
        self.memory = access;
        self
    }

    const fn qp(mut self, access: u32) -> Self {
        self.qp = access;
        self
    }

    /// rdma_rxe answers otherwise: `specs/kernel.md` says why.
    const fn but_rxe(mut self, end: End) -> Self {
        self.rxe = end;
        self
    }
}

const WITHOUT_FLUSH: u32 = ALL_ACCESS;

#[rustfmt::skip]
fn atomic_writes() -> Vec<Case> {
    use End::{Access, Done, Invalid};
    let end = i64::from(SIZE);
    vec![
        case("atomic-write", word(64), Done),
        case("atomic-write-last-word", word(end - 8), Done),
        case("atomic-write-wrong-key", wrong_key(word(64)), Access),
        case("atomic-write-misaligned", word(68), Invalid),
        case("atomic-write-misaligned-wrong-key", wrong_key(word(68)), Invalid).but_rxe(Access),
        case("atomic-write-beyond-end", word(end), Access),
        case("atomic-write-before-start", word(-8), Access),
        case("atomic-write-without-right", word(64), Access).memory(LOCAL_WRITE | REMOTE_READ),
        case("atomic-write-forbidden-by-qp", word(64), Invalid).qp(ALL_OF_QP & !REMOTE_WRITE),
    ]
}

/// Between two rdma_rxe.
#[rustfmt::skip]
fn flushes() -> Vec<Case> {
    use End::{Access, Done, Invalid};
    let end = i64::from(SIZE);
    vec![
        case("flush-range", flush(VISIBLE, RANGE, 4096, 8192), Done),
        case("flush-all-of-the-range", flush(VISIBLE, RANGE, 0, SIZE), Done),
        case("flush-region", flush(VISIBLE, REGION, 0, 0), Done),
        case("flush-region-whatever-the-range", flush(VISIBLE, REGION, 2 * end, 2 * SIZE), Done),
        case("flush-nothing", flush(VISIBLE, RANGE, 0, 0), Done),
        case("flush-range-wrong-key", wrong_key(flush(VISIBLE, RANGE, 0, 64)), Access),
        case("flush-region-wrong-key", wrong_key(flush(VISIBLE, REGION, 0, 0)), Access),
        case("flush-nothing-wrong-key", wrong_key(flush(VISIBLE, RANGE, 0, 0)), Access),
        case("flush-beyond-end", flush(VISIBLE, RANGE, end - 64, 128), Access),
        case("flush-before-start", flush(VISIBLE, RANGE, -64, 128), Access),
        case("flush-range-without-right", flush(VISIBLE, RANGE, 0, 64), Access).memory(WITHOUT_FLUSH),
        case("flush-region-without-right", flush(VISIBLE, REGION, 0, 0), Access).memory(WITHOUT_FLUSH),
        case("flush-forbidden-by-qp", flush(VISIBLE, RANGE, 0, 64), Invalid).qp(ALL_OF_QP & !FLUSH_GLOBAL),
        case("flush-persistent-without-right", flush(PERSISTENT, RANGE, 0, 64), Access),
        case("flush-persistent-region-without-right", flush(PERSISTENT, REGION, 0, 0), Access),
        case("flush-both-without-right", flush(VISIBLE | PERSISTENT, RANGE, 0, 64), Access),
        case("flush-persistent-forbidden-by-qp", flush(PERSISTENT, RANGE, 0, 64), Invalid).qp(ALL_OF_QP & !FLUSH_PERSISTENT),
        case("flush-of-no-placement", flush(0, RANGE, 0, 64), Done),
        case("flush-of-an-unknown-level", flush(VISIBLE, 2, 0, 64), Done),
    ]
}

/// What tells when rdma_rxe has mended its ICRC.
fn unanswered() -> Vec<Case> {
    vec![case(
        "flush-of-another-icrc",
        flush(VISIBLE, RANGE, 0, SIZE),
        End::Silence,
    )]
}

/// Runs everything.
pub(crate) fn run(args: &Args) -> Result<(), Error> {
    let [mut asks, mut answers] = args.ends.connect()?;
    let flushes_arrive = args.rxe == Rxe::Both;
    let mut all = atomic_writes();
    all.extend(if flushes_arrive { flushes() } else { unanswered() });
    let mut wrong = Vec::new();
    for (n, case) in all.iter().enumerate() {
        let expected = if args.rxe == Rxe::Requester {
            case.ours
        } else {
            case.rxe
        };
        let mut pair = Pair::new(&mut asks, &mut answers, args.ends.mtu, case, n as u32)?;
        if let Err(e) = pair.one(case, expected) {
            wrong.push(format!("{}: {e}", case.name));
        }
    }
    let plain = case("", word(0), End::Done);
    let mut pair = Pair::new(&mut asks, &mut answers, args.ends.mtu, &plain, 0x00ff_fff0)?;
    pair.words()
        .map_err(|e| format!("ATOMIC WRITEs one after another: {e}"))?;
    if flushes_arrive {
        pair.behind_writes().map_err(|e| format!("FLUSH behind WRITEs: {e}"))?;
    }
    match args.rxe {
        Rxe::Responder => pair.at_once().map_err(|e| format!("many at once: {e}"))?,
        Rxe::Requester | Rxe::Both => pair
            .sent_again()
            .map_err(|e| format!("an ATOMIC WRITE sent again: {e}"))?,
    }
    for agent in [&mut asks, &mut answers] {
        not_persistent(agent)?;
        if !args.stay {
            agent.call("quit")?;
        }
    }
    if !wrong.is_empty() {
        return Err(wrong.join("\n").into());
    }
    println!(
        "{} requests ended as expected at both ends; {WORDS} ATOMIC WRITEs in order: passed",
        all.len()
    );
    Ok(())
}

/// Nobody may be given the right to make memory persistent that is not.
fn not_persistent(agent: &mut Agent) -> Result<(), Error> {
    agent.create(16, 16, 2, 0)?;
    match agent.mem(4096, ALL_ACCESS | FLUSH_PERSISTENT) {
        Ok(_) => Err("ordinary memory was registered as persistent".into()),
        Err(_) => agent.mem(4096, ALL_OF_MEMORY).map(drop),
    }
}

const WORDS: u32 = 32;
const AT_ONCE: u32 = 40;
/// What either end may have under way of what is answered.
const READS: u32 = 4;

/// A connection.
struct Pair<'a> {
    asks: &'a mut Agent,
    answers: &'a mut Agent,
    source: AgentMem,
    sink: AgentMem,
}

impl<'a> Pair<'a> {
    fn new(asks: &'a mut Agent, answers: &'a mut Agent, mtu: u32, case: &Case, psn: u32) -> Result<Self, Error> {
        let (from, from_gid) = asks.create_with(64, 64, ALL_OF_QP)?;
        let (to, to_gid) = answers.create_with(64, 64, case.qp)?;
        let source = asks.mem(SIZE as usize, ALL_ACCESS)?;
        let sink = answers.mem(SIZE as usize, case.memory)?;
        let mtu = mtu.trailing_zeros() - 7;
        answers.call(&format!("rtr {from} {from_gid} {psn} {mtu} 12 {READS}"))?;
        answers.call(&format!("rts {psn} 14 6 7 {READS}"))?;
        asks.call(&format!("rtr {to} {to_gid} {psn} {mtu} 12 {READS}"))?;
        // 4.096 us * 2^16 = 0.3 s, three times.
        asks.call(&format!("rts {psn} 16 3 7 {READS}"))?;
        Ok(Self {
            asks,
            answers,
            source,
            sink,
        })
    }

    fn key(&self, wrong: bool) -> u32 {
        self.sink.rkey ^ if wrong { 0x55 } else { 0 }
    }

    /// The source's word at this offset goes to the same place of the sink's.
    fn atomic_write(&mut self, wr_id: u64, off: u64, at: i64, wrong_key: bool) -> Result<(), Error> {
        let post = AgentPost {
            wr_id,
            op: ATOMIC_WRITE,
            mem: self.source.id,
            off,
            len: 8,
            raddr: self.sink.addr.wrapping_add_signed(at),
            rkey: self.key(wrong_key),
            ..AgentPost::default()
        };
        self.asks.post(post)
    }

    fn flush(&mut self, wr_id: u64, range: Range, placement: u8, selectivity: u8) -> Result<(), Error> {
        let flush = AgentFlush {
            placement,
            selectivity,
            addr: self.sink.addr.wrapping_add_signed(range.at),
            len: range.len,
            rkey: self.key(range.wrong_key),
        };
        self.asks.flush(wr_id, flush)
    }

    /// Takes the completions of the requests from `first` on, all of which succeed, with these opcodes.
    fn all_done(&mut self, first: u64, opcodes: &[u32]) -> Result<(), Error> {
        let wcs = self.asks.poll('s', opcodes.len(), TIMEOUT_MS)?;
        let right = |(n, (wc, op)): (u64, (&crate::agent::AgentWc, &u32))| {
            wc.wr_id == first + n && wc.status == 0 && wc.opcode == *op
        };
        match wcs.len() == opcodes.len() && (0..).zip(wcs.iter().zip(opcodes)).all(right) {
            true => Ok(()),
            false => Err(format!("completions: {wcs:?}").into()),
        }
    }

    /// A request by itself; what it must leave alone is as it was.
    fn one(&mut self, case: &Case, expected: End) -> Result<(), Error> {
        const VALUE: u64 = 0x0123_4567_89ab_cdef;
        let written = match (case.request, expected) {
            (Request::AtomicWrite { at, .. }, End::Done) => Some(u64::try_from(at)?),
            _ => None,
        };
        self.but_for("fill", written)?;
        self.asks.word(self.source.id, 0, Some(VALUE))?;
        match case.request {
            Request::AtomicWrite { at, wrong_key } => self.atomic_write(7, 0, at, wrong_key)?,
            Request::Flush(range, placement, selectivity) => self.flush(7, range, placement, selectivity)?,
        }
        self.ends(case, expected)?;
        self.but_for("check", written)?;
        match written
            .map(|at| self.answers.word(self.sink.id, at, None))
            .transpose()?
        {
            None | Some(VALUE) => Ok(()),
            Some(other) => Err(format!("the word is {other:#x}").into()),
        }
    }

    /// The completion of a request, and the states of the queue pairs.
    fn ends(&mut self, case: &Case, expected: End) -> Result<(), Error> {
        let [wc] = self.asks.poll('s', 1, TIMEOUT_MS)?[..] else {
            return Err("no completion".into());
        };
        if status_name(wc.status) != expected.status() {
            return Err(format!("{}, not {}", status_name(wc.status), expected.status()).into());
        }
        let opcode = match case.request {
            Request::AtomicWrite { .. } => WC_ATOMIC_WRITE,
            Request::Flush(..) => WC_FLUSH,
        };
        // Of a failed work request the opcode is not said.
        if expected == End::Done && wc.opcode != opcode {
            return Err(format!("opcode {} of the completion, not {opcode}", wc.opcode).into());
        }
        let states = match expected {
            End::Done => ["RTS", "RTS"],
            End::Access | End::Invalid => ["ERR", "ERR"],
            End::Silence => ["ERR", "RTS"],
        };
        for (agent, state) in [&mut self.asks, &mut self.answers].into_iter().zip(states) {
            let is = state_name(agent.call("state")?.first().map_or("", String::as_str));
            if is != state {
                return Err(format!("a queue pair is in {is}, not {state}").into());
            }
        }
        Ok(())
    }

    /// Fills or checks the sink, but for a word.
    fn but_for(&mut self, command: &str, hole: Option<u64>) -> Result<(), Error> {
        let (sink, size) = (self.sink.id, u64::from(SIZE));
        let (before, behind) = hole.map_or((size, size), |at| (at, at + 8));
        self.answers.call(&format!("{command} {sink} 0 {before} 1"))?;
        let rest = size - behind;
        self.answers
            .call(&format!("{command} {sink} {behind} {rest} 2"))
            .map(drop)
    }

    /// ATOMIC WRITEs of one word each, of which the requester has more to send than may be under way.
    fn words(&mut self) -> Result<(), Error> {
        const FROM: u64 = 4096;
        let (sink, source) = (self.sink.id, self.source.id);
        let behind = FROM + u64::from(8 * WORDS);
        let rest = u64::from(SIZE) - behind;
        self.answers.call(&format!("fill {sink} 0 {FROM} 2"))?;
        self.answers.call(&format!("fill {sink} {behind} {rest} 3"))?;
        self.asks.call(&format!("fill {source} 0 {SIZE} 4"))?;
        for n in 0..u64::from(WORDS) {
            self.atomic_write(n, 8 * n, (FROM + 8 * n) as i64, false)?;
        }
        self.all_done(0, &vec![WC_ATOMIC_WRITE; WORDS as usize])?;
        self.answers.call(&format!("check {sink} {FROM} {} 4", 8 * WORDS))?;
        self.answers.call(&format!("check {sink} 0 {FROM} 2"))?;
        self.answers.call(&format!("check {sink} {behind} {rest} 3")).map(drop)
    }

    /// WRITEs, each followed by a FLUSH of what it wrote or of everything.
    fn behind_writes(&mut self) -> Result<(), Error> {
        const LEN: u32 = 20_000;
        let (sink, source) = (self.sink.id, self.source.id);
        let at = |n: u32| u64::from(n * LEN);
        for (n, selectivity) in [(0, RANGE), (1, REGION), (2, RANGE)] {
            self.asks.call(&format!("fill {source} {} {LEN} {}", at(n), 5 + n))?;
            let id = 2 * u64::from(n);
            let write = AgentPost {
                wr_id: id,
                op: WRITE,
                mem: source,
                off: at(n),
                len: LEN,
                raddr: self.sink.addr + at(n),
                rkey: self.sink.rkey,
                ..AgentPost::default()
            };
            self.asks.post(write)?;
            let range = Range {
                at: at(n) as i64,
                len: LEN,
                wrong_key: false,
            };
            self.flush(id + 1, range, VISIBLE, selectivity)?;
        }
        self.all_done(0, &[WC_WRITE, WC_FLUSH, WC_WRITE, WC_FLUSH, WC_WRITE, WC_FLUSH])?;
        for n in 0..3 {
            self.answers.call(&format!("check {sink} {} {LEN} {}", at(n), 5 + n))?;
        }
        Ok(())
    }

    fn of(&self, op: u32, wr_id: u64) -> AgentPost {
        AgentPost {
            wr_id,
            op,
            mem: self.source.id,
            off: 8192,
            len: 64,
            raddr: self.sink.addr + 8192,
            rkey: self.sink.rkey,
            ..AgentPost::default()
        }
    }

    /// READs and ATOMIC WRITEs behind a SEND for which the responder has no receive yet: when it has, they come at once.
    fn at_once(&mut self) -> Result<(), Error> {
        let (sink, source) = (self.sink.id, self.source.id);
        self.asks.call(&format!("fill {source} 0 {SIZE} 8"))?;
        self.asks.post(self.of(SEND, 0))?;
        let mut opcodes = vec![WC_SEND];
        for n in 1..u64::from(AT_ONCE) {
            if n % 4 == 0 {
                self.atomic_write(n, 8 * n, 8 * n as i64, false)?;
                opcodes.push(WC_ATOMIC_WRITE);
            } else {
                self.asks.post(self.of(READ, n))?;
                opcodes.push(WC_READ);
            }
        }
        self.answers.recv(0, sink, 4096, 64)?;
        self.all_done(0, &opcodes)?;
        for n in (4..u64::from(AT_ONCE)).step_by(4) {
            let here = self.asks.word(source, 8 * n, None)?;
            let there = self.answers.word(sink, 8 * n, None)?;
            if here != there {
                return Err(format!("word {n} is {there:#x}, not {here:#x}").into());
            }
        }
        Ok(())
    }

    /// rdma_rxe, which forgets the address of an ATOMIC WRITE when it sends it again (`specs/kernel.md`), here because the SEND
    /// before it found no receive.
    fn sent_again(&mut self) -> Result<(), Error> {
        self.asks.post(self.of(SEND, 0))?;
        self.atomic_write(1, 0, 0, false)?;
        // Many times the RNR timer.
        std::thread::sleep(Duration::from_millis(300));
        self.answers.recv(0, self.sink.id, 4096, 64)?;
        let wcs = self.asks.poll('s', 2, TIMEOUT_MS)?;
        let statuses: Vec<String> = wcs.iter().map(|wc| status_name(wc.status)).collect();
        match statuses.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["SUCCESS", "REM_ACCESS_ERR"] => Ok(()),
            _ => Err(format!("completions: {statuses:?}").into()),
        }
    }
}
