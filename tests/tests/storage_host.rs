//! A whole storage host at one address: a daemon that maps 16 devices of three servers, two mappings and a server beside it, and
//! a program for libibverbs, all at once. Whichever is killed, the others go on.
//!
//! perftest has to be there (Debian: `apt-get install perftest`), so the test is ignored by default.

use std::{fmt::Write as _, fs, net::Ipv4Addr, path::PathBuf, process::Command};

use ferroce_loopback::tcp::{free_port, listens};
use ferroce_tests::{
    checked::Checked,
    device::{image, map, serve},
    eventually, ferroce, fresh_address,
    process::{Running, kill_broker},
};
use nix::sys::signal::Signal;
use tempfile::TempDir;

const MIB: usize = 1 << 20;
/// Of the three servers, which the daemon maps.
const DEVICES: [usize; 3] = [6, 5, 5];
/// How many writes `ib_write_bw` makes when it shall end.
const WRITES: &str = "500";

/// What shares the address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    Daemon,
    Map(usize),
    Serve,
    Verbs,
}

const PARTS: [Part; 5] = [Part::Daemon, Part::Map(0), Part::Map(1), Part::Serve, Part::Verbs];

/// `ib_write_bw` under `ferroce run`: a server at one address, a client at another.
struct Verbs {
    server: Running,
    client: Running,
}

impl Verbs {
    fn start(here: Ipv4Addr, far: Ipv4Addr, how: &[&str]) -> Self {
        let port = free_port().unwrap();
        let mut server = perftest(here, port, how, None);
        eventually("ib_write_bw listens", || {
            assert!(!server.has_ended(), "ib_write_bw has ended\n{}", server.stderr());
            listens("self", port)
        });
        let client = perftest(far, port, how, Some(here));
        Self { server, client }
    }

    /// It writes without end, and says so every second.
    fn endless(here: Ipv4Addr, far: Ipv4Addr) -> Self {
        Self::start(here, far, &["--run_infinitely", "-D", "1"])
    }

    /// It has come to its end, and all is well.
    fn ends(self) {
        for side in [self.client, self.server] {
            let end = side.end();
            assert_eq!(end.code, Some(0), "{}\n{}", end.stdout, end.stderr);
        }
    }

    /// What it writes from now on arrives.
    fn works(&mut self) {
        while self.client.new_line().is_some() {}
        // The first second may have been before.
        for _ in 0..2 {
            eventually("ib_write_bw tells of its writes", || {
                assert!(
                    !self.client.has_ended(),
                    "ib_write_bw has ended\n{}",
                    self.client.stderr()
                );
                self.client.new_line().is_some_and(|line| iterations(&line) > Some(0))
            });
        }
    }
}

/// Of a line with results: `#bytes #iterations BW peak …`.
fn iterations(line: &str) -> Option<u64> {
    let mut words = line.split_whitespace();
    words.next()?.parse::<u64>().ok()?;
    words.next()?.parse().ok()
}

fn perftest(at: Ipv4Addr, port: u16, how: &[&str], to: Option<Ipv4Addr>) -> Running {
    let mut command = Command::new("stdbuf");
    command.arg("-oL").arg(ferroce());
    command.args(["run", "--addr", &at.to_string(), "--", "ib_write_bw", "-F", "-p"]);
    command
        .arg(port.to_string())
        .args(how)
        .args(to.map(|to| to.to_string()));
    Running::start_command(command, format!("ib_write_bw at {at}"))
}

struct Host {
    dir: TempDir,
    /// The address of all parts.
    here: Ipv4Addr,
    /// Of those at the other end.
    far: Ipv4Addr,
    servers: [Ipv4Addr; 3],
    _servers: Vec<Running>,
    daemon: Option<Running>,
    maps: [Option<Running>; 2],
    serve: Option<Running>,
    /// A mapping from elsewhere of what the server here exports.
    _of_serve: Option<Running>,
    verbs: Option<Verbs>,
    /// Of the daemon, the mappings, and the server.
    disks: [Vec<Checked>; 4],
    newcomers: usize,
}

impl Host {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let servers = [(); 3].map(|()| fresh_address());
        let mut host = Self {
            here: fresh_address(),
            far: fresh_address(),
            servers,
            _servers: Vec::new(),
            daemon: None,
            maps: [None, None],
            serve: None,
            _of_serve: None,
            verbs: None,
            disks: Default::default(),
            newcomers: 0,
            dir,
        };
        for (nth, server) in servers.into_iter().enumerate() {
            // Two more of the first are for mappings of their own, and one for whoever comes later.
            let more = ["map0", "map1", "new"]
                .map(str::to_owned)
                .into_iter()
                .take(if nth == 0 { 3 } else { 0 });
            let exports: Vec<String> = device_names(nth).chain(more).map(|name| host.export(&name)).collect();
            host._servers.push(serve(server, &exports, &[]).0);
        }
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// An image, and how a server exports it.
    fn export(&self, name: &str) -> String {
        let path = self.path(name);
        if !path.exists() {
            image(self.dir.path(), name, &vec![0; MIB]);
        }
        format!("{name}={}", path.display())
    }

    fn start(&mut self, part: Part) {
        match part {
            Part::Daemon => self.start_daemon(),
            Part::Map(nth) => {
                let name = format!("map{nth}");
                let more = ["--session", &name, "--device", &name];
                let socket = self.path(&format!("{name}.sock"));
                self.maps[nth] = Some(map(self.here, &self.servers[0].to_string(), &socket, &more).0);
            }
            Part::Serve => self.serve = Some(serve(self.here, &[self.export("own")], &[]).0),
            Part::Verbs => self.verbs = Some(Verbs::endless(self.here, self.far)),
        }
    }

