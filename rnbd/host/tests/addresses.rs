//! Addresses of ours that a mapping gets while it runs. Descriptors and threads are counted: the tests are in a program of their own, and
//! one after the other.

mod common;

use std::{
    fs,
    net::UdpSocket,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
};

use common::{Client, Lab, Mapped, eventually};
use rnbd::Errno;
use rnbd_host::control::{MapAnswer, MapListing, MapRequest, Refused, map::MapControl};
use rtrs::{addr::PathAddr, client::state::PathState};

const BLOCK: usize = 64 << 10;
const BLOCKS: usize = 64;

static ALONE: Mutex<()> = Mutex::new(());

/// Entries of a folder of this process's own.
fn own(what: &str) -> usize {
    fs::read_dir(format!("/proc/self/{what}")).unwrap().count()
}

fn listing(control: &MapControl) -> MapListing {
    control.list().unwrap()
}

fn ask(control: &MapControl, request: MapRequest) -> Result<(), Refused> {
    control
        .ask(request)
        .map(|answer| assert!(matches!(answer, MapAnswer::Done)))
}

/// NBD clients that write block after block, each its own blocks, and compare what they read.
struct Load {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    clients: Vec<JoinHandle<()>>,
}

fn stamp(n: usize, round: u64) -> Vec<u8> {
    let word = (n as u64) << 32 | round;
    word.to_le_bytes().repeat(BLOCK / 8)
}

impl Load {
    fn on(map: &Mapped, clients: usize) -> Self {
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let client = |index: usize| {
            let (mut client, stop, rounds) = (map.client(), stop.clone(), rounds.clone());
            thread::spawn(move || write_on(&mut client, index, clients, &stop, &rounds))
        };
        let clients = (0..clients).map(client).collect();
        Self { stop, rounds, clients }
    }

    /// Waits until so many more blocks are written.
    fn goes_on(&self) {
        let before = self.rounds.load(Relaxed);
        eventually("requests go on", || self.rounds.load(Relaxed) >= before + 40);
    }

    fn end(self) {
        self.stop.store(true, Relaxed);
        for client in self.clients {
            client.join().unwrap();
        }
    }
}

fn write_on(client: &mut Client, index: usize, clients: usize, stop: &AtomicBool, rounds: &AtomicU64) {
    for round in 1.. {
        for n in (index..BLOCKS).step_by(clients) {
            let at = (n * BLOCK) as u64;
            assert_eq!(client.write(at, &stamp(n, round), 0), 0, "block {n}");
            rounds.fetch_add(1, Relaxed);
            let back = client.read(at, BLOCK as u32).unwrap();
            assert!(back == stamp(n, round), "block {n} in round {round}");
        }
        if stop.load(Relaxed) {
            return;
        }
    }
}

#[test]
fn a_session_moves_from_address_to_address_under_load() {
    let _alone = ALONE.lock();
    let lab = Lab::new();
    let config = lab.config("s", "disk");
    let first = config.session.paths[0];
    let map = lab.try_map(config).unwrap();
    let control = map.mapping.control();
    let load = Load::on(&map, 2);
    load.goes_on();
    let second = lab.path();
    let mut most = None;
    for (come, go) in [(second, first), (first, second), (second, first)] {
        ask(&control, MapRequest::AddPath { path: come }).unwrap();
        load.goes_on();
        let paths = listing(&control).paths;
        assert!(paths.iter().all(|path| path.state == PathState::Connected), "{paths:?}");
        assert_eq!(paths.len(), 2);
        ask(&control, MapRequest::RemovePath { path: go }).unwrap();
        load.goes_on();
        let paths = listing(&control).paths;
        assert_eq!(paths.iter().map(|path| path.addr).collect::<Vec<_>>(), [come]);
        // The address stays open for the next path from there, and nothing comes on top. The thread that has opened it may be about to end.
        let (files, threads) = *most.get_or_insert_with(|| (own("fd"), own("task")));
        eventually("nothing more is open", || own("fd") <= files && own("task") <= threads);
    }
    load.end();
    let device = &listing(&control).devices[0];
    assert_eq!((device.counters.failed, device.waiting), (0, 0));
    map.end().unwrap();
    let bytes = fs::read(lab.image("disk")).unwrap();
    for (n, block) in bytes.chunks(BLOCK).take(BLOCKS).enumerate() {
        let word = u64::from_le_bytes(*block.first_chunk().unwrap());
        assert_eq!((word >> 32) as usize, n);
        assert!(block == stamp(n, word & 0xffff_ffff), "block {n}");
    }
}

#[test]
fn an_address_that_can_not_be_opened_leaves_nothing() {
    let _alone = ALONE.lock();
    let lab = Lab::new();
    let map = lab.try_map(lab.config("s", "disk")).unwrap();
    let control = map.mapping.control();
    let before = (own("fd"), own("task"));
    let elsewhere = PathAddr {
        src: Some([192, 0, 2, 1].into()),
        ..lab.path()
    };
    let refused = ask(&control, MapRequest::AddPath { path: elsewhere }).unwrap_err();
    assert_eq!(refused.errno, Errno::EADDRNOTAVAIL, "{refused}");
    assert!(refused.text.contains("192.0.2.1"), "{refused}");
    let taken = lab.path();
    let holder = UdpSocket::bind((taken.src.unwrap(), 4791)).unwrap();
    let refused = ask(&control, MapRequest::AddPath { path: taken }).unwrap_err();
    assert_eq!(refused.errno, Errno::EADDRINUSE, "{refused}");
    assert!(refused.text.contains("4791"), "{refused}");
    drop(holder);
    // A thread that has opened them may be about to end.
    eventually("nothing is left", || own("fd") <= before.0 && own("task") <= before.1);
    assert_eq!(listing(&control).paths.len(), 1);
    ask(&control, MapRequest::AddPath { path: taken }).unwrap();
    assert_eq!(listing(&control).paths.len(), 2);
    map.end().unwrap();
    let refused = ask(&control, MapRequest::AddPath { path: lab.path() }).unwrap_err();
    assert_eq!(refused.errno, Errno::ENODEV, "{refused}");
}

#[test]
fn who_asks_for_an_address_that_is_being_opened_waits_for_it() {
    let _alone = ALONE.lock();
    let lab = Lab::new();
    let map = lab.try_map(lab.config("s", "disk")).unwrap();
    let control = map.mapping.control();
    // To one port of the server, and to others where nobody listens.
    let path = lab.path();
    let ports = [1234, 9, 10, 11];
    let asked = ports.map(|port| {
        let (control, mut path) = (control.clone(), path);
        path.dst.set_port(port);
        thread::spawn(move || ask(&control, MapRequest::AddPath { path }))
    });
    let [done, refused @ ..] = asked.map(|asked| asked.join().unwrap());
    done.unwrap();
    for refused in refused {
        assert_eq!(refused.unwrap_err().errno, Errno::ECONNRESET);
    }
    assert_eq!(listing(&control).paths.len(), 2);
    map.end().unwrap();
}
