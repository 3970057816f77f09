//! Memory of the objects that programs hold pointers to, and the state of each.
//!
//! A program may pass any pointer: to an object that it has destroyed, to an object of another kind, to anything else. The
//! memory of each kind of object is used for this kind alone and never freed, like the kernel's SLAB_TYPESAFE_BY_RCU; the
//! state of a slot is next to the object. Most pointers are looked up: nothing is read at the pointer before it is known to be
//! a slot of the kind. Pointers of calls that libibverbs defines inline have been followed by the program before, through its
//! table of verbs: [`Object::hot`] and [`Object::posting`] take them for a slot.
//!
//! The kernel finds an object by its `context` and `handle`. A program that has changed them names another object, or none.
//! Calls that destroy objects, and calls that make objects from others, report that as uverbs' lookup does
//! (`rdma_lookup_get_uobject`): ENOENT. Other calls report EINVAL, as uverbs before Linux 6.15. Calls that post work compare
//! neither, as providers do.

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

use crate::{
    errno::{Errno, Result},
    fork,
};

/// Key that an object is found by: the address of its context, and its handle if it has one.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Name(pub(crate) usize, pub(crate) u32);

/// A kind of object.
///
/// # Safety
/// The type has the layout of C, with an `Abi` at the offset `AT`.
pub(crate) unsafe trait Object: Sized + 'static {
    /// The public part.
    type Abi;
    /// Name of the kind, for people.
    const KIND: &'static str;
    /// Offset of the public part.
    const AT: usize = 0;
    /// Whether a forked child may use it too.
    const INHERITED: bool = false;

    /// Memory of all objects of this kind.
    fn arena() -> &'static Arena<Self>;

    /// Reads the key in the public part.
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

    /// The object of a pointer that the program passes to change or query it.
    ///
    /// # Errors
    /// EINVAL for a pointer that is no object of this kind, NULL included, and for an object whose context or handle was
    /// changed.
    ///
    /// # Safety
    /// The program does not destroy it while the reference lives.
    unsafe fn of<'a>(abi: *mut Self::Abi) -> Result<&'a Self> {
        let slot = Self::arena().slot(abi).ok_or_else(unknown::<Self>)?;
        // SAFETY: the caller's promise.
        unsafe { slot.named() }
    }

    /// The object of a pointer from which another object is made.
    ///
    /// # Errors
    /// As for [`Object::claim`].
    ///
    /// # Safety
    /// As for [`Object::of`].
    unsafe fn lookup<'a>(abi: *mut Self::Abi) -> Result<&'a Self> {
        // SAFETY: the caller's promise.
        unsafe { Self::of(abi) }.map_err(|e| match e {
            Errno::INVAL => not_found::<Self>(abi),
            other => other,
        })
    }

    /// Like [`Object::lookup`], for a pointer that may be NULL.
    ///
    /// # Errors
    /// ENOENT as for [`Object::lookup`].
    ///
    /// # Safety
    /// As for [`Object::of`].
    unsafe fn given<'a>(abi: *mut Self::Abi) -> Result<Option<&'a Self>> {
        // SAFETY: the caller's promise.
        (!abi.is_null()).then(|| unsafe { Self::lookup(abi) }).transpose()
    }

    /// The object that a work request names. Its context and handle are not compared.
    ///
    /// # Errors
    /// EINVAL for a pointer that is no object of this kind.
    ///
    /// # Safety
    /// As for [`Object::of`].
    unsafe fn named<'a>(abi: *mut Self::Abi) -> Result<&'a Self> {
        let slot = Self::arena().slot(abi).ok_or_else(unknown::<Self>)?;
        // SAFETY: the caller's promise.
        unsafe { slot.live() }
    }

    /// The object that work is posted to: neither is the pointer looked up, nor are context and handle compared.
    ///
    /// # Errors
    /// EINVAL for an object that was destroyed.
    ///
    /// # Safety
    /// As for [`Object::hot`].
    unsafe fn posting<'a>(abi: *mut Self::Abi) -> Result<&'a Self> {
        // SAFETY: the caller's promise; the memory of a kind is never freed.
        unsafe { (*abi.byte_sub(Self::AT).cast::<Slot<Self>>()).live() }
    }

    /// Like [`Object::of`], without looking the pointer up.
    ///
    /// # Errors
    /// EINVAL for an object that was destroyed, or whose context or handle was changed.
    ///
    /// # Safety
    /// As for [`Object::of`]; the pointer is from [`Object::publish`].
    unsafe fn hot<'a>(abi: *mut Self::Abi) -> Result<&'a Self> {
        // SAFETY: the caller's promise; the memory of a kind is never freed.
        unsafe { (*abi.byte_sub(Self::AT).cast::<Slot<Self>>()).named() }
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

    /// Takes an object to destroy it: no other call finds it from now on.
    ///
    /// # Errors
    /// ENOENT for a pointer that is no object of this kind, and for an object whose context or handle was changed; EINVAL
    /// for NULL.
    fn claim(abi: *mut Self::Abi) -> Result<Claim<Self>> {
        let slot = Self::arena().slot(abi).filter(|slot| slot.is_live() && slot.has_name());
        let slot = slot.ok_or_else(|| not_found::<Self>(abi))?;
        let won = slot
            .state
            .compare_exchange(LIVE, GOING, Ordering::AcqRel, Ordering::Acquire);
        won.map(|_| Claim { slot }).map_err(|_| not_found::<Self>(abi))
    }

    /// Destroys an object, after `end` has ended what it stands for. A forked child's copy is forgotten: the rest is its parent's.
    ///
    /// # Errors
    /// As for [`Object::claim`], and those of `end`: the object stays then.
    fn destroy(abi: *mut Self::Abi, end: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        let claim = Self::claim(abi)?;
        match claim.slot.check_process() {
            Ok(()) => {
                end(&claim)?;
                claim.free();
            }
            Err(_) => claim.forget(),
        }
        Ok(())
    }
}

