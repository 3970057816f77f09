//! NBD on a unix socket → UDP → a file → UDP: a chain like `ferroce map` and `ferroce serve`, of two loops with one thread each, without
//! RoCE, RTRS or a checksum. `cargo xtask bench block` shows it beside the others as what this machine can do.
//!
//! A request travels as it came, with its payload, in one datagram, and so does its reply; there is no handling of loss, so that no
//! more is under way than the receive buffers hold.

mod client;
mod server;

use std::{io, net::SocketAddr, path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use rnbd::nbd::proto;
use socket2::{Domain, Protocol, Socket, Type};

/// What a datagram may carry, without its header.
const MAX_PAYLOAD: usize = 32 << 10;
/// Magic, flags, command, cookie, offset, length.
const REQUEST_LEN: usize = 28;
/// Magic, error, cookie.
const REPLY_LEN: usize = 16;
/// Asked for on both sides.
const SOCKET_BUFFER: usize = 8 << 20;

/// NBD over UDP in two hops without a protocol, for comparison
#[derive(Parser)]
#[command(name = "ferroce-bare")]
struct Cli {
    #[command(subcommand)]
    side: Side,
}

#[derive(Subcommand)]
enum Side {
    /// Answer requests out of a file
    Server {
        /// Our address and UDP port
        #[arg(long)]
        listen: SocketAddr,
        /// The file
        image: PathBuf,
    },
    /// Take requests at a unix socket
    Client {
        /// The server's address and UDP port
        #[arg(long)]
        server: SocketAddr,
        /// Bytes of the server's file
        #[arg(long)]
        size: u64,
        /// Unix socket to make
        nbd: PathBuf,
    },
}

/// The header of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Request {
    command: u16,
    cookie: u64,
    offset: u64,
    length: u32,
}

impl Request {
    /// None when there are too few bytes; an error when it is no request.
    fn parse(bytes: &[u8]) -> io::Result<Option<Self>> {
        let Some(bytes) = bytes.first_chunk::<REQUEST_LEN>() else {
            return Ok(None);
        };
        let number = |at: usize, len: usize| bytes[at..at + len].iter().fold(0u64, |n, &b| n << 8 | u64::from(b));
        if number(0, 4) != u64::from(proto::REQUEST_MAGIC) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "no NBD request"));
        }
        Ok(Some(Self {
            command: number(6, 2) as u16,
            cookie: number(8, 8),
            offset: number(16, 8),
            length: number(24, 4) as u32,
        }))
    }

    /// Bytes that follow the header.
    fn payload(&self) -> usize {
        match self.command {
            proto::cmd::WRITE => self.length as usize,
            _ => 0,
        }
    }

    /// Bytes that follow the reply's header.
    fn answer(&self) -> usize {
        match self.command {
            proto::cmd::READ => self.length as usize,
            _ => 0,
        }
    }
}

/// The header of a reply.
fn reply(error: u32, cookie: u64) -> [u8; REPLY_LEN] {
    let mut bytes = [0; REPLY_LEN];
    bytes[..4].copy_from_slice(&proto::SIMPLE_REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

/// A UDP socket, and the size of its receive buffer as the kernel counts.
fn socket(addr: SocketAddr) -> io::Result<(Socket, usize)> {
    let socket = Socket::new(Domain::for_address(addr), Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_recv_buffer_size(SOCKET_BUFFER)?;
    socket.set_send_buffer_size(SOCKET_BUFFER)?;
    socket.set_nonblocking(true)?;
    let granted = socket.recv_buffer_size()?;
    Ok((socket, granted))
}

fn main() -> ExitCode {
    let done = match Cli::parse().side {
        Side::Server { listen, image } => server::run(listen, &image),
        Side::Client { server, size, nbd } => client::run(server, size, &nbd),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}
