//! Client and server over the software device on loopback.

use std::{collections::HashMap, sync::mpsc};

use crate::support::*;
use ferroce_rig::{Outcome, Session};
use rand::{Rng, SeedableRng, rngs::StdRng};
use rtrs::{
    Direction, Error,
    client::{ConType, SessionConfig},
    server::ServerConfig,
};

/// Writes and reads of random sizes on separate stripes, as many in flight as the queue allows, against a copy.
fn stress(session: &Session, rounds: usize, seed: u64) {
    const STRIPE: usize = 60 << 10;
    let mut rng = StdRng::seed_from_u64(seed);
    let max = (session.info().max_io_size as usize).min(STRIPE);
    let mut model: Vec<Vec<u8>> = vec![vec![0; STRIPE]; 16];
    let (tx, rx) = mpsc::channel();
    let mut busy: HashMap<usize, Option<Vec<u8>>> = HashMap::new();
    let settle = |busy: &mut HashMap<usize, Option<Vec<u8>>>| {
        let (stripe, outcome): (usize, Outcome) = rx.recv_timeout(TIMEOUT).expect("every request ends");
        outcome.result.unwrap();
        if let Some(expected) = busy.remove(&stripe).unwrap() {
            let data = outcome.data.map_or(Vec::new(), |b| contents(&b));
            assert!(
                data == expected,
                "stripe {stripe}: {} bytes read differ from what was written",
                data.len()
            );
        }
    };
    for round in 0..rounds {
        let stripe = rng.random_range(0..model.len());
        while busy.contains_key(&stripe) {
            settle(&mut busy);
        }
        let len = match rng.random_range(0..4) {
            0 => rng.random_range(0..64),
            1 => (4096 * rng.random_range(1..8)).min(max),
            _ => rng.random_range(0..=max),
        };
        let at = rng.random_range(0..=STRIPE - len);
        let header = header((stripe * STRIPE + at) as u64, rng.random_range(0..100));
        let tx = tx.clone();
        let done = move |outcome| tx.send((stripe, outcome)).unwrap();
        let con = if round % 50 == 0 {
            ConType::Admin
        } else {
            ConType::Io(rng.random_range(0..1000))
        };
        if rng.random() {
            let mut bytes = vec![0; len];
            rng.fill(&mut bytes[..]);
            model[stripe][at..at + len].copy_from_slice(&bytes);
            busy.insert(stripe, None);
            session.request(con, Direction::Write, &header, Some(buffer(session, &bytes)), done);
        } else {
            busy.insert(stripe, Some(model[stripe][at..at + len].to_vec()));
            let data = session.alloc_buffer(len).unwrap();
            session.request(con, Direction::Read, &header, Some(data), done);
        }
    }
    while !busy.is_empty() {
        settle(&mut busy);
    }
    for (i, stripe) in model.iter().enumerate() {
        for (j, part) in stripe.chunks(max).enumerate() {
            assert!(
                read(session, (i * STRIPE + j * max) as u64, part.len()) == part,
                "stripe {i} at the end"
            );
        }
    }
}

#[test]
fn data_is_right_whatever_keys_and_connections_there_are() {
    // New keys at the server, and at the client; I/O connections, chunks, and rounds.
    for (always_invalidate, invalidate_reads, connections, chunks, rounds) in [
        (true, true, 1, 32, 1500),
        (true, true, 4, 32, 1500),
        (false, true, 1, 32, 1500),
        (false, false, 4, 32, 1500),
        (true, false, 2, 32, 500),
        (true, true, 2, 1, 200),
    ] {
        let bed = Bed::new(ServerConfig {
            always_invalidate,
            queue_depth: chunks,
            max_chunk_size: if chunks == 1 { 8192 } else { 64 << 10 },
            ..config()
        });
        let args = SessionConfig {
            invalidate_reads,
            ..bed.args("stress", connections)
        };
        let session = Session::open(bed.client(), args).unwrap();
        assert_eq!(session.info().new_rkeys, always_invalidate);
        assert_eq!(session.info().queue_depth, chunks);
        stress(&session, rounds, 7);
        assert!(session.state().is_ok());
        session.close();
        eventually("the session's end", || bed.disk.closed.lock().len() == 1);
        let counters = bed.server.counters();
        let errors = [
            counters.protocol_errors,
            counters.transfer_errors,
            counters.heartbeats_lost,
        ];
        assert_eq!(errors, [0; 3]);
    }
}

#[test]
fn buffers_are_reused_and_bounded() {
    let bed = Bed::new(config());
    let args = SessionConfig {
        buffer_bytes: Some(512 << 10),
        ..bed.args("s1", 1)
    };
    let session = Session::open(bed.client(), args).unwrap();
    let held: Vec<_> = (0..8).map(|_| session.alloc_buffer(60 << 10).unwrap()).collect();
    assert!(matches!(session.alloc_buffer(60 << 10), Err(Error::NoBuffer { .. })));
    assert!(matches!(session.alloc_buffer(100), Err(Error::NoBuffer { .. })));
    assert!(matches!(session.alloc_buffer(1 << 30), Err(Error::NoBuffer { .. })));
    drop(held);
    // What was given back is cut for others.
    let mut one = session.alloc_buffer(40 << 10).unwrap();
    assert!(one.write(40_000, &[0; 1000]).is_err());
    assert!(one.read(usize::MAX, &mut [0; 2]).is_err());
    // A buffer outlives its session.
    session.close();
    one.write(0, b"still here").unwrap();
    let mut back = [0; 10];
    one.read(0, &mut back).unwrap();
    assert_eq!(&back, b"still here");
}
