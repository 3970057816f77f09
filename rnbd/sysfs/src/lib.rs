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
mod tree;
mod writes;

pub use caller::{Admission, Caller};
pub use mount::{MountError, Mounted};
pub use rnbd_admin::Registry;
