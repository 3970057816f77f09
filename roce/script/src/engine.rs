//! Engine as the host: a port with one queue pair, in virtual time.

use core::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};
use std::{collections::VecDeque, sync::Arc};

use roce_bth::{Psn, Qpn, RKey, RnrTimer};
use roce_port::{Port, PortConfig, QpInit, RxMeta, TxBatch, TxConfig};
use roce_qp::{CompletionQueue, Counters, Failure};
use roce_verbs::mem::{MemError, MemoryTable, PdHandle, Region};
use roce_verbs::{
    AccessFlags, AddressVector, AsyncEvent, Completion, Instant, Mtu, Payload, QpAttr, QpCaps, QpState, RecvWr,
    RemoteAddr, SendFlags, SendOp, SendWr, Sge, WcFlags,
};

use crate::{
    host::{Completed, Datagram, Host, NextIds, Stop, addresses},
    memory::{Area, Memory},
    pattern,
    script::{Post, PostOp, RegionSpec, Setup},
    value::Place,
};

/// Queue pair of the script in the first run; the next run has the next one.
const FIRST_QPN: u32 = 0x51;
/// Start of virtual time.
const START: Instant = Instant::from_nanos(1_000_000_000);
/// Largest number of timers that run within one step: a script that needs more does not end in a reasonable time.
const MAX_TIMERS: u32 = 1_000_000;

/// Send and receive completion queue.
#[derive(Debug)]
struct Queue {
    cq: Arc<CompletionQueue>,
    taken: VecDeque<Completion>,
}

impl Queue {
    fn new(handle: u32) -> Self {
        Self {
            cq: CompletionQueue::new(handle, 1 << 17, None),
            taken: VecDeque::new(),
        }
    }

    fn take(&mut self) -> Option<Completion> {
        let mut polled = Vec::new();
        // An overflow is an event of the port.
        let _ = self.cq.poll(&mut polled, usize::MAX);
        self.taken.extend(polled);
        self.taken.pop_front()
    }
}

/// Engine under test.
#[derive(Debug)]
pub(crate) struct Engine<'a> {
    setup: &'a Setup,
    /// Engines that were started before.
    run: u32,
    port: Port,
    mem: Arc<MemoryTable>,
    pd: PdHandle,
    /// Memory behind the regions of `memory`.
    regions: Vec<Arc<Region>>,
    qpn: Qpn,
    script_qpn: Qpn,
    attr: QpAttr,
    memory: Memory,
    sends: Queue,
    receives: Queue,
    /// Memory of receive work requests, by their wr_id.
    buffers: Vec<(u64, Arc<Region>)>,
    next_ids: NextIds,
    batch: TxBatch,
    sent: VecDeque<Datagram>,
    events: VecDeque<AsyncEvent>,
    now: Instant,
}

impl<'a> Engine<'a> {
    /// Creates an engine as the `qp` lines say, so long after the start of the script. Each run has queue pair numbers of its own.
    pub(crate) fn new(setup: &'a Setup, elapsed: Duration, run: u32) -> Result<Self, String> {
        let failed = |e: &dyn core::fmt::Display| format!("the host can't be set up: {e}");
        let [host, script] = addresses(setup.is_v6());
        let mut config = PortConfig::new(vec![host], Mtu::B4096, 0x0200_0000_0000_0001);
        config.reorder = setup.reorder;
        let mut seed = [9; 32];
        seed[..4].copy_from_slice(&run.to_le_bytes());
        let script_qpn = Qpn::new(FIRST_QPN.wrapping_add(run));
        let mem = Arc::new(MemoryTable::new([7; 32], &config.limits));
        let mut port = Port::new(config, mem.clone(), seed);
        let now = START + elapsed;
        port.set_now(now);
        let pd = mem.alloc_pd().map_err(|e| failed(&e))?;
        let regions = allocate(&mem, pd, setup).map_err(|e| failed(&e))?;
        let memory = Memory::new(setup, regions.iter().map(|region| Area::of(region)));
        let (sends, receives) = (Queue::new(1), Queue::new(2));
        let qpn = port.create_qp(QpInit {
            pd,
            qp_type: setup.qp_type,
            send_cq: sends.cq.clone(),
            recv_cq: receives.cq.clone(),
            caps: QpCaps {
                max_send_wr: 1024,
                max_recv_wr: 2048,
                ..QpCaps::default()
            },
            signal_all: true,
            srq: None,
            xrcd: None,
        });
        let gso_off = TxConfig {
            gso: false,
            ..TxConfig::default()
        };
        let mut this = Self {
            setup,
            run,
            port,
            mem,
            pd,
            regions,
            qpn: qpn.map_err(|e| failed(&e))?,
            script_qpn,
            attr: attributes(setup, AddressVector::new(host, script), script_qpn),
            memory,
            sends,
            receives,
            buffers: Vec::new(),
            next_ids: NextIds::new(),
            batch: TxBatch::new(gso_off),
            sent: VecDeque::new(),
            events: VecDeque::new(),
            now,
        };
        this.bring_up().map_err(|e| failed(&e))?;
        Ok(this)
    }

