//! Sockets of one address for several loops: a reuseport group, in which the kernel finds a packet's socket by its destination
//! queue pair number ([`Steering`]).
//!
//! The program sees the UDP payload. What the kernel carries as one packet, such as a segmented send on loopback, goes where
//! its first packet goes.

use std::{
    io,
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use nix::sys::socket::{setsockopt, sockopt::AttachReusePortCbpf};
use roce_bth::Qpn;
use roce_port::Steering;
use socket2::Socket;

use crate::socket::{Family, OpenError, UdpConfig, bind_receiver, context, family_addresses, new_socket};

/// `BPF_A` of `linux/filter.h`: returns the accumulator.
const BPF_A: u32 = 0x10;

/// Index of the socket: the top bits of the destination queue pair number, bytes 5 to 7 of the BTH. Socket 0 gets what is not a
/// shard's, and (a load beyond the end returns 0) what is too short.
fn program(steering: Steering) -> [libc::sock_filter; 7] {
    let op = |code: u32, jt: u8, k: u32| libc::sock_filter {
        code: code as u16,
        jt,
        jf: 0,
        k,
    };
    let multicast = Qpn::MULTICAST.value();
    [
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 4),
        op(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, multicast),
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 3, multicast),
        op(
            libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K,
            0,
            24 - u32::from(steering.bits()),
        ),
        op(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 1, steering.shards() as u32),
        op(libc::BPF_RET | BPF_A, 0, 0),
        op(libc::BPF_RET | libc::BPF_K, 0, 0),
    ]
}

/// Has the sockets of a reuseport group chosen by a classic BPF program, which sees the UDP payload and returns the index of a
/// socket: its place in the order in which they were bound.
///
/// # Errors
/// When the socket is in no group, or the kernel refuses the program.
pub fn steer_group(socket: BorrowedFd<'_>, program: &mut [libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
        filter: program.as_mut_ptr(),
    };
    Ok(setsockopt(&socket, AttachReusePortCbpf, &program)?)
}

/// Receiving sockets of a shard.
pub(crate) struct Receivers {
    /// One for each IP version.
    pub(crate) families: Vec<Family>,
    /// All sockets of the groups: were one closed, the last would move into its place.
    pub(crate) held: Vec<Arc<OwnedFd>>,
}

/// Binds a group of sockets for each IP version of the address, with a member for each shard. Without steering it binds one socket that
/// no other can join.
pub(crate) fn open_receivers(config: &UdpConfig, steering: Option<Steering>) -> Result<Vec<Receivers>, OpenError> {
    let count = steering.map_or(1, Steering::shards);
    let mut shards: Vec<Vec<Family>> = (0..count).map(|_| Vec::new()).collect();
    for addr in family_addresses(config.addr) {
        let group = match open_group(config, addr, steering) {
            // A host without IPv6 still has the other half of the unspecified address.
            Err(OpenError::Io { source, .. })
                if config.addr.is_unspecified() && source.raw_os_error() == Some(libc::EAFNOSUPPORT) =>
            {
                continue;
            }
            group => group?,
        };
        for (shard, socket) in shards.iter_mut().zip(group) {
            shard.push(Family::of(socket, addr)?);
        }
    }
    if shards.iter().any(Vec::is_empty) {
        return Err(OpenError::NotLocal(config.addr));
    }
    let members = shards.iter().flatten().filter(|_| steering.is_some());
    let held = members
        .map(|family| Ok(Arc::new(OwnedFd::from(family.main.try_clone()?))))
        .collect::<io::Result<Vec<_>>>()
        .map_err(context("duplicating sockets"))?;
    let receivers = shards.into_iter().map(|families| Receivers {
        families,
        held: held.clone(),
    });
    Ok(receivers.collect())
}

fn open_group(config: &UdpConfig, addr: IpAddr, steering: Option<Steering>) -> Result<Vec<Socket>, OpenError> {
    // The first takes the port for itself: no device or group that has the port is joined.
    let first = new_socket(addr)?;
    bind_receiver(&first, config, addr)?;
    let Some(steering) = steering else {
        return Ok(vec![first]);
    };
    let set_up = context("making a group of UDP sockets");
    first.set_reuse_port(true).map_err(&set_up)?;
    let mut group = vec![first];
    for _ in 1..steering.shards() {
        let socket = new_socket(addr)?;
        socket.set_reuse_port(true).map_err(&set_up)?;
        bind_receiver(&socket, config, addr)?;
        group.push(socket);
    }
    steer_group(group[0].as_fd(), &mut program(steering)).map_err(context("steering packets to the loops"))?;
    Ok(group)
}

