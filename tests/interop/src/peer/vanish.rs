//! A requester whose peer goes away in the middle: its work must end with exhausted retries, nothing else.

use std::{net::SocketAddr, time::Duration};

use crate::{
    Error,
    agent::{ALL_ACCESS, Agent, AgentPost, WRITE},
};

/// Arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The agent that posts the requests (TCP).
    #[arg(long)]
    requester: SocketAddr,
    /// The agent that will go away (TCP).
    #[arg(long)]
    responder: SocketAddr,
    /// Path MTU in bytes.
    #[arg(long, default_value_t = 1024)]
    mtu: u32,
    /// Retries of the requester.
    #[arg(long, default_value_t = 6)]
    retry_cnt: u32,
}

const LEN: u32 = 20_000;
const RETRY_EXCEEDED: u32 = 12;
const FLUSHED: u32 = 5;

/// Writes until the peer is gone, then looks how that ends.
pub(crate) fn run(args: &Args) -> Result<(), Error> {
    let patience = Duration::from_secs(60);
    let mut requester = Agent::connect(args.requester, patience)?;
    let mut responder = Agent::connect(args.responder, patience)?;
    let (from, from_gid) = requester.create(16, 16, 2, 0)?;
    let (to, to_gid) = responder.create(16, 16, 2, 0)?;
    let source = requester.mem(LEN as usize, ALL_ACCESS)?;
    let sink = responder.mem(LEN as usize, ALL_ACCESS)?;
    let mtu = args.mtu.trailing_zeros() - 7;
    responder.call(&format!("rtr {from} {from_gid} 5 {mtu} 12 4"))?;
    responder.call("rts 5 14 6 6 4")?;
    requester.call(&format!("rtr {to} {to_gid} 5 {mtu} 12 4"))?;
    // 4.096 us * 2^16 = 268 ms.
    requester.call(&format!("rts 5 16 {} 6 4", args.retry_cnt))?;
    let write = |n| AgentPost {
        wr_id: n,
        op: WRITE,
        mem: source.id,
        len: LEN,
        raddr: sink.addr,
        rkey: sink.rkey,
        ..AgentPost::default()
    };
    let mut done = 0;
    loop {
        for n in 0..3 {
            requester.post(write(n))?;
        }
        let statuses: Vec<u32> = requester.poll('s', 3, 110_000)?.iter().map(|wc| wc.status).collect();
        let failed = statuses.iter().position(|s| *s != 0);
        done += failed.unwrap_or(statuses.len());
        match (failed, statuses.len()) {
            (None, 3) => {}
            (Some(at), 3) if statuses[at] == RETRY_EXCEEDED && statuses[at + 1..].iter().all(|s| *s == FLUSHED) => {
                break;
            }
            _ => return Err(format!("after {done} WRITEs the completions were {statuses:?}").into()),
        }
        if done == 30 {
            println!("vanish: running");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let state = requester.call("state")?;
    requester.call("quit")?;
    if done < 30 || state != ["6"] {
        return Err(format!("it ended after {done} WRITEs in state {state:?}").into());
    }
    println!("vanish: {done} WRITEs, then retries exceeded, the rest flushed, queue pair in error: passed");
    Ok(())
}
