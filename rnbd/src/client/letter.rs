//! Messages between the shards of a client about the devices that they share.

use std::sync::Arc;

use rtrs::client::request::SessionId;

use super::{losses::Losses, output::DeviceKey, patience::OnLoss};
use crate::proto::{AccessMode, MsgOpenRsp};

/// From one share of a client to another: to be handed to [`Client::letter`](super::Client::letter) there, at any later time, but
/// letters from one share to another in their order, and with RTRS's in between in theirs.
#[derive(Debug)]
pub struct Letter(pub(super) Word);

/// The whole of a letter. Devices have the names that home knows them by.
#[derive(Debug)]
pub(super) enum Word {
    /// Home: the server has opened a device, or opened it again.
    Opened(Box<Opening>),
    /// Home: it has another size, in bytes.
    Resized(DeviceKey, u64),
    /// Home: what operations meet while it is lost.
    OnLoss(DeviceKey, OnLoss),
    /// Home: it is being unmapped, and what is under way waited for or not.
    Release { device: DeviceKey, force: bool },
    /// To home: nothing of it is under way here, and nothing will be.
    Released(DeviceKey),
    /// To home: the server has [closed](super::closed) devices of a session.
    Stale(SessionId),
    /// Home: end all requests to a session's devices, and report. The number is the drain's.
    Drain(SessionId, u32),
    /// To home: none is in flight.
    Drained(SessionId, u32),
}

/// A device that the server has open.
#[derive(Clone, Debug)]
pub(super) struct Opening {
    pub(super) device: DeviceKey,
    pub(super) session: SessionId,
    pub(super) name: String,
    pub(super) mode: AccessMode,
    pub(super) on_loss: OnLoss,
    /// Losses of all shards together.
    pub(super) losses: Arc<Losses>,
    /// The server's answer: its number for the device, and what that is like.
    pub(super) answer: MsgOpenRsp,
}

/// They go between threads.
const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<Letter>();
};
