//! The attributes of running mappings and servers as a FUSE file system: a view of [`Registry`] with the paths, texts, modes and error
//! numbers of Linux's sysfs, for programs and scripts that read and write files.
//!
//! As in sysfs, files are 4096 bytes long whatever they say, a read from the start of a file makes its text, each
//! `write(2)` is one request and returns its `errno`, and nothing can be made, removed or renamed. Nothing is cached by the kernel,
//! so that changes are seen. A write returns when its request is done; a caller that is interrupted before gets EINTR, and the request
//! goes on.

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

/// Access control of a tree.
pub trait Admission: Send + Sync + 'static {
    /// Whether this caller may see and change everything; others get EACCES.
    fn admits(&self, caller: &Caller) -> bool;

    /// Whether this user, of those, gets what is reserved: root and the owner.
    fn trusts(&self, user: u32) -> bool;

    /// Group of the files.
    fn group(&self) -> u32;
}
