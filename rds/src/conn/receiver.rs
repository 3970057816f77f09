//! Messages of a connection from its peer: fragments to messages, duplicates, acknowledgements.

use super::broken::Broken;
use crate::proto::{BITMAP_LEN, BitmapFragment, CongestionMap, Flags, Fragment, Header, Kind, MAX_FRAGMENT, MAX_SEND};

/// Message that has come whole.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Incoming {
    /// For a socket. Pongs of the peer are among these, from port 0.
    Data {
        /// Header of its first fragment.
        header: Header,
        /// Its bytes.
        data: Vec<u8>,
    },
    /// The peer wants an empty message to this port.
    Ping(u16),
    /// Ports of the peer's address that are congested.
    Map(CongestionMap),
    /// Had come before, or is for nobody.
    Dropped,
}

/// Result of a fragment.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Taken {
    /// Messages of ours that the peer has: all up to this one.
    pub(crate) ack: u64,
    /// Message that is whole now.
    pub(crate) message: Option<Incoming>,
    /// It carries the acknowledgement alone.
    pub(crate) is_only_ack: bool,
    /// The message wants to be acknowledged.
    pub(crate) asks: bool,
    /// The message's number is lower than one that has come: the peer was started again.
    pub(crate) has_restarted: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Receiver {
    buffer: Box<[u8; MAX_SEND]>,
    messages: Messages,
}

impl Receiver {
    /// Returns one that has got all messages before this one.
    pub(crate) fn new(next: u64) -> Self {
        let messages = Messages {
            next: next.max(1),
            is_first: true,
            partial: None,
            told: 0,
            asked: false,
        };
        Self {
            buffer: Box::new([0; MAX_SEND]),
            messages,
        }
    }

    /// Sequence number after the highest one that has come.
    pub(crate) fn next(&self) -> u64 {
        self.messages.next
    }

    /// Acknowledgement for the next header: the highest sequence number that has come, 0 if none has over this connection. A peer that was
    /// started again takes an older one for that of messages that it has only just sent, and would not send them again.
    pub(crate) fn ack(&self) -> u64 {
        self.messages.ack()
    }

    /// The acknowledgement has left, with whatever header.
    pub(crate) fn ack_sent(&mut self) {
        (self.messages.told, self.messages.asked) = (self.ack(), false);
    }

    /// Returns whether the peer has asked for an acknowledgement that has not left.
    pub(crate) fn is_asked(&self) -> bool {
        self.messages.asked
    }

    /// Returns whether something has come that the peer was not told of.
    pub(crate) fn is_untold(&self) -> bool {
        self.messages.told != self.ack()
    }

    /// The connection is gone, with the message that was not whole.
    pub(crate) fn restart(&mut self) {
        let next = self.messages.next;
        self.messages = Messages {
            next,
            is_first: true,
            partial: None,
            told: 0,
            asked: false,
        };
    }

    /// Takes a SEND of `len` bytes, which `read` copies.
    ///
    /// # Errors
    /// The connection has to end: a wrong length or checksum, or a fragment of another message.
    pub(crate) fn take(&mut self, len: usize, read: impl FnOnce(&mut [u8]) -> bool) -> Result<Taken, Broken> {
        let bytes = self.buffer.get_mut(..len).ok_or(Broken::Length(len))?;
        match read(bytes) {
            true => self.messages.fragment(bytes),
            false => Err(Broken::Memory),
        }
    }
}

/// Message whose first fragments are there. Its memory grows with what comes.
#[derive(Debug)]
struct Partial {
    first: Header,
    fragments: u32,
    data: Vec<u8>,
}

#[derive(Debug)]
struct Messages {
    /// Sequence number after the highest one that has come. It outlives connections.
    next: u64,
    /// No message has come over the present connection.
    is_first: bool,
    partial: Option<Partial>,
    /// Highest sequence number that the peer was told of.
    told: u64,
    /// The peer wants to be told.
    asked: bool,
}

impl Messages {
    fn ack(&self) -> u64 {
        match self.is_first {
            true => 0,
            false => self.next - 1,
        }
    }

