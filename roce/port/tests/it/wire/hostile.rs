//! Bytes from a peer that wants no good: nothing panics, memory outside of what was granted stays as it is.

use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use roce_bth::{Aeth, AtomicEth, Bth, Deth, Header, Msn, Opcode, QKey, RKey, Reth, Syndrome};
use roce_icrc::Flow;
use roce_port::RxMeta;
use roce_verbs::{Psn, Qpn, SendOp};

use super::*;

#[test]
fn noise_of_any_length_is_dropped() {
    let (a, mut b, _, _) = pair();
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for _ in 0..20_000 {
        let mut bytes = vec![0; rng.random_range(0..400)];
        rng.fill_bytes(&mut bytes);
        let meta = RxMeta {
            segment_len: if rng.random() { rng.random_range(0..100) } else { 0 },
            identification: rng.random::<bool>().then(|| rng.random()),
            tos: rng.random(),
            ..RxMeta::new(b.addr, SocketAddr::new(a.addr, rng.random()))
        };
        b.port.handle_datagram(b.now, &meta, &bytes);
    }
    assert!(b.take().is_empty(), "noise is not answered");
    let c = b.port.counters();
    let dropped: u64 = c
        .named()
        .filter(|(n, _)| n.starts_with("drop_") || n.starts_with("icrc_"))
        .map(|(_, n)| n)
        .sum();
    assert_eq!(dropped, c.rx_packets);
}

fn any_header(rng: &mut ChaCha8Rng, dest: Qpn, granted: &Region) -> Header {
    let opcode = Opcode::ALL[rng.random_range(0..Opcode::ALL.len())];
    let mut bth = Bth::new(
        opcode,
        dest,
        Psn::new(100u32.wrapping_add(rng.random_range(0..12)).wrapping_sub(4)),
    );
    bth.ack_req = rng.random();
    bth.solicited = rng.random();
    bth.pad = if rng.random_range(0..4) == 0 {
        rng.random_range(0..4)
    } else {
        0
    };
    let mut header = Header::new(bth);
    let rkey = if rng.random() {
        granted.rkey()
    } else {
        RKey(rng.random())
    };
    let va = granted.addr().wrapping_add(rng.random_range(0..80)).wrapping_sub(8);
    let edge = [0, 1, 8, 64, 1024, 1 << 31, u32::MAX];
    header.reth = Some(Reth {
        va,
        rkey,
        dma_len: edge[rng.random_range(0..edge.len())],
    });
    header.atomic_eth = Some(AtomicEth {
        va,
        rkey,
        swap_add: rng.random(),
        compare: 0,
    });
    header.aeth = Some(Aeth {
        syndrome: Syndrome::from_byte(rng.random()),
        msn: Msn::new(rng.random()),
    });
    header.atomic_ack = Some(rng.random());
    header.imm = Some(rng.random());
    header.ieth = Some(rkey);
    header.deth = Some(Deth {
        qkey: QKey::GSI,
        reserved: 0,
        src_qp: Qpn::GSI,
    });
    header
}

/// Packets that pass every check of the port: only the engine and the connection manager stand behind.
#[test]
fn sealed_nonsense_does_no_harm() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    for _ in 0..400 {
        let (mut a, mut b, qa, qb) = pair();
        // The granted memory lies in the middle of a region that the peer has no key to.
        let (granted, own) = (b.region(64), b.region(256));
        own.write(0, &noise(256)).unwrap();
        b.receive(qb, 1, &granted);
        b.send(qb, 2, SendOp::Read(remote(&a.region(64))), &granted, 64);
        let _ = (qa, b.take());
        for _ in 0..40 {
            let dest = if rng.random_range(0..8) == 0 { Qpn::GSI } else { qb };
            let header = any_header(&mut rng, dest, &granted);
            let mut bytes = vec![0; header.wire_len()];
            header.emit(&mut bytes);
            let lens = [0, 0, 4, 8, 64, 256, 1024, 1028];
            let len = lens[rng.random_range(0..lens.len())];
            let end = bytes.len() + len;
            bytes.resize(end, 0xee);
            bytes.extend_from_slice(&[0; 4]);
            let src = SocketAddr::new(a.addr, 0xc000);
            let flow = Flow::try_from((src, SocketAddr::new(b.addr, ROCE))).unwrap();
            flow.seal(0, &mut bytes);
            b.port.handle_datagram(b.now, &RxMeta::new(b.addr, src), &bytes);
            b.take().iter().for_each(|d| a.give(d));
            b.now = b.now + core::time::Duration::from_millis(3);
            b.port.handle_timeout(b.now);
        }
        assert_eq!(contents(&own), noise(256));
    }
}
