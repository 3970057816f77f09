//! RDMA of RDS in tasks: `rdma_async 192.0.2.1 192.0.2.2` opens nodes at two addresses of this host, and one counts in memory of the other.

use std::{error::Error, net::IpAddr};

use rds_host::{Buffer, NodeOptions, Rdma, RdsNode, RegionRights, Socket};

/// Tasks that count at a time.
const TASKS: usize = 8;

fn open(addr: &str) -> Result<Socket, Box<dyn Error>> {
    let addr: IpAddr = addr.parse()?;
    let socket = RdsNode::open(NodeOptions::new(addr))?.socket()?;
    socket.bind((addr, 4000).into())?;
    Ok(socket)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [one, other] = &args[..] else {
        return Err("usage: rdma_async ADDRESS ADDRESS".into());
    };
    let (offering, counting) = (open(one)?, open(other)?);
    let (word, rights) = (
        Buffer::new(8)?,
        RegionRights {
            writable: true,
            use_once: false,
        },
    );
    let region = offering.register(&word, rights)?;
    let (to, from) = (offering.local_addr()?, counting.local_addr()?);
    offering
        .send_cookie_to_async(b"count here", region.cookie(), from)
        .await?;
    let cookie = counting.recv_async().await?.cookie.ok_or("no memory is offered")?;
    let found = Buffer::new(8 * TASKS)?;
    // All are under way before the first one is awaited.
    let mut additions = Vec::new();
    for task in 0..TASKS {
        let add = Rdma::fetch_add(1, &found, 8 * task, cookie);
        additions.push(counting.operate_async(&add, None, to).await?);
    }
    for addition in additions {
        addition.await?;
    }
    let mut count = [0; 8];
    word.read(0, &mut count)?;
    println!("{TASKS} tasks counted to {}", u64::from_ne_bytes(count));
    Ok(())
}
