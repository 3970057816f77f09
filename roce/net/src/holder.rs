//! Who holds a UDP port.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
};

/// A socket bound to a UDP port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Holder {
    /// The bound address.
    pub addr: IpAddr,
    /// The process, if it may be seen: its id and command.
    pub process: Option<(u32, String)>,
}

/// The sockets of this network namespace that keep others from binding this address and UDP port. Empty when `/proc` is
/// not there.
pub fn port_holders(addr: IpAddr, port: u16) -> Vec<Holder> {
    let sockets = read_twice(|table| sockets_in_the_way(table, addr, port)).unwrap_or_default();
    let owners = processes_with(&sockets.iter().map(|(_, inode)| *inode).collect());
    let holders = sockets.into_iter().map(|(addr, inode)| Holder {
        addr,
        process: owners.get(&inode).cloned(),
    });
    holders.collect()
}

/// The addresses, specific and unspecified, that sockets of this network namespace are bound to at a UDP port.
///
/// # Errors
/// When the kernel's tables can't be read.
pub fn bound_addresses(port: u16) -> io::Result<BTreeSet<IpAddr>> {
    read_twice(|table| {
        table
            .lines()
            .filter_map(|line| parse_line(line, port))
            .map(|s| s.0)
            .collect()
    })
}

/// What the kernel's tables of UDP sockets say.
fn read_twice<T: Eq>(parse: impl Fn(&str) -> T) -> io::Result<T> {
    let read = || -> io::Result<T> {
        let v4 = fs::read_to_string("/proc/net/udp")?;
        // A kernel may have no IPv6.
        let v6 = fs::read_to_string("/proc/net/udp6").unwrap_or_default();
        Ok(parse(&(v4 + &v6)))
    };
    let mut all = read()?;
    // A table that shrinks while it is read may lack lines.
    for _ in 0..READINGS {
        let before = std::mem::replace(&mut all, read()?);
        if all == before {
            break;
        }
    }
    Ok(all)
}

/// How often the kernel's tables are read until they say the same twice.
const READINGS: usize = 8;

/// The sockets that keep others from binding this address and UDP port: what they are bound to, and their inodes. A
/// table that grows while it is read may have lines twice.
fn sockets_in_the_way(table: &str, addr: IpAddr, port: u16) -> BTreeSet<(IpAddr, u64)> {
    // On other addresses the port is free for others.
    let in_the_way = |held: IpAddr| held == addr || held.is_unspecified() || addr.is_unspecified();
    let sockets = table.lines().filter_map(|line| parse_line(line, port));
    sockets.filter(|(held, _)| in_the_way(*held)).collect()
}

/// The local address and the inode of a line of `/proc/net/udp`, if it is for `port`.
fn parse_line(line: &str, port: u16) -> Option<(IpAddr, u64)> {
    let mut fields = line.split_whitespace();
    let (addr, hex_port) = fields.nth(1)?.rsplit_once(':')?;
    let inode = fields.nth(7)?.parse().ok()?;
    if u16::from_str_radix(hex_port, 16).ok()? != port {
        return None;
    }
    Some((parse_addr(addr)?, inode))
}

/// Words of the address in the machine's byte order, in hexadecimal.
fn parse_addr(hex: &str) -> Option<IpAddr> {
    let word = |at: usize| u32::from_str_radix(hex.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes);
    match hex.len() {
        8 => Some(Ipv4Addr::from(word(0)?).into()),
        32 => {
            let mut octets = [0; 16];
            for (nth, chunk) in octets.chunks_exact_mut(4).enumerate() {
                chunk.copy_from_slice(&word(nth * 8)?);
            }
            Some(Ipv6Addr::from(octets).into())
        }
        _ => None,
    }
}

