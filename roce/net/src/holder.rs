//! Owners of a UDP port, and what a user can do about them.
//!
//! The owner of a port is in the same network namespace as whoever wants it. It may still be invisible: another user's, or in another
//! container that shares the network namespace (a pod). What the kernel tells of all of them: the user of each UDP socket, and the paths
//! of listening Unix sockets, by which a broker is known.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
};

use nix::unistd::geteuid;
use roce_verbs::shown;

use crate::{environment, unix_table};

/// Name of a broker's socket in its directory.
pub const BROKER_SOCKET: &str = "broker.sock";
/// Variable for the directory of the broker to use.
pub const BROKER_DIR_VARIABLE: &str = "FERROCE_BROKER_DIR";
/// Variable for the program that is the broker; `off`: none.
pub const BROKER_VARIABLE: &str = "FERROCE_BROKER";

/// Owner of sockets.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Owner {
    /// A process that can be seen.
    Process {
        /// Its ID.
        pid: u32,
        /// Its command.
        name: String,
        /// The user that the socket was made by.
        uid: u32,
    },
    /// A broker, as far as can be told.
    Broker {
        /// Its user.
        uid: u32,
        /// Its process, if that can be seen.
        pid: Option<u32>,
        /// Paths of its socket; several if it can't be told which. May be paths of another container.
        sockets: Vec<PathBuf>,
    },
    /// The kernel (rdma_rxe).
    Kernel,
    /// A process that can't be seen.
    Hidden {
        /// Its user.
        uid: u32,
    },
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process { pid, name, .. } => write!(f, "process {pid} ({})", shown(name)),
            Self::Broker { uid, pid, sockets } => {
                write!(f, "a ferroce broker of user {uid}")?;
                let path = |path: &PathBuf| shown(&path.to_string_lossy()).to_string();
                let paths: Vec<String> = sockets.iter().map(path).collect();
                match (pid, &paths[..]) {
                    (Some(pid), [path]) => write!(f, " (process {pid}, {path})"),
                    (Some(pid), _) => write!(f, " (process {pid})"),
                    (None, []) => Ok(()),
                    (None, paths) => write!(f, " ({})", paths.join(" or ")),
                }
            }
            Self::Kernel => f.write_str("the kernel's rdma_rxe"),
            Self::Hidden { uid } => write!(f, "a process of user {uid} that can't be seen from here"),
        }
    }
}

impl Owner {
    /// Advice for a user, as part of a sentence.
    pub fn remedy(&self) -> String {
        const SHARE: &str = "processes share an address if one broker serves them";
        match self {
            Self::Process { .. } => "end it, or give this device another address".into(),
            Self::Broker { uid, .. } if *uid != geteuid().as_raw() => format!(
                "{SHARE}: for several users the system's (ferroce-broker.service, members of the group `ferroce`), for the containers \
                 of a pod one in a directory that they share ({BROKER_DIR_VARIABLE}); or give this device another address"
            ),
            Self::Broker { .. } if environment::var_os(BROKER_VARIABLE).is_some_and(|v| v == "off") => {
                format!("{SHARE}: {BROKER_VARIABLE}=off keeps this one from it")
            }
            Self::Broker { .. } => format!(
                "{SHARE}: set {BROKER_DIR_VARIABLE} to the same directory for all of them; for the containers of a pod to a volume that \
                 they share"
            ),
            Self::Kernel => {
                "`rdma link` lists its devices: remove them with `rdma link delete NAME` and `modprobe -r rdma_rxe`, or use a network \
                 namespace of your own"
                    .into()
            }
            Self::Hidden { .. } => {
                "it is another user's, or in another container with this network namespace (`ss -ulnp` as root on the host shows which): \
                 end it, or give this device another address"
                    .into()
            }
        }
    }
}

/// Sockets of one owner on the port of an address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Holder {
    /// The bound address.
    pub addr: IpAddr,
    /// Their owner.
    pub owner: Owner,
    /// How many there are.
    pub sockets: usize,
}

