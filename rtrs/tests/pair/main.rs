//! Client and server, each over a fabric of its own, and a wire between them that loses nothing: the whole of RTRS without a
//! socket, a thread or a clock.

mod bed;
mod chaos;
mod faulty;
mod hand;
mod held;
mod host;
mod hosts;
mod lies;
mod paths;
mod server_admin;
mod server_chaos;
mod server_lies;
mod server_matrix;
mod server_sessions;
mod server_waits;
mod silence;
mod station;
mod stats;
mod watch;

use std::{sync::Arc, time::Duration};

use host::KeyMode;
use hosts::Pair;
use roce_verbs::mem::Pages;
use roce_verbs::provider::KeyStrategy;
use rtrs::{
    Direction, Error, IoError, PathError,
    admission::AccessList,
    client::{Buffer, ConType, LentId, LentPiece, Output, SessionConfig, Submission},
    errno,
    server::{Server, ServerConfig, request},
};

pub(crate) fn server(always_invalidate: bool) -> ServerConfig {
    ServerConfig {
        queue_depth: 16,
        max_chunk_size: 16 << 10,
        always_invalidate,
        ..ServerConfig::default()
    }
}

/// Writes a pattern of each length, reads it back, and compares.
fn exchange(pair: &mut Pair, lens: &[usize]) {
    for (i, len) in lens.iter().enumerate() {
        let data: Vec<u8> = (0..*len).map(|b| (b * 7 + i) as u8).collect();
        pair.store(i, *len);
        let (result, _) = pair.request(Direction::Write, i as u8, Some(&data), *len);
        result.unwrap();
        let (result, back) = pair.request(Direction::Read, i as u8, None, *len);
        result.unwrap();
        assert!(back == data, "{len} bytes");
    }
}

#[test]
fn data_goes_over_and_back_with_every_kind_of_key() {
    for keys in KeyMode::ALL {
        for always_invalidate in [true, false] {
            for invalidate_reads in [true, false] {
                let mut pair = Pair::new(keys, server(always_invalidate));
                pair.open(|config| config.invalidate_reads = invalidate_reads);
                exchange(&mut pair, &[1, 512, 4096, 12 << 10]);
                pair.close();
                pair.assert_empty();
            }
        }
    }
}

#[test]
fn more_requests_than_permits_all_end_once() {
    for keys in KeyMode::ALL {
        // Also more than the send queues hold, which is 1024.
        for (depth, connections, requests) in [(16, 3, 200), (600, 1, 1500)] {
            all_end_once(keys, depth, connections, requests);
        }
    }
}

fn all_end_once(keys: KeyMode, depth: u32, connections: u16, requests: u64) {
    let config = ServerConfig {
        queue_depth: depth,
        ..server(true)
    };
    let mut pair = Pair::new(keys, config);
    pair.open(|config| {
        config.connections = connections;
        config.buffer_bytes = Some(requests as usize * (16 << 10));
    });
    pair.store(0, 512);
    let mut submitted = Vec::new();
    for tag in 0..requests {
        let direction = if tag % 2 == 0 {
            Direction::Read
        } else {
            Direction::Write
        };
        let data = pair.buffer(512);
        submitted.push(tag);
        pair.submit(Submission {
            tag,
            con: ConType::Io(tag as usize),
            direction,
            header: [0].into_iter().collect(),
            data,
        });
    }
    pair.pass(Duration::from_secs(1));
    let mut done = Vec::new();
    for (tag, result, data) in std::mem::take(&mut pair.done) {
        assert!(result.is_ok(), "{tag}: {result:?}");
        pair.give(data);
        done.push(tag);
    }
    done.sort_unstable();
    assert_eq!(done, submitted);
    pair.close();
    pair.assert_empty();
}

/// Memory that is lent to the session, with these bytes all over.
fn lend(pair: &mut Pair, len: usize, byte: u8) -> Result<(LentId, Arc<Pages>), Error> {
    let pages = Pages::allocate(len).unwrap();
    pages.write(0, &vec![byte; len]).unwrap();
    let (session, client) = (pair.session(), &mut pair.client);
    let lent = pair
        .near
        .with(pair.now, |cx| client.lend_memory(cx, session, pages.clone()))?;
    Ok((lent, pages))
}

