//! What both ends of a connection report when something goes wrong: cases that are run between two agents (the kernel's
//! or ours, see `serve`) and compared with what two kernels reported.

use std::{collections::BTreeMap, fs, path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    Error,
    agent::{
        ALL_ACCESS, Agent, AgentMem, AgentPost, CMP_SWAP, Ends, FETCH_ADD, IN_ERROR, READ, SEND, SEND_IMM, SEND_INV,
        WRITE, WRITE_IMM,
    },
    wrap::{packets, start},
};

/// Arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    ends: Ends,
    /// Compare with the results in this file.
    #[arg(long)]
    expect: Option<PathBuf>,
    /// Which side is ours, if any: some cases end otherwise then than between two kernels.
    #[arg(long, value_enum)]
    ours: Option<Ours>,
    /// Write the results into this file.
    #[arg(long)]
    record: Option<PathBuf>,
    /// Only cases whose name contains this; may be given several times.
    #[arg(long)]
    only: Vec<String>,
    /// Leave out cases where the specification leaves the result to the implementation, and those of what an agent's device says
    /// it can't do.
    #[arg(long)]
    strict_only: bool,
}

impl Args {
    fn takes(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|o| name.contains(o.as_str()))
    }
}

const SIZE: usize = 64 << 10;
const LOCAL_WRITE: u32 = 1;
const REMOTE_WRITE: u32 = 2;
const REMOTE_READ: u32 = 4;
const REMOTE_ATOMIC: u32 = 8;
/// How long a completion may take; retries of all cases end well before.
const TIMEOUT_MS: u32 = 60_000;
/// How long one is waited for that shall not come: ten times what seven retries would take.
const ENDLESS_MS: u32 = 8_000;

/// A work request of the requester.
#[derive(Clone, Copy)]
struct Post {
    op: u32,
    len: u32,
    /// Offset from the start of the responder's memory; may be outside.
    at: i64,
    spoil_rkey: u32,
    spoil_lkey: u32,
}

/// A receive of the responder.
#[derive(Clone, Copy)]
struct Recv {
    len: u32,
    spoil_lkey: u32,
}

/// What happens besides.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Twist {
    Nothing,
    /// The receives are posted only after this time (ms).
    LateRecvs(u64),
    /// The responder's queue pair is destroyed first.
    Destroyed,
    /// The responder's queue pair is in error first.
    InError,
    /// The responder's queue pair never leaves INIT.
    NotReady,
}

#[derive(Clone)]
struct Case {
    name: String,
    posts: Vec<Post>,
    recvs: Vec<Recv>,
    memory: u32,
    /// Rights of the requester's memory.
    source: u32,
    qp_access: u32,
    retry_cnt: u8,
    rnr_retry: u8,
    twist: Twist,
    /// The specification says how it ends, at both ends.
    strict: bool,
    /// Between two kernels it does not end.
    endless: bool,
    /// rdma_rxe takes the request otherwise when it comes again: its queue pair may also end in error.
    harmful_again: bool,
}

const fn post(op: u32, len: u32, at: i64) -> Post {
    Post {
        op,
        len,
        at,
        spoil_rkey: 0,
        spoil_lkey: 0,
    }
}

const fn bad_key(op: u32, len: u32) -> Post {
    Post {
        spoil_rkey: 0x55,
        ..post(op, len, 0)
    }
}

fn case(name: &str, posts: &[Post]) -> Case {
    Case {
        name: name.to_owned(),
        posts: posts.to_vec(),
        recvs: Vec::new(),
        memory: ALL_ACCESS,
        source: ALL_ACCESS,
        qp_access: REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC,
        retry_cnt: 3,
        rnr_retry: 7,
        twist: Twist::Nothing,
        strict: true,
        endless: false,
        harmful_again: false,
    }
}

impl Case {
    /// The first PSN of the `n`th case: if its first message is one of several packets, the PSNs pass 0 within that.
    fn psn(&self, n: usize, mtu: u32) -> u32 {
        let count = self.posts.first().map_or(1, |p| packets(p.len as usize, mtu as usize));
        match count {
            0 | 1 => 0x00ff_ffff - 2 * n as u32,
            many => start(many),
        }
    }

    fn recvs(mut self, lens: &[u32]) -> Self {
        self.recvs = lens.iter().map(|&len| Recv { len, spoil_lkey: 0 }).collect();
        self
    }

