//! The devices as a backend of a [`Fabric`](roce_local::Fabric): which objects a call concerns.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::BorrowedFd,
};

use roce_local::{Completed, Drain, Hardware, HardwareEvent, Object, Registered};
use roce_verbs::{
    Completion, Mtu, Qpn, RecvWr, SendWr,
    provider::{
        CmKind, CmRef, ConnParams, CqId, DeviceCaps, GrantOf, Granted, KeyKind, QpSpec, Registration, RejectReason,
        Revoked, VerbsError,
    },
    wr::PostError,
};

use crate::{
    advice,
    cm::Cm,
    device::{Cq, HwDevice, Mr, Pd},
    keys::Key,
    post::completion,
    qp::Qp,
    sys::News,
};

impl Hardware for HwDevice {
    fn devices(&self) -> &[DeviceCaps] {
        &self.caps
    }

    fn mtu(&self, addr: IpAddr) -> io::Result<Mtu> {
        self.mtu_of(addr)
    }

    fn close_removed(&mut self) {
        self.close_gone();
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.watched.fd()]
    }

    fn poll(&mut self) -> Result<bool, VerbsError> {
        self.poll_descriptors()
    }

    fn next_event(&mut self) -> Option<HardwareEvent> {
        self.events.pop_front()
    }

    fn alloc_pd(&mut self, device: usize) -> Result<Object, VerbsError> {
        Ok(Object::new(Pd::alloc(device, self.opened(device)?)?))
    }

    fn register(&mut self, pd: &Object, what: &Registration) -> Result<Registered, VerbsError> {
        let pd: &Pd = pd.get();
        let mr = Mr::register(pd, &self.devices[pd.device].name, what)?;
        Ok(Registered {
            addr: mr.addr,
            lkey: mr.raw.lkey(),
            rkey: mr.raw.rkey(),
            object: Object::new(mr),
        })
    }

    fn alloc_key(&mut self, pd: &Object, kind: KeyKind) -> Result<Object, VerbsError> {
        let pd: &Pd = pd.get();
        Ok(Object::new(Key::alloc(pd, &self.caps[pd.device], kind)?))
    }

    fn create_cq(&mut self, device: usize, entries: u32, id: CqId) -> Result<Object, VerbsError> {
        Ok(Object::new(Cq::create(device, self.opened(device)?, entries, id)?))
    }

    fn create_qp(&mut self, pd: &Object, cq: &Object, spec: &QpSpec) -> Result<(Object, Qpn), VerbsError> {
        let (pd, cq) = (pd.get::<Pd>(), cq.get::<Cq>());
        self.made = self.made.wrapping_add(1);
        let (device, limits) = (&self.devices[pd.device], &self.caps[pd.device].limits);
        let qp = Qp::create((pd, cq), device, limits, self.made, spec)?;
        let qpn = qp.qpn;
        Ok((Object::new(qp), qpn))
    }

    fn post_send(&mut self, qp: &mut Object, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        qp.get_mut::<Qp>().post_send(&mut self.sends, wrs)
    }

    fn post_recv(&mut self, qp: &mut Object, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        qp.get_mut::<Qp>().post_recv(&mut self.recvs, wrs)
    }

    fn grant(
        &mut self,
        qp: &mut Object,
        key: &mut Object,
        mr: &Object,
        grant: &GrantOf,
        wr_id: u64,
    ) -> Result<Granted, PostError> {
        key.get_mut::<Key>()
            .grant(qp.get_mut(), mr.get(), &mut self.sends, grant, wr_id)
    }

    fn revoke(
        &mut self,
        qp: &mut Object,
        key: &mut Object,
        mr: Option<&Object>,
        wr_id: u64,
    ) -> Result<Revoked, PostError> {
        key.get_mut::<Key>()
            .revoke(qp.get_mut(), mr.map(Object::get), &mut self.sends, wr_id)
    }

    fn invalidated(&mut self, key: &mut Object) {
        key.get_mut::<Key>().invalidated();
    }

    fn replace_key(&mut self, key: &mut Object) {
        key.get_mut::<Key>().replace();
    }

    fn drain(&mut self, qp: &mut Object) -> Drain {
        let qp: &mut Qp = qp.get_mut();
        qp.drain(self.devices[qp.device].gone, &mut self.sends)
    }

    fn is_draining(&self, qp: &Object) -> bool {
        qp.get::<Qp>().is_draining()
    }

    fn abandon(&mut self, qp: &mut Object) -> Vec<u64> {
        qp.get_mut::<Qp>().abandon()
    }

    fn poll_cq(&mut self, cq: &mut Object, out: &mut Vec<Completion>, max: usize) -> Result<usize, VerbsError> {
        let cq: &mut Cq = cq.get_mut();
        self.polled.clear();
        let polled = cq.raw.poll(&mut self.polled, max);
        out.extend(self.polled.iter().map(completion));
        polled.map_err(|e| VerbsError::State(e.to_string()))
    }

    fn complete(&mut self, qp: &mut Object, completion: &mut Completion) -> Completed {
        qp.get_mut::<Qp>().complete(completion)
    }

    fn arm(&mut self, cq: &mut Object) -> Result<(), VerbsError> {
        let cq: &mut Cq = cq.get_mut();
        match cq.armed || self.devices[cq.device].gone {
            true => Ok(()),
            false => cq.arm().map_err(|e| advice::failed("arming a completion queue", e)),
        }
    }

    fn disarm(&mut self, cq: &mut Object) {
        let cq: &mut Cq = cq.get_mut();
        cq.raw.told();
        cq.armed = false;
    }

    fn listen(&mut self, addr: SocketAddr, backlog: u32, id: CmRef) -> Result<(Object, SocketAddr), VerbsError> {
        let cm = Cm::listen(&self.channel, addr, backlog, id)?;
        let addr = cm.addrs().0;
        Ok((Object::new(cm), addr))
    }

    fn listen_again(&mut self, listener: &mut Object) {
        listener.get_mut::<Cm>().listen_again(&self.channel);
    }

    fn lose_listener(&mut self, listener: &mut Object, device: usize) {
        listener.get_mut::<Cm>().lose(&self.channel, &self.devices[device].name);
    }

    fn resolve(&mut self, src: Option<IpAddr>, dst: SocketAddr, id: CmRef) -> Result<Object, VerbsError> {
        Ok(Object::new(Cm::resolve(&self.channel, src, dst, id)?))
    }

    fn number_request(&mut self, cm: &mut Object, id: CmRef) {
        cm.get_mut::<Cm>().set_id(id);
    }

    fn connect(&mut self, cm: &mut Object, qp: &Object, params: &ConnParams) -> Result<(), VerbsError> {
        cm.get_mut::<Cm>().connect(qp.get(), params)
    }

    fn accept(&mut self, cm: &mut Object, qp: &mut Object, params: &ConnParams) -> Result<(), VerbsError> {
        cm.get_mut::<Cm>().accept(qp.get_mut(), params)
    }

    fn reject(&mut self, cm: &mut Object, reason: RejectReason, private_data: &[u8]) -> Result<(), VerbsError> {
        cm.get_mut::<Cm>().reject(reason, private_data)
    }

    fn disconnect(&mut self, cm: &mut Object, qp: Option<&mut Object>) {
        cm.get_mut::<Cm>().disconnect(qp.map(Object::get_mut));
    }

    fn cm_event(&mut self, cm: &mut Object, qp: Option<&mut Object>, event: Object) -> Option<CmKind> {
        let (cm, news): (&mut Cm, News) = (cm.get_mut(), event.into_inner());
        if news.is_removal() {
            let device = cm.device_on(&self.devices)?;
            self.device_gone(device);
            return None;
        }
        cm.event(&self.devices, qp.map(Object::get_mut), news)
    }

    fn communication_established(&mut self, cm: &mut Object) {
        cm.get_mut::<Cm>().communication_established();
    }

    fn cm_addrs(&self, cm: &Object) -> (SocketAddr, Option<SocketAddr>) {
        cm.get::<Cm>().addrs()
    }
}
