//! Memory that hostile captures take: little, however long they are.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    io::{self, Read},
    net::SocketAddr,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use etherparse::{IpHeaders, IpNumber, Ipv4Extensions, Ipv4Header, PacketBuilder};
use flate2::{Compression, read::GzEncoder};
use roce_bth::{Aeth, Bth, Credits, Header, ICRC_LEN, MAX_HEADER_LEN, Msn, Opcode, Psn, Qpn, Syndrome};
use roce_icrc::Flow;
use roce_pcap::{Report, Verdict, check_reader};

/// Counts what is allocated.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);
static CALLS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator does all the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Relaxed) + layout.size();
        MOST.fetch_max(now, Relaxed);
        CALLS.fetch_add(1, Relaxed);
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: passed on.
        unsafe { System.dealloc(ptr, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A beginning, then the same bytes again and again, made as they are read.
struct Endless {
    begin: Vec<u8>,
    again: Vec<u8>,
    at: usize,
    len: usize,
}

impl Read for Endless {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let bytes = match self.at.checked_sub(self.begin.len()) {
            None => &self.begin[self.at..],
            Some(past) => &self.again[past % self.again.len()..],
        };
        let n = out.len().min(bytes.len()).min(self.len - self.at);
        out[..n].copy_from_slice(&bytes[..n]);
        self.at += n;
        Ok(n)
    }
}

fn words(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

/// A section and an interface, little-endian.
fn begin() -> Vec<u8> {
    let section = [0x0a0d_0d0a, 28, 0x1a2b_3c4d, 1, u32::MAX, u32::MAX, 28];
    words(&[&section[..], &[1, 20, 1, 0, 20]].concat())
}

const LEN: usize = 24 << 20;
/// Also of what a finding takes, 10,000 of them.
const BOUND: usize = 10 << 20;

fn endless(begin: Vec<u8>, again: Vec<u8>) -> Endless {
    // In few calls.
    let again = again.repeat((64 << 10) / again.len() + 1);
    Endless {
        len: begin.len() + LEN / again.len() * again.len(),
        begin,
        again,
        at: 0,
    }
}

fn check(what: &str, begin: Vec<u8>, again: Vec<u8>) -> Report {
    check_within(what, endless(begin, again), BOUND)
}

fn check_within(what: &str, file: impl Read, bound: usize) -> Report {
    let before = NOW.load(Relaxed);
    MOST.store(before, Relaxed);
    let report = check_reader(what, file, |_| {}).unwrap();
    let took = MOST.load(Relaxed) - before;
    assert!(took < bound, "{what}: {took} bytes of memory for a file of {LEN}");
    report
}

fn reason(report: &Report) -> &str {
    assert_eq!((report.complete, report.verdict), (false, Verdict::Bad));
    &report.findings.last().unwrap().text
}

/// A pcap file of SENDs, each with its acknowledgement behind it, of one queue pair.
fn good_traffic(messages: u32) -> Vec<u8> {
    let hosts: [SocketAddr; 2] = [([10, 0, 0, 1], 4791).into(), ([10, 0, 0, 2], 4791).into()];
    let mut file = words(&[0xa1b2_c3d4, 0x0004_0002, 0, 0, 0x4_0000, 101]);
    for n in 0..2 * messages {
        let (psn, from) = (Psn::new(n / 2), n as usize % 2);
        let opcode = [Opcode::RcSendOnly, Opcode::RcAcknowledge][from];
        let mut header = Header::new(Bth::new(opcode, Qpn::new(2 + n % 2), psn));
        header.bth.ack_req = from == 0;
        header.aeth = Some(Aeth {
            syndrome: Syndrome::Ack(Credits::INVALID),
            msn: Msn::new(n / 2 + 1),
        });
        let mut packet = vec![0; MAX_HEADER_LEN];
        let len = header.emit(&mut packet);
        packet.resize(len + 64 * (1 - from) + ICRC_LEN, 0);
        let flow = Flow::try_from((hosts[from], hosts[1 - from])).unwrap();
        flow.seal(1, &mut packet);
        let mut frame = vec![];
        let builder = PacketBuilder::ip(IpHeaders::Ipv4(ipv4(from as u8), Ipv4Extensions::default()));
        builder.udp(4791, 4791).write(&mut frame, &packet).unwrap();
        file.extend(words(&[1, n, frame.len() as u32, frame.len() as u32]));
        file.extend(frame);
    }
    file
}

fn ipv4(from: u8) -> Ipv4Header {
    let mut ip = Ipv4Header::new(0, 64, IpNumber::UDP, [10, 0, 0, 1 + from], [10, 0, 0, 2 - from]).unwrap();
    ip.identification = 1;
    ip
}

/// As many calls of the allocator for a capture of good packets as for one of a quarter of it: all are at the beginning.
fn good_packets_allocate_nothing() {
    let calls = |messages| {
        let file = good_traffic(messages);
        let before = CALLS.load(Relaxed);
        let report = check_reader("good", &file[..], |_| {}).unwrap();
        assert_eq!(
            (report.icrc_ok, report.verdict),
            (u64::from(messages) * 2, Verdict::Good)
        );
        CALLS.load(Relaxed) - before
    };
    // Beyond the number of requests that are remembered.
    assert_eq!(calls(40_000), calls(10_000));
}

/// One test: they share the allocator.
#[test]
fn memory_does_not_grow_with_the_file() {
    let many = check("interfaces", begin(), words(&[1, 20, 1, 0, 20]));
    assert!(reason(&many).contains("more than 4096 interfaces"), "{}", reason(&many));

    // Sections begin again: that is no error.
    let sections = check("sections", begin(), begin());
    assert!(sections.complete);

    // One interface with a description in 24 MiB of comments, in a block of that size.
    let len = (LEN + 20) as u32;
    let options = check(
        "options",
        words(&[0x0a0d_0d0a, 28, 0x1a2b_3c4d, 1, 0, 0, 28, 1, len, 1, 0]),
        words(&[0x0004_0001, 0]),
    );
    assert!(reason(&options).contains("ends in the middle"), "{}", reason(&options));

    // Name resolution: records of an address and a name each.
    let names = check(
        "names",
        begin(),
        words(&[4, 40, 0x0008_0001, 1, 0x0061, 0x0008_0001, 2, 0x0062, 0, 40]),
    );
    assert_eq!((names.complete, names.verdict), (true, Verdict::NotChecked));

    // Packets with as many options as fit, of an interface that exists.
    let mut packet = vec![6, 0, 0, 0, 0, 0, 0];
    packet.extend([0x0004_0002, 0].repeat(100_000));
    packet[1] = packet.len() as u32 * 4 + 4;
    packet.push(packet[1]);
    let packets = check("packet options", begin(), words(&packet));
    assert!(packets.complete && packets.frames > 20);

    // Comments: as many as fit, long ones, and empty ones.
    for comment in [&[0xffff_0001, 0x2323_2323][..], &[1]] {
        let mut packet = vec![6, 0, 0, 0, 0, 0, 0];
        match comment {
            [header, text] => packet.extend([&[*header][..], &[*text].repeat(0x4000)].concat().repeat(16)),
            empty => packet.extend(empty.repeat(200_000)),
        }
        packet[1] = packet.len() as u32 * 4 + 4;
        packet.push(packet[1]);
        let report = check("comments", begin(), words(&packet));
        assert!(report.complete && report.frames > 10);
    }

    // Interfaces with names, and statistics of them.
    let mut named = vec![1, 0, 1, 0, 0x00ff_0002];
    named.extend([0x6161_6161; 64]);
    named[1] = named.len() as u32 * 4 + 4;
    named.push(named[1]);
    let statistics = [5, 36, 0, 0, 0, 0x0008_0005, 1, 0, 36];
    let described = check("names of interfaces", begin(), words(&named));
    assert!(reason(&described).contains("more than 4096 interfaces"));
    let counted = check("statistics", begin(), words(&statistics));
    assert!(counted.complete);

    // A block that says it has 4 GiB.
    let huge = check("huge block", [begin(), words(&[0x0bad, 0xffff_fff0])].concat(), vec![0]);
    assert!(reason(&huge).contains("ends in the middle"), "{}", reason(&huge));

    // Frames of 2 GiB and of a little more than is read, pcapng's and pcap's.
    for frame in [0x8000_0000, (1 << 20) + 4] {
        let block = words(&[6, 0xffff_fff0, 0, 0, 0, frame, frame]);
        let report = check("huge frame", [begin(), block].concat(), vec![0]);
        assert!(reason(&report).contains("at most"), "{}", reason(&report));
        let header = words(&[0xa1b2_c3d4, 0x0004_0002, 0, 0, 0x4_0000, 1, 0, 0, frame, frame]);
        let report = check("huge frame, pcap", header, vec![0]);
        assert!(!reason(&report).is_empty());
    }

    // Findings: each frame has one.
    let findings = check(
        "findings",
        words(&[0xa1b2_c3d4, 0x0004_0002, 0, 0, 0x4_0000, 187]),
        words(&[0, 0, 4, 4, 0]),
    );
    let found: u64 = findings.findings.iter().map(|finding| finding.count).sum();
    assert_eq!(found + findings.findings_left_out, findings.frames);

    // A small file that decompresses to one long block, and to many frames; what the encoder takes is counted too.
    for (begin, again) in [
        ([begin(), words(&[0x0bad, 0xffff_fff0])].concat(), vec![0]),
        (begin(), words(&[6, 36, 0, 0, 0, 4, 4, 0, 36])),
    ] {
        let file = GzEncoder::new(endless(begin, again), Compression::fast());
        let report = check_within("gzip", file, BOUND + (1 << 20));
        assert!(report.complete || reason(&report).contains("ends in the middle"));
    }
    let header = words(&[0xa1b2_c3d4, 0x0004_0002, 0, 0, 0x4_0000, 1, 0, 0, 1 << 20, 1 << 20]);
    let file = GzEncoder::new(endless(header, vec![0; 16 + (1 << 20)]), Compression::fast());
    let report = check_within("gzip, pcap", file, BOUND + (4 << 20));
    assert!(report.frames > 0);
    // Headers of members with names that do not end.
    let member = [&[0x1f, 0x8b, 8, 8, 0, 0, 0, 0, 0, 3][..], &[b'n'; 100]].concat();
    let before = NOW.load(Relaxed);
    MOST.store(before, Relaxed);
    check_reader("name", endless(member, vec![b'n']), |_| {}).unwrap_err();
    assert!(MOST.load(Relaxed) - before < BOUND);
    good_packets_allocate_nothing();
}
