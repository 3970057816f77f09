//! Frames of every link type and with every fault.

use std::net::{Ipv4Addr, SocketAddr};

use crate::common::{capture_of, ethernet, fixture, ip_datagram, ip_datagram_sealed, packet, report_of, v4, v6};
use roce_bth::{Bth, Header, Opcode, Psn, Qpn};
use roce_icrc::Flow;
use roce_pcap::{
    Capture, FrameError, Icrc, LinkType, Report, Rule, Severity, Verdict, Writer, check_file, check_reader, decode,
};

#[test]
fn what_the_writer_writes_reads_back_and_checks() {
    let mut writer = Writer::new(Vec::new()).unwrap();
    let mut sent = vec![];
    for (i, (src, dst)) in [v4(), v6(), v4()].into_iter().enumerate() {
        let id = 0x1200 + i as u16;
        let mut bytes = packet(&[7; 100]);
        Flow::try_from((src, dst)).unwrap().seal(id, &mut bytes);
        let time = 1_700_000_000_123_456_789 + i as u64;
        writer.write(time, src, dst, &bytes, id).unwrap();
        sent.push((time, src, dst, bytes, id));
    }
    let file = writer.finish().unwrap();

    let mut capture = Capture::new(&file[..]).unwrap();
    for (time, src, dst, bytes, id) in sent {
        let frame = capture.next_frame().unwrap().unwrap();
        assert_eq!((frame.time_ns, frame.link), (time, LinkType::Ethernet));
        let datagram = decode(frame.link, frame.data).unwrap();
        assert_eq!((datagram.src, datagram.dst), (src, dst));
        assert_eq!(datagram.payload, bytes);
        assert_eq!(datagram.identification(), if src.is_ipv4() { id } else { 0 });
    }
    assert!(capture.next_frame().is_none());

    let report = check_reader("written", &file[..], |frame| assert_eq!(frame.icrc, Icrc::Ok)).unwrap();
    assert_eq!((report.frames, report.roce_frames, report.icrc_ok), (3, 3, 3));
    assert_eq!(report.findings, [], "DF set, checksum right, nothing remarkable");
}

#[test]
fn the_writer_refuses_what_no_frame_can_hold() {
    let mut writer = Writer::new(Vec::new()).unwrap();
    let (src, dst) = v4();
    let kind = |result: std::io::Result<()>| result.unwrap_err().kind();
    assert_eq!(
        kind(writer.write(0, src, v6().1, &[0; 16], 0)),
        std::io::ErrorKind::InvalidInput
    );
    assert_eq!(
        kind(writer.write(0, src, dst, &[0; 65_530], 0)),
        std::io::ErrorKind::InvalidInput
    );
    assert_eq!(
        kind(writer.write(u64::MAX, src, dst, &[0; 16], 0)),
        std::io::ErrorKind::InvalidInput
    );
    assert_eq!(writer.finish().unwrap().len(), 24, "nothing but the file header");
}

