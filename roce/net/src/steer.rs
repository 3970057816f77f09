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

use roce_bth::Qpn;
use roce_port::Steering;
use socket2::Socket;

use crate::{
    socket::{OpenError, UdpConfig, bind_receiver, context, family_addresses, new_socket},
    sys,
};

/// `BPF_A` of `linux/filter.h`: returns the accumulator.
const BPF_A: u32 = 0x10;

/// Index of the socket: the top bits of the destination queue pair number, bytes 5 to 7 of the BTH. Socket 0 gets what is not a
/// shard's, and (a load beyond the end returns 0) what is too short.
fn program(steering: Steering) -> [libc::sock_filter; 7] {
    let jump = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let op = |code: u32, k: u32| jump(code, 0, 0, k);
    [
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 4),
        op(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, Qpn::MULTICAST.value()),
        jump(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            3,
            0,
            Qpn::MULTICAST.value(),
        ),
        op(
            libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K,
            24 - u32::from(steering.bits()),
        ),
        jump(
            libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K,
            1,
            0,
            steering.shards() as u32,
        ),
        op(libc::BPF_RET | BPF_A, 0),
        op(libc::BPF_RET | libc::BPF_K, 0),
    ]
}

/// Has the sockets of a reuseport group chosen by a classic BPF program, which sees the UDP payload and returns the index of a
/// socket: its place in the order in which they were bound.
///
/// # Errors
/// When the socket is in no group, or the kernel refuses the program.
pub fn steer_group(socket: BorrowedFd<'_>, program: &mut [libc::sock_filter]) -> io::Result<()> {
    sys::attach_program(socket, libc::SO_ATTACH_REUSEPORT_CBPF, program)
}

/// One shard's receiving sockets: one for each IP version.
pub(crate) struct ShardSockets {
    pub(crate) sockets: Vec<(IpAddr, Socket)>,
    /// All sockets of the groups: were one closed, the last would move into its place.
    pub(crate) held: Vec<Arc<OwnedFd>>,
}

/// Binds a group for each IP version of the address; what each shard has of them.
pub(crate) fn open_groups(config: &UdpConfig, steering: Steering) -> Result<Vec<ShardSockets>, OpenError> {
    let mut shards: Vec<Vec<(IpAddr, Socket)>> = (0..steering.shards()).map(|_| Vec::new()).collect();
    for addr in family_addresses(config.addr) {
        match open_group(config, addr, steering) {
            Ok(group) => {
                for (shard, socket) in shards.iter_mut().zip(group) {
                    shard.push((addr, socket));
                }
            }
            // A host without IPv6 still has the other half of the unspecified address.
            Err(OpenError::Io { source, .. })
                if config.addr.is_unspecified() && source.raw_os_error() == Some(libc::EAFNOSUPPORT) => {}
            Err(e) => return Err(e),
        }
    }
    if shards.iter().any(Vec::is_empty) {
        return Err(OpenError::NotLocal(config.addr));
    }
    let all = shards.iter().flatten().map(|(_, socket)| socket.try_clone());
    let held = all
        .map(|socket| socket.map(|s| Arc::new(OwnedFd::from(s))))
        .collect::<io::Result<Vec<_>>>()
        .map_err(context("duplicating sockets"))?;
    Ok(shards
        .into_iter()
        .map(|sockets| ShardSockets {
            sockets,
            held: held.clone(),
        })
        .collect())
}

fn open_group(config: &UdpConfig, addr: IpAddr, steering: Steering) -> Result<Vec<Socket>, OpenError> {
    let set_up = context("making a group of UDP sockets");
    let mut group = Vec::new();
    for shard in 0..steering.shards() {
        let socket = new_socket(addr)?;
        // The first takes the port for itself: who has one of his own, or such a group, is not to be joined.
        if shard > 0 {
            socket.set_reuse_port(true).map_err(&set_up)?;
        }
        bind_receiver(&socket, config, addr)?;
        if shard == 0 {
            socket.set_reuse_port(true).map_err(&set_up)?;
        }
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
    use crate::socket::Family;

    fn packet(qpn: u32, mark: u8) -> [u8; 24] {
        let mut bytes = [0; 24];
        // Acknowledge request and reserved bits beside the number do not matter.
        bytes[4] = 0xa5;
        bytes[5..8].copy_from_slice(&qpn.to_be_bytes()[1..]);
        bytes[8] = 0x80;
        bytes[23] = mark;
        bytes
    }

    fn groups(addr: IpAddr, shards: usize) -> Vec<ShardSockets> {
        let config = UdpConfig {
            addr,
            ..UdpConfig::default()
        };
        open_groups(&config, Steering::new(shards).unwrap()).unwrap()
    }

    fn next(shard: &ShardSockets) -> Vec<u8> {
        let socket = UdpSocket::from(shard.sockets[0].1.try_clone().unwrap());
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
        let again = open_groups(&config, Steering::new(2).unwrap());
        assert!(matches!(again, Err(OpenError::PortTaken { .. })));
        let alone = Family::open(&config, addr);
        assert!(matches!(alone, Err(OpenError::PortTaken { .. })));
        drop(_first);
        let _alone = Family::open(&config, addr).unwrap();
        assert!(matches!(
            open_groups(&config, Steering::new(2).unwrap()),
            Err(OpenError::PortTaken { .. })
        ));
    }
}
