//! Traffic of the other services beside the connections of the model: unreliable connections, datagrams, reliable and
//! extended connections into shared receive queues. Each flow goes one way and numbers its messages in their immediate
//! data, so that a receiver knows what must be in them.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use roce_mem::Region;
use roce_port::QpInit;
use roce_qp::{CompletionQueue, GRH_LEN, SharedReceiveQueue, SrqConfig, XrcDomain};
use roce_verbs::{
    AccessFlags, AddressVector, AsyncEvent, Completion, Datagram, Mtu, Payload, Psn, QKey, QpAttr, QpAttrMask as M,
    QpCaps, QpState, QpType, Qpn, RecvWr, RemoteAddr, RnrTimer, SendFlags, SendOp, SendRequest, SendWr, Sge, SrqAttr,
    SrqModify, SrqType, Srqn, Target, WcFlags, WcOpcode, WcStatus, legal,
};

use crate::{
    rng::Rng,
    runner::Check,
    scenario::{MS, US},
    world::{Event, World},
};

/// Bytes of one receive buffer, network header included, and of one message's place in a target.
const SLOT: usize = 8 << 10;
/// Receive buffers in a host's shared queues.
const SHARED: usize = 24;
/// The shared receive queues of a host: a basic one, and two for extended connections.
const QUEUES: usize = 3;
const QKEY: QKey = QKey(0x1234_5678);
/// Marks receives among work request ids.
const RECV: u64 = 1 << 63;

/// Kind of message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    Send,
    /// RDMA WRITE with immediate data, into a place of its own.
    Write,
    /// Datagram with a queue key that is not the receiver's.
    WrongKey,
    /// Datagram longer than the sender's MTU, which is never sent.
    TooLong,
}

#[derive(Clone, Debug)]
struct Message {
    what: What,
    len: usize,
    /// Which of the receiver's queues (XRC).
    queue: usize,
}

/// Messages from one host to another.
struct Flow {
    qp_type: QpType,
    from: usize,
    to: usize,
    /// Queue pairs of sender and receiver.
    qpns: [Qpn; 2],
    /// Its receives come from the host's shared queue.
    shared: bool,
    messages: Vec<Message>,
    source: Arc<Region>,
    /// Target of WRITEs: a place per message.
    target: Arc<Region>,
    /// Buffers of its own receives: a place per message.
    buffers: Arc<Region>,
    posted: usize,
    completed: usize,
    arrived: Vec<usize>,
    /// One of its hosts has died.
    dead: bool,
}

impl Flow {
    fn is_reliable(&self) -> bool {
        matches!(self.qp_type, QpType::Rc | QpType::XrcIni)
    }

    /// Returns the number of messages that can arrive.
    fn expected(&self) -> usize {
        let can = |m: &&Message| matches!(m.what, What::Send | What::Write);
        self.messages.iter().filter(can).count()
    }

    fn is_done(&self) -> bool {
        let all = self.messages.len();
        self.dead || (self.completed == all && (!self.is_reliable() || self.arrived.len() == all))
    }
}

/// State shared by the flows to a host.
struct Shared {
    cq: Arc<CompletionQueue>,
    queues: Vec<Arc<SharedReceiveQueue>>,
    domain: Arc<XrcDomain>,
    buffers: Arc<Region>,
    free: Vec<usize>,
    /// Receives in the shared queues or taken from them: work request ids with their buffers.
    outstanding: HashMap<u64, usize>,
    next: u64,
    /// The limit of each queue is armed.
    armed: [bool; QUEUES],
    /// Receives that went with their queue pairs.
    lost: usize,
    scheduled: bool,
}

/// All of it.
pub(crate) struct Services {
    rng: Rng,
    flows: Vec<Flow>,
    hosts: Vec<Shared>,
}

/// The bytes of a message: nobody else's.
fn content(flow: usize, seq: usize, len: usize) -> Vec<u8> {
    Rng::new((flow as u64) << 32 | seq as u64, 9).bytes(len)
}

