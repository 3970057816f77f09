//! Comparison of what both sides sent.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    fmt,
};

use roce_bth::{Class, Header, ICRC_LEN, NakCode, Packet, Psn, Syndrome};
use roce_pcap::PacketSummary;
use serde::Serialize;
use similar::{Algorithm, DiffOp, capture_diff_slices};

use crate::kind::Kind;

/// Difference between our engine and the captured side.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Difference {
    /// The captured frame, or the last one before.
    pub frame: u64,
    /// Kind.
    pub kind: Kind,
    /// Packet of the captured side; `None`: it sent nothing.
    pub expected: Option<String>,
    /// Packet of ours; `None`: it sent nothing.
    pub ours: Option<String>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |side: &Option<String>| side.as_deref().unwrap_or("nothing").to_owned();
        let (expected, ours) = (text(&self.expected), text(&self.ours));
        write!(
            f,
            "frame {} {}: expected {expected}; ours sent {ours}",
            self.frame,
            self.kind.name()
        )
    }
}

/// Both packets of a difference, described; `None`: there is none.
pub(crate) type Texts = (Option<String>, Option<String>);

/// Describes a packet that is given without its ICRC.
pub(crate) fn describe(body: &[u8]) -> String {
    let bytes = [body, &[0; ICRC_LEN]].concat();
    match Packet::parse(&bytes) {
        Ok(Packet { header, payload }) => {
            let payload_len = payload.len();
            let flag = if header.bth.migreq { " mig-req" } else { "" };
            format!("{}{flag}", PacketSummary { header, payload_len })
        }
        Err(e) => format!("{} bytes: {e}", body.len()),
    }
}

/// Describes two packets that differ.
fn both(theirs: &[u8], ours: &[u8]) -> Texts {
    let (mut expected, mut sent) = (describe(theirs), describe(ours));
    if expected == sent {
        let shorter = theirs.len().min(ours.len());
        let at = theirs.iter().zip(ours).position(|(a, b)| a != b).unwrap_or(shorter);
        let byte = |body: &[u8]| {
            body.get(at)
                .map_or_else(|| "none".to_owned(), |byte| format!("{byte:#04x}"))
        };
        expected += &format!(", byte {at} {}", byte(theirs));
        sent += &format!(", byte {at} {}", byte(ours));
    }
    (Some(expected), Some(sent))
}

fn header(body: &[u8]) -> Option<Header> {
    let bytes = [body, &[0; ICRC_LEN]].concat();
    Packet::parse(&bytes).ok().map(|p| p.header.into())
}

/// Returns whether two packets are equal but for what `adapt` makes equal.
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

/// Returns a request without the flags that a requester chooses: AckReq and MigReq.
fn without_choices(body: &[u8]) -> Vec<u8> {
    let mut key = body.to_vec();
    if let Some(mut header) = header(body) {
        (header.bth.ack_req, header.bth.migreq) = (false, false);
        header.emit(&mut key);
    }
    key
}

/// Returns the flags in which two requests differ that are the same without.
fn chosen(theirs: &[u8], ours: &[u8]) -> Vec<Kind> {
    let (Some(a), Some(b)) = (header(theirs), header(ours)) else {
        return vec![];
    };
    let (a, b) = (a.bth, b.bth);
    let missing = a.ack_req && !b.ack_req && a.opcode.info().position.ends();
    let flags = [
        (missing, Kind::NoAckRequest),
        (a.ack_req != b.ack_req && !missing, Kind::AckRequest),
        (a.migreq != b.migreq, Kind::MigReq),
    ];
    let differs = flags.into_iter().filter(|(differs, _)| *differs);
    differs.map(|(_, kind)| kind).collect()
}

/// A request that was sent.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    /// The captured frame that it belongs to.
    pub(crate) frame: u64,
    /// Index of the captured packet that it belongs to.
    pub(crate) index: usize,
    /// Its bytes without the ICRC.
    pub(crate) body: Vec<u8>,
    /// It was sent before, and refused since.
    pub(crate) refused: bool,
}

