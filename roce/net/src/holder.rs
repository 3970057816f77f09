//! Who holds a UDP port.

use std::{fs, net::IpAddr, path::Path};

/// A socket bound to a UDP port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Holder {
    /// The bound address as `/proc/net/udp` shows it, in hexadecimal.
    pub local: String,
    /// The process, if it may be seen: its id and command.
    pub process: Option<(u32, String)>,
}

/// The sockets of this network namespace that are bound to a UDP port. Empty when `/proc` is not there.
pub fn port_holders(port: u16) -> Vec<Holder> {
    let mut out = Vec::new();
    for table in ["/proc/net/udp", "/proc/net/udp6"] {
        let text = fs::read_to_string(table).unwrap_or_default();
        for (local, inode) in text.lines().filter_map(|line| parse_line(line, port)) {
            let process = process_with_socket(inode);
            out.push(Holder { local, process });
        }
    }
    out
}

/// The local address and the inode of a line of `/proc/net/udp`, if it is for `port`.
fn parse_line(line: &str, port: u16) -> Option<(String, u64)> {
    let mut fields = line.split_whitespace();
    let (addr, hex_port) = fields.nth(1)?.rsplit_once(':')?;
    let inode = fields.nth(7)?.parse().ok()?;
    (u16::from_str_radix(hex_port, 16).ok()? == port).then(|| (addr.to_owned(), inode))
}

fn process_with_socket(inode: u64) -> Option<(u32, String)> {
    let wanted = format!("socket:[{inode}]");
    let pids = fs::read_dir("/proc").ok()?.flatten();
    for pid in pids.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok()) {
        let Ok(fds) = fs::read_dir(format!("/proc/{pid}/fd")) else {
            continue;
        };
        if fds
            .flatten()
            .any(|fd| fs::read_link(fd.path()).is_ok_and(|l| l.as_os_str() == wanted.as_str()))
        {
            let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            return Some((pid, comm.trim().to_owned()));
        }
    }
    None
}

/// Whether a socket's address, as `/proc/net/udp` shows it, is this one or stands for all.
fn covers(shown: &str, addr: IpAddr) -> bool {
    // The kernel prints 32-bit words as they are in memory.
    let word = |w: &[u8]| format!("{:08X}", u32::from_ne_bytes([w[0], w[1], w[2], w[3]]));
    let wanted: String = match addr {
        IpAddr::V4(a) => a.octets().chunks(4).map(word).collect(),
        IpAddr::V6(a) => a.octets().chunks(4).map(word).collect(),
    };
    shown == wanted || addr.is_unspecified() || shown.bytes().all(|b| b == b'0')
}

/// A sentence about who holds the port at an address (or at all of them) and what to do. This process itself is not meant
/// unless there is nobody else.
pub fn explain(addr: IpAddr, port: u16) -> String {
    let mut holders = port_holders(port);
    holders.retain(|h| covers(&h.local, addr));
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
        let addr = IpAddr::from([127, 0, 0, 1]);
        let socket = UdpSocket::bind((addr, 0)).unwrap();
        let port = socket.local_addr().unwrap().port();
        let holders = port_holders(port);
        assert_eq!(holders.len(), 1);
        assert_eq!(holders[0].process.as_ref().map(|p| p.0), Some(std::process::id()));
        let id = std::process::id().to_string();
        assert!(explain(addr, port).contains(&id));
        assert!(explain([0, 0, 0, 0].into(), port).contains(&id));
        assert!(!explain([127, 0, 0, 2].into(), port).contains(&id));
    }
}
