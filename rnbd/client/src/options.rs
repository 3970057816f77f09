//! How a disk is opened.

use core::time::Duration;
use std::{net::IpAddr, sync::Arc};

use rnbd::{
    client::OnLoss,
    proto::{AccessMode, MsgOpen},
};
use roce::{Arrival, DeviceConfig, JoinConfig, LocalDevice, Mtu, Placement, SpinMode, broker::running_broker, iface};
use rtrs::{addr::PathAddr, client::SessionConfig};

use crate::error::OpenError;

/// Time between two heartbeats. A path fails after five missed ones.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Time until a lost path is connected again.
const RECONNECT: Duration = Duration::from_secs(2);

/// How a disk is opened: server, names, and what happens when paths are lost.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use rnbd_client::{DiskOptions, OnLoss};
///
/// let disk = DiskOptions::new("192.0.2.7".parse()?, "backup", "disk")
///     .path("198.51.100.1,198.51.100.7".parse()?)
///     .read_only()
///     .on_loss(OnLoss::Queue(None))
///     .open()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct DiskOptions {
    pub(crate) session: SessionConfig,
    pub(crate) name: String,
    pub(crate) mode: AccessMode,
    pub(crate) on_loss: OnLoss,
    pub(crate) grace: Duration,
    pub(crate) spin: SpinMode,
    mtu: Option<Mtu>,
    shares: bool,
}

impl DiskOptions {
    /// A device over one path, to read and write. The server knows its clients by the name of their sessions: each client needs one of
    /// its own.
    ///
    /// A path is written `SERVER`, `OWN,SERVER` or as the kernel writes it; the server's port is 1234 unless it is named.
    pub fn new(path: PathAddr, session: impl Into<String>, device: impl Into<String>) -> Self {
        let mut session = SessionConfig::new(session, path);
        session.reconnect_delay = RECONNECT;
        session.max_reconnects = SessionConfig::FOREVER;
        session.heartbeat.interval = HEARTBEAT;
        // RNBD's longest message names a device.
        session.max_user_header = size_of::<MsgOpen>() as u16;
        Self {
            session,
            name: device.into(),
            mode: AccessMode::ReadWrite,
            on_loss: OnLoss::Error,
            grace: Duration::from_secs(5),
            spin: SpinMode::default(),
            mtu: None,
            shares: false,
        }
    }

    /// Adds a path. Requests are spread over all paths, and those of one that is lost go by the others.
    pub fn path(mut self, path: PathAddr) -> Self {
        self.session.paths.push(path);
        self
    }

    /// Opens the device read-only.
    pub fn read_only(mut self) -> Self {
        self.mode = AccessMode::ReadOnly;
        self
    }

    /// Says what operations meet while no path is up: they fail with `ConnectionAborted`, as is the default, or wait.
    pub fn on_loss(mut self, on_loss: OnLoss) -> Self {
        self.on_loss = on_loss;
        self
    }

    /// Sets how long connecting may take, each step of it. Default: 30 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.session.connect_timeout = timeout;
        self
    }

    /// Sets the time between two heartbeats, of which five may be missed. Default: 1 s.
    pub fn heartbeat(mut self, interval: Duration) -> Self {
        self.session.heartbeat.interval = interval;
        self
    }

    /// Limits the attempts to connect a lost path again, up to 9999. When no path is left that is tried the disk is lost for good, and
    /// operations fail. Default: no limit.
    pub fn max_reconnects(mut self, attempts: u32) -> Self {
        self.session.max_reconnects = attempts;
        self
    }

    /// Sets how long a close waits for operations in flight. Default: 5 s.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Limits the path MTU. Default: what the interface carries.
    pub fn mtu(mut self, mtu: Mtu) -> Self {
        self.mtu = Some(mtu);
        self
    }

    /// Says how long the loop polls before it sleeps.
    pub fn spin(mut self, spin: SpinMode) -> Self {
        self.spin = spin;
        self
    }

    /// Shares our address with other processes of this host, of which each needs this: by a broker, which is the program `ferroce` and
    /// is started if none runs. Without it the disk shares an address only if a broker runs already.
    pub fn share_address(mut self) -> Self {
        self.shares = true;
        self
    }

    /// Returns the error for a session that was not opened.
    pub(crate) fn no_session(&self, error: rtrs::Error) -> OpenError {
        // Options have a path from the beginning.
        let server = self.session.paths[0].dst;
        OpenError::Session { server, error }
    }

    /// Opens the software devices for our ends of the paths, which are filled in.
    pub(crate) fn open_device(&mut self) -> Result<LocalDevice, OpenError> {
        self.session.check().map_err(|error| self.no_session(error))?;
        let mut sources = Vec::new();
        for path in &mut self.session.paths {
            let src = match path.src {
                Some(src) => src,
                None => iface::route_to(path.dst.ip()).map_err(|source| OpenError::Route {
                    server: path.dst.ip(),
                    source,
                })?,
            };
            path.src = Some(src);
            if !sources.contains(&src) {
                sources.push(src);
            }
        }
        let configs: Vec<_> = sources.into_iter().map(|addr| self.device_config(addr)).collect();
        let how = JoinConfig::from_env().filter(|how| self.shares || running_broker(&how.dir));
        let device = match how {
            None => LocalDevice::open(&configs),
            Some(how) => LocalDevice::open_shared(&configs, 1, Arc::new(Alone), &how).map(|mut all| all.remove(0)),
        };
        device.map_err(OpenError::Device)
    }

    fn device_config(&self, addr: IpAddr) -> DeviceConfig {
        DeviceConfig {
            mtu: self.mtu,
            ..DeviceConfig::new(addr)
        }
    }
}

/// Placement of connect requests where there is one loop, which accepts none.
#[derive(Debug)]
struct Alone;

impl Placement for Alone {
    fn place(&self, _: &Arrival<'_>) -> usize {
        0
    }
}
