//! Pcapng files that are written, copied from other captures, and read back.
//!
//! A test that needs tshark is ignored by default. To run it, install the package of this name, and:
//!
//! ```sh
//! cargo test -p roce-pcap --test it tshark -- --include-ignored
//! ```

use std::{fs, io::ErrorKind, path::Path};

use crate::common::{capture_of, ethernet, ip_datagram, packet, tshark, v4};
use proptest::{collection::vec, prelude::*};
use roce_pcap::{Capture, Direction, LinkType, PcapNgWriter, Record};

/// All that is known of a frame.
#[derive(Clone, PartialEq, Debug)]
struct Known {
    time_ns: u64,
    link: u16,
    interface: Option<String>,
    section: u64,
    original_len: u32,
    data: Vec<u8>,
    direction: Option<Direction>,
    comments: Vec<String>,
}

fn read(file: &[u8]) -> Vec<Known> {
    let mut capture = Capture::new(file).unwrap();
    let mut known = vec![];
    while let Some(frame) = capture.next_frame() {
        let frame = frame.unwrap();
        assert_eq!(frame.interface().link(), frame.link);
        assert_eq!(frame.interface(), &frame.interfaces()[frame.interface_index() as usize]);
        known.push(Known {
            time_ns: frame.time_ns,
            link: frame.interface().link_number(),
            interface: frame.interface().name().map(str::to_owned),
            section: frame.section(),
            original_len: frame.original_len,
            data: frame.data.to_vec(),
            direction: frame.direction,
            comments: frame.comments().to_vec(),
        });
    }
    known
}

fn copy(file: &[u8], more: &[&str]) -> Vec<u8> {
    let mut capture = Capture::new(file).unwrap();
    let mut writer = PcapNgWriter::new(Vec::new()).unwrap();
    while let Some(frame) = capture.next_frame() {
        writer.copy(&frame.unwrap(), more.iter().copied()).unwrap();
    }
    writer.finish().unwrap()
}

fn fixtures() -> Vec<(String, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../pcap-fixtures");
    let files = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    let captures = files.filter(|p| p.to_str().unwrap().contains(".pcap"));
    captures
        .map(|p| (p.display().to_string(), fs::read(p).unwrap()))
        .collect()
}

/// Big-endian, with two sections, two interfaces in the first, comments, flags, drops and microseconds.
fn sections() -> Vec<u8> {
    let option = |code: u16, value: &[u8]| {
        let mut out = [code.to_be_bytes(), (value.len() as u16).to_be_bytes()].concat();
        out.extend(value);
        out.resize(out.len().next_multiple_of(4), 0);
        out
    };
    let block = |kind: u32, fields: &[u32], rest: &[u8]| {
        let mut body: Vec<u8> = fields.iter().flat_map(|f| f.to_be_bytes()).collect();
        body.extend(rest);
        let len = (body.len() as u32 + 12).to_be_bytes();
        [&kind.to_be_bytes()[..], &len, &body, &len].concat()
    };
    let section = || block(0x0a0d_0d0a, &[0x1a2b_3c4d, 0x0001_0000, u32::MAX, u32::MAX], &[]);
    let frame = |interface: u32, ticks: u32, data: &[u8], options: &[u8]| {
        let len = data.len() as u32;
        let mut padded = data.to_vec();
        padded.resize(data.len().next_multiple_of(4), 0);
        let rest = [&padded, options].concat();
        block(6, &[interface, 0, ticks, len, len + 7], &rest)
    };
    let first = [
        option(1, b"first"),
        option(99, b"of no use"),
        option(2, &[0, 0, 0, 2]),
        option(1, "zweite, mit \u{fc}".as_bytes()),
        option(4, &3u64.to_be_bytes()),
        option(0, &[]),
    ]
    .concat();
    let statistics = |interface: u32, drops: u64, by_system: u64| {
        let options = [
            option(4, &1000u64.to_be_bytes()),
            option(5, &drops.to_be_bytes()),
            option(7, &by_system.to_be_bytes()),
        ];
        block(5, &[interface, 0, 0], &options.concat())
    };
    [
        section(),
        block(1, &[1 << 16, 0], &[option(2, b"eth0"), option(9, &[6])].concat()),
        block(1, &[113 << 16, 96], &option(2, b"any")),
        frame(0, 5, b"abcde", &first),
        frame(1, 6, &[0, 4, 0, 1, 0, 6, 2, 2, 2, 2, 2, 2, 0, 0, 8, 0], &[]),
        statistics(0, 2, 2),
        statistics(0, 5, 2),
        statistics(9, 100, 100),
        section(),
        block(1, &[101 << 16, 0], &[]),
        frame(0, 7, b"x", &option(1, b"third")),
        // An option longer than its block ends them.
        frame(0, 8, b"xy", &[0, 1, 0, 200, b'n', b'o', 0, 0]),
    ]
    .concat()
}

