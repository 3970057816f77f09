//! Regions of sockets.

use core::ops::Range;
use std::sync::Arc;

use roce_verbs::provider::{Memory, MrId};

use crate::{rdma::RegionRights, socket::SocketId};

/// Memory of a socket that peers may use.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) mr: MrId,
    pub(super) socket: SocketId,
    pub(super) memory: Arc<dyn Memory>,
    pub(super) range: Range<usize>,
    pub(super) rights: RegionRights,
}
