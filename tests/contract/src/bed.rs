//! Two hosts with what most cases need on them.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use roce_verbs::mem::Pages;
use roce_verbs::{
    AccessFlags, Completion, Payload, QpCaps, RKey, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge,
    provider::{
        CmKind, CmRef, ConnParams, CqId, DeviceCaps, DeviceIx, Event, GrantOf, Granted, KeyId, MrInfo, PdId, Provider,
        QpId, QpSpec, Registration, Revoked,
    },
};

use crate::{Pair, Side};

/// How long anything may take before it is called lost.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of a host's region.
pub const LEN: usize = 1 << 20;
/// The rights of a host's region.
pub const RIGHTS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC)
    .union(AccessFlags::MW_BIND);
/// The mark of work requests for keys.
const KEY_MARK: u64 = 0x6b65_7900;

/// A host.
#[derive(Debug)]
pub struct End {
    /// The device that has its address.
    pub device: DeviceIx,
    /// A protection domain on it.
    pub pd: PdId,
    /// A completion queue on it.
    pub cq: CqId,
    /// Memory.
    pub pages: Arc<Pages>,
    /// That memory, registered.
    pub mr: MrInfo,
    /// Completions that nobody has taken yet.
    pub completions: Vec<(QpId, Completion)>,
    /// Events that nobody has taken yet.
    pub events: Vec<Event>,
}

impl End {
    /// Creates the objects that a case needs on the device that has this address.
    ///
    /// # Panics
    /// When that can not be had.
    pub fn new(provider: &mut dyn Provider, addr: std::net::IpAddr) -> Self {
        let has = |caps: &DeviceCaps| caps.addrs.contains(&addr);
        let device = provider.devices().iter().position(has).unwrap_or(0);
        let device = DeviceIx(device as u16);
        let pages = Pages::allocate(LEN).expect("memory");
        let pd = provider.alloc_pd(device).expect("a protection domain");
        let cq = provider.create_cq(device, 256).expect("a completion queue");
        let what = Registration {
            memory: pages.clone(),
            offset: 0,
            len: LEN,
            iova: None,
            access: RIGHTS,
        };
        let mr = provider.register(pd, &what).expect("a registration");
        Self {
            device,
            pd,
            cq,
            pages,
            mr,
            completions: Vec::new(),
            events: Vec::new(),
        }
    }
}

/// A connection with both of its ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Link {
    /// The listener that it was made by, on side B.
    pub listener: CmRef,
    /// On side A.
    pub a: (CmRef, QpId),
    /// On side B.
    pub b: (CmRef, QpId),
}

impl Link {
    /// A side's queue pair.
    pub const fn qp(&self, side: Side) -> QpId {
        match side {
            Side::A => self.a.1,
            Side::B => self.b.1,
        }
    }

    /// A side's connection.
    pub const fn cm(&self, side: Side) -> CmRef {
        match side {
            Side::A => self.a.0,
            Side::B => self.b.0,
        }
    }
}

/// Both hosts.
pub struct Bed {
    pair: Box<dyn Pair>,
    ends: [End; 2],
}

impl core::fmt::Debug for Bed {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Bed").field("ends", &self.ends).finish_non_exhaustive()
    }
}

impl Bed {
    pub(crate) fn new(mut pair: Box<dyn Pair>) -> Self {
        let ends = Side::ALL.map(|side| {
            let addr = pair.addr(side);
            End::new(pair.provider(side), addr)
        });
        Self { pair, ends }
    }

    /// Gives back what both hosts have.
    pub(crate) fn end(mut self) {
        for side in Side::ALL {
            let (pd, cq, mr) = (self.at(side).pd, self.at(side).cq, self.at(side).mr.id);
            let p = self.provider(side);
            p.deregister(mr);
            p.destroy_cq(cq);
            p.free_pd(pd);
        }
    }

    /// A host.
    pub fn at(&mut self, side: Side) -> &mut End {
        &mut self.ends[side as usize]
    }

    /// A host's devices.
    pub fn provider(&mut self, side: Side) -> &mut dyn Provider {
        self.pair.provider(side)
    }

    /// Returns the capabilities of a host's device.
    pub fn caps(&mut self, side: Side) -> DeviceCaps {
        let device = usize::from(self.at(side).device.0);
        self.provider(side).devices()[device].clone()
    }

    /// A host's address, with a port.
    pub fn addr(&self, side: Side, port: u16) -> SocketAddr {
        SocketAddr::new(self.pair.addr(side), port)
    }

    /// One turn of both; what came of it is with the hosts.
    pub fn turn(&mut self) {
        self.pair.turn();
        for side in Side::ALL {
            let (provider, end) = (self.pair.provider(side), &mut self.ends[side as usize]);
            while provider.poll_completions(&mut end.completions, 8).expect("completions") > 0 {}
            while let Some(event) = provider.poll_event() {
                end.events.push(event);
            }
        }
    }

