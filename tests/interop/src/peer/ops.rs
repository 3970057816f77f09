//! Every RC operation against a `verbs-agent`, both as requester and as responder, with the data compared at both ends.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use roce::{Device, Grant, Mr};
use roce_verbs::{
    AccessFlags, Mtu, Payload, Psn, QpCaps, Qpn, RKey, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge, WcFlags,
    WcStatus,
};

use crate::{
    Error,
    agent::{
        ALL_ACCESS, Agent, AgentMem, AgentPost, CMP_SWAP, Caps, FETCH_ADD, IN_ERROR, READ, SEND, SEND_IMM, SEND_INV,
        WRITE, WRITE_IMM, pattern,
    },
    link::{Far, Link, Wire, addr_gid, gid_addr},
    wrap,
};

/// Arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Where the agent listens (TCP).
    #[arg(long)]
    agent: SocketAddr,
    /// Path MTU in bytes.
    #[arg(long, default_value_t = 1024)]
    mtu: usize,
    /// Largest message in bytes.
    #[arg(long, default_value_t = 8 << 20)]
    largest: usize,
    /// First PSN of both sides.
    #[arg(long, default_value_t = 0x00ff_fff0)]
    psn: u32,
    /// Local ACK timeout of both sides: 4.096 us * 2^timeout.
    #[arg(long, default_value_t = 17)]
    timeout: u8,
    /// How often everything is done.
    #[arg(long, default_value_t = 1)]
    rounds: u64,
    /// The agent's device need not be rdma_rxe: what it says it lacks (atomics, type-2 memory windows) is not asked of it, and it
    /// need not tell how far its PSNs are.
    #[arg(long)]
    pub(crate) as_capable: bool,
    /// Packets get lost: a refusal, which a queue pair sends once and then is in error, may be one of them.
    #[arg(long)]
    lossy: bool,
    /// READs of no bytes name key 0, which is as good as any (IBA C9-88): rdma_rxe of 6.12 answers them again with no other.
    #[arg(long)]
    no_key_for_nothing: bool,
}

const WAIT_MS: u32 = 60_000;

/// What all connections have in common.
pub(crate) struct Plan<'a> {
    pub(crate) local: IpAddr,
    pub(crate) mtu: Mtu,
    pub(crate) args: &'a Args,
}

/// A connection on which operations are done one after another.
pub(crate) struct Test {
    link: Link,
    pub(crate) agent: Agent,
    /// Our memory: the first half is the source, the second the sink; likewise the agent's.
    ours: Mr,
    theirs: AgentMem,
    half: usize,
    seed: u64,
    pub(crate) done: u32,
    /// The window that was invalidated last.
    last_window: Option<RemoteAddr>,
    no_key_for_nothing: bool,
    caps: Caps,
}

/// READ, WRITE and atomics by the other side, as in `ibv_access_flags`.
const REMOTE_ACCESS: u32 = 0xe;
const REMOTE_ATOMIC: u32 = 8;
/// READs and atomics in flight.
const READS: u8 = 8;
/// Of rdma_rxe.
const ALL_CAPS: Caps = Caps {
    atomics: true,
    windows: true,
    reads: READS,
};

