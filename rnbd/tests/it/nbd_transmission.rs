//! Requests of an NBD client and their replies, without sockets.

use std::time::Duration;

use crate::support::{GEOMETRY, KIB, MIB, Peer, World, byte_at, connect, ended_well, stall};
use rnbd::{
    Errno,
    block::{BlockOp, Completion, Geometry},
    nbd::{
        End, Piece, Stall, Want,
        proto::{cmd, cmd_flag, opt, tx},
    },
};

const EPERM: u32 = 1;
const EIO: u32 = 5;
const ENOMEM: u32 = 12;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const ENOTSUP: u32 = 95;
const ESHUTDOWN: u32 = 108;

const TIMEOUT: Duration = Duration::from_millis(100);

#[test]
fn reads_and_writes_of_every_size() {
    let world = &mut World::new(Geometry {
        size: 80 << 20,
        ..GEOMETRY
    });
    let mut c = Peer::go(world);
    // One part, several, more than one request may take of the buffers, and the most that a client may ask for.
    for len in [512, 4096, 64 * KIB, 64 * KIB + 512, 256 * KIB, 5 * MIB, 32 * MIB] {
        let data: Vec<u8> = (0..len).map(|i| (i % 253) as u8 ^ (len >> 12) as u8).collect();
        let cookie = c.request(cmd::WRITE, 0, 512, len, &data);
        c.settle(world);
        assert_eq!(c.reply(), (0, cookie), "{len}");
        let cookie = c.request(cmd::READ, 0, 512, len, &[]);
        c.settle(world);
        assert_eq!(c.reply(), (0, cookie), "{len}");
        assert!(c.take(len) == data, "{len}");
        assert!(c.answers.is_empty());
    }
    let parts: Vec<_> = world.seen.iter().filter(|s| s.len > 64 << 10).collect();
    assert!(parts.is_empty(), "{parts:?}");
    assert_eq!(world.memory.lent(), 0);
    assert_eq!(c.conn.in_flight(), (0, 0));
}

#[test]
fn requests_in_flight_are_all_answered_once_in_whatever_order() {
    let world = &mut World::new(Geometry {
        queue_depth: 2000,
        max_transfer: 4096,
        ..GEOMETRY
    });
    let mut c = Peer::go(world);
    c.hold = true;
    let mut expected = std::collections::BTreeMap::new();
    for n in 0..1500 {
        let offset = n * 7 % 1000 * 512;
        expected.insert(c.request(cmd::READ, 0, offset, 1024, &[]), offset);
    }
    c.settle(world);
    assert_eq!(c.held.len(), 1024);
    assert_eq!(c.conn.in_flight().0, 1024);
    assert_eq!(stall(&mut c), Some(Stall::Requests));
    while !c.held.is_empty() {
        let n = c.held.len();
        c.held.rotate_left(n / 3);
        c.finish_one(world);
        c.settle(world);
    }
    for _ in 0..1500 {
        let (error, cookie) = c.reply();
        assert_eq!(error, 0);
        let offset = expected.remove(&cookie).expect("each cookie once");
        let data: Vec<u8> = (offset..offset + 1024).map(byte_at).collect();
        assert_eq!(c.take(1024), data);
    }
    assert!(c.answers.is_empty() && expected.is_empty());
}

#[test]
fn bytes_in_flight_are_bounded_by_half_of_the_buffers() {
    let world = &mut World::new(GEOMETRY);
    let mut c = Peer::go(world);
    c.hold = true;
    for n in 0..20 {
        c.request(cmd::READ, 0, n * 64 * KIB, 64 * KIB, &[]);
    }
    c.settle(world);
    assert_eq!(c.held.len(), 8, "of 16 buffers");
    assert_eq!(stall(&mut c), Some(Stall::Bytes));
    c.takes = 0;
    c.finish_one(world);
    c.settle(world);
    assert_eq!(c.held.len(), 7, "an answer that is not taken counts");
    c.takes = usize::MAX;
    c.settle(world);
    assert_eq!(c.held.len(), 8);

    // One alone may be larger; then it is alone.
    let mut c = Peer::go(world);
    c.hold = true;
    let large = c.request(cmd::READ, 0, 0, 2 * MIB, &[]);
    let small = c.request(cmd::READ, 0, 0, 512, &[]);
    for _ in 0..32 {
        c.settle(world);
        assert_eq!(c.conn.in_flight(), (1, 2 << 20));
        c.finish_one(world);
    }
    c.settle(world);
    assert_eq!(c.reply(), (0, large));
    c.take(2 * MIB);
    c.finish_one(world);
    c.settle(world);
    assert_eq!(c.reply(), (0, small));
}

