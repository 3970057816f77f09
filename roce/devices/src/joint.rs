//! Two providers as one.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use roce::{
    Completion, ConnParams, PostError, Qpn, RecvWr, RejectReason, SendWr,
    verbs::provider::{
        CmKind, CmRef, CqId, DeviceCaps, DeviceIx, Event, GrantOf, Granted, KeyId, KeyKind, Lent, MrId, MrInfo, PdId,
        Provider, QpId, QpSpec, Registration, Revoked, Slots, VerbsError,
    },
};

/// Who has a provider.
pub trait Half {
    /// To ask.
    fn provider(&self) -> &dyn Provider;
    /// To use.
    fn provider_mut(&mut self) -> &mut dyn Provider;
}

/// Which of the two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// The first.
    A,
    /// The second.
    B,
}

impl Side {
    const fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

/// First slots of an object's number that are the second's, and those that are nobody's but ours. The bits below are the object's
/// number at home.
const SECOND: u32 = 1 << (QpId::SLOT_BITS - 2);
const OWN: u32 = 2 * SECOND;
/// How many ports are tried when any will do.
const PORTS_TRIED: usize = 256;

const FULL: VerbsError = VerbsError::Limit("objects of a loop");
const NOT_TOGETHER: &str = "objects of different devices";

/// A number of one of the two as ours, and back.
trait Numbered: Copy {
    /// `None`: there is no room for so many.
    fn ours(self, side: Side) -> Option<Self>;
    /// `None`: it is neither's.
    fn theirs(self) -> Option<(Side, Self)>;
}

macro_rules! numbered {
    ($($name:ty),*) => {$(
        impl Numbered for $name {
            fn ours(self, side: Side) -> Option<Self> {
                let first = match side {
                    Side::A => 0,
                    Side::B => SECOND,
                };
                (self.slot() < SECOND).then(|| Self::new(self.slot() + first, self.generation()))
            }

            fn theirs(self) -> Option<(Side, Self)> {
                match self.slot() {
                    slot if slot < SECOND => Some((Side::A, self)),
                    slot if slot < OWN => Some((Side::B, Self::new(slot - SECOND, self.generation()))),
                    _ => None,
                }
            }
        }
    )*};
}

numbered!(CmRef, CqId, KeyId, MrId, PdId, QpId);

fn gone(what: &str) -> VerbsError {
    VerbsError::Invalid(format!("no such {what}"))
}

/// Two providers as one, whose devices are those of both: the first's, the second's, and then in the order in which they come.
///
/// Numbers of objects say whose they are. Nothing is copied on the way, and what is posted goes where the queue pair is.
#[derive(Debug)]
pub struct Joint<A, B> {
    a: A,
    b: B,
    caps: Vec<DeviceCaps>,
    /// Whose a device is, and its number there.
    places: Vec<(Side, u16)>,
    /// Listeners of both.
    listeners: Slots<[CmRef; 2]>,
    /// From which of our addresses the way to a peer leads.
    route: fn(IpAddr) -> io::Result<IpAddr>,
    /// Who is asked first for completions and events.
    first: Side,
}

impl<A: Half, B: Half> Joint<A, B> {
    /// Both, which have objects of their own no longer. `route` tells from which of our addresses the way to a peer leads.
    pub fn new(a: A, b: B, route: fn(IpAddr) -> io::Result<IpAddr>) -> Self {
        let mut this = Self {
            a,
            b,
            caps: Vec::new(),
            places: Vec::new(),
            listeners: Slots::default(),
            route,
            first: Side::A,
        };
        this.refresh();
        this
    }

    /// The first.
    pub fn a(&self) -> &A {
        &self.a
    }

    /// The first, to be driven. If it gets another device, [`refresh`](Self::refresh) is to be called.
    pub fn a_mut(&mut self) -> &mut A {
        &mut self.a
    }

    /// The second.
    pub fn b(&self) -> &B {
        &self.b
    }

    /// The second, to be driven. If it gets another device, [`refresh`](Self::refresh) is to be called.
    pub fn b_mut(&mut self) -> &mut B {
        &mut self.b
    }

    /// Both, to be driven. If one gets another device, [`refresh`](Self::refresh) is to be called.
    pub fn halves_mut(&mut self) -> (&mut A, &mut B) {
        (&mut self.a, &mut self.b)
    }

