//! Copies and atomics for x86-64.

// All routines are leaves that keep the stack pointer, so that the signal handler can leave any of them by `landing`. They
// return 0. Memory of the two sides never overlaps.
routines! {
    // (to: rdi, from: rsi, bytes: rdx)
    copy: "
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
    ret"

    // As the one above, for 256 bytes and more and with AVX. Stores to whole cache lines but for both ends.
    copy_wide: "
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
    ret"

    // (to: rdi, byte: sil)
    store_byte: "
    mov [rdi], sil
    xor eax, eax
    ret"

    // (to: rdi, word: rsi)
    store: "
    mov [rdi], rsi
    xor eax, eax
    ret"

    // (word: rdi, add: rsi, former value: rdx)
    fetch_add: "
    lock xadd [rdi], rsi
    mov [rdx], rsi
    xor eax, eax
    ret"

    // (word: rdi, compare: rsi, swap: rdx, former value: rcx)
    compare_swap: "
    mov rax, rsi
    lock cmpxchg [rdi], rdx
    mov [rcx], rax
    xor eax, eax
    ret"

    => landing "
    mov eax, 1
    ret"
}

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
pub(in crate::mem::fault) unsafe fn copy(to: *mut u8, from: *const u8, len: usize) -> u32 {
    match len >= WIDE && std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the caller's promise; the processor has AVX.
        true => unsafe { roce_mem_fault_copy_wide(to, from, len) },
        // SAFETY: the caller's promise.
        false => unsafe { roce_mem_fault_copy(to, from, len) },
    }
}

/// Address of the interrupted instruction.
pub(super) fn program_counter(context: &mut libc::ucontext_t) -> &mut libc::greg_t {
    &mut context.uc_mcontext.gregs[libc::REG_RIP as usize]
}