/// The sockets of this network namespace that keep others from binding this address and UDP port, by address and owner. Empty when
/// `/proc` is not there. Looks at all processes, which takes long.
pub fn port_holders(addr: IpAddr, port: u16) -> Vec<Holder> {
    let sockets = read_twice(|table| sockets_in_the_way(table, addr, port)).unwrap_or_default();
    let processes = processes_with(&sockets.iter().map(|bound| bound.inode).collect());
    let table = unix_table::read().unwrap_or_default();
    let own = process_sockets(Path::new("/proc/self/fd"));
    let seen = Seen {
        processes,
        brokers: listening_brokers(&table, &own),
        may_be_kernel: geteuid().as_raw() == 0 && Path::new("/sys/module/rdma_rxe").exists(),
    };
    grouped(&sockets, &seen)
}

/// Owners that can be seen, besides the port's sockets.
struct Seen {
    processes: BTreeMap<u64, Process>,
    brokers: Vec<PathBuf>,
    /// All processes of this host can be seen, and it has rdma_rxe, which has one socket for each version of IP.
    may_be_kernel: bool,
}

/// A process that has a socket.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Process {
    pid: u32,
    name: String,
    /// The directory of the broker that it is.
    broker: Option<PathBuf>,
}

/// By address and owner. A broker has many sockets on one address. Most of them are in messages, where no process shows them; others are its
/// members', which are not in the way themselves.
fn grouped(sockets: &BTreeSet<Bound>, seen: &Seen) -> Vec<Holder> {
    let mut by_user = BTreeMap::<(IpAddr, u32), Vec<u64>>::new();
    for bound in sockets {
        by_user.entry((bound.addr, bound.uid)).or_default().push(bound.inode);
    }
    let mut holders = Vec::new();
    for ((addr, uid), inodes) in by_user {
        let processes: Vec<&Process> = inodes.iter().filter_map(|inode| seen.processes.get(inode)).collect();
        let hidden = inodes.len() - processes.len();
        let broker = processes.iter().find_map(|p| Some((p.pid, p.broker.clone()?)));
        let mut owners = BTreeMap::<Owner, usize>::new();
        if broker.is_some() || (hidden > 0 && !seen.brokers.is_empty()) {
            let (pid, dir) = broker.unzip();
            let sockets = dir.map_or_else(|| seen.brokers.clone(), |dir| vec![dir.join(BROKER_SOCKET)]);
            owners.insert(Owner::Broker { uid, pid, sockets }, inodes.len());
        } else {
            for process in processes {
                let (pid, name) = (process.pid, process.name.clone());
                *owners.entry(Owner::Process { pid, name, uid }).or_default() += 1;
            }
            let kernel = seen.may_be_kernel && hidden == 1 && addr.is_unspecified();
            let owner = if kernel { Owner::Kernel } else { Owner::Hidden { uid } };
            owners.extend((hidden > 0).then_some((owner, hidden)));
        }
        let holder = |(owner, sockets)| Holder { addr, owner, sockets };
        holders.extend(owners.into_iter().map(holder));
    }
    holders
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
            .map(|s| s.addr)
            .collect()
    })
}

/// Reads and parses the kernel's tables of UDP sockets, until two readings are the same.
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

/// A line of the kernel's tables.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Bound {
    addr: IpAddr,
    inode: u64,
    uid: u32,
}

/// The sockets that keep others from binding this address and UDP port. A table that grows while it is read may have lines twice.
fn sockets_in_the_way(table: &str, addr: IpAddr, port: u16) -> BTreeSet<Bound> {
    // On other addresses the port is free for others.
    let in_the_way = |held: IpAddr| held == addr || held.is_unspecified() || addr.is_unspecified();
    let sockets = table.lines().filter_map(|line| parse_line(line, port));
    sockets.filter(|bound| in_the_way(bound.addr)).collect()
}

