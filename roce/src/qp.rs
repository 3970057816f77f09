//! Queue pairs.

use std::{net::IpAddr, sync::Arc};

use parking_lot::Mutex;
use roce_fault::{PostStep, Posted, Posting, QpRef};
use roce_mem::PostedKey;
use roce_net::Driver;
use roce_port::{Port, QpInit as PortQpInit};
use roce_qp::{CompletionQueue as Queue, Failure, NO_RECEIVE_QUEUE, ReceiveQueue};
use roce_verbs::{
    AccessFlags, LKey, QpAttr, QpCaps, QpState, QpType, Qpn, RKey, RecvWr, SendFlags, SendOp, SendRequest, SendWr,
    provider::VerbsError,
    wr::{BindWindow, FastRegister, Payload, PostError},
};

use crate::{
    cm::Id,
    cq::Cq,
    device::{Device, DeviceInner, closed},
    faults::fail,
    memory::{Mr, Mw, Pd, Revocable},
    port::Membership,
    srq::{Srq, Xrcd},
};

/// A queue pair. It ends with its last clone, and then so does its connection, unless the program still has the
/// [`Id`].
#[derive(Clone)]
pub struct Qp(Arc<QpInner>);

struct QpInner {
    qpn: Qpn,
    /// Its place in the order of creation, for faults on demand.
    serial: u32,
    device: Arc<DeviceInner>,
    /// Which of the device's engines it is in.
    engine: usize,
    qp_type: QpType,
    caps: QpCaps,
    signal_all: bool,
    /// The multicast groups that it is a member of.
    groups: Mutex<Vec<Membership>>,
    // Held so that they outlive it.
    _pd: Pd,
    _cqs: [Option<Cq>; 2],
    srq: Option<Srq>,
    /// Handle of its connection, which stays up as long as the queue pair.
    connection: Mutex<Option<Id>>,
    /// Its own receive queue, if it has one.
    receives: Option<Arc<ReceiveQueue>>,
    _xrcd: Option<Xrcd>,
}

/// Attributes of a new reliable connected queue pair.
#[derive(Clone, Copy, Debug)]
pub struct QpInit<'a> {
    /// Completion queue of sends.
    pub send_cq: &'a Cq,
    /// Completion queue of receives.
    pub recv_cq: &'a Cq,
    /// Queue sizes.
    pub caps: QpCaps,
    /// Every send makes a completion.
    pub signal_all: bool,
}

/// Memory that a key opens to the peer.
#[derive(Clone, Copy, Debug)]
pub struct Grant<'a> {
    /// The memory.
    pub region: &'a Mr,
    /// Offset of the first byte in it.
    pub offset: usize,
    /// Length, bytes.
    pub len: usize,
    /// The rights.
    pub access: AccessFlags,
}

/// Attributes of a new queue pair of any service.
#[derive(Clone, Copy, Debug)]
pub struct QpOptions<'a> {
    /// Transport service.
    pub qp_type: QpType,
    /// Completions of sends. XRC targets have none.
    pub send_cq: Option<&'a Cq>,
    /// Completions of receives. XRC queue pairs have none.
    pub recv_cq: Option<&'a Cq>,
    /// Source of its receives, instead of a queue of its own.
    pub srq: Option<&'a Srq>,
    /// The domain of an XRC target.
    pub xrcd: Option<&'a Xrcd>,
    /// Queue sizes.
    pub caps: QpCaps,
    /// Every send makes a completion.
    pub signal_all: bool,
}

impl Drop for QpInner {
    fn drop(&mut self) {
        if self.device.engines.is_inherited() {
            return;
        }
        let router = &self.device.router;
        // Under the port's lock: the number may be another's as soon as that is free.
        let ended = self.driver().with(|port, now| {
            let done = port.destroy_qp(now, self.qpn);
            router.forget_qp(self.qpn);
            done
        });
        match ended {
            Ok(Err(e)) => tracing::error!("destroying queue pair {} failed: {e}", self.qpn),
            Ok(Ok(())) => {}
            // On a closed device there is nothing left to end.
            Err(_) => router.forget_qp(self.qpn),
        }
        self.device.engines.remove_queue_pair(self.engine);
    }
}

