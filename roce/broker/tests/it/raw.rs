//! A connection to the broker that sends any message.

use std::{
    io::IoSliceMut,
    os::{fd::OwnedFd, unix::net::UnixDatagram},
    path::Path,
    time::Duration,
};

use roce_broker::proto::{Grant, Reply, Request, ToBroker, ToClient, VERSION};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix, SocketType, sockopt,
};

/// Time after which an expected answer counts as missing.
const TIMEOUT: Duration = Duration::from_secs(180);

/// Connection to the broker that sends any message.
pub(crate) struct Raw(OwnedFd);

impl Raw {
    /// To the broker of a directory.
    pub(crate) fn at(dir: &Path) -> Self {
        Self::try_at(dir).unwrap()
    }

    /// Fails until the broker listens: its socket file exists earlier.
    pub(crate) fn try_at(dir: &Path) -> rustix::io::Result<Self> {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(dir.join("broker.sock"))?)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(TIMEOUT))?;
        Ok(Self(socket))
    }

    pub(crate) fn say(&self, message: &ToBroker) {
        let json = serde_json::to_vec(message).unwrap();
        let bytes = [&(json.len() as u32).to_le_bytes(), json.as_slice()].concat();
        rustix::net::send(&self.0, &bytes, SendFlags::NOSIGNAL).unwrap();
    }

    /// Waits for a reply. Returns it with the descriptors beside it. Nothing else may come.
    fn receive(&self) -> (Reply, Vec<OwnedFd>) {
        let mut bytes = vec![0; 96 << 10];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let got = rustix::net::recvmsg(&self.0, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC).expect("an answer");
        let mut fds = vec![];
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(list) = message {
                fds.extend(list);
            }
        }
        match serde_json::from_slice(&bytes[4..got.bytes]).unwrap() {
            ToClient::Reply { reply, .. } => (reply, fds),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn reply(&self) -> Reply {
        self.receive().0
    }

    /// Becomes a member.
    pub(crate) fn hello(&self, rejoin: Option<Grant>) -> Grant {
        self.join(rejoin).0
    }

    /// Becomes a member, and gets its page.
    pub(crate) fn join(&self, rejoin: Option<Grant>) -> (Grant, RawPage) {
        let request = Request::Hello {
            version: VERSION,
            name: "raw".into(),
            rejoin,
        };
        self.say(&ToBroker::Request { seq: 1, request });
        let (reply, mut fds) = self.receive();
        match reply {
            Reply::Welcome(given) => (given, RawPage(fds.remove(0))),
            other => panic!("{other:?}"),
        }
    }
}

/// A member's page, in which the test writes what it likes.
pub(crate) struct RawPage(pub(crate) OwnedFd);

impl RawPage {
    /// Writes words, from a place on.
    pub(crate) fn write(&self, at: u64, words: &[u64]) {
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        assert_eq!(rustix::io::pwrite(&self.0, &bytes, 8 * at), Ok(bytes.len()));
    }

    /// Publishes counters, behind a path MTU and a number of queue pairs.
    pub(crate) fn publish(&self, counters: &[u64]) {
        self.write(2, counters);
        self.write(0, &[1024, 1]);
    }
}

/// The descriptor that a broker gives to systemd, among what it tells.
pub(crate) fn deposited(notify: &UnixDatagram) -> OwnedFd {
    notify.set_read_timeout(Some(TIMEOUT)).unwrap();
    loop {
        let mut text = [0; 256];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut text)];
        rustix::net::recvmsg(notify, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(mut fds) = message {
                return fds.next().unwrap();
            }
        }
    }
}
