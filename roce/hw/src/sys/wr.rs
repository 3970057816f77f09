//! Work requests on their way to the library, in room that is used again and again.

use std::{io, mem, ptr};

use libc::c_int;
use rdma_sys::{
    atomic_t, bind_mw_t, bind_mw_tso_union_t, ibv_mw_bind_info, ibv_post_recv, ibv_post_send, ibv_qp, ibv_recv_wr,
    ibv_send_wr, ibv_sge, imm_data_invalidated_rkey_union_t, rdma_t, wr_t,
};
use roce_verbs::{
    AccessFlags, Payload, RKey, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge, WrOpcode, wr::PostError,
};

use super::{
    memory::{Mr, Mw},
    object::done,
};

/// `IBV_SEND_INLINE`.
const INLINE: u32 = 1 << 3;

/// Work request of the library.
pub(crate) trait Wr: Sized {
    /// Sets the next work request and the scatter/gather elements. Returns the number of elements, and whether they are inline data.
    fn link(&mut self, next: *mut Self, sges: *mut ibv_sge) -> (usize, bool);

    /// Posts a list.
    ///
    /// # Safety
    /// Queue pair and list exist, and there is room for `bad`.
    unsafe fn post(qp: *mut ibv_qp, first: *mut Self, bad: *mut *mut Self) -> c_int;
}

impl Wr for ibv_send_wr {
    fn link(&mut self, next: *mut Self, sges: *mut ibv_sge) -> (usize, bool) {
        (self.next, self.sg_list) = (next, sges);
        (self.num_sge as usize, self.send_flags & INLINE != 0)
    }

    unsafe fn post(qp: *mut ibv_qp, first: *mut Self, bad: *mut *mut Self) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { ibv_post_send(qp, first, bad) }
    }
}

impl Wr for ibv_recv_wr {
    fn link(&mut self, next: *mut Self, sges: *mut ibv_sge) -> (usize, bool) {
        (self.next, self.sg_list) = (next, sges);
        (self.num_sge as usize, false)
    }

    unsafe fn post(qp: *mut ibv_qp, first: *mut Self, bad: *mut *mut Self) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { ibv_post_recv(qp, first, bad) }
    }
}

/// List of work requests.
pub(crate) struct List<T> {
    wrs: Vec<T>,
    /// Elements of all work requests, in their order. Inline data is one element, whose address is a position in `inline`.
    sges: Vec<ibv_sge>,
    inline: Vec<u8>,
}

/// Send work requests.
pub(crate) type SendList = List<ibv_send_wr>;
/// Receive work requests.
pub(crate) type RecvList = List<ibv_recv_wr>;

// SAFETY: its pointers are set and used within one call.
unsafe impl<T: Wr> Send for List<T> {}

impl<T> Default for List<T> {
    fn default() -> Self {
        Self {
            wrs: Vec::new(),
            sges: Vec::new(),
            inline: Vec::new(),
        }
    }
}

impl<T> List<T> {
    pub(crate) fn clear(&mut self) {
        self.wrs.clear();
        self.sges.clear();
        self.inline.clear();
    }

    pub(crate) fn len(&self) -> usize {
        self.wrs.len()
    }

    fn push_sges(&mut self, sges: &[Sge]) -> i32 {
        self.sges.extend(sges.iter().map(|sge| ibv_sge {
            addr: sge.addr,
            length: sge.length,
            lkey: sge.lkey.0,
        }));
        sges.len() as i32
    }
}

impl<T: Wr> List<T> {
    /// Lets the work requests point to their data and to each other. Returns the first.
    fn link(&mut self) -> *mut T {
        let first = self.wrs.as_mut_ptr();
        let (count, mut at) = (self.wrs.len(), 0);
        for (i, wr) in self.wrs.iter_mut().enumerate() {
            let next = match i + 1 < count {
                true => first.wrapping_add(i + 1),
                false => ptr::null_mut(),
            };
            let (elements, is_inline) = wr.link(next, self.sges[at..].as_mut_ptr());
            if is_inline {
                let bytes = self.inline.as_ptr().wrapping_add(self.sges[at].addr as usize);
                self.sges[at].addr = bytes as u64;
            }
            at += elements;
        }
        first
    }

    /// Posts the list; of a refusal the number of work requests accepted before it.
    ///
    /// # Safety
    /// The queue pair exists.
    pub(super) unsafe fn post(&mut self, qp: *mut ibv_qp) -> Result<(), (usize, io::Error)> {
        if self.wrs.is_empty() {
            return Ok(());
        }
        let (first, mut bad) = (self.link(), ptr::null_mut());
        // SAFETY: the list lives during the call, which copies it and what is inline. Other data is in memory that its registration
        // keeps, and out of registered memory the device keeps. Regions and windows of bindings live as long.
        done(unsafe { T::post(qp, first, &raw mut bad) }).map_err(|e| {
            let bytes = (bad as usize).wrapping_sub(first as usize);
            let accepted = Some(bytes / size_of::<T>()).filter(|n| *n < self.wrs.len());
            (accepted.unwrap_or(0), e)
        })
    }
}

