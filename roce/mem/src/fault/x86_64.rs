//! Copies and atomics for x86-64.

use core::arch::global_asm;

// All routines are leaves that keep the stack pointer, so that the signal handler can leave any of them by `landing`. They
// return 0. Memory of the two sides never overlaps.
global_asm!(
    ".pushsection .text.roce_mem_fault,\"ax\",@progbits
    .p2align 6
    .globl roce_mem_fault_begin, roce_mem_fault_end, roce_mem_fault_landing
    .globl roce_mem_fault_copy, roce_mem_fault_copy_wide, roce_mem_fault_store_byte
    .globl roce_mem_fault_store, roce_mem_fault_fetch_add, roce_mem_fault_compare_swap
    .hidden roce_mem_fault_begin, roce_mem_fault_end, roce_mem_fault_landing
    .hidden roce_mem_fault_copy, roce_mem_fault_copy_wide, roce_mem_fault_store_byte
    .hidden roce_mem_fault_store, roce_mem_fault_fetch_add, roce_mem_fault_compare_swap
roce_mem_fault_begin:

    // (to: rdi, from: rsi, bytes: rdx)
    .type roce_mem_fault_copy,@function
roce_mem_fault_copy:
    .cfi_startproc
    cmp rdx, 16
    jb 3f
    cmp rdx, 32
    ja 2f
    movups xmm0, [rsi]
    movups xmm1, [rsi + rdx - 16]
    movups [rdi], xmm0
    movups [rdi + rdx - 16], xmm1
    xor eax, eax
    ret
2:  // The last 64 bytes may overlap those before.
    cmp rdx, 64
    ja 4f
    movups xmm0, [rsi]
    movups xmm1, [rsi + 16]
    movups xmm2, [rsi + rdx - 32]
    movups xmm3, [rsi + rdx - 16]
    movups [rdi], xmm0
    movups [rdi + 16], xmm1
    movups [rdi + rdx - 32], xmm2
    movups [rdi + rdx - 16], xmm3
    xor eax, eax
    ret
4:  lea rcx, [rsi + rdx - 64]
    lea r8, [rdi + rdx - 64]
    .p2align 4
5:  movups xmm0, [rsi]
    movups xmm1, [rsi + 16]
    movups xmm2, [rsi + 32]
    movups xmm3, [rsi + 48]
    movups [rdi], xmm0
    movups [rdi + 16], xmm1
    movups [rdi + 32], xmm2
    movups [rdi + 48], xmm3
    add rsi, 64
    add rdi, 64
    cmp rsi, rcx
    jb 5b
    movups xmm0, [rcx]
    movups xmm1, [rcx + 16]
    movups xmm2, [rcx + 32]
    movups xmm3, [rcx + 48]
    movups [r8], xmm0
    movups [r8 + 16], xmm1
    movups [r8 + 32], xmm2
    movups [r8 + 48], xmm3
    xor eax, eax
    ret
3:  cmp edx, 8
    jb 6f
    mov rax, [rsi]
    mov rcx, [rsi + rdx - 8]
    mov [rdi], rax
    mov [rdi + rdx - 8], rcx
    xor eax, eax
    ret
6:  cmp edx, 4
    jb 7f
    mov eax, [rsi]
    mov ecx, [rsi + rdx - 4]
    mov [rdi], eax
    mov [rdi + rdx - 4], ecx
    xor eax, eax
    ret
7:  test edx, edx
    jz 8f
    mov al, [rsi]
    mov [rdi], al
    cmp edx, 1
    je 8f
    movzx eax, word ptr [rsi + rdx - 2]
    mov [rdi + rdx - 2], ax
8:  xor eax, eax
    ret
    .cfi_endproc
    .size roce_mem_fault_copy, . - roce_mem_fault_copy

    // As the one above, for 256 bytes and more and with AVX. Stores to whole cache lines but for both ends.
    .type roce_mem_fault_copy_wide,@function
    .p2align 5
roce_mem_fault_copy_wide:
    .cfi_startproc
    lea rcx, [rsi + rdx - 128]
    lea r8, [rdi + rdx - 128]
    vmovdqu ymm0, [rsi]
    vmovdqu ymm1, [rsi + 32]
    vmovdqu [rdi], ymm0
    vmovdqu [rdi + 32], ymm1
    mov rax, rdi
    neg rax
    and eax, 63
    add rdi, rax
    add rsi, rax
    .p2align 5
2:  vmovdqu ymm0, [rsi]
    vmovdqu ymm1, [rsi + 32]
    vmovdqu ymm2, [rsi + 64]
    vmovdqu ymm3, [rsi + 96]
    vmovdqa [rdi], ymm0
    vmovdqa [rdi + 32], ymm1
    vmovdqa [rdi + 64], ymm2
    vmovdqa [rdi + 96], ymm3
    sub rsi, -128
    sub rdi, -128
    cmp rsi, rcx
    jb 2b
    vmovdqu ymm0, [rcx]
    vmovdqu ymm1, [rcx + 32]
    vmovdqu ymm2, [rcx + 64]
    vmovdqu ymm3, [rcx + 96]
    vmovdqu [r8], ymm0
    vmovdqu [r8 + 32], ymm1
    vmovdqu [r8 + 64], ymm2
    vmovdqu [r8 + 96], ymm3
    vzeroupper
    xor eax, eax
    ret
    .cfi_endproc
    .size roce_mem_fault_copy_wide, . - roce_mem_fault_copy_wide

    // (to: rdi, byte: sil)
    .type roce_mem_fault_store_byte,@function
roce_mem_fault_store_byte:
    .cfi_startproc
    mov [rdi], sil
    xor eax, eax
    ret
    .cfi_endproc
    .size roce_mem_fault_store_byte, . - roce_mem_fault_store_byte

    // (to: rdi, word: rsi)
    .type roce_mem_fault_store,@function
roce_mem_fault_store:
    .cfi_startproc
    mov [rdi], rsi
    xor eax, eax
    ret
    .cfi_endproc
    .size roce_mem_fault_store, . - roce_mem_fault_store

    // (word: rdi, add: rsi, former value: rdx)
    .type roce_mem_fault_fetch_add,@function
roce_mem_fault_fetch_add:
    .cfi_startproc
    lock xadd [rdi], rsi
    mov [rdx], rsi
    xor eax, eax
    ret
    .cfi_endproc
    .size roce_mem_fault_fetch_add, . - roce_mem_fault_fetch_add

    // (word: rdi, compare: rsi, swap: rdx, former value: rcx)
    .type roce_mem_fault_compare_swap,@function
roce_mem_fault_compare_swap:
    .cfi_startproc
    mov rax, rsi
    lock cmpxchg [rdi], rdx
    mov [rcx], rax
    xor eax, eax
    ret
    .cfi_endproc
    .size roce_mem_fault_compare_swap, . - roce_mem_fault_compare_swap
roce_mem_fault_end:

    .type roce_mem_fault_landing,@function
roce_mem_fault_landing:
    .cfi_startproc
    mov eax, 1
    ret
    .cfi_endproc
    .size roce_mem_fault_landing, . - roce_mem_fault_landing
    .popsection",
);

