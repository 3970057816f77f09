//! Whatever an NBD client sends, and however its bytes are cut, without sockets.

use std::time::Duration;

use crate::support::{GEOMETRY, Peer, World, information, option_bytes};
use proptest::prelude::*;
use rnbd::{
    Errno,
    block::Geometry,
    nbd::{
        End, Piece,
        proto::{self, Request, cmd, opt},
    },
};

/// Parts of what a client may send: bytes of one kind or another.
#[derive(Clone, Debug)]
enum Part {
    Noise(Vec<u8>),
    Option(u32, Vec<u8>),
    Request {
        command: u16,
        flags: u16,
        offset: u32,
        len: u32,
        fill: u8,
    },
    /// One bit of what follows is turned.
    Wrong(u16),
}

fn parts(go: bool) -> impl Strategy<Value = Vec<u8>> {
    let option = prop_oneof![
        (0u32..12, prop::collection::vec(any::<u8>(), 0..20)).prop_map(|(o, d)| Part::Option(o, d)),
        (0u32..12, "[a-z/]{0,5}").prop_map(|(o, name)| Part::Option(o, information(&name, &[1, 2]))),
        Just(Part::Option(opt::INFO, vec![0; 20_000])),
        Just(Part::Option(opt::GO, information("", &[]))),
    ];
    let request = (0u16..8, 0u16..4, 0u32..300, 0u32..300, any::<u8>());
    let request = request.prop_map(|(command, flags, offset, len, fill)| Part::Request {
        command: if command == cmd::DISC { cmd::WRITE } else { command },
        flags,
        offset: offset * 512,
        len: len * 512,
        fill,
    });
    let noise = prop::collection::vec(any::<u8>(), 0..100).prop_map(Part::Noise);
    let part = if go {
        prop_oneof![1 => any::<u16>().prop_map(Part::Wrong), 60 => request].boxed()
    } else {
        prop_oneof![1 => noise, 1 => any::<u16>().prop_map(Part::Wrong), 8 => option, 8 => request].boxed()
    };
    prop::collection::vec(part, 0..24).prop_map(move |parts| bytes_of(&parts, go))
}

fn bytes_of(parts: &[Part], go: bool) -> Vec<u8> {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    if go {
        bytes.extend(option_bytes(opt::GO, &information("", &[])));
    }
    let mut wrong = None;
    for (n, part) in parts.iter().enumerate() {
        let mut next = match part {
            Part::Noise(noise) => noise.clone(),
            Part::Option(option, data) => option_bytes(*option, data),
            Part::Request {
                command,
                flags,
                offset,
                len,
                fill,
            } => {
                let q = Request {
                    flags: *flags,
                    command: *command,
                    cookie: n as u64,
                    offset: u64::from(*offset),
                    len: u64::from(*len),
                };
                let payload = if *command == cmd::WRITE { *len as usize } else { 0 };
                let mut b = q.to_bytes().to_vec();
                b.extend((0..payload).map(|i| fill.wrapping_add((i / 100) as u8)));
                b
            }
            Part::Wrong(bit) => {
                wrong = Some(usize::from(*bit));
                continue;
            }
        };
        if let (Some(bit), false) = (wrong, next.is_empty()) {
            let at = bit / 8 % next.len().min(40);
            next[at] ^= 1 << (bit % 8);
            wrong = None;
        }
        bytes.extend(next);
    }
    bytes
}

fn geometries() -> impl Strategy<Value = Geometry> {
    let transfer = prop_oneof![Just(4096u32), Just(16 << 10), Just(64 << 10)];
    (transfer, 1u32..20, any::<[bool; 4]>()).prop_map(|(max_transfer, queue_depth, bits)| Geometry {
        size: 128 << 10,
        max_transfer,
        queue_depth,
        read_only: bits[0] && bits[1],
        write_cache: bits[1],
        fua: bits[2],
        max_discard: if bits[3] { 1 << 20 } else { 0 },
        ..GEOMETRY
    })
}