    /// Takes over what the devices have become, and those that are new.
    pub fn refresh(&mut self) {
        for side in [Side::A, Side::B] {
            let known = self.places.iter().filter(|(of, _)| *of == side).count();
            let there = self.of(side).devices().len();
            self.places.extend((known..there).map(|index| (side, index as u16)));
        }
        let caps = |(side, index): &(Side, u16)| self.of(*side).devices()[usize::from(*index)].clone();
        self.caps = self.places.iter().map(caps).collect();
    }

    /// The number that a device of one of the two has here.
    pub fn device(&self, side: Side, device: DeviceIx) -> Option<DeviceIx> {
        let place = self.places.iter().position(|place| *place == (side, device.0));
        place.map(|index| DeviceIx(index as u16))
    }

    fn of(&self, side: Side) -> &dyn Provider {
        match side {
            Side::A => self.a.provider(),
            Side::B => self.b.provider(),
        }
    }

    fn of_mut(&mut self, side: Side) -> &mut dyn Provider {
        match side {
            Side::A => self.a.provider_mut(),
            Side::B => self.b.provider_mut(),
        }
    }

    /// Whose an object is, and its number there.
    fn at<N: Numbered>(&mut self, id: N, what: &str) -> Result<(&mut dyn Provider, Side, N), VerbsError> {
        let (side, id) = id.theirs().ok_or_else(|| gone(what))?;
        Ok((self.of_mut(side), side, id))
    }

    /// A second object, which has to be of the same.
    fn same<N: Numbered>(side: Side, id: N) -> Option<N> {
        id.theirs().filter(|(of, _)| *of == side).map(|(_, id)| id)
    }

    fn device_at(&mut self, device: DeviceIx) -> Result<(&mut dyn Provider, Side, DeviceIx), VerbsError> {
        let place = self.places.get(usize::from(device.0)).copied();
        let (side, index) = place.ok_or_else(|| gone("device"))?;
        Ok((self.of_mut(side), side, DeviceIx(index)))
    }

    /// An object that has just been made, as ours; it is unmade if there is no room for its number.
    fn made<N: Numbered>(
        &mut self,
        side: Side,
        id: N,
        unmake: impl FnOnce(&mut dyn Provider, N),
    ) -> Result<N, VerbsError> {
        id.ours(side).ok_or_else(|| {
            unmake(self.of_mut(side), id);
            FULL
        })
    }

    fn made_mr(&mut self, side: Side, info: MrInfo) -> Result<MrInfo, VerbsError> {
        let id = self.made(side, info.id, |at, mr| at.deregister(mr))?;
        Ok(MrInfo { id, ..info })
    }

    /// Whose a source address is: the first's if it has said so, else the second's if that has it; what nobody names is the first's,
    /// whose devices may have all addresses.
    fn owner(&self, addr: IpAddr) -> Side {
        let addr = addr.to_canonical();
        let has = |side| self.of(side).devices().iter().any(|caps| caps.addrs.contains(&addr));
        match !has(Side::A) && (has(Side::B) || self.of(Side::A).devices().is_empty()) {
            true => Side::B,
            false => Side::A,
        }
    }

    fn listen_at(&mut self, side: Side, addr: SocketAddr, backlog: u32) -> Result<CmRef, VerbsError> {
        let id = self.of_mut(side).cm_listen(addr, backlog)?;
        self.made(side, id, |at, id| at.cm_destroy(id))
    }

    /// Whether one of the two has what can listen at all addresses of a family; IPv6's are IPv4's, too.
    fn serves(&self, side: Side, family: IpAddr) -> bool {
        let devices = self.of(side).devices();
        let has = |caps: &DeviceCaps| caps.addrs.is_empty() || caps.addrs.iter().any(IpAddr::is_ipv4);
        devices.iter().any(|caps| family.is_ipv6() || has(caps))
    }

    /// At all addresses of both, and on one port.
    fn listen_at_both(&mut self, addr: SocketAddr, backlog: u32) -> Result<CmRef, VerbsError> {
        // Those at ports that are free at the first only: it finds another as long as they are there.
        let mut vain = Vec::new();
        let listening = loop {
            let first = match self.listen_at(Side::A, addr, backlog) {
                Ok(first) => first,
                Err(e) => break Err(e),
            };
            let at = self.cm_addrs(first).map_or(addr, |(at, _)| at);
            match self.listen_at(Side::B, at, backlog) {
                Ok(second) => break Ok([first, second]),
                Err(e) => {
                    vain.push(first);
                    let taken = matches!(e, VerbsError::Address(_));
                    if !taken || addr.port() != 0 || vain.len() >= PORTS_TRIED {
                        break Err(e);
                    }
                }
            }
        };
        vain.into_iter().for_each(|id| self.cm_destroy(id));
        let [first, second] = listening?;
        let both = self
            .listeners
            .insert_with(|id: CmRef| (id.slot() < OWN).then_some([first, second]));
        let both = both.ok_or_else(|| {
            self.cm_destroy(first);
            self.cm_destroy(second);
            FULL
        })?;
        Ok(CmRef::new(both.slot() + OWN, both.generation()))
    }

