//! Capture files of every format, whole, cut and corrupt.

use std::{fs, path::Path};

use crate::common::{capture_of, ethernet, ip_datagram, packet, v4};
use pcap_file::{
    DataLink, Endianness,
    pcapng::{
        Block, PcapNgWriter, RawBlock,
        blocks::{
            interface_description::{InterfaceDescriptionBlock, InterfaceDescriptionOption},
            simple_packet::SimplePacketBlock,
        },
    },
};
use proptest::{collection::vec, prelude::*};
use rand::{Rng, SeedableRng};
use roce_pcap::{Capture, Error, LinkType, Rule, Verdict, check_reader};

fn fixture(name: &str) -> Vec<u8> {
    fs::read(
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../pcap-fixtures")
            .join(name),
    )
    .unwrap()
}

fn frame() -> Vec<u8> {
    ethernet(0x0800, &ip_datagram(v4(), 1, &packet(b"hello")))
}

#[test]
fn a_file_cut_anywhere_gives_the_whole_frames_and_an_error() {
    for name in ["cm-reject.pcap", "cm-reject.pcapng"] {
        let file = fixture(name);
        let mut most = 0;
        for cut in 0..file.len() {
            match check_reader(name, &file[..cut], |_| {}) {
                Err(e) => {
                    assert_eq!(most, 0, "{name} cut at {cut}: {e}");
                    assert!(
                        matches!(e, Error::CutOff { .. } | Error::NotACapture(_)),
                        "{name} cut at {cut}: {e}"
                    );
                }
                Ok(report) => {
                    assert!(report.frames >= most, "{name} cut at {cut}");
                    most = report.frames;
                    assert_eq!(report.icrc_ok, report.frames, "{name} cut at {cut}");
                    // Between two records the file looks complete.
                    if report.complete {
                        assert_eq!(report.findings, []);
                    } else {
                        assert_eq!(report.verdict, Verdict::Bad);
                        assert_eq!(report.findings.last().unwrap().rule, Rule::FileBroken);
                        assert_eq!(report.findings.last().unwrap().frame, report.frames + 1);
                        assert!(
                            report.findings[0].text.contains("ends in the middle"),
                            "{}",
                            report.findings[0].text
                        );
                    }
                }
            }
        }
        assert_eq!(check_reader(name, &file[..], |_| {}).unwrap().frames, 2);
    }
}

#[test]
fn after_an_error_the_reader_stays_at_the_end() {
    let file = fixture("cm-reject.pcap");
    let mut capture = Capture::new(&file[..100]).unwrap();
    assert!(capture.next_frame().unwrap().is_err());
    assert!(capture.next_frame().is_none());
}

#[test]
fn corrupt_records_are_named() {
    let good = frame();
    let reason = |patch: &dyn Fn(&mut Vec<u8>)| {
        let mut file = capture_of(1, &[(&good, None), (&good, None)]);
        patch(&mut file);
        let report = check_reader("x", &file[..], |_| {}).unwrap();
        assert_eq!((report.complete, report.verdict), (false, Verdict::Bad));
        assert_eq!(report.frames, 1);
        report.findings.last().unwrap().text.clone()
    };
    let second = 24 + 16 + good.len();
    let text = reason(&|f| f[second + 4..second + 8].copy_from_slice(&2_000_000u32.to_be_bytes()));
    assert!(text.contains("behind frame 1") && text.contains("time stamp"), "{text}");
    let text = reason(&|f| f[second + 12..second + 16].copy_from_slice(&3u32.to_be_bytes()));
    assert!(text.contains("more bytes captured"), "{text}");
    let text = reason(&|f| f[second + 8..second + 16].fill(0x7f));
    assert!(text.contains("ends in the middle"), "{text}");
}