    fn fragment(&mut self, bytes: &[u8]) -> Result<Taken, Broken> {
        let (header, _) = Header::parse(bytes)?;
        let ack = header.ack.get();
        if header.kind() == Kind::Ack {
            return Ok(Taken {
                ack,
                message: None,
                is_only_ack: true,
                asks: false,
                has_restarted: false,
            });
        }
        let index = self.partial.as_ref().map_or(0, |partial| partial.fragments);
        let Fragment { header, data } = Fragment::parse(bytes, index)?;
        let partial = self.partial.get_or_insert_with(|| Partial {
            first: *header,
            fragments: 0,
            data: Vec::new(),
        });
        header.continues(&partial.first, index)?;
        partial.data.extend_from_slice(data);
        partial.fragments += 1;
        let whole = self.partial.take_if(|partial| partial.fragments == header.fragments());
        let asks = whole
            .as_ref()
            .is_some_and(|whole| whole.first.flags().contains(Flags::ACK_REQUIRED));
        let next = self.next;
        let message = whole.map(|whole| self.whole(whole.first, whole.data));
        Ok(Taken {
            ack,
            message,
            is_only_ack: false,
            asks,
            has_restarted: self.next < next,
        })
    }

    fn whole(&mut self, header: Header, data: Vec<u8>) -> Incoming {
        // It has no sequence number, and is not acknowledged.
        if header.kind() == Kind::Bitmap {
            return map(&data).map_or(Incoming::Dropped, Incoming::Map);
        }
        // Nor has it, but the kernel takes it for a message if its flags are not exactly right.
        if (header.sport.get(), header.dport.get()) == (0, 0) {
            return Incoming::Dropped;
        }
        let (sequence, flags) = (header.sequence.get(), header.flags());
        self.asked |= flags.contains(Flags::ACK_REQUIRED);
        // Within a connection sequence numbers ascend. Over a new one a peer repeats what was not acknowledged, or it was started again and
        // counts from 1.
        let has_restarted = self.is_first && !flags.contains(Flags::RETRANSMITTED);
        self.is_first = false;
        if sequence < self.next && !has_restarted {
            return Incoming::Dropped;
        }
        self.next = sequence.saturating_add(1);
        match header.kind() {
            Kind::Ping => Incoming::Ping(header.sport.get()),
            _ => Incoming::Data { header, data },
        }
    }
}