/// Error of a lookup that has found nothing. NULL has no handle that could be looked up.
fn not_found<T: Object>(abi: *mut T::Abi) -> Errno {
    match abi.is_null() {
        true => Errno::INVAL.because(format_args!("the pointer to the {} is NULL", T::KIND)),
        false => no_object::<T>(Errno::NOENT),
    }
}

/// Error for a pointer that is no live object.
#[cold]
fn unknown<T: Object>() -> Errno {
    no_object::<T>(Errno::INVAL)
}

fn no_object<T: Object>(errno: Errno) -> Errno {
    errno.because(format_args!(
        "the pointer is to no {} of this library: it was destroyed, or its context or handle was overwritten",
        T::KIND
    ))
}

/// Makes a structure an [`Object`] that begins with the C structure, whose context and handle are given.
macro_rules! object {
    ($kind:ty, $name:literal, $abi:ty, |$public:ident| $context:expr, $handle:expr $(, inherited at $at:expr)?) => {
        // SAFETY: `repr(C)`, and the public part is at that offset.
        unsafe impl $crate::live::Object for $kind {
            type Abi = $abi;
            const KIND: &'static str = $name;
            $(
                const AT: usize = $at;
                const INHERITED: bool = true;
            )?

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

/// State of an empty slot, and of new memory.
const FREE: u32 = 0;
/// State of a slot with an object.
const LIVE: u32 = 0x6c69_7665;
/// State of a slot whose object is being destroyed.
const GOING: u32 = 1;

/// Memory of one object.
#[repr(C)]
struct Slot<T> {
    value: UnsafeCell<MaybeUninit<T>>,
    state: AtomicU32,
    /// Key that the object was made with, and the process that made it.
    made: UnsafeCell<(Name, u32)>,
    next: AtomicPtr<Self>,
}

impl<T: Object> Slot<T> {
    fn abi(&self) -> *mut T::Abi {
        self.value.get().cast::<T::Abi>().wrapping_byte_add(T::AT)
    }

    #[inline(always)]
    fn is_live(&self) -> bool {
        self.state.load(Ordering::Acquire) == LIVE
    }

    #[inline(always)]
    fn has_name(&self) -> bool {
        // SAFETY: written before the state said that it is alive. The public part is the program's to read and write.
        unsafe { (*self.made.get()).0 == T::name(self.abi()) }
    }

    /// Fails in a child of the process that made the object.
    #[inline(always)]
    fn check_process(&self) -> Result<()> {
        // SAFETY: as above.
        fork::check(unsafe { (*self.made.get()).1 })
    }

    /// The object in it, if it is alive in this process.
    ///
    /// # Safety
    /// As for [`Object::of`].
    #[inline(always)]
    unsafe fn live<'a>(&self) -> Result<&'a T> {
        if !self.is_live() {
            return Err(unknown::<T>());
        }
        if !T::INHERITED {
            self.check_process()?;
        }
        // SAFETY: it is alive, and stays so by the caller's promise.
        Ok(unsafe { self.value() })
    }

    /// Like [`Slot::live`]; the program has left its context and handle alone.
    ///
    /// # Safety
    /// As for [`Object::of`].
    #[inline(always)]
    unsafe fn named<'a>(&self) -> Result<&'a T> {
        // SAFETY: the caller's promise.
        let object = unsafe { self.live() }?;
        self.has_name().then_some(object).ok_or_else(unknown::<T>)
    }

    /// # Safety
    /// An object is in it, and stays there while the reference lives.
    unsafe fn value<'a>(&self) -> &'a T {
        // SAFETY: the caller's promise; slots are never freed.
        unsafe { (*self.value.get()).assume_init_ref() }
    }
}

/// Slots of the first piece of memory of a kind; each other piece has twice as many as the one before.
const FIRST: usize = 32;
const PIECES: usize = 24;

/// Held while a slot is taken or freed, and during a fork.
static SLOTS: Mutex<()> = Mutex::new(());

/// Before a fork.
pub(crate) fn hold() -> MutexGuard<'static, ()> {
    SLOTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a new handle; they repeat after 2^32.
pub(crate) fn handle() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Memory of all objects of a kind.
pub(crate) struct Arena<T> {
    pieces: [AtomicPtr<Slot<T>>; PIECES],
    /// The first free slot. Changes under [`SLOTS`].
    free: AtomicPtr<Slot<T>>,
}

impl<T: Object> Arena<T> {
    pub(crate) const fn new() -> Self {
        Self {
            pieces: [const { AtomicPtr::new(ptr::null_mut()) }; PIECES],
            free: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// The slot of a pointer.
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
                // SAFETY: a slot within the piece, which is never freed.
                return whole.then(|| unsafe { &*base.byte_add(offset) });
            }
        }
        None
    }

    /// Adds a piece of memory. Called with [`SLOTS`] locked.
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
            // SAFETY: within the new memory; zeroes are a free slot.
            self.give_back(unsafe { &*base.add(n) });
        }
        Ok(())
    }

    /// Called with [`SLOTS`] locked.
    fn give_back(&self, slot: &'static Slot<T>) {
        slot.next.store(self.free.load(Ordering::Relaxed), Ordering::Relaxed);
        self.free.store(ptr::from_ref(slot).cast_mut(), Ordering::Relaxed);
    }

    fn put(&self, value: T) -> Result<*mut T::Abi> {
        let locked = hold();
        if self.free.load(Ordering::Relaxed).is_null() {
            self.grow()?;
        }
        // SAFETY: a free slot.
        let slot = unsafe { &*self.free.load(Ordering::Relaxed) };
        self.free.store(slot.next.load(Ordering::Relaxed), Ordering::Relaxed);
        drop(locked);
        // SAFETY: the slot is this thread's alone until its state is LIVE.
        unsafe {
            slot.value.get().write(MaybeUninit::new(value));
            slot.made.get().write((T::name(slot.abi()), fork::generation()));
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
        // SAFETY: no other call finds it, and it is not used again. Its public part stays readable for inline calls.
        unsafe { (*slot.value.get()).assume_init_drop() };
        let _locked = hold();
        T::arena().give_back(slot);
    }

    /// Forgets an object of the parent process: a forked child has nothing to free.
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

    object!(Thing, "thing", Abi, |p| (*p).context, (*p).handle, inherited at mem::offset_of!(Thing, abi));

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
    fn only_live_objects_are_found() {
        let held = Arc::new(());
        let all: Vec<_> = (0..100)
            .map(|n| thing(n, &held).publish().unwrap_or(ptr::null_mut()))
            .collect();
        assert!(all.iter().all(|abi| found(*abi)) && Arc::strong_count(&held) == 101);
        let mut elsewhere = Abi { context: 7, handle: 1 };
        let others = [
            ptr::null_mut(),
            &raw mut elsewhere,
            all[3].wrapping_byte_add(8),
            ptr::dangling_mut(),
        ];
        for other in others {
            assert!(!found(other) && Thing::claim(other).is_err());
        }
        let one = all[40];
        // SAFETY: the public part may be written.
        unsafe {
            (*one).handle ^= 1;
            assert!(!found(one) && Thing::hot(one).is_err() && Thing::any(one).is_some());
            assert_eq!(Thing::claim(one).err(), Some(Errno::NOENT));
            assert_eq!(Thing::lookup(one).err(), Some(Errno::NOENT));
            assert!(
                Thing::named(one).is_ok() && Thing::posting(one).is_ok(),
                "posting compares nothing"
            );
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
            assert!(Thing::named(one).is_err() && Thing::posting(one).is_err());
            assert_eq!(Thing::lookup(ptr::null_mut()).err(), Some(Errno::INVAL));
            assert_eq!(((*one).context, (*one).handle), (7, 40), "inline calls read it");
        }
        assert_eq!(thing(1000, &held).publish(), Ok(one), "its slot is used again");
        for abi in all {
            Thing::claim(abi).unwrap_or_else(|e| panic!("{e:?}")).free();
        }
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
