//! Whether a kernel's RNBD client that does nothing any more waits for us.

use std::collections::BTreeSet;

/// Bits of an RTRS immediate value that are not its type (`rtrs-pri.h`: `MAX_IMM_PAYL_BITS`).
const PAYLOAD_BITS: u32 = 28;
/// Bits of a request's payload below the number of its chunk, with a queue depth of 512 (`rtrs-clt.c`: `mem_id_bits`).
const OFFSET_BITS: u32 = 19;
/// Of an answer's payload, the number of the request; above it is the errno (`rtrs-pri.h`: `rtrs_to_io_rsp_imm`).
const ID_MASK: u32 = (1 << OFFSET_BITS) - 1;

/// Looks at a session's I/O in the lines of `ferroce pcap check`. Returns how many requests there were; an error with the
/// numbers of those that have no answer.
pub(super) fn all_answered(frames: &str) -> Result<usize, String> {
    let mut seen = BTreeSet::new();
    let (mut open, mut requests) = (BTreeSet::new(), 0);
    for line in frames.lines() {
        let word = |name: &str| line.split_once(name)?.1.split_whitespace().next();
        let number = |name: &str| u32::from_str_radix(word(name)?.strip_prefix("0x")?, 16).ok();
        let (Some(imm), Some(qp), Some(psn)) = (number(" imm "), number(" qp "), number(" psn ")) else {
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

#[cfg(test)]
mod tests {
    use super::all_answered;

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
}
