//! Requests that the server's user holds while their path is lost. The chunk of a request is one piece of memory for all paths: what
//! goes on by another path must not get at it before the user is done with it.

use core::time::Duration;

use rtrs::{
    Direction,
    client::{ConType, PathCommand, Submission, state::PathState},
    server::ServerConfig,
};

use crate::{host::KeyMode, hosts::Pair, server};

const BLOCK: usize = 4096;

/// A session with so many permits over two paths. The user has three blocks of zeroes, and holds what comes.
fn pair(keys: KeyMode, always_invalidate: bool, depth: u32) -> Pair {
    let config = ServerConfig {
        queue_depth: depth,
        ..server(always_invalidate)
    };
    let mut pair = Pair::new(keys, config);
    pair.open_ways(2, |_| ());
    (0..3).for_each(|block| pair.store(block, BLOCK));
    pair.hold = true;
    pair
}

/// Submits a request for a block, tagged with its number.
fn begin(pair: &mut Pair, direction: Direction, block: u8, byte: u8) {
    let data = pair.buffer(BLOCK);
    let buffers = pair.client.buffers(pair.session()).unwrap();
    buffers.write(data.as_ref().unwrap(), 0, &[byte; BLOCK]).unwrap();
    pair.submit(Submission {
        tag: block.into(),
        con: ConType::Io(0),
        direction,
        header: [block].into_iter().collect(),
        data,
    });
    pair.settle();
}

/// Takes down the path that has the request, or the other one.
fn cut(pair: &mut Pair, busy: bool) {
    let paths = pair.statuses();
    let up = paths.iter().filter(|path| path.state == PathState::Connected);
    let found = up.max_by_key(|path| (path.in_flight > 0) == busy).unwrap().id;
    pair.command(found, PathCommand::Disconnect).unwrap();
    pair.pass(Duration::from_secs(1));
}

/// Takes the result of a request, and what its buffer holds.
fn ended(pair: &mut Pair, block: u8) -> (bool, Vec<u8>) {
    let at = pair.done.iter().position(|(tag, ..)| *tag == block.into());
    let (_, result, buffer) = pair.done.remove(at.expect("every request ends"));
    let buffer = buffer.unwrap();
    let mut bytes = vec![0; BLOCK];
    let buffers = pair.client.buffers(pair.session()).unwrap();
    buffers.read(&buffer, 0, &mut bytes).unwrap();
    pair.give(Some(buffer));
    (result.is_ok(), bytes)
}

fn assert_blocks(pair: &Pair, bytes: [u8; 3]) {
    for (block, byte) in bytes.into_iter().enumerate() {
        assert!(pair.file(block) == [byte; BLOCK], "block {block} is not {byte}");
    }
}

#[test]
fn a_request_that_is_held_while_its_path_is_lost_spoils_nothing() {
    for keys in KeyMode::ALL {
        for (always_invalidate, direction) in [
            (true, Direction::Write),
            (false, Direction::Write),
            (true, Direction::Read),
            (false, Direction::Read),
        ] {
            let mut pair = pair(keys, always_invalidate, 1);
            // It goes by the other path, in the same chunk; the next one would too, with other data for another place.
            begin(&mut pair, direction, 0, 10);
            assert_eq!(pair.held.len(), 1);
            cut(&mut pair, true);
            begin(&mut pair, Direction::Write, 1, 20);
            pair.pass(Duration::from_secs(3));
            assert!(pair.done.is_empty() && pair.held.len() == 1, "the chunk is in use");
            pair.release();
            pair.pass(Duration::from_secs(1));
            let (well, bytes) = ended(&mut pair, 0);
            let (byte, written) = if direction == Direction::Write {
                (10, 10)
            } else {
                (0, 0)
            };
            assert!(well && bytes == [byte; BLOCK], "{keys:?}");
            assert!(ended(&mut pair, 1).0);
            assert_blocks(&pair, [written, 20, 0]);
            assert_eq!(pair.statuses().iter().map(|path| path.stats.failovers).sum::<u64>(), 1);
            pair.close();
            pair.assert_empty();
        }
    }
}

#[test]
fn no_path_comes_up_while_a_request_of_a_lost_path_is_held() {
    for (always_invalidate, direction) in [
        (true, Direction::Write),
        (false, Direction::Write),
        (true, Direction::Read),
    ] {
        // The permit of a request that nobody has answered rests for half a minute: the next takes another.
        let mut pair = pair(KeyMode::Instant, always_invalidate, 2);
        begin(&mut pair, direction, 0, 10);
        // The session is lost, and its user is told: the chunk is free as far as the client knows.
        cut(&mut pair, true);
        cut(&mut pair, false);
        assert!(!ended(&mut pair, 0).0);
        let path = pair.statuses()[1].id;
        pair.command(path, PathCommand::Reconnect).unwrap();
        pair.pass(Duration::from_secs(5));
        assert!(pair.client.state(pair.session()).is_err(), "the chunk is in use");
        pair.release();
        pair.pass(Duration::from_secs(5));
        assert_eq!(pair.states(), [PathState::Closed, PathState::Connected]);
        begin(&mut pair, Direction::Write, 1, 20);
        assert!(ended(&mut pair, 1).0);
        let of_first = if direction == Direction::Write { 10 } else { 0 };
        assert_blocks(&pair, [of_first, 20, 0]);
        pair.close();
        pair.assert_empty();
    }
}
