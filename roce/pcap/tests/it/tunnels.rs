//! A packet of a kernel's capture in every link type and tunnel that is read.

use std::{fs, path::Path};

use crate::common::{capture_of, ethernet, ip_datagram_sealed, report_of, tshark};
use proptest::{collection::vec, prelude::*};
use roce_pcap::{
    Capture, FrameError, Icrc, LinkType, PcapNgWriter, Record, Report, Rule, Verdict, check_reader, decode,
};

/// The IP datagram of the first frame of a fixture.
fn real() -> Vec<u8> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../pcap-fixtures");
    let file = fs::read(fixtures.join("write-lat.pcap")).unwrap();
    let mut capture = Capture::new(&file[..]).unwrap();
    let frame = capture.next_frame().unwrap().unwrap();
    decode(frame.link, frame.data).unwrap().datagram.to_vec()
}

fn ipv4(protocol: u8, payload: &[u8]) -> Vec<u8> {
    let addresses = ("192.0.2.1:0".parse().unwrap(), "192.0.2.2:0".parse().unwrap());
    let mut ip = ip_datagram_sealed(addresses, 7, payload);
    // No UDP header.
    ip.drain(20..28);
    let total = ip.len() as u16;
    ip[2..4].copy_from_slice(&total.to_be_bytes());
    ip[9] = protocol;
    ip
}

fn ipv6(protocol: u8, payload: &[u8]) -> Vec<u8> {
    let addresses = ("[2001:db8::1]:0".parse().unwrap(), "[2001:db8::2]:0".parse().unwrap());
    let mut ip = ip_datagram_sealed(addresses, 7, payload);
    ip.drain(40..48);
    ip[4..6].copy_from_slice(&(payload.len() as u16).to_be_bytes());
    ip[6] = protocol;
    ip
}

fn udp(port: u16, parts: &[&[u8]]) -> Vec<u8> {
    let addresses = (
        "192.0.2.1:60000".parse().unwrap(),
        format!("192.0.2.2:{port}").parse().unwrap(),
    );
    ip_datagram_sealed(addresses, 7, &parts.concat())
}

fn gre(parts: &[&[u8]]) -> Vec<u8> {
    ipv4(47, &parts.concat())
}

/// Ethernet frames with a packet in each tunnel: name in the finding, ethertype, bytes.
fn tunnels() -> Vec<(&'static str, u16, Vec<u8>)> {
    let ip = real();
    let frame = ethernet(0x0800, &ip);
    let tagged = ethernet(0x8100, &[&[0, 5, 8, 0], &ip[..]].concat());
    let vxlan = [8, 0, 0, 0, 0, 0, 5, 0];
    let erspan_ii = [0x10, 5, 0, 7, 0, 0, 0, 1];
    // Frame type Ethernet; an IP packet and a platform subheader.
    let erspan_iii = [0x20, 5, 0, 7, 0, 0, 0, 1, 0, 0, 0, 0];
    let erspan_iii_ip = [&[0x20, 5, 0, 7, 0, 0, 0, 1, 0, 0, 2 << 2, 1][..], &[0; 8]].concat();
    vec![
        ("VXLAN", 0x0800, udp(4789, &[&vxlan, &frame])),
        ("VXLAN", 0x0800, udp(8472, &[&vxlan, &tagged])),
        ("GENEVE", 0x0800, udp(6081, &[&[0, 0, 0x65, 0x58, 0, 0, 5, 0], &frame])),
        (
            "GENEVE",
            0x0800,
            udp(6081, &[&[2, 0, 0x65, 0x58, 0, 0, 5, 0], &[0; 8], &frame]),
        ),
        ("GENEVE", 0x0800, udp(6081, &[&[0, 0, 0x08, 0x00, 0, 0, 5, 0], &ip])),
        ("GRE", 0x0800, gre(&[&[0, 0, 8, 0], &ip])),
        ("GRE", 0x0800, gre(&[&[0x80, 0, 8, 0, 1, 2, 0, 0], &ip])),
        ("GRE", 0x0800, gre(&[&[0x20, 0, 0x65, 0x58, 0, 0, 5, 0], &frame])),
        ("GRE", 0x0800, gre(&[&[0xb0, 0, 8, 0], &[9; 12], &ip])),
        ("GRE", 0x0800, gre(&[&[0, 0, 0x88, 0x47], &[0, 1, 1, 64], &ip])),
        ("GRE", 0x86dd, ipv6(47, &[&[0, 0, 8, 0], &ip[..]].concat())),
        ("ERSPAN I", 0x0800, gre(&[&[0, 0, 0x88, 0xbe], &frame])),
        (
            "ERSPAN II",
            0x0800,
            gre(&[&[0x10, 0, 0x88, 0xbe, 0, 0, 0, 1], &erspan_ii, &frame]),
        ),
        (
            "ERSPAN III",
            0x0800,
            gre(&[&[0x10, 0, 0x22, 0xeb, 0, 0, 0, 1], &erspan_iii, &tagged]),
        ),
        (
            "ERSPAN III",
            0x0800,
            gre(&[&[0x10, 0, 0x22, 0xeb, 0, 0, 0, 1], &erspan_iii_ip, &ip]),
        ),
        (
            "ERSPAN III",
            0x0800,
            gre(&[
                &[0x10, 0, 0x22, 0xeb, 0, 0, 0, 1],
                &[0x20, 5, 0, 7, 0, 0, 0, 1, 0, 0, 0, 1],
                &[0x10, 0, 0, 0, 0, 0, 0, 0],
                &frame,
            ]),
        ),
        ("IP in IP", 0x0800, ipv4(4, &ip)),
        ("IP in IP", 0x86dd, ipv6(4, &ip)),
        ("IP in IP", 0x0800, ipv4(41, &ipv6(4, &ip))),
        ("IP in IP", 0x86dd, ipv6(41, &ipv6(4, &ip))),
        // Hop-by-hop options, a routing header of 24 bytes, destination options, and a fragment that is all.
        (
            "IP in IP",
            0x86dd,
            ipv6(
                0,
                &[
                    &[43, 0, 1, 4, 0, 0, 0, 0][..],
                    &[60, 2, 4, 0],
                    &[0; 20],
                    &[44, 0, 1, 4, 0, 0, 0, 0],
                    &[4, 0, 0, 0, 0, 0, 0, 1],
                    &ip,
                ]
                .concat(),
            ),
        ),
    ]
}

