//! Messages to send.

use super::operation::{Prepared, Ticket};
use crate::{
    proto::{EXT_LEN, Extension, Flags, Header, MAX_FRAGMENT, pack},
    socket::SocketId,
};

/// Message to send.
#[derive(Debug)]
pub(crate) struct Outgoing {
    /// Socket that it is accounted to; `None`: the node itself.
    pub(crate) socket: Option<SocketId>,
    /// Ports of sender and receiver.
    pub(crate) ports: (u16, u16),
    /// Operation before its SENDs.
    pub(crate) operation: Option<Box<Prepared>>,
    /// It has no SENDs: its operation is all.
    pub(crate) is_silent: bool,
    /// Bytes of the program.
    pub(crate) data: Box<[u8]>,
    /// Extension headers.
    pub(crate) ext: [u8; EXT_LEN],
    /// Flags of the extension headers and of who sends it.
    pub(crate) flags: Flags,
    /// Its socket does not want it any more. It is not accounted to it, and sent only because its first fragments were.
    pub(super) canceled: bool,
    /// Its socket was closed after it was queued: it leaves, or comes again, over this link only.
    pub(super) orphan: bool,
}

impl Outgoing {
    /// Returns a message without extension headers.
    pub(crate) fn new(socket: Option<SocketId>, ports: (u16, u16), data: Box<[u8]>) -> Self {
        Self {
            socket,
            ports,
            operation: None,
            is_silent: false,
            data,
            ext: [0; EXT_LEN],
            flags: Flags::empty(),
            canceled: false,
            orphan: false,
        }
    }

    /// SENDs that it takes.
    pub(crate) fn fragments(&self) -> u32 {
        match self.is_silent {
            true => 0,
            false => (self.data.len().div_ceil(MAX_FRAGMENT) as u32).max(1),
        }
    }

    /// Addressee of the report of its operation, if that has not begun.
    pub(crate) fn ticket(&self) -> Option<Ticket> {
        self.operation.as_ref()?.ticket
    }

    /// Bytes of fragment `index`.
    pub(crate) fn fragment(&self, index: u32) -> &[u8] {
        let first = index as usize * MAX_FRAGMENT;
        let end = self.data.len().min(first + MAX_FRAGMENT);
        self.data.get(first..end).unwrap_or(&[])
    }

    /// Sets its extension header. One always fits.
    pub(crate) fn extend(&mut self, extension: Extension) {
        self.ext = pack(&[extension]).unwrap_or_default();
    }

    /// Returns its header.
    pub(crate) fn header(&self, sequence: u64, ack: u64, flags: Flags) -> Header {
        let mut header = Header::new(sequence, ack, self.data.len() as u32, self.ports, self.flags | flags);
        header.set_extensions(self.ext);
        header.seal();
        header
    }
}
