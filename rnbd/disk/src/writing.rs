//! Rules for writes of an image that are under way together, at the disks of all loops that have it: one that writes parts of blocks on
//! the way past the page cache reads the blocks and writes them back, and so has to be alone.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
};

use parking_lot::Mutex;

use crate::sys;

/// Wakes a disk that waits.
#[derive(Debug)]
pub(crate) struct Bell {
    eventfd: OwnedFd,
    /// It and the eventfd change together: else that could stay readable with nothing to do.
    rung: AtomicBool,
    change: Mutex<()>,
}

impl Bell {
    /// # Errors
    /// When the system gives no descriptor.
    pub(crate) fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            eventfd: sys::eventfd()?,
            rung: AtomicBool::new(false),
            change: Mutex::default(),
        }))
    }

    fn ring(&self) {
        let _change = self.change.lock();
        if !self.rung.swap(true, SeqCst) {
            sys::raise(&self.eventfd);
        }
    }

    /// Silences it. False: it was not rung.
    pub(crate) fn silence(&self) -> bool {
        // Most often it was not, and there is no lock to take.
        if !self.rung.load(SeqCst) {
            return false;
        }
        let _change = self.change.lock();
        self.rung.store(false, SeqCst);
        sys::lower(&self.eventfd);
        true
    }
}

impl AsRawFd for Bell {
    fn as_raw_fd(&self) -> RawFd {
        self.eventfd.as_raw_fd()
    }
}

/// See the module. Who may not begin waits for its bell, and asks again.
#[derive(Debug, Default)]
pub(crate) struct Writing {
    /// How many are under way, with [`Self::ALONE`] and [`Self::WANTED`].
    state: AtomicU32,
    /// Bells of the disks that wait. Each is here once.
    bells: Mutex<Vec<Arc<Bell>>>,
}

impl Writing {
    /// The one that is under way is to stay the only one.
    const ALONE: u32 = 1 << 31;
    /// One waits to be the only one, so that no others may begin.
    const WANTED: u32 = 1 << 30;

    /// Lets a write begin, if it may; else `bell` is rung when there is a reason to ask again.
    pub(crate) fn enter(&self, alone: bool, bell: Option<&Arc<Bell>>) -> bool {
        if self.try_enter(alone) {
            return true;
        }
        let Some(bell) = bell else { return false };
        let mut bells = self.bells.lock();
        if !bells.iter().any(|b| Arc::ptr_eq(b, bell)) {
            bells.push(bell.clone());
        }
        drop(bells);
        // What it waited for may have ended before the bell was there to be rung.
        self.try_enter(alone)
    }

    fn try_enter(&self, alone: bool) -> bool {
        let enter = |n: u32| match alone {
            // Another that waits to be alone asks again when this one is over.
            true if n & !Self::WANTED == 0 => Some(Self::ALONE | 1),
            false if n & (Self::ALONE | Self::WANTED) == 0 => Some(n + 1),
            _ => None,
        };
        let entered = self.state.fetch_update(SeqCst, SeqCst, enter).is_ok();
        if alone && !entered {
            self.state.fetch_or(Self::WANTED, SeqCst);
        }
        entered
    }

    /// One that has begun is over.
    pub(crate) fn leave(&self) {
        let leave = |n: u32| Some((n & !Self::ALONE).saturating_sub(1));
        if let Ok(before) = self.state.fetch_update(SeqCst, SeqCst, leave)
            && (before & !Self::WANTED == 1 || before & Self::ALONE != 0)
        {
            self.ring();
        }
    }

    /// A disk that waited ends: the wish of others to be alone is theirs to say again.
    pub(crate) fn give_up(&self) {
        self.state.fetch_and(!Self::WANTED, SeqCst);
        self.ring();
    }

    fn ring(&self) {
        let bells = std::mem::take(&mut *self.bells.lock());
        bells.iter().for_each(|bell| bell.ring());
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::atomic::AtomicU64, thread};

    use super::*;

    fn bell() -> Arc<Bell> {
        Bell::new().unwrap()
    }

    fn is_raised(bell: &Bell) -> bool {
        waits(bell, 0)
    }

    /// Whether it is raised within so many milliseconds.
    fn waits(bell: &Bell, milliseconds: i32) -> bool {
        let mut fd = libc::pollfd {
            fd: bell.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one valid pollfd.
        unsafe { libc::poll(&raw mut fd, 1, milliseconds) == 1 }
    }

    #[test]
    fn one_alone_waits_for_all_and_keeps_new_ones_out() {
        let (w, a, b) = (Writing::default(), bell(), bell());
        assert!(w.enter(false, Some(&a)) && w.enter(false, Some(&a)));
        assert!(!w.enter(true, Some(&b)), "two are under way");
        assert!(!w.enter(false, Some(&a)), "one waits to be alone");
        w.leave();
        assert!(!is_raised(&a) && !is_raised(&b), "one is still under way");
        w.leave();
        assert!(is_raised(&a) && is_raised(&b));
        assert!(a.silence() && b.silence() && !a.silence());
        assert!(!w.enter(false, Some(&a)), "the one that waits is first");
        assert!(w.enter(true, Some(&b)) && !w.enter(true, Some(&a)));
        w.leave();
        assert!(is_raised(&a));
        assert!(w.enter(true, Some(&a)));
    }

    #[test]
    fn who_ends_while_it_waits_keeps_nobody_out() {
        let (w, a, b) = (Writing::default(), bell(), bell());
        assert!(w.enter(false, Some(&a)) && !w.enter(true, Some(&b)) && !w.enter(false, Some(&a)));
        w.give_up();
        assert!(is_raised(&a) && w.enter(false, Some(&a)));
    }

    /// A thread that only waits for its bell gets in.
    #[test]
    fn the_bell_rings_for_everybody_who_waits() {
        const ROUNDS: u64 = 20_000;
        let (writing, inside, alone_inside) = (Writing::default(), AtomicU64::new(0), AtomicBool::new(false));
        thread::scope(|scope| {
            for n in 0..3u64 {
                let (writing, inside, alone_inside) = (&writing, &inside, &alone_inside);
                scope.spawn(move || {
                    let bell = bell();
                    for round in 0..ROUNDS {
                        let alone = (round + n).is_multiple_of(3);
                        while !writing.enter(alone, Some(&bell)) {
                            assert!(waits(&bell, 60_000), "the bell stays silent");
                            bell.silence();
                        }
                        let others = inside.fetch_add(1, SeqCst);
                        assert!(!alone_inside.load(SeqCst), "beside one that is alone");
                        assert!(!alone || others == 0, "alone beside {others}");
                        alone_inside.store(alone, SeqCst);
                        thread::yield_now();
                        if alone {
                            alone_inside.store(false, SeqCst);
                        }
                        inside.fetch_sub(1, SeqCst);
                        writing.leave();
                    }
                });
            }
        });
    }
}
