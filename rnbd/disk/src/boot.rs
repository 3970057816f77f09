//! Boot of the system, by which a server's clients see that its page cache is gone.

use std::fs;

/// Drawn by the kernel each time that it starts.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A boot of a system: what is in its page cache, and in caches of its disks, is there until the next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Boot(Option<Vec<u8>>);

impl Boot {
    /// The boot of the system that runs this process. Without `/proc` it is not known, and clients take unflushed writes for lost
    /// whenever they open a device again; the log says so.
    pub fn of_system() -> Self {
        let id = fs::read_to_string(BOOT_ID);
        if let Err(e) = &id {
            tracing::warn!("{BOOT_ID}: {e}: clients that reconnect take unflushed writes for lost");
        }
        Self::named(id.unwrap_or_default().trim())
    }

    /// The boot of this ID, of whatever machine; an empty one is not known.
    pub fn named(id: &str) -> Self {
        Self(Some(id.into()).filter(|id: &Vec<u8>| !id.is_empty()))
    }

    /// Its ID, if that is known.
    pub(crate) fn id(&self) -> Option<&[u8]> {
        self.0.as_deref()
    }
}
