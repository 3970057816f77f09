//! Libraries that stand in front of libc for a program under test.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Compiles C source to a shared library in a folder, for `LD_PRELOAD`.
///
/// # Panics
/// When there is no C compiler, or the source is wrong.
#[must_use]
pub fn compile(dir: &Path, source: &str) -> PathBuf {
    let (file, library) = (dir.join("preload.c"), dir.join("preload.so"));
    fs::write(&file, source).expect("the folder is writable");
    let compiled = Command::new("cc")
        .args(["-O2", "-shared", "-fPIC", "-o"])
        .args([&library, &file])
        .status();
    assert!(compiled.is_ok_and(|status| status.success()), "a C compiler");
    library
}
