//! Loopback addresses that no other test uses: the UDP port of RoCE is fixed, so each device needs an address of its own,
//! and test programs run side by side (of several checkouts, too).
//!
//! A process takes networks `127.x.y.0/24` and marks each as taken with a socket on its last address. The kernel
//! refuses that address to everybody else and lets it go with the process, however that ends.

pub mod tcp;

use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket},
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use roce_net::holder;

/// Port of the sockets that mark networks as taken.
const MARK: u16 = 4792;
/// RoCE's.
const ROCE: u16 = 4791;
/// Host part of the marks.
const LAST: u8 = 254;
/// Networks: 127.1.0.0/24 to 127.254.255.0/24. People and the demo use 127.0.0.0/24.
const NETWORKS: u32 = 254 << 8;
/// Of those, 127.44.0.0/15 has fixed addresses of the broker's tests.
const FIXED: [u8; 2] = [44, 45];

/// A network of ours and its next host.
struct Network {
    number: u32,
    next: u8,
    _mark: UdpSocket,
}

static OURS: Mutex<Option<Network>> = Mutex::new(None);

impl Network {
    fn address(number: u32, host: u8) -> Ipv4Addr {
        let [.., x, y] = number.to_be_bytes();
        Ipv4Addr::new(127, x + 1, y, host)
    }

    /// Takes one that is free; `from` says where to begin.
    fn take(from: u32) -> Self {
        for i in 0..NETWORKS {
            // A step without common factors with the number of networks: each comes once.
            let number = (from + i * 7919) % NETWORKS;
            let [_, second, ..] = Self::address(number, LAST).octets();
            if FIXED.contains(&second) {
                continue;
            }
            if let Ok(mark) = UdpSocket::bind((Self::address(number, LAST), MARK)) {
                return Self {
                    number,
                    next: 1,
                    _mark: mark,
                };
            }
        }
        panic!("no loopback network is free: does somebody hold UDP port {MARK} on all addresses?");
    }
}

/// An address for a device.
///
/// # Panics
/// When there is none.
pub fn address() -> Ipv4Addr {
    addresses(1)
}

/// The first of `count` addresses in a row.
///
/// # Panics
/// When there are none, or for more than 253.
pub fn addresses(count: u8) -> Ipv4Addr {
    assert!(count < LAST, "{count} addresses do not fit into one network");
    let mut ours = OURS.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let network = match ours.take() {
            Some(network) if count <= LAST - network.next => network,
            // Its addresses stay in use, so the mark stays until the end of the process.
            Some(full) => {
                let number = full.number;
                std::mem::forget(full);
                Network::take(number + 1)
            }
            None => Network::take(std::process::id() % NETWORKS),
        };
        let (number, first) = (network.number, network.next);
        let next = first + count;
        *ours = Some(Network { next, ..network });
        // A process that a test left behind may still have the port there. To bind it to see would take it for longer than that: a
        // program that another thread starts has every socket of this process until it runs.
        let taken = holder::bound_addresses(ROCE).expect("the kernel's tables of sockets");
        let everywhere = taken.iter().any(IpAddr::is_unspecified);
        let is_free = |host| !taken.contains(&Network::address(number, host).into());
        if !everywhere && (first..next).all(is_free) {
            return Network::address(number, first);
        }
    }
}

/// The right to the addresses that exist only once: `::1`, `::`, `0.0.0.0`.
#[derive(Debug)]
pub struct OnlyOne(#[allow(dead_code, reason = "the socket is the mark")] UdpSocket);

/// Waits until no other test uses the addresses that exist only once, and until no other program has RoCE's port on `::1`;
/// they are the caller's as long as the value lives.
///
/// # Panics
/// When that takes longer than five minutes.
pub fn only_one() -> OnlyOne {
    let until = Instant::now() + Duration::from_secs(300);
    let wait = |what: &str, addr: IpAddr, port| loop {
        match UdpSocket::bind((addr, port)) {
            Err(e) if e.kind() == ErrorKind::AddrInUse => {
                assert!(Instant::now() < until, "{what} still has UDP port {port} of {addr}");
                thread::sleep(Duration::from_millis(20));
            }
            bound => return bound,
        }
    };
    let mark = wait("another test", Ipv4Addr::new(127, 0, 0, LAST).into(), MARK);
    // A host without IPv6 is the caller's business.
    let _ = wait("another program", Ipv6Addr::LOCALHOST.into(), ROCE);
    OnlyOne(mark.expect("loopback"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_address_comes_twice_and_its_network_is_marked() {
        let threads: Vec<_> = (0..4)
            .map(|_| thread::spawn(|| (0..100).map(|_| address()).collect::<Vec<_>>()))
            .collect();
        let all: Vec<_> = threads.into_iter().flat_map(|t| t.join().unwrap()).collect();
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
        for addr in all {
            let [a, b, c, _] = addr.octets();
            assert!(UdpSocket::bind((Ipv4Addr::new(a, b, c, LAST), MARK)).is_err(), "{addr}");
        }
    }

    #[test]
    fn addresses_in_a_row_are_in_one_network() {
        let mut seen = HashSet::new();
        for _ in 0..40 {
            let first = addresses(7).octets();
            assert!(first[3] + 7 <= LAST);
            for i in 0..7 {
                assert!(seen.insert([first[1], first[2], first[3] + i]));
            }
        }
    }

    #[test]
    fn an_address_whose_port_is_taken_is_passed_over() {
        let one = addresses(2);
        let [a, b, c, d] = one.octets();
        let _holders: Vec<_> = (d + 2..LAST)
            .filter_map(|host| UdpSocket::bind((Ipv4Addr::new(a, b, c, host), ROCE)).ok())
            .collect();
        let next = address();
        assert_ne!(next.octets()[..3], [a, b, c]);
        UdpSocket::bind((next, ROCE)).unwrap();
    }

    #[test]
    fn one_after_the_other_has_the_addresses_that_exist_once() {
        let first = only_one();
        let second = thread::spawn(|| drop(only_one()));
        thread::sleep(Duration::from_millis(50));
        assert!(!second.is_finished());
        drop(first);
        second.join().unwrap();
    }
}
