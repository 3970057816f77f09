//! RDMA of RDS without the kernel's module: one program offers memory, another one writes and reads it.
//!
//! ```text
//! rdma serve 192.0.2.1 4000
//! rdma call 192.0.2.2 192.0.2.1 4000 some words
//! ```

use std::{error::Error, net::IpAddr};

use rds_host::{Buffer, NodeOptions, Rdma, RdsNode, RegionRights, Socket};

/// Bytes that are offered.
const LEN: usize = 65_536;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["serve", addr, port] => serve(&open(addr, port.parse()?)?),
        ["call", addr, peer, port, ref words @ ..] => call(&open(addr, 0)?, (peer.parse()?, port.parse()?), words),
        _ => Err("usage: rdma serve ADDRESS PORT | rdma call ADDRESS PEER PORT WORD...".into()),
    }
}

fn open(addr: &str, port: u16) -> Result<Socket, Box<dyn Error>> {
    let addr: IpAddr = addr.parse()?;
    let socket = RdsNode::open(NodeOptions::new(addr))?.socket()?;
    socket.bind((addr, port).into())?;
    Ok(socket)
}

/// Offers memory to who asks, and prints what the next message says was written there.
fn serve(socket: &Socket) -> Result<(), Box<dyn Error>> {
    let (buffer, rights) = (
        Buffer::new(LEN)?,
        RegionRights {
            writable: true,
            use_once: false,
        },
    );
    let region = socket.register(&buffer, rights)?;
    loop {
        let message = socket.recv()?;
        if message.data.is_empty() {
            socket.send_cookie_to(&[], region.cookie(), message.from)?;
            continue;
        }
        // It comes after what was written with it.
        let mut text = vec![0; usize::from(u16::from_le_bytes(message.data[..].try_into()?))];
        buffer.read(0, &mut text)?;
        println!("{} wrote: {}", message.from, String::from_utf8_lossy(&text));
    }
}

fn call(socket: &Socket, peer: (IpAddr, u16), words: &[&str]) -> Result<(), Box<dyn Error>> {
    let (text, buffer) = (words.join(" "), Buffer::new(2 * LEN)?);
    socket.send_to(&[], peer.into())?;
    let cookie = socket.recv()?.cookie.ok_or("the peer offers no memory")?;
    buffer.write(0, text.as_bytes())?;
    let len = u16::try_from(text.len())?.to_le_bytes();
    let written = Rdma::write(&buffer, 0..text.len(), cookie);
    socket.operate(&written, Some(&len), peer.into())?.wait()?;
    // Without a message, from the fifth byte on.
    let read = Rdma::read(&buffer, LEN..LEN + text.len() - 4, cookie).at(4);
    socket.operate(&read, None, peer.into())?.wait()?;
    let mut back = vec![0; text.len() - 4];
    buffer.read(LEN, &mut back)?;
    println!("read back: {}", String::from_utf8_lossy(&back));
    Ok(())
}
