//! The extended way to post: `ibv_wr_start`, one call per work request, `ibv_wr_complete`.

use std::cell::UnsafeCell;

use libc::{c_int, c_void, size_t};
use parking_lot::{RawMutex, lock_api::RawMutex as _};
use roce::{
    LKey, RKey, RemoteAddr, SendOp, Sge,
    verbs::{Srqn, Target},
};

use crate::{
    abi::{ibv_ah, ibv_data_buf, ibv_mw, ibv_mw_bind_info, ibv_qp, ibv_qp_ex, ibv_sge},
    batch::{self, Batch},
    live::Object as _,
    post,
    qp::Qp,
    ret::{self, Errno, Result},
};

/// Work requests between start and complete.
pub(crate) struct Builder {
    /// Held from start to complete or abort: threads that share a queue pair take turns.
    lock: RawMutex,
    work: UnsafeCell<Work>,
}

#[derive(Default)]
struct Work {
    batch: Batch,
    /// Error of the first bad call; complete returns it and posts nothing.
    error: Option<Errno>,
}

// SAFETY: the work is only touched between start and complete, under the lock.
unsafe impl Sync for Builder {}

impl Builder {
    pub(crate) fn new() -> Self {
        Self {
            lock: RawMutex::INIT,
            work: UnsafeCell::default(),
        }
    }
}

/// The public part of a queue pair.
pub(crate) fn public(qp_base: ibv_qp) -> ibv_qp_ex {
    ibv_qp_ex {
        qp_base,
        comp_mask: 0,
        wr_id: 0,
        wr_flags: 0,
        wr_atomic_cmp_swp,
        wr_atomic_fetch_add,
        wr_bind_mw,
        wr_local_inv,
        wr_rdma_read,
        wr_rdma_write,
        wr_rdma_write_imm,
        wr_send,
        wr_send_imm,
        wr_send_inv,
        wr_send_tso,
        wr_set_ud_addr,
        wr_set_xrc_srqn,
        wr_set_inline_data,
        wr_set_inline_data_list,
        wr_set_sge,
        wr_set_sge_list,
        wr_start,
        wr_complete,
        wr_abort,
        wr_atomic_write,
    }
}

/// Adds to the work of a queue pair; an error is kept for complete.
///
/// # Safety
/// `qp` is a queue pair of ours on which this thread has called start.
unsafe fn with(qp: *mut ibv_qp_ex, body: impl FnOnce(&Qp, &mut Batch) -> Result<()>) {
    ret::leaf((), || {
        // SAFETY: the caller's promise.
        let Some(this) = (unsafe { Qp::any(qp.cast()) }) else {
            return;
        };
        // SAFETY: nobody else is at the work.
        let work = unsafe { &mut *this.builder().work.get() };
        if let Err(e) = body(this, &mut work.batch) {
            work.error.get_or_insert(e);
        }
    });
}

/// Begins a work request.
///
/// # Safety
/// As [`with`].
unsafe fn begin(qp: *mut ibv_qp_ex, op: Result<SendOp>) {
    // SAFETY: the caller's promise.
    unsafe { begin_with(qp, |_| op) }
}

/// Begins a work request whose operation depends on the queue pair.
///
/// # Safety
/// As [`with`].
unsafe fn begin_with(qp: *mut ibv_qp_ex, op: impl FnOnce(&Qp) -> Result<SendOp>) {
    // SAFETY: the program sets both fields before the call.
    let (wr_id, flags) = unsafe { ((*qp).wr_id, (*qp).wr_flags) };
    // SAFETY: the caller's promise.
    unsafe {
        with(qp, |this, batch| {
            batch.begin(wr_id, op(this)?, post::flags(flags));
            Ok(())
        });
    }
}

fn remote(addr: u64, rkey: u32) -> RemoteAddr {
    let rkey = RKey(rkey);
    RemoteAddr { addr, rkey }
}

macro_rules! begins {
    ($($name:ident($($arg:ident: $ty:ty),*) => $op:expr;)*) => {$(
        unsafe extern "C" fn $name(qp: *mut ibv_qp_ex $(, $arg: $ty)*) {
            // SAFETY: the program has called start on a queue pair of ours.
            unsafe { begin(qp, Ok($op)) };
        }
    )*};
}

begins! {
    wr_atomic_cmp_swp(rkey: u32, addr: u64, compare: u64, swap: u64) =>
        SendOp::CompareSwap { remote: remote(addr, rkey), compare, swap };
    wr_atomic_fetch_add(rkey: u32, addr: u64, add: u64) => SendOp::FetchAdd { remote: remote(addr, rkey), add };
    wr_local_inv(rkey: u32) => SendOp::LocalInvalidate(RKey(rkey));
    wr_rdma_read(rkey: u32, addr: u64) => SendOp::Read(remote(addr, rkey));
    wr_rdma_write(rkey: u32, addr: u64) => SendOp::Write(remote(addr, rkey));
    wr_rdma_write_imm(rkey: u32, addr: u64, imm: u32) => SendOp::WriteWithImm(remote(addr, rkey), u32::from_be(imm));
    wr_send() => SendOp::Send;
    wr_send_imm(imm: u32) => SendOp::SendWithImm(u32::from_be(imm));
    wr_send_inv(rkey: u32) => SendOp::SendWithInv(RKey(rkey));
}

