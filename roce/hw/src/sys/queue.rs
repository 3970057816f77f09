//! Completion channels, completion queues and queue pairs.

use std::{
    ffi::c_void,
    io,
    mem::{self, MaybeUninit},
    ops::Range,
    os::fd::BorrowedFd,
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use rdma_sys::{
    atomic_t, bind_mw_t, bind_mw_tso_union_t, ibv_ack_cq_events, ibv_bind_mw, ibv_comp_channel, ibv_cq,
    ibv_create_comp_channel, ibv_create_cq, ibv_create_qp, ibv_destroy_comp_channel, ibv_destroy_cq, ibv_destroy_qp,
    ibv_get_cq_event, ibv_modify_qp, ibv_mw_bind, ibv_mw_bind_info, ibv_poll_cq, ibv_post_recv, ibv_post_send, ibv_qp,
    ibv_qp_attr, ibv_qp_init_attr, ibv_qp_type, ibv_recv_wr, ibv_req_notify_cq, ibv_send_wr, ibv_sge, ibv_wc,
    imm_data_invalidated_rkey_union_t, rdma_t, wr_t,
};
use roce_verbs::{
    AccessFlags, Payload, QpAttrMask, QpCaps, RKey, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge, WrOpcode,
    wr::PostError,
};

use super::{Context, Mr, Mw, Pd, done, made, set_nonblocking, unless_empty};

/// `IBV_SEND_INLINE`.
const INLINE: u32 = 1 << 3;
/// Events of a completion queue that are acknowledged together: it takes a lock.
const ACKS: u32 = 64;
/// Completions that are taken at a time.
const POLLED: usize = 32;

/// Completion channel of a device.
#[derive(Debug)]
pub(crate) struct Channel {
    raw: NonNull<ibv_comp_channel>,
    context: Arc<Context>,
}

// SAFETY: libibverbs lets any thread use a channel, and several at a time.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl Channel {
    pub(crate) fn create(context: &Arc<Context>) -> io::Result<Arc<Self>> {
        // SAFETY: the context is open.
        let raw = made(unsafe { ibv_create_comp_channel(context.as_ptr()) })?;
        let context = context.clone();
        let channel = Self { raw, context };
        // SAFETY: the channel was just made.
        set_nonblocking(unsafe { (*raw.as_ptr()).fd })?;
        Ok(Arc::new(channel))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel has the descriptor as long as it lives.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).fd) }
    }

    /// Takes an event: the cookie of the completion queue, which [`Cq::told`] has to be called of.
    pub(crate) fn event(&self) -> io::Result<Option<u64>> {
        let (mut cq, mut cookie) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: room for both.
        let got = done(unsafe { ibv_get_cq_event(self.raw.as_ptr(), &raw mut cq, &raw mut cookie) });
        Ok(unless_empty(got)?.map(|()| cookie as u64))
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: its queues keep it, so none is left.
        if let Err(e) = done(unsafe { ibv_destroy_comp_channel(self.raw.as_ptr()) }) {
            tracing::warn!("destroying a channel of {} failed: {e}", self.context.name());
        }
    }
}

/// A completion queue.
#[derive(Debug)]
pub(crate) struct Cq {
    raw: NonNull<ibv_cq>,
    /// Events that were taken and not acknowledged yet.
    unacknowledged: AtomicU32,
    channel: Arc<Channel>,
}

// SAFETY: libibverbs lets any thread use a queue, and several at a time.
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

/// A completion as the library gives it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Polled {
    pub(crate) wr_id: u64,
    pub(crate) status: u32,
    pub(crate) opcode: u32,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    /// Immediate data as it is in memory, or the key that was invalidated.
    pub(crate) extra: u32,
    pub(crate) qp_num: u32,
    pub(crate) src_qp: u32,
    pub(crate) flags: u32,
    pub(crate) pkey_index: u16,
    pub(crate) sl: u8,
}

