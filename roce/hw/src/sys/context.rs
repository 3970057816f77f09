//! Open devices.

use std::{
    ffi::CStr,
    io,
    mem::{self, MaybeUninit},
    net::{IpAddr, Ipv6Addr},
    os::fd::BorrowedFd,
    ptr::{self, NonNull},
};

use rdma_sys::{
    ibv_ack_async_event, ibv_async_event, ibv_comp_channel, ibv_context, ibv_create_comp_channel, ibv_device,
    ibv_device_attr, ibv_fork_init, ibv_free_device_list, ibv_get_async_event, ibv_get_cq_event, ibv_get_device_list,
    ibv_get_device_name, ibv_gid_entry, ibv_open_device, ibv_port_attr, ibv_query_device, ibv_transport_type,
};

use roce_verbs::{EventSource, Qpn};

use super::{
    ffi::{_ibv_query_gid_table, GID_TYPE_ROCE_V2},
    object::{Owned, done, found},
};

/// Open device, with a completion channel for all of its completion queues.
pub(crate) struct Context {
    channel: Owned<ibv_comp_channel>,
    raw: Owned<ibv_context>,
}

/// Device that was found, open or not.
pub(crate) struct Found {
    pub(crate) name: String,
    /// Name of its device file.
    pub(crate) file: String,
    pub(crate) opened: io::Result<Context>,
}

/// Asynchronous event: the number of `enum ibv_event_type`, which may be one that our headers do not know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AsyncNews {
    pub(crate) kind: u32,
    /// Queue pair, or completion queue by its cookie; `Port` for all other events.
    pub(crate) source: EventSource,
    /// Cookie of the queue pair or completion queue that it is about, or 0.
    pub(crate) cookie: u64,
}

/// Returns a C string of a structure or the library.
///
/// # Safety
/// It ends with a zero, and lives during the call.
unsafe fn text(s: *const libc::c_char) -> String {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(s) }.to_string_lossy().into_owned()
}

/// Returns the name of a device.
///
/// # Safety
/// It is one of a list that is not freed, or of an open context.
pub(super) unsafe fn name_of(device: *mut ibv_device) -> String {
    // SAFETY: the caller's promise; the name is a part of the device.
    unsafe { text(ibv_get_device_name(device)) }
}

