//! A host's node and its program.

use std::collections::{BTreeMap, BTreeSet};

use lnet::{Buffer, Entry, EntryOptions, Failure, Get, JobId, Node, Output, Put, proto::Nid, proto::PingInfo};
use roce_sim::{Check, Coverage, Rng, SEC};
use roce_verbs::{
    Completion, Instant,
    provider::{Cx, Event, QpId},
};

use crate::{
    ledger::{Ledger, content},
    plan::{Places, ProgramPlan},
    tester::{Rules, Tester, TesterPlan},
};

/// Portal of memory that peers PUT into, each its own, found by its NID; of memory that they GET from; and one where nothing is.
const SINKS: u32 = 10;
const SOURCE: u32 = 11;
const NOTHING: u32 = 12;
const BITS: u64 = 0x1234_5678_9abc_def0;
/// Match bits from which on they are for replies and data of selftest, by the stamps of its clients.
const REPLIES: u64 = 1 << 62;
/// Time for which a place is left alone after a PUT that has failed: it may still come.
const REST: u64 = 200 * SEC;
/// Bytes that a ping may bring.
const PING: usize = 272;

/// State of the world that a program works with.
pub(crate) struct Env<'a> {
    pub(crate) ledger: &'a mut Ledger,
    pub(crate) rng: &'a mut Rng,
    pub(crate) coverage: &'a mut Coverage,
    pub(crate) hosts: &'a [Nid],
    /// Hosts that have started again.
    pub(crate) restarted: &'a BTreeSet<Nid>,
    /// No operation may fail, and no connection end.
    pub(crate) strict: bool,
    pub(crate) intruder: Option<Nid>,
}

/// Operation of a program.
#[derive(Debug)]
enum What {
    Put {
        place: (Nid, usize),
        ack: bool,
    },
    Get {
        from: Nid,
        offset: usize,
        sink: Buffer,
    },
    Ping(Buffer),
    /// Nothing matches it.
    Miss {
        is_put: bool,
    },
}

/// Operation that was begun, if the node took it, and its number.
type Begun = (Result<JobId, Failure>, u64, What);

/// Host's node and program.
pub(crate) struct Side {
    pub(crate) node: Node,
    pub(crate) plan: ProgramPlan,
    room: Places,
    /// By peer.
    sinks: BTreeMap<Nid, Buffer>,
    jobs: BTreeMap<JobId, (u64, What)>,
    /// When places of peers may be used.
    places: BTreeMap<(Nid, usize), u64>,
    begins_at: u64,
    tester: Tester,
    /// See [`taken`](Self::taken).
    taken: BTreeSet<u64>,
}

/// Number of the content of a host's memory for GETs.
const fn source_number(nid: Nid) -> u64 {
    nid.0 & 0xff
}

impl Side {
    pub(crate) fn start(
        mut node: Node,
        (plan, tester): (ProgramPlan, Option<TesterPlan>),
        (room, rules): (Places, Rules),
        now: Instant,
        hosts: &[Nid],
    ) -> Self {
        let tester = Tester::start(&mut node, now, (tester, rules));
        let entry = |portal, from, options, memory| Entry {
            portal,
            from,
            match_bits: BITS,
            ignore_bits: 0,
            options: options | EntryOptions::MANAGE_REMOTE,
            memory,
            uses: None,
        };
        let source = Buffer::allocate(room.len).expect("memory");
        source.write(&content(source_number(node.nid()), room.len));
        node.attach(entry(SOURCE, None, EntryOptions::GET, source));
        let mut sinks = BTreeMap::new();
        let own = node.nid();
        for peer in hosts.iter().filter(|peer| **peer != own) {
            let sink = Buffer::allocate(room.len * room.count).expect("memory");
            sinks.insert(*peer, sink.clone());
            node.attach(entry(SINKS, Some(*peer), EntryOptions::PUT, sink));
        }
        Self {
            node,
            plan,
            room,
            sinks,
            jobs: BTreeMap::new(),
            places: BTreeMap::new(),
            begins_at: now.as_nanos(),
            tester,
            taken: BTreeSet::new(),
        }
    }

