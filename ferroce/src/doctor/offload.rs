//! Whether the kernel segments and merges UDP (GSO, GRO): tried on loopback.

use std::{net::UdpSocket, time::Duration};

use nix::sys::socket::{setsockopt, sockopt};

use super::{Finding, fail, ok, warn};
/// Payload of a packet and packets of a send: like a run of RDMA packets at path MTU 1024.
const SEGMENT: usize = 1024;
const SEGMENTS: usize = 8;
/// Tries until a send arrives merged; merging is the kernel's choice.
const TRIES: u8 = 4;

/// Outcome of one send.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Merged,
    Single,
    Incomplete,
}

/// Sends eight packets in one call and looks how they arrive.
pub(super) fn check() -> Finding {
    match try_offload() {
        Ok(Outcome::Merged) => ok("UDP segmentation and merging work on loopback"),
        Ok(Outcome::Single) => warn(
            "UDP segmentation (GSO) works, merging (GRO) does not: every packet costs a system call",
            "use Linux 5.0 or later; on an interface `ethtool -K DEV rx-udp-gro-forwarding on` may help",
        ),
        Ok(Outcome::Incomplete) => fail(
            "packets of a segmented send (GSO) are lost on loopback",
            "run with --no-gso, and look at firewall rules for loopback (`nft list ruleset`)",
        ),
        Err((what, e)) => warn(
            format!("{what}: {e}"),
            "ferroce works without, at about a quarter of the speed; Linux 5.0 or later has UDP GSO and GRO",
        ),
    }
}

fn try_offload() -> Result<Outcome, (&'static str, std::io::Error)> {
    let bind = || UdpSocket::bind(("127.0.0.1", 0)).map_err(|e| ("no UDP socket on loopback", e));
    let (sender, receiver) = (bind()?, bind()?);
    setsockopt(&sender, sockopt::UdpGsoSegment, &(SEGMENT as i32)).map_err(|e| ("no UDP GSO", e.into()))?;
    setsockopt(&receiver, sockopt::UdpGroSegment, &true).map_err(|e| ("no UDP GRO", e.into()))?;
    receiver
        .set_read_timeout(Some(Duration::from_secs(2)))
        .map_err(|e| ("no receive timeout", e))?;
    let to = receiver.local_addr().map_err(|e| ("no local address", e))?;
    let mut outcome = Outcome::Incomplete;
    for _ in 0..TRIES {
        let packets = [0x5a; SEGMENT * SEGMENTS];
        sender
            .send_to(&packets, to)
            .map_err(|e| ("a segmented send is refused", e))?;
        outcome = receive(&receiver, packets.len());
        if outcome == Outcome::Merged {
            break;
        }
    }
    Ok(outcome)
}

fn receive(socket: &UdpSocket, want: usize) -> Outcome {
    let mut buffer = vec![0; 1 << 16];
    let (mut total, mut merged) = (0, false);
    while total < want {
        let Ok(n) = socket.recv(&mut buffer) else {
            return Outcome::Incomplete;
        };
        merged |= n > SEGMENT;
        total += n;
    }
    if merged { Outcome::Merged } else { Outcome::Single }
}