/// A process that has each of these sockets, for those that can be seen: a descriptor that is under way in a message is no
/// process's.
fn processes_with(inodes: &BTreeSet<u64>) -> BTreeMap<u64, (u32, String)> {
    let mut owners = BTreeMap::new();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    for pid in processes.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok()) {
        if owners.len() == inodes.len() {
            break;
        }
        let fds = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let has: BTreeSet<u64> = fds
            .filter_map(|fd| socket_inode(&fs::read_link(fd.path()).ok()?))
            .filter(|inode| inodes.contains(inode))
            .collect();
        if !has.is_empty() {
            let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            for inode in has {
                owners.entry(inode).or_insert_with(|| (pid, comm.trim().to_owned()));
            }
        }
    }
    owners
}

/// Of what a descriptor of a socket is shown as: `socket:[INODE]`.
fn socket_inode(link: &Path) -> Option<u64> {
    link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// A sentence about who holds the port at this address, and what to do. This process itself is not meant unless there is
/// nobody else.
pub fn explain(addr: IpAddr, port: u16) -> String {
    let mut holders = port_holders(addr, port);
    let is_own = |h: &Holder| h.process.as_ref().is_some_and(|p| p.0 == std::process::id());
    if holders.iter().any(|h| !is_own(h)) {
        holders.retain(|h| !is_own(h));
    }
    if let Some((pid, comm)) = holders.iter().find_map(|h| h.process.as_ref()) {
        return format!("process {pid} ({comm}) has it: end it, or give this device another address");
    }
    if Path::new("/sys/module/rdma_rxe").exists() {
        return "the kernel's rdma_rxe has it (`rdma link` lists its devices): remove them with `rdma link delete NAME` \
                and `modprobe -r rdma_rxe`"
            .to_owned();
    }
    match holders.is_empty() {
        true => "whoever has it is not visible from here".to_owned(),
        false => "a process of another user, or the kernel, has it: `ss -ulnp` as root shows which".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    #[test]
    fn this_process_is_found_as_the_holder_of_its_port() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        let holders = port_holders(Ipv4Addr::LOCALHOST.into(), port);
        assert_eq!(holders.len(), 1);
        assert_eq!(holders[0].process.as_ref().map(|p| p.0), Some(std::process::id()));
        let us = std::process::id().to_string();
        assert!(explain(Ipv4Addr::LOCALHOST.into(), port).contains(&us));
        assert!(explain(Ipv4Addr::UNSPECIFIED.into(), port).contains(&us));
        let bound = bound_addresses(port).unwrap();
        assert!(bound.contains(&Ipv4Addr::LOCALHOST.into()), "{bound:?}");
        let elsewhere = explain(Ipv4Addr::new(127, 0, 0, 2).into(), port);
        assert!(!elsewhere.contains(&us), "we have it on another address: {elsewhere}");
    }

    #[test]
    fn a_socket_that_the_table_has_twice_is_one() {
        let local = u32::from_ne_bytes([127, 0, 0, 1]);
        let line = |port: u16, inode: u64| {
            format!(
                "  9: {local:08X}:{port:04X} 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 {inode} 2 0 0\n"
            )
        };
        let table = [line(4791, 7), line(4792, 8), line(4791, 7), line(4791, 9)].concat();
        let sockets = sockets_in_the_way(&table, Ipv4Addr::LOCALHOST.into(), 4791);
        assert_eq!(sockets.into_iter().map(|s| s.1).collect::<Vec<_>>(), [7, 9]);
    }

    #[test]
    fn addresses_of_the_table() {
        let word = |octets: [u8; 4]| format!("{:08X}", u32::from_ne_bytes(octets));
        assert_eq!(parse_addr(&word([127, 0, 0, 1])), Some("127.0.0.1".parse().unwrap()));
        let text = format!("{}{}{}{}", word([0; 4]), word([0; 4]), word([0; 4]), word([0, 0, 0, 1]));
        assert_eq!(parse_addr(&text), Some("::1".parse().unwrap()));
        assert_eq!(parse_addr("12"), None);
        assert_eq!(parse_addr("ÄÄÄÄ"), None);
    }
}
