//! Whether a kernel that does nothing any more waits for us.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
};

use super::Ctx;
use crate::lab::{HOST_V4, HOST_V6};

/// Bits of an RTRS immediate value that are not its type (`rtrs-pri.h`: `MAX_IMM_PAYL_BITS`).
const PAYLOAD_BITS: u32 = 28;
/// Bits of a request's payload below the number of its chunk, with a queue depth of 512 (`rtrs-clt.c`: `mem_id_bits`).
const OFFSET_BITS: u32 = 19;
/// Of an answer's payload, the number of the request; above it is the errno (`rtrs-pri.h`: `rtrs_to_io_rsp_imm`).
const ID_MASK: u32 = (1 << OFFSET_BITS) - 1;

/// The number that stands behind `name` in a line of `ferroce pcap check`.
fn number(line: &str, name: &str) -> Option<u32> {
    let word = line.split_once(name)?.1.split_whitespace().next()?;
    u32::from_str_radix(word.strip_prefix("0x")?, 16).ok()
}

/// Looks at a session's I/O in the lines of `ferroce pcap check`. Returns how many requests there were; an error with the
/// numbers of those that have no answer.
pub(super) fn all_answered(frames: &str) -> Result<usize, String> {
    let mut seen = BTreeSet::new();
    let (mut open, mut requests) = (BTreeSet::new(), 0);
    for line in frames.lines() {
        let (Some(imm), Some(qp), Some(psn)) = (number(line, " imm "), number(line, " qp "), number(line, " psn "))
        else {
            continue;
        };
        // Packets that came again say nothing new.
        if !seen.insert((qp, psn)) {
            continue;
        }
        let payload = imm & ((1 << PAYLOAD_BITS) - 1);
        match imm >> PAYLOAD_BITS {
            // RTRS_IO_REQ_IMM
            0 => {
                requests += 1;
                open.insert(payload >> OFFSET_BITS);
            }
            // RTRS_IO_RSP_IMM, RTRS_IO_RSP_W_INV_IMM
            1 | 2 => {
                open.remove(&(payload & ID_MASK));
            }
            _ => {}
        }
    }
    match open.is_empty() && requests > 0 {
        true => Ok(requests),
        false => Err(format!(
            "of {requests} requests in the capture these have no answer: {open:?}"
        )),
    }
}

/// Returns whether the capture shows that the kernel stopped in the middle of a message, as it does now and then
/// (`specs/kernel.md`). What excused one run does not excuse the next: the first `judged` lines of the capture are left out.
pub(super) fn kernel_stopped(c: &Ctx<'_>, judged: &mut usize) -> bool {
    let Ok(frames) = c.frames() else { return false };
    let lines = frames.lines().count();
    stopped_within_a_message(frames.lines().skip(mem::replace(judged, lines)))
}

/// Whether the kernel stopped in the middle of a message although we had acknowledged all of it that had come. In the lines of
/// `ferroce pcap check` there is then a queue pair of ours to which its last packet is of a message that goes on, and what we
/// last said to the other end of it is that this packet has come. Other queue pairs may have gone on meanwhile.
fn stopped_within_a_message<'a>(frames: impl Iterator<Item = &'a str>) -> bool {
    // By destination queue pair: what the kernel sent last, and what we did.
    let (mut sent, mut answered) = (BTreeMap::new(), BTreeMap::new());
    for (at, line) in frames.enumerate() {
        let Some(packet) = Packet::parse(line) else { continue };
        match packet.ours {
            true if packet.answers => answered.insert(packet.qp, (at, packet)),
            true => None,
            false if packet.answers => None,
            false => sent.insert(packet.qp, (at, packet)),
        };
    }
    sent.values().filter(|(_, packet)| packet.goes_on).any(|(at, packet)| {
        let says_so = |(when, answer): &&(usize, Packet)| when > at && answer.acknowledges && answer.psn == packet.psn;
        answered.values().any(|answer| says_so(&answer))
    })
}

/// What a line of `ferroce pcap check` says of a packet.
struct Packet {
    /// The destination.
    qp: u32,
    psn: u32,
    /// We have sent it.
    ours: bool,
    /// It answers a request.
    answers: bool,
    /// It says that what it answers has come.
    acknowledges: bool,
    /// Its message has more packets.
    goes_on: bool,
}

