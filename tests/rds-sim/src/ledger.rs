//! Messages that were accepted and have not been received, and the rules for them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use roce_sim::Check;

/// Socket to socket, with the type of service of the sender's: the order holds within each.
pub(crate) type Stream = (SocketAddr, SocketAddr);

/// Message under way.
#[derive(Debug)]
struct Sent {
    number: u64,
    len: usize,
    /// It may be missing: its sender or receiver died, was closed, or canceled it.
    may_be_lost: bool,
}

/// Messages of a stream.
#[derive(Default, Debug)]
struct Messages {
    sent: Vec<Sent>,
    /// How many of them may have come, or are lost: several numbers, since short messages look alike.
    done: BTreeSet<usize>,
}

impl Messages {
    /// Whether all from this one on may be missing.
    fn may_all_be_lost(&self, from: usize) -> bool {
        self.sent[from..].iter().all(|sent| sent.may_be_lost)
    }

    fn is_settled(&self) -> bool {
        self.done.iter().any(|done| self.may_all_be_lost(*done))
    }

    /// A message has come. False: it can't be any of them.
    fn received(&mut self, data: &[u8]) -> bool {
        let mut done = BTreeSet::new();
        for from in &self.done {
            for (index, sent) in self.sent.iter().enumerate().skip(*from) {
                if data == content(sent.number, sent.len) {
                    done.insert(index + 1);
                }
                if !sent.may_be_lost {
                    break;
                }
            }
        }
        let found = !done.is_empty();
        if found {
            self.done = done;
        }
        found
    }
}

/// See the module.
#[derive(Default, Debug)]
pub(crate) struct Ledger {
    streams: BTreeMap<Stream, Messages>,
    next: u64,
    pub(crate) sent: u64,
    pub(crate) received: u64,
}

/// Returns the bytes of a message: its number, then bytes that differ from one message to the next.
pub(crate) fn content(number: u64, len: usize) -> Vec<u8> {
    let tail = (0..).map(|i: u64| (number.wrapping_mul(31).wrapping_add(i * 7)) as u8);
    number.to_le_bytes().into_iter().chain(tail).take(len).collect()
}

impl Ledger {
    /// Returns the next message's number.
    pub(crate) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// A node has accepted a message. `operates`: it has an operation, and is not sent again over another connection.
    pub(crate) fn accepted(&mut self, stream: Stream, number: u64, len: usize, operates: bool) {
        self.sent += 1;
        let messages = self.streams.entry(stream).or_default();
        if messages.sent.is_empty() {
            messages.done.insert(0);
        }
        messages.sent.push(Sent {
            number,
            len,
            may_be_lost: operates,
        });
    }

    /// A message has come.
    pub(crate) fn received(&mut self, stream: Stream, data: &[u8]) -> Check {
        let messages = self.streams.entry(stream).or_default();
        if messages.received(data) {
            self.received += 1;
            return Ok(());
        }
        let due = messages.done.iter().map(|done| messages.sent.get(*done));
        Err(format!(
            "{} to {}: a message of {} bytes instead of one of {:?}",
            stream.0,
            stream.1,
            data.len(),
            due.collect::<Vec<_>>()
        ))
    }

    /// Messages of these streams that are under way may be missing.
    pub(crate) fn may_lose(&mut self, is_meant: impl Fn(&Stream) -> bool) {
        for (_, messages) in self.streams.iter_mut().filter(|(stream, _)| is_meant(stream)) {
            let first = messages.done.first().copied().unwrap_or(0);
            messages.sent[first..]
                .iter_mut()
                .for_each(|sent| sent.may_be_lost = true);
        }
    }

    /// Returns whether nothing is under way that has to come.
    pub(crate) fn is_settled(&self) -> bool {
        self.streams.values().all(Messages::is_settled)
    }

    /// Returns what is still to come.
    pub(crate) fn situation(&self) -> String {
        let late = self.streams.iter().filter(|(_, messages)| !messages.is_settled());
        let late = late.map(|(stream, messages)| {
            let done = messages.done.first();
            format!(
                "{} to {}: {done:?} of {} are done",
                stream.0,
                stream.1,
                messages.sent.len()
            )
        });
        late.collect::<Vec<_>>().join("; ")
    }
}
