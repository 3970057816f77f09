//! Captures with very many queue pairs.

use roce_bth::{Aeth, Bth, Credits, Header, ICRC_LEN, MAX_HEADER_LEN, Msn, Opcode, Psn, Qpn, ROCE_UDP_PORT, Syndrome};
use roce_pcap::Verdict;

use crate::common::{capture_of, ethernet, ip_datagram, report_of, v4};

/// Requests and answers of which only the peers know which belong together: each answer fits to all requests. Comparing them all
/// would take minutes.
#[test]
fn queue_pairs_that_fit_to_many_are_left_unpaired() {
    const QUEUE_PAIRS: u32 = 30_000;
    let (a, b) = v4();
    let back = (b, (a.ip(), ROCE_UDP_PORT).into());
    let frame = |qpn, opcode, from_a| {
        let mut header = Header::new(Bth::new(opcode, Qpn::new(qpn), Psn::new(5)));
        header.aeth = Some(Aeth {
            syndrome: Syndrome::Ack(Credits::INVALID),
            msn: Msn::new(1),
        });
        let mut bytes = vec![0; MAX_HEADER_LEN];
        let len = header.emit(&mut bytes);
        bytes.resize(len + ICRC_LEN, 0);
        let addresses = if from_a { (a, b) } else { back };
        ethernet(0x0800, &ip_datagram(addresses, 1, &bytes))
    };
    let requests = (0..QUEUE_PAIRS).map(|n| frame(n + 2, Opcode::RcSendOnly, true));
    let answers = (0..QUEUE_PAIRS).map(|n| frame(n + 2, Opcode::RcAcknowledge, false));
    let frames: Vec<_> = requests.chain(answers).collect();
    let frames: Vec<_> = frames.iter().map(|frame| (&frame[..], None)).collect();
    let report = report_of(&capture_of(1, &frames));
    assert_eq!(report.icrc_ok, u64::from(2 * QUEUE_PAIRS));
    assert_eq!(report.conversations.len() as u32, 2 * QUEUE_PAIRS);
    assert_eq!((report.verdict, report.findings), (Verdict::NotChecked, vec![]));
}
