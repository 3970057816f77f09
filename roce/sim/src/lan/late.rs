//! A provider that takes its time, as hardware does: to move a queue pair to error, until when packets still arrive, and to take a
//! key back.

use core::net::{IpAddr, SocketAddr};
use std::collections::VecDeque;

use roce_port::fabric::{Fabric, Ports};
use roce_verbs::{
    Completion, Instant, Qpn, RecvWr, SendWr, WcOpcode,
    provider::{
        CmRef, ConnParams, CqId, DeviceCaps, DeviceIx, Event, GrantOf, Granted, KeyId, KeyKind, MrId, MrInfo, PdId,
        Provider, QpId, QpSpec, Registration, RejectReason, Revoked, VerbsError,
    },
    wr::PostError,
};

use crate::{Check, Rng};

/// Call that is carried out later.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Later {
    Drain(QpId),
    Disconnect(CmRef),
}

/// How a host's provider differs from the loop's own.
#[derive(Clone, Copy, Debug)]
pub struct LagPlan {
    /// A drain, and taking a key back by a work request, take so long at most, nanoseconds.
    pub most: u64,
    /// Only memory windows of type 1 are supported.
    pub type_1_only: bool,
}

/// Calls that a host's provider carries out later, in their order.
#[derive(Debug)]
pub struct Lag {
    most: u64,
    caps: Vec<DeviceCaps>,
    rng: Rng,
    waiting: Vec<(Instant, Later)>,
    /// Completions that nobody sees before their time; of a send queue in their order.
    held: VecDeque<(Instant, QpId, Completion)>,
    /// Queue pairs that were drained while a key was being taken back by them.
    pub overtaken: u64,
    /// A rule that was broken.
    broken: Option<&'static str>,
}

impl Lag {
    /// Returns it for these devices.
    pub fn new(plan: LagPlan, devices: &[DeviceCaps], rng: Rng) -> Self {
        let mut caps = devices.to_vec();
        for caps in &mut caps {
            caps.window_2 &= !plan.type_1_only;
        }
        Self {
            most: plan.most,
            caps,
            rng,
            waiting: Vec::new(),
            held: VecDeque::new(),
            overtaken: 0,
            broken: None,
        }
    }

    /// Whether the machines have kept to the rules.
    pub fn check(&mut self) -> Check {
        self.broken.take().map_or(Ok(()), |what| Err(what.into()))
    }

    /// When something is to be done.
    pub fn next_timeout(&self) -> Option<Instant> {
        let held = self.held.iter().map(|(at, ..)| *at);
        self.waiting.iter().map(|(at, _)| *at).chain(held).min()
    }

    /// Nothing of the past counts.
    pub fn clear(&mut self) {
        self.waiting.clear();
        self.held.clear();
    }

    fn hold(&mut self, now: Instant, qp: QpId, wc: Completion) {
        let takes_back = wc.is_ok() && matches!(wc.opcode, WcOpcode::LocalInvalidate | WcOpcode::BindWindow);
        let after = if takes_back { self.rng.range(0, self.most) } else { 0 };
        let at = Instant::from_nanos(now.as_nanos() + after);
        let before = self.held.iter().rfind(|(_, of, wc)| *of == qp && !is_receive(wc));
        let at = match before {
            Some((before, ..)) if !is_receive(&wc) => at.max(*before),
            _ => at,
        };
        self.held.push_back((at, qp, wc));
    }

    /// Everything of a queue pair is to be seen.
    fn release(&mut self, now: Instant, qp: QpId) {
        let early = self.held.iter_mut().filter(|(at, of, _)| *of == qp && *at > now);
        let early: Vec<_> = early.map(|(at, ..)| *at = now).collect();
        self.overtaken += u64::from(!early.is_empty());
    }

    fn add(&mut self, now: Instant, what: Later) {
        let after = self.rng.range(0, self.most);
        // Not before what was asked for earlier.
        let at = Instant::from_nanos(now.as_nanos() + after);
        let at = self.waiting.iter().map(|(at, _)| *at).chain([at]).max().unwrap_or(at);
        self.waiting.push((at, what));
    }
}

fn is_receive(wc: &Completion) -> bool {
    matches!(wc.opcode, WcOpcode::Recv | WcOpcode::RecvRdmaWithImm)
}

/// Provider over a `Fabric`, with delays.
pub struct Late<'a, P> {
    fabric: &'a mut Fabric<P>,
    lag: &'a mut Lag,
    now: Instant,
}

impl<'a, P: Ports> Late<'a, P> {
    /// Creates a provider, and carries out the calls that are due.
    pub fn new(fabric: &'a mut Fabric<P>, lag: &'a mut Lag, now: Instant) -> Self {
        let mut late = Self { fabric, lag, now };
        late.run(|_, at| at <= now);
        late
    }

    fn run(&mut self, which: impl Fn(&Later, Instant) -> bool) {
        let (now, rest): (Vec<_>, Vec<_>) = self.lag.waiting.drain(..).partition(|(at, what)| which(what, *at));
        self.lag.waiting = rest;
        for (_, what) in now {
            match what {
                Later::Drain(qp) => {
                    self.lag.release(self.now, qp);
                    self.fabric.drain(qp);
                }
                Later::Disconnect(cm) => self.fabric.cm_disconnect(cm),
            }
        }
    }
}

