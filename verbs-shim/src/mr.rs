//! Memory regions.

use std::{ptr, sync::Arc};

use libc::{c_int, c_void, size_t};
use parking_lot::Mutex;
use roce::{AccessFlags, MemoryRegion, Reregister};

use crate::{
    abi::{access, c_enum, ibv_mr, ibv_pd, ibv_sge},
    context::Core,
    pd::{Pd, Users},
    pin,
    ret::{self, Errno, Result, object},
};

/// A memory region.
#[repr(C)]
pub(crate) struct Mr {
    abi: ibv_mr,
    core: Arc<Core>,
    state: Mutex<State>,
}

struct State {
    inner: roce::Mr,
    access: u32,
    _user: Users,
}

/// Checks the rights that a program asks for.
pub(crate) fn access_flags(flags: u32) -> Result<AccessFlags> {
    // Optional rights are such that a device may leave them out; huge pages make no difference here.
    let flags = flags & !(access::OPTIONAL_RANGE | access::HUGETLB);
    if flags & access::ON_DEMAND != 0 {
        return Err(Errno::NOTSUP);
    }
    AccessFlags::from_bits(flags).ok_or(Errno::INVAL)
}

/// Checks that memory is there, and can be written if anybody may write (`ib_access_writable`).
fn check_memory(addr: *mut c_void, length: size_t, rights: AccessFlags) -> Result<()> {
    const WRITERS: AccessFlags = AccessFlags::LOCAL_WRITE
        .union(AccessFlags::REMOTE_WRITE)
        .union(AccessFlags::REMOTE_ATOMIC)
        .union(AccessFlags::MW_BIND);
    pin::check(addr as usize, length, rights.intersects(WRITERS))
}

/// What to register.
#[derive(Clone, Copy)]
struct Range {
    addr: *mut c_void,
    length: size_t,
    iova: u64,
}

fn register(pd: &Pd, range: Range, flags: u32) -> Result<roce::Mr> {
    let rights = access_flags(flags)?;
    check_memory(range.addr, range.length, rights)?;
    let device = &pd.engine()?.device;
    // SAFETY: the program promises that the memory stays until it deregisters; Rust has no references to it.
    Ok(unsafe { device.register_mr(&pd.inner, range.addr.cast(), range.length, range.iova, rights) }?)
}

fn reg(pd: *mut ibv_pd, range: Range, flags: u32) -> Result<*mut ibv_mr> {
    // SAFETY: the program passes a domain of ours.
    let domain = unsafe { Pd::of(object(pd)?) };
    domain.core.alive()?;
    let inner = register(domain, range, flags)?;
    let mr = Box::leak(Box::new(Mr {
        abi: ibv_mr {
            // SAFETY: as above.
            context: unsafe { (*pd).context },
            pd,
            addr: range.addr,
            length: range.length,
            handle: inner.lkey().0 >> 8,
            lkey: inner.lkey().0,
            rkey: inner.rkey().0,
        },
        core: domain.core.clone(),
        state: Mutex::new(State {
            inner,
            access: flags,
            _user: domain.user(),
        }),
    }));
    Ok(&raw mut mr.abi)
}

