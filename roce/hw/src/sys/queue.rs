//! Completion queues and queue pairs.

use std::{
    ffi::c_void,
    io,
    mem::{self, MaybeUninit},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use rdma_sys::{
    ibv_ack_cq_events, ibv_bind_mw, ibv_cq, ibv_create_cq, ibv_create_qp, ibv_modify_qp, ibv_mw_bind, ibv_poll_cq,
    ibv_qp, ibv_qp_init_attr, ibv_qp_type, ibv_req_notify_cq, ibv_wc,
};
use roce_verbs::{
    AccessFlags, Completion, Instant, QpAttrMask, QpCaps, QpState, Qpn, RKey, RnrTimer, SendFlags, WcFlags, WcOpcode,
    WcStatus,
};

use super::{
    attr::{Attributes, Reads},
    cm::CmId,
    context::Context,
    memory::{Mw, Pd},
    object::{Owned, done},
    wr::{Bind, List, Wr},
};

/// Events of a completion queue that are acknowledged together: it takes a lock.
const ACKS: u32 = 64;
/// Completions that are taken at a time.
const POLLED: usize = 32;

/// Completion queue.
pub(crate) struct Cq {
    raw: Owned<ibv_cq>,
    /// Events that were taken and not acknowledged yet.
    unacknowledged: AtomicU32,
    _context: Arc<Context>,
}

impl Cq {
    pub(crate) fn create(context: &Arc<Context>, entries: u32, cookie: u64) -> io::Result<Arc<Self>> {
        let entries = i32::try_from(entries).map_err(|_| io::ErrorKind::InvalidInput)?;
        let (channel, cookie) = (context.channel(), cookie as *mut c_void);
        Ok(Arc::new(Self {
            // SAFETY: context and channel live; the cookie is a number.
            raw: unsafe { Owned::new(ibv_create_cq(context.as_ptr(), entries, cookie, channel, 0)) }?,
            unacknowledged: AtomicU32::new(0),
            _context: context.clone(),
        }))
    }

    /// Appends completions, 32 at most. Returns their number.
    pub(crate) fn poll(&self, out: &mut Vec<Completion>, max: usize) -> io::Result<usize> {
        let mut room = [const { MaybeUninit::<ibv_wc>::uninit() }; POLLED];
        let max = max.min(POLLED);
        // SAFETY: room for so many.
        let count = unsafe { ibv_poll_cq(self.raw.as_ptr(), max as i32, room.as_mut_ptr().cast()) };
        let count = usize::try_from(count).map_err(|_| io::Error::other("the completion queue has failed"))?;
        let filled = room.iter().take(count);
        // SAFETY: so many were filled in.
        out.extend(filled.map(|wc| completion(unsafe { wc.assume_init_ref() })));
        Ok(count)
    }

    /// Requests an event for the next completion.
    pub(crate) fn arm(&self) -> io::Result<()> {
        // SAFETY: the queue lives.
        done(unsafe { ibv_req_notify_cq(self.raw.as_ptr(), 0) })
    }

    /// Counts an event of it that was taken from the channel.
    pub(crate) fn count_event(&self) {
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
    }
}

fn status(code: u32) -> WcStatus {
    let found = WcStatus::NAMED.get(code as usize);
    found.map_or(WcStatus::GeneralError, |(_, status)| *status)
}

fn opcode(code: u32) -> WcOpcode {
    let mut all = WcOpcode::ALL.into_iter();
    all.find(|o| *o as u32 == code).unwrap_or_default()
}

/// Returns a completion of the library as ours, with the `wr_id` of the device.
fn completion(wc: &ibv_wc) -> Completion {
    let flags = WcFlags::from_bits_truncate(wc.wc_flags);
    // SAFETY: both members are numbers of 32 bits.
    let extra = unsafe { wc.imm_data_invalidated_rkey_union.invalidated_rkey };
    let with = |flag| if flags.contains(flag) { extra } else { 0 };
    Completion {
        wr_id: wc.wr_id,
        status: status(wc.status),
        opcode: opcode(wc.opcode),
        vendor_err: wc.vendor_err,
        byte_len: wc.byte_len,
        imm: u32::from_be(with(WcFlags::WITH_IMM)),
        invalidated: RKey(with(WcFlags::WITH_INV)),
        qpn: Qpn::new(wc.qp_num),
        src_qp: Qpn::new(wc.src_qp),
        pkey_index: wc.pkey_index,
        sl: wc.sl,
        timestamp: Instant::ZERO,
        flags,
        solicited: false,
    }
}

/// Reliable connected queue pair.
pub(crate) struct Qp {
    raw: Owned<ibv_qp>,
    max_inline_data: u32,
    _pd: Arc<Pd>,
    _cq: Arc<Cq>,
}

impl Qp {
    /// Creates a queue pair, whose events carry the cookie.
    pub(crate) fn create(pd: &Arc<Pd>, cq: &Arc<Cq>, caps: &QpCaps, signal_all: bool, cookie: u64) -> io::Result<Self> {
        // SAFETY: plain data; null pointers are none.
        let mut init: ibv_qp_init_attr = unsafe { mem::zeroed() };
        init.qp_context = cookie as *mut c_void;
        (init.send_cq, init.recv_cq) = (cq.raw.as_ptr(), cq.raw.as_ptr());
        (init.qp_type, init.sq_sig_all) = (ibv_qp_type::IBV_QPT_RC, i32::from(signal_all));
        init.cap.max_send_wr = caps.max_send_wr;
        init.cap.max_recv_wr = caps.max_recv_wr;
        init.cap.max_send_sge = caps.max_send_sge;
        init.cap.max_recv_sge = caps.max_recv_sge;
        init.cap.max_inline_data = caps.max_inline_data;
        Ok(Self {
            // SAFETY: domain and queue live; the call writes the sizes that it has granted.
            raw: unsafe { Owned::new(ibv_create_qp(pd.as_ptr(), &raw mut init)) }?,
            max_inline_data: init.cap.max_inline_data,
            _pd: pd.clone(),
            _cq: cq.clone(),
        })
    }

    /// Returns the inline data that it was granted.
    pub(crate) fn max_inline_data(&self) -> u32 {
        self.max_inline_data
    }

    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair lives.
        unsafe { (*self.raw.as_ptr()).qp_num }
    }

    fn modify(&self, mut attributes: Attributes) -> io::Result<()> {
        // SAFETY: the queue pair lives, and the attributes that the mask names are set.
        done(unsafe { ibv_modify_qp(self.raw.as_ptr(), &raw mut attributes.raw, attributes.mask) })
    }

    /// Moves it to INIT, on the first port: it may turn out to be another when the route is known.
    pub(crate) fn init(&self, access: AccessFlags) -> io::Result<()> {
        let mut init = Attributes::of(QpState::Init);
        init.raw.port_num = 1;
        init.set(QpAttrMask::PKEY_INDEX | QpAttrMask::PORT);
        init.set_access(access);
        self.modify(init)
    }

    /// Moves it to error.
    pub(crate) fn fail(&self) -> io::Result<()> {
        self.modify(Attributes::of(QpState::Err))
    }

    /// Moves it to RTS with what the connection manager knows. `reads`: limits; `tos`: of our packets, if it is not that of the path.
    pub(crate) fn bring_up(
        &self,
        cm: &CmId,
        access: AccessFlags,
        reads: Reads,
        min_rnr_timer: Option<RnrTimer>,
        tos: Option<u8>,
    ) -> io::Result<()> {
        let mut init = cm.attributes(QpState::Init)?;
        init.set_access(access);
        self.modify(init)?;
        let mut rtr = cm.attributes(QpState::Rtr)?;
        rtr.limit_reads(reads);
        if let Some(timer) = min_rnr_timer.filter(|_| rtr.has(QpAttrMask::MIN_RNR_TIMER)) {
            rtr.raw.min_rnr_timer = timer.code();
        }
        if let Some(tos) = tos.filter(|_| rtr.has(QpAttrMask::AV)) {
            rtr.raw.ah_attr.grh.traffic_class = tos;
        }
        self.modify(rtr)?;
        let mut rts = cm.attributes(QpState::Rts)?;
        rts.limit_reads(reads);
        self.modify(rts)
    }

    /// Posts a list; of a refusal the number of work requests accepted before it.
    pub(crate) fn post<T: Wr>(&self, list: &mut List<T>) -> Result<(), (usize, io::Error)> {
        // SAFETY: the queue pair lives.
        unsafe { list.post(self.raw.as_ptr()) }
    }

    /// Posts the binding of a type 1 window, which gets a new key. A binding of no bytes closes it.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_the_library_are_ours() {
        for code in 0..22 {
            assert_eq!(status(code) as u32, code);
        }
        assert_eq!(status(23), WcStatus::GeneralError, "one that we do not know");
        for code in [0, 1, 2, 3, 4, 5, 6, 8, 9, 128, 129] {
            assert_eq!(opcode(code) as u32, code);
        }
    }

    #[test]
    fn immediate_data_is_big_endian_and_a_key_is_not() {
        // SAFETY: plain data.
        let mut wc: ibv_wc = unsafe { mem::zeroed() };
        (wc.wr_id, wc.opcode, wc.wc_flags) = (1, 128, 2);
        wc.imm_data_invalidated_rkey_union.invalidated_rkey = u32::from_ne_bytes([1, 2, 3, 4]);
        let out = completion(&wc);
        assert_eq!((out.wr_id, out.imm, out.invalidated), (1, 0x0102_0304, RKey(0)));
        wc.wc_flags = 8;
        wc.imm_data_invalidated_rkey_union.invalidated_rkey = 0x500;
        let out = completion(&wc);
        assert_eq!((out.imm, out.invalidated), (0, RKey(0x500)));
    }
}
