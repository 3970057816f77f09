//! Loops whose addresses are shared with other processes, through a broker (`roce_broker`): each loop is a member.

use std::{
    net::IpAddr,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use roce_broker::{JoinConfig, JoinError, Membership, Report};
use roce_net::OpenSockets;
use roce_port::{QpnSlot, RxMeta};
use roce_verbs::provider::VerbsError;

use crate::{
    device::{DeviceConfig, Services},
    shards::{Endpoints, HandedOver},
    shared::{Listeners, join_error},
};

/// How long the broker's question waits for a loop that is at work, before it is told what the loop said last.
const PATIENCE: Duration = Duration::from_millis(200);

/// What a loop tells about itself when it is asked.
#[derive(Default)]
struct Answers {
    wanted: AtomicBool,
    /// The last one.
    last: Mutex<Option<Report>>,
    told: Condvar,
}

/// Takes what the broker has for a loop.
struct Post {
    endpoints: Arc<Endpoints>,
    answers: Arc<Answers>,
}

impl roce_broker::Inbox for Post {
    fn datagram(&self, meta: &RxMeta, bytes: &[u8]) {
        if let Some(endpoint) = self.endpoints.of(meta.local.to_canonical()) {
            endpoint.inbox().send_or_lose(HandedOver::forwarded(meta, bytes));
        }
    }

    fn report(&self) -> Option<Report> {
        let mut last = self.answers.last.lock();
        self.answers.wanted.store(true, SeqCst);
        if !self.endpoints.wake() {
            return None;
        }
        self.answers.told.wait_for(&mut last, PATIENCE);
        last.clone()
    }
}

/// A loop's membership, for who opens devices for the loop.
pub(crate) struct Joining {
    membership: Arc<Membership>,
}

/// The same, which keeps nothing alive.
pub(crate) struct WeakJoining(Weak<Membership>);

impl WeakJoining {
    /// `None`: the loop has ended.
    pub(crate) fn get(&self) -> Option<Joining> {
        let membership = self.0.upgrade()?;
        Some(Joining { membership })
    }
}

impl Joining {
    /// Becomes a member of the broker's, which is started if none runs.
    ///
    /// # Errors
    /// When there is none and none can be started, or it refuses.
    pub(crate) fn join(how: &JoinConfig) -> Result<Self, VerbsError> {
        let membership = roce_broker::join(how).map_err(join_error)?;
        Ok(Self {
            membership: Arc::new(membership),
        })
    }

    /// For who opens devices later.
    pub(crate) fn later(&self) -> WeakJoining {
        WeakJoining(Arc::downgrade(&self.membership))
    }

    /// The numbers that are the loop's at all of its addresses, and whom it tells what others must know.
    pub(crate) fn place(&self) -> (QpnSlot, Arc<dyn Services>) {
        (self.membership.numbers(), Arc::new(Listeners(self.membership.clone())))
    }

    /// The sockets that the loop gets for an address. It may take as long as the broker takes to answer.
    ///
    /// # Errors
    /// When the address is not ours, or somebody has its port who is no member.
    pub(crate) fn sockets(&self, addr: IpAddr) -> Result<OpenSockets, JoinError> {
        self.membership.open(addr)
    }

    /// A device's configuration, with these sockets.
    pub(crate) fn config(&self, config: &DeviceConfig, sockets: OpenSockets) -> DeviceConfig {
        let (slot, services) = self.place();
        DeviceConfig {
            sockets: Some(sockets),
            qpn_slot: Some(slot),
            services: Some(services),
            ..config.clone()
        }
    }

    /// What comes for it is this one's.
    pub(crate) fn deliver(&self, inbox: Arc<dyn roce_broker::Inbox>) {
        self.membership.set_inbox(inbox);
    }

    /// The loop has its devices: packets for an address go to its endpoint.
    pub(crate) fn joined(self, endpoints: Arc<Endpoints>) -> Joined {
        let answers = Arc::<Answers>::default();
        self.membership.set_inbox(Arc::new(Post {
            endpoints: endpoints.clone(),
            answers: answers.clone(),
        }));
        Joined {
            membership: self.membership,
            endpoints,
            answers,
        }
    }
}

/// The membership of a loop.
pub(crate) struct Joined {
    membership: Arc<Membership>,
    endpoints: Arc<Endpoints>,
    answers: Arc<Answers>,
}

impl Joined {
    /// The loop's addresses.
    pub(crate) fn endpoints(&self) -> &Arc<Endpoints> {
        &self.endpoints
    }

    /// Whether the broker wants a report.
    pub(crate) fn is_asked(&self) -> bool {
        self.answers.wanted.load(SeqCst)
    }

    /// Answers the broker.
    pub(crate) fn tell(&self, report: Report) {
        self.answers.wanted.store(false, SeqCst);
        *self.answers.last.lock() = Some(report);
        self.answers.told.notify_all();
    }

    /// The loop ends, and this is what it has counted.
    pub(crate) fn leave(&self, report: Report) {
        self.tell(report.clone());
        self.membership.report_last(report);
    }
}
