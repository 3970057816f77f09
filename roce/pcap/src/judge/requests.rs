//! Rules of request packets.

use roce_bth::{Class, Reth};

use super::{
    context::{Context, PathMtu},
    direction::{Beginning, Direction, Refused, wrap},
    event::EventKind,
    message::{Message, check_length, check_reth},
    observed::Observed,
    spans::{AGAIN, Body, Read, Span},
};
use crate::rule::Rule;

/// Part of an RNR NAK's time after which a repetition is not early: clocks differ.
const RNR_TOLERANCE_PERCENT: u64 = 95;
/// Time after a fatal NAK within which a requester may not have heard of it, nanoseconds.
const GRACE_NS: u64 = 100_000_000;

/// Distance of PSNs that is no loss: the queue pair was connected again, in a way that the capture does not show.
const RESTART: i64 = 1 << 17;

/// Judges a request packet of a reliable connection.
pub(super) fn reliable(d: &mut Direction, o: &Observed<'_>, cx: &mut Context<'_>) -> EventKind {
    d.requests += 1;
    d.last_ns = o.meta.time_ns;
    d.cut += u64::from(o.payload.is_none());
    check_reth(o, cx);
    check_atomic(o, cx);
    check_length_of_request(o, cx);
    let mut psn = d.unwrap(o.header.bth.psn);
    if d.next.is_some_and(|next| (psn - next).abs() > RESTART) && d.beginning == Beginning::Unknown {
        d.restart();
        psn = d.unwrap(o.header.bth.psn);
    }
    let Some(next) = d.next else {
        (d.first, d.acked) = (psn, psn);
        return fresh(d, o, psn, 0, cx);
    };
    if d.loose && psn >= next {
        fix_loose(d, o, psn, cx);
    }
    let next = d.next.unwrap_or(next);
    settle_beyond(d, psn, o, cx);
    if psn >= next {
        return fresh(d, o, psn, psn - next, cx);
    }
    // Without a named beginning the first request has the first PSN.
    if psn < d.first && d.requests == 1 {
        let text = format!(
            "the first request has PSN {}, the peer asked for {}",
            wrap(psn),
            wrap(d.first)
        );
        cx.find(Rule::PsnStart, o, text);
        return fresh(d, o, psn, 0, cx);
    }
    repeated(d, o, psn, cx)
}

/// Judges a request packet of an unreliable connection: nothing is repeated, and what is lost is gone.
pub(super) fn unreliable(d: &mut Direction, o: &Observed<'_>, cx: &mut Context<'_>) -> EventKind {
    d.last_ns = o.meta.time_ns;
    d.cut += u64::from(o.payload.is_none());
    check_reth(o, cx);
    check_length(o, Rule::PayloadLength, cx);
    let psn = d.unwrap(o.header.bth.psn);
    let skipped = d.next.map_or(0, |next| psn - next);
    if skipped != 0 {
        d.message = Message::Unknown;
    }
    d.message.step(o, cx);
    d.next = Some(psn + 1);
    EventKind::Request {
        psn,
        psns: 1,
        repeated: false,
        skipped: skipped.max(0),
        ends: o.header.bth.opcode.info().position.ends(),
    }
}

fn check_length_of_request(o: &Observed<'_>, cx: &mut Context<'_>) {
    if matches!(o.header.bth.opcode.info().class, Class::Send | Class::Write) {
        check_length(o, Rule::PayloadLength, cx);
    }
}

fn check_atomic(o: &Observed<'_>, cx: &mut Context<'_>) {
    if let Some(atomic) = o.header.atomic_eth()
        && atomic.va % 8 != 0
    {
        cx.find(
            Rule::AtomicAlignment,
            o,
            format!("{} at {:#x}", o.header.bth.opcode.info().name, atomic.va),
        );
    }
}

