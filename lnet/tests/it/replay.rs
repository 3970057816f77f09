//! A node in the place of either kernel in captures: it gets what the captured peer sent, and is asked for the operations that the captured
//! side began. Each message and all data of its own have to be the kernel's, byte for byte, but for names that each side chooses (handles,
//! cookies, keys and addresses); what else differs is counted, and has a reason.

use lnet::proto::{Body, Message};

use crate::{
    conversation::HOSTS,
    player::{Differences, Player},
};

/// Plays a side, which sends nothing that has no reason to differ.
fn played(name: &str, is_first: bool) -> Player {
    let played = Player::play(name, is_first);
    let wrong: String = played.wrong.iter().map(|wrong| format!("\n  {wrong}")).collect();
    let host = HOSTS[usize::from(!is_first)];
    assert!(wrong.is_empty(), "{name}, our side {host:?}:{wrong}");
    assert!(played.equal > 0, "{name}");
    played
}

fn check(name: &str, is_first: bool, expected: Differences) {
    let played = played(name, is_first);
    let host = HOSTS[usize::from(!is_first)];
    assert_eq!(
        played.differences, expected,
        "{name}, our side {host:?}, {} equal",
        played.equal
    );
}

/// Messages with other credits, ping information (of kernels with discovery switched off), NOOPs; `None`: not replayed.
type Counts = Option<(usize, usize, usize)>;

/// Captures, and by host what differs.
const TABLE: [(&str, [Counts; 2]); 15] = [
    ("ping", [Some((0, 0, 0)), Some((0, 0, 0))]),
    ("discover", [Some((2, 0, 0)), Some((4, 0, 0))]),
    ("selftest-ping", [Some((0, 1, 0)), Some((0, 1, 0))]),
    ("brw-read-4k", [Some((0, 1, 0)), Some((0, 1, 0))]),
    ("brw-read-64k", [Some((0, 1, 0)), Some((0, 1, 0))]),
    ("brw-read-1m", [Some((0, 1, 0)), Some((0, 1, 0))]),
    ("brw-read-3976", [Some((0, 1, 0)), Some((0, 1, 0))]),
    ("brw-write-4k", [Some((4, 1, 0)), Some((0, 1, 0))]),
    ("brw-write-1m", [Some((2, 1, 0)), Some((0, 1, 0))]),
    ("brw-write-3984", [Some((2, 1, 0)), Some((0, 1, 0))]),
    ("peer-credits-8-42", [Some((0, 0, 0)), Some((0, 1, 0))]),
    ("keepalive", [Some((0, 0, 1)), Some((0, 1, 1))]),
    // The first host opens two connections, the node one.
    ("conns-per-peer-2", [None, Some((0, 2, 0))]),
    ("loss", [Some((6, 1, 0)), Some((0, 2, 0))]),
    // The second host dies and comes back.
    ("restart-killed", [Some((0, 1, 0)), Some((0, 2, 0))]),
];

#[test]
fn the_node_sends_what_each_captured_kernel_sent() {
    for (name, hosts) in TABLE {
        for (host, expected) in hosts.into_iter().enumerate() {
            let Some((credits, pings, noops)) = expected else {
                continue;
            };
            // The kernel refuses the first request of another incarnation, and ends the connection that stands. The node takes it, and ends
            // that one once the new one is established: anybody can send such a request.
            let answers = if (name, host) == ("restart-killed", 0) {
                vec![9]
            } else {
                Vec::new()
            };
            let expected = Differences {
                credits,
                pings,
                noops,
                answers,
                ..Differences::default()
            };
            check(name, host == 0, expected);
        }
    }
}

#[test]
fn odd_requests_are_answered_as_by_the_kernel() {
    let expected = Differences {
        // The kernel's threshold at depth 1 is 0: it gives back no credits in messages for that alone.
        noops: 2,
        // A depth of 0, with which the kernel can't send; version 1, which the node does not speak (83, 88); a source that is not the
        // packet's; another incarnation, which the kernel refuses once.
        answers: vec![46, 83, 88, 107, 135],
        ..Differences::default()
    };
    check("odd-requests", true, expected);
}

#[test]
fn odd_rejects_are_followed_as_by_the_kernel() {
    // After a reject of version 1 the kernel speaks that, and is rejected again.
    let expected = Differences {
        answers: vec![49],
        ..Differences::default()
    };
    check("odd-rejects", true, expected);
}

#[test]
fn odd_answers_are_judged_as_by_the_kernel() {
    check("odd-acks", true, Differences::default());
}

#[test]
fn odd_messages_are_answered_as_by_the_kernel() {
    let expected = Differences {
        // The kernel posts the buffer of a GET_REQ again only after its answer has left, so that it is a credit behind (22), has four to give
        // back where the node has three (42), and then fewer (46, 50).
        credits: 3,
        noops: 1,
        // Fourteen answers to pings, and a WRITE of one: the kernel has discovery switched off.
        pings: 15,
        // A message of version 1 amid a connection, which the kernel takes.
        closed: vec![101],
        // The kernel's fault: it leaves out the WRITE into a fragment that the data does not fill, before the frames 22, 28 and 215.
        writes: 3,
        ..Differences::default()
    };
    check("odd-messages", true, expected);
}

/// Three tests at once, each with 8 requests at a time, at a depth of 8. Which message carries a credit is a matter of time; but as many go
/// back as the kernel gives back, but for those of a connection that are still owed at the end, and a NOOP has those of the high water.
#[test]
fn credits_of_a_busy_connection_go_back_as_the_kernels() {
    const DEPTH: u64 = 8;
    for (is_first, messages) in [(true, 520), (false, 565)] {
        let mut played = played("credits-busy", is_first);
        let more = core::mem::take(&mut played.ours);
        let parsed = more.iter().map(|bytes| Message::parse(bytes).unwrap());
        let (noops, behind): (Vec<_>, Vec<_>) = parsed.partition(|message| message.body == Body::Noop);
        assert!(noops.iter().all(|noop| noop.credits == 4));
        // The kernel's are behind the end of the capture.
        assert!(behind.len() <= DEPTH as usize, "{behind:?}");
        let (ours, theirs) = played.given;
        assert!(ours.abs_diff(theirs) <= DEPTH, "{ours} credits, the kernel {theirs}");
        let expected = Differences {
            credits: played.differences.credits,
            noops: played.differences.noops,
            pings: 1,
            more: more.len(),
            writes: behind.len(),
            ..Differences::default()
        };
        assert_eq!(played.equal + expected.noops, messages);
        assert_eq!(played.differences, expected);
    }
}
