//! LNet's transfers by RDMA: requests that are open, by their cookies.

use std::collections::VecDeque;

use super::sink::Sink;

/// Open requests of a connection at most; the oldest are dropped. Each side may have 255.
const MAX_OPEN: usize = 512;
/// Fragments of all sinks of a connection at most; sinks beyond are not judged.
const MAX_FRAGMENTS: usize = 4096;

/// Message that waits for an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// PUT_REQ, for PUT_ACK or PUT_NAK.
    PutReq,
    /// PUT_ACK, for PUT_DONE.
    PutAck,
    /// GET_REQ, for GET_DONE.
    GetReq,
}

impl Kind {
    /// Name of the message.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::PutReq => "PUT_REQ",
            Self::PutAck => "PUT_ACK",
            Self::GetReq => "GET_REQ",
        }
    }
}

/// Message that waits for an answer.
#[derive(Debug)]
pub(super) struct Request {
    /// Endpoint that sent it.
    pub(super) maker: usize,
    pub(super) kind: Kind,
    pub(super) cookie: u64,
    pub(super) sink: Option<Sink>,
}

/// Open requests of a connection.
#[derive(Default, Debug)]
pub(super) struct Transfers {
    open: VecDeque<Request>,
    fragments: usize,
    /// A request was dropped, or its sink: answers and WRITEs may belong to it.
    forgot: bool,
}

impl Transfers {
    /// Returns whether all requests are known.
    pub(super) const fn is_complete(&self) -> bool {
        !self.forgot
    }

    pub(super) fn add(&mut self, mut request: Request) {
        let fragments = request.sink.as_ref().map_or(0, Sink::fragments);
        if self.fragments + fragments > MAX_FRAGMENTS {
            (request.sink, self.forgot) = (None, true);
        } else {
            self.fragments += fragments;
        }
        if self.open.len() >= MAX_OPEN {
            self.forgot = true;
            let oldest = self.open.pop_front();
            self.leave(oldest.as_ref());
        }
        self.open.push_back(request);
    }

    /// Removes and returns a request of one side.
    pub(super) fn take(&mut self, maker: usize, kind: Kind, cookie: u64) -> Option<Request> {
        let is = |r: &Request| (r.maker, r.kind, r.cookie) == (maker, kind, cookie);
        let request = self.open.remove(self.open.iter().position(is)?);
        self.leave(request.as_ref());
        request
    }

    /// Returns the memory with this key that one side described last.
    pub(super) fn sink(&mut self, maker: usize, key: u32) -> Option<&mut Sink> {
        let made = self.open.iter_mut().rev().filter(|r| r.maker == maker);
        made.filter_map(|r| r.sink.as_mut()).find(|sink| sink.key == key)
    }

    /// Notes that messages of a side are missing in the capture: it may have written.
    pub(super) fn lost(&mut self, writer: usize) {
        let others = self.open.iter_mut().filter(|r| r.maker != writer);
        others.filter_map(|r| r.sink.as_mut()).for_each(Sink::blur);
    }

    fn leave(&mut self, request: Option<&Request>) {
        let sink = request.and_then(|request| request.sink.as_ref());
        self.fragments -= sink.map_or(0, Sink::fragments);
    }
}

#[cfg(test)]
mod tests {
    use ::lnet::proto::{Fragment, Fragments, RdmaDesc};

    use super::*;

    #[test]
    fn memory_is_bounded() {
        let mut transfers = Transfers::default();
        let fragments = vec![Fragment { nob: 1, addr: 1 }; 257];
        for cookie in 0..2 * MAX_OPEN as u64 {
            let desc = RdmaDesc {
                key: cookie as u32,
                frags: Fragments::List(&fragments),
            };
            transfers.add(Request {
                maker: 0,
                kind: Kind::GetReq,
                cookie,
                sink: Some(Sink::new(&desc)),
            });
            let kept: usize = transfers
                .open
                .iter()
                .filter_map(|r| r.sink.as_ref())
                .map(Sink::fragments)
                .sum();
            assert!(kept <= MAX_FRAGMENTS && kept == transfers.fragments && transfers.open.len() <= MAX_OPEN);
        }
        assert!(!transfers.is_complete());
        assert!(transfers.take(0, Kind::GetReq, 0).is_none() && transfers.take(0, Kind::GetReq, 1000).is_some());
    }
}
