//! Running mappings and servers, as the registry sees them.

use std::{net::IpAddr, sync::Arc};

use rnbd::{Errno, server::listing::DeviceListing};
use rnbd_host::control::{
    MapAnswer, MapListing, MapOrder, MapRequest, Refused, ServeAnswer, ServeRequest, map::MapControl,
};
use rtrs::server::listing::SessionListing;

/// A running mapping.
pub trait Client: Send + Sync {
    /// Sends a request and waits for its answer.
    ///
    /// # Errors
    /// The reasons are at [`MapRequest`].
    fn ask(&self, request: MapRequest) -> Result<MapAnswer, Refused>;

    /// Returns its session, paths and devices.
    ///
    /// # Errors
    /// ENODEV when it has ended.
    fn listing(&self) -> Result<MapListing, Refused> {
        match self.ask(MapRequest::List {})? {
            MapAnswer::Listing(listing) => Ok(*listing),
            MapAnswer::Done | MapAnswer::Stats(_) => Err(Errno::EIO.into()),
        }
    }
}

impl Client for MapControl {
    fn ask(&self, request: MapRequest) -> Result<MapAnswer, Refused> {
        Self::ask(self, request)
    }
}

/// A running server.
pub trait Server: Send + Sync {
    /// Sends a request and waits for its answer.
    ///
    /// # Errors
    /// The reasons are at [`ServeRequest`].
    fn ask(&self, request: ServeRequest) -> Result<ServeAnswer, Refused>;

    /// Returns its parameters.
    fn parameters(&self) -> Parameters;

    /// Returns its sessions and their paths.
    ///
    /// # Errors
    /// ENODEV when it has ended.
    fn sessions(&self) -> Result<Vec<SessionListing>, Refused> {
        match self.ask(ServeRequest::Sessions)? {
            ServeAnswer::Sessions(sessions) => Ok(sessions),
            _ => Err(Errno::EIO.into()),
        }
    }

    /// Returns its open devices.
    ///
    /// # Errors
    /// ENODEV when it has ended.
    fn devices(&self) -> Result<Vec<DeviceListing>, Refused> {
        match self.ask(ServeRequest::Devices)? {
            ServeAnswer::Devices(devices) => Ok(devices),
            _ => Err(Errno::EIO.into()),
        }
    }
}

/// Parameters of the kernel's modules `rtrs_server` and `rnbd_server`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Parameters {
    /// Bytes of a chunk.
    pub max_chunk_size: u32,
    /// Requests in flight of a session at most.
    pub sess_queue_depth: u32,
    /// Keys are invalidated while a request is processed.
    pub always_invalidate: bool,
    /// Folder whose files are exported by their names; empty if there is none.
    pub dev_search_path: String,
    /// The port.
    pub port: u16,
}

/// Running servers and mappings of a process.
pub trait Host: Send + Sync {
    /// Returns the mappings, each with one session, in the order of their starts.
    fn clients(&self) -> Vec<Arc<dyn Client>>;

    /// Returns the servers.
    fn servers(&self) -> Vec<Arc<dyn Server>>;

    /// Returns the name of the RDMA device at this local address (`hca_name`).
    fn hca_name(&self, addr: IpAddr) -> String;

    /// Opens a session, and a device over it.
    ///
    /// # Errors
    /// EOPNOTSUPP if the process can't have another session, and those of opening either.
    fn open(&self, session: &str, order: &MapOrder) -> Result<(), Refused>;
}

/// Choice of the names of files.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Names {
    /// Names of the kernel's code.
    Mainline,
    /// Also those that only its documents have, if something is behind them.
    #[default]
    All,
}
