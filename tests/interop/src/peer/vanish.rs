//! A requester whose peer goes away in the middle: its work must end with exhausted retries, nothing else. And two agents,
//! one of them started again, that work together again.

use std::time::Duration;

use crate::{
    Error,
    agent::{ALL_ACCESS, Agent, AgentMem, AgentPost, Ends, FETCH_ADD, READ, SEND, WRITE},
};

/// Arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    ends: Ends,
    /// Retries of the requester.
    #[arg(long, default_value_t = 6)]
    retry_cnt: u32,
}

const LEN: u32 = 20_000;
const RETRY_EXCEEDED: u32 = 12;
const FLUSHED: u32 = 5;

/// A connection between queue pairs and memory that are new; what the requester and what the responder has.
fn connect(requester: &mut Agent, responder: &mut Agent, args: &Args) -> Result<(AgentMem, AgentMem), Error> {
    let (from, from_gid) = requester.create(16, 16, 2, 0)?;
    let (to, to_gid) = responder.create(16, 16, 2, 0)?;
    let source = requester.mem(LEN as usize, ALL_ACCESS)?;
    let sink = responder.mem(LEN as usize, ALL_ACCESS)?;
    let mtu = args.ends.mtu.trailing_zeros() - 7;
    responder.call(&format!("rtr {from} {from_gid} 5 {mtu} 12 4"))?;
    responder.call("rts 5 14 6 6 4")?;
    requester.call(&format!("rtr {to} {to_gid} 5 {mtu} 12 4"))?;
    // 4.096 us * 2^16 = 268 ms.
    requester.call(&format!("rts 5 16 {} 6 4", args.retry_cnt))?;
    Ok((source, sink))
}

/// Writes until the peer is gone, then looks how that ends.
pub(crate) fn run(args: &Args) -> Result<(), Error> {
    let [mut requester, mut responder] = args.ends.connect()?;
    let (source, sink) = connect(&mut requester, &mut responder, args)?;
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
    if done < 30 || state != ["6"] {
        return Err(format!("it ended after {done} WRITEs in state {state:?}").into());
    }
    println!("vanish: {done} WRITEs, then retries exceeded, the rest flushed, queue pair in error: passed");
    Ok(())
}

/// WRITE, READ, SEND and fetch-and-add each way over one new connection, the data compared.
pub(crate) fn exchange(args: &Args) -> Result<(), Error> {
    let [mut a, mut b] = args.ends.connect()?;
    let (at_a, at_b) = connect(&mut a, &mut b, args)?;
    one_way(&mut a, at_a, &mut b, at_b, 1).map_err(|e| format!("requester to responder: {e}"))?;
    one_way(&mut b, at_b, &mut a, at_a, 2).map_err(|e| format!("responder to requester: {e}"))?;
    for agent in [&mut a, &mut b] {
        agent.call("quit")?;
    }
    println!("exchange: WRITE, READ, SEND and atomic each way over a new connection, data compared: passed");
    Ok(())
}

fn one_way(asks: &mut Agent, here: AgentMem, answers: &mut Agent, there: AgentMem, seed: u32) -> Result<(), Error> {
    let post = |op, len| AgentPost {
        wr_id: u64::from(op),
        op,
        mem: here.id,
        len,
        raddr: there.addr,
        rkey: there.rkey,
        swap: 5,
        ..AgentPost::default()
    };
    let fill = |agent: &mut Agent, mem: AgentMem, seed| agent.call(&format!("fill {} 0 {LEN} {seed}", mem.id));
    let check = |agent: &mut Agent, mem: AgentMem, seed| agent.call(&format!("check {} 0 {LEN} {seed}", mem.id));
    let done = |asks: &mut Agent, op, len| -> Result<(), Error> {
        asks.post(post(op, len))?;
        match asks.poll('s', 1, 60_000)?[..] {
            [wc] if wc.status == 0 => Ok(()),
            ref other => Err(format!("opcode {op}: {other:?}").into()),
        }
    };
    let seed = 10 * seed;
    fill(asks, here, seed)?;
    done(asks, WRITE, LEN)?;
    check(answers, there, seed)?;
    fill(answers, there, seed + 1)?;
    done(asks, READ, LEN)?;
    check(asks, here, seed + 1)?;
    fill(asks, here, seed + 2)?;
    answers.recv(3, there.id, 0, LEN)?;
    done(asks, SEND, LEN)?;
    match answers.poll('r', 1, 60_000)?[..] {
        [wc] if wc.status == 0 && wc.byte_len == LEN => {}
        ref other => return Err(format!("receive: {other:?}").into()),
    }
    check(answers, there, seed + 2)?;
    answers.word(there.id, 0, Some(37))?;
    done(asks, FETCH_ADD, 8)?;
    match (asks.word(here.id, 0, None)?, answers.word(there.id, 0, None)?) {
        (37, 42) => Ok(()),
        other => Err(format!("fetch-and-add: {other:?}").into()),
    }
}