#[test]
fn every_link_type_leads_to_the_same_datagram() {
    let ip = ip_datagram(v4(), 0x77, &packet(b"hello"));
    let with = |head: &[u8]| [head, &ip].concat();
    let mac = [2; 12];
    let frames = [
        (LinkType::RawIp, ip.clone()),
        (LinkType::Loopback, with(&[2, 0, 0, 0])),
        (LinkType::Ethernet, with(&[&mac[..], &[8, 0]].concat())),
        (LinkType::Ethernet, with(&[&mac[..], &[0x81, 0, 0, 5, 8, 0]].concat())),
        (
            LinkType::Ethernet,
            with(&[&mac[..], &[0x88, 0xa8, 0, 9, 0x81, 0, 0, 5, 8, 0]].concat()),
        ),
        (
            LinkType::LinuxSll,
            with(&[0, 0, 0, 1, 0, 6, 2, 2, 2, 2, 2, 2, 0, 0, 8, 0]),
        ),
        (
            LinkType::LinuxSll2,
            with(&[8, 0, 0, 0, 0, 0, 0, 2, 0, 1, 0, 6, 2, 2, 2, 2, 2, 2, 0, 0]),
        ),
    ];
    for (link, mut frame) in frames {
        // Link-layer padding behind the datagram is not part of it.
        frame.extend([0xaa; 6]);
        let datagram = decode(link, &frame).unwrap_or_else(|e| panic!("{link:?}: {e}"));
        assert_eq!(datagram.datagram, ip, "{link:?}");
        assert_eq!(datagram.payload, &ip[28..], "{link:?}");
        assert_eq!(datagram.identification(), 0x77);
        assert!(
            roce_icrc::check_datagram(datagram.datagram).unwrap().is_ok(),
            "{link:?}"
        );
    }
    let numbers = [1, 101, 228, 12, 113, 276, 0, 108, 127].map(LinkType::from_number);
    use LinkType::{Ethernet, LinuxSll, LinuxSll2, Loopback, Other, RawIp};
    assert_eq!(
        numbers,
        [
            Ethernet,
            RawIp,
            RawIp,
            RawIp,
            LinuxSll,
            LinuxSll2,
            Loopback,
            Loopback,
            Other(127)
        ]
    );
}

#[test]
fn decode_refuses_what_is_not_a_whole_udp_datagram() {
    let ip = ip_datagram(v4(), 1, &packet(b"hello"));
    let changed = |at: usize, value: u8| {
        let mut bytes = ip.clone();
        bytes[at] = value;
        decode(LinkType::RawIp, &bytes).unwrap_err()
    };
    assert_eq!(changed(9, 6), FrameError::NotUdp(6));
    assert_eq!(changed(6, 0x20), FrameError::Fragment { offset: 0, more: true });
    assert_eq!(
        changed(7, 2),
        FrameError::Fragment {
            offset: 16,
            more: false
        }
    );
    assert!(matches!(changed(0, 0x44), FrameError::Malformed(_)));
    assert!(matches!(changed(0, 0x75), FrameError::Malformed(_)));
    assert!(matches!(changed(25, 9), FrameError::Malformed(_)), "UDP length");
    assert!(matches!(changed(3, 10), FrameError::Malformed(_)), "total length");
    assert_eq!(
        decode(LinkType::Ethernet, &ethernet(0x0806, &[0; 28])).unwrap_err(),
        FrameError::NotIp(0x0806)
    );
    assert_eq!(
        decode(LinkType::Ethernet, &ethernet(0x8915, &[0; 60])).unwrap_err(),
        FrameError::RoceV1
    );
    assert_eq!(
        decode(LinkType::Other(127), &ip).unwrap_err(),
        FrameError::LinkType(127)
    );
    for cut in 0..ip.len() {
        assert!(
            matches!(decode(LinkType::RawIp, &ip[..cut]), Err(FrameError::Truncated { .. })),
            "{cut}"
        );
    }
}

/// The report of a capture with one Ethernet frame.
fn one(ip: &[u8]) -> Report {
    let report = report_of(&capture_of(1, &[(&ethernet(0x0800, ip), None)]));
    assert_eq!(report.frames, 1);
    report
}

fn kinds(report: &Report) -> Vec<Rule> {
    report.findings.iter().map(|f| f.rule).collect()
}

