//! Comparison of a node's SENDs and private data with those of the captured side.

use std::{fmt, net::IpAddr};

use rds::proto::{Flags, Header};
use zerocopy::IntoBytes as _;

use super::{
    kind::Kind,
    player::{Played, Posted},
    record::{Record, Sent},
};

/// Difference between a node and the captured side.
#[derive(Debug)]
pub(super) struct Difference {
    pub(super) kind: Kind,
    text: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Result of the comparison.
#[derive(Debug, Default)]
pub(super) struct Comparison {
    /// SENDs that are the same, byte for byte.
    pub(super) equal: usize,
    /// SENDs of the captured side.
    pub(super) theirs: usize,
    /// Private data that are the same, byte for byte.
    pub(super) private: usize,
    pub(super) differences: Vec<Difference>,
}

impl Comparison {
    fn note(&mut self, kind: Kind, text: String) {
        self.differences.push(Difference { kind, text });
    }

    fn private(&mut self, record: &Record, played: &Played, side: IpAddr) {
        for (id, link) in record.links.iter().enumerate() {
            let (Some(private), Some(ours)) = (&link.private, played.private.get(&id)) else {
                continue;
            };
            let theirs = &private[usize::from(link.acceptor == side)];
            let (same, rest) = theirs.split_at(ours.len().min(theirs.len()));
            match same == ours && rest.iter().all(|byte| *byte == 0) {
                true => self.private += 1,
                false => self.note(
                    Kind::Other,
                    format!("connection {id}: private data {ours:02x?}, not {theirs:02x?}"),
                ),
            }
        }
    }

    /// Compares the SENDs of a connection: acknowledgements without data by the moment at which they were sent, all others by their order.
    fn link(&mut self, theirs: &[(usize, &Sent)], ours: &[Posted]) {
        let (mut acks, others): (Vec<_>, Vec<_>) = ours.iter().partition(|posted| is_ack(&posted.bytes));
        let mut others = others.into_iter();
        for (number, sent) in theirs {
            self.theirs += 1;
            let next = match is_ack(&sent.bytes) {
                true => acks
                    .iter()
                    .position(|posted| posted.beside == Some(*number))
                    .map(|at| acks.remove(at)),
                false => others.next(),
            };
            match next {
                Some(next) if next.bytes == sent.bytes => self.equal += 1,
                Some(next) => self.fields(sent, &next.bytes),
                None if is_ack(&sent.bytes) => self.note(Kind::NoAckAlone, shown(sent.frame, &sent.bytes)),
                None => self.note(Kind::Other, format!("not sent: {}", shown(sent.frame, &sent.bytes))),
            }
        }
        for more in acks {
            self.note(Kind::AckAlone, shown(0, &more.bytes));
        }
        for more in others {
            self.note(Kind::More, shown(0, &more.bytes));
        }
    }

    /// Names the fields in which two SENDs differ.
    fn fields(&mut self, sent: &Sent, ours: &[u8]) {
        let (Ok((theirs, data)), Ok((header, our_data))) = (Header::peek(&sent.bytes), Header::parse(ours)) else {
            return self.note(Kind::Other, shown(sent.frame, ours));
        };
        const SEVERAL: Flags = Flags::SEVERAL_EXTENSIONS;
        let ask = Flags::ACK_REQUIRED;
        let [we_ask, they_ask] = [header, theirs].map(|header| header.flags().contains(ask));
        let mut alike = *header;
        alike.ack = theirs.ack;
        let mut flags = header.flags();
        flags.set(ask, they_ask);
        flags.set(SEVERAL, theirs.flags().contains(SEVERAL));
        alike.set_flags(flags);
        let theirs_ext: Vec<_> = theirs.extensions().collect();
        let extends = header.extensions().next().is_none() && !theirs_ext.is_empty();
        if extends {
            alike.set_extensions(rds::proto::pack(&theirs_ext).unwrap_or_default());
        }
        alike.seal();
        if alike.as_bytes() != theirs.as_bytes() || data != our_data {
            let text = format!("{}, not {}", shown(sent.frame, ours), shown(sent.frame, &sent.bytes));
            return self.note(Kind::Other, text);
        }
        if extends {
            self.note(Kind::Extensions, format!("frame {}: {theirs_ext:?}", sent.frame));
        }
        if we_ask != they_ask {
            let kind = if we_ask { Kind::Asks } else { Kind::DoesNotAsk };
            self.note(kind, format!("frame {}", sent.frame));
        }
        if header.ack != theirs.ack {
            let text = format!("frame {}: {}, not {}", sent.frame, header.ack, theirs.ack);
            self.note(Kind::Acknowledges, text);
        }
    }
}

fn is_ack(bytes: &[u8]) -> bool {
    Header::peek(bytes).is_ok_and(|(header, _)| header.kind() == rds::proto::Kind::Ack)
}

fn shown(frame: u64, bytes: &[u8]) -> String {
    match Header::peek(bytes) {
        Ok((header, data)) => format!(
            "frame {frame}: {:?} {} (ack {}, {} bytes, {} to {}, {:?}, extensions {:?}) with {} bytes",
            header.kind(),
            header.sequence,
            header.ack,
            header.len,
            header.sport,
            header.dport,
            header.flags(),
            header.extensions().collect::<Vec<_>>(),
            data.len()
        ),
        Err(e) => e.to_string(),
    }
}

/// Compares what a node did with what its side did in the capture.
pub(super) fn compare(record: &Record, played: &Played, side: IpAddr) -> Comparison {
    let mut comparison = Comparison::default();
    comparison.private(record, played, side);
    for id in 0..record.links.len() {
        if played.refused.contains(&id) {
            comparison.note(Kind::Refuses, format!("connection {id}"));
            continue;
        }
        let whole = record
            .sent
            .iter()
            .enumerate()
            .filter(|(_, sent)| !sent.bytes.is_empty());
        let mut theirs: Vec<_> = whole.filter(|(_, sent)| sent.link == id && sent.from == side).collect();
        theirs.sort_by_key(|(_, sent)| sent.frame);
        let ours = played.posted.get(&id).map_or(&[][..], Vec::as_slice);
        comparison.link(&theirs, ours);
    }
    comparison
}
