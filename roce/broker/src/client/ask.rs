//! Requests over a connection that no other thread uses.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    time::{Duration, Instant},
};

use crate::{
    error::{Error, context},
    page::Page,
    proto::{Grant, Reply, Request, Statistics, ToBroker, ToClient, VERSION},
    start,
    wire::{self, MAX_RECORD, RecvError},
};

/// Time that a request may take, the start of another broker included.
pub(super) const REQUEST_TIME: Duration = Duration::from_secs(30);

/// Sends a request and waits for the answer. Packets that come instead are lost.
pub(super) fn ask(link: &OwnedFd, request: Request, fds: &[BorrowedFd<'_>]) -> Result<(Reply, Vec<OwnedFd>), Error> {
    say(link, &ToBroker::Request { seq: 0, request }, fds)?;
    answer(link)
}

/// Sends a message, waiting for room.
pub(super) fn say(link: &OwnedFd, message: &ToBroker, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
    let bytes = wire::encode(message, &[]);
    let sent = bytes.and_then(|bytes| wire::send(link.as_fd(), &bytes, fds, true));
    sent.map_err(context("asking the broker"))
}

/// Waits for the answer to a request, or for a further one to the same.
fn answer(link: &OwnedFd) -> Result<(Reply, Vec<OwnedFd>), Error> {
    let mut buffer = vec![0; MAX_RECORD];
    let deadline = Instant::now() + REQUEST_TIME;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::Timeout);
        }
        if !roce_net::wait_readable(link.as_fd(), Some(left)).map_err(context("waiting for the broker"))? {
            continue;
        }
        let record = match wire::receive(link.as_fd(), &mut buffer, false) {
            Ok(record) => record,
            Err(RecvError::Empty) => continue,
            Err(RecvError::Closed) => {
                return Err(context("asking the broker")(io::ErrorKind::ConnectionReset.into()));
            }
            Err(RecvError::Malformed(_)) => return Err(Error::Protocol),
        };
        if let ToClient::Reply { reply, .. } = record.message {
            return Ok((accepted(reply, record.lacks_fds)?, record.fds));
        }
    }
}

/// Turns a refusal, or an answer without its descriptors, into an error.
pub(super) fn accepted(reply: Reply, lacks_fds: bool) -> Result<Reply, Error> {
    match reply {
        Reply::Refused { why, text } => Err(Error::Refused { why, text }),
        _ if lacks_fds => Err(context("receiving sockets of the broker")(
            rustix::io::Errno::MFILE.into(),
        )),
        _ => Ok(reply),
    }
}

/// Joins. Returns the member's place, and its page.
pub(super) fn say_hello(link: &OwnedFd, name: &str, rejoin: Option<Grant>) -> Result<(Grant, Option<Page>), Error> {
    let hello = Request::Hello {
        version: VERSION,
        name: name.to_owned(),
        rejoin,
    };
    let (reply, fds) = ask(link, hello, &[])?;
    let given = match reply {
        Reply::Welcome(given) if given.place.is_valid() => given,
        _ => return Err(Error::Protocol),
    };
    let page = fds.first().map(Page::map).transpose();
    let page = page.map_err(context("mapping the page for counters"))?;
    Ok((given, page))
}

/// Returns the statistics of a running broker; `None` if none runs.
///
/// # Errors
/// When it does not answer.
pub fn statistics(dir: &Path) -> Result<Option<Statistics>, Error> {
    let Some(link) = start::connect(dir)? else {
        return Ok(None);
    };
    let mut all: Option<Statistics> = None;
    let (mut reply, _) = ask(&link, Request::Statistics, &[])?;
    while let Reply::Statistics { part, more } = reply {
        match &mut all {
            None => all = Some(part),
            Some(all) => all.append(part),
        }
        if !more {
            return Ok(all);
        }
        (reply, _) = answer(&link)?;
    }
    Err(Error::Protocol)
}

/// Returns whether a broker runs that this user may use.
pub fn running_broker(dir: &Path) -> bool {
    matches!(start::connect(dir), Ok(Some(_)))
}