    /// Returns whether all has ended.
    pub(crate) fn is_done(&self) -> bool {
        self.plan.operations == 0 && self.jobs.is_empty() && self.tester.is_done()
    }

    /// Remembers replies and data of a stranger, unless the request for them may be lost.
    fn note_taken(&mut self, output: &Output, env: &Env<'_>) {
        match output {
            Output::Served(served, _) if Some(served.from) == env.intruder && served.match_bits >= REPLIES => {
                self.taken.insert(served.match_bits);
            }
            Output::Down(peer, _) if Some(*peer) == env.intruder => self.taken.clear(),
            _ => {}
        }
    }

    /// Match bits of replies and data that a stranger has sent, and that were taken.
    pub(crate) const fn taken(&self) -> &BTreeSet<u64> {
        &self.taken
    }

    /// Returns whether no request of selftest is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.tester.is_idle()
    }

    /// Everything that can be done now.
    pub(crate) fn work(&mut self, cx: &mut Cx<'_>, env: &mut Env<'_>) -> Check {
        let now = cx.now.as_nanos();
        self.tester.work(&mut self.node, cx.now, env.coverage)?;
        while let Some(output) = self.node.poll_output() {
            self.note_taken(&output, env);
            if self.tester.output(&mut self.node, cx.now, &output) {
                continue;
            }
            match output {
                Output::Done(id, result) => self.done(now, id, result, env)?,
                Output::Served(served, Ok(len)) if served.is_put => {
                    let Some(sink) = self.sinks.get(&served.from) else {
                        return Err(format!("a PUT of {}", served.from));
                    };
                    let part = sink.part(served.offset, len as usize).ok_or("outside of the memory")?;
                    env.ledger.put(served.hdr_data, &part.to_vec())?;
                }
                Output::Served(_, Ok(_)) => env.coverage.note("GET served"),
                Output::Served(_, Err(_)) => env.coverage.note("operation of a peer that failed"),
                Output::Unlinked(entry) => return Err(format!("{entry:?} is gone")),
                Output::Pinged(_) => env.coverage.note("ping answered"),
                Output::Pushed(_) => env.coverage.note("ping information of a peer"),
                Output::Up(..) => env.coverage.note("connection"),
                Output::Down(_, Failure::Message(e)) => return Err(format!("a message of a peer: {e}")),
                Output::Down(_, Failure::Credits(e)) => return Err(format!("credits: {e}")),
                Output::Down(peer, Failure::Restarted) if !env.restarted.contains(&peer) => {
                    return Err(format!("a connection to {peer} was ended, which has not started again"));
                }
                Output::Down(peer, why) if env.strict => {
                    return Err(format!("the connection to {peer} has ended: {why}"));
                }
                Output::Down(_, Failure::Restarted) => env.coverage.note("peer that started again"),
                Output::Down(_, Failure::Timeout) => env.coverage.note("connection without progress"),
                Output::Down(..) => env.coverage.note("connection lost"),
                Output::Refused(_, why) => env
                    .coverage
                    .note_if("both connected at once", why == lnet::Refusal::Race),
            }
        }
        self.tester.work(&mut self.node, cx.now, env.coverage)?;
        self.check_credits(env)?;
        let others = self.node.jobs() - self.jobs.len();
        self.tester.check(others, env.hosts, env.coverage)?;
        while self.plan.operations > 0 && self.begins_at <= now && self.jobs.len() < self.plan.at_once {
            self.begin(cx.now, env)?;
            self.plan.operations -= 1;
            self.begins_at = now + env.rng.range(0, self.plan.think);
        }
        Ok(())
    }

    fn check_credits(&self, env: &mut Env<'_>) -> Check {
        for connection in self.node.connections() {
            let (c, asked, promised) = (connection.credits, connection.asked, connection.promised);
            let ours = usize::from(c.available.max(c.reserved)).max(asked);
            let theirs = usize::from(c.theirs + c.outstanding) + promised;
            let depth = usize::from(c.depth);
            if ours.max(theirs) > depth || connection.in_flight > depth + 2 {
                return Err(format!("{connection:?}"));
            }
            let is_waiting = connection.is_established && connection.queued > 0;
            env.coverage.note_if("no credit left", is_waiting && c.available == 0);
            env.coverage
                .note_if("no place for an answer left", is_waiting && c.reserved == 0);
        }
        Ok(())
    }

    fn done(&mut self, now: u64, id: JobId, result: Result<u32, Failure>, env: &mut Env<'_>) -> Check {
        let Some((number, what)) = self.jobs.remove(&id) else {
            return Err(format!("{id:?} ends, which was not begun"));
        };
        if let Some(why) = result.as_ref().err().filter(|_| env.strict) {
            return Err(format!("operation {number} fails: {why}"));
        }
        env.coverage.note_if("operation failed", result.is_err());
        match (what, result) {
            (What::Put { place, ack }, result) => {
                let rest = if result.is_ok() && ack { 0 } else { REST };
                self.places.insert(place, now + rest);
                match result {
                    Ok(len) => env.ledger.done(number, len, ack),
                    Err(_) => env.ledger.over(number),
                }
            }
            (What::Get { from, offset, sink }, Ok(len)) => {
                env.ledger.done(number, len, false)?;
                let all = content(source_number(from), self.room.len);
                match sink.to_vec() == all[offset..offset + sink.len()] {
                    true => Ok(()),
                    false => Err(format!("GET {number} brings other bytes than {from} has")),
                }
            }
            (What::Ping(sink), Ok(len)) => {
                env.ledger.over(number)?;
                env.coverage.note("ping");
                let bytes = sink.to_vec();
                let info = PingInfo::parse(&bytes[..len as usize]).map_err(|e| e.to_string())?;
                let up = info.interfaces().nth(1).map(|ni| ni.status);
                match up == Some(lnet::proto::STATUS_UP) {
                    true => Ok(()),
                    false => Err(format!("{info:?}")),
                }
            }
            (What::Miss { is_put }, Ok(_)) if !is_put => Err(format!("GET {number} finds something")),
            (_, _) => env.ledger.over(number),
        }
    }

    fn begin(&mut self, now: Instant, env: &mut Env<'_>) -> Check {
        let others: Vec<Nid> = env
            .hosts
            .iter()
            .copied()
            .filter(|nid| *nid != self.node.nid())
            .collect();
        let peer = others[env.rng.index(others.len())];
        let len = env.rng.pick(&self.plan.lens);
        let (is_get, is_miss) = (env.rng.chance(self.plan.gets), env.rng.chance(self.plan.misses));
        let (id, number, what) = if env.rng.chance(self.plan.pings) {
            let sink = Buffer::allocate(PING).ok_or("no memory")?;
            let id = self.node.ping(now, peer, sink.clone());
            (id, env.ledger.begin(0), What::Ping(sink))
        } else if is_get {
            self.begin_get(now, peer, (len.max(1), is_miss), env)?
        } else {
            match self.begin_put(now, peer, (len, is_miss), env)? {
                Some(begun) => begun,
                None => return Ok(()),
            }
        };
        let id = id.map_err(|e| e.to_string())?;
        self.jobs.insert(id, (number, what));
        Ok(())
    }

    fn begin_get(
        &mut self,
        now: Instant,
        peer: Nid,
        (len, is_miss): (usize, bool),
        env: &mut Env<'_>,
    ) -> Result<Begun, String> {
        let sink = Buffer::allocate(len).ok_or("no memory")?;
        let offset = env.rng.index(self.room.len - len + 1);
        let get = Get {
            peer,
            portal: if is_miss { NOTHING } else { SOURCE },
            match_bits: BITS,
            offset: offset as u32,
            sink: sink.clone(),
        };
        let what = match is_miss {
            true => What::Miss { is_put: false },
            false => What::Get {
                from: peer,
                offset,
                sink,
            },
        };
        Ok((self.node.get(now, &get), env.ledger.begin(len), what))
    }

    fn begin_put(
        &mut self,
        now: Instant,
        peer: Nid,
        (len, is_miss): (usize, bool),
        env: &mut Env<'_>,
    ) -> Result<Option<Begun>, String> {
        let free = |place: &usize| self.places.get(&(peer, *place)).is_none_or(|at| *at <= now.as_nanos());
        let Some(place) = (0..self.room.count).find(free) else {
            env.coverage.note("no place for a PUT");
            return Ok(None);
        };
        let number = env.ledger.begin(len);
        // A buffer has at least a byte.
        let memory = Buffer::allocate(len.max(1)).ok_or("no memory")?;
        memory.write(&content(number, len));
        let source = memory.part(0, len).ok_or("no part")?;
        let ack = env.rng.chance(self.plan.acks);
        let put = Put {
            peer,
            portal: if is_miss { NOTHING } else { SINKS },
            match_bits: BITS,
            hdr_data: number,
            offset: (place * self.room.len) as u32,
            source,
            ack,
        };
        let what = match is_miss {
            true => What::Miss { is_put: true },
            false => {
                self.places.insert((peer, place), u64::MAX);
                What::Put {
                    place: (peer, place),
                    ack,
                }
            }
        };
        Ok(Some((self.node.put(now, &put), number, what)))
    }

    /// The host dies with its operations.
    pub(crate) fn die(self, env: &mut Env<'_>) -> Result<(ProgramPlan, Option<TesterPlan>), String> {
        let mut jobs = self.jobs.into_values();
        jobs.try_for_each(|(number, _)| env.ledger.over(number))?;
        Ok((self.plan, self.tester.into_plan()))
    }

    /// When it wants to go on by itself.
    pub(crate) fn wakes_at(&self) -> Option<Instant> {
        let begins = self.plan.operations > 0 && self.jobs.len() < self.plan.at_once;
        let begins = begins.then(|| Instant::from_nanos(self.begins_at));
        begins.into_iter().chain(self.tester.next_timeout()).min()
    }

    /// Returns what it waits for.
    pub(crate) fn situation(&self) -> String {
        format!(
            "{}: {} operations to begin, {:?} under way, {:?}",
            self.node.nid(),
            self.plan.operations,
            self.jobs,
            self.node.connections().collect::<Vec<_>>()
        )
    }
}

/// A host's turn.
pub(crate) struct Turn<'a> {
    pub(crate) side: &'a mut Side,
    pub(crate) env: Env<'a>,
}

impl roce_sim::lan::Machines for Turn<'_> {
    fn completion(&mut self, cx: &mut Cx<'_>, qp: QpId, wc: &Completion) {
        self.side.node.completion(cx, qp, wc);
    }

    fn event(&mut self, cx: &mut Cx<'_>, event: &Event) {
        self.side.node.event(cx, event);
    }

    fn timeout(&mut self, cx: &mut Cx<'_>) {
        self.side.node.timeout(cx);
        self.side.tester.timeout(&mut self.side.node, cx.now);
    }

    fn work(&mut self, cx: &mut Cx<'_>) -> Check {
        self.side.work(cx, &mut self.env)
    }

    fn end_batch(&mut self, cx: &mut Cx<'_>) {
        self.side.node.end_batch(cx);
    }

    fn next_timeout(&self) -> Option<Instant> {
        let wakes = self.side.wakes_at().into_iter();
        wakes.chain(self.side.node.next_timeout()).min()
    }
}