#[test]
fn each_fault_is_found_and_named() {
    let good = ip_datagram(v4(), 1, &packet(b"hello"));
    let report = one(&good);
    assert_eq!((report.icrc_ok, report.verdict), (1, Verdict::Good));
    assert_eq!(kinds(&report), []);

    let mut bad = good.clone();
    *bad.last_mut().unwrap() ^= 1;
    let report = one(&bad);
    assert_eq!((report.icrc_ok, report.icrc_bad, report.bad_frames), (0, 1, 1));
    assert_eq!((kinds(&report), report.verdict), (vec![Rule::FrameIcrc], Verdict::Bad));

    // Any covered byte; here one of the payload.
    let mut bad = good.clone();
    bad[41] ^= 0x80;
    assert_eq!(kinds(&one(&bad)), [Rule::FrameIcrc]);

    let mut fragment = good.clone();
    fragment[6] = 0x20;
    let report = one(&fragment);
    assert!(kinds(&report).contains(&Rule::FrameFragment));
    assert_eq!((report.icrc_unchecked, report.verdict), (1, Verdict::Bad));

    // UDP length.
    let mut malformed = good.clone();
    malformed[25] -= 4;
    let report = one(&malformed);
    assert_eq!(kinds(&report), [Rule::FrameMalformed]);
    assert_eq!((report.icrc_unchecked, report.verdict), (1, Verdict::Bad));

    // DF clear and everything right for that: only a note.
    let mut clear = good.clone();
    clear[6] = 0;
    crate::common::reseal(&mut clear);
    let report = one(&clear);
    assert_eq!(kinds(&report), [Rule::FrameDfClear]);
    assert_eq!((report.icrc_ok, report.verdict), (1, Verdict::Good));

    let mut sum = good.clone();
    sum[10] ^= 0xff;
    let report = one(&sum);
    assert_eq!(
        (kinds(&report), report.verdict),
        (vec![Rule::FrameIpChecksum], Verdict::Good)
    );

    // An IPv4 option word (no operation).
    let mut options = good.clone();
    options[0] = 0x46;
    options.splice(20..20, [1; 4]);
    options[3] += 4;
    crate::common::reseal(&mut options);
    let report = one(&options);
    assert_eq!(kinds(&report), [Rule::FrameIpOptions]);
    assert_eq!((report.icrc_ok, report.verdict), (1, Verdict::Bad));
}

#[test]
fn faults_of_the_transport_headers_are_found() {
    let with_packet = |bytes: &[u8]| one(&ip_datagram(v4(), 1, bytes));

    let mut unknown = packet(b"");
    unknown[0] = 0xc1;
    let report = with_packet(&unknown);
    assert_eq!(kinds(&report), [Rule::FrameOpcode]);
    assert_eq!((report.icrc_ok, report.verdict), (1, Verdict::Bad));

    let mut qp0 = packet(b"");
    qp0[5..8].fill(0);
    assert_eq!(kinds(&with_packet(&qp0)), [Rule::FrameQp0]);

    let mut version = packet(b"");
    version[1] |= 3;
    assert_eq!(kinds(&with_packet(&version)), [Rule::FrameMalformed]);

    // Ten bytes: neither BTH nor ICRC fits.
    let report = with_packet(&[4; 10]);
    assert_eq!((kinds(&report), report.icrc_unchecked), (vec![Rule::FrameMalformed], 1));
    let report = with_packet(&[]);
    assert_eq!((kinds(&report), report.icrc_unchecked), (vec![Rule::FrameMalformed], 1));
}

#[test]
fn a_translated_request_is_told_from_a_damaged_one() {
    let mut capture = Capture::open(fixture("rping.pcap")).unwrap();
    let frame = capture.next_frame().unwrap().unwrap();
    let request = decode(frame.link, frame.data).unwrap();
    let came_from = SocketAddr::new(Ipv4Addr::new(192, 0, 2, 77).into(), request.src.port());
    let addresses = (came_from, request.dst);
    let mut packet = request.payload.to_vec();
    let report = |packet: &[u8]| {
        let ip = ip_datagram_sealed(addresses, request.identification(), packet);
        report_of(&capture_of(1, &[(&ethernet(0x0800, &ip), None)]))
    };
    assert_eq!(kinds(&report(&packet)), [Rule::FrameIcrc, Rule::FrameTranslated]);
    packet[30] ^= 1;
    assert_eq!(kinds(&report(&packet)), [Rule::FrameIcrc]);
}

#[test]
fn other_traffic_is_counted_and_left_alone() {
    let mut dns = ip_datagram(v4(), 1, &[1; 30]);
    dns[22..24].copy_from_slice(&53u16.to_be_bytes());
    let frames = [
        ethernet(0x0800, &dns),
        ethernet(0x0806, &[0; 28]),
        ethernet(0x8915, &[0; 60]),
        vec![1, 2, 3],
    ];
    let listed: Vec<_> = frames.iter().map(|f| (&f[..], None)).collect();
    let report = report_of(&capture_of(1, &listed));
    assert_eq!((report.frames, report.roce_frames), (4, 0));
    assert_eq!(kinds(&report), [Rule::FrameRoceV1, Rule::FrameCut]);
    assert_eq!(
        (report.unread_frames, report.verdict),
        (0, Verdict::NotChecked),
        "there is no RoCEv2"
    );
}

