//! Memory of the headers of requests: the user's, and RTRS's message behind it. They are the session's, so that a request can
//! go by another path without being written again.

use std::sync::Arc;

use roce_verbs::mem::Pages;
use roce_verbs::{
    AccessFlags, Sge,
    provider::{DeviceIx, MrInfo, PdId, RangeError, Registration, VerbsError},
};
use smallvec::SmallVec;

use crate::{cx::Cx, proto::RdmaRead};

/// Bytes that a header with its message takes at least; each begins on a cache line of its own.
const LINE: usize = 64;

/// The headers of a session's requests, one place for each permit.
#[derive(Debug)]
pub(super) struct Headers {
    pages: Arc<Pages>,
    stride: usize,
    mrs: SmallVec<[(DeviceIx, MrInfo); 1]>,
}

impl Headers {
    /// For `depth` requests with user headers of at most `max_user_header` bytes.
    pub(super) fn new(depth: u32, max_user_header: u32) -> Result<Self, VerbsError> {
        let stride = (max_user_header as usize + RdmaRead::LEN_ONE).next_multiple_of(LINE);
        let pages = Pages::allocate(stride * depth as usize).map_err(|e| VerbsError::Invalid(e.to_string()))?;
        Ok(Self {
            pages,
            stride,
            mrs: SmallVec::new(),
        })
    }

    /// Whether as many requests with such headers have room.
    pub(super) fn fits(&self, depth: u32, max_user_header: u32) -> bool {
        let stride = (max_user_header as usize + RdmaRead::LEN_ONE).next_multiple_of(LINE);
        stride <= self.stride && self.stride * depth as usize <= self.pages.len()
    }

    pub(super) fn add_device(&mut self, cx: &mut Cx<'_>, device: DeviceIx, pd: PdId) -> Result<(), VerbsError> {
        if self.mrs.iter().any(|(of, _)| *of == device) {
            return Ok(());
        }
        let what = Registration {
            memory: self.pages.clone(),
            offset: 0,
            len: self.pages.len(),
            iova: None,
            access: AccessFlags::LOCAL_WRITE,
        };
        let mr = cx.provider.register(pd, &what)?;
        self.mrs.push((device, mr));
        Ok(())
    }

    pub(super) fn remove_device(&mut self, cx: &mut Cx<'_>, device: DeviceIx) {
        self.mrs.retain(|(of, mr)| {
            let stays = *of != device;
            if !stays {
                cx.provider.deregister(mr.id);
            }
            stays
        });
    }

    pub(super) fn close(&mut self, cx: &mut Cx<'_>) {
        for (_, mr) in self.mrs.drain(..) {
            cx.provider.deregister(mr.id);
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
        self.pages.write(usize::from(permit) * self.stride + offset, bytes)
    }

    /// A request's header for a device.
    pub(super) fn sge(&self, permit: u16, len: usize, device: DeviceIx) -> Option<Sge> {
        let (_, mr) = self.mrs.iter().find(|(of, _)| *of == device)?;
        Some(Sge {
            addr: mr.addr + (usize::from(permit) * self.stride) as u64,
            length: len as u32,
            lkey: mr.lkey,
        })
    }
}
