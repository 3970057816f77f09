//! Mounting a tree, and taking it away.

use std::{
    fs::{self, DirBuilder},
    io, mem,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    process::Command,
};

use fuser::{BackgroundSession, Config, MountOption, SessionACL};
use nix::{
    errno::Errno,
    mount::{MntFlags, umount2},
    unistd::geteuid,
};
use rnbd_admin::Registry;
use roce_net::environment;

use crate::{Admission, tree::Tree};

/// Threads that answer what does not wait.
const THREADS: usize = 4;
/// Dead mounts one over the other that are taken away at most.
const MAX_DEAD: usize = 16;
/// The device behind every mount of this kind.
const DEVICE: &str = "/dev/fuse";
/// Program that mounts for users other than root.
const HELPER: &str = "fusermount3";

/// Why a tree is not mounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// There is something mounted that answers.
    #[error("something is mounted there: unmount it, or take another directory")]
    Mounted,
    /// The directory is not empty: its content would be hidden.
    #[error("the directory is not empty")]
    NotEmpty,
    /// It is no directory.
    #[error("it is no directory")]
    NoDirectory,
    /// The kernel's module is not there, or this container does not see the device.
    #[error("there is no /dev/fuse: load the module (`modprobe fuse`), or let the container have the device")]
    NoDevice,
    /// Only root mounts without it, and not in every container.
    #[error("we may not mount by ourselves, and there is no fusermount3: install the package fuse3")]
    NoHelper,
    /// The system does not let us.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A mounted tree, until it is dropped.
pub struct Mounted {
    session: Option<BackgroundSession>,
    dir: PathBuf,
    /// The number of the file system, by which it is told from what somebody else has mounted there since.
    device: u64,
}

impl Mounted {
    /// Mounts a view of this registry. The directory is made if it is missing; what a process that has died has left there is
    /// replaced.
    ///
    /// # Errors
    /// When the directory is in use, or the system does not let us.
    pub fn mount(dir: &Path, registry: Registry, admission: impl Admission + Clone) -> Result<Self, MountError> {
        let dir = prepare(dir)?;
        let device = dir.metadata()?.dev();
        if !Path::new(DEVICE).exists() {
            return Err(MountError::NoDevice);
        }
        let mount = |acl| {
            let tree = Tree::new(registry.with_names(registry.names()), admission.clone())?;
            fuser::spawn_mount(tree, &dir, &options(acl))
        };
        // Others are let in by the admission, if the system lets them as far as that.
        let session = match mount(SessionACL::All) {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied && !geteuid().is_root() => mount(SessionACL::Owner),
            other => other,
        };
        // The device is there. Of a program that is missing the system may also say that a folder on the way to it can't be entered.
        let session = session.map_err(|e| match e.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied if !has_helper() => MountError::NoHelper,
            _ => MountError::Io(e),
        })?;
        let mut this = Self {
            session: Some(session),
            dir,
            device,
        };
        this.device = this.dir.metadata()?.dev();
        Ok(this)
    }

    /// Returns the mount point.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let Some(session) = self.session.take() else { return };
        // Not what somebody else has mounted there since.
        let ours = self.dir.metadata().is_ok_and(|meta| meta.dev() == self.device);
        // Who is in there keeps what he has; the rest ends with this process.
        match ours.then(|| umount2(&self.dir, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW)) {
            // fusermount3 does it.
            Some(Err(Errno::EPERM)) => drop(session),
            Some(Err(e)) => tracing::warn!("{} stays mounted: {e}", self.dir.display()),
            // fuser would unmount what is there now.
            Some(Ok(())) | None => mem::forget(session),
        }
    }
}

fn options(acl: SessionACL) -> Config {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName("ferroce".into()),
        MountOption::Subtype("ferroce".into()),
        MountOption::NoSuid,
        MountOption::NoDev,
        MountOption::NoExec,
    ];
    config.acl = acl;
    config.n_threads = Some(THREADS);
    config
}

/// An empty directory, without what the dead have left there.
fn prepare(dir: &Path) -> Result<PathBuf, MountError> {
    for _ in 0..MAX_DEAD {
        match fs::metadata(dir) {
            Ok(_) => break,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                // Who may use it is decided inside.
                let mode = if geteuid().is_root() { 0o755 } else { 0o700 };
                DirBuilder::new().recursive(true).mode(mode).create(dir)?;
            }
            Err(e) if is_dead(&e) => detach(dir)?,
            Err(e) => return Err(e.into()),
        }
    }
    if !dir.metadata()?.is_dir() {
        return Err(MountError::NoDirectory);
    }
    let dir = dir.canonicalize()?;
    let parent = dir.parent().ok_or(MountError::NotEmpty)?;
    if dir.metadata()?.dev() != parent.metadata()?.dev() {
        return Err(MountError::Mounted);
    }
    match dir.read_dir()?.next() {
        None => Ok(dir),
        Some(_) => Err(MountError::NotEmpty),
    }
}

/// Whether there is what mounts for us.
fn has_helper() -> bool {
    let always = ["/bin", "/sbin"].map(PathBuf::from);
    let mut dirs = environment::search_path().into_iter().chain(always);
    dirs.any(|dir| dir.join(HELPER).is_file())
}

/// Nobody answers there any more.
fn is_dead(e: &io::Error) -> bool {
    [Errno::ENOTCONN, Errno::ECONNABORTED].contains(&Errno::from_raw(e.raw_os_error().unwrap_or_default()))
}

fn detach(dir: &Path) -> Result<(), MountError> {
    match umount2(dir, MntFlags::MNT_DETACH) {
        Ok(()) => Ok(()),
        Err(Errno::EPERM) => {
            let helper = Command::new(HELPER).args(["-u", "-z", "--"]).arg(dir).output();
            let done = helper.map_err(|e| match has_helper() {
                false => MountError::NoHelper,
                true => MountError::Io(e),
            })?;
            match done.status.success() {
                true => Ok(()),
                false => Err(io::Error::other(String::from_utf8_lossy(&done.stderr).trim().to_owned()).into()),
            }
        }
        Err(e) => Err(io::Error::from(e).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_made_and_has_to_be_empty() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a/b");
        assert_eq!(prepare(&dir).unwrap(), dir.canonicalize().unwrap());
        fs::write(dir.join("file"), "").unwrap();
        assert!(matches!(prepare(&dir), Err(MountError::NotEmpty)));
        assert!(matches!(prepare(&dir.join("file")), Err(MountError::NoDirectory)));
        assert!(matches!(prepare(Path::new("/proc")), Err(MountError::Mounted)));
    }
}
