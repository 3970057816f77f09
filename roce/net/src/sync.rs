//! Locks and atomics of the [handover](crate::handover), whose tests have a scheduler's in their place.

pub(crate) use std::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    thread::yield_now,
};

pub(crate) use parking_lot::{Mutex, MutexGuard};

/// Runs a test of something with atomics.
#[cfg(test)]
pub(crate) fn model(run: impl Fn() + Send + Sync + 'static) {
    run();
}