/// Runs everything.
pub(crate) fn run(provider: &Device, local: IpAddr, args: &Args) -> Result<(), Error> {
    let mtu = Mtu::from_bytes(args.mtu).ok_or("no such path MTU")?;
    let agent = Agent::connect(args.agent)?;
    let plan = Plan { local, mtu, args };
    let (agent, wrapped) = wrap::run(provider, &plan, agent)?;
    let mut test = Test::open(provider, &plan, agent, args.psn, args.largest)?;
    test.done = wrapped;

    let m = args.mtu;
    let sizes = [0, 1, m - 1, m, m + 1, 3 * m + 5, 64 << 10, 1 << 20, 8 << 20];
    for _ in 0..args.rounds {
        for size in sizes.into_iter().filter(|s| *s <= args.largest) {
            test.messages_out(size)?;
            test.messages_in(size)?;
            test.one_sided_out(size)?;
            test.one_sided_in(size)?;
        }
        if test.caps.atomics {
            test.atomics_out()?;
            test.atomics_in()?;
        }
        if test.caps.windows {
            test.invalidate_out(args.as_capable)?;
        }
        test.invalidate_in(provider)?;
    }
    test.invalidated_key_is_dead(args.lossy)?;
    test.agent.call("quit")?;
    println!(
        "ops: {} operations at path MTU {}, every byte compared{}: passed",
        test.done,
        args.mtu,
        not_tried(test.caps)
    );
    Ok(())
}

/// What was left out, for the verdict.
fn not_tried(caps: Caps) -> String {
    let lacks = [
        (caps.atomics, "atomics"),
        (caps.windows, "SEND with Invalidate of theirs (no type-2 windows)"),
    ];
    let lacks: Vec<_> = lacks
        .into_iter()
        .filter(|(has, _)| !has)
        .map(|(_, what)| what)
        .collect();
    match lacks.is_empty() {
        true => String::new(),
        false => format!("; not tried, since the device there can't: {}", lacks.join(", ")),
    }
}

impl Test {
    /// Connects with new queue pairs and new memory at both ends, which start with this PSN.
    pub(crate) fn open(
        provider: &Device,
        plan: &Plan<'_>,
        mut agent: Agent,
        psn: u32,
        largest: usize,
    ) -> Result<Self, Error> {
        let (mtu, timeout) = (plan.mtu, plan.args.timeout);
        let caps = match plan.args.as_capable {
            true => agent.caps()?.at_most(READS),
            false => ALL_CAPS,
        };
        let (qpn, gid) = agent.create(64, 64, 2, 64)?;
        let half = largest.max(4096).next_multiple_of(4096);
        let theirs = agent.mem(2 * half, ALL_ACCESS)?;
        let sizes = QpCaps {
            max_send_wr: 64,
            max_recv_wr: 64,
            ..QpCaps::default()
        };
        let link = Link::new(provider, sizes)?;
        let rights = AccessFlags::LOCAL_WRITE
            | AccessFlags::REMOTE_WRITE
            | AccessFlags::REMOTE_READ
            | AccessFlags::REMOTE_ATOMIC
            | AccessFlags::MW_BIND;
        let ours = provider.alloc_mr(&link.pd, 2 * half, rights)?;
        let far = Far {
            qpn: Qpn::new(qpn),
            psn: Psn::new(psn),
            addr: gid_addr(gid.parse()?),
        };
        let wire = Wire {
            mtu,
            timeout,
            retry_cnt: 6,
            rnr_retry: 6,
            rd_atomic: caps.reads,
        };
        link.bring_up(plan.local, Psn::new(psn), far, wire)?;
        let (our_qpn, our_gid) = (link.qp.qpn().value(), addr_gid(plan.local));
        agent.call(&format!(
            "rtr {our_qpn} {our_gid} {psn} {} 12 {}",
            mtu as u8, caps.reads
        ))?;
        agent.call(&format!("rts {psn} {timeout} 6 6 {}", caps.reads))?;
        Ok(Self {
            link,
            agent,
            ours,
            theirs,
            half,
            seed: 1,
            done: 0,
            last_window: None,
            no_key_for_nothing: plan.args.no_key_for_nothing,
            caps,
        })
    }

    /// A new pattern number.
    fn next_seed(&mut self) -> u64 {
        self.seed += 1;
        self.done += 1;
        self.seed
    }

    fn sge(&self, offset: usize, len: usize) -> Result<Sge, Error> {
        Ok(Sge {
            addr: self.ours.addr() + offset as u64,
            length: u32::try_from(len)?,
            lkey: self.ours.lkey(),
        })
    }