impl QpInner {
    fn driver(&self) -> &Driver {
        self.device.engines.get(self.engine)
    }
}

impl core::fmt::Debug for Qp {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_tuple("Qp").field(&self.0.qpn).finish()
    }
}

const GONE: (usize, PostError) = (0, PostError::NoQueuePair);

/// From RESET to INIT, with the rights that rdma_cm gives (`cm_init_qp_init_attr`).
const INIT: QpAttr = QpAttr {
    state: Some(QpState::Init),
    cur_state: None,
    en_sqd_async_notify: None,
    access: Some(
        AccessFlags::REMOTE_WRITE
            .union(AccessFlags::REMOTE_READ)
            .union(AccessFlags::REMOTE_ATOMIC),
    ),
    pkey_index: Some(0),
    port: Some(1),
    qkey: None,
    av: None,
    path_mtu: None,
    timeout: None,
    retry_cnt: None,
    rnr_retry: None,
    rq_psn: None,
    max_rd_atomic: None,
    min_rnr_timer: None,
    sq_psn: None,
    max_dest_rd_atomic: None,
    dest_qpn: None,
    path_mig_state: None,
    sq_draining: false,
};

/// The range of a grant, in the region's addresses.
fn granted_range(grant: &Grant<'_>) -> Result<(u64, u64), PostError> {
    let size = grant.region.len();
    if grant.offset > size || grant.len > size - grant.offset {
        return Err(PostError::Invalid("the granted range is outside the region"));
    }
    Ok((grant.region.addr() + grant.offset as u64, grant.len as u64))
}

impl Device {
    /// Creates a reliable connected queue pair in INIT: receives may be posted at once (`rdma_create_qp`).
    ///
    /// # Errors
    /// If the limit of the device is reached.
    pub fn create_qp(&self, pd: &Pd, init: &QpInit<'_>) -> Result<Qp, VerbsError> {
        let qp = self.create_qp_in_reset(pd, init)?;
        qp.modify(&INIT)?;
        Ok(qp)
    }

    /// Creates a queue pair in RESET, as `ibv_create_qp` does. [`Device::create_qp`] returns one in INIT, as `rdma_create_qp` does,
    /// so that receives can be posted before it is connected.
    ///
    /// # Errors
    /// At the device's limit.
    pub fn create_qp_in_reset(&self, pd: &Pd, init: &QpInit<'_>) -> Result<Qp, VerbsError> {
        let options = QpOptions {
            qp_type: QpType::Rc,
            send_cq: Some(init.send_cq),
            recv_cq: Some(init.recv_cq),
            srq: None,
            xrcd: None,
            caps: init.caps,
            signal_all: init.signal_all,
        };
        Qp::of(self, Some(pd), &options)
    }

    /// Makes a queue pair of any service, in RESET (`ibv_create_qp`, `ibv_create_qp_ex`). An XRC target needs no
    /// protection domain.
    ///
    /// # Errors
    /// At the device's limits, or when the options don't go together.
    pub fn create_qp_as(&self, pd: Option<&Pd>, options: &QpOptions<'_>) -> Result<Qp, VerbsError> {
        Qp::of(self, pd, options)
    }
}

