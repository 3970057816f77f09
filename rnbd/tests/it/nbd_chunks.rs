//! Structured replies, extended headers and what they make possible, without sockets.

use crate::support::{
    GEOMETRY, KIB, MIB, Peer, World, byte_at, connect, contexts, ended_well, information, option_reply,
};
use rnbd::{
    Errno,
    block::{BlockOp, Completion, Extent, Geometry},
    nbd::{
        End,
        proto::{self, BASE_ALLOCATION, Framing, chunk, cmd, cmd_flag, opt, rep, tx},
    },
};

const EIO: u32 = 5;
const EINVAL: u32 = 22;
const ENOTSUP: u32 = 95;

/// A client that has asked for this framing, and for `base:allocation`.
fn go(world: &mut World, framing: Framing) -> Peer {
    let mut c = connect(world);
    let option = match framing {
        Framing::Simple => None,
        Framing::Structured => Some(opt::STRUCTURED_REPLY),
        Framing::Extended => Some(opt::EXTENDED_HEADERS),
    };
    if let Some(option) = option {
        c.option(option, &[]);
        c.option(opt::SET_META_CONTEXT, &contexts("disk", &[BASE_ALLOCATION]));
        c.settle(world);
        assert_eq!(option_reply(&mut c), (option, rep::ACK, Vec::new()));
        let (of, kind, data) = option_reply(&mut c);
        assert_eq!((of, kind), (opt::SET_META_CONTEXT, rep::META_CONTEXT));
        assert_eq!(data, [&[0, 0, 0, 1], BASE_ALLOCATION.as_bytes()].concat());
        assert_eq!(option_reply(&mut c).1, rep::ACK);
    }
    c.option(opt::GO, &information("disk", &[]));
    c.settle(world);
    let export = option_reply(&mut c).2;
    let flags = u16::from_be_bytes([export[10], export[11]]);
    assert_eq!(flags & tx::SEND_DF != 0, framing != Framing::Simple);
    assert_eq!(option_reply(&mut c).1, rep::INFO);
    assert_eq!(option_reply(&mut c).1, rep::ACK);
    assert!(c.answers.is_empty());
    c.framing = framing;
    c
}

/// A reply that is one chunk.
#[derive(PartialEq, Eq, Debug)]
struct Chunk {
    kind: u16,
    cookie: u64,
    /// With extended headers.
    offset: Option<u64>,
    body: Vec<u8>,
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |n, b| n << 8 | u64::from(*b))
}

fn chunk_of(c: &mut Peer) -> Chunk {
    let extended = c.framing == Framing::Extended;
    let head = c.take(16);
    let magic = if extended {
        proto::EXTENDED_REPLY_MAGIC
    } else {
        proto::STRUCTURED_REPLY_MAGIC
    };
    assert_eq!(head[..4], magic.to_be_bytes());
    assert_eq!(head[4..6], [0, 1], "the last chunk");
    let offset = extended.then(|| number(&c.take(8)));
    let len = number(&c.take(if extended { 8 } else { 4 }));
    Chunk {
        kind: number(&head[6..8]) as u16,
        cookie: number(&head[8..]),
        offset,
        body: c.take(len as usize),
    }
}

/// Asks, and is answered by a chunk to that cookie and offset.
fn ask(c: &mut Peer, world: &mut World, command: u16, flags: u16, offset: usize, len: usize, data: &[u8]) -> Chunk {
    let cookie = c.request(command, flags, offset, len, data);
    c.settle(world);
    let chunk = chunk_of(c);
    assert_eq!(chunk.cookie, cookie);
    assert!(chunk.offset.is_none_or(|at| at == offset as u64));
    assert!(c.answers.is_empty());
    chunk
}

/// The error of a chunk that is one.
fn error_of(chunk: &Chunk) -> u32 {
    assert_eq!(chunk.kind, chunk::ERROR);
    assert_eq!(chunk.body[4..], [0, 0], "no text");
    number(&chunk.body[..4]) as u32
}

#[test]
fn reads_come_in_one_chunk_with_their_offset() {
    for framing in [Framing::Structured, Framing::Extended] {
        let world = &mut World::new(GEOMETRY);
        let mut c = go(world, framing);
        for (flags, offset, len) in [(0, 512, 512), (cmd_flag::DF, 4096, 300 * KIB), (0, 0, 3 * MIB)] {
            let chunk = ask(&mut c, world, cmd::READ, flags, offset, len, &[]);
            assert_eq!(chunk.kind, chunk::OFFSET_DATA);
            assert_eq!(number(&chunk.body[..8]), offset as u64);
            assert!(chunk.body[8..].iter().copied().eq((offset..offset + len).map(byte_at)));
        }
        let nothing = ask(&mut c, world, cmd::READ, 0, 512, 0, &[]);
        assert_eq!((nothing.kind, nothing.body.len()), (chunk::NONE, 0));
        let beyond = ask(&mut c, world, cmd::READ, 0, GEOMETRY.size as usize, 512, &[]);
        assert_eq!(error_of(&beyond), EINVAL);
        world.fails = |s| (s.offset >= 128 << 10).then_some(Errno::EIO);
        assert_eq!(error_of(&ask(&mut c, world, cmd::READ, 0, 0, 512 * KIB, &[])), EIO);
        assert_eq!((world.memory.lent(), c.conn.in_flight()), (0, (0, 0)));
    }
}