impl From<&ibv_wc> for Polled {
    fn from(wc: &ibv_wc) -> Self {
        Self {
            wr_id: wc.wr_id,
            status: wc.status,
            opcode: wc.opcode,
            vendor_err: wc.vendor_err,
            byte_len: wc.byte_len,
            // SAFETY: both members are numbers of 32 bits.
            extra: unsafe { wc.imm_data_invalidated_rkey_union.invalidated_rkey },
            qp_num: wc.qp_num,
            src_qp: wc.src_qp,
            flags: wc.wc_flags,
            pkey_index: wc.pkey_index,
            sl: wc.sl,
        }
    }
}

impl Cq {
    pub(crate) fn create(channel: &Arc<Channel>, entries: u32, cookie: u64) -> io::Result<Arc<Self>> {
        let entries = i32::try_from(entries).map_err(|_| io::ErrorKind::InvalidInput)?;
        let context = channel.context.as_ptr();
        // SAFETY: context and channel live; the cookie is a number.
        let raw = unsafe { ibv_create_cq(context, entries, cookie as *mut c_void, channel.raw.as_ptr(), 0) };
        Ok(Arc::new(Self {
            raw: made(raw)?,
            unacknowledged: AtomicU32::new(0),
            channel: channel.clone(),
        }))
    }

    /// Appends completions, some 32 at most; returns how many.
    pub(crate) fn poll(&self, out: &mut Vec<Polled>, max: usize) -> io::Result<usize> {
        let mut room = [const { MaybeUninit::<ibv_wc>::uninit() }; POLLED];
        let max = max.min(POLLED);
        // SAFETY: room for so many.
        let count = unsafe { ibv_poll_cq(self.raw.as_ptr(), max as i32, room.as_mut_ptr().cast()) };
        let count = usize::try_from(count).map_err(|_| io::Error::other("the completion queue has failed"))?;
        let filled = room.iter().take(count);
        // SAFETY: so many were filled in.
        out.extend(filled.map(|wc| Polled::from(unsafe { wc.assume_init_ref() })));
        Ok(count)
    }

    /// Asks for an event at the next completion.
    pub(crate) fn arm(&self) -> io::Result<()> {
        // SAFETY: the queue lives.
        done(unsafe { ibv_req_notify_cq(self.raw.as_ptr(), 0) })
    }

    /// An event of it was taken from the channel.
    pub(crate) fn told(&self) {
        if self.unacknowledged.fetch_add(1, Ordering::Relaxed) + 1 >= ACKS {
            self.acknowledge();
        }
    }

    fn acknowledge(&self) {
        let count = self.unacknowledged.swap(0, Ordering::Relaxed);
        if count > 0 {
            // SAFETY: the queue lives, and so many events of it were taken.
            unsafe { ibv_ack_cq_events(self.raw.as_ptr(), count) };
        }
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // Destroying waits for that.
        self.acknowledge();
        // SAFETY: its queue pairs keep it, so none is left.
        if let Err(e) = done(unsafe { ibv_destroy_cq(self.raw.as_ptr()) }) {
            tracing::warn!(
                "destroying a completion queue of {} failed: {e}",
                self.channel.context.name()
            );
        }
    }
}

/// States of a queue pair that we bring one to (`enum ibv_qp_state`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    Init = 1,
    Rtr = 2,
    Rts = 3,
    Err = 6,
}

/// Attributes for a queue pair's next state.
pub(crate) struct Attributes {
    pub(super) raw: ibv_qp_attr,
    pub(super) mask: i32,
}

impl Attributes {
    /// None but the state.
    pub(crate) fn of(state: State) -> Self {
        // SAFETY: plain data.
        let mut raw: ibv_qp_attr = unsafe { mem::zeroed() };
        raw.qp_state = state as u32;
        let mask = QpAttrMask::STATE.bits() as i32;
        Self { raw, mask }
    }

