//! Where the objects live that programs hold pointers to, and which of them are alive.
//!
//! A program may pass any pointer: to an object that it has destroyed, of another kind, or to nothing at all. So that each of
//! them can be told from an object, the memory of a kind is used for this kind alone and never given back, as kernels do with
//! their type-safe slabs; whether a place in it is taken stands beside the object. Most pointers are looked up, which reads
//! nothing at the pointer itself before it is known to be a place of the kind. Those of calls that libibverbs defines inline
//! have been followed by the program, through its table of verbs, before we see them: [`Object::hot`] takes them for a place.
//!
//! An object's `context` and `handle` are what the kernel would find it by. A program that has changed them means another
//! object, or none: that is EINVAL, too.

use std::{
    alloc::{Layout, alloc_zeroed},
    cell::UnsafeCell,
    mem::{ManuallyDrop, MaybeUninit},
    ops::Deref,
    ptr,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicPtr, AtomicU32, Ordering},
    },
};

use crate::ret::{Errno, Result};

/// What an object is found by: the address of its context, and its handle where it has one.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Name(pub(crate) usize, pub(crate) u32);

/// A kind of object.
///
/// # Safety
/// The type has the layout of C, with an `Abi` at the offset `AT`.
pub(crate) unsafe trait Object: Sized + 'static {
    /// The public part.
    type Abi;
    /// Where the public part begins.
    const AT: usize = 0;

    /// Where all of this kind live.
    fn arena() -> &'static Arena<Self>;

    /// What the public part says that it is.
    ///
    /// # Safety
    /// `abi` can be read.
    unsafe fn name(abi: *const Self::Abi) -> Name;

    /// Makes an object of this kind, and the pointer that the program gets.
    ///
    /// # Errors
    /// ENOMEM.
    fn publish(self) -> Result<*mut Self::Abi> {
        Self::arena().put(self)
    }

    /// The object of a pointer that the program passes.
    ///
    /// # Errors
    /// EINVAL for whatever is no object of this kind, NULL included, and for one whose context or handle was changed.
    ///
    /// # Safety
    /// The program does not destroy it while the reference lives.
    unsafe fn of<'a>(abi: *mut Self::Abi) -> Result<&'a Self> {
        let slot = Self::arena().slot(abi).ok_or(Errno::INVAL)?;
        slot.check(LIVE)?;
        // SAFETY: it is alive, and stays so by the caller's promise.
        Ok(unsafe { slot.value() })
    }

    /// The object of a pointer that may be NULL.
    ///
    /// # Errors
    /// As for [`Object::of`], but for NULL.
    ///
    /// # Safety
    /// As for [`Object::of`].
    unsafe fn given<'a>(abi: *mut Self::Abi) -> Result<Option<&'a Self>> {
        // SAFETY: the caller's promise.
        (!abi.is_null()).then(|| unsafe { Self::of(abi) }).transpose()
    }

    /// Like [`Object::of`], without looking the pointer up.
    ///
    /// # Errors
    /// EINVAL for an object that was destroyed, or whose context or handle was changed.
    ///
    /// # Safety
    /// As for [`Object::of`]; the pointer is from [`Object::publish`].
    unsafe fn hot<'a>(abi: *mut Self::Abi) -> Result<&'a Self> {
        // SAFETY: the caller's promise; such memory stays what it is.
        let slot = unsafe { &*abi.byte_sub(Self::AT).cast::<Slot<Self>>() };
        slot.check(LIVE)?;
        // SAFETY: as in `of`.
        Ok(unsafe { slot.value() })
    }

    /// The object of a pointer, even if it is being destroyed or calls itself otherwise.
    ///
    /// # Safety
    /// As for [`Object::of`].
    unsafe fn any<'a>(abi: *mut Self::Abi) -> Option<&'a Self> {
        let slot = Self::arena().slot(abi)?;
        let there = matches!(slot.state.load(Ordering::Acquire), LIVE | GOING);
        // SAFETY: it was made, and destroying it waits for who may call this.
        there.then(|| unsafe { slot.value() })
    }

    /// Takes an object to destroy it: nobody else finds it meanwhile.
    ///
    /// # Errors
    /// As for [`Object::of`].
    fn claim(abi: *mut Self::Abi) -> Result<Claim<Self>> {
        let slot = Self::arena().slot(abi).ok_or(Errno::INVAL)?;
        slot.check(LIVE)?;
        let won = slot
            .state
            .compare_exchange(LIVE, GOING, Ordering::AcqRel, Ordering::Acquire);
        won.map(|_| Claim { slot }).map_err(|_| Errno::INVAL)
    }
}

