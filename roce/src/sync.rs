//! Lock and handles of the [`router`](crate::router), which its model under shuttle replaces.

use std::{
    any::Any,
    sync::{Arc, Weak},
};

pub(crate) use parking_lot::Mutex;

/// Handle of a listener, connection or resolution.
pub(crate) type Handle = Arc<dyn Any + Send + Sync>;

/// Reference that does not keep a handle.
pub(crate) type WeakHandle = Weak<dyn Any + Send + Sync>;