/// Cuts bytes into pieces, over and over again.
fn cuts(sizes: &[usize]) -> impl FnMut() -> usize {
    let mut sizes: Vec<usize> = sizes.to_vec();
    move || {
        sizes.rotate_left(1);
        *sizes.last().expect("a size")
    }
}

/// Runs a client that sends this and leaves. Returns answers, what the device saw, its content, and the end.
fn outcome(
    geometry: Geometry,
    sent: &[u8],
    receive: &[usize],
    transmit: &[usize],
) -> (Vec<u8>, Vec<crate::support::Seen>, Vec<u8>, End) {
    let mut world = World::new(geometry);
    let mut c = Peer::new(&world);
    c.send(sent);
    c.closed = true;
    c.settle_in(&mut world, &mut cuts(receive), &mut cuts(transmit));
    let end = c.conn.ended().expect("an end").clone();
    assert_eq!(world.memory.lent(), 0);
    (c.answers, world.seen, world.content, end)
}

fn sizes() -> impl Strategy<Value = Vec<usize>> {
    let size = prop_oneof![1usize..40, 1usize..5000, Just(1 << 20)];
    prop::collection::vec(size, 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn how_the_bytes_are_cut_changes_nothing(
        geometry in geometries(),
        sent in prop_oneof![parts(true), parts(false)],
        receive in sizes(),
        transmit in sizes(),
    ) {
        let whole = outcome(geometry, &sent, &[usize::MAX], &[usize::MAX]);
        let cut = outcome(geometry, &sent, &receive, &transmit);
        prop_assert_eq!(whole.3, cut.3);
        prop_assert!(whole.1 == cut.1, "the device saw something else");
        prop_assert!(whole.0 == cut.0, "the client was answered something else");
        prop_assert!(whole.2 == cut.2);
    }

    #[test]
    fn whatever_comes_and_whenever_all_is_bounded_and_given_back(
        geometry in geometries(),
        sent in prop_oneof![parts(true), parts(false), prop::collection::vec(any::<u8>(), 0..3000)],
        steps in prop::collection::vec((0u8..8, 0usize..3000), 0..300),
        ending in 0u8..3,
    ) {
        let mut world = World::new(geometry);
        world.fails = |s| (s.offset % 7 == 3).then_some(Errno::ENOSPC);
        let mut c = Peer::new(&world);
        c.send(&sent);
        c.hold = true;
        let share = (u64::from(geometry.queue_depth / 2) * u64::from(geometry.max_transfer)).max(1);
        for (what, size) in steps {
            match what {
                0..=2 => _ = c.receive(&mut world, size * 50),
                3 => _ = c.transmit(&mut world, size),
                4 => _ = c.poll(&mut world),
                5 if !c.held.is_empty() => {
                    let n = c.held.len();
                    c.held.rotate_left(size % n);
                    c.finish_one(&mut world);
                }
                6 => c.pass(&mut world, Duration::from_millis(size as u64 / 10)),
                7 if size > 2950 => c.call(&mut world, |conn, now, device| conn.cut(now, device)),
                _ => {}
            }
            let (requests, bytes) = c.conn.in_flight();
            prop_assert!(requests <= 1024);
            prop_assert!(bytes <= share || requests == 1 && bytes <= proto::MAX_PAYLOAD.into());
            prop_assert!(world.memory.lent() <= geometry.queue_depth as usize);
            let mut pieces = Vec::new();
            c.conn.gather(&mut pieces);
            let waiting = pieces.iter().map(Piece::len).sum::<usize>();
            prop_assert!(waiting as u64 <= bytes + 64 * 16 + (100 << 10), "{waiting} bytes wait");
        }
        match ending {
            0 => c.call(&mut world, |conn, now, device| conn.cut(now, device)),
            1 => c.call(&mut world, |conn, now, device| conn.stop(now, device)),
            _ => c.closed = true,
        }
        c.hold = false;
        loop {
            c.settle(&mut world);
            if c.held.is_empty() {
                break;
            }
            c.finish_one(&mut world);
        }
        prop_assert!(c.conn.ended().is_some());
        prop_assert_eq!(world.memory.lent(), 0);
        prop_assert_eq!(c.conn.in_flight(), (0, 0));
    }
}
