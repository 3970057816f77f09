//! The server, with clients by hand.

use core::time::Duration;

use roce_verbs::{
    RemoteAddr, SendOp,
    provider::{DeviceIx, Event},
    wr::PostError,
};
use rtrs::{
    Direction, errno,
    proto::{Imm, IoReply},
    server::{ServerConfig, request::Ticket},
};

use crate::{
    bed::{Bed, CHUNK, DEPTH, address, config},
    faulty::{Faulty, Posted},
    hand::{Client, name},
    host::KeyMode,
};

#[test]
fn a_session_is_opened_used_and_closed_with_each_kind_of_keys() {
    for always_invalidate in [true, false] {
        for keys in KeyMode::ALL {
            let config = ServerConfig {
                always_invalidate,
                ..config()
            };
            let mut bed = Bed::with(config, keys);
            let mut client = Client::new(1);
            client.open(&mut bed, "s1");
            assert_eq!(bed.news(), ["opened s1", "path up"]);
            let renewed = always_invalidate && keys != KeyMode::Static;
            assert_eq!(client.has_new_keys(&mut bed), renewed, "{keys:?}");
            for round in 0..3 {
                write_and_read(&mut bed, &mut client, renewed, round);
            }
            client.leave(&mut bed);
            assert_eq!(
                bed.news(),
                ["path down: the peer disconnected", "closed: the peer disconnected"]
            );
            bed.is_clean();
            bed.stop();
        }
    }
}

fn write_and_read(bed: &mut Bed, client: &mut Client, renewed: bool, round: u8) {
    let before = client.chunks[3].rkey;
    client.send_write(bed, 3, &[round; 100], b"where to");
    let request = bed.request();
    assert_eq!(
        (&request.header[..], request.direction),
        (&b"where to"[..], Direction::Write)
    );
    assert_eq!((request.connection, request.data_len), (1, 100));
    let mut data = [0; 100];
    let memory = bed.server.memory(request.key.session).unwrap().clone();
    memory.read(request.data_offset, &mut data).unwrap();
    assert_eq!(data, [round; 100]);
    bed.answer(request.key, 0);
    let ok = |invalidated| IoReply {
        msg_id: 3,
        errno: 0,
        invalidated,
    };
    assert_eq!(client.answers(bed, 1), [ok(false)]);

    client.send_read(bed, 3, 64, b"where from", true);
    let request = bed.request();
    assert_eq!((request.direction, request.data_len), (Direction::Read, 64));
    bed.server.write_data(request.key, 0, &[round + 1; 64]).unwrap();
    assert!(bed.server.write_data(request.key, 1, &[0; 64]).is_err());
    bed.answer(request.key, 0);
    assert!(bed.server.write_data(request.key, 0, &[0]).is_err(), "it is answered");
    assert_eq!(client.data(bed, 64), [round + 1; 64]);
    assert_eq!(client.answers(bed, 1), [ok(true)]);
    assert_eq!(client.chunks[3].rkey != before, renewed);
}

/// Nobody changes what the user reads, nor uses a chunk by its former key.
#[test]
fn a_chunk_is_closed_while_its_request_is_worked_on() {
    for keys in KeyMode::CLOSABLE {
        for answered in [false, true] {
            let mut bed = Bed::with(config(), keys);
            let client = Client::opened(&mut bed, 1, "s1");
            client.send_write(&mut bed, 2, b"data", b"header");
            let request = bed.request();
            assert!(client.write(&mut bed, 1, 0, b"fine"), "other chunks are open");
            if answered {
                bed.answer(request.key, 0);
            }
            assert!(!client.write(&mut bed, 2, 0, b"evil"), "{keys:?}");
            if !answered {
                let mut data = [0; 4];
                let memory = bed.server.memory(request.key.session).unwrap();
                memory.read(request.data_offset, &mut data).unwrap();
                assert_eq!(&data, b"data");
                bed.answer(request.key, 0);
            }
            // Where nothing says why the queue pair has failed, the server gives the client a moment to leave.
            bed.wait(Duration::from_secs(3));
            assert_eq!(bed.news()[0], "path down: the peer used a key that it had no right to");
            assert_eq!(bed.server.counters().access_errors, 1, "{keys:?}");
            bed.is_clean();
        }
    }
}

