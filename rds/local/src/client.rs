//! Programs' side: a control connection, and sockets for Rust programs.

use std::{
    io::{self, IoSlice},
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::{Mutex, PoisonError},
};

use roce_broker::JoinConfig;
use rustix::net::{RecvFlags, SendFlags};
use zerocopy::IntoBytes;

use crate::{
    control::{Answer, Request, SocketOption},
    data::{RecvHeader, RecvKind, SendHeader},
    key::SocketKey,
    limits::{MAX_MESSAGE, SOCKET},
    op::Op,
    page::Page,
    record::{connect, read_memory_file, receive, send},
    start::{connect_or_start, directory},
};

/// Control connection to the node. Requests of several threads come one after the other.
#[derive(Debug)]
pub struct Control(Mutex<OwnedFd>);

impl Control {
    /// Connects to this user's node, which is started if none is running.
    ///
    /// # Errors
    /// When there is none and none can be started.
    pub fn open() -> io::Result<Self> {
        let program = JoinConfig::from_env().and_then(|join| join.program);
        connect_or_start(&directory(), program.as_deref()).map(Self::new)
    }

    /// Connects to the node of a directory; `None` if none is running.
    ///
    /// # Errors
    /// When it is another user's; those of `connect`.
    pub fn find(dir: &Path) -> io::Result<Option<Self>> {
        Ok(connect(&dir.join(SOCKET))?.map(Self::new))
    }

    /// Returns one over a connected socket.
    pub fn new(socket: OwnedFd) -> Self {
        Self(Mutex::new(socket))
    }

    /// Asks, and waits for the answer and its descriptors.
    ///
    /// # Errors
    /// The errno of the answer; `ECONNRESET` when the node is gone, `EPROTO` when it is of another version.
    pub fn call(&self, request: &Request) -> io::Result<(Answer, Vec<OwnedFd>)> {
        let socket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        send(&*socket, &[IoSlice::new(&request.to_bytes())], &[], SendFlags::empty())?;
        let mut bytes = [0; Answer::LEN];
        let Some(record) = receive(&*socket, &mut bytes, RecvFlags::empty())? else {
            return Err(io::Error::from_raw_os_error(libc::ECONNRESET));
        };
        let answer = Answer::parse(bytes.get(..record.len).unwrap_or_default());
        let answer = answer.map_err(|_| io::Error::from_raw_os_error(libc::EPROTO))?;
        match answer.errno {
            0 => Ok((answer, record.fds)),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Returns information (`RDS_INFO_*`): its bytes, and the size of an element.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub fn info(&self, number: u32) -> io::Result<(Vec<u8>, usize)> {
        let (answer, fds) = self.call(&Request::Info(number))?;
        let file = fds.first().ok_or(io::ErrorKind::InvalidData)?;
        Ok((read_memory_file(file, answer.len as usize)?, answer.value as usize))
    }

    /// Creates a socket.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE` above the node's limits.
    pub fn socket(&self) -> io::Result<Socket<'_>> {
        let (answer, fds) = self.call(&Request::Socket)?;
        let [fd, page] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| io::ErrorKind::InvalidData)?;
        Ok(Socket {
            control: self,
            key: SocketKey(answer.value),
            page: Page::map(&page)?,
            fd,
        })
    }
}

/// Message or report that has come.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Received {
    /// Its kind.
    pub kind: RecvKind,
    /// Sender of a message.
    pub from: Option<SocketAddr>,
    /// Data.
    pub data: Vec<u8>,
}

/// RDS socket of a program.
#[derive(Debug)]
pub struct Socket<'a> {
    control: &'a Control,
    key: SocketKey,
    page: Page,
    fd: OwnedFd,
}

impl AsFd for Socket<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Socket<'_> {
    /// Its key.
    pub fn key(&self) -> SocketKey {
        self.key
    }

    /// Its page.
    pub fn page(&self) -> &Page {
        &self.page
    }

    /// Binds it. Returns the address.
    ///
    /// # Errors
    /// Errors of `bind`.
    pub fn bind(&self, addr: SocketAddr) -> io::Result<SocketAddr> {
        let (answer, _) = self.control.call(&Request::Bind(self.key, addr))?;
        answer.addr.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Sets an option.
    ///
    /// # Errors
    /// Errors of `setsockopt`.
    pub fn set(&self, option: SocketOption, value: u64) -> io::Result<()> {
        self.control
            .call(&Request::SetOption(self.key, option, value))
            .map(drop)
    }

    /// Sends a message; `None`: to where it is connected. Waits while the buffer is full, unless `flags` say otherwise.
    ///
    /// # Errors
    /// `ENOBUFS` while the port is congested; those of `sendmsg`.
    pub fn send_to(&self, data: &[u8], to: Option<SocketAddr>, flags: SendFlags) -> io::Result<()> {
        if self.page.some_port_is_congested() {
            self.control.call(&Request::Congestion {
                socket: self.key,
                to,
                wait: false,
            })?;
        }
        let header = SendHeader::new(to, &Op::None, 0, data.len());
        let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(data)];
        Ok(send(&self.fd, &parts, &[], flags)?)
    }

    /// Receives what is next.
    ///
    /// # Errors
    /// `ECONNRESET` when the node is gone; those of `recvmsg`.
    pub fn recv(&self, flags: RecvFlags) -> io::Result<Received> {
        let mut buffer = vec![0; RecvHeader::LEN + MAX_MESSAGE];
        loop {
            let Some(record) = receive(&self.fd, &mut buffer, flags)? else {
                return Err(io::Error::from_raw_os_error(libc::ECONNRESET));
            };
            let bytes = buffer.get(..record.len).unwrap_or_default();
            let (header, kind) = RecvHeader::parse(bytes).map_err(io::Error::other)?;
            let data = match record.fds.first().filter(|_| header.is_in_file()) {
                Some(file) => read_memory_file(file, header.data_len())?,
                None => bytes.get(RecvHeader::LEN..).unwrap_or_default().to_vec(),
            };
            if matches!(kind, RecvKind::Message(_)) {
                self.page.add_received(header.data_len());
            }
            if kind != RecvKind::Wake {
                let from = header.from();
                return Ok(Received { kind, from, data });
            }
        }
    }
}
