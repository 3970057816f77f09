//! `ibv_post_send`, `ibv_post_recv` and `ibv_bind_mw`.

use libc::c_int;
use roce::{
    AccessFlags, LKey, QKey, Qpn, RKey, RecvWr, RemoteAddr, SendFlags, SendOp, Srqn, Target, verbs::wr::BindWindow,
};

use crate::{
    abi::{
        IBV_MW_TYPE_1, IBV_MW_TYPE_2, IBV_QPT_UD, IBV_QPT_XRC_SEND, IBV_SEND_INLINE, IBV_SEND_IP_CSUM, ibv_mw,
        ibv_mw_bind, ibv_mw_bind_info, ibv_qp, ibv_recv_wr, ibv_send_wr, op,
    },
    ah::Ah,
    batch::{self, Batch},
    live::Object as _,
    mr,
    mw::Mw,
    qp::Qp,
    ret::{self, Errno, Result},
};

/// Work requests that are handed over together.
const TOGETHER: usize = 64;

/// The transport's flags.
pub(crate) fn flags(bits: u32) -> SendFlags {
    SendFlags::from_bits_truncate(bits)
}

/// A window's binding.
///
/// # Safety
/// The program does not deregister the region during the call.
pub(crate) unsafe fn bind(qp: &Qp, rkey: u32, info: &ibv_mw_bind_info) -> Result<SendOp> {
    // SAFETY: the caller's promise.
    let lkey = unsafe { mr::key_of(&qp.core, info.mr)? };
    Ok(SendOp::BindWindow(BindWindow {
        key: RKey(rkey),
        lkey: LKey(lkey),
        addr: info.addr,
        length: info.length,
        access: AccessFlags::from_bits(info.mw_access_flags).ok_or_else(|| {
            Errno::INVAL.because(format_args!(
                "mw_access_flags {:#x} has unknown bits",
                info.mw_access_flags
            ))
        })?,
    }))
}

/// The binding of a type 2 window by a work request: `rkey` gives the new key's last byte, the rest is the window's.
///
/// # Safety
/// The program destroys neither the window nor the region during the call.
pub(crate) unsafe fn bind_type2(qp: &Qp, mw: *mut ibv_mw, rkey: u32, info: &ibv_mw_bind_info) -> Result<SendOp> {
    // SAFETY: the caller's promise.
    let mw = unsafe { Mw::named(mw)? };
    qp.core.same(&mw.core)?;
    if mw.kind != IBV_MW_TYPE_2 {
        return Err(Errno::INVAL.because("a memory window of type 1 is bound by ibv_bind_mw, not by a work request"));
    }
    // SAFETY: the caller's promise.
    unsafe { bind(qp, mw.inner.rkey().0 & !0xff | rkey & 0xff, info) }
}

/// The operation of a work request.
///
/// # Safety
/// The work request is legal for its opcode.
unsafe fn operation(qp: &Qp, wr: &ibv_send_wr) -> Result<SendOp> {
    // SAFETY: any bytes are good for these fields.
    let (rdma, atomic) = unsafe { (wr.wr.rdma, wr.wr.atomic) };
    let to = RemoteAddr {
        addr: rdma.remote_addr,
        rkey: RKey(rdma.rkey),
    };
    let word = RemoteAddr {
        addr: atomic.remote_addr,
        rkey: RKey(atomic.rkey),
    };
    let imm = u32::from_be(wr.imm_data);
    Ok(match wr.opcode {
        op::RDMA_WRITE => SendOp::Write(to),
        op::RDMA_WRITE_WITH_IMM => SendOp::WriteWithImm(to, imm),
        op::SEND => SendOp::Send,
        op::SEND_WITH_IMM => SendOp::SendWithImm(imm),
        op::RDMA_READ => SendOp::Read(to),
        op::ATOMIC_CMP_AND_SWP => SendOp::CompareSwap {
            remote: word,
            compare: atomic.compare_add,
            swap: atomic.swap,
        },
        op::ATOMIC_FETCH_AND_ADD => SendOp::FetchAdd {
            remote: word,
            add: atomic.compare_add,
        },
        op::LOCAL_INV => SendOp::LocalInvalidate(RKey(wr.imm_data)),
        op::SEND_WITH_INV => SendOp::SendWithInv(RKey(wr.imm_data)),
        op::BIND_MW => {
            // SAFETY: the opcode says which member it is, and its pointers are the program's.
            unsafe {
                let of = wr.extra.bind_mw;
                bind_type2(qp, of.mw, of.rkey, &of.bind_info)?
            }
        }
        op::ATOMIC_WRITE => SendOp::AtomicWrite(to),
        other => return Err(Errno::INVAL.because(format_args!("opcode {other} is unknown or not supported"))),
    })
}

