//! Libraries that programs and libraries need, as `readelf` of binutils reports.

use std::{collections::BTreeSet, path::Path, process::Command};

use crate::{Result, process};

/// The libraries that a file loads.
pub(crate) fn needed(path: &Path) -> Result<BTreeSet<String>> {
    run("-d", path).map(|text| libraries(&text))
}

/// The newest version of glibc whose symbols a file uses.
pub(crate) fn glibc(path: &Path) -> Result<(u32, u32)> {
    run("-V", path).map(|text| newest_glibc(&text))
}

fn run(option: &str, path: &Path) -> Result<String> {
    let mut readelf = Command::new("readelf");
    let out = process::capture("readelf", readelf.arg("-W").arg(option).arg(path))?;
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// The libraries in what `readelf -d` prints.
fn libraries(text: &str) -> BTreeSet<String> {
    let of = |line: &str| {
        let (_, rest) = line.split_once("(NEEDED)")?;
        let (name, _) = rest.split_once('[')?.1.split_once(']')?;
        Some(name.to_owned())
    };
    text.lines().filter_map(of).collect()
}

/// The newest version of glibc's symbols in what `readelf -V` prints.
fn newest_glibc(text: &str) -> (u32, u32) {
    let of = |rest: &str| {
        let version: String = rest.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
        let mut parts = version.split('.').map(str::parse);
        Some((parts.next()?.ok()?, parts.next()?.ok()?))
    };
    text.split("GLIBC_").skip(1).filter_map(of).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_and_versions_are_read() {
        let text = " 0x0000000000000001 (NEEDED)             Shared library: [libibverbs.so.1]\n\
                    0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]\n 0x000000000000000c (INIT) 0x1000\n";
        assert_eq!(
            libraries(text),
            ["libc.so.6".to_owned(), "libibverbs.so.1".to_owned()].into()
        );
        let text = "0x00e0:   Name: GLIBC_2.2.5  Flags: none\n0x0100:   Name: GLIBC_2.34  Flags: none Version: 2\nGLIBC_PRIVATE";
        assert_eq!(newest_glibc(text), (2, 34));
        assert_eq!(newest_glibc("nothing"), (0, 0));
    }
}
