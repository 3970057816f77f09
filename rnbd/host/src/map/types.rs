//! Configuration of a mapping, its events, and why it ends.

use core::time::Duration;
use std::{collections::BTreeSet, io, path::PathBuf};

use rnbd::{
    Errno,
    block::Geometry,
    client::{OnLoss, error::MapError, output::LossCause},
    proto::AccessMode,
};
use roce::reactor::ReactorConfig;
use rtrs::{
    Error, IoError, PathError,
    addr::PathAddr,
    client::{SessionConfig, SessionInfo},
};

use crate::{
    control::MapDevice,
    events::EventSender,
    listen::{Listen, NbdAddress},
    tls::Tls,
};

/// A socket where a virtual machine's front end finds a device as a disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VhostSocket {
    /// The device's name.
    pub device: String,
    /// The socket file.
    pub path: PathBuf,
}

/// Why these can't be the devices of a mapping.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DevicesError {
    /// A mapping without devices.
    #[error("a mapping needs a device")]
    NoDevice,
    /// A session has a device once.
    #[error("device {0:?} is named twice")]
    Twice(String),
    /// A socket for a device that is not mapped.
    #[error("a vhost-user socket for {0:?}, which is no device of the mapping")]
    NoSuch(String),
}

/// How to map.
#[derive(Clone, Debug)]
pub struct MapConfig {
    /// The session.
    pub session: SessionConfig,
    /// The devices, all over this session. NBD clients that name none get the first.
    pub devices: Vec<MapDevice>,
    /// Loss policy: the fate of requests while no path is up.
    pub on_loss: OnLoss,
    /// Listeners for NBD clients.
    pub listen: Vec<Listen>,
    /// TLS for NBD clients, on all listeners.
    pub tls: Option<Tls>,
    /// Sockets for the front ends of virtual machines (vhost-user-blk), made with mode 0600 and removed at the end.
    pub vhost: Vec<VhostSocket>,
    /// NBD clients that have chosen a device; further ones are rejected. A quarter of them is reserved for Unix
    /// sockets if there are TCP sockets, too.
    pub max_clients: usize,
    /// Time for the requests of NBD clients in flight when it stops.
    pub grace: Duration,
    /// The loop.
    pub reactor: ReactorConfig,
}

impl MapConfig {
    /// One device, to read and write, without TLS; 16 NBD clients, 5 s of grace.
    pub fn new(session: SessionConfig, device: impl Into<String>, listen: Vec<Listen>) -> Self {
        Self {
            session,
            devices: vec![MapDevice {
                name: device.into(),
                mode: AccessMode::ReadWrite,
            }],
            on_loss: OnLoss::default(),
            listen,
            tls: None,
            vhost: Vec::new(),
            max_clients: 16,
            grace: Duration::from_secs(5),
            reactor: ReactorConfig::default(),
        }
    }

    /// Whether these can be the devices; the session has a [check](SessionConfig::check) of its own.
    ///
    /// # Errors
    /// Says why not.
    pub fn check_devices(&self) -> Result<(), DevicesError> {
        let mut names = BTreeSet::new();
        let twice = self.devices.iter().find(|device| !names.insert(&device.name));
        match twice {
            Some(device) => Err(DevicesError::Twice(device.name.clone())),
            None if self.devices.is_empty() => Err(DevicesError::NoDevice),
            None => match self.vhost.iter().find(|socket| !names.contains(&socket.device)) {
                Some(socket) => Err(DevicesError::NoSuch(socket.device.clone())),
                None => Ok(()),
            },
        }
    }
}

/// Why a mapping ended without having been asked to, or not in good order.
#[derive(Debug, thiserror::Error)]
pub enum MapFailure {
    /// The session could not be opened.
    #[error(transparent)]
    Session(Error),
    /// A device could not be opened.
    #[error("device {device}: {error}")]
    Map {
        /// Name of the device.
        device: String,
        /// Why.
        error: MapError,
    },
    /// A socket for NBD clients can't be had.
    #[error("{0}")]
    Socket(io::Error),
    /// The session was lost.
    #[error("{0}")]
    Lost(PathError),
    /// The last flush of a device failed.
    #[error("flush of device {device}: {errno}")]
    Flush {
        /// Name of the device.
        device: String,
        /// Why.
        errno: Errno,
    },
    /// A device could not be closed.
    #[error("closing device {device}: {error}")]
    Close {
        /// Name of the device.
        device: String,
        /// Why.
        error: IoError,
    },
    /// The loop could not go on.
    #[error("{0}")]
    Loop(String),
}

impl MapFailure {
    /// The error number that the kernel's client has for it.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Session(e) => Errno::from_wire(e.errno()),
            Self::Map { error, .. } => error.errno(),
            Self::Lost(_) => Errno::ECONNABORTED,
            Self::Flush { errno, .. } => *errno,
            Self::Close { error, .. } => Errno::from_wire(error.errno()),
            Self::Socket(_) | Self::Loop(_) => Errno::EIO,
        }
    }
}

/// Event of a mapping.
#[derive(Debug)]
pub enum MapEvent {
    /// NBD clients can come, to these. It comes once, before any device.
    Listening(Vec<NbdAddress>),
    /// A device is there, and NBD clients can choose it. It comes for each of those that the mapping begins with when all are open,
    /// and for one that is added later when it is.
    Mapped {
        /// The device.
        device: MapDevice,
        /// Size and limits.
        geometry: Geometry,
        /// Limits of the session.
        info: SessionInfo,
    },
    /// Event of a path or a device.
    News(MapNews),
    /// It is over.
    Ended(Result<(), MapFailure>),
}

/// Event of a path or a device.
#[derive(Debug)]
pub enum MapNews {
    /// A path is up; `again` if it has been before.
    PathUp {
        /// The path.
        path: PathAddr,
        /// See above.
        again: bool,
    },
    /// A path is down, and why.
    PathDown {
        /// The path.
        path: PathAddr,
        /// Why.
        why: PathError,
    },
    /// A path has taken over requests of one that is down.
    TookOver {
        /// The path that took them.
        path: PathAddr,
        /// How many.
        requests: u32,
    },
    /// A path could not be connected; there will be other attempts.
    AttemptFailed {
        /// The path.
        path: PathAddr,
        /// Why.
        error: Error,
    },
    /// A path stays down.
    PathClosed {
        /// The path.
        path: PathAddr,
        /// Why.
        why: PathError,
    },
    /// No path is up, and why the last one went.
    Lost(PathError),
    /// A path is up again.
    Back(SessionInfo),
    /// The server has opened a device again.
    Remapped {
        /// Name of the device.
        device: String,
    },
    /// It would not: [`OnLoss`] says whether it is asked again.
    NotRemapped {
        /// Name of the device.
        device: String,
        /// Why.
        error: MapError,
    },
    /// The server may have lost writes that it had acknowledged and no flush had made durable: the next flush of each NBD client and
    /// virtual machine fails.
    WritesLost {
        /// The device.
        device: String,
        /// Requests that wrote.
        writes: u64,
        /// How that is known.
        cause: LossCause,
    },
    /// A device has another size, or other limits.
    Changed {
        /// Name of the device.
        device: String,
        /// Size and limits.
        geometry: Geometry,
    },
    /// A device is gone, as [was asked for](crate::control::MapRequest::Unmap).
    Unmapped {
        /// Name of the device.
        device: String,
        /// Error of the final flush.
        why: Option<String>,
    },
    /// So many events were dropped, as `Mapping::next` was not called.
    EventsLost(u64),
}

/// Sender of the loop's events.
pub(crate) type Tell = EventSender<MapEvent>;