    fn start_daemon(&mut self) {
        let mut config = String::new();
        for (nth, server) in self.servers.iter().enumerate() {
            let devices: Vec<String> = device_names(nth).map(|name| format!("\"{name}\"")).collect();
            let socket = self.path(&format!("server{nth}.sock"));
            writeln!(
                config,
                "[map.server{nth}]\npath = \"{},{server}\"\ndevice = [{}]\nnbd = \"{}\"",
                self.here,
                devices.join(", "),
                socket.display()
            )
            .unwrap();
        }
        fs::write(self.path("ferroce.toml"), config).unwrap();
        let mut command = Command::new(ferroce());
        command
            .args(["daemon", "--json", "--config"])
            .arg(self.path("ferroce.toml"));
        command.arg("--control").arg(self.path("control"));
        let mut daemon = Running::start_command(command, "ferroce daemon".into());
        // Each device tells.
        (0..DEVICES.iter().sum()).for_each(|_| drop(daemon.event("mapped")));
        self.daemon = Some(daemon);
    }

    /// Looks for the first time at what a part has.
    fn look(&mut self, part: Part) {
        let disk = |socket: &str, export: &str, image: &str| {
            Checked::new(&self.path(&format!("{socket}.sock")), export, &self.path(image))
        };
        match part {
            Part::Daemon => {
                let all = (0..DEVICES.len()).flat_map(|nth| device_names(nth).map(move |name| (nth, name)));
                let all = all
                    .map(|(nth, name)| disk(&format!("server{nth}"), &name, &name))
                    .collect();
                self.disks[0] = all;
            }
            Part::Map(nth) => {
                let name = format!("map{nth}");
                self.disks[1 + nth] = vec![disk(&name, &name, &name)];
            }
            Part::Serve => {
                let socket = self.path("own.sock");
                let more = ["--session", "own", "--device", "own", "--on-loss", "queue"];
                self._of_serve = Some(map(self.far, &self.here.to_string(), &socket, &more).0);
                self.disks[3] = vec![Checked::new(&socket, "own", &self.path("own"))];
            }
            Part::Verbs => {}
        }
    }

    fn disks(&mut self, part: Part) -> &mut Vec<Checked> {
        match part {
            Part::Daemon => &mut self.disks[0],
            Part::Map(nth) => &mut self.disks[1 + nth],
            Part::Serve => &mut self.disks[3],
            Part::Verbs => panic!("it has no disks"),
        }
    }

    fn works(&mut self, part: Part) {
        match part {
            Part::Verbs => self.verbs.as_mut().expect("it runs").works(),
            other => self.disks(other).iter_mut().for_each(Checked::works),
        }
    }

    /// All but this one work, and so does what comes to the address now.
    fn others_work(&mut self, but: Option<Part>) {
        let others = PARTS.into_iter().filter(|part| Some(*part) != but);
        others.for_each(|part| self.works(part));
        self.newcomers += 1;
        let name = format!("new{}", self.newcomers);
        let socket = self.path(&format!("{name}.sock"));
        let more = ["--session", &name, "--device", "new"];
        let (newcomer, _) = map(self.here, &self.servers[0].to_string(), &socket, &more);
        let mut disk = Checked::new(&socket, "new", &self.path("new"));
        disk.works();
        drop(disk);
        let end = newcomer.stop();
        assert_eq!(end.code, Some(0), "{}", end.stderr);
        Verbs::start(self.here, self.far, &["-n", WRITES]).ends();
    }

    fn kill(&mut self, part: Part) {
        let victim = match part {
            Part::Daemon => self.daemon.take(),
            Part::Map(nth) => self.maps[nth].take(),
            Part::Serve => self.serve.take(),
            Part::Verbs => {
                let Verbs { server, client } = self.verbs.take().expect("it runs");
                server.signal(Signal::SIGKILL);
                // Its client learns of it.
                assert_ne!(client.end().code, Some(0));
                Some(server)
            }
        };
        let mut victim = victim.expect("it runs");
        victim.signal(Signal::SIGKILL);
        victim.wait();
    }

    /// It was killed, and has been started again: what was written is there.
    fn returns(&mut self, part: Part) {
        if part != Part::Verbs {
            self.disks(part).iter_mut().for_each(Checked::returns);
        }
        self.works(part);
    }
}

/// The devices of a server that the daemon maps.
fn device_names(server: usize) -> impl Iterator<Item = String> {
    (0..DEVICES[server]).map(move |nth| format!("disk{server}-{nth}"))
}

#[test]
#[ignore = "needs ib_write_bw"]
fn whichever_part_of_a_storage_host_is_killed_the_others_go_on() {
    let mut host = Host::new();
    for part in PARTS {
        host.start(part);
        host.look(part);
    }
    host.others_work(None);
    for part in PARTS {
        eprintln!("{part:?} is killed");
        host.kill(part);
        host.others_work(Some(part));
        host.start(part);
        host.returns(part);
    }
    eprintln!("the broker is killed");
    kill_broker();
    host.others_work(None);
    // Whatever is left behind ends as it should.
    for daemon_or_map in [host.daemon.take(), host.maps[0].take(), host.maps[1].take()] {
        let end = daemon_or_map.expect("it runs").stop();
        assert_eq!(end.code, Some(0), "{}", end.stderr);
    }
}