#[cfg(test)]
mod tests {
    use std::{
        net::{SocketAddr, UdpSocket},
        time::Duration,
    };

    use roce_bth::ROCE_UDP_PORT;

    use super::*;

    fn packet(qpn: u32, mark: u8) -> [u8; 24] {
        let mut bytes = [0; 24];
        // Acknowledge request and reserved bits beside the number do not matter.
        bytes[4] = 0xa5;
        bytes[5..8].copy_from_slice(&qpn.to_be_bytes()[1..]);
        bytes[8] = 0x80;
        bytes[23] = mark;
        bytes
    }

    fn groups(addr: IpAddr, shards: usize) -> Vec<Receivers> {
        let config = UdpConfig {
            addr,
            ..UdpConfig::default()
        };
        open_receivers(&config, Steering::new(shards)).unwrap()
    }

    fn next(shard: &Receivers) -> Vec<u8> {
        let socket = UdpSocket::from(shard.families[0].main.try_clone().unwrap());
        socket.set_nonblocking(false).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut bytes = [0; 64];
        let n = socket.recv(&mut bytes).expect("a packet");
        bytes[..n].to_vec()
    }

    fn check(addr: IpAddr, shards: usize) {
        let steering = Steering::new(shards).unwrap();
        let mut opened = groups(addr, shards);
        let sender = UdpSocket::bind((addr, 0)).unwrap();
        let to = SocketAddr::new(addr, ROCE_UDP_PORT);
        let send = |bytes: &[u8]| sender.send_to(bytes, to).unwrap();
        for (shard, sockets) in opened.iter().enumerate() {
            let numbers = steering.slot(shard).unwrap().qpns();
            let last = numbers.last.min(Qpn::MULTICAST.value() - 1);
            for (mark, qpn) in [(1, numbers.first), (2, last)] {
                send(&packet(qpn, mark));
                assert_eq!(next(sockets), packet(qpn, mark), "{qpn:#x} of {shards}");
            }
        }
        // Management, multicast, numbers of nobody, and what is no packet.
        let strange = [0, 1, 0xff_ffff].map(|qpn| packet(qpn, 3));
        for bytes in strange {
            send(&bytes);
            assert_eq!(next(&opened[0]), bytes);
        }
        if !shards.is_power_of_two() {
            send(&packet(0xff_fffe, 4));
            assert_eq!(next(&opened[0]), packet(0xff_fffe, 4));
        }
        send(&[7; 5]);
        assert_eq!(next(&opened[0]), [7; 5]);
        // A shard that is gone leaves the others where they are.
        let last = opened.pop().unwrap();
        opened.remove(0);
        drop(opened);
        let number = steering.slot(shards - 1).unwrap().qpns().first;
        send(&packet(number, 5));
        assert_eq!(next(&last), packet(number, 5));
    }

    #[test]
    fn each_number_arrives_at_its_shard() {
        for shards in [2, 3, 4, 7] {
            check(ferroce_loopback::address().into(), shards);
        }
    }

    #[test]
    fn the_same_over_ipv6() {
        let _only = ferroce_loopback::only_one();
        check(std::net::Ipv6Addr::LOCALHOST.into(), 3);
    }

    #[test]
    fn a_group_is_not_joined_by_another() {
        let addr: IpAddr = ferroce_loopback::address().into();
        let _first = groups(addr, 2);
        let config = UdpConfig {
            addr,
            ..UdpConfig::default()
        };
        let again = open_receivers(&config, Steering::new(2));
        assert!(matches!(again, Err(OpenError::PortTaken { .. })));
        let alone = open_receivers(&config, None);
        assert!(matches!(alone, Err(OpenError::PortTaken { .. })));
        drop(_first);
        let _alone = open_receivers(&config, None).unwrap();
        assert!(matches!(
            open_receivers(&config, Steering::new(2)),
            Err(OpenError::PortTaken { .. })
        ));
    }
}
