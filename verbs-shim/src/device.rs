//! The list of devices: one for each interface that has an address.

use std::{
    cell::RefCell,
    fs,
    net::IpAddr,
    ptr,
    sync::{Mutex, MutexGuard, PoisonError, atomic::AtomicU64},
};

use libc::{c_char, c_int};
use roce::{LinkState, Mtu, gids::device_names, iface, names};

use crate::{
    abi::{IBV_NODE_CA, IBV_TRANSPORT_IB, ibv_device},
    config,
    errno::Result,
    fork,
    gids::{self, GidTable},
    live, log, ret, unopened,
};

/// Bytes behind the public part: providers' libraries (libmlx5) read fields of the private structure around it, and must find
/// zeroes there.
const TAIL: usize = 1024;

/// A device as programs see it, and its private part. Never freed.
#[repr(C)]
pub(crate) struct VerbsDevice {
    abi: ibv_device,
    tail: [u8; TAIL],
    pub(crate) name: String,
    pub(crate) interface: String,
    pub(crate) index: c_int,
    pub(crate) gids: GidTable,
    /// How often the link went down while a device was open.
    pub(crate) link_downed: AtomicU64,
}

// SAFETY: the pointers in it are null; everything is read only after it is made, but for the table, which has a lock.
unsafe impl Sync for VerbsDevice {}
// SAFETY: as above.
unsafe impl Send for VerbsDevice {}

/// All devices that were ever listed; they are never freed, since programs keep pointers to them. A `std` lock: it needs nothing
/// that a fork could leave half done.
static DEVICES: Mutex<Vec<&'static VerbsDevice>> = Mutex::new(Vec::new());

type Held = (MutexGuard<'static, Vec<&'static VerbsDevice>>, MutexGuard<'static, ()>);

thread_local! {
    static HELD: RefCell<Option<Held>> = const { RefCell::new(None) };
}

/// Locks the tables that a forked child keeps, before the fork.
extern "C" fn hold() {
    let held = (known(), live::hold());
    HELD.with(|h| *h.borrow_mut() = Some(held));
}

/// Unlocks them after a fork, in both processes.
extern "C" fn release() {
    HELD.with(|h| h.borrow_mut().take());
}

/// Returns all devices that were ever listed.
pub(crate) fn known() -> MutexGuard<'static, Vec<&'static VerbsDevice>> {
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Copies a name into a zeroed C array.
fn put(to: &mut [c_char], text: &str) {
    let room = to.len() - 1;
    for (c, b) in to[..room].iter_mut().zip(text.bytes()) {
        *c = b as c_char;
    }
}

impl VerbsDevice {
    fn new(index: usize, name: String, interface: &str, only: Vec<IpAddr>) -> Self {
        let mut abi = ibv_device {
            ops: [ptr::null_mut(); 2],
            node_type: IBV_NODE_CA,
            transport_type: IBV_TRANSPORT_IB,
            name: [0; 64],
            dev_name: [0; 64],
            dev_path: [0; 256],
            ibdev_path: [0; 256],
        };
        put(&mut abi.name, &name);
        put(&mut abi.dev_name, &format!("uverbs{index}"));
        put(&mut abi.dev_path, &format!("/sys/class/infiniband_verbs/uverbs{index}"));
        put(&mut abi.ibdev_path, &format!("/sys/class/infiniband/{name}"));
        Self {
            abi,
            tail: [0; TAIL],
            name,
            interface: interface.to_owned(),
            index: index as c_int,
            gids: GidTable::new(interface, only),
            link_downed: AtomicU64::new(0),
        }
    }

    /// The device of a pointer that the program has from our list.
    pub(crate) fn of(device: *mut ibv_device) -> Option<&'static Self> {
        known().iter().copied().find(|d| ptr::eq(d.as_abi(), device))
    }

    pub(crate) fn as_abi(&'static self) -> *mut ibv_device {
        // Programs get a mutable pointer by the C type, and may not write.
        ptr::from_ref(self).cast_mut().cast()
    }

    /// The node's GUID as rxe makes it: the EUI-64 of the interface's MAC address, in network byte order.
    pub(crate) fn guid(&self) -> [u8; 8] {
        let mac = self.mac();
        [mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]]
    }

    /// The interface's MAC address.
    pub(crate) fn mac(&self) -> [u8; 6] {
        let text = fs::read_to_string(format!("/sys/class/net/{}/address", self.interface)).unwrap_or_default();
        let mut out = [0; 6];
        for (byte, part) in out.iter_mut().zip(text.trim().split(':')) {
            *byte = u8::from_str_radix(part, 16).unwrap_or(0);
        }
        out
    }

    /// The number of the interface (`if_index`), or 0.
    pub(crate) fn ifindex(&self) -> u32 {
        let name = std::ffi::CString::new(self.interface.as_str()).unwrap_or_default();
        // SAFETY: a C string.
        unsafe { libc::if_nametoindex(name.as_ptr()) }
    }

    /// Returns the largest path MTU that the interface carries, or a smaller one if set; `None` if it carries none.
    pub(crate) fn path_mtu(&self) -> Option<Mtu> {
        let carries = Mtu::for_interface(iface::mtu_of(&self.interface).unwrap_or(1500))?;
        Some(config::mtu().map_or(carries, |wanted| wanted.min(carries)))
    }

    /// The interface's link.
    pub(crate) fn link(&self) -> LinkState {
        LinkState::of(Some(&self.interface))
    }
}