    fn post(&self, what: &str, op: SendOp, offset: usize, len: usize) -> Result<(), Error> {
        let sge = [self.sge(offset, len)?];
        let sges = if len == 0 { &sge[..0] } else { &sge[..] };
        let wr = SendWr {
            wr_id: 7,
            op,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(sges),
        };
        self.link.qp.post_send(&[wr]).map_err(|(_, e)| e)?;
        let wc = Link::expect_ok(&self.link.send_cq, what)?;
        if wc.wr_id == 7 {
            Ok(())
        } else {
            Err(format!("{what}: completion of {}", wc.wr_id).into())
        }
    }

    fn remote(&self, offset: usize) -> RemoteAddr {
        RemoteAddr {
            addr: self.theirs.addr + offset as u64,
            rkey: RKey(self.theirs.rkey),
        }
    }

    fn our_check(&self, what: &str, offset: usize, len: usize, seed: u64) -> Result<(), Error> {
        let mut got = vec![0; len];
        self.ours.read(offset, &mut got)?;
        match pattern(seed, len).iter().zip(&got).position(|(a, b)| a != b) {
            None => Ok(()),
            Some(at) => Err(format!("{what}: byte {at} of {len} is wrong").into()),
        }
    }

    fn their_check(&mut self, offset: usize, len: usize, seed: u64) -> Result<(), Error> {
        self.agent
            .call(&format!("check {} {offset} {len} {seed}", self.theirs.id))
            .map(drop)
    }

    fn their_fill(&mut self, offset: usize, len: usize, seed: u64) -> Result<(), Error> {
        self.agent
            .call(&format!("fill {} {offset} {len} {seed}", self.theirs.id))
            .map(drop)
    }

    /// SEND and SEND with immediate from us.
    pub(crate) fn messages_out(&mut self, len: usize) -> Result<(), Error> {
        for imm in [None, Some(0x1234_5678)] {
            let seed = self.next_seed();
            self.ours.write(0, &pattern(seed, len))?;
            self.agent
                .recv(seed, self.theirs.id, self.half as u64, u32::try_from(len)?)?;
            let what = format!("our SEND of {len} bytes, immediate {imm:?}");
            self.post(&what, imm.map_or(SendOp::Send, SendOp::SendWithImm), 0, len)?;
            let wcs = self.agent.poll('r', 1, WAIT_MS)?;
            match wcs[..] {
                [wc] if wc.wr_id == seed
                    && wc.status == 0
                    && wc.byte_len as usize == len
                    && wc.imm == imm.unwrap_or(0) => {}
                _ => return Err(format!("{what}: the agent saw {wcs:?}").into()),
            }
            self.their_check(self.half, len, seed)?;
        }
        Ok(())
    }

    /// SEND and SEND with immediate from the agent.
    pub(crate) fn messages_in(&mut self, len: usize) -> Result<(), Error> {
        for (op, imm) in [(SEND, 0), (SEND_IMM, 0x9abc_def0)] {
            let seed = self.next_seed();
            let what = format!("the agent's SEND of {len} bytes, opcode {op}");
            self.their_fill(0, len, seed)?;
            let sge = [self.sge(self.half, len)?];
            let sges = if len == 0 { &sge[..0] } else { &sge[..] };
            self.link
                .qp
                .post_recv(&[RecvWr { wr_id: seed, sges }])
                .map_err(|(_, e)| e)?;
            self.agent_post(
                &what,
                AgentPost {
                    op,
                    len: u32::try_from(len)?,
                    imm,
                    ..AgentPost::default()
                },
            )?;
            let wc = Link::expect_ok(&self.link.recv_cq, &what)?;
            if wc.wr_id != seed || wc.byte_len as usize != len || wc.imm != imm {
                return Err(format!("{what}: {wc:?}").into());
            }
            self.our_check(&what, self.half, len, seed)?;
        }
        Ok(())
    }