#[test]
fn the_user_answers_once_and_by_errno() {
    let mut bed = Bed::new(config());
    let mut client = Client::opened(&mut bed, 1, "s1");
    let mut answer = |bed: &mut Bed, errno| {
        client.send_read(bed, 0, 64, b"h", true);
        let request = bed.request();
        bed.server.write_data(request.key, 0, &[errno as u8 | 1; 64]).unwrap();
        bed.answer(request.key, errno);
        bed.answer(request.key, 0);
        let answers = client.answers(bed, 1);
        assert_eq!(answers.len(), 1);
        assert!(answers[0].invalidated, "a read that fails ends its key all the same");
        (answers[0].errno, client.data(bed, 64)[0] == errno as u8 | 1)
    };
    assert_eq!(answer(&mut bed, 28), (28, false));
    assert_eq!(answer(&mut bed, -30), (30, false));
    assert_eq!(answer(&mut bed, 100_000), (5, false), "what does not fit");
    assert_eq!(answer(&mut bed, 0), (0, true));
    assert_eq!(bed.server.sessions()[0].requests, 0);
}

/// A client that sends as soon as it has its answer finds a receive.
#[test]
fn receives_are_back_before_answers_leave() {
    let mut bed = Bed::new(config());
    let client = Client::opened(&mut bed, 1, "s1");
    (0..DEPTH as u16).for_each(|chunk| client.send_write(&mut bed, chunk, b"data", b"header"));
    let keys: Vec<_> = bed.requests().iter().map(|r| r.key).collect();
    // The turn in which the requests are answered brings a message over each connection.
    for cid in [0, 1] {
        let payload = client.layout(&mut bed).pack(0, 10);
        let imm = if cid == 0 { Imm::HbMsg } else { Imm::IoReq(payload) };
        bed.answer_later(keys[usize::from(cid)], 0);
        bed.host.fabric.log = Some(Vec::new());
        client.imm(&mut bed, cid, imm.encode());
        let log = bed.host.fabric.log.take().unwrap();
        let back = log.iter().position(|posted| *posted == Posted::Recvs(1));
        let sent = log.iter().position(|posted| matches!(posted, Posted::Send { .. }));
        assert!(back.is_some() && back < sent, "{cid}: {log:?}");
    }
}

#[test]
fn answers_of_a_turn_leave_in_one_call() {
    let mut bed = Bed::new(config());
    let client = Client::opened(&mut bed, 1, "s1");
    for chunk in 0..6 {
        client.send_read(&mut bed, chunk, 512, b"header", true);
    }
    let keys: Vec<_> = bed.requests().iter().map(|r| r.key).collect();
    bed.host.fabric.log = Some(Vec::new());
    bed.answer_all(&keys, 0);
    let log = bed.host.fabric.log.take().unwrap().into_iter();
    let calls = log.filter_map(|posted| match posted {
        Posted::Send { call, op } => Some((call, op.code() as u32)),
        Posted::Recvs(_) => None,
    });
    let calls: Vec<_> = calls.collect();
    assert_eq!(calls.len(), 18);
    assert!(calls.iter().all(|(call, _)| *call == calls[0].0), "{calls:?}");
    assert!(
        calls.chunks(6).all(|kind| kind.iter().all(|(_, op)| *op == kind[0].1)),
        "{calls:?}"
    );
}

#[test]
fn many_more_answers_than_the_send_queue_holds() {
    for keys in KeyMode::ALL {
        let config = ServerConfig {
            queue_depth: 600,
            ..config()
        };
        let mut bed = Bed::with(config, keys);
        let mut client = Client::opened(&mut bed, 1, "deep");
        for _ in 0..3 {
            for chunk in 0..600 {
                client.send_read(&mut bed, chunk, 8, b"h", true);
            }
            let requests: Vec<_> = bed.requests().iter().map(|r| r.key).collect();
            assert_eq!(requests.len(), 600, "{keys:?}");
            // No acknowledgement comes for a while.
            bed.cut = true;
            bed.answer_all(&requests, 0);
            let mut answers = client.answers(&mut bed, 1).len();
            assert!(answers < 600, "all fit");
            bed.cut = false;
            bed.wait(Duration::from_secs(1));
            answers += client.answers(&mut bed, 1).len();
            assert_eq!(answers, 600, "{keys:?}");
        }
    }
}

