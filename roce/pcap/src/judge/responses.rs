//! Rules of answers: acknowledgements, NAKs, READ responses.

use roce_bth::{Aeth, Class, NakCode, Position, Syndrome};

use super::{
    context::{Context, PathMtu},
    direction::{Beginning, Beyond, Direction, GapNak, MsnBase, Refused, Rnr, wrap},
    event::EventKind,
    message::check_length,
    observed::Observed,
    spans::{Body, Read, Span},
};
use crate::rule::Rule;

/// Time without an answer after which it is reported, nanoseconds.
const STALL_NS: u64 = 1_000_000_000;
/// Most PSNs that may be outstanding: half of the numbers (IBA 9.7.6.1).
const WINDOW: i64 = 1 << 23;

/// Judges an answer to the requests of `d`.
pub(super) fn answer(d: &mut Direction, o: &Observed<'_>, cx: &mut Context<'_>) -> EventKind {
    d.answered_ns = o.meta.time_ns;
    d.last_ns = o.meta.time_ns;
    let psn = d.unwrap(o.header.bth.psn);
    let aeth = o.header.aeth();
    check_refused(d, o, psn, aeth, cx);
    match (o.header.bth.opcode.info().class, aeth) {
        (Class::ReadResponse, _) => read_response(d, o, psn, cx),
        (Class::SelectiveAcknowledge, _) => EventKind::Ack {
            psn,
            round_trip_ns: None,
        },
        (Class::AtomicAcknowledge, _) => atomic(d, o, psn, cx),
        (_, None) => EventKind::Unknown,
        (_, Some(aeth)) => match aeth.syndrome {
            Syndrome::Ack(_) => acknowledge(d, o, psn, cx),
            Syndrome::Nak(code) => nak(d, o, psn, code, cx),
            Syndrome::Rnr(timer) => rnr(d, o, psn, timer.duration(), cx),
            Syndrome::Reserved(byte) => {
                cx.find(Rule::Syndrome, o, format!("the reserved syndrome {byte:#04x}"));
                EventKind::Unknown
            }
        },
    }
}

/// Place of an answer among the requests.
enum Place {
    /// Index of the request.
    Request(usize),
    /// Before everything that is remembered.
    Old,
    /// Not sent, as far as is known now.
    Unsent,
}

/// Finds the request that an answer names; reports one that was never sent.
fn place(d: &mut Direction, o: &Observed<'_>, psn: i64, what: &'static str, cx: &mut Context<'_>) -> Place {
    let Some(next) = d.next.filter(|_| d.requests > 0) else {
        if d.beginning == Beginning::Named && psn < d.first {
            ghost(d, o, psn, what, cx);
        }
        return Place::Unsent;
    };
    if d.loose && psn >= next {
        // The READ at the end takes more PSNs than are counted yet.
        let last = d.spans.iter().next_back().map(|span| span.start);
        return last
            .and_then(|start| d.spans.find(start))
            .map_or(Place::Unsent, Place::Request);
    }
    if psn >= next {
        d.beyond.get_or_insert(Beyond::new(psn, o.meta.frame, what));
        return Place::Unsent;
    }
    if psn < d.first {
        // Requests from before the capture may still be answered, until one that the capture shows is.
        if d.beginning == Beginning::Named || d.acked > d.first || d.first - psn > WINDOW / 2 {
            ghost(d, o, psn, what, cx);
        }
        return Place::Old;
    }
    d.spans.find(psn).map_or(Place::Old, Place::Request)
}

fn ghost(d: &Direction, o: &Observed<'_>, psn: i64, what: &str, cx: &mut Context<'_>) {
    let text = format!(
        "{what} of PSN {}, which was never sent: the first request has {}",
        wrap(psn),
        wrap(d.first)
    );
    cx.find(Rule::AckGhost, o, text);
}

/// Answers after a fatal NAK.
fn check_refused(d: &Direction, o: &Observed<'_>, psn: i64, aeth: Option<Aeth>, cx: &mut Context<'_>) {
    let Some(refused) = d.refused else { return };
    let refuses = aeth.is_some_and(|aeth| !matches!(aeth.syndrome, Syndrome::Ack(_)));
    if psn >= refused.psn && !refuses {
        let name = o.header.bth.opcode.info().name;
        let text = format!(
            "{name} of PSN {} after the fatal NAK of frame {}",
            wrap(psn),
            refused.frame
        );
        cx.find(Rule::AnswerAfterNak, o, text);
    }
}