/// A request with PSNs that were not sent before.
fn fresh(d: &mut Direction, o: &Observed<'_>, psn: i64, skipped: i64, cx: &mut Context<'_>) -> EventKind {
    let info = o.header.bth.opcode.info();
    check_first(d, o, psn, skipped, cx);
    check_alive(d, o, cx);
    if skipped > 0 {
        let hole = Span {
            start: psn - skipped,
            count: skipped,
            body: Body::Hole,
            opcode: None,
            ..span(o, psn)
        };
        d.spans.push(
            Span {
                ends: false,
                asks: false,
                ..hole
            },
            d.acked,
            cx.room,
        );
        d.message = Message::Unknown;
    }
    let (body, count) = body(o, psn, *cx.mtu);
    match body {
        Body::Packet(_) => d.message.step(o, cx),
        _ => d.message.finish(o, cx),
    }
    if matches!(body, Body::Read(_)) || info.class == Class::Atomic {
        check_depth(d, o, psn, cx);
    }
    d.loose = count.is_none();
    d.assumed |= body.is_assumed();
    let count = count.unwrap_or(1);
    d.spans.push(
        Span {
            body,
            count,
            ..span(o, psn)
        },
        d.acked,
        cx.room,
    );
    d.next = Some(psn + count);
    EventKind::Request {
        psn,
        psns: count,
        repeated: false,
        skipped,
        ends: info.position.ends(),
    }
}

fn check_first(d: &mut Direction, o: &Observed<'_>, psn: i64, skipped: i64, cx: &mut Context<'_>) {
    if d.beginning == Beginning::Named && d.requests == 1 && skipped != 0 {
        // It may be the second packet, if the first was lost before the capture; the first then comes late.
        d.msn = None;
        if skipped > 1 << 16 {
            let text = format!(
                "the first request has PSN {}, the peer asked for {}",
                wrap(psn),
                wrap(d.first)
            );
            cx.find(Rule::PsnStart, o, text);
        }
    }
}

fn check_alive(d: &Direction, o: &Observed<'_>, cx: &mut Context<'_>) {
    let now = o.meta.time_ns;
    if let Some(Refused { frame, time_ns, .. }) = d.refused
        && now > time_ns.saturating_add(GRACE_NS)
    {
        let text = format!(
            "a new request {} after the fatal NAK of frame {frame}",
            millis(now - time_ns)
        );
        cx.find(Rule::RequestAfterNak, o, text);
    }
    if let Some(ended) = cx.disconnected
        && now > ended.saturating_add(GRACE_NS)
    {
        cx.find(
            Rule::RequestAfterDisconnect,
            o,
            format!("a new request {} after the disconnect", millis(now - ended)),
        );
    }
}

/// Milliseconds in words.
fn millis(ns: u64) -> String {
    format!("{} ms", ns / 1_000_000)
}

/// Counts READs and atomics that are not answered.
fn check_depth(d: &mut Direction, o: &Observed<'_>, psn: i64, cx: &mut Context<'_>) {
    d.open.push_back(psn);
    let outstanding = d.open.len();
    if let Some(depth) = cx.depth
        && outstanding > usize::from(depth)
    {
        let text = format!("{outstanding} READs and atomics are outstanding, the connection allows {depth}");
        cx.find(Rule::ReadDepth, o, text);
        d.open.pop_front();
    }
    if d.open.len() > 256 {
        d.open.pop_front();
    }
}

fn span(o: &Observed<'_>, psn: i64) -> Span {
    let bth = &o.header.bth;
    let info = bth.opcode.info();
    Span {
        start: psn,
        count: 1,
        body: Body::Packet(None),
        opcode: Some(bth.opcode),
        frame: o.meta.frame,
        first_ns: o.meta.time_ns,
        last_ns: o.meta.time_ns,
        sent: 1,
        asks: bth.ack_req
            || matches!(
                info.class,
                Class::ReadRequest | Class::Atomic | Class::Flush | Class::AtomicWrite
            ),
        ends: info.position.ends(),
        ends_before: 0,
        holes_before: 0,
    }
}

/// The kind of a request, and its number of PSNs; `None`: the path MTU is not known.
fn body(o: &Observed<'_>, psn: i64, mtu: PathMtu) -> (Body, Option<i64>) {
    match o.header.bth.opcode.info().class {
        Class::ReadRequest => {
            let reth = o.header.reth();
            let count = match reth {
                Some(reth) if reth.dma_len <= 256 => Some(1),
                Some(reth) => mtu.packets(reth.dma_len),
                None => None,
            };
            let Reth { va, rkey, .. } = reth.unwrap_or_default();
            let read = Read {
                len: reth.map(|reth| reth.dma_len),
                va,
                rkey: rkey.0,
                next: psn,
                seen: psn,
                gap: false,
                again: [None; AGAIN],
                forgotten: reth.is_none(),
                passed: false,
                assumed: count.is_none(),
            };
            (Body::Read(read), count)
        }
        Class::Atomic | Class::Flush | Class::AtomicWrite => (Body::Single(digest(o)), Some(1)),
        _ => (Body::Packet(digest(o)), Some(1)),
    }
}

