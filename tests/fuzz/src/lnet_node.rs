//! Peers of an LNet node, some that keep to the protocol and some that don't: connect requests, answers and rejects with any parameters, messages
//! of any bytes and such as fit together, transfers, ends of connections at any time; programs with operations and portals; a device that has
//! no room. The node sends only what the credits allow and writes only where it was told; its limits hold, each operation ends, memory that a
//! transfer is done with is closed, and nothing is left in the end.

mod connections;
mod link;
mod machine;
mod messages;
mod names;
mod programs;
mod run;

use std::time::Duration;

use roce_verbs::provider::{CmKind, DeviceIx};

use crate::input::Input;
use run::Run;

/// Steps of a run: more are left out, so that no input takes long.
const STEPS: usize = 96;

/// See the module.
pub fn run(data: &[u8]) {
    play(data);
}

/// Connections that came to stand, and operations of the node and of its peers that ended well.
fn play(data: &[u8]) -> (usize, usize, usize) {
    let mut input = Input(data);
    let mut run = Run::new(input.byte() & 1 != 0);
    for _ in 0..STEPS {
        if input.0.is_empty() {
            break;
        }
        step(&mut run, &mut input);
        run.settle();
        run.check();
    }
    run.stop()
}

fn step(run: &mut Run, input: &mut Input<'_>) {
    let op = input.byte();
    let link = input.below(run.links.len());
    match op % 16 {
        0 => run.connect(input),
        1 => run.answer(link, input),
        2 => run.tell(link, CmKind::Resolved { device: DeviceIx(0) }),
        3 => run.end(link, input),
        4 => run.raw(link, input),
        5 => run.peer_put(link, input),
        6 => run.peer_get(link, input),
        7..=9 => run.go_on(link, input),
        10 => run.begin(input),
        11 => run.host.now = run.wait(Duration::from_millis(250) * u32::from(input.byte())),
        12 => run.noop(link, input),
        13 => run.portal(input),
        14 => run.selftest(link, input),
        _ => run.device(input),
    }
}

#[cfg(test)]
mod tests {
    use super::play;

    /// A peer's request to connect, with its last word; memory for PUTs, and for GETs.
    const BEGIN: [&[u8]; 3] = [&[0, 0, 0, 32], &[13, 0, 8, 255], &[13, 0, 9, 255]];

    #[test]
    fn operations_of_decent_peers_and_of_the_node_end_well() {
        let peers: [&[u8]; 5] = [
            &[5, 0, 4, 100, 0, 0],
            &[5, 0, 12, 255, 0, 0],
            &[8, 0, 1, 0, 0],
            &[6, 0, 0, 50, 0],
            &[6, 0, 2, 255, 1, 0],
        ];
        assert_eq!(play(&[&[0], &BEGIN.concat()[..], &peers.concat()].concat()), (1, 0, 4));
        let node: [&[u8]; 8] = [
            &[10, 0, 0, 6, 40],
            &[9, 0, 2, 0, 0],
            &[10, 0, 0, 2, 255],
            &[7, 0, 0, 1, 0],
            &[10, 0, 0, 1, 40],
            &[9, 0, 2, 0, 0],
            &[10, 0, 0, 1, 255],
            &[8, 0, 1, 0, 0],
        ];
        assert_eq!(play(&[&[1], &BEGIN.concat()[..], &node.concat()].concat()), (1, 4, 0));
    }

    #[test]
    fn a_connection_that_the_node_begins_carries_its_operation() {
        // The peer's NOOP comes with its answer, or there is none.
        for shape in [32, 0] {
            let steps: [&[u8]; 3] = [&[10, 0, 1, 2, 40], &[2, 0], &[1, 0, shape, 0]];
            assert_eq!(play(&[&[0], &steps.concat()[..]].concat()), (1, 1, 0));
        }
    }

    #[test]
    fn an_operation_ends_with_the_connection_that_a_peer_has_broken() {
        let get: [&[u8]; 2] = [&[10, 0, 0, 1, 255], &[8, 0, 1, 6 << 2, 0]];
        // Without an end of the operation it panics.
        assert_eq!(play(&[&[0], &BEGIN.concat()[..], &get.concat()].concat()), (1, 0, 0));
    }
}
