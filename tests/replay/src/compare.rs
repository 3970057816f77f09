//! What may differ, by name.

use std::collections::VecDeque;

use roce_bth::{Class, Header, NakCode, Packet, Psn, Syndrome};
use serde::Deserialize;

/// In what our engine and the captured side differ.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The same request, but only one of the two asks for an acknowledgement: the requester's choice, in the middle of a
    /// message or where ours does.
    AckRequest,
    /// A message's last packet, with which only the captured side asks for an acknowledgement.
    NoAckRequest,
    /// Positive acknowledgements that only one of the two sent, and that another one covers.
    AckCoalescing,
    /// Ours acknowledges the packet that its NAK asked for, at once; theirs says it later, with something that implies it.
    AckAfterRefusal,
    /// The acknowledgement of a duplicate: ours has the duplicate's PSN, theirs a later one that was executed (IBA C9-105
    /// allows both).
    DuplicateAck,
    /// The same packet but for MigReq, which IBA leaves without meaning on paths that don't migrate.
    MigReq,
    /// An acknowledgement with another credit count.
    Credits,
    /// The answer to a READ that was asked for again from the middle: ours opens a stream (FIRST, ONLY), as the
    /// specification has it, rdma_rxe goes on with the one from before (MIDDLE, LAST). Bytes and PSN are the same.
    ReadResumed,
    /// The captured side reports a sequence gap right after its RNR NAK for the same PSN, before it took a request with
    /// that; ours is silent, as the specification has it.
    GapAfterRnr,
    /// An answer that only the captured side sent.
    OnlyTheirAnswer,
    /// An answer that only ours sent.
    OnlyOurAnswer,
    /// A request that only the captured side ever sent.
    OnlyTheirRequest,
    /// A request that only ours ever sent.
    OnlyOurRequest,
    /// A request that both sent, the captured side once more. How much a requester repeats is its own choice; that it
    /// repeats where it has to is a matter of [`Kind::NotRepeated`].
    OnlyTheirRepeat,
    /// A request that the captured side sent, perhaps once more, after it had got the NAK that ends the connection: it was
    /// in its queue.
    AfterRefusal,
    /// The captured side's requests were refused, or its timer ran out, it repeated them and had success; ours repeats
    /// nothing, or something else.
    NotRepeated,
    /// A request that both sent, ours once more, although nobody refused it.
    OnlyOurRepeat,
    /// A request that both sent, ours once more, because it was refused: of two refusals in a row the captured side heeds
    /// one.
    RepeatedAsTold,
    /// Another answer.
    Answer,
    /// The packets are the same, the ICRCs are not.
    Icrc,
}

impl Kind {
    /// Whether the replay makes a difference of this kind only where it knows that both sides are right. Only these may be
    /// allowed without a number.
    pub const fn proves_itself(self) -> bool {
        matches!(
            self,
            Self::AckRequest
                | Self::AckAfterRefusal
                | Self::DuplicateAck
                | Self::ReadResumed
                | Self::GapAfterRnr
                | Self::OnlyTheirRepeat
                | Self::RepeatedAsTold
                | Self::AfterRefusal
        )
    }
}

/// A difference.
#[derive(Clone, Debug)]
pub struct Difference {
    /// The captured frame, or the last one before.
    pub frame: u64,
    /// What differs.
    pub kind: Kind,
    /// Both packets.
    pub detail: String,
}

/// One line about a packet given without its ICRC.
pub(crate) fn describe(body: &[u8]) -> String {
    let mut bytes = body.to_vec();
    bytes.extend([0; 4]);
    match Packet::parse(&bytes) {
        Ok(p) => {
            let h = Header::from(p.header);
            let flag = |on: bool, name: &'static str| if on { name } else { "" };
            format!(
                "{} psn {}{}{} {} bytes{}{}{}{}{}",
                h.bth.opcode,
                h.bth.psn.value(),
                flag(h.bth.ack_req, " A"),
                flag(h.bth.solicited, " S"),
                p.payload.len(),
                h.reth.map_or(String::new(), |r| format!(" {r:x?}")),
                h.atomic_eth.map_or(String::new(), |a| format!(" {a:x?}")),
                h.aeth
                    .map_or(String::new(), |a| format!(" {:?} msn {}", a.syndrome, a.msn.value())),
                h.imm.map_or(String::new(), |i| format!(" imm {i:#x}")),
                h.ieth.map_or(String::new(), |k| format!(" inv {:#x}", k.0)),
            )
        }
        Err(e) => format!("{e}: {body:02x?}"),
    }
}

fn header(body: &[u8]) -> Option<Header> {
    let mut bytes = body.to_vec();
    bytes.extend([0; 4]);
    Packet::parse(&bytes).ok().map(|p| p.header.into())
}

