//! Answers of loops, and the channel that carries one.

use std::sync::mpsc::{Receiver, RecvError, Sender, channel};

use rnbd::{Errno, server::listing::DeviceListing};
use rtrs::server::listing::SessionListing;

use super::{answer::MapListing, refused::Refused};
use crate::stats::{MapStats, ServeStats};

/// Answer of a mapping.
#[derive(Clone, Debug)]
pub enum MapAnswer {
    /// The request is done.
    Done,
    /// To [`MapRequest::List`](super::MapRequest::List).
    Listing(Box<MapListing>),
    /// To [`MapRequest::Stats`](super::MapRequest::Stats).
    Stats(Box<MapStats>),
}

/// Answer of a server.
#[derive(Clone, Debug)]
pub enum ServeAnswer {
    /// The request is done.
    Done,
    /// To [`ServeRequest::Sessions`](super::ServeRequest::Sessions).
    Sessions(Vec<SessionListing>),
    /// To [`ServeRequest::Devices`](super::ServeRequest::Devices).
    Devices(Vec<DeviceListing>),
    /// To [`ServeRequest::Stats`](super::ServeRequest::Stats).
    Stats(Box<ServeStats>),
}

/// Sender of a loop's answer to a request.
#[derive(Clone, Debug)]
pub(crate) struct Reply<T>(Sender<Result<T, Refused>>);

impl<T> Reply<T> {
    pub(crate) fn send(self, answer: Result<T, Refused>) {
        // The receiver may be gone.
        let _ = self.0.send(answer);
    }
}

/// Receiver of the answer to a request.
#[derive(Debug)]
pub struct Pending<T>(Receiver<Result<T, Refused>>);

impl<T> Pending<T> {
    /// Waits for the answer, which may take as long as connecting does.
    ///
    /// # Errors
    /// The answer's; ENODEV when the loop has ended.
    pub fn wait(self) -> Result<T, Refused> {
        self.0.recv().unwrap_or_else(|_: RecvError| Err(gone()))
    }

    /// Waits for the first of several loops that does what was requested.
    ///
    /// # Errors
    /// If all refuse, the refusal of a loop that knows what the request is about, else ENOENT; ENODEV when all have ended.
    pub(crate) fn wait_for_first(self) -> Result<T, Refused> {
        let mut refusals = Vec::new();
        for answer in self.0 {
            match answer {
                Ok(done) => return Ok(done),
                Err(refused) => refusals.push(refused),
            }
        }
        let rank = |refused: &Refused| match refused.errno {
            Errno::ENODEV => 2,
            Errno::ENOENT => 1,
            _ => 0,
        };
        Err(refusals.into_iter().min_by_key(rank).unwrap_or_else(gone))
    }
}

fn gone() -> Refused {
    Refused::new(Errno::ENODEV, "the mapping or server has exited")
}

/// A channel for the answer to one request.
pub(crate) fn reply<T>() -> (Reply<T>, Pending<T>) {
    let (send, receive) = channel();
    (Reply(send), Pending(receive))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loop_that_knows_decides_and_no_other_is_waited_for() {
        let answers = |answers: &[Errno]| {
            let (reply, pending) = reply::<()>();
            for errno in answers {
                reply.clone().send(Err((*errno).into()));
            }
            drop(reply);
            pending.wait_for_first().unwrap_err().errno
        };
        let (none, gone, other) = (Errno::ENOENT, Errno::ENODEV, Errno::EPERM);
        assert_eq!(answers(&[]), gone);
        assert_eq!(answers(&[gone, none, gone]), none);
        assert_eq!(answers(&[none, other, gone]), other);
        let (reply, pending) = reply();
        reply.clone().send(Err(none.into()));
        reply.clone().send(Ok(7));
        assert_eq!(pending.wait_for_first(), Ok(7), "a loop has not answered");
        drop(reply);
    }
}
