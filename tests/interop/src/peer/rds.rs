//! A node of RDS: sends messages and compares what comes back, or sends back what comes; or does RDMA on what a peer offers, and offers
//! memory.

use std::{net::IpAddr, time::Duration};

use rds_host::{Buffer, NodeOptions, Rdma, RdsNode, RegionRights, Socket};
use roce::DatapathKind;

use crate::Error;

/// How long a message may take there and back: the other end is an emulated machine.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Bytes of memory that each side offers.
const RDMA_LEN: usize = 60_000;

/// Arguments of the command.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Port: of the other end and ours
    #[arg(long, default_value_t = 4000)]
    port: u16,
    /// Send to this address, and compare what comes back
    #[arg(long)]
    connect: Option<IpAddr>,
    /// The same once more with this type of service
    #[arg(long, requires = "connect")]
    tos: Option<u8>,
    /// Then send back what comes
    #[arg(long)]
    serve: bool,
    /// Lengths of the messages; only the number of those that are sent back counts
    #[arg(long, value_delimiter = ',', default_value = "0,1,4095,4096,4097,100000,1048576")]
    lens: Vec<usize>,
    /// Wait for a peer that offers memory, read and write it, and offer memory
    #[arg(long, conflicts_with_all = ["connect", "serve"])]
    rdma: bool,
}

pub(crate) fn run(addr: IpAddr, datapath: DatapathKind, args: &Args) -> Result<(), Error> {
    let mut options = NodeOptions::new(addr);
    options.device.datapath = datapath;
    let node = RdsNode::open(options)?;
    let socket = bound(&node, args.port)?;
    println!("waiting at {}", socket.local_addr()?);
    if let Some(peer) = args.connect {
        for tos in [None, args.tos].into_iter().take(1 + usize::from(args.tos.is_some())) {
            let socket = bound(&node, 0)?;
            tos.map_or(Ok(()), |tos| socket.set_tos(tos))?;
            call(&socket, peer, args)?;
        }
    }
    if args.serve {
        serve(&socket, args)?;
    }
    if args.rdma {
        rdma(&socket)?;
    }
    for connection in node.connections()? {
        println!("{connection:?}");
    }
    match args.rdma {
        true => println!("passed: {RDMA_LEN} bytes read and written, both ways"),
        false => println!("passed: {} messages there and back", args.lens.len()),
    }
    Ok(())
}

fn bound(node: &RdsNode, port: u16) -> Result<Socket, Error> {
    let socket = node.socket()?;
    socket.set_buffers(Some(1 << 20), Some(1 << 20))?;
    socket.bind((node.addr(), port).into())?;
    Ok(socket)
}

fn serve(socket: &Socket, args: &Args) -> Result<(), Error> {
    for _ in &args.lens {
        let message = socket.recv_timeout(TIMEOUT)?;
        socket.send_to(&message.data, message.from)?;
        println!("{} bytes from {}", message.data.len(), message.from);
    }
    Ok(socket.flush(TIMEOUT)?)
}

fn call(socket: &Socket, peer: IpAddr, args: &Args) -> Result<(), Error> {
    for len in &args.lens {
        let data: Vec<u8> = (0..*len).map(|i| (i * 7 + len) as u8).collect();
        socket.send_to(&data, (peer, args.port).into())?;
        let answer = socket.recv_timeout(TIMEOUT)?;
        if answer.data != data {
            return Err(format!("{len} bytes sent, other {} came back", answer.data.len()).into());
        }
        println!("{len} bytes came back from {}", answer.from);
    }
    Ok(socket.flush(TIMEOUT)?)
}

/// Bytes of the memory that a step is to find, as the program in the guest makes them.
fn pattern(seed: usize) -> Vec<u8> {
    (0..RDMA_LEN).map(|i| (i * 7 + i / 256 + seed) as u8).collect()
}

fn check(buffer: &Buffer, seed: usize, what: &str) -> Result<(), Error> {
    let mut bytes = vec![0; RDMA_LEN];
    buffer.read(0, &mut bytes)?;
    match bytes == pattern(seed) {
        true => {
            println!("{what}: {RDMA_LEN} bytes");
            Ok(())
        }
        false => Err(format!("{what}: other bytes").into()),
    }
}

/// The other end is `rds-rdma` in a guest.
fn rdma(socket: &Socket) -> Result<(), Error> {
    let offer = socket.recv_timeout(TIMEOUT)?;
    let (peer, cookie) = (offer.from, offer.cookie.ok_or("the message has no cookie")?);
    println!("{peer} offers {cookie}");
    let buffer = Buffer::new(RDMA_LEN)?;
    socket
        .operate(&Rdma::read(&buffer, 0..RDMA_LEN, cookie), Some(b"got"), peer)?
        .wait()?;
    check(&buffer, 1, "READ of the kernel's memory")?;
    buffer.write(0, &pattern(2))?;
    // The end first, so that the offset counts.
    let end = Rdma::write(&buffer, 5000..RDMA_LEN, cookie).at(5000);
    socket.operate(&end, None, peer)?.wait()?;
    socket.send_to(b"end", peer)?;
    let begin = Rdma::write(&buffer, 0..5000, cookie);
    socket.operate(&begin, Some(b"written"), peer)?.wait()?;
    let ours = Buffer::new(RDMA_LEN)?;
    ours.write(0, &pattern(3))?;
    let rights = RegionRights {
        writable: true,
        use_once: false,
    };
    let region = socket.register(&ours, rights)?;
    socket.send_cookie_to(b"offer", region.cookie(), peer)?;
    for text in ["read", "wrote"] {
        let message = socket.recv_timeout(TIMEOUT)?;
        if message.data != text.as_bytes() {
            return Err(format!("{message:?} came instead of `{text}`").into());
        }
    }
    check(&ours, 4, "WRITE of the kernel")?;
    Ok(socket.flush(TIMEOUT)?)
}
