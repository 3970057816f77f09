//! RDS without the kernel's module: sends back what comes, or sends messages to who does, a kernel for example.
//!
//! ```text
//! echo serve 192.0.2.1 4000
//! echo call 192.0.2.2 192.0.2.1 4000 0 100 100000
//! ```

use std::{error::Error, net::IpAddr, time::Duration};

use rds_host::{NodeOptions, RdsNode, Socket};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["serve", addr, port] => serve(&open(addr, port.parse()?)?),
        ["call", addr, peer, port, ref lens @ ..] => call(&open(addr, 0)?, (peer.parse()?, port.parse()?), lens),
        _ => Err("usage: echo serve ADDRESS PORT | echo call ADDRESS PEER PORT LEN...".into()),
    }
}

/// Returns a socket at an address of this host, with room for the longest messages.
fn open(addr: &str, port: u16) -> Result<Socket, Box<dyn Error>> {
    let addr: IpAddr = addr.parse()?;
    let socket = RdsNode::open(NodeOptions::new(addr))?.socket()?;
    socket.set_buffers(Some(1 << 20), Some(1 << 20))?;
    socket.bind((addr, port).into())?;
    Ok(socket)
}

fn serve(socket: &Socket) -> Result<(), Box<dyn Error>> {
    loop {
        let message = socket.recv()?;
        socket.send_to(&message.data, message.from)?;
        println!("{} bytes sent back to {}", message.data.len(), message.from);
    }
}

fn call(socket: &Socket, peer: (IpAddr, u16), lens: &[&str]) -> Result<(), Box<dyn Error>> {
    for len in lens {
        let data: Vec<u8> = (0..len.parse::<usize>()?).map(|i| (i * 7) as u8).collect();
        socket.send_to(&data, peer.into())?;
        let answer = socket.recv_timeout(Duration::from_secs(60))?;
        if answer.data != data {
            return Err(format!("{len} bytes sent, other {} came back", answer.data.len()).into());
        }
        println!("{len} bytes came back");
    }
    Ok(())
}