/// A line of `/proc/net/udp`, if it is for `port`.
fn parse_line(line: &str, port: u16) -> Option<Bound> {
    let mut fields = line.split_whitespace();
    let (addr, hex_port) = fields.nth(1)?.rsplit_once(':')?;
    let uid = fields.nth(5)?.parse().ok()?;
    let inode = fields.nth(1)?.parse().ok()?;
    if u16::from_str_radix(hex_port, 16).ok()? != port {
        return None;
    }
    let addr = parse_addr(addr)?;
    Some(Bound { addr, inode, uid })
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
/// process's. Of several a broker.
fn processes_with(inodes: &BTreeSet<u64>) -> BTreeMap<u64, Process> {
    let mut owners = BTreeMap::<u64, Process>::new();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    for pid in processes.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok()) {
        let has: Vec<u64> = process_sockets(Path::new(&format!("/proc/{pid}/fd")))
            .intersection(inodes)
            .copied()
            .collect();
        if has.is_empty() {
            continue;
        }
        let name = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
        let process = Process {
            pid,
            name: String::from_utf8_lossy(&name).trim().to_owned(),
            broker: fs::read(format!("/proc/{pid}/cmdline"))
                .ok()
                .and_then(|line| broker_dir(&line)),
        };
        for inode in has {
            let known = owners
                .get(&inode)
                .is_some_and(|p| process.broker.is_none() || p.broker.is_some());
            if !known {
                owners.insert(inode, process.clone());
            }
        }
    }
    owners
}

/// The inodes of the sockets in a directory of descriptors.
fn process_sockets(fds: &Path) -> BTreeSet<u64> {
    let fds = fs::read_dir(fds).into_iter().flatten().flatten();
    fds.filter_map(|fd| socket_inode(&fs::read_link(fd.path()).ok()?))
        .collect()
}