/// Everything up to and including `psn` is acknowledged. Returns the time since it was sent, if it was sent once.
fn advance(d: &mut Direction, o: &Observed<'_>, psn: i64, at: usize, cx: &mut Context<'_>) -> Option<u64> {
    let now = o.meta.time_ns;
    let end = psn + 1;
    let mut slow = None;
    let mut missed = 0;
    for span in d.spans.from(d.acked).take_while(|span| span.start < end) {
        if span.is_hole() {
            missed += span.count.min(end - span.start);
        } else if slow.is_none() && span.asks && now.saturating_sub(span.first_ns) >= STALL_NS {
            slow = Some(*span);
        }
    }
    if end > d.acked {
        d.missed += missed as u64;
        d.acked = end;
        d.open.retain(|start| *start >= end);
        if let Some(span) = slow {
            stalled(&span, o, cx);
        }
    }
    let span = d.spans.get(at)?;
    (span.sent == 1 && !span.is_hole()).then(|| now.saturating_sub(span.first_ns))
}

fn stalled(span: &Span, o: &Observed<'_>, cx: &mut Context<'_>) {
    let waited = o.meta.time_ns.saturating_sub(span.first_ns);
    let text = format!(
        "{} of frame {} was answered {:.1} s after it was first sent ({} transmissions)",
        span.opcode.map_or("a request", |opcode| opcode.info().name),
        span.frame,
        waited as f64 / 1e9,
        span.sent
    );
    cx.find(Rule::Stall, o, text);
}

/// Checks an answer's MSN: the messages before `through` are completed, those behind it may be.
fn check_msn(d: &mut Direction, o: &Observed<'_>, through: i64, cx: &mut Context<'_>) {
    if d.loose && d.next.is_some_and(|next| through >= next) {
        // Whether the READ at the end is before it is not known.
        return;
    }
    let (Some(aeth), Some((ends, holes))) = (o.header.aeth(), d.completed(through)) else {
        return;
    };
    let (all, all_holes) = d.next.and_then(|next| d.completed(next)).unwrap_or((ends, holes));
    let msn = aeth.msn.value();
    let Some(base) = d.msn else {
        if all == ends {
            d.msn = Some(MsnBase {
                offset: msn.wrapping_sub(ends as u32) & 0x00ff_ffff,
                holes,
            });
        }
        return;
    };
    let lowest = base.offset.wrapping_add(ends as u32) & 0x00ff_ffff;
    let room = (all_holes - base.holes).max(0) + (all - ends);
    let above = i64::from(msn.wrapping_sub(lowest) & 0x00ff_ffff);
    if above > room {
        let names = if room == 0 {
            format!("{lowest}")
        } else {
            format!("{lowest} to {}", i64::from(lowest) + room)
        };
        cx.find(Rule::Msn, o, format!("MSN {msn}, {names} expected"));
        // Take the peer's count from here on: one fault is one finding.
        d.msn = None;
    } else if holes > base.holes && all == ends {
        d.msn = Some(MsnBase {
            offset: msn.wrapping_sub(ends as u32) & 0x00ff_ffff,
            holes,
        });
    }
}

fn acknowledge(d: &mut Direction, o: &Observed<'_>, psn: i64, cx: &mut Context<'_>) -> EventKind {
    let at = match place(d, o, psn, "an acknowledgement", cx) {
        Place::Request(at) => at,
        Place::Old | Place::Unsent => {
            return EventKind::Ack {
                psn,
                round_trip_ns: None,
            };
        }
    };
    d.swaps_answers |= psn + 1 < d.acked;
    check_passed(d, o, psn, cx);
    check_msn(d, o, psn + 1, cx);
    let round_trip_ns = advance(d, o, psn, at, cx);
    EventKind::Ack { psn, round_trip_ns }
}

/// An acknowledgement says that everything before it is done, but READs and atomics have answers of their own.
fn check_passed(d: &Direction, o: &Observed<'_>, psn: i64, cx: &mut Context<'_>) {
    let passed = d
        .spans
        .from(d.acked)
        .take_while(|span| span.start <= psn)
        .find(|span| span.awaits_response());
    if let Some(span) = passed {
        let text = format!(
            "an acknowledgement of PSN {} before the READ of frame {} (PSN {}) was answered",
            o.header.bth.psn,
            span.frame,
            wrap(span.start)
        );
        cx.find(Rule::AckPassesRead, o, text);
    }
}

