//! A disk in a loop of the program's own, by mio: prints the first block.
//!
//! `cargo run -p rnbd-client --example own_loop -- 192.0.2.7 look disk`: server, session, device.

use std::{env, error::Error, os::fd::AsRawFd};

use mio::{Events, Interest, Poll, Token, unix::SourceFd};
use rnbd_client::{DiskEvent, DiskOptions, Request};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [server, session, device] = &args[..] else {
        return Err("usage: own_loop SERVER SESSION DEVICE".into());
    };
    let mut disk = DiskOptions::new(server.parse()?, session, device)
        .read_only()
        .open_in_loop()?;
    let (mut poll, mut events) = (Poll::new()?, Events::with_capacity(8));
    let fd = disk.as_raw_fd();
    poll.registry()
        .register(&mut SourceFd(&fd), Token(0), Interest::READABLE)?;
    loop {
        let timeout = disk.turn()?;
        while let Some(event) = disk.next_event() {
            match event {
                DiskEvent::Opened(geometry) => {
                    let len = geometry.logical_block_size as usize;
                    disk.submit(1, Request::Read { offset: 0, len });
                }
                DiskEvent::Done { result, .. } => {
                    println!("{:02x?}", result?);
                    disk.close();
                }
                DiskEvent::Closed(result) => return Ok(result?),
            }
        }
        poll.poll(&mut events, timeout)?;
    }
}
