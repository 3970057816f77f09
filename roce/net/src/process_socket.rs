//! Sockets by which a user's processes are found and asked: `ferroce fault`, `ferroce pcap capture`.
//!
//! A socket's name is abstract and says whose it is: `PREFIX/PID/NAME`. It goes with the process, and is seen in the process's network
//! namespace. Only the process's own user and root are answered.

use std::{
    io,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    time::Duration,
};

use nix::{
    sys::socket::{getsockopt, sockopt::PeerCredentials},
    unistd::geteuid,
};

use crate::unix_table;

/// Time that either side has for each read and write.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Sockets of one name and process.
const SAME_NAME: u32 = 64;
/// Longest name, bytes: that of a socket has 107 at most.
const MAX_NAME: usize = 64;

/// Process that can be asked, and what it calls itself.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ProcessName {
    /// Process ID.
    pub pid: u32,
    /// Name of the program, or of a task.
    pub name: String,
}

/// Sockets of one purpose, which have the beginning of their names in common.
#[derive(Clone, Copy, Debug)]
pub struct ProcessSockets {
    prefix: &'static str,
}

/// Whether the name of a socket may have this character.
fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || "._-:".contains(c)
}

/// Returns a name as part of a socket's or a file's name: at most 64 characters, others than letters, digits and `._-:` replaced.
pub fn plain_name(name: &str) -> String {
    let plain = name.chars().map(|c| if is_plain(c) { c } else { '_' });
    plain.take(MAX_NAME).collect()
}

/// Returns whether the other side is our own user or root.
fn is_trusted(stream: &UnixStream) -> io::Result<bool> {
    let peer = getsockopt(stream, PeerCredentials)?.uid();
    let own = geteuid().as_raw();
    Ok(peer == own || peer == 0)
}

fn set_timeouts(stream: &UnixStream) -> io::Result<()> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))
}

impl ProcessSockets {
    /// Names the sockets of a purpose by the beginning of their names.
    pub const fn new(prefix: &'static str) -> Self {
        Self { prefix }
    }

    fn address(self, pid: u32, name: &str) -> io::Result<SocketAddr> {
        SocketAddr::from_abstract_name(format!("{}/{pid}/{name}", self.prefix))
    }

    /// Creates a socket of this process. A further one of the same name has a number.
    ///
    /// # Errors
    /// When there are 64 of the name, or the system has no socket left.
    pub fn listen(self, name: &str) -> io::Result<UnixListener> {
        let (pid, base) = (std::process::id(), plain_name(name));
        let names = (1..=SAME_NAME).map(|n| match n {
            1 => base.clone(),
            _ => format!("{base}+{n}"),
        });
        let mut last = io::Error::from(io::ErrorKind::AddrInUse);
        for name in names {
            match UnixListener::bind_addr(&self.address(pid, &name)?) {
                Ok(listener) => return Ok(listener),
                Err(e) if e.kind() == io::ErrorKind::AddrInUse => last = e,
                Err(e) => return Err(e),
            }
        }
        Err(last)
    }

    /// Prepares an accepted connection: reads and writes time out after 2 s.
    ///
    /// # Errors
    /// `PermissionDenied` when its other side is neither this user nor root.
    pub fn admit(self, stream: &UnixStream) -> io::Result<()> {
        set_timeouts(stream)?;
        match is_trusted(stream)? {
            true => Ok(()),
            false => Err(anothers()),
        }
    }

    /// Lists the processes of this network namespace, of all users.
    ///
    /// # Errors
    /// When the system's list of sockets can't be read.
    pub fn all(self) -> io::Result<Vec<ProcessName>> {
        let mut found: Vec<_> = unix_table::listening(&unix_table::read()?)
            .filter_map(|(_, path)| self.parse(path))
            .collect();
        found.sort();
        Ok(found)
    }

    /// Parses the path of a listening socket. Anybody can listen under such a name, so one that [`listen`](Self::listen) does not make
    /// is ignored.
    fn parse(self, path: &str) -> Option<ProcessName> {
        let rest = path.strip_prefix('@')?.strip_prefix(self.prefix)?.strip_prefix('/')?;
        let (pid, name) = rest.split_once('/')?;
        let name = Some(name).filter(|name| name.chars().all(|c| is_plain(c) || c == '+'))?;
        Some(ProcessName {
            pid: pid.parse().ok()?,
            name: name.to_owned(),
        })
    }

    /// Connects to a process. Reads and writes time out after 2 s.
    ///
    /// # Errors
    /// `PermissionDenied` when the process is another user's, and those of `connect(2)`.
    pub fn connect(self, to: &ProcessName) -> io::Result<UnixStream> {
        let stream = UnixStream::connect_addr(&self.address(to.pid, &to.name)?)?;
        set_timeouts(&stream)?;
        // Anybody can take a name.
        match geteuid().is_root() || is_trusted(&stream)? {
            true => Ok(stream),
            false => Err(anothers()),
        }
    }
}

fn anothers() -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, "it belongs to another user")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOCKETS: ProcessSockets = ProcessSockets::new("ferroce-test");

    fn own(name: &str) -> Vec<String> {
        let all = SOCKETS.all().unwrap().into_iter();
        all.filter(|t| t.pid == std::process::id() && t.name.starts_with(name))
            .map(|t| t.name)
            .collect()
    }

    #[test]
    fn several_of_a_name_are_told_apart() {
        let _sockets = [(); 3].map(|()| SOCKETS.listen("a task").unwrap());
        assert_eq!(own("a_task"), ["a_task", "a_task+2", "a_task+3"]);
    }

    #[test]
    fn names_of_strangers_do_no_harm() {
        let target = |line: &str| unix_table::listening(line).find_map(|(_, path)| SOCKETS.parse(path));
        assert_eq!(target("Num RefCount Protocol Flags Type St Inode Path"), None);
        let line = "0000000000000000: 00000002 00000000 00010000 0001 01 12345 @ferroce-test/7/x";
        assert_eq!(target(line).map(|t| (t.pid, t.name)), Some((7, "x".into())));
        assert_eq!(target(&line.replace("00010000", "00000000")), None);
        for name in ["\u{1b}[2J", "a\u{9b}31m", "a\u{202e}b", "\u{fffd}", "a/b"] {
            assert_eq!(target(&line.replace("7/x", &format!("7/{name}"))), None, "{name:?}");
        }
    }

    #[test]
    fn a_socket_whose_name_is_no_text_hides_none() {
        let name = [b"no text \xff ", std::process::id().to_string().as_bytes()].concat();
        let _other = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
        let _socket = SOCKETS.listen("seen").unwrap();
        assert_eq!(own("seen").len(), 1);
    }
}
