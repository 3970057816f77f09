//! Mounting and unmounting a tree.

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

use crate::{caller::Admission, tree::Tree};

/// Threads that answer requests; writes have their own.
const THREADS: usize = 4;
/// Stacked dead mounts that are unmounted at most; more are an error.
const MAX_DEAD: usize = 16;
/// The device behind every mount of this kind.
const DEVICE: &str = "/dev/fuse";
/// Program that mounts for users other than root.
const HELPER: &str = "fusermount3";

/// Reason why a tree is not mounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// A live file system is mounted there.
    #[error("something is mounted there: unmount it, or take another directory")]
    Mounted,
    /// The directory is not empty: its content would be hidden.
    #[error("the directory is not empty")]
    NotEmpty,
    /// The path is not a directory.
    #[error("not a directory")]
    NoDirectory,
    /// The kernel's module is not loaded, or the container has no device.
    #[error("there is no /dev/fuse: load the module (`modprobe fuse`), or let the container have the device")]
    NoDevice,
    /// Users other than root, and root in some containers, need it.
    #[error("mounting needs fusermount3 here: install the package fuse3")]
    NoHelper,
    /// System call error.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A mounted tree, until it is dropped.
pub struct Mounted {
    session: Option<BackgroundSession>,
    dir: PathBuf,
    /// Device number of the file system, which distinguishes it from a later mount.
    device: u64,
}

impl Mounted {
    /// Mounts a view of this registry. Creates the directory if it is missing, and replaces the mount of a dead process.
    ///
    /// # Errors
    /// When the directory is in use, and those of mounting.
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
        // The admission checks other users, if the system allows them to get that far.
        let session = match mount(SessionACL::All) {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied && !geteuid().is_root() => mount(SessionACL::Owner),
            other => other,
        };
        // The device exists. A missing program may also be reported as a folder in its path that can't be entered.
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
        // A later mount of somebody else stays.
        let ours = self.dir.metadata().is_ok_and(|meta| meta.dev() == self.device);
        // Detached: open files stay until they are closed, or this process exits.
        match ours.then(|| umount2(&self.dir, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW)) {
            // fuser calls fusermount3.
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

/// Returns an empty directory, after unmounting what dead processes have left there.
fn prepare(dir: &Path) -> Result<PathBuf, MountError> {
    for _ in 0..MAX_DEAD {
        match fs::metadata(dir) {
            Ok(_) => break,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                // The admission decides who may use it.
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

/// Whether fusermount3 is installed.
fn has_helper() -> bool {
    let always = ["/bin", "/sbin"].map(PathBuf::from);
    let mut dirs = environment::search_path().into_iter().chain(always);
    dirs.any(|dir| dir.join(HELPER).is_file())
}

/// Whether the process that served the mount is dead.
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