#[test]
fn other_replies_are_simple_but_with_extended_headers() {
    let world = &mut World::new(GEOMETRY);
    let mut c = go(world, Framing::Structured);
    for command in [cmd::WRITE, cmd::FLUSH, cmd::TRIM, cmd::WRITE_ZEROES, cmd::CACHE] {
        assert_eq!(c.ask(world, command, 0, 0, 4096), 0, "{command}");
    }
    assert_eq!(c.ask(world, cmd::TRIM, 0, 1, 4096), EINVAL);
    let mut c = go(world, Framing::Extended);
    for command in [cmd::FLUSH, cmd::TRIM, cmd::WRITE_ZEROES, cmd::CACHE] {
        let chunk = ask(&mut c, world, command, 0, 4096, 4096, &[]);
        assert_eq!((chunk.kind, chunk.body.len()), (chunk::NONE, 0), "{command}");
    }
    let data = [7; 4096];
    // Clients have to say that there is payload; one that does not still means what it says.
    for flags in [cmd_flag::PAYLOAD_LEN, 0] {
        assert_eq!(
            ask(&mut c, world, cmd::WRITE, flags, 4096, 4096, &data).kind,
            chunk::NONE
        );
        assert_eq!(world.content[4096..8192], data);
    }
    assert_eq!(error_of(&ask(&mut c, world, cmd::TRIM, 0, 1, 4096, &[])), EINVAL);
}

/// The extents of a chunk that has some, and the state of each.
fn states(c: &Peer, status: &Chunk) -> Vec<(u64, u64)> {
    assert_eq!(status.body[..4], [0, 0, 0, 1], "the context's number");
    let (kind, skip, width) = match c.framing {
        Framing::Extended => (chunk::BLOCK_STATUS_EXT, 8, 8),
        _ => (chunk::BLOCK_STATUS, 4, 4),
    };
    assert_eq!(status.kind, kind);
    let extents = status.body[skip..].chunks(2 * width);
    let extents: Vec<_> = extents.map(|e| (number(&e[..width]), number(&e[width..]))).collect();
    assert!(skip == 4 || number(&status.body[4..8]) == extents.len() as u64);
    extents
}

const DATA: u64 = 0;
const HOLE: u64 = 3;

#[test]
fn what_is_asked_for_of_a_range_is_its_state() {
    for framing in [Framing::Structured, Framing::Extended] {
        let world = &mut World::new(GEOMETRY);
        let mut c = go(world, framing);
        let size = GEOMETRY.size;
        let ask = |c: &mut Peer, world: &mut World, flags| ask(c, world, cmd::BLOCK_STATUS, flags, 4096, MIB, &[]);
        let mib = MIB as u64;
        for (holes, all) in [
            (vec![], vec![(mib, DATA)]),
            (core::iter::once(0..size).collect(), vec![(mib, HOLE)]),
            (
                vec![0..8192, 12_288..16_384, mib..size],
                vec![
                    (4096, HOLE),
                    (4096, DATA),
                    (4096, HOLE),
                    (mib - 16_384, DATA),
                    (4096, HOLE),
                ],
            ),
        ] {
            world.holes = holes;
            let status = ask(&mut c, world, 0);
            assert_eq!(states(&c, &status), all);
            let status = ask(&mut c, world, cmd_flag::REQ_ONE);
            assert_eq!(states(&c, &status), all[..1]);
        }
        let asked: Vec<_> = world.seen.iter().map(|s| (s.op, s.offset, s.len)).collect();
        let op = |most| (BlockOp::BlockStatus { most }, 4096, mib);
        assert_eq!(asked, [op(510), op(1)].repeat(3));
        assert_eq!((world.memory.lent(), c.conn.in_flight()), (0, (0, 0)));
    }
}