#[test]
fn sessions_are_listed_with_what_they_are() {
    let mut bed = Bed::new(config());
    let mut client = Client::new(1);
    client.connect(&mut bed, 0).unwrap();
    let listed = bed.server.sessions();
    assert_eq!(
        (listed.len(), listed[0].name.as_str(), listed[0].connections),
        (1, "", 0)
    );
    assert_eq!((listed[0].uuid, listed[0].peer.ip()), (client.session, client.peer));
    client.connect(&mut bed, 1).unwrap();
    client.inform(&mut bed, &name("s1"));
    let listed = &bed.server.sessions()[0];
    assert_eq!((listed.name.as_str(), listed.connections, listed.paths), ("s1", 2, 1));
}

#[test]
fn memory_is_asked_for_when_the_client_has_proved_its_address() {
    let mut bed = Bed::new(config());
    bed.hold_memory = true;
    let mut client = Client::new(1);
    client.ask(&mut bed, 0, client.request(0)).unwrap();
    assert!(bed.outputs.is_empty() && bed.server.sessions().is_empty());
    assert_eq!((bed.host.usage().mrs, bed.host.usage().qps), (0, 1));
    client.establish(&mut bed);
    assert_eq!(bed.outputs.len(), 1);
    // The handshake goes on, and is answered when there are chunks.
    client.connect(&mut bed, 1).unwrap();
    client.inform(&mut bed, &name("s1"));
    assert!(!client.informed(&mut bed));
    assert!(bed.server.memory(bed.session()).is_none());
    bed.memory(true);
    assert!(client.informed(&mut bed));
    assert_eq!(bed.news(), ["opened s1", "path up"]);
    assert_eq!(
        bed.server.memory(bed.session()).unwrap().len(),
        (DEPTH * CHUNK) as usize
    );
}

#[test]
fn a_session_without_memory_ends_and_leaves_nothing() {
    let mut bed = Bed::new(config());
    bed.hold_memory = true;
    let mut client = Client::new(1);
    client.connect_all(&mut bed);
    client.inform(&mut bed, &name("s1"));
    bed.memory(false);
    assert!(client.is_gone(&bed));
    assert!(bed.news().is_empty(), "nobody has heard of it");
    assert_eq!(bed.server.counters().no_resources, 1);
    bed.is_clean();
    bed.hold_memory = false;
    Client::opened(&mut bed, 1, "s1");
}

#[test]
fn memory_that_comes_too_late_or_not_at_all_is_no_harm() {
    let mut bed = Bed::new(config());
    bed.hold_memory = true;
    let mut client = Client::new(1);
    client.connect_all(&mut bed);
    client.inform(&mut bed, &name("s1"));
    // It never comes: the handshake's time runs out.
    bed.wait(Duration::from_secs(31));
    assert!(client.is_gone(&bed));
    assert_eq!(bed.server.counters().handshakes_lost, 1);
    let ticket = bed.memory(true);
    bed.is_clean();
    for ticket in [ticket, Ticket(77)] {
        bed.call(|server, cx| server.ready(cx, ticket, roce_verbs::mem::Pages::allocate(4096)));
    }
    assert!(bed.outputs.is_empty());
    // The client leaves before there is any.
    let client = &mut Client::new(2);
    client.connect(&mut bed, 0).unwrap();
    client.leave(&mut bed);
    bed.is_clean();
    bed.memory(true);
    bed.is_clean();
}

#[test]
fn too_little_memory_is_none() {
    let mut bed = Bed::new(config());
    bed.hold_memory = true;
    let mut client = Client::new(1);
    client.connect(&mut bed, 0).unwrap();
    let pages = roce_verbs::mem::Pages::allocate((DEPTH * CHUNK) as usize - 4096);
    bed.call(|server, cx| server.ready(cx, Ticket(1), pages));
    assert!(client.is_gone(&bed));
    assert_eq!(bed.server.counters().no_resources, 1);
    bed.outputs.clear();
    bed.is_clean();
}