#[test]
fn what_could_not_be_read_is_not_good() {
    // Bluetooth.
    let report = report_of(&capture_of(187, &[(&[0; 50], None), (&[0; 50], None)]));
    assert_eq!(
        (kinds(&report), report.findings[0].count),
        (vec![Rule::FrameLinkType], 2)
    );
    assert_eq!(
        (report.unread_frames, report.bad_frames, report.verdict),
        (2, 0, Verdict::NotChecked)
    );
    // Cut in the middle of the IP header, by `tcpdump -s 20`.
    let frame = ethernet(0x0800, &ip_datagram(v4(), 1, &packet(b"")));
    let report = report_of(&capture_of(1, &[(&frame[..20], Some(frame.len() as u32))]));
    assert_eq!((report.unread_frames, report.verdict), (1, Verdict::NotChecked));
    // Cut behind the headers: there is no ICRC.
    let report = report_of(&capture_of(
        1,
        &[(&frame, None), (&frame[..54], Some(frame.len() as u32))],
    ));
    assert_eq!(
        (report.icrc_ok, report.icrc_unchecked, report.verdict),
        (1, 1, Verdict::NotChecked)
    );
    let nothing = report_of(&capture_of(1, &[]));
    assert_eq!((nothing.frames, nothing.verdict), (0, Verdict::NotChecked));
}

/// A frame in a UDP datagram to `port` behind this header.
fn in_tunnel(port: u16, header: &[u8], frame: &[u8]) -> Vec<u8> {
    let mut carried = header.to_vec();
    carried.extend(frame);
    let addresses = (
        "192.0.2.1:60000".parse().unwrap(),
        SocketAddr::new("192.0.2.2".parse().unwrap(), port),
    );
    ethernet(0x0800, &crate::common::ip_datagram_sealed(addresses, 7, &carried))
}

#[test]
fn packets_in_tunnels_are_read() {
    let good = ethernet(0x0800, &ip_datagram(v4(), 1, &packet(b"hello")));
    let mut bad = good.clone();
    // In the payload.
    bad[56] ^= 1;
    let vxlan = [8, 0, 0, 0, 0, 0, 5, 0];
    // One option of four bytes and its header.
    let geneve = [&[2, 0, 0x65, 0x58, 0, 0, 5, 0][..], &[0; 8]].concat();
    for (port, header, name) in [
        (4789, &vxlan[..], "VXLAN"),
        (8472, &vxlan, "VXLAN"),
        (6081, &geneve, "GENEVE"),
    ] {
        let frames = [in_tunnel(port, header, &good), in_tunnel(port, header, &bad)];
        let report = report_of(&capture_of(1, &[(&frames[0], None), (&frames[1], None)]));
        assert_eq!(
            (report.roce_frames, report.icrc_ok, report.icrc_bad),
            (2, 1, 1),
            "{name}"
        );
        assert_eq!(kinds(&report), [Rule::FrameTunnel, Rule::FrameIcrc], "{name}");
        let text = &report.findings[0].text;
        assert!(text.contains(name) && text.contains("192.0.2.1"), "{text}");
        let cut = &frames[0][..70];
        let report = report_of(&capture_of(1, &[(cut, Some(frames[0].len() as u32))]));
        assert_eq!(
            (report.unread_frames, report.verdict),
            (1, Verdict::NotChecked),
            "{name}"
        );
    }
    let mut dns = good;
    dns[36..38].copy_from_slice(&53u16.to_be_bytes());
    for other in [
        in_tunnel(4789, &vxlan, &dns),
        in_tunnel(4789, &[0; 8], &[]),
        in_tunnel(4789, &[8], &[]),
    ] {
        let report = report_of(&capture_of(1, &[(&other, None)]));
        assert_eq!((kinds(&report), report.verdict), (vec![], Verdict::NotChecked));
    }
}