fn pieces(region: &Region, at: usize, len: usize) -> Sge {
    Sge {
        addr: region.addr() + at as u64,
        length: len as u32,
        lkey: region.lkey(),
    }
}

/// Work requests of a service's queue pairs.
fn caps() -> QpCaps {
    QpCaps {
        max_send_wr: 16,
        max_recv_wr: 64,
        ..QpCaps::default()
    }
}

impl Services {
    /// Returns a summary of the state, for reports.
    pub(crate) fn situation(&self) -> String {
        let mut out = String::new();
        for (h, s) in self.hosts.iter().enumerate() {
            let waiting: Vec<_> = s.queues.iter().map(|q| q.len()).collect();
            out += &format!(
                "\n  host {h}: shared receives {waiting:?}, {} free, {} outstanding, {} lost, to be replenished: {}",
                s.free.len(),
                s.outstanding.len(),
                s.lost,
                s.scheduled,
            );
        }
        for (i, f) in self.flows.iter().enumerate().filter(|(_, f)| !f.is_done()) {
            out += &format!(
                "\n  flow {i} from host {} to {} ({:?}, shared: {}): {} messages, {} posted, {} completed, {} arrived",
                f.from,
                f.to,
                f.qp_type,
                f.shared,
                f.messages.len(),
                f.posted,
                f.completed,
                f.arrived.len(),
            );
        }
        out
    }
}

impl World {
    /// Draws the flows of an extended run, and sets them up.
    pub(crate) fn begin_services(&mut self) -> Check {
        if !self.scenario.extended {
            return Ok(());
        }
        let mut rng = Rng::new(self.seed, 5);
        let hosts = (0..self.hosts.len()).map(|h| self.shared(h)).collect();
        self.services = Some(Services {
            flows: Vec::new(),
            hosts,
            rng: rng.clone(),
        });
        for _ in 0..rng.range(1, 6) {
            self.begin_flow(&mut rng, self.scale)?;
        }
        let flows = self.services().flows.len();
        for flow in 0..flows {
            let after = rng.range(0, 5 * MS);
            self.schedule(after, Event::Serve { flow });
        }
        self.services().rng = rng;
        for h in 0..self.hosts.len() {
            self.want_buffers(h);
        }
        Ok(())
    }

    fn services(&mut self) -> &mut Services {
        self.services.as_mut().expect("an extended run")
    }

    fn shared(&self, h: usize) -> Shared {
        let host = &self.hosts[h];
        let cq = CompletionQueue::new(90, 1 << 16, None);
        let domain = XrcDomain::new();
        let queues: Vec<_> = (0..QUEUES)
            .map(|i| {
                SharedReceiveQueue::new(SrqConfig {
                    handle: i as u32,
                    number: Srqn::new(100 + i as u32),
                    pd: host.pd,
                    srq_type: if i == 0 { SrqType::Basic } else { SrqType::Xrc },
                    attr: SrqAttr {
                        max_wr: SHARED as u32,
                        max_sge: 2,
                        limit: 0,
                    },
                    cq: Some(cq.clone()),
                })
            })
            .collect();
        for queue in &queues[1..] {
            assert!(domain.attach(queue));
        }
        let access = AccessFlags::LOCAL_WRITE;
        Shared {
            cq,
            queues,
            domain,
            buffers: host
                .mem
                .alloc_region(host.pd, QUEUES * SHARED * SLOT, access)
                .expect("memory"),
            free: (0..QUEUES * SHARED).collect(),
            outstanding: HashMap::new(),
            next: 0,
            armed: [false; QUEUES],
            lost: 0,
            scheduled: false,
        }
    }

