//! Frames: headers from the link layer to UDP, and checksums.

use roce_bth::{ICRC_LEN, ROCE_UDP_PORT};
use roce_icrc::{Flow, Recovery, check_datagram};
use roce_port::cm::Translation;

use super::{
    checksum,
    packet::{Filling, Packets},
    secret::Secret,
};
use crate::{
    check::examine,
    frame::{self, Datagram, IpLayer, Layer},
    link::{LinkType, erf_header},
    reader::Frame,
    report::{FrameReport, Icrc},
    segments::{MIN_PACKET, Splitter, segment_ok},
};

const UDP_LEN: usize = 8;
const PROTOCOL_GRE: u8 = 47;
const PROTOCOL_UDP: u8 = 17;
/// Flags and protocol type of GRE.
const GRE_LEN: usize = 4;
const MAC_LEN: usize = 6;
const ETHERNET_LEN: usize = 14;

/// Replaces the contents of frames.
pub(super) struct Frames {
    packets: Packets,
    splitter: Splitter,
}

impl Frames {
    pub(super) fn new(secret: Secret, filling: Filling, keep_private: bool) -> Self {
        Self {
            packets: Packets::new(secret, filling, keep_private),
            splitter: Splitter::default(),
        }
    }

    /// Returns the bytes that take the place of a frame's.
    pub(super) fn replace(&mut self, frame: &Frame<'_>) -> Vec<u8> {
        let old = frame.data;
        let mut new = old.to_vec();
        let mut known = self.link_header(frame.link, &mut new);
        let mut headers = vec![];
        for layer in frame::layers(frame.link, old) {
            match layer {
                Layer::Ethernet(at) => {
                    self.ethernet(&mut new, at);
                    known = (at + ETHERNET_LEN).min(old.len());
                }
                Layer::Network(at) => known = at,
                Layer::Ip(layer) => {
                    self.ip_header(&mut new, &layer);
                    known = layer.payload + known_of_payload(&layer, old.len());
                    headers.push(layer);
                }
            }
        }
        if let Ok((report, _)) = examine(frame, &mut self.splitter)
            && let Ok(dissected) = frame::dissect(frame.link, old)
            && let Some(header) = headers.last()
        {
            let is_whole = dissected.problem.is_none();
            self.roce(&mut new, &dissected.datagram, header, is_whole, &report);
            known = header.end.min(new.len());
        }
        let rest = known.min(new.len());
        new[rest..].fill(0);
        // From the inside out: the outer ones cover the inner ones.
        for header in headers.iter().rev() {
            checksums(old, &mut new, header);
        }
        new
    }

    /// Replaces the addresses of a link header. Returns where it ends.
    fn link_header(&self, link: LinkType, new: &mut [u8]) -> usize {
        let len = new.len();
        match link {
            LinkType::Ethernet => {
                self.ethernet(new, 0);
                ETHERNET_LEN.min(len)
            }
            LinkType::LinuxSll => {
                self.cooked(new, 6);
                16.min(len)
            }
            LinkType::LinuxSll2 => {
                self.cooked(new, 12);
                20.min(len)
            }
            LinkType::Loopback => 4.min(len),
            LinkType::Erf => {
                let Ok(end) = erf_header(new) else { return 16.min(len) };
                for extension in new[16..end].chunks_mut(8) {
                    extension[1..].fill(0);
                }
                // Ethernet begins behind two bytes of padding; other records are IP at once.
                if [2, 11, 16, 20].contains(&(new[8] & 0x7f)) {
                    self.ethernet(new, end + 2);
                    return (end + 2 + ETHERNET_LEN).min(len);
                }
                end
            }
            LinkType::RawIp | LinkType::Other(_) => 0,
        }
    }

    fn ethernet(&self, new: &mut [u8], at: usize) {
        for at in [at, at + MAC_LEN] {
            match new.get_mut(at..at + MAC_LEN) {
                Some(mac) => self.packets.addresses.replace_mac(mac),
                // The frame ends in it.
                None => new.iter_mut().skip(at).for_each(|byte| *byte = 0),
            }
        }
    }

    /// Replaces the address of a Linux cooked header: eight bytes, of which a MAC address has six.
    fn cooked(&self, new: &mut [u8], at: usize) {
        if let Some(address) = new.get_mut(at..at + 8) {
            self.packets.addresses.replace_mac(&mut address[..MAC_LEN]);
            address[MAC_LEN..].fill(0);
        } else {
            new.iter_mut().skip(at).for_each(|byte| *byte = 0);
        }
    }

    /// Replaces addresses, and fills options and the contents of extension headers with zeros.
    fn ip_header(&mut self, new: &mut [u8], header: &IpLayer) {
        let addresses = &mut self.packets.addresses;
        let IpLayer { at, payload, .. } = *header;
        match new[at] >> 4 {
            4 => {
                addresses.replace(&mut new[at + 12..at + 16]);
                addresses.replace(&mut new[at + 16..at + 20]);
                new[at + 20..payload].fill(0);
            }
            _ => {
                addresses.replace(&mut new[at + 8..at + 24]);
                addresses.replace(&mut new[at + 24..at + 40]);
                extension_headers(&mut new[at..payload]);
            }
        }
    }

