//! Packets that arrive merged at a raw or packet socket.
//!
//! Between sockets of one host, over veth and in some virtual machines the kernel carries a segmented send (`UDP_SEGMENT`) as one
//! packet. It cuts this up for UDP sockets, and reports its step to those that ask for it (`UDP_GRO`). Raw and packet sockets get
//! it whole, with the header of the first packet. (Packet sockets get the step since Linux 6.2, with `PACKET_VNET_HDR`; before,
//! they get an error then.) So the step is found in the bytes: all packets of a train have one destination queue pair, and the
//! ICRC proves how long the first one is. A wrong step does no harm, as the port checks each packet's ICRC.

use std::net::SocketAddr;

use roce_bth::ROCE_UDP_PORT;
use roce_icrc::Flow;
use roce_port::RxMeta;

/// Shortest packet: BTH and ICRC, bytes.
const SHORTEST: usize = 12 + 4;
/// Packet lengths that are tried, each for the price of an ICRC: payload may look like headers.
const TRIES: usize = 4;

/// Returns the bytes of each packet but the last, if several are merged, and else 0.
pub(crate) fn segment_len(meta: &RxMeta, bytes: &[u8]) -> usize {
    // A RoCE packet has a whole number of words.
    let (words, _) = bytes.as_chunks::<4>();
    let [first, second, ..] = words else { return 0 };
    // Opcode and flags differ; partition and queue pair are the same.
    let (partition, qpn) = (&first[2..], &second[1..]);
    let places = words.len().saturating_sub(SHORTEST / 4);
    let begins = |at: &usize| words[*at][2..] == *partition && words[at + 1][1..] == *qpn;
    let candidates = (SHORTEST / 4..=places).filter(begins).map(|at| 4 * at);
    let mut flow = None;
    for len in candidates.take(TRIES) {
        let to = SocketAddr::new(meta.local, ROCE_UDP_PORT);
        let flow = flow.get_or_insert_with(|| Flow::try_from((meta.remote, to)).ok());
        let id = meta.identification.unwrap_or(0);
        if flow.is_some_and(|flow| flow.verify(id, &bytes[..len])) {
            return len;
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(v4: bool) -> RxMeta {
        let (local, remote) = match v4 {
            true => ("192.0.2.1", "192.0.2.2:49152"),
            false => ("2001:db8::1", "[2001:db8::2]:49152"),
        };
        RxMeta {
            identification: v4.then_some(0),
            ..RxMeta::new(local.parse().unwrap(), remote.parse().unwrap())
        }
    }

    fn train(meta: &RxMeta, lens: &[usize]) -> Vec<u8> {
        let flow = Flow::try_from((meta.remote, SocketAddr::new(meta.local, ROCE_UDP_PORT))).unwrap();
        let mut bytes = vec![];
        for (i, len) in lens.iter().enumerate() {
            let mut packet = vec![0; *len];
            packet[..8].copy_from_slice(&[i as u8, 0, 0xff, 0xff, i as u8, 0, 1, 2]);
            packet[11] = i as u8;
            flow.seal(i as u16, &mut packet);
            bytes.extend(packet);
        }
        bytes
    }

    #[test]
    fn the_step_of_merged_packets_is_found() {
        for v4 in [true, false] {
            let meta = meta(v4);
            for lens in [&[16, 16][..], &[1040, 1040, 1040, 20], &[4112; 15], &[64, 16]] {
                assert_eq!(segment_len(&meta, &train(&meta, lens)), lens[0], "{lens:?}");
            }
        }
    }

    #[test]
    fn a_single_packet_has_none() {
        let meta = meta(true);
        for len in [16, 20, 4112] {
            assert_eq!(segment_len(&meta, &train(&meta, &[len])), 0);
        }
        for len in 0..16 {
            assert_eq!(segment_len(&meta, &vec![0; len]), 0);
        }
    }

    #[test]
    fn payload_that_looks_like_headers_is_payload() {
        let meta = meta(true);
        let flow = Flow::try_from((meta.remote, SocketAddr::new(meta.local, ROCE_UDP_PORT))).unwrap();
        let mut bytes = [0, 0, 0xff, 0xff, 0, 0, 1, 2].repeat(512);
        flow.seal(0, &mut bytes);
        assert_eq!(segment_len(&meta, &bytes), 0);
    }

    /// It came from elsewhere, or was damaged: the port counts a wrong ICRC.
    #[test]
    fn damaged_trains_are_not_cut_up() {
        let meta = meta(true);
        let mut bytes = train(&meta, &[1040, 1040]);
        bytes[500] ^= 1;
        assert_eq!(segment_len(&meta, &bytes), 0);
    }
}