    fn spoil_recv(mut self) -> Self {
        self.recvs.iter_mut().for_each(|r| r.spoil_lkey = 0x55);
        self
    }

    fn memory(mut self, access: u32) -> Self {
        self.memory = access;
        self
    }

    fn source(mut self, access: u32) -> Self {
        self.source = access;
        self
    }

    fn qp_access(mut self, access: u32) -> Self {
        self.qp_access = access;
        self
    }

    fn retries(mut self, retry_cnt: u8, rnr_retry: u8) -> Self {
        (self.retry_cnt, self.rnr_retry) = (retry_cnt, rnr_retry);
        self
    }

    fn twist(mut self, twist: Twist) -> Self {
        self.twist = twist;
        self
    }

    fn lenient(mut self) -> Self {
        self.strict = false;
        self
    }

    fn harmful_again(mut self) -> Self {
        self.harmful_again = true;
        self
    }

    /// Whether it ended as expected with us on that side.
    fn is_met(&self, expected: &Ending, seen: &Ending, ours: Option<Ours>) -> bool {
        if self.harmful_again && ours == Some(Ours::Requester) && seen.responder_state == "ERR" {
            println!("{}: the request came twice: {READ_AGAIN}", self.name);
            let again = Ending {
                responder_state: "ERR".to_owned(),
                ..expected.clone()
            };
            return again == *seen;
        }
        expected == seen
    }

    fn endless(mut self) -> Self {
        self.endless = true;
        self
    }
}

fn key_cases() -> Vec<Case> {
    let end = SIZE as i64;
    vec![
        case("write-bad-rkey", &[bad_key(WRITE, 64)]),
        case("write-bad-rkey-many-packets", &[bad_key(WRITE, 20_000)]),
        case("write-imm-bad-rkey", &[bad_key(WRITE_IMM, 64)]).recvs(&[64, 64]),
        case("read-bad-rkey", &[bad_key(READ, 64)]),
        case("read-bad-rkey-many-packets", &[bad_key(READ, 20_000)]),
        case("compare-swap-bad-rkey", &[bad_key(CMP_SWAP, 8)]),
        case("fetch-add-bad-rkey", &[bad_key(FETCH_ADD, 8)]),
        case("write-nothing-bad-rkey", &[bad_key(WRITE, 0)]),
        case("read-nothing-bad-rkey", &[bad_key(READ, 0)])
            .lenient()
            .harmful_again(),
        case("send-inv-bad-rkey", &[bad_key(SEND_INV, 16)])
            .recvs(&[64, 64])
            .lenient(),
        case("write-beyond-end", &[post(WRITE, 128, end - 64)]),
        case("write-before-start", &[post(WRITE, 128, -64)]),
        case("write-beyond-end-many-packets", &[post(WRITE, 20_000, end - 64)]),
        case("read-beyond-end", &[post(READ, 128, end - 64)]),
        case("read-beyond-end-many-packets", &[post(READ, 20_000, end - 64)]),
        case("fetch-add-beyond-end", &[post(FETCH_ADD, 8, end)]),
        case("fetch-add-misaligned", &[post(FETCH_ADD, 8, 4)]),
        case("compare-swap-misaligned", &[post(CMP_SWAP, 8, 1)]),
        case("write-without-right", &[post(WRITE, 64, 0)]).memory(LOCAL_WRITE | REMOTE_READ),
        case("read-without-right", &[post(READ, 64, 0)]).memory(LOCAL_WRITE | REMOTE_WRITE),
        case("fetch-add-without-right", &[post(FETCH_ADD, 8, 0)]).memory(LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ),
        case("write-forbidden-by-qp", &[post(WRITE, 64, 0)]).qp_access(REMOTE_READ | REMOTE_ATOMIC),
        case("read-forbidden-by-qp", &[post(READ, 64, 0)]).qp_access(REMOTE_WRITE | REMOTE_ATOMIC),
        case("fetch-add-forbidden-by-qp", &[post(FETCH_ADD, 8, 0)]).qp_access(REMOTE_WRITE | REMOTE_READ),
        case(
            "write-bad-rkey-then-more",
            &[
                post(WRITE, 64, 0),
                bad_key(WRITE, 64),
                post(WRITE, 64, 0),
                post(SEND, 8, 0),
            ],
        )
        .recvs(&[64, 64]),
        case(
            "read-bad-rkey-between",
            &[post(READ, 64, 0), bad_key(READ, 64), post(READ, 64, 0)],
        ),
    ]
}