#[test]
fn what_is_wrong_is_refused_and_the_connection_goes_on() {
    let world = &mut World::new(GEOMETRY);
    let size = GEOMETRY.size as usize;
    let mut c = Peer::go(world);
    for (command, flags, offset, len, error) in [
        (cmd::READ, 0, size, 512, EINVAL),
        (cmd::READ, 0, 1, 512, EINVAL),
        (cmd::READ, 0, 0, 33 * MIB, EINVAL),
        (cmd::WRITE, 0, size, 512, ENOSPC),
        (cmd::WRITE, 0, size - 512, 100 * KIB, ENOSPC),
        (cmd::WRITE, 0, 100, 3 * MIB, EINVAL),
        (cmd::WRITE, 0, 0, 32 * MIB, ENOSPC),
        (cmd::WRITE, 1 << 4, 0, 512, EINVAL),
        (cmd::TRIM, 0, size, 512, EINVAL),
        (cmd::WRITE_ZEROES, 0, size, 512, ENOSPC),
        (cmd::READ, cmd_flag::NO_HOLE, 0, 512, EINVAL),
        (cmd::BLOCK_STATUS, 0, 0, 512, EINVAL),
        (cmd::CACHE, 0, size, 512, EINVAL),
        (8, 0, 0, 0, EINVAL),
        (cmd::READ, cmd_flag::DF, 0, 512, EINVAL),
        (99, 0, 0, 512, EINVAL),
    ] {
        assert_eq!(
            c.ask(world, command, flags, offset, len),
            error,
            "{command} {offset} {len}"
        );
    }
    assert_eq!(world.seen, [], "the device hears of none");
    for zero in [cmd::READ, cmd::WRITE, cmd::TRIM, cmd::WRITE_ZEROES, cmd::CACHE] {
        assert_eq!(c.ask(world, zero, cmd_flag::FUA, 0, 0), 0);
    }
    assert_eq!(world.seen, [], "nothing is nothing");
    assert_eq!(c.ask(world, cmd::WRITE, 0, 512, 512), 0);
    assert_eq!(world.content[512..1024], [0x5a; 512]);
}

#[test]
fn read_only_devices_refuse_changes() {
    let world = &mut World::new(Geometry {
        read_only: true,
        ..GEOMETRY
    });
    let mut c = Peer::go(world);
    for change in [cmd::WRITE, cmd::TRIM, cmd::WRITE_ZEROES] {
        assert_eq!(c.ask(world, change, 0, 0, 512), EPERM);
    }
    assert_eq!(c.ask(world, cmd::FLUSH, 0, 0, 0), 0);
    assert_eq!(c.ask(world, cmd::READ, cmd_flag::FUA, 0, 512), 0);
}

#[test]
fn errors_of_the_device_reach_the_client_and_the_first_counts() {
    let world = &mut World::new(GEOMETRY);
    let mut c = Peer::go(world);
    let fails: [(crate::support::Fails, u32); 6] = [
        (|_| Some(Errno::EROFS), EPERM),
        (|_| Some(Errno::ENOMEM), ENOMEM),
        (|_| Some(Errno::ENOSPC), ENOSPC),
        (|_| Some(Errno::EOPNOTSUPP), ENOTSUP),
        (|_| Some(Errno::ESHUTDOWN), ESHUTDOWN),
        (|_| Some(Errno::ECONNABORTED), EIO),
    ];
    for (fail, error) in fails {
        world.fails = fail;
        for command in [cmd::READ, cmd::WRITE, cmd::TRIM, cmd::WRITE_ZEROES, cmd::FLUSH] {
            assert_eq!(c.ask(world, command, 0, 0, 64 * KIB), error, "{command}");
        }
    }
    // Some parts fail: no data is sent.
    world.fails = |s| match s.offset {
        0x2_0000 => Some(Errno::ENOSPC),
        0x3_0000 => Some(Errno::EIO),
        _ => None,
    };
    for len in [256 * KIB, MIB] {
        assert_eq!(c.ask(world, cmd::READ, 0, 0, len), ENOSPC);
        assert_eq!(c.ask(world, cmd::WRITE, 0, 0, len), ENOSPC);
        assert!(c.answers.is_empty());
    }
    assert_eq!(world.memory.lent(), 0);
}

