//! Memory regions.

use std::sync::Arc;

use libc::{c_int, c_void, size_t};
use parking_lot::Mutex;
use roce::{AccessFlags, Reregister};

use crate::{
    abi::{access, c_enum, ibv_mr, ibv_pd, ibv_sge, rereg},
    core::Core,
    live::{self, Object as _},
    log,
    pd::{Pd, Users},
    pin,
    ret::{self, Errno, Result},
    signals,
};

/// A memory region.
#[repr(C)]
pub(crate) struct Mr {
    abi: ibv_mr,
    pub(crate) core: Arc<Core>,
    state: Mutex<State>,
}

live::object!(Mr, "MR", ibv_mr, |mr| (*mr).context, (*mr).handle);

struct State {
    inner: roce::Mr,
    memory: (*mut c_void, size_t),
    access: u32,
    /// Keeps the domain.
    user: Users,
}

/// Checks the rights that a program asks for.
pub(crate) fn access_flags(flags: u32) -> Result<AccessFlags> {
    // Optional rights are such that a device may leave them out; huge pages make no difference here.
    // Neither is any memory pinned that would have to be found on demand instead.
    let flags = flags & !(access::OPTIONAL_RANGE | access::HUGETLB | access::ON_DEMAND);
    AccessFlags::from_bits(flags)
        .ok_or_else(|| Errno::INVAL.because(format_args!("access flags {flags:#x} has unknown bits")))
}

/// Checks that memory is there, and can be written if anybody may write (`ib_access_writable`).
fn check_memory(addr: *mut c_void, length: size_t, rights: AccessFlags) -> Result<()> {
    const WRITERS: AccessFlags = AccessFlags::LOCAL_WRITE
        .union(AccessFlags::REMOTE_WRITE)
        .union(AccessFlags::REMOTE_ATOMIC)
        .union(AccessFlags::MW_BIND);
    pin::check(addr as usize, length, rights.intersects(WRITERS))
}

fn reg(pd: *mut ibv_pd, addr: *mut c_void, length: size_t, iova: u64, flags: u32) -> Result<*mut ibv_mr> {
    // SAFETY: the program passes a domain of ours.
    let domain = unsafe { Pd::lookup(pd)? };
    let rights = access_flags(flags)?;
    if flags & access::ON_DEMAND != 0 && length == size_t::MAX {
        return Err(Errno::NOTSUP.because("implicit on-demand paging (all of the program's memory) is not supported"));
    }
    check_memory(addr, length, rights)?;
    signals::prepare();
    let device = &domain.engine()?.device;
    // SAFETY: memory of the program, which Rust has no references to. If the program unmaps it, accesses fail.
    let inner = unsafe { device.register_mr(&domain.inner, addr.cast(), length, iova, rights) }?;
    let mr = Mr {
        abi: ibv_mr {
            context: domain.context(),
            pd,
            addr,
            length,
            handle: inner.lkey().0 >> 8,
            lkey: inner.lkey().0,
            rkey: inner.rkey().0,
        },
        core: domain.core.clone(),
        state: Mutex::new(State {
            inner,
            memory: (addr, length),
            access: flags,
            user: domain.users.clone(),
        }),
    };
    mr.publish()
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
    ret::pointer(|| reg(pd, addr, length, iova, flags))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: size_t,
    iova: u64,
    flags: c_int,
) -> *mut ibv_mr {
    ret::pointer(|| reg(pd, addr, length, iova, flags as u32))
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
    ret::pointer(|| reg(pd, addr, length, iova, flags))
}

/// Changes to a region that a program asks for.
struct Change {
    what: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: size_t,
    access: u32,
}

impl Change {
    fn has(&self, what: c_int) -> bool {
        self.what & what != 0
    }

    /// Whether libibverbs would ask the kernel at all.
    fn makes_sense(&self) -> bool {
        self.what & !(rereg::CHANGE_TRANSLATION | rereg::CHANGE_PD | rereg::CHANGE_ACCESS) == 0
            && (!self.has(rereg::CHANGE_TRANSLATION) || (self.length > 0 && !self.addr.is_null()))
            && (!self.has(rereg::CHANGE_PD) || !self.pd.is_null())
            && (self.has(rereg::CHANGE_ACCESS) || self.access == 0)
    }
}

