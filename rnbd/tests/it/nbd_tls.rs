//! TLS of an NBD connection, as far as the connection knows of it: when it begins, what is refused without it, what is forgotten.

use std::time::Duration;

use crate::support::{
    GEOMETRY, Peer, World, connect_with, contexts, ended_well, information, option_bytes, option_reply, stall,
};
use rnbd::nbd::{
    End, Phase, Stall, TlsMode,
    proto::{BASE_ALLOCATION, Framing, cmd, opt, rep, tx},
};

const BOTH: [TlsMode; 2] = [TlsMode::On, TlsMode::Require];

fn kind_of(peer: &mut Peer, world: &mut World, option: u32, data: &[u8]) -> u32 {
    peer.option(option, data);
    peer.settle(world);
    let (of, kind, _) = option_reply(peer);
    assert_eq!(of, option);
    kind
}

/// A client that has come to the handshake.
fn before_handshake(world: &mut World, mode: TlsMode) -> Peer {
    let mut c = connect_with(world, mode);
    assert_eq!(kind_of(&mut c, world, opt::STARTTLS, &[]), rep::ACK);
    assert_eq!(c.conn.phase(), Phase::Handshake);
    assert!(c.conn.wants_tls());
    assert_eq!(stall(&mut c), Some(Stall::Handshake));
    c
}

/// A client with TLS.
fn secured(world: &mut World, mode: TlsMode) -> Peer {
    let mut c = before_handshake(world, mode);
    c.call(world, |conn, now, device| conn.tls_established(now, device));
    assert_eq!(c.conn.phase(), Phase::Secured);
    assert!(!c.conn.wants_tls());
    c
}

#[test]
fn with_tls_a_client_gets_what_one_without_it_gets() {
    let world = &mut World::new(GEOMETRY);
    for mode in BOTH {
        let mut c = secured(world, mode);
        assert_eq!(kind_of(&mut c, world, opt::LIST, &[]), rep::SERVER);
        c.answers.clear();
        assert_eq!(
            kind_of(&mut c, world, opt::INFO, &information("nothing", &[])),
            rep::ERR_UNKNOWN
        );
        assert_eq!(
            kind_of(&mut c, world, opt::STARTTLS, &[]),
            rep::ERR_INVALID,
            "once is enough"
        );
        c.option(opt::GO, &information("other", &[]));
        c.settle(world);
        c.answers.clear();
        assert_eq!((c.conn.export(), c.conn.phase()), (Some(1), Phase::Transmission));
        assert_eq!(c.ask(world, cmd::WRITE, 0, 4096, 512), 0);
        assert_eq!(c.ask(world, cmd::FLUSH, 0, 0, 0), 0);
        c.request(cmd::DISC, 0, 0, 0, &[]);
        assert_eq!(ended_well(&mut c, world), End::Left);
    }
}

#[test]
fn the_old_option_for_an_export_works_with_tls() {
    let world = &mut World::new(GEOMETRY);
    for mode in BOTH {
        let mut c = secured(world, mode);
        c.option(opt::EXPORT_NAME, b"other");
        c.settle(world);
        assert_eq!(c.take(10)[..8], GEOMETRY.size.to_be_bytes());
        assert_eq!(c.ask(world, cmd::FLUSH, 0, 0, 0), 0);
    }
}

#[test]
fn where_tls_is_required_nothing_is_told_or_done_without_it() {
    let world = &mut World::new(GEOMETRY);
    let mut c = connect_with(world, TlsMode::Require);
    for (option, data) in [
        (opt::LIST, Vec::new()),
        (opt::INFO, information("disk", &[])),
        (opt::GO, information("", &[])),
        (opt::GO, information("nothing", &[])),
        (opt::STRUCTURED_REPLY, Vec::new()),
        (opt::EXTENDED_HEADERS, Vec::new()),
        (opt::SET_META_CONTEXT, contexts("", &[BASE_ALLOCATION])),
        (4711, Vec::new()),
        // Malformed, and longer than what is read.
        (opt::INFO, vec![0; 3]),
        (opt::INFO, vec![0; 100_000]),
    ] {
        assert_eq!(
            kind_of(&mut c, world, option, &data),
            rep::ERR_TLS_REQD,
            "option {option}"
        );
    }
    assert_eq!(kind_of(&mut c, world, opt::STARTTLS, &[0]), rep::ERR_INVALID);
    assert_eq!(c.conn.export(), None);
    assert_eq!(kind_of(&mut c, world, opt::ABORT, &[]), rep::ACK);
    assert_eq!(ended_well(&mut c, world), End::Left);

    let mut c = connect_with(world, TlsMode::Require);
    c.option(opt::EXPORT_NAME, b"disk");
    assert!(matches!(ended_well(&mut c, world), End::Protocol(_)));
    assert!(c.answers.is_empty(), "not even the size is told");
}

