//! Programs into which no library can be preloaded.

use std::{
    ffi::OsStr,
    fs::File,
    io::Read,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use super::is_program;

/// Bytes from the beginning that have the program headers in every program that linkers make.
const HEAD: u64 = 64 << 10;
const MAGIC: &[u8] = b"\x7fELF";
/// `ELFCLASS64`, `ELFCLASS32`.
const CLASS: u8 = if cfg!(target_pointer_width = "64") { 2 } else { 1 };
/// `PT_INTERP`: the program asks for a dynamic linker.
const PT_INTERP: u32 = 3;
const SETUID: u32 = 0o4000;
const SETGID: u32 = 0o2000;

/// The file of a program, as the shell would find it.
pub(super) fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_encoded_bytes().contains(&b'/') {
        return Some(program.into());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|dir| dir.join(program))
        .find(|p| is_program(p))
}

/// Refuses programs that would run without our library, and then find no device.
pub(super) fn check(path: &Path) -> Result<(), String> {
    let name = path.display();
    let Ok(meta) = std::fs::metadata(path) else {
        return Ok(());
    };
    let foreign = meta.uid() != nix::unistd::geteuid().as_raw();
    if meta.mode() & (SETUID | SETGID) != 0 && foreign {
        return Err(format!(
            "{name} runs with another user's rights (setuid or setgid): the dynamic linker preloads nothing there; run a \
             copy of it (`cp`)"
        ));
    }
    let mut head = Vec::new();
    let read = File::open(path).and_then(|f| f.take(HEAD).read_to_end(&mut head));
    match read.is_ok() && head.starts_with(MAGIC) {
        // A script; its interpreter is what matters.
        false => Ok(()),
        true if head.get(4) != Some(&CLASS) => Err(format!(
            "{name} is a program of another word size than ferroce's library"
        )),
        true if is_static(&head) == Some(true) => Err(format!(
            "{name} is linked statically: no library can be preloaded; it needs the one that uses libibverbs.so.1"
        )),
        true => Ok(()),
    }
}

/// Whether a 64-bit program asks for no dynamic linker; `None` when its headers are elsewhere.
fn is_static(head: &[u8]) -> Option<bool> {
    let bytes = |at: usize, len: usize| head.get(at..at.checked_add(len)?);
    let half = |at| Some(u16::from_ne_bytes(bytes(at, 2)?.try_into().ok()?));
    let offset = usize::try_from(u64::from_ne_bytes(bytes(32, 8)?.try_into().ok()?)).ok()?;
    let (size, count) = (usize::from(half(54)?), usize::from(half(56)?));
    for i in 0..count {
        let at = offset.checked_add(i.checked_mul(size)?)?;
        if u32::from_ne_bytes(bytes(at, 4)?.try_into().ok()?) == PT_INTERP {
            return Some(false);
        }
    }
    Some(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_programs_and_scripts_pass() {
        let own = std::env::current_exe().unwrap();
        assert_eq!(check(&own), Ok(()));
        assert_eq!(check(Path::new("/nonexistent")), Ok(()), "exec says it better");
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("script");
        std::fs::write(&script, "#!/bin/sh\n").unwrap();
        assert_eq!(check(&script), Ok(()));
        assert!(find(OsStr::new("sh")).is_some());
        assert!(find(OsStr::new("no such program")).is_none());
    }

    #[test]
    fn static_and_foreign_programs_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("program");
        let mut bytes = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        // No program headers: nothing asks for a linker.
        bytes[56..58].fill(0);
        std::fs::write(&file, &bytes).unwrap();
        assert!(check(&file).unwrap_err().contains("statically"));
        bytes[4] ^= 3;
        std::fs::write(&file, &bytes).unwrap();
        assert!(check(&file).unwrap_err().contains("word size"));
        // Whatever the headers say, it is not looked for outside of the file.
        bytes[4] ^= 3;
        bytes[32..40].fill(0xff);
        bytes[54..58].fill(0xff);
        std::fs::write(&file, &bytes).unwrap();
        assert_eq!(check(&file), Ok(()));
    }
}
