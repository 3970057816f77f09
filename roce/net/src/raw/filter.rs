//! Filters of raw and packet sockets: classic BPF programs, which the kernel runs before it copies a packet.

use std::{
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd},
};

use libc::sock_filter;
use roce_bth::{Qpn, ROCE_UDP_PORT};
use roce_port::Steering;

use crate::{
    socket::{OpenError, context},
    sys,
};

/// Fields that are no bytes of the packet (`linux/filter.h`): `SKF_AD_OFF` and an offset, and bytes from the IP header on.
const PACKET_TYPE: u32 = (libc::SKF_AD_OFF + libc::SKF_AD_PKTTYPE) as u32;
const PROTOCOL: u32 = (libc::SKF_AD_OFF + libc::SKF_AD_PROTOCOL) as u32;
const VLAN_TAG: u32 = (libc::SKF_AD_OFF + libc::SKF_AD_VLAN_TAG) as u32;
const IP_HEADER: u32 = libc::SKF_NET_OFF as u32;

/// The bits of a VLAN tag that are the VLAN.
const VLAN_ID: u32 = 0xfff;
/// More Fragments, and the offset of the fragment.
const FRAGMENT: u32 = 0x3fff;
const WORD: u32 = libc::BPF_W;
const HALF: u32 = libc::BPF_H;
const BYTE: u32 = libc::BPF_B;

/// Packets that a socket of a datapath receives.
#[derive(Clone, Debug)]
pub(crate) struct Accepted {
    /// Our addresses and groups; none: all that the IP layer delivers.
    pub(crate) addrs: Vec<IpAddr>,
    /// Shard whose queue pairs they are for, if there are several.
    pub(crate) shard: Option<(Steering, usize)>,
}

/// Kind of a socket, which decides where the bytes begin that its filter sees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Layer {
    /// Raw IPv4: at the IP header.
    Ipv4,
    /// Raw IPv6: at the UDP header.
    Ipv6,
    /// Packet: at the Ethernet header. Frames with this VLAN tag; 0: with none.
    Link { v4: bool, vlan: u16 },
}

impl Layer {
    fn is_v4(self) -> bool {
        matches!(self, Self::Ipv4 | Self::Link { v4: true, .. })
    }

    /// Returns where a byte of the IP header is.
    fn ip(self, at: u32) -> u32 {
        match self {
            Self::Ipv4 => at,
            // The IP layer has seen to it that all of this header is in one piece, as loads from there need.
            Self::Ipv6 => IP_HEADER + at,
            Self::Link { .. } => 14 + at,
        }
    }

    /// Returns where a byte of the UDP header is, or of the payload behind it.
    fn udp(self, at: u32) -> u32 {
        match self {
            Self::Ipv4 => 20 + at,
            Self::Ipv6 => at,
            Self::Link { v4: true, .. } => 14 + 20 + at,
            Self::Link { v4: false, .. } => 14 + 40 + at,
        }
    }
}

fn op(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    }
}

/// A program under way: each step refuses the packet or goes on.
#[derive(Default)]
struct Program(Vec<sock_filter>);

impl Program {
    fn load(&mut self, size: u32, at: u32) -> &mut Self {
        self.0.push(op(libc::BPF_LD | size | libc::BPF_ABS, 0, 0, at));
        self
    }

    fn mask(&mut self, bits: u32) -> &mut Self {
        self.0.push(op(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, bits));
        self
    }

    fn refuse(&mut self) {
        self.0.push(op(libc::BPF_RET | libc::BPF_K, 0, 0, 0));
    }

