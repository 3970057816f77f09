//! Shared receive queues and XRC domains.

use std::sync::{Arc, atomic::Ordering};

use roce_fault::{PostStep, Posting, QpRef};
use roce_qp::{SharedReceiveQueue, SrqConfig, XrcDomain};
use roce_verbs::{RecvWr, SrqAttr, SrqModify, SrqType, Srqn, provider::VerbsError, wr::PostError};

use crate::{
    cq::Cq,
    device::{Counted, Device, DeviceInner},
    memory::Pd,
};

/// Settings of a new shared receive queue.
#[derive(Debug)]
pub struct SrqInit<'a> {
    /// Sizes, and the limit to begin with.
    pub attr: SrqAttr,
    /// For messages of extended reliable connections: the domain, and where its receives complete.
    pub xrc: Option<(&'a Xrcd, &'a Cq)>,
}

/// A shared receive queue. It ends with its last clone; queue pairs that take from it hold one.
#[derive(Clone, Debug)]
pub struct Srq(Arc<SrqInner>);

#[derive(Debug)]
struct SrqInner {
    queue: Arc<SharedReceiveQueue>,
    pd: Pd,
    xrc: Option<(Xrcd, Cq)>,
    _counted: Arc<Counted>,
}

impl Drop for SrqInner {
    fn drop(&mut self) {
        if let Some((xrcd, _)) = &self.xrc
            && let Ok(engines) = self.pd.0.device.live()
        {
            xrcd.domain.detach(self.queue.number());
            // A thread that had found it before is done when the port's lock is free.
            engines.pass_locks();
        }
    }
}

/// Checks a size of a shared receive queue (`rxe_srq_chk_init`, `rxe_srq_chk_attr`).
fn check_size(asked: u32, max: u32, what: &str) -> Result<(), VerbsError> {
    match asked <= max {
        true => Ok(()),
        false => Err(VerbsError::Invalid(format!(
            "a shared receive queue of {asked} {what}: {max} are possible"
        ))),
    }
}

impl Srq {
    /// The number that names it in asynchronous events.
    pub fn handle(&self) -> u32 {
        self.0.queue.handle()
    }

    /// The number that peers of extended reliable connections name it by (`ibv_get_srq_num`).
    pub fn number(&self) -> Srqn {
        self.0.queue.number()
    }

    /// Its kind.
    pub fn kind(&self) -> SrqType {
        self.0.queue.config().srq_type
    }

    /// Posts receives in order; stops at the first that is refused.
    ///
    /// # Errors
    /// The refusal, with the number of requests that were accepted before it.
    pub fn post_recv(&self, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        let queue = |wrs: &[RecvWr<'_>]| {
            for (i, wr) in wrs.iter().enumerate() {
                self.0.queue.post(wr).map_err(|e| (i, e))?;
            }
            Ok(())
        };
        let Some(faults) = self.0.pd.0.device.verb_faults() else {
            return queue(wrs);
        };
        // It is no queue pair's.
        let none = QpRef { qpn: 0, serial: 0 };
        faults.post(Posting::Recv, none, wrs, false, |step| match step {
            PostStep::Post(wrs) => queue(wrs),
            PostStep::Fail => Ok(()),
        })
    }

    /// Resizes it or arms its limit (`ibv_modify_srq`). A limit that is passed already is reported at once.
    ///
    /// # Errors
    /// When size, limit and what it holds don't fit together, or at the device's limit.
    pub fn modify(&self, attr: &SrqModify) -> Result<(), VerbsError> {
        let device = &self.0.pd.0.device;
        if let Some(max_wr) = attr.max_wr {
            check_size(max_wr, device.limits.max_srq_wr, "work requests")?;
        }
        let event = self.0.queue.modify(attr);
        let event = event.map_err(|e| VerbsError::Invalid(e.to_string()))?;
        match event {
            Some(event) => Ok(device.engines.first().with_quiet(|port, _| port.push_event(event))?),
            None => Ok(()),
        }
    }

    /// Sizes, and the limit as it is armed.
    pub fn query(&self) -> SrqAttr {
        self.0.queue.query()
    }

    /// Receives that no message has taken.
    pub fn len(&self) -> usize {
        self.0.queue.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn queue(&self) -> &Arc<SharedReceiveQueue> {
        &self.0.queue
    }

    pub(crate) fn check(&self, device: &Arc<DeviceInner>) -> Result<(), VerbsError> {
        device.check(&self.0.pd.0.device, "shared receive queue")
    }
}

/// A domain of extended reliable connections. It ends with its last clone; its queue pairs and shared receive queues hold
/// one each.
#[derive(Clone, Debug)]
pub struct Xrcd {
    domain: Arc<XrcDomain>,
    /// Of its target queue pairs, which have none of their own: keys are checked against the shared receive queue's.
    pd: Pd,
    _counted: Arc<Counted>,
}

impl Xrcd {
    /// Whether both are the same domain.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.domain, &other.domain)
    }

    pub(crate) fn domain(&self) -> &Arc<XrcDomain> {
        &self.domain
    }

    pub(crate) fn pd(&self) -> &Pd {
        &self.pd
    }
}

impl Device {
    /// Makes a shared receive queue.
    ///
    /// # Errors
    /// At the device's limits, or when sizes don't fit together.
    pub fn create_srq(&self, pd: &Pd, init: &SrqInit<'_>) -> Result<Srq, VerbsError> {
        pd.check(&self.0)?;
        let limits = &self.0.limits;
        let attr = init.attr;
        if attr.max_wr == 0 || attr.limit > attr.max_wr {
            let text = format!("a shared receive queue of {} with limit {}", attr.max_wr, attr.limit);
            return Err(VerbsError::Invalid(text));
        }
        check_size(attr.max_wr, limits.max_srq_wr, "work requests")?;
        check_size(attr.max_sge, limits.max_srq_sge, "scatter/gather elements")?;
        if let Some((xrcd, cq)) = init.xrc {
            xrcd.pd().check(&self.0)?;
            cq.check(&self.0)?;
            // The first engine has the targets of extended reliable connections.
            cq.engine_set().insert(0);
        }
        let counted = self.0.srqs.take(limits.max_srq, "shared receive queues")?;
        // Numbers go round long before they could meet one in use: there are 2^24, and 2^16 queues.
        let handle = self.0.next_srq.fetch_add(1, Ordering::Relaxed);
        let queue = SharedReceiveQueue::new(SrqConfig {
            handle,
            number: Srqn::new(handle & 0x00ff_ffff),
            pd: pd.0.handle,
            srq_type: if init.xrc.is_some() {
                SrqType::Xrc
            } else {
                SrqType::Basic
            },
            attr,
            cq: init.xrc.map(|(_, cq)| cq.queue().clone()),
        });
        let srq = Srq(Arc::new(SrqInner {
            queue,
            pd: pd.clone(),
            xrc: init.xrc.map(|(x, cq)| (x.clone(), cq.clone())),
            _counted: counted,
        }));
        match init.xrc {
            Some((xrcd, _)) if !xrcd.domain().attach(srq.queue()) => {
                Err(VerbsError::Limit("numbers of shared receive queues"))
            }
            _ => Ok(srq),
        }
    }

    /// Makes an XRC domain. Only this process has it: domains shared by a file between processes don't exist here.
    ///
    /// # Errors
    /// At the device's limit.
    pub fn open_xrcd(&self) -> Result<Xrcd, VerbsError> {
        Ok(Xrcd {
            domain: XrcDomain::new(),
            pd: self.alloc_pd()?,
            _counted: self.0.xrcds.take(self.0.limits.max_xrcd, "XRC domains")?,
        })
    }
}
