//! The in-flight table of a session: each permit with its request, from the first transmission to the end, and what requests use that
//! belongs to no path: headers, buffers, and the keys of reads.

use core::time::Duration;
use std::{collections::VecDeque, sync::Arc};

use roce_verbs::{
    AccessFlags, Instant, RKey, Sge,
    mem::Pages,
    provider::{DeviceIx, KeyId, KeyKind, KeyStrategy, PdId, RangeError, VerbsError},
    wr::PostError,
};
use smallvec::SmallVec;

use crate::{
    Cx, Direction, IoError, PACKET_LIFETIME, PathError,
    client::{
        buffers::Buffers,
        memory::Memory,
        permits::{Permits, Quarantine},
        request::{Output, SessionId, Submission},
    },
    proto::RdmaRead,
};

/// How long packets of a lost path may still arrive at a server's chunk, or be processed there. Then the permits of requests that the
/// path did not answer are given out again.
const QUARANTINE: Duration = Duration::from_secs(2);
/// The same for requests that no path answered: a kernel's server accepts another path while its disk executes them (which Linux
/// gives up after 30 s, by default).
const LONG_QUARANTINE: Duration = Duration::from_secs(30);
/// Slots of granting a key by work request: a provider may have to end the former key first.
const GRANT_SLOTS: u32 = 2;
/// Rights of memory that only keys of its requests open.
const BOUND: AccessFlags = AccessFlags::LOCAL_WRITE.union(AccessFlags::MW_BIND);

/// Event that a request waits for.
#[derive(Clone, Debug)]
pub(super) enum Waits {
    /// Room in the send queue.
    Room,
    /// The server's answer.
    Answer,
    /// The end of its buffer's key, which the server has not revoked; then it ends with this error number.
    Revocation(u16),
    /// Another path: its own is lost.
    Path,
    /// The time when no packet of the first transmission can arrive; then another path. A read's message differs by path: it names
    /// another key. If the first message came later, the server would use the key of a closed path, and fail this path as well.
    Resend,
    /// The same time; then its result is reported. It was answered by another path. If the user knew earlier, it could write the same
    /// blocks again, and the old data would follow the new.
    Report(Result<(), IoError>),
}

/// A request that has a permit.
#[derive(Debug)]
pub(super) struct InFlight<U> {
    pub(super) request: Submission<U>,
    /// Index of the path.
    pub(super) path: u16,
    /// Number of its connection.
    pub(super) cid: u16,
    /// The processor that it was sent on.
    pub(super) cpu: u16,
    /// The key under which the server may write the buffer of a read, if it ends with the request.
    pub(super) key: Option<RKey>,
    pub(super) waits: Waits,
    /// Lost paths that carried it, for which its permit waits after completion.
    quarantine: Option<Quarantine<u16>>,
}

impl<U> InFlight<U> {
    /// Whether its path may still touch its buffer.
    fn is_on_path(&self) -> bool {
        matches!(self.waits, Waits::Room | Waits::Answer | Waits::Revocation(_))
    }

    /// When none of the packets that lost paths have sent of it can arrive any more.
    fn settled_at(&self) -> Instant {
        let since = self.quarantine.as_ref().map_or(Instant::ZERO, |q| q.since);
        since + PACKET_LIFETIME
    }
}

/// Alignment of a header with its message: a cache line.
const LINE: usize = 64;

/// The headers of a session's requests, by permit.
#[derive(Debug)]
pub(super) struct Headers {
    pub(super) memory: Memory,
    stride: usize,
}

fn stride(max_user_header: u32) -> usize {
    (max_user_header as usize + RdmaRead::LEN_ONE).next_multiple_of(LINE)
}

impl Headers {
    /// For `depth` requests with user headers of at most `max_user_header` bytes.
    pub(super) fn new(depth: u32, max_user_header: u32) -> Result<Self, VerbsError> {
        let stride = stride(max_user_header);
        let pages = Pages::allocate(stride * depth as usize).map_err(|e| VerbsError::Invalid(e.to_string()))?;
        let memory = Memory::new(pages);
        Ok(Self { memory, stride })
    }

