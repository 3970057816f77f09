//! All devices of a loop, and the events of their descriptors.

use std::{
    collections::VecDeque,
    io,
    net::{IpAddr, SocketAddr},
    os::fd::BorrowedFd,
    sync::{Arc, Once},
};

use roce_port::fabric::{DeviceName, Hardware, NewCm, Table};
use roce_verbs::{
    AsyncEvent, Completion, Mtu,
    provider::{CmKind, CmRef, CqId, DeviceCaps, DeviceIx, Event, KeyId, MrId, PdId, QpId, VerbsError},
};

use crate::{
    advice,
    cm::Cm,
    device::{self, CONNECTIONS, DEVICES, Device, FILES, Pd, device_of},
    keys::Key,
    qp::Qp,
    sys::{AsyncNews, Context, EventChannel, Mr, NODES, News, Nodes, RecvList, SendList, Watched, kind},
};

mod hotplug;
mod verbs;

/// `IBV_EVENT_DEVICE_FATAL`, `IBV_EVENT_GID_CHANGE`.
const DEVICE_FATAL: u32 = 8;
const GID_CHANGE: u32 = 18;

/// Completion queue.
struct Cq {
    device: usize,
    raw: Arc<crate::sys::Cq>,
    /// An event will report the next completion.
    armed: bool,
}

/// The RDMA devices of the host as a backend of a [`Fabric`](roce_port::fabric::Fabric), without a thread or a lock.
///
/// Objects end in the order of the fields: a window before its registration, a queue pair before its completion queue.
pub(crate) struct HwDevice {
    cms: Table<CmRef, Cm>,
    qps: Table<QpId, Qp>,
    keys: Table<KeyId, Key>,
    mrs: Table<MrId, Mr>,
    cqs: Table<CqId, Cq>,
    pds: Table<PdId, Pd>,
    caps: Vec<DeviceCaps>,
    devices: Vec<Device>,
    channel: Arc<EventChannel>,
    events: VecDeque<Event>,
    /// Completions that no device makes any more.
    flushed: VecDeque<(QpId, Completion)>,
    /// Completions of one queue, and room for lists of work requests.
    polled: Vec<Completion>,
    sends: SendList,
    recvs: RecvList,
    /// Tokens of the descriptors that are readable.
    ready: Vec<u64>,
    watched: Watched,
    /// `None` where there are no device files.
    files: Option<Nodes>,
    /// Names of devices to use, also those that come later; none: all.
    wanted: Vec<DeviceName>,
}

impl std::fmt::Debug for HwDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HwDevice")
            .field("devices", &self.devices.len())
            .finish_non_exhaustive()
    }
}

/// Has children of the process leave registered memory alone. Whoever registers memory before us, or has set this up, has decided
/// that already.
fn fork_init() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Err(e) = Context::fork_init() {
            tracing::warn!("children of this process may disturb registered memory: ibv_fork_init: {e}");
        }
    });
}

fn is_wanted(wanted: &[DeviceName], name: &str) -> bool {
    wanted.is_empty() || wanted.iter().any(|d| d.name == name)
}

impl HwDevice {
    /// Opens devices, in the order of the system.
    pub(crate) fn open(wanted: &[DeviceName]) -> Result<Self, VerbsError> {
        fork_init();
        let mut there = Vec::new();
        // Watched before devices are opened, so that none goes unnoticed.
        let files = Nodes::watch(NODES);
        let found = Context::open_all(|name| {
            there.push(name.to_owned());
            is_wanted(wanted, name)
        });
        let (mut devices, mut caps, mut failed) = (Vec::new(), Vec::new(), None);
        for found in found.map_err(advice::no_list)? {
            let (name, file) = (found.name.clone(), device::file(&found.file));
            match Device::open(found, wanted).map_err(|e| advice::not_opened(&name, &file, e)) {
                Ok((device, can)) => {
                    devices.push(device);
                    caps.push(can);
                }
                Err(e) if wanted.is_empty() => {
                    tracing::warn!("{e}");
                    failed.get_or_insert(e);
                }
                Err(e) => return Err(e),
            }
        }
        let lacks = |wanted: &&DeviceName| !devices.iter().any(|d: &Device| d.name == wanted.name);
        let lacking: Vec<String> = wanted.iter().filter(lacks).map(|d| d.name.clone()).collect();
        if devices.is_empty() || !lacking.is_empty() {
            return Err(failed.unwrap_or_else(|| advice::no_device(&lacking, &there)));
        }
        let not_watched = |e| advice::failed("watching the RDMA devices", e);
        let mut this = Self {
            cms: Table::default(),
            qps: Table::default(),
            keys: Table::default(),
            mrs: Table::default(),
            cqs: Table::default(),
            pds: Table::default(),
            caps,
            devices,
            channel: EventChannel::create().map_err(advice::no_cm)?,
            events: VecDeque::new(),
            flushed: VecDeque::new(),
            polled: Vec::new(),
            sends: SendList::default(),
            recvs: RecvList::default(),
            ready: Vec::new(),
            watched: Watched::new().map_err(not_watched)?,
            files,
            wanted: wanted.to_vec(),
        };
        this.watch().map_err(not_watched)?;
        (0..this.devices.len()).for_each(|index| this.anchor(index));
        Ok(this)
    }

