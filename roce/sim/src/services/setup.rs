//! Queue pairs and shared receive queues of the other services.

use std::collections::HashMap;

use roce_port::QpInit;
use roce_qp::{CompletionQueue, GRH_LEN, SharedReceiveQueue, SrqConfig, XrcDomain};
use roce_verbs::{
    AccessFlags, AddressVector, Mtu, Psn, QpAttr, QpType, Qpn, RecvWr, RnrTimer, SrqAttr, SrqModify, SrqType, Srqn,
};

use super::{Flow, Message, QKEY, QUEUES, RECV, SHARED, SLOT, Services, Shared, What, caps, content, pieces};
use crate::{
    rng::Rng,
    runner::Check,
    scenario::{MS, US},
    world::World,
};

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
            self.schedule(after, "serve", move |w| w.serve(flow));
        }
        self.services().rng = rng;
        for h in 0..self.hosts.len() {
            self.want_buffers(h);
        }
        Ok(())
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
        self.bring_up((to, qpns[1], peer_type), (from, qpns[0]), psn, mtu)?;
        self.bring_up((from, qpns[0], qp_type), (to, qpns[1]), psn, mtu)?;
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

    /// Brings one end of a flow up: from RESET to RTS.
    fn bring_up(&mut self, end: (usize, Qpn, QpType), peer: (usize, Qpn), psn: Psn, mtu: Mtu) -> Check {
        let now = self.instant();
        let (h, qpn, qp_type) = end;
        let av = AddressVector::new(self.addr(h), self.addr(peer.0));
        let way = QpAttr {
            access: Some(AccessFlags::REMOTE_WRITE),
            qkey: Some(QKEY.0),
            rq_psn: Some(psn),
            sq_psn: Some(psn),
            max_dest_rd_atomic: Some(1),
            max_rd_atomic: Some(1),
            min_rnr_timer: Some(RnrTimer::new(8)),
            // Longer than all partitions of a run together.
            timeout: Some(17),
            ..QpAttr::to_rts(av, mtu, peer.1)
        };
        for attr in way.steps(qp_type) {
            let moved = self.hosts[h].port.modify_qp(now, qpn, &attr);
            moved.map_err(|e| format!("host {h}: {qp_type:?} to {:?}: {e}", attr.state))?;
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

    pub(super) fn want_buffers(&mut self, h: usize) {
        let lag = if self.quiet { 20 * US } else { MS };
        let boot = self.hosts[h].boot;
        let s = self.services();
        if !s.hosts[h].scheduled {
            s.hosts[h].scheduled = true;
            let after = s.rng.range(0, lag);
            self.schedule(after, "replenish", move |w| w.replenish(h, boot));
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
}
