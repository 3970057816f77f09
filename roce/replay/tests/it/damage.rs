//! Captures are untrusted: whatever their packets are, a replay ends with an outcome or an error.

use std::path::Path;

use proptest::prelude::*;
use roce_bth::Packet;
use roce_pcap::{Capture, Setup, Survey};
use roce_replay::{Connection, Settings, play, read};

/// Captures with every operation, losses, refusals and RNR NAKs.
const FILES: [&str; 5] = [
    "verbs-ops.pcap",
    "loss-read-response-server.pcap",
    "rnr-write-imm.pcap",
    "nak-write-rkey.pcap",
    "annex-a19.pcap",
];

fn connection(file: &str) -> Connection {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../pcap-fixtures")
        .join(file);
    let open = || Capture::open(&path).expect(file);
    let survey = Survey::new(file, &Setup::default(), &mut open());
    read(&survey, &mut open()).remove(0)
}

/// Change of a packet.
#[derive(Clone, Debug)]
enum Change {
    /// Another value of a byte; the ICRC does not matter to a queue pair.
    Byte(prop::sample::Index, prop::sample::Index, u8),
    Remove(prop::sample::Index),
    Repeat(prop::sample::Index),
    Swap(prop::sample::Index, prop::sample::Index),
    /// The other side sent it.
    Turn(prop::sample::Index),
}

fn change() -> impl Strategy<Value = Change> {
    let packet = any::<prop::sample::Index>;
    prop_oneof![
        5 => (packet(), packet(), any::<u8>()).prop_map(|(packet, byte, value)| Change::Byte(packet, byte, value)),
        1 => packet().prop_map(Change::Remove),
        1 => packet().prop_map(Change::Repeat),
        1 => (packet(), packet()).prop_map(|(one, other)| Change::Swap(one, other)),
        1 => packet().prop_map(Change::Turn),
    ]
}

fn apply(connection: &mut Connection, change: &Change) {
    let events = &mut connection.events;
    let len = events.len();
    if len == 0 {
        return;
    }
    match change {
        Change::Byte(packet, byte, value) => {
            let event = &mut events[packet.index(len)];
            let mut bytes = event.bytes.clone();
            // Headers, mostly.
            let at = byte.index(bytes.len().min(40));
            bytes[at] = *value;
            if Packet::parse(&bytes).is_ok() {
                event.bytes = bytes;
            }
        }
        Change::Remove(packet) => drop(events.remove(packet.index(len))),
        Change::Repeat(packet) => events.insert(packet.index(len), events[packet.index(len)].clone()),
        Change::Swap(one, other) => events.swap(one.index(len), other.index(len)),
        Change::Turn(packet) => {
            let event = &mut events[packet.index(len)];
            event.sender = 1 - event.sender;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_packets_have_an_outcome_or_an_error(
        file in prop::sample::select(&FILES[..]),
        changes in prop::collection::vec(change(), 1..8),
        side in 0usize..2,
        mtu in prop::sample::select(&[256usize, 1024, 4096][..]),
        joined_late in any::<bool>(),
    ) {
        let mut connection = connection(file);
        changes.iter().for_each(|change| apply(&mut connection, change));
        let settings = Settings { joined_late, receive: Some(4096), ..Settings::default() };
        if let Ok(outcome) = play(&connection, side, mtu, &settings) {
            prop_assert!(outcome.equal <= outcome.theirs);
        }
    }
}
