//! Steering a mapping.

use core::time::Duration;
use std::sync::Arc;

use rnbd::{
    Errno,
    block::Geometry,
    client::{OnLoss, device::DeviceCounters, state::DeviceState},
    proto::AccessMode,
};
use roce::iface;
use roce_reactor::Handle;
use rtrs::{
    addr::PathAddr,
    client::{PathCommand, PathCounters, PathStatus, Policy, SessionInfo},
};

use super::{Pending, Refused, answer};
use crate::{
    addresses::Addresses,
    map::{MapDevice, MapStats},
    mapper::{Command, HOME},
};

/// Request to a mapping. Paths go by their addresses; one without ours is the path to that server, if there is only one.
/// The port counts only if one of several paths between the same addresses has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MapRequest {
    /// Connects one more path. From an address of ours that the mapping has no port of, that is opened first, for all of its loops; it
    /// stays open as long as the mapping is there. Refused with EADDRNOTAVAIL when that is no address of this host, with EADDRINUSE when
    /// somebody has its port, with ETIMEDOUT when the broker does not answer; and with the errno of connecting the path (the kernel's
    /// `add_path`): then it is gone again.
    AddPath(PathAddr),
    /// Takes a path off the list, the last one too (`remove_path`).
    RemovePath(PathAddr),
    /// Takes a path down, until it is asked for (`disconnect`).
    Disconnect(PathAddr),
    /// Connects a path anew, at once (`reconnect`). Refused with EBUSY while it is being connected or closed, and with ENOTCONN when
    /// the attempt failed; then others follow.
    Reconnect(PathAddr),
    /// Sets counters of a path to zero.
    ResetPathStats(PathAddr, PathCounters),
    /// How paths are chosen from the next request on (`mpath_policy`).
    SetPolicy(Policy),
    /// How a lost path is connected again, from its next loss or failure on (`max_reconnect_attempts`).
    SetReconnects {
        /// Attempts at most, or [`FOREVER`](rtrs::client::SessionConfig::FOREVER).
        attempts: u32,
        /// Time before each.
        delay: Duration,
    },
    /// Sets the loss policy of all devices, those included that are mapped later.
    SetOnLoss(OnLoss),
    /// Opens one more device over the session (`map_device`). Refused with EEXIST when one of this name is there, and with the errno
    /// of opening it: then it is gone again.
    Map(MapDevice),
    /// A device's size (`resize`); refused with ENOENT while it is not mapped.
    Resize {
        /// Name of the device.
        device: String,
        /// In sectors of 512 bytes.
        sectors: u64,
    },
    /// Opens the device of this name again (`remap_device`); refused with ENOENT when there is none, with EALREADY when it is open,
    /// and with the server's errno.
    Remap(String),
    /// Closes a device (`unmap_device`), after what was written to it is made durable; refused with ENOENT when there is none of this
    /// name. The session and other devices stay; the mapping ends with the last. An error of making it durable or of closing it is
    /// the answer, and the device is gone nonetheless.
    Unmap {
        /// Name of the device.
        device: String,
        /// Also if NBD clients use it, whose requests fail then, and who are disconnected; else that is refused with EBUSY. Nothing
        /// is made durable.
        force: bool,
    },
    /// How everything is.
    List,
    /// Returns the statistics.
    Stats,
}

/// Answer of a mapping.
#[derive(Clone, Debug)]
pub enum MapAnswer {
    /// It is done.
    Done,
    /// To [`MapRequest::List`].
    Listing(Box<MapListing>),
    /// To [`MapRequest::Stats`].
    Stats(Box<MapStats>),
}

/// A device of a mapping.
#[derive(Clone, Debug)]
pub struct MappedDevice {
    /// As the server calls it.
    pub name: String,
    /// How it is opened.
    pub mode: AccessMode,
    /// `None`: not yet, or no more.
    pub state: Option<DeviceState>,
    /// As it was when it was opened last, or has been resized.
    pub geometry: Option<Geometry>,
    /// Loss policy: the fate of requests while no path is up.
    pub on_loss: OnLoss,
    /// Requests so far.
    pub counters: DeviceCounters,
    /// Requests that wait for a path, or for the server to open it again.
    pub waiting: usize,
    /// NBD clients that have chosen it.
    pub clients: usize,
}

impl MappedDevice {
    /// One that has not been opened.
    pub(crate) fn new(device: MapDevice, on_loss: OnLoss) -> Self {
        Self {
            name: device.name,
            mode: device.mode,
            state: None,
            geometry: None,
            on_loss,
            counters: DeviceCounters::default(),
            waiting: 0,
            clients: 0,
        }
    }
}

