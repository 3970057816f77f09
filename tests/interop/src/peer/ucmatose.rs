//! The other half of `ucmatose`: several connections, each with messages both ways, then an orderly end.

use std::{
    collections::{HashMap, HashSet},
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use roce::{CmEvent, CmEventKind, ConnParams, Device, EventChannel, Id, Mr, RejectReason};
use roce_verbs::{AccessFlags, Payload, QpCaps, RecvWr, SendFlags, SendOp, SendWr, Sge};

use crate::{Error, link::Link};

/// Connections with their queue pairs.
type Connected = Vec<(Id, Node)>;

/// Arguments, with the defaults of `ucmatose`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Connect to the server on this host instead of waiting for a client.
    #[arg(long)]
    connect: Option<IpAddr>,
    /// RDMA_CM port.
    #[arg(long, default_value_t = 7471)]
    port: u16,
    /// Connections.
    #[arg(long, default_value_t = 1)]
    connections: usize,
    /// Messages each way on a connection.
    #[arg(long, default_value_t = 10)]
    messages: u32,
    /// Bytes of a message.
    #[arg(long, default_value_t = 100)]
    size: usize,
}

struct Node {
    link: Link,
    region: Mr,
}

impl Node {
    fn new(provider: &Device, args: &Args) -> Result<Self, Error> {
        let caps = QpCaps {
            max_send_wr: args.messages,
            max_recv_wr: args.messages,
            ..QpCaps::default()
        };
        let link = Link::unconnected(provider, caps)?;
        let region = provider.alloc_mr(&link.pd, args.size.max(1), AccessFlags::LOCAL_WRITE)?;
        let node = Self { link, region };
        let sges = node.sges()?;
        for _ in 0..args.messages {
            let wr = RecvWr { wr_id: 1, sges: &sges };
            node.link.qp.post_recv(&[wr]).map_err(|(_, e)| e)?;
        }
        Ok(node)
    }

    fn sges(&self) -> Result<[Sge; 1], Error> {
        Ok([Sge {
            addr: self.region.addr(),
            length: u32::try_from(self.region.len())?,
            lkey: self.region.lkey(),
        }])
    }

    fn send(&self, args: &Args) -> Result<(), Error> {
        let sges = self.sges()?;
        let wr = SendWr {
            wr_id: 2,
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(&sges),
        };
        for _ in 0..args.messages {
            self.link.qp.post_send(&[wr]).map_err(|(_, e)| e)?;
        }
        Ok(())
    }

    fn complete(&self, args: &Args, sends: bool) -> Result<(), Error> {
        let cq = if sends { &self.link.send_cq } else { &self.link.recv_cq };
        for _ in 0..args.messages {
            let wc = Link::expect_ok(cq, if sends { "send" } else { "receive" })?;
            if !sends && wc.byte_len as usize != args.size {
                return Err(format!("received {} bytes", wc.byte_len).into());
            }
        }
        Ok(())
    }
}

/// Waits until all connections stand; returns them with their nodes.
fn establish(provider: &Device, local: IpAddr, channel: &EventChannel, args: &Args) -> Result<Connected, Error> {
    let params = || ConnParams {
        responder_resources: 1,
        initiator_depth: 1,
        ..ConnParams::default()
    };
    let mut waiting: HashMap<u64, (Id, Node)> = HashMap::new();
    let mut up = Vec::new();
    let mut _listener = None;
    let connect = || {
        let node = Node::new(provider, args)?;
        let far = SocketAddr::new(args.connect.unwrap_or(local), args.port);
        let id = provider.connect(channel, Some(local), far, &node.link.qp, params())?;
        Ok::<_, Error>((id.handle(), (id, node)))
    };
    if args.connect.is_some() {
        for _ in 0..args.connections {
            waiting.extend([connect()?]);
        }
    } else {
        _listener = Some(provider.listen(channel, SocketAddr::new(local, args.port), 64)?);
        println!("ucmatose: waiting");
    }
    let until = Instant::now() + Duration::from_secs(60);
    while up.len() < args.connections {
        let event = channel.wait(Some(Duration::from_secs(90)))?;
        let CmEvent { id, kind, .. } = event.ok_or("no connection event within 90 s")?;
        match kind {
            CmEventKind::Request { .. } => {
                let node = Node::new(provider, args)?;
                id.accept(&node.link.qp, params())?;
                waiting.insert(id.handle(), (id, node));
            }
            CmEventKind::Established { .. } => {
                let entry = waiting.remove(&id.handle());
                up.push(entry.ok_or("a connection stands that nobody asked for")?);
            }
            // The server is not that far yet.
            CmEventKind::Rejected { reason, .. }
                if reason == RejectReason::INVALID_SERVICE_ID && Instant::now() < until =>
            {
                waiting.remove(&id.handle());
                std::thread::sleep(Duration::from_millis(300));
                waiting.extend([connect()?]);
            }
            other => return Err(format!("not connected: {other:?}").into()),
        }
    }
    Ok(up)
}

/// Waits until every connection is over.
fn disconnected(channel: &EventChannel, ids: &[(Id, Node)]) -> Result<(), Error> {
    let mut left: HashSet<u64> = ids.iter().map(|(id, _)| id.handle()).collect();
    while !left.is_empty() {
        let event = channel
            .wait(Some(Duration::from_secs(90)))?
            .ok_or("no disconnect within 90 s")?;
        if matches!(event.kind, CmEventKind::Disconnected { .. }) {
            event.id.disconnect()?;
            left.remove(&event.id.handle());
        }
    }
    Ok(())
}

/// Runs one side.
pub(crate) fn run(provider: &Device, local: IpAddr, args: &Args) -> Result<(), Error> {
    let channel = provider.create_cm_channel()?;
    let nodes = establish(provider, local, &channel, args)?;
    // The server sends first, the client answers; the server disconnects.
    let server = args.connect.is_none();
    if server {
        nodes.iter().try_for_each(|(_, n)| n.send(args))?;
        nodes.iter().try_for_each(|(_, n)| n.complete(args, true))?;
        nodes.iter().try_for_each(|(_, n)| n.complete(args, false))?;
        nodes.iter().try_for_each(|(id, _)| id.disconnect())?;
    } else {
        nodes.iter().try_for_each(|(_, n)| n.complete(args, false))?;
        nodes.iter().try_for_each(|(_, n)| n.send(args))?;
        nodes.iter().try_for_each(|(_, n)| n.complete(args, true))?;
    }
    disconnected(&channel, &nodes)?;
    println!(
        "ucmatose: {} connections, {} messages of {} bytes each way: passed",
        nodes.len(),
        args.messages,
        args.size
    );
    // The peer may have to ask for the last acknowledgement again.
    std::thread::sleep(Duration::from_secs(1));
    Ok(())
}