    /// The place of a listener of both.
    fn own(id: CmRef) -> Option<CmRef> {
        (id.slot() >= OWN).then(|| CmRef::new(id.slot() - OWN, id.generation()))
    }

    /// How a listener of one of the two is known outside.
    fn listener(&self, id: CmRef) -> CmRef {
        let found = self.listeners.iter::<CmRef>().find(|(_, both)| both.contains(&id));
        found.map_or(id, |(both, _)| CmRef::new(both.slot() + OWN, both.generation()))
    }

    /// An event as ours. `None` of an object that has no number here.
    fn translated(&mut self, side: Side, event: Event) -> Option<Event> {
        let device = |this: &Self, device| this.device(side, device);
        Some(match event {
            Event::Cm { id, kind } => {
                let Some(ours) = id.ours(side) else {
                    self.of_mut(side).cm_destroy(id);
                    return None;
                };
                let kind = match kind {
                    CmKind::Resolved { device: at } => CmKind::Resolved {
                        device: device(self, at)?,
                    },
                    CmKind::ConnectRequest {
                        listener,
                        device: at,
                        private_data,
                        initiator_depth,
                        responder_resources,
                    } => CmKind::ConnectRequest {
                        listener: self.listener(listener.ours(side)?),
                        device: device(self, at)?,
                        private_data,
                        initiator_depth,
                        responder_resources,
                    },
                    kind => kind,
                };
                Event::Cm { id: ours, kind }
            }
            Event::Drained(qp) => Event::Drained(qp.ours(side)?),
            Event::Async(at, event) => Event::Async(device(self, at)?, event),
            Event::DeviceRemoved(at) => Event::DeviceRemoved(device(self, at)?),
        })
    }

    fn take_completions(
        &mut self,
        side: Side,
        out: &mut Vec<(QpId, Completion)>,
        max: usize,
    ) -> Result<usize, VerbsError> {
        let from = out.len();
        let count = self.of_mut(side).poll_completions(out, max)?;
        if side == Side::B {
            for (qp, _) in &mut out[from..] {
                // What has a queue pair here has a number here.
                *qp = qp.ours(side).unwrap_or(*qp);
            }
        }
        Ok(count)
    }
}

const NO_QP: PostError = PostError::NoQueuePair;
const NO_KEY: PostError = PostError::Invalid("no such key");
const NO_MR: PostError = PostError::Invalid("no such registration");

impl<A: Half, B: Half> Provider for Joint<A, B> {
    fn devices(&self) -> &[DeviceCaps] {
        &self.caps
    }

    fn alloc_pd(&mut self, device: DeviceIx) -> Result<PdId, VerbsError> {
        let (at, side, device) = self.device_at(device)?;
        let pd = at.alloc_pd(device)?;
        self.made(side, pd, |at, pd| at.free_pd(pd))
    }

    fn free_pd(&mut self, pd: PdId) {
        if let Ok((at, _, pd)) = self.at(pd, "") {
            at.free_pd(pd);
        }
    }

    fn register(&mut self, pd: PdId, what: &Registration) -> Result<MrInfo, VerbsError> {
        let (at, side, pd) = self.at(pd, "protection domain")?;
        let info = at.register(pd, what)?;
        self.made_mr(side, info)
    }

    fn deregister(&mut self, mr: MrId) {
        if let Ok((at, _, mr)) = self.at(mr, "") {
            at.deregister(mr);
        }
    }

    fn alloc_key(&mut self, pd: PdId, kind: KeyKind) -> Result<KeyId, VerbsError> {
        let (at, side, pd) = self.at(pd, "protection domain")?;
        let key = at.alloc_key(pd, kind)?;
        self.made(side, key, |at, key| at.free_key(key))
    }

    fn free_key(&mut self, key: KeyId) {
        if let Ok((at, _, key)) = self.at(key, "") {
            at.free_key(key);
        }
    }