impl<P: Ports> Provider for Late<'_, P> {
    fn drain(&mut self, qp: QpId) {
        match self.lag.most {
            0 => self.fabric.drain(qp),
            _ => self.lag.add(self.now, Later::Drain(qp)),
        }
    }

    fn destroy_qp(&mut self, qp: QpId) {
        self.lag.waiting.retain(|(_, what)| *what != Later::Drain(qp));
        self.lag.held.retain(|(_, of, _)| *of != qp);
        self.fabric.destroy_qp(qp);
    }

    fn cm_disconnect(&mut self, id: CmRef) {
        match self.lag.most {
            0 => self.fabric.cm_disconnect(id),
            _ => self.lag.add(self.now, Later::Disconnect(id)),
        }
    }

    fn cm_destroy(&mut self, id: CmRef) {
        self.run(|what, _| *what == Later::Disconnect(id));
        self.fabric.cm_destroy(id);
    }

    fn devices(&self) -> &[DeviceCaps] {
        &self.lag.caps
    }

    fn alloc_pd(&mut self, device: DeviceIx) -> Result<PdId, VerbsError> {
        self.fabric.alloc_pd(device)
    }

    fn free_pd(&mut self, pd: PdId) {
        self.fabric.free_pd(pd);
    }

    fn register(&mut self, pd: PdId, what: &Registration) -> Result<MrInfo, VerbsError> {
        self.fabric.register(pd, what)
    }

    fn deregister(&mut self, mr: MrId) {
        self.fabric.deregister(mr);
    }

    fn alloc_key(&mut self, pd: PdId, kind: KeyKind) -> Result<KeyId, VerbsError> {
        self.fabric.alloc_key(pd, kind)
    }

    fn free_key(&mut self, key: KeyId) {
        self.fabric.free_key(key);
    }

    fn create_cq(&mut self, device: DeviceIx, entries: u32) -> Result<CqId, VerbsError> {
        self.fabric.create_cq(device, entries)
    }

    fn destroy_cq(&mut self, cq: CqId) {
        self.fabric.destroy_cq(cq);
    }

    fn create_qp(&mut self, spec: &QpSpec) -> Result<QpId, VerbsError> {
        self.fabric.create_qp(spec)
    }

    fn qpn(&self, qp: QpId) -> Option<Qpn> {
        Provider::qpn(self.fabric, qp)
    }

    fn post_send(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        self.fabric.post_send(qp, wrs)
    }

    fn post_recv(&mut self, qp: QpId, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        self.fabric.post_recv(qp, wrs)
    }

    fn grant_list(&mut self, qp: QpId, key: KeyId, pieces: &[GrantOf]) -> Result<Granted, PostError> {
        self.fabric.grant_list(qp, key, pieces)
    }

    fn grant(&mut self, qp: QpId, key: KeyId, grant: &GrantOf, wr_id: u64) -> Result<Granted, PostError> {
        if self.fabric.opens(key) {
            // Since its request ended.
            self.lag.broken = Some("a key is granted that still opens memory");
        }
        self.fabric.grant(qp, key, grant, wr_id)
    }

    fn revoke(&mut self, qp: QpId, key: KeyId, wr_id: u64) -> Result<Revoked, PostError> {
        self.fabric.revoke(qp, key, wr_id)
    }

    fn close_key(&mut self, key: KeyId) {
        self.fabric.close_key(key);
    }

    fn access_violated(&self, qp: QpId) -> bool {
        self.fabric.access_violated(qp)
    }

    fn cm_listen(&mut self, addr: SocketAddr, backlog: u32) -> Result<CmRef, VerbsError> {
        self.fabric.cm_listen(addr, backlog)
    }

    fn cm_resolve(&mut self, src: Option<IpAddr>, dst: SocketAddr) -> Result<CmRef, VerbsError> {
        self.fabric.cm_resolve(src, dst)
    }

    fn cm_connect(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        self.fabric.cm_connect(id, qp, params)
    }

    fn cm_accept(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        self.fabric.cm_accept(id, qp, params)
    }

    fn cm_reject(&mut self, id: CmRef, reason: RejectReason, private_data: &[u8]) -> Result<(), VerbsError> {
        self.fabric.cm_reject(id, reason, private_data)
    }

    fn cm_addrs(&self, id: CmRef) -> Option<(SocketAddr, Option<SocketAddr>)> {
        self.fabric.cm_addrs(id)
    }

    fn poll_completions(&mut self, out: &mut Vec<(QpId, Completion)>, max: usize) -> Result<usize, VerbsError> {
        if self.lag.most == 0 {
            return self.fabric.poll_completions(out, max);
        }
        let mut new = Vec::new();
        self.fabric.poll_completions(&mut new, usize::MAX)?;
        for (qp, wc) in new {
            self.lag.hold(self.now, qp, wc);
        }
        let (now, before) = (self.now, out.len());
        let held = core::mem::take(&mut self.lag.held);
        for (at, qp, wc) in held {
            match at <= now && out.len() < before + max {
                true => out.push((qp, wc)),
                false => self.lag.held.push_back((at, qp, wc)),
            }
        }
        Ok(out.len() - before)
    }

    fn poll_event(&mut self) -> Option<Event> {
        self.fabric.poll_event()
    }
}
