//! Stands for the crate `roce-broker` where the feature `broker` is off. There is no [`JoinConfig`], so nothing else is ever made.

use std::{convert::Infallible, io, net::IpAddr, path::PathBuf};

use roce_net::OpenSockets;
use roce_port::{PortChange, QpnParts, QpnSlot, RxMeta};

/// Never made: see [`JoinConfig::from_env`].
#[derive(Clone, Debug)]
pub struct JoinConfig {
    /// Folder of the broker's socket.
    pub dir: PathBuf,
    never: Infallible,
}

impl JoinConfig {
    /// `None`: no process shares an address without the feature `broker`.
    pub const fn from_env() -> Option<Self> {
        None
    }
}

/// Never made.
#[derive(Debug)]
pub struct Membership(Infallible);

/// Error of joining, which is never made.
#[derive(Debug)]
#[allow(missing_docs)]
pub enum JoinError {
    Start(StartError),
    Refused { why: proto::Refusal, text: String },
    Timeout,
    Io { context: &'static str, source: io::Error },
}

impl std::fmt::Display for JoinError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("built without the feature `broker`")
    }
}

/// Error of starting a broker, which is never made.
#[derive(Debug)]
#[allow(missing_docs)]
pub enum StartError {
    Io { context: String, source: io::Error },
}

/// Parts of the protocol.
pub mod proto {
    /// Reason of a refusal.
    #[derive(Debug)]
    #[allow(missing_docs)]
    pub enum Refusal {
        Address,
    }
}

/// Status of a member's devices.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Snapshot {
    pub mtu: u32,
    pub queue_pairs: u64,
    pub counters: [u64; COUNTERS.len()],
}

/// Counters of a [`Snapshot`]: nobody reads them.
pub(crate) const COUNTERS: [&str; 0] = [];

/// Receiver of packets.
pub type Inbox = dyn Fn(&RxMeta, &[u8]) + Send + Sync;

/// Never called.
pub(crate) fn join(config: &JoinConfig) -> Result<Membership, JoinError> {
    match config.never {}
}

/// Addresses of a broker.
pub(crate) struct Statistics {
    pub(crate) addrs: Vec<IpAddr>,
}

/// `None`: there is no broker.
pub(crate) const fn statistics(_dir: &std::path::Path) -> Result<Option<Statistics>, JoinError> {
    Ok(None)
}

impl Membership {
    pub(crate) fn numbers(&self) -> QpnSlot {
        match self.0 {}
    }

    pub(crate) fn parts(&self) -> Option<QpnParts> {
        match self.0 {}
    }

    pub(crate) fn set_inbox(&self, _inbox: Box<Inbox>) {
        match self.0 {}
    }

    pub(crate) fn publish(&self, _status: &Snapshot) -> bool {
        match self.0 {}
    }

    pub(crate) fn open(&self, _addr: IpAddr) -> Result<OpenSockets, JoinError> {
        match self.0 {}
    }

    pub(crate) fn bind(&self, _service: u64, _addr: Option<IpAddr>, _reuse: bool) -> Result<u64, JoinError> {
        match self.0 {}
    }

    pub(crate) fn unbind(&self, _service: u64, _addr: Option<IpAddr>) -> Result<(), JoinError> {
        match self.0 {}
    }

    pub(crate) fn listen(&self, _service: u64, _addr: Option<IpAddr>) -> Result<(), JoinError> {
        match self.0 {}
    }

    pub(crate) fn unlisten(&self, _service: u64, _addr: Option<IpAddr>) -> Result<(), JoinError> {
        match self.0 {}
    }

    pub(crate) fn port_change(&self, _change: &PortChange) {
        match self.0 {}
    }

    pub(crate) fn hand_over(&self, _meta: &RxMeta, _bytes: &[u8]) -> bool {
        match self.0 {}
    }
}
