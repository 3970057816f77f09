//! Negotiation with an NBD client, without sockets.

use std::time::Duration;

use crate::support::{
    GEOMETRY, Peer, World, connect, contexts, ended_well, information, option_bytes, option_reply, stall,
};
use rnbd::nbd::{
    End, Phase, Piece, Stall,
    proto::{self, BASE_ALLOCATION, Request, cmd, opt, rep, tx},
};

const NEGOTIATION: Duration = Duration::from_secs(30);

fn kind_of(peer: &mut Peer, world: &mut World, option: u32, data: &[u8]) -> u32 {
    peer.option(option, data);
    peer.settle(world);
    let (of, kind, _) = option_reply(peer);
    assert_eq!(of, option);
    kind
}

#[test]
fn options_are_answered_as_the_protocol_says() {
    let world = &mut World::new(GEOMETRY);
    let mut c = connect(world);
    assert_eq!(kind_of(&mut c, world, 4711, &[1, 2, 3]), rep::ERR_UNSUP);
    for o in [opt::STRUCTURED_REPLY, opt::EXTENDED_HEADERS] {
        assert_eq!(kind_of(&mut c, world, o, &[1]), rep::ERR_INVALID);
    }
    for o in [opt::LIST_META_CONTEXT, opt::SET_META_CONTEXT] {
        let query = contexts("", &[BASE_ALLOCATION]);
        assert_eq!(
            kind_of(&mut c, world, o, &query),
            rep::ERR_INVALID,
            "no structured replies"
        );
    }
    c.option(opt::LIST, &[]);
    c.settle(world);
    assert_eq!(
        option_reply(&mut c),
        (opt::LIST, rep::SERVER, b"\0\0\0\x04diskthe disk".to_vec())
    );
    assert_eq!(
        option_reply(&mut c),
        (opt::LIST, rep::SERVER, b"\0\0\0\x05otherthe other".to_vec())
    );
    assert_eq!(option_reply(&mut c), (opt::LIST, rep::ACK, Vec::new()));
    assert_eq!(kind_of(&mut c, world, opt::LIST, &[1]), rep::ERR_INVALID);
    assert_eq!(
        kind_of(&mut c, world, opt::INFO, &information("nothing", &[])),
        rep::ERR_UNKNOWN
    );
    let long = "x".repeat(proto::MAX_NAME + 1);
    for malformed in [
        &b""[..],
        &[0, 0, 0, 9, 1],
        &[0xff; 8],
        &information("disk", &[3])[..11],
        &information(&long, &[]),
    ] {
        assert_eq!(kind_of(&mut c, world, opt::GO, malformed), rep::ERR_INVALID);
    }
    assert_eq!(kind_of(&mut c, world, opt::INFO, &vec![0; 100_000]), rep::ERR_TOO_BIG);
    assert_eq!(kind_of(&mut c, world, 4711, &vec![0; 16 << 10]), rep::ERR_UNSUP);

    c.option(opt::INFO, &information("", &[1, 2, 3]));
    c.settle(world);
    let (_, kind, export) = option_reply(&mut c);
    assert_eq!((kind, &export[..2]), (rep::INFO, &[0, 0][..]));
    assert_eq!(export[2..10], GEOMETRY.size.to_be_bytes());
    let flags = u16::from_be_bytes([export[10], export[11]]);
    let can = tx::SEND_FUA | tx::SEND_TRIM | tx::SEND_WRITE_ZEROES | tx::SEND_FAST_ZERO | tx::SEND_CACHE;
    assert_eq!(flags, tx::HAS_FLAGS | tx::SEND_FLUSH | tx::CAN_MULTI_CONN | can);
    let sizes = [512u32, 4096, 32 << 20].map(u32::to_be_bytes).concat();
    assert_eq!(option_reply(&mut c).2, [&[0, 3][..], &sizes].concat());
    assert_eq!(option_reply(&mut c).2, b"\0\x01disk");
    assert_eq!(option_reply(&mut c).2, b"\0\x02the disk");
    assert_eq!(option_reply(&mut c).1, rep::ACK);
    assert_eq!(c.conn.export(), None, "INFO chooses nothing");

    assert_eq!(kind_of(&mut c, world, opt::ABORT, &[]), rep::ACK);
    assert_eq!(ended_well(&mut c, world), End::Left);
}

