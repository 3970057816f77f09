//! Loops whose addresses are shared with other processes, through a broker (`roce_broker`): each loop is a member.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use roce_broker::{JoinConfig, Membership, Report};
use roce_port::{QpnSlot, RxMeta};
use roce_verbs::provider::VerbsError;

use crate::{
    device::{DeviceConfig, Services},
    open::serves,
    shards::Door,
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
    doors: Arc<[Door]>,
    answers: Arc<Answers>,
}

impl roce_broker::Inbox for Post {
    fn datagram(&self, meta: &RxMeta, bytes: &[u8]) {
        let local = meta.local.to_canonical();
        let exact = self.doors.iter().find(|door| door.addr == local);
        let has = |door: &&Door| door.addr.is_unspecified() && serves(door.addr, local);
        let any = || self.doors.iter().find(has);
        if let Some(door) = exact.or_else(any) {
            door.inbox().forwarded(meta, bytes);
        }
    }

    fn report(&self) -> Option<Report> {
        let mut last = self.answers.last.lock();
        self.answers.wanted.store(true, SeqCst);
        let door = self.doors.first()?;
        door.inbox().ring();
        self.answers.told.wait_for(&mut last, PATIENCE);
        last.clone()
    }
}

/// A loop's membership, before the loop has its devices.
pub(crate) struct Joining {
    membership: Arc<Membership>,
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

    /// The numbers that are the loop's at all of its addresses, and whom it tells what others must know.
    pub(crate) fn place(&self) -> (QpnSlot, Arc<dyn Services>) {
        (self.membership.numbers(), Arc::new(Listeners(self.membership.clone())))
    }

    /// A device's configuration, with the sockets that the loop gets for it.
    ///
    /// # Errors
    /// When the address is not ours, or somebody has its port who is no member.
    pub(crate) fn config(&self, config: &DeviceConfig) -> Result<DeviceConfig, VerbsError> {
        let (slot, services) = self.place();
        Ok(DeviceConfig {
            sockets: Some(self.membership.open(config.addr).map_err(join_error)?),
            qpn_slot: Some(slot),
            services: Some(services),
            ..config.clone()
        })
    }

    /// The loop has its devices: what comes for an address goes through this door.
    pub(crate) fn joined(self, doors: Arc<[Door]>) -> Joined {
        let answers = Arc::<Answers>::default();
        self.membership.set_inbox(Arc::new(Post {
            doors,
            answers: answers.clone(),
        }));
        Joined {
            membership: self.membership,
            answers,
        }
    }
}

/// The membership of a loop.
pub(crate) struct Joined {
    membership: Arc<Membership>,
    answers: Arc<Answers>,
}

impl Joined {
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