#[test]
fn data_comes_and_goes_in_pieces_of_memory_that_is_lent() {
    for devices in 1..=2 {
        let mut pair = Pair::over(devices, KeyMode::Instant, server(true));
        pair.open(|_| {});
        let (a, in_a) = lend(&mut pair, 8192, 0xaa).unwrap();
        let (b, in_b) = lend(&mut pair, 4096, 0xbb).unwrap();
        let piece = |memory, offset, len| LentPiece { memory, offset, len };
        let pieces = [
            piece(a, 100, 7),
            piece(b, 0, 4000),
            piece(a, 5000, 1),
            piece(a, 200, 85),
        ];
        let bytes: Vec<u8> = (0..4093u32).map(|i| (i * 7) as u8).collect();
        let whole = || Buffer::of_lent(pieces).unwrap().part(0, 1 << 20, 1).unwrap();
        let session = pair.session();
        let buffers = pair.client.buffers(session).unwrap();
        buffers.write(&whole(), 0, &bytes).unwrap();
        pair.store(3, bytes.len());
        for direction in [Direction::Write, Direction::Read] {
            if direction == Direction::Read {
                in_a.write(0, &[0xaa; 8192]).unwrap();
                in_b.write(0, &[0xbb; 4096]).unwrap();
            }
            pair.submit(Submission {
                tag: 5,
                con: ConType::Io(0),
                direction,
                header: [3].into_iter().collect(),
                data: Some(whole()),
            });
            pair.settle();
            let (_, result, data) = pair.done.remove(0);
            assert!(result.is_ok(), "{direction:?} {result:?}");
            pair.give(data);
        }
        let mut back = vec![0; bytes.len()];
        let buffers = pair.client.buffers(session).unwrap();
        buffers.read(&whole(), 0, &mut back).unwrap();
        assert!(back == bytes);
        // And nothing beside the pieces.
        let all = |pages: &Pages| {
            let mut out = vec![0; pages.len()];
            pages.read(0, &mut out).unwrap();
            out
        };
        let (in_a, in_b) = (all(&in_a), all(&in_b));
        for (offset, byte) in in_a.into_iter().enumerate() {
            let ours = (100..107).contains(&offset) || offset == 5000 || (200..285).contains(&offset);
            assert!(ours || byte == 0xaa, "{offset}");
        }
        assert!(in_b[4000..].iter().all(|byte| *byte == 0xbb));
        let client = &mut pair.client;
        pair.near.with(pair.now, |cx| {
            client.take_memory_back(cx, session, a);
            client.take_memory_back(cx, session, b);
        });
        pair.close();
        pair.assert_empty();
    }
}

#[test]
fn memory_is_only_lent_where_requests_open_no_more_than_their_own() {
    for (keys, invalidate) in [
        (KeyMode::Queued, true),
        (KeyMode::Windows, true),
        (KeyMode::Static, true),
    ] {
        let mut pair = Pair::new(keys, server(invalidate));
        pair.open(|_| {});
        let refused = lend(&mut pair, 4096, 0).map(drop);
        assert!(matches!(refused, Err(Error::Verbs(_))), "{keys:?}: {refused:?}");
        pair.store(0, 100);
        let (result, _) = pair.request(Direction::Write, 0, Some(&[1; 100]), 100);
        assert!(result.is_ok(), "the session is as good as before: {result:?}");
        pair.close();
        pair.assert_empty();
    }
}

#[test]
fn errors_of_the_servers_user_reach_the_client() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    pair.open(|_| {});
    pair.answer_with = Some(-28);
    for direction in [Direction::Read, Direction::Write] {
        let (result, _) = pair.request(direction, 0, Some(&[1; 100]), 100);
        assert!(matches!(result, Err(IoError::Remote(28))), "{result:?}");
    }
    pair.close();
    pair.assert_empty();
}