    /// Refuses the packet unless the loaded value is this.
    fn require(&mut self, value: u32) {
        self.0
            .push(op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, 0, value));
        self.refuse();
    }

    /// Refuses the packet if the loaded value is above this.
    fn at_most(&mut self, value: u32) {
        self.0
            .push(op(libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K, 0, 1, value));
        self.refuse();
    }

    /// Refuses the packet unless the words from an offset on are one of these.
    fn one_of(&mut self, at: u32, values: &[Vec<u32>]) {
        let len = |words: &[u32]| 2 * words.len() as u32 + 1;
        let mut rest: u32 = values.iter().map(|words| len(words)).sum();
        for words in values {
            rest -= len(words);
            for (i, word) in words.iter().enumerate() {
                // Past the remaining words, and the jump at their end.
                let next = 2 * (words.len() - i - 1) as u8 + 1;
                self.load(WORD, at + 4 * i as u32);
                self.0
                    .push(op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, next, *word));
            }
            // Past the other values, and the refusal behind them.
            self.0.push(op(libc::BPF_JMP | libc::BPF_JA, 0, 0, rest + 1));
        }
        self.refuse();
    }

    /// Refuses packets to queue pairs of other shards. The first gets those of no shard.
    fn require_shard(&mut self, layer: Layer, steering: Steering, shard: usize) {
        // What is too short has no number: a load beyond the end refuses it.
        let (multicast, is_first) = (Qpn::MULTICAST.value(), shard == 0);
        self.load(WORD, layer.udp(8 + 4)).mask(multicast);
        let shift = 24 - u32::from(steering.bits());
        let jump = |kind, jt, jf, k| op(libc::BPF_JMP | kind | libc::BPF_K, jt, jf, k);
        // To the refusal behind these four, or past it.
        let of_no_shard = |to_refusal: u8| to_refusal + u8::from(is_first);
        let code = [
            jump(libc::BPF_JEQ, of_no_shard(3), 0, multicast),
            op(libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K, 0, 0, shift),
            jump(libc::BPF_JGE, of_no_shard(1), 0, steering.shards() as u32),
            jump(libc::BPF_JEQ, 1, 0, shard as u32),
        ];
        self.0.extend(code);
        self.refuse();
    }

    fn accept(mut self) -> Vec<sock_filter> {
        self.0.push(op(libc::BPF_RET | libc::BPF_K, 0, 0, u32::MAX));
        self.0
    }
}

fn words(addr: IpAddr) -> Vec<u32> {
    match addr {
        IpAddr::V4(v4) => vec![v4.to_bits()],
        IpAddr::V6(v6) => [96, 64, 32, 0].map(|shift| (v6.to_bits() >> shift) as u32).into(),
    }
}

/// Returns a program that accepts whole UDP packets to the RoCE port of these addresses.
fn program(layer: Layer, accepted: &Accepted) -> Vec<sock_filter> {
    let v4 = layer.is_v4();
    let mut program = Program::default();
    if let Layer::Link { vlan, .. } = layer {
        // To others, or from here: every frame on lo comes twice, when it leaves and when it arrives.
        program
            .load(WORD, PACKET_TYPE)
            .at_most(u32::from(libc::PACKET_MULTICAST));
        program.load(WORD, VLAN_TAG).mask(VLAN_ID).require(u32::from(vlan));
        let kind = if v4 { libc::ETH_P_IP } else { libc::ETH_P_IPV6 };
        program.load(WORD, PROTOCOL).require(kind as u32);
    }
    if v4 {
        // No options.
        program.load(BYTE, layer.ip(0)).require(0x45);
        program.load(HALF, layer.ip(6)).mask(FRAGMENT).require(0);
    }
    if layer != Layer::Ipv6 {
        let protocol = if v4 { 9 } else { 6 };
        program.load(BYTE, layer.ip(protocol)).require(libc::IPPROTO_UDP as u32);
    }
    program.load(HALF, layer.udp(2)).require(u32::from(ROCE_UDP_PORT));
    let addrs: Vec<_> = accepted.addrs.iter().filter(|a| a.is_ipv4() == v4).copied().collect();
    if !accepted.addrs.is_empty() {
        let words: Vec<_> = addrs.into_iter().map(words).collect();
        program.one_of(layer.ip(if v4 { 16 } else { 24 }), &words);
    }
    if let Some((steering, shard)) = accepted.shard {
        program.require_shard(layer, steering, shard);
    }
    program.accept()
}

/// Has a socket receive these packets alone.
///
/// # Errors
/// When the kernel refuses the filter, such as for its length.
pub(crate) fn attach(socket: BorrowedFd<'_>, layer: Layer, accepted: &Accepted) -> Result<(), OpenError> {
    let attached = sys::attach_filter(socket.as_fd(), &mut program(layer, accepted));
    attached.map_err(context("attaching a filter to a raw socket"))
}