/// The memory stays as long as the user works in it.
#[test]
fn a_session_that_is_closed_waits_for_its_requests() {
    let mut bed = Bed::new(config());
    let client = Client::opened(&mut bed, 1, "s1");
    client.send_write(&mut bed, 0, b"data", b"h");
    client.send_read(&mut bed, 1, 64, b"h", true);
    let requests = bed.requests();
    let session = bed.session();
    assert!(bed.call(|server, cx| server.close_session(cx, session)));
    assert!(bed.news().is_empty());
    assert!(client.is_gone(&bed));
    bed.server.write_data(requests[1].key, 0, b"late").unwrap();
    bed.answer(requests[1].key, 0);
    assert!(bed.server.memory(session).is_some());
    bed.answer(requests[0].key, 5);
    assert_eq!(bed.news(), ["path down: closed", "closed: closed"]);
    assert!(bed.server.memory(session).is_none());
    assert!(!bed.call(|server, cx| server.close_session(cx, session)));
    bed.answer(requests[0].key, 0);
    bed.is_clean();
}

#[test]
fn nothing_is_given_back_before_the_queue_pairs_are_drained() {
    let mut bed = Bed::new(config());
    bed.host.fabric.hold_drains = true;
    let client = Client::opened(&mut bed, 1, "s1");
    client.send_write(&mut bed, 0, b"data", b"h");
    let request = bed.request();
    let before = bed.host.usage();
    client.leave(&mut bed);
    bed.answer(request.key, 0);
    assert_eq!(bed.host.usage(), before);
    assert!(bed.news().is_empty());
    let qps = bed.host.fabric.draining.clone();
    assert_eq!(qps.len(), 2);
    bed.host.fabric.finish_drain(qps[1]);
    bed.turn();
    assert_eq!(bed.host.usage(), before);
    bed.finish_drains();
    assert_eq!(bed.news().len(), 2);
    bed.is_clean();
}

#[test]
fn stopping_ends_everything_and_waits_for_the_user() {
    let mut bed = Bed::new(config());
    let client = Client::opened(&mut bed, 1, "s1");
    Client::new(2).ask(&mut bed, 0, Client::new(2).request(0)).unwrap();
    client.send_write(&mut bed, 0, b"data", b"h");
    let request = bed.request();
    bed.cut = true;
    let mut late = Client::new(3);
    late.ask(&mut bed, 0, late.request(0)).unwrap();
    bed.cut = false;
    bed.carry_to_server();
    bed.call(|server, cx| server.stop(cx));
    assert!(!bed.server.is_idle());
    bed.answer(request.key, 0);
    assert_eq!(bed.news().len(), 2);
    bed.stop();
}

#[test]
fn a_client_that_is_silent_is_asked_and_then_given_up() {
    let mut bed = Bed::new(config());
    let client = Client::opened(&mut bed, 1, "s1");
    // It answers, three times.
    for _ in 0..3 {
        bed.wait(Duration::from_secs(5));
        assert_eq!(client.imms(&mut bed, 0), [Imm::HbMsg]);
        client.imm(&mut bed, 0, Imm::HbAck.encode());
    }
    bed.wait(Duration::from_secs(34));
    assert_eq!(client.imms(&mut bed, 0), [Imm::HbMsg], "one question is enough");
    assert!(bed.news().is_empty());
    bed.wait(Duration::from_secs(1));
    assert_eq!(bed.news()[0], "path down: no heartbeat within 35s");
    assert_eq!(bed.server.counters().heartbeats_lost, 1);
    bed.is_clean();
}

#[test]
fn who_asks_without_end_gets_few_answers() {
    let mut bed = Bed::new(config());
    let client = Client::opened(&mut bed, 1, "s1");
    let ask = SendOp::WriteWithImm(RemoteAddr::default(), Imm::HbMsg.encode());
    let mut asked = |count: usize| {
        (0..count).for_each(|_| client.post(&mut bed, 0, ask, b""));
        // All have come when the server has its turn.
        while bed.carry_to_server() {}
        bed.turn();
        client.imms(&mut bed, 0).len()
    };
    assert_eq!(
        asked(20),
        20,
        "who measures round trips needs an answer to each question"
    );
    let acks = asked(100);
    assert!((1..=64).contains(&acks), "{acks} acknowledgements");
}

