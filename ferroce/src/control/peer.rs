//! Access control of control sockets and mounted trees: root, the owner, and the members of a group.
//!
//! The mode of the file grants the same. The check here holds even if that mode has been changed.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
};

use nix::{
    sys::socket::{getsockopt, sockopt::PeerCredentials},
    unistd::{Group, getegid, geteuid},
};
use rnbd::Errno;
use rnbd_host::control::Refused;
use rnbd_sysfs::{Admission, Caller};
use roce_net::places::{Identity, Peer};

use crate::output::Failure;

/// Groups of a process at most (`NGROUPS_MAX` of Linux); more are an error.
const MAX_GROUPS: usize = 65_536;

/// Finds the number of a group by its name or number.
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

/// A user with its groups.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Credentials {
    user: u32,
    group: u32,
    further: Vec<u32>,
}

impl Credentials {
    /// Returns the credentials of the process that connected, as of that time.
    fn of(stream: &impl AsFd) -> io::Result<Self> {
        let credentials = getsockopt(&stream.as_fd(), PeerCredentials)?;
        Ok(Self {
            user: credentials.uid(),
            group: credentials.gid(),
            further: further_groups(stream)?,
        })
    }
}

/// Returns the supplementary groups that the peer had when it connected.
fn further_groups(stream: &impl AsFd) -> io::Result<Vec<u32>> {
    let mut groups = vec![0_u32; 64];
    loop {
        let mut len = size_of_val(groups.as_slice()) as libc::socklen_t;
        // SAFETY: the buffer has `len` bytes, of numbers for which any bytes are right.
        let r = unsafe {
            libc::getsockopt(
                stream.as_fd().as_raw_fd(),
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

/// Rights of a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Authority {
    /// All requests: root, the user of the process, and the program that started it.
    Full,
    /// Members of the group: of requests that touch files of the process's user, only those that the configuration allows.
    Limited,
}

/// The users of a socket or a tree.
#[derive(Clone, Copy, Debug)]
pub(super) struct AccessControl {
    owner: u32,
    group: u32,
}

impl AccessControl {
    /// Allows root, the user of this process, and the members of this group, by default that of the process.
    pub(super) fn new(group: Option<u32>) -> Self {
        Self {
            owner: geteuid().as_raw(),
            group: group.unwrap_or_else(|| getegid().as_raw()),
        }
    }

    /// Whether a user is root or the owner, who could do all that this process does anyway.
    const fn trusts(&self, user: u32) -> bool {
        user == 0 || user == self.owner
    }

    fn allows(&self, user: u32, group: u32, further: impl FnOnce() -> Vec<u32>) -> bool {
        self.trusts(user) || group == self.group || further().contains(&self.group)
    }

    fn check(&self, peer: &Credentials) -> Result<Peer, Refused> {
        if self.allows(peer.user, peer.group, || peer.further.clone()) {
            return Ok(Peer {
                identity: Identity::User(peer.user),
                trusted: self.trusts(peer.user),
            });
        }
        let text = format!(
            "user {} is neither root, nor the owner (user {}), nor a member of group {}",
            peer.user, self.owner, self.group
        );
        Err(Refused::new(Errno::EACCES, text))
    }

    /// Returns the peer of a connection, if it may use the socket.
    pub(super) fn identify(&self, stream: &impl AsFd) -> Result<Peer, Refused> {
        let credentials = Credentials::of(stream);
        let credentials =
            credentials.map_err(|e| Refused::new(Errno::EIO, format!("the user who connects is unknown: {e}")))?;
        self.check(&credentials)
    }
}

impl Admission for AccessControl {
    fn admits(&self, caller: &Caller) -> bool {
        self.allows(caller.user, caller.group, || caller.further_groups())
    }

    fn trusts(&self, user: u32) -> bool {
        Self::trusts(self, user)
    }

    fn group(&self) -> u32 {
        self.group
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn root_the_owner_and_members_of_the_group_are_allowed() {
        let access = AccessControl { owner: 7, group: 70 };
        let peer = |user, group, further: &[u32]| Credentials {
            user,
            group,
            further: further.to_vec(),
        };
        for (allowed, trusted) in [
            (peer(0, 0, &[]), true),
            (peer(7, 1, &[]), true),
            (peer(8, 70, &[]), false),
            (peer(8, 1, &[2, 70]), false),
        ] {
            let identity = Identity::User(allowed.user);
            assert_eq!(access.check(&allowed), Ok(Peer { identity, trusted }), "{allowed:?}");
        }
        for not in [peer(8, 7, &[]), peer(70, 71, &[0, 7])] {
            assert_eq!(access.check(&not).unwrap_err().errno, Errno::EACCES, "{not:?}");
        }
    }

    #[test]
    fn our_own_credentials_are_found() {
        let (a, _b) = UnixStream::pair().unwrap();
        let peer = Credentials::of(&a).unwrap();
        assert_eq!((peer.user, peer.group), (geteuid().as_raw(), getegid().as_raw()));
        let mut ours: Vec<u32> = nix::unistd::getgroups().unwrap().iter().map(|g| g.as_raw()).collect();
        let mut found = peer.further;
        ours.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, ours);
    }
}
