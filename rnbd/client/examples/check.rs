//! Reads a device of a server on tokio, 16 requests at a time, and prints a sum of its bytes.
//!
//! `cargo run -p rnbd-client --example check -- 192.0.2.7 check disk`: server, session, device.

use std::{env, error::Error};

use rnbd_client::DiskOptions;
use tokio::task::JoinSet;

/// Bytes of a read.
const STEP: usize = 256 << 10;
const IN_FLIGHT: usize = 16;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [server, session, device] = &args[..] else {
        return Err("usage: check SERVER SESSION DEVICE".into());
    };
    let disk = DiskOptions::new(server.parse()?, session, device)
        .read_only()
        .open_async()
        .await?;
    let (mut at, mut sum, mut reads) = (0, 0u64, JoinSet::new());
    loop {
        while at < disk.size() && reads.len() < IN_FLIGHT {
            let len = (disk.size() - at).min(STEP as u64) as usize;
            reads.spawn(disk.read_at(len, at));
            at += len as u64;
        }
        let Some(read) = reads.join_next().await else { break };
        sum += read??.into_iter().map(u64::from).sum::<u64>();
    }
    println!("{} bytes, sum {sum}", disk.size());
    disk.close().await?;
    Ok(())
}