impl Packet {
    fn parse(line: &str) -> Option<Self> {
        let sender = line.split(" > ").next().unwrap_or_default();
        let has = |opcodes: &[&str]| opcodes.iter().any(|opcode| line.contains(opcode));
        let acknowledge = line.contains(" RC Acknowledge ");
        Some(Self {
            qp: number(line, " qp ")?,
            psn: number(line, " psn ")?,
            ours: [format!(" {}:", HOST_V4[0]), format!(" [{}]:", HOST_V6[0])]
                .iter()
                .any(|addr| sender.contains(addr)),
            answers: has(&[" Acknowledge ", " Read Response "]),
            acknowledges: acknowledge && line.contains(" ack msn "),
            goes_on: has(&[" Send First ", " Send Middle ", " Write First ", " Write Middle "]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{all_answered, stopped_within_a_message};

    const REQUEST: &str = " 1 1.0 10.77.0.1:50138 > 10.77.0.254:4791 RC RDMA Write Last with Immediate qp 0x62cb29 psn 0x16c557 imm 0x02b00420 len 36 ack-req [icrc ok]\n";
    const AGAIN: &str = " 2 1.1 10.77.0.1:50138 > 10.77.0.254:4791 RC RDMA Write Last with Immediate qp 0x62cb29 psn 0x16c557 imm 0x02b00420 len 36 ack-req [icrc ok]\n";
    const ANSWER: &str = " 3 1.2 10.77.0.254:57892 > 10.77.0.1:4791 RC Send Only with Immediate qp 0x000015 psn 0x8bb5eb imm 0x10000056 len 8 ack-req [icrc ok]\n";
    const OTHER: &str = " 4 1.3 10.77.0.254:57892 > 10.77.0.1:4791 RC Send Only with Immediate qp 0x000015 psn 0x8bb5ec imm 0x10000055 len 8 ack-req [icrc ok]\n";

    #[test]
    fn what_is_owed_is_found() {
        assert_eq!(all_answered(&[REQUEST, ANSWER, AGAIN].concat()), Ok(1));
        let owed = all_answered(&[REQUEST, AGAIN, OTHER].concat()).expect_err("no answer");
        assert!(owed.contains("{86}"), "{owed}");
        assert!(all_answered("nothing to see").is_err());
    }

    #[test]
    fn a_message_that_breaks_off_is_the_kernels_fault_only_if_it_was_acknowledged() {
        let sent = " 1 1.0 [fd77::1]:61758 > [fd77::254]:4791 RC Send Middle qp 0x46d2bb psn 0x8843f8 len 1024 ack-req [icrc ok]\n";
        let ack = " 2 1.1 [fd77::254]:49703 > [fd77::1]:4791 RC Acknowledge qp 0x000088 psn 0x8843f8 ack msn 0x000000 [icrc ok]\n";
        let stopped = |lines: &[&str]| stopped_within_a_message(lines.concat().lines());
        assert!(stopped(&[sent, ack]));
        // A program with several queue pairs: the others had something left to do.
        let other = sent.replace("0x46d2bb", "0x46d2bc").replace("0x8843f8", "0x1234f8");
        let last = other.replace("Middle", "Last").replace("0x1234f8", "0x1234f9");
        let other_ack = ack.replace("0x000088", "0x000089").replace("0x8843f8", "0x1234f9");
        assert!(stopped(&[sent, &other, ack, &last, &other_ack]));
        assert!(!stopped(&[&other, &last, &other_ack]));
        for wrong in [
            &[sent][..],
            &[ack, sent],
            &[sent, ack, sent],
            &[sent, &ack.replace("0x8843f8", "0x8843f7")],
            &[sent, &ack.replace("ack msn", "nak sequence error msn")],
            &[&sent.replace("Middle", "Last"), ack],
            &[&sent.replace("fd77::1]:61758", "fd77::254]:61758"), ack],
        ] {
            assert!(!stopped(wrong), "{wrong:?}");
        }
    }
}