#[test]
fn the_old_export_name_option_works_with_and_without_zeroes() {
    let world = &mut World::new(GEOMETRY);
    for (flags, extra) in [(3u32, 0), (2, 0), (1, 124), (0, 124)] {
        let mut c = Peer::new(world);
        c.send(&flags.to_be_bytes());
        c.option(opt::EXPORT_NAME, b"other");
        c.settle(world);
        assert_eq!(c.conn.export(), Some(1));
        c.take(18);
        let answer = c.take(10 + extra);
        assert_eq!(answer[..8], GEOMETRY.size.to_be_bytes());
        assert!(answer[10..].iter().all(|b| *b == 0));
        assert!(c.answers.is_empty());
        assert_eq!(c.ask(world, cmd::FLUSH, 0, 0, 0), 0);
    }
    let mut c = connect(world);
    c.option(opt::EXPORT_NAME, b"wrong");
    assert_eq!(ended_well(&mut c, world), End::Protocol("no export \"wrong\"".into()));
}

#[test]
fn a_client_gets_the_export_that_it_asks_for() {
    let world = &mut World::new(GEOMETRY);
    for (name, index) in [
        ("", 0),
        ("/", 0),
        ("/other", 1),
        ("images/b", 1),
        ("/images/b", 1),
        ("disk", 0),
    ] {
        let mut c = connect(world);
        c.option(opt::GO, &information(name, &[]));
        c.settle(world);
        assert_eq!(c.conn.export(), Some(index), "{name:?}");
        assert_eq!(c.conn.phase(), Phase::Transmission);
    }
}

#[test]
fn exports_come_and_go_while_a_client_asks_for_options() {
    let world = &mut World::new(GEOMETRY);
    let mut c = connect(world);
    let ask = |c: &mut Peer, world: &mut World, name| kind_of(c, world, opt::INFO, &information(name, &[]));
    assert_eq!(ask(&mut c, world, "disk"), rep::INFO);
    c.answers.clear();
    c.conn.withdraw(0);
    assert_eq!(ask(&mut c, world, "disk"), rep::ERR_UNKNOWN);
    c.option(opt::LIST, b"");
    c.settle(world);
    let (_, kind, listed) = option_reply(&mut c);
    assert!(kind == rep::SERVER && listed[4..].starts_with(b"other"), "{listed:?}");
    assert_eq!(option_reply(&mut c).1, rep::ACK);
    // The first that is left needs no name; one that comes has a number of its own.
    let another = world.exports().get(0).cloned().unwrap();
    c.conn.offer(another);
    for (name, index) in [("", 1), ("disk", 2)] {
        let mut c = connect(world);
        c.conn.withdraw(0);
        c.conn.offer(world.exports().get(0).cloned().unwrap());
        c.option(opt::GO, &information(name, &[]));
        c.settle(world);
        assert_eq!(c.conn.export(), Some(index), "{name:?}");
        // Who has chosen it is let go by other means.
        c.conn.withdraw(index);
        c.answers.clear();
        assert_eq!(c.ask(world, cmd::READ, 0, 0, 512), 0);
    }
    c.option(opt::GO, &information("disk", &[]));
    c.settle(world);
    assert_eq!(c.conn.export(), Some(2));
}

#[test]
fn what_makes_no_sense_ends_the_connection_after_what_came_before_is_answered() {
    let world = &mut World::new(GEOMETRY);
    let mut c = Peer::new(world);
    c.send(&[0xff; 64]);
    assert_eq!(
        ended_well(&mut c, world),
        End::Protocol("unknown client flags 0xffffffff".into())
    );
    assert_eq!(c.answers.len(), 18);

    let absurd = [
        &proto::OPT_MAGIC.to_be_bytes()[..],
        &[0, 0, 0, 7, 0xff, 0xff, 0xff, 0xff],
    ]
    .concat();
    let long_name = option_bytes(opt::EXPORT_NAME, &[b'x'; (16 << 10) + 1]);
    for (bytes, why) in [
        (&[0; 64][..], "option without its magic number"),
        (&absurd, "option 7 of 4294967295 bytes"),
        (&long_name, "option 1 of 16385 bytes"),
    ] {
        let mut c = connect(world);
        c.option(opt::LIST, &[1]);
        c.send(bytes);
        assert_eq!(ended_well(&mut c, world), End::Protocol(why.into()));
        assert_eq!(option_reply(&mut c).1, rep::ERR_INVALID);
        assert!(c.answers.is_empty());
    }

    for (bytes, why) in [
        (vec![0x55; 280], "request without its magic number"),
        (
            Request {
                flags: 0,
                command: cmd::WRITE,
                cookie: 1,
                offset: 0,
                len: u32::MAX.into(),
            }
            .to_bytes()
            .to_vec(),
            "a request with 4294967295 bytes of payload",
        ),
    ] {
        let mut c = Peer::go(world);
        let cookie = c.request(cmd::FLUSH, 0, 0, 0, &[]);
        c.send(&bytes);
        assert_eq!(ended_well(&mut c, world), End::Protocol(why.into()));
        assert_eq!(c.reply(), (0, cookie));
        assert!(c.answers.is_empty());
    }
}

