//! Commands of other threads to the loop of a mapping.

use std::{io, net::IpAddr, os::unix::net::UnixStream, sync::mpsc::Sender};

use roce::NewDevice;

use crate::control::{MapAnswer, MapRequest, Reply};

/// Whether a loop has taken a device, which else comes back.
pub(crate) type Taken = Result<(), (io::Error, Box<NewDevice>)>;

/// Command of another thread.
pub(crate) enum Command {
    /// Request while the mapping runs.
    Control(MapRequest, Reply<MapAnswer>),
    /// Connects an NBD client of this process.
    Connect(UnixStream),
    /// Ends the mapping in an orderly way.
    Stop,
    /// An address of ours has no link any more.
    LinkDown(IpAddr),
    /// There is one more of our addresses.
    Attach(Box<NewDevice>, Sender<Taken>),
    #[cfg(test)]
    Panic,
}
