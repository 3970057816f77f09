//! Queue pairs.

use std::{net::IpAddr, sync::Arc};

use parking_lot::Mutex;
use roce_fault::{PostStep, Posted, Posting, QpRef};
use roce_net::{Closed, Driver};
use roce_port::{Port, QpInit as PortQpInit};
use roce_qp::{CompletionQueue as Queue, Failure, NO_RECEIVE_QUEUE, QueuePair, ReceiveQueue};
use roce_verbs::{
    AccessFlags, QpAttr, QpCaps, QpState, QpType, Qpn, RKey, RecvWr, SendFlags, SendOp, SendRequest, SendWr,
    provider::VerbsError,
    wr::{FastRegister, Payload, PostError},
};
use smallvec::SmallVec;

use crate::{
    cq::Cq,
    device::{Device, DeviceInner},
    faults::fail,
    group::Membership,
    memory::{Keyed, Mr, Mw, Pd, Revocable},
    srq::{Srq, Xrcd},
    sync::Handle,
};

/// A queue pair. It ends with its last clone, and then so does its connection, unless the program still has the
/// [`Id`](crate::Id).
#[derive(Clone, Debug)]
pub struct Qp(Arc<QpInner>);

#[derive(Debug)]
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
    connection: Mutex<Option<Handle>>,
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

impl<'a> QpInit<'a> {
    /// Queues of the usual sizes. Sends, if they have [`SendFlags::SIGNALED`], and receives complete into one queue.
    pub fn new(cq: &'a Cq) -> Self {
        Self {
            send_cq: cq,
            recv_cq: cq,
            caps: QpCaps::default(),
            signal_all: false,
        }
    }
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
        let Ok(engines) = self.device.live() else { return };
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
        engines.remove_queue_pair(self.engine);
    }
}

impl QpInner {
    fn driver(&self) -> &Driver {
        self.device.engines.get(self.engine)
    }
}

const GONE: (usize, PostError) = (0, PostError::NoQueuePair);

/// Returns the change from RESET to INIT, with the rights that rdma_cm gives (`cm_init_qp_init_attr`).
fn init_attr() -> QpAttr {
    QpAttr {
        state: Some(QpState::Init),
        access: Some(AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC),
        pkey_index: Some(0),
        port: Some(1),
        ..QpAttr::default()
    }
}

/// Returns a work request about a key.
fn key_wr(wr_id: u64, op: SendOp, flags: SendFlags) -> SendWr<'static> {
    SendWr {
        wr_id,
        op,
        flags,
        payload: Payload::Sges(&[]),
    }
}

impl Grant<'_> {
    /// Returns the range, in the region's addresses and still without a key.
    fn range(&self) -> Result<FastRegister, PostError> {
        let size = self.region.len();
        if self.offset > size || self.len > size - self.offset {
            return Err(PostError::Invalid("the granted range is outside the region"));
        }
        let addr = self.region.addr() + self.offset as u64;
        Ok(FastRegister {
            key: RKey::default(),
            lkey: self.region.lkey(),
            addr,
            length: self.len as u64,
            iova: addr,
            access: self.access,
        })
    }
}

impl Device {
    /// Creates a reliable connected queue pair in INIT: receives may be posted at once (`rdma_create_qp`).
    ///
    /// # Errors
    /// If the limit of the device is reached.
    pub fn create_qp(&self, pd: &Pd, init: &QpInit<'_>) -> Result<Qp, VerbsError> {
        let options = QpOptions {
            qp_type: QpType::Rc,
            send_cq: Some(init.send_cq),
            recv_cq: Some(init.recv_cq),
            srq: None,
            xrcd: None,
            caps: init.caps,
            signal_all: init.signal_all,
        };
        let qp = self.create_qp_as(Some(pd), &options)?;
        qp.modify(&init_attr())?;
        Ok(qp)
    }

