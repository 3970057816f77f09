//! Objects that several loops use.

use core::{any::Any, fmt};
use std::sync::Arc;

/// An object of one loop's provider on its way to that of another loop, of the same device: a protection domain, a registration
/// or a key ([`Provider::lend_pd`](super::Provider::lend_pd) and its like). What it is only providers of the kind that made it
/// know.
///
/// The object stays its maker's: the numbers that others have for it go first, then the maker's, and the object with that.
#[derive(Clone)]
pub struct Lent(Arc<dyn Any + Send + Sync>);

impl Lent {
    /// Wraps a provider's object.
    pub fn new<T: Any + Send + Sync>(object: T) -> Self {
        Self(Arc::new(object))
    }

    /// The object, if it is of this type.
    pub fn get<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lent")
    }
}
