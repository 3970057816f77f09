//! Messages between a broker and systemd (`sd_notify(3)`, `sd_listen_fds(3)`): readiness, and the vaults, which
//! systemd keeps when a system broker ends, since its members, of other users, are not trusted with them.

use std::{
    ffi::{OsStr, OsString},
    io::{self, IoSlice},
    mem::MaybeUninit,
    net::IpAddr,
    os::{
        fd::{BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
};

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use roce_net::environment;

/// The first descriptor that is passed (`SD_LISTEN_FDS_START`).
const FIRST: i32 = 3;

/// Socket for messages to systemd; does nothing when not started by it.
#[derive(Debug)]
pub struct Notify(Option<OsString>);

impl Notify {
    /// Takes the socket that the environment names, if it names one.
    pub fn from_env() -> Self {
        Self(environment::var_os("NOTIFY_SOCKET"))
    }

    /// Sends a message like `READY=1`, and a descriptor with it if there is one.
    ///
    /// # Errors
    /// When nobody listens there, and those of sending.
    pub fn say(&self, text: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let Some(name) = &self.0 else { return Ok(()) };
        let addr = match name.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddrUnix::new_abstract_name(name)?,
            None => SocketAddrUnix::new(OsStr::new(name))?,
        };
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let text = [IoSlice::new(text.as_bytes())];
        rustix::net::sendmsg_addr(&socket, &addr, &text, &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

/// Returns the descriptors that systemd kept for us. Call it once, and before the process opens any of its own.
pub(super) fn kept_descriptors() -> Vec<OwnedFd> {
    let number = |name: &str| environment::var(name)?.parse::<u32>().ok();
    let ours = number("LISTEN_PID") == Some(std::process::id());
    let count = number("LISTEN_FDS").filter(|_| ours).unwrap_or(0).min(1 << 12) as i32;
    (FIRST..FIRST + count)
        .map(|fd| {
            // SAFETY: systemd has opened these before it started us, for us alone; this is called once.
            unsafe { OwnedFd::from_raw_fd(fd) }
        })
        .collect()
}

/// Returns the name of a vault among the descriptors that systemd stores: letters and digits only.
fn vault_name(addr: IpAddr) -> String {
    match addr {
        IpAddr::V4(a) => format!("vault-{:08x}", a.to_bits()),
        IpAddr::V6(a) => format!("vault-{:032x}", a.to_bits()),
    }
}

impl Notify {
    /// Has systemd store a vault. That its other end is closed is no reason to drop it (`FDPOLL`).
    pub(super) fn keep(&self, addr: IpAddr, vault: BorrowedFd<'_>) {
        let text = format!("FDSTORE=1\nFDPOLL=0\nFDNAME={}", vault_name(addr));
        if let Err(e) = self.say(&text, &[vault]) {
            tracing::warn!("can't store the sockets with systemd: {e}");
        }
    }

    /// Has systemd drop a vault.
    pub(super) fn drop_kept(&self, addr: IpAddr) {
        if let Err(e) = self.say(&format!("FDSTOREREMOVE=1\nFDNAME={}", vault_name(addr)), &[]) {
            tracing::warn!("can't remove closed sockets from systemd's store: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::{fd::AsFd, unix::net::UnixDatagram};

    #[test]
    fn messages_reach_the_notification_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        let notify = Notify(Some(path.into()));
        notify.say("READY=1", &[]).unwrap();
        notify.say("FDSTORE=1", &[socket.as_fd()]).unwrap();
        let mut bytes = [0; 128];
        let n = socket.recv(&mut bytes).unwrap();
        assert_eq!(&bytes[..n], b"READY=1");
        let n = socket.recv(&mut bytes).unwrap();
        assert_eq!(&bytes[..n], b"FDSTORE=1");
        notify.drop_kept("fe80::1".parse().unwrap());
        let n = socket.recv(&mut bytes).unwrap();
        let text = str::from_utf8(&bytes[..n]).unwrap();
        assert_eq!(text, "FDSTOREREMOVE=1\nFDNAME=vault-fe800000000000000000000000000001");
        Notify(None).say("nobody", &[]).unwrap();
    }
}