/// Returns the destination of a work request.
///
/// # Safety
/// The program does not destroy a datagram's address handle during the call.
unsafe fn target(qp: &Qp, wr: &ibv_send_wr) -> Result<Target> {
    match qp.kind() {
        // Of another operation, which fails, the union's other members are set.
        IBV_QPT_UD if matches!(wr.opcode, op::SEND | op::SEND_WITH_IMM) => {
            // SAFETY: the type of the queue pair says which member it is.
            let ud = unsafe { wr.wr.ud };
            // SAFETY: the caller's promise.
            unsafe { datagram(qp, ud.ah, ud.remote_qpn, ud.remote_qkey) }
        }
        IBV_QPT_XRC_SEND => Ok(Target::Srq(Srqn::new(wr.remote_srqn))),
        _ => Ok(Target::Peer),
    }
}

/// A datagram's receiver.
///
/// # Safety
/// The program does not destroy the address handle during the call.
pub(crate) unsafe fn datagram(qp: &Qp, ah: *mut crate::abi::ibv_ah, qpn: u32, qkey: u32) -> Result<Target> {
    // SAFETY: the caller's promise.
    let ah = unsafe { Ah::named(ah)? };
    qp.core.same(&ah.core)?;
    Ok(Target::Datagram(ah.inner.to(Qpn::new(qpn), QKey(qkey))))
}

/// Checks the number of scatter/gather elements of a work request.
pub(crate) fn sge_count(given: c_int, max: usize) -> Result<usize> {
    let count = usize::try_from(given).ok().filter(|n| *n <= max);
    count.ok_or_else(|| Errno::INVAL.because(format_args!("num_sge {given}: the queue has at most {max}")))
}

/// Checks the length of inline data.
pub(crate) fn check_inline(qp: &Qp, lengths: impl Iterator<Item = u64>) -> Result<()> {
    let most = qp.max_inline();
    let total = lengths.fold(0, u64::saturating_add);
    match total <= most {
        true => Ok(()),
        false => Err(Errno::INVAL.because(format_args!("more inline data than max_inline_data, {most} bytes"))),
    }
}

/// Adds a work request to a batch.
///
/// # Safety
/// As `ibv_post_send` demands.
unsafe fn add(batch: &mut Batch, qp: &Qp, wr: &ibv_send_wr) -> Result<()> {
    if wr.send_flags & IBV_SEND_IP_CSUM != 0 {
        return Err(Errno::INVAL.because("IBV_SEND_IP_CSUM: this device computes no checksums"));
    }
    let count = sge_count(wr.num_sge, qp.max_send_sge())?;
    // SAFETY: the caller's promise.
    let (what, to, list) = unsafe { (operation(qp, wr)?, target(qp, wr)?, batch::sge_list(wr.sg_list, count)) };
    // LOCAL_INV and BIND_MW have no data: the list may be left over from the structure's last use.
    let has_data = !matches!(wr.opcode, op::LOCAL_INV | op::BIND_MW);
    let inline = has_data && wr.send_flags & IBV_SEND_INLINE != 0;
    if inline {
        check_inline(qp, list.iter().map(|s| s.length.into()))?;
    }
    // Nothing is refused from here on: a request in the batch is posted.
    batch.begin(wr.wr_id, what, flags(wr.send_flags));
    batch.target(to);
    if wr.opcode == op::BIND_MW {
        // SAFETY: the opcode says which member it is; the window was found alive.
        unsafe { batch.binds(wr.extra.bind_mw.mw, &what) };
    }
    if !inline {
        if has_data {
            batch.sges(&list);
        }
        return Ok(());
    }
    let buffers = list
        .iter()
        .map(|s| (std::ptr::with_exposed_provenance(s.addr as usize), s.length as usize));
    // SAFETY: with inline data the elements are plain addresses of the program.
    unsafe { batch.inline(buffers) };
    Ok(())
}