fn local_cases() -> Vec<Case> {
    let spoiled = |op, len| Post {
        spoil_lkey: 0x55,
        ..post(op, len, 0)
    };
    vec![
        case("send-bad-lkey", &[spoiled(SEND, 64)]).recvs(&[64]),
        case("write-bad-lkey", &[spoiled(WRITE, 64)]),
        case("read-bad-lkey", &[spoiled(READ, 64)]).lenient(),
        case("read-into-readonly", &[post(READ, 64, 0)])
            .source(REMOTE_READ)
            .lenient(),
        case("recv-bad-lkey", &[post(SEND, 64, 0)])
            .recvs(&[64, 64])
            .spoil_recv(),
        case("recv-into-readonly", &[post(SEND, 64, 0)])
            .recvs(&[64])
            .memory(REMOTE_READ),
    ]
}

fn queue_cases() -> Vec<Case> {
    let message = [post(SEND, 64, 0)];
    let mut all = vec![
        case("send-too-long", &[post(SEND, 128, 0)]).recvs(&[64, 64]),
        case("send-too-long-many-packets", &[post(SEND, 20_000, 0)]).recvs(&[5000, 64]),
        case("send-imm-too-long", &[post(SEND_IMM, 128, 0)]).recvs(&[64]),
        case("send-nothing-into-nothing", &[post(SEND, 0, 0)]).recvs(&[0]),
        case("rnr-send-late", &message)
            .recvs(&[64])
            .retries(7, 7)
            .twist(Twist::LateRecvs(300)),
        case(
            "rnr-send-late-many-packets",
            &[post(SEND, 20_000, 0), post(SEND, 64, 0)],
        )
        .recvs(&[20_000, 64])
        .retries(7, 7)
        .twist(Twist::LateRecvs(300)),
        case("rnr-write-imm-late", &[post(WRITE_IMM, 5000, 0), post(WRITE, 64, 0)])
            .retries(7, 7)
            .recvs(&[0])
            .retries(7, 7)
            .twist(Twist::LateRecvs(300)),
        case("peer-in-error", &message)
            .retries(2, 7)
            .recvs(&[64])
            .twist(Twist::InError),
        case("peer-not-ready", &message)
            .retries(2, 7)
            .recvs(&[64])
            .twist(Twist::NotReady),
        case("peer-destroyed-write", &[post(WRITE, 5000, 0), post(WRITE, 64, 0)])
            .retries(2, 7)
            .twist(Twist::Destroyed),
        case("peer-destroyed-read", &[post(READ, 5000, 0)])
            .retries(2, 7)
            .twist(Twist::Destroyed),
    ];
    for rnr_retry in [0, 1, 3, 6] {
        all.push(case(&format!("rnr-exhausted-{rnr_retry}"), &message).retries(6, rnr_retry));
        all.push(
            case(
                &format!("rnr-exhausted-write-imm-{rnr_retry}"),
                &[post(WRITE_IMM, 64, 0)],
            )
            .retries(6, rnr_retry),
        );
    }
    for retry_cnt in [0, 1, 3, 6] {
        let name = format!("retries-exhausted-{retry_cnt}");
        all.push(case(&name, &message).retries(retry_cnt, 7).twist(Twist::Destroyed));
    }
    let endless = case("retries-7", &message).retries(7, 7).twist(Twist::Destroyed);
    all.push(endless.lenient().endless());
    let late = case("rnr-send-late-few-retries", &message).recvs(&[64]).retries(1, 7);
    all.push(late.twist(Twist::LateRecvs(1500)).lenient());
    all
}

/// How a case ended.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Ending {
    /// Status of each send, in the order of their posting; REFUSED if it could not be posted, NONE if it never completed.
    requester: Vec<String>,
    /// State of the requester's queue pair.
    requester_state: String,
    /// Status of each receive that completed.
    responder: Vec<String>,
    /// State of the responder's queue pair; empty if it is gone.
    responder_state: String,
}

/// In place of a status: the work request never completed.
const NONE: &str = "NONE";