unsafe extern "C" {
    fn roce_mem_fault_copy(to: *mut u8, from: *const u8, len: usize) -> u32;
    fn roce_mem_fault_copy_wide(to: *mut u8, from: *const u8, len: usize) -> u32;
}

/// Bytes from which on the routine with AVX is faster.
const WIDE: usize = 256;

/// Copies bytes; 0 unless a page of either side can't be accessed.
///
/// # Safety
/// As [`super::read`] and [`super::write`].
#[inline]
pub(in crate::fault) unsafe fn copy(to: *mut u8, from: *const u8, len: usize) -> u32 {
    match len >= WIDE && std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the caller's promise; the processor has AVX.
        true => unsafe { roce_mem_fault_copy_wide(to, from, len) },
        // SAFETY: the caller's promise.
        false => unsafe { roce_mem_fault_copy(to, from, len) },
    }
}

/// Address of the interrupted instruction.
pub(super) fn program_counter(context: &libc::ucontext_t) -> usize {
    context.uc_mcontext.gregs[libc::REG_RIP as usize] as usize
}

/// Has the interrupted thread go on at an address.
pub(super) fn set_program_counter(context: &mut libc::ucontext_t, address: usize) {
    context.uc_mcontext.gregs[libc::REG_RIP as usize] = address as libc::greg_t;
}