    /// So many turns, in which nothing is expected.
    pub fn turns(&mut self, count: usize) {
        (0..count).for_each(|_| self.turn());
    }

    /// So many turns, of which nobody asks what came.
    pub fn turns_unseen(&mut self, count: usize) {
        (0..count).for_each(|_| self.pair.turn());
    }

    /// Turns until there is something.
    ///
    /// # Panics
    /// When it does not come.
    pub fn wait<T>(&mut self, what: &str, mut look: impl FnMut(&mut Self) -> Option<T>) -> T {
        let end = Instant::now() + TIMEOUT;
        loop {
            if let Some(found) = look(self) {
                return found;
            }
            assert!(Instant::now() < end, "waited in vain for {what}: {self:?}");
            self.turn();
        }
    }

    /// Waits for a completion of a queue pair by its mark, and takes it.
    ///
    /// # Panics
    /// When it does not come.
    pub fn completion(&mut self, side: Side, qp: QpId, wr_id: u64) -> Completion {
        self.wait(&format!("completion {wr_id} of {side:?}"), |bed| {
            let all = &mut bed.at(side).completions;
            let at = all.iter().position(|(of, wc)| *of == qp && wc.wr_id == wr_id)?;
            Some(all.remove(at).1)
        })
    }

    /// The same, of one that has succeeded.
    ///
    /// # Panics
    /// When it does not come, or has failed.
    pub fn success(&mut self, side: Side, qp: QpId, wr_id: u64) -> Completion {
        let wc = self.completion(side, qp, wr_id);
        assert!(wc.is_ok(), "{wc:?}");
        wc
    }

    /// Waits for an event, and takes it.
    ///
    /// # Panics
    /// When it does not come.
    pub fn event<T>(&mut self, side: Side, what: &str, is: impl Fn(&Event) -> Option<T>) -> T {
        self.wait(&format!("{what} at {side:?}"), |bed| {
            let all = &mut bed.at(side).events;
            let at = all.iter().position(|event| is(event).is_some())?;
            is(&all.remove(at))
        })
    }

    /// Waits for an event of a connection, and takes it.
    ///
    /// # Panics
    /// When it does not come.
    pub fn cm_event<T>(&mut self, side: Side, id: CmRef, what: &str, is: impl Fn(&CmKind) -> Option<T>) -> T {
        self.event(side, what, |event| match event {
            Event::Cm { id: of, kind } if *of == id => is(kind),
            _ => None,
        })
    }

    /// Waits for the end of a drain.
    ///
    /// # Panics
    /// When it does not come.
    pub fn drained(&mut self, side: Side, qp: QpId) {
        self.event(side, "the end of a drain", |event| {
            matches!(event, Event::Drained(of) if *of == qp).then_some(())
        });
    }

    /// Sizes of the queue pairs of cases.
    pub fn spec(&mut self, side: Side) -> QpSpec {
        let end = self.at(side);
        QpSpec {
            pd: end.pd,
            cq: end.cq,
            caps: QpCaps {
                max_send_wr: 16,
                max_recv_wr: 16,
                max_send_sge: 2,
                max_recv_sge: 2,
                max_inline_data: 32,
            },
            signal_all: false,
        }
    }

    /// Makes a queue pair.
    ///
    /// # Panics
    /// When that fails.
    pub fn qp(&mut self, side: Side) -> QpId {
        let spec = self.spec(side);
        self.provider(side).create_qp(&spec).expect("a queue pair")
    }

    /// Listens at a port that is free; its address.
    ///
    /// # Panics
    /// When that fails.
    pub fn listen(&mut self) -> (CmRef, SocketAddr) {
        let at = self.addr(Side::B, 0);
        let listener = self.provider(Side::B).cm_listen(at, 8).expect("a listener");
        let (local, remote) = self.provider(Side::B).cm_addrs(listener).expect("its address");
        assert_eq!((local.ip(), remote), (at.ip(), None));
        assert_ne!(local.port(), 0, "it has found one");
        (listener, local)
    }

    /// Looks for the way from A to an address.
    ///
    /// # Panics
    /// When there is none.
    pub fn resolve(&mut self, to: SocketAddr) -> CmRef {
        let from = self.addr(Side::A, 0).ip();
        let id = self.provider(Side::A).cm_resolve(Some(from), to).expect("a way");
        let device = self.cm_event(Side::A, id, "the way", |kind| match kind {
            CmKind::Resolved { device } => Some(*device),
            _ => None,
        });
        assert_eq!(device, self.at(Side::A).device);
        id
    }

    /// Waits for a request at a listener; its number.
    ///
    /// # Panics
    /// When none comes.
    pub fn request(&mut self, listener: CmRef) -> CmRef {
        self.event(Side::B, "a request", |event| match event {
            Event::Cm {
                id,
                kind: CmKind::ConnectRequest { listener: at, .. },
            } if *at == listener => Some(*id),
            _ => None,
        })
    }

