//! Accesses through the kernel, for processors that have no routines of their own. Each copy is a system call.
//!
//! Atomics have the kernel look whether the page can be written, and are then the processor's own: a page that goes away in
//! between still ends the program.

use core::{
    ffi::c_void,
    sync::atomic::{AtomicU64, Ordering},
};

const FAULT: u32 = 1;

fn iovec(at: *const u8, len: usize) -> libc::iovec {
    libc::iovec {
        iov_base: at.cast_mut().cast(),
        iov_len: len,
    }
}

/// Copies bytes; 0 unless a page of either side can't be accessed.
///
/// # Safety
/// As [`super::read`] and [`super::write`].
pub(super) unsafe fn copy(to: *mut u8, from: *const u8, len: usize) -> u32 {
    let (to, from) = (iovec(to, len), iovec(from, len));
    // SAFETY: plain data; the kernel checks both sides, and the caller promises that no Rust object is written but its own.
    let copied = unsafe { libc::process_vm_readv(libc::getpid(), &raw const to, 1, &raw const from, 1, 0) };
    u32::from(usize::try_from(copied) != Ok(len))
}

/// Stores a byte.
///
/// # Safety
/// As [`super::write`].
pub(super) unsafe fn store_byte(to: *mut u8, byte: u8) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { copy(to, &raw const byte, 1) }
}

/// Whether a word can be written, as far as the kernel can tell (Linux 5.14).
fn is_writable(word: *mut u64) -> bool {
    // SAFETY: asks for a number; the advice changes no contents, and is first asked for on no memory at all.
    unsafe {
        let advise = |at: *mut u64, len| libc::madvise(at.cast(), len, libc::MADV_POPULATE_WRITE) == 0;
        let page = libc::sysconf(libc::_SC_PAGESIZE) as usize;
        !advise(core::ptr::null_mut(), 0) || advise(word.map_addr(|at| at & !(page - 1)), page)
    }
}

/// Stores a word.
///
/// # Safety
/// As [`super::store`].
pub(super) unsafe fn store(to: *mut u64, word: u64) -> u32 {
    if !is_writable(to) {
        return FAULT;
    }
    // SAFETY: aligned and mapped. Others may change it at any time, which `AtomicU64` allows.
    unsafe { AtomicU64::from_ptr(to) }.store(word, Ordering::Release);
    0
}

/// Adds to a word.
///
/// # Safety
/// As [`super::fetch_add`]; `former` can be written.
pub(super) unsafe fn fetch_add(word: *mut u64, add: u64, former: *mut u64) -> u32 {
    if !is_writable(word) {
        return FAULT;
    }
    // SAFETY: as in `store`.
    unsafe { *former = AtomicU64::from_ptr(word).fetch_add(add, Ordering::AcqRel) };
    0
}

/// Compares and swaps a word.
///
/// # Safety
/// As [`super::compare_swap`]; `former` can be written.
pub(super) unsafe fn compare_swap(word: *mut u64, compare: u64, swap: u64, former: *mut u64) -> u32 {
    if !is_writable(word) {
        return FAULT;
    }
    // SAFETY: as in `store`.
    let word = unsafe { AtomicU64::from_ptr(word) };
    let (Ok(old) | Err(old)) = word.compare_exchange(compare, swap, Ordering::AcqRel, Ordering::Acquire);
    // SAFETY: the caller's promise.
    unsafe { *former = old };
    0
}

/// No routine is ever interrupted.
pub(super) unsafe fn leave(_context: *mut c_void) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_do_as_the_routines_do() {
        let (page, flags) = (4096, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a mapping of this test's own, of which the second page can't be written.
        unsafe {
            let at = libc::mmap(
                core::ptr::null_mut(),
                2 * page,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            );
            assert_ne!(at, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(at.byte_add(page), page, libc::PROT_READ), 0);
            let (fine, edge) = (at.cast::<u8>(), at.cast::<u8>().add(page - 4));
            let (data, mut out, mut former) = ([7; 8], [0; 8], 0);
            assert_eq!((copy(fine, data.as_ptr(), 8), copy(out.as_mut_ptr(), fine, 8)), (0, 0));
            assert_eq!(out, data);
            assert_eq!(copy(edge, data.as_ptr(), 8), FAULT);
            assert_eq!(copy(out.as_mut_ptr(), edge, 8), 0);
            assert_eq!(out, [7, 7, 7, 7, 0, 0, 0, 0]);
            assert_eq!((store_byte(fine, 1), store_byte(edge.add(4), 1)), (0, FAULT));
            let (word, lost) = (fine.cast::<u64>(), at.byte_add(page).cast::<u64>());
            assert_eq!((store(word, 5), store(lost, 5)), (0, FAULT));
            assert_eq!((fetch_add(word, 2, &raw mut former), former), (0, 5));
            assert_eq!((compare_swap(word, 7, 9, &raw mut former), former), (0, 7));
            assert_eq!((compare_swap(word, 7, 1, &raw mut former), former), (0, 9));
            assert_eq!(fetch_add(lost, 2, &raw mut former), FAULT);
            assert_eq!(compare_swap(lost, 0, 9, &raw mut former), FAULT);
            assert_eq!(libc::munmap(at, 2 * page), 0);
            assert!(!leave(at));
        }
    }
}
