//! Frames with their packets taken apart.

use std::net::SocketAddr;

use ferroce_dissect::{Dissection, Dissector, Meta};
use roce_bth::{Bth, Packet};
use roce_pcap::{
    Error, Finding, Frame, FrameReport, Icrc, Report, Reviewed, Reviewer, decode,
    judge::{Event, Observed},
};

/// Packet of a frame.
pub(super) struct Part {
    pub(super) bth: Bth,
    /// Part that it plays in its conversation, if it belongs to one.
    pub(super) event: Option<Event>,
    /// `None`: the capture cut the packet.
    pub(super) dissection: Option<Dissection>,
}

impl Part {
    /// Returns whether the packet was sent before.
    pub(super) fn is_repeated(&self) -> bool {
        use roce_pcap::judge::EventKind::{ReadResponse, Request};
        let by_judge = self.event.is_some_and(|event| match event.kind {
            Request { repeated, .. } | ReadResponse { repeated, .. } => repeated,
            _ => false,
        });
        by_judge || self.dissection.as_ref().is_some_and(|dissection| dissection.repeated)
    }
}

/// Frame with its packets.
pub(super) struct Packets {
    pub(super) time_ns: u64,
    pub(super) reviewed: Reviewed,
    /// Packets that a receiver would take.
    pub(super) parts: Vec<Part>,
}

impl Packets {
    /// Returns whether there is nothing to show.
    pub(super) const fn is_empty(&self) -> bool {
        self.reviewed.report.is_none() && self.reviewed.findings.is_empty()
    }

    /// Returns the report on the frame, if it is RoCEv2.
    pub(super) const fn report(&self) -> Option<&FrameReport> {
        self.reviewed.report.as_ref()
    }
}

/// Reads the frames of a capture, in their order.
pub(super) struct Reading<'a> {
    reviewer: Reviewer<'a>,
    dissector: Dissector,
}

impl<'a> Reading<'a> {
    pub(super) fn new(reviewer: Reviewer<'a>) -> Self {
        Self {
            reviewer,
            dissector: Dissector::new(),
        }
    }

    /// Takes the next frame apart.
    pub(super) fn frame(&mut self, frame: &Frame<'_>) -> Packets {
        let (dissector, mut parts) = (&mut self.dissector, vec![]);
        let reviewed = self.reviewer.frame(frame, |event, observed| {
            parts.push(part(dissector, event, observed));
        });
        let report = reviewed.report.as_ref();
        // Messages of the connection manager, and packets of too many conversations.
        if parts.is_empty()
            && report.is_some_and(|report| report.icrc == Icrc::Ok && report.packets == 1)
            && let Ok(datagram) = decode(frame.link, frame.data)
            && let Ok(packet) = Packet::parse(datagram.payload)
        {
            let meta = meta(frame.index, frame.time_ns, datagram.src, datagram.dst);
            parts.push(Part {
                bth: packet.header.bth,
                event: None,
                dissection: Some(dissector.packet(&meta, &packet)),
            });
        }
        Packets {
            time_ns: frame.time_ns,
            reviewed,
            parts,
        }
    }

    /// Notes that the capture can't be read further.
    pub(super) fn broken(&mut self, error: &Error) {
        self.reviewer.broken(error);
    }

    /// Returns the report, and the findings that show at the end.
    pub(super) fn finish(self) -> (Report, Vec<Finding>) {
        self.reviewer.finish()
    }
}

const fn meta(frame: u64, time_ns: u64, src: SocketAddr, dst: SocketAddr) -> Meta {
    Meta {
        frame,
        time_ns,
        src,
        dst,
    }
}

fn part(dissector: &mut Dissector, event: &Event, observed: &Observed<'_>) -> Part {
    let dst = SocketAddr::new(observed.meta.dst, roce_bth::ROCE_UDP_PORT);
    let meta = meta(event.frame, event.time_ns, observed.meta.src, dst);
    let dissection = observed.payload.map(|payload| {
        let header = observed.header;
        dissector.packet(&meta, &Packet { header, payload })
    });
    Part {
        bth: observed.header.bth,
        event: Some(*event),
        dissection,
    }
}