fn rdma(to: &RemoteAddr) -> wr_t {
    wr_t {
        rdma: rdma_t {
            remote_addr: to.addr,
            rkey: to.rkey.0,
        },
    }
}

fn atomic(to: &RemoteAddr, compare_add: u64, swap: u64) -> wr_t {
    wr_t {
        atomic: atomic_t {
            remote_addr: to.addr,
            compare_add,
            swap,
            rkey: to.rkey.0,
        },
    }
}

fn blank(wr_id: u64, opcode: WrOpcode, flags: SendFlags) -> ibv_send_wr {
    // SAFETY: plain data; null pointers are none.
    let mut raw: ibv_send_wr = unsafe { mem::zeroed() };
    (raw.wr_id, raw.opcode, raw.send_flags) = (wr_id, opcode as u32, flags.bits());
    raw
}

/// Range that a window is bound to.
pub(crate) struct Bind<'a> {
    pub(crate) mr: &'a Mr,
    pub(crate) addr: u64,
    pub(crate) length: u64,
    pub(crate) access: AccessFlags,
}

impl Bind<'_> {
    pub(super) fn info(&self) -> ibv_mw_bind_info {
        ibv_mw_bind_info {
            mr: self.mr.as_ptr(),
            addr: self.addr,
            length: self.length,
            mw_access_flags: self.access.bits(),
        }
    }
}

impl SendList {
    /// Adds a work request.
    ///
    /// # Errors
    /// If `ibv_post_send` has no such operation; nothing is added.
    pub(crate) fn push(&mut self, wr: &SendWr<'_>, wr_id: u64) -> Result<(), PostError> {
        let mut raw = blank(wr_id, wr.op.code(), wr.flags);
        let imm = |imm: u32| imm_data_invalidated_rkey_union_t { imm_data: imm.to_be() };
        let key = |key: RKey| imm_data_invalidated_rkey_union_t {
            invalidated_rkey: key.0,
        };
        match &wr.op {
            SendOp::Send => {}
            SendOp::SendWithImm(n) => raw.imm_data_invalidated_rkey_union = imm(*n),
            SendOp::SendWithInv(k) | SendOp::LocalInvalidate(k) => raw.imm_data_invalidated_rkey_union = key(*k),
            SendOp::Write(to) | SendOp::Read(to) => raw.wr = rdma(to),
            SendOp::WriteWithImm(to, n) => {
                raw.wr = rdma(to);
                raw.imm_data_invalidated_rkey_union = imm(*n);
            }
            SendOp::CompareSwap { remote, compare, swap } => raw.wr = atomic(remote, *compare, *swap),
            SendOp::FetchAdd { remote, add } => raw.wr = atomic(remote, *add, 0),
            SendOp::FastRegister(_) => return Err(PostError::Invalid("hardware verbs have no fast registration")),
            SendOp::BindWindow(_) => return Err(PostError::Invalid("windows are bound by granting their keys")),
            SendOp::AtomicWrite(_) | SendOp::Flush(_) => {
                return Err(PostError::Invalid("ibv_post_send does not have the operation"));
            }
        }
        raw.num_sge = match wr.payload {
            Payload::Sges(sges) => self.push_sges(sges),
            Payload::Inline(bytes) => {
                raw.send_flags |= INLINE;
                self.sges.push(ibv_sge {
                    addr: self.inline.len() as u64,
                    length: bytes.len() as u32,
                    lkey: 0,
                });
                self.inline.extend_from_slice(bytes);
                1
            }
        };
        self.wrs.push(raw);
        Ok(())
    }

    /// Adds the binding of a type 2 window under a key.
    pub(crate) fn push_bind(&mut self, wr_id: u64, mw: &Mw, key: RKey, bind: &Bind<'_>) {
        let mut raw = blank(wr_id, WrOpcode::BindWindow, SendFlags::SIGNALED);
        raw.bind_mw_tso_union = bind_mw_tso_union_t {
            bind_mw: bind_mw_t {
                mw: mw.as_ptr(),
                rkey: key.0,
                bind_info: bind.info(),
            },
        };
        self.wrs.push(raw);
    }
}

impl RecvList {
    pub(crate) fn push(&mut self, wr: &RecvWr<'_>, wr_id: u64) {
        let num_sge = self.push_sges(wr.sges);
        self.wrs.push(ibv_recv_wr {
            wr_id,
            next: ptr::null_mut(),
            sg_list: ptr::null_mut(),
            num_sge,
        });
    }
}