#[test]
fn a_state_that_can_not_be_told_is_refused_or_an_error() {
    for framing in [Framing::Structured, Framing::Extended] {
        let world = &mut World::new(GEOMETRY);
        let mut c = go(world, framing);
        let size = GEOMETRY.size as usize;
        for (offset, len) in [(size, 512), (0, 0), (0, size + 512), (100, 512), (0, 100)] {
            let refused = ask(&mut c, world, cmd::BLOCK_STATUS, 0, offset, len, &[]);
            assert_eq!(error_of(&refused), EINVAL);
        }
        assert_eq!(world.seen, [], "the device is not asked");
        world.fails = |_| Some(Errno::ECONNABORTED);
        assert_eq!(error_of(&ask(&mut c, world, cmd::BLOCK_STATUS, 0, 0, size, &[])), EIO);
        assert_eq!(c.conn.in_flight(), (0, 0));
    }
}

/// Extents of a device are not trusted: not more than the range is told, nothing of nothing, and one state as one extent.
#[test]
fn what_a_device_says_of_a_range_is_fitted_into_it() {
    let (data, hole) = (Extent::data, Extent::hole);
    for (said, told) in [
        (vec![], vec![(8192, DATA)]),
        (vec![data(0), hole(0)], vec![(8192, DATA)]),
        (vec![hole(4096)], vec![(4096, HOLE)]),
        (vec![hole(4096), data(0), hole(4096)], vec![(8192, HOLE)]),
        (
            vec![data(512), data(512), hole(u64::MAX)],
            vec![(1024, DATA), (7168, HOLE)],
        ),
        (vec![hole(8192), data(8192)], vec![(8192, HOLE)]),
    ] {
        let world = &mut World::new(GEOMETRY);
        let mut c = go(world, Framing::Structured);
        c.hold = true;
        c.request(cmd::BLOCK_STATUS, 0, 4096, 8192, &[]);
        c.settle(world);
        let q = c.held.pop_front().unwrap();
        let completion = Completion {
            extents: said.clone(),
            ..Completion::new(Ok(()), None)
        };
        c.done(world, q.user, completion);
        c.settle(world);
        let status = chunk_of(&mut c);
        assert_eq!(states(&c, &status), told, "{said:?}");
        assert!(c.answers.is_empty());
    }
}

#[test]
fn contexts_hold_for_the_export_that_they_were_chosen_for() {
    let world = &mut World::new(GEOMETRY);
    let mut c = connect(world);
    c.option(opt::STRUCTURED_REPLY, &[]);
    c.settle(world);
    for (option, query, answers) in [
        (opt::LIST_META_CONTEXT, contexts("disk", &[]), 2),
        (opt::LIST_META_CONTEXT, contexts("", &["base:"]), 2),
        (opt::LIST_META_CONTEXT, contexts("disk", &["qemu:"]), 1),
        (opt::SET_META_CONTEXT, contexts("disk", &["base:"]), 1),
        (opt::SET_META_CONTEXT, contexts("other", &["x", BASE_ALLOCATION]), 2),
    ] {
        c.answers.clear();
        c.option(option, &query);
        c.settle(world);
        if answers == 2 {
            let (_, kind, data) = option_reply(&mut c);
            assert_eq!((kind, &data[4..]), (rep::META_CONTEXT, BASE_ALLOCATION.as_bytes()));
            assert_eq!(data[3] == 0, option == opt::LIST_META_CONTEXT);
        }
        assert_eq!(option_reply(&mut c), (option, rep::ACK, Vec::new()));
        assert!(c.answers.is_empty());
    }
    for (query, kind) in [
        (contexts("nothing", &[BASE_ALLOCATION]), rep::ERR_UNKNOWN),
        (vec![0; 3], rep::ERR_INVALID),
    ] {
        c.option(opt::LIST_META_CONTEXT, &query);
        c.settle(world);
        assert_eq!(option_reply(&mut c).1, kind);
    }
    // Chosen for the other one.
    c.option(opt::GO, &information("disk", &[]));
    c.settle(world);
    c.answers.clear();
    c.framing = Framing::Structured;
    assert_eq!(error_of(&ask(&mut c, world, cmd::BLOCK_STATUS, 0, 0, 512, &[])), EINVAL);
}

#[test]
fn extended_headers_stay_and_make_earlier_contexts_void() {
    let world = &mut World::new(GEOMETRY);
    let mut c = connect(world);
    c.option(opt::STRUCTURED_REPLY, &[]);
    c.option(opt::SET_META_CONTEXT, &contexts("disk", &[BASE_ALLOCATION]));
    c.option(opt::EXTENDED_HEADERS, &[]);
    c.settle(world);
    c.answers.clear();
    c.option(opt::STRUCTURED_REPLY, &[]);
    c.option(opt::EXTENDED_HEADERS, &[]);
    c.option(opt::GO, &information("disk", &[]));
    c.settle(world);
    assert_eq!(option_reply(&mut c).1, rep::ERR_EXT_HEADER_REQD);
    assert_eq!(option_reply(&mut c).1, rep::ACK);
    c.answers.clear();
    c.framing = Framing::Extended;
    assert_eq!(error_of(&ask(&mut c, world, cmd::BLOCK_STATUS, 0, 0, 512, &[])), EINVAL);
}