#[test]
fn a_session_that_is_gone_has_no_buffers() {
    let world = &mut World::new(GEOMETRY);
    let mut c = Peer::go(world);
    world.memory.refuses = Some(Errno::ESHUTDOWN);
    let mut cookies = Vec::new();
    for (command, len) in [
        (cmd::READ, 512),
        (cmd::READ, MIB),
        (cmd::WRITE, 512),
        (cmd::WRITE, 300 * KIB),
    ] {
        let data = vec![1; if command == cmd::WRITE { len } else { 0 }];
        cookies.push(c.request(command, 0, 0, len, &data));
    }
    c.settle(world);
    cookies.push(c.request(cmd::FLUSH, 0, 0, 0, &[]));
    c.settle(world);
    for cookie in &cookies[..4] {
        assert_eq!(c.reply(), (ESHUTDOWN, *cookie));
    }
    assert_eq!(c.reply(), (0, cookies[4]));
    assert!(c.answers.is_empty());
}

#[test]
fn forced_writes_cost_only_where_there_is_a_cache() {
    let fua = cmd_flag::FUA;
    let ops = |geometry: Geometry, later: Option<Geometry>| {
        let world = &mut World::new(geometry);
        let mut c = Peer::go(world);
        if let Some(later) = later {
            c.conn.set_geometry(0, later);
            world.geometry = later;
        }
        for command in [cmd::WRITE, cmd::WRITE_ZEROES, cmd::TRIM] {
            assert_eq!(c.ask(world, command, fua, 0, 512), 0);
        }
        world.seen.iter().map(|s| s.op).collect::<Vec<_>>()
    };
    let zeroes = |fua| BlockOp::WriteZeroes { fua, may_unmap: true };
    let forced = [
        BlockOp::Write { fua: true },
        zeroes(true),
        BlockOp::Discard,
        BlockOp::Flush,
    ];
    assert_eq!(ops(GEOMETRY, None), forced);
    let plain = Geometry {
        write_cache: false,
        fua: false,
        ..GEOMETRY
    };
    let free = [BlockOp::Write { fua: false }, zeroes(false), BlockOp::Discard];
    assert_eq!(ops(plain, None), free);
    // What the client was told stays true.
    let lost = Geometry { fua: false, ..GEOMETRY };
    let flushed = [
        BlockOp::Write { fua: false },
        BlockOp::Flush,
        zeroes(false),
        BlockOp::Flush,
        BlockOp::Discard,
        BlockOp::Flush,
    ];
    assert_eq!(ops(GEOMETRY, Some(lost)), flushed);
}

#[test]
fn a_forced_trim_is_a_discard_and_then_a_flush() {
    let world = &mut World::new(GEOMETRY);
    let mut c = Peer::go(world);
    c.hold = true;
    let trim = c.request(cmd::TRIM, cmd_flag::FUA, 4096, 8192, &[]);
    let read = c.request(cmd::READ, 0, 0, 512, &[]);
    c.settle(world);
    assert_eq!(
        c.held.iter().map(|q| q.op).collect::<Vec<_>>(),
        [BlockOp::Discard, BlockOp::Read]
    );
    c.finish_one(world);
    assert_eq!(
        c.held.back().map(|q| q.op),
        Some(BlockOp::Flush),
        "when the discard is over"
    );
    assert!(!c.conn.has_output());
    c.finish_one(world);
    c.finish_one(world);
    c.settle(world);
    assert_eq!(c.reply(), (0, read));
    c.take(512);
    assert_eq!(c.reply(), (0, trim));

    world.fails = |_| Some(Errno::EIO);
    c.hold = false;
    world.seen.clear();
    assert_eq!(c.ask(world, cmd::TRIM, cmd_flag::FUA, 0, 512), EIO);
    assert_eq!(world.seen.len(), 1, "nothing to make durable");
}