/// Makes a structure an [`Object`]: `AT` bytes into it is the C structure, whose context and handle are named.
macro_rules! object {
    ($kind:ty, $abi:ty, $at:expr, |$public:ident| $context:expr, $handle:expr) => {
        // SAFETY: `repr(C)`, and the public part is at that offset.
        unsafe impl $crate::live::Object for $kind {
            type Abi = $abi;
            const AT: usize = $at;

            fn arena() -> &'static $crate::live::Arena<Self> {
                static ARENA: $crate::live::Arena<$kind> = $crate::live::Arena::new();
                &ARENA
            }

            #[inline(always)]
            unsafe fn name($public: *const $abi) -> $crate::live::Name {
                // SAFETY: the caller's promise.
                unsafe { $crate::live::Name($context as usize, $handle as u32) }
            }
        }
    };
}
pub(crate) use object;

/// A place that nothing is in; also what memory begins with.
const FREE: u32 = 0;
/// An object is in it.
const LIVE: u32 = 0x6c69_7665;
/// An object is in it that is being destroyed.
const GOING: u32 = 1;

/// Room for an object.
#[repr(C)]
struct Slot<T> {
    value: UnsafeCell<MaybeUninit<T>>,
    state: AtomicU32,
    /// As it was made.
    name: UnsafeCell<Name>,
    next: AtomicPtr<Self>,
}

impl<T: Object> Slot<T> {
    fn abi(&self) -> *mut T::Abi {
        self.value.get().cast::<T::Abi>().wrapping_byte_add(T::AT)
    }

    #[inline(always)]
    fn check(&self, state: u32) -> Result<()> {
        if self.state.load(Ordering::Acquire) != state {
            return Err(Errno::INVAL);
        }
        // SAFETY: written before the state said that it is alive. The public part is the program's to read and write.
        match unsafe { *self.name.get() == T::name(self.abi()) } {
            true => Ok(()),
            false => Err(Errno::INVAL),
        }
    }

    /// # Safety
    /// An object is in it, and stays there while the reference lives.
    unsafe fn value<'a>(&self) -> &'a T {
        // SAFETY: the caller's promise; places are for ever.
        unsafe { (*self.value.get()).assume_init_ref() }
    }
}

/// Places of the first piece of memory of a kind; each other piece has twice as many as the one before.
const FIRST: usize = 32;
const PIECES: usize = 24;

/// Held to make or give back any place, and over a fork.
static PLACES: Mutex<()> = Mutex::new(());

/// Before a fork.
pub(crate) fn hold() -> MutexGuard<'static, ()> {
    PLACES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A handle that no other object of this process has had for long.
pub(crate) fn handle() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// All objects of a kind.
pub(crate) struct Arena<T> {
    pieces: [AtomicPtr<Slot<T>>; PIECES],
    /// The first of the free places. Changes under [`PLACES`].
    free: AtomicPtr<Slot<T>>,
}

impl<T: Object> Arena<T> {
    pub(crate) const fn new() -> Self {
        Self {
            pieces: [const { AtomicPtr::new(ptr::null_mut()) }; PIECES],
            free: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// The place that a pointer is for.
    fn slot(&self, abi: *mut T::Abi) -> Option<&'static Slot<T>> {
        let at = abi.addr().wrapping_sub(T::AT);
        for (i, piece) in self.pieces.iter().enumerate() {
            let base = piece.load(Ordering::Acquire);
            let offset = at.wrapping_sub(base.addr());
            if base.is_null() {
                return None;
            }
            if offset < (FIRST << i) * size_of::<Slot<T>>() {
                let whole = offset.is_multiple_of(size_of::<Slot<T>>());
                // SAFETY: a place within the piece, which is never freed.
                return whole.then(|| unsafe { &*base.byte_add(offset) });
            }
        }
        None
    }

    /// Adds a piece of memory. Called with [`PLACES`] locked.
    fn grow(&self) -> Result<()> {
        let found = self
            .pieces
            .iter()
            .enumerate()
            .find(|(_, p)| p.load(Ordering::Relaxed).is_null());
        let (i, piece) = found.ok_or(Errno::NOMEM)?;
        let layout = Layout::array::<Slot<T>>(FIRST << i).map_err(|_| Errno::NOMEM)?;
        // SAFETY: not of size zero: every object has a public part.
        let base = unsafe { alloc_zeroed(layout) }.cast::<Slot<T>>();
        if base.is_null() {
            return Err(Errno::NOMEM);
        }
        piece.store(base, Ordering::Release);
        for n in (0..FIRST << i).rev() {
            // SAFETY: within the new memory; zeroes are a free place.
            self.give_back(unsafe { &*base.add(n) });
        }
        Ok(())
    }

    /// Called with [`PLACES`] locked.
    fn give_back(&self, slot: &'static Slot<T>) {
        slot.next.store(self.free.load(Ordering::Relaxed), Ordering::Relaxed);
        self.free.store(ptr::from_ref(slot).cast_mut(), Ordering::Relaxed);
    }

    fn put(&self, value: T) -> Result<*mut T::Abi> {
        let locked = hold();
        if self.free.load(Ordering::Relaxed).is_null() {
            self.grow()?;
        }
        // SAFETY: a place, which is free.
        let slot = unsafe { &*self.free.load(Ordering::Relaxed) };
        self.free.store(slot.next.load(Ordering::Relaxed), Ordering::Relaxed);
        drop(locked);
        // SAFETY: the place is this thread's alone until the state says otherwise.
        unsafe {
            slot.value.get().write(MaybeUninit::new(value));
            slot.name.get().write(T::name(slot.abi()));
        }
        slot.state.store(LIVE, Ordering::Release);
        Ok(slot.abi())
    }
}

/// The right to destroy an object; without [`Claim::free`] the object stays.
pub(crate) struct Claim<T: Object> {
    slot: &'static Slot<T>,
}

impl<T: Object> Claim<T> {
    /// Frees the object.
    pub(crate) fn free(self) {
        let slot = ManuallyDrop::new(self).slot;
        slot.state.store(FREE, Ordering::Release);
        // SAFETY: nobody else finds it, and it is not used again. Its public part stays readable: inline calls follow it to us.
        unsafe { (*slot.value.get()).assume_init_drop() };
        let _locked = hold();
        T::arena().give_back(slot);
    }