    /// Makes a queue pair of any service, in RESET (`ibv_create_qp`, `ibv_create_qp_ex`). An XRC target needs no
    /// protection domain.
    ///
    /// # Errors
    /// At the device's limits, or when the options don't go together.
    pub fn create_qp_as(&self, pd: Option<&Pd>, options: &QpOptions<'_>) -> Result<Qp, VerbsError> {
        let qp_type = options.qp_type;
        let pd = match (qp_type, options.xrcd, pd) {
            (QpType::XrcTgt, Some(xrcd), None) => xrcd.pd(),
            (_, _, Some(pd)) => pd,
            _ => return Err(VerbsError::Invalid("the queue pair has no protection domain".into())),
        };
        pd.check(&self.0)?;
        for cq in [options.send_cq, options.recv_cq].into_iter().flatten() {
            cq.check(&self.0)?;
        }
        if let Some(srq) = options.srq {
            srq.check(&self.0)?;
        }
        if let Some(xrcd) = options.xrcd {
            xrcd.pd().check(&self.0)?;
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
        let engines = &self.0.engines;
        if engines.queue_pairs() >= self.0.limits.max_qp {
            return Err(VerbsError::Limit("queue pairs"));
        }
        let cqs: Vec<_> = [options.send_cq, options.recv_cq].into_iter().flatten().collect();
        let engine_sets: Vec<_> = cqs.iter().map(|cq| cq.engine_set()).collect();
        let engine = engines.place(qp_type, &engine_sets, cqs.iter().all(|cq| cq.is_polled()));
        let made = engines.get(engine).with_quiet(|port, now| -> Result<_, VerbsError> {
            port.set_now(now);
            let qpn = port.create_qp(args)?;
            let receive_queue = port.qp(qpn).and_then(QueuePair::receive_queue).cloned();
            Ok((qpn, receive_queue, port.qp_serial(qpn)))
        });
        let (qpn, receives, serial) = made??;
        engines.add_queue_pair(engine, &engine_sets);
        Ok(Qp(Arc::new(QpInner {
            qpn,
            serial: serial.unwrap_or(0),
            receives,
            engine,
            device: self.0.clone(),
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
}

impl Qp {
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
        let driver = self.0.driver();
        self.post(Posting::Send, requests, false, |wrs| {
            driver.with(|port, now| port.post_requests(now, self.0.qpn, wrs))
        })
    }

    /// Like [`Qp::post_requests`], but all of them or none (`ibv_wr_complete`).
    ///
    /// # Errors
    /// The first refusal, with the number of requests before it; nothing was posted.
    pub fn post_batch(&self, requests: &[SendRequest<'_>]) -> Result<(), (usize, PostError)> {
        let driver = self.0.driver();
        self.post(Posting::Send, requests, true, |wrs| {
            driver.with(|port, now| port.post_batch(now, self.0.qpn, wrs))
        })
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
        if !driver.with_quiet(|port, _| port.attach_mcast(self.0.qpn, group))?? {
            return Ok(());
        }
        match Membership::new(&self.0.device, group, local) {
            Ok(member) => {
                groups.push(member);
                Ok(())
            }
            Err(e) => {
                driver.with_quiet(|port, _| port.detach_mcast(self.0.qpn, group))??;
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
        driver.with_quiet(|port, _| port.detach_mcast(self.0.qpn, group))??;
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
    pub(crate) fn keep_connection(&self, id: Handle) {
        let former = self.0.connection.lock().replace(id);
        // Dropping a handle takes the port's lock.
        drop(former);
    }

    /// Current state.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn state(&self) -> Result<QpState, VerbsError> {
        let state = self.0.driver().with_quiet(|port, _| port.qp_state(self.0.qpn))?;
        state.ok_or(VerbsError::Post(PostError::NoQueuePair))
    }

    /// Queues the binding of a memory window. Peers may use the returned key once what was posted before is
    /// executed; what the window was bound to before ends then.
    ///
    /// # Errors
    /// Like [`Qp::post_send`]; also when the range is outside the region.
    pub fn post_bind(&self, window: &Mw, grant: &Grant<'_>, wr_id: u64, flags: SendFlags) -> Result<RKey, PostError> {
        self.open(&window.0, grant, wr_id, flags)
    }

    /// Queues the end of a window's binding.
    ///
    /// # Errors
    /// Like [`Qp::post_send`].
    pub fn post_unbind(&self, window: &Mw, wr_id: u64, flags: SendFlags) -> Result<(), PostError> {
        self.close(&window.0, wr_id, flags)
    }

    /// Posts, with the faults that rules demand.
    #[inline]
    fn post<T>(&self, verb: Posting, wrs: &[T], whole: bool, post: impl Fn(&[T]) -> Result<Posted, Closed>) -> Posted {
        let post = |wrs: &[T]| post(wrs).unwrap_or(Err(GONE));
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

    /// Posts the opening of a range under the object's next key.
    fn open(&self, object: &Keyed, grant: &Grant<'_>, wr_id: u64, flags: SendFlags) -> Result<RKey, PostError> {
        let at = grant.range()?;
        let mut key = object.key.lock();
        let (next, ops) = key.grant(&self.0.device.mem, at);
        let last = ops.len() - 1;
        let wr = |(i, op)| match i == last {
            true => key_wr(wr_id, op, flags),
            false => key_wr(wr_id, op, flags.difference(SendFlags::SIGNALED)),
        };
        let wrs: SmallVec<[_; 2]> = ops.into_iter().enumerate().map(wr).collect();
        match self.post_send(&wrs) {
            Ok(()) => {
                (key.posted.key, key.posted.granted) = (next, true);
                Ok(next)
            }
            Err((done, e)) => {
                // The end of the former key alone may have been taken.
                key.posted.granted &= done == 0;
                Err(e)
            }
        }
    }

    /// Posts the end of the object's key.
    fn close(&self, object: &Keyed, wr_id: u64, flags: SendFlags) -> Result<(), PostError> {
        let mut key = object.key.lock();
        let (after, close) = key.revoke(&self.0.device.mem);
        self.post_send(&[key_wr(wr_id, close, flags)]).map_err(|(_, e)| e)?;
        (key.posted.key, key.posted.granted) = (after, false);
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
        let driver = self.0.driver();
        self.post(Posting::Send, wrs, false, |wrs| {
            driver.with(|port, now| port.post_send(now, self.0.qpn, wrs))
        })
    }

    /// Posts receives in order, up to the first invalid one.
    ///
    /// A peer repeats a message that finds no receive, without end and without a completion if its `rnr_retry_count` is 7, as it is
    /// by default. So post receives before the connection is up.
    ///
    /// # Errors
    /// The number of receives posted, and the error of the next one.
    pub fn post_recv(&self, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        self.post(Posting::Recv, wrs, false, |wrs| Ok(self.queue_receives(wrs)))
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
        self.open(&region.0, grant, wr_id, flags)
    }

    /// Queues the end of a revocable region's current key.
    ///
    /// # Errors
    /// As [`Qp::post_send`].
    pub fn post_revoke(&self, region: &Revocable, wr_id: u64, flags: SendFlags) -> Result<(), PostError> {
        self.close(&region.0, wr_id, flags)
    }

    /// Changes attributes and state. The queue pairs of [`Device::connect`] and [`Id::accept`](crate::Id::accept) are moved to RTS without it.
    ///
    /// # Errors
    /// If the transition or an attribute is not permitted.
    pub fn modify(&self, attr: &QpAttr) -> Result<(), VerbsError> {
        let driver = self.0.driver();
        let modify = |port: &mut Port, now| port.modify_qp(now, self.0.qpn, attr);
        match attr.stops() {
            true => driver.with_arrived(modify)?,
            false => driver.with(modify)?,
        }
    }

    /// Returns the current attributes.
    ///
    /// # Errors
    /// If the queue pair is gone, or the device is closed.
    pub fn query(&self) -> Result<QpAttr, VerbsError> {
        self.0.driver().with_quiet(|port, _| port.query_qp(self.0.qpn))?
    }
}
