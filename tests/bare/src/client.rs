//! The hop that NBD clients connect to.

use std::{
    collections::BTreeMap,
    io::{self, ErrorKind, Read, Write},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
};

use mio::{
    Events, Interest, Poll, Token,
    net::{UdpSocket, UnixListener, UnixStream},
};
use rnbd::nbd::proto::{self, cmd, tx};

use crate::{MAX_PAYLOAD, REPLY_LEN, REQUEST_LEN, Request};

/// Second of the greeting, when nothing is negotiated ("oldstyle").
const OLD_STYLE_MAGIC: u64 = 0x0000_4202_8186_1253;
/// Reserved at the end of that greeting.
const ZEROES: usize = 124;
/// Holds many requests.
const INPUT: usize = 256 << 10;

const LISTENER: Token = Token(0);
const NBD: Token = Token(1);
const UDP: Token = Token(2);

/// What the kernel may charge to a receive buffer for a datagram.
const fn charge(bytes: usize) -> usize {
    2 * bytes + 1024
}

struct Hop {
    udp: UdpSocket,
    nbd: UnixStream,
    input: Vec<u8>,
    /// What of `input` is not parsed yet.
    pending: std::ops::Range<usize>,
    output: Vec<u8>,
    /// Requests under way, and what each may take of the receive buffers.
    under_way: BTreeMap<u64, usize>,
    charged: usize,
    limit: usize,
}

/// Serves one NBD client after another until it is killed.
pub(crate) fn run(server: SocketAddr, size: u64, path: &Path) -> io::Result<()> {
    let (socket, limit) = crate::socket(server)?;
    let any = match server {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    socket.bind(&any.into())?;
    socket.connect(&server.into())?;
    let mut udp = UdpSocket::from_std(socket.into());
    let mut listener = UnixListener::bind(path)?;
    let mut poll = Poll::new()?;
    let mut events = Events::with_capacity(8);
    poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
    poll.registry().register(&mut udp, UDP, Interest::READABLE)?;
    println!("listening");
    loop {
        let mut nbd = match listener.accept() {
            Ok((nbd, _)) => nbd,
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                poll.poll(&mut events, None)?;
                continue;
            }
            Err(e) => return Err(e),
        };
        let both = Interest::READABLE | Interest::WRITABLE;
        poll.registry().register(&mut nbd, NBD, both)?;
        let mut hop = Hop {
            udp,
            nbd,
            input: vec![0; INPUT],
            pending: 0..0,
            output: greeting(size),
            under_way: BTreeMap::new(),
            charged: 0,
            limit,
        };
        while hop.turn()? {
            poll.poll(&mut events, None)?;
        }
        udp = hop.udp;
    }
}

fn greeting(size: u64) -> Vec<u8> {
    let flags = tx::HAS_FLAGS | tx::SEND_FLUSH;
    let mut bytes = Vec::from(proto::INIT_MAGIC.to_be_bytes());
    bytes.extend(OLD_STYLE_MAGIC.to_be_bytes());
    bytes.extend(size.to_be_bytes());
    bytes.extend(u32::from(flags).to_be_bytes());
    bytes.resize(bytes.len() + ZEROES, 0);
    bytes
}

impl Hop {
    /// Does all that can be done now. False at the end of the connection.
    fn turn(&mut self) -> io::Result<bool> {
        loop {
            let replies = self.take_replies()?;
            let open = self.take_requests()?;
            self.write()?;
            if !open || !replies {
                return Ok(open);
            }
        }
    }

    /// Passes replies on. Whether there were any.
    fn take_replies(&mut self) -> io::Result<bool> {
        let mut any = false;
        loop {
            let at = self.output.len();
            self.output.resize(at + REPLY_LEN + MAX_PAYLOAD, 0);
            let len = match self.udp.recv(&mut self.output[at..]) {
                Ok(len) => len,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    self.output.truncate(at);
                    return Ok(any);
                }
                Err(e) => return Err(e),
            };
            self.output.truncate(at + len);
            let cookie = self.output[at..]
                .get(8..REPLY_LEN)
                .and_then(|bytes| bytes.try_into().ok());
            let known = cookie.and_then(|cookie| self.under_way.remove(&u64::from_be_bytes(cookie)));
            match known {
                Some(charge) => self.charged -= charge,
                // It belongs to an earlier connection.
                None => self.output.truncate(at),
            }
            any = true;
        }
    }

    /// Passes requests on as long as there is room for them. False at the end of the connection.
    fn take_requests(&mut self) -> io::Result<bool> {
        loop {
            if !self.forward()? {
                return Ok(true);
            }
            self.input.copy_within(self.pending.clone(), 0);
            self.pending = 0..self.pending.len();
            match self.nbd.read(&mut self.input[self.pending.end..]) {
                Ok(0) => return Ok(false),
                Ok(len) => self.pending.end += len,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(true),
                Err(e) if e.kind() == ErrorKind::ConnectionReset => return Ok(false),
                Err(e) => return Err(e),
            }
        }
    }

    /// Sends what is there. Whether more is wanted.
    fn forward(&mut self) -> io::Result<bool> {
        while let Some(request) = Request::parse(&self.input[self.pending.clone()])? {
            let (len, cost) = (REQUEST_LEN + request.payload(), charge(request.length as usize));
            if request.length as usize > MAX_PAYLOAD {
                return Err(io::Error::new(ErrorKind::InvalidInput, "a request of more than 32 KiB"));
            }
            if request.command == cmd::DISC || self.pending.len() < len {
                return Ok(true);
            }
            if self.charged > 0 && self.charged + cost > self.limit {
                return Ok(false);
            }
            let at = self.pending.start;
            match self.udp.send(&self.input[at..at + len]) {
                Ok(_) => (),
                // A reply comes, and with it another turn.
                Err(e) if e.kind() == ErrorKind::WouldBlock && self.charged > 0 => return Ok(false),
                Err(e) => return Err(e),
            }
            self.charged += cost;
            self.under_way.insert(request.cookie, cost);
            self.pending.start += len;
        }
        Ok(true)
    }

    fn write(&mut self) -> io::Result<()> {
        let mut at = 0;
        while at < self.output.len() {
            match self.nbd.write(&self.output[at..]) {
                Ok(len) => at += len,
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) => return Err(e),
            }
        }
        self.output.drain(..at);
        Ok(())
    }
}
