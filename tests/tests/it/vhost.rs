//! A device as the disk of a virtual machine, whose front end and driver are the test's: everything that a guest's driver may do, and
//! what it may not.

use std::{
    fs::{self, File, OpenOptions},
    net::Ipv4Addr,
    os::{fd::AsRawFd as _, unix::fs::FileExt as _},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use ferroce_tests::{
    device::{image, map_args, serve_args},
    eventually, fresh_address,
    nbd::Client,
    pattern,
    process::{Running, TIMEOUT, run},
    vhost::{BUFFERS, FAR, Guest, HIGH, QUEUE, REGION, Segment, WRITE, kind},
};
use nix::sys::signal::Signal;
use serde_json::json;
use vhost::{
    VhostBackend as _,
    vhost_user::{VhostUserFrontend as _, message::VhostUserInflight},
};

const SECTOR: usize = 512;
const SIZE: usize = 4 << 20;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPPORTED: u8 = 2;
const EBUSY: i32 = 16;

/// Long enough for what must not happen to happen.
const A_MOMENT: Duration = Duration::from_millis(300);

/// A server of an image, and a mapping of it with a socket for a front end and one for NBD clients.
struct Lab {
    dir: tempfile::TempDir,
    server: Ipv4Addr,
    serve: Running,
    map: Running,
    more: Vec<&'static str>,
}

impl Lab {
    fn new(more: &[&'static str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        image(dir.path(), "disk", &pattern(1, SIZE));
        let server = fresh_address();
        let serve = start_server(server, dir.path());
        let map = start_map(server, dir.path(), more);
        Self {
            dir,
            server,
            serve,
            map,
            more: more.to_vec(),
        }
    }

    /// One whose requests wait while the server is away.
    fn patient() -> Self {
        Self::new(&["--on-loss", "queue", "--reconnect-delay", "0.2", "--heartbeat", "0.5"])
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("vhost")
    }

    fn nbd(&self) -> Client {
        Client::connect_to(&self.dir.path().join("nbd"), "", TIMEOUT).unwrap()
    }

    /// A guest with a ring.
    fn guest(&self) -> Guest {
        let mut guest = Guest::connect(&self.socket(), 0);
        assert_eq!(guest.start(), 0);
        guest
    }

    fn image(&self) -> Vec<u8> {
        fs::read(self.dir.path().join("disk")).unwrap()
    }

    /// kill -9 of the server, which the mapping has noticed.
    fn lose_server(&mut self) {
        self.serve.signal(Signal::SIGKILL);
        self.serve.wait();
        self.map.event("session_lost");
    }

    /// Until so many requests wait for the server.
    fn until_it_waits(&mut self, requests: u64) {
        eventually("the requests wait for the server", || {
            self.map.ask(json!({ "do": "list" }))["devices"][0]["waiting"] == requests
        });
    }

    fn restart_server(&mut self) {
        self.serve = start_server(self.server, self.dir.path());
    }

    fn end(self) {
        let map = self.map.stop();
        assert_eq!(map.code, Some(0), "{}", map.stderr);
        assert_eq!(self.serve.stop().code, Some(0));
    }
}

fn start_server(server: Ipv4Addr, dir: &Path) -> Running {
    let export = format!("disk={}", dir.join("disk").display());
    let mut serve = Running::start(&serve_args(server, &[export], &[]));
    serve.event("listening");
    serve
}

fn start_map(server: Ipv4Addr, dir: &Path, more: &[&str]) -> Running {
    let socket = dir.join("vhost").display().to_string();
    let mut all = vec!["--vhost-user", &socket];
    all.extend_from_slice(more);
    let args = map_args(fresh_address(), &server.to_string(), &dir.join("nbd"), &all);
    let mut map = Running::steered(&args);
    let mapped = map.event("mapped");
    assert_eq!(mapped["vhost_user"][0], socket);
    map
}

/// Segments of these lengths, with a gap behind each.
fn segments(at: u64, lens: &[u32]) -> Vec<Segment> {
    let mut at = at;
    let place = |len: &u32| {
        let segment = (at, *len);
        at += u64::from(*len) + 64;
        segment
    };
    lens.iter().map(place).collect()
}

#[test]
fn a_guest_reads_and_writes_whatever_its_buffers_look_like() {
    let lab = Lab::new(&[]);
    let mut guest = lab.guest();
    let before = lab.image();
    assert_eq!(guest.capacity(), (SIZE / SECTOR) as u64);
    let pages = vec![4096; 64];
    let sectors = vec![512; 126];
    for (name, segments) in [
        ("one piece", vec![(BUFFERS, 4096)]),
        ("a megabyte in one piece", vec![(BUFFERS, 1 << 20)]),
        ("scattered pages", segments(BUFFERS, &pages)),
        ("as many segments as there may be", segments(BUFFERS, &sectors)),
        (
            "no sector in one piece",
            segments(BUFFERS + 3, &[100, 7, 405, 1, 511, 1024, 1000, 24]),
        ),
        ("in two regions", vec![(HIGH - 700, 4096), (FAR, 512), (BUFFERS, 512)]),
        ("two regions that touch", vec![(HIGH - 2048, 4096)]),
        ("to the end of all memory", vec![(FAR + REGION as u64 - 8192, 8192)]),
    ] {
        let len: usize = segments.iter().map(|(_, len)| *len as usize).sum();
        guest.put(BUFFERS, &vec![0; 2 << 20]);
        let read = guest.read(0, 8, &segments);
        assert!(read == before[8 * SECTOR..8 * SECTOR + len], "read: {name}");
        let bytes = pattern(len as u64, len);
        guest.write(0, 8, &segments, &bytes);
        assert!(
            guest.gather(&segments) == bytes,
            "a write leaves the guest's memory as it was: {name}"
        );
        assert!(lab.image()[8 * SECTOR..8 * SECTOR + len] == bytes, "written: {name}");
        assert!(guest.read(0, 8, &segments) == bytes, "read again: {name}");
        guest.write(0, 8, &segments, &before[8 * SECTOR..8 * SECTOR + len]);
        // The gaps between segments are nobody's.
        let gaps = segments
            .windows(2)
            .filter(|pair| pair[1].0 == pair[0].0 + u64::from(pair[0].1) + 64);
        for pair in gaps {
            assert_eq!(guest.get(pair[0].0 + u64::from(pair[0].1), 64), [0; 64], "{name}");
        }
    }
    assert!(lab.image() == before);
    lab.end();
}

#[test]
fn a_driver_with_old_habits_is_served_as_well() {
    const INDIRECT: u64 = 1 << 28;
    const EVENT_IDX: u64 = 1 << 29;
    const FLUSH: u64 = 1 << 9;
    const WRITEBACK: usize = 32;
    let lab = Lab::new(&[]);
    let mut guest = Guest::connect(&lab.socket(), INDIRECT | EVENT_IDX | FLUSH);
    let ring = guest.start();
    // Who can't flush has what is written forced to the disk.
    assert_eq!(guest.config(33)[WRITEBACK], 0);
    let bytes = pattern(2, 8192);
    guest.write(ring, 0, &[(BUFFERS, 8192)], &bytes);
    assert!(guest.read(ring, 0, &[(BUFFERS, 8192)]) == bytes);
    assert_eq!(
        guest.run(ring, kind::DISCARD, 0, &[], &[]).0,
        IOERR,
        "a discard of nothing"
    );
    drop(guest);
    // And who can may choose.
    let mut guest = lab.guest();
    assert_eq!(guest.config(33)[WRITEBACK], 1);
    for value in [0u8, 1] {
        let flags = vhost::vhost_user::message::VhostUserConfigFlags::WRITABLE;
        guest.front.set_config(WRITEBACK as u32, flags, &[value]).unwrap();
        assert_eq!(guest.config(33)[WRITEBACK], value);
        guest.write(0, 0, &[(BUFFERS, 8192)], &bytes);
    }
    lab.end();
}

/// A range of a discard or of zeroes.
fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

#[test]
fn a_guest_flushes_discards_zeroes_and_asks_for_the_name() {
    let lab = Lab::new(&[]);
    let mut guest = lab.guest();
    let before = lab.image();
    assert_eq!(guest.run(0, kind::FLUSH, 0, &[], &[]), (OK, 1));
    assert_eq!(guest.run(0, kind::ID, 0, &[], &[(BUFFERS, 20)]), (OK, 21));
    assert_eq!(guest.get(BUFFERS, 20), b"disk\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    let run_ranges = |guest: &mut Guest, kind, ranges: &[Vec<u8>]| {
        let bytes = ranges.concat();
        guest.put(BUFFERS, &bytes);
        guest.run(0, kind, 0, &[(BUFFERS, bytes.len() as u32)], &[]).0
    };
    assert_eq!(
        run_ranges(&mut guest, kind::ZEROES, &[range(8, 8, 0), range(100, 1, 1)]),
        OK
    );
    let sixteen: Vec<_> = (0..16).map(|n| range(1024 + 16 * n, 8, 0)).collect();
    assert_eq!(run_ranges(&mut guest, kind::DISCARD, &sixteen), OK);
    let after = lab.image();
    let zero = |sector: usize, count: usize| {
        after[sector * SECTOR..(sector + count) * SECTOR]
            .iter()
            .all(|b| *b == 0)
    };
    assert!(zero(8, 8) && zero(100, 1) && zero(1024, 8) && zero(1024 + 240, 8));
    assert!(
        after[..8 * SECTOR] == before[..8 * SECTOR]
            && after[16 * SECTOR..100 * SECTOR] == before[16 * SECTOR..100 * SECTOR]
    );
    // What can't be done is told, and changes nothing.
    let end = (SIZE / SECTOR) as u64;
    for (kind, ranges, status) in [
        (kind::ZEROES, vec![range(end, 1, 0)], IOERR),
        (kind::ZEROES, vec![range(u64::MAX, 1, 0)], IOERR),
        (kind::ZEROES, vec![range(0, 1, 2)], UNSUPPORTED),
        (kind::DISCARD, vec![range(0, 8, 1)], UNSUPPORTED),
        (kind::DISCARD, (0..17).map(|n| range(n * 8, 8, 0)).collect(), IOERR),
    ] {
        assert_eq!(run_ranges(&mut guest, kind, &ranges), status, "{kind} {ranges:?}");
    }
    for (sector, len) in [(end, 512), (end - 1, 1024), (u64::MAX, 512), (0, 100)] {
        assert_eq!(
            guest.run(0, kind::IN, sector, &[], &[(BUFFERS, len)]),
            (IOERR, 1),
            "{sector} {len}"
        );
        assert_eq!(
            guest.run(0, kind::OUT, sector, &[(BUFFERS, len)], &[]),
            (IOERR, 1),
            "{sector} {len}"
        );
    }
    for kind in [2, 3, 99] {
        assert_eq!(guest.run(0, kind, 0, &[], &[(BUFFERS, 512)]).0, UNSUPPORTED);
    }
    assert!(lab.image() == after);
    lab.end();
}

#[test]
fn a_device_that_is_read_only_is_a_disk_that_is() {
    const RO: u64 = 1 << 5;
    let lab = Lab::new(&["--ro"]);
    let mut guest = lab.guest();
    assert_ne!(guest.features & RO, 0);
    assert!(guest.read(0, 0, &[(BUFFERS, 4096)]) == pattern(1, SIZE)[..4096]);
    assert_eq!(guest.run(0, kind::OUT, 0, &[(BUFFERS, 4096)], &[]), (IOERR, 1));
    lab.end();
}

#[test]
fn nonsense_of_a_guest_is_answered_or_ends_its_ring_and_touches_nothing_else() {
    let lab = Lab::new(&[]);
    let mut guest = lab.guest();
    assert_eq!((guest.start(), guest.start()), (1, 2));
    let before = lab.image();
    guest.put(BUFFERS, &[7; 8192]);
    let outside = FAR + REGION as u64;
    for (name, output, input) in [
        ("outside", vec![(outside, 512)], vec![]),
        ("across the end", vec![(outside - 256, 512)], vec![]),
        ("in the hole", vec![(1 << 31, 512)], vec![]),
        ("beyond all addresses", vec![(u64::MAX - 255, 512)], vec![]),
        ("outside", vec![], vec![(outside, 512)]),
        ("half of it outside", vec![], vec![(BUFFERS, 512), (outside, 512)]),
        ("beyond all addresses", vec![], vec![(u64::MAX - 255, 512)]),
    ] {
        let what = if input.is_empty() { kind::OUT } else { kind::IN };
        assert_eq!(guest.run(0, what, 0, &output, &input), (IOERR, 1), "{name}");
    }
    assert_eq!(
        guest.get(BUFFERS, 8192),
        [7; 8192],
        "nothing is read of what can't be read whole"
    );
    // Chains without a place for a status are given back unanswered.
    for descriptors in [
        vec![(BUFFERS, 16, 0)],
        vec![(BUFFERS, 1, WRITE), (BUFFERS + 64, 16, 0)],
        vec![(BUFFERS, 16, 0), (outside, 1, WRITE)],
    ] {
        let head = guest.queue(0, &descriptors);
        guest.kick(0);
        let ended = guest.wait(0);
        assert_eq!((ended.head, ended.written), (head, 0), "{descriptors:?}");
    }
    // A header that is not there.
    let head = guest.queue(0, &[(outside, 16, 0), (BUFFERS, 513, WRITE)]);
    guest.kick(0);
    assert_eq!((guest.wait(0).head, guest.get(BUFFERS + 512, 1)), (head, vec![IOERR]));
    // A head that is none.
    guest.offer(1, QUEUE);
    guest.kick(1);
    guest.wait_broken(1);
    // More than the ring has.
    guest.set_available(2, QUEUE + 1);
    guest.kick(2);
    guest.wait_broken(2);
    let bytes = pattern(3, 4096);
    guest.write(0, 0, &[(BUFFERS, 4096)], &bytes);
    assert!(guest.read(0, 0, &[(BUFFERS, 4096)]) == bytes, "the other ring goes on");
    assert!(lab.image()[4096..] == before[4096..]);
    // A broken ring can begin again.
    guest.stop(1);
    let mut again = guest.reconnect(&lab.socket(), None);
    assert!(again.read(0, 0, &[(BUFFERS, 4096)]) == bytes);
    lab.end();
}

#[test]
fn memory_and_rings_are_taken_away_when_nothing_is_under_way() {
    let mut lab = Lab::patient();
    let mut guest = lab.guest();
    let bytes = pattern(4, 4096);
    for (n, what) in ["the memory", "a region", "the ring"].into_iter().enumerate() {
        let sector = 64 * n as u64;
        lab.lose_server();
        guest.put(BUFFERS, &bytes);
        let head = guest.submit(0, kind::OUT, sector, &[(BUFFERS, 4096)], &[]);
        guest.kick(0);
        lab.until_it_waits(1);
        let (mut front, regions) = (guest.front.clone(), guest.regions());
        let taking = thread::spawn(move || match what {
            "the memory" => front.set_mem_table(&regions).map(|_| 0).unwrap(),
            "a region" => front.remove_mem_region(&regions[2]).map(|()| 0).unwrap(),
            _ => front.get_vring_base(0).unwrap(),
        });
        thread::sleep(A_MOMENT);
        assert!(!taking.is_finished(), "{what} was taken away under a request");
        lab.restart_server();
        assert_eq!(guest.wait(0).head, head);
        let base = taking.join().unwrap();
        assert_eq!(guest.status(0, head), OK, "{what}");
        assert!(lab.image()[sector as usize * SECTOR..][..4096] == bytes, "{what}");
        match what {
            "a region" => {
                assert_eq!(guest.run(0, kind::IN, 0, &[], &[(FAR, 512)]), (IOERR, 1), "it is gone");
                let region = guest.regions()[2];
                guest.front.add_mem_region(&region).unwrap();
                assert!(guest.read(0, sector, &[(FAR, 4096)]) == bytes, "it is there again");
            }
            "the ring" => {
                guest.restart(0, base);
                assert!(guest.read(0, sector, &[(FAR, 4096)]) == bytes, "it goes on");
            }
            _ => assert!(guest.read(0, sector, &[(BUFFERS, 4096)]) == bytes),
        }
    }
    lab.end();
}

#[test]
fn rings_without_a_descriptor_are_polled() {
    let lab = Lab::new(&[]);
    let mut guest = lab.guest();
    assert_eq!(guest.start(), 1);
    let run = |guest: &mut Guest, kind, sector| {
        let buffer = [(BUFFERS, 4096)];
        let (output, input) = match kind {
            kind::OUT => (&buffer[..], &[][..]),
            _ => (&[][..], &buffer[..]),
        };
        let head = guest.submit(0, kind, sector, output, input);
        let ended = guest.wait(0);
        assert_eq!((ended.head, guest.status(0, head)), (head, OK));
    };
    guest.poll(0);
    for n in 0..20 {
        let bytes = pattern(n, 4096);
        guest.put(BUFFERS, &bytes);
        run(&mut guest, kind::OUT, 8 * n);
        guest.put(BUFFERS, &[0; 4096]);
        run(&mut guest, kind::IN, 8 * n);
        assert!(guest.get(BUFFERS, 4096) == bytes);
    }
    // One that has been idle for long, and many at once beside a ring with a descriptor.
    thread::sleep(A_MOMENT);
    run(&mut guest, kind::IN, 0);
    for n in 0..40 {
        guest.submit(0, kind::IN, 8 * n, &[], &[(BUFFERS, 4096)]);
    }
    assert!(guest.read(1, 0, &[(BUFFERS, 4096)]) == pattern(0, 4096));
    for _ in 0..40 {
        guest.wait(0);
    }
    // It gets a descriptor again.
    let base = guest.stop(0);
    guest.restart(0, base);
    assert!(guest.read(0, 0, &[(BUFFERS, 4096)]) == pattern(0, 4096));
    lab.end();
}

#[test]
fn one_front_end_at_a_time_and_the_next_when_it_has_left() {
    let mut lab = Lab::patient();
    let mut guest = lab.guest();
    // Another waits for its turn.
    let socket = lab.socket();
    let other = thread::spawn(move || {
        let mut guest = Guest::connect(&socket, 0);
        guest.start();
        guest.read(0, 0, &[(BUFFERS, 4096)])
    });
    thread::sleep(A_MOMENT);
    assert!(!other.is_finished());
    // It leaves with requests under way, which end first.
    lab.lose_server();
    let bytes = pattern(5, 4096);
    guest.put(BUFFERS, &bytes);
    for _ in 0..20 {
        guest.submit(0, kind::OUT, 0, &[(BUFFERS, 4096)], &[]);
    }
    guest.kick(0);
    lab.until_it_waits(20);
    drop(guest);
    thread::sleep(A_MOMENT);
    assert!(!other.is_finished());
    lab.restart_server();
    assert!(other.join().unwrap() == bytes);
    let mut client = lab.nbd();
    assert!(client.read(0, 4096).unwrap() == bytes);
    client.disconnect().unwrap();
    lab.end();
}

/// Memory for what is under way in one ring.
fn inflight(guest: &mut Guest) -> (VhostUserInflight, File) {
    let (what, file) = guest
        .front
        .get_inflight_fd(&VhostUserInflight::new(0, 0, 1, QUEUE))
        .unwrap();
    guest.front.set_inflight_fd(&what, file.as_raw_fd()).unwrap();
    (what, file)
}

#[test]
fn what_a_mapping_had_under_way_when_it_was_killed_the_next_one_does() {
    let mut lab = Lab::patient();
    let mut guest = Guest::connect(&lab.socket(), 0);
    let (what, file) = inflight(&mut guest);
    guest.start();
    guest.write(0, 0, &[(BUFFERS, 4096)], &pattern(6, 4096));
    lab.lose_server();
    let mut heads = Vec::new();
    for n in 0..5 {
        let at = BUFFERS + 8192 * n;
        guest.put(at, &pattern(10 + n, 4096));
        heads.push(guest.submit(0, kind::OUT, 16 * n, &[(at, 4096)], &[]));
    }
    guest.kick(0);
    let under_way = |head: u16| {
        let mut state = [0];
        file.read_exact_at(&mut state, 16 + 16 * u64::from(head)).unwrap();
        state == [1]
    };
    eventually("the requests are taken", || heads.iter().all(|head| under_way(*head)));
    // Something that has come after them.
    heads.push(guest.submit(0, kind::FLUSH, 0, &[], &[]));
    lab.map.signal(Signal::SIGKILL);
    lab.map.wait();
    lab.restart_server();
    lab.map = start_map(lab.server, lab.dir.path(), &lab.more);
    let mut guest = guest.reconnect(&lab.socket(), Some((&what, &file)));
    let mut ended: Vec<u16> = heads.iter().map(|_| guest.wait(0).head).collect();
    ended.sort_unstable();
    heads.sort_unstable();
    assert_eq!(ended, heads);
    let image = lab.image();
    for n in 0..5 {
        assert!(image[8192 * n as usize..][..4096] == pattern(10 + n, 4096), "{n}");
    }
    assert!(
        heads
            .iter()
            .all(|head| guest.status(0, *head) == OK && !under_way(*head))
    );
    guest.write(0, 0, &[(BUFFERS, 4096)], &pattern(7, 4096));
    lab.end();
}

#[test]
fn a_front_end_that_takes_its_memory_away_is_cut_off_and_others_go_on() {
    let lab = Lab::new(&[]);
    let mut guest = lab.guest();
    let before = lab.image();
    let mut client = lab.nbd();
    // Where the data of a write lies, then where that of a read goes, then the ring itself.
    for (n, region) in [2, 2, 0].into_iter().enumerate() {
        let head = match n {
            0 => guest.submit(0, kind::OUT, 0, &[(FAR + 8192, 4096)], &[]),
            _ => guest.submit(0, kind::IN, 0, &[], &[(FAR + 8192, 4096)]),
        };
        guest.file(region).set_len(4096).unwrap();
        guest.kick(0);
        // Nobody answers it any more.
        eventually("it is cut off", || guest.front.get_features().is_err());
        guest.file(region).set_len(REGION as u64).unwrap();
        let _ = head;
        drop(guest);
        guest = lab.guest();
        assert!(guest.read(0, 64, &[(BUFFERS, 8192)]) == before[64 * SECTOR..][..8192]);
        assert!(client.read(1 << 20, 4096).unwrap() == before[1 << 20..][..4096]);
    }
    drop(guest);
    client.disconnect().unwrap();
    lab.end();
}

#[test]
fn a_guest_is_told_when_its_disk_becomes_larger_and_the_disk_is_in_use() {
    let mut lab = Lab::new(&[]);
    let mut guest = lab.guest();
    lab.map.refused(json!({ "do": "unmap", "device": "disk" }), EBUSY);
    let file = OpenOptions::new()
        .write(true)
        .open(lab.dir.path().join("disk"))
        .unwrap();
    file.set_len(2 * SIZE as u64).unwrap();
    lab.map
        .done(json!({ "do": "resize", "device": "disk", "sectors": 2 * SIZE / SECTOR }));
    let mut message = [0; 12];
    std::io::Read::read_exact(&mut guest.channel, &mut message).unwrap();
    assert_eq!(message[..4], 2u32.to_ne_bytes(), "the configuration has changed");
    assert_eq!(guest.capacity(), 2 * (SIZE / SECTOR) as u64);
    let bytes = pattern(8, 4096);
    guest.write(0, (SIZE / SECTOR) as u64 + 8, &[(BUFFERS, 4096)], &bytes);
    assert!(lab.image()[SIZE + 4096..][..4096] == bytes);
    // At any price it is let go, and the guest with it.
    lab.map.done(json!({ "do": "unmap", "device": "disk", "force": true }));
    eventually("it is cut off", || guest.front.get_features().is_err());
    lab.map.event("unmapped");
    lab.map.end();
    assert_eq!(lab.serve.stop().code, Some(0));
}

#[test]
fn several_devices_rings_and_connections() {
    let dir = tempfile::tempdir().unwrap();
    let server = fresh_address();
    let exports: Vec<String> = ["a", "b", "c"]
        .map(|name| format!("{name}={}", image(dir.path(), name, &vec![0; SIZE]).display()))
        .to_vec();
    let mut serve = Running::start(&serve_args(server, &exports, &["--threads", "2"]));
    serve.event("listening");
    let sockets = ["a", "b", "c"].map(|name| (name, dir.path().join(format!("{name}.vhost"))));
    let mut more = vec!["--connections".to_owned(), "3".into()];
    for (name, socket) in &sockets {
        let socket = format!("{name}={}", socket.display());
        more.extend(["--device".to_owned(), (*name).into(), "--vhost-user".into(), socket]);
    }
    let more: Vec<&str> = more.iter().map(String::as_str).collect();
    let args = map_args(fresh_address(), &server.to_string(), &dir.path().join("nbd"), &more);
    let mut map = Running::start(&args);
    sockets.iter().for_each(|_| drop(map.event("mapped")));
    let guests = sockets.map(|(name, socket)| {
        thread::spawn(move || {
            let mut guest = Guest::connect(&socket, 0);
            let rings: Vec<usize> = (0..4).map(|_| guest.start()).collect();
            for round in 0..8u64 {
                for ring in &rings {
                    let at = BUFFERS + (*ring as u64) * (256 << 10);
                    guest.put(at, &pattern(round * 4 + *ring as u64, 200 << 10));
                    guest.submit(*ring, kind::OUT, *ring as u64 * 1024, &[(at, 200 << 10)], &[]);
                    guest.kick(*ring);
                }
                for ring in &rings {
                    let head = guest.wait(*ring).head;
                    assert_eq!(guest.status(*ring, head), OK, "{name}");
                }
            }
        })
    });
    guests.into_iter().for_each(|guest| guest.join().unwrap());
    for name in ["a", "b", "c"] {
        let image = fs::read(dir.path().join(name)).unwrap();
        for ring in 0..4u64 {
            let at = ring as usize * 1024 * SECTOR;
            assert!(
                image[at..at + (200 << 10)] == pattern(7 * 4 + ring, 200 << 10),
                "{name} {ring}"
            );
        }
    }
    assert_eq!(map.stop().code, Some(0));
    assert_eq!(serve.stop().code, Some(0));
}

#[test]
fn sockets_that_can_t_be_are_told_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let server = fresh_address();
    let here = fresh_address();
    let exports: Vec<String> = ["a", "b"]
        .map(|name| format!("{name}={}", image(dir.path(), name, &vec![0; SIZE]).display()))
        .to_vec();
    let mut serve = Running::start(&serve_args(server, &exports, &[]));
    serve.event("listening");
    let try_map = |more: &[&str]| {
        let args = map_args(here, &server.to_string(), &dir.path().join("nbd"), more);
        run(&args)
    };
    let ended = try_map(&["--device", "a", "--device", "b", "--vhost-user", "v"]);
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("DEVICE=SOCKET"), "{}", ended.stderr);
    let file = image(dir.path(), "file", b"no socket").display().to_string();
    let ended = try_map(&["--device", "a", "--vhost-user", &file]);
    assert_eq!(ended.code, Some(1));
    assert!(
        ended.stderr.contains("the file exists and is no socket"),
        "{}",
        ended.stderr
    );
    assert_eq!(serve.stop().code, Some(0));
}

