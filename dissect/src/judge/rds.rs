//! RDS: headers, fragments, sequence numbers, acknowledgements.

use ::rds::proto::{BITMAP_LEN, Flags, Header, Kind, MAX_MESSAGE};
use roce_pcap::Rule;

use super::{claims::Missing, cx::Cx, maps::Maps, rds_pair::RdsPair, stream::Whole};

/// Messages in a row without a request for an acknowledgement after which one is due. Kernels ask with the ninth, unless
/// `net.rds.max_unacked_packets` is changed.
const UNASKED: u32 = 128;

/// Message whose fragments are coming.
#[derive(Clone, Copy, Debug)]
enum Part {
    /// Fragments may be missing before the next one.
    Unknown,
    /// A fragment of this message was seen, and which one is not known.
    Skipped(Header),
    /// The next fragment begins a message.
    Between,
    /// The first fragment has this header, and so many have come.
    Open(Header, u32),
}

/// Fragment and its place in its message.
#[derive(Clone, Copy)]
struct Place<'a> {
    header: &'a Header,
    index: u32,
    data: &'a [u8],
}

/// Messages of one side.
#[derive(Debug)]
struct Side {
    part: Part,
    /// Sequence number of its last message on the connection.
    last: Option<u64>,
    /// Whether that is certain: none is missing in the capture behind it.
    is_last: bool,
    /// Highest sequence number of a packet that came before another one that it follows: its peer may have kept it.
    early: u64,
    /// Its last acknowledgement.
    ack: Option<u64>,
    /// Messages since it asked for an acknowledgement.
    unasked: u32,
    maps: Maps,
}

impl Default for Side {
    fn default() -> Self {
        Self {
            part: Part::Unknown,
            last: None,
            early: 0,
            is_last: false,
            ack: None,
            unasked: 0,
            maps: Maps::default(),
        }
    }
}

/// RDS connection.
#[derive(Default, Debug)]
pub(super) struct Rds {
    sides: [Side; 2],
    /// The requester of the connection is node 1 of its pair.
    swapped: bool,
}

impl Rds {
    /// Creates a connection whose beginning the capture has. `swapped`: its requester is node 1 of its pair.
    pub(super) fn begun(swapped: bool) -> Self {
        let mut rds = Self {
            swapped,
            ..Self::default()
        };
        for side in &mut rds.sides {
            side.part = Part::Between;
        }
        rds
    }

    /// Index of an endpoint's node in the pair.
    const fn node(&self, endpoint: usize) -> usize {
        match self.swapped {
            true => 1 - endpoint,
            false => endpoint,
        }
    }

    /// Notes that messages of a side are missing in the capture.
    pub(super) fn lost(&mut self, sender: usize) {
        let side = &mut self.sides[sender];
        (side.part, side.unasked, side.is_last) = (Part::Unknown, 0, false);
        side.maps.lost();
    }

    /// Notes a packet of a side that comes out of order.
    pub(super) fn early(&mut self, sender: usize, payload: &[u8], pair: Option<&mut RdsPair>) {
        if let Ok((header, _)) = Header::parse(payload) {
            let sequence = header.sequence.get();
            let early = &mut self.sides[sender].early;
            *early = sequence.max(*early);
            let node = self.node(sender);
            if let Some(pair) = pair {
                pair.early(node, sequence);
            }
        }
    }

    /// Notes that everything up to this PSN of a side was acknowledged.
    pub(super) fn acknowledged(&mut self, sender: usize, psn: i64, time_ns: u64) {
        self.sides[sender].maps.acknowledged(psn, time_ns);
    }

    /// Returns whether a SEND is what a claim takes for missing.
    pub(super) fn is(missing: Missing, message: &Whole<'_>) -> bool {
        let Ok((header, _)) = Header::peek(message.bytes) else {
            return false;
        };
        match missing {
            Missing::Sequence(sequence) => header.sequence.get() >= sequence,
            Missing::Map => header.kind() == Kind::Bitmap,
            _ => false,
        }
    }

