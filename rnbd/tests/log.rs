//! What a client can make the server write into its log.

use std::{
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Instant,
};

use rnbd::{
    backend::{ExportSpec, Exports},
    client::Client,
    proto::AccessMode,
    server::{Server, ServerOptions},
};
use roce::{Device, DeviceConfig};
use rtrs::{
    addr::PathAddr,
    client::{OpenArgs, Session},
    server::ServerConfig,
};
use tracing::{
    Event, Metadata, Subscriber,
    span::{Attributes, Id, Record},
};

/// Counts the lines of the server.
struct Lines;

static LINES: AtomicU64 = AtomicU64::new(0);

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("rnbd::server") && *metadata.level() <= tracing::Level::INFO
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        LINES.fetch_add(1, Relaxed);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

fn device(addr: IpAddr) -> Device {
    Device::open(DeviceConfig::new(addr)).unwrap()
}

/// A throttle of each session would let a line of each kind through per session.
#[test]
fn clients_do_not_fill_the_log() {
    const SESSIONS: u64 = 12;
    const OPENS: u64 = 50;
    tracing::subscriber::set_global_default(Lines).unwrap();
    let began = Instant::now();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, [0; 4096]).unwrap();
    let spec = ExportSpec {
        name: "disk".into(),
        path,
        ..ExportSpec::default()
    };
    let exports = Exports::new([spec], None).unwrap();
    let addr: IpAddr = ferroce_loopback::address().into();
    let config = ServerConfig {
        addr,
        queue_depth: 16,
        ..ServerConfig::default()
    };
    let server = Server::start(&device(addr), config, ServerOptions::new(exports)).unwrap();
    let src: IpAddr = ferroce_loopback::address().into();
    let ours = device(src);
    for n in 0..SESSIONS {
        let to = PathAddr {
            src: Some(src),
            dst: SocketAddr::new(addr, 1234),
        };
        let session = Session::open(&ours, OpenArgs::new(format!("s{n}"), to)).unwrap();
        let client = Client::new(session.clone()).unwrap();
        for _ in 0..OPENS {
            client.map("none", AccessMode::ReadOnly).unwrap_err();
            client.map("disk", AccessMode::ReadOnly).unwrap().unmap().unwrap();
        }
        session.close();
    }
    assert_eq!(server.counters().refused, SESSIONS * OPENS);
    server.shutdown();
    // Sessions, devices, refused opens: a line of each per second.
    let bound = 3 * (began.elapsed().as_secs() + 2);
    let lines = LINES.load(Relaxed);
    assert!((1..=bound).contains(&lines), "{lines} lines, {bound} allowed");
    assert!(bound < SESSIONS * OPENS, "this machine is too slow to tell");
}
