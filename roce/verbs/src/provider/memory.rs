//! Memory that its owner lends to devices.

use core::fmt;

use parking_lot::Mutex;

/// Memory that its owner lends to devices. Peers may change it at any time, so nobody makes a reference to its bytes.
///
/// # Safety
/// `as_ptr` is the same all the time. Unless the memory is [`foreign`](Self::foreign), as long as the value lives, the `len` bytes there
/// are its memory, for reads and writes from any thread. Pages of it may be missing or protected: an access to one fails.
#[allow(unsafe_code, reason = "a promise that implementors make; nothing here uses it")]
pub unsafe trait Memory: Send + Sync + fmt::Debug + 'static {
    /// First byte.
    fn as_ptr(&self) -> *mut u8;
    /// Bytes.
    fn len(&self) -> usize;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Memory that calls access, instead of the memory of this process: `as_ptr` is an address for these calls then. Only the software
    /// device can use it.
    fn foreign(&self) -> Option<&Foreign> {
        None
    }
}

/// Calls that access memory of another process.
pub trait ForeignMemory: Send + Sync + fmt::Debug + 'static {
    /// Copies the bytes from address `at` on. `false`: some are missing or protected, or the process is gone.
    fn read(&self, at: u64, out: &mut [u8]) -> bool;
    /// Copies bytes to address `at`, as [`read`](Self::read).
    fn write(&self, at: u64, data: &[u8]) -> bool;
}

/// Memory of another process, to register: all its addresses from 0 on, or the first of them.
#[derive(Debug)]
pub struct Foreign {
    calls: Box<dyn ForeignMemory>,
    len: usize,
    /// Atomics of devices exclude each other. Those of the process itself are not excluded, as with devices of hardware.
    atomics: Mutex<()>,
}

impl Foreign {
    /// Returns the memory of addresses below `len`.
    pub fn new(calls: impl ForeignMemory, len: usize) -> Self {
        Self {
            calls: Box::new(calls),
            len,
            atomics: Mutex::new(()),
        }
    }

    /// Copies the bytes from address `at` on; returns whether it could.
    pub(crate) fn read(&self, at: usize, out: &mut [u8]) -> bool {
        self.calls.read(at as u64, out)
    }

    /// Copies bytes to address `at`; returns whether it could.
    pub(crate) fn write(&self, at: usize, data: &[u8]) -> bool {
        self.calls.write(at as u64, data)
    }

    /// Replaces a word by what `f` makes of it, if anything. Returns what it was; `None`: it could not be accessed.
    pub fn update(&self, at: usize, f: impl FnOnce(u64) -> Option<u64>) -> Option<u64> {
        let _alone = self.atomics.lock();
        let mut bytes = [0; 8];
        self.read(at, &mut bytes).then_some(())?;
        let former = u64::from_ne_bytes(bytes);
        match f(former) {
            Some(new) => self.write(at, &new.to_ne_bytes()).then_some(former),
            None => Some(former),
        }
    }
}

// SAFETY: nothing of this process, as `foreign` says; the address is always the same.
#[allow(unsafe_code, reason = "it promises nothing of this process's memory")]
unsafe impl Memory for Foreign {
    fn as_ptr(&self) -> *mut u8 {
        core::ptr::null_mut()
    }

    fn len(&self) -> usize {
        self.len
    }

    fn foreign(&self) -> Option<&Foreign> {
        Some(self)
    }
}