    /// Judges a SEND. `trouble_ns` is when its sender last had to send something again.
    pub(super) fn message(
        &mut self,
        message: &Whole<'_>,
        trouble_ns: u64,
        pair: Option<&mut RdsPair>,
        cx: &mut Cx<'_>,
    ) {
        if message.reth.is_some() {
            // Data of an RDMA operation.
            return;
        }
        let (header, data) = match Header::parse(message.bytes) {
            Ok(found) => found,
            Err(why) => {
                let rule = match Header::peek(message.bytes) {
                    Ok(_) => Rule::RdsChecksum,
                    Err(_) => Rule::RdsLength,
                };
                cx.find(rule, why.to_string());
                self.sides[cx.sender].part = Part::Unknown;
                return;
            }
        };
        self.acknowledgement(header, pair.as_deref(), cx);
        if header.kind() == Kind::Ack {
            check_ack_only(message, data, cx);
            return;
        }
        let Some(index) = self.place(header, cx) else {
            return;
        };
        let place = Place { header, index, data };
        if index == 0 {
            self.first(header, trouble_ns, pair, cx);
        }
        self.fragment(place, message, cx);
    }

    /// Finds the place of a fragment in its message; `None`: it is not known.
    fn place(&mut self, header: &Header, cx: &mut Cx<'_>) -> Option<u32> {
        let part = &mut self.sides[cx.sender].part;
        let begins = match *part {
            Part::Open(first, count) => match header.continues(&first, count) {
                Ok(()) => {
                    *part = Part::Open(first, count + 1);
                    return Some(count);
                }
                Err(why) => {
                    let text = format!("{why}, of message {} ({} fragments)", first.sequence, first.fragments());
                    cx.find(Rule::RdsFragment, text);
                    // Whether it begins a message is not known.
                    false
                }
            },
            Part::Between => true,
            Part::Skipped(other) => header.continues(&other, 0).is_err(),
            Part::Unknown => header.fragments() == 1,
        };
        *part = match begins {
            true => Part::Open(*header, 1),
            false => Part::Skipped(*header),
        };
        begins.then_some(0)
    }

    /// Judges the first fragment of a message.
    fn first(&mut self, header: &Header, trouble_ns: u64, pair: Option<&mut RdsPair>, cx: &mut Cx<'_>) {
        let len = header.len.get();
        if len > MAX_MESSAGE {
            cx.find(
                Rule::RdsLength,
                format!("a message of {len} bytes, at most {MAX_MESSAGE}"),
            );
        }
        if header.flags().contains(Flags::CONG_BITMAP) {
            check_map(header, cx);
            return;
        }
        self.sequence(header, pair, cx);
        let dport = header.dport.get();
        let new = !header.flags().contains(Flags::RETRANSMITTED) && dport != 0;
        if let Some(shown) = self.sides[cx.receiver()].maps.congested(dport, cx.time_ns, trouble_ns)
            && new
        {
            let text = format!(
                "message {} to port {dport}, which the map of frame {} shows as congested",
                header.sequence, shown
            );
            cx.claim(Rule::RdsCongested, Missing::Map, text);
        }
        let unasked = &mut self.sides[cx.sender].unasked;
        *unasked = match header.flags().contains(Flags::ACK_REQUIRED) {
            true => 0,
            false => *unasked + 1,
        };
        if *unasked >= UNASKED {
            *unasked = 0;
            let text = format!(
                "{UNASKED} messages in a row, up to {}, ask for no acknowledgement",
                header.sequence
            );
            cx.find(Rule::RdsAckAsked, text);
        }
    }

    fn sequence(&mut self, header: &Header, pair: Option<&mut RdsPair>, cx: &mut Cx<'_>) {
        let sequence = header.sequence.get();
        let again = header.flags().contains(Flags::RETRANSMITTED);
        let node = self.node(cx.sender);
        let Side { last, is_last, .. } = &mut self.sides[cx.sender];
        if sequence == 0 {
            cx.find(Rule::RdsSequence, "a message with sequence number 0");
            return;
        }
        match *last {
            Some(before) if sequence <= before && !again => {
                cx.find(Rule::RdsSequence, format!("message {sequence} after message {before}"));
            }
            // The first one on the connection: the pair may have had others.
            None => {
                let before = pair.as_ref().and_then(|pair| pair.last(node));
                let repeats = before.is_some_and(|before| sequence <= before) && !again;
                if let Some(before) = before.filter(|_| repeats) {
                    let begins = sequence == 1;
                    let rule = if begins { Rule::RdsRestart } else { Rule::RdsRepeat };
                    let text = match begins {
                        true => format!("message 1, after message {before} over an earlier connection"),
                        false => format!(
                            "message {sequence} without RETRANSMITTED, after message {before} over an earlier connection"
                        ),
                    };
                    cx.find(rule, text);
                }
            }
            Some(_) => {}
        }
        let begins_again = last.is_none() && !again;
        *last = Some(sequence.max(last.unwrap_or(0)));
        *is_last = true;
        if let Some(pair) = pair {
            pair.sent(node, sequence, begins_again);
        }
    }