    /// Takes the queue pair to its first state, and posts the receives of the `qp` lines.
    fn bring_up(&mut self) -> Result<(), String> {
        let setup = self.setup;
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            if state as u8 > setup.state as u8 {
                break;
            }
            self.change_state(state)?;
            if state == QpState::Rtr
                && let Some(port) = setup.source_port
            {
                self.port.set_peer_source(self.qpn, port).map_err(|e| e.to_string())?;
            }
        }
        match setup.state {
            QpState::Reset => Ok(()),
            _ => setup.receives.iter().try_for_each(|len| self.post_recv(None, *len)),
        }
    }

    /// Takes out what the port has to send, and runs its jobs.
    fn flush(&mut self) {
        loop {
            self.port.persist_here(self.now);
            let more = self.port.poll_transmit(self.now, &mut self.batch);
            let at = self.elapsed();
            for train in self.batch.trains() {
                let packets = train.packets().enumerate();
                self.sent.extend(packets.map(|(index, bytes)| Datagram {
                    at,
                    src: SocketAddr::new(train.local, train.src_port),
                    dst: train.remote,
                    identification: index as u16,
                    bytes: bytes.to_vec(),
                }));
            }
            let idle = self.batch.is_empty();
            self.batch.clear();
            if idle && !more {
                break;
            }
        }
        self.events.extend(core::iter::from_fn(|| self.port.poll_async_event()));
    }

    /// Lets time go by until `end`, or until `until` is true. Returns whether it is.
    fn run(&mut self, end: Duration, mut until: impl FnMut(&mut Self) -> bool) -> Result<bool, String> {
        let end = START + end;
        for _ in 0..MAX_TIMERS {
            if until(self) {
                return Ok(true);
            }
            let Some(at) = self.port.poll_timeout().filter(|at| *at <= end) else {
                self.now = self.now.max(end);
                self.port.set_now(self.now);
                return Ok(false);
            };
            self.now = self.now.max(at);
            self.port.handle_timeout(self.now);
            self.flush();
        }
        Err(format!("more than {MAX_TIMERS} timers ran during this step"))
    }

    /// Changes the queue pair's state.
    fn change_state(&mut self, to: QpState) -> Result<(), String> {
        let qp_type = self.port.qp(self.qpn).map(|qp| qp.config().qp_type);
        let from = self.port.qp_state(self.qpn);
        let attr = match (to, from, qp_type) {
            // Reports when the send queue is drained.
            (QpState::Sqd, ..) => QpAttr {
                state: Some(to),
                en_sqd_async_notify: Some(true),
                ..QpAttr::default()
            },
            (QpState::Rts, Some(QpState::Sqd | QpState::Sqe), _) | (_, _, None) => QpAttr {
                state: Some(to),
                ..QpAttr::default()
            },
            (_, _, Some(qp_type)) => self.attr.step(qp_type, to),
        };
        let modified = self.port.modify_qp(self.now, self.qpn, &attr);
        self.flush();
        modified.map_err(|e| e.to_string())
    }

    fn post_recv(&mut self, id: Option<u64>, len: usize) -> Result<(), String> {
        let wr_id = self.next_ids.draw(id, true);
        let access = AccessFlags::LOCAL_WRITE;
        let mut sges = Vec::new();
        if len > 0 {
            let region = self.mem.alloc_region(self.pd, len, access).map_err(|e| e.to_string())?;
            sges.push(Sge {
                addr: region.addr(),
                length: len as u32,
                lkey: region.lkey(),
            });
            self.buffers.push((wr_id, region));
        }
        let wr = RecvWr { wr_id, sges: &sges };
        let posted = self.port.post_recv(self.now, self.qpn, &[wr]);
        self.flush();
        posted.map_err(|(_, e)| e.to_string())
    }
}