/// Comparison of the requests of both sides.
#[derive(Debug, Default)]
pub(crate) struct Aligned {
    /// Indexes of the captured side's packets that are equal.
    pub(crate) equal: HashSet<usize>,
    pub(crate) differences: Vec<Difference>,
}

/// Finds the longest common subsequence of the requests of both sides; what is not in it is a difference.
pub(crate) fn align(theirs: &[Sent], ours: &[Sent]) -> Aligned {
    let mut numbers = HashMap::new();
    let mut number = |sent: &Sent| {
        let next = numbers.len();
        *numbers.entry(without_choices(&sent.body)).or_insert(next)
    };
    let their_numbers: Vec<usize> = theirs.iter().map(&mut number).collect();
    let our_numbers: Vec<usize> = ours.iter().map(&mut number).collect();
    // What the other side sent as well, if not at this time, is a repetition.
    let of = |all: &[usize]| all.iter().copied().collect::<HashSet<_>>();
    let (all_theirs, all_ours) = (of(&their_numbers), of(&our_numbers));
    let mut found = Aligned::default();
    for op in capture_diff_slices(Algorithm::Myers, &their_numbers, &our_numbers) {
        let (their_range, our_range) = (op.old_range(), op.new_range());
        if let DiffOp::Equal { .. } = op {
            theirs[their_range]
                .iter()
                .zip(&ours[our_range])
                .for_each(|(theirs, ours)| found.match_pair(theirs, ours));
            continue;
        }
        for i in their_range {
            let is_repeat = all_ours.contains(&their_numbers[i]);
            let kind = if is_repeat {
                Kind::OnlyTheirRepeat
            } else {
                Kind::OnlyTheirRequest
            };
            found.add(&theirs[i], kind, (Some(describe(&theirs[i].body)), None));
        }
        for j in our_range {
            let kind = match (all_theirs.contains(&our_numbers[j]), ours[j].refused) {
                (true, true) => Kind::RepeatedAsTold,
                (true, false) => Kind::OnlyOurRepeat,
                (false, _) => Kind::OnlyOurRequest,
            };
            found.add(&ours[j], kind, (None, Some(describe(&ours[j].body))));
        }
    }
    found
}

impl Aligned {
    /// Notes requests that are the same, but for flags.
    fn match_pair(&mut self, theirs: &Sent, ours: &Sent) {
        if theirs.body == ours.body {
            self.equal.insert(theirs.index);
            return;
        }
        for kind in chosen(&theirs.body, &ours.body) {
            self.add(theirs, kind, both(&theirs.body, &ours.body));
        }
    }

    fn add(&mut self, at: &Sent, kind: Kind, (expected, ours): Texts) {
        self.differences.push(Difference {
            frame: at.frame,
            kind,
            expected,
            ours,
        });
    }
}

/// The syndrome's credits, if it is a positive acknowledgement.
fn is_positive(h: &Header) -> bool {
    h.bth.opcode.info().class == Class::Acknowledge && h.aeth.is_some_and(|a| matches!(a.syndrome, Syndrome::Ack(_)))
}

/// Returns whether two READ responses have the same bytes and place, and only ours opens a stream.
fn is_resumed(theirs: &[u8], ours: &[u8]) -> bool {
    let whole = |body: &[u8]| [body, &[0; ICRC_LEN]].concat();
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
    /// PSN that ours asked for with its last NAK.
    asked: Option<Psn>,
    /// PSNs that the captured side has acknowledged and ours has not.
    owed: Option<Psn>,
}

