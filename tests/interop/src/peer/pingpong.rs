//! The other half of `ibv_rc_pingpong`: its TCP exchange, then SENDs back and forth.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use roce::Device;
use roce_verbs::{
    AccessFlags, Completion, Mtu, Payload, Psn, QpCaps, Qpn, RecvWr, SendFlags, SendOp, SendWr, Sge, WcStatus,
};

use crate::{
    Error,
    link::{Far, Link, Wire, addr_gid, gid_addr},
};

/// `sizeof "0000:000000:000000:00000000000000000000000000000000"`.
const MSG_LEN: usize = 52;
const RECV_DEPTH: u32 = 500;

/// Arguments, with the defaults of `ibv_rc_pingpong`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Connect to the server on this host instead of waiting for a client.
    #[arg(long)]
    connect: Option<IpAddr>,
    /// TCP port of the exchange.
    #[arg(long, default_value_t = 18515)]
    port: u16,
    /// Bytes of a message.
    #[arg(long, default_value_t = 4096)]
    size: usize,
    /// Messages each way.
    #[arg(long, default_value_t = 1000)]
    iters: u32,
    /// Path MTU in bytes.
    #[arg(long, default_value_t = 1024)]
    mtu: usize,
    /// Packets are lost: ibv_rc_pingpong ends with its last message, and nobody acknowledges our last one again.
    #[arg(long)]
    lossy: bool,
    /// First PSN that we send.
    #[arg(long, default_value_t = 0x00ff_fff0)]
    psn: u32,
}

fn emit(me: Far) -> [u8; MSG_LEN] {
    let gid: String = addr_gid(me.addr).octets().iter().map(|b| format!("{b:02x}")).collect();
    let text = format!("{:04x}:{:06x}:{:06x}:{gid}", 0, me.qpn.value(), me.psn.value());
    let mut msg = [0; MSG_LEN];
    msg[..text.len()].copy_from_slice(text.as_bytes());
    msg
}

fn parse(msg: &[u8; MSG_LEN]) -> Result<Far, Error> {
    let text = std::str::from_utf8(msg)?.trim_end_matches('\0');
    let parts: Vec<&str> = text.split(':').collect();
    let [_lid, qpn, psn, gid] = parts[..] else {
        return Err(format!("peer sent {text:?}").into());
    };
    Ok(Far {
        qpn: Qpn::new(u32::from_str_radix(qpn, 16)?),
        psn: Psn::new(u32::from_str_radix(psn, 16)?),
        addr: gid_addr(Ipv6Addr::from(u128::from_str_radix(gid, 16)?)),
    })
}

fn tcp_connect(addr: SocketAddr) -> Result<TcpStream, Error> {
    let until = Instant::now() + Duration::from_secs(40);
    loop {
        match TcpStream::connect_timeout(&addr, Duration::from_secs(2)) {
            Ok(stream) => return Ok(stream),
            Err(e) if Instant::now() > until => return Err(format!("TCP to {addr}: {e}").into()),
            Err(_) => std::thread::sleep(Duration::from_millis(300)),
        }
    }
}

