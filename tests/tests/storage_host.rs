//! A whole storage host at one address: a daemon that maps 16 devices of three servers, two mappings and a server beside it, and
//! a program for libibverbs, all at once. Whichever is killed, the others go on.
//!
//! perftest has to be there (Debian: `apt-get install perftest`), so the test is ignored by default.

use std::{fmt::Write as _, fs, net::Ipv4Addr, path::PathBuf, process::Command};

use ferroce_tests::{
    checked::Checked,
    device::{image, map, map_args, serve, serve_args},
    ferroce, fresh_address,
    network::Namespace,
    perftest::{Sides, WriteBw},
    process::{Running, kill_broker},
};
use nix::sys::signal::Signal;
use tempfile::TempDir;

const MIB: usize = 1 << 20;
/// Of the three servers, which the daemon maps.
const DEVICES: [usize; 3] = [6, 5, 5];
/// What shares the address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    Daemon,
    Map(usize),
    Serve,
    Verbs,
}

const PARTS: [Part; 5] = [Part::Daemon, Part::Map(0), Part::Map(1), Part::Serve, Part::Verbs];

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
    verbs: Option<WriteBw>,
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

    fn sides(&self) -> Sides {
        Sides {
            server: self.here,
            client: Some(self.far),
        }
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
            Part::Verbs => self.verbs = Some(WriteBw::endless(&|args| Running::start(args), self.sides())),
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
        WriteBw::once(&|args| Running::start(args), self.sides());
    }

    fn kill(&mut self, part: Part) {
        let victim = match part {
            Part::Daemon => self.daemon.take(),
            Part::Map(nth) => self.maps[nth].take(),
            Part::Serve => self.serve.take(),
            Part::Verbs => {
                let WriteBw { server, client } = self.verbs.take().expect("it runs");
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

/// A network namespace whose addresses nobody else has.
struct Alone {
    namespace: Namespace,
    dir: TempDir,
}

impl Alone {
    const ADDR: Ipv4Addr = Ipv4Addr::LOCALHOST;
    /// Programs for libibverbs have all addresses.
    const EVERYWHERE: Sides = Sides {
        server: Self::ADDR,
        client: None,
    };

    fn new() -> Self {
        let more = ["addr add 10.0.0.1/32 dev lo", "addr add 10.0.0.2/32 dev lo"];
        Self {
            namespace: Namespace::new(&more),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn run(&self, args: &[String]) -> Running {
        self.namespace.run(args)
    }

    fn serve(&self) -> Running {
        let exports = ["a", "b"].map(|name| {
            let path = self.dir.path().join(name);
            if !path.exists() {
                image(self.dir.path(), name, &vec![0; MIB]);
            }
            format!("{name}={}", path.display())
        });
        let mut serve = self.run(&serve_args(Self::ADDR, &exports, &[]));
        serve.event("listening");
        serve
    }

    /// A mapping from these addresses.
    fn map(&self, device: &str, from: &[Ipv4Addr]) -> (Running, Checked) {
        let socket = self.dir.path().join(format!("{device}.sock"));
        let more = ["--session", device, "--device", device];
        let mut args = map_args(from[0], &Self::ADDR.to_string(), &socket, &more);
        for addr in &from[1..] {
            args.extend(["--path".to_owned(), format!("{addr},{}", Self::ADDR)]);
        }
        let mut map = self.run(&args);
        map.event("mapped");
        (map, Checked::new(&socket, device, &self.dir.path().join(device)))
    }
}

#[test]
#[ignore = "needs ib_write_bw, and the right to make a network namespace"]
fn a_program_that_takes_all_addresses_comes_beside_those_that_have_some() {
    let host = Alone::new();
    let run = |args: &[String]| host.run(args);
    let serve = host.serve();
    let (map, mut a) = host.map("a", &[Alone::ADDR]);
    let mut verbs = WriteBw::endless(&run, Alone::EVERYWHERE);
    verbs.works();
    a.works();
    // Addresses that nobody had before.
    let (other, mut b) = host.map("b", &[[10, 0, 0, 1].into()]);
    b.works();
    host.namespace.kill_broker();
    verbs.works();
    [&mut a, &mut b].into_iter().for_each(Checked::works);
    WriteBw::once(&run, Alone::EVERYWHERE);
    drop((a, b));
    for ferroce in [map, other, serve] {
        let end = ferroce.stop();
        assert_eq!(end.code, Some(0), "{}", end.stderr);
    }
    verbs.works();
    WriteBw::once(&run, Alone::EVERYWHERE);
    // Who has had an address may have it again.
    let _serve = host.serve();
    let (_map, mut a) = host.map("a", &[Alone::ADDR]);
    a.works();
    verbs.works();
}

#[test]
#[ignore = "needs ib_write_bw, and the right to make a network namespace"]
fn a_storage_host_comes_beside_a_program_that_has_all_addresses() {
    let host = Alone::new();
    let run = |args: &[String]| host.run(args);
    let mut verbs = WriteBw::endless(&run, Alone::EVERYWHERE);
    verbs.works();
    let _serve = host.serve();
    let (_map, mut a) = host.map("a", &[Alone::ADDR]);
    let (_other, mut b) = host.map("b", &[[10, 0, 0, 1].into(), [10, 0, 0, 2].into()]);
    verbs.works();
    [&mut a, &mut b].into_iter().for_each(Checked::works);
    host.namespace.kill_broker();
    verbs.works();
    [&mut a, &mut b].into_iter().for_each(Checked::works);
    WriteBw::once(&run, Alone::EVERYWHERE);
}