/// A pcapng file of one interface with these options, holding one enhanced packet with these ticks and a simple packet.
fn pcapng(endianness: Endianness, options: Vec<InterfaceDescriptionOption<'static>>, ticks: u64) -> Vec<u8> {
    let mut writer = PcapNgWriter::with_endianness(Vec::new(), endianness).unwrap();
    let data = frame();
    let interface = InterfaceDescriptionBlock {
        linktype: DataLink::ETHERNET,
        snaplen: 0,
        options,
    };
    writer.write_block(&Block::InterfaceDescription(interface)).unwrap();
    // By hand: pcap-file's own enhanced packet takes nanoseconds for ticks.
    let number = |v: u32| {
        if endianness == Endianness::Big {
            v.to_be_bytes()
        } else {
            v.to_le_bytes()
        }
    };
    let mut body = vec![];
    for field in [
        0,
        (ticks >> 32) as u32,
        ticks as u32,
        data.len() as u32,
        data.len() as u32,
    ] {
        body.extend(number(field));
    }
    body.extend(&data);
    body.resize(body.len().next_multiple_of(4), 0);
    let len = body.len() as u32 + 12;
    let raw = RawBlock {
        type_: 6,
        initial_len: len,
        body: body.into(),
        trailer_len: len,
    };
    writer.write_raw_block(&raw).unwrap();
    let simple = SimplePacketBlock {
        original_len: data.len() as u32,
        data: data.into(),
    };
    writer.write_block(&Block::SimplePacket(simple)).unwrap();
    writer.into_inner()
}

#[test]
fn pcapng_of_either_byte_order_and_any_resolution() {
    use InterfaceDescriptionOption::{IfTsOffset, IfTsResol};
    let cases = [
        (vec![], 1_700_000_000_000_001, 1_700_000_000_000_001_000),
        (vec![IfTsResol(9)], 1_700_000_000_000_000_001, 1_700_000_000_000_000_001),
        (vec![IfTsResol(3)], 5, 5_000_000),
        (vec![IfTsResol(0)], 5, 5_000_000_000),
        (vec![IfTsResol(12)], 5_000, 5),
        (vec![IfTsResol(0x80 | 10)], 512, 500_000_000),
        (vec![IfTsResol(9), IfTsOffset(2)], 7, 2_000_000_007),
        (vec![IfTsResol(127)], u64::MAX, 0),
        (vec![IfTsResol(255)], u64::MAX, 0),
    ];
    for endianness in [Endianness::Big, Endianness::Little] {
        for (options, ticks, ns) in cases.clone() {
            let file = pcapng(endianness, options.clone(), ticks);
            let mut capture = Capture::new(&file[..]).unwrap();
            let enhanced = capture.next_frame().unwrap().unwrap();
            assert_eq!(
                (enhanced.time_ns, enhanced.link),
                (ns, LinkType::Ethernet),
                "{options:?} {endianness:?}"
            );
            assert_eq!(enhanced.data, frame());
            let simple = capture.next_frame().unwrap().unwrap();
            assert_eq!((simple.index, simple.time_ns, simple.data), (2, 0, &frame()[..]));
            assert!(capture.next_frame().is_none());
            let report = check_reader("x", &file[..], |_| {}).unwrap();
            assert_eq!((report.icrc_ok, report.verdict), (2, Verdict::Good));
        }
    }
}

/// The obsolete packet block (type 2), whose time stamp is two 32-bit halves, the high one first.
#[test]
fn old_pcapng_packet_blocks_are_read() {
    for endianness in [Endianness::Big, Endianness::Little] {
        let big = endianness == Endianness::Big;
        let number = |v: u32| if big { v.to_be_bytes() } else { v.to_le_bytes() };
        let mut writer = PcapNgWriter::with_endianness(Vec::new(), endianness).unwrap();
        let interface = InterfaceDescriptionBlock::new(DataLink::ETHERNET, 0);
        writer.write_block(&Block::InterfaceDescription(interface)).unwrap();
        // Interface 0, no drops, then the two halves of the time and the lengths.
        let mut body = vec![0; 4];
        for field in [1, 5, 4, 60] {
            body.extend(number(field));
        }
        body.extend([1, 2, 3, 4]);
        let len = body.len() as u32 + 12;
        let raw = RawBlock {
            type_: 2,
            initial_len: len,
            body: body.into(),
            trailer_len: len,
        };
        writer.write_raw_block(&raw).unwrap();
        let file = writer.into_inner();
        let mut capture = Capture::new(&file[..]).unwrap();
        let frame = capture.next_frame().unwrap().unwrap();
        assert_eq!(frame.time_ns, ((1 << 32) + 5) * 1000, "{endianness:?}");
        assert_eq!(
            (frame.data, frame.original_len, frame.is_cut()),
            (&[1, 2, 3, 4][..], 60, true)
        );
    }
}

