//! Open devices.

use std::{
    ffi::CStr,
    io,
    mem::{self, MaybeUninit},
    net::{IpAddr, Ipv6Addr},
    os::fd::BorrowedFd,
    ptr::NonNull,
};

use rdma_sys::{
    ibv_ack_async_event, ibv_async_event, ibv_close_device, ibv_context, ibv_device, ibv_device_attr, ibv_fork_init,
    ibv_free_device_list, ibv_get_async_event, ibv_get_device_list, ibv_get_device_name, ibv_gid_entry,
    ibv_open_device, ibv_port_attr, ibv_query_device, ibv_transport_type,
};

use super::{
    NODES, done,
    ffi::{_ibv_query_gid_table, GID_TYPE_ROCE_V2},
    made, set_nonblocking, unless_empty,
};

/// An open device.
#[derive(Debug)]
pub(crate) struct Context {
    raw: NonNull<ibv_context>,
    name: String,
}

// SAFETY: libibverbs lets any thread use a context, and several at a time.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// A device that was found, open or not.
pub(crate) struct Found {
    pub(crate) name: String,
    /// Its device file.
    pub(crate) file: String,
    pub(crate) opened: io::Result<Context>,
}

/// Object of an asynchronous event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Element {
    /// A queue pair, by its number.
    Qp(u32),
    /// A completion queue, by its cookie.
    Cq(u64),
    /// The device, or a port.
    Device,
}

/// An asynchronous event: the number of `enum ibv_event_type`, which may be one that our headers do not know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AsyncNews {
    pub(crate) kind: u32,
    pub(crate) element: Element,
}

/// A C string of a structure or the library.
///
/// # Safety
/// It ends with a zero, and lives during the call.
unsafe fn text(s: *const libc::c_char) -> String {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(s) }.to_string_lossy().into_owned()
}

/// The name of a device.
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
    /// When the list of devices can't be had.
    pub(crate) fn open_all(mut wanted: impl FnMut(&str) -> bool) -> io::Result<Vec<Found>> {
        let mut count = 0;
        // SAFETY: fills in the number of devices.
        let list = made(unsafe { ibv_get_device_list(&raw mut count) })?;
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
            let opened = Self::open(device, &name);
            let file = format!("{NODES}/{file}");
            found.push(Found { name, file, opened });
        }
        // SAFETY: what was made above. Devices that are open live on.
        unsafe { ibv_free_device_list(list.as_ptr()) };
        Ok(found)
    }

    fn open(device: *mut ibv_device, name: &str) -> io::Result<Self> {
        // SAFETY: a device of a list that is not freed yet.
        let raw = made(unsafe { ibv_open_device(device) })?;
        let context = Self {
            raw,
            name: name.to_owned(),
        };
        // SAFETY: the context is open.
        set_nonblocking(unsafe { (*raw.as_ptr()).async_fd })?;
        Ok(context)
    }

    /// Has children of the process leave registered memory alone. Only before the first registration.
    pub(crate) fn fork_init() -> io::Result<()> {
        // SAFETY: no arguments.
        done(unsafe { ibv_fork_init() })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn as_ptr(&self) -> *mut ibv_context {
        self.raw.as_ptr()
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

    /// The addresses of the RoCE v2 GIDs of a port or of all, each with its port, without link-local ones, which say nothing without
    /// an interface.
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

    /// The next asynchronous event, already acknowledged: destroying what it is about need not wait for us.
    pub(crate) fn async_event(&self) -> io::Result<Option<AsyncNews>> {
        let mut event = MaybeUninit::<ibv_async_event>::zeroed();
        // SAFETY: room for an event.
        let got = done(unsafe { ibv_get_async_event(self.as_ptr(), event.as_mut_ptr()) });
        if unless_empty(got)?.is_none() {
            return Ok(None);
        }
        let event = event.as_mut_ptr();
        // SAFETY: the event is filled in. Its kind is read as the number that it is in C: a value of Rust's enumeration may
        // only be one that our headers know. What it is about lives until the event is acknowledged.
        unsafe {
            let kind = (&raw const (*event).event_type).cast::<u32>().read();
            let element = match kind {
                0 => Element::Cq((*(*event).element.cq).cq_context as u64),
                1..=7 | 16 => Element::Qp((*(*event).element.qp).qp_num),
                _ => Element::Device,
            };
            ibv_ack_async_event(event);
            Ok(Some(AsyncNews { kind, element }))
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: what is made on it keeps it, so nothing is left.
        if let Err(e) = done(unsafe { ibv_close_device(self.as_ptr()) }) {
            tracing::warn!("closing {} failed: {e}", self.name);
        }
    }
}