#[test]
fn flushed_receives_wait_for_the_reason() {
    let mut bed = Bed::new(config());
    let breaks = |bed: &mut Bed| {
        let last = *bed.host.fabric.accepted.last().unwrap();
        bed.break_qp(last);
        bed.turn();
        assert!(bed.news().is_empty());
    };
    // It comes.
    let client = Client::opened(&mut bed, 1, "s1");
    breaks(&mut bed);
    client.leave(&mut bed);
    assert_eq!(bed.news()[0], "path down: the peer disconnected");
    // It does not.
    Client::opened(&mut bed, 2, "s2");
    breaks(&mut bed);
    bed.wait(Duration::from_millis(1900));
    assert!(bed.news().is_empty());
    bed.wait(Duration::from_millis(200));
    assert_eq!(bed.news()[0], "path down: the queue pair failed");
    // There is one: the others are of no account.
    let client = Client::opened(&mut bed, 3, "s3");
    client.send(&mut bed, 1, SendOp::Send, &[0; 100]);
    assert_eq!(bed.news()[0], "path down: receive failed: LocalLengthError");
    assert_eq!(bed.server.counters().transfer_errors, 2);
    bed.is_clean();
}

#[test]
fn what_cant_be_posted_ends_the_path() {
    let mut bed = Bed::new(config());
    let client = Client::opened(&mut bed, 1, "s1");
    client.send_write(&mut bed, 0, b"data", b"h");
    let request = bed.request();
    bed.host.fabric.faults.post = Some(PostError::Length(9));
    bed.answer(request.key, 0);
    assert!(client.is_gone(&bed));
    assert_eq!(bed.server.counters().transfer_errors, 1);
    bed.is_clean();
}

#[test]
fn a_device_without_room_for_a_path_leaves_nothing_behind() {
    type Fault = fn(&mut Faulty, usize);
    let faults: [(Fault, usize); 3] = [
        (|p, n| p.faults.keys = Some(n), DEPTH as usize),
        (|p, n| p.faults.registrations = Some(n), 2),
        (|p, n| p.faults.qps = Some(n), 2),
    ];
    for (i, (fault, enough)) in faults.into_iter().enumerate() {
        let mut bed = Bed::new(config());
        for n in 0..enough {
            fault(&mut bed.host.fabric, n);
            let mut client = Client::new(1);
            let refused = (0..2).find_map(|cid| client.connect(&mut bed, cid).err());
            assert!(client.is_gone(&bed), "fault {i}, {n}");
            assert!(
                refused.is_none_or(|e| [errno::ENOMEM, errno::ECONNRESET].contains(&e)),
                "{refused:?}"
            );
            bed.is_clean();
            assert!(bed.news().is_empty());
        }
        fault(&mut bed.host.fabric, enough);
        Client::opened(&mut bed, 1, "s1");
    }
}

#[test]
fn an_accept_that_fails_is_a_refusal() {
    let mut bed = Bed::new(config());
    bed.host.fabric.faults.accept = true;
    assert_eq!(Client::new(1).connect(&mut bed, 0), Err(errno::ENOMEM));
    bed.is_clean();
    let mut client = Client::new(1);
    client.connect(&mut bed, 0).unwrap();
    bed.host.fabric.faults.accept = true;
    assert_eq!(client.connect(&mut bed, 1), Err(errno::ENOMEM));
    assert!(client.is_gone(&bed));
    bed.is_clean();
}

#[test]
fn paths_through_a_device_that_is_gone_end() {
    let mut bed = Bed::over(config(), KeyMode::Instant, 2);
    let mut first = Client::opened(&mut bed, 1, "s1");
    let mut second = first.second_path(2);
    second.local.set_ip(address(1));
    second.open(&mut bed, "s1");
    assert_eq!(bed.news(), ["path up"]);
    assert_eq!(bed.host.usage().pds, 2);
    bed.call(|server, cx| server.event(cx, &Event::DeviceRemoved(DeviceIx(1))));
    assert_eq!(bed.news(), ["path down: connection failed: the device is gone"]);
    assert!(second.is_gone(&bed));
    assert_eq!(bed.host.usage().pds, 1);
    write_and_read(&mut bed, &mut first, true, 0);
}

