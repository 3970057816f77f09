//! Hosts on a network: their packets by raw sockets, in real time, and their verbs by an agent.

mod agent;
mod config;
mod needs;
mod wire;

use core::{
    fmt,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::Duration,
};
use std::{
    collections::HashMap,
    hash::{BuildHasher as _, RandomState},
    io,
};

use roce_bth::{Aeth, Bth, Credits, Header, ICRC_LEN, Msn, Opcode, Psn, Qpn, RKey, ROCE_UDP_PORT, Syndrome};
use roce_icrc::Flow;
use roce_verbs::{QpState, QpType, WcStatus};

pub use self::config::{LiveConfig, LiveError};
use self::{
    agent::{Agent, Answer},
    wire::Wire,
};
use crate::{
    host::{Completed, Datagram, Host, NextIds, Stop},
    memory::{Area, Memory},
    pattern,
    play::Outcome,
    script::{Post, PostOp, SCRIPT_PORT, Script, Setup},
    value::Place,
};

/// Longest time of one question for completions or events, so that packets are taken from the socket meanwhile.
const ASK: Duration = Duration::from_millis(20);
/// Shortest such question: some agents ask the device only if they have time.
const ASK_ONCE: Duration = Duration::from_millis(1);
/// Time for the host's first request, and for its completion.
const LEARN: Duration = Duration::from_secs(10);
/// Bytes of a region that one answer carries, at most.
const READ: usize = 16 << 10;
/// Send work requests, and receives, of the queue pair.
const DEPTHS: [u32; 2] = [512, 2048];
/// Part of the time that a host may be late in which a packet is expected to have its effect: it is waited for whether there is one or not.
const SETTLED: u32 = 10;
/// Part of that time that packets are under way.
const TRANSIT: u32 = 100;
/// Bits of queue pair numbers of scripts: this one is set in all of them.
const SCRIPT_QPN: u32 = 0x40_0000;

/// Live host with its agent, on which scripts are played one after another.
#[derive(Debug)]
pub struct Live {
    config: LiveConfig,
    wire: Wire,
    agent: Agent,
    caps: Answer,
    /// Queue pair of the next script.
    next_qpn: u32,
}

impl Live {
    /// Opens raw sockets, and connects to the agent.
    ///
    /// # Errors
    /// Without CAP_NET_RAW, when UDP port 4791 is taken, and when there is no agent.
    pub fn open(config: LiveConfig) -> Result<Self, LiveError> {
        let addr = config.agent;
        let mut agent = Agent::connect(addr).map_err(|source| LiveError::Agent { addr, source })?;
        let caps = agent.call("caps").map_err(|stop| match stop {
            Stop::Mismatch(text) | Stop::NotRun(text) => LiveError::Protocol(format!("agent at {addr}: {text}")),
        })?;
        let random = RandomState::new().hash_one(addr) as u32;
        Ok(Self {
            config,
            wire: Wire::open(config.script, config.host)?,
            agent,
            caps,
            next_qpn: SCRIPT_QPN | random & (SCRIPT_QPN - 1),
        })
    }
}

impl Script {
    /// Plays the script on a live host, in real time. What the host or the way to it can't do ends it as not run.
    pub fn play_live(&self, live: &mut Live) -> Outcome {
        if let Some(why) = needs::missing(self, &live.config, &live.caps) {
            return Outcome::not_run(why);
        }
        live.wire.restart();
        let mut host = LiveHost {
            setup: &self.setup,
            memory: Memory::new(&self.setup, []),
            regions: Vec::new(),
            buffers: HashMap::new(),
            next_ids: NextIds::new(),
            qpn: Qpn::new(0),
            last_sent: Duration::ZERO,
            live,
        };
        match host.restart() {
            Ok(()) => self.play_on(&mut host),
            Err(Stop::Mismatch(text)) => Outcome::not_run(format!("the host refuses the settings: {text}")),
            Err(Stop::NotRun(why)) => Outcome::not_run(why),
        }
    }
}

/// Live host during a script.
struct LiveHost<'a> {
    live: &'a mut Live,
    setup: &'a Setup,
    memory: Memory,
    /// The agent's numbers of the regions.
    regions: Vec<u32>,
    /// The agent's numbers of the memory of receives, by their wr_id, and its length.
    buffers: HashMap<u64, (u32, usize)>,
    next_ids: NextIds,
    qpn: Qpn,
    /// Time of the last packet of the script.
    last_sent: Duration,
}

