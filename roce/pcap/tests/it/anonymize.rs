//! Copies without addresses, keys and data, which are judged as the originals are.

use std::{
    collections::HashSet,
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use proptest::{collection::vec, prelude::*};
use roce_bth::{Class, ExtHeader, Packet, Qpn};
use roce_pcap::{Anonymized, Capture, Filling, PcapNgWriter, Report, Settings, check_reader, decode};

use crate::{
    common::{capture_of, ethernet, fixture, ip_datagram, ip_datagram_sealed, packet, v4, v6},
    damage::damaged_captures,
};

fn settings() -> Settings {
    Settings {
        key: Settings::key_of("test"),
        ..Settings::default()
    }
}

fn anonymized(file: &[u8], settings: &Settings) -> (Vec<u8>, Anonymized) {
    let mut out = PcapNgWriter::new(Vec::new()).unwrap();
    let done = roce_pcap::anonymize(settings, &mut Capture::new(file).unwrap(), &mut out).unwrap();
    (out.finish().unwrap(), done)
}

fn captures() -> Vec<(PathBuf, Vec<u8>)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../pcap-fixtures");
    let dirs = [root.clone(), root.join("rds"), root.join("lnet")];
    let files = dirs.iter().flat_map(|dir| fs::read_dir(dir).unwrap());
    let files = files.map(|e| e.unwrap().path());
    files
        .filter(|path| path.to_str().unwrap().contains(".pcap"))
        .map(|path| (path.clone(), fs::read(path).unwrap()))
        .collect()
}

