//! The replay is no mirror: a capture that says something else than what our engine does is noticed.

use std::net::{IpAddr, SocketAddr};

use ferroce_replay::{connections, fixtures};
use roce_bth::Packet;
use roce_icrc::Flow;
use roce_replay::{Connection, Error, Event, Kind, Outcome, Settings, is_request};
use roce_verbs::WcStatus;

const MTU: usize = 1024;

fn one(file: &str) -> Connection {
    let mut found = connections(&fixtures().join(file)).unwrap();
    assert_eq!(found.len(), 1);
    found.remove(0)
}

fn server() -> IpAddr {
    "10.77.0.1".parse().unwrap()
}

fn client() -> IpAddr {
    "10.77.0.2".parse().unwrap()
}

fn play(connection: &Connection, side: IpAddr, mtu: usize, settings: &Settings) -> Result<Outcome, Error> {
    roce_replay::play(connection, connection.side(side).unwrap(), mtu, settings)
}

fn run(connection: &Connection, side: IpAddr) -> Result<Outcome, Error> {
    // Short, to save time: no SEND here is longer.
    let settings = Settings {
        receive: Some(8192),
        ..Settings::default()
    };
    play(connection, side, MTU, &settings)
}

/// Gives an event the ICRC that its bytes should have.
fn seal(event: &mut Event) {
    let flow = Flow::try_from((event.src, SocketAddr::new(event.dst.ip(), 4791))).unwrap();
    flow.seal(event.identification.unwrap(), &mut event.bytes);
}

/// Every bit of every third answer, changed with a right ICRC: the responder's replay notices, but for bits that it is told.
#[test]
fn a_changed_answer_is_noticed() {
    let whole = one("verbs-ops.pcap");
    let clean = run(&whole, server()).unwrap();
    assert!(clean.differences.is_empty() && clean.wrong_memory.is_empty());
    assert_eq!(clean.equal, clean.theirs);
    let mut changed = 0;
    for index in 0..whole.events.len() {
        let event = &whole.events[index];
        let header = event.packet().header;
        if event.src.ip() != server() || is_request(header.bth.opcode) || index % 3 != 0 {
            continue;
        }
        // A READ response's payload and an atomic's result are what the memory is made to hold.
        for bit in 0..header.bytes().len() * 8 {
            let at = bit / 8;
            let told = header.atomic_ack().is_some() && at >= header.bytes().len() - 8;
            let mut altered = whole.clone();
            altered.events[index].bytes[at] ^= 0x80 >> (bit % 8);
            seal(&mut altered.events[index]);
            // Another destination is another flow, another opcode may be another service.
            if told || (5..8).contains(&at) || at == 0 || Packet::parse(&altered.events[index].bytes).is_err() {
                continue;
            }
            let noticed = match run(&altered, server()) {
                Ok(outcome) => !outcome.differences.is_empty() || !outcome.wrong_memory.is_empty(),
                Err(_) => true,
            };
            assert!(noticed, "frame {}, byte {at}, bit {}", event.frame, bit % 8);
            changed += 1;
        }
    }
    assert!(changed > 600, "{changed}");
}

#[test]
fn a_changed_request_is_noticed() {
    let whole = one("verbs-ops.pcap");
    let clean = run(&whole, client()).unwrap();
    assert!(clean.differences.is_empty() && clean.succeeded == clean.posted && clean.posted == 33);
    // What, the byte, and its bits.
    let changes = [
        ("opcode", 0, 1),
        ("reserved bit", 8, 1),
        ("acknowledge request", 8, 0x80),
        ("PSN", 11, 1),
        ("partition key", 3, 1),
        ("migration", 1, 0x40),
    ];
    for index in 0..whole.events.len() {
        let event = &whole.events[index];
        if event.src.ip() != client() || !is_request(event.packet().header.bth.opcode) {
            continue;
        }
        for (what, at, bits) in changes {
            let mut altered = whole.clone();
            altered.events[index].bytes[at] ^= bits;
            seal(&mut altered.events[index]);
            if Packet::parse(&altered.events[index].bytes).is_err() {
                continue;
            }
            let noticed = run(&altered, client()).map_or(true, |o| !o.differences.is_empty());
            // A SEND that is another kind of SEND is another work request, which ours does as well.
            let other_request = what == "opcode" && event.packet().header.bth.opcode.info().position.ends();
            assert!(noticed || other_request, "frame {}: {what}", event.frame);
        }
    }
}