#[test]
fn a_frame_cut_by_the_capture_is_unchecked_but_not_bad() {
    let frame = ethernet(0x0800, &ip_datagram(v4(), 1, &packet(&[9; 1000])));
    let report = report_of(&capture_of(
        1,
        &[(&frame[..96], Some(frame.len() as u32)), (&frame, None)],
    ));
    assert_eq!(
        (report.frames, report.roce_frames, report.icrc_ok, report.icrc_unchecked),
        (2, 2, 1, 1)
    );
    assert_eq!(kinds(&report), [Rule::FrameCut]);
    assert_eq!(report.findings[0].severity, Severity::Note);
    assert_eq!(report.verdict, Verdict::NotChecked);
    // Without the capture having cut it, the frame itself is short.
    let report = report_of(&capture_of(1, &[(&frame[..96], None)]));
    assert_eq!(kinds(&report), [Rule::FrameMalformed]);
    assert_eq!(report.verdict, Verdict::Bad);
}

/// A frame as tcpdump sees it on a host that sends with UDP GSO: `counts` packets of equal size and a shorter one.
fn before_segmentation((src, dst): (SocketAddr, SocketAddr), first_id: u16, same_id: bool) -> Vec<u8> {
    let flow = Flow::try_from((src, dst)).unwrap();
    let mut payload = vec![];
    for nth in 0..5u16 {
        let mut bytes = packet(&vec![nth as u8; if nth < 4 { 1024 } else { 300 }]);
        flow.seal(if same_id { first_id } else { first_id.wrapping_add(nth) }, &mut bytes);
        payload.extend(bytes);
    }
    crate::common::ip_datagram_sealed((src, dst), first_id, &payload)
}

#[test]
fn several_packets_in_one_frame_are_checked_one_by_one() {
    for same_id in [false, true] {
        let report = one(&before_segmentation(v4(), 0xfffe, same_id));
        assert_eq!((report.roce_frames, report.roce_packets), (1, 5));
        assert_eq!((report.icrc_ok, report.icrc_bad), (1, 0));
        assert_eq!(
            (kinds(&report), report.verdict),
            (vec![Rule::FrameSegments], Verdict::Good)
        );
    }
    let frame = ethernet(0x86dd, &before_segmentation(v6(), 0, true));
    let report = report_of(&capture_of(1, &[(&frame, None)]));
    assert_eq!((report.roce_packets, report.icrc_ok, report.icrc_bad), (5, 1, 0));

    let mut bad = before_segmentation(v4(), 0, false);
    let at = 28 + 2 * (12 + 1024 + 4) + 500;
    bad[at] ^= 1;
    let report = one(&bad);
    assert_eq!((report.icrc_ok, report.icrc_bad, report.verdict), (0, 1, Verdict::Bad));
    assert_eq!(kinds(&report), [Rule::FrameSegments, Rule::FrameIcrc]);
    assert!(
        report.findings[1].text.contains("packet 3 of 5"),
        "{}",
        report.findings[1].text
    );

    // A packet that is right for some other Identification, which segmentation would not give it.
    let mut bad = before_segmentation(v4(), 7, false);
    let second = 28 + 1040..28 + 2 * 1040;
    let (src, dst) = v4();
    Flow::try_from((src, dst)).unwrap().seal(0x4444, &mut bad[second]);
    let report = one(&bad);
    assert_eq!(kinds(&report), [Rule::FrameSegments, Rule::FrameIcrc]);
    assert!(
        report.findings[1].text.contains("packet 2 of 5"),
        "{}",
        report.findings[1].text
    );
}

