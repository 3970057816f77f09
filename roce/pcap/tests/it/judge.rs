//! The judge's findings about a few packets, word for word.

use roce_bth::{AtomicEth, Bth, Header, NakCode, Opcode, Psn, Qpn};
use roce_pcap::Verdict;
use roce_port::cm::mad::{Drep, Dreq, Mad, Message, Mra, Rep, Req};

use crate::common::wire::{A, B, QP_A, QP_B, Wire, ack, nak, read, request, response, rnr, write};

fn send(psn: u32) -> Header {
    request(Opcode::RcSendOnly, psn)
}

fn fetch_add(psn: u32, va: u64) -> Header {
    let mut header = request(Opcode::RcFetchAdd, psn);
    header.atomic_eth = Some(AtomicEth {
        va,
        ..AtomicEth::default()
    });
    header
}

/// A READ that is asked for again from an address on.
fn read_at(psn: u32, va: u64, len: u32) -> Header {
    let mut header = read(psn, len);
    header.reth.as_mut().unwrap().va = va;
    header
}

/// The responses to a READ of four packets with PSN 10.
fn whole_read(w: &mut Wire) {
    w.b(response(Opcode::RcReadResponseFirst, 10, 1), 1024);
    w.b(request(Opcode::RcReadResponseMiddle, 11), 1024);
    w.b(request(Opcode::RcReadResponseMiddle, 12), 1024);
    w.b(response(Opcode::RcReadResponseLast, 13, 1), 1024);
}

const SEQUENCE: NakCode = NakCode::PsnSequenceError;
const ACCESS: NakCode = NakCode::RemoteAccessError;