fn one(frame: &[u8], original: Option<u32>) -> Report {
    report_of(&capture_of(1, &[(frame, original)]))
}

fn kinds(report: &Report) -> Vec<Rule> {
    report.findings.iter().map(|f| f.rule).collect()
}

#[test]
fn a_real_packet_is_found_in_every_tunnel() {
    let ip = real();
    for (n, (name, ether_type, packet)) in tunnels().into_iter().enumerate() {
        // With link-layer padding.
        let frame = [ethernet(ether_type, &packet), vec![0xaa; 5]].concat();
        assert_eq!(decode(LinkType::Ethernet, &frame).unwrap().datagram, ip, "{n}: {name}");
        let report = one(&frame, None);
        assert_eq!(
            (report.icrc_ok, report.verdict),
            (1, Verdict::NotChecked),
            "{n}: {name}"
        );
        assert_eq!(kinds(&report), [Rule::FrameTunnel], "{n}: {name}");
        let text = &report.findings[0].text;
        let (src, dst) = match ether_type {
            0x0800 => ("192.0.2.1", "192.0.2.2"),
            _ => ("2001:db8::1", "2001:db8::2"),
        };
        assert!(text.ends_with(&format!("in {name} from {src} to {dst}")), "{text}");

        let mut bad = frame.clone();
        bad[14 + packet.len() - 1] ^= 1;
        assert_eq!(one(&bad, None).icrc_bad, 1, "{n}: {name}");
    }
}

#[test]
fn a_tunnel_packet_cut_anywhere_is_unread_or_unchecked() {
    for (n, (name, ether_type, packet)) in tunnels().into_iter().enumerate() {
        let frame = ethernet(ether_type, &packet);
        for cut in 0..frame.len() {
            let what = format!("{n}: {name} cut at {cut}");
            let report = one(&frame[..cut], Some(frame.len() as u32));
            assert_eq!((report.icrc_ok, report.verdict), (0, Verdict::NotChecked), "{what}");
            // Too short for the header of VXLAN or GENEVE, it is a datagram to its port.
            let is_seen = report.unread_frames + report.icrc_unchecked == 1;
            let is_udp = ether_type == 0x0800 && packet[9] == 17;
            assert!(
                is_seen || is_udp && report.roce_frames == 0 && cut >= 42,
                "{what}: {report:?}"
            );
            // A frame that is that short.
            let report = one(&frame[..cut], None);
            assert_eq!(report.icrc_ok, 0, "{what}");
        }
    }
}

