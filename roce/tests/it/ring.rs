//! Rings of packets: what is in them, who gets them, and when they are written.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::mpsc::{Receiver, channel},
    time::{Duration, Instant},
};

use crate::common::*;
use roce::{
    Device, DeviceConfig, Payload, ProcessName, RKey, RemoteAddr, SendOp, VerbsError, WcStatus,
    ring::{Cause, Ring, RingConfig, RingControl, RingRequest, Written},
};
use roce_bth::{Class, Syndrome};
use roce_pcap::{Capture, Verdict, check_file, decode};

const SIZE: usize = 256 << 10;
const LEN: usize = 40_000;

/// A pair whose first side has a ring, and what is written of it.
struct Recorded {
    pair: Pair,
    ring: Ring,
    control: RingControl,
    written: Receiver<Written>,
    process: ProcessName,
}

fn with(ring: &Ring) -> DeviceConfig {
    DeviceConfig {
        ring: Some(ring.clone()),
        ..config()
    }
}

fn recorded(name: &str, file: &Path, on_bad: bool) -> Recorded {
    let ring = Ring::new(SIZE).unwrap();
    let (sender, written) = channel();
    let control = RingControl::start(
        &ring,
        RingConfig {
            name: name.into(),
            file: file.into(),
            on_bad,
            signals: None,
            report: Box::new(move |one| {
                let Written { cause, result } = one;
                let result = result.as_ref().map_err(|e| e.kind().into()).cloned();
                sender.send(Written { cause: *cause, result }).unwrap();
            }),
        },
    );
    let process = ProcessName {
        pid: std::process::id(),
        name: name.into(),
    };
    Recorded {
        pair: connected(with(&ring), config()),
        ring,
        control: control.unwrap(),
        written,
        process,
    }
}

impl Recorded {
    fn writes(&self, rounds: usize) {
        let (ma, mb) = (self.pair.a.mr(LEN), self.pair.b.mr(LEN));
        for _ in 0..rounds {
            let sges = [ma.sge(0, LEN)];
            post(&self.pair.qa, 1, SendOp::Write(remote(&mb, 0)), Payload::Sges(&sges));
            self.pair.a.good(1);
        }
    }

    /// Uses a key that the peer does not have.
    fn fails(pair: &Pair) {
        let ma = pair.a.mr(64);
        let nothing = RemoteAddr { addr: 0, rkey: RKey(1) };
        post(&pair.qa, 1, SendOp::Write(nothing), Payload::Sges(&[ma.sge(0, 64)]));
        assert_eq!(pair.a.completions(1)[0].status, WcStatus::RemoteAccessError);
    }
}

/// Checks that a file is good. Returns the number of packets.
fn good(path: &Path) -> u64 {
    let report = check_file(path).unwrap();
    assert_eq!(report.verdict, Verdict::Good, "{:?}", report.findings);
    assert_eq!(report.icrc_ok, report.frames);
    report.frames
}

/// Of each frame of a file, whether it is a NAK.
fn naks(path: &Path) -> Vec<bool> {
    let mut capture = Capture::new(fs::File::open(path).unwrap()).unwrap();
    let mut naks = Vec::new();
    while let Some(frame) = capture.next_frame() {
        let frame = frame.unwrap();
        let datagram = decode(frame.link, frame.data).unwrap();
        let packet = roce_bth::Packet::parse(datagram.payload).unwrap();
        let is_ack = packet.header.bth.opcode.info().class == Class::Acknowledge;
        let syndrome = packet.header.aeth().map(|aeth| aeth.syndrome);
        naks.push(is_ack && matches!(syndrome, Some(Syndrome::Nak(_))));
    }
    naks
}

/// Whether one of the last frames of a file is a NAK.
fn ends_with_nak(path: &Path) -> bool {
    naks(path).iter().rev().take(2).any(|nak| *nak)
}