    /// Judges the acknowledgement in a header.
    fn acknowledgement(&mut self, header: &Header, pair: Option<&RdsPair>, cx: &mut Cx<'_>) {
        let ack = header.ack.get();
        let node = self.node(cx.receiver());
        let peer = &self.sides[cx.receiver()];
        let sent = peer.last.filter(|_| peer.is_last);
        let before = pair.and_then(|pair| pair.highest(node)).unwrap_or(0);
        let sent = sent.map(|last| last.max(before).max(peer.early));
        let before = self.sides[cx.sender].ack.replace(ack);
        if let Some(sent) = sent
            && ack > sent
            && before != Some(ack)
        {
            let text = format!("message {ack} is acknowledged, the last one that was sent is {sent}");
            cx.claim(Rule::RdsAckFuture, Missing::Sequence(ack), text);
        }
        if let Some(before) = before
            && ack < before
        {
            let text = format!("message {ack} is acknowledged after message {before}");
            cx.find(Rule::RdsAckBack, text);
        }
    }

    /// Judges a fragment by its place in its message.
    fn fragment(&mut self, place: Place<'_>, message: &Whole<'_>, cx: &mut Cx<'_>) {
        let Place { header, index, data } = place;
        let side = &mut self.sides[cx.sender];
        let expected = header.fragment_len(index);
        let len = message.len - Header::LEN;
        if len != expected && header.len.get() <= MAX_MESSAGE {
            let text = format!(
                "fragment {} of {} has {len} bytes of the message's {}, expected {expected}",
                index + 1,
                header.fragments(),
                header.len
            );
            cx.find(Rule::RdsLength, text);
        }
        if header.kind() == Kind::Bitmap && header.len.get() as usize == BITMAP_LEN {
            side.maps.fragment(index, data, message.psn, cx.frame);
        }
        if index + 1 < header.fragments() {
            return;
        }
        side.part = Part::Between;
        if !message.solicited {
            let name = match header.kind() {
                Kind::Bitmap => "a congestion map".to_owned(),
                _ => format!("message {}", header.sequence),
            };
            cx.find(
                Rule::RdsSolicited,
                format!("the last fragment of {name} is not solicited"),
            );
        }
    }
}

fn check_ack_only(message: &Whole<'_>, data: &[u8], cx: &mut Cx<'_>) {
    if !data.is_empty() {
        let text = format!("an acknowledgement with {} bytes behind its header", data.len());
        cx.find(Rule::RdsLength, text);
    }
    if !message.solicited {
        cx.find(Rule::RdsSolicited, "an acknowledgement is not solicited");
    }
}

fn check_map(header: &Header, cx: &mut Cx<'_>) {
    let (flags, len) = (header.flags(), header.len.get());
    if flags != Flags::CONG_BITMAP {
        let text = format!("a congestion map with flags {:#04x}, expected 0x01", flags.bits());
        cx.find(Rule::RdsMap, text);
    }
    if len as usize != BITMAP_LEN {
        cx.find(
            Rule::RdsMap,
            format!("a congestion map of {len} bytes, expected {BITMAP_LEN}"),
        );
    }
    let numbers = (header.sequence.get(), header.sport.get(), header.dport.get());
    if numbers != (0, 0, 0) {
        let (sequence, sport, dport) = numbers;
        let text = format!("a congestion map with sequence number {sequence}, ports {sport} and {dport}");
        cx.find(Rule::RdsMapNumbers, text);
    }
}
