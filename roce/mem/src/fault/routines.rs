//! The routines in assembly, and the way out of one of them.

use core::ffi::c_void;

#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
#[cfg_attr(target_arch = "aarch64", path = "aarch64.rs")]
mod arch;

pub(super) use arch::copy;

unsafe extern "C" {
    fn roce_mem_fault_begin();
    fn roce_mem_fault_end();
    fn roce_mem_fault_landing();

    #[link_name = "roce_mem_fault_store_byte"]
    pub(super) fn store_byte(to: *mut u8, byte: u8) -> u32;
    #[link_name = "roce_mem_fault_store"]
    pub(super) fn store(to: *mut u64, word: u64) -> u32;
    #[link_name = "roce_mem_fault_fetch_add"]
    pub(super) fn fetch_add(word: *mut u64, add: u64, former: *mut u64) -> u32;
    #[link_name = "roce_mem_fault_compare_swap"]
    pub(super) fn compare_swap(word: *mut u64, compare: u64, swap: u64, former: *mut u64) -> u32;
}

/// Has an interrupted routine return that it has failed. Returns false if something else was interrupted. Async-signal-safe.
///
/// # Safety
/// `context` is what a handler with SA_SIGINFO got.
pub(super) unsafe fn leave(context: *mut c_void) -> bool {
    // SAFETY: the caller's promise.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    let routines = roce_mem_fault_begin as *const () as usize..roce_mem_fault_end as *const () as usize;
    let is_ours = routines.contains(&arch::program_counter(context));
    if is_ours {
        arch::set_program_counter(context, roce_mem_fault_landing as *const () as usize);
    }
    is_ours
}