/// A number of `ibv_wc_status` by name.
pub(crate) fn status_name(status: u32) -> String {
    const NAMES: [&str; 23] = [
        "SUCCESS",
        "LOC_LEN_ERR",
        "LOC_QP_OP_ERR",
        "LOC_EEC_OP_ERR",
        "LOC_PROT_ERR",
        "WR_FLUSH_ERR",
        "MW_BIND_ERR",
        "BAD_RESP_ERR",
        "LOC_ACCESS_ERR",
        "REM_INV_REQ_ERR",
        "REM_ACCESS_ERR",
        "REM_OP_ERR",
        "RETRY_EXC_ERR",
        "RNR_RETRY_EXC_ERR",
        "LOC_RDD_VIOL_ERR",
        "REM_INV_RD_REQ_ERR",
        "REM_ABORT_ERR",
        "INV_EECN_ERR",
        "INV_EEC_STATE_ERR",
        "FATAL_ERR",
        "RESP_TIMEOUT_ERR",
        "GENERAL_ERR",
        "TM_ERR",
    ];
    NAMES
        .get(status as usize)
        .map_or_else(|| status.to_string(), |s| (*s).to_owned())
}

/// A number of `ibv_qp_state` by name.
pub(crate) fn state_name(state: &str) -> String {
    const NAMES: [&str; 7] = ["RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"];
    let known = state.parse::<usize>().ok().and_then(|n| NAMES.get(n));
    known.map_or_else(|| state.to_owned(), |s| (*s).to_owned())
}

/// Two agents with the queue pairs of one case.
struct Pair<'a> {
    requester: &'a mut Agent,
    responder: &'a mut Agent,
    source: AgentMem,
    sink: AgentMem,
}

impl<'a> Pair<'a> {
    fn new(requester: &'a mut Agent, responder: &'a mut Agent, case: &Case, mtu: u32, psn: u32) -> Result<Self, Error> {
        let (from, from_gid) = requester.create(16, 16, 2, 0)?;
        let (to, to_gid) = responder.create_with(16, 16, case.qp_access)?;
        let source = requester.mem(SIZE, case.source)?;
        let sink = responder.mem(SIZE, case.memory)?;
        let mtu_code = mtu.trailing_zeros() - 7;
        requester.call(&format!("rtr {to} {to_gid} {psn} {mtu_code} 12 4"))?;
        // 4.096 us * 2^14 = 67 ms.
        requester.call(&format!("rts {psn} 14 {} {} 4", case.retry_cnt, case.rnr_retry))?;
        if case.twist != Twist::NotReady {
            responder.call(&format!("rtr {from} {from_gid} {psn} {mtu_code} 12 4"))?;
            responder.call(&format!("rts {psn} 14 3 7 4"))?;
        }
        Ok(Self {
            requester,
            responder,
            source,
            sink,
        })
    }

    fn post_recvs(&mut self, case: &Case) -> Result<(), Error> {
        for (n, recv) in case.recvs.iter().enumerate() {
            let (mem, key) = (self.sink.id, recv.spoil_lkey);
            self.responder.call(&format!("recv {n} {mem} 0 {} {key}", recv.len))?;
        }
        Ok(())
    }

    /// Posts everything; returns which posts were refused at once.
    fn post_sends(&mut self, case: &Case) -> Vec<bool> {
        let post = |(n, p): (usize, &Post)| {
            let done = self.requester.post(AgentPost {
                wr_id: n as u64,
                op: p.op,
                mem: self.source.id,
                len: p.len,
                raddr: self.sink.addr.wrapping_add_signed(p.at),
                rkey: self.sink.rkey ^ p.spoil_rkey,
                imm: 0x1122_3344,
                spoil_lkey: p.spoil_lkey,
                ..AgentPost::default()
            });
            done.is_err()
        };
        case.posts.iter().enumerate().map(post).collect()
    }

