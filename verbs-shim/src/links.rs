//! Events of ports: the interfaces behind the devices, watched as long as a device is open. A program that only waits for
//! events has no transport, and events of one interface are for the contexts of its device alone.

use std::{
    os::fd::AsFd,
    sync::{Arc, Mutex, PoisonError, Weak, atomic::Ordering},
};

use roce::links::{LinkChange, LinkWatch};

use crate::{
    abi::{c_enum, event},
    context::Core,
    engine,
    events::Entry,
    ret::Result,
    worker::{Next, Worker},
};

/// The watch of a process.
pub(crate) struct Links {
    contexts: Mutex<Vec<Weak<Core>>>,
    /// Not the thread's own, so that a forked child, which has no such thread, does not lose it.
    watch: Mutex<LinkWatch>,
    /// Set once, right after it is made.
    worker: Mutex<Option<Worker>>,
}

impl Links {
    /// Starts to watch.
    ///
    /// # Errors
    /// When the system has no netlink, descriptor or thread left.
    pub(crate) fn open() -> Result<Arc<Self>> {
        let watch = LinkWatch::new()?;
        let watched = watch.as_fd().try_clone_to_owned()?;
        for device in engine::devices().iter() {
            // What it has now is nothing new.
            device.gids.renew();
        }
        let links = Arc::new(Self {
            contexts: Mutex::default(),
            watch: Mutex::new(watch),
            worker: Mutex::default(),
        });
        let weak = Arc::downgrade(&links);
        let worker = Worker::start("ferroce links", watched, move || {
            match weak.upgrade().inspect(|links| links.look()) {
                Some(_) => Next::Ready,
                None => Next::End,
            }
        })?;
        *links.worker.lock().unwrap_or_else(PoisonError::into_inner) = Some(worker);
        Ok(links)
    }

    /// Tells what has changed.
    fn look(&self) {
        let changes = self.watch.lock().unwrap_or_else(PoisonError::into_inner).take();
        match changes {
            Ok(changes) => changes.iter().for_each(|(name, change)| self.tell(name, *change)),
            Err(e) => tracing::warn!("looking at the interfaces failed: {e}"),
        }
    }

    /// Tells a context from now on. Those that are closed go, so that a program that opens devices again and again leaves
    /// nothing.
    pub(crate) fn add(&self, context: &Arc<Core>) {
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        contexts.retain(|c| c.strong_count() > 0);
        contexts.push(Arc::downgrade(context));
    }

    fn contexts(&self) -> Vec<Arc<Core>> {
        let contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        contexts.iter().filter_map(Weak::upgrade).collect()
    }

    fn tell(&self, interface: &str, change: LinkChange) {
        tracing::debug!("interface {interface}: {change:?}");
        let Some(device) = engine::devices().iter().find(|d| d.interface == interface).copied() else {
            return;
        };
        let kind: c_enum = match change {
            LinkChange::Active => event::PORT_ACTIVE,
            LinkChange::Down => {
                device.link_downed.fetch_add(1, Ordering::Relaxed);
                event::PORT_ERR
            }
            // The table is renewed first, so that who asks because of the event sees what it is about.
            LinkChange::Addresses if device.gids.renew() => event::GID_CHANGE,
            LinkChange::Addresses | LinkChange::Mtu => return,
        };
        for context in self.contexts() {
            if std::ptr::eq(context.device, device) {
                context.events.push(Entry::of_port(kind));
            }
        }
    }
}