    /// Whether there is room for as many requests with such headers.
    pub(super) fn fits(&self, depth: u32, max_user_header: u32) -> bool {
        stride(max_user_header) <= self.stride && self.stride * depth as usize <= self.memory.pages.len()
    }

    /// Registers them with a device, unless they are.
    pub(super) fn add_device(&mut self, cx: &mut Cx<'_>, device: DeviceIx, pd: PdId) -> Result<(), VerbsError> {
        match self.memory.on(device) {
            Some(_) => Ok(()),
            None => self.memory.register(cx, device, pd, AccessFlags::LOCAL_WRITE),
        }
    }

    /// Writes bytes of a request's header.
    pub(super) fn write(&self, permit: u16, offset: usize, bytes: &[u8]) -> Result<(), RangeError> {
        if offset + bytes.len() > self.stride {
            return Err(RangeError {
                offset,
                len: bytes.len(),
                size: self.stride,
            });
        }
        let at = usize::from(permit) * self.stride + offset;
        self.memory.pages.write(at, bytes)
    }

    /// A request's header for a device.
    pub(super) fn sge(&self, permit: u16, len: usize, device: DeviceIx) -> Option<Sge> {
        let mr = self.memory.on(device)?;
        Some(Sge {
            addr: mr.addr + (usize::from(permit) * self.stride) as u64,
            length: len as u32,
            lkey: mr.lkey,
        })
    }
}

/// State of a session for a device that it has paths on.
#[derive(Debug)]
pub(super) struct PerDevice {
    pub(super) device: DeviceIx,
    /// As the system calls it.
    pub(super) name: Option<Arc<str>>,
    pub(super) pd: PdId,
    /// Strategy of the keys that open the buffers of reads.
    pub(super) strategy: KeyStrategy,
    /// Key of each permit, unless the keys are static.
    pub(super) keys: Vec<KeyId>,
    /// The server is asked to revoke them (SEND_WITH_INV).
    pub(super) peer_invalidates: bool,
    /// Keys are granted and revoked without a work request.
    pub(super) instant: bool,
}