#[test]
fn a_request_that_is_too_long_is_not_sent() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    pair.open(|_| {});
    let long = Submission {
        tag: 1,
        con: ConType::Admin,
        direction: Direction::Write,
        header: std::iter::repeat_n(0, 321).collect(),
        data: None,
    };
    pair.submit(long);
    pair.settle();
    let (tag, result, _) = pair.done.remove(0);
    let long = matches!(result, Err(IoError::TooLong { len: 321, max: 320, .. }));
    assert!(long && tag == 1, "{tag} {result:?}");
    let data = pair.buffer(12 << 10 | 1);
    let long = Submission {
        tag: 1,
        con: ConType::Admin,
        direction: Direction::Write,
        header: [0].into_iter().collect(),
        data,
    };
    pair.submit(long);
    pair.settle();
    let (_, result, data) = pair.done.remove(0);
    let error = result.unwrap_err();
    assert!(matches!(error, IoError::TooLong { what: "data", .. }), "{error:?}");
    assert_eq!(error.errno(), errno::EMSGSIZE);
    pair.give(data);
    // The longest of both is fine.
    pair.store(0, 12 << 10);
    let data = pair.buffer(12 << 10);
    let longest = Submission {
        tag: 1,
        con: ConType::Admin,
        direction: Direction::Write,
        header: std::iter::repeat_n(0, 320).collect(),
        data,
    };
    pair.submit(longest);
    pair.settle();
    let (_, result, data) = pair.done.remove(0);
    assert!(result.is_ok(), "{result:?}");
    pair.give(data);
    pair.close();
    pair.assert_empty();
}

#[test]
fn requests_in_flight_end_with_the_session_and_their_buffers_come_back() {
    for keys in KeyMode::ALL {
        let mut pair = Pair::new(keys, server(true));
        pair.open(|_| {});
        pair.hold = true;
        for tag in 0..40 {
            let data = pair.buffer(4096);
            pair.submit(Submission {
                tag,
                con: ConType::Io(0),
                direction: Direction::Read,
                header: [0].into_iter().collect(),
                data,
            });
        }
        pair.settle();
        assert_eq!(
            (pair.done.len(), pair.held.len()),
            (0, 16),
            "as many as the queue is deep"
        );
        pair.server_closes();
        assert_eq!(pair.done.len(), 40);
        for (tag, result, data) in std::mem::take(&mut pair.done) {
            assert!(matches!(result, Err(IoError::Path(_))), "{tag}: {result:?}");
            pair.give(data);
        }
        assert!(
            pair.told
                .iter()
                .any(|o| matches!(o, Output::Down(_, PathError::PeerDisconnected))),
            "{:?}",
            pair.told
        );
        // The server's session lives until its user has answered.
        assert!(
            !pair
                .server_told
                .iter()
                .any(|o| matches!(o, request::Output::SessionClosed { .. }))
        );
        pair.release();
        assert!(
            pair.server_told
                .iter()
                .any(|o| matches!(o, request::Output::SessionClosed { .. }))
        );
        pair.close();
        pair.assert_empty();
    }
}

#[test]
fn closing_ends_requests_with_an_error_and_leaves_nothing() {
    let mut pair = Pair::new(KeyMode::Instant, server(false));
    pair.open(|config| config.connections = 2);
    pair.hold = true;
    let data = pair.buffer(100);
    pair.submit(Submission {
        tag: 9,
        con: ConType::Io(1),
        direction: Direction::Write,
        header: [0].into_iter().collect(),
        data,
    });
    pair.settle();
    pair.close();
    assert!(
        matches!(pair.done[..], [(9, Err(IoError::Path(PathError::Closed)), Some(_))]),
        "{:?}",
        pair.done
    );
    let (_, _, data) = pair.done.remove(0);
    pair.give(data);
    pair.release();
    pair.assert_empty();
}

#[test]
fn a_server_listens_on_all_its_addresses_or_on_none() {
    let mut pair = Pair::over(2, KeyMode::Instant, server(true));
    let before = pair.far.usage();
    let config = |last: u8| ServerConfig {
        addr: hosts::addresses(2)[0],
        port: 999,
        further: vec![([192, 0, 2, last], 999).into()],
        ..server(true)
    };
    let refused = pair.far.with(pair.now, |cx| Server::listen(cx, config(99)));
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("192.0.2.99"), "{text}");
    assert_eq!(pair.far.usage(), before);
    let (mut other, local) = pair.far.with(pair.now, |cx| Server::listen(cx, config(12))).unwrap();
    assert_eq!(local, config(12).listen_addr());
    assert_eq!(pair.far.usage().cms, before.cms + 2);
    pair.far.with(pair.now, |cx| other.stop(cx));
    assert_eq!(pair.far.usage(), before);
}

