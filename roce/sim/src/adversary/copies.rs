//! An attacker who knows a connection's source port, and always gets there first: whenever a packet arrives beyond a gap, a
//! forged copy with other bytes has come just before it. Neither copy may be executed; the peer sends the packet again.

use std::net::SocketAddr;

use roce_bth::{ICRC_LEN, Packet, ROCE_UDP_PORT};
use roce_icrc::Flow;

use super::{live::Direction, packets::MARK, state::Copies};
use crate::{net::Frame, world::World};

impl World {
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
            self.live.deliver(h, packet);
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
            && self.live.is_beyond_gap(h, bth.dest_qp, bth.psn)
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