/// Of what a descriptor of a socket is shown as: `socket:[INODE]`.
fn socket_inode(link: &Path) -> Option<u64> {
    link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// The directory of the broker that a process is, from its command line: `PROGRAM broker … --dir DIR`.
fn broker_dir(cmdline: &[u8]) -> Option<PathBuf> {
    let mut words = cmdline.split(|b| *b == 0).skip(1);
    if words.next() != Some(b"broker") {
        return None;
    }
    let dir = words.skip_while(|word| *word != b"--dir").nth(1)?;
    Some(PathBuf::from(String::from_utf8_lossy(dir).into_owned()))
}

/// Returns the brokers' sockets that listen in this network namespace, in whichever container, without this process's own.
fn listening_brokers(table: &str, own: &BTreeSet<u64>) -> Vec<PathBuf> {
    let sockets = unix_table::listening(table).filter_map(|(inode, path)| {
        let path = Path::new(path);
        let is_broker = path.file_name().is_some_and(|name| name == BROKER_SOCKET);
        (is_broker && !own.contains(&inode)).then(|| path.to_owned())
    });
    // Two containers may have the same path.
    sockets.collect::<BTreeSet<_>>().into_iter().collect()
}

/// A sentence about who holds the port at this address, and what to do. This process itself is not meant unless there is
/// nobody else.
pub fn explain(addr: IpAddr, port: u16) -> String {
    let holders = port_holders(addr, port);
    let own = std::process::id();
    let is_own = |h: &&Holder| matches!(h.owner, Owner::Process { pid, .. } if pid == own);
    let found = holders.iter().find(|h| !is_own(h)).or(holders.first());
    match found {
        Some(Holder { owner, .. }) => format!("{owner} has it: {}", owner.remedy()),
        None if Path::new("/sys/module/rdma_rxe").exists() => {
            format!("{} has it: {}", Owner::Kernel, Owner::Kernel.remedy())
        }
        None => "its owner is not visible from here".to_owned(),
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
        assert!(matches!(holders[0].owner, Owner::Process { pid, .. } if pid == std::process::id()));
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
        assert_eq!(sockets.into_iter().map(|s| s.inode).collect::<Vec<_>>(), [7, 9]);
    }

    fn bound(addr: &str, inode: u64, uid: u32) -> Bound {
        let addr = addr.parse().unwrap();
        Bound { addr, inode, uid }
    }

    fn process(pid: u32, broker: Option<&str>) -> Process {
        Process {
            pid,
            name: "ferroce".into(),
            broker: broker.map(PathBuf::from),
        }
    }

    fn listed(sockets: &[Bound], seen: &Seen) -> Vec<String> {
        let holders = grouped(&sockets.iter().copied().collect(), seen);
        let line = |h: &Holder| format!("{} on {} ({})", h.owner, h.addr, h.sockets);
        holders.iter().map(line).collect()
    }

    #[test]
    fn sockets_of_one_owner_are_one_holder() {
        let mut sockets: Vec<Bound> = (0..300).map(|inode| bound("0.0.0.0", inode, 1000)).collect();
        sockets.extend([bound("::", 400, 0), bound("127.0.0.1", 401, 0)]);
        let mut seen = Seen {
            processes: BTreeMap::from([(401, process(7, None))]),
            brokers: vec![],
            may_be_kernel: true,
        };
        let expected = [
            "a process of user 1000 that can't be seen from here on 0.0.0.0 (300)",
            "process 7 (ferroce) on 127.0.0.1 (1)",
            "the kernel's rdma_rxe on :: (1)",
        ];
        assert_eq!(listed(&sockets, &seen), expected);
        // A broker of another container: no process of it can be seen, but its socket can.
        seen.brokers = vec!["/run/pod/broker.sock".into()];
        let first = listed(&sockets, &seen).remove(0);
        assert_eq!(
            first,
            "a ferroce broker of user 1000 (/run/pod/broker.sock) on 0.0.0.0 (300)"
        );
    }

    #[test]
    fn names_that_others_choose_do_not_act_on_a_terminal() {
        let process = Owner::Process {
            pid: 7,
            name: "a\x1b[2J".into(),
            uid: 5,
        };
        assert_eq!(process.to_string(), "process 7 (a\\u{1b}[2J)");
        let broker = Owner::Broker {
            uid: 5,
            pid: None,
            sockets: vec!["/tmp/\u{9b}31m/broker.sock".into()],
        };
        let text = broker.to_string();
        assert_eq!(text, "a ferroce broker of user 5 (/tmp/\\u{9b}31m/broker.sock)");
    }

    #[test]
    fn a_broker_is_named_instead_of_its_members() {
        let sockets = [
            bound("10.0.0.1", 1, 5),
            bound("10.0.0.1", 2, 5),
            bound("10.0.0.1", 3, 5),
        ];
        let seen = Seen {
            processes: BTreeMap::from([(1, process(8, Some("/tmp/d"))), (2, process(9, None))]),
            brokers: vec!["/tmp/d/broker.sock".into(), "/tmp/e/broker.sock".into()],
            may_be_kernel: false,
        };
        let expected = "a ferroce broker of user 5 (process 8, /tmp/d/broker.sock) on 10.0.0.1 (3)";
        assert_eq!(listed(&sockets, &seen), [expected]);
    }

    #[test]
    fn brokers_are_known_by_command_line_and_by_socket() {
        let dir = |line: &str| broker_dir(line.replace(' ', "\0").as_bytes());
        assert_eq!(
            dir("/usr/bin/ferroce broker --announce --dir /tmp/x"),
            Some("/tmp/x".into())
        );
        assert_eq!(dir("ferroce serve --dir /tmp/x"), None);
        let table = "Num RefCount Protocol Flags Type St Inode Path\n\
                     0: 00000002 00000000 00010000 0005 01 10 /tmp/a/broker.sock\n\
                     0: 00000002 00000000 00010000 0005 01 11 /tmp/own/broker.sock\n\
                     0: 00000003 00000000 00000000 0005 03 12 /tmp/client/broker.sock\n\
                     0: 00000003 00000000 00000000 0005 03 13\n\
                     0: 00000002 00000000 00010000 0001 01 14 /run/other.sock\n";
        let found = listening_brokers(table, &BTreeSet::from([11]));
        assert_eq!(found, [PathBuf::from("/tmp/a/broker.sock")]);
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
