//! Block devices of RNBD servers for Rust programs: `ferroce serve`, or the kernel's server.
//!
//! ```
//! # use std::{net::IpAddr, time::Duration};
//! # // A server of an image of 1 MiB for this example.
//! # fn serve() -> Result<(rnbd_host::serve::Serving, tempfile::NamedTempFile, IpAddr), Box<dyn std::error::Error>> {
//! #     let image = tempfile::NamedTempFile::new()?;
//! #     image.as_file().set_len(1 << 20)?;
//! #     let addr = ferroce_loopback::address().into();
//! #     let spec = format!("disk={}", image.path().display()).parse()?;
//! #     let config = rnbd_host::serve::ServeConfig {
//! #         rtrs: rtrs::server::ServerConfig { addr, ..Default::default() },
//! #         limits: Default::default(),
//! #         exports: rnbd_disk::Exports::new([spec], None, rnbd_disk::Caching::PageCache)?,
//! #         disk: Default::default(),
//! #         reactor: Default::default(),
//! #         grace: Duration::from_secs(5),
//! #     };
//! #     let device = roce::LocalDevice::open(&[roce::DeviceConfig::new(addr)])?;
//! #     Ok((rnbd_host::serve::Serving::start(device, config)?, image, addr))
//! # }
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (mut server, _image, addr) = serve()?;
//! # let (done, finished) = std::sync::mpsc::channel::<()>();
//! # let files = std::thread::spawn(move || while !matches!(finished.try_recv(), Err(std::sync::mpsc::TryRecvError::Disconnected)) {
//! #     server.next(Duration::from_millis(5));
//! # });
//! use rnbd_client::{Disk, PathAddr};
//!
//! let path: PathAddr = "192.0.2.7".parse()?;
//! # let path: PathAddr = format!("{},{addr}", ferroce_loopback::address()).parse()?;
//! let disk = Disk::open(path, "backup", "disk")?;
//! println!("{} bytes in blocks of {}", disk.size(), disk.geometry().logical_block_size);
//!
//! disk.write_at(&[7; 4096], 8192)?;
//! disk.flush()?;
//! let mut data = [0; 4096];
//! disk.read_at(&mut data, 8192)?;
//! assert_eq!(data, [7; 4096]);
//!
//! disk.discard(8192, 4096)?;
//! disk.close()?;
//! # drop(done);
//! # files.join().expect("no panic");
//! # Ok(())
//! # }
//! ```
//!
//! There are three ways to one: [`Disk`] blocks the calling thread, and any number of threads may call; [`AsyncDisk`] has futures for any
//! runtime; both have a thread that does the I/O. [`DiskLoop`] has none: a loop of the caller's drives it by one descriptor.
//! [`DiskOptions`] has what a call of `open` leaves out: further paths, access, what becomes of operations while no path is up.
//!
//! Log events of paths go to [tracing](https://docs.rs/tracing).

mod asynchronous;
mod disk;
mod error;
mod in_loop;
mod options;
mod request;
mod service;

pub use asynchronous::AsyncDisk;
pub use disk::Disk;
pub use error::OpenError;
pub use in_loop::{DiskEvent, DiskLoop};
pub use options::DiskOptions;
pub use request::Request;
pub use rnbd::{Errno, block::Geometry, client::OnLoss};
pub use roce::{Mtu, SpinMode};
pub use rtrs::addr::PathAddr;
