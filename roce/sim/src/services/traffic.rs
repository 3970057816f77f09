//! Messages of the other services, and checks of what arrives.

use std::collections::HashSet;

use roce_verbs::{
    AddressVector, AsyncEvent, Completion, Datagram, Mtu, Payload, QKey, QpType, Qpn, RemoteAddr, SendFlags, SendOp,
    SendRequest, SendWr, Srqn, Target, WcOpcode, WcStatus,
};

use super::{Flow, QKEY, QUEUES, RECV, SHARED, SLOT, Services, Shared, What, caps, check_arrival, pieces};
use crate::{
    runner::Check,
    scenario::{MS, US},
    world::World,
};

impl World {
    pub(super) fn services(&mut self) -> &mut Services {
        self.services.as_mut().expect("an extended run")
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
            self.schedule(pause, "serve", move |w| w.serve(flow));
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