#[test]
fn later_requests_go_by_what_the_device_has_become() {
    let world = &mut World::new(GEOMETRY);
    let mut c = Peer::go(world);
    let now = Geometry {
        size: 1 << 20,
        max_transfer: 4096,
        max_discard: 0,
        queue_depth: 4,
        ..GEOMETRY
    };
    c.conn.set_geometry(1, now);
    assert_eq!(c.ask(world, cmd::READ, 0, 2 * MIB, 512), 0, "of another device");
    c.take(512);
    world.geometry = now;
    c.conn.set_geometry(0, now);
    assert_eq!(c.ask(world, cmd::READ, 0, MIB, 512), EINVAL);
    assert_eq!(c.ask(world, cmd::TRIM, 0, 0, 512), ENOTSUP);
    world.seen.clear();
    assert_eq!(c.ask(world, cmd::WRITE, 0, 0, 16 * KIB), 0);
    assert_eq!(world.seen.iter().map(|s| s.len).collect::<Vec<_>>(), [4096; 4]);
    c.conn.set_geometry(0, Geometry { read_only: true, ..now });
    assert_eq!(c.ask(world, cmd::WRITE, 0, 0, 512), EPERM);
    // A client that comes later is told so.
    c = connect(world);
    c.conn.set_geometry(0, now);
    c.option(opt::EXPORT_NAME, b"");
    c.settle(world);
    let answer = c.take(10);
    assert_eq!(answer[..8], now.size.to_be_bytes());
    assert_eq!(u16::from_be_bytes([answer[8], answer[9]]) & tx::SEND_TRIM, 0);
}

/// A device is resized, or comes back as another one, under clients that stay connected.
#[test]
fn a_client_keeps_the_size_that_it_was_told_unless_there_is_less() {
    let size = GEOMETRY.size as usize;
    let world = &mut World::new(Geometry {
        size: 2 * GEOMETRY.size,
        ..GEOMETRY
    });
    world.geometry = GEOMETRY;
    let mut c = Peer::go(world);
    let beyond = |c: &mut Peer, world: &mut World, at: usize| {
        assert_eq!(c.ask(world, cmd::READ, 0, at, 512), EINVAL);
        assert_eq!(c.ask(world, cmd::TRIM, 0, at, 512), EINVAL);
        for command in [cmd::WRITE, cmd::WRITE_ZEROES] {
            assert_eq!(c.ask(world, command, 0, at, 512), ENOSPC);
        }
        assert_eq!(c.ask(world, cmd::WRITE, 0, at - 512, 512), 0);
    };
    beyond(&mut c, world, size);
    for (now, end) in [(2 * size, size), (size / 2, size / 2), (4096, 4096), (2 * size, size)] {
        world.geometry.size = now as u64;
        c.conn.set_geometry(0, world.geometry);
        beyond(&mut c, world, end);
    }
    // Who comes later is told.
    let mut late = Peer::go(world);
    beyond(&mut late, world, 2 * size);
}

#[test]
fn large_payload_goes_straight_into_buffers() {
    let world = &mut World::new(GEOMETRY);
    let mut c = Peer::go(world);
    for _ in 0..2 {
        c.request(cmd::WRITE, 0, 0, 64 * KIB, &[7; 64 * KIB]);
    }
    // The first is not expected to be large.
    c.receive(world, 28 + 4096);
    c.poll(world);
    let Want::Payload { at, len, then, .. } = c.conn.want() else {
        panic!("payload is wanted")
    };
    assert_eq!((at, len, then.len()), (4096, 60 * KIB, 4096));
    assert_eq!(c.receive(world, usize::MAX), 60 * KIB + 4096);
    c.poll(world);
    let Want::Payload { at, len, .. } = c.conn.want() else {
        panic!("payload is wanted")
    };
    assert_eq!((at, len), (4096 - 28, 64 * KIB - (4096 - 28)));
    c.settle(world);
    assert_eq!([c.reply(), c.reply()].map(|(error, _)| error), [0, 0]);
    assert_eq!(world.content[..64 * KIB], [7; 64 * KIB]);
}

