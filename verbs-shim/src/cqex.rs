//! Creation of completion queues, and their extended interface: `ibv_start_poll` and readers of the current completion.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use libc::{c_int, c_uint, c_void};
use roce::Completion;
use zerocopy::FromZeros as _;

use crate::{
    abi::{
        CQ_WC_FLAGS, IBV_CREATE_CQ_ATTR_SINGLE_THREADED, c_enum, cq_init, ibv_comp_channel, ibv_context, ibv_cq,
        ibv_cq_ex, ibv_cq_init_attr_ex, ibv_poll_cq_attr, ibv_wc_tm_info,
    },
    cq::{self, Cq},
    live::Object as _,
    ret::{self, Errno, Result},
};

/// The public part of a queue.
pub(crate) fn public(base: ibv_cq) -> ibv_cq_ex {
    ibv_cq_ex {
        base,
        comp_mask: 0,
        status: 0,
        wr_id: 0,
        start_poll,
        next_poll,
        end_poll,
        read_opcode,
        read_vendor_err,
        read_byte_len,
        read_imm_data,
        read_qp_num,
        read_src_qp,
        read_wc_flags,
        read_slid,
        read_sl,
        read_dlid_path_bits,
        read_completion_ts,
        read_cvlan,
        read_flow_tag,
        read_tm_info,
        read_completion_wallclock_ns,
    }
}

/// Takes the next completion and makes it the current one.
///
/// # Safety
/// `cq` is a queue of ours whose poll this thread has started.
unsafe fn advance(cq: *mut ibv_cq_ex) -> Result<()> {
    // SAFETY: the caller's promise.
    let this = unsafe { Cq::hot(cq.cast())? };
    let next = this.take_one()?.ok_or(Errno::NOENT)?;
    // SAFETY: likewise: no other thread polls during this call.
    unsafe {
        *this.poll.current.get() = next;
        (&raw mut (*cq).wr_id).write(next.wr_id);
        (&raw mut (*cq).status).write(next.status as c_enum);
    }
    Ok(())
}

unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // Not `ret::code`: ENOENT is no error, and errno is left alone.
    ret::value(libc::EIO, || {
        // SAFETY: the program passes attributes, or null.
        if !attr.is_null() && unsafe { attr.read_unaligned() }.comp_mask != 0 {
            return libc::EINVAL;
        }
        // SAFETY: a queue of ours.
        let this = match unsafe { Cq::hot(cq.cast()) } {
            Ok(cq) => cq,
            Err(e) => return e.0,
        };
        this.poll.lock();
        // SAFETY: the poll has begun.
        match unsafe { advance(cq) } {
            Ok(()) => 0,
            Err(e) => {
                this.poll.unlock();
                e.0
            }
        }
    })
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the program has begun a poll.
    ret::value(libc::EIO, || unsafe { advance(cq) }.err().map_or(0, |e| e.0))
}

unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    ret::value((), || {
        // SAFETY: a queue of ours, whose poll this thread has started.
        if let Some(cq) = unsafe { Cq::any(cq.cast()) } {
            cq.poll.unlock();
        }
    });
}

/// The completion at hand.
///
/// # Safety
/// `cq` is a queue of ours whose poll this thread has started.
unsafe fn current<'a>(cq: *mut ibv_cq_ex) -> &'a Completion {
    // SAFETY: the caller's promise. The memory is a queue's for ever.
    unsafe { &*(*cq.cast::<Cq>()).poll.current.get() }
}

macro_rules! readers {
    ($($name:ident -> $ty:ty: |$c:ident| $value:expr;)*) => {$(
        unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $ty {
            // SAFETY: the program reads between start and end of its poll.
            let $c = unsafe { current(cq) };
            $value
        }
    )*};
}