pub(crate) unsafe extern "C" fn post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    ret::code(|| {
        let mut first = wr;
        // SAFETY: the program passes a queue pair of ours.
        let done = unsafe { Qp::posting(qp) }.and_then(|this| {
            let mut batch = Batch::default();
            let mut next = wr;
            while !next.is_null() {
                // SAFETY: the program passes a list of work requests, which need not be aligned.
                let request = unsafe { next.read_unaligned() };
                // SAFETY: likewise.
                let added = unsafe { add(&mut batch, this, &request) };
                let after = request.next;
                if added.is_err() || batch.len() == TOGETHER || after.is_null() {
                    // What came before a bad one is posted.
                    // SAFETY: the list from `first` has at least as many requests as the batch.
                    unsafe { submit(this, &batch, added.is_err(), &mut first) }?;
                    added?;
                    batch.clear();
                    first = after;
                }
                next = after;
            }
            Ok(())
        });
        if done.is_err() {
            // SAFETY: the program passes room for the pointer.
            unsafe { bad.write_unaligned(first) };
        }
        done
    })
}

/// Posts a batch whose first request is at `first`, which moves to the first one that was not accepted.
///
/// # Safety
/// The list at `first` is as long as the batch.
unsafe fn submit(qp: &Qp, batch: &Batch, failed: bool, first: &mut *mut ibv_send_wr) -> Result<()> {
    let (taken, error) = match batch.submit(&qp.inner) {
        Ok(()) => (if failed { batch.len() } else { 0 }, None),
        Err((taken, e)) => (taken, Some(e)),
    };
    for _ in 0..taken {
        // SAFETY: the caller's promise.
        *first = unsafe { (&raw const (**first).next).read_unaligned() };
    }
    error.map_or(Ok(()), |e| Err(e.into()))
}

/// Converts a list of receives and hands each over; stops at the first that is refused, which is returned. A receive may
/// have `max_sge` elements: of more not even the first is read.
///
/// # Safety
/// `wr` is a list of receives as `ibv_post_recv` demands.
pub(crate) unsafe fn each_recv(
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
    max_sge: usize,
    mut post: impl FnMut(&[RecvWr<'_>]) -> std::result::Result<(), (usize, roce::PostError)>,
) -> Result<()> {
    let mut next = wr;
    let mut run = || {
        while !next.is_null() {
            // SAFETY: the caller's promise; receives need not be aligned.
            let wr = unsafe { next.read_unaligned() };
            let count = sge_count(wr.num_sge, max_sge)?;
            // SAFETY: likewise.
            let sges = unsafe { batch::sge_list(wr.sg_list, count) };
            let recv = RecvWr {
                wr_id: wr.wr_id,
                sges: &sges,
            };
            post(&[recv]).map_err(|(_, e)| Errno::from(e))?;
            next = wr.next;
        }
        Ok(())
    };
    let done = run();
    if done.is_err() {
        // SAFETY: the program passes room for the pointer.
        unsafe { bad.write_unaligned(next) };
    }
    done
}

pub(crate) unsafe extern "C" fn post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes a queue pair of ours, a list of receives, and room for the pointer.
        unsafe {
            let this = Qp::posting(qp).inspect_err(|_| bad.write_unaligned(wr))?;
            each_recv(wr, bad, this.max_recv_sge(), |wrs| this.inner.post_recv(wrs))
        }
    })
}

/// Binds a type 1 window; its key changes with each binding.
pub(crate) unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, request: *mut ibv_mw_bind) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes a queue pair and a window of ours, and a binding.
        let (this, window, request, key) =
            unsafe { (Qp::named(qp)?, Mw::named(mw)?, request.read_unaligned(), (*mw).rkey) };
        this.core.same(&window.core)?;
        if window.kind != IBV_MW_TYPE_1 {
            return Err(Errno::INVAL.because("ibv_bind_mw binds windows of type 1 only"));
        }
        let next = RKey(key).next().0;
        let mut batch = Batch::default();
        // SAFETY: the binding's region is ours.
        let op = unsafe { bind(this, next, &request.bind_info)? };
        batch.begin(request.wr_id, op, flags(request.send_flags));
        batch.submit(&this.inner).map_err(|(_, e)| Errno::from(e))?;
        // SAFETY: as above.
        unsafe { (*mw).rkey = next };
        Ok(())
    })
}