#[test]
fn a_wrong_checksum_is_noticed() {
    let mut whole = one("verbs-ops.pcap");
    let index = whole.events.iter().position(|e| e.src.ip() == server()).unwrap();
    let last = whole.events[index].bytes.len() - 1;
    whole.events[index].bytes[last] ^= 1;
    let kinds: Vec<Kind> = run(&whole, server())
        .unwrap()
        .differences
        .iter()
        .map(|d| d.kind)
        .collect();
    assert_eq!(kinds, [Kind::Icrc]);
}

#[test]
fn missing_and_repeated_packets_are_noticed() {
    let whole = one("loss-write-client.pcap");
    let base = run(&whole, client()).unwrap();
    let mine: Vec<usize> = (0..whole.events.len())
        .filter(|i| whole.events[*i].src.ip() == client())
        .collect();
    for index in &mine {
        let mut more = whole.clone();
        more.events.insert(*index, whole.events[*index].clone());
        // Its timer ran out: ours repeats something as well, or differs.
        let again = run(&more, client()).unwrap();
        let noticed = again.differences.len() > base.differences.len() || again.equal > base.equal;
        assert!(noticed, "event {index} repeated");
        let psn = whole.events[*index].packet().header.bth.psn;
        let later = &whole.events[index + 1..];
        if later
            .iter()
            .any(|e| e.src.ip() == client() && e.packet().header.bth.psn == psn)
        {
            // Sent once less, with the same outcome.
            continue;
        }
        let mut less = whole.clone();
        less.events.remove(*index);
        let noticed = run(&less, client()).map_or(true, |o| o.differences.iter().any(|d| d.kind != Kind::AckRequest));
        assert!(noticed, "event {index} missing");
    }
    let whole = one("verbs-ops.pcap");
    let answers = |i: &usize| {
        let event = &whole.events[*i];
        event.src.ip() == server() && !is_request(event.packet().header.bth.opcode)
    };
    for index in (0..whole.events.len()).filter(answers) {
        let mut less = whole.clone();
        less.events.remove(index);
        let noticed = run(&less, server()).map_or(true, |o| !o.differences.is_empty());
        assert!(noticed, "event {index} missing");
        let mut more = whole.clone();
        more.events.insert(index, whole.events[index].clone());
        let noticed = run(&more, server()).map_or(true, |o| !o.differences.is_empty());
        assert!(noticed, "event {index} repeated");
    }
}

fn kinds(outcome: &Outcome) -> Vec<Kind> {
    outcome.differences.iter().map(|d| d.kind).collect()
}

/// A requester that does not repeat what it should, here because it has no retries, is noticed at each place.
#[test]
fn a_requester_that_gives_up_is_noticed() {
    let cases = [
        ("rnr-send.pcap", WcStatus::RnrRetryExceeded),
        ("rnr-send-slow.pcap", WcStatus::RnrRetryExceeded),
        ("loss-write-last-client.pcap", WcStatus::RetryExceeded),
        ("loss-atomic-ack-client.pcap", WcStatus::RetryExceeded),
    ];
    for (file, status) in cases {
        let settings = Settings {
            // It gives up sooner than the captured side repeats itself.
            timeout: 10,
            retry_cnt: 0,
            rnr_retry: 0,
            ..Settings::default()
        };
        let outcome = play(&one(file), client(), MTU, &settings).unwrap();
        assert!(kinds(&outcome).contains(&Kind::NotRepeated), "{file}: {outcome:?}");
        assert_eq!(outcome.failed, Some(status), "{file}");
    }
}

/// Ours sends one packet after an RNR NAK, the captured side all: refusals of the others are not ours, and what the captured
/// responder took meanwhile is acknowledged as far as ours has sent it.
#[test]
fn answers_to_what_ours_did_not_send_are_kept_from_it() {
    for file in ["rnr-send.pcap", "rnr-send-slow.pcap", "rnr-write-imm.pcap"] {
        let whole = one(file);
        let outcome = play(&whole, client(), MTU, &Settings::default()).unwrap();
        let harmless = |k: &Kind| matches!(k, Kind::AckRequest | Kind::OnlyTheirRepeat);
        assert!(kinds(&outcome).iter().all(harmless), "{file}: {outcome:?}");
        assert_eq!(outcome.succeeded, outcome.posted, "{file}");
    }
}

/// An acknowledgement of what the captured side never sent does not make ours believe that it sent it.
#[test]
fn a_request_that_only_ours_has_yet_to_send_is_not_invented() {
    let mut whole = one("loss-write-client.pcap");
    let last = whole.events.iter().rposition(|e| e.src.ip() == client()).unwrap();
    whole.events.remove(last);
    let noticed = run(&whole, client()).map_or(true, |o| o.differences.iter().any(|d| !d.kind.proves_itself()));
    assert!(noticed);
}
