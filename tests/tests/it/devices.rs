//! Several devices on one session: exports of one socket, which come, go and fail one by one.

use std::{
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
};

use ferroce_tests::{
    device::{image, map_args, serve_args},
    eventually, fresh_address,
    nbd::{self, Client, EIO, ENOSPC, EPERM, Error},
    pattern,
    process::{Running, TIMEOUT, run},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const BLOCK: usize = 4096;
const BLOCKS: usize = 64;
const SIZE: usize = BLOCK * BLOCKS;

const ENOENT: i32 = 2;
const EBUSY: i32 = 16;
const EEXIST: i32 = 17;
const ECONNABORTED: i32 = 103;
const EALREADY: i32 = 114;

/// A server of a folder with the images `a`, `b` and `c`, and a mapping of some of them over one session.
struct Lab {
    dir: tempfile::TempDir,
    server: Ipv4Addr,
    threads: &'static str,
    serve: Running,
    map: Running,
    mapped: Vec<Value>,
}

impl Lab {
    /// `devices`: as they are named on the command line.
    fn new(threads: &'static str, devices: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("images")).unwrap();
        for name in ["a", "b", "c"] {
            image(&dir.path().join("images"), name, &[0; SIZE]);
        }
        let server = fresh_address();
        let serve = start(server, dir.path(), threads);
        let mut more = vec![
            "--connections",
            threads,
            "--on-loss",
            "queue",
            "--reconnect-delay",
            "0.2",
            "--heartbeat",
            "0.5",
        ];
        more.extend(devices.iter().flat_map(|device| ["--device", device]));
        let args = map_args(fresh_address(), &server.to_string(), &dir.path().join("nbd"), &more);
        let mut map = Running::steered(&args);
        let mapped = devices.iter().map(|_| map.event("mapped")).collect();
        Self {
            dir,
            server,
            threads,
            serve,
            map,
            mapped,
        }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("nbd")
    }

    fn image(&self, name: &str) -> PathBuf {
        self.dir.path().join("images").join(name)
    }

    fn exports(&self) -> Vec<String> {
        nbd::list(&self.socket()).unwrap()
    }

    fn client(&self, name: &str) -> Client {
        self.try_client(name).unwrap()
    }

    fn try_client(&self, name: &str) -> std::io::Result<Client> {
        Client::connect_to(&self.socket(), name, TIMEOUT)
    }

    /// A device as the mapping lists it.
    fn device(&mut self, name: &str) -> Value {
        let listing = self.map.done(json!({ "do": "list" }));
        let devices = listing["devices"].as_array().unwrap();
        devices
            .iter()
            .find(|device| device["name"] == name)
            .cloned()
            .unwrap_or_default()
    }

    /// Devices that the server has open, and for how many sessions.
    fn open(&mut self) -> (usize, usize) {
        let [devices, sessions] = ["devices", "sessions"].map(|what| {
            let listing = self.serve.done(json!({ "do": what }));
            listing[what].as_array().unwrap().len()
        });
        (devices, sessions)
    }

    /// kill -9, and the mapping has noticed.
    fn kill(&mut self) {
        self.serve.signal(Signal::SIGKILL);
        self.serve.wait();
        self.map.event("session_lost");
    }

    fn restart(&mut self) {
        self.serve = start(self.server, self.dir.path(), self.threads);
    }

    fn end(self) {
        let map = self.map.stop();
        assert_eq!(map.code, Some(0), "{}", map.stderr);
        assert_eq!(self.serve.stop().code, Some(0));
    }
}

fn start(server: Ipv4Addr, dir: &Path, threads: &str) -> Running {
    let folder = dir.join("images").display().to_string();
    let args = serve_args(server, &[], &["--export-dir", &folder, "--threads", threads]);
    let mut serve = Running::steered(&args);
    serve.event("listening");
    serve
}

fn unmap(name: &str) -> Value {
    json!({ "do": "unmap", "device": name })
}

/// Somebody who writes and reads one half of a device again and again.
struct Work {
    device: &'static str,
    half: usize,
    rounds: AtomicU64,
}

impl Work {
    fn new(device: &'static str, half: usize) -> Self {
        let rounds = AtomicU64::new(0);
        Self { device, half, rounds }
    }

    /// Where a round writes, and what.
    fn of_round(&self, round: u64) -> (usize, Vec<u8>) {
        let block = self.half * BLOCKS / 2 + round as usize % (BLOCKS / 2);
        let seed = round * 8 + self.half as u64 * 4 + u64::from(self.device.as_bytes()[0] - b'a');
        (block * BLOCK, pattern(seed, BLOCK))
    }

    fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }

    fn run(&self, mut client: Client, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            let (at, data) = self.of_round(self.rounds());
            client.write(at as u64, &data).unwrap();
            assert!(client.read(at as u64, BLOCK).unwrap() == data);
            self.rounds.fetch_add(1, Ordering::Relaxed);
        }
        client.flush().unwrap();
        client.disconnect().unwrap();
    }

    fn goes_on(&self) {
        let enough = self.rounds() + 5;
        eventually("it goes on", || self.rounds() > enough);
    }

    /// It has left behind what it should.
    fn check(&self, lab: &Lab) {
        let bytes = fs::read(lab.image(self.device)).unwrap();
        for round in self.rounds().saturating_sub(BLOCKS as u64 / 2)..self.rounds() {
            let (at, data) = self.of_round(round);
            assert!(bytes[at..at + BLOCK] == data, "{}: round {round}", self.device);
        }
    }
}

