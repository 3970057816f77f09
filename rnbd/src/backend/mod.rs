//! Where a server's bytes are: image files and block devices, the exports that name them, and the threads that do the
//! I/O. Nothing is memory-mapped: a file that shrinks gives errors, not signals.

mod device;
mod exports;
mod image;
mod lookup;
mod pool;
mod throttle;

pub use device::{LocalBuffer, LocalDevice};
pub(crate) use exports::ExportId;
pub use exports::{ExportSpec, Exports, FolderSpec, OpenExport};
pub use image::Image;
pub use pool::Pool;
pub(crate) use throttle::Throttle;