#[test]
fn tunnels_in_tunnels_are_read_to_a_depth_of_four() {
    let mut packet = real();
    for depth in 1..=5 {
        packet = match depth % 2 {
            0 => ipv4(4, &packet),
            _ => udp(4789, &[&[8, 0, 0, 0, 0, 0, 5, 0], &ethernet(0x0800, &packet)]),
        };
        let report = one(&ethernet(0x0800, &packet), None);
        assert_eq!(kinds(&report), [Rule::FrameTunnel], "{depth}");
        let text = &report.findings[0].text;
        if depth < 5 {
            assert_eq!(
                (report.icrc_ok, text.matches("192.0.2.1").count()),
                (1, depth),
                "{text}"
            );
        } else {
            assert_eq!((report.unread_frames, report.verdict), (1, Verdict::NotChecked));
            assert!(text.contains("more than 4"), "{text}");
        }
        if depth == 2 {
            let expected = "in VXLAN from 192.0.2.1 to 192.0.2.2, in IP in IP from 192.0.2.1 to 192.0.2.2";
            assert_eq!(text, expected, "the innermost first");
        }
    }
}

#[test]
fn a_copy_that_the_switch_cut_is_unchecked_but_not_bad() {
    let frame = ethernet(0x0800, &real());
    let short = |len: usize| {
        gre(&[
            &[0x10, 0, 0x88, 0xbe, 0, 0, 0, 1],
            &[0x10, 5, 4, 7, 0, 0, 0, 1],
            &frame[..len],
        ])
    };
    let report = one(&ethernet(0x0800, &short(60)), None);
    assert_eq!(kinds(&report), [Rule::FrameTunnel, Rule::FrameCut]);
    assert_eq!((report.icrc_unchecked, report.verdict), (1, Verdict::NotChecked));
    let report = one(&ethernet(0x0800, &short(30)), None);
    assert_eq!((kinds(&report), report.unread_frames), (vec![Rule::FrameCut], 1));
    // In a tunnel of another kind it is the sender's fault.
    let report = one(&ethernet(0x0800, &ipv4(4, &real()[..50])), None);
    assert_eq!(kinds(&report), [Rule::FrameTunnel, Rule::FrameMalformed]);
}

#[test]
fn tunnels_that_are_not_read_are_named() {
    let ip = real();
    let mut fragment = gre(&[&[0, 0, 8, 0], &ip]);
    fragment[6] = 0x20;
    let mut first = udp(4789, &[&[8, 0, 0, 0, 0, 0, 5, 0], &ethernet(0x0800, &ip)]);
    first[6] = 0x20;
    let frame_type_3 = [0x20, 5, 0, 7, 0, 0, 0, 1, 0, 0, 3 << 2, 0];
    for (packet, text) in [
        (gre(&[&[0x20, 1, 0x88, 0x0b, 0, 0, 0, 0], &ip]), "PPTP"),
        (gre(&[&[0x40, 0, 8, 0, 0, 0, 0, 0], &ip]), "source routing"),
        (
            gre(&[&[0, 0, 0x22, 0xeb], &frame_type_3, &ip]),
            "neither Ethernet nor IP",
        ),
        (fragment, "fragment"),
        (first, "fragment"),
    ] {
        let report = one(&ethernet(0x0800, &packet), None);
        assert_eq!(
            (kinds(&report), report.unread_frames),
            (vec![Rule::FrameTunnel], 1),
            "{text}"
        );
        assert!(report.findings[0].text.contains(text), "{}", report.findings[0].text);
    }
    let report = one(&ethernet(0x8847, &[&[0, 1, 1, 64, 0, 0, 0, 0], &ip[..]].concat()), None);
    assert!(report.findings[0].text.contains("pseudowire"));
    // Other protocols in tunnels are other traffic.
    for packet in [gre(&[&[0, 0, 8, 6], &[0; 28]]), ipv4(4, &ipv4(6, &[0; 20]))] {
        let report = one(&ethernet(0x0800, &packet), None);
        assert_eq!((kinds(&report), report.unread_frames), (vec![], 0));
    }
}

