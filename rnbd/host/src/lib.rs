//! RNBD on one thread, or on several: a loop that drives RTRS, RNBD, disks and NBD sockets, and what the rest of a program has of it.
//!
//! - [`serve`]: a server of exports;
//! - [`admission`]: admission control of such a server, shared by its loops;
//! - [`map`]: devices of a server as exports at NBD sockets;
//! - [`listen`], [`activation`], [`tls`]: where NBD clients come in, the sockets that a program is started with, and what they are
//!   encrypted with;
//! - [`control`]: what can be asked of either while it runs.
//!
//! Each starts a thread for the loop, which does all I/O, on a [`LocalDevice`](roce::LocalDevice), or one for each shard of a device. The
//! thread that has the handle reads events by [`serve::Serving::next`] or [`map::Mapping::next`]; events that it does not read in time are
//! dropped and counted. What may wait for the system, such as opening and closing files and allocating memory for sessions, is done by
//! further threads.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//!
//! use rnbd_disk::{Caching, DiskConfig, Exports};
//! use rnbd_host::serve::{ServeConfig, ServeEvent, Serving};
//! use roce::{DeviceConfig, LocalDevice};
//!
//! let addr = "192.0.2.7".parse()?;
//! let device = LocalDevice::open(&[DeviceConfig::new(addr)])?;
//! let config = ServeConfig {
//!     rtrs: rtrs::server::ServerConfig { addr, ..Default::default() },
//!     limits: Default::default(),
//!     exports: Exports::new(["disk=/images/disk.img".parse()?], None, Caching::PageCache)?,
//!     disk: DiskConfig::default(),
//!     reactor: Default::default(),
//!     grace: Duration::from_secs(30),
//! };
//! let mut server = Serving::start(device, config)?;
//! loop {
//!     match server.next(Duration::from_secs(1)) {
//!         Some(ServeEvent::SessionOpened(session)) => println!("{} is here", session.name),
//!         Some(ServeEvent::Stopped(why)) => break println!("over: {why:?}"),
//!         _ => {}
//!     }
//! }
//! # Ok(())
//! # }
//! ```

mod accept;
pub mod activation;
mod addresses;
pub mod admission;
pub mod control;
mod events;
mod front;
mod iov;
mod jobs;
mod links;
pub mod listen;
mod loops;
pub mod map;
mod mapper;
mod nbd;
mod rng;
pub mod serve;
mod server;
mod stats;
pub mod tls;
mod vhost;

pub use roce::reactor::LoopStats;
#[doc(hidden)]
pub use vhost::fuzz;