/// Buffers that a client keeps from others although it does not use them.
#[test]
fn a_client_that_stops_in_a_write_gives_the_buffer_back() {
    for before in [0, 1, 1000, 64 * KIB, 65 * KIB, 100 * KIB - 1] {
        let world = &mut World::new(GEOMETRY);
        let mut c = Peer::go(world);
        let data: Vec<u8> = (0..100 * KIB).map(|i| (i % 251) as u8).collect();
        c.request(cmd::WRITE, 0, 0, data.len(), &data[..before]);
        c.settle(world);
        assert_eq!(world.memory.lent(), 1);
        c.pass(world, TIMEOUT - Duration::from_millis(1));
        assert_eq!(world.memory.lent(), 1, "not yet");
        let next = before + 1.min(data.len() - before - 1);
        c.send(&data[before..next]);
        c.settle(world);
        c.pass(world, TIMEOUT - Duration::from_millis(1));
        let kept = usize::from(next > before);
        assert_eq!(world.memory.lent(), kept, "each byte makes it patient again");
        c.pass(world, TIMEOUT);
        assert_eq!(world.memory.lent(), 0, "{before}");
        assert_eq!(c.conn.next_timeout(), None);

        // It goes on when the client does, also bit by bit, and waits for a buffer.
        c.send(&data[next..data.len() - 1]);
        c.settle_in(world, &mut || 777, &mut || usize::MAX);
        let taken: Vec<_> = std::iter::from_fn(|| world.memory.take()).collect();
        c.send(&data[data.len() - 1..]);
        c.settle(world);
        if c.answers.is_empty() {
            assert_eq!(stall(&mut c), Some(Stall::Buffers));
        }
        taken.into_iter().for_each(|b| world.memory.give(b));
        c.settle(world);
        assert_eq!(c.reply().0, 0);
        assert!(world.content[..data.len()] == data, "{before}");
        assert_eq!(world.memory.lent(), 0);
    }
}

#[test]
fn a_client_that_takes_nothing_gives_the_buffers_back() {
    let world = &mut World::new(GEOMETRY);
    let mut c = Peer::go(world);
    c.takes = 0;
    world.pass(Duration::from_secs(10));
    let reads = [(0, 64 * KIB), (4096, 512), (128 * KIB, 192 * KIB)];
    for (offset, len) in reads {
        c.request(cmd::READ, 0, offset, len, &[]);
    }
    c.settle(world);
    assert_eq!(world.memory.lent(), 5);
    assert_eq!(c.conn.next_timeout(), Some(world.now + TIMEOUT));
    c.takes = 1000;
    c.settle(world);
    c.pass(world, TIMEOUT - Duration::from_millis(1));
    c.takes = 10;
    c.settle(world);
    c.pass(world, TIMEOUT - Duration::from_millis(1));
    assert_eq!(world.memory.lent(), 5, "some of it was taken meanwhile");
    c.pass(world, Duration::from_millis(1));
    assert_eq!(world.memory.lent(), 0);
    assert_eq!(c.conn.in_flight().0, 3);
    // What comes later has its time as well.
    c.request(cmd::READ, 0, 8192, 4096, &[]);
    c.settle(world);
    assert_eq!(world.memory.lent(), 1);
    c.pass(world, TIMEOUT);
    assert_eq!((world.memory.lent(), c.conn.next_timeout()), (0, None));

    c.takes = usize::MAX;
    c.settle_in(world, &mut || usize::MAX, &mut || 1237);
    for (n, (offset, len)) in reads.into_iter().chain([(8192, 4096)]).enumerate() {
        assert_eq!(c.reply(), (0, n as u64 + 1));
        let data: Vec<u8> = (offset..offset + len).map(byte_at).collect();
        assert!(c.take(len) == data);
    }
}

