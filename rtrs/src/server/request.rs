//! A client's request in the hands of the server's user.

use core::fmt;
use std::sync::Arc;

use roce_verbs::provider::{MemoryRegion, Provider, RangeError};
use smallvec::SmallVec;

use super::{path::Path, session::SessionHandle};
use crate::{
    Direction,
    proto::{self, SgDesc, errno},
};

/// What is sent when a request is done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    pub(super) msg_id: u16,
    pub(super) errno: u16,
    /// Where the data of a read goes, also when it failed: its key may have to be revoked.
    pub(super) dest: Option<SgDesc>,
    pub(super) need_inval: bool,
}

/// A request. The client waits until it is completed; dropped uncompleted, it ends with EIO.
pub struct Request<P: Provider> {
    path: Arc<Path<P>>,
    cid: u16,
    msg_id: u16,
    direction: Direction,
    header: SmallVec<[u8; 64]>,
    data_len: u32,
    dest: Option<SgDesc>,
    need_inval: bool,
    completed: bool,
}

impl<P: Provider> Request<P> {
    pub(super) fn new(
        path: Arc<Path<P>>,
        cid: u16,
        msg_id: u16,
        message: proto::Request,
        header: SmallVec<[u8; 64]>,
    ) -> Self {
        let (direction, data_len, dest, need_inval) = match message {
            proto::Request::Write { data_len, .. } => (Direction::Write, data_len, None, false),
            proto::Request::Read {
                data_len,
                dest,
                need_inval,
                ..
            } => (Direction::Read, data_len, dest, need_inval),
        };
        Self {
            path,
            cid,
            msg_id,
            direction,
            header,
            data_len,
            dest,
            need_inval,
            completed: false,
        }
    }

    /// The session.
    pub fn session(&self) -> &SessionHandle {
        &self.path.session.handle
    }

    /// Read or write, seen from the client.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// The connection that the request came over; 0 is the service connection.
    pub fn connection(&self) -> u16 {
        self.cid
    }

    /// The user's header: a copy, which the client can't change any more.
    pub fn user_header(&self) -> &[u8] {
        &self.header
    }

    /// Bytes of data that the client sent, or has room for.
    pub fn data_len(&self) -> usize {
        self.data_len as usize
    }

    fn start(&self) -> usize {
        usize::from(self.msg_id) * self.path.layout.chunk_size() as usize
    }

    fn check(&self, offset: usize, len: usize) -> Result<(), RangeError> {
        if offset.checked_add(len).is_none_or(|end| end > self.data_len()) {
            return Err(RangeError {
                offset,
                len,
                size: self.data_len(),
            });
        }
        Ok(())
    }

    /// Copies data out of the chunk.
    ///
    /// # Errors
    /// When the range is outside the request's data.
    pub fn read_data(&self, offset: usize, out: &mut [u8]) -> Result<(), RangeError> {
        self.check(offset, out.len())?;
        self.path.session.chunks.read(self.start() + offset, out)
    }

    /// Copies data into the chunk.
    ///
    /// # Errors
    /// When the range is outside the request's data.
    pub fn write_data(&self, offset: usize, data: &[u8]) -> Result<(), RangeError> {
        self.check(offset, data.len())?;
        self.path.session.chunks.write(self.start() + offset, data)
    }

    /// First byte of the data in the chunk, for `pread` and `pwrite`: valid for [`Request::data_len`] bytes until the
    /// request is completed or dropped. Without always_invalidate the client can change the bytes at any time: never
    /// make a reference from it.
    pub fn data_ptr(&self) -> *mut u8 {
        self.path.session.chunks.as_ptr().wrapping_add(self.start())
    }

    /// Answers: 0, or an error number of either sign. A successful read sends the client its `data_len` bytes.
    pub fn complete(mut self, errno: i32) {
        self.answer(errno);
    }

    fn answer(&mut self, status: i32) {
        if core::mem::replace(&mut self.completed, true) {
            return;
        }
        let reply = proto::IoReply::new(self.msg_id.into(), status, self.need_inval);
        self.path.answer(
            self.cid,
            Answer {
                msg_id: self.msg_id,
                errno: reply.errno,
                dest: self.dest,
                need_inval: self.need_inval,
            },
        );
    }
}

impl<P: Provider> Drop for Request<P> {
    fn drop(&mut self) {
        self.answer(errno::EIO);
    }
}

impl<P: Provider> fmt::Debug for Request<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("msg_id", &self.msg_id)
            .field("direction", &self.direction)
            .field("header", &self.header.len())
            .field("data_len", &self.data_len)
            .finish_non_exhaustive()
    }
}