impl Answers {
    /// Compares an answer of the captured side, which expects this PSN next. Returns differences, and whether a packet of ours
    /// was equal to it.
    pub(crate) fn match_one(&mut self, theirs: &[u8], expected: Option<Psn>) -> (Vec<(Kind, Texts)>, bool) {
        let mut found = Vec::new();
        let Some(t) = header(theirs) else {
            return (vec![(Kind::Answer, (Some(describe(theirs)), None))], false);
        };
        loop {
            let Some((ours, duplicate)) = self.ready.front() else {
                let kind = if is_positive(&t) {
                    self.owed = Some(t.bth.psn);
                    Kind::AckCoalescing
                } else {
                    Kind::OnlyTheirAnswer
                };
                found.push((kind, (Some(describe(theirs)), None)));
                return (found, false);
            };
            if ours == theirs {
                self.take();
                return (found, true);
            }
            let texts = both(theirs, ours);
            let Some(o) = header(ours) else {
                return (vec![(Kind::Answer, texts)], false);
            };
            let alike = |adapt: fn(&Header, &mut Header)| equal_but(theirs, ours, adapt);
            if alike(|a, b| b.bth.migreq = a.bth.migreq) {
                found.push((Kind::MigReq, texts));
            } else if alike(|a, b| {
                b.bth.migreq = a.bth.migreq;
                if let (Some(x), Some(y)) = (a.aeth, b.aeth.as_mut())
                    && matches!((x.syndrome, y.syndrome), (Syndrome::Ack(_), Syndrome::Ack(_)))
                {
                    y.syndrome = x.syndrome;
                }
            }) {
                if t.bth.migreq != o.bth.migreq {
                    found.push((Kind::MigReq, texts.clone()));
                }
                found.push((Kind::Credits, texts));
            } else if is_resumed(theirs, ours) {
                found.push((Kind::ReadResumed, texts));
            } else if is_positive(&t)
                && is_positive(&o)
                && duplicate.is_some_and(|of| o.bth.psn == of && t.bth.psn.is_after(of))
                && expected.is_some_and(|next| t.bth.psn.is_before(next))
            {
                found.push((Kind::DuplicateAck, texts));
            } else if is_positive(&o) && !o.bth.psn.is_after(t.bth.psn) {
                // Ours said it apart; theirs says it now, or with something that implies it.
                found.push((self.apart(&o), texts));
                self.take();
                continue;
            } else if is_positive(&t) {
                found.push((Kind::AckCoalescing, texts));
                return (found, false);
            } else if o.bth.psn.is_after(t.bth.psn) {
                found.push((Kind::OnlyTheirAnswer, texts));
                return (found, false);
            } else {
                found.push((Kind::Answer, texts));
            }
            self.take();
            return (found, false);
        }
    }

    /// Removes the oldest answer of ours.
    fn take(&mut self) {
        let Some((ours, _)) = self.ready.pop_front() else {
            return;
        };
        let Some(h) = header(&ours) else { return };
        let syndrome = h.aeth.map(|a| a.syndrome);
        let is_refusal = matches!(syndrome, Some(Syndrome::Rnr(_) | Syndrome::Nak(_)));
        self.owed = self.owed.filter(|owed| is_refusal || owed.is_after(h.bth.psn));
        if let Some(Syndrome::Rnr(_) | Syndrome::Nak(NakCode::PsnSequenceError)) = syndrome {
            self.asked = Some(h.bth.psn);
        }
    }

    /// Returns the kind of a positive acknowledgement that only ours sent.
    fn apart(&self, ours: &Header) -> Kind {
        match self.asked == Some(ours.bth.psn) {
            true => Kind::AckAfterRefusal,
            false => Kind::AckCoalescing,
        }
    }

    /// Returns the answers that ours sent and theirs did not.
    pub(crate) fn rest(&mut self) -> Vec<(Kind, Texts)> {
        let mut found = Vec::new();
        while let Some((ours, _)) = self.ready.front() {
            let kind = match header(ours) {
                Some(h) if is_positive(&h) => self.apart(&h),
                _ => Kind::OnlyOurAnswer,
            };
            found.push((kind, (None, Some(describe(ours)))));
            self.take();
        }
        if let Some(psn) = self.owed.take() {
            let expected = format!("an acknowledgement of PSN {psn}");
            found.push((Kind::OnlyTheirAnswer, (Some(expected), None)));
        }
        found
    }
}
