//! Addresses that several loops or engines have: of this process alone, or as members of the broker (`roce_broker`), which shares them
//! among processes.

use std::{
    net::IpAddr,
    sync::{Arc, Weak},
    time::Duration,
};

use roce_net::OpenSockets;
use roce_port::{HandedOver, PortChange, RxMeta, Steering, ToShard};
use roce_verbs::{Instant, provider::VerbsError};

use crate::{
    broker::{self, Error, JoinConfig, Membership, Snapshot},
    config::{DeviceConfig, Services},
    open::{self, Bound},
    shards::Endpoints,
};

/// Interval at which a loop publishes its counters.
const PUBLISH: Duration = Duration::from_millis(100);

pub(crate) fn join_error(e: Error) -> VerbsError {
    match e {
        Error::Io { context, source } => VerbsError::Io { context, source },
        other => VerbsError::Address(other.to_string()),
    }
}

/// Joins the broker for each of so many loops or engines. It is started if none runs.
///
/// # Errors
/// If the broker refuses, or none runs and none can be started.
pub(crate) fn join(config: &JoinConfig, members: usize) -> Result<Vec<Arc<Membership>>, VerbsError> {
    let joined = (0..members).map(|_| broker::join(config).map(Arc::new));
    joined.collect::<Result<_, _>>().map_err(join_error)
}

/// Loops or engines that have an address, and others who may have it too.
pub(crate) enum Sharing {
    /// This process's alone; `None`: a single one.
    Process(Option<Steering>),
    /// Each is a member of the broker.
    Broker(Vec<Weak<Membership>>),
}

impl Sharing {
    pub(crate) fn of(members: &[Arc<Membership>]) -> Self {
        Self::Broker(members.iter().map(Arc::downgrade).collect())
    }

    /// Asks the broker for the sockets of the members that have `given` none yet: it gives them once.
    pub(crate) fn ask(&self, addr: IpAddr, given: &mut Vec<OpenSockets>) -> Result<(), Error> {
        let Self::Broker(members) = self else { return Ok(()) };
        // Without those that have left, the address can't be bound.
        for member in members.iter().skip(given.len()).map_while(Weak::upgrade) {
            given.push(member.open(addr)?);
        }
        Ok(())
    }

    /// Opens an address for all, on the sockets that the broker has `given`.
    pub(crate) fn bind(&self, config: &DeviceConfig, given: &[OpenSockets]) -> Result<Bound, VerbsError> {
        let members = match self {
            Self::Process(steering) => return open::open(config, *steering),
            Self::Broker(members) => members,
        };
        let mut bound = Bound::new();
        for (index, member) in members.iter().enumerate() {
            let (Some(member), Some(sockets)) = (member.upgrade(), given.get(index)) else {
                return Err(VerbsError::Closed);
            };
            let config = DeviceConfig {
                sockets: Some(sockets.clone()),
                // The range of queue pair numbers holds at all addresses.
                qpn_slot: Some(member.numbers()),
                qpn_parts: member.parts(),
                services: Some(member),
                ..config.clone()
            };
            bound.extend(open::open(&config, None)?);
        }
        Ok(bound)
    }

    /// Opens an address of which nobody has asked for sockets before.
    pub(crate) fn open(&self, config: &DeviceConfig) -> Result<Bound, VerbsError> {
        let mut given = Vec::new();
        self.ask(config.addr, &mut given).map_err(join_error)?;
        self.bind(config, &given)
    }
}

/// The membership's own methods come before the trait's, some of which have the same names.
impl Services for Membership {
    fn claim(&self, service_id: u64, addr: Option<IpAddr>) -> Result<(), VerbsError> {
        self.listen(service_id, addr).map_err(join_error)
    }

    fn release(&self, service_id: u64, addr: Option<IpAddr>) {
        if let Err(e) = self.unlisten(service_id, addr) {
            tracing::debug!("the broker is not told that a listener is gone: {e}");
        }
    }

    fn reserve(&self, service_id: u64, addr: Option<IpAddr>, reuse: bool) -> Result<u64, VerbsError> {
        self.bind(service_id, addr, reuse).map_err(join_error)
    }

    fn unreserve(&self, service_id: u64, addr: Option<IpAddr>) {
        if let Err(e) = self.unbind(service_id, addr) {
            tracing::debug!("the broker is not told that a port is free: {e}");
        }
    }

    fn publish(&self, status: &Snapshot) {
        self.publish(status);
    }

    fn port_change(&self, change: PortChange) {
        self.port_change(&change);
    }

    fn hand_over(&self, meta: &RxMeta, bytes: &[u8]) {
        // Lost if the broker has no room: the sender sends it again.
        self.hand_over(meta, bytes);
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
    /// Completes joining: from now on the endpoint of an address receives its packets from the broker.
    pub(crate) fn new(membership: Arc<Membership>, endpoints: Arc<Endpoints>) -> Self {
        let theirs = endpoints.clone();
        membership.set_inbox(Box::new(move |meta, bytes| {
            if let Some(endpoint) = theirs.of(meta.local.to_canonical()) {
                let packet = ToShard::Packet(HandedOver::new(meta, bytes, false));
                endpoint.inbox.send_or_lose(packet);
            }
        }));
        Self {
            membership,
            endpoints,
            publish_at: Instant::ZERO,
            unpublished: false,
        }
    }

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
