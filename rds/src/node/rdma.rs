//! Regions of sockets, and operations on their way or on memory of the node itself.

use core::{net::SocketAddr, ops::Range};
use std::sync::Arc;

use roce_verbs::{
    AccessFlags,
    mem::Pages,
    provider::{Cx, DeviceIx, Memory, Provider, Registration, VerbsError},
};

use super::{Node, region::Region};
use crate::{
    Error,
    conn::{Ended, Outgoing, Staged},
    proto::{Extension, Header, MAX_MESSAGE, RdmaCookie},
    rdma::{Operation, OperationFlags, OperationKind, RdmaNotice, RdmaStatus, RegionRights},
    socket::SocketId,
};

/// Bytes of a region at most: those of an operation, and of a page for its beginning and end, as in the kernel.
const MAX_REGION: usize = MAX_MESSAGE as usize + 4096;

impl Node {
    /// Registers memory of a socket that is bound, for all peers that get the cookie. Its addresses begin at 0, as those of the kernel's
    /// regions do. Hardware can't register memory of other processes.
    ///
    /// # Errors
    /// [`Error::NotConnected`] if the socket is not bound, [`Error::TooLong`] above 1 MiB and a page, [`Error::Invalid`] of an empty
    /// range, [`Error::Fault`], [`Error::NoDevice`], [`Error::Unsupported`]; [`Error::Limit`] of the socket or the device.
    pub fn register(
        &mut self,
        cx: &mut Cx<'_>,
        id: SocketId,
        memory: Arc<dyn Memory>,
        range: Range<usize>,
        rights: RegionRights,
    ) -> Result<RdmaCookie, Error> {
        let max_regions = self.config.max_regions;
        let socket = self.get(id)?;
        let local = socket.bound.ok_or(Error::NotConnected)?.ip();
        match range.len() {
            0 => return Err(Error::Invalid),
            len if len > MAX_REGION => return Err(Error::TooLong),
            _ if range.end > memory.len() => return Err(Error::Fault),
            _ if socket.regions >= max_regions => return Err(Error::Limit),
            _ => {}
        }
        let devices = cx.provider.devices();
        let device = devices.iter().position(|device| device.addrs.contains(&local));
        let device = DeviceIx(device.ok_or(Error::NoDevice)? as u16);
        let pd = self.domain(cx.provider, device).map_err(register_error)?;
        let mut access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ;
        if rights.writable {
            access |= AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
        }
        let what = Registration {
            memory: memory.clone(),
            offset: range.start,
            len: range.len(),
            iova: Some(0),
            access,
        };
        let mr = cx.provider.register(pd, &what).map_err(register_error)?;
        self.get(id)?.regions += 1;
        let region = Region {
            mr: mr.id,
            socket: id,
            memory,
            range,
            rights,
        };
        self.regions.insert((local, mr.rkey.0), region);
        self.counters.count_registered(what.len);
        Ok(RdmaCookie::new(mr.rkey.0, 0))
    }

    /// Frees a region of a socket. At the end of the turn the memory is left alone, and a peer that uses the key loses its connection.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the socket has no such region, perhaps since it was for use once.
    pub fn free_region(&mut self, id: SocketId, cookie: RdmaCookie) -> Result<(), Error> {
        let local = self.get(id)?.bound.ok_or(Error::NotConnected)?;
        match self.free(id, local, cookie.rkey(), |_| true) {
            true => Ok(()),
            false => Err(Error::Invalid),
        }
    }

    /// Returns whether a cookie is of a region of a socket, at any offset.
    pub fn has_region(&self, id: SocketId, cookie: RdmaCookie) -> bool {
        let socket = self.sockets.get(id.0 as usize);
        let bound = socket.and_then(|socket| socket.bound);
        let region = bound.and_then(|bound| self.regions.get(&(bound.ip(), cookie.rkey())));
        region.is_some_and(|region| region.socket == id)
    }

    /// Number of regions of a socket; `None`: of all.
    pub fn regions(&self, id: Option<SocketId>) -> usize {
        match id {
            Some(id) => self.sockets.get(id.0 as usize).map_or(0, |socket| socket.regions),
            None => self.regions.len(),
        }
    }

