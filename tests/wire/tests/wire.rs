//! The wire with the kernel at both ends.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

use ferroce_wire::{
    direction::{Burst, Conditions, Counters},
    wire::{End, Wire, WireConfig},
};

const PORT: u16 = 5000;
/// A socket buffer holds so many datagrams of the size below.
const BATCH: u32 = 100;

fn socket(wire: &Wire, network: u8, end: End) -> UdpSocket {
    let at = SocketAddr::from((Wire::address(network, end), PORT));
    let bind = || {
        let socket = UdpSocket::bind(at)?;
        socket.set_read_timeout(Some(Duration::from_secs(20)))?;
        io::Result::Ok(socket)
    };
    wire.namespace(end).within(bind).unwrap()
}

fn wire(networks: u8) -> Wire {
    let config = WireConfig {
        networks,
        ..WireConfig::default()
    };
    Wire::start(&config).unwrap()
}

/// Both ends of a network, which know each other's hardware addresses: each has heard of the other.
fn pair(wire: &Wire, network: u8) -> [UdpSocket; 2] {
    let pair = End::BOTH.map(|end| socket(wire, network, end));
    for (from, to) in [(0, 1), (1, 0)] {
        pair[from].connect(pair[to].local_addr().unwrap()).unwrap();
    }
    for (from, to) in [(0, 1), (1, 0)] {
        pair[from].send(b"here").unwrap();
        let mut buffer = [0; 100];
        let len = pair[to].recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..len], b"here");
    }
    pair
}

/// Waits until everything has come out; the counters.
fn settled(wire: &Wire, network: u8, from: End) -> Counters {
    loop {
        let (counters, under_way) = wire.counters(network, from);
        let c = counters;
        assert_eq!(
            c.taken + c.repeated,
            c.cut + c.lost + c.dropped + c.refused + c.delivered + under_way as u64
        );
        if under_way == 0 {
            return counters;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
#[ignore = "needs root, for network namespaces"]
fn what_goes_into_a_wire_comes_out_on_the_same_network() {
    let wire = wire(2);
    let pairs = [pair(&wire, 0), pair(&wire, 1)];
    let mut buffer = [0; 2000];
    for n in 0..2000_u32 {
        for (network, [a, b]) in pairs.iter().enumerate() {
            let mut sent = vec![network as u8; 1000];
            sent[..4].copy_from_slice(&n.to_be_bytes());
            for (from, to) in [(a, b), (b, a)] {
                from.send(&sent).unwrap();
                let len = to.recv(&mut buffer).unwrap();
                assert_eq!(buffer[..len], sent);
            }
        }
    }
    // Nothing else is counted.
    for network in 0..2 {
        for from in End::BOTH {
            let c = settled(&wire, network, from);
            assert!(c.delivered == c.taken && c.taken >= 2000, "{c:?}");
        }
    }
}

#[test]
#[ignore = "needs root, for network namespaces"]
fn a_lossy_wire_loses_what_it_counts() {
    let wire = wire(1);
    let [a, b] = pair(&wire, 0);
    wire.set(
        0,
        End::A,
        Conditions {
            loss: 0.02,
            burst: Some(Burst {
                begins: 0.002,
                length: 5.0,
            }),
            duplicate: 0.01,
            ..Conditions::default()
        },
    );
    let before = settled(&wire, 0, End::A);
    let mut received = 0_u64;
    let mut buffer = [0; 2000];
    for n in 0..10_000_u32 / BATCH {
        for _ in 0..BATCH {
            a.send(&[7; 500]).unwrap();
        }
        // All of them have come out of the namespace, and are counted, when as many were taken.
        while settled(&wire, 0, End::A).taken < before.taken + u64::from((n + 1) * BATCH) {
            std::thread::sleep(Duration::from_millis(1));
        }
        b.set_nonblocking(true).unwrap();
        while b.recv(&mut buffer).is_ok() {
            received += 1;
        }
    }
    let c = settled(&wire, 0, End::A);
    // The kernel may ask for a hardware address again, and nothing else.
    let others = c.taken - before.taken - 10_000;
    assert!(others <= 2, "{c:?}");
    assert!(
        (received..=received + others).contains(&(c.delivered - before.delivered)),
        "{c:?}"
    );
    assert_eq!(c.delivered, c.taken + c.repeated - c.lost);
    assert!((200..450).contains(&c.lost) && (60..140).contains(&c.repeated), "{c:?}");
}

#[test]
#[ignore = "needs root, for network namespaces"]
fn a_cut_wire_is_silent_and_a_mended_one_is_not() {
    let wire = wire(1);
    let [a, b] = pair(&wire, 0);
    wire.set(0, End::B, Conditions::cut());
    let before = settled(&wire, 0, End::B);
    b.send(b"lost").unwrap();
    while settled(&wire, 0, End::B).cut == before.cut {
        std::thread::sleep(Duration::from_millis(1));
    }
    // The other way is not.
    a.send(b"there").unwrap();
    let mut buffer = [0; 100];
    let len = b.recv(&mut buffer).unwrap();
    assert_eq!(&buffer[..len], b"there");
    wire.set(0, End::B, Conditions::default());
    b.send(b"found").unwrap();
    let len = a.recv(&mut buffer).unwrap();
    assert_eq!(&buffer[..len], b"found");
}