#[test]
fn a_pcapng_packet_of_an_unknown_interface_is_an_error() {
    let mut writer = PcapNgWriter::new(Vec::new()).unwrap();
    let simple = SimplePacketBlock {
        original_len: 4,
        data: vec![0; 4].into(),
    };
    writer.write_block(&Block::SimplePacket(simple)).unwrap();
    let file = writer.into_inner();
    let mut capture = Capture::new(&file[..]).unwrap();
    let e = capture.next_frame().unwrap().unwrap_err().to_string();
    assert!(e.contains("interface"), "{e}");
}

/// A deterministic stand-in for the fuzz target: nothing but an error, a finding or a clean report may come out.
#[test]
fn mutated_captures_never_panic() {
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(0x4791);
    let seeds = [
        fixture("cm-reject.pcap"),
        fixture("cm-reject.pcapng"),
        fixture("udaddy.pcap"),
        fixture("atomic-cs.pcap"),
        pcapng(Endianness::Big, vec![InterfaceDescriptionOption::IfTsResol(9)], 5),
    ];
    let mut read = 0;
    for _ in 0..4_000 {
        let mut file = seeds[rng.random_range(0..seeds.len())].clone();
        for _ in 0..rng.random_range(1..8) {
            let at = rng.random_range(0..file.len());
            match rng.random_range(0..5) {
                0 => file[at] ^= 1 << rng.random_range(0..8),
                1 => file[at] = rng.random(),
                2 => file.truncate(at + 1),
                3 => file.insert(at, rng.random()),
                _ => {
                    let end = (at + rng.random_range(1..64)).min(file.len());
                    file.drain(at + 1..end.max(at + 1));
                }
            }
        }
        if let Ok(report) = check_reader("mutated", &file[..], |_| {}) {
            read += report.frames;
            assert_eq!(
                report.icrc_ok + report.icrc_bad + report.icrc_unchecked,
                report.roce_frames
            );
            assert!(report.bad_frames <= report.roce_frames && report.roce_frames <= report.frames);
        }
    }
    assert!(
        read > 4_000,
        "only {read} frames read: the mutations leave nothing to test"
    );
}

proptest! {
    #[test]
    fn arbitrary_frames_never_panic(
        link in prop_oneof![Just(1u32), Just(101), Just(113), Just(276), Just(0), any::<u32>()],
        frames in vec(vec(any::<u8>(), 0..120), 1..5),
    ) {
        let listed: Vec<_> = frames.iter().map(|f| (&f[..], None)).collect();
        let report = check_reader("x", &capture_of(link, &listed)[..], |_| {}).unwrap();
        prop_assert_eq!(report.frames, frames.len() as u64);
    }

    /// One byte of a good frame changed: never a panic, and never a good ICRC if a covered byte of the packet changed.
    #[test]
    fn damaged_frames_are_judged(at in 0usize..63, to: u8) {
        let mut bytes = frame();
        prop_assume!(bytes[at] != to);
        bytes[at] = to;
        let report = check_reader("x", &capture_of(1, &[(&bytes, None)])[..], |_| {}).unwrap();
        // From the UDP payload on, but for the FECN/BECN byte.
        if at >= 42 && at != 46 {
            prop_assert_eq!((report.icrc_ok, report.icrc_bad), (0, 1));
        }
    }
}