/// All findings of each frame, by rule.
fn rules(file: &[u8]) -> (Report, Vec<(u64, &'static str)>) {
    let mut rules = vec![];
    let report = check_reader("file", file, |frame| {
        rules.extend(frame.findings.iter().map(|f| (f.frame, f.rule.id())));
    })
    .unwrap();
    rules.extend(
        report
            .findings
            .iter()
            .filter(|f| f.at_end)
            .map(|f| (f.frame, f.rule.id())),
    );
    (report, rules)
}

fn frames(file: &[u8]) -> Vec<Vec<u8>> {
    let mut capture = Capture::new(file).unwrap();
    let mut frames = vec![];
    while let Some(frame) = capture.next_frame() {
        frames.push(frame.unwrap().data.to_vec());
    }
    frames
}

/// Bytes that a copy must not have: addresses of packets, and payload, virtual addresses and GIDs of packets.
#[derive(Default)]
struct Secrets {
    short: HashSet<[u8; 4]>,
    macs: HashSet<[u8; 6]>,
    remote: HashSet<[u8; 12]>,
    long: HashSet<[u8; 16]>,
}

impl Secrets {
    fn of(file: &[u8]) -> Self {
        let mut secrets = Self::default();
        let mut capture = Capture::new(file).unwrap();
        while let Some(frame) = capture.next_frame() {
            let frame = frame.unwrap();
            for mac in [&frame.data[..6], &frame.data[6..12]] {
                secrets.macs.insert(mac.try_into().unwrap());
            }
            let Ok(datagram) = decode(frame.link, frame.data) else {
                continue;
            };
            for ip in [datagram.src.ip(), datagram.dst.ip()] {
                match ip {
                    IpAddr::V4(v4) => drop(secrets.short.insert(v4.octets())),
                    IpAddr::V6(v6) => drop(secrets.long.insert(v6.octets())),
                }
            }
            let Ok(packet) = Packet::parse(datagram.payload) else {
                continue;
            };
            let info = packet.header.bth.opcode.info();
            for header in [ExtHeader::Reth, ExtHeader::AtomicEth] {
                if let Some(at) = info.offset(header) {
                    // Virtual address and key.
                    secrets
                        .remote
                        .insert(packet.header.bytes()[at..at + 12].try_into().unwrap());
                }
            }
            let is_cm = packet.header.bth.dest_qp == Qpn::GSI;
            if info.class != Class::Cnp && !is_cm {
                secrets
                    .long
                    .extend(packet.payload.windows(16).map(|w| <[u8; 16]>::try_from(w).unwrap()));
            }
        }
        secrets.remote.remove(&[0; 12]);
        secrets.macs.remove(&[0xff; 6]);
        secrets.macs.remove(&[0; 6]);
        // Zeros and the like are everywhere.
        secrets
            .long
            .retain(|bytes| bytes.iter().collect::<HashSet<_>>().len() > 4);
        secrets
    }

    fn found_in(&self, frame: &[u8]) -> Option<String> {
        let any = |found: Option<&[u8]>| found.map(|bytes| format!("{bytes:02x?}"));
        any(frame.windows(4).find(|w| self.short.contains(*w)))
            .or_else(|| any(frame.windows(6).find(|w| self.macs.contains(*w))))
            .or_else(|| any(frame.windows(12).find(|w| self.remote.contains(*w))))
            .or_else(|| any(frame.windows(16).find(|w| self.long.contains(*w))))
    }
}

#[test]
fn all_captures_are_judged_as_before() {
    let all = captures();
    assert!(all.len() > 90, "{}", all.len());
    for (path, file) in all {
        let (copy, done) = anonymized(&file, &settings());
        assert_eq!(done.first_different, None, "{}", path.display());
        let ((old, old_rules), (new, new_rules)) = (rules(&file), rules(&copy));
        assert_eq!(old_rules, new_rules, "{}", path.display());
        let counts = |r: &Report| {
            let conversations: Vec<_> = r
                .conversations
                .iter()
                .map(|c| (c.packets, c.repeated, c.verdict, c.mtu))
                .collect();
            let findings = r.findings.iter().map(|f| (f.rule, f.count)).collect::<Vec<_>>();
            (
                r.frames,
                r.roce_frames,
                r.roce_packets,
                r.icrc_ok,
                r.icrc_bad,
                r.icrc_unchecked,
                conversations,
                findings,
            )
        };
        assert_eq!(counts(&old), counts(&new), "{}", path.display());
        let lengths = |file: &[u8]| frames(file).iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(lengths(&file), lengths(&copy), "{}", path.display());
    }
}

#[test]
fn damaged_captures_are_judged_as_before() {
    for (what, file) in damaged_captures() {
        let (copy, done) = anonymized(&file, &settings());
        assert_eq!(done.first_different, None, "{what}");
        assert_eq!(rules(&file).1, rules(&copy).1, "{what}");
    }
}

#[test]
fn a_difference_is_noticed() {
    // Without its payload a repetition is the same as the first.
    let zeros = Settings {
        filling: Filling::Zeros,
        ..settings()
    };
    let noticed = damaged_captures().filter(|(_, file)| anonymized(file, &zeros).1.first_different.is_some());
    let noticed: Vec<_> = noticed.map(|(what, _)| what).collect();
    assert!(
        !noticed.is_empty()
            && noticed
                .iter()
                .all(|what| what.contains("repeated packet with other bytes")),
        "{noticed:?}"
    );
}

#[test]
fn translated_requests_stay_such() {
    let mut file = fs::read(fixture("rping.pcap")).unwrap();
    // The first frame, a REQ: behind the headers of file, record and Ethernet. The checksum is not made again.
    let src = 24 + 16 + 14 + 12;
    file[src..src + 4].copy_from_slice(&[10, 99, 0, 9]);
    let found = rules(&file).1;
    assert!(
        found
            .iter()
            .any(|(frame, rule)| (*frame, *rule) == (1, "frame-translated")),
        "{found:?}"
    );
    let (copy, done) = anonymized(&file, &settings());
    assert_eq!((done.first_different, rules(&copy).1), (None, found));
}

#[test]
fn no_address_key_or_payload_of_a_capture_is_in_its_copy() {
    for (path, file) in captures() {
        let secrets = Secrets::of(&file);
        assert!(
            frames(&file).iter().any(|frame| secrets.found_in(frame).is_some()),
            "the search finds nothing"
        );
        for (at, frame) in frames(&anonymized(&file, &settings()).0).iter().enumerate() {
            assert_eq!(secrets.found_in(frame), None, "{} frame {}", path.display(), at + 1);
        }
    }
}

#[test]
fn the_same_seed_makes_the_same_copy_and_another_one_another() {
    let (_, file) = captures().swap_remove(0);
    let first = anonymized(&file, &settings()).0;
    assert!(first == anonymized(&file, &settings()).0);
    let other = Settings {
        key: Settings::key_of("other"),
        ..Settings::default()
    };
    assert!(first != anonymized(&file, &other).0);
}

#[test]
fn private_data_and_times_are_as_asked() {
    let file = captures()
        .into_iter()
        .find(|(path, _)| path.ends_with("rnbd.pcap"))
        .unwrap()
        .1;
    let name = |file: &[u8]| rules(file).0.conversations[0].name.clone();
    let kept = Settings {
        keep_private: true,
        shift_secs: -3600,
        filling: Filling::Zeros,
        ..settings()
    };
    let (copy, done) = anonymized(&file, &kept);
    assert_eq!((done.first_different, name(&copy)), (None, name(&file)));
    let times = |file: &[u8]| rules(file).0.conversations[0].time_ns;
    assert_eq!(times(&copy), times(&file).map(|ns| ns - 3600 * 1_000_000_000));
}

#[test]
fn frames_of_all_kinds_are_judged_as_before_and_show_nothing() {
    let good = ip_datagram(v4(), 7, &packet(b"secret payload, to be hidden"));
    let mut bad = good.clone();
    *bad.last_mut().unwrap() ^= 1;
    let six = ip_datagram(v6(), 0, &packet(b"secret payload, to be hidden"));
    let segments: Vec<u8> = {
        let size = packet(b"secret payload, to be hidden").len();
        let whole = |nth: u16| ip_datagram(v4(), 7 + nth, &packet(b"secret payload, to be hidden"));
        let joined: Vec<u8> = (0..3).flat_map(|nth| whole(nth)[28..].to_vec()).collect();
        assert_eq!(joined.len(), 3 * size);
        ip_datagram_sealed(v4(), 7, &joined)
    };
    let vxlan = {
        let (src, mut dst) = v4();
        dst.set_port(4789);
        let inner = [&[8, 0, 0, 0, 0, 0, 42, 0][..], &ethernet(0x0800, &good)].concat();
        ip_datagram_sealed((src, dst), 9, &inner)
    };
    let mut tcp = good.clone();
    tcp[9] = 6;
    let mut fragment = good.clone();
    fragment[6..8].copy_from_slice(&[0x20, 0]);
    let mut later = good.clone();
    later[6..8].copy_from_slice(&[0, 3]);
    let padded = [&ethernet(0x0800, &good)[..], b"secret trailer"].concat();
    let mut frames_in: Vec<Vec<u8>> = [&good, &bad, &segments, &vxlan, &tcp, &fragment, &later]
        .map(|ip| ethernet(0x0800, ip))
        .to_vec();
    frames_in.push(ethernet(0x86dd, &six));
    frames_in.push(ethernet(0x0806, b"secret arp of 10.1.2.3"));
    frames_in.push(ethernet(0x8915, b"secret version 1"));
    frames_in.push(padded);
    let mut input: Vec<(&[u8], Option<u32>)> = frames_in.iter().map(|frame| (&frame[..], None)).collect();
    let whole = &frames_in[0];
    for len in [0, 3, 13, 14, 30, 40, 45, 50, 60, 70] {
        input.push((&whole[..len], Some(whole.len() as u32)));
    }
    let file = capture_of(1, &input);
    let (copy, done) = anonymized(&file, &settings());
    assert_eq!(done.first_different, None);
    assert_eq!(rules(&file).1, rules(&copy).1);
    assert_eq!((rules(&copy).0.icrc_bad, rules(&copy).0.icrc_ok), (1, 5));
    let (src, dst) = v4();
    let octets = [src.ip(), dst.ip()].map(|ip| match ip {
        IpAddr::V4(v4) => v4.octets(),
        IpAddr::V6(_) => unreachable!(),
    });
    for (at, frame) in frames(&copy).iter().enumerate() {
        assert_eq!(frame.len(), input[at].0.len());
        assert!(!frame.windows(6).any(|w| w == b"secret"), "frame {}", at + 1);
        assert!(
            !octets.iter().any(|ip| frame.windows(4).any(|w| w == ip)),
            "frame {}",
            at + 1
        );
    }
}

#[test]
fn link_headers_lose_their_addresses() {
    let ip = ip_datagram(v4(), 7, &packet(b"secret"));
    let mac = [0x52, 0x54, 0, 1, 2, 3];
    let sll = [&[0, 4, 0, 1, 0, 6][..], &mac, &[9, 9, 8, 0], &ip].concat();
    let sll2 = [&[8, 0, 0, 0, 0, 0, 0, 1, 0, 1, 4, 6][..], &mac, &[9, 9], &ip].concat();
    let erf = [&[0; 8][..], &[2, 0, 0, 0, 0, 0, 0, 0, 0, 0], &mac, &mac, &[8, 0], &ip].concat();
    for (link, frame) in [
        (113, sll),
        (276, sll2),
        (197, erf),
        (101, ip.clone()),
        (147, ip.clone()),
    ] {
        let file = capture_of(link, &[(&frame, None)]);
        let (copy, done) = anonymized(&file, &settings());
        assert_eq!(done.first_different, None, "{link}");
        let copied = &frames(&copy)[0];
        assert!(!copied.windows(6).any(|w| w == mac || w == b"secret"), "{link}");
        assert!(!copied.windows(4).any(|w| w == [10, 1, 2, 3]), "{link}");
        assert_eq!(rules(&copy).0.icrc_ok, u64::from(link != 147), "{link}");
    }
}

proptest! {
    #[test]
    fn damaged_frames_are_copied_with_their_lengths(
        frame in 0usize..4,
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
        link in prop::sample::select(vec![1u32, 113, 276, 101, 197, 0, 999]),
    ) {
        let good = ip_datagram(v4(), 7, &packet(b"payload"));
        let (src, mut dst) = v4();
        dst.set_port(6081);
        let geneve = [&[1, 0, 0x65, 0x58, 0, 0, 1, 0, 1, 2, 3, 4][..], &ethernet(0x0800, &good)].concat();
        let mut gre = ip_datagram_sealed(v4(), 1, &[&[0x30, 0, 0x88, 0xbe, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0][..], &ethernet(0x0800, &good)].concat());
        gre.drain(20..28);
        gre[9] = 47;
        let frames_in = [
            ethernet(0x0800, &good),
            ethernet(0x86dd, &ip_datagram(v6(), 0, &packet(b"payload"))),
            ethernet(0x0800, &ip_datagram_sealed((src, dst), 1, &geneve)),
            ethernet(0x0800, &gre),
        ];
        let mut frame = frames_in[frame].clone();
        for (at, byte) in damage {
            let at = at.index(frame.len());
            frame[at] = byte;
        }
        let original = frame.len() as u32;
        frame.truncate(cut.index(frame.len() * 2).min(frame.len()));
        let file = capture_of(link, &[(&frame, Some(original))]);
        let (copy, done) = anonymized(&file, &settings());
        prop_assert_eq!(done.frames, 1);
        prop_assert_eq!(frames(&copy)[0].len(), frame.len());
    }
}