    fn free(&mut self, id: SocketId, local: SocketAddr, rkey: u32, is_meant: impl FnOnce(&Region) -> bool) -> bool {
        let key = (local.ip(), rkey);
        let region = self.regions.get(&key).filter(|region| region.socket == id);
        if !region.is_some_and(is_meant) {
            return false;
        }
        if let Some(region) = self.regions.remove(&key) {
            self.counters.count_freed(region.range.len());
            self.freed_regions.push(region.mr);
        }
        if let Ok(socket) = self.get(id) {
            socket.regions -= 1;
        }
        true
    }

    /// A socket is closed.
    pub(super) fn free_regions_of(&mut self, id: SocketId) {
        let Self {
            regions,
            freed_regions,
            counters,
            ..
        } = self;
        regions.retain(|_, region| {
            let stays = region.socket != id;
            if !stays {
                counters.count_freed(region.range.len());
                freed_regions.push(region.mr);
            }
            stays
        });
    }

    pub(super) fn deregister_freed(&mut self, provider: &mut dyn Provider) {
        self.freed_regions.drain(..).for_each(|mr| provider.deregister(mr));
    }

    /// Switches reports of operations that failed on or off, also of those without [`OperationFlags::NOTIFY`] (`RDS_RECVERR`).
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn set_reports_errors(&mut self, id: SocketId, on: bool) -> Result<(), Error> {
        self.get(id)?.reports_errors = on;
        Ok(())
    }

    /// Takes the next report of an operation, and leaves all else that the socket could receive.
    ///
    /// # Errors
    /// [`Error::WouldBlock`].
    pub fn notice(&mut self, id: SocketId) -> Result<RdmaNotice, Error> {
        self.get(id)?.pop_notice().ok_or(Error::WouldBlock)
    }