#[test]
fn where_tls_is_offered_a_client_may_do_without() {
    let world = &mut World::new(GEOMETRY);
    let mut c = connect_with(world, TlsMode::On);
    c.option(opt::GO, &information("", &[]));
    c.settle(world);
    c.answers.clear();
    assert_eq!(c.ask(world, cmd::FLUSH, 0, 0, 0), 0);

    let mut c = connect_with(world, TlsMode::Off);
    assert_eq!(kind_of(&mut c, world, opt::STARTTLS, &[]), rep::ERR_POLICY);
    c.option(opt::GO, &information("", &[]));
    c.settle(world);
    assert_eq!(c.conn.phase(), Phase::Transmission);
}

#[test]
fn what_was_agreed_on_before_tls_is_forgotten() {
    let world = &mut World::new(GEOMETRY);
    for framing in [opt::STRUCTURED_REPLY, opt::EXTENDED_HEADERS] {
        let mut c = connect_with(world, TlsMode::On);
        assert_eq!(kind_of(&mut c, world, framing, &[]), rep::ACK);
        let query = contexts("disk", &[BASE_ALLOCATION]);
        assert_eq!(kind_of(&mut c, world, opt::SET_META_CONTEXT, &query), rep::META_CONTEXT);
        c.settle(world);
        c.answers.clear();
        assert_eq!(kind_of(&mut c, world, opt::STARTTLS, &[]), rep::ACK);
        c.call(world, |conn, now, device| conn.tls_established(now, device));
        assert_eq!(
            kind_of(&mut c, world, opt::LIST_META_CONTEXT, &query),
            rep::ERR_INVALID,
            "structured replies have to be asked for again"
        );
        c.option(opt::GO, &information("disk", &[]));
        c.settle(world);
        let (_, _, export) = option_reply(&mut c);
        assert_eq!(u16::from_be_bytes([export[10], export[11]]) & tx::SEND_DF, 0);
        c.answers.clear();
        // Compact requests and simple replies, and nobody may ask what is allocated.
        assert_eq!(c.ask(world, cmd::BLOCK_STATUS, 0, 0, 4096), 22);

        // A context that was chosen before counts for nothing when structured replies are there again.
        let mut c = connect_with(world, TlsMode::On);
        kind_of(&mut c, world, framing, &[]);
        kind_of(&mut c, world, opt::SET_META_CONTEXT, &query);
        c.settle(world);
        c.answers.clear();
        assert_eq!(kind_of(&mut c, world, opt::STARTTLS, &[]), rep::ACK);
        c.call(world, |conn, now, device| conn.tls_established(now, device));
        assert_eq!(kind_of(&mut c, world, opt::STRUCTURED_REPLY, &[]), rep::ACK);
        c.option(opt::GO, &information("disk", &[]));
        c.settle(world);
        c.answers.clear();
        c.framing = Framing::Structured;
        let cookie = c.request(cmd::BLOCK_STATUS, 0, 0, 4096, &[]);
        c.settle(world);
        let head = c.take(20);
        assert_eq!(head[6..8], rnbd::nbd::proto::chunk::ERROR.to_be_bytes());
        assert_eq!(head[8..16], cookie.to_be_bytes());
        assert_eq!(c.take(6)[..4], 22u32.to_be_bytes());
    }
}

#[test]
fn what_is_sent_along_with_starttls_is_not_taken_for_what_tls_brings() {
    let world = &mut World::new(GEOMETRY);
    let whole = option_bytes(opt::ABORT, &[]);
    for (mode, more) in BOTH
        .into_iter()
        .flat_map(|mode| [1, whole.len()].map(|n| (mode, &whole[..n])))
    {
        let mut c = connect_with(world, mode);
        c.send(&[&option_bytes(opt::STARTTLS, &[]), more].concat());
        let end = ended_well(&mut c, world);
        assert!(
            matches!(&end, End::Protocol(why) if why.contains("STARTTLS")),
            "{end:?}"
        );
        assert!(c.answers.is_empty() && !c.conn.wants_tls(), "TLS is not promised");
    }
    // Later it is not read at all: it is TLS that has to make sense of it.
    let mut c = before_handshake(world, TlsMode::On);
    c.send(&whole);
    c.settle(world);
    assert_eq!((c.socket.len(), c.conn.phase()), (whole.len(), Phase::Handshake));
}