#[cfg(test)]
mod tests {
    use libc::c_int;

    use super::*;

    /// Runs a program over bytes. `fields`: what loads from elsewhere find.
    fn accepts(program: &[sock_filter], bytes: &[u8], fields: &[(u32, u32)]) -> bool {
        let (mut at, mut acc) = (0, 0u32);
        loop {
            let op = program[at];
            let code = u32::from(op.code);
            at += 1;
            match code & 7 {
                libc::BPF_LD => {
                    let field = fields.iter().find(|(k, _)| *k == op.k).map(|(_, value)| *value);
                    let size = match code & 0x18 {
                        libc::BPF_W => 4,
                        libc::BPF_H => 2,
                        _ => 1,
                    };
                    let read = || {
                        let from = op.k as usize;
                        let bytes = bytes.get(from..from.checked_add(size)?)?;
                        Some(bytes.iter().fold(0, |n, b| n << 8 | u32::from(*b)))
                    };
                    match field.or_else(read) {
                        Some(value) => acc = value,
                        None => return false,
                    }
                }
                libc::BPF_ALU if code & 0xf0 == libc::BPF_AND => acc &= op.k,
                libc::BPF_ALU if code & 0xf0 == libc::BPF_RSH => acc >>= op.k,
                libc::BPF_JMP => {
                    let yes = match code & 0xf0 {
                        libc::BPF_JA => {
                            at += op.k as usize;
                            continue;
                        }
                        libc::BPF_JEQ => acc == op.k,
                        libc::BPF_JGT => acc > op.k,
                        _ => acc >= op.k,
                    };
                    at += usize::from(if yes { op.jt } else { op.jf });
                }
                _ => return op.k != 0,
            }
        }
    }

    fn ip(v4: bool, to: &str, qpn: u32) -> Vec<u8> {
        let mut bytes = match (v4, to.parse().unwrap()) {
            (true, IpAddr::V4(to)) => {
                let mut ip = vec![0x45, 0, 0, 44, 0, 0, 0x40, 0, 64, 17, 0, 0, 192, 0, 2, 9];
                ip.extend(to.octets());
                ip
            }
            (_, IpAddr::V6(to)) => {
                let mut ip = vec![0x60, 0, 0, 0, 0, 24, 17, 64];
                ip.extend([9; 16]);
                ip.extend(to.octets());
                ip
            }
            _ => unreachable!(),
        };
        bytes.extend([0xc0, 1, 0x12, 0xb7, 0, 24, 0, 0, 4, 0, 0xff, 0xff]);
        bytes.extend(qpn.to_be_bytes());
        bytes.extend([0; 8]);
        bytes
    }

    fn frame(ip: &[u8]) -> Vec<u8> {
        [&[0; 14], ip].concat()
    }

    fn link(vlan: u16, kind: c_int, tag: u32) -> (Layer, [(u32, u32); 3]) {
        let v4 = kind == libc::ETH_P_IP;
        let fields = [(PACKET_TYPE, 0), (PROTOCOL, kind as u32), (VLAN_TAG, tag)];
        (Layer::Link { v4, vlan }, fields)
    }

    fn accepted(addrs: &[&str]) -> Accepted {
        Accepted {
            addrs: addrs.iter().map(|a| a.parse().unwrap()).collect(),
            shard: None,
        }
    }

