//! Membership of a loop in the broker (`roce_broker`), which shares addresses among processes.

use std::{
    net::IpAddr,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use roce_net::OpenSockets;
use roce_port::{HandedOver, QpnSlot, RxMeta, ToShard};
use roce_verbs::provider::VerbsError;

use crate::{
    broker::{self, Inbox, JoinConfig, JoinError, Membership, Report},
    device::{DeviceConfig, Services},
    shards::Endpoints,
    shared::{Listeners, join_error},
};

/// Time that a busy loop has to report. After that its previous report is sent.
const REPORT_TIMEOUT: Duration = Duration::from_millis(200);

/// Status reports of a loop to the broker.
#[derive(Default)]
struct Reports {
    requested: AtomicBool,
    last: Mutex<Option<Report>>,
    /// Signaled when `last` changes.
    updated: Condvar,
}

/// Receives the broker's messages for a loop.
struct LoopInbox {
    endpoints: Arc<Endpoints>,
    reports: Arc<Reports>,
}

impl Inbox for LoopInbox {
    fn datagram(&self, meta: &RxMeta, bytes: &[u8]) {
        if let Some(endpoint) = self.endpoints.of(meta.local.to_canonical()) {
            endpoint
                .inbox()
                .send_or_lose(ToShard::Packet(HandedOver::forwarded(meta, bytes)));
        }
    }

    fn report(&self) -> Option<Report> {
        let mut last = self.reports.last.lock();
        self.reports.requested.store(true, SeqCst);
        if !self.endpoints.wake() {
            return None;
        }
        self.reports.updated.wait_for(&mut last, REPORT_TIMEOUT);
        last.clone()
    }
}

/// Membership of a loop whose devices are not open yet.
pub(crate) struct Joining {
    membership: Arc<Membership>,
}

/// Weak reference to a loop's membership.
pub(crate) struct WeakJoining(Weak<Membership>);

impl WeakJoining {
    /// Returns the membership. `None` if the loop was dropped.
    pub(crate) fn upgrade(&self) -> Option<Joining> {
        let membership = self.0.upgrade()?;
        Some(Joining { membership })
    }
}

impl Joining {
    /// Joins the broker, which is started if none runs.
    ///
    /// # Errors
    /// If the broker refuses, or none runs and none can be started.
    pub(crate) fn join(config: &JoinConfig) -> Result<Self, VerbsError> {
        let membership = broker::join(config).map_err(join_error)?;
        Ok(Self {
            membership: Arc::new(membership),
        })
    }

    /// Returns a weak reference, to open devices later.
    pub(crate) fn downgrade(&self) -> WeakJoining {
        WeakJoining(Arc::downgrade(&self.membership))
    }

    /// Returns the loop's range of queue pair numbers, which holds at all its addresses, and the registry of services.
    pub(crate) fn place(&self) -> (QpnSlot, Arc<dyn Services>) {
        (self.membership.numbers(), Arc::new(Listeners(self.membership.clone())))
    }

    /// Requests the loop's sockets for an address from the broker. Blocks until it answers.
    ///
    /// # Errors
    /// If the address is not local, or a process that is no member uses its port.
    pub(crate) fn sockets(&self, addr: IpAddr) -> Result<OpenSockets, JoinError> {
        self.membership.open(addr)
    }

    /// Returns a device's configuration with these sockets and this membership.
    pub(crate) fn config(&self, config: &DeviceConfig, sockets: OpenSockets) -> DeviceConfig {
        let (slot, services) = self.place();
        DeviceConfig {
            sockets: Some(sockets),
            qpn_slot: Some(slot),
            qpn_parts: self.membership.parts(),
            services: Some(services),
            ..config.clone()
        }
    }

    /// Sets the receiver of the broker's messages.
    pub(crate) fn set_inbox(&self, inbox: Arc<dyn Inbox>) {
        self.membership.set_inbox(inbox);
    }

    /// Completes joining: from now on the endpoint of an address receives its packets from the broker.
    pub(crate) fn joined(self, endpoints: Arc<Endpoints>) -> Joined {
        let reports = Arc::<Reports>::default();
        self.membership.set_inbox(Arc::new(LoopInbox {
            endpoints: endpoints.clone(),
            reports: reports.clone(),
        }));
        Joined {
            membership: self.membership,
            endpoints,
            reports,
        }
    }
}

/// Membership of a loop with its endpoints.
pub(crate) struct Joined {
    membership: Arc<Membership>,
    endpoints: Arc<Endpoints>,
    reports: Arc<Reports>,
}

impl Joined {
    /// Returns the endpoints of the loop's addresses.
    pub(crate) fn endpoints(&self) -> &Arc<Endpoints> {
        &self.endpoints
    }

    /// Returns whether the broker has requested a report.
    pub(crate) fn is_report_requested(&self) -> bool {
        self.reports.requested.load(SeqCst)
    }

    /// Stores the report that the broker requested.
    pub(crate) fn report(&self, report: Report) {
        self.reports.requested.store(false, SeqCst);
        *self.reports.last.lock() = Some(report);
        self.reports.updated.notify_all();
    }

    /// Leaves the broker with a last report.
    pub(crate) fn leave(&self, report: Report) {
        self.report(report.clone());
        self.membership.report_last(report);
    }
}
