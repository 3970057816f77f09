//! Copies and atomics for 64-bit ARM.

// As on x86-64: leaves that keep the stack pointer and the link register, and return 0.
routines! {
    // (to: x0, from: x1, bytes: x2)
    copy: "
    hint #34
    add x3, x1, x2
    add x4, x0, x2
    cmp x2, #16
    b.lo 3f
    cmp x2, #32
    b.hi 2f
    ldr q0, [x1]
    ldur q1, [x3, #-16]
    str q0, [x0]
    stur q1, [x4, #-16]
    mov w0, #0
    ret
2:  cmp x2, #64
    b.hi 4f
    ldp q0, q1, [x1]
    ldp q2, q3, [x3, #-32]
    stp q0, q1, [x0]
    stp q2, q3, [x4, #-32]
    mov w0, #0
    ret
4:  sub x3, x3, #64
    sub x4, x4, #64
5:  ldp q0, q1, [x1]
    ldp q2, q3, [x1, #32]
    stp q0, q1, [x0]
    stp q2, q3, [x0, #32]
    add x1, x1, #64
    add x0, x0, #64
    cmp x1, x3
    b.lo 5b
    ldp q0, q1, [x3]
    ldp q2, q3, [x3, #32]
    stp q0, q1, [x4]
    stp q2, q3, [x4, #32]
    mov w0, #0
    ret
3:  tbz x2, #3, 6f
    ldr x5, [x1]
    ldur x6, [x3, #-8]
    str x5, [x0]
    stur x6, [x4, #-8]
    mov w0, #0
    ret
6:  tbz x2, #2, 7f
    ldr w5, [x1]
    ldur w6, [x3, #-4]
    str w5, [x0]
    stur w6, [x4, #-4]
    mov w0, #0
    ret
7:  cbz x2, 8f
    ldrb w5, [x1]
    ldurb w6, [x3, #-1]
    strb w5, [x0]
    sturb w6, [x4, #-1]
    tbz x2, #1, 8f
    ldrb w5, [x1, #1]
    strb w5, [x0, #1]
8:  mov w0, #0
    ret"

    // (to: x0, byte: w1)
    store_byte: "
    hint #34
    stlrb w1, [x0]
    mov w0, #0
    ret"

    // (to: x0, word: x1)
    store: "
    hint #34
    stlr x1, [x0]
    mov w0, #0
    ret"

    // (word: x0, add: x1, former value: x2)
    fetch_add: "
    hint #34
2:  ldaxr x3, [x0]
    add x4, x3, x1
    stlxr w5, x4, [x0]
    cbnz w5, 2b
    str x3, [x2]
    mov w0, #0
    ret"

    // (word: x0, compare: x1, swap: x2, former value: x3)
    compare_swap: "
    hint #34
    // Stores the former value where it differs: a page that can't be written faults either way, as on x86-64.
2:  ldaxr x4, [x0]
    cmp x4, x1
    csel x6, x2, x4, eq
    stlxr w5, x6, [x0]
    cbnz w5, 2b
    str x4, [x3]
    mov w0, #0
    ret"

    => landing "
    mov w0, #1
    ret"
}

unsafe extern "C" {
    fn roce_mem_fault_copy(to: *mut u8, from: *const u8, len: usize) -> u32;
}

/// Copies bytes; 0 unless a page of either side can't be accessed.
///
/// # Safety
/// As [`super::read`] and [`super::write`].
#[inline]
pub(in crate::mem::fault) unsafe fn copy(to: *mut u8, from: *const u8, len: usize) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { roce_mem_fault_copy(to, from, len) }
}

/// Address of the interrupted instruction.
pub(super) fn program_counter(context: &mut libc::ucontext_t) -> &mut u64 {
    &mut context.uc_mcontext.pc
}