impl Qp {
    fn of(device: &Device, pd: Option<&Pd>, options: &QpOptions<'_>) -> Result<Self, VerbsError> {
        let qp_type = options.qp_type;
        let pd = match (qp_type, options.xrcd, pd) {
            (QpType::XrcTgt, Some(xrcd), None) => xrcd.pd(),
            (_, _, Some(pd)) => pd,
            _ => return Err(VerbsError::Invalid("the queue pair has no protection domain".into())),
        };
        pd.check(&device.0)?;
        for cq in [options.send_cq, options.recv_cq].into_iter().flatten() {
            cq.check(&device.0)?;
        }
        if let Some(srq) = options.srq {
            srq.check(&device.0)?;
        }
        if let Some(xrcd) = options.xrcd {
            xrcd.pd().check(&device.0)?;
        }
        let queue = |cq: Option<&Cq>, needed: bool| match cq {
            Some(cq) => Ok(cq.queue().clone()),
            // Nothing is ever put into it.
            None if !needed => Ok(Queue::new(0, 1, None)),
            None => Err(VerbsError::Invalid("the queue pair has no completion queue".into())),
        };
        let args = PortQpInit {
            pd: pd.0.handle,
            qp_type,
            send_cq: queue(options.send_cq, qp_type.sends())?,
            recv_cq: queue(options.recv_cq, qp_type.receives())?,
            caps: options.caps,
            signal_all: options.signal_all,
            srq: options.srq.map(|s| s.queue().clone()),
            xrcd: options.xrcd.map(|x| x.domain().clone()),
        };
        let engines = &device.0.engines;
        if engines.queue_pairs() >= device.0.limits.max_qp {
            return Err(VerbsError::Limit("queue pairs"));
        }
        let cqs: Vec<_> = [options.send_cq, options.recv_cq].into_iter().flatten().collect();
        let engine_sets: Vec<_> = cqs.iter().map(|cq| cq.engine_set()).collect();
        let engine = engines.place(qp_type, &engine_sets, cqs.iter().all(|cq| cq.is_polled()));
        let made = engines.get(engine).with_quiet(|port, now| -> Result<_, VerbsError> {
            port.set_now(now);
            let qpn = port.create_qp(args)?;
            Ok((qpn, port.receive_queue(qpn), port.qp_serial(qpn)))
        });
        let (qpn, receives, serial) = made.map_err(closed)??;
        engines.add_queue_pair(engine, &engine_sets);
        Ok(Self(Arc::new(QpInner {
            qpn,
            serial: serial.unwrap_or(0),
            receives,
            engine,
            device: device.0.clone(),
            qp_type,
            caps: options.caps.of_queues(qp_type, options.srq.is_some()),
            signal_all: options.signal_all,
            groups: Mutex::default(),
            _pd: pd.clone(),
            _cqs: [options.send_cq.cloned(), options.recv_cq.cloned()],
            srq: options.srq.cloned(),
            connection: Mutex::default(),
            _xrcd: options.xrcd.cloned(),
        })))
    }

    /// Its transport service.
    pub fn qp_type(&self) -> QpType {
        self.0.qp_type
    }

    /// The sizes of its queues.
    pub fn caps(&self) -> QpCaps {
        self.0.caps
    }

    /// Whether every send makes a completion.
    pub fn signals_all(&self) -> bool {
        self.0.signal_all
    }

    /// Its shared receive queue, if it has one.
    pub fn srq(&self) -> Option<&Srq> {
        self.0.srq.as_ref()
    }

