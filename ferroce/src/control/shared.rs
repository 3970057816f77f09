//! State shared by all views of a process.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use rnbd_admin::{Names, Registry};

use super::{events::Events, registry::ServiceRegistry};

/// State shared by the control sockets, the mounted tree and the metrics of a process.
pub(crate) struct Shared {
    pub(crate) services: Arc<ServiceRegistry>,
    pub(crate) registry: Registry,
    pub(crate) events: Events,
    /// Mount point of the attributes.
    sysfs: OnceLock<PathBuf>,
    /// The process ends: requests in progress are answered, further ones refused.
    ending: AtomicBool,
}

impl Shared {
    pub(super) fn new(services: Arc<ServiceRegistry>) -> Self {
        Self {
            registry: Registry::new(services.clone(), Names::All),
            services,
            events: Events::default(),
            sysfs: OnceLock::new(),
            ending: AtomicBool::new(false),
        }
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    pub(super) fn end(&self) {
        self.ending.store(true, Ordering::Release);
    }

    /// Returns the mount point of the attributes, if they are mounted.
    pub(crate) fn sysfs(&self) -> Option<&Path> {
        self.sysfs.get().map(PathBuf::as_path)
    }

    pub(super) fn mounted_at(&self, dir: &Path) {
        let _ = self.sysfs.set(dir.to_owned());
    }
}