    fn begin_flow(&mut self, rng: &mut Rng, scale: u32) -> Check {
        let from = rng.index(self.hosts.len());
        let to = (from + 1 + rng.index(self.hosts.len() - 1)) % self.hosts.len();
        let qp_type = rng.pick(&[
            QpType::Uc,
            QpType::Uc,
            QpType::Ud,
            QpType::Ud,
            QpType::Rc,
            QpType::XrcIni,
        ]);
        let peer_type = if qp_type == QpType::XrcIni {
            QpType::XrcTgt
        } else {
            qp_type
        };
        let shared = match qp_type {
            QpType::Rc => true,
            QpType::XrcIni => false,
            _ => rng.chance(0.5),
        };
        let mtu = self.hosts[from].plan.mtu.min(self.hosts[to].plan.mtu);
        let messages = self.draw_messages(qp_type, mtu, from, rng, scale);
        let n = messages.len();
        let alloc = |w: &Self, h: usize| {
            let host = &w.hosts[h];
            let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
            host.mem.alloc_region(host.pd, n * SLOT, access).expect("memory")
        };
        let (source, target, buffers) = (alloc(self, from), alloc(self, to), alloc(self, to));
        let flow = self.services().flows.len();
        for (seq, m) in messages.iter().enumerate() {
            let data = content(flow, seq, m.len);
            source.write(seq * SLOT, &data).map_err(|e| e.to_string())?;
        }
        let qpns = [
            self.service_qp(from, qp_type, false)?,
            self.service_qp(to, peer_type, shared)?,
        ];
        let psn = Psn::new(rng.number() as u32);
        let [addr, peer_addr] = [from, to].map(|h| self.hosts[h].plan.addr);
        self.bring_up(to, qpns[1], peer_type, addr, qpns[0], psn, mtu)?;
        self.bring_up(from, qpns[0], qp_type, peer_addr, qpns[1], psn, mtu)?;
        self.services().flows.push(Flow {
            qp_type,
            from,
            to,
            qpns,
            shared,
            messages,
            source,
            target,
            buffers,
            posted: 0,
            completed: 0,
            arrived: Vec::new(),
            dead: false,
        });
        match shared || qp_type == QpType::XrcIni {
            true => Ok(()),
            false => self.post_own(flow),
        }
    }

    fn draw_messages(&self, qp_type: QpType, mtu: Mtu, from: usize, rng: &mut Rng, scale: u32) -> Vec<Message> {
        let (mtu, own) = (mtu.bytes(), self.hosts[from].plan.mtu.bytes());
        let datagrams = qp_type == QpType::Ud;
        let n = rng.range(5, u64::from(scale.clamp(6, 60)));
        let message = |rng: &mut Rng| {
            let len = match rng.index(4) {
                0 => rng.range(0, 64) as usize,
                1 => mtu - rng.index(2),
                _ if datagrams => rng.range(0, mtu as u64) as usize,
                2 => mtu + 1,
                _ => rng.range(0, SLOT as u64 - GRH_LEN as u64) as usize,
            };
            let what = match rng.index(8) {
                0 if datagrams => What::WrongKey,
                1 if datagrams => What::TooLong,
                2..=4 if !datagrams => What::Write,
                _ => What::Send,
            };
            Message {
                what,
                len: if what == What::TooLong {
                    own + 1
                } else {
                    len.min(SLOT - GRH_LEN)
                },
                queue: 1 + rng.index(2),
            }
        };
        (0..n).map(|_| message(rng)).collect()
    }

    fn service_qp(&mut self, h: usize, qp_type: QpType, shared: bool) -> Result<Qpn, String> {
        let s = &self.services().hosts[h];
        let (cq, srq) = (s.cq.clone(), s.queues[0].clone());
        let domain = s.domain.clone();
        let host = &mut self.hosts[h];
        let qpn = host.port.create_qp(QpInit {
            pd: host.pd,
            qp_type,
            send_cq: cq.clone(),
            recv_cq: cq,
            caps: caps(),
            signal_all: true,
            srq: shared.then_some(srq),
            xrcd: (qp_type == QpType::XrcTgt).then_some(domain),
        });
        qpn.map_err(|e| format!("host {h}: no {qp_type:?} queue pair: {e}"))
    }