/// Stops work, also when a test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Has all work while something happens, and looks whether what they have left behind is right.
fn working(lab: &mut Lab, works: &[Work], happens: impl FnOnce(&mut Lab)) {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for work in works {
            let (client, stop) = (lab.client(work.device), &stop);
            scope.spawn(move || work.run(client, stop));
        }
        let _stop = Stop(&stop);
        happens(lab);
    });
    works.iter().for_each(|work| work.check(lab));
}

#[test]
fn devices_are_exports_of_one_socket_and_share_a_session() {
    for threads in ["1", "2"] {
        let mut lab = Lab::new(threads, &["a", "b,ro", "c"]);
        let told: Vec<_> = lab.mapped.iter().map(|m| (&m["device"], &m["read_only"])).collect();
        let (no, yes) = (json!(false), json!(true));
        assert_eq!(told, [(&json!("a"), &no), (&json!("b"), &yes), (&json!("c"), &no)]);
        let socket = lab.socket();
        assert_eq!(
            lab.mapped[0]["uri"],
            format!("nbd+unix:///?socket={}", socket.display())
        );
        assert_eq!(
            lab.mapped[1]["uri"],
            format!("nbd+unix:///b?socket={}", socket.display())
        );
        assert_eq!(lab.exports(), ["a", "b", "c"]);
        assert_eq!(lab.open(), (3, 1));
        assert!(lab.try_client("d").is_err());

        // Two of each, so that somebody uses each at every loop.
        let works = [("a", 0), ("c", 0), ("a", 1), ("c", 1)].map(|(device, half)| Work::new(device, half));
        working(&mut lab, &works, |_| {
            eventually("all have written all", || {
                works.iter().all(|work| work.rounds() > BLOCKS as u64)
            });
        });
        let mut reader = lab.client("b");
        assert!(matches!(reader.write(0, &[1; BLOCK]), Err(Error::Refused(EPERM))));
        assert!(reader.read(0, SIZE).unwrap() == [0; SIZE]);
        // The empty name is the first one's.
        let mut first = Client::connect(&socket).unwrap();
        first.write(0, &[7; BLOCK]).unwrap();
        assert!(fs::read(lab.image("a")).unwrap()[..BLOCK] == [7; BLOCK]);
        for client in [reader, first] {
            client.disconnect().unwrap();
        }
        let written = (works[1].rounds() + works[3].rounds()) * BLOCK as u64;
        assert_eq!(lab.device("c")["written_bytes"], written);
        lab.end();
    }
}

