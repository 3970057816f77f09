//! Requests over a connection that nobody else uses.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    time::{Duration, Instant},
};

use crate::{
    page::Page,
    proto::{Rejoin, Reply, Request, Statistics, ToBroker, ToClient, VERSION},
    start::{self, JoinError, join_io},
    wire::{self, MAX_RECORD, Record, RecvError},
};

/// How long a request may take, the start of another broker included.
pub(super) const REQUEST_TIME: Duration = Duration::from_secs(30);
/// The number of requests over a connection that nobody else uses.
const SEQ: u64 = 0;

/// Sends a request over a connection that nobody else uses, and waits for the answer. What comes besides is passed to
/// `other`.
pub(super) fn ask(
    link: &OwnedFd,
    request: Request,
    fds: &[BorrowedFd<'_>],
    other: &mut dyn FnMut(Record<ToClient>),
) -> Result<Record<Reply>, JoinError> {
    let bytes = wire::encode(&ToBroker::Request { seq: SEQ, request }, &[]).map_err(join_io("asking the broker"))?;
    wire::send(link.as_fd(), &bytes, fds, true).map_err(join_io("asking the broker"))?;
    answer(link, other)
}

/// Waits for the answer to a request of [`ask`], or for another one to the same.
fn answer(link: &OwnedFd, other: &mut dyn FnMut(Record<ToClient>)) -> Result<Record<Reply>, JoinError> {
    let mut buffer = vec![0; MAX_RECORD];
    let deadline = Instant::now() + REQUEST_TIME;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(JoinError::Timeout);
        }
        if !roce_net::wait_readable(link.as_fd(), Some(left)).map_err(join_io("waiting for the broker"))? {
            continue;
        }
        match wire::receive(link.as_fd(), &mut buffer, false) {
            Ok(Record {
                message: ToClient::Reply { seq: SEQ, reply },
                fds,
                lacks_fds,
                ..
            }) => {
                return accepted(Record {
                    message: reply,
                    payload: vec![],
                    fds,
                    lacks_fds,
                });
            }
            Ok(record) => other(record),
            Err(RecvError::Empty) => {}
            Err(RecvError::Closed) => {
                return Err(join_io("asking the broker")(io::ErrorKind::ConnectionReset.into()));
            }
            Err(RecvError::Malformed(_)) => return Err(JoinError::Protocol),
        }
    }
}

pub(super) fn accepted(record: Record<Reply>) -> Result<Record<Reply>, JoinError> {
    match record.message {
        Reply::Refused { why, text } => Err(JoinError::Refused { why, text }),
        _ if record.lacks_fds => Err(join_io("receiving sockets of the broker")(
            io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error()),
        )),
        _ => Ok(record),
    }
}

/// Joins over a connection that nobody else uses. Returns what the member was given, and its page.
pub(super) fn say_hello(
    link: &OwnedFd,
    name: &str,
    rejoin: Option<Rejoin>,
) -> Result<(Rejoin, Option<Page>), JoinError> {
    let hello = Request::Hello {
        version: VERSION,
        name: name.to_owned(),
        rejoin,
    };
    let record = ask(link, hello, &[], &mut |_| {})?;
    let Reply::Welcome { place, token, parts } = record.message else {
        return Err(JoinError::Protocol);
    };
    if !place.is_valid() {
        return Err(JoinError::Protocol);
    }
    let page = record.fds.first().map(Page::map).transpose();
    let page = page.map_err(join_io("mapping the page for counters"))?;
    Ok((Rejoin { place, token, parts }, page))
}

/// Asks a running broker who is there; `None` when none runs.
///
/// # Errors
/// When it does not answer.
pub fn statistics(dir: &Path) -> Result<Option<Statistics>, JoinError> {
    let Some(link) = start::connect(dir)? else {
        return Ok(None);
    };
    let mut all: Option<Statistics> = None;
    let mut record = ask(&link, Request::Statistics, &[], &mut |_| {})?;
    while let Reply::Statistics { part, more } = record.message {
        match &mut all {
            None => all = Some(part),
            Some(all) => all.append(part),
        }
        if !more {
            return Ok(all);
        }
        record = answer(&link, &mut |_| {})?;
    }
    Err(JoinError::Protocol)
}

/// Whether a broker runs that this user may use.
pub fn running_broker(dir: &Path) -> bool {
    matches!(start::connect(dir), Ok(Some(_)))
}
