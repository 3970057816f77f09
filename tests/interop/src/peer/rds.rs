//! A node of RDS: sends messages and compares what comes back, or sends back what comes.

use std::{net::IpAddr, time::Duration};

use rds_host::{NodeOptions, RdsNode, Socket};
use roce::DatapathKind;

use crate::Error;

/// How long a message may take there and back: the other end is an emulated machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Arguments of the command.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Port: of the other end with --connect, else ours
    #[arg(long, default_value_t = 4000)]
    port: u16,
    /// Send to this address; else send back what comes
    #[arg(long)]
    connect: Option<IpAddr>,
    /// Lengths of the messages; without --connect only their number counts
    #[arg(long, value_delimiter = ',', default_value = "0,1,4095,4096,4097,100000,1048576")]
    lens: Vec<usize>,
    /// Type of service
    #[arg(long)]
    tos: Option<u8>,
}

pub(crate) fn run(addr: IpAddr, datapath: DatapathKind, args: &Args) -> Result<(), Error> {
    let mut options = NodeOptions::new(addr);
    options.device.datapath = datapath;
    let node = RdsNode::open(options)?;
    let socket = node.socket()?;
    socket.set_buffers(Some(1 << 20), Some(1 << 20))?;
    let own = if args.connect.is_some() { 0 } else { args.port };
    socket.bind((addr, own).into())?;
    if let Some(tos) = args.tos {
        socket.set_tos(tos)?;
    }
    match args.connect {
        Some(peer) => call(&socket, peer, args)?,
        None => serve(&socket, args)?,
    }
    for connection in node.connections()? {
        println!("{connection:?}");
    }
    println!("passed: {} messages there and back", args.lens.len());
    Ok(())
}

fn serve(socket: &Socket, args: &Args) -> Result<(), Error> {
    println!("waiting at {}", socket.local_addr()?);
    for _ in &args.lens {
        let message = socket.recv_timeout(PATIENCE)?;
        socket.send_to(&message.data, message.from)?;
        println!("{} bytes from {}", message.data.len(), message.from);
    }
    Ok(socket.flush(PATIENCE)?)
}

fn call(socket: &Socket, peer: IpAddr, args: &Args) -> Result<(), Error> {
    for len in &args.lens {
        let data: Vec<u8> = (0..*len).map(|i| (i * 7 + len) as u8).collect();
        socket.send_to(&data, (peer, args.port).into())?;
        let answer = socket.recv_timeout(PATIENCE)?;
        if answer.data != data {
            return Err(format!("{len} bytes sent, other {} came back", answer.data.len()).into());
        }
        println!("{len} bytes came back from {}", answer.from);
    }
    Ok(socket.flush(PATIENCE)?)
}