    fn has(&self, what: QpAttrMask) -> bool {
        self.mask & what.bits() as i32 != 0
    }

    fn set(&mut self, what: QpAttrMask) {
        self.mask |= what.bits() as i32;
    }

    /// Ready for receives, on a port.
    pub(crate) fn init(port: u8, access: AccessFlags) -> Self {
        let mut this = Self::of(State::Init);
        this.raw.port_num = port;
        this.raw.qp_access_flags = access.bits();
        this.set(QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::ACCESS_FLAGS);
        this
    }

    /// Sets the rights of peers.
    pub(crate) fn set_access(&mut self, access: AccessFlags) {
        self.raw.qp_access_flags = access.bits();
        self.set(QpAttrMask::ACCESS_FLAGS);
    }

    /// Sets the minimum RNR timer.
    pub(crate) fn set_min_rnr_timer(&mut self, code: u8) {
        if self.has(QpAttrMask::MIN_RNR_TIMER) {
            self.raw.min_rnr_timer = code;
        }
    }

    /// Type of service or traffic class of the packets.
    pub(crate) fn set_traffic_class(&mut self, tos: u8) {
        if self.has(QpAttrMask::AV) {
            self.raw.ah_attr.grh.traffic_class = tos;
        }
    }

    /// READs and atomics at a time: no more that are answered, and that are sent.
    pub(crate) fn limit_reads(&mut self, responder: u8, initiator: u8) {
        self.raw.max_dest_rd_atomic = self.raw.max_dest_rd_atomic.min(responder);
        self.raw.max_rd_atomic = self.raw.max_rd_atomic.min(initiator);
    }
}

/// Data of a work request in a list.
#[derive(Clone)]
enum Data {
    Sges(Range<usize>),
    Inline(Range<usize>),
}

/// Send work requests on their way to the library, in room that is used again and again.
#[derive(Default)]
pub(crate) struct SendList {
    wrs: Vec<ibv_send_wr>,
    data: Vec<Data>,
    sges: Vec<ibv_sge>,
    inline: Vec<u8>,
}

// SAFETY: its pointers are set and used within one call.
unsafe impl Send for SendList {}