/// The interfaces to make devices of, with the addresses that each is restricted to.
fn interfaces() -> Result<Vec<(String, Vec<IpAddr>)>> {
    let mut out: Vec<(String, Vec<IpAddr>)> = Vec::new();
    let asked = config::addresses();
    for ip in &asked {
        match gids::interface_of(*ip)? {
            Some(name) => match out.iter_mut().find(|(n, _)| *n == name) {
                Some((_, ips)) => ips.push(*ip),
                None => out.push((name, vec![*ip])),
            },
            None => config::complain(format_args!("{}: no interface has the address {ip}", config::ADDR)),
        }
    }
    if asked.is_empty() {
        let all = iface::interfaces()?;
        let names = device_names(&all).into_iter();
        out.extend(names.map(|name| (name.to_owned(), Vec::new())));
    }
    Ok(out)
}

/// Makes forked children start over.
pub(crate) fn watch_forks() {
    fork::watch(hold, release);
}

/// The devices that there are now.
///
/// # Errors
/// When a query fails: EMFILE without a descriptor left.
pub(crate) fn list() -> Result<Vec<&'static VerbsDevice>> {
    watch_forks();
    log::start();
    let (wanted, names) = (interfaces()?, config::device_names());
    let all: Vec<&str> = wanted.iter().map(|(interface, _)| interface.as_str()).collect();
    let given = names.assign(&all);
    let mut known = known();
    let mut out = Vec::new();
    for (position, (interface, only)) in wanted.iter().enumerate() {
        let old = known.iter().find(|d| d.interface == *interface).copied();
        let device = old.unwrap_or_else(|| {
            let has = |name: &str| known.iter().any(|d| d.name == name);
            // A device that was there before keeps its name.
            let name = given[position].filter(|name| !has(name)).map_or_else(
                || names::usual_name(known.len(), |name| has(name) || given.contains(&Some(name))),
                str::to_owned,
            );
            let device = VerbsDevice::new(known.len(), name, interface, only.clone());
            let device: &'static VerbsDevice = Box::leak(Box::new(device));
            known.push(device);
            device
        });
        out.push(device);
    }
    drop(known);
    unopened::listed(|| {
        let names = out.iter().map(|d| format!("{} ({})", d.name, d.interface));
        names.collect()
    });
    Ok(out)
}

/// Returns the name in the structure, as rdma-core does; it may be the program's own.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    if device.is_null() {
        return ptr::null();
    }
    // SAFETY: the program passes a structure of this type; nothing is read here.
    unsafe { (&raw const (*device).name).cast() }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_get_device_index(device: *mut ibv_device) -> c_int {
    ret::value(-1, || VerbsDevice::of(device).map_or(-1, |d| d.index))
}

#[unsafe(no_mangle)]
extern "C" fn ibv_get_device_guid(device: *mut ibv_device) -> u64 {
    ret::value(0, || {
        VerbsDevice::of(device).map_or(0, |d| u64::from_ne_bytes(d.guid()))
    })
}
