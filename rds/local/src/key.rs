//! Names of sockets.

use std::{
    fmt,
    os::fd::{AsFd, BorrowedFd},
};

use rustix::net::SocketAddrUnix;

/// Prefix of the abstract names of the node's ends.
const PREFIX: &str = "ferroce-rds/";

/// Number of a socket, which its node has drawn at random and gives to no other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SocketKey(pub u64);

impl fmt::Debug for SocketKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SocketKey({self})")
    }
}

impl fmt::Display for SocketKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl SocketKey {
    /// Gives the node's end of a socket its name. The kernel gives it to no other socket of the network namespace meanwhile.
    ///
    /// # Errors
    /// Errors of `bind`.
    pub fn name_end(self, end: BorrowedFd<'_>) -> rustix::io::Result<()> {
        let name = format!("{PREFIX}{self}");
        rustix::net::bind(end, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)
    }

    /// Returns the key of a program's end; `None` of any other descriptor. Names can be imitated while no node has them: only
    /// [`Request::Attach`](crate::Request::Attach) tells whether it is a socket of this user's node.
    pub fn of_peer(end: impl AsFd) -> Option<Self> {
        let peer = rustix::net::getpeername(end).ok()??;
        let peer = SocketAddrUnix::try_from(peer).ok()?;
        Self::from_name(peer.abstract_name()?)
    }

    fn from_name(name: &[u8]) -> Option<Self> {
        let digits = name.strip_prefix(PREFIX.as_bytes())?;
        let text = str::from_utf8(digits).ok().filter(|text| text.len() == 16)?;
        u64::from_str_radix(text, 16)
            .ok()
            .map(Self)
            .filter(|key| key.to_string() == text)
    }
}

#[cfg(test)]
mod tests {
    use std::os::{fd::OwnedFd, unix::net::UnixStream};

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn a_program_finds_the_key_of_its_socket_and_of_no_other() {
        let (ours, theirs) = pair();
        let key = SocketKey(u64::from(std::process::id()) << 32 | 0xabc);
        assert_eq!(SocketKey::of_peer(&theirs), None, "without a name");
        key.name_end(ours.as_fd()).unwrap();
        assert_eq!(SocketKey::of_peer(&theirs), Some(key));
        assert_eq!(
            SocketKey::of_peer(theirs.try_clone().unwrap()),
            Some(key),
            "also of a duplicate"
        );
        assert_eq!(SocketKey::of_peer(&ours), None);
        assert!(key.name_end(pair().0.as_fd()).is_err(), "the name is taken");
        assert_eq!(SocketKey::of_peer(UnixStream::pair().unwrap().0), None);
        assert_eq!(SocketKey::of_peer(std::io::stdin()), None);
    }

    #[test]
    fn other_names_are_no_keys() {
        for name in [
            "",
            "ferroce-rds/",
            "ferroce-rds/12",
            "ferroce-rds/00000000000000AB",
            "ferroce-rds/+0000000000000ab",
        ] {
            assert_eq!(SocketKey::from_name(name.as_bytes()), None, "{name}");
        }
        assert_eq!(
            SocketKey::from_name(b"ferroce-rds/00000000000000ab"),
            Some(SocketKey(0xab))
        );
    }
}
