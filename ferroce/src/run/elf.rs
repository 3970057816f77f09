//! Programs into which no library can be preloaded.

use std::{
    ffi::OsStr,
    fs::File,
    io::Read,
    os::unix::fs::{FileExt, MetadataExt},
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
/// `PT_LOAD`, `PT_DYNAMIC`.
const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
/// `DT_STRTAB`, `DT_STRSZ`.
const DT_STRTAB: u64 = 5;
const DT_STRSZ: u64 = 10;
/// Bytes of names that are looked through at most.
const MAX_STRINGS: u64 = 64 << 20;
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

/// Functions by which programs call the runtime of a sanitizer that must be loaded before all other libraries.
const SANITIZERS: [(&str, &str); 3] = [
    ("__asan_init", "AddressSanitizer"),
    ("__hwasan_init", "HWAddressSanitizer"),
    ("__tsan_init", "ThreadSanitizer"),
];

/// The sanitizer that a program is built with, if any.
pub(super) fn sanitizer(path: &Path) -> Option<&'static str> {
    let file = File::open(path).ok()?;
    let names = dynamic_strings(&file)?;
    let has = |name: &str| names.split(|b| *b == 0).any(|other| other == name.as_bytes());
    SANITIZERS.iter().find(|(init, _)| has(init)).map(|(_, name)| *name)
}

/// Whether a library's file is the runtime of such a sanitizer.
pub(super) fn is_sanitizer_runtime(library: &OsStr) -> bool {
    let name = Path::new(library)
        .file_name()
        .map(OsStr::as_encoded_bytes)
        .unwrap_or_default();
    let runtimes = [
        "libasan.",
        "libhwasan.",
        "libtsan.",
        "libclang_rt.asan",
        "libclang_rt.hwasan",
        "libclang_rt.tsan",
    ];
    runtimes.iter().any(|runtime| name.starts_with(runtime.as_bytes()))
}

/// The names of a 64-bit program's dynamic symbols (its `DT_STRTAB`).
fn dynamic_strings(file: &File) -> Option<Vec<u8>> {
    let read = |at: u64, len: u64| {
        let mut out = vec![0; usize::try_from(len.min(MAX_STRINGS)).ok()?];
        file.read_exact_at(&mut out, at).ok().map(|()| out)
    };
    let head = read(0, 64).filter(|head| head.starts_with(MAGIC) && head[4] == CLASS)?;
    let number = |from: &[u8], at: usize| Some(u64::from_ne_bytes(from.get(at..at + 8)?.try_into().ok()?));
    let half = |at: usize| u64::from(u16::from_ne_bytes([head[at], head[at + 1]]));
    let headers = read(number(&head, 32)?, half(54) * half(56))?;
    let headers: Vec<_> = headers.chunks_exact(usize::try_from(half(54).max(1)).ok()?).collect();
    let kind = |header: &[u8]| Some(u32::from_ne_bytes(header.get(..4)?.try_into().ok()?));
    // Offset in the file, address and length of a segment.
    let segment = |header: &[u8]| Some((number(header, 8)?, number(header, 16)?, number(header, 32)?));
    let (at, _, len) = headers
        .iter()
        .find(|h| kind(h) == Some(PT_DYNAMIC))
        .and_then(|h| segment(h))?;
    let entries = read(at, len)?;
    let value = |tag: u64| {
        let entry = entries.chunks_exact(16).find(|entry| number(entry, 0) == Some(tag))?;
        number(entry, 8)
    };
    let (address, len) = (value(DT_STRTAB)?, value(DT_STRSZ)?);
    let loads = headers
        .iter()
        .filter(|h| kind(h) == Some(PT_LOAD))
        .filter_map(|h| segment(h));
    let mut offsets = loads.filter_map(|(at, start, size)| {
        let into = address.checked_sub(start).filter(|into| *into < size)?;
        at.checked_add(into)
    });
    read(offsets.next()?, len)
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
    fn sanitizers_are_found_in_programs_and_by_their_runtimes() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("main.c");
        std::fs::write(&source, "int main(void) { return 0; }\n").unwrap();
        let build = |options: &[&str]| {
            let program = dir.path().join("program");
            let mut cc = std::process::Command::new("cc");
            let built = cc.args(options).arg("-o").arg(&program).arg(&source).status();
            assert!(built.unwrap().success(), "cc {options:?}");
            sanitizer(&program)
        };
        assert_eq!(build(&[]), None);
        assert_eq!(build(&["-fsanitize=address"]), Some("AddressSanitizer"));
        assert_eq!(build(&["-fsanitize=thread"]), Some("ThreadSanitizer"));
        assert_eq!(sanitizer(&std::env::current_exe().unwrap()), None);
        assert_eq!(sanitizer(&source), None);
        let runtime = |name: &str| is_sanitizer_runtime(OsStr::new(name));
        assert!(runtime("/usr/lib/libasan.so.8") && runtime("libclang_rt.tsan-x86_64.so"));
        assert!(!runtime("/usr/lib/libasangria.so") && !runtime("libubsan.so.1"));
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