fn sge(sge: &Sge) -> ibv_sge {
    ibv_sge {
        addr: sge.addr,
        length: sge.length,
        lkey: sge.lkey.0,
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

impl SendList {
    pub(crate) fn clear(&mut self) {
        self.wrs.clear();
        self.data.clear();
        self.sges.clear();
        self.inline.clear();
    }

    pub(crate) fn len(&self) -> usize {
        self.wrs.len()
    }

    /// Adds a work request.
    ///
    /// # Errors
    /// When `ibv_post_send` has no such operation; nothing is added.
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
        let data = match wr.payload {
            Payload::Sges(sges) => {
                let first = self.sges.len();
                self.sges.extend(sges.iter().map(sge));
                Data::Sges(first..self.sges.len())
            }
            Payload::Inline(bytes) => {
                raw.send_flags |= INLINE;
                let first = self.inline.len();
                self.inline.extend_from_slice(bytes);
                let element = self.sges.len();
                self.sges.push(ibv_sge {
                    addr: first as u64,
                    length: bytes.len() as u32,
                    lkey: 0,
                });
                Data::Inline(element..element + 1)
            }
        };
        self.wrs.push(raw);
        self.data.push(data);
        Ok(())
    }

    /// Lets the work requests point to their data and to each other; the first one.
    fn link(&mut self) -> *mut ibv_send_wr {
        let first = self.wrs.as_mut_ptr();
        let count = self.wrs.len();
        for (i, (wr, data)) in self.wrs.iter_mut().zip(&self.data).enumerate() {
            let (Data::Sges(range) | Data::Inline(range)) = data;
            if let Data::Inline(range) = data {
                let bytes = self.inline.as_ptr().wrapping_add(self.sges[range.start].addr as usize);
                self.sges[range.start].addr = bytes as u64;
            }
            wr.num_sge = range.len() as i32;
            wr.sg_list = self.sges[range.clone()].as_mut_ptr();
            wr.next = match i + 1 < count {
                true => first.wrapping_add(i + 1),
                false => ptr::null_mut(),
            };
        }
        first
    }
}

/// Receive work requests on their way to the library.
#[derive(Default)]
pub(crate) struct RecvList {
    wrs: Vec<ibv_recv_wr>,
    sges: Vec<ibv_sge>,
}

// SAFETY: its pointers are set and used within one call.
unsafe impl Send for RecvList {}

impl RecvList {
    pub(crate) fn clear(&mut self) {
        self.wrs.clear();
        self.sges.clear();
    }

    pub(crate) fn len(&self) -> usize {
        self.wrs.len()
    }

    pub(crate) fn push(&mut self, wr: &RecvWr<'_>, wr_id: u64) {
        self.sges.extend(wr.sges.iter().map(sge));
        self.wrs.push(ibv_recv_wr {
            wr_id,
            next: ptr::null_mut(),
            sg_list: ptr::null_mut(),
            num_sge: wr.sges.len() as i32,
        });
    }

    fn link(&mut self) -> *mut ibv_recv_wr {
        let first = self.wrs.as_mut_ptr();
        let (count, mut at) = (self.wrs.len(), 0);
        for (i, wr) in self.wrs.iter_mut().enumerate() {
            wr.sg_list = self.sges[at..].as_mut_ptr();
            at += wr.num_sge as usize;
            wr.next = match i + 1 < count {
                true => first.wrapping_add(i + 1),
                false => ptr::null_mut(),
            };
        }
        first
    }
}

/// How many came before `bad` in a list from `first`.
fn before<T>(first: *mut T, bad: *mut T, count: usize) -> usize {
    let bytes = (bad as usize).wrapping_sub(first as usize);
    match bytes / size_of::<T>() {
        n if n < count => n,
        _ => 0,
    }
}

/// Range that a window is bound to.
pub(crate) struct Bind<'a> {
    pub(crate) mr: &'a Mr,
    pub(crate) addr: u64,
    pub(crate) length: u64,
    pub(crate) access: AccessFlags,
}

impl Bind<'_> {
    fn info(&self) -> ibv_mw_bind_info {
        ibv_mw_bind_info {
            mr: self.mr.as_ptr(),
            addr: self.addr,
            length: self.length,
            mw_access_flags: self.access.bits(),
        }
    }
}

/// A reliable connected queue pair.
#[derive(Debug)]
pub(crate) struct Qp {
    raw: NonNull<ibv_qp>,
    granted: QpCaps,
    pd: Arc<Pd>,
    _cq: Arc<Cq>,
}

// SAFETY: libibverbs lets any thread use a queue pair, and several at a time.
unsafe impl Send for Qp {}
// SAFETY: as above.
unsafe impl Sync for Qp {}

impl Qp {
    pub(crate) fn create(pd: &Arc<Pd>, cq: &Arc<Cq>, caps: &QpCaps, signal_all: bool) -> io::Result<Self> {
        // SAFETY: plain data; null pointers are none.
        let mut init: ibv_qp_init_attr = unsafe { mem::zeroed() };
        (init.send_cq, init.recv_cq) = (cq.raw.as_ptr(), cq.raw.as_ptr());
        (init.qp_type, init.sq_sig_all) = (ibv_qp_type::IBV_QPT_RC, i32::from(signal_all));
        init.cap.max_send_wr = caps.max_send_wr;
        init.cap.max_recv_wr = caps.max_recv_wr;
        init.cap.max_send_sge = caps.max_send_sge;
        init.cap.max_recv_sge = caps.max_recv_sge;
        init.cap.max_inline_data = caps.max_inline_data;
        // SAFETY: domain and queue live; the call writes the sizes that it has granted.
        let raw = made(unsafe { ibv_create_qp(pd.as_ptr(), &raw mut init) })?;
        let granted = QpCaps {
            max_send_wr: init.cap.max_send_wr,
            max_recv_wr: init.cap.max_recv_wr,
            max_send_sge: init.cap.max_send_sge,
            max_recv_sge: init.cap.max_recv_sge,
            max_inline_data: init.cap.max_inline_data,
        };
        Ok(Self {
            raw,
            granted,
            pd: pd.clone(),
            _cq: cq.clone(),
        })
    }