/// A mapping as it is at a moment: all of its loops together.
#[derive(Clone, Debug)]
pub struct MapListing {
    /// The session's name.
    pub session: String,
    /// The server's port, for paths that are added.
    pub port: u16,
    /// Limits of the session; `None` until it is open.
    pub info: Option<SessionInfo>,
    /// How its paths are chosen.
    pub policy: Policy,
    /// Attempts to connect a lost path again, at most.
    pub max_reconnects: u32,
    /// Time before each.
    pub reconnect_delay: Duration,
    /// Its paths, with what is in flight and counted on them.
    pub paths: Vec<PathStatus>,
    /// Its devices, in the order in which they were asked for.
    pub devices: Vec<MappedDevice>,
}

impl MapListing {
    /// Adds what another loop has. Home's is what the others are added to.
    fn add(&mut self, other: &Self) {
        for of_other in &other.paths {
            if let Some(path) = self.paths.iter_mut().find(|path| path.id == of_other.id) {
                path.in_flight += of_other.in_flight;
                path.stats.add(&of_other.stats);
            }
        }
        for of_other in &other.devices {
            if let Some(device) = self.devices.iter_mut().find(|device| device.name == of_other.name) {
                device.counters.add(&of_other.counters);
                device.waiting += of_other.waiting;
                device.clients += of_other.clients;
            }
        }
    }
}

/// Steers a mapping; from [`Mapping::control`](crate::map::Mapping::control). It keeps nothing alive.
#[derive(Clone, Debug)]
pub struct MapControl {
    loops: Arc<[Handle<Command, ()>]>,
    addresses: Arc<Addresses>,
}

impl MapControl {
    pub(crate) fn new(loops: Arc<[Handle<Command, ()>]>, addresses: Arc<Addresses>) -> Self {
        Self { loops, addresses }
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// Says why not; [`MapRequest`] has the reasons.
    pub fn ask(&self, request: MapRequest) -> Result<MapAnswer, Refused> {
        match request {
            MapRequest::Stats => self.stats().map(|stats| MapAnswer::Stats(Box::new(stats))),
            MapRequest::List => self.list().map(|listing| MapAnswer::Listing(Box::new(listing))),
            MapRequest::ResetPathStats(..) => {
                // A loop that has not heard of the path yet has counted nothing.
                self.tell_all(&request)
                    .into_iter()
                    .next()
                    .unwrap_or_else(|| Err(Errno::ENODEV.into()))
            }
            MapRequest::AddPath(path) => self.add_path(path),
            request => self.tell(HOME, &request).wait(),
        }
    }

    fn add_path(&self, path: PathAddr) -> Result<MapAnswer, Refused> {
        let dst = path.dst.ip();
        let no_way = |e| Refused::new(Errno::EHOSTUNREACH, format!("no way to {dst}: {e}"));
        let src = path.src.map_or_else(|| iface::route_to(dst).map_err(no_way), Ok)?;
        if !src.is_unspecified() {
            self.addresses.ensure(src)?;
        }
        let src = Some(src);
        self.tell(HOME, &MapRequest::AddPath(PathAddr { src, ..path })).wait()
    }

    fn tell(&self, index: usize, request: &MapRequest) -> Pending<MapAnswer> {
        let (reply, pending) = answer();
        if let Some(handle) = self.loops.get(index) {
            handle.command(Command::Steer(request.clone(), reply));
        }
        pending
    }

    /// Asks each loop, in their order.
    fn tell_all(&self, request: &MapRequest) -> Vec<Result<MapAnswer, Refused>> {
        let asked: Vec<_> = (0..self.loops.len()).map(|index| self.tell(index, request)).collect();
        asked.into_iter().map(Pending::wait).collect()
    }

    /// Returns the statistics.
    ///
    /// # Errors
    /// ENODEV when it has ended.
    pub fn stats(&self) -> Result<MapStats, Refused> {
        let mut sum = MapStats::default();
        for part in self.tell_all(&MapRequest::Stats) {
            if let MapAnswer::Stats(part) = part? {
                sum.add(&part);
            }
        }
        Ok(sum)
    }

    /// How everything is.
    ///
    /// # Errors
    /// ENODEV when it has ended.
    pub fn list(&self) -> Result<MapListing, Refused> {
        let asked: Vec<_> = (0..self.loops.len())
            .map(|index| self.tell(index, &MapRequest::List))
            .collect();
        let mut sum: Option<MapListing> = None;
        for part in asked {
            let MapAnswer::Listing(part) = part.wait()? else {
                continue;
            };
            match &mut sum {
                Some(sum) => sum.add(&part),
                None => sum = Some(*part),
            }
        }
        sum.ok_or_else(|| Errno::ENODEV.into())
    }

    /// Asks for something of a path.
    ///
    /// # Errors
    /// As [`MapRequest`] says of it.
    pub fn path(&self, path: PathAddr, command: PathCommand) -> Result<(), Refused> {
        let request = match command {
            PathCommand::Add => MapRequest::AddPath(path),
            PathCommand::Remove => MapRequest::RemovePath(path),
            PathCommand::Disconnect => MapRequest::Disconnect(path),
            PathCommand::Reconnect => MapRequest::Reconnect(path),
        };
        self.ask(request).map(|_| ())
    }
}