#[test]
fn what_a_capture_says_of_frames_is_read() {
    let frames = read(&sections());
    let known = |time_ns, link, interface: Option<&str>, section, data: &[u8], direction, comments: &[&str]| Known {
        time_ns,
        link,
        interface: interface.map(str::to_owned),
        section,
        original_len: data.len() as u32 + 7,
        data: data.to_vec(),
        direction,
        comments: comments.iter().map(|&c| c.to_owned()).collect(),
    };
    let cooked = [0, 4, 0, 1, 0, 6, 2, 2, 2, 2, 2, 2, 0, 0, 8, 0];
    let (outbound, comments) = (Some(Direction::Outbound), ["first", "zweite, mit \u{fc}"]);
    assert_eq!(
        frames,
        [
            known(5000, 1, Some("eth0"), 0, b"abcde", outbound, &comments),
            known(6000, 113, Some("any"), 0, &cooked, outbound, &[]),
            known(7000, 101, None, 1, b"x", None, &["third"]),
            known(8000, 101, None, 1, b"xy", None, &[]),
        ]
    );
}

#[test]
fn drops_are_those_that_the_file_states() {
    let file = sections();
    let mut capture = Capture::new(&file[..]).unwrap();
    assert_eq!(capture.dropped(), None);
    capture.next_frame().unwrap().unwrap();
    assert_eq!(capture.dropped(), Some(3), "before the first frame");
    while capture.next_frame().is_some() {}
    // The last statistics of an interface count from the beginning.
    assert_eq!(capture.dropped(), Some(7));
    let classic = capture_of(1, &[(&[0; 20], None)]);
    let mut capture = Capture::new(&classic[..]).unwrap();
    while capture.next_frame().is_some() {}
    assert_eq!(capture.dropped(), None);
}

#[test]
fn cooked_headers_have_directions() {
    let direction = |number: u32, at: usize, packet_type: u8| {
        let mut frame = [0; 20];
        frame[at] = packet_type;
        read(&capture_of(number, &[(&frame, None)]))[0].direction
    };
    for (number, at) in [(113, 1), (276, 10)] {
        let all: Vec<_> = (0..6).map(|packet_type| direction(number, at, packet_type)).collect();
        let (inbound, outbound) = (Some(Direction::Inbound), Some(Direction::Outbound));
        assert_eq!(all, [inbound, inbound, inbound, inbound, outbound, None]);
    }
    assert_eq!(direction(1, 10, 4), None);
    assert_eq!(read(&capture_of(276, &[(&[0; 10], None)]))[0].direction, None);
}

#[test]
fn a_copy_has_all_that_the_capture_has() {
    let mut files = fixtures();
    files.push(("sections".to_owned(), sections()));
    assert!(files.len() > 10);
    for (name, file) in files {
        let original = read(&file);
        let copied = copy(&file, &[]);
        assert_eq!(read(&copied), original, "{name}");
        assert_eq!(copy(&copied, &[]), copied, "{name}");
        let annotated = read(&copy(&file, &["one", "two"]));
        assert_eq!(annotated.len(), original.len());
        for (annotated, mut original) in annotated.into_iter().zip(original) {
            original.comments.extend(["one".to_owned(), "two".to_owned()]);
            assert_eq!(annotated, original, "{name}");
        }
    }
}

