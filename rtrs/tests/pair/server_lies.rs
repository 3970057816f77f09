//! Clients that break the protocol, or that are not let in: the path ends, is counted, and nobody else notices.

use core::{cell::RefCell, net::IpAddr, time::Duration};

use proptest::{prelude::*, test_runner::TestRunner};
use roce_verbs::SendOp;
use rtrs::{
    errno,
    proto::{Imm, IoReply, MsgFlags, RdmaRead, RdmaWrite, RkeyRsp, SgDesc},
    server::ServerConfig,
};
use zerocopy::IntoBytes;

use crate::{
    bed::{Bed, CHUNK, DEPTH, config, fixed_keys},
    hand::{Client, name},
    host::KeyMode,
};

fn still_serves(bed: &mut Bed) {
    assert!(bed.server.sessions().is_empty());
    bed.is_clean();
    let mut client = Client::opened(bed, 200, "good");
    client.send_write(bed, 0, b"all is well", b"h");
    let request = bed.request();
    bed.answer(request.key, 0);
    assert_eq!(client.answers(bed, 1).len(), 1);
    client.leave(bed);
    bed.outputs.clear();
    bed.is_clean();
}

/// A read request with its descriptors.
fn read_message(usr_len: u16, desc: &[SgDesc]) -> Vec<u8> {
    [
        RdmaRead::new(usr_len, MsgFlags::NEED_INVAL, desc.len() as u16).as_bytes(),
        desc.as_bytes(),
    ]
    .concat()
}

/// Bytes in a chunk, and the offset that is announced.
fn io(client: &Client, bed: &mut Bed, chunk: u16, at: u32, bytes: &[u8], offset: u32) {
    assert!(client.write(bed, chunk, at, bytes));
    client.announce(bed, chunk, offset);
}