    /// Queue pairs of a host that take datagrams.
    pub(crate) fn datagram_qpns(&self, h: usize) -> Vec<Qpn> {
        let flows = self.services.iter().flat_map(|s| &s.flows);
        let to = flows.filter(|f| !f.dead && f.to == h && f.qp_type == QpType::Ud);
        to.map(|f| f.qpns[1]).collect()
    }

    /// Queue pairs of reliable flows: host, number, the peer's host, type and path MTU of each end.
    pub(crate) fn reliable_flows(&self) -> impl Iterator<Item = (usize, Qpn, usize, QpType, Mtu)> {
        let flows = self
            .services
            .iter()
            .flat_map(|s| &s.flows)
            .filter(|f| !f.dead && f.is_reliable());
        flows.flat_map(|f| {
            let mtu = self.hosts[f.from].plan.mtu.min(self.hosts[f.to].plan.mtu);
            [
                (f.from, f.qpns[0], f.to, f.qp_type, mtu),
                (f.to, f.qpns[1], f.from, f.qp_type, mtu),
            ]
        })
    }

    /// RESET to RTS, with what each step needs.
    #[allow(clippy::too_many_arguments, reason = "what a path consists of")]
    fn bring_up(
        &mut self,
        h: usize,
        qpn: Qpn,
        qp_type: QpType,
        remote: std::net::IpAddr,
        dest: Qpn,
        psn: Psn,
        mtu: Mtu,
    ) -> Check {
        let now = self.instant();
        let host = &mut self.hosts[h];
        let local = host.plan.addr;
        let steps = [
            (QpState::Reset, QpState::Init),
            (QpState::Init, QpState::Rtr),
            (QpState::Rtr, QpState::Rts),
        ];
        for (from, to) in steps {
            let step = legal::transition(qp_type, from, to).ok_or("no such transition")?;
            let has = |m| step.required.contains(m);
            let attr = QpAttr {
                state: Some(to),
                pkey_index: has(M::PKEY_INDEX).then_some(0),
                port: has(M::PORT).then_some(1),
                access: has(M::ACCESS_FLAGS).then_some(AccessFlags::REMOTE_WRITE),
                qkey: has(M::QKEY).then_some(QKEY.0),
                av: has(M::AV).then_some(AddressVector::new(local, remote)),
                path_mtu: has(M::PATH_MTU).then_some(mtu),
                dest_qpn: has(M::DEST_QPN).then_some(dest),
                rq_psn: has(M::RQ_PSN).then_some(psn),
                max_dest_rd_atomic: has(M::MAX_DEST_RD_ATOMIC).then_some(1),
                min_rnr_timer: has(M::MIN_RNR_TIMER).then_some(RnrTimer::new(8)),
                // Longer than all partitions of a run together.
                timeout: has(M::TIMEOUT).then_some(17),
                retry_cnt: has(M::RETRY_CNT).then_some(7),
                rnr_retry: has(M::RNR_RETRY).then_some(7),
                sq_psn: has(M::SQ_PSN).then_some(psn),
                max_rd_atomic: has(M::MAX_RD_ATOMIC).then_some(1),
                ..QpAttr::default()
            };
            let moved = host.port.modify_qp(now, qpn, &attr);
            moved.map_err(|e| format!("host {h}: {qp_type:?} to {to:?}: {e}"))?;
        }
        Ok(())
    }

    /// Posts the receives of a flow that has its own: as many as messages.
    fn post_own(&mut self, flow: usize) -> Check {
        let now = self.instant();
        let f = &self.services().flows[flow];
        let (h, qpn, n, buffers) = (f.to, f.qpns[1], f.messages.len(), f.buffers.clone());
        for slot in 0..n {
            let sges = [
                pieces(&buffers, slot * SLOT, 100),
                pieces(&buffers, slot * SLOT + 100, SLOT - 100),
            ];
            let wr = RecvWr {
                wr_id: RECV | slot as u64,
                sges: &sges,
            };
            let posted = self.hosts[h].port.post_recv(now, qpn, &[wr]);
            posted.map_err(|(_, e)| format!("flow {flow}: receive refused: {e}"))?;
        }
        Ok(())
    }