    /// Watches everything that there is.
    fn watch(&self) -> io::Result<()> {
        self.watched.add(self.channel.fd(), CONNECTIONS)?;
        if let Some(files) = &self.files {
            self.watched.add(files.fd(), FILES)?;
        }
        let mut devices = self.devices.iter().enumerate();
        devices.try_for_each(|(index, device)| device.watch(&self.watched, index))
    }

    fn anchor(&mut self, index: usize) {
        self.devices[index].anchor(&self.channel, index, &self.caps[index]);
    }

    /// Returns the context of a device, unless it is gone.
    fn context(&self, device: usize) -> Result<&Arc<Context>, VerbsError> {
        let context = self.devices.get(device).and_then(Device::usable);
        context.ok_or_else(|| VerbsError::Invalid("no such device".into()))
    }

    fn poll_connections(&mut self, new: NewCm<'_>) -> Result<(), VerbsError> {
        let channel = self.channel.clone();
        loop {
            let news = channel.event();
            match news.map_err(|e| advice::failed("taking an event of the connection manager", e))? {
                Some(news) => self.cm_news(news, new),
                None => return Ok(()),
            }
        }
    }

    fn cm_news(&mut self, news: News, new: NewCm<'_>) {
        if news.request.is_some() {
            self.request(news, new);
            return;
        }
        let is_removal = news.kind == kind::RDMA_CM_EVENT_DEVICE_REMOVAL;
        if let Some(device) = device::anchored(news.token) {
            if is_removal && device < self.devices.len() {
                self.device_gone(device);
            }
            return;
        }
        let id = CmRef(news.token as u32);
        let Some(cm) = self.cms.get_mut(id) else { return };
        if is_removal {
            if let Some(device) = cm.device_on(&self.devices) {
                self.device_gone(device);
            }
            return;
        }
        let qp = cm.qp().and_then(|qp| self.qps.get_mut(qp));
        let kind = cm.event(&self.devices, qp, news);
        self.events.extend(kind.map(|kind| Event::Cm { id, kind }));
    }

    /// Makes a connection of a request. Drops, and so rejects, one that is not for a listener or not on a device in use.
    fn request(&mut self, news: News, new: NewCm<'_>) {
        let listener = CmRef(news.token as u32);
        if !self.cms.get(listener).is_some_and(Cm::is_listener) {
            return;
        }
        let Some(raw) = news.request else { return };
        let Some((device, id)) = device_of(&self.devices, &raw).and_then(|device| Some((device, new()?))) else {
            return;
        };
        let cm = Cm::of_request(raw, id, device, &self.devices, news.reads);
        self.cms.insert(id, cm);
        let kind = CmKind::ConnectRequest {
            listener,
            device: DeviceIx(device as u16),
            private_data: news.private_data,
            initiator_depth: news.reads.sent,
            responder_resources: news.reads.answered,
        };
        self.events.push_back(Event::Cm { id, kind });
    }

    fn poll_channel(&mut self, device: usize) -> Result<(), VerbsError> {
        while let Some(context) = &self.devices[device].context {
            let cookie = context.completion_event();
            let Some(cookie) = cookie.map_err(|e| advice::failed("taking an event of a completion queue", e))? else {
                break;
            };
            // An event of a queue that is gone has gone with it.
            if let Some(cq) = self.cqs.get_mut(CqId(cookie as u32)) {
                cq.raw.count_event();
                cq.armed = false;
            }
        }
        Ok(())
    }