/// Title, packets, findings.
type Case = (&'static str, fn(&mut Wire), &'static [&'static str]);

/// Between two queue pairs of which the capture does not show the beginning, with a path MTU of 1024.
#[rustfmt::skip]
const CASES: &[Case] = &[
    ("an answer a little beyond what was sent: the capture may have missed the request", |w| { w.a(send(10), 8); w.b(ack(11, 1), 0); }, &[]),
    ("an answer 2^16 - 1 beyond", |w| { w.a(send(10), 8); w.b(ack(10 + (1 << 16), 1), 0); }, &[]),
    ("an answer 2^16 beyond", |w| { w.a(send(10), 8); w.b(ack(11 + (1 << 16), 1), 0); }, &["2 ack-ghost B: an acknowledgement of PSN 0x01000b, which was never sent"]),
    ("an answer beyond, and the requester asks again", |w| { w.a(send(10), 8); w.b(ack(11, 1), 0); w.a(send(10), 8); }, &["2 ack-ghost B: an acknowledgement of PSN 0x00000b, which was never sent"]),
    ("an answer beyond, and requests go on behind it", |w| { w.a(send(10), 8); w.b(ack(11, 1), 0); w.a(send(12), 8); w.b(ack(12, 2), 0); }, &[]),
    ("an answer beyond, and that request comes later", |w| { w.a(send(10), 8); w.b(ack(11, 1), 0); w.a(send(11), 8); w.b(ack(11, 1), 0); }, &["2 ack-ghost B: an acknowledgement of PSN 0x00000b, which was only sent later (frame 3)"]),
    ("an answer from before the capture", |w| { w.a(send(10), 8); w.b(ack(9, 1), 0); w.b(ack(10, 2), 0); }, &[]),
    ("an answer from before the capture, after one to a packet that it shows", |w| { w.a(send(10), 8); w.b(ack(10, 2), 0); w.b(ack(9, 1), 0); }, &["3 ack-ghost B: an acknowledgement of PSN 0x000009, which was never sent: the first request has 0x00000a"]),
    ("an answer a quarter of the numbers before the first", |w| { w.a(send(10), 8); w.b(ack(10u32.wrapping_sub(1 << 22), 1), 0); }, &[]),
    ("an answer more than a quarter of the numbers before the first", |w| { w.a(send(10), 8); w.b(ack(9u32.wrapping_sub(1 << 22), 1), 0); }, &["2 ack-ghost B: an acknowledgement of PSN 0xc00009, which was never sent: the first request has 0x00000a"]),
    ("a gap that is acknowledged: the capture missed the packet", |w| { w.a(send(10), 8); w.a(send(12), 8); w.b(nak(SEQUENCE, 11, 1), 0); w.a(send(12), 8); w.b(ack(12, 3), 0); }, &[]),
    ("a gap, and only packets behind it again: it may be lost again", |w| { w.a(send(10), 8); w.a(send(12), 8); w.b(nak(SEQUENCE, 11, 1), 0); w.a(send(12), 8); }, &[]),
    ("a gap, and only packets behind it again and again", |w| { w.a(send(10), 8); w.a(send(12), 8); w.b(nak(SEQUENCE, 11, 1), 0); w.a(send(12), 8); w.a(send(12), 8); }, &["2 psn-skipped A: PSN 0x00000b was never sent; the peer asked for it in frame 3", "2 no-answer B: RC Send Only with PSN 0x00000c of frame 2 was sent 3 times in 0.0 s and never answered"]),
    ("a gap of two, of which one packet comes later: the network loses packets", |w| { w.a(send(10), 8); w.a(send(13), 8); w.b(nak(SEQUENCE, 11, 1), 0); for _ in 0..7 { w.a(send(12), 8); w.a(send(13), 8); } }, &["4 no-answer B: RC Send Only with PSN 0x00000c of frame 4 was sent 7 times in 0.0 s and never answered"]),
    ("a gap of two, of which one packet comes later, eight times", |w| { w.a(send(10), 8); w.a(send(13), 8); w.b(nak(SEQUENCE, 11, 1), 0); for _ in 0..8 { w.a(send(12), 8); w.a(send(13), 8); } }, &["2 psn-skipped A: PSN 0x00000b was never sent; the peer asked for it in frame 3", "4 no-answer B: RC Send Only with PSN 0x00000c of frame 4 was sent 8 times in 0.0 s and never answered"]),
    ("a gap, and new packets behind it", |w| { w.a(send(10), 8); w.a(send(12), 8); w.b(nak(SEQUENCE, 11, 1), 0); w.a(send(13), 8); }, &[]),
    ("a gap, and what is behind it was sent again before the NAK", |w| { w.a(send(10), 8); w.a(send(12), 8); w.a(send(12), 8); w.a(send(12), 8); w.b(nak(SEQUENCE, 11, 1), 0); }, &["2 no-answer B: RC Send Only with PSN 0x00000c of frame 2 was sent 3 times in 0.0 s and never answered"]),
    ("a gap, the packet, the same NAK again", |w| { w.a(send(10), 8); w.a(send(12), 8); w.b(nak(SEQUENCE, 11, 1), 0); w.a(send(11), 8); w.b(nak(SEQUENCE, 11, 1), 0); w.a(send(11), 8); w.b(ack(12, 3), 0); }, &[]),
    ("a NAK after two requests acknowledges the first", |w| { w.a(send(10), 8); w.b(ack(10, 1), 0); w.a(send(11), 8); w.a(send(13), 8); w.b(nak(SEQUENCE, 12, 2), 0); w.b(rnr(1, 11, 1), 0); }, &["6 nak-acknowledged B: an RNR NAK of PSN 0x00000b, which was acknowledged before"]),
    ("a NAK that was overtaken, as an acknowledgement was before", |w| { (10..14).for_each(|psn| w.a(send(psn), 8)); w.b(ack(11, 2), 0); w.b(ack(10, 1), 0); w.a(send(12), 8); w.a(send(13), 8); w.b(ack(13, 4), 0); w.b(nak(SEQUENCE, 12, 2), 0); }, &[]),
    ("a NAK of the packet that was acknowledged last", |w| { w.a(send(10), 8); w.b(ack(10, 1), 0); w.b(nak(SEQUENCE, 10, 1), 0); }, &["3 nak-acknowledged B: a NAK of PSN 0x00000a, which was acknowledged before"]),
    ("a fatal NAK of what was acknowledged", |w| { w.a(send(10), 8); w.b(ack(10, 1), 0); w.b(nak(ACCESS, 10, 1), 0); }, &["3 nak-fatal -: RC Send Only of frame 1 (PSN 0x00000a) was refused: remote access error: key, range or right"]),
    ("two fatal NAKs: the first counts", |w| { w.a(send(10), 8); w.a(send(11), 8); w.b(nak(NakCode::InvalidRequest, 10, 0), 0); w.b(nak(ACCESS, 11, 0), 0); w.b(ack(11, 1), 0); }, &["3 nak-fatal -: RC Send Only of frame 1 (PSN 0x00000a) was refused: invalid request: an operation that is not allowed, or more bytes than the receive has", "4 nak-fatal -: RC Send Only of frame 2 (PSN 0x00000b) was refused: remote access error: key, range or right", "5 answer-after-nak B: RC Acknowledge of PSN 0x00000b after the fatal NAK of frame 3"]),
    ("an acknowledgement of what was before a fatal NAK", |w| { w.a(send(10), 8); w.a(send(11), 8); w.b(nak(NakCode::RemoteOperationalError, 11, 1), 0); w.b(ack(10, 1), 0); }, &["3 nak-fatal -: RC Send Only of frame 2 (PSN 0x00000b) was refused: remote operational error: the responder failed by itself"]),
    ("a request a tenth of a second after a fatal NAK, and one right behind", |w| { w.a(send(10), 8); w.b(nak(ACCESS, 10, 0), 0); w.us += 99_990; w.a(send(11), 8); w.us -= 9; w.a(send(12), 8); }, &["2 nak-fatal -: RC Send Only of frame 1 (PSN 0x00000a) was refused: remote access error: key, range or right", "4 request-after-nak A: a new request 100 ms after the fatal NAK of frame 2"]),
    ("sent twice and not answered: the capture may end too early", |w| { w.a(send(10), 8); w.a(send(10), 8); }, &[]),
    ("sent three times and not answered", |w| { w.a(send(10), 8); w.a(send(10), 8); w.a(send(10), 8); }, &["1 no-answer B: RC Send Only with PSN 0x00000a of frame 1 was sent 3 times in 0.0 s and never answered"]),
    ("not answered for two seconds", |w| { w.a(send(10), 8); w.us += 1_999_990; w.a(send(11), 8); }, &["1 no-answer B: RC Send Only with PSN 0x00000a of frame 1 was sent 1 times in 0.0 s and never answered"]),
    ("not answered for less than two seconds", |w| { w.a(send(10), 8); w.us += 1_999_989; w.a(send(11), 8); }, &[]),
    ("no answer is asked for", |w| { let mut quiet = send(10); quiet.bth.ack_req = false; for _ in 0..4 { w.a(quiet, 8); } }, &[]),
    ("no answer is asked for, but by a repetition", |w| { let mut quiet = send(10); quiet.bth.ack_req = false; for _ in 0..3 { w.a(quiet, 8); } w.a(send(10), 8); }, &["1 no-answer B: RC Send Only with PSN 0x00000a of frame 1 was sent 4 times in 0.0 s and never answered"]),
    ("answered after a second", |w| { w.a(send(10), 8); w.us += 999_990; w.b(ack(10, 1), 0); }, &["2 stall -: RC Send Only of frame 1 was answered 1.0 s after it was first sent (1 transmissions)"]),
    ("answered in less than a second", |w| { w.a(send(10), 8); w.us += 999_989; w.b(ack(10, 1), 0); }, &[]),
    ("answered after two transmissions and a second", |w| { w.a(send(10), 8); w.us += 999_990; w.a(send(10), 8); w.b(ack(10, 1), 0); }, &["3 stall -: RC Send Only of frame 1 was answered 1.0 s after it was first sent (2 transmissions)"]),
    ("RNR NAKs until the end", |w| { for _ in 0..3 { w.a(send(10), 8); w.b(rnr(1, 10, 0), 0); w.us += 20; } }, &["6 rnr-unresolved B: no receive was posted for PSN 0x00000a after 3 RNR NAKs"]),
    ("RNR NAKs of two requests one after the other", |w| { for psn in [10, 11] { for _ in 0..2 { w.a(send(psn), 8); w.b(rnr(1, psn, psn - 10), 0); w.us += 20; } } }, &["8 rnr-unresolved B: no receive was posted for PSN 0x00000b after 2 RNR NAKs"]),
    ("an RNR NAK, then an acknowledgement", |w| { w.a(send(10), 8); w.b(rnr(1, 10, 0), 0); w.us += 20; w.a(send(10), 8); w.b(ack(10, 1), 0); }, &[]),
    ("a repetition a microsecond before 95 % of the RNR NAK's time", |w| { w.a(send(10), 8); w.b(rnr(17, 10, 0), 0); w.us += 3_637; w.a(send(10), 8); w.b(ack(10, 1), 0); }, &["3 rnr-early A: repeated 3647 us after the RNR NAK of frame 2, which asks for 3840 us"]),
    ("a repetition after 95 % of the RNR NAK's time", |w| { w.a(send(10), 8); w.b(rnr(17, 10, 0), 0); w.us += 3_638; w.a(send(10), 8); w.b(ack(10, 1), 0); }, &[]),
    ("an RNR NAK of a WRITE with immediate data", |w| { let mut header = write(10, 8); header.bth.opcode = Opcode::RcWriteOnlyImm; header.imm = Some(7); w.a(header, 8); w.b(rnr(1, 10, 0), 0); w.us += 20; w.a(header, 8); w.b(ack(10, 1), 0); }, &[]),
    ("an RNR NAK of a WRITE", |w| { w.a(write(10, 8), 8); w.b(rnr(1, 10, 0), 0); w.us += 20; w.a(write(10, 8), 8); w.b(ack(10, 1), 0); }, &["2 rnr-without-receive B: an RNR NAK of PSN 0x00000a, which takes no receive"]),
    ("a sequence NAK for what an RNR NAK refused", |w| { w.a(send(10), 8); w.a(send(11), 8); w.b(rnr(1, 10, 0), 0); w.b(nak(SEQUENCE, 10, 0), 0); }, &["4 nak-after-rnr B: a sequence NAK of PSN 0x00000a, which the RNR NAK of frame 3 refused", "3 rnr-unresolved B: no receive was posted for PSN 0x00000a after 1 RNR NAKs"]),
    ("an RNR NAK acknowledges what is before it", |w| { w.a(send(10), 8); w.a(send(11), 8); w.b(rnr(1, 11, 1), 0); w.b(nak(SEQUENCE, 10, 0), 0); }, &["4 nak-acknowledged B: a NAK of PSN 0x00000a, which was acknowledged before", "3 rnr-unresolved B: no receive was posted for PSN 0x00000b after 1 RNR NAKs"]),
    ("two READs outstanding, none of which is answered before an acknowledgement", |w| { w.a(read(10, 8), 0); w.a(read(11, 8), 0); w.a(send(12), 8); w.b(ack(12, 3), 0); }, &["4 ack-passes-read B: an acknowledgement of PSN 0x00000c before the READ of frame 1 (PSN 0x00000a) was answered"]),
    ("a READ is answered between acknowledgements", |w| { w.a(send(10), 8); w.a(read(11, 2000), 0); w.a(send(13), 8); w.b(ack(10, 1), 0); w.b(response(Opcode::RcReadResponseFirst, 11, 2), 1024); w.b(response(Opcode::RcReadResponseLast, 12, 2), 976); w.b(ack(13, 3), 0); }, &[]),
    ("a READ's last response is missing", |w| { w.a(read(10, 2000), 0); w.a(send(12), 8); w.b(response(Opcode::RcReadResponseFirst, 10, 1), 1024); w.b(ack(12, 2), 0); }, &["4 ack-passes-read B: an acknowledgement of PSN 0x00000c before the READ of frame 1 (PSN 0x00000a) was answered"]),
    ("a READ's first response is missing in the capture", |w| { w.a(read(10, 2000), 0); w.b(response(Opcode::RcReadResponseLast, 11, 1), 976); w.a(send(12), 8); w.b(ack(12, 2), 0); }, &[]),
    ("a READ of no bytes", |w| { w.a(read(10, 0), 0); w.b(response(Opcode::RcReadResponseOnly, 10, 1), 0); }, &[]),
    ("a READ that is answered with fewer bytes", |w| { w.a(read(10, 1032), 0); w.b(response(Opcode::RcReadResponseFirst, 10, 1), 1024); w.b(response(Opcode::RcReadResponseLast, 11, 1), 4); }, &["3 response-length B: the last response to the READ of 1032 bytes in frame 1 has 4 bytes, not 8"]),
    ("a READ of whole packets", |w| { w.a(read(10, 2048), 0); w.b(response(Opcode::RcReadResponseFirst, 10, 1), 1024); w.b(response(Opcode::RcReadResponseLast, 11, 1), 1024); w.a(send(12), 8); w.b(ack(12, 2), 0); }, &[]),
    ("a READ asked for again from its second packet", |w| { w.a(read(10, 3072), 0); w.b(response(Opcode::RcReadResponseFirst, 10, 1), 1024); let mut rest = read(11, 2048); rest.reth.as_mut().unwrap().va = 1024; w.a(rest, 0); w.b(response(Opcode::RcReadResponseFirst, 11, 1), 1024); w.b(response(Opcode::RcReadResponseLast, 12, 1), 1024); }, &[]),
    ("a part of a READ asked for again", |w| { w.a(read(10, 3072), 0); let mut part = read(11, 1024); part.reth.as_mut().unwrap().va = 1024; w.a(part, 0); w.b(response(Opcode::RcReadResponseOnly, 11, 1), 1024); }, &[]),
    ("more of a READ asked for again than is left", |w| { w.a(read(10, 3072), 0); let mut rest = read(11, 2052); rest.reth.as_mut().unwrap().va = 1024; w.a(rest, 0); }, &["2 read-retry A: PSN 0x00000b of the READ in frame 1 stands for at most 2048 bytes at 0x400 with key 0x0, this asks for 2052 at 0x400 with 0x0"]),
    ("a READ asked for again with another key", |w| { w.a(read(10, 8), 0); let mut again = read(10, 8); again.reth.as_mut().unwrap().rkey = roce_bth::RKey(9); w.a(again, 0); }, &["2 read-retry A: PSN 0x00000a of the READ in frame 1 stands for at most 8 bytes at 0x0 with key 0x0, this asks for 8 at 0x0 with 0x9"]),
    ("a READ answered twice after it was asked for twice", |w| { for _ in 0..2 { w.a(read(10, 8), 0); w.b(response(Opcode::RcReadResponseOnly, 10, 1), 8); } }, &[]),
    ("a READ answered twice", |w| { w.a(read(10, 8), 0); for _ in 0..2 { w.b(response(Opcode::RcReadResponseOnly, 10, 1), 8); } }, &["3 response-repeated -: PSN 0x00000a of the READ in frame 1 again, which was not asked for again"]),
    ("a SEND with a READ's PSN", |w| { w.a(read(10, 2000), 0); w.a(send(11), 8); }, &["2 read-span-reused A: RC Send Only has PSN 0x00000b, which belongs to the READ of 2000 bytes in frame 1 (PSNs 0x00000a to 0x00000b)"]),
    ("READs answered in the wrong order", |w| { w.a(read(10, 8), 0); w.a(read(11, 8), 0); w.b(response(Opcode::RcReadResponseOnly, 11, 2), 8); w.b(response(Opcode::RcReadResponseOnly, 10, 1), 8); }, &["4 response-order B: a response to the READ of frame 1 after one to a later READ"]),
    ("READs answered in the wrong order after a repetition", |w| { w.a(read(10, 8), 0); w.a(read(11, 8), 0); w.b(response(Opcode::RcReadResponseOnly, 11, 2), 8); w.a(read(10, 8), 0); w.b(response(Opcode::RcReadResponseOnly, 10, 1), 8); }, &[]),
    ("a READ response to an atomic", |w| { w.a(fetch_add(10, 8), 0); w.b(response(Opcode::RcReadResponseOnly, 10, 1), 8); }, &["2 response-unrequested B: RC RDMA Read Response Only of PSN 0x00000a, which is RC Fetch and Add of frame 1"]),
    ("an atomic acknowledgement before a READ's answer", |w| { w.a(read(10, 8), 0); w.a(fetch_add(11, 8), 0); w.b(response(Opcode::RcAtomicAcknowledge, 11, 2), 0); }, &["3 ack-passes-read B: an acknowledgement of PSN 0x00000b before the READ of frame 1 (PSN 0x00000a) was answered"]),
    ("an atomic acknowledgement of a READ", |w| { w.a(read(10, 8), 0); w.b(response(Opcode::RcAtomicAcknowledge, 10, 1), 0); }, &["2 response-unrequested B: RC Atomic Acknowledge of PSN 0x00000a, which is RC RDMA Read Request of frame 1"]),
    ("an atomic twice, its acknowledgement twice", |w| { for _ in 0..2 { w.a(fetch_add(10, 8), 0); w.b(response(Opcode::RcAtomicAcknowledge, 10, 1), 0); } }, &[]),
    ("an atomic at 4, one at 0", |w| { w.a(fetch_add(10, 4), 0); w.a(fetch_add(11, 0), 0); w.b(response(Opcode::RcAtomicAcknowledge, 10, 1), 0); w.b(response(Opcode::RcAtomicAcknowledge, 11, 2), 0); }, &["1 atomic-alignment A: RC Fetch and Add at 0x4"]),
    ("an MSN that skips a message", |w| { w.a(send(10), 8); w.b(ack(10, 1), 0); w.a(send(11), 8); w.b(ack(11, 3), 0); w.a(send(12), 8); w.b(ack(12, 4), 0); }, &["4 msn B: MSN 3, 2 expected"]),
    ("an MSN of messages that may be done", |w| { w.a(send(10), 8); w.b(ack(10, 1), 0); w.a(send(11), 8); w.a(send(12), 8); w.b(ack(11, 3), 0); w.b(ack(12, 3), 0); }, &[]),
    ("an MSN of one more message than may be done", |w| { w.a(send(10), 8); w.b(ack(10, 1), 0); w.a(send(11), 8); w.a(send(12), 8); w.b(ack(11, 4), 0); }, &["5 msn B: MSN 4, 2 to 3 expected"]),
    ("an MSN with a packet that the capture lacks, which may have ended a message", |w| { w.a(send(10), 8); w.b(ack(10, 1), 0); w.a(send(12), 8); w.b(ack(12, 3), 0); w.a(send(13), 8); w.b(ack(13, 4), 0); }, &[]),
    ("an MSN with a packet that the capture lacks, which ended no message", |w| { w.a(send(10), 8); w.b(ack(10, 1), 0); w.a(send(12), 8); w.b(ack(12, 2), 0); w.a(send(13), 8); w.b(ack(13, 4), 0); }, &["6 msn B: MSN 4, 3 expected"]),
    ("an MSN while packets are missing on both sides of one that came late", |w| { w.a(send(10), 8); w.b(ack(10, 1), 0); w.a(send(16), 8); w.a(send(13), 8); w.b(ack(13, 8), 0); }, &["5 msn B: MSN 8, 2 to 7 expected"]),
    ("an MSN after the last of five packets has come late", |w| { w.a(send(10), 8); w.b(ack(10, 1), 0); for psn in [16, 13, 11, 15, 12, 14] { w.a(send(psn), 8); } w.b(ack(16, 8), 0); }, &["9 msn B: MSN 8, 7 expected"]),
    ("packets that came late, with other bytes", |w| { w.a(send(10), 8); for psn in [16, 13, 11, 15, 12, 14] { w.a(send(psn), 8); } for psn in 10..17 { w.a(send(psn), 12); } }, &["8 repeat-differs A: RC Send Only with PSN 0x00000a has other bytes than in frame 1", "9 repeat-differs A: RC Send Only with PSN 0x00000b has other bytes than in frame 4", "10 repeat-differs A: RC Send Only with PSN 0x00000c has other bytes than in frame 6", "11 repeat-differs A: RC Send Only with PSN 0x00000d has other bytes than in frame 3", "12 repeat-differs A: RC Send Only with PSN 0x00000e has other bytes than in frame 7", "13 repeat-differs A: RC Send Only with PSN 0x00000f has other bytes than in frame 5", "14 repeat-differs A: RC Send Only with PSN 0x000010 has other bytes than in frame 2"]),
    ("a READ that comes late", |w| { w.a(send(10), 8); w.a(send(14), 8); w.a(read(11, 2000), 0); w.a(send(12), 8); w.a(send(13), 8); w.b(response(Opcode::RcReadResponseFirst, 11, 2), 1024); w.b(response(Opcode::RcReadResponseLast, 12, 2), 976); w.b(ack(14, 4), 0); w.b(ack(14, 5), 0); }, &["4 read-span-reused A: RC Send Only has PSN 0x00000c, which belongs to the READ of 2000 bytes in frame 3 (PSNs 0x00000b to 0x00000c)", "9 msn B: MSN 5, 4 expected"]),
    ("a READ's only response but one is missing in the capture", |w| { w.a(read(10, 3000), 0); w.b(request(Opcode::RcReadResponseMiddle, 11), 1024); w.a(send(13), 8); w.b(ack(13, 2), 0); }, &[]),
    ("an MSN that is wrong in an atomic acknowledgement", |w| { w.a(fetch_add(10, 0), 0); w.b(response(Opcode::RcAtomicAcknowledge, 10, 1), 0); w.a(fetch_add(11, 0), 0); w.b(response(Opcode::RcAtomicAcknowledge, 11, 5), 0); }, &["4 msn B: MSN 5, 2 expected"]),
    ("an atomic acknowledgement before the answer to a later READ", |w| { w.a(fetch_add(10, 0), 0); w.a(read(11, 8), 0); w.b(response(Opcode::RcAtomicAcknowledge, 10, 1), 0); w.b(response(Opcode::RcReadResponseOnly, 11, 2), 8); }, &[]),
    ("an old atomic acknowledgement again", |w| { w.a(fetch_add(10, 0), 0); w.b(response(Opcode::RcAtomicAcknowledge, 10, 1), 0); w.a(send(11), 8); w.b(ack(11, 2), 0); w.a(fetch_add(10, 0), 0); w.b(response(Opcode::RcAtomicAcknowledge, 10, 1), 0); }, &[]),
    ("two requests answered after a second: the first is reported", |w| { w.a(send(10), 8); w.a(send(11), 8); w.us += 1_000_000; w.b(ack(11, 2), 0); w.b(ack(11, 2), 0); }, &["3 stall -: RC Send Only of frame 1 was answered 1.0 s after it was first sent (1 transmissions)"]),
    ("a message of two packets counts once", |w| { w.a(request(Opcode::RcSendFirst, 10), 1024); w.b(ack(10, 7), 0); w.a(request(Opcode::RcSendLast, 11), 8); w.b(ack(11, 8), 0); }, &[]),
    ("the same PSN for other bytes", |w| { w.a(send(10), 8); w.a(send(10), 12); }, &["2 repeat-differs A: RC Send Only with PSN 0x00000a has other bytes than in frame 1"]),
    ("the same PSN for another operation", |w| { w.a(send(10), 8); w.a(write(10, 8), 8); }, &["2 psn-reused A: RC RDMA Write Only has PSN 0x00000a, which frame 1 used for RC Send Only"]),
    ("the same PSN for other bytes that the capture cut", |w| { w.a(send(10), 8); w.cut = 8; w.a(send(10), 12); }, &[]),
    ("a packet that comes after later ones", |w| { w.a(send(10), 8); w.a(send(13), 8); w.a(send(12), 8); w.a(send(11), 8); w.b(ack(13, 4), 0); w.a(send(12), 12); }, &["6 repeat-differs A: RC Send Only with PSN 0x00000c has other bytes than in frame 3"]),
    ("MIDDLE and LAST after packets that are missing", |w| { w.a(send(10), 8); w.a(request(Opcode::RcSendMiddle, 12), 1024); w.a(request(Opcode::RcSendLast, 13), 8); }, &[]),
    ("LAST after ONLY", |w| { w.a(send(10), 8); w.a(request(Opcode::RcSendLast, 11), 8); }, &["2 opcode-sequence A: RC Send Last goes on with a message that was not begun"]),
    ("FIRST after FIRST", |w| { w.a(request(Opcode::RcSendFirst, 10), 1024); w.a(request(Opcode::RcSendFirst, 11), 1024); }, &["2 opcode-sequence A: RC Send First begins a message while that of frame 1 is not finished"]),
    ("a WRITE's MIDDLE in a SEND", |w| { w.a(request(Opcode::RcSendFirst, 10), 1024); w.a(request(Opcode::RcWriteMiddle, 11), 1024); w.a(request(Opcode::RcWriteLast, 12), 8); }, &["2 opcode-sequence A: RC RDMA Write Middle goes on with a message that was not begun"]),
    ("a WRITE that has all its bytes before its LAST", |w| { let mut first = write(10, 1024); first.bth.opcode = Opcode::RcWriteFirst; w.a(first, 1024); w.a(request(Opcode::RcWriteLast, 11), 4); }, &["2 write-length A: a WRITE of 1024 bytes by its RETH has 1028"]),
    ("a WRITE of fewer bytes", |w| { w.a(write(10, 12), 8); }, &["1 write-length A: a WRITE of 12 bytes by its RETH has 8"]),
    ("a WRITE that goes on beyond its bytes", |w| { let mut first = write(10, 1028); first.bth.opcode = Opcode::RcWriteFirst; w.a(first, 1024); w.a(request(Opcode::RcWriteMiddle, 11), 1024); w.a(request(Opcode::RcWriteLast, 12), 4); }, &["2 write-length A: a WRITE of 1028 bytes by its RETH has 2048 and goes on", "3 write-length A: a WRITE of 1028 bytes by its RETH has 2052"]),
    ("a WRITE of 2^31 bytes, and one of more", |w| { let mut first = write(10, 1 << 31); first.bth.opcode = Opcode::RcWriteFirst; w.a(first, 1024); let mut next = write(12, (1 << 31) + 1); next.bth.opcode = Opcode::RcWriteFirst; w.a(next, 1024); }, &["2 reth-length A: RC RDMA Write First of 2147483649 bytes, more than 2^31"]),
    ("lengths of ONLY", |w| { w.a(send(10), 1024); w.a(send(11), 1028); w.a(send(12), 0); }, &["2 payload-length A: RC Send Only has 1028 bytes, more than the path MTU of 1024"]),
    ("lengths of FIRST, MIDDLE and LAST", |w| { w.a(request(Opcode::RcSendFirst, 10), 1020); w.a(request(Opcode::RcSendMiddle, 11), 1024); w.a(request(Opcode::RcSendLast, 12), 0); w.a(request(Opcode::RcSendFirst, 13), 1024); w.a(request(Opcode::RcSendLast, 14), 1028); }, &["1 payload-length A: RC Send First has 1020 bytes, the path MTU is 1024", "3 payload-length A: RC Send Last without payload", "5 payload-length A: RC Send Last has 1028 bytes, more than the path MTU of 1024"]),
    ("a request that asks for no answer is acknowledged, the next one waits", |w| { let mut quiet = send(10); quiet.bth.ack_req = false; w.a(quiet, 8); w.a(send(11), 8); w.us += 1_000_000; w.b(ack(10, 1), 0); }, &[]),
    ("a gap, and what is behind it was sent again when the NAK came", |w| { w.a(send(10), 8); w.a(send(12), 8); w.a(send(12), 8); w.us -= 10; w.b(nak(SEQUENCE, 11, 1), 0); }, &[]),
    ("a gap, and what is behind it is not answered for two seconds", |w| { w.a(send(10), 8); w.b(ack(10, 1), 0); w.a(send(12), 8); w.us += 2_000_000; w.a(send(13), 8); }, &["3 no-answer B: RC Send Only with PSN 0x00000c of frame 3 was sent 1 times in 0.0 s and never answered"]),
    ("an RNR NAK of a packet that the capture lacks, before a WRITE", |w| { w.a(send(10), 8); w.a(write(12, 8), 8); w.b(rnr(1, 11, 1), 0); w.us += 20; w.a(send(11), 8); w.a(write(12, 8), 8); w.b(ack(12, 3), 0); }, &[]),
    ("no answer is asked for, but by a repetition of the second packet", |w| { let quiet = |psn| { let mut header = send(psn); header.bth.ack_req = false; header }; w.a(quiet(10), 8); for _ in 0..3 { w.a(quiet(11), 8); } w.a(send(11), 8); }, &["2 no-answer B: RC Send Only with PSN 0x00000b of frame 2 was sent 4 times in 0.0 s and never answered"]),
    ("an MSN before a gap, with messages in it", |w| { w.a(send(10), 8); w.b(ack(10, 1), 0); w.a(request(Opcode::RcSendFirst, 13), 1024); w.b(ack(10, 3), 0); w.a(request(Opcode::RcSendLast, 14), 8); w.b(ack(14, 5), 0); }, &["6 msn B: MSN 5, 2 to 4 expected"]),
    ("an MSN behind a gap, of a message that is acknowledged later", |w| { w.a(send(10), 8); w.b(ack(10, 1), 0); w.a(send(12), 8); w.a(send(13), 8); w.b(ack(12, 4), 0); w.b(ack(13, 4), 0); }, &[]),
    ("a READ answered again with its MSN of the first time, behind it packets that the capture lacks", |w| { w.a(read(10, 8), 0); w.b(response(Opcode::RcReadResponseOnly, 10, 1), 8); w.a(send(13), 8); w.b(ack(13, 4), 0); w.a(read(10, 8), 0); w.b(response(Opcode::RcReadResponseOnly, 10, 1), 8); }, &[]),
    ("a READ asked for again in pieces, then from the same packet to its end", |w| { w.a(read(10, 4096), 0); whole_read(w); w.a(read_at(11, 1024, 2048), 0); w.a(read_at(11, 1024, 3072), 0); w.b(response(Opcode::RcReadResponseFirst, 11, 1), 1024); w.b(request(Opcode::RcReadResponseMiddle, 12), 1024); w.b(response(Opcode::RcReadResponseLast, 13, 1), 1024); }, &[]),
    ("a READ asked for again while its next response is on its way", |w| { w.a(read(10, 3072), 0); w.b(response(Opcode::RcReadResponseFirst, 10, 1), 1024); w.a(read_at(11, 1024, 2048), 0); w.b(request(Opcode::RcReadResponseMiddle, 11), 1024); w.b(response(Opcode::RcReadResponseLast, 12, 1), 1024); }, &[]),
    ("a READ asked for again from its last response, which goes on in the middle", |w| { w.a(read(10, 3072), 0); w.b(response(Opcode::RcReadResponseFirst, 10, 1), 1024); w.b(request(Opcode::RcReadResponseMiddle, 11), 1024); w.a(read_at(11, 1024, 2048), 0); w.b(request(Opcode::RcReadResponseMiddle, 11), 1024); w.b(response(Opcode::RcReadResponseLast, 12, 1), 1024); }, &["5 response-resumed B: RC RDMA Read Response Middle with PSN 0x00000b, from which on the READ was asked for again"]),
    ("a READ that comes late and asks for more than the gap has room for", |w| { w.a(send(10), 8); w.a(send(14), 8); w.a(read(13, 4096), 0); w.a(send(14), 8); }, &[]),
    ("256 READs, the last of which is answered first", |w| { for n in 0..256 { w.a(read(10 + n, 8), 0); } w.b(response(Opcode::RcReadResponseOnly, 265, 256), 8); w.b(response(Opcode::RcReadResponseOnly, 10, 1), 8); }, &["258 response-order B: a response to the READ of frame 1 after one to a later READ"]),
    ("a queue pair that is connected again far away", |w| { w.a(send(10), 8); w.b(ack(10, 1), 0); w.a(send(11 + (1 << 17)), 8); w.b(ack(11 + (1 << 17), 9), 0); w.a(send(13 + (1 << 18)), 8); w.b(ack(13 + (1 << 18), 99), 0); }, &[]),
];

/// The same with PSN 10 as the first of both, and one READ that may be outstanding.
#[rustfmt::skip]
const NAMED: &[Case] = &[
    ("the first MSN is known", |w| { w.a(send(10), 8); w.b(ack(10, 2), 0); }, &["2 msn B: MSN 2, 1 expected"]),
    ("the first packet begins a message", |w| { w.a(request(Opcode::RcSendMiddle, 10), 1024); }, &["1 opcode-sequence A: RC Send Middle goes on with a message that was not begun"]),
    ("the second packet first", |w| { w.a(send(11), 8); w.a(send(10), 8); w.b(ack(11, 2), 0); }, &[]),
    ("the first packet has the PSN before", |w| { w.a(send(9), 8); }, &["1 psn-start A: the first request has PSN 0x000009, the peer asked for 0x00000a"]),
    ("the second packet has the PSN before the first", |w| { w.a(send(10), 8); w.a(send(9), 8); }, &[]),
    ("the first packet is 2^16 ahead", |w| { w.a(send(10 + (1 << 16)), 8); }, &[]),
    ("the first packet is more than 2^16 ahead", |w| { w.a(send(11 + (1 << 16)), 8); }, &["1 psn-start A: the first request has PSN 0x01000b, the peer asked for 0x00000a"]),
    ("an acknowledgement before all requests", |w| { w.b(ack(9, 0), 0); w.b(ack(10, 0), 0); w.a(send(10), 8); w.b(ack(9, 0), 0); w.b(ack(10, 1), 0); }, &["1 ack-ghost B: an acknowledgement of PSN 0x000009, which was never sent: the first request has 0x00000a", "4 ack-ghost B: an acknowledgement of PSN 0x000009, which was never sent: the first request has 0x00000a"]),
    ("a second READ", |w| { w.a(read(10, 8), 0); w.a(read(11, 8), 0); w.b(response(Opcode::RcReadResponseOnly, 10, 1), 8); w.b(response(Opcode::RcReadResponseOnly, 11, 2), 8); w.a(read(12, 8), 0); }, &["2 read-depth A: 2 READs and atomics are outstanding, the connection allows 1"]),
    ("an atomic next to a READ", |w| { w.a(fetch_add(10, 0), 0); w.a(read(11, 8), 0); }, &["2 read-depth A: 2 READs and atomics are outstanding, the connection allows 1"]),
    ("a READ after an atomic that is acknowledged", |w| { w.a(fetch_add(10, 0), 0); w.b(response(Opcode::RcAtomicAcknowledge, 10, 1), 0); w.a(read(11, 8), 0); }, &[]),
    ("a READ after one of which the last response has not come", |w| { w.a(read(10, 2000), 0); w.b(response(Opcode::RcReadResponseFirst, 10, 1), 1024); w.a(read(12, 8), 0); }, &["3 read-depth A: 2 READs and atomics are outstanding, the connection allows 1"]),
    ("an MSN behind a packet that the capture lacks", |w| { w.a(send(10), 8); w.a(send(12), 8); w.b(ack(12, 9), 0); }, &["3 msn B: MSN 9, 2 to 3 expected"]),
    ("RNR NAKs of the first packet", |w| { for _ in 0..2 { w.a(send(10), 8); w.b(rnr(1, 10, 0), 0); w.us += 20; } }, &["4 rnr-unresolved B: no receive was posted for PSN 0x00000a after 2 RNR NAKs"]),
];

/// The same without a path MTU.
#[rustfmt::skip]
const UNSIZED: &[Case] = &[
    ("a FIRST has the path MTU", |w| { w.a(request(Opcode::RcSendFirst, 10), 512); w.a(request(Opcode::RcSendMiddle, 11), 1024); }, &["2 payload-length A: RC Send Middle has 1024 bytes, the path MTU is 512"]),
    ("a FIRST without a path MTU's length", |w| { w.a(request(Opcode::RcSendFirst, 10), 768); }, &["1 payload-length A: RC Send First has 768 bytes, which is no path MTU (256 to 4096)"]),
    ("a FIRST that is too short", |w| { w.a(request(Opcode::RcSendFirst, 10), 128); }, &["1 payload-length A: RC Send First has 128 bytes, which is no path MTU (256 to 4096)"]),
    ("a FIRST that is too long", |w| { w.a(request(Opcode::RcSendFirst, 10), 8192); }, &["1 payload-length A: RC Send First has 8192 bytes, which is no path MTU (256 to 4096)"]),
    ("an ONLY of the longest path MTU, and a longer one", |w| { w.a(send(10), 4096); w.a(send(11), 4100); }, &["2 payload-length A: RC Send Only has 4100 bytes, which is no path MTU (256 to 4096)"]),
    ("an ONLY has no path MTU", |w| { w.a(send(10), 512); w.a(send(11), 516); w.a(request(Opcode::RcSendFirst, 12), 1024); }, &[]),
    ("a READ of 600 bytes takes three PSNs, with a path MTU of 256", |w| { w.a(read(10, 600), 0); w.a(send(13), 8); w.b(ack(13, 2), 0); }, &["3 ack-passes-read B: an acknowledgement of PSN 0x00000d before the READ of frame 1 (PSN 0x00000a) was answered"]),
    ("a READ of 8000 bytes takes one PSN", |w| { w.a(read(10, 8000), 0); w.a(send(11), 8); }, &["2 read-span-reused A: the READ of 8000 bytes in frame 1 takes 2 PSNs or more, this request begins after 1"]),
    ("a READ of 8000 bytes takes two PSNs, with a path MTU of 4096", |w| { w.a(read(10, 8000), 0); w.a(send(12), 8); }, &[]),
    ("a READ of 8000 bytes takes two PSNs, and one packet is missing", |w| { w.a(read(10, 8000), 0); w.a(send(13), 8); w.b(response(Opcode::RcReadResponseFirst, 10, 1), 4096); w.b(response(Opcode::RcReadResponseLast, 11, 1), 3904); w.b(ack(13, 3), 0); }, &[]),
    ("a response shows that the next request has a READ's PSN", |w| { w.a(read(10, 2400), 0); w.a(send(12), 8); w.b(response(Opcode::RcReadResponseFirst, 10, 1), 1024); }, &["2 read-span-reused A: this request has PSN 0x00000c, which belongs to the READ of 2400 bytes in frame 1 (PSNs 0x00000a to 0x00000c)"]),
    ("a response shows that packets behind a READ are missing", |w| { w.a(read(10, 2000), 0); w.a(send(18), 8); w.b(response(Opcode::RcReadResponseFirst, 10, 1), 1024); w.b(response(Opcode::RcReadResponseLast, 11, 1), 976); w.b(ack(18, 8), 0); }, &[]),
    ("a response shows how many PSNs the last READ takes", |w| { w.a(read(10, 2400), 0); w.b(response(Opcode::RcReadResponseFirst, 10, 1), 1024); w.a(send(12), 8); }, &["3 read-span-reused A: RC Send Only has PSN 0x00000c, which belongs to the READ of 2400 bytes in frame 1 (PSNs 0x00000a to 0x00000c)"]),
    ("an MSN behind a READ whose number of PSNs a response showed", |w| { w.a(read(10, 2000), 0); w.a(send(18), 8); w.b(response(Opcode::RcReadResponseFirst, 10, 1), 1024); w.b(response(Opcode::RcReadResponseLast, 11, 1), 976); w.b(ack(18, 8), 0); w.a(send(19), 8); w.b(ack(19, 99), 0); }, &["7 msn B: MSN 99, 9 expected"]),
    ("a packet that comes late behind a READ whose number of PSNs a response showed", |w| { w.a(read(10, 2000), 0); w.a(send(18), 8); w.b(response(Opcode::RcReadResponseFirst, 10, 1), 1024); w.b(response(Opcode::RcReadResponseLast, 11, 1), 976); for psn in [12, 17, 14] { w.a(send(psn), 8); } w.a(send(11), 8); w.a(send(12), 12); }, &["8 read-span-reused A: RC Send Only has PSN 0x00000b, which belongs to the READ of 2000 bytes in frame 1 (PSNs 0x00000a to 0x00000b)", "9 repeat-differs A: RC Send Only with PSN 0x00000c has other bytes than in frame 5"]),
    ("READs whose number of PSNs a response showed", |w| { w.a(read(10, 2000), 0); w.a(read(12, 4000), 0); w.b(response(Opcode::RcReadResponseFirst, 10, 1), 1024); w.b(response(Opcode::RcReadResponseLast, 11, 1), 976); w.a(send(15), 8); }, &["5 read-span-reused A: RC Send Only has PSN 0x00000f, which belongs to the READ of 4000 bytes in frame 2 (PSNs 0x00000c to 0x00000f)"]),
    ("a READ's second response first", |w| { w.a(read(10, 3000), 0); w.b(request(Opcode::RcReadResponseMiddle, 11), 1024); w.b(response(Opcode::RcReadResponseLast, 12, 1), 952); w.a(send(13), 8); w.b(ack(13, 2), 0); }, &[]),
    ("a response beyond a READ that has the path MTU", |w| { w.a(read(10, 2000), 0); w.b(request(Opcode::RcReadResponseMiddle, 13), 1024); w.a(read(10, 2000), 0); }, &["2 ack-ghost B: a READ response of PSN 0x00000d, which was never sent"]),
    ("a READ's last response only", |w| { w.a(read(10, 3000), 0); w.b(response(Opcode::RcReadResponseLast, 12, 1), 952); w.a(send(13), 8); w.b(ack(13, 2), 0); }, &[]),
    ("a READ's last response only, and it is asked for again", |w| { w.a(read(10, 3000), 0); w.b(response(Opcode::RcReadResponseLast, 12, 1), 952); w.a(read(10, 3000), 0); }, &[]),
    ("a READ's last response is asked for again", |w| { w.a(read(10, 600), 0); w.a(send(13), 8); w.a(read_at(12, 512, 88), 0); w.b(response(Opcode::RcReadResponseOnly, 12, 1), 88); w.b(ack(13, 2), 0); }, &[]),
    ("an answer a little beyond a READ of one packet", |w| { w.a(read(10, 256), 0); w.b(ack(11, 1), 0); }, &[]),
    ("a fatal NAK of a READ's second and third packet", |w| { w.a(send(9), 8); w.b(ack(9, 5), 0); w.a(read(10, 3000), 0); w.b(nak(ACCESS, 11, 5), 0); w.b(nak(ACCESS, 12, 5), 0); }, &["4 nak-fatal -: RC RDMA Read Request of frame 3 (PSN 0x00000b) was refused: remote access error: key, range or right", "5 nak-fatal -: RC RDMA Read Request of frame 3 (PSN 0x00000c) was refused: remote access error: key, range or right"]),
    ("a READ of 3000 bytes, and packets behind it are missing", |w| { w.a(read(10, 3000), 0); w.a(send(18), 8); w.b(response(Opcode::RcReadResponseFirst, 10, 1), 1024); w.b(request(Opcode::RcReadResponseMiddle, 11), 1024); w.b(response(Opcode::RcReadResponseLast, 12, 1), 952); w.b(ack(18, 7), 0); w.a(send(12), 8); }, &["7 read-span-reused A: RC Send Only has PSN 0x00000c, which belongs to the READ of 3000 bytes in frame 1 (PSNs 0x00000a to 0x00000c)"]),
    ("a response shows that a request behind missing packets has a READ's PSN", |w| { w.a(read(10, 8000), 0); w.a(send(13), 8); w.b(response(Opcode::RcReadResponseFirst, 10, 1), 1024); }, &["2 read-span-reused A: this request has PSN 0x00000d, which belongs to the READ of 8000 bytes in frame 1 (PSNs 0x00000a to 0x000011)"]),
    ("a READ of 2000 bytes comes late", |w| { w.a(send(10), 8); w.a(send(14), 8); w.a(read(11, 2000), 0); w.b(response(Opcode::RcReadResponseFirst, 11, 2), 1024); w.b(response(Opcode::RcReadResponseLast, 12, 2), 976); w.b(ack(14, 4), 0); }, &[]),
    ("a READ's ONLY response", |w| { w.a(read(10, 600), 0); w.b(response(Opcode::RcReadResponseOnly, 10, 1), 600); w.a(send(11), 8); w.b(ack(11, 2), 0); }, &[]),
    ("a packet before the request that a READ's number of PSNs was taken from", |w| { w.a(read(10, 3000), 0); w.a(send(16), 8); w.a(send(15), 8); w.a(write(10, 8), 8); }, &["4 read-span-reused A: RC RDMA Write Only has PSN 0x00000a, which belongs to the READ of 3000 bytes in frame 1 (PSNs 0x00000a to 0x00000f)", "1 no-answer B: RC RDMA Read Request with PSN 0x00000a of frame 1 was sent 3 times in 0.0 s and never answered"]),
    ("packets that may belong to a READ of which the capture cut the length", |w| { w.cut = 20; w.a(read(10, 600), 0); w.cut = 0; w.a(send(17), 8); w.a(send(16), 8); w.a(send(16), 12); w.b(ack(17, 2), 0); }, &["5 ack-passes-read B: an acknowledgement of PSN 0x000011 before the READ of frame 1 (PSN 0x00000a) was answered"]),
    ("a READ of which the capture cut the length", |w| { w.cut = 20; w.a(read(10, 600), 0); w.cut = 0; w.a(send(17), 8); w.a(send(16), 8); w.b(ack(17, 2), 0); }, &["4 ack-passes-read B: an acknowledgement of PSN 0x000011 before the READ of frame 1 (PSN 0x00000a) was answered"]),
];

fn judge(wire: fn() -> Wire, cases: &[Case]) {
    let mut wrong = vec![];
    for (title, packets, expected) in cases {
        let mut wire = wire();
        packets(&mut wire);
        let found = wire.found();
        if found != *expected {
            wrong.push(format!("{title}: {found:#?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn packets_of_queue_pairs_of_which_the_beginning_is_not_known() {
    judge(Wire::stated, CASES);
}

#[test]
fn packets_from_the_first_on() {
    judge(|| Wire::named(10, 1), NAMED);
}

#[test]
fn packets_of_queue_pairs_of_which_the_path_mtu_is_not_known() {
    let wire = || {
        let mut wire = Wire::new();
        wire.state(None, None, None);
        wire
    };
    judge(wire, UNSIZED);
}

/// Returns what could not be checked, and the verdict.
fn unknown(packets: fn(&mut Wire)) -> (Vec<String>, Verdict) {
    let mut wire = Wire::stated();
    packets(&mut wire);
    wire.found();
    let summary = wire.summary();
    (summary.not_checked, summary.verdict)
}

#[test]
fn what_could_not_be_checked_is_said() {
    let good = unknown(|w| {
        w.a(send(10), 8);
        w.b(ack(10, 1), 0);
    });
    assert_eq!(good, (vec![], Verdict::Good));
    let one_side = unknown(|w| w.a(send(10), 8));
    assert_eq!(
        one_side,
        (vec!["only one direction is there".to_owned()], Verdict::NotChecked)
    );
    let cut = unknown(|w| {
        w.a(send(10), 8);
        w.b(ack(10, 1), 0);
        w.cut = 4;
        w.a(send(11), 8);
        w.b(ack(11, 2), 0);
    });
    assert_eq!(cut, (vec!["1 packets are cut".to_owned()], Verdict::NotChecked));
    let missing = unknown(|w| {
        w.a(send(10), 8);
        w.a(send(13), 8);
        w.b(ack(13, 4), 0);
        w.b(ack(13, 4), 0);
    });
    let text = "2 packets are missing in the capture, but were answered".to_owned();
    assert_eq!(missing, (vec![text], Verdict::NotChecked));
    let (a_part_of_them, _) = unknown(|w| {
        w.a(send(10), 8);
        w.a(send(16), 8);
        w.b(ack(13, 4), 0);
    });
    assert_eq!(
        a_part_of_them,
        ["3 packets are missing in the capture, but were answered"]
    );
    let (behind_one_that_came_late, _) = unknown(|w| {
        w.a(send(10), 8);
        w.a(send(16), 8);
        w.a(send(13), 8);
        w.b(ack(16, 7), 0);
    });
    assert_eq!(
        behind_one_that_came_late,
        ["4 packets are missing in the capture, but were answered"]
    );
}

/// A jump of PSNs is another connection of the queue pair; what was counted before still counts.
#[test]
fn a_connection_after_another_keeps_the_counts() {
    let jump = |wire: &mut Wire, by: u32| {
        wire.cut = 4;
        wire.a(send(10), 8);
        wire.cut = 0;
        wire.a(send(10), 8);
        wire.a(send(12), 8);
        wire.b(ack(12, 3), 0);
        wire.a(send(13 + by), 8);
        wire.b(ack(13 + by, 4), 0);
        // The MSN is known from here on.
        wire.b(ack(13 + by, 6), 0);
        let found = wire.found();
        let summary = wire.summary();
        (found, summary.not_checked, summary.repeated)
    };
    let cut = "1 packets are cut".to_owned();
    let msn = vec![format!("7 msn B: MSN 6, 4 expected")];
    for by in [(1 << 17) + 1, 1 << 20] {
        let missing = "1 packets are missing in the capture, but were answered".to_owned();
        let found = jump(&mut Wire::stated(), by);
        assert_eq!(found, (msn.clone(), vec![cut.clone(), missing], [1, 0]), "{by}");
    }
    // As far as packets may be missing in a capture.
    let (_, unknown, _) = jump(&mut Wire::stated(), 1 << 17);
    assert_eq!(
        unknown[1],
        "131073 packets are missing in the capture, but were answered"
    );
    // A connection of which the first PSN is known does not jump.
    let (_, unknown, _) = jump(&mut Wire::named(10, 1), 1 << 20);
    assert_eq!(
        unknown[1],
        "1048577 packets are missing in the capture, but were answered"
    );
}

#[test]
fn the_end_of_a_connection_is_judged_once() {
    let mut wire = Wire::stated();
    for _ in 0..3 {
        wire.a(send(10), 8);
    }
    wire.state(Some(1024), None, None);
    let found = wire.found();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with("1 no-answer B"), "{found:?}");
    let mut wire = Wire::stated();
    wire.a(send(10), 8);
    wire.b(rnr(1, 10, 0), 0);
    wire.state(Some(1024), None, None);
    let found = wire.found();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with("2 rnr-unresolved B"), "{found:?}");
}

#[test]
fn an_answer_to_a_damaged_request_is_no_ghost() {
    for damaged in [false, true] {
        let mut wire = Wire::stated();
        wire.a(send(10), 8);
        wire.damaged = damaged;
        wire.a(send(11), 8);
        wire.damaged = false;
        if !damaged {
            // Its acknowledgement is for another one.
            wire.b(ack(12, 1), 0);
        } else {
            wire.b(ack(11, 2), 0);
        }
        wire.a(send(10), 8);
        assert_eq!(wire.found().len(), usize::from(!damaged));
    }
}

#[test]
fn packets_behind_a_read_are_missing_when_a_response_shows_its_number_of_psns() {
    let mut wire = Wire::new();
    wire.state(None, None, None);
    wire.a(read(10, 2000), 0);
    wire.a(send(18), 8);
    wire.b(response(Opcode::RcReadResponseFirst, 10, 1), 1024);
    wire.b(response(Opcode::RcReadResponseLast, 11, 1), 976);
    wire.b(ack(18, 8), 0);
    assert_eq!(wire.found(), [""; 0]);
    assert_eq!(
        wire.summary().not_checked,
        ["6 packets are missing in the capture, but were answered"]
    );
}

/// The next request shows how many PSNs it took.
#[test]
fn a_read_of_which_the_capture_cut_the_length_has_any_number_of_responses() {
    let mut wire = Wire::stated();
    wire.cut = 20;
    wire.a(read(10, 3000), 0);
    wire.cut = 0;
    wire.b(response(Opcode::RcReadResponseFirst, 10, 1), 1024);
    wire.b(request(Opcode::RcReadResponseMiddle, 11), 1024);
    wire.b(response(Opcode::RcReadResponseLast, 12, 1), 952);
    wire.a(send(13), 8);
    wire.b(ack(13, 2), 0);
    assert_eq!(wire.found(), [""; 0]);
    assert_eq!(wire.summary().not_checked, ["1 packets are cut"]);
}

#[test]
fn each_packet_plays_its_part() {
    let mut wire = Wire::stated();
    wire.a(send(10), 8);
    wire.b(ack(10, 1), 0);
    wire.a(send(12), 8);
    wire.b(nak(SEQUENCE, 11, 1), 0);
    wire.a(send(11), 8);
    wire.a(send(12), 8);
    wire.b(rnr(1, 12, 2), 0);
    wire.a(read(13, 8), 0);
    wire.b(response(Opcode::RcReadResponseOnly, 13, 4), 8);
    wire.b(response(Opcode::RcReadResponseOnly, 13, 4), 8);
    wire.a(read(14, 2000), 0);
    wire.b(response(Opcode::RcReadResponseFirst, 14, 5), 1024);
    wire.b(response(Opcode::RcReadResponseLast, 15, 5), 976);
    wire.b(nak(ACCESS, 13, 4), 0);
    wire.b(Header::new(Bth::new(Opcode::Cnp, Qpn::new(0), Psn::new(0))), 0);
    let parts: Vec<_> = wire
        .events
        .iter()
        .map(|e| (e.kind.name(), e.kind.latency_ns()))
        .collect();
    let expected = [
        ("request", None),
        ("ack", Some(10_000)),
        ("request", None),
        ("sequence_nak", None),
        ("request", None),
        ("retransmission", None),
        ("rnr_nak", None),
        ("request", None),
        ("read_response", Some(10_000)),
        ("repeated_read_response", Some(20_000)),
        ("request", None),
        ("read_response", None),
        ("read_response", Some(20_000)),
        ("fatal_nak", None),
        ("cnp", None),
    ];
    assert_eq!(parts, expected);
}

/// An unreliable connection loses packets, and messages with them; what is there is in order.
#[test]
fn messages_of_unreliable_connections_are_in_order() {
    let mut wire = Wire::new();
    wire.a(request(Opcode::UcSendFirst, 10), 1024);
    wire.a(request(Opcode::UcSendLast, 12), 8);
    wire.a(request(Opcode::UcSendOnly, 13), 8);
    wire.cut = 4;
    wire.a(request(Opcode::UcSendLast, 14), 8);
    wire.cut = 0;
    wire.a(request(Opcode::UcSendFirst, 15), 1020);
    let skipped: Vec<_> = wire
        .events
        .iter()
        .map(|event| match event.kind {
            roce_pcap::judge::EventKind::Request { skipped, .. } => skipped,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(skipped, [0, 1, 0, 0, 0]);
    assert_eq!(
        wire.found(),
        [
            "4 opcode-sequence A: UC Send Last goes on with a message that was not begun",
            "5 payload-length A: UC Send First has 1020 bytes, the path MTU is 1024",
        ]
    );
    assert_eq!(wire.summary().not_checked, ["1 packets are cut"]);
}

#[test]
fn requests_of_an_extended_connection_are_answered_too() {
    let mut wire = Wire::new();
    for _ in 0..3 {
        wire.a(request(Opcode::XrcSendOnly, 10), 8);
    }
    let found = wire.found();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with("1 no-answer B: XRC Send Only"), "{found:?}");
    assert_eq!(wire.summary().service, "XRC");
}

fn cm(message: impl Into<Message>) -> [u8; 256] {
    Mad::new(1, message).emit()
}

/// A request for communication with this ID, by a queue pair of that number.
fn req(id: u32, qpn: u32) -> Req {
    Req {
        local_comm_id: id,
        local_qpn: Qpn::new(qpn),
        path_mtu: 3,
        primary_local_gid: A.parse().unwrap(),
        primary_remote_gid: B.parse().unwrap(),
        ..Req::default()
    }
}

#[test]
fn a_connection_request_is_answered_in_any_way() {
    let answers: [(&str, Option<[u8; 256]>); 3] = [
        ("none", None),
        (
            "later",
            Some(cm(Mra {
                remote_comm_id: 5,
                ..Mra::default()
            })),
        ),
        (
            "of another request",
            Some(cm(Mra {
                remote_comm_id: 6,
                ..Mra::default()
            })),
        ),
    ];
    for (answer, mad) in answers {
        let mut wire = Wire::new();
        wire.mad(true, &cm(req(5, QP_A)));
        if let Some(mad) = mad {
            wire.mad(false, &mad);
        }
        wire.us += 1_000_000;
        // Repeated: its time counts from the first.
        wire.mad(true, &cm(req(5, QP_A)));
        let found = wire.found();
        assert_eq!(found.len(), usize::from(answer != "later"), "{answer}: {found:?}");
    }
}

#[test]
fn a_disconnect_ends_its_own_connection() {
    let mut wire = Wire::new();
    for (id, more) in [(5, 0), (6, 0x10)] {
        wire.mad(true, &cm(req(id, QP_A + more)));
        let rep = Rep {
            local_comm_id: id + 10,
            remote_comm_id: id,
            local_qpn: Qpn::new(QP_B + more),
            ..Rep::default()
        };
        wire.mad(false, &cm(rep));
    }
    wire.mad(
        true,
        &cm(Dreq {
            local_comm_id: 6,
            remote_comm_id: 16,
            ..Dreq::default()
        }),
    );
    wire.mad(
        false,
        &cm(Drep {
            local_comm_id: 16,
            remote_comm_id: 6,
            ..Drep::default()
        }),
    );
    let ended = wire.us;
    wire.a(send(0), 8);
    // As long after the disconnect as a request may have been on its way.
    wire.send(ended + 100_000, QP_B + 0x10, send(0), 8);
    wire.us += 900_000;
    wire.send(wire.us, QP_B + 0x10, send(1), 8);
    let messages: Vec<_> = wire.judge.connection_messages().collect();
    assert_eq!(messages, [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 1)]);
    assert_eq!(
        wire.found(),
        ["9 request-after-disconnect A: a new request 1000 ms after the disconnect"]
    );
}

#[test]
fn only_messages_of_the_connection_manager_are_judged() {
    let mut mad = cm(req(5, QP_A));
    // Attribute.
    mad[16] = 0xff;
    let mut wire = Wire::new();
    wire.mad(true, &mad);
    // Class: performance management.
    mad[1] = 4;
    wire.mad(true, &mad);
    let found = wire.found();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].starts_with("1 gsi-header A: a management datagram that is dropped"),
        "{found:?}"
    );
}

/// Answers go to the conversation whose requests they can be of.
#[test]
fn an_answer_belongs_to_the_requests_that_await_it() {
    let mut wire = Wire::new();
    wire.a(send(10), 8);
    // Another queue pair of the same host.
    wire.send(20, QP_B + 1, send(500), 8);
    wire.b(ack(500, 1), 0);
    wire.found();
    let all = wire.judge.conversations();
    let packets: Vec<_> = all.iter().map(|c| c.packets).collect();
    assert_eq!(packets, [[1, 0], [1, 1]]);
    // An acknowledgement of what was not sent belongs to neither.
    let mut wire = Wire::new();
    wire.a(send(10), 8);
    wire.b(ack(11, 1), 0);
    wire.found();
    assert_eq!(wire.judge.conversations().len(), 2);
}
