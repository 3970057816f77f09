//! The device as a [`VerbsDevice`].

use std::net::{IpAddr, SocketAddr};

use roce_verbs::{
    AccessFlags, DeviceLimits, QpState,
    provider::{ConnParams, QpInit, VerbsDevice, VerbsError},
};

use crate::{
    cm::{EventChannel, Id},
    cq::{Channel, Cq},
    device::{Device, mem_error},
    memory::{Mr, Pd, Revocable},
    qp::Qp,
};

impl VerbsDevice for Device {
    type Pd = Pd;
    type Channel = Channel;
    type Cq = Cq;
    type Mr = Mr;
    type Revocable = Revocable;
    type Qp = Qp;
    type CmId = Id;
    type CmChannel = EventChannel;

    fn limits(&self) -> DeviceLimits {
        self.0.limits.clone()
    }

    fn alloc_pd(&self) -> Result<Pd, VerbsError> {
        Pd::new(self)
    }

    fn create_channel(&self) -> Result<Channel, VerbsError> {
        Channel::new(self)
    }

    fn create_cq(&self, entries: u32, channel: Option<&Channel>, cookie: u64) -> Result<Cq, VerbsError> {
        Cq::new(self, entries, channel, cookie)
    }

    fn alloc_mr(&self, pd: &Pd, len: usize, access: AccessFlags) -> Result<Mr, VerbsError> {
        pd.check(&self.0)?;
        self.0.may_register()?;
        let region = self.0.mem.alloc_region(pd.0.handle, len, access).map_err(mem_error)?;
        Ok(Mr::new(pd, region))
    }

    fn alloc_revocable(&self, pd: &Pd) -> Result<Revocable, VerbsError> {
        Revocable::new(self, pd)
    }

    fn create_qp(&self, pd: &Pd, init: &QpInit<'_, Cq>) -> Result<Qp, VerbsError> {
        Qp::new(self, pd, init, QpState::Init)
    }

    fn create_cm_channel(&self) -> Result<EventChannel, VerbsError> {
        EventChannel::new(self)
    }

    fn listen(&self, channel: &EventChannel, addr: SocketAddr, backlog: u32) -> Result<Id, VerbsError> {
        self.cm_listen(channel, addr, backlog)
    }

    fn connect(
        &self,
        channel: &EventChannel,
        src: Option<IpAddr>,
        dst: SocketAddr,
        qp: &Qp,
        params: ConnParams,
    ) -> Result<Id, VerbsError> {
        self.cm_connect(channel, src, dst, qp, params)
    }
}
