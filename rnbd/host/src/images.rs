//! Images that the loops of a server have open, for each other.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use rnbd::server::disk::StoreId;
use rnbd_disk::OpenExport;

/// The exports that sessions have open, by the loop that has opened them and its name for them. Asked when one is opened or closed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Images(Arc<Mutex<BTreeMap<(usize, StoreId), OpenExport>>>);

impl Images {
    /// A loop has opened one, of which this is a part.
    pub(crate) fn offer(&self, home: usize, store: StoreId, part: OpenExport) {
        self.0.lock().insert((home, store), part);
    }

    /// A part of it for another loop, while it is open.
    pub(crate) fn part(&self, home: usize, store: StoreId) -> Option<OpenExport> {
        self.0.lock().get(&(home, store)).map(OpenExport::part)
    }

    /// The loop is about to close it.
    pub(crate) fn withdraw(&self, home: usize, store: StoreId) {
        // Dropped without the lock, though the loop has the rest of it still.
        let part = self.0.lock().remove(&(home, store));
        drop(part);
    }
}
