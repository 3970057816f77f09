//! Control of a mapping.

use std::sync::Arc;

use rnbd::Errno;
use roce::{iface, reactor::Handle};
use rtrs::addr::PathAddr;

use super::{
    answer::MapListing,
    refused::Refused,
    reply::{MapAnswer, reply},
    request::MapRequest,
};
use crate::{addresses::Addresses, mapper::command::Command, stats::MapStats};

/// Handle of a mapping, from [`Mapping::control`](crate::map::Mapping::control). Keeps nothing alive.
#[derive(Clone, Debug)]
pub struct MapControl {
    handle: Handle<Command, ()>,
    addresses: Arc<Addresses>,
}

impl MapControl {
    pub(crate) fn new(handle: Handle<Command, ()>, addresses: Arc<Addresses>) -> Self {
        Self { handle, addresses }
    }

    /// Sends a request and waits for its answer.
    ///
    /// # Errors
    /// The reasons are at [`MapRequest`].
    pub fn ask(&self, request: MapRequest) -> Result<MapAnswer, Refused> {
        let request = match request {
            MapRequest::AddPath { path } => MapRequest::AddPath {
                path: self.opened(path)?,
            },
            other => other,
        };
        let (reply, pending) = reply();
        self.handle.command(Command::Control(request, reply));
        pending.wait()
    }

    /// Opens the port of a path's source. Without a source it is that of the route.
    fn opened(&self, path: PathAddr) -> Result<PathAddr, Refused> {
        let dst = path.dst.ip();
        let no_route = |e| Refused::new(Errno::EHOSTUNREACH, format!("no route to {dst}: {e}"));
        let src = path.src.map_or_else(|| iface::route_to(dst).map_err(no_route), Ok)?;
        if !src.is_unspecified() {
            self.addresses.ensure(src)?;
        }
        Ok(PathAddr { src: Some(src), ..path })
    }

    /// Returns the statistics.
    ///
    /// # Errors
    /// ENODEV when the mapping has ended.
    pub fn stats(&self) -> Result<MapStats, Refused> {
        match self.ask(MapRequest::Stats {})? {
            MapAnswer::Stats(stats) => Ok(*stats),
            _ => Err(Errno::ENODEV.into()),
        }
    }

    /// Returns the session, its paths and its devices.
    ///
    /// # Errors
    /// ENODEV when the mapping has ended.
    pub fn list(&self) -> Result<MapListing, Refused> {
        match self.ask(MapRequest::List {})? {
            MapAnswer::Listing(listing) => Ok(*listing),
            _ => Err(Errno::ENODEV.into()),
        }
    }
}
