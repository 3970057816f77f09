//! A connection to the broker that says what the test likes.

use std::{
    os::{fd::OwnedFd, unix::net::UnixDatagram},
    path::Path,
};

use roce_broker::{
    Report,
    proto::{Rejoin, Reply, Request, ToBroker, ToClient, UNASKED, VERSION},
};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType, sockopt};

use super::{PATIENCE, Place};

pub(crate) struct Raw(OwnedFd);

impl Raw {
    pub(crate) fn connect(place: &Place) -> Self {
        Self::at(&place.broker_dir())
    }

    /// To the broker of a directory.
    pub(crate) fn at(dir: &Path) -> Self {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        let at = SocketAddrUnix::new(dir.join("broker.sock")).unwrap();
        rustix::net::connect(&socket, &at).unwrap();
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(PATIENCE)).unwrap();
        Self(socket)
    }

    pub(crate) fn say(&self, message: &ToBroker) {
        let json = serde_json::to_vec(message).unwrap();
        let bytes = [&(json.len() as u32).to_le_bytes(), json.as_slice()].concat();
        rustix::net::send(&self.0, &bytes, SendFlags::NOSIGNAL).unwrap();
    }

    fn message(&self) -> ToClient {
        let mut bytes = vec![0; 96 << 10];
        let (len, _) = rustix::net::recv(&self.0, &mut bytes, RecvFlags::empty()).expect("an answer");
        serde_json::from_slice(&bytes[4..len]).unwrap()
    }

    /// Waits for a reply. Nothing else may come.
    pub(crate) fn reply(&self) -> Reply {
        match self.message() {
            ToClient::Reply { reply, .. } => reply,
            other => panic!("{other:?}"),
        }
    }

    /// Waits for a reply. The broker may ask for counters meanwhile, and is not told.
    pub(crate) fn reply_among_questions(&self) -> Reply {
        loop {
            match self.message() {
                ToClient::Reply { reply, .. } => return reply,
                ToClient::Query { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Becomes a member.
    pub(crate) fn hello(&self, rejoin: Option<Rejoin>) -> Rejoin {
        let request = Request::Hello {
            version: VERSION,
            name: "raw".into(),
            rejoin,
        };
        self.say(&ToBroker::Request { seq: 1, request });
        match self.reply() {
            Reply::Welcome { place, token, parts } => Rejoin { place, token, parts },
            other => panic!("{other:?}"),
        }
    }

    /// Tells counters unasked.
    pub(crate) fn report(&self, counters: impl IntoIterator<Item = (String, u64)>) {
        let report = Report {
            counters: counters.into_iter().collect(),
            ..Report::default()
        };
        let (token, report) = (UNASKED, Some(report));
        self.say(&ToBroker::Report { token, report });
    }
}

/// The descriptor that a broker gives to systemd, among what it tells.
pub(crate) fn deposited(notify: &UnixDatagram) -> OwnedFd {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
    notify.set_read_timeout(Some(PATIENCE)).unwrap();
    loop {
        let mut text = [0; 256];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [std::io::IoSliceMut::new(&mut text)];
        rustix::net::recvmsg(notify, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(mut fds) = message {
                return fds.next().unwrap();
            }
        }
    }
}