#[test]
fn clients_that_want_the_same_buffers_do_not_wait_for_each_other() {
    let geometry = Geometry {
        queue_depth: 8,
        ..GEOMETRY
    };
    let world = &mut World::new(geometry);
    world.memory.depth = 3;
    let mut clients: Vec<Peer> = (0..4).map(|_| Peer::go(world)).collect();
    for (n, c) in clients.iter_mut().enumerate() {
        c.hold = true;
        for i in 0..3 {
            c.request(cmd::READ, 0, (n + i) * 64 * KIB, 128 * KIB, &[]);
            c.request(cmd::WRITE, 0, 2 * MIB, 128 * KIB, &[n as u8; 128 * KIB]);
        }
    }
    let mut rounds = 0;
    while clients.iter().any(|c| c.answers.len() < 3 * (128 * KIB + 32)) {
        for c in &mut clients {
            c.settle(world);
            if !c.held.is_empty() {
                c.finish_one(world);
            }
        }
        rounds += 1;
        assert!(rounds < 1000, "nothing moves any more");
    }
    for (n, c) in clients.iter_mut().enumerate() {
        for i in 0..3 {
            assert_eq!(c.reply().0, 0);
            let first = (n + i) * 64 * KIB;
            assert!(c.take(128 * KIB) == (first..first + 128 * KIB).map(byte_at).collect::<Vec<_>>());
            assert_eq!(c.reply().0, 0);
        }
    }
    assert_eq!(world.memory.lent(), 0);
}

#[test]
fn a_read_that_lacks_buffers_goes_on_with_those_that_it_has() {
    let world = &mut World::new(GEOMETRY);
    world.memory.depth = 2;
    let mut clients = [Peer::go(world), Peer::go(world)];
    for c in &mut clients {
        c.hold = true;
        c.request(cmd::READ, 0, 64 * KIB, 256 * KIB, &[]);
        c.receive(world, usize::MAX);
    }
    assert_eq!(clients.each_ref().map(|c| c.held.len()), [2, 0]);
    assert_eq!(stall(&mut clients[1]), Some(Stall::Buffers));
    for c in &mut clients {
        c.hold = false;
        while !c.held.is_empty() {
            c.finish_one(world);
        }
    }
    for _ in 0..2 {
        clients.iter_mut().for_each(|c| c.settle(world));
    }
    let data: Vec<u8> = (64 * KIB..320 * KIB).map(byte_at).collect();
    for c in &mut clients {
        assert_eq!(c.reply().0, 0);
        assert!(c.take(data.len()) == data);
    }
    assert_eq!(world.memory.lent(), 0);
}

#[test]
fn what_is_under_way_is_answered_when_the_client_leaves() {
    for disconnect in [true, false] {
        let world = &mut World::new(GEOMETRY);
        let mut c = Peer::go(world);
        c.hold = true;
        for n in 0..12 {
            c.request(cmd::READ, 0, n * 64 * KIB, 64 * KIB, &[]);
        }
        if disconnect {
            c.request(cmd::DISC, 0, 0, 0, &[]);
            c.request(cmd::WRITE, 0, 0, 512, &[1; 512]);
        } else {
            c.closed = true;
        }
        while c.answers.len() < 12 * (16 + 64 * KIB) {
            assert_eq!(c.conn.ended(), None);
            c.settle(world);
            c.finish_one(world);
            c.settle(world);
        }
        assert_eq!(ended_well(&mut c, world), End::Left);
        assert_eq!(
            world.content[..512],
            (0..512).map(byte_at).collect::<Vec<_>>(),
            "after the end"
        );
    }
}

#[test]
fn half_a_write_is_no_write() {
    let world = &mut World::new(GEOMETRY);
    for len in [8192, 100 * KIB] {
        for staged in [false, true] {
            let mut c = Peer::go(world);
            world.seen.clear();
            let cookie = c.request(cmd::WRITE, 0, 0, len, &[1; 4096]);
            c.settle(world);
            if staged {
                c.pass(world, TIMEOUT);
            }
            c.closed = true;
            assert_eq!(ended_well(&mut c, world), End::CutShort("a write"));
            assert_eq!(c.reply(), (EIO, cookie));
            assert_eq!(world.seen, []);
            assert_eq!(world.memory.lent(), 0);
        }
    }
    let mut c = Peer::go(world);
    let refused = c.request(cmd::WRITE, 0, 1, 8192, &[1; 4096]);
    c.closed = true;
    assert_eq!(ended_well(&mut c, world), End::CutShort("a write"));
    assert_eq!(c.reply(), (EINVAL, refused));
}