#[test]
fn a_negotiation_has_thirty_seconds() {
    let world = &mut World::new(GEOMETRY);
    let mut silent = Peer::new(world);
    let mut slow = connect(world);
    let mut deaf = Peer::new(world);
    deaf.takes = 0;
    deaf.send(&3u32.to_be_bytes());
    deaf.option(opt::GO, &information("", &[]));
    let mut leaving = Peer::new(world);
    leaving.takes = 0;
    leaving.send(&3u32.to_be_bytes());
    leaving.option(opt::ABORT, &[]);
    let mut good = Peer::go(world);
    for peer in [&mut silent, &mut slow, &mut deaf, &mut leaving] {
        peer.settle(world);
        assert_eq!(peer.conn.next_timeout(), Some(world.now + NEGOTIATION));
    }
    assert_eq!(good.conn.next_timeout(), None);
    world.pass(NEGOTIATION - Duration::from_millis(1));
    slow.send(&[0]);
    for peer in [&mut silent, &mut slow, &mut deaf, &mut leaving] {
        peer.pass(world, Duration::ZERO);
        peer.settle(world);
        assert_eq!(peer.conn.ended(), None);
    }
    world.pass(Duration::from_millis(1));
    for peer in [&mut silent, &mut slow, &mut deaf] {
        peer.pass(world, Duration::ZERO);
        assert_eq!(ended_well(peer, world), End::TimedOut);
    }
    leaving.pass(world, Duration::ZERO);
    assert_eq!(ended_well(&mut leaving, world), End::Left);
    assert_eq!(good.ask(world, cmd::FLUSH, 0, 0, 0), 0);
}

#[test]
fn a_client_that_asks_without_listening_is_not_read_from() {
    let world = &mut World::new(GEOMETRY);
    let mut c = connect(world);
    c.takes = 0;
    for _ in 0..20_000 {
        c.option(opt::LIST, &[]);
    }
    c.settle(world);
    assert_eq!(stall(&mut c), Some(Stall::Answers));
    let waiting = |c: &Peer| {
        let mut pieces = Vec::new();
        c.conn.gather(&mut pieces);
        pieces.iter().map(Piece::len).sum::<usize>()
    };
    let bound = 66 << 10;
    assert!(waiting(&c) < bound);
    // One byte at a time does not make it hoard what is taken.
    c.takes = 10_000;
    c.settle_in(world, &mut || usize::MAX, &mut || 1);
    assert!(waiting(&c) < bound);
    c.takes = usize::MAX;
    c.settle(world);
    assert_eq!(c.answers.len(), 20_000 * (36 + 38 + 20));
}

#[test]
fn a_device_that_is_chosen_when_answers_leave_gets_nothing_before_its_loop_has_it() {
    let world = &mut World::new(GEOMETRY);
    let mut c = connect(world);
    // Answers without end: the choice behind them is read, but not looked at.
    (0..900).for_each(|_| c.option(opt::LIST, &[]));
    c.option(opt::GO, &information("", &[]));
    c.request(cmd::READ, 0, 0, 4096, &[]);
    assert!(c.receive(world, usize::MAX) > 0 && c.socket.is_empty());
    assert_eq!((stall(&mut c), c.conn.export()), (Some(Stall::Answers), None));
    while c.transmit(world, 20_000) > 0 {}
    c.call(world, |conn, now, device| conn.timeout(now, device));
    assert_eq!((stall(&mut c), c.conn.export()), (Some(Stall::Work), Some(0)));
    assert!(world.seen.is_empty() && world.memory.lent() == 0);
    c.settle(world);
    assert_eq!(world.seen.len(), 1);
}

#[test]
fn leaving_is_in_order_between_messages_only() {
    let world = &mut World::new(GEOMETRY);
    let mut c = Peer::new(world);
    c.closed = true;
    assert_eq!(ended_well(&mut c, world), End::CutShort("the negotiation"));

    let mut c = connect(world);
    c.closed = true;
    assert_eq!(ended_well(&mut c, world), End::Left);
    for part in [
        vec![0; 3],
        option_bytes(7, &[1; 100])[..50].to_vec(),
        option_bytes(7, &[1; 20_000])[..50].to_vec(),
    ] {
        let mut c = connect(world);
        c.send(&part);
        c.closed = true;
        assert_eq!(ended_well(&mut c, world), End::CutShort("the negotiation"));
        assert!(c.answers.is_empty());
    }

    let mut c = Peer::go(world);
    c.closed = true;
    assert_eq!(ended_well(&mut c, world), End::Left);
    let mut c = Peer::go(world);
    c.send(&proto::REQUEST_MAGIC.to_be_bytes());
    c.closed = true;
    assert_eq!(ended_well(&mut c, world), End::CutShort("a request"));
}