#[test]
fn packets_of_frames_that_the_capture_cut_are_not_said_to_be_missing() {
    let (one, several) = (
        ip_datagram(v4(), 1, &packet(b"hello")),
        before_segmentation(v4(), 2, false),
    );
    let frames = [one, several].map(|datagram| ethernet(0x0800, &datagram));
    let cut = (&frames[1][..96], Some(frames[1].len() as u32));
    let report = report_of(&capture_of(1, &[(&frames[0], None), cut]));
    let [conversation] = &report.conversations[..] else {
        panic!("{:?}", report.conversations);
    };
    let text = "1 frames with several packets are cut";
    assert!(
        conversation.not_checked.iter().any(|not| not == text),
        "{conversation:?}"
    );
    assert_eq!(report.verdict, Verdict::NotChecked);
}

#[test]
fn findings_are_bounded_and_the_rest_counted() {
    let count = roce_pcap::MAX_FINDINGS + 5;
    let from = |n: usize| SocketAddr::new(Ipv4Addr::from(0x0b00_0000 + n as u32).into(), 50_000);
    let malformed = |n: usize| {
        let mut qp0 = packet(b"hello");
        qp0[5..8].fill(0);
        ethernet(0x0800, &ip_datagram((from(n), v4().1), 1, &qp0))
    };
    let frames: Vec<Vec<u8>> = (0..count).map(malformed).collect();
    let twice: Vec<_> = frames.iter().chain(&frames).map(|frame| (&frame[..], None)).collect();
    let report = report_of(&capture_of(1, &twice));
    assert_eq!(
        (report.findings.len(), report.findings_left_out),
        (roce_pcap::MAX_FINDINGS, 10),
        "each peer's fault once"
    );
    assert_eq!(
        (report.findings[0].count, report.findings[0].last_frame),
        (2, count as u64 + 1)
    );
    assert_eq!(report.bad_frames, twice.len() as u64);
}

#[test]
fn the_json_keys_are_stable() {
    let mut bad = ip_datagram(v4(), 1, &packet(b"hello"));
    *bad.last_mut().unwrap() ^= 1;
    let json = serde_json::to_value(one(&bad)).unwrap();
    let keys: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
    for key in ["file", "frames", "roce_frames", "icrc_ok", "icrc_bad", "findings"] {
        assert!(keys.contains(&key), "{key} of {keys:?}");
    }
    assert_eq!(json["icrc_bad"], 1);
    let finding = &json["findings"][0];
    assert_eq!((&finding["frame"], &finding["rule"]), (&1.into(), &"frame-icrc".into()));
    assert_eq!(finding["severity"], "error");
    assert!(finding["text"].is_string());
}

#[test]
fn a_file_that_cannot_be_opened_says_which() {
    let dir = tempfile::tempdir().unwrap();
    let e = check_file(dir.path().join("nothing.pcap")).unwrap_err().to_string();
    assert!(e.contains("nothing.pcap"), "{e}");
    let path = dir.path().join("text");
    std::fs::write(&path, "hello, world, this is no capture").unwrap();
    let e = check_file(&path).unwrap_err().to_string();
    assert!(e.contains("neither a pcap nor a pcapng"), "{e}");
    std::fs::write(&path, [0x1f, 0x8b, 8, 0]).unwrap();
    let e = check_file(&path).unwrap_err().to_string();
    assert!(e.contains("ends in the middle"), "{e}");
    std::fs::write(&path, "").unwrap();
    let e = check_file(&path).unwrap_err().to_string();
    assert!(e.contains("empty"), "{e}");
}

#[test]
fn a_written_file_is_checked_by_name() {
    let path = tempfile::tempdir().unwrap().keep().join("sim.pcap");
    let mut writer = Writer::create(&path).unwrap();
    let (src, dst) = v4();
    let mut bytes = vec![0; 16];
    Header::new(Bth::new(Opcode::UcSendOnly, Qpn::new(5), Psn::new(6))).emit(&mut bytes);
    Flow::try_from((src, dst)).unwrap().seal(0, &mut bytes);
    writer.write(1, src, dst, &bytes, 0).unwrap();
    writer.flush().unwrap();
    let report = check_file(&path).unwrap();
    assert_eq!((report.icrc_ok, report.verdict), (1, Verdict::Good));
    assert!(report.file.ends_with("sim.pcap"));
    std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
}