/// Digest of headers behind the BTH, and payload.
fn digest(o: &Observed<'_>) -> Option<u32> {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(o.header.bytes().get(roce_bth::BTH_LEN..)?);
    hasher.update(o.payload?);
    Some(hasher.finalize())
}

/// Gives the READ at the end its number of PSNs by the next request's PSN.
fn fix_loose(d: &mut Direction, o: &Observed<'_>, psn: i64, cx: &mut Context<'_>) {
    d.loose = false;
    let Some(last) = d.spans.last_mut() else { return };
    let Body::Read(Read { len: Some(len), .. }) = last.body else {
        // The header is cut: the READ may have any length.
        last.count = (psn - last.start).max(1);
        d.next = Some(last.end());
        return;
    };
    let taken = psn - last.start;
    let fits = |mtu: u32| i64::from(len.div_ceil(mtu).max(1)) == taken;
    if [256, 512, 1024, 2048, 4096].into_iter().any(fits) {
        last.count = taken;
    } else if taken < i64::from(len.div_ceil(4096)) {
        let text = format!(
            "the READ of {len} bytes in frame {} takes {} PSNs or more, this request begins after {taken}",
            last.frame,
            len.div_ceil(4096)
        );
        cx.find(Rule::ReadSpanReused, o, text);
        last.count = taken.max(1);
    } else {
        last.count = i64::from(len.div_ceil(4096)).max(1);
    }
    d.next = Some(last.end());
}

/// A new request shows whether an earlier answer was for one that was sent.
fn settle_beyond(d: &mut Direction, psn: i64, o: &Observed<'_>, cx: &mut Context<'_>) {
    let Some(beyond) = d.beyond else { return };
    if d.next.is_some_and(|next| psn < next) {
        return;
    }
    d.beyond = None;
    // Where the capture misses packets, of either direction, this one may be there a second time.
    if psn > beyond.psn || cx.missed > 0 {
        d.missed += 1;
        return;
    }
    let text = format!(
        "{} of PSN {}, which was only sent later (frame {})",
        beyond.what,
        wrap(beyond.psn),
        o.meta.frame
    );
    cx.find_at(Rule::AckGhost, beyond.frame, (o.meta.dst, o.meta.src.ip()), text);
}

/// A request with a PSN that is behind the last one.
fn repeated(d: &mut Direction, o: &Observed<'_>, psn: i64, cx: &mut Context<'_>) -> EventKind {
    let event = |repeated, psns| EventKind::Request {
        psn,
        psns,
        repeated,
        skipped: 0,
        ends: o.header.bth.opcode.info().position.ends(),
    };
    heed_naks(d, o, psn, cx);
    if let Some(beyond) = &mut d.beyond {
        beyond.doubted = true;
    }
    let Some(at) = d.spans.find(psn) else {
        d.repeated += 1;
        return event(true, 1);
    };
    let Some(&known) = d.spans.get(at) else {
        return event(true, 1);
    };
    if known.is_hole() {
        return late(d, o, psn, at, cx);
    }
    d.repeated += 1;
    check_same(&known, o, psn, cx);
    let acked = psn < d.acked;
    if let Some(span) = d.spans.get_mut(at) {
        span.sent += 1;
        span.last_ns = o.meta.time_ns;
        span.asks |= o.header.bth.ack_req && !acked;
        if let Body::Read(read) = &mut span.body
            && o.header.bth.opcode.info().class == Class::ReadRequest
        {
            let rest = known.end() - psn;
            let asked = o.header.reth().and_then(|reth| cx.mtu.packets(reth.dma_len));
            read.ask_again(psn, psn + asked.map_or(rest, |asked| asked.min(rest)));
        }
    }
    event(true, 1)
}