impl Host for Engine<'_> {
    fn restart(&mut self) -> Result<(), Stop> {
        *self = Self::new(self.setup, self.elapsed(), self.run.wrapping_add(1))?;
        Ok(())
    }

    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn qpn(&self) -> Qpn {
        self.qpn
    }

    fn script_qpn(&self) -> Qpn {
        self.script_qpn
    }

    fn address(&self, named: IpAddr) -> Result<IpAddr, Stop> {
        Ok(named)
    }

    fn is_v6(&self) -> bool {
        self.setup.is_v6()
    }

    fn elapsed(&self) -> Duration {
        self.now.saturating_since(START)
    }

    fn lateness(&self) -> Duration {
        Duration::ZERO
    }

    fn transit(&self) -> Option<Duration> {
        None
    }

    fn settle(&mut self) -> Result<(), Stop> {
        Ok(())
    }

    fn receive(&mut self, datagram: &Datagram) -> Result<(), Stop> {
        let meta = RxMeta {
            identification: Some(datagram.identification),
            ..RxMeta::new(datagram.dst.ip(), datagram.src)
        };
        self.port.handle_datagram(self.now, &meta, &datagram.bytes);
        self.flush();
        Ok(())
    }

    fn wait(&mut self, end: Duration) -> Result<(), Stop> {
        self.run(end, |_| false)?;
        Ok(())
    }

    fn wait_sent(&mut self, end: Duration) -> Result<Option<Datagram>, Stop> {
        self.run(end, |this| !this.sent.is_empty())?;
        Ok(self.sent.pop_front())
    }

    fn wait_completion(&mut self, is_recv: bool, end: Duration) -> Result<Option<Completed>, Stop> {
        let mut taken = None;
        self.run(end, |this| {
            let queue = if is_recv { &mut this.receives } else { &mut this.sends };
            taken = queue.take();
            taken.is_some()
        })?;
        Ok(taken.map(|wc| Completed {
            wr_id: wc.wr_id,
            status: wc.status,
            byte_len: wc.byte_len,
            imm: wc.flags.contains(WcFlags::WITH_IMM).then_some(wc.imm),
        }))
    }

    fn wait_event(&mut self, end: Duration) -> Result<Option<u32>, Stop> {
        self.run(end, |this| !this.events.is_empty())?;
        Ok(self.events.pop_front().map(|event| event.describe().0))
    }

    fn state(&mut self) -> Result<Option<QpState>, Stop> {
        Ok(self.port.qp_state(self.qpn))
    }

    fn counts(&mut self) -> (Counters, Option<Failure>) {
        (self.port.counters().transport, self.port.take_failure(self.qpn))
    }

    fn modify(&mut self, to: QpState) -> Result<(), Stop> {
        Ok(self.change_state(to)?)
    }

    fn revoke(&mut self, index: usize) -> Result<(), Stop> {
        let revoked = self.mem.revoke(&self.regions[index]);
        self.flush();
        Ok(revoked.map_err(|e| e.to_string())?)
    }

    fn post(&mut self, post: &Post) -> Result<(), Stop> {
        if post.op == PostOp::Recv {
            return Ok(self.post_recv(post.id, post.len)?);
        }
        let sges = [Sge {
            addr: self.memory.address(post.local),
            length: post.len as u32,
            lkey: self.regions[post.local.region.unwrap_or(0)].lkey(),
        }];
        let mut flags = SendFlags::SIGNALED;
        flags.set(SendFlags::SOLICITED, post.solicited);
        flags.set(SendFlags::FENCE, post.fence);
        let wr = SendWr {
            wr_id: self.next_ids.draw(post.id, false),
            op: operation(post),
            flags,
            payload: Payload::Sges(if post.len == 0 { &[] } else { &sges }),
        };
        let posted = self.port.post_send(self.now, self.qpn, &[wr]);
        self.flush();
        Ok(posted.map_err(|(_, e)| e.to_string())?)
    }

    fn read(&mut self, place: Place, len: usize) -> Result<Vec<u8>, Stop> {
        let mut bytes = vec![0; len];
        let region = &self.regions[place.region.unwrap_or(0)];
        let at = usize::try_from(place.offset).unwrap_or(usize::MAX);
        region.read(at, &mut bytes).map_err(|e| e.to_string())?;
        Ok(bytes)
    }

    fn received(&mut self, wr_id: u64, len: usize) -> Result<Option<Vec<u8>>, Stop> {
        let mut bytes = vec![0; len];
        let found = self.buffers.iter().rev().find(|(id, _)| *id == wr_id);
        let read = len == 0 || found.is_some_and(|(_, region)| region.read(0, &mut bytes).is_ok());
        Ok(read.then_some(bytes))
    }
}