/// Runs one side.
pub(crate) fn run(provider: &Device, local: IpAddr, args: &Args) -> Result<(), Error> {
    let mtu = Mtu::from_bytes(args.mtu).ok_or("no such path MTU")?;
    let caps = QpCaps {
        max_send_wr: 8,
        max_recv_wr: RECV_DEPTH,
        ..QpCaps::default()
    };
    let link = Link::new(provider, caps)?;
    let region = provider.alloc_mr(&link.pd, args.size.max(1), AccessFlags::LOCAL_WRITE)?;
    region.write(0, &vec![0x7b; args.size])?;
    let me = Far {
        qpn: link.qp.qpn(),
        psn: Psn::new(args.psn),
        addr: local,
    };
    let sge = [Sge {
        addr: region.addr(),
        length: u32::try_from(args.size)?,
        lkey: region.lkey(),
    }];
    for _ in 0..RECV_DEPTH {
        link.qp
            .post_recv(&[RecvWr { wr_id: 1, sges: &sge }])
            .map_err(|(_, e)| e)?;
    }
    let wire = Wire {
        mtu,
        timeout: 18,
        retry_cnt: 7,
        rnr_retry: 7,
        rd_atomic: 1,
    };

    let mut msg = [0; MSG_LEN];
    let mut done = [0; 5];
    if let Some(host) = args.connect {
        let mut tcp = tcp_connect(SocketAddr::new(host, args.port))?;
        tcp.write_all(&emit(me))?;
        tcp.read_exact(&mut msg)?;
        link.bring_up(local, me.psn, parse(&msg)?, wire)?;
        tcp.write_all(b"done\0")?;
    } else {
        let listener = TcpListener::bind((local, args.port))?;
        println!("pingpong: waiting");
        let (mut tcp, _) = listener.accept()?;
        tcp.read_exact(&mut msg)?;
        link.bring_up(local, me.psn, parse(&msg)?, wire)?;
        tcp.write_all(&emit(me))?;
        tcp.read_exact(&mut done)?;
    }
    let t0 = Instant::now();
    exchange(&link, &sge, args)?;
    let us = t0.elapsed().as_secs_f64() * 1e6 / f64::from(args.iters);
    let mut got = vec![0; args.size];
    region.read(0, &mut got)?;
    println!(
        "pingpong: {} iterations of {} bytes each way, {us:.1} us each: passed",
        args.iters, args.size
    );
    Ok(())
}

fn exchange(link: &Link, sge: &[Sge], args: &Args) -> Result<(), Error> {
    let send = SendWr {
        wr_id: 2,
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        payload: Payload::Sges(sge),
    };
    let (mut sent, mut received, mut posted) = (0u32, 0u32, RECV_DEPTH);
    let mut in_flight = false;
    if args.connect.is_some() {
        link.qp.post_send(&[send]).map_err(|(_, e)| e)?;
        in_flight = true;
    }
    let mut wcs: Vec<Completion> = Vec::new();
    let mut owed = 0;
    let until = Instant::now() + Duration::from_secs(120);
    while sent < args.iters || received < args.iters {
        wcs.clear();
        link.send_cq.poll(&mut wcs, 8)?;
        link.recv_cq.poll(&mut wcs, 8)?;
        for wc in &wcs {
            let last = sent + 1 == args.iters && received == args.iters;
            if args.lossy && last && wc.wr_id == 2 && wc.status == WcStatus::RetryExceeded {
                println!("pingpong: the acknowledgement of the last message did not come");
                return Ok(());
            }
            // Of the completion that says why the queue pair is in error, the other queue may not have had any yet.
            if wc.status == WcStatus::FlushError && wc.wr_id != 2 {
                continue;
            }
            if !wc.is_ok() {
                return Err(format!("completion of {}: {:?}", wc.wr_id, wc.status).into());
            }
            if wc.wr_id == 2 {
                sent += 1;
                in_flight = false;
                continue;
            }
            if wc.byte_len as usize != args.size {
                return Err(format!("received {} bytes", wc.byte_len).into());
            }
            received += 1;
            owed += 1;
            posted -= 1;
            if posted < RECV_DEPTH / 2 {
                link.qp
                    .post_recv(&[RecvWr { wr_id: 1, sges: sge }])
                    .map_err(|(_, e)| e)?;
                posted += 1;
            }
        }
        let posted_sends = sent + u32::from(in_flight);
        if owed > 0 && !in_flight && posted_sends < args.iters {
            owed -= 1;
            link.qp.post_send(&[send]).map_err(|(_, e)| e)?;
            in_flight = true;
        }
        if Instant::now() > until {
            return Err(format!("stuck after {sent} sent, {received} received").into());
        }
    }
    // The peer may still wait for our acknowledgement of its last message.
    std::thread::sleep(Duration::from_millis(300));
    Ok(())
}