#[test]
fn captures_behind_each_other_have_sections_of_their_own() {
    let mut writer = PcapNgWriter::new(Vec::new()).unwrap();
    for (n, link) in [101, 1].into_iter().enumerate() {
        if n > 0 {
            writer.section().unwrap();
        }
        let file = capture_of(link, &[(&[n as u8; 3], None)]);
        let mut capture = Capture::new(&file[..]).unwrap();
        writer.copy(&capture.next_frame().unwrap().unwrap(), []).unwrap();
    }
    let frames = read(&writer.finish().unwrap());
    let links: Vec<_> = frames.iter().map(|f| (f.section, f.link)).collect();
    assert_eq!(links, [(0, 101), (1, 1)]);
}

#[test]
fn drops_are_written() {
    let mut writer = PcapNgWriter::new(Vec::new()).unwrap();
    let interface = writer.interface(1, 0, Some("mlx5_0")).unwrap();
    writer.dropped(interface, 5, 7).unwrap();
    let file = writer.finish().unwrap();
    let mut capture = Capture::new(&file[..]).unwrap();
    assert!(capture.next_frame().is_none());
    assert_eq!(capture.dropped(), Some(7));
    let interface = &capture.interfaces()[0];
    assert_eq!((interface.name(), interface.dropped()), (Some("mlx5_0"), Some(7)));
    assert_eq!((interface.link(), interface.snaplen()), (LinkType::Ethernet, 0));
}

#[test]
fn the_writer_refuses_what_no_block_can_hold() {
    let mut writer = PcapNgWriter::new(Vec::new()).unwrap();
    let record = |data| Record {
        interface: 0,
        time_ns: 0,
        original_len: 0,
        data,
        direction: None,
    };
    let kind = |result: std::io::Result<()>| result.unwrap_err().kind();
    assert_eq!(
        kind(writer.write(&record(&[]), [])),
        ErrorKind::InvalidInput,
        "no interface"
    );
    assert_eq!(kind(writer.dropped(0, 0, 1)), ErrorKind::InvalidInput, "no interface");
    writer.interface(1, 0, None).unwrap();
    let long = vec![0; (1 << 20) + 1];
    assert_eq!(kind(writer.write(&record(&long), [])), ErrorKind::InvalidInput);
    let text = "x".repeat(65_536);
    assert_eq!(kind(writer.write(&record(&[]), [&text[..]])), ErrorKind::InvalidInput);
    // Those are not half written.
    writer.write(&record(&[1]), [&text[1..]]).unwrap();
    let frames = read(&writer.finish().unwrap());
    assert_eq!((frames.len(), frames[0].comments[0].len()), (1, 65_535));
}

#[test]
fn long_and_broken_comments_can_be_copied() {
    let mut writer = PcapNgWriter::new(Vec::new()).unwrap();
    writer.interface(1, 0, None).unwrap();
    let record = Record {
        interface: 0,
        time_ns: 0,
        original_len: 1,
        data: &[1],
        direction: None,
    };
    let text = "#".repeat(65_535);
    writer.write(&record, [&text[..]; 4]).unwrap();
    writer.write(&record, ["short"; 300]).unwrap();
    let mut file = writer.finish().unwrap();
    let frames = read(&file);
    assert_eq!(frames.iter().map(|f| f.comments.len()).collect::<Vec<_>>(), [2, 256]);
    // No characters: what stands for them takes three bytes each.
    for byte in file.iter_mut().filter(|b| **b == b'#') {
        *byte = 0xff;
    }
    let frames = read(&copy(&file, &[]));
    assert_eq!(frames[0].comments[0].len(), 65_535);
    assert!(frames[0].comments[0].chars().all(|c| c == char::REPLACEMENT_CHARACTER));
}

