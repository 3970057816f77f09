//! Requests that are done by several operations, while the device loses writes that it had acknowledged.

use crate::support::{GEOMETRY, Peer, World};
use rnbd::{
    block::BlockOp,
    nbd::proto::{cmd, cmd_flag},
};

const EIO: u32 = 5;

/// Starts a request whose operations are held back.
fn start(world: &mut World, command: u16, flags: u16, len: usize) -> Peer {
    let mut peer = Peer::go(world);
    start_by(&mut peer, world, command, flags, len);
    peer
}

fn start_by(peer: &mut Peer, world: &mut World, command: u16, flags: u16, len: usize) {
    peer.hold = true;
    let data = if command == cmd::WRITE {
        vec![7; len]
    } else {
        Vec::new()
    };
    peer.request(command, flags, 0, len, &data);
    peer.settle(world);
}

/// A client of a device that has come back without FUA.
fn unforced(world: &mut World) -> Peer {
    let mut peer = Peer::go(world);
    world.geometry.fua = false;
    peer.conn.set_geometry(0, world.geometry);
    peer
}

/// Does the operations, and loses writes before the last.
fn ends(world: &mut World, mut peer: Peer, operations: usize, loses: bool) -> u32 {
    for n in 1..=operations {
        if n == operations {
            world.losses = u64::from(loses);
        }
        peer.finish_one(world);
    }
    peer.settle(world);
    assert!(peer.held.is_empty());
    peer.reply().0
}

#[test]
fn a_write_fails_that_has_lost_a_part() {
    for (loses, error) in [(false, 0), (true, EIO)] {
        let mut world = World::new(GEOMETRY);
        let peer = start(&mut world, cmd::WRITE, 0, 2 * GEOMETRY.max_transfer as usize);
        assert_eq!(peer.held.len(), 2);
        assert_eq!(ends(&mut world, peer, 2, loses), error);
        let peer = start(&mut world, cmd::WRITE, 0, 4096);
        assert_eq!(ends(&mut world, peer, 1, loses), 0, "it has one part");
    }
}

/// The flush that follows makes nothing durable that is lost.
#[test]
fn a_forced_write_fails_whose_flush_came_too_late() {
    for (loses, error) in [(false, 0), (true, EIO)] {
        let mut world = World::new(GEOMETRY);
        let mut peer = unforced(&mut world);
        start_by(&mut peer, &mut world, cmd::WRITE, cmd_flag::FUA, 4096);
        assert_eq!(ends(&mut world, peer, 2, loses), error);
        let flushes = world.seen.iter().filter(|seen| seen.op == BlockOp::Flush);
        assert_eq!(flushes.count(), 1);
    }
}

#[test]
fn a_read_brings_what_is_there() {
    let mut world = World::new(GEOMETRY);
    let peer = start(&mut world, cmd::READ, 0, 2 * GEOMETRY.max_transfer as usize);
    assert_eq!(ends(&mut world, peer, 2, true), 0);
}

#[test]
fn a_flush_says_whether_it_is_part_of_a_write() {
    let mut world = World::new(GEOMETRY);
    let peer = start(&mut world, cmd::FLUSH, 0, 0);
    assert!(!peer.held[0].forces);
    let mut peer = unforced(&mut world);
    start_by(&mut peer, &mut world, cmd::WRITE, cmd_flag::FUA, 4096);
    assert!(!peer.held[0].forces);
    peer.finish_one(&mut world);
    assert!(peer.held[0].op == BlockOp::Flush && peer.held[0].forces);
}