    /// Programs give buffers when they see completions. A broken message of UC may hold the last one of a queue, and then no
    /// completion comes: the others that wait for the queue would do so for ever.
    pub(crate) fn wake_services(&mut self) {
        let Some(services) = &self.services else { return };
        let empty = |s: &Shared| s.queues.iter().any(|q| q.is_empty());
        let starved: Vec<bool> = services.hosts.iter().map(empty).collect();
        for h in (0..starved.len()).filter(|h| starved[*h]) {
            self.want_buffers(h);
        }
    }

    fn want_buffers(&mut self, h: usize) {
        let lag = if self.quiet { 20 * US } else { MS };
        let boot = self.hosts[h].boot;
        let s = self.services();
        if !s.hosts[h].scheduled {
            s.hosts[h].scheduled = true;
            let after = s.rng.range(0, lag);
            self.schedule(after, Event::Replenish { host: h, boot });
        }
    }

    /// Gives buffers to a host's shared queues, and arms their limits now and then.
    pub(crate) fn replenish(&mut self, h: usize, boot: u32) -> Check {
        if self.hosts[h].boot != boot || !self.hosts[h].alive {
            return Ok(());
        }
        let Services { rng, hosts, .. } = self.services();
        let s = &mut hosts[h];
        s.scheduled = false;
        for (i, queue) in s.queues.iter().enumerate() {
            let wanted = rng.range(1, 8) as usize;
            while queue.len() < wanted
                && let Some(slot) = s.free.pop()
            {
                let wr_id = RECV | 1 << 62 | (i as u64) << 56 | s.next << 8 | slot as u64;
                s.next += 1;
                let sges = [pieces(&s.buffers, slot * SLOT, SLOT)];
                let posted = queue.post(&RecvWr { wr_id, sges: &sges });
                posted.map_err(|e| format!("host {h}: shared receive refused: {e}"))?;
                s.outstanding.insert(wr_id, slot);
            }
            if rng.chance(0.3) {
                let limit = rng.range(0, SHARED as u64) as u32;
                let armed = queue.modify(&SrqModify {
                    max_wr: None,
                    limit: Some(limit),
                });
                let passed = armed.map_err(|e| format!("host {h}: limit refused: {e}"))?;
                if passed.is_some() != ((queue.len() as u32) < limit) {
                    return Err(format!(
                        "host {h}: limit {limit} of {} receives: {passed:?}",
                        queue.len()
                    ));
                }
                s.armed[i] = limit > 0 && passed.is_none();
            }
        }
        self.service(h)
    }

    pub(crate) fn on_srq_event(&mut self, h: usize, event: AsyncEvent) -> Check {
        let AsyncEvent::SrqLimitReached(handle) = event else {
            return Err(format!("host {h}: {event:?}"));
        };
        let armed = self.services().hosts[h].armed.get_mut(handle as usize);
        match armed.is_some_and(std::mem::take) {
            true => Ok(()),
            false => Err(format!("host {h}: queue {handle} reached a limit that is not armed")),
        }
    }

