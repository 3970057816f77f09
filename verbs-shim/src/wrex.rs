//! The extended way to post: `ibv_wr_start`, one call per work request, `ibv_wr_complete`.

use libc::{c_int, c_void, size_t};
use parking_lot::lock_api::RawMutex as _;
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
        let work = unsafe { &mut *this.builder.work.get() };
        if let Err(e) = body(this, &mut work.batch) {
            work.error.get_or_insert(e);
        }
    });
}

/// Begins a work request.
///
/// # Safety
/// As [`with`].
unsafe fn begin(qp: *mut ibv_qp_ex, op: impl FnOnce(&Qp) -> Result<SendOp>, then: impl FnOnce(&mut Batch, &SendOp)) {
    // SAFETY: the program sets both fields before the call.
    let (wr_id, flags) = unsafe { ((*qp).wr_id, (*qp).wr_flags) };
    // SAFETY: the caller's promise.
    unsafe {
        with(qp, |this, batch| {
            let op = op(this)?;
            batch.begin(wr_id, op, post::flags(flags));
            then(batch, &op);
            Ok(())
        });
    }
}

fn remote(addr: u64, rkey: u32) -> RemoteAddr {
    let rkey = RKey(rkey);
    RemoteAddr { addr, rkey }
}

/// Defines calls that begin a work request, and those that change the current one.
macro_rules! calls {
    ($($name:ident($($arg:ident: $ty:ty),*) => $op:expr;)*) => {$(
        unsafe extern "C" fn $name(qp: *mut ibv_qp_ex $(, $arg: $ty)*) {
            // SAFETY: the program has called start on a queue pair of ours.
            unsafe { begin(qp, |_| Ok($op), |_, _| ()) };
        }
    )*};
    (change $($name:ident($($arg:ident: $ty:ty),*) |$this:pat_param, $batch:ident| $change:expr;)*) => {$(
        unsafe extern "C" fn $name(qp: *mut ibv_qp_ex $(, $arg: $ty)*) {
            // SAFETY: the program has called start on a queue pair of ours. Objects, lists and buffers that it passes are as the call
            // demands.
            unsafe { with(qp, |$this, $batch| { $change; Ok(()) }) };
        }
    )*};
}

calls! {
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

calls! {
    change
    wr_send_tso(_header: *mut c_void, _size: u16, _mss: u16) |_, _batch|
        Err::<(), _>(Errno::NOTSUP.because("this device has no TSO"))?;
    wr_set_ud_addr(ah: *mut ibv_ah, qpn: u32, qkey: u32) |this, batch| batch.target(post::datagram(this, ah, qpn, qkey)?);
    wr_set_xrc_srqn(srqn: u32) |_, batch| batch.target(Target::Srq(Srqn::new(srqn)));
    wr_set_inline_data(addr: *mut c_void, len: size_t) |this, batch|
        inline(this, batch, std::iter::once((addr.cast_const().cast(), len)))?;
    wr_set_inline_data_list(count: size_t, list: *const ibv_data_buf) |this, batch| {
        let buffers = (0..count).map(|n| list.add(n).read_unaligned());
        inline(this, batch, buffers.map(|b| (b.addr.cast_const().cast(), b.length)))?;
    };
    wr_set_sge(lkey: u32, addr: u64, length: u32) |_, batch| batch.sges(&[Sge { addr, length, lkey: LKey(lkey) }]);
    wr_set_sge_list(count: size_t, list: *const ibv_sge) |this, batch| {
        post::sge_count(c_int::try_from(count).unwrap_or(c_int::MAX), this.max_send_sge())?;
        batch.sges(&batch::sge_list(list, count));
    };
}

unsafe extern "C" fn wr_bind_mw(qp: *mut ibv_qp_ex, mw: *mut ibv_mw, rkey: u32, info: *const ibv_mw_bind_info) {
    // SAFETY: as above; the binding is readable, the window and the region are ours, and live until they are bound.
    unsafe {
        let bind = |this: &Qp| post::bind_type2(this, mw, rkey, &info.read_unaligned());
        begin(qp, bind, |batch, op| batch.binds(mw, op));
    }
}

unsafe extern "C" fn wr_atomic_write(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, word: *const c_void) {
    // SAFETY: as above; the program passes eight bytes, which are copied here.
    unsafe {
        let op = SendOp::AtomicWrite(remote(addr, rkey));
        begin(
            qp,
            |_| Ok(op),
            |batch, _| batch.inline(std::iter::once((word.cast(), 8))),
        );
    }
}

/// Copies inline data.
///
/// # Errors
/// EINVAL if it is too long.
///
/// # Safety
/// The buffers are readable.
unsafe fn inline(qp: &Qp, batch: &mut Batch, buffers: impl Iterator<Item = (*const u8, usize)> + Clone) -> Result<()> {
    let lengths = buffers.clone().map(|(_, len)| len as u64);
    post::check_inline(qp, lengths)?;
    // SAFETY: the caller's promise.
    unsafe { batch.inline(buffers) };
    Ok(())
}

unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    ret::value((), || {
        // SAFETY: a queue pair of ours.
        let Some(this) = (unsafe { Qp::any(qp.cast()) }) else {
            return;
        };
        if this.core.alive().is_ok() {
            this.builder.lock.lock();
        }
        // SAFETY: locked; in a forked child there is one thread.
        let work = unsafe { &mut *this.builder.work.get() };
        work.batch.clear();
        // SAFETY: as above.
        work.error = unsafe { Qp::posting(qp.cast()) }.err();
    });
}

unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    ret::code(|| {
        // SAFETY: the program has called start on a queue pair of ours.
        let this = unsafe { Qp::any(qp.cast()) }.ok_or_else(|| Errno::INVAL.because("the queue pair was destroyed"))?;
        this.core.alive()?;
        // SAFETY: locked by start.
        let work = unsafe { &mut *this.builder.work.get() };
        // SAFETY: as above.
        let gone = unsafe { Qp::posting(qp.cast()) }.err();
        let done = match work.error.take().or(gone) {
            Some(e) => Err(e),
            None => work.batch.submit_all(&this.inner),
        };
        work.batch.clear();
        // SAFETY: likewise.
        unsafe { this.builder.lock.unlock() };
        done
    })
}

unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    ret::value((), || {
        // SAFETY: the program has called start on a queue pair of ours.
        let Some(this) = (unsafe { Qp::any(qp.cast()) }) else {
            return;
        };
        if this.core.alive().is_ok() {
            // SAFETY: locked by start.
            unsafe {
                (*this.builder.work.get()).batch.clear();
                this.builder.lock.unlock();
            }
        }
    });
}