/// Changes a region, or leaves it as it was.
///
/// # Errors
/// EINVAL, EFAULT, and errors of the transport.
///
/// # Safety
/// The program uses neither the region nor the domain otherwise during the call.
unsafe fn reregister(mr: *mut ibv_mr, wanted: &Change) -> Result<()> {
    // SAFETY: the caller's promise.
    let this = unsafe { Mr::lookup(mr)? };
    if wanted.what == 0 {
        return Err(Errno::INVAL.because("flags is 0: nothing is to change"));
    }
    let mut state = this.state.lock();
    let domain = match wanted.has(rereg::CHANGE_PD) {
        // SAFETY: the caller's promise.
        true => Some(unsafe { Pd::of(wanted.pd)? }),
        false => None,
    };
    domain.map_or(Ok(()), |domain| this.core.same(&domain.core))?;
    let (moves, allows) = (wanted.has(rereg::CHANGE_TRANSLATION), wanted.has(rereg::CHANGE_ACCESS));
    let access = if allows { wanted.access } else { state.access };
    let rights = access_flags(access)?;
    let memory = if moves {
        (wanted.addr, wanted.length)
    } else {
        state.memory
    };
    if moves || allows {
        check_memory(memory.0, memory.1, rights)?;
    }
    let new = Reregister {
        pd: domain.map(|domain| &domain.inner),
        memory: moves.then(|| (memory.0.cast(), memory.1, natural(memory.0, access))),
        access: allows.then_some(rights),
    };
    // SAFETY: as for `reg`.
    state.inner = unsafe { state.inner.reregister(&new) }?;
    (state.memory, state.access) = (memory, access);
    if let Some(domain) = domain {
        state.user = domain.users.clone();
    }
    // SAFETY: the public part, which no other thread writes during this call.
    unsafe {
        if domain.is_some() {
            (*mr).pd = wanted.pd;
        }
        ((*mr).addr, (*mr).length) = memory;
        ((*mr).lkey, (*mr).rkey) = (state.inner.lkey().0, state.inner.rkey().0);
    }
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_rereg_mr(
    mr: *mut ibv_mr,
    what: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: size_t,
    flags: c_int,
) -> c_int {
    let access = flags as u32;
    let wanted = Change {
        what,
        pd,
        addr,
        length,
        access,
    };
    if mr.is_null() || !wanted.makes_sense() {
        log::failed("ibv_rereg_mr", Errno::INVAL.because("the arguments don't fit flags"));
        Errno::INVAL.set();
        return rereg::ERR_INPUT;
    }
    // SAFETY: the program's arguments.
    match ret::code(|| unsafe { reregister(mr, &wanted) }) {
        0 => 0,
        _ => rereg::ERR_CMD,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    ret::code(|| Mr::destroy(mr, |this| Ok(this.state.lock().inner.deregister()?)))
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

/// The key of the region that a window is bound to, of the same context; 0 without one, which unbinds it.
///
/// # Errors
/// EINVAL for what is no region of this context.
///
/// # Safety
/// The program does not deregister it during the call.
pub(crate) unsafe fn key_of(core: &Core, mr: *mut ibv_mr) -> Result<u32> {
    let mr = match mr.is_null() {
        true => return Ok(0),
        // SAFETY: the caller's promise.
        false => unsafe { Mr::named(mr)? },
    };
    core.same(&mr.core)?;
    Ok(mr.state.lock().inner.lkey().0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_makes_no_sense_is_told_from_what_is_refused() {
        let some = std::ptr::dangling_mut::<u64>();
        let change = |what, pd, addr, length, access| Change {
            what,
            pd,
            addr,
            length,
            access,
        };
        let (pd, addr) = (some.cast::<ibv_pd>(), some.cast::<c_void>());
        let (no_pd, no_addr) = (std::ptr::null_mut(), std::ptr::null_mut());
        for fine in [
            change(0, no_pd, no_addr, 0, 0),
            change(rereg::CHANGE_TRANSLATION, no_pd, addr, 1, 0),
            change(rereg::CHANGE_PD, pd, no_addr, 0, 0),
            change(rereg::CHANGE_ACCESS, no_pd, no_addr, 0, 1),
            change(
                rereg::CHANGE_TRANSLATION | rereg::CHANGE_PD | rereg::CHANGE_ACCESS,
                pd,
                addr,
                1,
                1,
            ),
        ] {
            assert!(fine.makes_sense(), "{:x}", fine.what);
        }
        for bad in [
            change(1 << 3, pd, addr, 1, 1),
            change(rereg::CHANGE_TRANSLATION, pd, no_addr, 1, 0),
            change(rereg::CHANGE_TRANSLATION, pd, addr, 0, 0),
            change(rereg::CHANGE_PD, no_pd, no_addr, 0, 0),
            change(rereg::CHANGE_PD, pd, no_addr, 0, 1),
        ] {
            assert!(!bad.makes_sense(), "{:x}", bad.what);
        }
    }

    #[test]
    fn rights_that_cost_nothing_are_taken() {
        let write = AccessFlags::LOCAL_WRITE.bits();
        for free in [access::ON_DEMAND, access::HUGETLB, 1 << 20, access::OPTIONAL_RANGE] {
            assert_eq!(access_flags(write | free), Ok(AccessFlags::LOCAL_WRITE));
        }
        assert_eq!(access_flags(write | 1 << 31), Err(Errno::INVAL));
    }
}