/// Whether two packets are equal but for what `adapt` makes equal.
fn equal_but(theirs: &[u8], ours: &[u8], adapt: impl Fn(&Header, &mut Header)) -> bool {
    let (Some(a), Some(mut b)) = (header(theirs), header(ours)) else {
        return false;
    };
    adapt(&a, &mut b);
    let mut out = ours.to_vec();
    if a.wire_len() != b.wire_len() || out.len() < b.wire_len() {
        return false;
    }
    b.emit(&mut out);
    out == theirs
}

/// Whether two requests are the same but for flags that a requester chooses; and those flags.
fn same_request(theirs: &[u8], ours: &[u8]) -> Option<Vec<Kind>> {
    if theirs == ours {
        return Some(vec![]);
    }
    let alike = equal_but(theirs, ours, |a, b| {
        b.bth.ack_req = a.bth.ack_req;
        b.bth.migreq = a.bth.migreq;
    });
    let (a, b) = (header(theirs)?.bth, header(ours)?.bth);
    let missing = a.ack_req && !b.ack_req && a.opcode.info().position.ends();
    let flags = [
        (missing, Kind::NoAckRequest),
        (a.ack_req != b.ack_req && !missing, Kind::AckRequest),
        (a.migreq != b.migreq, Kind::MigReq),
    ];
    alike.then(|| {
        flags
            .into_iter()
            .filter(|(differs, _)| *differs)
            .map(|(_, kind)| kind)
            .collect()
    })
}

/// A request that was sent.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    /// The captured frame that it belongs to.
    pub(crate) frame: u64,
    /// Its bytes without the ICRC.
    pub(crate) body: Vec<u8>,
    /// It was sent before, and refused since.
    pub(crate) refused: bool,
}

/// What comparing the requests of both sides came to.
#[derive(Debug, Default)]
pub(crate) struct Aligned {
    /// Frames whose packets are equal.
    pub(crate) equal: Vec<u64>,
    pub(crate) differences: Vec<Difference>,
}

/// Finds the longest common subsequence of the requests of both sides; what is not in it is a difference.
pub(crate) fn align(theirs: &[Sent], ours: &[Sent]) -> Aligned {
    let (n, m) = (theirs.len(), ours.len());
    let same: Vec<Vec<Option<Vec<Kind>>>> = theirs
        .iter()
        .map(|t| ours.iter().map(|o| same_request(&t.body, &o.body)).collect())
        .collect();
    let mut longest = vec![vec![0u32; m + 1]; n + 1];
    for i in (0..n).rev() {
        for j in (0..m).rev() {
            let skip = longest[i + 1][j].max(longest[i][j + 1]);
            let take = longest[i + 1][j + 1] + 1;
            longest[i][j] = if same[i][j].is_some() { take.max(skip) } else { skip };
        }
    }
    // What the other side sent as well, if not at this time, is a repetition.
    let repeats_t: Vec<bool> = same.iter().map(|row| row.iter().any(Option::is_some)).collect();
    let repeats_o: Vec<bool> = (0..m).map(|j| same.iter().any(|row| row[j].is_some())).collect();
    let mut found = Aligned::default();
    let (mut i, mut j) = (0, 0);
    while i < n || j < m {
        let matched = i < n && j < m && same[i][j].is_some() && longest[i][j] == longest[i + 1][j + 1] + 1;
        let (kinds, frame, detail) = if matched {
            let kinds = same[i][j].clone().unwrap_or_default();
            if kinds.is_empty() {
                found.equal.push(theirs[i].frame);
            }
            let text = format!("theirs {}, ours {}", describe(&theirs[i].body), describe(&ours[j].body));
            let frame = theirs[i].frame;
            (i, j) = (i + 1, j + 1);
            (kinds, frame, text)
        } else if j == m || (i < n && longest[i + 1][j] >= longest[i][j + 1]) {
            let kind = if repeats_t[i] {
                Kind::OnlyTheirRepeat
            } else {
                Kind::OnlyTheirRequest
            };
            i += 1;
            (
                vec![kind],
                theirs[i - 1].frame,
                format!("theirs {}", describe(&theirs[i - 1].body)),
            )
        } else {
            let kind = match (repeats_o[j], ours[j].refused) {
                (true, true) => Kind::RepeatedAsTold,
                (true, false) => Kind::OnlyOurRepeat,
                (false, _) => Kind::OnlyOurRequest,
            };
            j += 1;
            (
                vec![kind],
                ours[j - 1].frame,
                format!("ours {}", describe(&ours[j - 1].body)),
            )
        };
        for kind in kinds {
            let detail = detail.clone();
            found.differences.push(Difference { frame, kind, detail });
        }
    }
    found
}

/// The syndrome's credits, if it is a positive acknowledgement.
fn is_positive(h: &Header) -> bool {
    h.bth.opcode.info().class == Class::Acknowledge && h.aeth.is_some_and(|a| matches!(a.syndrome, Syndrome::Ack(_)))
}

