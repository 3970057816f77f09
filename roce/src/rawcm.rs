//! The connection manager for programs that bring their queue pairs up themselves, as librdmacm's do, and for datagram
//! services (SIDR). Arguments and events are those of the connection manager (`roce_cm`).

use std::{
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Duration,
};

use roce_port::{
    AcceptArgs, ConnId, ConnectArgs, ListenArgs, Port, PortCmEvent, PortSpace, RawCmEvent, ResolveArgs, ServiceId,
    SidrAnswer,
};
use roce_verbs::{
    Instant,
    provider::{RejectReason, VerbsError},
};

use crate::{
    cm::{EventSource, Key, end_orphan},
    cq::wait,
    device::{Device, DeviceInner, closed},
};

/// Listens, connects and resolves; its descriptor is readable while events wait. Cheap to clone.
#[derive(Clone)]
pub struct RawCm(Arc<EventSource>);

impl core::fmt::Debug for RawCm {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("RawCm").finish_non_exhaustive()
    }
}

/// A listener, connection or resolution. Dropping it ends it: a connection is disconnected, a waiting request refused.
pub struct RawId {
    key: Key,
    device: Arc<DeviceInner>,
    /// Claim of a listener.
    claim: Option<(u64, Option<IpAddr>)>,
}

impl Drop for RawId {
    fn drop(&mut self) {
        if self.device.engines.is_inherited() {
            return;
        }
        self.device.router.remove(self.key);
        // On a closed device there is nothing left to end.
        let _ = self.device.engines.first().with(|port, now| match self.key {
            Key::Listener(id) => port.cm_unlisten(id),
            Key::Conn(id) => port.cm_destroy(now, id),
        });
        if let (Some((service, addr)), Some(services)) = (self.claim, &self.device.services) {
            services.release(service, addr);
        }
    }
}

impl core::fmt::Debug for RawId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_tuple("RawId").field(&self.key).finish()
    }
}

/// A port that is kept for this process among those that share the address. It is free again with the drop.
pub struct PortHold {
    service: ServiceId,
    addr: Option<IpAddr>,
    device: Arc<DeviceInner>,
}

impl core::fmt::Debug for PortHold {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { service, addr, .. } = self;
        f.debug_struct("PortHold")
            .field("service", service)
            .field("addr", addr)
            .finish()
    }
}

impl PortHold {
    /// The port; 0 when any was asked for and nobody keeps ports: then every one is as good.
    pub const fn port(&self) -> u16 {
        self.service.0 as u16
    }
}

impl Drop for PortHold {
    fn drop(&mut self) {
        if let Some(services) = &self.device.services
            && !self.device.engines.is_inherited()
        {
            services.unreserve(self.service.0, self.addr);
        }
    }
}

/// Event of a connection.
#[derive(Debug)]
pub struct RawEvent {
    /// [`RawId::number`] of the connection or resolution; of a request: of the listener.
    pub number: u64,
    /// The new connection or resolution, in a request.
    pub new: Option<RawId>,
    /// Event. Ids in it are of no use here.
    pub event: RawCmEvent,
}

impl Device {
    /// Makes a connection manager for programs that bring their queue pairs up themselves.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    pub fn raw_cm(&self) -> Result<RawCm, VerbsError> {
        Ok(RawCm(EventSource::new(self)?))
    }
}

