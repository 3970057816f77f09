//! Names of the files that a ring is written to.

use std::{
    ffi::OsString,
    fs::{self, File},
    io::{self, ErrorKind},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use roce_net::process_socket::plain_name;

/// The most files of a name. With that many, none is written until one is removed.
pub const MAX_FILES: u32 = 16;

/// Returns the usual file of a process or task: `ferroce-NAME-PID.pcap` in the folder of temporary files.
pub fn usual_file(name: &str) -> PathBuf {
    let name = plain_name(name).replace(':', "_");
    std::env::temp_dir().join(format!("ferroce-{name}-{}.pcap", std::process::id()))
}

/// Returns the name of the n-th file: `trace.pcap`, `trace-2.pcap`, ….
fn numbered(path: &Path, n: u32) -> PathBuf {
    if n == 1 {
        return path.to_owned();
    }
    let mut name = OsString::from(path.file_stem().unwrap_or_default());
    name.push(format!("-{n}"));
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

/// Writes a new file of this name, or of the next one with a number, which only its owner may read. Nothing that exists is changed, and
/// no symbolic link is followed. A file that can't be written to its end is removed. Returns the path, and the result of `write`.
///
/// # Errors
/// The errors of `open(2)` and `write`, and `AlreadyExists` when there are [`MAX_FILES`].
pub(super) fn write_new<T>(path: &Path, write: impl FnOnce(&File) -> io::Result<T>) -> io::Result<(PathBuf, T)> {
    for path in (1..=MAX_FILES).map(|n| numbered(path, n)) {
        let file = match File::options().write(true).create_new(true).mode(0o600).open(&path) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => continue,
            Err(e) => return Err(named(&path, &e)),
            Ok(file) => file,
        };
        return match write(&file) {
            Ok(written) => Ok((path, written)),
            Err(e) => {
                let _ = fs::remove_file(&path);
                Err(named(&path, &e))
            }
        };
    }
    let text = format!(
        "there are {MAX_FILES} files {} already: remove those that are not needed",
        path.display()
    );
    Err(io::Error::new(ErrorKind::AlreadyExists, text))
}

fn named(path: &Path, e: &io::Error) -> io::Error {
    io::Error::new(e.kind(), format!("{}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        os::unix::fs::{PermissionsExt, symlink},
    };

    use super::*;

    fn write(path: &Path, text: &str) -> io::Result<PathBuf> {
        Ok(write_new(path, |mut file| file.write_all(text.as_bytes()))?.0)
    }

    #[test]
    fn files_are_numbered_and_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.b.pcap");
        assert_eq!(write(&path, "first").unwrap(), path);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        for n in 2..=MAX_FILES {
            assert_eq!(write(&path, "more").unwrap(), dir.path().join(format!("a.b-{n}.pcap")));
        }
        assert_eq!(write(&path, "too many").unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"first");
        fs::remove_file(dir.path().join("a.b-3.pcap")).unwrap();
        assert_eq!(write(&path, "again").unwrap(), dir.path().join("a.b-3.pcap"));
    }

    #[test]
    fn no_link_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        let [path, missing] = ["trace", "missing"].map(|name| dir.path().join(name));
        symlink(&missing, &path).unwrap();
        assert_eq!(write(&path, "x").unwrap(), dir.path().join("trace-2"));
        assert!(!missing.exists());
    }

    #[test]
    fn half_a_file_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace.pcap");
        let full = |_: &File| Err::<(), _>(io::Error::from(ErrorKind::StorageFull));
        let e = write_new(&path, full).unwrap_err();
        assert!(e.to_string().starts_with(path.to_str().unwrap()), "{e}");
        assert!(!path.exists());
    }
}