#[test]
fn extension_headers_of_ipv6_are_skipped() {
    let addresses = ("[fd00::3]:50000".parse().unwrap(), "[fd00::4]:4791".parse().unwrap());
    let plain = crate::common::ip_datagram(addresses, 0, &crate::common::packet(b"hello"));
    let with = |next: u8, headers: &[u8]| {
        let mut ip = plain.clone();
        ip[6] = next;
        ip[5] += headers.len() as u8;
        ip.splice(40..40, headers.iter().copied());
        ip
    };
    let hop = [17, 0, 1, 4, 0, 0, 0, 0];
    let good = with(0, &hop);
    let mut icrc = vec![];
    let file = capture_of(101, &[(&good, None)]);
    let report = check_reader("x", &file[..], |frame| icrc.push(frame.icrc)).unwrap();
    assert_eq!((report.verdict, icrc), (Verdict::Good, vec![Icrc::Ok]));
    let datagram = decode(LinkType::RawIp, &good).unwrap();
    assert_eq!(datagram.payload, &plain[48..]);
    for cut in 0..good.len() {
        let e = decode(LinkType::RawIp, &good[..cut]).unwrap_err();
        assert!(matches!(e, FrameError::Truncated { .. }), "{cut}: {e}");
    }
    // A header longer than the packet, and more of them than there may be.
    let mut long = good;
    long[41] = 9;
    assert!(decode(LinkType::RawIp, &long).is_err());
    let endless = with(0, &[0; 80]);
    assert_eq!(decode(LinkType::RawIp, &endless).unwrap_err(), FrameError::NotUdp(0));
    let fragment = |field: u8| decode(LinkType::RawIp, &with(44, &[17, 0, 0, field, 0, 0, 0, 1])).map(|_| ());
    assert_eq!(fragment(0), Ok(()));
    assert_eq!(fragment(1), Err(FrameError::Fragment { offset: 0, more: true }));
    assert_eq!(fragment(8), Err(FrameError::Fragment { offset: 8, more: false }));
}

/// A record of Endace's format: type, extension headers, and the bytes behind those.
fn erf(kind: u8, extensions: usize, rest: &[u8]) -> Vec<u8> {
    let len = (16 + 8 * extensions + rest.len()) as u16;
    let on_wire = rest.len() as u16 - if kind < 22 { 2 } else { 0 };
    let mut record = vec![0; 8];
    record.extend([kind | u8::from(extensions > 0) << 7, 4]);
    for field in [len, 0, on_wire] {
        record.extend(field.to_be_bytes());
    }
    for n in 1..=extensions {
        record.extend([3 | u8::from(n < extensions) << 7, 0, 0, 0, 0, 0, 0, 0]);
    }
    record.extend(rest);
    record
}

/// Frames of each link type around the packet: number and bytes.
fn links() -> Vec<(u16, Vec<u8>)> {
    let ip = real();
    let head = |bytes: &[u8]| [bytes, &ip].concat();
    let padded = head(&[&[0, 0][..], &ethernet(0x0800, &[])].concat());
    let labels = ethernet(0x8847, &head(&[0, 1, 0, 64, 0, 2, 1, 64]));
    let tags = [0x88, 0xa8, 0, 9, 0x91, 0, 0, 5, 0x81, 0, 0, 6, 8, 0];
    vec![
        (1, ethernet(0x0800, &ip)),
        (1, [&[2; 12][..], &tags, &ip].concat()),
        (1, labels),
        (12, ip.clone()),
        (14, ip.clone()),
        (101, ip.clone()),
        (228, ip.clone()),
        (0, head(&[2, 0, 0, 0])),
        (0, head(&[0, 0, 0, 2])),
        (108, head(&[0, 0, 0, 2])),
        (113, head(&[0, 0, 0, 1, 0, 6, 2, 2, 2, 2, 2, 2, 0, 0, 8, 0])),
        (
            113,
            head(&[0, 4, 0, 1, 0, 6, 2, 2, 2, 2, 2, 2, 0, 0, 0x81, 0, 0, 5, 8, 0]),
        ),
        (276, head(&[8, 0, 0, 0, 0, 0, 0, 2, 0, 1, 0, 6, 2, 2, 2, 2, 2, 2, 0, 0])),
        (197, erf(2, 0, &padded)),
        (197, erf(11, 1, &padded)),
        (197, erf(16, 3, &padded)),
        (197, erf(22, 0, &ip)),
    ]
}