/// A packet that was overtaken by later ones, or sent again after it was lost before the capture.
fn late(d: &mut Direction, o: &Observed<'_>, psn: i64, at: usize, cx: &mut Context<'_>) -> EventKind {
    let (body, count) = body(o, psn, *cx.mtu);
    d.assumed |= body.is_assumed();
    d.is_lossy = true;
    let room = d.spans.get(at).map_or(1, |hole| hole.end() - psn);
    let count = count.unwrap_or(room).min(room);
    d.spans.fill(
        at,
        Span {
            body,
            count,
            ..span(o, psn)
        },
    );
    EventKind::Request {
        psn,
        psns: count,
        repeated: false,
        skipped: 0,
        ends: o.header.bth.opcode.info().position.ends(),
    }
}

/// Notes what a repetition does about the NAK before it.
fn heed_naks(d: &mut Direction, o: &Observed<'_>, psn: i64, cx: &mut Context<'_>) {
    if let Some(nak) = d.gap_nak.as_mut().filter(|nak| nak.psn == psn) {
        nak.resent = true;
    }
    let Some(rnr) = d.rnr.filter(|rnr| rnr.psn == psn) else {
        return;
    };
    d.rnr = None;
    let waited = o.meta.time_ns.saturating_sub(rnr.time_ns);
    if waited < rnr.wait_ns / 100 * RNR_TOLERANCE_PERCENT {
        let text = format!(
            "repeated {} us after the RNR NAK of frame {}, which asks for {} us",
            waited / 1000,
            rnr.frame,
            rnr.wait_ns / 1000
        );
        cx.find(Rule::RnrEarly, o, text);
    }
}

/// Checks that a PSN is used again for the same request.
fn check_same(known: &Span, o: &Observed<'_>, psn: i64, cx: &mut Context<'_>) {
    let opcode = o.header.bth.opcode;
    match known.body {
        Body::Read(read) if opcode.info().class == Class::ReadRequest => check_read_again(known, &read, o, psn, cx),
        // How many PSNs the READ takes is not known.
        Body::Read(read) if read.assumed && psn > known.start => {}
        Body::Read(read) => {
            let text = format!(
                "{} has PSN {}, which belongs to the READ of {} bytes in frame {} (PSNs {} to {})",
                opcode.info().name,
                wrap(psn),
                read.len.unwrap_or_default(),
                known.frame,
                wrap(known.start),
                wrap(known.end() - 1)
            );
            cx.find(Rule::ReadSpanReused, o, text);
        }
        Body::Packet(digest_before) | Body::Single(digest_before) => {
            let before = known.opcode.map_or("another request", |opcode| opcode.info().name);
            if known.opcode != Some(opcode) {
                let text = format!(
                    "{} has PSN {}, which frame {} used for {before}",
                    opcode.info().name,
                    wrap(psn),
                    known.frame
                );
                cx.find(Rule::PsnReused, o, text);
            } else if let (Some(before), Some(now)) = (digest_before, digest(o))
                && before != now
            {
                let text = format!(
                    "{} with PSN {} has other bytes than in frame {}",
                    opcode.info().name,
                    wrap(psn),
                    known.frame
                );
                cx.find(Rule::RepeatDiffers, o, text);
            }
        }
        Body::Hole => {}
    }
}

/// Checks a READ that is asked for again, from its beginning or from the middle.
fn check_read_again(known: &Span, read: &Read, o: &Observed<'_>, psn: i64, cx: &mut Context<'_>) {
    let (Some(reth), Some(len), Some(mtu)) = (o.header.reth(), read.len, cx.mtu.bytes()) else {
        return;
    };
    let done = (psn - known.start) as u64 * u64::from(mtu);
    let rest = u64::from(len).saturating_sub(done);
    let (va, rkey) = (read.va.wrapping_add(done), read.rkey);
    if reth.va != va || u64::from(reth.dma_len) > rest || reth.rkey.0 != rkey {
        let text = format!(
            "PSN {} of the READ in frame {} stands for at most {rest} bytes at {va:#x} with key {rkey:#x}, this asks for {} at {:#x} with {}",
            wrap(psn),
            known.frame,
            reth.dma_len,
            reth.va,
            reth.rkey
        );
        cx.find(Rule::ReadRetry, o, text);
    }
}