impl fmt::Debug for LiveHost<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LiveHost")
            .field("qpn", &self.qpn)
            .finish_non_exhaustive()
    }
}

/// Returns an address as a GID.
const fn gid(addr: IpAddr) -> Ipv6Addr {
    match addr {
        IpAddr::V4(addr) => addr.to_ipv6_mapped(),
        IpAddr::V6(addr) => addr,
    }
}

impl LiveHost<'_> {
    fn call(&mut self, command: &str) -> Result<Answer, Stop> {
        self.live.agent.call(command)
    }

    /// Registers memory. Returns the agent's number, and where it is.
    fn register(&mut self, len: usize, access: u32) -> Result<(u32, Area), Stop> {
        let answer = self.call(&format!("mem {len} {access}"))?;
        let area = Area {
            addr: answer.word(1)?,
            rkey: RKey(answer.word(2)?),
        };
        Ok((answer.word(0)?, area))
    }

    /// Creates the queue pair in INIT.
    fn create(&mut self) -> Result<(), Stop> {
        const RC: u32 = 2;
        const UC: u32 = 3;
        let setup = self.setup;
        let qp_type = if setup.qp_type == QpType::Uc { UC } else { RC };
        let ([sends, receives], access) = (DEPTHS, setup.access.bits());
        let answer = self.call(&format!("create {sends} {receives} 1 0 {access} {qp_type}"))?;
        self.qpn = Qpn::new(answer.word(0)?);
        let found: Ipv6Addr = answer.word(1)?;
        let host = self.live.config.host;
        if found != gid(host) {
            return Err(Stop::NotRun(format!(
                "the agent uses the GID {found}, not that of {host}"
            )));
        }
        Ok(())
    }

    /// Creates the regions.
    fn regions(&mut self) -> Result<(), Stop> {
        let mut areas = Vec::new();
        self.regions.clear();
        for (index, spec) in self.setup.regions.iter().enumerate() {
            let (id, area) = self.register(spec.len, spec.access.bits())?;
            self.call(&format!("fill {id} 0 {} {}", spec.len, pattern::seed(index)))?;
            self.regions.push(id);
            areas.push(area);
        }
        self.memory = Memory::new(self.setup, areas);
        Ok(())
    }

    fn enter_rtr(&mut self) -> Result<Answer, Stop> {
        let Setup {
            peer_psn,
            mtu,
            rnr_timer,
            depth,
            ..
        } = *self.setup;
        let (qpn, gid) = (self.script_qpn().value(), gid(self.live.config.script));
        self.call(&format!("rtr {qpn} {gid} {peer_psn} {} {rnr_timer} {depth}", mtu as u8))
    }

    /// Takes the queue pair to RTS. `psn`: of its first request.
    fn enter_rts(&mut self, psn: u32) -> Result<Answer, Stop> {
        let Setup {
            timeout,
            retry,
            rnr_retry,
            depth,
            ..
        } = *self.setup;
        self.call(&format!("rts {psn} {timeout} {retry} {rnr_retry} {depth}"))
    }

    /// Takes the queue pair to RTS, and has it learn the script's UDP source port if need be.
    fn start_sending(&mut self) -> Result<(), Stop> {
        let setup = self.setup;
        if !self.live.config.is_ferroce || setup.qp_type != QpType::Rc {
            return self.enter_rts(setup.psn).map(drop);
        }
        let first = Psn::new(setup.psn).sub(1);
        self.enter_rts(first.value())?;
        self.call("post 0 0 2 0 0 0 0 0 0 0 0")?;
        let end = self.elapsed() + LEARN;
        if self.wait_sent(end)?.is_none() {
            return Err(Stop::NotRun("the host does not send its WRITE of no bytes".to_owned()));
        }
        let ack = Header {
            aeth: Some(Aeth {
                syndrome: Syndrome::Ack(Credits::INVALID),
                msn: Msn::new(1),
            }),
            ..Header::new(Bth::new(Opcode::RcAcknowledge, self.qpn, first))
        };
        let mut bytes = vec![0; ack.wire_len()];
        ack.emit(&mut bytes);
        bytes.extend([0; ICRC_LEN]);
        let LiveConfig { host, script, .. } = self.live.config;
        let src = SocketAddr::new(script, setup.source_port.unwrap_or(SCRIPT_PORT));
        let dst = SocketAddr::new(host, ROCE_UDP_PORT);
        if let Ok(flow) = Flow::try_from((src, dst)) {
            flow.seal(0, &mut bytes);
        }
        self.receive(&Datagram {
            at: self.elapsed(),
            src,
            dst,
            identification: 0,
            bytes,
        })?;
        match self.wait_completion(false, self.elapsed() + LEARN)? {
            Some(done) if done.status == WcStatus::Success => Ok(()),
            found => Err(Stop::NotRun(format!(
                "the host's WRITE of no bytes ends with {found:?}"
            ))),
        }
    }

    fn post_recv(&mut self, id: Option<u64>, len: usize) -> Result<(), Stop> {
        const LOCAL_WRITE: u32 = 1;
        let wr_id = self.next_ids.draw(id, true);
        let (mem, _) = match len {
            0 => (self.regions[0], None),
            _ => self.register(len, LOCAL_WRITE).map(|(id, area)| (id, Some(area)))?,
        };
        self.buffers.insert(wr_id, (mem, len));
        self.call(&format!("recv {wr_id} {mem} 0 {len}")).map(drop)
    }

    /// Reads bytes of memory of the agent.
    fn bytes(&mut self, mem: u32, at: u64, len: usize) -> Result<Vec<u8>, Stop> {
        let mut bytes = Vec::new();
        while bytes.len() < len {
            let (from, more) = (at.wrapping_add(bytes.len() as u64), READ.min(len - bytes.len()));
            let digits: String = self.call(&format!("read {mem} {from} {more}"))?.word(0)?;
            let pairs = digits.as_bytes().chunks(2);
            let read = pairs.map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap_or_default(), 16));
            let read: Vec<u8> = read.collect::<Result<_, _>>().unwrap_or_default();
            if read.len() != more {
                return Err(Stop::NotRun(format!(
                    "the agent answers {} bytes, not {more}",
                    read.len()
                )));
            }
            bytes.extend(read);
        }
        Ok(bytes)
    }

    /// Asks again and again until there is an answer or `end` has come.
    fn ask<T>(
        &mut self,
        end: Duration,
        mut question: impl FnMut(&mut Agent, Duration) -> Result<Option<T>, Stop>,
    ) -> Result<Option<T>, Stop> {
        loop {
            self.live.wire.take();
            let left = end.saturating_sub(self.elapsed());
            let answer = question(&mut self.live.agent, left.clamp(ASK_ONCE, ASK))?;
            if answer.is_some() || left.is_zero() {
                return Ok(answer);
            }
        }
    }
}