#[test]
fn the_last_packets_are_given_to_those_who_ask_and_stay() {
    let dir = tempfile::tempdir().unwrap();
    let recorded = recorded("asked", &dir.path().join("ring.pcap"), false);
    let processes = RingRequest::processes().unwrap();
    assert!(processes.contains(&recorded.process), "{processes:?}");
    // More than the ring holds.
    recorded.writes(20);
    let request = RingRequest::default();
    let mut sent = Vec::new();
    let packets = request.read(&recorded.process, &mut sent).unwrap().packets;
    let path = dir.path().join("sent.pcap");
    fs::write(&path, &sent).unwrap();
    assert_eq!(good(&path), packets);
    assert!(sent.len() > SIZE / 2 && sent.len() < 2 * SIZE, "{} bytes", sent.len());

    let written = request.write(&recorded.process).unwrap();
    let file = written.path.unwrap();
    assert_eq!(file, dir.path().join("ring.pcap"));
    assert!(good(&file) >= packets, "they are still there");
    let part = RingRequest {
        last: SIZE as u64 / 8,
        ..request.clone()
    };
    let written = part.write(&recorded.process).unwrap();
    assert_eq!(written.path.unwrap(), dir.path().join("ring-2.pcap"));
    assert!(
        (1..packets / 4).contains(&written.packets),
        "{} of {packets}",
        written.packets
    );

    drop(recorded.control);
    assert!(request.write(&recorded.process).is_err());
}

#[test]
fn a_failure_writes_one_file_that_ends_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let recorded = recorded("failing", &dir.path().join("ring.pcap"), true);
    recorded.writes(3);
    let begin = Instant::now();
    Recorded::fails(&recorded.pair);
    let Written { cause, result } = recorded.written.recv_timeout(TIMEOUT).unwrap();
    let (path, packets) = result.unwrap();
    assert_eq!((cause, good(&path)), (Cause::QueuePair, packets));
    assert!(ends_with_nak(&path));
    // Another one so soon is not written.
    Recorded::fails(&connected(with(&recorded.ring), config()));
    recorded.control.finish();
    let is_soon = begin.elapsed() < Duration::from_secs(10);
    assert!(recorded.written.try_iter().count() == 0 || !is_soon);
}

#[test]
fn a_process_may_wait_for_the_failure_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let recorded = recorded("waited", &dir.path().join("ring.pcap"), false);
    recorded.writes(3);
    let request = RingRequest {
        on_bad: true,
        ..RingRequest::default()
    };
    let process = recorded.process.clone();
    let waiting = std::thread::spawn(move || {
        let mut sent = Vec::new();
        request.read(&process, &mut sent).map(|_| sent)
    });
    // It may ask after the first failures.
    while !waiting.is_finished() {
        Recorded::fails(&connected(with(&recorded.ring), config()));
    }
    let path: PathBuf = dir.path().join("sent.pcap");
    fs::write(&path, waiting.join().unwrap().unwrap()).unwrap();
    good(&path);
    // Other connections may have begun behind it.
    assert!(naks(&path).contains(&true));
    assert_eq!(recorded.written.try_iter().count(), 0, "no file was asked for");
}

#[test]
fn what_is_due_is_written_before_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let recorded = recorded("ending", &dir.path().join("ring.pcap"), true);
    Recorded::fails(&recorded.pair);
    // The thread that has seen the failure may still be about to report it.
    recorded.pair.a.device.stats();
    recorded.control.finish();
    assert_eq!(recorded.written.try_iter().count(), 1);
    good(&dir.path().join("ring.pcap"));
}

#[test]
fn a_capture_is_a_file_or_a_ring() {
    let both = DeviceConfig {
        pcap: Some("/dev/null".into()),
        ..with(&Ring::new(SIZE).unwrap())
    };
    assert!(matches!(Device::open(both), Err(VerbsError::Invalid(_))));
    assert!(Ring::new(Ring::MIN_SIZE - 1).is_err());
    assert!(Ring::new(usize::MAX / 2).is_err());
}
