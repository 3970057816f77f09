//! A client's session: version, open devices, and the messages that are not I/O.

use std::{collections::HashMap, sync::Arc, sync::atomic::Ordering::Relaxed};

use parking_lot::{Mutex, RwLock};
use roce_verbs::provider::Provider;
use rtrs::{Direction, server::Request};
use zerocopy::IntoBytes;

use super::{Shared, io};
use crate::{
    backend::{ExportId, OpenExport},
    block::Geometry,
    errno::Errno,
    proto::{
        AccessMode, CACHE_FUA, CACHE_WRITEBACK, ClientMsg, MsgIo, MsgOpen, MsgOpenRsp, MsgSessInfo, SECTOR,
        VERSION_MAJOR,
    },
};

/// A device that a session has open. Requests in flight hold it; when the last of them is over after a close, the file
/// is closed and the close answered.
pub(super) struct OpenDevice<P: Provider> {
    // Dropped in this order: the answer tells that writes are durable and the next writer may come.
    export: OpenExport,
    _place: Place,
    id: u32,
    /// As the client spells it.
    name: Vec<u8>,
    /// What it stands for.
    found: ExportId,
    closing: Closing<P>,
}

/// One of the devices that the server may have open.
struct Place(Arc<Shared>);

impl Place {
    fn take(shared: &Arc<Shared>) -> Option<Self> {
        let max = shared.max_open as u64;
        let taken = (shared.counters.open).fetch_update(Relaxed, Relaxed, |n| (n < max).then_some(n + 1));
        taken.is_ok().then(|| Self(shared.clone()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.counters.open.fetch_sub(1, Relaxed);
    }
}

impl<P: Provider> OpenDevice<P> {
    pub(super) fn export(&self) -> &OpenExport {
        &self.export
    }
}

/// The close request, to be answered when this goes.
struct Closing<P: Provider>(Mutex<Option<Request<P>>>);

impl<P: Provider> Drop for Closing<P> {
    fn drop(&mut self) {
        if let Some(r) = self.0.get_mut().take() {
            r.complete(0);
        }
    }
}

/// Devices by their id.
struct Table<P: Provider> {
    open: HashMap<u32, Arc<OpenDevice<P>>>,
    next: u32,
}

/// A session.
pub(super) struct Session<P: Provider> {
    shared: Arc<Shared>,
    name: String,
    devices: RwLock<Table<P>>,
    /// Held while a device is opened: the same name twice gives the same device.
    opening: Mutex<()>,
}

impl<P: Provider> Session<P> {
    pub(super) fn new(shared: Arc<Shared>, name: &str) -> Self {
        Self {
            shared,
            name: name.into(),
            devices: RwLock::new(Table {
                open: HashMap::new(),
                next: 0,
            }),
            opening: Mutex::new(()),
        }
    }

    fn complain(&self, what: impl std::fmt::Display) {
        self.shared.counters.malformed.fetch_add(1, Relaxed);
        if let Some(suppressed) = self.shared.logs.malformed.pass() {
            tracing::warn!(session = self.name, suppressed, "{what}");
        }
    }

    /// Starts what the client asks for; does not block.
    pub(super) fn request(self: Arc<Self>, request: Request<P>) {
        let message = match ClientMsg::parse(request.user_header()) {
            Ok(m) => m,
            Err(e) => {
                self.complain(e);
                return request.complete(libc::EINVAL);
            }
        };
        match message {
            ClientMsg::Io(m) => self.io(&m, request),
            ClientMsg::SessInfo(m) => {
                let version = m.ver.min(VERSION_MAJOR);
                answer(request, MsgSessInfo::response(version).as_bytes());
            }
            // Opening and closing wait for the file system.
            ClientMsg::Open(m) => {
                // An answer that does not fit must not leave a device open.
                if request.direction() != Direction::Read || request.data_len() < size_of::<MsgOpenRsp>() {
                    return request.complete(libc::EINVAL);
                }
                let shared = self.shared.clone();
                shared.pool.run(move || match self.open(&m) {
                    Ok(rsp) => answer(request, rsp.as_bytes()),
                    Err(e) => request.complete(e.raw()),
                });
            }
            ClientMsg::Close(m) => {
                let shared = self.shared.clone();
                shared.pool.run(move || self.close(m.device_id.get(), request));
            }
        }
    }

    fn io(&self, m: &MsgIo, request: Request<P>) {
        let device = self.devices.read().open.get(&m.device_id.get()).cloned();
        match device {
            Some(device) => io::start(&self.shared, device, m, request),
            None => {
                self.complain(format_args!("request for device {}, which is not open", m.device_id));
                request.complete(libc::ENOTCONN);
            }
        }
    }

    fn open(&self, m: &MsgOpen) -> Result<MsgOpenRsp, Errno> {
        let r = self.open_device(m);
        let c = &self.shared.counters;
        match &r {
            Ok(_) => c.opens.fetch_add(1, Relaxed),
            Err(e) => {
                if let Some(suppressed) = self.shared.logs.refused.pass() {
                    tracing::warn!(session = self.name, request = ?m, suppressed, "open refused: {e}");
                }
                c.refused.fetch_add(1, Relaxed)
            }
        };
        let d = r?;
        Ok(open_response(d.id, &d.export.image().geometry()))
    }

    fn open_device(&self, m: &MsgOpen) -> Result<Arc<OpenDevice<P>>, Errno> {
        let name = m.name().ok_or(Errno::EINVAL)?;
        let mode = AccessMode::from_wire(m.access_mode).ok_or(Errno::EINVAL)?;
        let _one_at_a_time = self.opening.lock();
        {
            let t = self.devices.read();
            // A client that reconnects opens again what it has open.
            if let Some(d) = t.open.values().find(|d| d.name == name) {
                return Ok(d.clone());
            }
            if t.open.len() >= self.shared.max_devices {
                return Err(self.at_limit(Errno::EMFILE));
            }
        }
        let place = Place::take(&self.shared).ok_or_else(|| self.at_limit(Errno::ENFILE))?;
        let found = self.shared.exports.find(&self.name, name)?;
        let id = found.id().clone();
        // One device under two spellings would be closed under both with the first.
        if self.devices.read().open.values().any(|d| d.found == id) {
            return Err(Errno::EEXIST);
        }
        let export = self.shared.exports.open_found(found, mode)?;
        if let Some(suppressed) = self.shared.logs.devices.pass() {
            tracing::info!(session = self.name, image = export.image().label(), %mode, suppressed, "device opened");
        }
        Ok(self.enter(export, place, name, id))
    }

    fn at_limit(&self, e: Errno) -> Errno {
        self.shared.counters.refused_limit.fetch_add(1, Relaxed);
        e
    }

    /// Gives an open device its id.
    fn enter(&self, export: OpenExport, place: Place, name: &[u8], found: ExportId) -> Arc<OpenDevice<P>> {
        let mut t = self.devices.write();
        // Ids are not used again at once, so that a late request can't reach another device.
        while t.open.contains_key(&t.next) {
            t.next = t.next.wrapping_add(1);
        }
        let id = t.next;
        t.next = id.wrapping_add(1);
        let device = Arc::new(OpenDevice {
            export,
            _place: place,
            id,
            name: name.into(),
            found,
            closing: Closing(Mutex::new(None)),
        });
        t.open.insert(id, device.clone());
        device
    }

    /// The kernel's server answers success also for a device that is not open.
    fn close(&self, id: u32, request: Request<P>) {
        let Some(device) = self.devices.write().open.remove(&id) else {
            return request.complete(0);
        };
        if let Some(suppressed) = self.shared.logs.devices.pass() {
            tracing::info!(
                session = self.name,
                image = device.export.image().label(),
                suppressed,
                "device closed"
            );
        }
        *device.closing.0.lock() = Some(request);
    }
}

/// Sends a message as the data of a read.
fn answer<P: Provider>(request: Request<P>, message: &[u8]) {
    let errno = match (request.direction(), request.write_data(0, message)) {
        (Direction::Read, Ok(())) => 0,
        _ => libc::EINVAL,
    };
    request.complete(errno);
}

/// The answer to an open request. 16-bit fields hold what fits.
fn open_response(id: u32, g: &Geometry) -> MsgOpenRsp {
    let sectors = |bytes: u64| u32::try_from(bytes / SECTOR).unwrap_or(u32::MAX);
    let small = |n: u32| u16::try_from(n).unwrap_or(1 << 15);
    let mut rsp = MsgOpenRsp::new();
    rsp.device_id.set(id);
    rsp.nsectors.set(g.size / SECTOR);
    rsp.logical_block_size.set(small(g.logical_block_size));
    rsp.physical_block_size.set(small(g.physical_block_size));
    rsp.max_hw_sectors.set(sectors(g.max_transfer.into()));
    rsp.max_segments.set(128);
    rsp.max_discard_sectors.set(sectors(g.max_discard));
    if g.max_discard > 0 {
        rsp.discard_granularity.set(g.discard_granularity);
    }
    if g.write_cache {
        rsp.cache_policy |= CACHE_WRITEBACK;
    }
    if g.fua {
        rsp.cache_policy |= CACHE_FUA;
    }
    rsp
}
