//! Who may use a control socket and a mounted tree: root, its owner, and the members of its group.
//!
//! The file's mode says the same, and the system holds to it; whoever has got around it, as by a changed mode, is told here.

use std::{
    io::{self, Write},
    os::{fd::AsRawFd, unix::net::UnixStream},
    sync::Arc,
};

use nix::{
    sys::socket::{getsockopt, sockopt::PeerCredentials},
    unistd::{Group, getegid, geteuid},
};
use rnbd::Errno;
use rnbd_host::control::Refused;
use rnbd_sysfs::{Admission, Caller};

use super::{Shared, connection, sockets};
use crate::output::Failure;

/// Groups of a process at most, as of Linux (`NGROUPS_MAX`).
const MAX_GROUPS: usize = 65_536;

/// The number of a group, by its name or number.
pub(super) fn group(text: &str) -> Result<u32, Failure> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    match Group::from_name(text) {
        Ok(Some(group)) => Ok(group.gid.as_raw()),
        Ok(None) => Err(Failure::usage(format!("there is no group {text:?}"))),
        Err(e) => Err(Failure::failed(format!("group {text:?}: {e}"))),
    }
}

/// A user with his groups.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Peer {
    user: u32,
    group: u32,
    further: Vec<u32>,
}

impl Peer {
    fn of(stream: &UnixStream) -> io::Result<Self> {
        let credentials = getsockopt(stream, PeerCredentials)?;
        Ok(Self {
            user: credentials.uid(),
            group: credentials.gid(),
            further: further_groups(stream)?,
        })
    }
}

/// The supplementary groups that it had when it connected.
fn further_groups(stream: &UnixStream) -> io::Result<Vec<u32>> {
    let mut groups = vec![0_u32; 64];
    loop {
        let mut len = size_of_val(groups.as_slice()) as libc::socklen_t;
        // SAFETY: the buffer has `len` bytes, of numbers for which any bytes are right.
        let r = unsafe {
            libc::getsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        let found = len as usize / size_of::<u32>();
        if r == 0 {
            groups.truncate(found);
            return Ok(groups);
        }
        let e = io::Error::last_os_error();
        if e.raw_os_error() != Some(libc::ERANGE) || found <= groups.len() || found > MAX_GROUPS {
            return Err(e);
        }
        groups.resize(found, 0);
    }
}

/// Who is let in at a socket.
#[derive(Clone, Copy, Debug)]
pub(super) struct Door {
    owner: u32,
    group: u32,
}

impl Door {
    /// For us, and for this group or our own.
    pub(super) fn new(group: Option<u32>) -> Self {
        Self {
            owner: geteuid().as_raw(),
            group: group.unwrap_or_else(|| getegid().as_raw()),
        }
    }

    fn lets_in(&self, user: u32, group: u32, further: impl FnOnce() -> Vec<u32>) -> bool {
        user == 0 || user == self.owner || group == self.group || further().contains(&self.group)
    }

    fn admits(&self, peer: &Peer) -> Result<(), Refused> {
        if self.lets_in(peer.user, peer.group, || peer.further.clone()) {
            return Ok(());
        }
        let text = format!(
            "user {} is neither root, nor the owner (user {}), nor a member of group {}",
            peer.user, self.owner, self.group
        );
        Err(Refused::new(Errno::EACCES, text))
    }

    /// Serves who has connected, if he may be; to the end of the connection.
    pub(super) fn let_in(&self, shared: &Arc<Shared>, mut stream: &UnixStream) {
        let admitted = Peer::of(stream)
            .map_err(|e| Refused::new(Errno::EIO, format!("who are you? {e}")))
            .and_then(|peer| self.admits(&peer));
        match admitted {
            Ok(()) => sockets::converse(shared, stream),
            Err(refused) => {
                tracing::warn!("control socket: {refused}");
                // A new socket has room for a line.
                let _ = stream.write_all(connection::refusal(&refused).as_bytes());
            }
        }
    }
}

impl Admission for Door {
    fn admits(&self, caller: &Caller) -> bool {
        self.lets_in(caller.user, caller.group, || caller.further_groups())
    }

    fn group(&self) -> u32 {
        self.group
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_the_owner_and_members_of_the_group_are_let_in() {
        let door = Door { owner: 7, group: 70 };
        let peer = |user, group, further: &[u32]| Peer {
            user,
            group,
            further: further.to_vec(),
        };
        for let_in in [peer(0, 0, &[]), peer(7, 1, &[]), peer(8, 70, &[]), peer(8, 1, &[2, 70])] {
            assert_eq!(door.admits(&let_in), Ok(()), "{let_in:?}");
        }
        for not in [peer(8, 7, &[]), peer(70, 71, &[0, 7])] {
            assert_eq!(door.admits(&not).unwrap_err().errno, Errno::EACCES, "{not:?}");
        }
    }

    #[test]
    fn we_are_who_we_are() {
        let (a, _b) = UnixStream::pair().unwrap();
        let peer = Peer::of(&a).unwrap();
        assert_eq!((peer.user, peer.group), (geteuid().as_raw(), getegid().as_raw()));
        let mut ours: Vec<u32> = nix::unistd::getgroups().unwrap().iter().map(|g| g.as_raw()).collect();
        let mut told = peer.further;
        ours.sort_unstable();
        told.sort_unstable();
        assert_eq!(told, ours);
    }
}