#[test]
fn a_real_packet_is_found_behind_every_link_header() {
    for (number, frame) in links() {
        let number = number.into();
        let report = report_of(&capture_of(number, &[(&frame, None)]));
        assert_eq!(
            (report.icrc_ok, report.verdict),
            (1, Verdict::NotChecked),
            "{number}: {report:?}"
        );
        assert_eq!(kinds(&report), [], "{number}");
        for cut in 0..frame.len() {
            let report = report_of(&capture_of(number, &[(&frame[..cut], Some(frame.len() as u32))]));
            let seen = (
                report.icrc_ok,
                report.unread_frames + report.icrc_unchecked,
                report.verdict,
            );
            assert_eq!(seen, (0, 1, Verdict::NotChecked), "{number} cut at {cut}");
        }
    }
    let v6 = ipv6(4, &real());
    for (number, frame) in [(229, v6.clone()), (197, erf(23, 0, &v6))] {
        assert_eq!(report_of(&capture_of(number, &[(&frame, None)])).icrc_ok, 1, "{number}");
    }
}

#[test]
fn erf_records_of_other_types_are_not_read() {
    let infiniband = erf(21, 0, &[0; 60]);
    let report = report_of(&capture_of(197, &[(&infiniband, None)]));
    assert_eq!((kinds(&report), report.unread_frames), (vec![Rule::FrameLinkType], 1));
    assert!(
        report.findings[0].text.contains("InfiniBand"),
        "{}",
        report.findings[0].text
    );
    // Metadata, which is not traffic.
    let report = report_of(&capture_of(197, &[(&erf(27, 0, &[0; 60]), None)]));
    assert_eq!((kinds(&report), report.unread_frames), (vec![], 0));
}

#[test]
#[ignore = "needs tshark"]
fn tshark_finds_the_packet_in_the_same_places() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("places.pcapng");
    let tunnels = tunnels();
    let tunnels = tunnels
        .into_iter()
        .map(|(_, ether_type, packet)| (1, ethernet(ether_type, &packet)));
    let frames: Vec<_> = links().into_iter().chain(tunnels).collect();
    let mut writer = PcapNgWriter::create(&path).unwrap();
    for (number, data) in &frames {
        let record = Record {
            interface: writer.interface(*number, 0, None).unwrap(),
            time_ns: 0,
            original_len: data.len() as u32,
            data,
            direction: None,
        };
        writer.write(&record, []).unwrap();
    }
    writer.flush().unwrap();
    let shown = tshark(
        &[
            "-dudp.port==8472,vxlan",
            "-Tfields",
            "-eframe.number",
            "-einfiniband.bth.psn",
            "-eframe.protocols",
            "-r",
        ],
        &path,
    );
    assert_eq!(shown.lines().count(), frames.len());
    let ip = real();
    let psn = u32::from_be_bytes([0, ip[37], ip[38], ip[39]]).to_string();
    // Of IP in ERSPAN III it shows no more.
    let unread = |line: &&str| line.ends_with("erspan:data");
    let others: Vec<_> = shown
        .lines()
        .filter(|line| line.split('\t').nth(1) != Some(&psn) && !unread(line))
        .collect();
    assert_eq!(others, [""; 0]);
}

proptest! {
    /// Damaged headers of tunnels and links cause no panic, and the counts agree.
    #[test]
    fn damaged_headers_never_panic(
        which: prop::sample::Index,
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut: prop::sample::Index,
        is_cut: bool,
    ) {
        let tunnels = tunnels().into_iter().map(|(_, ether_type, packet)| (1, ethernet(ether_type, &packet)));
        let frames: Vec<_> = links().into_iter().chain(tunnels).collect();
        let (number, mut frame) = which.get(&frames).clone();
        let original = frame.len() as u32;
        for (at, to) in changes {
            // Those of the packet have tests of their own.
            let at = at.index(frame.len().min(110));
            frame[at] = to;
        }
        if is_cut {
            frame.truncate(cut.index(frame.len()));
        }
        let report = report_of(&capture_of(number.into(), &[(&frame, Some(original))]));
        prop_assert_eq!(report.icrc_ok + report.icrc_bad + report.icrc_unchecked, report.roce_frames);
        prop_assert!(report.roce_frames + report.unread_frames <= 1);
    }
}