#[test]
fn one_goes_and_another_comes_while_others_go_on() {
    for threads in ["1", "2"] {
        let mut lab = Lab::new(threads, &["a", "b"]);
        let socket = lab.socket();
        let works = [Work::new("a", 0)];
        working(&mut lab, &works, |lab| {
            lab.map.refused(unmap("d"), ENOENT);
            lab.map.refused(json!({ "do": "remap", "device": "d" }), ENOENT);
            lab.map
                .refused(json!({ "do": "resize", "device": "d", "sectors": 8 }), ENOENT);
            lab.map.refused(unmap("a"), EBUSY);
            let mut client = lab.client("b");
            client.write(0, &pattern(5, BLOCK)).unwrap();
            lab.map.refused(unmap("b"), EBUSY);
            client.disconnect().unwrap();
            eventually("it is unmapped", || lab.map.ask(unmap("b"))["ok"] == true);
            let told = lab.map.event("unmapped");
            assert_eq!((&told["device"], &told["why"]), (&json!("b"), &Value::Null));
            works[0].goes_on();
            assert_eq!((lab.open(), lab.exports()), ((1, 1), vec!["a".to_owned()]));
            assert!(lab.try_client("b").is_err());
            lab.map.refused(unmap("b"), ENOENT);

            // It comes again, and one more.
            for name in ["c", "b"] {
                lab.map.done(json!({ "do": "map", "device": name }));
                assert_eq!(lab.map.event("mapped")["device"], name);
                lab.map
                    .refused(json!({ "do": "map", "device": name, "mode": "ro" }), EEXIST);
            }
            lab.map.refused(json!({ "do": "map", "device": "d" }), ENOENT);
            assert_eq!(
                (lab.open(), lab.exports()),
                ((3, 1), ["a", "c", "b"].map(str::to_owned).into())
            );
            let mut clients = [(); 3].map(|()| lab.client("b"));
            for client in &mut clients {
                assert!(client.read(0, BLOCK).unwrap() == pattern(5, BLOCK));
            }
            eventually("all are counted", || lab.device("b")["clients"] == 3);
            // At any price: whoever uses it is let go, and nobody else.
            lab.map.done(json!({ "do": "unmap", "device": "b", "force": true }));
            assert_eq!(lab.map.event("unmapped")["device"], "b");
            for client in &mut clients {
                assert!(client.read(0, BLOCK).is_err());
            }
            works[0].goes_on();
            let mut other = lab.client("c");
            other.write(0, &pattern(6, BLOCK)).unwrap();
            other.disconnect().unwrap();
        });
        // The first that is left is the one without a name, and the mapping ends with the last.
        eventually("it is unmapped", || lab.map.ask(unmap("a"))["ok"] == true);
        assert!(Client::connect(&socket).unwrap().read(0, BLOCK).unwrap() == pattern(6, BLOCK));
        eventually("it is unmapped", || lab.map.ask(unmap("c"))["ok"] == true);
        let end = lab.map.end();
        assert_eq!(end.code, Some(0), "{}", end.stderr);
        assert!(!socket.exists());
        eventually("the server has nothing open", || {
            let devices = lab.serve.done(json!({ "do": "devices" }));
            devices["devices"] == json!([])
        });
        assert_eq!(lab.serve.stop().code, Some(0));
    }
}

#[test]
fn all_come_back_when_the_server_does_but_for_one_that_it_has_not() {
    for threads in ["1", "2"] {
        let mut lab = Lab::new(threads, &["a", "b"]);
        let works = [Work::new("a", 0), Work::new("b", 0)];
        working(&mut lab, &works, |lab| {
            lab.kill();
            lab.restart();
            let mut back = [(); 2].map(|()| lab.map.event("remapped")["device"].to_string());
            back.sort_unstable();
            assert_eq!(back, ["\"a\"", "\"b\""]);
            works.iter().for_each(Work::goes_on);
            // One is gone: it waits, and the other does not.
            lab.kill();
            let away = lab.dir.path().join("away");
            fs::rename(lab.image("b"), &away).unwrap();
            lab.restart();
            // A lock of the server that was killed may be in the way of either.
            while lab.map.event("not_remapped")["device"] != "b" {}
            eventually("its request waits", || lab.device("b")["waiting"] == 1);
            works[0].goes_on();
            lab.map.refused(json!({ "do": "remap", "device": "a" }), EALREADY);
            lab.map.refused(json!({ "do": "remap", "device": "b" }), ENOENT);
            fs::rename(&away, lab.image("b")).unwrap();
            let answer = lab.map.ask(json!({ "do": "remap", "device": "b" }));
            // It may have been opened just before.
            assert!(answer["ok"] == true || answer["errno"] == EALREADY, "{answer}");
            works[1].goes_on();
        });
        for name in ["a", "b"] {
            assert_eq!(lab.device(name)["failed"], 0);
        }
        lab.end();
    }
}