#[test]
#[ignore = "needs tshark"]
fn tshark_reads_what_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("written.pcapng");
    let fields = "-Tfields -Eseparator=; -Eaggregator=| -eframe.time_epoch -eframe.len -eframe.cap_len \
        -eframe.interface_name -eframe.comment -eframe.packet_flags_direction -r";
    let fields: Vec<_> = fields.split_whitespace().collect();

    let mut writer = PcapNgWriter::create(&path).unwrap();
    let ethernet_frame = ethernet(0x0800, &ip_datagram(v4(), 1, &packet(b"hello")));
    let raw = ip_datagram(v4(), 2, &packet(b""));
    let interfaces = [(1, "mlx5_0"), (101, "tun0")].map(|(link, name)| writer.interface(link, 0, Some(name)).unwrap());
    for (n, (interface, data)) in interfaces.into_iter().zip([&ethernet_frame, &raw]).enumerate() {
        let record = Record {
            interface,
            time_ns: 1_700_000_000_123_456_789 + n as u64,
            original_len: data.len() as u32 + 1,
            data,
            direction: Some([Direction::Inbound, Direction::Outbound][n]),
        };
        writer.write(&record, ["one", "two"]).unwrap();
    }
    writer.dropped(interfaces[0], 1_700_000_000_123_456_789, 7).unwrap();
    writer.flush().unwrap();
    let shown = tshark(&fields, &path);
    let (a, b) = (ethernet_frame.len(), raw.len());
    let expected = format!(
        "1700000000.123456789;{};{a};mlx5_0;one|two;1\n1700000000.123456790;{};{b};tun0;one|two;2\n",
        a + 1,
        b + 1
    );
    // Some versions write the direction in hexadecimal.
    assert_eq!(
        shown
            .replace("0x00000001", "1")
            .replace("0x00000002", "2")
            .replace(";0x", ";"),
        expected
    );

    // The same packets as in the originals.
    let fields = "-Tfields -eframe.time_epoch -eframe.protocols -eframe.len -einfiniband.bth.psn -r";
    let fields: Vec<_> = fields.split_whitespace().collect();
    let some = ["cm-reject.pcapng", "udaddy.pcap", "scapy-cnp.pcap"];
    let files = fixtures()
        .into_iter()
        .filter(|(name, _)| some.iter().any(|s| name.ends_with(s)));
    for (name, file) in files {
        fs::write(&path, copy(&file, &[])).unwrap();
        let original = dir.path().join("original");
        fs::write(&original, file).unwrap();
        assert!(tshark(&fields, &path) == tshark(&fields, &original), "{name}");
    }
}

proptest! {
    #[test]
    fn what_is_written_is_read(
        records in vec(
            (0usize..3, any::<u64>(), any::<u32>(), vec(any::<u8>(), 0..60), 0..3, vec(".{0,20}", 0..4)),
            0..8,
        ),
    ) {
        let links = [1, 113, 276];
        let mut writer = PcapNgWriter::new(Vec::new()).unwrap();
        for link in links {
            writer.interface(link, 0, Some("name")).unwrap();
        }
        let mut expected = vec![];
        for (interface, time_ns, original_len, data, direction, comments) in records {
            // What headers say has been tested.
            let direction = match direction {
                0 if interface == 0 => None,
                1 => Some(Direction::Inbound),
                _ => Some(Direction::Outbound),
            };
            let record = Record { interface: interface as u32, time_ns, original_len, data: &data, direction };
            writer.write(&record, comments.iter().map(String::as_str)).unwrap();
            let (link, name) = (links[interface], Some("name".to_owned()));
            expected.push(Known { time_ns, link, interface: name, section: 0, original_len, data, direction, comments });
        }
        let file = writer.finish().unwrap();
        prop_assert_eq!(&read(&file), &expected);
        prop_assert_eq!(read(&copy(&file, &[])), expected);
    }
}
