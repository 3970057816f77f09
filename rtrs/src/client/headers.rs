//! Memory of the headers of requests: the user's, and RTRS's message behind it. It belongs to the session, so that a request can
//! be resent by another path.

use roce_verbs::mem::Pages;
use roce_verbs::{
    AccessFlags, Sge,
    provider::{DeviceIx, PdId, RangeError, VerbsError},
};

use crate::{client::memory::Memory, cx::Cx, proto::RdmaRead};

/// Alignment of a header with its message: a cache line.
const LINE: usize = 64;

/// The headers of a session's requests, by permit.
#[derive(Debug)]
pub(super) struct Headers {
    pub(super) memory: Memory,
    stride: usize,
}

fn stride(max_user_header: u32) -> usize {
    (max_user_header as usize + RdmaRead::LEN_ONE).next_multiple_of(LINE)
}

impl Headers {
    /// For `depth` requests with user headers of at most `max_user_header` bytes.
    pub(super) fn new(depth: u32, max_user_header: u32) -> Result<Self, VerbsError> {
        let stride = stride(max_user_header);
        let pages = Pages::allocate(stride * depth as usize).map_err(|e| VerbsError::Invalid(e.to_string()))?;
        let memory = Memory::new(pages);
        Ok(Self { memory, stride })
    }

    /// Whether there is room for as many requests with such headers.
    pub(super) fn fits(&self, depth: u32, max_user_header: u32) -> bool {
        stride(max_user_header) <= self.stride && self.stride * depth as usize <= self.memory.pages.len()
    }

    /// Registers them with a device, unless they are.
    pub(super) fn add_device(&mut self, cx: &mut Cx<'_>, device: DeviceIx, pd: PdId) -> Result<(), VerbsError> {
        match self.memory.on(device) {
            Some(_) => Ok(()),
            None => self.memory.register(cx, device, pd, AccessFlags::LOCAL_WRITE),
        }
    }

    /// Writes bytes of a request's header.
    pub(super) fn write(&self, permit: u16, offset: usize, bytes: &[u8]) -> Result<(), RangeError> {
        if offset + bytes.len() > self.stride {
            return Err(RangeError {
                offset,
                len: bytes.len(),
                size: self.stride,
            });
        }
        let at = usize::from(permit) * self.stride + offset;
        self.memory.pages.write(at, bytes)
    }

    /// A request's header for a device.
    pub(super) fn sge(&self, permit: u16, len: usize, device: DeviceIx) -> Option<Sge> {
        let mr = self.memory.on(device)?;
        Some(Sge {
            addr: mr.addr + (usize::from(permit) * self.stride) as u64,
            length: len as u32,
            lkey: mr.lkey,
        })
    }
}