/// Turns an error of the sockets into the reason why a script is not run.
fn unsent(e: &io::Error) -> Stop {
    Stop::NotRun(format!("the packet can't be sent: {e}"))
}

impl Host for LiveHost<'_> {
    fn restart(&mut self) -> Result<(), Stop> {
        let qpn = Qpn::new(self.live.next_qpn);
        self.live.next_qpn = SCRIPT_QPN | (self.live.next_qpn + 1) & (SCRIPT_QPN - 1);
        self.buffers.clear();
        self.next_ids = NextIds::new();
        self.create()?;
        // What comes from now on is of this queue pair.
        self.live.wire.expect(qpn);
        self.regions()?;
        match self.setup.state {
            QpState::Reset => return self.modify(QpState::Reset),
            QpState::Init => {}
            state => {
                self.enter_rtr()?;
                if state == QpState::Rts {
                    self.start_sending()?;
                }
            }
        }
        let setup = self.setup;
        setup.receives.iter().try_for_each(|len| self.post_recv(None, *len))
    }

    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn qpn(&self) -> Qpn {
        self.qpn
    }

    fn script_qpn(&self) -> Qpn {
        self.live.wire.qpn()
    }

    fn address(&self, named: IpAddr) -> Result<IpAddr, Stop> {
        let LiveConfig { host, script, .. } = self.live.config;
        let is_v6 = host.is_ipv6();
        if named.is_ipv6() != is_v6 && self.setup.ip.is_some() {
            return Err(Stop::NotRun(format!(
                "{named} and {host} are of two IP versions: no packet has both"
            )));
        }
        Ok(needs::address(named, host, script))
    }

    fn is_v6(&self) -> bool {
        self.live.config.host.is_ipv6()
    }

    fn elapsed(&self) -> Duration {
        self.live.wire.elapsed()
    }

    fn lateness(&self) -> Duration {
        self.live.config.lateness
    }

    fn transit(&self) -> Option<Duration> {
        Some(self.lateness() / TRANSIT)
    }

    fn settle(&mut self) -> Result<(), Stop> {
        self.wait(self.last_sent + self.lateness() / SETTLED)
    }

    fn receive(&mut self, datagram: &Datagram) -> Result<(), Stop> {
        self.last_sent = self.elapsed();
        self.live.wire.send(datagram).map_err(|e| unsent(&e))
    }

    fn wait(&mut self, end: Duration) -> Result<(), Stop> {
        self.live.wire.sleep(end).map_err(|e| unsent(&e))
    }

    fn wait_sent(&mut self, end: Duration) -> Result<Option<Datagram>, Stop> {
        self.live.wire.wait(end).map_err(|e| unsent(&e))
    }

    fn wait_completion(&mut self, is_recv: bool, end: Duration) -> Result<Option<Completed>, Stop> {
        self.ask(end, |agent, time| agent.poll(is_recv, time))
    }

    fn wait_event(&mut self, end: Duration) -> Result<Option<u32>, Stop> {
        self.ask(end, |agent, time| {
            let answer = agent.call(&format!("event {}", time.as_millis()))?;
            match answer.word::<String>(0)?.as_str() {
                "none" => Ok(None),
                _ => answer.word(0).map(Some),
            }
        })
    }

    fn state(&mut self) -> Result<Option<QpState>, Stop> {
        let number: u32 = self.call("state")?.word(0)?;
        let known = crate::names::STATES.iter().map(|(_, state)| *state);
        Ok(known.into_iter().find(|state| *state as u32 == number))
    }

    fn modify(&mut self, to: QpState) -> Result<(), Stop> {
        let from = self.state()?;
        match (to, from) {
            (QpState::Rtr, _) => self.enter_rtr(),
            (QpState::Rts, Some(QpState::Rtr)) => self.enter_rts(self.setup.psn),
            _ => self.call(&format!("modify {}", to as u32)),
        }
        .map(drop)
    }

    fn revoke(&mut self, index: usize) -> Result<(), Stop> {
        self.call(&format!("dereg {}", self.regions[index])).map(drop)
    }

    fn post(&mut self, post: &Post) -> Result<(), Stop> {
        const SIGNALED: u32 = 2;
        if post.op == PostOp::Recv {
            return self.post_recv(post.id, post.len);
        }
        let wr_id = self.next_ids.draw(post.id, false);
        let flags = SIGNALED | u32::from(post.fence) | u32::from(post.solicited) << 2;
        let Post {
            len,
            va,
            compare,
            local,
            ..
        } = *post;
        let (mem, at) = (self.regions[local.region.unwrap_or(0)], local.offset);
        // The key to invalidate takes the place of the remote one, and the addend that of the value to swap.
        let (rkey, imm) = (post.inv.unwrap_or(post.rkey), post.imm.unwrap_or(0));
        let swap = if post.op == PostOp::FetchAdd {
            post.add
        } else {
            post.swap
        };
        let op = opcode(post);
        self.call(&format!(
            "post {wr_id} {op} {flags} {mem} {at} {len} {va} {rkey} {imm} {compare} {swap}"
        ))
        .map(drop)
    }

    fn read(&mut self, place: Place, len: usize) -> Result<Vec<u8>, Stop> {
        self.bytes(self.regions[place.region.unwrap_or(0)], place.offset, len)
    }

    fn received(&mut self, wr_id: u64, len: usize) -> Result<Option<Vec<u8>>, Stop> {
        match self.buffers.get(&wr_id) {
            Some((mem, has)) if len <= *has => self.bytes(*mem, 0, len).map(Some),
            _ => Ok((len == 0).then(Vec::new)),
        }
    }
}

/// Returns the number in `ibv_wr_opcode`.
const fn opcode(post: &Post) -> u32 {
    match (post.op, post.imm, post.inv) {
        (PostOp::Write, None, _) => 0,
        (PostOp::Write, Some(_), _) => 1,
        (PostOp::Send | PostOp::Recv, None, None) => 2,
        (PostOp::Send | PostOp::Recv, Some(_), _) => 3,
        (PostOp::Read, ..) => 4,
        (PostOp::CompareSwap, ..) => 5,
        (PostOp::FetchAdd, ..) => 6,
        (PostOp::Send | PostOp::Recv, None, Some(_)) => 9,
    }
}