impl PerDevice {
    fn free(self, cx: &mut Cx<'_>) {
        for key in self.keys {
            cx.provider.free_key(key);
        }
        cx.provider.free_pd(self.pd);
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct InFlightTable<U> {
    session: SessionId,
    pub(super) permits: Permits<u16>,
    /// By permit.
    entries: Vec<Option<InFlight<U>>>,
    /// Requests in flight, by path.
    pub(super) loads: Vec<u32>,
    pub(super) headers: Option<Headers>,
    pub(super) buffers: Buffers,
    devices: SmallVec<[PerDevice; 1]>,
    /// Requests that wait for a permit.
    pub(super) waiting: VecDeque<Submission<U>>,
    /// Permits of requests that wait to be [resent](Waits::Resend) or [reported](Waits::Report).
    held: Vec<u16>,
}

impl<U> InFlightTable<U> {
    pub(super) fn new(session: SessionId) -> Self {
        Self {
            session,
            permits: Permits::new(0),
            entries: Vec::new(),
            loads: Vec::new(),
            headers: None,
            buffers: Buffers::new(0),
            devices: SmallVec::new(),
            waiting: VecDeque::new(),
            held: Vec::new(),
        }
    }

    /// Number of permits.
    pub(super) fn depth(&self) -> usize {
        self.entries.len()
    }

    /// The request that has a permit.
    pub(super) fn get(&self, permit: u16) -> Option<&InFlight<U>> {
        self.entries.get(usize::from(permit))?.as_ref()
    }

    /// The same, to change it.
    pub(super) fn get_mut(&mut self, permit: u16) -> Option<&mut InFlight<U>> {
        self.entries.get_mut(usize::from(permit))?.as_mut()
    }

    /// Gives a permit to a request, which is [sent](Self::launch) next.
    pub(super) fn insert(&mut self, permit: u16, request: Submission<U>) {
        self.entries[usize::from(permit)] = Some(InFlight {
            request,
            path: 0,
            cid: 0,
            cpu: 0,
            key: None,
            waits: Waits::Path,
            quarantine: None,
        });
    }

    /// Assigns a request to a path.
    pub(super) fn launch(&mut self, permit: u16, path: u16, cid: u16, cpu: u16) {
        let Some(entry) = self.get_mut(permit) else { return };
        (entry.path, entry.cid, entry.cpu, entry.waits) = (path, cid, cpu, Waits::Room);
        let path = usize::from(path);
        if self.loads.len() <= path {
            self.loads.resize(path + 1, 0);
        }
        self.loads[path] += 1;
    }

    fn unload(&mut self, path: u16) {
        if let Some(load) = self.loads.get_mut(usize::from(path)) {
            *load = load.saturating_sub(1);
        }
    }

    /// Ends a request that its path has answered, or holds it back.
    pub(super) fn finish(
        &mut self,
        now: Instant,
        permit: u16,
        result: Result<(), IoError>,
        out: &mut VecDeque<Output<U>>,
    ) {
        let Some(entry) = self.get_mut(permit) else { return };
        let path = entry.path;
        // A read that is done twice changes nothing.
        if entry.quarantine.is_some() && entry.request.direction == Direction::Write && now < entry.settled_at() {
            entry.waits = Waits::Report(result);
            self.held.push(permit);
        } else {
            self.end(permit, result, out);
        }
        self.unload(path);
    }

    /// Ends a request: its permit comes back.
    pub(super) fn end(&mut self, permit: u16, result: Result<(), IoError>, out: &mut VecDeque<Output<U>>) {
        let entry = self.entries.get_mut(usize::from(permit)).and_then(Option::take);
        let Some(entry) = entry else { return };
        match entry.quarantine.filter(|quarantine| !quarantine.is_over()) {
            None => self.permits.give(permit),
            Some(quarantine) => self.permits.give_later(permit, quarantine),
        }
        out.push_back(entry.request.done(self.session, result));
    }

    /// Ends a request that no path has answered.
    pub(super) fn end_unanswered(&mut self, now: Instant, permit: u16, why: &PathError, out: &mut VecDeque<Output<U>>) {
        let quarantine = self.get_mut(permit).and_then(|entry| entry.quarantine.as_mut());
        if let Some(quarantine) = quarantine {
            quarantine.until = quarantine.until.max(now + LONG_QUARANTINE);
        }
        self.end(permit, Err(IoError::Path(why.clone())), out);
    }

    /// A path is down and drained: nothing of it touches a buffer any more. Returns the permits of its requests that have no answer.
    pub(super) fn path_lost(
        &mut self,
        cx: &mut Cx<'_>,
        path: u16,
        device: Option<DeviceIx>,
        out: &mut VecDeque<Output<U>>,
    ) -> Vec<u16> {
        let keys = device.and_then(|device| self.devices.iter().find(|d| d.device == device));
        let keys = keys.map_or(&[][..], |d| &d.keys);
        let mut lost = Vec::new();
        let mut answered = Vec::new();
        for (permit, entry) in (0..).zip(&mut self.entries) {
            let Some(entry) = entry.as_mut().filter(|entry| entry.path == path && entry.is_on_path()) else {
                continue;
            };
            if entry.key.take().is_some()
                && let Some(key) = keys.get(usize::from(permit))
            {
                cx.provider.close_key(*key);
            }
            match entry.waits {
                // The key ended with the queue pair.
                Waits::Revocation(errno) => {
                    answered.push((permit, errno));
                    continue;
                }
                Waits::Answer => {
                    let quarantine = Quarantine::new(path, cx.now, cx.now + QUARANTINE);
                    entry.quarantine = Some(match entry.quarantine.take() {
                        Some(before) => before.and(quarantine),
                        None => quarantine,
                    });
                }
                _ => {}
            }
            entry.waits = Waits::Path;
            lost.push(permit);
        }
        if let Some(load) = self.loads.get_mut(usize::from(path)) {
            *load = 0;
        }
        for (permit, errno) in answered {
            self.end(permit, IoError::of_reply(errno), out);
        }
        lost
    }

    /// Holds the reads that have been sent, until no packet of them can arrive. The other requests stay in the list.
    pub(super) fn hold_reads(&mut self, permits: &mut Vec<u16>) {
        permits.retain(|permit| {
            let entry = self.entries[usize::from(*permit)].as_mut();
            let sent =
                |entry: &&mut InFlight<U>| entry.quarantine.is_some() && entry.request.direction == Direction::Read;
            let Some(entry) = entry.filter(sent) else { return true };
            entry.waits = Waits::Resend;
            self.held.push(*permit);
            false
        });
    }

    /// Reports requests that have been held for long enough. Returns those to be sent again.
    pub(super) fn release_held(&mut self, now: Instant, out: &mut VecDeque<Output<U>>) -> Vec<u16> {
        let entries = &self.entries;
        let is_settled = |permit: &mut u16| {
            let entry = entries[usize::from(*permit)].as_ref();
            entry.is_some_and(|entry| entry.settled_at() <= now)
        };
        let mut settled: Vec<u16> = self.held.extract_if(.., is_settled).collect();
        settled.retain(|permit| {
            let Some(entry) = self.get_mut(*permit) else {
                return false;
            };
            let Waits::Report(result) = &mut entry.waits else {
                debug_assert!(matches!(entry.waits, Waits::Resend), "it is nowhere else");
                return true;
            };
            let result = core::mem::replace(result, Ok(()));
            self.end(*permit, result, out);
            false
        });
        settled
    }

    /// No path is left: takes the requests out of those that are held that could be sent again.
    pub(super) fn take_unsent(&mut self) -> Vec<u16> {
        let entries = &self.entries;
        let is_unsent = |permit: &mut u16| {
            let entry = entries[usize::from(*permit)].as_ref();
            entry.is_some_and(|entry| matches!(entry.waits, Waits::Resend))
        };
        self.held.extract_if(.., is_unsent).collect()
    }

    /// The session closes while packets of held requests may still arrive at the server: their results are unknown.
    pub(super) fn fail_held(&mut self, out: &mut VecDeque<Output<U>>) {
        for permit in core::mem::take(&mut self.held) {
            self.end(permit, Err(IoError::Path(PathError::Closed)), out);
        }
    }

    /// When the next request has been held for long enough.
    pub(super) fn next_timeout(&self) -> Option<Instant> {
        let held = self
            .held
            .iter()
            .filter_map(|permit| self.entries[usize::from(*permit)].as_ref());
        held.map(InFlight::settled_at).min()
    }

    /// The server has completed all that arrived by this path.
    pub(super) fn path_gone(&mut self, path: u16) {
        self.permits.path_gone(path);
        self.quarantines().for_each(|quarantine| quarantine.path_gone(path));
    }

    /// A path was removed; another may get its index.
    pub(super) fn path_forgotten(&mut self, path: u16) {
        self.permits.path_forgotten(path);
        self.quarantines()
            .for_each(|quarantine| quarantine.path_forgotten(&path));
    }

    fn quarantines(&mut self) -> impl Iterator<Item = &mut Quarantine<u16>> {
        let entries = self.entries.iter_mut().flatten();
        entries.filter_map(|entry| entry.quarantine.as_mut())
    }
}

/// Devices.
impl<U> InFlightTable<U> {
    pub(super) fn device(&self, device: DeviceIx) -> Option<&PerDevice> {
        self.devices.iter().find(|d| d.device == device)
    }

    /// Slots of the send queue that a request on a device takes at most.
    pub(super) fn slots(&self, device: Option<DeviceIx>, direction: Direction) -> u32 {
        let of = device.and_then(|device| self.device(device));
        match of {
            Some(d) if direction == Direction::Read && d.strategy != KeyStrategy::Static && !d.instant => {
                GRANT_SLOTS + 1
            }
            _ => 1,
        }
    }

    /// The key that opens the buffer of a permit's read on a device.
    pub(super) fn key_of(&self, device: Option<DeviceIx>, permit: u16) -> Result<KeyId, PostError> {
        let of = device.and_then(|device| self.device(device));
        let key = of.and_then(|d| d.keys.get(usize::from(permit))).copied();
        key.ok_or(PostError::Invalid("the permit has no key of its own"))
    }

    /// The session's protection domain on a device.
    pub(super) fn pd_on(&mut self, cx: &mut Cx<'_>, device: DeviceIx, revoked: bool) -> Result<PdId, VerbsError> {
        if let Some(of) = self.device(device) {
            return Ok(of.pd);
        }
        let caps = cx.provider.devices().get(usize::from(device.0));
        let caps = caps.ok_or_else(|| VerbsError::Invalid("no such device".into()))?;
        let (strategy, instant) = (KeyStrategy::for_reads(caps, revoked), caps.instant_keys);
        let peer_invalidates = strategy.peer_can_invalidate() && caps.tells_invalidated;
        let name = caps.name.clone();
        if revoked && strategy == KeyStrategy::Static {
            tracing::warn!(
                device = device.0,
                "the device can't revoke keys: the buffers of reads stay open"
            );
        }
        let pd = cx.provider.alloc_pd(device)?;
        self.devices.push(PerDevice {
            device,
            name,
            pd,
            strategy,
            keys: Vec::new(),
            peer_invalidates,
            instant,
        });
        Ok(pd)
    }

    /// Frees the resources on devices without paths. Queue pairs there are destroyed.
    pub(super) fn retain_devices(&mut self, cx: &mut Cx<'_>, used: &[DeviceIx]) {
        for of in core::mem::take(&mut self.devices) {
            if used.contains(&of.device) {
                self.devices.push(of);
                continue;
            }
            if let Some(headers) = &mut self.headers {
                headers.memory.deregister(cx, Some(of.device));
            }
            self.buffers.remove_device(cx, of.device);
            of.free(cx);
        }
    }

    /// Prepares a device that a path uses: headers, keys and buffers for `depth` permits.
    pub(super) fn prepare_device(
        &mut self,
        cx: &mut Cx<'_>,
        device: DeviceIx,
        depth: u32,
        max_user_header: u32,
    ) -> Result<(), VerbsError> {
        let depth = depth.min(u16::MAX.into());
        if self.entries.iter().skip(depth as usize).any(Option::is_some) {
            return Err(VerbsError::State(
                "the server's queue is another than that of what is in flight".into(),
            ));
        }
        if self.headers.as_ref().is_none_or(|h| !h.fits(depth, max_user_header)) {
            let mut headers = Headers::new(depth, max_user_header)?;
            for of in &self.devices {
                headers.add_device(cx, of.device, of.pd)?;
            }
            if let Some(mut old) = self.headers.replace(headers) {
                old.memory.deregister(cx, None);
            }
        }
        self.permits.set_depth(depth as u16);
        self.entries.resize_with(depth as usize, || None);
        let Some(of) = self.devices.iter_mut().find(|d| d.device == device) else {
            return Err(VerbsError::Invalid("no such device".into()));
        };
        let (kind, access) = match of.strategy {
            KeyStrategy::Static => (None, AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE),
            KeyStrategy::FastRegistration => (Some(KeyKind::FastRegistration), BOUND),
            KeyStrategy::Window1 => (Some(KeyKind::Window1), BOUND),
            KeyStrategy::Window2 => (Some(KeyKind::Window2), BOUND),
        };
        while let Some(kind) = kind.filter(|_| of.keys.len() < depth as usize) {
            of.keys.push(cx.provider.alloc_key(of.pd, kind)?);
        }
        let pd = of.pd;
        if let Some(headers) = &mut self.headers {
            headers.add_device(cx, device, pd)?;
        }
        self.buffers.add_device(cx, device, pd, access)
    }

    /// Frees the resources on all devices. The paths are gone.
    pub(super) fn close(&mut self, cx: &mut Cx<'_>) {
        if let Some(mut headers) = self.headers.take() {
            headers.memory.deregister(cx, None);
        }
        self.buffers.close(cx);
        for of in self.devices.drain(..) {
            of.free(cx);
        }
    }
}
