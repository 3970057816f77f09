//! The routines in assembly, and the way out of one of them.

use core::ffi::c_void;

/// Puts routines between two symbols, and behind them the landing of those that a fault interrupts.
macro_rules! routines {
    ($( $name:ident: $code:literal )* => landing $landing:literal) => {
        core::arch::global_asm!(
            ".pushsection .text.roce_mem_fault,\"ax\",@progbits",
            ".globl roce_mem_fault_begin, roce_mem_fault_end",
            ".hidden roce_mem_fault_begin, roce_mem_fault_end",
            ".p2align 6",
            "roce_mem_fault_begin:",
            $( routine!($name, $code), )*
            "roce_mem_fault_end:",
            routine!(landing, $landing),
            ".popsection",
        );
    };
}

macro_rules! routine {
    ($name:ident, $code:literal) => {
        concat!(
            ".globl roce_mem_fault_",
            stringify!($name),
            "\n",
            ".hidden roce_mem_fault_",
            stringify!($name),
            "\n",
            ".type roce_mem_fault_",
            stringify!($name),
            ",%function\n",
            ".p2align 5\n",
            "roce_mem_fault_",
            stringify!($name),
            ":\n",
            ".cfi_startproc",
            $code,
            "\n",
            ".cfi_endproc\n",
            ".size roce_mem_fault_",
            stringify!($name),
            ", . - roce_mem_fault_",
            stringify!($name),
        )
    };
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("accesses to registered memory have routines for x86-64 and 64-bit ARM only");

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
    let counter = arch::program_counter(context);
    let is_ours = routines.contains(&(*counter as usize));
    if is_ours {
        *counter = roce_mem_fault_landing as *const () as usize as _;
    }
    is_ours
}
