//! An attacker who knows a connection's source port, and always gets there first: whenever a packet arrives beyond a gap, a
//! forged copy with other bytes has come just before it. Neither copy may be executed; the peer sends the packet again.

use std::net::SocketAddr;

use roce_bth::{ICRC_LEN, Packet, Qpn, ROCE_UDP_PORT};
use roce_icrc::Flow;

use super::{
    live::{Direction, Live},
    packets::MARK,
};
use crate::{net::Frame, rng::Rng, world::World};

/// The attacker and what it has seen.
pub(crate) struct Copies {
    rng: Rng,
    live: Live,
    left: u32,
    pub(crate) sent: u64,
}

impl Copies {
    pub(crate) fn new(mut rng: Rng) -> Self {
        Self {
            left: rng.pick(&[20, 100, 500]),
            live: Live::default(),
            sent: 0,
            rng,
        }
    }
}

impl World {
    /// Notes a genuine packet that is sent.
    pub(crate) fn note_for_copies(&mut self, to: usize, src_port: u16, packet: &[u8]) {
        let Some(mut copies) = self.copies.take() else { return };
        copies.live.note(to, src_port, packet, |qpn| self.path_mtu(to, qpn));
        self.copies = Some(copies);
    }

    /// Forgets what was sent to a queue pair that is made, or starts again.
    pub(crate) fn forget_copies(&mut self, host: usize, qpn: Qpn) {
        if let Some(copies) = &mut self.copies {
            copies.live.forget(host, qpn);
        }
    }

    /// Gives a host a frame, and before it a forged copy if it is beyond a gap.
    pub(crate) fn take_after_copy(&mut self, h: usize, frame: &Frame) {
        let now = self.instant();
        let Some(mut copies) = self.copies.take() else {
            return self.hosts[h].take(now, frame);
        };
        if let Some(copy) = self.copy_of(&mut copies, h, frame) {
            copies.left -= 1;
            copies.sent += 1;
            self.trace.forged(self.now, h, &copy);
            self.hosts[h].take(now, &copy);
        }
        self.hosts[h].take(now, frame);
        // Of a damaged frame some packets may be sound.
        for packet in frame.packets() {
            copies.live.deliver(h, packet);
        }
        self.copies = Some(copies);
    }

    /// Forges a copy of a frame's first packet if that is a request beyond a gap, of a connection that buffers such packets.
    fn copy_of(&self, copies: &mut Copies, h: usize, frame: &Frame) -> Option<Frame> {
        let bytes = frame.packets().next()?;
        let packet = Packet::parse(bytes).ok()?;
        let bth = packet.header.bth;
        let wanted = copies.left > 0
            && !frame.damaged
            && packet.payload.len() >= 8
            && Direction::of(bth.opcode) == Direction::Request
            && self.agrees_on_ports(h, bth.dest_qp)
            && copies.live.is_beyond_gap(h, bth.dest_qp, bth.psn)
            && copies.rng.chance(0.5);
        if !wanted {
            return None;
        }
        let start = bytes.len() - ICRC_LEN - usize::from(bth.pad) - packet.payload.len();
        let mut forged = bytes.to_vec();
        forged[start..start + packet.payload.len()].fill(MARK);
        let to = SocketAddr::new(frame.dst, ROCE_UDP_PORT);
        Flow::try_from((frame.src, to))
            .ok()?
            .seal(frame.identification, &mut forged);
        Some(Frame {
            segment_len: 0,
            bytes: forged,
            ..frame.clone()
        })
    }
}