    /// The sizes that it has.
    pub(crate) fn granted(&self) -> &QpCaps {
        &self.granted
    }

    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair lives.
        unsafe { (*self.raw.as_ptr()).qp_num }
    }

    pub(crate) fn modify(&self, attributes: &mut Attributes) -> io::Result<()> {
        // SAFETY: the queue pair lives, and the attributes that the mask names are set.
        done(unsafe { ibv_modify_qp(self.raw.as_ptr(), &raw mut attributes.raw, attributes.mask) })
    }

    /// Posts a list; of a refusal the number that came before it.
    pub(crate) fn post_send(&self, list: &mut SendList) -> Result<(), (usize, io::Error)> {
        if list.wrs.is_empty() {
            return Ok(());
        }
        let (first, mut bad) = (list.link(), ptr::null_mut());
        // SAFETY: the queue pair and the list live during the call, which copies the list and what is inline. Other data is in
        // memory that its registration keeps, and out of registered memory the device keeps.
        let posted = done(unsafe { ibv_post_send(self.raw.as_ptr(), first, &raw mut bad) });
        posted.map_err(|e| (before(first, bad, list.len()), e))
    }

    pub(crate) fn post_recv(&self, list: &mut RecvList) -> Result<(), (usize, io::Error)> {
        if list.wrs.is_empty() {
            return Ok(());
        }
        let (first, mut bad) = (list.link(), ptr::null_mut());
        // SAFETY: as in `post_send`.
        let posted = done(unsafe { ibv_post_recv(self.raw.as_ptr(), first, &raw mut bad) });
        posted.map_err(|e| (before(first, bad, list.len()), e))
    }

    /// Posts what is in the list, and behind it the binding of a type 2 window under a key.
    pub(crate) fn post_bind_2(
        &self,
        list: &mut SendList,
        wr_id: u64,
        (mw, key): (&mut Mw, RKey),
        bind: &Bind<'_>,
    ) -> Result<(), (usize, io::Error)> {
        let mut raw = blank(wr_id, WrOpcode::BindWindow, SendFlags::SIGNALED);
        raw.bind_mw_tso_union = bind_mw_tso_union_t {
            bind_mw: bind_mw_t {
                mw: mw.as_ptr(),
                rkey: key.0,
                bind_info: bind.info(),
            },
        };
        list.wrs.push(raw);
        list.data.push(Data::Sges(0..0));
        self.post_send(list)?;
        mw.set_rkey(key);
        Ok(())
    }

    /// Posts the binding of a type 1 window, whose key is a new one then; of no bytes: it is open to nothing.
    pub(crate) fn post_bind_1(&self, wr_id: u64, mw: &mut Mw, bind: &Bind<'_>) -> io::Result<()> {
        let mut bind = ibv_mw_bind {
            wr_id,
            send_flags: SendFlags::SIGNALED.bits(),
            bind_info: bind.info(),
        };
        // SAFETY: queue pair, window and registration live during the call. A window that is bound closes before its
        // registration ends, or the registration does not end (`Mr`).
        done(unsafe { ibv_bind_mw(self.raw.as_ptr(), mw.as_ptr(), &raw mut bind) })
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        if let Err(e) = done(unsafe { ibv_destroy_qp(self.raw.as_ptr()) }) {
            tracing::warn!("destroying a queue pair of {} failed: {e}", self.pd.context().name());
        }
    }
}