/// The request that the lost path has brought is still with the user when the client repeats it by another.
#[test]
fn a_request_that_comes_again_by_another_path_waits_for_the_first() {
    let mut bed = Bed::new(config());
    let lost = Client::opened(&mut bed, 1, "s1");
    let mut alive = lost.second_path(2);
    alive.open(&mut bed, "s1");
    bed.outputs.clear();
    lost.send_write(&mut bed, 4, b"data", b"first");
    let first = bed.request();
    lost.leave(&mut bed);
    assert!(bed.news().is_empty(), "the user has a request of it");
    alive.send_write(&mut bed, 4, b"data", b"again");
    assert!(bed.requests().is_empty());
    assert_eq!(bed.server.counters().requests_parked, 1);
    alive.send_write(&mut bed, 5, b"data", b"other");
    let other = bed.request();
    assert_eq!(&other.header[..], b"other");
    bed.answer(first.key, 0);
    let again = bed.requests();
    assert_eq!((again.len(), &again[0].header[..]), (1, &b"again"[..]));
    assert_ne!(again[0].key, first.key);
    assert_eq!(bed.news(), ["path down: the peer disconnected"]);
    bed.answer_all(&[again[0].key, other.key], 0);
    assert_eq!(alive.answers(&mut bed, 1).len(), 2);
    alive.leave(&mut bed);
    bed.is_clean();
}

#[test]
fn a_chunk_is_not_handed_on_before_the_lost_path_is_drained() {
    let mut bed = Bed::new(config());
    let lost = Client::opened(&mut bed, 1, "s1");
    let mut alive = lost.second_path(2);
    alive.open(&mut bed, "s1");
    bed.outputs.clear();
    bed.host.fabric.hold_drains = true;
    lost.send_write(&mut bed, 4, b"data", b"first");
    let first = bed.request();
    lost.leave(&mut bed);
    alive.send_write(&mut bed, 4, b"data", b"again");
    bed.answer(first.key, 0);
    assert!(bed.requests().is_empty());
    bed.finish_drains();
    assert_eq!(&bed.request().header[..], b"again");
}

/// As the kernel's client does, whose heartbeat begins before it is told of the chunks.
#[test]
fn a_client_that_waits_to_be_let_in_may_ask_for_signs_of_life() {
    let mut bed = Bed::new(config());
    let lost = Client::opened(&mut bed, 1, "s1");
    lost.send_write(&mut bed, 4, b"data", b"first");
    let first = bed.request();
    lost.leave(&mut bed);
    let mut next = lost.second_path(2);
    next.connect_all(&mut bed);
    next.inform(&mut bed, &name("s1"));
    let acks = |bed: &mut Bed| next.messages(bed, 0).len();
    for _ in 0..3 {
        next.imm(&mut bed, 0, Imm::HbMsg.encode());
        assert_eq!(acks(&mut bed), 1);
        next.imm(&mut bed, 0, Imm::HbAck.encode());
        assert_eq!(acks(&mut bed), 0);
    }
    bed.answer(first.key, 0);
    assert!(next.informed(&mut bed));
}

/// All paths were lost: the client may reuse every chunk, but the user is still at work in one.
#[test]
fn a_new_path_is_let_in_when_the_requests_of_lost_paths_are_answered() {
    let mut bed = Bed::new(config());
    let lost = Client::opened(&mut bed, 1, "s1");
    lost.send_write(&mut bed, 4, b"data", b"first");
    let first = bed.request();
    lost.leave(&mut bed);
    let mut next = lost.second_path(2);
    next.connect_all(&mut bed);
    next.inform(&mut bed, &name("s1"));
    assert!(!next.informed(&mut bed));
    assert!(bed.news().is_empty());
    assert_eq!(bed.server.counters().paths_held, 1);
    bed.answer(first.key, 0);
    assert!(next.informed(&mut bed));
    assert_eq!(bed.news(), ["path down: the peer disconnected", "path up"]);
    write_and_read(&mut bed, &mut next, true, 1);
}