impl RawCm {
    /// Readable while events wait.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        AsFd::as_fd(&*self.0.queue)
    }

    /// Takes one event, if there is one.
    ///
    /// # Errors
    /// When none is left and the device is closed.
    pub fn take(&self) -> Result<Option<RawEvent>, VerbsError> {
        let device = &self.0.device;
        if device.engines.is_inherited() {
            return Err(VerbsError::Closed);
        }
        while let Some(event) = self.0.queue.pop()? {
            let request = event.request();
            let PortCmEvent::Raw(raw) = event else { continue };
            match request {
                Some((listener, conn)) if device.router.knows(Key::Listener(listener)) => {
                    return Ok(Some(RawEvent {
                        number: Key::Listener(listener).number(),
                        new: Some(self.id(Key::Conn(conn), None)),
                        event: raw,
                    }));
                }
                Some((_, conn)) => end_orphan(device, conn),
                None if device.router.knows(Key::Conn(raw.conn())) => {
                    return Ok(Some(RawEvent {
                        number: Key::Conn(raw.conn()).number(),
                        new: None,
                        event: raw,
                    }));
                }
                None => {}
            }
        }
        Ok(None)
    }

    /// Takes one event; `None` when the time runs out (`None` waits for ever).
    ///
    /// # Errors
    /// When waiting fails or the device is closed.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Option<RawEvent>, VerbsError> {
        wait(&self.0.device, &self.0.queue, timeout, || self.take())
    }

    fn id(&self, key: Key, claim: Option<(u64, Option<IpAddr>)>) -> RawId {
        RawId {
            key,
            device: self.0.device.clone(),
            claim,
        }
    }

    /// Keeps a port of a port space for this process, on the addresses that [`ListenArgs::addr`] stands for; port 0: any that
    /// is free. Needed only to be sure of it before listening.
    ///
    /// # Errors
    /// When another process has it.
    pub fn reserve(
        &self,
        space: PortSpace,
        port: u16,
        addr: Option<IpAddr>,
        reuse: bool,
    ) -> Result<PortHold, VerbsError> {
        let device = &self.0.device;
        let (wanted, addr) = (ServiceId::new(space, port), addr.map(|a| a.to_canonical()));
        let service = match &device.services {
            Some(services) => ServiceId(services.reserve(wanted.0, addr, reuse)?),
            None => wanted,
        };
        Ok(PortHold {
            service,
            addr,
            device: device.clone(),
        })
    }

    /// Listens for connect requests, or in a port space of datagrams for questions.
    ///
    /// # Errors
    /// When the port is taken or the address is not ours.
    pub fn listen(&self, args: &ListenArgs) -> Result<RawId, VerbsError> {
        let device = &self.0.device;
        let claim = (
            ServiceId::new(args.space, args.port).0,
            args.addr.map(|a| a.to_canonical()),
        );
        if let Some(services) = &device.services {
            services.claim(claim.0, claim.1)?;
        }
        let made = device.engines.first().with_quiet(|port, _| {
            let key = Key::Listener(port.cm_listen_raw(args)?);
            device.router.add_raw(key, &self.0.queue);
            Ok(key)
        });
        match made.map_err(closed).and_then(|made| made) {
            Ok(key) => Ok(self.id(key, Some(claim))),
            Err(e) => {
                if let Some(services) = &device.services {
                    services.release(claim.0, claim.1);
                }
                Err(e)
            }
        }
    }

    /// Sends a REQ. [`RawCmEvent::Reply`] (then bring the queue pair up and call [`RawId::establish`]),
    /// [`RawCmEvent::Rejected`] or [`RawCmEvent::Unreachable`] follows.
    ///
    /// # Errors
    /// When there is no way to the peer or an argument is wrong.
    pub fn connect(&self, args: &ConnectArgs) -> Result<RawId, VerbsError> {
        let mut args = args.clone();
        if args.local.ip().is_unspecified() {
            args.local.set_ip(self.0.device.local_for(args.remote.ip())?);
        }
        self.start(|port, now| port.cm_connect_raw(now, &args))
    }

    /// Asks which queue pair serves a port. [`RawCmEvent::Resolved`] or [`RawCmEvent::Unreachable`] follows.
    ///
    /// # Errors
    /// When there is no way to the peer or an argument is wrong.
    pub fn resolve(&self, args: &ResolveArgs) -> Result<RawId, VerbsError> {
        let mut args = args.clone();
        if args.local.ip().is_unspecified() {
            args.local.set_ip(self.0.device.local_for(args.remote.ip())?);
        }
        self.start(|port, now| port.cm_resolve(now, &args))
    }

    fn start(&self, call: impl FnOnce(&mut Port, Instant) -> Result<ConnId, VerbsError>) -> Result<RawId, VerbsError> {
        let device = &self.0.device;
        // The route is made under the port's lock, so that no event comes before it.
        let made = device.engines.first().with(|port, now| {
            let key = Key::Conn(call(port, now)?);
            device.router.add_raw(key, &self.0.queue);
            Ok(key)
        });
        let made: Result<Key, VerbsError> = made.map_err(closed)?;
        Ok(self.id(made?, None))
    }
}

impl RawId {
    /// A number that no other listener, connection or resolution of the device has.
    pub fn number(&self) -> u64 {
        self.key.number()
    }

    fn with<R>(&self, call: impl FnOnce(&mut Port, Instant, ConnId) -> Result<R, VerbsError>) -> Result<R, VerbsError> {
        let Key::Conn(conn) = self.key else {
            return Err(VerbsError::State("a listener is not a connection".into()));
        };
        let done = self.device.engines.first().with(|port, now| call(port, now, conn));
        done.map_err(closed)?
    }

    /// Takes an unanswered request out of its listener's backlog, as the kernel does when a program fetches the event.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn leave_backlog(&self) -> Result<(), VerbsError> {
        self.with(|port, _, conn| {
            port.cm_leave_backlog(conn);
            Ok(())
        })
    }

    /// Accepts a request with a queue pair that is in RTS. [`RawCmEvent::Established`] follows.
    ///
    /// # Errors
    /// When it does not wait any more or there is too much private data.
    pub fn accept(&self, args: &AcceptArgs) -> Result<(), VerbsError> {
        self.with(|port, now, conn| port.cm_accept_raw(now, conn, args))
    }

    /// Answers who asks for a queue pair.
    ///
    /// # Errors
    /// When it does not wait any more or there is too much private data.
    pub fn answer(&self, answer: &SidrAnswer) -> Result<(), VerbsError> {
        self.with(|port, now, conn| port.cm_answer(now, conn, answer))
    }

    /// Our queue pair is in RTS: tells the peer (RTU).
    ///
    /// # Errors
    /// When the peer's reply is not there or the connection is over.
    pub fn establish(&self) -> Result<(), VerbsError> {
        self.with(|port, now, conn| port.cm_establish(now, conn))
    }

    /// Refuses a request or a reply.
    ///
    /// # Errors
    /// When there is nothing to refuse or there is too much private data.
    pub fn reject(&self, reason: RejectReason, private_data: &[u8]) -> Result<(), VerbsError> {
        self.with(|port, now, conn| port.cm_reject_raw(now, conn, reason, private_data))
    }

    /// A packet came on the queue pair before the RTU (`rdma_notify`, "communication established").
    ///
    /// # Errors
    /// When the device is closed.
    pub fn notify(&self) -> Result<(), VerbsError> {
        self.with(|port, now, conn| {
            port.cm_notify(now, conn);
            Ok(())
        })
    }

    /// Ends the connection. [`RawCmEvent::Disconnected`] follows.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn disconnect(&self) -> Result<(), VerbsError> {
        self.with(|port, now, conn| {
            port.cm_disconnect(now, conn);
            Ok(())
        })
    }
}