/// Creates the regions of a script.
fn allocate(mem: &MemoryTable, pd: PdHandle, setup: &Setup) -> Result<Vec<Arc<Region>>, MemError> {
    let create = |(index, spec): (usize, &RegionSpec)| {
        let region = mem.alloc_region(pd, spec.len, spec.access)?;
        let bytes: Vec<u8> = (0..spec.len as u64).map(|at| pattern::of_region(index, at)).collect();
        region.write(0, &bytes).map_err(|_| MemError::Range(spec.len as u64))?;
        Ok(region)
    };
    setup.regions.iter().enumerate().map(create).collect()
}

fn attributes(setup: &Setup, path: AddressVector, peer: Qpn) -> QpAttr {
    QpAttr {
        access: Some(setup.access),
        rq_psn: Some(Psn::new(setup.peer_psn)),
        sq_psn: Some(Psn::new(setup.psn)),
        max_dest_rd_atomic: Some(setup.depth),
        max_rd_atomic: Some(setup.depth),
        min_rnr_timer: Some(RnrTimer::new(setup.rnr_timer)),
        timeout: Some(setup.timeout),
        retry_cnt: Some(setup.retry),
        rnr_retry: Some(setup.rnr_retry),
        ..QpAttr::to_rts(path, setup.mtu, peer)
    }
}

fn operation(post: &Post) -> SendOp {
    let remote = RemoteAddr {
        addr: post.va,
        rkey: RKey(post.rkey),
    };
    match (post.op, post.imm, post.inv) {
        (PostOp::Send | PostOp::Recv, Some(imm), _) => SendOp::SendWithImm(imm),
        (PostOp::Send | PostOp::Recv, None, Some(key)) => SendOp::SendWithInv(RKey(key)),
        (PostOp::Send | PostOp::Recv, None, None) => SendOp::Send,
        (PostOp::Write, Some(imm), _) => SendOp::WriteWithImm(remote, imm),
        (PostOp::Write, None, _) => SendOp::Write(remote),
        (PostOp::Read, ..) => SendOp::Read(remote),
        (PostOp::CompareSwap, ..) => SendOp::CompareSwap {
            remote,
            compare: post.compare,
            swap: post.swap,
        },
        (PostOp::FetchAdd, ..) => SendOp::FetchAdd { remote, add: post.add },
    }
}