    #[test]
    fn packets_to_our_addresses_are_accepted() {
        let ours = accepted(&["192.0.2.1", "239.1.2.3", "2001:db8::1", "ff0e::7"]);
        let (v4, fields) = link(0, libc::ETH_P_IP, 0);
        let of_link = program(v4, &ours);
        let raw = program(Layer::Ipv4, &ours);
        for (to, expected) in [("192.0.2.1", true), ("239.1.2.3", true), ("192.0.2.2", false)] {
            let bytes = ip(true, to, 5);
            assert_eq!(accepts(&raw, &bytes, &[]), expected, "{to}");
            assert_eq!(accepts(&of_link, &frame(&bytes), &fields), expected, "{to}");
            assert!(accepts(&program(Layer::Ipv4, &accepted(&[])), &bytes, &[]), "any");
        }
        let (v6, fields) = link(0, libc::ETH_P_IPV6, 0);
        for (to, expected) in [
            ("2001:db8::1", true),
            ("ff0e::7", true),
            ("2001:db8::2", false),
            ("ff0f::7", false),
        ] {
            let bytes = ip(false, to, 5);
            assert_eq!(accepts(&program(v6, &ours), &frame(&bytes), &fields), expected, "{to}");
            let to_words: Vec<_> = words(to.parse().unwrap());
            let fields: Vec<_> = (0..4)
                .map(|i| (Layer::Ipv6.ip(24 + 4 * i), to_words[i as usize]))
                .collect();
            assert_eq!(accepts(&program(Layer::Ipv6, &ours), &bytes[40..], &fields), expected);
        }
        let none_of_this_version = program(Layer::Ipv4, &accepted(&["::1"]));
        assert!(!accepts(&none_of_this_version, &ip(true, "192.0.2.1", 5), &[]));
    }

    #[test]
    fn others_are_refused() {
        let ours = accepted(&["192.0.2.1"]);
        let whole = ip(true, "192.0.2.1", 5);
        let raw = program(Layer::Ipv4, &ours);
        for (at, value, why) in [
            (0, 0x46, "options"),
            (6, 0x20, "first fragment"),
            (7, 1, "later fragment"),
            (9, 6, "TCP"),
            (23, 0xb8, "another port"),
        ] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            assert!(!accepts(&raw, &bytes, &[]), "{why}");
        }
        let (layer, fields) = link(0, libc::ETH_P_IP, 0);
        let of_link = program(layer, &ours);
        let with = |k: u32, value: u32| fields.map(|(key, old)| (key, if key == k { value } else { old }));
        let bytes = frame(&whole);
        assert!(accepts(&of_link, &bytes, &fields));
        assert!(!accepts(
            &of_link,
            &bytes,
            &with(PACKET_TYPE, u32::from(libc::PACKET_OUTGOING))
        ));
        assert!(!accepts(
            &of_link,
            &bytes,
            &with(PACKET_TYPE, u32::from(libc::PACKET_OTHERHOST))
        ));
        assert!(!accepts(&of_link, &bytes, &with(PROTOCOL, libc::ETH_P_ARP as u32)));
    }

    #[test]
    fn frames_of_another_vlan_are_refused() {
        let ours = accepted(&["192.0.2.1"]);
        let bytes = frame(&ip(true, "192.0.2.1", 5));
        // The upper bits are the priority.
        for (vlan, tag, expected) in [
            (0, 0, true),
            (0, 0x6000, true),
            (0, 5, false),
            (5, 0xa005, true),
            (5, 6, false),
            (5, 0, false),
        ] {
            let (layer, fields) = link(vlan, libc::ETH_P_IP, tag);
            assert_eq!(
                accepts(&program(layer, &ours), &bytes, &fields),
                expected,
                "{vlan} {tag:#x}"
            );
        }
    }

    #[test]
    fn each_packet_is_for_one_shard() {
        for shards in [2, 3, 4, 7] {
            let steering = Steering::new(shards).unwrap();
            let owners = |qpn: u32| {
                let of = |shard: usize| {
                    let accepted = Accepted {
                        shard: Some((steering, shard)),
                        ..accepted(&["192.0.2.1"])
                    };
                    accepts(&program(Layer::Ipv4, &accepted), &ip(true, "192.0.2.1", qpn), &[])
                };
                (0..shards).filter(|shard| of(*shard)).collect::<Vec<_>>()
            };
            for shard in 0..shards {
                let numbers = steering.slot(shard).unwrap().qpns();
                let last = numbers.last.min(Qpn::MULTICAST.value() - 1);
                assert_eq!(owners(numbers.first), [shard]);
                // Acknowledge request and reserved bits beside the number do not matter.
                assert_eq!(owners(last | 0xa500_0000), [shard]);
            }
            for qpn in [0, 1, Qpn::MULTICAST.value()] {
                assert_eq!(owners(qpn), [0], "{qpn:#x} of {shards}");
            }
            if !shards.is_power_of_two() {
                assert_eq!(owners(0xff_fffe), [0]);
            }
        }
    }
}
