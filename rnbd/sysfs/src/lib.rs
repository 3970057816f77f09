//! The attributes of running mappings and servers as a FUSE file system: a view of [`Registry`] with the paths, texts, modes and error
//! numbers of Linux's sysfs, for programs and scripts that read and write files.
//!
//! As in sysfs, files are 4096 bytes long whatever they say, a read that begins at the start of a file has a text made for it, one
//! `write(2)` is one order whose `errno` is the order's, and nothing can be made, removed or renamed. Nothing is cached by the kernel,
//! so that what has changed is seen. A write waits for as long as what it asks for takes; who is interrupted meanwhile has EINTR, and
//! what was asked for goes on.

mod caller;
mod handles;
mod inodes;
mod mount;
mod quota;
mod tree;
mod writes;

pub use caller::Caller;
pub use mount::{MountError, Mounted};
pub use rnbd_admin::Registry;

/// Who may use a tree.
pub trait Admission: Send + Sync + 'static {
    /// Whether this caller may see and change everything; others get EACCES.
    fn admits(&self, caller: &Caller) -> bool;

    /// Whether this user, of those, gets what is reserved: root and the owner.
    fn trusts(&self, user: u32) -> bool;

    /// Group of the files.
    fn group(&self) -> u32;
}