    /// Operations of a socket whose memory devices use, canceled ones among them.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn operating(&mut self, id: SocketId) -> Result<usize, Error> {
        self.get(id)?;
        Ok(self.links.iter().map(|(_, link)| link.operations.of(id)).sum())
    }

    /// A message has come: an operation of its sender on this region was done before.
    pub(super) fn operated_by_peer(&mut self, to: SocketAddr, header: &Header) {
        let rkey = header.extensions().find_map(|extension| match extension {
            Extension::Rdma { rkey } => Some(rkey),
            _ => None,
        });
        if let (Some(rkey), Some(&id)) = (rkey, self.bound.get(&to)) {
            self.free(id, to, rkey, |region| region.rights.use_once);
        }
    }

    pub(super) fn operations_ended(&mut self, ended: Vec<Ended>) {
        for (ticket, status) in ended {
            if let Some(socket) = self.sockets.get_mut(ticket.socket.0 as usize) {
                if let Some(status) = status {
                    socket.operation_ended(ticket.notice(status));
                }
                Self::tell(&mut self.out, (ticket.socket, socket));
            }
        }
    }

    /// Messages leave the queue that were not acknowledged.
    pub(super) fn release(&mut self, messages: &[Outgoing]) {
        for message in messages {
            let Some(id) = message.socket else { continue };
            if let Some(socket) = self.sockets.get_mut(id.0 as usize) {
                socket.unacked -= message.data.len();
                Self::tell(&mut self.out, (id, socket));
            }
        }
    }

    /// Messages leave the queue whose operation could not begin.
    pub(super) fn could_not_begin(&mut self, messages: &[Outgoing]) {
        self.release(messages);
        let tickets = messages.iter().filter_map(Outgoing::ticket);
        self.operations_ended(tickets.map(|ticket| (ticket, Some(RdmaStatus::OtherError))).collect());
    }

    /// Reports the end of an operation that was not queued, if its socket wants to know.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn report(&mut self, id: SocketId, operation: &Operation, status: RdmaStatus) -> Result<(), Error> {
        let socket = self.get(id)?;
        let notifies = operation.flags.contains(OperationFlags::NOTIFY);
        if notifies || status != RdmaStatus::Success && socket.reports_errors {
            let token = operation.token;
            socket.notify(RdmaNotice { token, status });
            Self::tell(&mut self.out, (id, &mut self.sockets[id.0 as usize]));
        }
        Ok(())
    }

    /// Does an operation on memory of another socket of this node. Returns whether it could.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for atomics on memory of this process: the device has no part in it, so they would exclude none of its own.
    pub(super) fn operate_here(&mut self, id: SocketId, to: SocketAddr, operation: &Operation) -> Result<bool, Error> {
        let status = match operation.kind.is_atomic() {
            true => self.update_here(to, operation)?,
            false => self.copy_here(to, operation),
        };
        let is_done = status == RdmaStatus::Success;
        self.report(id, operation, status)?;
        if is_done && let Some(&peer) = self.bound.get(&to) {
            self.free(peer, to, operation.cookie.rkey(), |region| region.rights.use_once);
        }
        Ok(is_done)
    }

    fn copy_here(&self, to: SocketAddr, operation: &Operation) -> RdmaStatus {
        let writes = operation.kind == OperationKind::Write;
        let remote = self.remote_here(to, operation, writes);
        let Some(remote) = remote.and_then(|(memory, range)| Pages::part_of(memory, range).ok()) else {
            return RdmaStatus::RemoteError;
        };
        let Some(local) = Staged::new(operation) else {
            return RdmaStatus::OtherError;
        };
        let mut bytes = vec![0; operation.bytes()];
        let copied = match writes {
            true => local.pages().read(0, &mut bytes).and_then(|()| remote.write(0, &bytes)),
            false => remote.read(0, &mut bytes).and_then(|()| local.pages().write(0, &bytes)),
        };
        match copied.map(|()| local.finish()) {
            Ok(Some(())) => RdmaStatus::Success,
            Ok(None) => RdmaStatus::OtherError,
            Err(_) => RdmaStatus::RemoteError,
        }
    }

    fn update_here(&self, to: SocketAddr, operation: &Operation) -> Result<RdmaStatus, Error> {
        let Some((memory, range)) = self.remote_here(to, operation, true) else {
            return Ok(RdmaStatus::RemoteError);
        };
        let foreign = memory.foreign().ok_or(Error::Unsupported)?;
        let Some(local) = Staged::new(operation) else {
            return Ok(RdmaStatus::OtherError);
        };
        let change = |former: u64| match operation.kind {
            OperationKind::FetchAdd { add } => Some(former.wrapping_add(add)),
            OperationKind::CompareSwap { compare, swap } => (former == compare).then_some(swap),
            OperationKind::Write | OperationKind::Read => None,
        };
        let is_word = range.start.is_multiple_of(8);
        let Some(former) = is_word.then(|| foreign.update(range.start, change)).flatten() else {
            return Ok(RdmaStatus::RemoteError);
        };
        let told = local.pages().write(0, &former.to_ne_bytes()).ok();
        Ok(match told.and_then(|()| local.finish()) {
            Some(()) => RdmaStatus::Success,
            None => RdmaStatus::OtherError,
        })
    }

    /// Returns the memory that an operation names. `None`: the key, the range or the right is wrong.
    fn remote_here(
        &self,
        to: SocketAddr,
        operation: &Operation,
        changes: bool,
    ) -> Option<(&Arc<dyn Memory>, Range<usize>)> {
        let region = self.regions.get(&(to.ip(), operation.cookie.rkey()))?;
        let first = usize::try_from(operation.cookie.address(operation.remote)).ok()?;
        let end = first.checked_add(operation.bytes())?;
        if end > region.range.len() || changes && !region.rights.writable {
            return None;
        }
        let at = region.range.start;
        Some((&region.memory, at + first..at + end))
    }
}

/// Returns why memory could not be registered.
fn register_error(error: VerbsError) -> Error {
    match error {
        VerbsError::Limit(_) => Error::Limit,
        VerbsError::Unsupported(_) => Error::Unsupported,
        VerbsError::Io { source, .. } if source.kind() == std::io::ErrorKind::Unsupported => Error::Unsupported,
        _ => Error::Fault,
    }
}