#[test]
fn a_configuration_that_can_not_be_is_refused() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    let changes: [fn(&mut ServerConfig); 8] = [
        |c| c.queue_depth = 0,
        |c| c.max_chunk_size = 4096,
        |c| c.max_chunk_size = 10_000,
        |c| (c.queue_depth, c.max_chunk_size) = (512, 1 << 20),
        |c| c.queue_depth = 60_000,
        |c| c.max_sessions = 0,
        |c| c.max_paths = 0,
        |c| c.max_connections = 1,
    ];
    for change in changes {
        let mut config = ServerConfig {
            addr: hosts::addresses(2)[0],
            port: 999,
            ..server(true)
        };
        change(&mut config);
        let refused = pair.far.with(pair.now, |cx| Server::listen(cx, config)).map(drop);
        assert!(matches!(refused, Err(Error::Config(_))), "{refused:?}");
    }
}

#[test]
fn refusals_say_why() {
    let limits = ServerConfig {
        allow: AccessList::new(["192.0.2.0/24".parse().unwrap()]),
        max_connections: 3,
        max_sessions: 1,
        ..server(true)
    };
    let mut pair = Pair::new(KeyMode::Instant, limits.clone());
    let error = pair.open_fails(|config| config.connections = 3);
    assert!(error.contains("ECONNRESET"), "{error}");
    pair.open(|_| {});
    let first = pair.session();
    let error = pair.open_fails(|config| config.name = "another".into());
    assert!(error.contains("as many sessions as it allows"), "{error}");
    assert!(pair.client.state(first).is_ok());
    let elsewhere = ServerConfig {
        allow: AccessList::new(["10.0.0.0/8".parse().unwrap()]),
        ..limits
    };
    let mut pair = Pair::new(KeyMode::Instant, elsewhere);
    let error = pair.open_fails(|_| {});
    assert!(error.contains("does not allow this address"), "{error}");
    pair.assert_empty();
}

#[test]
fn nobody_listens_and_the_session_can_not_be_opened() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    let error = pair.open_fails(|config| config.paths[0].dst.set_port(9));
    assert!(error.contains("nobody listens there"), "{error}");
    pair.assert_empty();
}

#[test]
fn a_silent_server_is_given_up() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    pair.open(|_| {});
    let timeout = SessionConfig::new("x", pair.path()).heartbeat.timeout();
    pair.deaf = true;
    pair.pass(timeout + Duration::from_secs(6));
    assert!(
        pair.told
            .iter()
            .any(|o| matches!(o, Output::Down(_, PathError::HeartbeatLost(_)))),
        "{:?}",
        pair.told
    );
}

#[test]
fn an_idle_session_lives_by_its_heartbeats() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    pair.open(|_| {});
    pair.pass(Duration::from_secs(300));
    assert!(pair.told.is_empty(), "{:?}", pair.told);
    exchange(&mut pair, &[512]);
    pair.close();
    pair.assert_empty();
}

#[test]
fn keys_are_what_the_device_can_do() {
    for (mode, chunks, reads) in [
        (
            KeyMode::Instant,
            KeyStrategy::FastRegistration,
            KeyStrategy::FastRegistration,
        ),
        (KeyMode::Windows, KeyStrategy::Window1, KeyStrategy::Window2),
        (KeyMode::Static, KeyStrategy::Static, KeyStrategy::Static),
    ] {
        let caps = mode.caps();
        assert_eq!(KeyStrategy::for_chunks(&caps, true), chunks, "{mode:?}");
        assert_eq!(KeyStrategy::for_reads(&caps, true), reads, "{mode:?}");
    }
}

#[test]
fn a_server_that_is_gone_is_given_up() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    pair.open(|_| {});
    pair.cut = true;
    pair.pass(Duration::from_secs(60));
    assert!(matches!(pair.told[..], [Output::Down(..)]), "{:?}", pair.told);
}
