//! Queue pairs.

use std::sync::Arc;

use roce_port::QpInit as PortQpInit;
use roce_verbs::{
    AccessFlags, QpAttr, QpState, QpType, Qpn, RKey, RecvWr, SendFlags, SendOp, SendWr,
    provider::{Grant, MemoryRegion, QpInit, QueuePair, VerbsError},
    wr::{BindWindow, FastRegister, Payload, PostError},
};

use crate::{
    cq::Cq,
    device::{Device, DeviceInner, closed},
    memory::{Mr, Mw, Pd, PostedKey, Revocable},
};

/// A reliable connected queue pair. It ends with its last clone.
#[derive(Clone)]
pub struct Qp(Arc<QpInner>);

struct QpInner {
    qpn: Qpn,
    device: Arc<DeviceInner>,
    // Held so that they outlive it.
    _pd: Pd,
    _cqs: [Cq; 2],
}

impl Drop for QpInner {
    fn drop(&mut self) {
        // On a closed device there is nothing left to end.
        if let Ok(Err(e)) = self.device.driver.with(|port, now| port.destroy_qp(now, self.qpn)) {
            tracing::error!("destroying queue pair {} failed: {e}", self.qpn);
        }
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
fn granted_range(grant: &Grant<'_, Mr>) -> Result<(u64, u64), PostError> {
    let size = grant.region.len();
    if grant.offset > size || grant.len > size - grant.offset {
        return Err(PostError::Invalid("the granted range is outside the region"));
    }
    Ok((grant.region.addr() + grant.offset as u64, grant.len as u64))
}

impl Device {
    /// Makes a queue pair in RESET, as `ibv_create_qp` does. [`roce_verbs::provider::Provider::create_qp`] gives one in
    /// INIT, as `rdma_create_qp` does, so that receives can be posted before it is connected.
    ///
    /// # Errors
    /// At the device's limit.
    pub fn create_qp_in_reset(&self, pd: &Pd, init: &QpInit<'_, Cq>) -> Result<Qp, VerbsError> {
        Qp::new(self, pd, init, QpState::Reset)
    }
}

impl Qp {
    /// Makes a queue pair in RESET or INIT.
    pub(crate) fn new(device: &Device, pd: &Pd, init: &QpInit<'_, Cq>, state: QpState) -> Result<Self, VerbsError> {
        pd.check(&device.0)?;
        for cq in [init.send_cq, init.recv_cq] {
            if !Arc::ptr_eq(cq.device(), &device.0) {
                return Err(VerbsError::Invalid("the completion queue is another device's".into()));
            }
        }
        let args = PortQpInit {
            pd: pd.0.handle,
            qp_type: QpType::Rc,
            send_cq: init.send_cq.queue().clone(),
            recv_cq: init.recv_cq.queue().clone(),
            caps: init.caps,
            signal_all: init.signal_all,
            srq: None,
            xrcd: None,
        };
        let made = device.0.driver.with_quiet(|port, _| port.create_qp(args));
        let qp = Self(Arc::new(QpInner {
            qpn: made.map_err(closed)??,
            device: device.0.clone(),
            _pd: pd.clone(),
            _cqs: [init.send_cq.clone(), init.recv_cq.clone()],
        }));
        if state == QpState::Init {
            qp.modify(&INIT)?;
        }
        Ok(qp)
    }

    pub(crate) fn device(&self) -> &Arc<DeviceInner> {
        &self.0.device
    }

    /// Current state.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn state(&self) -> Result<QpState, VerbsError> {
        let state = self.0.device.driver.with_quiet(|port, _| port.qp_state(self.0.qpn));
        state.map_err(closed)?.ok_or(VerbsError::Post(PostError::NoQueuePair))
    }

    /// Queues the binding of a type-2 memory window. Peers may use the returned key once what was posted before is
    /// executed; what the window was bound to before ends then.
    ///
    /// # Errors
    /// Like [`QueuePair::post_send`]; also when the range is outside the region.
    pub fn post_bind(
        &self,
        window: &Mw,
        grant: &Grant<'_, Mr>,
        wr_id: u64,
        flags: SendFlags,
    ) -> Result<RKey, PostError> {
        let (addr, length) = granted_range(grant)?;
        let (lkey, access) = (grant.region.lkey(), grant.access);
        self.renew(&mut window.posted().lock(), wr_id, flags, |key| {
            SendOp::BindWindow(BindWindow {
                key,
                lkey,
                addr,
                length,
                access,
            })
        })
    }

    /// Queues the end of a window's binding.
    ///
    /// # Errors
    /// Like [`QueuePair::post_send`].
    pub fn post_unbind(&self, window: &Mw, wr_id: u64, flags: SendFlags) -> Result<(), PostError> {
        self.revoke(&mut window.posted().lock(), wr_id, flags)
    }

    /// Invalidates the former key, if there is one, and opens the next.
    fn renew(
        &self,
        posted: &mut PostedKey,
        wr_id: u64,
        flags: SendFlags,
        open: impl Fn(RKey) -> SendOp,
    ) -> Result<RKey, PostError> {
        let next = posted.key.next();
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
                *posted = PostedKey {
                    key: next,
                    granted: true,
                };
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
}

impl QueuePair for Qp {
    type Mr = Mr;
    type Revocable = Revocable;

    fn qpn(&self) -> Qpn {
        self.0.qpn
    }

    fn post_send(&self, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        let driver = &self.0.device.driver;
        driver
            .with(|port, now| port.post_send(now, self.0.qpn, wrs))
            .unwrap_or(Err(GONE))
    }

    fn post_recv(&self, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        let driver = &self.0.device.driver;
        driver
            .with_quiet(|port, now| port.post_recv(now, self.0.qpn, wrs))
            .unwrap_or(Err(GONE))
    }

    /// With a queue pair that signals all sends, a renewal makes two completions, both with this `wr_id`.
    fn post_grant(
        &self,
        region: &Revocable,
        grant: &Grant<'_, Mr>,
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

    fn post_revoke(&self, region: &Revocable, wr_id: u64, flags: SendFlags) -> Result<(), PostError> {
        self.revoke(&mut region.posted().lock(), wr_id, flags)
    }

    fn modify(&self, attr: &QpAttr) -> Result<(), VerbsError> {
        let done = self
            .0
            .device
            .driver
            .with(|port, now| port.modify_qp(now, self.0.qpn, attr));
        done.map_err(closed)?
    }

    fn query(&self) -> Result<QpAttr, VerbsError> {
        let attr = self.0.device.driver.with_quiet(|port, _| port.query_qp(self.0.qpn));
        attr.map_err(closed)?
    }
}
