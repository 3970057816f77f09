//! Block devices for tests that may set up loop devices, and what of their data is on them.

use std::{
    fs::{self, File},
    io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use tempfile::TempDir;

/// Bytes of a [`Loop`].
const LEN: usize = 8 << 20;
/// What must have happened by then, or it will not.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A loop device of 8 MiB full of sevens, until it is dropped.
#[derive(Debug)]
pub struct Loop {
    path: PathBuf,
    dir: TempDir,
}

impl Loop {
    /// Sets one up, with these options of `losetup` besides.
    ///
    /// # Panics
    /// When that is not allowed, or `losetup` is missing.
    pub fn new(options: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a folder for the image");
        let image = dir.path().join("i");
        fs::write(&image, vec![7; LEN]).expect("an image");
        let until = Instant::now() + TIMEOUT;
        loop {
            let out = Command::new("losetup")
                .args(["--find", "--show"])
                .args(options)
                .arg(&image)
                .output()
                .expect("losetup");
            if out.status.success() {
                let path = String::from_utf8_lossy(&out.stdout).trim().into();
                return Self { path, dir };
            }
            // Finding a free one and taking it are two steps: another test may have been between them.
            let said = String::from_utf8_lossy(&out.stderr);
            assert!(said.contains("busy") && Instant::now() < until, "losetup: {said}");
        }
    }

    /// Gives it another size, in bytes, under those who have it open.
    ///
    /// # Panics
    /// When the system refuses.
    pub fn resize(&self, bytes: u64) {
        let image = File::options().write(true).open(self.dir.path().join("i"));
        image.and_then(|image| image.set_len(bytes)).expect("another size");
        let told = Command::new("losetup").arg("-c").arg(&self.path).status();
        assert!(told.expect("losetup").success());
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.path).status();
    }
}

/// Pages of a file that are not on its device yet (`cachestat`, Linux 6.5).
///
/// # Panics
/// When the system does not know the call.
pub fn dirty_pages(path: &Path) -> u64 {
    const CACHESTAT: libc::c_long = 451;
    let file = File::open(path).expect("the file");
    let (range, mut stat) = ([0u64, 0], [0u64; 5]);
    // SAFETY: the call reads two numbers and writes five.
    let r = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), stat.as_mut_ptr(), 0) };
    assert_eq!(r, 0, "cachestat: {}", io::Error::last_os_error());
    stat[1] + stat[2]
}

/// Writes until some of it is seen in memory only: the system may write pages back at any moment.
///
/// # Panics
/// When it never is; as [`dirty_pages`].
pub fn stays_in_memory(path: &Path, mut write: impl FnMut()) {
    let seen = (0..10).any(|_| {
        write();
        dirty_pages(path) > 0
    });
    assert!(seen, "a plain write does not stay in memory");
}