    fn poll_device(&mut self, device: usize) {
        while let Some(context) = &self.devices[device].context {
            match context.async_event() {
                Ok(Some(news)) => self.async_event(device, news),
                Ok(None) => return,
                // The descriptor of a device that is gone has nothing any more.
                Err(e) => {
                    tracing::debug!("taking an event of {}: {e}", self.devices[device].name);
                    self.device_gone(device);
                    return;
                }
            }
        }
    }

    fn async_event(&mut self, index: usize, news: AsyncNews) {
        let device = &mut self.devices[index];
        if news.kind == DEVICE_FATAL {
            self.device_gone(index);
            return;
        }
        if news.kind == GID_CHANGE
            && let Some(context) = device.usable()
            && let Ok(addrs) = context.addresses(device.port)
        {
            (self.caps[index].addrs, device.ports) = addrs.into_iter().unzip();
            self.anchor(index);
            self.listen_again();
        }
        let Some(event) = AsyncEvent::new(news.kind, news.source) else {
            return;
        };
        let qp = QpId(news.cookie as u32);
        match event {
            AsyncEvent::QpAccessError(_) => {
                if let Some(qp) = self.qps.get_mut(qp) {
                    qp.set_violated();
                }
            }
            AsyncEvent::CommunicationEstablished(_) => {
                // One that was rejected may still have the queue pair of the one that was accepted.
                for (_, cm) in self.cms.iter_mut().filter(|(_, cm)| cm.qp() == Some(qp)) {
                    cm.communication_established();
                }
            }
            _ => {}
        }
        self.events.push_back(Event::Async(DeviceIx(index as u16), event));
    }
}

impl Hardware for HwDevice {
    fn devices(&self) -> &[DeviceCaps] {
        &self.caps
    }

    fn mtu(&self, addr: IpAddr) -> io::Result<Mtu> {
        let index = self.owner(addr).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let device = &self.devices[index];
        let context = device.context.as_ref().ok_or(io::ErrorKind::AddrNotAvailable)?;
        let at = self.caps[index].addrs.iter().position(|of| *of == addr.to_canonical());
        let port = at.and_then(|at| device.ports.get(at)).copied().unwrap_or(1);
        let code = context.port(port)?.active_mtu;
        let mtu = u8::try_from(code).ok().and_then(Mtu::from_code);
        mtu.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.watched.fd()]
    }

    fn poll(&mut self, new: NewCm<'_>) -> Result<bool, VerbsError> {
        let mut ready = std::mem::take(&mut self.ready);
        let failed = |e| advice::failed("looking for events", e);
        self.watched.ready(&mut ready).map_err(failed)?;
        for token in &ready {
            let device = (token / 2).saturating_sub(DEVICES / 2) as usize;
            match *token {
                CONNECTIONS => self.poll_connections(new)?,
                FILES => self.files_changed(),
                token if token % 2 == 0 => self.poll_channel(device)?,
                _ => self.poll_device(device),
            }
        }
        let any = !ready.is_empty();
        self.ready = ready;
        Ok(any)
    }

    fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn arm(&mut self) -> Result<(), VerbsError> {
        for (_, cq) in self.cqs.iter_mut() {
            if !cq.armed && !self.devices[cq.device].gone {
                cq.raw
                    .arm()
                    .map_err(|e| advice::failed("arming a completion queue", e))?;
                cq.armed = true;
            }
        }
        Ok(())
    }

    fn listen(&mut self, addr: SocketAddr, backlog: u32, id: CmRef) -> Result<SocketAddr, VerbsError> {
        let cm = Cm::listen(&self.channel, addr, backlog, id)?;
        let (local, _) = cm.addrs();
        self.cms.insert(id, cm);
        Ok(local)
    }

    fn resolve(&mut self, src: IpAddr, dst: SocketAddr, id: CmRef) -> Result<(), VerbsError> {
        self.cms.insert(id, Cm::resolve(&self.channel, src, dst, id)?);
        Ok(())
    }
}