#[test]
fn tls_begins_when_what_was_said_in_the_clear_is_sent() {
    let world = &mut World::new(GEOMETRY);
    let mut c = connect_with(world, TlsMode::On);
    c.takes = 0;
    c.option(opt::LIST, &[]);
    c.option(opt::STARTTLS, &[]);
    c.settle(world);
    assert_eq!(c.conn.phase(), Phase::Handshake);
    c.call(world, |conn, now, device| conn.tls_established(now, device));
    assert_eq!(c.conn.phase(), Phase::Handshake, "nobody has shaken hands");
    let mut sent = 0;
    while !c.conn.wants_tls() {
        c.takes = 1;
        sent += c.transmit(world, 1);
    }
    assert!(sent > 20 && !c.conn.has_output());
    c.call(world, |conn, now, device| conn.tls_established(now, device));
    assert_eq!(c.conn.phase(), Phase::Secured);
}

#[test]
fn a_client_that_can_not_be_offered_tls_is_not() {
    let world = &mut World::new(GEOMETRY);
    for flags in [0u32, 2] {
        let mut c = Peer::with_tls(world, TlsMode::On);
        c.send(&flags.to_be_bytes());
        c.settle(world);
        c.take(18);
        assert_eq!(kind_of(&mut c, world, opt::STARTTLS, &[]), rep::ERR_POLICY);
        let mut c = Peer::with_tls(world, TlsMode::Require);
        c.send(&flags.to_be_bytes());
        assert!(matches!(ended_well(&mut c, world), End::Protocol(_)));
    }
}

#[test]
fn a_handshake_that_fails_or_never_ends_ends_the_connection() {
    let world = &mut World::new(GEOMETRY);
    let mut c = before_handshake(world, TlsMode::Require);
    c.call(world, |conn, now, device| {
        conn.tls_failed(now, "no certificate".into(), device)
    });
    assert_eq!(ended_well(&mut c, world), End::Tls("no certificate".into()));

    let mut c = before_handshake(world, TlsMode::Require);
    c.closed = true;
    c.call(world, |conn, now, device| conn.eof(now, device));
    assert_eq!(ended_well(&mut c, world), End::CutShort("the handshake of TLS"));

    let mut c = before_handshake(world, TlsMode::Require);
    c.call(world, |conn, now, device| conn.stop(now, device));
    assert_eq!(ended_well(&mut c, world), End::Stopped);

    let mut c = before_handshake(world, TlsMode::Require);
    c.pass(world, Duration::from_secs(30));
    assert_eq!(ended_well(&mut c, world), End::TimedOut);
}

#[test]
fn a_client_that_shakes_hands_and_does_no_more_has_thirty_seconds_altogether() {
    let world = &mut World::new(GEOMETRY);
    let mut c = before_handshake(world, TlsMode::On);
    c.pass(world, Duration::from_secs(29));
    c.call(world, |conn, now, device| conn.tls_established(now, device));
    assert_eq!(c.conn.phase(), Phase::Secured);
    c.pass(world, Duration::from_secs(1));
    assert_eq!(ended_well(&mut c, world), End::TimedOut);
}

#[test]
fn tls_that_breaks_later_gives_back_what_is_under_way() {
    let world = &mut World::new(GEOMETRY);
    let mut c = secured(world, TlsMode::Require);
    c.option(opt::GO, &information("", &[]));
    c.settle(world);
    c.hold = true;
    c.request(cmd::READ, 0, 0, 4096, &[]);
    c.settle(world);
    assert_eq!(world.memory.lent(), 1);
    c.call(world, |conn, now, device| {
        conn.tls_failed(now, "bad record".into(), device)
    });
    assert_eq!(c.conn.ended(), None, "the device still writes to the buffer");
    c.finish_one(world);
    assert_eq!(ended_well(&mut c, world), End::Tls("bad record".into()));
    assert_eq!(world.memory.lent(), 0);
}
