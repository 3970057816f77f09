//! Membership of a loop in the broker (`roce_broker`), which shares addresses among processes.

use std::{
    net::IpAddr,
    sync::{Arc, Weak},
    time::Duration,
};

use roce_net::OpenSockets;
use roce_port::{HandedOver, QpnSlot, ToShard};
use roce_verbs::{Instant, provider::VerbsError};

use crate::{
    broker::{self, Inbox, JoinConfig, JoinError, Membership, Snapshot},
    device::{DeviceConfig, Services},
    shards::Endpoints,
    shared::{Listeners, join_error},
};

/// Interval at which a loop publishes its counters.
const PUBLISH: Duration = Duration::from_millis(100);

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
    pub(crate) fn set_inbox(&self, inbox: Box<Inbox>) {
        self.membership.set_inbox(inbox);
    }

    /// Completes joining: from now on the endpoint of an address receives its packets from the broker.
    pub(crate) fn joined(self, endpoints: Arc<Endpoints>) -> Joined {
        let theirs = endpoints.clone();
        self.membership.set_inbox(Box::new(move |meta, bytes| {
            if let Some(endpoint) = theirs.of(meta.local.to_canonical()) {
                let packet = ToShard::Packet(HandedOver::forwarded(meta, bytes));
                endpoint.inbox().send_or_lose(packet);
            }
        }));
        Joined {
            membership: self.membership,
            endpoints,
            publish_at: Instant::ZERO,
            unpublished: false,
        }
    }
}

/// Membership of a loop with its endpoints.
pub(crate) struct Joined {
    membership: Arc<Membership>,
    endpoints: Arc<Endpoints>,
    /// Time to publish the counters next, and whether they may have changed since the last time.
    publish_at: Instant,
    unpublished: bool,
}

impl Joined {
    /// Returns the endpoints of the loop's addresses.
    pub(crate) fn endpoints(&self) -> &Arc<Endpoints> {
        &self.endpoints
    }

    /// Notes that the loop has done something. Returns whether it is time to publish the counters.
    pub(crate) fn is_publish_due(&mut self, now: Instant) -> bool {
        self.unpublished = true;
        now >= self.publish_at
    }

    /// Publishes the loop's status.
    pub(crate) fn publish(&mut self, now: Instant, status: &Snapshot) {
        self.publish_at = now + PUBLISH;
        self.unpublished = self.membership.publish(status);
    }

    /// Returns when to publish the counters, if they may have changed.
    pub(crate) fn publish_at(&self) -> Option<Instant> {
        self.unpublished.then_some(self.publish_at)
    }
}
