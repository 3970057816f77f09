//! The file of `run --pcap`.

use std::{
    ffi::OsString,
    fs::{self, File, TryLockError},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// Returns the file that the library is to write: the one given, from which an earlier capture is removed, or one of its own if
/// another process writes that now.
///
/// The library takes a file that exists for another process's: the first process under `run` must find none.
pub(super) fn prepare(file: PathBuf) -> OsString {
    let name = file.to_string_lossy();
    // A pipe or `/dev/stdout` is used as it is.
    let earlier = fs::symlink_metadata(&file)
        .is_ok_and(|meta| meta.is_file() && meta.nlink() == 1 && meta.uid() == nix::unistd::geteuid().as_raw());
    if name.contains("%p") || !earlier {
        return file.into();
    }
    if is_written(&file) {
        // The program keeps this process's number.
        let own = format!("{name}.{}", std::process::id());
        eprintln!("ferroce: another process writes {name} now: the capture is {own}");
        return own.into();
    }
    if let Err(e) = fs::remove_file(&file) {
        tracing::warn!("{name}: the earlier capture can't be removed: {e}");
    }
    file.into()
}

/// Whether a process has the file open as its capture, which it locks.
fn is_written(file: &Path) -> bool {
    File::open(file).is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_capture_goes_and_one_in_progress_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("wire.pcap");
        assert_eq!(prepare(path.clone()), path);
        fs::write(&path, "earlier").unwrap();
        assert_eq!(prepare(path.clone()), path);
        assert!(!path.exists());

        fs::write(&path, "now").unwrap();
        let writer = File::open(&path).unwrap();
        writer.lock().unwrap();
        let own = dir.path().join(format!("wire.pcap.{}", std::process::id()));
        assert_eq!(prepare(path.clone()), own);
        assert_eq!(fs::read(&path).unwrap(), b"now");

        let each = dir.path().join("wire-%p.pcap");
        fs::write(&each, "").unwrap();
        assert_eq!(prepare(each.clone()), each);
        assert!(each.exists());
    }
}
