//! Requests in flight: the parts that each was split into, and its reply when the last of them has ended.

use core::cell::RefCell;
use std::rc::Rc;

use rtrs::client::buffers::Buffer;
use smallvec::SmallVec;

use crate::{
    block::{self, BlockRequest, Completion, Extent, Geometry},
    client::Parts,
    errno::Errno,
    nbd::{
        memory::{Memory, copy_from, give, zeroes},
        proto::{self, cmd},
        reply::{Answer, Data, Header, Reply, extents, head},
    },
};

/// Bytes of a part at least, whatever the device's limit.
const MIN_PART: u32 = 512;

/// A part of a request, which the device has. The request ends with its last part.
#[derive(Debug)]
pub struct RequestPart {
    pub(crate) request: Rc<RefCell<InFlight>>,
    pub(crate) index: u32,
}

/// Memory and device of a connection.
pub trait Backend: Memory {
    /// Submits a request to the device, which is complete with [`done`](super::Connection::done). A device that has completed it by then
    /// returns the completion.
    fn submit(&mut self, request: BlockRequest<RequestPart>) -> Option<(RequestPart, Completion)>;
}

/// Place of the data of a request's parts.
#[derive(Debug)]
enum Landing {
    /// Not a read.
    Nowhere,
    /// Buffers in order, which are sent as they are.
    Buffers(SmallVec<[Option<Buffer>; 1]>),
    /// Copied as parts complete.
    Heap(Vec<u8>),
    /// Extents of the range.
    Extents(Vec<Extent>),
}

/// A request whose reply is still to come. It lies in its [parts](RequestPart) at the device, and in the connection until all of them
/// are submitted.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) header: Header,
    charge: u64,
    /// Bytes of the range that the client has named.
    span: u64,
    /// Bytes that are moved.
    len: u32,
    /// Bytes of each part but the last.
    step: u32,
    /// Parts that the device has.
    open: u32,
    /// The first error.
    error: Option<Errno>,
    /// A flush follows the parts.
    flush: bool,
    /// Losses of a write.
    losses: Parts,
    landing: Landing,
}

impl InFlight {
    /// A request that counts for `charge`. Of the `span` that it names `len` bytes are moved.
    pub(crate) fn new(header: Header, charge: u64, span: u64, len: u32, g: &Geometry) -> Self {
        Self {
            header,
            charge,
            span,
            len,
            step: g.max_transfer.max(MIN_PART),
            open: 0,
            error: None,
            flush: false,
            losses: Parts::default(),
            landing: Landing::Nowhere,
        }
    }

    /// Number of parts.
    pub(crate) fn parts(&self) -> u32 {
        self.len.div_ceil(self.step)
    }

    /// Start and length of a part within the request; no bytes beyond the last.
    pub(crate) fn range(&self, index: u32) -> (u32, u32) {
        let at = index.saturating_mul(self.step).min(self.len);
        (at, self.step.min(self.len - at))
    }

    /// Bytes of the request behind a part.
    pub(crate) fn behind(&self, index: u32) -> usize {
        let (at, len) = self.range(index);
        (self.len - at - len) as usize
    }

    /// Records an error; the first one is the reply's.
    pub(crate) fn fail(&mut self, e: Errno) {
        self.error.get_or_insert(e);
    }

    pub(crate) fn failed(&self) -> bool {
        self.error.is_some()
    }

    /// A flush has to follow the parts.
    pub(crate) fn set_flush(&mut self, flush: bool) {
        self.flush = flush;
    }

    /// Whether a flush follows now.
    pub(crate) fn take_flush(&mut self) -> bool {
        core::mem::take(&mut self.flush) && !self.failed()
    }

    /// The device gets a part.
    pub(crate) fn part_begins(&mut self) {
        self.open += 1;
    }

    /// No part can end any more: without the ends of all it has failed.
    pub(crate) fn close(&mut self) {
        if self.open > 0 {
            self.fail(Errno::EIO);
        }
    }

    /// The buffers of a read are sent as they are.
    pub(crate) fn expect_buffers(&mut self) {
        self.landing = Landing::Buffers((0..self.parts()).map(|_| None).collect());
    }

    /// The data of a read is collected in one piece. `false` without memory: it has failed.
    pub(crate) fn expect_heap(&mut self) -> bool {
        match zeroes(self.len as usize) {
            Some(bytes) => self.landing = Landing::Heap(bytes),
            None => self.fail(Errno::ENOMEM),
        }
        !self.failed()
    }

    /// A part has ended.
    pub(crate) fn part_ended(&mut self, part: u32, completion: Completion, memory: &mut dyn Memory) {
        let Completion {
            mut result,
            data,
            extents,
            losses,
        } = completion;
        self.open -= 1;
        if matches!(self.landing, Landing::Nowhere) {
            result = self.losses.ended(result, losses);
        }
        if let Err(e) = result {
            self.fail(e);
        }
        if self.failed() {
            return give(memory, data);
        }
        let (at, len) = self.range(part);
        match (&mut self.landing, data) {
            (Landing::Extents(_), data) => {
                self.learn(&extents);
                give(memory, data);
            }
            (Landing::Nowhere, data) => give(memory, data),
            (_, None) => self.fail(Errno::EIO),
            (Landing::Buffers(places), Some(mut buffer)) => {
                buffer.set_len(len as usize);
                if let Some(place) = places.get_mut(part as usize) {
                    *place = Some(buffer);
                }
            }
            (Landing::Heap(bytes), Some(buffer)) => {
                copy_from(memory, &buffer, &mut bytes[at as usize..(at + len) as usize]);
                give(memory, Some(buffer));
            }
        }
    }

    /// Takes the extents of the range that the client asks about, from its beginning on; without any, all is data.
    pub(crate) fn learn(&mut self, extents: &[Extent]) {
        let mut left = self.span;
        let mut within = Vec::new();
        for extent in extents {
            let len = extent.len.min(left);
            left -= len;
            if len > 0 {
                block::append(&mut within, Extent { len, ..*extent });
            }
        }
        if within.is_empty() {
            within.push(Extent::data(self.span));
        }
        self.landing = Landing::Extents(within);
    }

    /// The reply; buffers that it does not carry are given back.
    pub(crate) fn into_reply(self, memory: &mut dyn Memory) -> Reply {
        let mut data = SmallVec::new();
        let len = self.span;
        let mut answer = match (self.error, self.header.command) {
            (Some(e), _) => Answer::Failed(proto::error_code(e)),
            (None, cmd::READ) if len > 0 => Answer::Data { len },
            (None, _) => Answer::Done,
        };
        match (self.landing, self.error) {
            (Landing::Buffers(buffers), Some(_)) => buffers.into_iter().for_each(|buffer| give(memory, buffer)),
            (_, Some(_)) | (Landing::Nowhere, None) => {}
            (Landing::Buffers(buffers), None) => data.extend(buffers.into_iter().flatten().map(Data::Device)),
            (Landing::Heap(bytes), None) => data.push(Data::Heap(bytes)),
            (Landing::Extents(found), None) => {
                answer = Answer::Status { extents: found.len() };
                data.push(Data::Heap(extents(self.header.framing, &found)));
            }
        }
        Reply::new(head(self.header, answer), data, self.charge)
    }
}