#[test]
fn a_server_that_stops_answers_what_has_come() {
    let world = &mut World::new(GEOMETRY);
    let mut c = Peer::go(world);
    c.hold = true;
    let write = c.request(cmd::WRITE, 0, 0, 4096, &[1; 4096]);
    let half = c.request(cmd::WRITE, 0, 8192, 4096, &[1; 100]);
    c.settle(world);
    c.call(world, |conn, now, device| conn.stop(now, device));
    c.send(&[1; 4096]);
    c.settle(world);
    assert_eq!(c.reply(), (ESHUTDOWN, half));
    assert_eq!(c.conn.ended(), None);
    c.finish_one(world);
    assert_eq!(ended_well(&mut c, world), End::Stopped);
    assert_eq!(c.reply(), (0, write));
    assert_eq!(world.content[..4096], [1; 4096]);
    assert_eq!(c.socket.len(), 4096, "no longer read");

    let mut c = connect(world);
    c.call(world, |conn, now, device| conn.stop(now, device));
    assert_eq!(ended_well(&mut c, world), End::Stopped);
}

#[test]
fn a_client_that_is_cut_off_is_over_when_the_device_is_done() {
    let world = &mut World::new(GEOMETRY);
    let mut c = Peer::go(world);
    c.takes = 100;
    c.request(cmd::READ, 0, 0, 64 * KIB, &[]);
    c.settle(world);
    c.hold = true;
    c.request(cmd::TRIM, cmd_flag::FUA, 0, 512, &[]);
    c.request(cmd::WRITE, 0, 0, 64 * KIB, &[1; 64 * KIB]);
    c.request(cmd::READ, 0, 0, 320 * KIB, &[]);
    c.request(cmd::WRITE, 0, 0, 64 * KIB, &[2; 10]);
    c.settle(world);
    assert!(c.held.len() >= 3, "{:?}", c.held);
    c.call(world, |conn, now, device| conn.cut(now, device));
    c.poll(world);
    assert!(!c.conn.has_output());
    while !c.held.is_empty() {
        assert_eq!(c.conn.ended(), None);
        assert_eq!(world.memory.lent(), c.held.iter().filter(|q| q.data.is_some()).count());
        c.finish_one(world);
    }
    assert_eq!(ended_well(&mut c, world), End::Broken);
    assert_eq!(world.memory.lent(), 0);
    assert!(world.seen.iter().all(|s| s.op != BlockOp::Flush), "for nobody");
    c.call(world, |conn, now, device| conn.cut(now, device));
    c.call(world, |conn, now, device| conn.eof(now, device));
    c.call(world, |conn, now, device| conn.timeout(now, device));
    assert_eq!(ended_well(&mut c, world), End::Broken);
}

#[test]
fn a_read_whose_buffer_was_lost_fails() {
    let world = &mut World::new(GEOMETRY);
    let mut c = Peer::go(world);
    c.hold = true;
    let lost = c.request(cmd::READ, 0, 0, 512, &[]);
    c.settle(world);
    let q = c.held.pop_front().unwrap();
    // The session is gone, and the buffer with it.
    c.done(world, q.user, Completion::new(Ok(()), None));
    c.settle(world);
    assert_eq!(c.reply(), (EIO, lost));
}

#[test]
fn replies_go_out_many_at_a_time_but_not_all() {
    let world = &mut World::new(Geometry {
        queue_depth: 400,
        max_transfer: 4096,
        ..GEOMETRY
    });
    let mut c = Peer::go(world);
    c.takes = 0;
    for _ in 0..100 {
        c.request(cmd::READ, 0, 0, 4096, &[]);
    }
    c.settle(world);
    let mut pieces = Vec::new();
    c.conn.gather(&mut pieces);
    assert_eq!(pieces.len(), 2 * 64);
    assert!(matches!(pieces[1], Piece::Data { at: 0, len: 4096, .. }));
    c.call(world, |conn, now, device| conn.sent(now, 16 + 100, device));
    let mut pieces = Vec::new();
    c.conn.gather(&mut pieces);
    assert_eq!(pieces.len(), 2 * 64 - 1);
    assert!(matches!(pieces[0], Piece::Data { at: 100, len: 3996, .. }));
}