/// The start of a region's addresses when the program does not choose them.
fn natural(addr: *mut c_void, flags: u32) -> u64 {
    match flags & AccessFlags::ZERO_BASED.bits() {
        0 => addr as u64,
        _ => 0,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: size_t, flags: c_int) -> *mut ibv_mr {
    let flags = flags as u32;
    let iova = natural(addr, flags);
    ret::pointer(|| reg(pd, Range { addr, length, iova }, flags))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: size_t,
    iova: u64,
    flags: c_int,
) -> *mut ibv_mr {
    ret::pointer(|| reg(pd, Range { addr, length, iova }, flags as u32))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: size_t,
    iova: u64,
    flags: libc::c_uint,
) -> *mut ibv_mr {
    // ibv_reg_mr with optional rights comes here, with the address as iova.
    let zero_based = flags & AccessFlags::ZERO_BASED.bits() != 0;
    let iova = if zero_based && iova == addr as u64 { 0 } else { iova };
    ret::pointer(|| reg(pd, Range { addr, length, iova }, flags))
}

/// `ibv_rereg_mr_flags`.
mod change {
    pub(super) const TRANSLATION: c_int = 1;
    pub(super) const PD: c_int = 1 << 1;
    pub(super) const ACCESS: c_int = 1 << 2;
    use libc::c_int;
}

/// `IBV_REREG_MR_ERR_INPUT`: the region is as it was, which holds for every error here.
const ERR_INPUT: c_int = -1;

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_rereg_mr(
    mr: *mut ibv_mr,
    what: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: size_t,
    flags: c_int,
) -> c_int {
    let done = ret::code(|| {
        // SAFETY: the program passes a region of ours, which it does not use otherwise meanwhile.
        let this = unsafe { &mut *object(mr)?.cast::<Mr>() };
        this.core.alive()?;
        let known = change::TRANSLATION | change::PD | change::ACCESS;
        if what == 0 || what & !known != 0 || (what & change::PD != 0 && pd.is_null()) {
            return Err(Errno::INVAL);
        }
        if what & change::TRANSLATION != 0 && (length == 0 || addr.is_null()) {
            return Err(Errno::INVAL);
        }
        let new_pd = if what & change::PD != 0 { pd } else { this.abi.pd };
        // SAFETY: a domain of ours.
        let domain = unsafe { Pd::of(new_pd) };
        let mut state = this.state.lock();
        let rights = if what & change::ACCESS != 0 {
            flags as u32
        } else {
            state.access
        };
        let moves = what & change::TRANSLATION != 0;
        let checked = access_flags(rights)?;
        let (start, bytes) = if moves {
            (addr, length)
        } else {
            (this.abi.addr, this.abi.length)
        };
        if moves || what & change::ACCESS != 0 {
            check_memory(start, bytes, checked)?;
        }
        let new = Reregister {
            pd: (what & change::PD != 0).then_some(&domain.inner),
            memory: moves.then(|| (addr.cast(), length, natural(addr, rights))),
            access: (what & change::ACCESS != 0).then_some(checked),
        };
        // SAFETY: as for `register`.
        let inner = unsafe { state.inner.reregister(&new) }?;
        this.abi.pd = new_pd;
        if moves {
            (this.abi.addr, this.abi.length) = (addr, length);
        }
        (this.abi.lkey, this.abi.rkey) = (inner.lkey().0, inner.rkey().0);
        *state = State {
            inner,
            access: rights,
            _user: domain.user(),
        };
        Ok(())
    });
    if done == 0 { 0 } else { ERR_INPUT }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes a region of ours.
        let this = unsafe { &*object(mr)?.cast::<Mr>() };
        if this.core.alive().is_err() {
            // A forked child's copy: the region is the parent's.
            return Ok(());
        }
        this.state.lock().inner.deregister()?;
        // SAFETY: boxed by `reg`; the program does not use it again.
        drop(unsafe { Box::from_raw(mr.cast::<Mr>()) });
        Ok(())
    })
}

/// Advice is about paging on demand, which is not done here.
pub(crate) unsafe extern "C" fn advise_mr(
    _pd: *mut ibv_pd,
    _advice: c_enum,
    _flags: u32,
    _sges: *mut ibv_sge,
    _count: u32,
) -> c_int {
    libc::EOPNOTSUPP
}

/// A null region pointer, for unbinding windows.
pub(crate) fn keys(mr: *mut ibv_mr) -> Option<(u32, *mut ibv_pd)> {
    if ptr::eq(mr, ptr::null()) {
        return None;
    }
    // SAFETY: not null: a region of ours.
    unsafe { Some(((*mr).lkey, (*mr).pd)) }
}