    fn lend_pd(&mut self, pd: PdId) -> Result<Lent, VerbsError> {
        let (at, _, pd) = self.at(pd, "protection domain")?;
        at.lend_pd(pd)
    }

    fn borrow_pd(&mut self, device: DeviceIx, pd: &Lent) -> Result<PdId, VerbsError> {
        let (at, side, device) = self.device_at(device)?;
        let pd = at.borrow_pd(device, pd)?;
        self.made(side, pd, |at, pd| at.free_pd(pd))
    }

    fn lend_mr(&mut self, mr: MrId) -> Result<Lent, VerbsError> {
        let (at, _, mr) = self.at(mr, "registration")?;
        at.lend_mr(mr)
    }

    fn borrow_mr(&mut self, pd: PdId, mr: &Lent) -> Result<MrInfo, VerbsError> {
        let (at, side, pd) = self.at(pd, "protection domain")?;
        let info = at.borrow_mr(pd, mr)?;
        self.made_mr(side, info)
    }

    fn lend_key(&mut self, key: KeyId) -> Result<Lent, VerbsError> {
        let (at, _, key) = self.at(key, "key")?;
        at.lend_key(key)
    }

    fn borrow_key(&mut self, pd: PdId, key: &Lent) -> Result<KeyId, VerbsError> {
        let (at, side, pd) = self.at(pd, "protection domain")?;
        let key = at.borrow_key(pd, key)?;
        self.made(side, key, |at, key| at.free_key(key))
    }

    fn create_cq(&mut self, device: DeviceIx, entries: u32) -> Result<CqId, VerbsError> {
        let (at, side, device) = self.device_at(device)?;
        let cq = at.create_cq(device, entries)?;
        self.made(side, cq, |at, cq| at.destroy_cq(cq))
    }

    fn destroy_cq(&mut self, cq: CqId) {
        if let Ok((at, _, cq)) = self.at(cq, "") {
            at.destroy_cq(cq);
        }
    }

    fn create_qp(&mut self, spec: &QpSpec) -> Result<QpId, VerbsError> {
        let (at, side, pd) = self.at(spec.pd, "protection domain")?;
        let cq = Self::same(side, spec.cq).ok_or_else(|| VerbsError::Invalid(NOT_TOGETHER.into()))?;
        let qp = at.create_qp(&QpSpec { pd, cq, ..*spec })?;
        self.made(side, qp, |at, qp| at.destroy_qp(qp))
    }

    fn destroy_qp(&mut self, qp: QpId) {
        if let Ok((at, _, qp)) = self.at(qp, "") {
            at.destroy_qp(qp);
        }
    }

    fn qpn(&self, qp: QpId) -> Option<Qpn> {
        let (side, qp) = qp.theirs()?;
        self.of(side).qpn(qp)
    }

    fn post_send(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        let (at, _, qp) = self.at(qp, "").map_err(|_| (0, NO_QP))?;
        at.post_send(qp, wrs)
    }

    fn post_recv(&mut self, qp: QpId, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        let (at, _, qp) = self.at(qp, "").map_err(|_| (0, NO_QP))?;
        at.post_recv(qp, wrs)
    }

    fn grant(&mut self, qp: QpId, key: KeyId, grant: &GrantOf, wr_id: u64) -> Result<Granted, PostError> {
        let (at, side, qp) = self.at(qp, "").map_err(|_| NO_QP)?;
        let key = Self::same(side, key).ok_or(NO_KEY)?;
        let mr = Self::same(side, grant.mr).ok_or(NO_MR)?;
        at.grant(qp, key, &GrantOf { mr, ..*grant }, wr_id)
    }

    fn grant_list(&mut self, qp: QpId, key: KeyId, pieces: &[GrantOf]) -> Result<Granted, PostError> {
        let (at, side, qp) = self.at(qp, "").map_err(|_| NO_QP)?;
        let key = Self::same(side, key).ok_or(NO_KEY)?;
        if side == Side::A && pieces.iter().all(|piece| Self::same(side, piece.mr).is_some()) {
            return at.grant_list(qp, key, pieces);
        }
        let theirs = |piece: &GrantOf| {
            let mr = Self::same(side, piece.mr).ok_or(NO_MR)?;
            Ok(GrantOf { mr, ..*piece })
        };
        at.grant_list(qp, key, &pieces.iter().map(theirs).collect::<Result<Vec<_>, _>>()?)
    }