/// Whether two READ responses have the same bytes and place, and only ours opens a stream.
fn is_resumed(theirs: &[u8], ours: &[u8]) -> bool {
    let whole = |body: &[u8]| [body, &[0; 4]].concat();
    let (theirs, ours) = (whole(theirs), whole(ours));
    let (Ok(t), Ok(o)) = (Packet::parse(&theirs), Packet::parse(&ours)) else {
        return false;
    };
    let (ti, oi) = (t.header.bth.opcode.info(), o.header.bth.opcode.info());
    let read = ti.class == Class::ReadResponse && oi.class == Class::ReadResponse;
    let opens = oi.position.starts() && !ti.position.starts() && ti.position.ends() == oi.position.ends();
    read && opens && t.header.bth.psn == o.header.bth.psn && t.payload == o.payload
}

/// Compares the answers of both sides in order.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    /// Ours, not matched yet; with the PSN of the duplicate that it answers, if it is one.
    pub(crate) ready: VecDeque<(Vec<u8>, Option<Psn>)>,
    /// What ours asked for with its last NAK.
    asked: Option<Psn>,
}

impl Answers {
    /// The captured side, which expects this PSN next, sent an answer. Returns differences, and whether a packet of ours was
    /// equal to it.
    pub(crate) fn match_one(&mut self, theirs: &[u8], expected: Option<Psn>) -> (Vec<(Kind, String)>, bool) {
        let mut found = Vec::new();
        let Some(t) = header(theirs) else {
            return (vec![(Kind::Answer, describe(theirs))], false);
        };
        loop {
            let Some((ours, duplicate)) = self.ready.front() else {
                let kind = if is_positive(&t) {
                    Kind::AckCoalescing
                } else {
                    Kind::OnlyTheirAnswer
                };
                found.push((kind, format!("theirs {}", describe(theirs))));
                return (found, false);
            };
            if ours == theirs {
                self.take();
                return (found, true);
            }
            let text = format!("theirs {}, ours {}", describe(theirs), describe(ours));
            let Some(o) = header(ours) else {
                return (vec![(Kind::Answer, text)], false);
            };
            let alike = |adapt: fn(&Header, &mut Header)| equal_but(theirs, ours, adapt);
            if alike(|a, b| b.bth.migreq = a.bth.migreq) {
                found.push((Kind::MigReq, text));
            } else if alike(|a, b| {
                b.bth.migreq = a.bth.migreq;
                if let (Some(x), Some(y)) = (a.aeth, b.aeth.as_mut())
                    && matches!((x.syndrome, y.syndrome), (Syndrome::Ack(_), Syndrome::Ack(_)))
                {
                    y.syndrome = x.syndrome;
                }
            }) {
                if t.bth.migreq != o.bth.migreq {
                    found.push((Kind::MigReq, text.clone()));
                }
                found.push((Kind::Credits, text));
            } else if is_resumed(theirs, ours) {
                found.push((Kind::ReadResumed, text));
            } else if is_positive(&t)
                && is_positive(&o)
                && duplicate.is_some_and(|of| o.bth.psn == of && t.bth.psn.is_after(of))
                && expected.is_some_and(|next| t.bth.psn.is_before(next))
            {
                found.push((Kind::DuplicateAck, text));
            } else if is_positive(&o) && !o.bth.psn.is_after(t.bth.psn) {
                // Ours said it apart; theirs says it now, or with something that implies it.
                found.push((self.apart(&o), text));
                self.take();
                continue;
            } else if is_positive(&t) {
                found.push((Kind::AckCoalescing, text));
                return (found, false);
            } else if o.bth.psn.is_after(t.bth.psn) {
                found.push((Kind::OnlyTheirAnswer, text));
                return (found, false);
            } else {
                found.push((Kind::Answer, text));
            }
            self.take();
            return (found, false);
        }
    }

    /// Ours is done with.
    fn take(&mut self) {
        let Some((ours, _)) = self.ready.pop_front() else {
            return;
        };
        let Some(h) = header(&ours) else { return };
        let syndrome = h.aeth.map(|a| a.syndrome);
        if let Some(Syndrome::Rnr(_) | Syndrome::Nak(NakCode::PsnSequenceError)) = syndrome {
            self.asked = Some(h.bth.psn);
        }
    }

    /// The kind of a positive acknowledgement that only ours sent.
    fn apart(&self, ours: &Header) -> Kind {
        match self.asked == Some(ours.bth.psn) {
            true => Kind::AckAfterRefusal,
            false => Kind::AckCoalescing,
        }
    }

    /// What ours sent and theirs did not.
    pub(crate) fn rest(&mut self) -> Vec<(Kind, String)> {
        let mut found = Vec::new();
        while let Some((ours, _)) = self.ready.front() {
            let kind = match header(ours) {
                Some(h) if is_positive(&h) => self.apart(&h),
                _ => Kind::OnlyOurAnswer,
            };
            found.push((kind, format!("ours {}", describe(ours))));
            self.take();
        }
        found
    }
}