fn nak(d: &mut Direction, o: &Observed<'_>, psn: i64, code: NakCode, cx: &mut Context<'_>) -> EventKind {
    let event = EventKind::Nak { psn, code };
    let Place::Request(at) = place(d, o, psn, "a NAK", cx) else {
        return event;
    };
    if psn < d.acked && code == NakCode::PsnSequenceError {
        late_nak(d, o, psn, "a NAK", cx);
        return event;
    }
    check_msn(d, o, psn, cx);
    if psn > d.acked {
        advance(d, o, psn - 1, at, cx);
    }
    if code == NakCode::PsnSequenceError {
        if let Some(rnr) = d.rnr.filter(|rnr| rnr.psn == psn) {
            let text = format!(
                "a sequence NAK of PSN {}, which the RNR NAK of frame {} refused",
                wrap(psn),
                rnr.frame
            );
            cx.find(Rule::NakAfterRnr, o, text);
        }
        if let Some(before) = d.gap_nak.filter(|nak| nak.psn == psn && !nak.resent) {
            let text = format!(
                "PSN {} again, as in frame {}, and it was not sent in between",
                wrap(psn),
                before.frame
            );
            cx.find(Rule::NakRepeated, o, text);
        }
        d.gap_nak = Some(GapNak {
            psn,
            frame: o.meta.frame,
            time_ns: o.meta.time_ns,
            resent: false,
        });
    } else {
        refuse(d, o, psn, at, code, cx);
    }
    event
}

/// A NAK of what was acknowledged before. Where the network swaps answers it may have been sent earlier.
fn late_nak(d: &Direction, o: &Observed<'_>, psn: i64, what: &str, cx: &mut Context<'_>) {
    if !d.swaps_answers {
        let text = format!("{what} of PSN {}, which was acknowledged before", wrap(psn));
        cx.find(Rule::NakAcknowledged, o, text);
    }
}

fn refuse(d: &mut Direction, o: &Observed<'_>, psn: i64, at: usize, code: NakCode, cx: &mut Context<'_>) {
    let (frame, time_ns) = (o.meta.frame, o.meta.time_ns);
    d.refused.get_or_insert(Refused {
        psn,
        frame,
        time_ns,
        code,
    });
    let span = d.spans.get(at);
    let what = span
        .and_then(|span| span.opcode)
        .map_or("request", |opcode| opcode.info().name);
    let of = span.map_or(0, |span| span.frame);
    let why = match code {
        NakCode::InvalidRequest => {
            "invalid request: an operation that is not allowed, or more bytes than the receive has"
        }
        NakCode::RemoteAccessError => "remote access error: key, range or right",
        NakCode::RemoteOperationalError => "remote operational error: the responder failed by itself",
        _ => "refused",
    };
    cx.find(
        Rule::NakFatal,
        o,
        format!("{what} of frame {of} (PSN {}) was refused: {why}", wrap(psn)),
    );
}

fn rnr(d: &mut Direction, o: &Observed<'_>, psn: i64, wait: std::time::Duration, cx: &mut Context<'_>) -> EventKind {
    let event = EventKind::Rnr { psn, wait };
    let Place::Request(at) = place(d, o, psn, "an RNR NAK", cx) else {
        return event;
    };
    if psn < d.acked {
        late_nak(d, o, psn, "an RNR NAK", cx);
        return event;
    }
    check_msn(d, o, psn, cx);
    let takes_receive = d.spans.get(at).and_then(|span| span.opcode).is_none_or(|opcode| {
        let info = opcode.info();
        info.class == Class::Send || info.has(roce_bth::ExtHeader::Imm)
    });
    if !takes_receive {
        cx.find(
            Rule::RnrWithoutReceive,
            o,
            format!("an RNR NAK of PSN {}, which takes no receive", wrap(psn)),
        );
    }
    if psn > d.acked {
        advance(d, o, psn - 1, at, cx);
    }
    let (frame, time_ns) = (o.meta.frame, o.meta.time_ns);
    let wait_ns = wait.as_nanos() as u64;
    let before = if d.rnrs.0 == psn { d.rnrs.1 } else { 0 };
    d.rnrs = (psn, before + 1);
    d.rnr = Some(Rnr {
        psn,
        frame,
        time_ns,
        wait_ns,
    });
    event
}

fn atomic(d: &mut Direction, o: &Observed<'_>, psn: i64, cx: &mut Context<'_>) -> EventKind {
    let event = |round_trip_ns| EventKind::Ack { psn, round_trip_ns };
    let Place::Request(at) = place(d, o, psn, "an atomic acknowledgement", cx) else {
        return event(None);
    };
    let is_atomic = d
        .spans
        .get(at)
        .is_some_and(|span| matches!(span.body, Body::Single(_)) || span.is_hole());
    if !is_atomic {
        unrequested(d, o, psn, at, cx);
        return event(None);
    }
    check_passed(d, o, psn, cx);
    if psn >= d.acked {
        check_msn(d, o, psn + 1, cx);
    }
    event(advance(d, o, psn, at, cx))
}