    /// Posts some of a flow's messages.
    pub(crate) fn serve(&mut self, flow: usize) -> Check {
        let now = self.instant();
        let [a, b] = [0, 1].map(|end| {
            let f = &self.services.as_ref().expect("an extended run").flows[flow];
            self.hosts[[f.from, f.to][end]].plan.addr
        });
        let Some(services) = &mut self.services else {
            return Ok(());
        };
        let burst = services.rng.range(1, 5);
        let pause = services.rng.range(US, 2 * MS);
        let f = &mut services.flows[flow];
        if f.dead {
            return Ok(());
        }
        let h = f.from;
        for _ in 0..burst {
            if f.posted == f.messages.len() || f.posted - f.completed + 1 >= caps().max_send_wr as usize {
                break;
            }
            let (seq, m) = (f.posted, &f.messages[f.posted]);
            let imm = (flow << 16 | seq) as u32;
            let sges = [pieces(&f.source, seq * SLOT, m.len)];
            let op = match m.what {
                What::Write => SendOp::WriteWithImm(
                    RemoteAddr {
                        addr: f.target.addr() + (seq * SLOT) as u64,
                        rkey: f.target.rkey(),
                    },
                    imm,
                ),
                _ => SendOp::SendWithImm(imm),
            };
            let target = match f.qp_type {
                QpType::Ud => Target::Datagram(Datagram {
                    av: AddressVector::new(a, b),
                    qpn: f.qpns[1],
                    qkey: if m.what == What::WrongKey { QKey(1) } else { QKEY },
                }),
                QpType::XrcIni => Target::Srq(Srqn::new(100 + m.queue as u32)),
                _ => Target::Peer,
            };
            let wr = SendWr {
                wr_id: (flow as u64) << 32 | seq as u64,
                op,
                flags: SendFlags::SIGNALED,
                payload: Payload::Sges(&sges),
            };
            let posted = self.hosts[h]
                .port
                .post_requests(now, f.qpns[0], &[SendRequest { wr, target }]);
            posted.map_err(|(_, e)| format!("flow {flow}: message {seq} refused: {e}"))?;
            f.posted += 1;
            self.stats.operations += 1;
        }
        if f.posted < f.messages.len() {
            self.schedule(pause, Event::Serve { flow });
        }
        self.service(h)
    }

    /// Takes what has completed in a host's queue of the services.
    pub(crate) fn poll_services(&mut self, h: usize) -> Check {
        let Some(services) = &self.services else { return Ok(()) };
        let mut out = Vec::new();
        let polled = services.hosts[h].cq.poll(&mut out, usize::MAX);
        polled.map_err(|_| format!("host {h}: the services' completion queue overflowed"))?;
        for wc in &out {
            self.trace.completed(self.now, h, wc);
            self.stats.completions += 1;
            let checked = match wc.wr_id & RECV {
                0 => self.on_service_sent(h, wc),
                _ => self.on_service_received(h, wc),
            };
            checked.map_err(|text| format!("host {h}: {text}: {wc:?}"))?;
        }
        Ok(())
    }

    fn on_service_sent(&mut self, h: usize, wc: &Completion) -> Check {
        let (flow, seq) = ((wc.wr_id >> 32) as usize, wc.wr_id as u32 as usize);
        let services = self.services();
        let f = services.flows.get_mut(flow).ok_or("a send of no flow")?;
        if f.from != h || f.qpns[0] != wc.qpn || f.dead {
            return Err(format!("a send of flow {flow} completed where it was not posted"));
        }
        if seq != f.completed {
            return Err(format!("message {seq} completed, but {} is the next", f.completed));
        }
        let opcode = match f.messages[seq].what {
            What::Write => WcOpcode::RdmaWrite,
            _ => WcOpcode::Send,
        };
        if !wc.is_ok() || wc.opcode != opcode {
            return Err(format!("message {seq} of flow {flow} went wrong"));
        }
        f.completed += 1;
        if f.is_reliable() && f.arrived.len() < f.completed && !f.dead {
            // Its receiver may not have been looked at yet, but the completion is there.
            let to = f.to;
            self.poll_services(to)?;
            let f = &self.services().flows[flow];
            if f.arrived.len() < f.completed {
                return Err(format!("message {seq} of flow {flow} completed, but never arrived"));
            }
        }
        self.stats.succeeded += 1;
        Ok(())
    }

