//! Pings nodes of LNet in tasks, all at once: `pings_async 192.0.2.2@o2ib 192.0.2.1@o2ib ...`; the first NID is our own.

use std::{error::Error, time::Instant};

use lnet_host::{LnetNode, Nid, NodeOptions};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let nids: Result<Vec<Nid>, String> = std::env::args().skip(1).map(|nid| nid.parse()).collect();
    let nids = nids?;
    let [own, peers @ ..] = &nids[..] else {
        return Err("usage: pings_async NID PEER...".into());
    };
    let node = LnetNode::open(NodeOptions::new(*own))?;
    let mut tasks = Vec::new();
    for peer in peers.iter().copied() {
        let node = node.clone();
        tasks.push(tokio::spawn(async move {
            let begun = Instant::now();
            let reply = node.ping(peer)?.await?;
            Ok::<_, lnet_host::Error>((begun.elapsed(), reply))
        }));
    }
    for (peer, task) in peers.iter().zip(tasks) {
        match task.await? {
            Ok((time, reply)) => println!("{peer}: {} interfaces, {} us", reply.count, time.as_micros()),
            Err(e) => println!("{peer}: {e}"),
        }
    }
    Ok(())
}