    fn run(&mut self, case: &Case, expected: Option<&Ending>) -> Result<Ending, Error> {
        if !matches!(case.twist, Twist::LateRecvs(_)) {
            self.post_recvs(case)?;
        }
        match case.twist {
            Twist::Destroyed => self.responder.call("destroy").map(drop)?,
            Twist::InError => self.responder.call(&format!("modify {IN_ERROR}")).map(drop)?,
            _ => {}
        }
        let refused = self.post_sends(case);
        if let Twist::LateRecvs(ms) = case.twist {
            std::thread::sleep(Duration::from_millis(ms));
            self.post_recvs(case)?;
        }
        let taken = refused.iter().filter(|r| !**r).count();
        let comes = expected.map_or(!case.endless, |e| !e.requester.iter().any(|s| s == NONE));
        let sends = self
            .requester
            .poll('s', taken, if comes { TIMEOUT_MS } else { ENDLESS_MS })?;
        if sends.windows(2).any(|w| w[0].wr_id >= w[1].wr_id) {
            return Err(format!("{}: completions out of order: {sends:?}", case.name).into());
        }
        let mut statuses = sends.iter().map(|wc| status_name(wc.status));
        let one = |refused: &bool| match refused {
            true => "REFUSED".to_owned(),
            false => statuses.next().unwrap_or_else(|| NONE.to_owned()),
        };
        let mut ending = Ending {
            requester: refused.iter().map(one).collect(),
            requester_state: String::new(),
            responder: Vec::new(),
            responder_state: String::new(),
        };
        if case.twist != Twist::Destroyed {
            let sure = expected.map_or(0, |e| e.responder.len());
            let mut recvs = self.responder.poll('r', sure, TIMEOUT_MS)?;
            // More than expected would come now.
            recvs.extend(
                self.responder
                    .poll('r', case.recvs.len() + 1 - recvs.len().min(case.recvs.len()), 400)?,
            );
            ending.responder = recvs.iter().map(|wc| status_name(wc.status)).collect();
            ending.responder_state = self.settled_state(false, expected.map(|e| &e.responder_state))?;
        }
        ending.requester_state = self.settled_state(true, expected.map(|e| &e.requester_state))?;
        Ok(ending)
    }

    /// The state of a queue pair, once it is the expected one or has had time to become so.
    fn settled_state(&mut self, requester: bool, expected: Option<&String>) -> Result<String, Error> {
        let agent = if requester {
            &mut self.requester
        } else {
            &mut self.responder
        };
        let state = agent.settled_state(|s| expected.is_none_or(|e| *e == state_name(s)))?;
        Ok(state_name(&state))
    }
}

type Endings = BTreeMap<String, Ending>;

/// Where two kernels are no model for us: a case, whether that is so with us as requester (else as responder), what is
/// reported then, and why.
struct Divergence {
    case: &'static str,
    ours_asks: bool,
    requester: &'static [&'static str],
    responder: &'static [&'static str],
    why: &'static str,
}

const fn divergence(
    case: &'static str,
    ours_asks: bool,
    requester: &'static [&'static str],
    responder: &'static [&'static str],
    why: &'static str,
) -> Divergence {
    Divergence {
        case,
        ours_asks,
        requester,
        responder,
        why,
    }
}

const ATOMIC_ALIGNMENT: &str =
    "rdma_rxe does not let misaligned atomics be posted; we send them, and the responder refuses";
const LOCAL_KEY: &str = "IBA 11.6.2 calls this a local protection error; rdma_rxe reports a local QP operation error";
const ENDLESS: &str = "rdma_rxe takes a retry count of 7 for endless; it is the largest number";
const RNR_WAIT: &str =
    "an RNR NAK is an answer (IBA 9.7.5.2.8); rdma_rxe's retransmission timer runs on and takes retries";
const TOO_LONG: &str =
    "IBA 9.7.4.2.4 and 11.6.2: invalid request and local length error; rdma_rxe reports an operational error";

/// A guest that answers later than our tail probe comes sees the request twice.
const READ_AGAIN: &str = "rdma_rxe checks the key of a READ of no bytes when it repeats the response";
const LOCAL_ACCESS: &str =
    "IBA 11.6.2 calls this a local access error of the receive; rdma_rxe reports a remote access error";

#[rustfmt::skip]
const DIVERGENCES: &[Divergence] = &[
    divergence("fetch-add-misaligned", true, &["REM_INV_REQ_ERR"], &[], ATOMIC_ALIGNMENT),
    divergence("compare-swap-misaligned", true, &["REM_INV_REQ_ERR"], &[], ATOMIC_ALIGNMENT),
    divergence("retries-7", true, &["RETRY_EXC_ERR"], &[], ENDLESS),
    divergence("rnr-send-late-few-retries", true, &["SUCCESS"], &["SUCCESS"], RNR_WAIT),
    divergence("send-bad-lkey", true, &["LOC_PROT_ERR"], &[], LOCAL_KEY),
    divergence("write-bad-lkey", true, &["LOC_PROT_ERR"], &[], LOCAL_KEY),
    divergence("recv-bad-lkey", false, &["REM_OP_ERR"], &["LOC_PROT_ERR", "WR_FLUSH_ERR"], LOCAL_KEY),
    divergence("recv-into-readonly", false, &["REM_OP_ERR"], &["LOC_PROT_ERR"], LOCAL_KEY),
    divergence("send-too-long", false, &["REM_INV_REQ_ERR"], &["LOC_LEN_ERR", "WR_FLUSH_ERR"], TOO_LONG),
    divergence("send-too-long-many-packets", false, &["REM_INV_REQ_ERR"], &["LOC_LEN_ERR", "WR_FLUSH_ERR"], TOO_LONG),
    divergence("send-imm-too-long", false, &["REM_INV_REQ_ERR"], &["LOC_LEN_ERR"], TOO_LONG),
    divergence("write-imm-bad-rkey", false, &["REM_ACCESS_ERR"], &["LOC_ACCESS_ERR", "WR_FLUSH_ERR"], LOCAL_ACCESS),
];