readers! {
    read_opcode -> c_enum: |c| c.opcode as c_enum;
    read_vendor_err -> u32: |c| c.vendor_err;
    read_byte_len -> u32: |c| c.byte_len;
    read_imm_data -> u32: |c| cq::imm_or_key(c);
    read_qp_num -> u32: |c| c.qpn.value();
    read_src_qp -> u32: |c| c.src_qp.value();
    read_wc_flags -> c_uint: |c| c.flags.bits();
    read_slid -> u32: |_c| 0;
    read_sl -> u8: |c| c.sl;
    read_dlid_path_bits -> u8: |_c| 0;
    read_completion_ts -> u64: |c| c.timestamp.as_nanos();
    read_cvlan -> u16: |_c| 0;
    read_flow_tag -> u32: |_c| 0;
    read_completion_wallclock_ns -> u64: |c| wallclock(c);
}

unsafe extern "C" fn read_tm_info(_cq: *mut ibv_cq_ex, info: *mut ibv_wc_tm_info) {
    // SAFETY: the program passes room for it.
    unsafe { info.write_unaligned(ibv_wc_tm_info { tag: 0, private: 0 }) };
}

/// Returns the time of a completion by the wall clock, in nanoseconds since 1970. The order of completions is kept.
fn wallclock(c: &Completion) -> u64 {
    static KEPT: AtomicU64 = AtomicU64::new(0);
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let wall = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
    let ahead = offset(
        KEPT.load(Ordering::Relaxed),
        wall.saturating_sub(roce::now().as_nanos()),
    );
    KEPT.store(ahead, Ordering::Relaxed);
    c.timestamp.as_nanos().saturating_add(ahead)
}

/// Largest difference between the two clocks that counts as the time between reading them. A larger one means that the wall clock
/// was set.
const STEP_NS: u64 = 1_000_000;

/// Returns how far the wall clock is ahead of the transport's: `kept`, as long as it is near the one `seen`.
fn offset(kept: u64, seen: u64) -> u64 {
    match kept.abs_diff(seen) < STEP_NS {
        true => kept,
        false => seen,
    }
}

pub(crate) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    let cq: *mut ibv_cq = ret::pointer(|| {
        // SAFETY: the program passes attributes.
        let mut attr = unsafe { attr.read_unaligned() };
        if attr.comp_mask & !(cq_init::FLAGS | cq_init::PD) != 0 || attr.wc_flags & !CQ_WC_FLAGS != 0 {
            return Err(Errno::NOTSUP.because("comp_mask or wc_flags has bits that this device does not support"));
        }
        if attr.comp_mask & cq_init::FLAGS == 0 {
            attr.flags = 0;
        }
        if attr.flags & !IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0 {
            return Err(Errno::NOTSUP.because("flags has bits that this device does not support"));
        }
        // SAFETY: the program passes an open context and a channel or null.
        unsafe { Cq::create(context, &attr, public) }
    });
    cq.cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    entries: c_int,
    cookie: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    ret::pointer(|| {
        let mut attr = ibv_cq_init_attr_ex::new_zeroed();
        attr.cqe =
            u32::try_from(entries).map_err(|_| Errno::INVAL.because(format_args!("cqe {entries} is negative")))?;
        (attr.cq_context, attr.channel) = (cookie, channel);
        attr.comp_vector = vector.cast_unsigned();
        // SAFETY: the program passes an open context, and a channel created by this library or null.
        unsafe { Cq::create(context, &attr, public) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_walls_clock_goes_with_the_completions() {
        assert_eq!(offset(0, 5_000_000_000), 5_000_000_000);
        assert_eq!(offset(5_000_000_000, 5_000_000_400), 5_000_000_000);
        assert_eq!(offset(5_000_000_000, 4_999_999_600), 5_000_000_000);
        assert_eq!(offset(5_000_000_000, 3_000_000_000), 3_000_000_000, "the clock was set");
        let at = |nanos| Completion {
            timestamp: roce::verbs::Instant::from_nanos(nanos),
            ..Completion::default()
        };
        let now = roce::now().as_nanos();
        let read: Vec<u64> = (0..1000).map(|n| wallclock(&at(now + n))).collect();
        assert!(read.is_sorted_by(|a, b| a < b));
    }
}