    /// Replaces the contents of the packets of a RoCEv2 frame, and makes their ICRCs again.
    fn roce(&mut self, new: &mut [u8], old: &Datagram<'_>, header: &IpLayer, is_whole: bool, report: &FrameReport) {
        let (start, end) = (header.payload + UDP_LEN, header.end.min(new.len()));
        let dst = match old.dst.ip() {
            std::net::IpAddr::V4(v4) => v4.octets().to_vec(),
            std::net::IpAddr::V6(v6) => v6.octets().to_vec(),
        };
        if !is_whole || old.payload.len() < MIN_PACKET {
            let payload = &mut new[start..end];
            return self.packets.replace(payload, &dst);
        }
        let (src, to) = (
            self.packets.addresses.ip(old.src.ip()),
            self.packets.addresses.ip(old.dst.ip()),
        );
        let flows = (
            Flow::try_from((old.src, old.dst)),
            Flow::try_from(((src, old.src.port()).into(), (to, old.dst.port()).into())),
        );
        let (Ok(old_flow), Ok(new_flow)) = flows else { return };
        let id = old.identification();
        if report.packets > 1 {
            let size = self.splitter.last_size().max(1);
            for (nth, (before, after)) in old
                .payload
                .chunks(size)
                .zip(new[start..end].chunks_mut(size))
                .enumerate()
            {
                let counted = id.wrapping_add(nth as u16);
                let was_right = segment_ok(old.src, old.dst, id, nth, before);
                let own = match old_flow.recover(before, counted) {
                    Recovery::Exact(own) if was_right => own,
                    _ => counted,
                };
                self.packet(after, &dst, |body| {
                    let right = new_flow.compute(own, body);
                    if was_right { right } else { !right }
                });
            }
            return;
        }
        let translated = match report.icrc {
            Icrc::Bad => Translation::of(&old_flow, Some(id), old.payload),
            _ => None,
        };
        if let Some(t) = translated {
            let mut ip = |ip| self.packets.addresses.ip(ip);
            let sent = (
                (ip(t.sent_from.ip()), t.sent_from.port()).into(),
                (ip(t.sent_to), ROCE_UDP_PORT).into(),
            );
            if let Ok(sent) = Flow::try_from(sent) {
                return self.packet(&mut new[start..end], &dst, |body| sent.compute(id, body));
            }
        }
        let fault = fault(old, &old_flow, id);
        self.packet(&mut new[start..end], &dst, |_| 0);
        let made = match check_datagram(&new[header.at..end]) {
            Some(checked) => checked.computed,
            None => new_flow.compute(id, &new[start..end - ICRC_LEN]),
        };
        new[end - ICRC_LEN..end].copy_from_slice(&(made ^ fault).to_le_bytes());
    }

    /// Replaces the contents of a packet and writes the ICRC of the rest.
    fn packet(&mut self, packet: &mut [u8], dst: &[u8], icrc: impl FnOnce(&[u8]) -> u32) {
        if packet.len() < MIN_PACKET {
            self.packets.replace(packet, dst);
        } else if let Some((body, end)) = packet.split_last_chunk_mut::<ICRC_LEN>() {
            self.packets.replace(body, dst);
            *end = icrc(body).to_le_bytes();
        }
    }
}

/// Difference between the ICRC that a datagram carries and the right one.
fn fault(old: &Datagram<'_>, flow: &Flow, id: u16) -> u32 {
    if let Some(checked) = check_datagram(old.datagram) {
        return checked.carried ^ checked.computed;
    }
    match old.payload.split_last_chunk::<ICRC_LEN>() {
        Some((body, end)) => u32::from_le_bytes(*end) ^ flow.compute(id, body),
        None => 0,
    }
}

/// Returns how many bytes behind an IP header, in a frame of `len` bytes, say what is in it.
fn known_of_payload(header: &IpLayer, len: usize) -> usize {
    let room = header.end.min(len).saturating_sub(header.payload);
    let known = match (header.protocol, header.fragment) {
        (_, Some(1..)) => 0,
        (PROTOCOL_UDP, _) => UDP_LEN,
        (PROTOCOL_GRE, _) => GRE_LEN,
        _ => 0,
    };
    known.min(room)
}

/// Fills the contents of IPv6 extension headers with zeros: what is next and the lengths stay.
fn extension_headers(packet: &mut [u8]) {
    let (mut next, mut at) = (packet[6], 40);
    while at + 8 <= packet.len() {
        let is_fragment = next == 44;
        let len = if is_fragment {
            8
        } else {
            8 + usize::from(packet[at + 1]) * 8
        };
        next = packet[at];
        let end = packet.len().min(at + len);
        if !is_fragment {
            packet[at + 2..end].fill(0);
        }
        at = end;
    }
}

/// Makes the checksums of an IP packet again.
fn checksums(old: &[u8], new: &mut [u8], header: &IpLayer) {
    let IpLayer { at, payload, .. } = *header;
    let end = header.end.min(old.len());
    let is_v4 = old[at] >> 4 == 4;
    let begins = !matches!(header.fragment, Some(1..));
    if header.protocol == PROTOCOL_UDP && begins && end >= payload + UDP_LEN {
        let addresses = if is_v4 { at + 12..at + 20 } else { at + 8..at + 40 };
        let length = ((end - payload) as u32).to_be_bytes();
        let rest = [0, PROTOCOL_UDP];
        let (old_addresses, new_addresses) = (&old[addresses.clone()], new[addresses].to_vec());
        if header.end == end && header.fragment.is_none() {
            checksum::udp(
                &old[payload..end],
                &[old_addresses, &length, &rest],
                &mut new[payload..end],
                &[&new_addresses, &length, &rest],
            );
        } else {
            // It covers what is not there.
            new[payload + 6..payload + 8].fill(0);
        }
    }
    if is_v4 {
        checksum::ipv4(&old[at..payload], &mut new[at..payload]);
    }
}