fn unrequested(d: &Direction, o: &Observed<'_>, psn: i64, at: usize, cx: &mut Context<'_>) {
    let name = o.header.bth.opcode.info().name;
    let span = d.spans.get(at);
    let what = span
        .and_then(|span| span.opcode)
        .map_or("nothing", |opcode| opcode.info().name);
    let of = span.map_or(0, |span| span.frame);
    cx.find(
        Rule::ResponseUnrequested,
        o,
        format!("{name} of PSN {}, which is {what} of frame {of}", wrap(psn)),
    );
}

fn read_response(d: &mut Direction, o: &Observed<'_>, psn: i64, cx: &mut Context<'_>) -> EventKind {
    let event = |repeated, latency_ns| EventKind::ReadResponse {
        psn,
        repeated,
        latency_ns,
    };
    let Place::Request(mut at) = place(d, o, psn, "a READ response", cx) else {
        return event(false, None);
    };
    learn_mtu(d, o, cx);
    if d.spans.get(at).is_some_and(|span| span.end() <= psn) {
        // The READ had no length until now.
        match d.spans.find(psn) {
            Some(found) => at = found,
            None => {
                match d.spans.get_mut(at).map(|span| &mut span.body) {
                    // Responses before it are missing, which would show how long the READ is.
                    Some(Body::Read(read)) if d.loose => read.gap = true,
                    _ => {
                        d.beyond
                            .get_or_insert(Beyond::new(psn, o.meta.frame, "a READ response"));
                    }
                }
                return event(false, None);
            }
        }
    }
    let Some(&span) = d.spans.get(at) else {
        return event(false, None);
    };
    match span.body {
        Body::Read(mut read) => {
            // Where the capture misses requests, it may not show all that ask for a part of it again.
            read.forgotten |= d.missed > 0;
            check_order(d, o, &span, &read, cx);
            check_response(o, &span, &read, psn, *cx.mtu, cx);
            let repeated = psn < read.next;
            let latency = take_response(d, o, psn, at, cx);
            event(repeated, latency)
        }
        // FLUSH and ATOMIC WRITE are answered so (IBA A19).
        Body::Single(_) if o.payload_len == 0 => {
            advance(d, o, psn, at, cx);
            event(false, None)
        }
        Body::Hole => event(false, None),
        Body::Single(_) | Body::Packet(_) => {
            unrequested(d, o, psn, at, cx);
            event(false, None)
        }
    }
}

/// Takes the path MTU from a response that must be as long, and counts the PSNs of READs by it.
fn learn_mtu(d: &mut Direction, o: &Observed<'_>, cx: &mut Context<'_>) {
    check_length(o, Rule::ResponseLength, cx);
    if !d.assumed {
        return;
    }
    if *cx.mtu == PathMtu::Unknown {
        let only = o.header.bth.opcode.info().position == Position::Only;
        if d.loose && only {
            // All of it in one packet.
            d.loose = false;
        }
        return;
    }
    let starts: Vec<i64> = d
        .spans
        .iter()
        .filter(|span| span.body.is_assumed())
        .map(|span| span.start)
        .collect();
    for start in starts {
        recount(d, o, start, cx);
    }
    (d.loose, d.assumed) = (false, false);
}

/// Gives the READ at `start` the number of PSNs that the path MTU asks for.
fn recount(d: &mut Direction, o: &Observed<'_>, start: i64, cx: &mut Context<'_>) {
    let Some(at) = d.spans.find(start) else { return };
    let Some(&span) = d.spans.get(at) else { return };
    let Body::Read(Read { len: Some(len), .. }) = span.body else {
        return;
    };
    let Some(count) = cx.mtu.packets(len) else { return };
    let following = d.spans.from(span.end()).find(|span| !span.is_hole()).copied();
    match following {
        None => {
            d.spans.resize(at, count);
            d.next = Some(start + count);
        }
        Some(following) if count > following.start - start => {
            let text = format!(
                "this request has PSN {}, which belongs to the READ of {len} bytes in frame {} (PSNs {} to {})",
                wrap(following.start),
                span.frame,
                wrap(start),
                wrap(start + count - 1)
            );
            cx.find_at(
                Rule::ReadSpanReused,
                following.frame,
                (o.meta.dst, o.meta.src.ip()),
                text,
            );
        }
        Some(_) => d.spans.resize(at, count),
    }
    if let Some(Span {
        body: Body::Read(read), ..
    }) = d.spans.get_mut(at)
    {
        read.assumed = false;
    }
}

