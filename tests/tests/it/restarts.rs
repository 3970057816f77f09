//! Servers that die, and are back as others: with other limits, other keys, another image.

use std::{
    fs::{self, File},
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
};

use ferroce_tests::{
    device::{image, map_args, serve},
    eventually, fresh_address,
    nbd::{Client, Error},
    pattern,
    process::Running,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const MIB: usize = 1 << 20;

struct Lab {
    dir: tempfile::TempDir,
    image: PathBuf,
    server: Ipv4Addr,
    serving: Option<Running>,
    map: Running,
}

impl Lab {
    fn new(bytes: &[u8], serve_more: &[&str], map_more: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let image = image(dir.path(), "disk.img", bytes);
        let server = fresh_address();
        let serving = Some(start(server, &image, serve_more));
        let mut more = vec!["--device", "disk.img", "--on-loss", "queue", "--reconnect-delay", "0.2"];
        more.extend(map_more);
        let args = map_args(fresh_address(), &server.to_string(), &dir.path().join("nbd"), &more);
        let mut map = Running::steered(&args);
        map.event("mapped");
        Self {
            dir,
            image,
            server,
            serving,
            map,
        }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("nbd")
    }

    fn client(&self) -> Client {
        Client::connect(&self.socket()).unwrap()
    }

    /// kill -9, and the mapping has noticed.
    fn kill(&mut self) {
        let mut serving = self.serving.take().unwrap();
        serving.signal(Signal::SIGKILL);
        serving.wait();
        self.map.event("session_lost");
    }

    fn restart(&mut self, more: &[&str]) {
        self.serving = Some(start(self.server, &self.image, more));
    }

    fn list(&mut self) -> Value {
        self.map.ask(json!({ "do": "list" }))
    }

    fn end(self) {
        let map = self.map.stop();
        assert_eq!(map.code, Some(0), "{}", map.stderr);
        assert_eq!(self.serving.unwrap().stop().code, Some(0));
    }
}

fn start(server: Ipv4Addr, image: &Path, more: &[&str]) -> Running {
    // A server with a folder begins without the image, too.
    let folder = image.parent().unwrap().display().to_string();
    serve(server, &[], &[&["--export-dir", &folder], more].concat()).0
}

#[test]
fn a_server_is_back_with_other_limits_and_keys() {
    const BLOCK: usize = 100_000 / 512 * 512;
    let mut lab = Lab::new(&vec![0; 8 * MIB], &[], &[]);
    let blocks = 8 * MIB / BLOCK;
    let servers: [&[&str]; 6] = [
        &["--queue-depth", "16"],
        &["--queue-depth", "1024"],
        &["--max-chunk-size", "16K"],
        &["--max-chunk-size", "1M", "--queue-depth", "64"],
        &["--always-invalidate", "off"],
        &["--always-invalidate", "on", "--max-chunk-size", "64K"],
    ];
    for (round, more) in servers.iter().enumerate() {
        let mut client = lab.client();
        // While it is down.
        client.write(0, &pattern(1000 + round as u64, BLOCK)).unwrap();
        lab.kill();
        let writer = thread::spawn(move || {
            for block in 0..blocks {
                let seed = (round * blocks + block) as u64;
                client.write((block * BLOCK) as u64, &pattern(seed, BLOCK)).unwrap();
            }
            for block in 0..blocks {
                let seed = (round * blocks + block) as u64;
                let read = client.read((block * BLOCK) as u64, BLOCK).unwrap();
                assert!(read == pattern(seed, BLOCK), "block {block} in round {round}");
            }
            client.flush().unwrap();
        });
        lab.restart(more);
        lab.map.event("remapped");
        writer.join().unwrap();
        let listing = lab.list();
        let option = |name: &str| more.iter().position(|o| *o == name).map(|at| more[at + 1]);
        if let Some(depth) = option("--queue-depth") {
            assert_eq!(listing["queue_depth"].to_string(), depth);
        }
        if let Some(kib) = option("--max-chunk-size") {
            let kib = kib.replace("1M", "1024K").replace('K', "").parse::<u64>().unwrap();
            assert_eq!(listing["max_io_bytes"], (kib - 4) << 10);
        }
        assert_eq!(listing["new_rkeys"], option("--always-invalidate") != Some("off"));
        assert_eq!(listing["devices"][0]["failed"], 0);
        let bytes = fs::read(&lab.image).unwrap();
        for (block, bytes) in bytes.chunks_exact(BLOCK).enumerate() {
            let seed = (round * blocks + block) as u64;
            assert!(
                bytes == pattern(seed, BLOCK),
                "block {block} of the image in round {round}"
            );
        }
    }
    lab.end();
}

#[test]
fn an_image_has_grown_and_shrunk_meanwhile() {
    let mut lab = Lab::new(&vec![1; 4 * MIB], &[], &[]);
    let file = File::options().write(true).open(&lab.image).unwrap();
    for mib in [6_usize, 2, 4] {
        let mut client = lab.client();
        lab.kill();
        file.set_len((mib * MIB) as u64).unwrap();
        // Of the part that is there before and after.
        let waiting = thread::spawn(move || {
            client.write(0, &pattern(mib as u64, MIB)).unwrap();
            client
        });
        lab.restart(&[]);
        assert_eq!(lab.map.event("resized")["bytes"], mib * MIB);
        lab.map.event("remapped");
        let mut old = waiting.join().unwrap();
        let mut new = lab.client();
        assert_eq!(new.size, (mib * MIB) as u64);
        let last = ((mib * MIB) - 4096) as u64;
        new.write(last, &pattern(7, 4096)).unwrap();
        for client in [&mut new, &mut old] {
            assert!(client.read(0, MIB).unwrap() == pattern(mib as u64, MIB));
            let beyond = client.write(last + 4096, &[1; 4096]);
            assert!(matches!(beyond, Err(Error::Refused(_))), "{beyond:?}");
        }
        assert_eq!(fs::metadata(&lab.image).unwrap().len(), (mib * MIB) as u64);
    }
    lab.end();
}

#[test]
fn an_image_that_is_gone_is_asked_for_until_it_is_there_again() {
    let mut lab = Lab::new(&vec![1; MIB], &[], &[]);
    let away = lab.dir.path().join("away");
    for by_hand in [false, true] {
        let mut client = lab.client();
        lab.kill();
        fs::rename(&lab.image, &away).unwrap();
        let waiting = thread::spawn(move || client.read(0, 4096));
        lab.restart(&[]);
        lab.map.event("session_back");
        lab.map.event("not_remapped");
        eventually("the request waits", || lab.list()["devices"][0]["waiting"] == 1);
        if by_hand {
            assert_eq!(lab.map.ask(json!({ "do": "remap", "device": "disk.img" }))["errno"], 2);
        }
        fs::rename(&away, &lab.image).unwrap();
        if by_hand {
            let answer = lab.map.ask(json!({ "do": "remap", "device": "disk.img" }));
            // Somebody may have asked just before.
            assert!(answer["ok"] == true || answer["errno"] == 114, "{answer}");
        }
        lab.map.event("remapped");
        assert_eq!(waiting.join().unwrap().unwrap(), [1; 4096]);
    }
    lab.end();
}

/// A program that is under way, and killed if a test fails.
struct Copy(Child);

impl Copy {
    fn start(from: &str, to: &str) -> Self {
        let mut command = Command::new("nbdcopy");
        command.args(["--connections=2", "--request-size=65536", from, to]);
        Self(command.stdin(Stdio::null()).spawn().expect("nbdcopy is there"))
    }

    fn end(mut self) {
        let status = self.0.wait().unwrap();
        assert!(status.success(), "nbdcopy: {status}");
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "needs nbdcopy"]
fn nbdcopy_goes_on_when_its_server_was_killed_and_is_back() {
    const SIZE: usize = 192 * MIB;
    let mut lab = Lab::new(&vec![0; SIZE], &[], &[]);
    let source = image(lab.dir.path(), "source", &pattern(5, SIZE));
    let back = lab.dir.path().join("back");
    let device = format!("nbd+unix:///?socket={}", lab.socket().display());
    let ways = [
        (source.to_str().unwrap(), device.as_str(), "written_bytes"),
        (device.as_str(), back.to_str().unwrap(), "read_bytes"),
    ];
    for (from, to, moved) in ways {
        let copy = Copy::start(from, to);
        for part in [SIZE / 4, SIZE / 2] {
            eventually("the copy goes on", || {
                let moved = lab.list()["devices"][0][moved].as_u64().unwrap();
                moved >= part as u64
            });
            lab.kill();
            lab.restart(&[]);
            lab.map.event("remapped");
        }
        copy.end();
    }
    assert_eq!(lab.list()["devices"][0]["failed"], 0);
    let repeated = lab.list()["devices"][0]["repeated"].as_u64().unwrap();
    println!("{repeated} requests were sent again");
    assert!(repeated > 0, "nothing was under way when the server died");
    let source = fs::read(source).unwrap();
    assert!(fs::read(&lab.image).unwrap() == source && fs::read(back).unwrap() == source);
    lab.end();
}