    fn on_service_received(&mut self, h: usize, wc: &Completion) -> Check {
        let from_shared = wc.wr_id >> 62 & 1 == 1;
        let clean = self.is_clean();
        let Services { flows, hosts, .. } = self.services();
        let s = &mut hosts[h];
        let owner = flows.iter().position(|f| f.to == h && f.qpns[1] == wc.qpn);
        let flow = owner.ok_or("a receive of no flow")?;
        let f = &mut flows[flow];
        if from_shared != (f.shared || f.qp_type == QpType::XrcIni) {
            return Err("a receive of the wrong queue".into());
        }
        let mut queue = None;
        let (buffers, slot) = if from_shared {
            let slot = s.outstanding.remove(&wc.wr_id);
            let slot = slot.ok_or("a shared receive that is not outstanding (twice?)")?;
            s.free.push(slot);
            queue = Some((wc.wr_id >> 56 & 3) as usize);
            (&s.buffers, slot)
        } else {
            (&f.buffers, (wc.wr_id & !RECV) as usize)
        };
        if !wc.is_ok() {
            // A broken message gives its shared receive back (class E); nothing else fails.
            let broken = f.qp_type == QpType::Uc && f.shared && wc.status == WcStatus::RemoteInvalidRequestError;
            self.want_buffers(h);
            return if broken { Ok(()) } else { Err("a receive failed".into()) };
        }
        let (named, seq) = ((wc.imm >> 16) as usize, (wc.imm & 0xffff) as usize);
        let m = f.messages.get(seq).filter(|_| named == flow && seq < f.posted);
        let m = m.ok_or("a message that nobody has sent")?;
        let expected = if f.qp_type == QpType::XrcIni { m.queue } else { 0 };
        if queue.is_some_and(|q| q != expected) {
            return Err(format!("message {seq} of flow {flow} came to queue {queue:?}: {m:?}"));
        }
        check_arrival(f, flow, seq, m, wc, buffers, slot)?;
        // A network that doubles or swaps packets may do so with messages of one packet.
        let next = match f.qp_type {
            QpType::Rc | QpType::XrcIni => seq == f.arrived.len(),
            QpType::Uc => !clean || f.arrived.last().is_none_or(|last| *last < seq),
            _ => !clean || !f.arrived.contains(&seq),
        };
        if !next {
            return Err(format!("flow {flow}: message {seq} after {:?}", f.arrived.last()));
        }
        if !from_shared && slot != f.arrived.len() {
            return Err(format!(
                "flow {flow}: receive {slot} was used after {} others",
                f.arrived.len()
            ));
        }
        f.arrived.push(seq);
        self.stats.messages += 1;
        self.stats.service_messages += 1;
        if from_shared {
            self.want_buffers(h);
        }
        Ok(())
    }

    /// Whether the network neither doubles nor swaps packets.
    fn is_clean(&self) -> bool {
        let f = &self.scenario.faults;
        f.duplicate == 0.0 && f.reorder == 0.0
    }

    /// Ends the flows from and to a host that dies.
    pub(crate) fn end_services(&mut self, dying: usize) {
        let now = self.instant();
        let Some(services) = &mut self.services else { return };
        for f in services.flows.iter_mut().filter(|f| !f.dead) {
            if f.from != dying && f.to != dying {
                continue;
            }
            f.dead = true;
            let (other, end) = if f.from == dying { (f.to, 1) } else { (f.from, 0) };
            // With whatever it was doing.
            let _ = self.hosts[other].port.destroy_qp(now, f.qpns[end]);
            if end == 1 {
                services.hosts[other].lost += 1;
            }
        }
    }

    /// Makes new shared queues for a host that is back.
    pub(crate) fn renew_services(&mut self, h: usize) {
        if self.services.is_some() {
            let fresh = self.shared(h);
            self.services().hosts[h] = fresh;
        }
    }