/// READs are answered in order.
fn check_order(d: &mut Direction, o: &Observed<'_>, span: &Span, read: &Read, cx: &mut Context<'_>) {
    // A READ that was asked for again is answered late; where the capture misses requests, it may not show that.
    if read.passed && span.sent == 1 && d.missed == 0 {
        let text = format!(
            "a response to the READ of frame {} after one to a later READ",
            span.frame
        );
        cx.find(Rule::ResponseOrder, o, text);
    }
    let from = d.open.front().copied().unwrap_or(span.start);
    let earlier: Vec<i64> = d
        .spans
        .from(from)
        .take_while(|earlier| earlier.start < span.start)
        .filter(|earlier| earlier.awaits_response())
        .map(|earlier| earlier.start)
        .collect();
    for start in earlier {
        let earlier = d.spans.find(start).and_then(|at| d.spans.get_mut(at));
        if let Some(Span {
            body: Body::Read(read), ..
        }) = earlier
        {
            read.passed = true;
        }
    }
}

/// Checks position and length of a response.
fn check_response(o: &Observed<'_>, span: &Span, read: &Read, psn: i64, mtu: PathMtu, cx: &mut Context<'_>) {
    let position = o.header.bth.opcode.info().position;
    let last = psn + 1 == span.end();
    let expected = place_in(span.start, span.end(), psn);
    let again = read.again.iter().flatten();
    let asked = again.filter(|(from, to)| (*from..*to).contains(&psn));
    if position != expected && !read.forgotten && !asked.clone().any(|(from, to)| place_in(*from, *to, psn) == position)
    {
        let name = o.header.bth.opcode.info().name;
        let text = format!("{name} with PSN {}, {expected:?} expected", wrap(psn));
        cx.find(Rule::ResponseSequence, o, text);
    } else if position == expected
        && asked
            .clone()
            .any(|(from, to)| *from == psn && place_in(*from, *to, psn) != position)
        && psn < read.seen
        && psn != span.start
    {
        // A responder that goes on where it was asked to is understood by all.
        let name = o.header.bth.opcode.info().name;
        let text = format!(
            "{name} with PSN {}, from which on the READ was asked for again",
            wrap(psn)
        );
        cx.find(Rule::ResponseResumed, o, text);
    }
    if psn < read.next && span.sent == 1 {
        let text = format!(
            "PSN {} of the READ in frame {} again, which was not asked for again",
            wrap(psn),
            span.frame
        );
        cx.find(Rule::ResponseRepeated, o, text);
    }
    let (Some(len), Some(mtu)) = (read.len, mtu.bytes()) else {
        return;
    };
    let rest = i64::from(len) - (psn - span.start) * i64::from(mtu);
    let (want, got) = (rest.clamp(0, i64::from(mtu)), o.payload_len as i64);
    if last && got != want {
        let text = format!(
            "the last response to the READ of {len} bytes in frame {} has {got} bytes, not {want}",
            span.frame
        );
        cx.find(Rule::ResponseLength, o, text);
    }
}

/// Position of a response among those to PSNs `from..to`.
const fn place_in(from: i64, to: i64, psn: i64) -> Position {
    match (psn == from, psn + 1 == to) {
        (true, true) => Position::Only,
        (true, false) => Position::First,
        (false, true) => Position::Last,
        (false, false) => Position::Middle,
    }
}

/// Goes on with the READ at `at`. Returns the time since it was sent, with its last response.
fn take_response(d: &mut Direction, o: &Observed<'_>, psn: i64, at: usize, cx: &mut Context<'_>) -> Option<u64> {
    let span = d.spans.get_mut(at)?;
    let (start, end, sent, first_ns) = (span.start, span.end(), span.sent, span.first_ns);
    let Body::Read(read) = &mut span.body else { return None };
    read.gap |= psn > read.next;
    read.next = read.next.max(psn + 1);
    read.seen = read.seen.max(psn + 1);
    if o.header.aeth().is_some() && psn >= d.acked {
        check_msn(d, o, start, cx);
    }
    let done = psn + 1 == end;
    let upto = if done { psn } else { start - 1 };
    if upto >= d.acked {
        advance(d, o, upto, at, cx);
    }
    (done && sent == 1).then(|| o.meta.time_ns.saturating_sub(first_ns))
}
