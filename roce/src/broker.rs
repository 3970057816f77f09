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
pub enum Error {
    Refused { why: proto::Refusal, text: String },
    Timeout,
    Io { context: String, source: io::Error },
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("built without the feature `broker`")
    }
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
pub(crate) fn join(config: &JoinConfig) -> Result<Membership, Error> {
    match config.never {}
}

/// Addresses of a broker.
pub(crate) struct Statistics {
    pub(crate) addrs: Vec<IpAddr>,
}

/// `None`: there is no broker.
pub(crate) const fn statistics(_dir: &std::path::Path) -> Result<Option<Statistics>, Error> {
    Ok(None)
}

/// Implements methods of a [`Membership`], of which there is none.
macro_rules! never {
    ($(fn $name:ident($($argument:ty),*) -> $result:ty;)*) => {
        impl Membership {
            $(pub(crate) fn $name(&self $(, _: $argument)*) -> $result {
                match self.0 {}
            })*
        }
    };
}

never! {
    fn numbers() -> QpnSlot;
    fn parts() -> Option<QpnParts>;
    fn set_inbox(Box<Inbox>) -> ();
    fn publish(&Snapshot) -> bool;
    fn open(IpAddr) -> Result<OpenSockets, Error>;
    fn bind(u64, Option<IpAddr>, bool) -> Result<u64, Error>;
    fn unbind(u64, Option<IpAddr>) -> Result<(), Error>;
    fn listen(u64, Option<IpAddr>) -> Result<(), Error>;
    fn unlisten(u64, Option<IpAddr>) -> Result<(), Error>;
    fn port_change(&PortChange) -> ();
    fn hand_over(&RxMeta, &[u8]) -> ();
}
