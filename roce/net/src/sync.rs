//! Locks and atomics of [`progress`](crate::progress), which its tests replace by shuttle's.

pub(crate) use std::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence},
    thread::yield_now,
};

pub(crate) use parking_lot::{Mutex, MutexGuard};
