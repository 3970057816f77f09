//! Throughput and latency of RTRS over the software device, client and server in one process on loopback:
//! `cargo run --release -p rtrs --example throughput -- [SIZE [DEPTH [CONNECTIONS [always_invalidate on|off]]]]`.
//! The server answers at once, so that only the transport is measured.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use roce::{Device, DeviceConfig};
use rtrs::{
    Direction,
    addr::PathAddr,
    client::{ConType, OpenArgs, Session},
    server::{Request, Server, ServerConfig, ServerOps, SessionHandle},
};

struct Echo;

impl ServerOps<Device> for Echo {
    fn session_opened(&self, _: &SessionHandle) {}
    fn rdma_request(&self, request: Request<Device>) {
        request.complete(0);
    }
    fn session_closed(&self, _: &SessionHandle) {}
}

fn measure(session: &Session<Device>, direction: Direction, size: usize, depth: usize, time: Duration) {
    let (tx, rx) = mpsc::channel();
    let send = |data, i: usize| {
        let permit = session.permit().expect("the session is up");
        let (tx, start) = (tx.clone(), Instant::now());
        session.request(
            permit,
            ConType::Io(i),
            direction,
            &[0; 24],
            Some(data),
            move |outcome| {
                let _ = tx.send((outcome, start.elapsed(), i));
            },
        );
    };
    for i in 0..depth {
        send(session.alloc_buffer(size).expect("a buffer"), i);
    }
    let start = Instant::now();
    let (mut latencies, mut busy) = (Vec::new(), depth);
    while busy > 0 {
        let (outcome, latency, i) = rx.recv().expect("every request ends");
        outcome.result.expect("success");
        latencies.push(latency);
        match outcome.data {
            Some(data) if start.elapsed() < time => send(data, i),
            _ => busy -= 1,
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    latencies.sort_unstable();
    let at = |p: usize| latencies[(latencies.len() * p / 100).min(latencies.len() - 1)];
    println!(
        "{direction:?} {size} bytes, {depth} in flight: {:.3} GB/s, {:.0} requests/s, median {:?}, 99 % {:?}",
        latencies.len() as f64 * size as f64 / seconds / 1e9,
        latencies.len() as f64 / seconds,
        at(50),
        at(99),
    );
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, or: usize| args.get(i).map_or(or, |s| s.parse().expect("a number"));
    let (size, depth, connections) = (number(0, 124 << 10), number(1, 32), number(2, 2));
    let always_invalidate = args.get(3).is_none_or(|s| s != "off");
    let ip = |n| IpAddr::V4(Ipv4Addr::new(127, 0, 9, n));
    let device = |n| Device::open(DeviceConfig::new(ip(n))).expect("a device on loopback");
    let (server_dev, client_dev) = (device(1), device(2));
    let config = ServerConfig {
        addr: ip(1),
        always_invalidate,
        ..ServerConfig::default()
    };
    let server = Server::listen(&server_dev, config, Arc::new(Echo)).expect("a server");
    let path = PathAddr {
        src: Some(ip(2)),
        dst: SocketAddr::new(ip(1), 1234),
    };
    for invalidate_reads in [true, false] {
        let open = OpenArgs {
            connections: connections as u16,
            invalidate_reads,
            ..OpenArgs::new("throughput", path)
        };
        let session = Session::open(&client_dev, open).expect("a session");
        println!("always_invalidate {always_invalidate}, invalidate_reads {invalidate_reads}");
        for direction in [Direction::Write, Direction::Read] {
            measure(&session, direction, size, depth, Duration::from_secs(2));
        }
        session.close();
        while !server.sessions().is_empty() {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    println!("server {:?}", server_dev.stats());
}
