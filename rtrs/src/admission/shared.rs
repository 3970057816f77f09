//! Admission of the servers of several loops.

use std::sync::Arc;

use parking_lot::Mutex;

use super::Admission;

/// Admission shared by the servers of several loops.
#[derive(Clone, Debug)]
pub struct SharedAdmission(
    /// Leaf lock: acquire no other lock while holding it.
    Arc<Mutex<Admission>>,
);

impl SharedAdmission {
    /// Shares an admission.
    pub fn new(admission: Admission) -> Self {
        Self(Arc::new(Mutex::new(admission)))
    }

    /// Calls the admission, alone.
    pub fn with<R>(&self, call: impl FnOnce(&mut Admission) -> R) -> R {
        call(&mut self.0.lock())
    }
}