    fn agent_post(&mut self, what: &str, post: AgentPost) -> Result<(), Error> {
        let id = 0x1_0000 + self.seed;
        self.agent.post(AgentPost {
            wr_id: id,
            mem: self.theirs.id,
            ..post
        })?;
        let wcs = self.agent.poll('s', 1, WAIT_MS)?;
        match wcs[..] {
            [wc] if wc.wr_id == id && wc.status == 0 => Ok(()),
            _ => Err(format!("{what}: the agent saw {wcs:?}").into()),
        }
    }

    /// WRITE from us.
    pub(crate) fn write_out(&mut self, len: usize) -> Result<(), Error> {
        let seed = self.next_seed();
        self.ours.write(0, &pattern(seed, len))?;
        let what = format!("our WRITE of {len} bytes");
        self.post(&what, SendOp::Write(self.remote(self.half)), 0, len)?;
        self.their_check(self.half, len, seed)
    }

    /// READ from us.
    pub(crate) fn read_out(&mut self, len: usize) -> Result<(), Error> {
        let seed = self.next_seed();
        self.their_fill(0, len, seed)?;
        let what = format!("our READ of {len} bytes");
        let mut source = self.remote(0);
        if len == 0 && self.no_key_for_nothing {
            source.rkey = RKey(0);
        }
        self.post(&what, SendOp::Read(source), self.half, len)?;
        self.our_check(&what, self.half, len, seed)
    }

    /// WRITE, WRITE with immediate and READ from us.
    fn one_sided_out(&mut self, len: usize) -> Result<(), Error> {
        self.write_out(len)?;
        let seed = self.next_seed();
        self.ours.write(0, &pattern(seed, len))?;
        self.agent.recv(seed, self.theirs.id, 0, 0)?;
        let what = format!("our WRITE of {len} bytes with immediate");
        self.post(&what, SendOp::WriteWithImm(self.remote(self.half), 0xa5), 0, len)?;
        let wcs = self.agent.poll('r', 1, WAIT_MS)?;
        match wcs[..] {
            [wc] if wc.wr_id == seed && wc.status == 0 && wc.imm == 0xa5 && wc.byte_len as usize == len => {}
            _ => return Err(format!("{what}: the agent saw {wcs:?}").into()),
        }
        self.their_check(self.half, len, seed)?;
        self.read_out(len)
    }

    /// WRITE from the agent.
    pub(crate) fn write_in(&mut self, len: usize) -> Result<(), Error> {
        let raddr = self.ours.addr() + self.half as u64;
        let seed = self.next_seed();
        let what = format!("the agent's WRITE of {len} bytes");
        self.their_fill(0, len, seed)?;
        self.agent_post(
            &what,
            AgentPost {
                op: WRITE,
                len: u32::try_from(len)?,
                raddr,
                rkey: self.ours.rkey().0,
                ..AgentPost::default()
            },
        )?;
        self.our_check(&what, self.half, len, seed)
    }

    /// READ from the agent.
    pub(crate) fn read_in(&mut self, len: usize) -> Result<(), Error> {
        let seed = self.next_seed();
        self.ours.write(0, &pattern(seed, len))?;
        let what = format!("the agent's READ of {len} bytes");
        self.agent_post(
            &what,
            AgentPost {
                op: READ,
                off: self.half as u64,
                len: u32::try_from(len)?,
                raddr: self.ours.addr(),
                rkey: self.ours.rkey().0,
                ..AgentPost::default()
            },
        )?;
        let checked = self.their_check(self.half, len, seed);
        // A fault of rdma_rxe: after a READ that did succeed its queue pair is not in error.
        if checked.is_err() && self.agent.settled_state(|s| s == IN_ERROR)? == IN_ERROR {
            return Err(format!("{what} succeeded before all of it was there, and its queue pair is in error").into());
        }
        checked
    }