    /// Whether all is done, and what must arrive has: senders of UC are done while their last packets are on the way.
    pub(crate) fn services_done(&self) -> bool {
        let arrived = |f: &Flow| f.dead || !self.is_sure(f) || f.arrived.len() == f.expected();
        let services = self.services.as_ref();
        services.is_none_or(|s| s.flows.iter().all(|f| f.is_done() && arrived(f)))
    }

    /// Whether every message of a flow arrives.
    fn is_sure(&self, f: &Flow) -> bool {
        f.is_reliable() || (!f.shared && self.delivers(f.from, f.to))
    }

    /// At the end: reliable flows have arrived, and every shared receive is accounted for.
    pub(crate) fn check_services(&self) -> Check {
        let Some(services) = &self.services else { return Ok(()) };
        for (i, f) in services.flows.iter().enumerate().filter(|(_, f)| !f.dead) {
            let all = f.messages.len();
            let expected = f.expected();
            if !f.is_done() || self.is_sure(f) && f.arrived.len() != expected {
                let (n, posted) = (f.arrived.len(), f.posted);
                return Err(format!(
                    "flow {i} ({:?}): {n} of {expected} messages arrived, {posted} of {all} posted",
                    f.qp_type
                ));
            }
        }
        for (h, s) in services.hosts.iter().enumerate() {
            let waiting: usize = s.queues.iter().map(|q| q.len()).sum();
            // Unfinished messages hold one each.
            let unfinished = services
                .flows
                .iter()
                .filter(|f| !f.dead && f.to == h && f.shared && f.qp_type == QpType::Uc);
            let most = waiting + unfinished.count() + s.lost;
            let n = s.outstanding.len();
            if n < waiting || n > most {
                return Err(format!(
                    "host {h}: {n} shared receives are out, {waiting} of them wait, {most} at most"
                ));
            }
            let buffers: HashSet<_> = s.outstanding.values().collect();
            if buffers.len() != n || n + s.free.len() != QUEUES * SHARED {
                return Err(format!("host {h}: {n} shared receives, {} buffers free", s.free.len()));
            }
        }
        Ok(())
    }

    /// Whether everything that was sent between two hosts has arrived in order.
    fn delivers(&self, from: usize, to: usize) -> bool {
        let quiet = self.scenario.disturbances == 0 && self.net_stats.overflowed == 0 && self.net_stats.corrupted == 0;
        quiet && self.is_clean() && !self.lossy(from, to) && self.net_stats.lost == 0
    }
}

/// Compares a message with what must have come.
fn check_arrival(
    f: &Flow,
    flow: usize,
    seq: usize,
    m: &Message,
    wc: &Completion,
    buffers: &Region,
    slot: usize,
) -> Check {
    let (head, flags, opcode) = match (f.qp_type, m.what) {
        (_, What::WrongKey | What::TooLong) => return Err(format!("message {seq} of flow {flow} must not arrive")),
        (QpType::Ud, _) => (GRH_LEN, WcFlags::GRH | WcFlags::WITH_IMM, WcOpcode::Recv),
        (_, What::Write) => (0, WcFlags::WITH_IMM, WcOpcode::RecvRdmaWithImm),
        _ => (0, WcFlags::WITH_IMM, WcOpcode::Recv),
    };
    let right = wc.byte_len as usize == head + m.len && wc.flags == flags && wc.opcode == opcode;
    if !right || (f.qp_type == QpType::Ud && wc.src_qp != f.qpns[0]) {
        return Err(format!("message {seq} of flow {flow} ({m:?}) arrived otherwise"));
    }
    let mut actual = vec![0; m.len];
    let read = match m.what {
        What::Write => f.target.read(seq * SLOT, &mut actual),
        _ => buffers.read(slot * SLOT + head, &mut actual),
    };
    read.map_err(|e| e.to_string())?;
    match actual == content(flow, seq, m.len) {
        true => Ok(()),
        false => Err(format!("message {seq} of flow {flow} has wrong bytes")),
    }
}