    /// Waits until a connection stands; the peer's private data.
    ///
    /// # Panics
    /// When it does not come to that.
    pub fn established(&mut self, side: Side, id: CmRef) -> Vec<u8> {
        self.cm_event(side, id, "an established connection", |kind| match kind {
            CmKind::Established { private_data } => Some(private_data.clone()),
            _ => None,
        })
    }

    /// Connects A and B.
    pub fn connect(&mut self) -> Link {
        self.connect_with(&ConnParams::default())
    }

    /// Connects A and B, which have the same parameters.
    ///
    /// # Panics
    /// When that fails.
    pub fn connect_with(&mut self, params: &ConnParams) -> Link {
        let (listener, to) = self.listen();
        let id = self.resolve(to);
        let qp = self.qp(Side::A);
        self.provider(Side::A).cm_connect(id, qp, params).expect("a request");
        let theirs = self.request(listener);
        let their_qp = self.qp(Side::B);
        let accepted = self.provider(Side::B).cm_accept(theirs, their_qp, params);
        accepted.expect("an accept");
        self.established(Side::A, id);
        self.established(Side::B, theirs);
        Link {
            listener,
            a: (id, qp),
            b: (theirs, their_qp),
        }
    }

    /// Ends a connection, and gives back what it had.
    pub fn give_back(&mut self, link: Link) {
        for side in Side::ALL {
            self.provider(side).drain(link.qp(side));
            self.drained(side, link.qp(side));
        }
        self.give_back_after(link);
    }

    /// Gives back what a connection had whose queue pairs are drained, or need not be.
    pub fn give_back_after(&mut self, link: Link) {
        for side in Side::ALL {
            self.provider(side).destroy_qp(link.qp(side));
            self.provider(side).cm_destroy(link.cm(side));
        }
        self.provider(Side::B).cm_destroy(link.listener);
    }

    /// A piece of a host's region.
    pub fn sge(&mut self, side: Side, offset: usize, length: usize) -> Sge {
        let mr = self.at(side).mr;
        Sge {
            addr: mr.addr + offset as u64,
            length: length as u32,
            lkey: mr.lkey,
        }
    }

    /// A place in a host's region, by the region's own key.
    pub fn remote(&mut self, side: Side, offset: usize) -> RemoteAddr {
        let mr = self.at(side).mr;
        RemoteAddr {
            addr: mr.addr + offset as u64,
            rkey: mr.rkey,
        }
    }

    /// The same, by another key.
    pub fn remote_by(&mut self, side: Side, offset: usize, rkey: RKey) -> RemoteAddr {
        RemoteAddr {
            rkey,
            ..self.remote(side, offset)
        }
    }

    /// Returns bytes of a host's memory.
    ///
    /// # Panics
    /// Outside of it.
    pub fn bytes(&mut self, side: Side, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.at(side).pages.read(offset, &mut out).expect("a range of it");
        out
    }

    /// Writes to a host's memory.
    ///
    /// # Panics
    /// Outside of it.
    pub fn fill(&mut self, side: Side, offset: usize, data: &[u8]) {
        self.at(side).pages.write(offset, data).expect("a range of it");
    }

    /// Posts one signalled work request.
    ///
    /// # Panics
    /// When it is refused.
    pub fn post(&mut self, side: Side, qp: QpId, wr_id: u64, op: SendOp, payload: Payload<'_>) {
        let wr = SendWr {
            wr_id,
            op,
            flags: SendFlags::SIGNALED,
            payload,
        };
        self.provider(side).post_send(qp, &[wr]).expect("a work request");
    }

    /// Posts a receive.
    ///
    /// # Panics
    /// When it is refused.
    pub fn receive(&mut self, side: Side, qp: QpId, wr_id: u64, sges: &[Sge]) {
        let recv = RecvWr { wr_id, sges };
        self.provider(side).post_recv(qp, &[recv]).expect("a receive");
    }

    /// Opens a range of B's region to the peer, and waits until that holds.
    ///
    /// # Panics
    /// When it is refused, or the key is the former.
    pub fn grant(&mut self, qp: QpId, key: KeyId, offset: usize, len: usize, access: AccessFlags) -> RKey {
        let grant = GrantOf {
            mr: self.at(Side::B).mr.id,
            offset,
            len,
            iova: None,
            access,
        };
        let granted = self.provider(Side::B).grant(qp, key, &grant, KEY_MARK);
        match granted.expect("a key") {
            Granted::Now(rkey) => rkey,
            Granted::Queued(rkey) => {
                self.success(Side::B, qp, KEY_MARK);
                rkey
            }
        }
    }

    /// Takes a key back, and waits until that holds.
    ///
    /// # Panics
    /// When it is refused.
    pub fn revoke(&mut self, qp: QpId, key: KeyId) {
        let revoked = self.provider(Side::B).revoke(qp, key, KEY_MARK + 1);
        if revoked.expect("an end") == Revoked::Queued {
            self.success(Side::B, qp, KEY_MARK + 1);
        }
    }
}
