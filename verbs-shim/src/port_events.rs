//! Events of ports: the interfaces behind the devices, watched as long as a device is open. A program that only waits for
//! events has no transport, and events of one interface are for the contexts of its device alone.

use std::{
    os::fd::AsFd,
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak, atomic::Ordering},
};

use roce::links::{LinkChange, LinkWatch};

use crate::{
    abi::{c_enum, event},
    device::{self, VerbsDevice},
    errno::Result,
    events::{AsyncEvents, Entry},
    fork::Own,
    singleton::Singleton,
    worker::{Next, Worker},
};

/// Watch of a process.
pub(crate) struct PortWatch {
    /// Open devices, and where to report their events.
    contexts: Mutex<Vec<(&'static VerbsDevice, Weak<AsyncEvents>)>>,
    /// Not the thread's own, so that a forked child, which has no such thread, does not lose it.
    watch: Mutex<LinkWatch>,
    /// Set once, right after it is made.
    worker: OnceLock<Worker>,
}

static LINKS: Own<Singleton<PortWatch>> = Own::new(Singleton::new);

/// Returns the watch of this process, if the system has one.
pub(crate) fn get() -> Option<Arc<PortWatch>> {
    let got = LINKS.get().get(PortWatch::open);
    got.map_err(|e| tracing::info!("changes of interfaces are not seen: {e:?}"))
        .ok()
}

impl PortWatch {
    /// Starts to watch.
    ///
    /// # Errors
    /// When the system has no netlink, descriptor or thread left.
    fn open() -> Result<Arc<Self>> {
        let watch = LinkWatch::new()?;
        let watched = watch.as_fd().try_clone_to_owned()?;
        for device in device::known().iter() {
            // Addresses that it has at the start are no change.
            device.gids.renew();
        }
        let watch = Arc::new(Self {
            contexts: Mutex::default(),
            watch: Mutex::new(watch),
            worker: OnceLock::new(),
        });
        let worker = Worker::on("ferroce links", watched, &watch, |watch: &Self| {
            watch.look();
            Next::Ready
        })?;
        let _ = watch.worker.set(worker);
        Ok(watch)
    }

    /// Reports changes.
    fn look(&self) {
        let changes = self.watch.lock().unwrap_or_else(PoisonError::into_inner).take();
        match changes {
            Ok(changes) => changes.iter().for_each(|(name, change)| self.report(name, *change)),
            Err(e) => tracing::warn!("looking at the interfaces failed: {e}"),
        }
    }

    /// Adds a context. Closed ones are removed, so that a program that opens devices again and again leaves nothing.
    pub(crate) fn add(&self, device: &'static VerbsDevice, events: &Arc<AsyncEvents>) {
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        contexts.retain(|(_, events)| events.strong_count() > 0);
        contexts.push((device, Arc::downgrade(events)));
    }

    fn report(&self, interface: &str, change: LinkChange) {
        tracing::debug!("interface {interface}: {change:?}");
        let Some(device) = device::known().iter().find(|d| d.interface == interface).copied() else {
            return;
        };
        let kind: c_enum = match change {
            LinkChange::Active => event::PORT_ACTIVE,
            LinkChange::Down => {
                device.link_downed.fetch_add(1, Ordering::Relaxed);
                event::PORT_ERR
            }
            // The table is renewed before the event, so that a program that asks because of it sees the change.
            LinkChange::Addresses if device.gids.renew() => event::GID_CHANGE,
            LinkChange::Addresses | LinkChange::Mtu => return,
        };
        let contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, events) in contexts.iter().filter(|(of, _)| std::ptr::eq(*of, device)) {
            if let Some(events) = events.upgrade() {
                events.push(Entry::of_port(kind));
            }
        }
    }
}
