//! Captures that miss packets: nobody is blamed for what they don't show.

use roce_bth::Opcode;
use roce_pcap::Verdict;

use crate::common::wire::{Wire, ack, read, response, write};

/// A request whose first transmission the capture misses is there when it is sent again, behind its acknowledgement.
#[test]
fn a_repetition_that_is_seen_first_makes_no_ghost_of_its_answer() {
    let mut wire = Wire::stated();
    wire.a(write(10, 100), 100);
    wire.b(ack(10, 1), 0);
    // Packet 11 is not captured, its acknowledgement is, and the capture goes on.
    wire.b(ack(11, 2), 0);
    wire.a(write(12, 100), 100);
    // Neither is packet 13, until it is sent again, because the acknowledgement was lost.
    wire.b(ack(13, 4), 0);
    wire.a(write(13, 100), 100);
    wire.b(ack(13, 4), 0);
    assert_eq!(wire.found(), Vec::<String>::new());
    assert_eq!(wire.summary().verdict, Verdict::NotChecked);
}

/// It may miss a request of one side where it has missed those of the other.
#[test]
fn a_capture_that_misses_requests_of_one_side_makes_no_ghost_of_the_others_answer() {
    let mut wire = Wire::stated();
    wire.a(write(10, 100), 100);
    wire.b(ack(10, 1), 0);
    wire.b(write(20, 100), 100);
    wire.a(ack(20, 1), 0);
    // Packet 21 of B is not captured, nor the first transmission of packet 11 of A.
    wire.a(ack(21, 2), 0);
    wire.b(write(22, 100), 100);
    wire.a(ack(22, 3), 0);
    wire.b(ack(11, 2), 0);
    wire.a(write(11, 100), 100);
    wire.b(ack(11, 2), 0);
    assert_eq!(wire.found(), Vec::<String>::new());
    assert_eq!(wire.summary().verdict, Verdict::NotChecked);
}

/// The capture is not known to miss anything.
#[test]
fn an_answer_to_a_request_that_is_sent_later_is_a_ghost() {
    let mut wire = Wire::stated();
    wire.a(write(10, 100), 100);
    wire.b(ack(11, 2), 0);
    wire.a(write(11, 100), 100);
    let found = wire.found();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with("2 ack-ghost B: "), "{found:?}");
}

/// Responses to what is asked for again are of the position in that part, also when more parts were asked for than the judge
/// remembers.
#[test]
fn responses_to_a_part_that_was_forgotten_have_any_position() {
    let mut wire = Wire::stated();
    wire.a(read(10, 16 * 1024), 0);
    for psn in 11..18 {
        let mut again = read(psn, 1024);
        again.reth.as_mut().unwrap().va = u64::from(psn - 10) * 1024;
        wire.a(again, 0);
    }
    for psn in 11..18 {
        wire.b(response(Opcode::RcReadResponseOnly, psn, 1), 1024);
    }
    // The rest of the READ is not answered.
    let found = wire.found();
    assert!(found.len() == 1 && found[0].contains("no-answer"), "{found:?}");
}