    /// WRITE, WRITE with immediate and READ from the agent.
    fn one_sided_in(&mut self, len: usize) -> Result<(), Error> {
        self.write_in(len)?;
        let (sink, rkey) = (self.ours.addr() + self.half as u64, self.ours.rkey().0);
        let len32 = u32::try_from(len)?;
        let seed = self.next_seed();
        let what = format!("the agent's WRITE of {len} bytes with immediate");
        self.their_fill(0, len, seed)?;
        self.link
            .qp
            .post_recv(&[RecvWr { wr_id: seed, sges: &[] }])
            .map_err(|(_, e)| e)?;
        let imm = 0x77;
        self.agent_post(
            &what,
            AgentPost {
                op: WRITE_IMM,
                len: len32,
                raddr: sink,
                rkey,
                imm,
                ..AgentPost::default()
            },
        )?;
        let wc = Link::expect_ok(&self.link.recv_cq, &what)?;
        if wc.wr_id != seed || wc.imm != imm || wc.byte_len != len32 {
            return Err(format!("{what}: {wc:?}").into());
        }
        self.our_check(&what, self.half, len, seed)?;
        self.read_in(len)
    }

    fn atomics_out(&mut self) -> Result<(), Error> {
        let remote = self.remote(64);
        let mut word = [0; 8];
        self.agent.word(self.theirs.id, 64, Some(100))?;
        let steps = [
            (SendOp::FetchAdd { remote, add: 23 }, 100, 123),
            (
                SendOp::CompareSwap {
                    remote,
                    compare: 123,
                    swap: 7,
                },
                123,
                7,
            ),
            (
                SendOp::CompareSwap {
                    remote,
                    compare: 123,
                    swap: 9,
                },
                7,
                7,
            ),
            (SendOp::FetchAdd { remote, add: u64::MAX }, 7, 6),
        ];
        for (op, before, after) in steps {
            self.done += 1;
            self.post(&format!("our {op:?}"), op, 0, 8)?;
            self.ours.read(0, &mut word)?;
            let (got, now) = (u64::from_ne_bytes(word), self.agent.word(self.theirs.id, 64, None)?);
            if (got, now) != (before, after) {
                return Err(format!("our {op:?}: returned {got}, left {now}").into());
            }
        }
        Ok(())
    }

    fn atomics_in(&mut self) -> Result<(), Error> {
        let (raddr, rkey) = (self.ours.addr() + 64, self.ours.rkey().0);
        self.ours.write(64, &500u64.to_ne_bytes())?;
        let steps = [
            (FETCH_ADD, 0, 50, 500, 550),
            (CMP_SWAP, 550, 11, 550, 11),
            (CMP_SWAP, 550, 12, 11, 11),
        ];
        for (op, compare, swap, before, after) in steps {
            self.next_seed();
            let what = format!("the agent's atomic, opcode {op}");
            self.agent_post(
                &what,
                AgentPost {
                    op,
                    len: 8,
                    raddr,
                    rkey,
                    compare,
                    swap,
                    ..AgentPost::default()
                },
            )?;
            let got = self.agent.word(self.theirs.id, 0, None)?;
            let mut word = [0; 8];
            self.ours.read(64, &mut word)?;
            let now = u64::from_ne_bytes(word);
            if (got, now) != (before, after) {
                return Err(format!("{what}: returned {got}, left {now}").into());
            }
        }
        Ok(())
    }