/// The client may not know yet that its only path is down when another one comes up: it goes on with what it has open, which would
/// be closed with the session.
#[test]
fn a_session_outlives_its_last_path_while_another_is_being_connected() {
    let mut bed = Bed::new(config());
    let first = Client::opened(&mut bed, 1, "s1");
    let mut second = first.second_path(2);
    second.connect(&mut bed, 0).unwrap();
    bed.outputs.clear();
    first.leave(&mut bed);
    assert_eq!(bed.news(), ["path down: the peer disconnected"]);
    second.connect(&mut bed, 1).unwrap();
    second.inform(&mut bed, &name("s1"));
    assert!(second.informed(&mut bed));
    assert_eq!(bed.news(), ["path up"]);
    write_and_read(&mut bed, &mut second, true, 1);
    bed.outputs.clear();
    // One that is never up keeps it only until its handshake is given up.
    let mut third = second.second_path(3);
    third.connect(&mut bed, 0).unwrap();
    second.leave(&mut bed);
    bed.wait(Duration::from_secs(31));
    let news = bed.news();
    assert!(
        news[0].starts_with("path down") && news[1].starts_with("closed"),
        "{news:?}"
    );
    bed.is_clean();
}

#[test]
fn a_new_path_that_is_not_let_in_gives_up_in_time() {
    let mut bed = Bed::new(config());
    let lost = Client::opened(&mut bed, 1, "s1");
    lost.send_write(&mut bed, 4, b"data", b"first");
    let first = bed.request();
    lost.leave(&mut bed);
    let mut next = lost.second_path(2);
    next.connect_all(&mut bed);
    next.inform(&mut bed, &name("s1"));
    bed.wait(Duration::from_secs(31));
    assert!(next.is_gone(&bed));
    assert_eq!(bed.server.counters().handshakes_lost, 1);
    bed.answer(first.key, 0);
    bed.is_clean();
}

#[test]
fn a_parked_request_goes_with_its_path() {
    let mut bed = Bed::new(config());
    let busy = Client::opened(&mut bed, 1, "s1");
    let mut waits = busy.second_path(2);
    waits.open(&mut bed, "s1");
    bed.outputs.clear();
    busy.send_write(&mut bed, 4, b"data", b"first");
    let first = bed.request();
    waits.send_write(&mut bed, 4, b"data", b"again");
    // It takes its time to go.
    bed.host.fabric.hold_drains = true;
    waits.leave(&mut bed);
    bed.answer(first.key, 0);
    assert!(bed.outputs.is_empty());
    bed.host.fabric.hold_drains = false;
    bed.finish_drains();
    assert_eq!(bed.news(), ["path down: the peer disconnected"]);
    bed.stop();
}

#[test]
fn a_name_is_one_sessions_and_free_when_that_is_being_closed() {
    let mut bed = Bed::new(config());
    let first = Client::opened(&mut bed, 1, "db");
    let mut second = Client::new(2);
    second.connect_all(&mut bed);
    second.inform(&mut bed, &name("db"));
    assert!(second.is_gone(&bed));
    first.send_write(&mut bed, 0, b"data", b"h");
    let request = bed.request();
    first.leave(&mut bed);
    let mut third = Client::new(3);
    third.open(&mut bed, "db");
    assert_eq!(bed.news(), ["opened db", "path up"]);
    bed.answer(request.key, 0);
    assert_eq!(bed.news().len(), 2);
}

#[test]
fn a_second_path_may_have_another_name_and_the_first_stays() {
    let mut bed = Bed::new(config());
    let first = Client::opened(&mut bed, 1, "db");
    let mut second = first.second_path(2);
    second.open(&mut bed, "other");
    assert_eq!(bed.server.sessions()[0].name, "db");
    assert_eq!(bed.server.sessions()[0].paths, 2);
    assert_eq!(bed.news(), ["path up"]);
    first.leave(&mut bed);
    second.leave(&mut bed);
    let news = bed.news();
    assert_eq!(news.len(), 3, "{news:?}");
    assert!(news[2].starts_with("closed"));
}