/// Which side of the pair is ours.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum, Debug)]
pub(crate) enum Ours {
    /// We ask.
    Requester,
    /// We answer.
    Responder,
}

/// Puts what is right for us in the place of what two kernels report.
fn apply_divergences(expected: &mut Endings, ours: Ours) {
    for d in DIVERGENCES.iter().filter(|d| d.ours_asks == (ours == Ours::Requester)) {
        let Some(ending) = expected.get_mut(d.case) else {
            continue;
        };
        println!("{}: not as two kernels: {}", d.case, d.why);
        ending.requester = d.requester.iter().map(|&s| s.to_owned()).collect();
        ending.responder = d.responder.iter().map(|&s| s.to_owned()).collect();
        // Whoever reports or causes an error ends in that state; the requester's own errors never reach the responder.
        if d.why == RNR_WAIT {
            ending.requester_state = "RTS".to_owned();
            continue;
        }
        ending.requester_state = "ERR".to_owned();
        if ![LOCAL_KEY, ENDLESS].contains(&d.why) || ours == Ours::Responder {
            ending.responder_state = "ERR".to_owned();
        }
    }
}

/// Runs the cases.
pub(crate) fn run(args: &Args) -> Result<(), Error> {
    let mut expected: Option<Endings> = match &args.expect {
        Some(path) => Some(serde_json::from_str(&fs::read_to_string(path)?)?),
        None => None,
    };
    if let (Some(expected), Some(ours)) = (&mut expected, args.ours) {
        apply_divergences(expected, ours);
    }
    let [mut requester, mut responder] = args.ends.connect()?;
    let atomics = !args.strict_only || requester.caps()?.atomics && responder.caps()?.atomics;
    let mut seen = Endings::new();
    let mut wrong = 0;
    let cases = [key_cases(), local_cases(), queue_cases()].concat();
    for (n, case) in cases.iter().enumerate() {
        let wanted = args.takes(&case.name) && (case.strict || !args.strict_only);
        if !wanted {
            continue;
        }
        if !atomics && case.name.starts_with("compare-swap") {
            println!("{}: not tried, a device has no atomics", case.name);
            continue;
        }
        let known = expected.as_ref().and_then(|e| e.get(&case.name));
        let psn = case.psn(n, args.ends.mtu);
        let ending = Pair::new(&mut requester, &mut responder, case, args.ends.mtu, psn)
            .and_then(|mut pair| pair.run(case, known))
            .map_err(|e| format!("{}: {e}", case.name))?;
        match known {
            Some(k) if !case.is_met(k, &ending, args.ours) => {
                wrong += 1;
                println!("{}: differs\n  expected {k:?}\n  seen     {ending:?}", case.name);
            }
            None if expected.is_some() => {
                wrong += 1;
                println!("{}: no expectation; seen {ending:?}", case.name);
            }
            _ => println!(
                "{}: {} | {}",
                case.name,
                ending.requester.join(" "),
                ending.responder.join(" ")
            ),
        }
        seen.insert(case.name.clone(), ending);
    }
    for agent in [&mut requester, &mut responder] {
        agent.call("quit")?;
    }
    if let Some(path) = &args.record {
        fs::write(path, serde_json::to_string_pretty(&seen)? + "\n")?;
    }
    if wrong > 0 {
        return Err(format!(
            "{wrong} of {} cases ended otherwise than between two kernels",
            seen.len()
        )
        .into());
    }
    println!("errors: {} cases ended as expected at both ends: passed", seen.len());
    Ok(())
}