type Case = (&'static str, fn(&Client, &mut Bed));

/// What a client with an open session can do wrong.
const AFTER_HANDSHAKE: &[Case] = &[
    ("unknown immediate type", |c, bed| c.imm(bed, 1, 0x5000_0000)),
    ("an answer from the client", |c, bed| {
        c.imm(bed, 1, Imm::IoRsp(IoReply::new(0, 0, false)).encode());
    }),
    ("a heartbeat on an I/O connection", |c, bed| {
        c.imm(bed, 1, Imm::HbMsg.encode())
    }),
    ("an acknowledged heartbeat there", |c, bed| {
        c.imm(bed, 1, Imm::HbAck.encode())
    }),
    ("an offset behind the chunk", |c, bed| {
        c.imm(bed, 1, Imm::IoReq(CHUNK + 1).encode());
    }),
    ("an unknown message", |c, bed| io(c, bed, 0, 0, &9u16.to_le_bytes(), 0)),
    ("a key response", |c, bed| {
        io(c, bed, 0, 0, RkeyRsp::new(0, 1).as_bytes(), 0)
    }),
    ("a message cut off by the chunk's end", |c, bed| {
        io(c, bed, 0, CHUNK - 1, &[2], CHUNK - 1);
    }),
    ("a read cut off by the chunk's end", |c, bed| {
        let message = read_message(0, &[SgDesc::new(1, 2, 3)]);
        io(c, bed, 0, CHUNK - 8, &message[..8], CHUNK - 8);
    }),
    ("a header longer than what lies before", |c, bed| {
        io(c, bed, 3, 0, RdmaWrite::new(100).as_bytes(), 0);
    }),
    ("a header longer than any", |c, bed| {
        io(c, bed, 3, 6000, RdmaWrite::new(5000).as_bytes(), 6000);
    }),
    ("two descriptors", |c, bed| {
        io(c, bed, 1, 1024, &read_message(0, &[SgDesc::new(1, 2, 512); 2]), 1024);
    }),
    ("a read of nothing", |c, bed| {
        io(c, bed, 1, 512, &read_message(0, &[SgDesc::new(1, 2, 0)]), 512);
    }),
    ("a read of more than was set aside", |c, bed| {
        io(c, bed, 1, 512, &read_message(0, &[SgDesc::new(1, 2, 513)]), 512);
    }),
    ("two requests in one chunk", |c, bed| {
        c.send_write(bed, 2, b"data", b"header");
        c.announce(bed, 2, 10);
    }),
    ("a SEND on an I/O connection", |c, bed| {
        c.send(bed, 1, SendOp::Send, b"hello");
    }),
    ("a SEND with immediate data on an I/O connection", |c, bed| {
        c.send(bed, 1, SendOp::SendWithImm(Imm::IoReq(0).encode()), b"");
    }),
    ("a second information request", |c, bed| {
        c.inform(bed, &name("other"));
    }),
];

fn cases(config: ServerConfig, keys: KeyMode) {
    let mut bed = Bed::with(config, keys);
    for (i, (what, bad)) in AFTER_HANDSHAKE.iter().enumerate() {
        let client = Client::opened(&mut bed, 1, "bad");
        bad(&client, &mut bed);
        // A request that the user holds keeps the session until it is answered.
        for request in bed.requests() {
            bed.answer(request.key, 0);
        }
        assert!(client.is_gone(&bed), "{what}");
        let counters = bed.server.counters();
        let broken = counters.protocol_errors + counters.transfer_errors;
        assert_eq!(broken, i as u64 + 1, "{what}: {counters:?}");
        let news = bed.news();
        assert_eq!(news.len(), 2, "{what}: {news:?}");
    }
    assert_eq!(bed.server.counters().sessions_opened, AFTER_HANDSHAKE.len() as u64);
    still_serves(&mut bed);
}

#[test]
fn a_client_that_breaks_the_protocol_with_new_keys() {
    for keys in KeyMode::CLOSABLE {
        cases(config(), keys);
    }
}

#[test]
fn a_client_that_breaks_the_protocol_with_fixed_keys() {
    cases(fixed_keys(), KeyMode::Instant);
}

#[test]
fn keys_open_nothing_to_other_sessions() {
    let mut bed = Bed::new(config());
    let mut mine = Client::opened(&mut bed, 1, "mine");
    let mut other = Client::opened(&mut bed, 2, "other");
    other.chunks.clone_from(&mine.chunks);
    assert!(!other.write(&mut bed, 0, 0, b"evil"));
    other.leave(&mut bed);
    assert!(other.is_gone(&bed));
    assert_eq!(bed.news()[0], "path down: the peer used a key that it had no right to");
    assert_eq!(bed.server.counters().access_errors, 1);
    mine.send_write(&mut bed, 0, b"fine", b"h");
    let request = bed.request();
    bed.answer(request.key, 0);
    assert_eq!(mine.answers(&mut bed, 1).len(), 1);
    mine.leave(&mut bed);
    bed.outputs.clear();
    still_serves(&mut bed);
}

#[test]
fn whoever_tries_keys_again_and_again_has_to_wait() {
    let mut bed = Bed::new(config());
    let mut refused = 0;
    for _ in 0..12 {
        let mut client = Client::new(1);
        if let Err(errno) = client.connect(&mut bed, 0) {
            assert_eq!(errno, errno::EBUSY);
            refused += 1;
            continue;
        }
        client.connect(&mut bed, 1).unwrap();
        client.inform(&mut bed, &name("bad"));
        assert!(client.informed(&mut bed));
        assert!(!client.write_by(&mut bed, 0, 0, b"evil", 0xff));
        client.leave(&mut bed);
    }
    assert!(refused > 0, "nothing slows it down");
    let counters = bed.server.counters();
    assert_eq!(
        (counters.access_errors, counters.refused_slowed_down),
        (12 - refused, refused)
    );
    // Others don't have to.
    Client::opened(&mut bed, 2, "other");
}

#[test]
fn connection_requests_that_can_not_be() {
    let mut bed = Bed::new(ServerConfig {
        max_connections: 5,
        ..config()
    });
    let refused = |bed: &mut Bed, spoil: &dyn Fn(&mut Vec<u8>)| {
        let mut client = Client::new(1);
        let mut bytes = client.request(0);
        spoil(&mut bytes);
        client.ask(bed, 0, bytes).unwrap_err()
    };
    assert_eq!(refused(&mut bed, &|b| b[2] = 0), errno::ECONNRESET, "magic");
    assert_eq!(refused(&mut bed, &|b| b[5] = 9), errno::ECONNRESET, "version");
    assert_eq!(
        refused(&mut bed, &|b| b[6] = 2),
        errno::ECONNRESET,
        "number above the count"
    );
    assert_eq!(refused(&mut bed, &|b| b[8] = 6), errno::ECONNRESET, "too many");
    assert_eq!(refused(&mut bed, &|b| b[8] = 1), errno::ECONNRESET, "no I/O connection");
    assert_eq!(
        refused(&mut bed, &|b| b[44] = 0),
        errno::ENXIO,
        "not the first, but no session"
    );
    assert_eq!(refused(&mut bed, &Vec::clear), errno::ECONNRESET, "nothing");
    bed.is_clean();

    let mut client = Client::new(1);
    client.connections = 3;
    client.connect(&mut bed, 0).unwrap();
    assert_eq!(
        client.clone().connect(&mut bed, 0),
        Err(errno::ECONNRESET),
        "the same again"
    );
    let mut other = Client {
        connections: 4,
        ..client.clone()
    };
    assert_eq!(other.connect(&mut bed, 1), Err(errno::ECONNRESET), "another count");
    let mut second = Client {
        session: client.session,
        peer: client.peer,
        ..Client::new(2)
    };
    assert_eq!(
        second.connect(&mut bed, 0),
        Err(errno::EEXIST),
        "between the same addresses"
    );
    let mut thief = Client {
        session: client.session,
        path: client.path,
        ..Client::new(2)
    };
    assert_eq!(thief.connect(&mut bed, 1), Err(errno::ECONNRESET), "from elsewhere");
    client.connect(&mut bed, 2).unwrap();
    client.connect(&mut bed, 1).unwrap();
    client.inform(&mut bed, &name("s1"));
    assert!(client.informed(&mut bed), "in any order");
    assert_eq!(
        client.clone().connect(&mut bed, 1),
        Err(errno::ECONNRESET),
        "after the handshake"
    );
    let counters = bed.server.counters();
    assert_eq!((counters.connections_refused, counters.refused_connections), (12, 1));
    assert!(!client.is_gone(&bed));
}

#[test]
fn handshakes_that_go_wrong() {
    let mut bed = Bed::new(config());
    let good = name("s1");
    let spoilt = |at: usize, value: u8| {
        let mut b = good.clone();
        b[at] = value;
        b
    };
    for (what, bytes) in [
        ("too short", good[..100].to_vec()),
        ("another type", spoilt(0, 1)),
        ("a slash in the name", spoilt(3, b'/')),
        ("no name", spoilt(2, 0)),
        ("a name without end", [&good[..2], &[b'x'; 255], &good[257..]].concat()),
    ] {
        let mut client = Client::new(1);
        client.connect_all(&mut bed);
        client.inform(&mut bed, &bytes);
        assert!(client.is_gone(&bed), "{what}");
    }
    let mut client = Client::new(1);
    client.connect(&mut bed, 0).unwrap();
    client.inform(&mut bed, &good);
    assert!(client.is_gone(&bed), "before all connections are there");
    let mut client = Client::new(1);
    client.connect_all(&mut bed);
    client.imm(&mut bed, 1, Imm::IoReq(0).encode());
    assert!(client.is_gone(&bed), "a request before the handshake is done");
    let mut client = Client::new(1);
    client.connect_all(&mut bed);
    client.imm(&mut bed, 0, Imm::HbMsg.encode());
    assert!(client.is_gone(&bed), "an RDMA WRITE instead of the information request");
    let counters = bed.server.counters();
    assert_eq!((counters.sessions_opened, counters.protocol_errors), (0, 8));
    assert!(bed.news().is_empty());
    still_serves(&mut bed);
}

#[test]
fn handshakes_that_are_not_finished_end() {
    let mut bed = Bed::new(ServerConfig {
        handshake_timeout: Duration::from_secs(3),
        ..config()
    });
    let mut half_open = Client::new(1);
    half_open.ask(&mut bed, 0, half_open.request(0)).unwrap();
    let mut opening = Client::new(2);
    opening.connect(&mut bed, 0).unwrap();
    // However many connections it makes on the way.
    let mut slow = Client {
        connections: 60,
        ..Client::new(3)
    };
    for cid in 0..29 {
        slow.connect(&mut bed, cid).unwrap();
        bed.wait(Duration::from_millis(99));
    }
    assert!([&half_open, &opening, &slow].iter().all(|client| !client.is_gone(&bed)));
    bed.wait(Duration::from_millis(200));
    // A client whose address is not proved is not told.
    assert!(opening.is_gone(&bed) && slow.is_gone(&bed));
    assert_eq!(bed.server.counters().handshakes_lost, 3);
    still_serves(&mut bed);
}

/// Requests that come before connection 0 is known to stand, as its last message was lost.
#[test]
fn further_connections_wait_for_the_first() {
    let mut bed = Bed::new(config());
    let mut client = Client::new(1);
    client.connections = 3;
    client.ask(&mut bed, 0, client.request(0)).unwrap();
    for cid in [1, 2] {
        client.ask(&mut bed, cid, client.request(cid)).unwrap();
        assert!(client.accepted(&mut bed, cid).is_none());
    }
    // The client gives one of them up.
    client.forget(&mut bed, 2);
    client.establish(&mut bed);
    assert!(client.accepted(&mut bed, 1).is_some());
    client.connect(&mut bed, 2).unwrap();
    client.inform(&mut bed, &name("s1"));
    assert!(client.informed(&mut bed));
    assert_eq!(bed.server.counters().requests_held, 2);
    // Connection 1 is one of the path's, and the client ends the path by it.
    bed.news();
    client.disconnect(&mut bed, 1);
    bed.turn();
    assert_eq!(bed.news()[0], "path down: the peer disconnected");
    assert!(client.is_gone(&bed));
    bed.is_clean();
}

/// Which are given up with their path: before anybody knows that there is a client, and just when that is known.
#[test]
fn further_connections_go_with_the_first() {
    for established in [false, true] {
        let mut bed = Bed::new(config());
        let mut lost = Client::new(2);
        lost.connections = 3;
        for cid in 0..3 {
            lost.ask(&mut bed, cid, lost.request(cid)).unwrap();
        }
        lost.disconnect(&mut bed, 0);
        if established {
            lost.establish(&mut bed);
        }
        bed.turn();
        assert!(lost.is_gone(&bed), "established: {established}");
        bed.is_clean();
        assert!(bed.news().is_empty());
        Client::opened(&mut bed, 1, "s1");
    }
}

#[test]
fn strangers_get_little_and_give_way() {
    let mut bed = Bed::new(config());
    let before = bed.host.usage();
    let mut strangers: Vec<Client> = Vec::new();
    for n in 0..300u16 {
        let mut stranger = Client::new(1);
        stranger.peer = IpAddr::from([10, 1, (n >> 8) as u8, n as u8]);
        (stranger.session.0[0], stranger.session.0[1]) = (n as u8, (n >> 8) as u8);
        stranger.ask(&mut bed, 0, stranger.request(0)).unwrap();
        strangers.push(stranger);
    }
    let usage = bed.host.usage();
    assert_eq!((usage.mrs, usage.keys, usage.qps), (before.mrs, before.keys, 256));
    assert_eq!(bed.server.counters().half_open_evicted, 44);
    assert!(strangers[..44].iter().all(|s| s.is_gone(&bed)));
    Client::opened(&mut bed, 1, "s1");
    bed.stop();
}

#[test]
fn limits_refuse_and_give_back() {
    let mut bed = Bed::new(ServerConfig {
        max_sessions: 3,
        max_sessions_per_client: 2,
        max_paths: 4,
        ..config()
    });
    let from = |n: u8, peer: u8| {
        let mut client = Client::new(n);
        client.peer = IpAddr::from([10, 0, 0, peer]);
        client
    };
    let mut first = from(1, 1);
    first.open(&mut bed, "s1");
    from(2, 1).open(&mut bed, "s2");
    assert_eq!(from(3, 1).connect(&mut bed, 0), Err(errno::EUSERS), "of one client");
    from(3, 2).open(&mut bed, "s3");
    assert_eq!(from(4, 3).connect(&mut bed, 0), Err(errno::EUSERS), "of all");
    let mut second = first.second_path(9);
    second.open(&mut bed, "s1");
    assert_eq!(first.second_path(10).connect(&mut bed, 0), Err(errno::EUSERS), "paths");
    let counters = bed.server.counters();
    assert_eq!(
        (
            counters.refused_sessions_of_client,
            counters.refused_sessions,
            counters.refused_paths
        ),
        (1, 1, 1)
    );
    // Both asked in time, but one was faster.
    second.leave(&mut bed);
    let (mut fast, mut slow) = (first.second_path(11), first.second_path(12));
    for client in [&mut fast, &mut slow] {
        client.ask(&mut bed, 0, client.request(0)).unwrap();
    }
    for client in [&fast, &slow] {
        client.establish(&mut bed);
    }
    assert!(!fast.is_gone(&bed) && slow.is_gone(&bed));
    assert_eq!(bed.server.counters().refused_paths, 2);
    bed.stop();
}

/// Random messages in chunks: each is handed on or ends the path, and nothing is lost.
#[test]
fn random_messages_in_a_chunk() {
    let bed = RefCell::new(Bed::new(fixed_keys()));
    let mut runner = TestRunner::new(proptest::test_runner::Config {
        cases: 500,
        failure_persistence: None,
        ..Default::default()
    });
    let message = (
        0u16..5,
        any::<u16>(),
        0u16..3,
        0u16..3,
        any::<u64>(),
        any::<u32>(),
        any::<u32>(),
    );
    let strategy = (
        message,
        0u16..DEPTH as u16,
        0u32..2 * CHUNK,
        proptest::option::weighted(0.2, any::<u32>()),
        1usize..40,
    );
    let outcome = runner.run(
        &strategy,
        |((kind, usr, flags, sg, addr, key, len), chunk, offset, imm, cut)| {
            let bed = &mut *bed.borrow_mut();
            let client = &mut Client::opened(bed, 1, "fuzz");
            let usr = if usr % 2 == 0 { usr % 64 } else { usr };
            let mut bytes = [kind, usr, flags, sg].as_bytes().to_vec();
            bytes.extend(SgDesc::new(addr, key, len % (2 * CHUNK)).as_bytes());
            bytes.truncate(cut);
            let start = offset.min(CHUNK - bytes.len() as u32);
            prop_assert!(client.write(bed, chunk, start, &bytes));
            client.announce(bed, chunk, offset.min(CHUNK - 1));
            if let Some(imm) = imm.filter(|_| !client.is_gone(bed)) {
                client.imm(bed, 1, imm);
            }
            for request in bed.requests() {
                let end = request.data_offset + request.data_len as usize;
                prop_assert!(end <= (DEPTH * CHUNK) as usize);
                bed.answer(request.key, 0);
            }
            if !client.is_gone(bed) {
                client.answers(bed, 1);
                client.leave(bed);
            }
            bed.outputs.clear();
            bed.is_clean();
            Ok(())
        },
    );
    outcome.unwrap();
    still_serves(&mut bed.borrow_mut());
}
