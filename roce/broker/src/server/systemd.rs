//! What a broker and systemd say to each other (`sd_notify(3)`, `sd_listen_fds(3)`): readiness, and the vaults, which
//! systemd keeps when a system broker ends, since its members, of other users, are not trusted with them.

use std::{
    collections::HashMap,
    ffi::{OsStr, OsString},
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
};

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::sys;

/// The first descriptor that is passed (`SD_LISTEN_FDS_START`).
const FIRST: i32 = 3;

/// Where to tell systemd something; does nothing when not started by it.
pub(super) struct Notify(Option<OsString>);

impl Notify {
    pub(super) fn from_env() -> Self {
        Self(std::env::var_os("NOTIFY_SOCKET").filter(|s| !s.is_empty()))
    }

    /// Sends a message like `READY=1`.
    pub(super) fn say(&self, text: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
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

/// The descriptors that systemd kept for us. Call it once, and before the process opens any of its own.
pub(super) fn kept_descriptors() -> Vec<OwnedFd> {
    let vars: HashMap<OsString, OsString> = std::env::vars_os().collect();
    let number = |name: &str| vars.get(OsStr::new(name))?.to_str()?.parse::<u32>().ok();
    let ours = number("LISTEN_PID") == Some(std::process::id());
    let count = number("LISTEN_FDS").filter(|_| ours).unwrap_or(0).min(1 << 12) as i32;
    (FIRST..FIRST + count)
        .map(|fd| {
            // SAFETY: systemd has opened these before it started us, for us alone; this is called once.
            unsafe { sys::inherited(fd) }
        })
        .collect()
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
        let mut bytes = [0; 64];
        let n = socket.recv(&mut bytes).unwrap();
        assert_eq!(&bytes[..n], b"READY=1");
        let n = socket.recv(&mut bytes).unwrap();
        assert_eq!(&bytes[..n], b"FDSTORE=1");
        Notify(None).say("nobody", &[]).unwrap();
    }
}