#[test]
fn lengths_beyond_32_bits_reach_the_device_as_one_request() {
    let world = &mut World::new(Geometry {
        size: 5 << 30,
        ..GEOMETRY
    });
    let mut c = go(world, Framing::Extended);
    world.fails = |_| Some(Errno::EIO);
    let len = 5usize << 30;
    for (command, op) in [
        (cmd::TRIM, BlockOp::Discard),
        (
            cmd::WRITE_ZEROES,
            BlockOp::WriteZeroes {
                fua: false,
                may_unmap: true,
            },
        ),
    ] {
        assert_eq!(error_of(&ask(&mut c, world, command, 0, 0, len, &[])), EIO);
        let seen = world.seen.pop().expect("a request");
        assert_eq!((seen.op, seen.offset, seen.len), (op, 0, len as u64));
    }
    world.fails = |_| None;
    world.holes = core::iter::once(4096..5 << 30).collect();
    let status = ask(&mut c, world, cmd::BLOCK_STATUS, 0, 0, len, &[]);
    assert_eq!(states(&c, &status), [(4096, DATA), (len as u64 - 4096, HOLE)]);
    assert_eq!(error_of(&ask(&mut c, world, cmd::READ, 0, 0, len, &[])), EINVAL);
    c.request(cmd::WRITE, cmd_flag::PAYLOAD_LEN, 0, len, &[]);
    let why = format!("a request with {len} bytes of payload");
    assert_eq!(ended_well(&mut c, world), End::Protocol(why));
}

#[test]
fn payload_where_none_belongs_is_skipped() {
    let world = &mut World::new(GEOMETRY);
    let mut c = go(world, Framing::Extended);
    for command in [cmd::READ, cmd::FLUSH, cmd::BLOCK_STATUS, cmd::TRIM, 99] {
        let answer = ask(&mut c, world, command, cmd_flag::PAYLOAD_LEN, 0, 4096, &[0x25; 4096]);
        assert_eq!(error_of(&answer), EINVAL, "{command}");
    }
    assert_eq!(world.seen, []);
    assert_eq!(ask(&mut c, world, cmd::FLUSH, 0, 0, 0, &[]).kind, chunk::NONE);
}

#[test]
fn a_flag_of_extended_headers_is_refused_without_them() {
    for framing in [Framing::Simple, Framing::Structured] {
        let world = &mut World::new(GEOMETRY);
        let mut c = go(world, framing);
        assert_eq!(
            c.ask(world, cmd::WRITE, cmd_flag::PAYLOAD_LEN, 0, 4096),
            EINVAL,
            "{framing:?}"
        );
        assert_eq!(world.seen, []);
        // Its payload is no request.
        assert_eq!(c.ask(world, cmd::FLUSH, 0, 0, 0), 0, "{framing:?}");
    }
}

#[test]
fn to_cache_is_to_read_without_sending() {
    let world = &mut World::new(Geometry {
        size: 80 << 20,
        ..GEOMETRY
    });
    let mut c = Peer::go(world);
    for len in [512, 64 * KIB + 512, 5 * MIB, 70 * MIB] {
        world.seen.clear();
        assert_eq!(c.ask(world, cmd::CACHE, 0, 512, len), 0);
        assert!(c.answers.is_empty());
        let read: u64 = world.seen.iter().map(|s| s.len).sum();
        assert_eq!(read, len.min(32 * MIB) as u64);
        assert!(world.seen.iter().all(|s| s.op == BlockOp::Read));
    }
    world.fails = |s| (s.offset > 0).then_some(Errno::EIO);
    assert_eq!(c.ask(world, cmd::CACHE, 0, 0, 5 * MIB), EIO);
    assert_eq!((world.memory.lent(), c.conn.in_flight()), (0, (0, 0)));
}

#[test]
fn zeroes_that_are_to_be_fast_are_refused_where_they_are_written() {
    let mut errors = Vec::new();
    for max_write_zeroes in [0, 1 << 20] {
        let world = &mut World::new(Geometry {
            max_write_zeroes,
            ..GEOMETRY
        });
        let mut c = Peer::go(world);
        let flags = [0, cmd_flag::FAST_ZERO, cmd_flag::FAST_ZERO | cmd_flag::NO_HOLE];
        errors.push(flags.map(|f| c.ask(world, cmd::WRITE_ZEROES, f, 0, 4096)));
    }
    assert_eq!(errors, [[0, ENOTSUP, ENOTSUP], [0; 3]]);
}
