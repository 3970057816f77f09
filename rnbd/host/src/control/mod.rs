//! Steering a running mapping or server: what is asked of its loops, and what they answer.
//!
//! Each side has one type of requests, one of answers, and a handle, which can be cloned and used from any thread. A request gets one
//! answer, when what was asked for is done or has failed; what else happens is told as events, as always.

pub mod map;
pub mod serve;

use std::sync::mpsc::{Receiver, RecvError, Sender, channel};

use rnbd::Errno;

/// A request was not, or could not be, complied with.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text}")]
pub struct Refused {
    /// The kernel's error number for it.
    pub errno: Errno,
    /// Reason for people.
    pub text: String,
}

impl Refused {
    /// With this error number, and what is wrong.
    pub fn new(errno: Errno, text: impl Into<String>) -> Self {
        Self {
            errno,
            text: text.into(),
        }
    }
}

impl From<Errno> for Refused {
    fn from(errno: Errno) -> Self {
        Self::new(errno, errno.to_string())
    }
}

impl From<rtrs::Error> for Refused {
    fn from(e: rtrs::Error) -> Self {
        Self::new(Errno::from_wire(e.errno()), e.to_string())
    }
}

/// Channel for a loop's answer to a request.
#[derive(Debug)]
pub(crate) struct Reply<T>(Sender<Result<T, Refused>>);

impl<T> Reply<T> {
    pub(crate) fn send(self, answer: Result<T, Refused>) {
        // Who asked may have gone.
        let _ = self.0.send(answer);
    }
}

/// The answer to a request that has been made.
#[derive(Debug)]
pub struct Pending<T>(Receiver<Result<T, Refused>>);

impl<T> Pending<T> {
    /// Waits for the answer, which may take as long as connecting does.
    ///
    /// # Errors
    /// The answer's; ENODEV when the loop has ended.
    pub fn wait(self) -> Result<T, Refused> {
        let gone = |_: RecvError| Err(Refused::new(Errno::ENODEV, "it has ended"));
        self.0.recv().unwrap_or_else(gone)
    }
}

/// Both ends of an answer.
pub(crate) fn answer<T>() -> (Reply<T>, Pending<T>) {
    let (send, receive) = channel();
    (Reply(send), Pending(receive))
}