    /// Posts sends in order, each to its own target: datagrams, and messages of XRC initiators. Stops at the first that is
    /// refused.
    ///
    /// # Errors
    /// The refusal, with the number of requests that were accepted before it.
    pub fn post_requests(&self, requests: &[SendRequest<'_>]) -> Result<(), (usize, PostError)> {
        let post = |requests: &[SendRequest<'_>]| {
            let posted = self
                .0
                .driver()
                .with(|port, now| port.post_requests(now, self.0.qpn, requests));
            posted.unwrap_or(Err(GONE))
        };
        self.post(Posting::Send, requests, false, post)
    }

    /// Like [`Qp::post_requests`], but all of them or none (`ibv_wr_complete`).
    ///
    /// # Errors
    /// The first refusal, with the number of requests before it; nothing was posted.
    pub fn post_batch(&self, requests: &[SendRequest<'_>]) -> Result<(), (usize, PostError)> {
        let post = |requests: &[SendRequest<'_>]| {
            let posted = self
                .0
                .driver()
                .with(|port, now| port.post_batch(now, self.0.qpn, requests));
            posted.unwrap_or(Err(GONE))
        };
        self.post(Posting::Send, requests, true, post)
    }

    /// Takes the reason why it has failed, as text for people: what was asked of whom, and what was wrong with it. `None` if it has
    /// not failed, or the reason was taken before.
    pub fn take_failure(&self) -> Option<Failure> {
        let driver = self.0.driver();
        driver.with_quiet(|port, _| port.take_failure(self.0.qpn)).ok()?
    }

    /// Has what is sent to a multicast group delivered to it (`ibv_attach_mcast`); the group is joined on the interface
    /// that has `local` (unspecified: the device's address). A second call does nothing.
    ///
    /// # Errors
    /// When it is no UD queue pair or no group, at a limit, or when the system refuses.
    pub fn attach_mcast(&self, group: IpAddr, local: IpAddr) -> Result<(), VerbsError> {
        let mut groups = self.0.groups.lock();
        let driver = self.0.driver();
        let added = driver.with_quiet(|port, _| port.attach_mcast(self.0.qpn, group));
        if !added.map_err(closed)?? {
            return Ok(());
        }
        match Membership::new(&self.0.device, group, local) {
            Ok(member) => {
                groups.push(member);
                Ok(())
            }
            Err(e) => {
                let undone = driver.with_quiet(|port, _| port.detach_mcast(self.0.qpn, group));
                undone.map_err(closed)??;
                Err(e)
            }
        }
    }

    /// Ends its membership in a multicast group (`ibv_detach_mcast`).
    ///
    /// # Errors
    /// When it is not a member.
    pub fn detach_mcast(&self, group: IpAddr) -> Result<(), VerbsError> {
        let mut groups = self.0.groups.lock();
        let driver = self.0.driver();
        let done = driver.with_quiet(|port, _| port.detach_mcast(self.0.qpn, group));
        done.map_err(closed)??;
        groups.retain(|m| m.group() != group.to_canonical());
        Ok(())
    }

    /// The multicast groups that it is a member of.
    pub fn mcast_groups(&self) -> Vec<IpAddr> {
        self.0.groups.lock().iter().map(Membership::group).collect()
    }

    /// Returns the engine and the number of the queue pair.
    pub(crate) fn place(&self) -> (usize, Qpn) {
        (self.0.engine, self.0.qpn)
    }

    pub(crate) fn device(&self) -> &Arc<DeviceInner> {
        &self.0.device
    }

    /// Keeps the handle of its connection, in the place of a former one.
    pub(crate) fn keep_connection(&self, id: Id) {
        let former = self.0.connection.lock().replace(id);
        // Dropping a handle takes the port's lock.
        drop(former);
    }

    /// Current state.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn state(&self) -> Result<QpState, VerbsError> {
        let state = self.0.driver().with_quiet(|port, _| port.qp_state(self.0.qpn));
        state.map_err(closed)?.ok_or(VerbsError::Post(PostError::NoQueuePair))
    }

    /// Queues the binding of a memory window. Peers may use the returned key once what was posted before is
    /// executed; what the window was bound to before ends then.
    ///
    /// # Errors
    /// Like [`Qp::post_send`]; also when the range is outside the region.
    pub fn post_bind(&self, window: &Mw, grant: &Grant<'_>, wr_id: u64, flags: SendFlags) -> Result<RKey, PostError> {
        let (addr, length) = granted_range(grant)?;
        let (lkey, access) = (grant.region.lkey(), grant.access);
        let bind = |key| {
            SendOp::BindWindow(BindWindow {
                key,
                lkey,
                addr,
                length,
                access,
            })
        };
        let mut posted = window.posted().lock();
        if !window.kind().is_type2() {
            // Binding anew is how the former binding of type 1 ends (IBA 10.6.7.2.1).
            return self.rebind(&mut posted, wr_id, flags, bind);
        }
        self.renew(&mut posted, wr_id, flags, bind)
    }

    /// Opens the next key without closing the former one first.
    fn rebind(
        &self,
        posted: &mut PostedKey,
        wr_id: u64,
        flags: SendFlags,
        open: impl Fn(RKey) -> SendOp,
    ) -> Result<RKey, PostError> {
        let key = posted.next(&self.0.device.mem);
        let wr = SendWr {
            wr_id,
            op: open(key),
            flags,
            payload: Payload::Sges(&[]),
        };
        self.post_send(&[wr]).map_err(|(_, e)| e)?;
        posted.key = key;
        posted.granted = true;
        Ok(key)
    }

    /// Queues the end of a window's binding.
    ///
    /// # Errors
    /// Like [`Qp::post_send`].
    pub fn post_unbind(&self, window: &Mw, wr_id: u64, flags: SendFlags) -> Result<(), PostError> {
        let mut posted = window.posted().lock();
        if window.kind().is_type2() {
            return self.revoke(&mut posted, wr_id, flags);
        }
        // A binding of no length ends one of type 1.
        self.rebind(&mut posted, wr_id, flags, |key| {
            SendOp::BindWindow(BindWindow {
                key,
                lkey: LKey::default(),
                addr: 0,
                length: 0,
                access: AccessFlags::empty(),
            })
        })?;
        posted.granted = false;
        Ok(())
    }

    /// Posts, with the faults that rules demand.
    #[inline]
    fn post<T>(&self, verb: Posting, wrs: &[T], whole: bool, post: impl Fn(&[T]) -> Posted) -> Posted {
        let Some(faults) = self.0.device.verb_faults() else {
            return post(wrs);
        };
        let (qpn, serial) = (self.0.qpn.value(), self.0.serial);
        faults.post(verb, QpRef { qpn, serial }, wrs, whole, |step| match step {
            PostStep::Post(wrs) => post(wrs),
            PostStep::Fail => {
                fail(self.0.driver(), self.0.qpn, true);
                Ok(())
            }
        })
    }

    /// Posts receives without the port's lock, so that it waits for no packets that others handle.
    fn queue_receives(&self, wrs: &[RecvWr<'_>]) -> Posted {
        let driver = self.0.driver();
        if driver.is_closed() {
            return Err(GONE);
        }
        let queue = self.0.receives.as_ref().ok_or((0, NO_RECEIVE_QUEUE))?;
        let queued = queue.post(wrs)?;
        let (_, flushed) = wrs.split_at(queued);
        if flushed.is_empty() {
            return Ok(());
        }
        driver
            .with_quiet(|port, now| port.post_recv(now, self.0.qpn, flushed))
            .unwrap_or(Err(GONE))
            .map_err(|(n, e)| (queued + n, e))
    }

    /// Invalidates the former key, if there is one, and opens the next.
    fn renew(
        &self,
        posted: &mut PostedKey,
        wr_id: u64,
        flags: SendFlags,
        open: impl Fn(RKey) -> SendOp,
    ) -> Result<RKey, PostError> {
        let next = posted.next(&self.0.device.mem);
        let wr = |op, flags| SendWr {
            wr_id,
            op,
            flags,
            payload: Payload::Sges(&[]),
        };
        let wrs = [
            wr(
                SendOp::LocalInvalidate(posted.key),
                flags.difference(SendFlags::SIGNALED),
            ),
            wr(open(next), flags),
        ];
        let skip = usize::from(!posted.granted);
        match self.post_send(&wrs[skip..]) {
            Ok(()) => {
                posted.key = next;
                posted.granted = true;
                Ok(next)
            }
            Err((done, e)) => {
                // The invalidation alone may have been taken.
                posted.granted &= done == 0;
                Err(e)
            }
        }
    }

    fn revoke(&self, posted: &mut PostedKey, wr_id: u64, flags: SendFlags) -> Result<(), PostError> {
        let wr = SendWr {
            wr_id,
            op: SendOp::LocalInvalidate(posted.key),
            flags,
            payload: Payload::Sges(&[]),
        };
        self.post_send(&[wr]).map_err(|(_, e)| e)?;
        posted.granted = false;
        Ok(())
    }

    /// Returns its number.
    pub fn qpn(&self) -> Qpn {
        self.0.qpn
    }

    /// Posts work requests in order, up to the first invalid one.
    ///
    /// One that succeeds makes a completion if it has [`SendFlags::SIGNALED`], or the queue pair was created with
    /// [`QpInit::signal_all`]. One that fails always does.
    ///
    /// # Errors
    /// The number of work requests posted, and the error of the next one.
    pub fn post_send(&self, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        let post = |wrs: &[SendWr<'_>]| {
            let posted = self.0.driver().with(|port, now| port.post_send(now, self.0.qpn, wrs));
            posted.unwrap_or(Err(GONE))
        };
        self.post(Posting::Send, wrs, false, post)
    }

    /// Posts receives in order, up to the first invalid one.
    ///
    /// A peer repeats a message that finds no receive, without end and without a completion if its `rnr_retry_count` is 7, as it is
    /// by default. So post receives before the connection is up.
    ///
    /// # Errors
    /// The number of receives posted, and the error of the next one.
    pub fn post_recv(&self, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        self.post(Posting::Recv, wrs, false, |wrs| self.queue_receives(wrs))
    }

    /// Queues the renewal of a revocable region's key. Peers may use the returned key when the work requests before it are executed;
    /// the former key ends then at the latest.
    ///
    /// With a queue pair that signals all sends, a renewal makes two completions, both with this `wr_id`.
    ///
    /// # Errors
    /// As [`Qp::post_send`]; also if the range is outside the region.
    pub fn post_grant(
        &self,
        region: &Revocable,
        grant: &Grant<'_>,
        wr_id: u64,
        flags: SendFlags,
    ) -> Result<RKey, PostError> {
        let (addr, length) = granted_range(grant)?;
        let (lkey, access) = (grant.region.lkey(), grant.access);
        self.renew(&mut region.posted().lock(), wr_id, flags, |key| {
            SendOp::FastRegister(FastRegister {
                key,
                lkey,
                addr,
                length,
                iova: addr,
                access,
            })
        })
    }

    /// Queues the end of a revocable region's current key.
    ///
    /// # Errors
    /// As [`Qp::post_send`].
    pub fn post_revoke(&self, region: &Revocable, wr_id: u64, flags: SendFlags) -> Result<(), PostError> {
        self.revoke(&mut region.posted().lock(), wr_id, flags)
    }

    /// Changes attributes and state. The queue pairs of [`Device::connect`] and [`Id::accept`] are moved to RTS without it.
    ///
    /// # Errors
    /// If the transition or an attribute is not permitted.
    pub fn modify(&self, attr: &QpAttr) -> Result<(), VerbsError> {
        let driver = self.0.driver();
        let modify = |port: &mut Port, now| port.modify_qp(now, self.0.qpn, attr);
        let done = match attr.stops() {
            true => driver.with_arrived(modify),
            false => driver.with(modify),
        };
        done.map_err(closed)?
    }

    /// Returns the current attributes.
    ///
    /// # Errors
    /// If the queue pair is gone, or the device is closed.
    pub fn query(&self) -> Result<QpAttr, VerbsError> {
        let attr = self.0.driver().with_quiet(|port, _| port.query_qp(self.0.qpn));
        attr.map_err(closed)?
    }
}