    /// Our SEND invalidates a window of the agent.
    fn invalidate_out(&mut self, as_capable: bool) -> Result<(), Error> {
        let access = match self.caps.atomics {
            true => REMOTE_ACCESS,
            false => REMOTE_ACCESS & !REMOTE_ATOMIC,
        };
        let key = self.agent.window(self.theirs.id, 0, 4096, access)?;
        let key = key.ok_or("the agent's device has no memory windows")?;
        let window = RemoteAddr {
            addr: self.theirs.addr,
            rkey: RKey(key),
        };
        let seed = self.next_seed();
        self.ours.write(0, &pattern(seed, 4096))?;
        self.post("our WRITE through a window", SendOp::Write(window), 0, 4096)?;
        self.their_check(0, 4096, seed)?;
        self.agent.recv(seed, self.theirs.id, 0, 0)?;
        self.post("our SEND with invalidate", SendOp::SendWithInv(RKey(key)), 0, 0)?;
        match self.agent.poll('r', 1, WAIT_MS)?[..] {
            // rdma_rxe (6.1) invalidates, but does not tell programs in userspace which key; other devices may.
            [wc] if wc.status == 0 && (wc.invalidated == 0 || as_capable && wc.invalidated == key) => {}
            ref other => return Err(format!("our SEND with invalidate: the agent saw {other:?}").into()),
        }
        self.last_window = Some(window);
        Ok(())
    }

    /// The last thing that a queue pair does: a WRITE through the window that was invalidated is refused.
    fn invalidated_key_is_dead(&mut self, lossy: bool) -> Result<(), Error> {
        let Some(window) = self.last_window else {
            return Ok(());
        };
        let sges = [self.sge(0, 64)?];
        let op = SendOp::Write(window);
        let wr = SendWr {
            wr_id: 8,
            op,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(&sges),
        };
        self.link.qp.post_send(&[wr]).map_err(|(_, e)| e)?;
        let wc = Link::wait_one(&self.link.send_cq, Duration::from_secs(60))?;
        match wc.status {
            WcStatus::RemoteAccessError => Ok(()),
            WcStatus::RetryExceeded if lossy => self.their_queue_pair_is_in_error(),
            other => Err(format!("our WRITE through an invalidated window: {other:?}").into()),
        }
    }

    /// What the agent's queue pair has refused put it into error: work is flushed.
    fn their_queue_pair_is_in_error(&mut self) -> Result<(), Error> {
        const FLUSHED: u32 = 5;
        self.agent.post(AgentPost {
            op: SEND,
            mem: self.theirs.id,
            ..AgentPost::default()
        })?;
        match self.agent.poll('s', 1, WAIT_MS)?[..] {
            [wc] if wc.status == FLUSHED => Ok(()),
            ref other => Err(format!("nothing was refused: the agent's next SEND ended with {other:?}").into()),
        }
    }

    /// The agent's SEND invalidates a region of ours.
    fn invalidate_in(&mut self, provider: &Device) -> Result<(), Error> {
        let region = provider.alloc_revocable(&self.link.pd)?;
        let access = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
        let grant = Grant {
            region: &self.ours,
            offset: 0,
            len: 4096,
            access,
        };
        let key = self.link.qp.post_grant(&region, &grant, 9, SendFlags::SIGNALED)?;
        Link::expect_ok(&self.link.send_cq, "grant")?;
        let seed = self.next_seed();
        self.their_fill(0, 4096, seed)?;
        let (raddr, rkey) = (self.ours.addr(), key.0);
        let what = "the agent's WRITE through a revocable region";
        self.agent_post(
            what,
            AgentPost {
                op: WRITE,
                len: 4096,
                raddr,
                rkey,
                ..AgentPost::default()
            },
        )?;
        self.our_check(what, 0, 4096, seed)?;
        self.link
            .qp
            .post_recv(&[RecvWr { wr_id: seed, sges: &[] }])
            .map_err(|(_, e)| e)?;
        let what = "the agent's SEND with invalidate";
        self.agent_post(
            what,
            AgentPost {
                op: SEND_INV,
                rkey,
                ..AgentPost::default()
            },
        )?;
        let wc = Link::expect_ok(&self.link.recv_cq, what)?;
        if !wc.flags.contains(WcFlags::WITH_INV) || wc.invalidated != key {
            return Err(format!("{what}: {wc:?}").into());
        }
        Ok(())
    }
}
