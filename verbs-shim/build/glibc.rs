//! Old symbol versions, so that the library loads with older C libraries than the one that it is linked with.
//!
//! glibc 2.34 took the functions of libpthread and libdl into libc, and 2.33 those of `stat`; what is linked with it asks
//! for them by these versions. The same functions are there by their old versions, in every glibc, but linkers don't take
//! them from a newer one. So they find libraries here that have nothing but the old names.

use std::{fmt::Write as _, path::Path};

/// The old version of all but [`LATER`].
const OLD: &str = "GLIBC_2.2.5";
/// A function of a later version.
const LATER: (&str, &str) = ("pthread_setname_np", "GLIBC_2.12");
/// Libraries that had functions which libc has today: name that a linker looks for, SONAME, and functions.
const MOVED: [(&str, &str, &str); 2] = [
    (
        "libpthread.so",
        "libpthread.so.0",
        "_pthread_cleanup_pop _pthread_cleanup_push pthread_attr_getguardsize pthread_attr_getstack pthread_attr_setstacksize \
         pthread_create pthread_detach pthread_getattr_np pthread_getspecific pthread_join pthread_key_create \
         pthread_key_delete pthread_kill pthread_once pthread_setname_np pthread_setspecific pthread_sigmask pthread_testcancel",
    ),
    ("libdl.so", "libdl.so.2", "dladdr dlclose dlerror dlopen dlsym"),
];
/// Functions of the library's own: `fstat`, which glibc before 2.33 has for the linker alone (the kernel's structure is the
/// C library's on 64-bit machines), and, absent, what Rust's library does without where a C library lacks it.
const OWN: &str = "\
.section .note.GNU-stack,\"\",%progbits
.text
.globl fstat, fstat64
.hidden fstat, fstat64
.type fstat,%function
.type fstat64,%function
fstat:
fstat64:
\t.cfi_startproc
\tmovl $5, %eax
\tsyscall
\tcmpq $-4095, %rax
\tjae 1f
\tret
1:\tnegl %eax
\tpushq %rbx
\t.cfi_adjust_cfa_offset 8
\tmovl %eax, %ebx
\tcall __errno_location@PLT
\tmovl %ebx, (%rax)
\tmovl $-1, %eax
\tpopq %rbx
\t.cfi_adjust_cfa_offset -8
\tret
\t.cfi_endproc
.globl gettid, posix_spawn_file_actions_addchdir_np
.hidden gettid, posix_spawn_file_actions_addchdir_np
.set gettid, 0
.set posix_spawn_file_actions_addchdir_np, 0
";

/// Makes what the library is to be linked with, and returns the linker's arguments for that.
pub(crate) fn arguments(out: &Path) -> super::Result<Vec<String>> {
    let dir = out.join("glibc");
    std::fs::create_dir_all(&dir).map_err(super::failed(&dir))?;
    for (file, soname, functions) in MOVED {
        let mut text = String::from(".section .note.GNU-stack,\"\",%progbits\n.text\n");
        let mut map = String::new();
        let mut old = Vec::new();
        for function in functions.split_whitespace() {
            let _ = write!(
                text,
                ".globl {function}\n.type {function},%function\n{function}:\n\tret\n"
            );
            match function == LATER.0 {
                true => map = format!("{} {{ global: {function}; }} {OLD};\n", LATER.1),
                false => old.push(function),
            }
        }
        let (source, script) = (dir.join(file).with_extension("s"), dir.join(file).with_extension("map"));
        super::put(&source, &text)?;
        super::put(&script, &format!("{OLD} {{ global: {}; }};\n{map}", old.join("; ")))?;
        super::cc(&[
            source.as_ref(),
            format!("-Wl,-soname,{soname}").as_ref(),
            format!("-Wl,--version-script={}", script.display()).as_ref(),
            "-o".as_ref(),
            dir.join(file).as_ref(),
        ])?;
    }
    let (source, object) = (dir.join("own.s"), dir.join("own.o"));
    super::put(&source, OWN)?;
    super::compile(&source, &object)?;
    Ok(vec![format!("-L{}", dir.display()), object.display().to_string()])
}