unsafe extern "C" fn wr_send_tso(qp: *mut ibv_qp_ex, _header: *mut c_void, _size: u16, _mss: u16) {
    // SAFETY: the program has called start on a queue pair of ours.
    unsafe { begin(qp, Err(Errno::NOTSUP.because("this device has no TSO"))) };
}

unsafe extern "C" fn wr_bind_mw(qp: *mut ibv_qp_ex, mw: *mut ibv_mw, rkey: u32, info: *const ibv_mw_bind_info) {
    let mut bound = None;
    // SAFETY: as above; the binding is readable, the window and the region are ours, and live until they are bound.
    unsafe {
        begin_with(qp, |this| {
            let op = post::bind_type2(this, mw, rkey, &info.read_unaligned())?;
            bound = Some(op);
            Ok(op)
        });
        if let Some(op) = bound {
            with(qp, |_, batch| {
                batch.binds(mw, &op);
                Ok(())
            });
        }
    }
}

unsafe extern "C" fn wr_atomic_write(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, word: *const c_void) {
    // SAFETY: as above; the program passes eight bytes, which are taken now.
    unsafe {
        begin(qp, Ok(SendOp::AtomicWrite(remote(addr, rkey))));
        with(qp, |_, batch| {
            batch.inline(std::iter::once((word.cast(), 8)));
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, qpn: u32, qkey: u32) {
    // SAFETY: as above; the address handle is ours.
    unsafe {
        with(qp, |this, batch| {
            batch.target(post::datagram(this, ah, qpn, qkey)?);
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_xrc_srqn(qp: *mut ibv_qp_ex, srqn: u32) {
    // SAFETY: as above.
    unsafe {
        with(qp, |_, batch| {
            batch.target(Target::Srq(Srqn::new(srqn)));
            Ok(())
        });
    }
}

/// Copies inline data, if it is not too long.
///
/// # Safety
/// As [`with`]; the buffers are readable.
unsafe fn inline(qp: *mut ibv_qp_ex, buffers: impl Iterator<Item = (*const u8, usize)> + Clone) {
    // SAFETY: the caller's promise.
    unsafe {
        with(qp, |this, batch| {
            let total = buffers
                .clone()
                .try_fold(0u64, |sum, (_, len)| sum.checked_add(len as u64));
            if total.is_none_or(|t| t > this.max_inline()) {
                return Err(Errno::INVAL.because(format_args!(
                    "more inline data than max_inline_data, {} bytes",
                    this.max_inline()
                )));
            }
            batch.inline(buffers);
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, len: size_t) {
    // SAFETY: as above; the program passes `len` bytes.
    unsafe { inline(qp, std::iter::once((addr.cast_const().cast(), len))) };
}

unsafe extern "C" fn wr_set_inline_data_list(qp: *mut ibv_qp_ex, count: size_t, list: *const ibv_data_buf) {
    // SAFETY: as above; the program passes `count` buffers.
    unsafe {
        let buffers = (0..count).map(|n| list.add(n).read_unaligned());
        inline(qp, buffers.map(|b| (b.addr.cast_const().cast(), b.length)));
    }
}

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: as above.
    unsafe {
        with(qp, |_, batch| {
            let lkey = LKey(lkey);
            batch.sges(&[Sge { addr, length, lkey }]);
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, count: size_t, list: *const ibv_sge) {
    // SAFETY: as above; the program passes `count` elements.
    unsafe {
        with(qp, |this, batch| {
            post::sge_count(c_int::try_from(count).unwrap_or(c_int::MAX), this.max_send_sge())?;
            batch.sges(&batch::sge_list(list, count));
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    ret::value((), || {
        // SAFETY: a queue pair of ours.
        let Some(this) = (unsafe { Qp::any(qp.cast()) }) else {
            return;
        };
        if this.alive().is_ok() {
            this.builder().lock.lock();
        }
        // SAFETY: locked; in a forked child there is one thread.
        let work = unsafe { &mut *this.builder().work.get() };
        work.batch.clear();
        // SAFETY: as above.
        work.error = unsafe { Qp::posting(qp.cast()) }.err();
    });
}

unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    ret::code(|| {
        // SAFETY: the program has called start on a queue pair of ours.
        let this = unsafe { Qp::any(qp.cast()) }.ok_or_else(|| Errno::INVAL.because("the queue pair was destroyed"))?;
        this.alive()?;
        // SAFETY: locked by start.
        let work = unsafe { &mut *this.builder().work.get() };
        // SAFETY: as above.
        let gone = unsafe { Qp::posting(qp.cast()) }.err();
        let done = match work.error.take().or(gone) {
            Some(e) => Err(e),
            None => work.batch.submit_all(this),
        };
        work.batch.clear();
        // SAFETY: likewise.
        unsafe { this.builder().lock.unlock() };
        done
    })
}

unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    ret::value((), || {
        // SAFETY: the program has called start on a queue pair of ours.
        let Some(this) = (unsafe { Qp::any(qp.cast()) }) else {
            return;
        };
        if this.alive().is_ok() {
            // SAFETY: locked by start.
            unsafe {
                (*this.builder().work.get()).batch.clear();
                this.builder().lock.unlock();
            }
        }
    });
}