impl Context {
    /// Opens all devices that speak InfiniBand's transport and are `wanted`.
    ///
    /// # Errors
    /// If there is no list of devices.
    pub(crate) fn open_all(mut wanted: impl FnMut(&str) -> bool) -> io::Result<Vec<Found>> {
        let mut count = 0;
        // SAFETY: fills in the number of devices.
        let list = unsafe { ibv_get_device_list(&raw mut count) };
        let list = NonNull::new(list).ok_or_else(io::Error::last_os_error)?;
        let mut found = Vec::new();
        for i in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the list has so many devices, and is freed below.
            let (device, name, file, transport) = unsafe {
                let device = *list.as_ptr().add(i);
                let file = text((*device).dev_name.as_ptr());
                (device, name_of(device), file, (*device).transport_type)
            };
            if transport != ibv_transport_type::IBV_TRANSPORT_IB || !wanted(&name) {
                continue;
            }
            let opened = Self::open(device);
            found.push(Found { name, file, opened });
        }
        // SAFETY: what was made above. Devices that are open live on.
        unsafe { ibv_free_device_list(list.as_ptr()) };
        Ok(found)
    }

    fn open(device: *mut ibv_device) -> io::Result<Self> {
        // SAFETY: a device of a list that is not freed yet.
        let raw = unsafe { Owned::new(ibv_open_device(device)) }?;
        // SAFETY: the context is open.
        let channel = unsafe { Owned::new(ibv_create_comp_channel(raw.as_ptr())) }?;
        let context = Self { channel, raw };
        for fd in [context.async_fd(), context.channel_fd()] {
            rustix::io::ioctl_fionbio(fd, true)?;
        }
        Ok(context)
    }

    /// Has children of the process leave registered memory alone. Only before the first registration.
    pub(crate) fn fork_init() -> io::Result<()> {
        // SAFETY: no arguments.
        done(unsafe { ibv_fork_init() })
    }

    pub(super) fn as_ptr(&self) -> *mut ibv_context {
        self.raw.as_ptr()
    }

    pub(super) fn channel(&self) -> *mut ibv_comp_channel {
        self.channel.as_ptr()
    }

    pub(crate) fn attributes(&self) -> io::Result<ibv_device_attr> {
        // SAFETY: plain data, which the call fills.
        unsafe {
            let mut attr: ibv_device_attr = mem::zeroed();
            done(ibv_query_device(self.as_ptr(), &raw mut attr))?;
            Ok(attr)
        }
    }

    pub(crate) fn port(&self, number: u8) -> io::Result<ibv_port_attr> {
        // SAFETY: plain data, which the call fills as far as the library knows it.
        unsafe {
            let mut attr: ibv_port_attr = mem::zeroed();
            done(rdma_sys::___ibv_query_port(self.as_ptr(), number, &raw mut attr))?;
            Ok(attr)
        }
    }

    /// Returns the addresses of the RoCE v2 GIDs of a port or of all, each with its port, without link-local ones, which need an
    /// interface.
    pub(crate) fn addresses(&self, port: Option<u8>) -> io::Result<Vec<(IpAddr, u8)>> {
        let mut room = 0;
        for port in 1..=self.attributes()?.phys_port_cnt {
            room += usize::try_from(self.port(port)?.gid_tbl_len).unwrap_or(0);
        }
        let mut entries: Vec<ibv_gid_entry> = Vec::with_capacity(room);
        // SAFETY: room for so many entries of this size; as many as it returns are filled in.
        unsafe {
            let size = size_of::<ibv_gid_entry>();
            let count = _ibv_query_gid_table(self.as_ptr(), entries.as_mut_ptr(), room, 0, size);
            let negative = |_| io::Error::from_raw_os_error(count.unsigned_abs() as i32);
            entries.set_len(usize::try_from(count).map_err(negative)?.min(room));
        }
        let of_port = |e: &&ibv_gid_entry| port.is_none_or(|port| u32::from(port) == e.port_num);
        let v2 = entries.iter().filter(|e| e.gid_type == GID_TYPE_ROCE_V2);
        // SAFETY: both members are 16 bytes.
        let addrs = v2
            .filter(of_port)
            .map(|e| (Ipv6Addr::from(unsafe { e.gid.raw }), e.port_num as u8));
        let mut out: Vec<(IpAddr, u8)> = Vec::new();
        for (addr, port) in addrs.filter(|(addr, _)| !addr.is_unicast_link_local() && !addr.is_unspecified()) {
            let addr = IpAddr::V6(addr).to_canonical();
            if !out.iter().any(|(known, _)| *known == addr) {
                out.push((addr, port));
            }
        }
        Ok(out)
    }

    pub(crate) fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context has the descriptor as long as it lives.
        unsafe { BorrowedFd::borrow_raw((*self.as_ptr()).async_fd) }
    }

    pub(crate) fn channel_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel has the descriptor as long as it lives.
        unsafe { BorrowedFd::borrow_raw((*self.channel()).fd) }
    }

    /// Takes an event of the channel: the cookie of the completion queue, whose [`Cq::count_event`](super::Cq::count_event) must be
    /// called.
    pub(crate) fn completion_event(&self) -> io::Result<Option<u64>> {
        let (mut cq, mut cookie) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: room for both.
        let found = found(unsafe { ibv_get_cq_event(self.channel(), &raw mut cq, &raw mut cookie) })?;
        Ok(found.then_some(cookie as u64))
    }

    /// Returns the next asynchronous event, already acknowledged: destroying what it is about need not wait for us.
    pub(crate) fn async_event(&self) -> io::Result<Option<AsyncNews>> {
        let mut event = MaybeUninit::<ibv_async_event>::zeroed();
        // SAFETY: room for an event.
        if !found(unsafe { ibv_get_async_event(self.as_ptr(), event.as_mut_ptr()) })? {
            return Ok(None);
        }
        let event = event.as_mut_ptr();
        // SAFETY: the event is filled in. Its kind is read as the number that it is in C: a value of Rust's enumeration may
        // only be one that our headers know. What it is about lives until the event is acknowledged.
        unsafe {
            let kind = (&raw const (*event).event_type).cast::<u32>().read();
            let (source, cookie) = match kind {
                0 => {
                    let cookie = (*(*event).element.cq).cq_context as u64;
                    (EventSource::Cq(cookie as u32), cookie)
                }
                1..=7 | 16 => {
                    let qp = (*event).element.qp;
                    (EventSource::Qp(Qpn::new((*qp).qp_num)), (*qp).qp_context as u64)
                }
                _ => (EventSource::Port, 0),
            };
            ibv_ack_async_event(event);
            Ok(Some(AsyncNews { kind, source, cookie }))
        }
    }
}