    fn revoke(&mut self, qp: QpId, key: KeyId, wr_id: u64) -> Result<Revoked, PostError> {
        let (at, side, qp) = self.at(qp, "").map_err(|_| NO_QP)?;
        at.revoke(qp, Self::same(side, key).ok_or(NO_KEY)?, wr_id)
    }

    fn close_key(&mut self, key: KeyId) {
        if let Ok((at, _, key)) = self.at(key, "") {
            at.close_key(key);
        }
    }

    fn drain(&mut self, qp: QpId) {
        if let Ok((at, _, qp)) = self.at(qp, "") {
            at.drain(qp);
        }
    }

    fn access_violated(&self, qp: QpId) -> bool {
        qp.theirs().is_some_and(|(side, qp)| self.of(side).access_violated(qp))
    }

    fn cm_listen(&mut self, addr: SocketAddr, backlog: u32) -> Result<CmRef, VerbsError> {
        let ip = addr.ip();
        if !ip.is_unspecified() {
            return self.listen_at(self.owner(ip), addr, backlog);
        }
        match [Side::A, Side::B].map(|side| self.serves(side, ip)) {
            [true, true] => self.listen_at_both(addr, backlog),
            [false, true] => self.listen_at(Side::B, addr, backlog),
            _ => self.listen_at(Side::A, addr, backlog),
        }
    }

    fn cm_resolve(&mut self, src: Option<IpAddr>, dst: SocketAddr) -> Result<CmRef, VerbsError> {
        let no_way = |e| VerbsError::Address(format!("no way to {}: {e}", dst.ip()));
        let from = src.map_or_else(|| (self.route)(dst.ip()), Ok).map_err(no_way)?;
        let side = self.owner(from);
        let id = self.of_mut(side).cm_resolve(Some(from), dst)?;
        self.made(side, id, |at, id| at.cm_destroy(id))
    }

    fn cm_connect(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        let (at, side, id) = self.at(id, "connection")?;
        let qp = Self::same(side, qp).ok_or_else(|| VerbsError::Invalid(NOT_TOGETHER.into()))?;
        at.cm_connect(id, qp, params)
    }

    fn cm_accept(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        let (at, side, id) = self.at(id, "connection")?;
        let qp = Self::same(side, qp).ok_or_else(|| VerbsError::Invalid(NOT_TOGETHER.into()))?;
        at.cm_accept(id, qp, params)
    }

    fn cm_reject(&mut self, id: CmRef, reason: RejectReason, private_data: &[u8]) -> Result<(), VerbsError> {
        let (at, _, id) = self.at(id, "connection")?;
        at.cm_reject(id, reason, private_data)
    }

    fn cm_disconnect(&mut self, id: CmRef) {
        if let Ok((at, _, id)) = self.at(id, "") {
            at.cm_disconnect(id);
        }
    }

    fn cm_disconnect_by(&mut self, id: CmRef, ways: &[CmRef]) {
        if let Ok((at, side, id)) = self.at(id, "") {
            let ways: Vec<_> = ways.iter().filter_map(|way| Self::same(side, *way)).collect();
            at.cm_disconnect_by(id, &ways);
        }
    }

    fn cm_destroy(&mut self, id: CmRef) {
        if let Some(both) = Self::own(id).and_then(|own| self.listeners.remove(own)) {
            both.into_iter().for_each(|id| self.cm_destroy(id));
        } else if let Ok((at, _, id)) = self.at(id, "") {
            at.cm_destroy(id);
        }
    }

    fn cm_addrs(&self, id: CmRef) -> Option<(SocketAddr, Option<SocketAddr>)> {
        if let Some(own) = Self::own(id) {
            return self.cm_addrs(self.listeners.get(own)?[0]);
        }
        let (side, id) = id.theirs()?;
        self.of(side).cm_addrs(id)
    }

    fn poll_completions(&mut self, out: &mut Vec<(QpId, Completion)>, max: usize) -> Result<usize, VerbsError> {
        // Neither starves the other.
        self.first = self.first.other();
        let (first, second) = (self.first, self.first.other());
        let count = self.take_completions(first, out, max)?;
        Ok(count + self.take_completions(second, out, max - count)?)
    }

    fn poll_event(&mut self) -> Option<Event> {
        self.first = self.first.other();
        for side in [self.first, self.first.other()] {
            while let Some(event) = self.of_mut(side).poll_event() {
                if matches!(event, Event::Async(..) | Event::DeviceRemoved(_)) {
                    self.refresh();
                }
                if let Some(event) = self.translated(side, event) {
                    return Some(event);
                }
            }
        }
        None
    }
}