/// Returns the map that a message carries; `None` if it has another length, which the kernel ignores.
fn map(data: &[u8]) -> Option<CongestionMap> {
    if data.len() != BITMAP_LEN {
        return None;
    }
    let mut map = CongestionMap::default();
    for (index, part) in data.chunks_exact(MAX_FRAGMENT).enumerate() {
        map.replace(&BitmapFragment::parse(index as u32, part).ok()?);
    }
    Some(map)
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes as _;

    use super::*;

    fn take(receiver: &mut Receiver, header: &Header, data: &[u8]) -> Result<Taken, Broken> {
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend_from_slice(data);
        receiver.take(bytes.len(), |out| {
            out.copy_from_slice(&bytes);
            true
        })
    }

    fn header(sequence: u64, len: u32, flags: Flags) -> Header {
        Header::new(sequence, 5, len, (7, 9), flags)
    }

    /// Takes a message of one byte; returns whether it was delivered.
    fn delivered(receiver: &mut Receiver, sequence: u64, flags: Flags) -> bool {
        let taken = take(receiver, &header(sequence, 1, flags), &[0]).unwrap();
        matches!(taken.message, Some(Incoming::Data { .. }))
    }

    #[test]
    fn messages_come_once_over_all_connections() {
        let (mut receiver, again, none) = (Receiver::new(1), Flags::RETRANSMITTED, Flags::empty());
        assert!(delivered(&mut receiver, 1, none) && delivered(&mut receiver, 2, none));
        // Canceled messages leave gaps.
        assert!(delivered(&mut receiver, 9, none));
        assert!(!delivered(&mut receiver, 9, none) && !delivered(&mut receiver, 3, again));
        assert_eq!(receiver.ack(), 9);
        receiver.restart();
        assert!(!delivered(&mut receiver, 9, again) && delivered(&mut receiver, 10, again));
    }

    #[test]
    fn nothing_is_acknowledged_over_a_connection_before_something_has_come_over_it() {
        let (mut receiver, again) = (Receiver::new(5), Flags::RETRANSMITTED);
        assert_eq!(receiver.ack(), 0, "a former node got the messages before");
        assert!(delivered(&mut receiver, 5, Flags::empty()));
        receiver.restart();
        assert_eq!((receiver.ack(), receiver.is_untold()), (0, false));
        assert!(!delivered(&mut receiver, 5, again));
        assert_eq!((receiver.ack(), receiver.is_untold()), (5, true));
    }

    #[test]
    fn a_peer_that_was_started_again_counts_from_1() {
        let mut receiver = Receiver::new(1);
        assert!(delivered(&mut receiver, 1000, Flags::empty()));
        receiver.restart();
        let first = take(&mut receiver, &header(1, 1, Flags::empty()), &[0]).unwrap();
        assert!(first.has_restarted && matches!(first.message, Some(Incoming::Data { .. })));
        assert_eq!(receiver.ack(), 1);
        // Only with its first message.
        assert!(delivered(&mut receiver, 2, Flags::empty()) && !delivered(&mut receiver, 1, Flags::empty()));
    }

    #[test]
    fn fragments_make_a_message_and_acknowledgements_may_come_between() {
        let mut receiver = Receiver::new(1);
        let data: Vec<u8> = (0..5000).map(|i| i as u8).collect();
        let first = take(&mut receiver, &header(1, 5000, Flags::ACK_REQUIRED), &data[..4096]).unwrap();
        assert_eq!((first.ack, first.message), (5, None));
        let between = take(&mut receiver, &Header::ack_only(6), &[]).unwrap();
        assert_eq!((between.ack, between.message, between.is_only_ack), (6, None, true));
        assert!(!first.is_only_ack && !first.asks && !first.has_restarted);
        let last = take(&mut receiver, &header(1, 5000, Flags::ACK_REQUIRED), &data[4096..]).unwrap();
        let Some(Incoming::Data { data: whole, .. }) = last.message else {
            panic!("{last:?}");
        };
        assert!(whole == data && receiver.is_asked() && last.asks);
        receiver.ack_sent();
        assert!(!receiver.is_asked() && !receiver.is_untold());
    }

    #[test]
    fn impossible_fragments_end_the_connection() {
        let mut wrong_sum = header(1, 1, Flags::empty());
        wrong_sum.set_flags(Flags::ACK_REQUIRED);
        let cases: [(&str, Header, usize); 4] = [
            ("checksum", wrong_sum, 1),
            ("too short", header(1, 100, Flags::empty()), 99),
            ("too long", header(1, 100, Flags::empty()), 101),
            ("above 1 MiB", header(1, (1 << 20) + 1, Flags::empty()), 4096),
        ];
        for (what, header, len) in cases {
            let taken = take(&mut Receiver::new(1), &header, &vec![0; len]);
            assert!(taken.is_err(), "{what}: {taken:?}");
        }
        // Of another message.
        let mut receiver = Receiver::new(1);
        take(&mut receiver, &header(1, 5000, Flags::empty()), &[0; 4096]).unwrap();
        assert!(take(&mut receiver, &header(2, 5000, Flags::empty()), &[0; 904]).is_err());
        assert!(Receiver::new(1).take(MAX_SEND + 1, |_| true).is_err());
    }

    #[test]
    fn a_map_has_no_number_and_its_flags_and_length_are_exact() {
        let mut receiver = Receiver::new(3);
        let mut map = CongestionMap::default();
        map.set(4000, true);
        let send = |receiver: &mut Receiver, header: Header| {
            let part = |index| map.fragment(index).unwrap();
            take(receiver, &header, part(0).bytes()).unwrap();
            take(receiver, &header, part(1).bytes()).unwrap().message
        };
        assert_eq!(send(&mut receiver, Header::bitmap(0)), Some(Incoming::Map(map.clone())));
        let other = Header::new(
            0,
            0,
            BITMAP_LEN as u32,
            (0, 0),
            Flags::CONG_BITMAP | Flags::ACK_REQUIRED,
        );
        assert_eq!(send(&mut receiver, other), Some(Incoming::Dropped));
        assert_eq!(receiver.next(), 3);
        let short = Header::new(0, 0, 4096, (0, 0), Flags::CONG_BITMAP);
        let taken = take(&mut receiver, &short, &[0; 4096]).unwrap();
        assert_eq!(taken.message, Some(Incoming::Dropped));
    }

    #[test]
    fn pings_have_a_number_and_no_socket() {
        let mut receiver = Receiver::new(1);
        let ping = Header::new(1, 0, 0, (77, 0), Flags::empty());
        assert_eq!(
            take(&mut receiver, &ping, &[]).unwrap().message,
            Some(Incoming::Ping(77))
        );
        assert_eq!(receiver.ack(), 1);
    }
}
