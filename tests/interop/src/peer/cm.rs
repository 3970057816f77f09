//! Our own `cm-agent`: one connection of the connection manager, event by event (see `lab/cm-agent.c`).

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use roce::{CmEvent, CmEventKind, ConnParams, Device};
use roce_verbs::QpCaps;

use crate::{Error, link::Link};

/// Which side.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum, Debug)]
pub(crate) enum Role {
    /// Waits for one request and accepts it.
    Accept,
    /// Waits for one request and rejects it.
    Reject,
    /// Connects.
    Connect,
}

/// Arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Which side.
    #[arg(value_enum)]
    role: Role,
    /// The peer, for `connect`.
    #[arg(long)]
    to: Option<IpAddr>,
    /// RDMA_CM port.
    #[arg(long, default_value_t = 7200)]
    port: u16,
    /// Private data to send, in hexadecimal.
    #[arg(long, default_value = "")]
    data: String,
    /// Disconnect after so many milliseconds; without it the peer does that.
    #[arg(long)]
    hold: Option<u64>,
}

fn unhex(text: &str) -> Result<Vec<u8>, Error> {
    let digits = text.as_bytes();
    let byte = |pair: &[u8]| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?);
    digits.chunks(2).map(byte).collect()
}

fn print(kind: &CmEventKind) {
    let (name, status, data, depth): (_, i32, &[u8], _) = match kind {
        CmEventKind::Request { private_data, path, .. } => {
            let depth = format!(" depth {} {}", path.responder_resources, path.initiator_depth);
            ("CONNECT_REQUEST", 0, private_data, depth)
        }
        CmEventKind::Established { private_data, .. } => ("ESTABLISHED", 0, private_data, String::new()),
        CmEventKind::Rejected {
            reason, private_data, ..
        } => ("REJECTED", i32::from(reason.0), private_data, String::new()),
        CmEventKind::Unreachable { why, .. } => ("UNREACHABLE", -why.errno(), &[], String::new()),
        CmEventKind::Failed { text, .. } => {
            println!("{text}");
            ("CONNECT_ERROR", -1, &[], String::new())
        }
        CmEventKind::Disconnected { .. } => ("DISCONNECTED", 0, &[], String::new()),
        CmEventKind::TimewaitExit { .. } => ("TIMEWAIT_EXIT", 0, &[], String::new()),
        other => return println!("unexpected: {other:?}"),
    };
    let end = data.iter().rposition(|b| *b != 0).map_or(0, |at| at + 1);
    let hex: String = data[..end].iter().map(|b| format!("{b:02x}")).collect();
    println!("RDMA_CM_EVENT_{name} status {status}{depth} data {} {hex}", data.len());
}

/// Runs one connection to its end.
pub(crate) fn run(provider: &Device, local: IpAddr, args: &Args) -> Result<(), Error> {
    let channel = provider.create_cm_channel()?;
    let data = unhex(&args.data)?;
    let params = ConnParams {
        private_data: data.clone(),
        responder_resources: 3,
        initiator_depth: 5,
        ..ConnParams::default()
    };
    let caps = QpCaps {
        max_send_wr: 2,
        max_recv_wr: 2,
        ..QpCaps::default()
    };
    let link = Link::unconnected(provider, caps)?;
    let mut current;
    if args.role == Role::Connect {
        let far = SocketAddr::new(args.to.ok_or("--to is missing")?, args.port);
        current = provider.connect(&channel, Some(local), far, &link.qp, params.clone())?;
    } else {
        current = provider.listen(&channel, SocketAddr::new(local, args.port), 4)?;
        println!("listening");
    }
    let listener = current.clone();
    let (mut established, mut hold) = (false, args.hold);
    loop {
        let timeout = hold
            .filter(|_| established)
            .map_or(Duration::from_secs(90), Duration::from_millis);
        let Some(CmEvent { id, kind, .. }) = channel.wait(Some(timeout))? else {
            if established && hold.take().is_some() {
                current.disconnect()?;
                continue;
            }
            return Err("no event".into());
        };
        print(&kind);
        match kind {
            CmEventKind::Request { .. } if args.role == Role::Reject => {
                id.reject(&data)?;
                break;
            }
            CmEventKind::Request { .. } => {
                id.accept(&link.qp, params.clone())?;
                current = id;
            }
            CmEventKind::Established { .. } => established = true,
            CmEventKind::Disconnected { .. } => {
                current.disconnect()?;
                break;
            }
            CmEventKind::Rejected { .. } | CmEventKind::Unreachable { .. } | CmEventKind::Failed { .. } => break,
            _ => {}
        }
    }
    // The last message may be lost: the peer would ask again.
    std::thread::sleep(Duration::from_secs(1));
    drop(listener);
    println!("over");
    Ok(())
}