    /// Forgets an object that is another process's: a forked child has nothing to free.
    pub(crate) fn forget(self) {
        ManuallyDrop::new(self).slot.state.store(FREE, Ordering::Release);
    }
}

impl<T: Object> Deref for Claim<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the object is there until the claim is used up.
        unsafe { self.slot.value() }
    }
}

impl<T: Object> Drop for Claim<T> {
    fn drop(&mut self) {
        self.slot.state.store(LIVE, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::{mem, sync::Arc};

    use super::*;

    #[repr(C)]
    struct Abi {
        context: usize,
        handle: u32,
    }

    #[repr(C)]
    struct Thing {
        before: u64,
        abi: Abi,
        held: Arc<()>,
    }

    object!(Thing, Abi, mem::offset_of!(Thing, abi), |p| (*p).context, (*p).handle);

    fn thing(handle: u32, held: &Arc<()>) -> Thing {
        let abi = Abi { context: 7, handle };
        Thing {
            before: 0,
            abi,
            held: held.clone(),
        }
    }

    fn found(abi: *mut Abi) -> bool {
        // SAFETY: nothing is destroyed meanwhile.
        unsafe { Thing::of(abi) }.is_ok()
    }

    #[test]
    fn only_what_lives_is_found() {
        let held = Arc::new(());
        let all: Vec<_> = (0..100)
            .map(|n| thing(n, &held).publish().unwrap_or(ptr::null_mut()))
            .collect();
        assert!(all.iter().all(|abi| found(*abi)) && Arc::strong_count(&held) == 101);
        let mut elsewhere = Abi { context: 7, handle: 1 };
        let strangers = [
            ptr::null_mut(),
            &raw mut elsewhere,
            all[3].wrapping_byte_add(8),
            ptr::dangling_mut(),
        ];
        for stranger in strangers {
            assert!(!found(stranger) && Thing::claim(stranger).is_err());
        }
        let one = all[40];
        // SAFETY: the public part may be written.
        unsafe {
            (*one).handle ^= 1;
            assert!(!found(one) && Thing::claim(one).is_err() && Thing::hot(one).is_err() && Thing::any(one).is_some());
            (*one).handle ^= 1;
            (*one).context = 8;
            assert!(!found(one) && Thing::claim(one).is_err());
            (*one).context = 7;
        }
        let claim = Thing::claim(one).unwrap_or_else(|e| panic!("{e:?}"));
        assert!(!found(one) && Thing::claim(one).is_err() && claim.abi.handle == 40);
        drop(claim);
        assert!(found(one), "given up");
        Thing::claim(one).unwrap_or_else(|e| panic!("{e:?}")).free();
        assert!(Arc::strong_count(&held) == 100 && !found(one) && Thing::claim(one).is_err());
        // SAFETY: a pointer from before, whose memory is there for ever.
        unsafe {
            assert!(Thing::hot(one).is_err() && Thing::any(one).is_none());
            assert_eq!(((*one).context, (*one).handle), (7, 40), "inline calls read it");
        }
        assert_eq!(thing(1000, &held).publish(), Ok(one), "its place is used again");
        for abi in all {
            Thing::claim(abi).unwrap_or_else(|e| panic!("{e:?}")).free();
        }
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
