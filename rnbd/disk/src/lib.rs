//! The disks of an RNBD server: image files and block devices, the exports that name them, and the I/O.
//!
//! - [`Exports`]: which names are offered, and who has them open for writing. Opening and closing wait for the disk, so
//!   a loop has another thread do them.
//! - [`Image`]: an open file or device. Nothing is memory-mapped: a file that shrinks gives errors, not signals.
//! - [`Disk`]: the open devices of one loop. Operations of many sessions are started in a fair order, each the [`Way`] that
//!   its file needs: file systems in memory by system calls in the loop, others by io_uring, and by a few threads where
//!   there is none. The server submits operations (`rnbd::server::disk::Disks`), the loop calls [`Disk::pump`] once a round, and watches
//!   [`Disk::descriptor`].
//!
//! Between the two halves is the operation as a row of system calls (`op.rs`), which says what is checked, what follows
//! of each result, and what is remembered of a file: the same whichever way the calls are made.

mod boot;
mod disk;
mod exports;
mod extents;
mod failures;
mod file_system;
mod geometry;
mod image;
mod lookup;
mod op;
mod pool;
mod probe;
mod registered;
mod ring;
mod sys;
mod throttle;
mod workers;
mod writers;

pub use boot::Boot;
pub use disk::{Budget, Disk, DiskConfig, DiskCounters};
pub use exports::{Closing, ExportId, ExportSpec, Exports, FolderSpec, Found, OpenError, OpenExport};
pub use file_system::FileSystem;
pub use image::{Caching, Image};
pub use op::Part;
pub use probe::{Way, Ways};
pub use ring::Ring;
pub use workers::{Work, Workers};