#[test]
fn one_can_be_unmapped_while_the_server_is_away() {
    for threads in ["1", "2"] {
        let mut lab = Lab::new(threads, &["a", "b", "c,ro"]);
        let works = [Work::new("a", 0)];
        working(&mut lab, &works, |lab| {
            lab.kill();
            eventually("its request waits", || lab.device("a")["waiting"] == 1);
            // Nobody can tell whether what was written is durable, if it can be written.
            let answer = lab.map.ask(unmap("b"));
            assert_eq!(answer["errno"], ECONNABORTED, "{answer}");
            assert!(
                answer["error"].as_str().unwrap().contains("flush of device b"),
                "{answer}"
            );
            lab.map.done(unmap("c"));
            lab.map.refused(json!({ "do": "map", "device": "c" }), ECONNABORTED);
            assert_eq!(lab.exports(), ["a"]);
            lab.restart();
            works[0].goes_on();
            assert_eq!(lab.open(), (1, 1));
            lab.map.done(json!({ "do": "map", "device": "b" }));
            works[0].goes_on();
        });
        lab.end();
    }
}

#[test]
fn what_goes_wrong_with_one_device_is_told_by_its_name_and_of_it_alone() {
    for threads in ["1", "2"] {
        let mut lab = Lab::new(threads, &["a", "b"]);
        // Another size is one device's.
        lab.map
            .done(json!({ "do": "resize", "device": "b", "sectors": SIZE / 1024 }));
        let told = lab.map.event("resized");
        assert_eq!((&told["device"], &told["bytes"]), (&json!("b"), &json!(SIZE / 2)));
        eventually("clients see it", || lab.client("b").size == SIZE as u64 / 2);
        let mut a = lab.client("a");
        assert_eq!(a.size, SIZE as u64);
        a.write(SIZE as u64 - BLOCK as u64, &[1; BLOCK]).unwrap();
        let beyond = lab.client("b").write(SIZE as u64 / 2, &[1; BLOCK]);
        assert!(matches!(beyond, Err(Error::Refused(ENOSPC))), "{beyond:?}");
        // The server does not know it any more, so that it can't be made durable.
        let devices = lab.serve.done(json!({ "do": "devices" }));
        let devices = devices["devices"].as_array().unwrap();
        let b = devices.iter().find(|device| device["name"] == "b").unwrap();
        let close = json!({ "do": "force_close", "session": b["session"], "device": b["device"] });
        lab.serve.done(close);
        let mut client = lab.client("b");
        assert!(matches!(client.write(0, &[1; BLOCK]), Err(Error::Refused(EIO))));
        client.disconnect().unwrap();
        let mut answer = Value::Null;
        eventually("it is unmapped", || {
            answer = lab.map.ask(unmap("b"));
            answer["errno"] != EBUSY
        });
        let text = answer["error"].as_str().unwrap();
        assert!(text.contains("flush of device b"), "{answer}");
        assert_eq!(lab.map.event("unmapped")["why"], text);
        assert_eq!(lab.exports(), ["a"]);
        a.write(0, &[2; BLOCK]).unwrap();
        a.disconnect().unwrap();
        lab.end();
    }
}

#[test]
fn all_that_were_named_have_to_be_there() {
    let mut lab = Lab::new("1", &["a"]);
    for (second, errno) in [("nothing", "no such export"), ("a", "somebody has it open for writing")] {
        let socket = lab.dir.path().join("other");
        let more = ["--session", "other", "--device", "c", "--device", second];
        let end = run(&map_args(fresh_address(), &lab.server.to_string(), &socket, &more));
        assert_eq!(end.code, Some(1), "{}", end.stderr);
        assert!(
            end.stderr.contains(&format!("can't map {second} of ")) && end.stderr.contains(errno),
            "{}",
            end.stderr
        );
        assert!(!end.stdout.contains("\"mapped\"") && !socket.exists(), "{}", end.stdout);
        eventually("the server has closed the other", || lab.open().0 == 1);
    }
    let more = ["--session", "other", "--device", "c", "--device", "c,ro"];
    let end = run(&map_args(
        fresh_address(),
        &lab.server.to_string(),
        &lab.dir.path().join("other"),
        &more,
    ));
    assert_eq!(end.code, Some(2), "{}", end.stderr);
    assert!(end.stderr.contains("device \"c\" is named twice"), "{}", end.stderr);
    lab.end();
}