/// A boot sector that reads 16 sectors behind itself by the BIOS, writes them from sector 100 on, and says `K` at qemu's debug port, or
/// `F` if one failed; then it ends the machine by qemu's exit device.
fn boot_sector() -> [u8; SECTOR] {
    const CODE: [&[u8]; 23] = [
        &[0xfa],                   // cli
        &[0x31, 0xc0],             // xor ax, ax
        &[0x8e, 0xd8],             // mov ds, ax
        &[0x8e, 0xc0],             // mov es, ax
        &[0x8e, 0xd0],             // mov ss, ax
        &[0xbc, 0x00, 0x7c],       // mov sp, 0x7c00
        &[0xfb],                   // sti: dl is the drive, and stays so
        &[0xb4, 0x42],             // mov ah, 0x42: extended read
        &[0xbe, 0x44, 0x7c],       // mov si, read
        &[0xcd, 0x13],             // int 0x13
        &[0x72, 0x0e],             // jc failed
        &[0xb8, 0x00, 0x43],       // mov ax, 0x4300: extended write
        &[0xbe, 0x54, 0x7c],       // mov si, write
        &[0xcd, 0x13],             // int 0x13
        &[0x72, 0x04],             // jc failed
        &[0xb0, b'K'],             // mov al, 'K'
        &[0xeb, 0x02],             // jmp say
        &[0xb0, b'F'],             // failed: mov al, 'F'
        &[0xba, 0xe9, 0x00, 0xee], // say: mov dx, 0xe9; out dx, al
        &[0xba, 0x01, 0x05],       // mov dx, 0x501
        &[0xb0, 0x00, 0xee],       // mov al, 0; out dx, al
        &[0xf4],                   // hlt
        &[0xeb, 0xfd],             // jmp back to it
    ];
    // Disk address packets: 16 sectors, memory at 0x8000, and the first sector.
    let packet = |sector: u8| [16, 0, 16, 0, 0x00, 0x80, 0, 0, sector, 0, 0, 0, 0, 0, 0, 0];
    let mut sector = [0; SECTOR];
    let code = CODE.concat();
    sector[..code.len()].copy_from_slice(&code);
    sector[0x44..0x54].copy_from_slice(&packet(1));
    sector[0x54..0x64].copy_from_slice(&packet(100));
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

#[test]
#[ignore = "needs qemu-system-x86_64"]
fn qemu_boots_from_a_device_and_its_bios_reads_and_writes_it() {
    let lab = Lab::new(&[]);
    let path = lab.dir.path().join("disk");
    let disk = OpenOptions::new().write(true).open(&path).unwrap();
    disk.write_all_at(&boot_sector(), 0).unwrap();
    let before = lab.image();
    // Once more with the same mapping: the first machine has left in good order.
    for _ in 0..2 {
        disk.write_all_at(&[0; 16 * SECTOR], 100 * SECTOR as u64).unwrap();
        let said = lab.dir.path().join("said");
        let chardev = format!("socket,id=disk,path={}", lab.socket().display());
        let debug = format!("file:{}", said.display());
        let status = std::process::Command::new("qemu-system-x86_64")
            .args([
                "-accel",
                "tcg",
                "-m",
                "64",
                "-display",
                "none",
                "-no-reboot",
                "-nodefaults",
            ])
            .args(["-object", "memory-backend-memfd,id=ram,size=64M,share=on"])
            .args(["-machine", "pc,memory-backend=ram", "-chardev", &chardev])
            .args(["-device", "vhost-user-blk-pci,chardev=disk,bootindex=0,num-queues=2"])
            .args(["-debugcon", &debug, "-device", "isa-debug-exit,iobase=0x501,iosize=1"])
            .status()
            .unwrap();
        // The exit device makes 1 of 0.
        assert_eq!(status.code(), Some(1));
        let said = fs::read_to_string(said).unwrap();
        assert!(said.ends_with('K'), "{said:?}");
        let after = lab.image();
        assert!(after[100 * SECTOR..116 * SECTOR] == before[SECTOR..17 * SECTOR]);
        assert!(after[116 * SECTOR..] == before[116 * SECTOR..] && after[..100 * SECTOR] == before[..100 * SECTOR]);
    }
    lab.end();
}
