//! The scenarios, as data; what they do is in the modules.

mod annex;
mod attach;
mod attributes;
mod blktests;
mod cm;
mod contract;
mod errors;
mod faults;
mod handshakes;
mod lnet;
mod ops;
mod paths;
mod peer;
mod programs;
mod rdma;
mod rds;
mod remote;
mod rnbd;
pub(crate) mod scripts;
mod services;
mod stall;
mod strangers;

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use roce::DatapathKind;

use crate::{
    Error,
    facts::{Hosts, Want},
    far::{Far, Ip},
    guest::{Guest, Kernel, Shape},
    lab::{Places, Proc},
};

/// Time for the broker to tell the peers of processes that were killed.
const LEAVING: Duration = Duration::from_secs(30);

/// What a scenario works with.
pub(crate) struct Ctx<'a> {
    /// Its guest; a peer that is another host has none.
    pub(crate) guest: Option<&'a mut Guest>,
    /// A second guest, if the scenario asked for one.
    pub(crate) second: Option<&'a mut Guest>,
    /// The host on the other end: the guest, or the peer.
    pub(crate) far: Far,
    /// Our addresses towards it.
    pub(crate) local: [Option<IpAddr>; 2],
    /// Interface MTU towards it.
    pub(crate) mtu: u32,
    /// Logs, captures and images of this scenario.
    pub(crate) dir: PathBuf,
    pub(crate) places: &'a Places,
    /// Sockets of our programs.
    pub(crate) datapath: DatapathKind,
    /// Packets are lost: less data will do.
    pub(crate) lossy: bool,
    /// What both hosts have, with a peer.
    pub(crate) hosts: Option<&'a Hosts>,
    /// Why packets are not captured, if they can't be.
    pub(crate) uncaptured: Option<&'a str>,
}

/// Who asks whom.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    OursToKernel,
    KernelToOurs,
    Both,
    KernelToKernel,
}

impl Direction {
    pub(crate) const fn text(self) -> &'static str {
        match self {
            Self::OursToKernel => "ours → kernel",
            Self::KernelToOurs => "kernel → ours",
            Self::Both => "both",
            Self::KernelToKernel => "kernel → kernel",
        }
    }
}

type Run = Box<dyn Fn(&mut Ctx<'_>) -> Result<String, Error>>;

/// A scenario.
pub(crate) struct Scenario {
    pub(crate) name: String,
    /// Kind of scenario: its index in the report's titles.
    pub(crate) number: u8,
    pub(crate) direction: Direction,
    /// Part of the short set: see [`all`].
    pub(crate) ci: bool,
    pub(crate) shape: Shape,
    /// Arguments of netem, both ways.
    pub(crate) netem: Option<&'static str>,
    /// The scenario itself starts netem.
    pub(crate) netem_later: bool,
    pub(crate) guests: u8,
    /// The kernels that it runs on.
    pub(crate) kernels: &'static [Kernel],
    /// Networks that it uses, each of which is captured. 0: it sends nothing, or captures by itself.
    pub(crate) nets: u8,
    /// The packet whose ICRC rdma_rxe computes wrongly (`specs/kernel.md`): it comes, and all others are right.
    pub(crate) wrong_icrc: Option<&'static str>,
    /// Waits most of the time: runs beside the others.
    pub(crate) waits: bool,
    /// Runs against another host as well.
    pub(crate) peer: bool,
    /// Runs against another host alone.
    pub(crate) peer_only: bool,
    /// What it takes there and here, then.
    pub(crate) wants: &'static [Want],
    /// It stands for what only another host can show: why the lab itself does not run it.
    pub(crate) elsewhere: Option<&'static str>,
    /// Sockets of our programs, whatever `--datapath` says.
    pub(crate) datapath: Option<DatapathKind>,
    /// Why it can't run with the programs that there are.
    pub(crate) lacks: fn(&Places, Kernel) -> Option<String>,
    pub(crate) run: Run,
}

pub(crate) const SMALL: Shape = Shape {
    cpus: 1,
    mtu: 1500,
    kernel: Kernel::V6_1,
};
pub(crate) const JUMBO: Shape = Shape { mtu: 9000, ..SMALL };
/// See [`JUMBO_SMP`].
pub(crate) const SMP: Shape = Shape { cpus: 4, ..SMALL };
/// With several CPUs rxe's requester stopped for ever in the middle of messages, on one seldom (`specs/kernel.md` has the likely
/// cause: more than 64 packets under way), so only the kernel's RNBD client runs here: its requests are shorter.
pub(crate) const JUMBO_SMP: Shape = Shape { cpus: 4, ..JUMBO };

impl Scenario {
    fn new(
        number: u8,
        name: impl Into<String>,
        direction: Direction,
        run: impl Fn(&mut Ctx<'_>) -> Result<String, Error> + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            number,
            direction,
            ci: false,
            shape: SMALL,
            netem: None,
            netem_later: false,
            guests: 1,
            kernels: &Kernel::ALL,
            nets: 1,
            wrong_icrc: None,
            waits: false,
            peer: false,
            peer_only: false,
            wants: &[Want::Software],
            elsewhere: None,
            datapath: None,
            lacks: |_, _| None,
            run: Box::new(run),
        }
    }

    fn ci(self) -> Self {
        self.ci_if(true)
    }

    fn ci_if(mut self, ci: bool) -> Self {
        self.ci = ci;
        self
    }

    fn shape(mut self, shape: Shape) -> Self {
        self.shape = shape;
        self
    }

    fn netem(mut self, what: &'static str) -> Self {
        self.netem = Some(what);
        self
    }

    fn netem_later(mut self, what: &'static str) -> Self {
        self.netem_later = true;
        self.netem(what)
    }

    fn guests(mut self, count: u8) -> Self {
        self.guests = count;
        self
    }

    fn nets(mut self, count: u8) -> Self {
        self.nets = count;
        self
    }

    /// Another kernel lacks what it is about, or is known to fail, for a reason that `specs/kernel.md` has.
    fn only_on(mut self, kernels: &'static [Kernel]) -> Self {
        self.kernels = kernels;
        self
    }

    /// The same in guests with this kernel. The name tells, but for Debian's own.
    fn on(mut self, kernel: Kernel) -> Self {
        if kernel != Kernel::V6_1 {
            self.name = format!("{}-{}", self.name, kernel.series());
        }
        self.shape.kernel = kernel;
        self
    }

    fn wrong_icrc(mut self, packet: &'static str) -> Self {
        self.wrong_icrc = Some(packet);
        self
    }

    fn waits(mut self) -> Self {
        self.waits = true;
        self
    }

    fn peer(mut self) -> Self {
        self.peer = true;
        self
    }

    fn peer_only(mut self) -> Self {
        self.peer_only = true;
        self.peer()
    }

    fn wants(mut self, wants: &'static [Want]) -> Self {
        self.wants = wants;
        self
    }

    fn lacks(mut self, lacks: fn(&Places, Kernel) -> Option<String>) -> Self {
        self.lacks = lacks;
        self
    }

    fn datapath(mut self, datapath: DatapathKind) -> Self {
        self.datapath = Some(datapath);
        self
    }

    fn elsewhere(mut self, why: &'static str) -> Self {
        self.elsewhere = Some(why);
        self
    }

    /// There is a checkout of Lustre.
    pub(crate) fn with_lustre(&mut self) {
        self.elsewhere = self.elsewhere.filter(|why| *why != lnet::NO_CHECKOUT);
    }

    /// Whether its programs talk over this protocol.
    pub(crate) fn needs(&self, ip: Ip) -> bool {
        let over_v6 = self.name.contains("-v6");
        // ibv_rc_pingpong as a server waits on an IPv4 socket, whatever GID it uses.
        ip == Ip::V6 && over_v6 || ip == Ip::V4 && (!over_v6 || self.name.starts_with("pingpong-our-client"))
    }

    /// Whether its packets pass between hosts, where they are captured.
    pub(crate) fn on_the_wire(&self) -> bool {
        self.nets > 0 && (self.direction != Direction::KernelToKernel || self.guests > 1)
    }

    /// For the table.
    pub(crate) fn setting(&self) -> String {
        if self.peer_only || self.elsewhere.is_some_and(|why| why != lnet::NO_CHECKOUT) {
            return "any RoCE device".to_owned();
        }
        let Shape { cpus, mtu, kernel } = self.shape;
        let cpus = if cpus == 1 {
            "1 CPU".to_owned()
        } else {
            format!("{cpus} CPUs")
        };
        let netem = self.netem.map(|n| format!(", netem {n}")).unwrap_or_default();
        format!("Linux {}, {cpus}, MTU {mtu}{netem}", kernel.series())
    }
}

/// All scenarios; those of one guest shape stand together, so that a guest is booted once.
///
/// The short set is what each change has to pass. It has a scenario of each kind, service, and fault, in each direction that
/// the kind has, and leaves out what differs from one that is there in the address family, the path MTU, or the program that
/// makes the same requests, and what only kernels take part in.
pub(crate) fn all() -> Vec<Scenario> {
    let mut all = Vec::new();
    for kernel in Kernel::ALL {
        let lists = [
            ops::list(),
            annex::list(),
            cm::list(),
            errors::list(),
            scripts::list(),
            rnbd::list(),
            attributes::list(),
            blktests::list(),
            faults::list(),
            paths::list(),
            attach::list(),
            handshakes::list(),
            programs::list(),
            strangers::list(),
            rdma::list(),
            rds::list(),
            lnet::list(),
        ];
        all.extend(
            lists
                .into_iter()
                .flatten()
                .filter(|s| s.kernels.contains(&kernel))
                .map(|s| s.on(kernel)),
        );
    }
    // What the first two compare the kernel with, check by check, was recorded of 6.1; the others are not about the kernel.
    let once = [services::list(), contract::list(), peer::list(), remote::list()];
    all.extend(once.into_iter().flatten());
    all.sort_by_key(|s| (s.guests, s.shape.kernel, s.shape.mtu, s.shape.cpus));
    all
}

impl Ctx<'_> {
    /// The guest of a scenario that can't run without one.
    pub(crate) fn guest(&mut self) -> Result<&mut Guest, Error> {
        self.guest
            .as_deref_mut()
            .ok_or_else(|| "needs a guest of the lab".into())
    }

    /// The guest's kernel.
    pub(crate) fn kernel(&self) -> Result<Kernel, Error> {
        let guest = self.guest.as_ref().ok_or("needs a guest of the lab")?;
        Ok(guest.shape.kernel)
    }

    /// Our address.
    pub(crate) fn host(&self, ip: Ip) -> Result<IpAddr, Error> {
        self.local[usize::from(ip == Ip::V6)].ok_or_else(|| format!("no address of IP{} here", ip.tag()).into())
    }

    /// The path MTU that the interface carries, bytes.
    pub(crate) fn path_mtu(&self) -> &'static str {
        if self.mtu >= 4096 + 96 { "4096" } else { "1024" }
    }

    /// Where the broker of our servers and mappings is. It ends with the last of them.
    fn shared_dir(&self) -> PathBuf {
        self.places.run.join("shared")
    }

    /// One of our programs.
    fn sharing(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env("FERROCE_BROKER", &self.places.ferroce)
            .env("FERROCE_BROKER_DIR", self.shared_dir())
            .env("FERROCE_BROKER_LINGER", "0.5");
        command
    }

    /// Waits until nobody shares our addresses any more: the next scenario may want them for itself.
    pub(crate) fn all_left(&self) -> Result<(), Error> {
        let end = Instant::now() + LEAVING;
        while roce::broker::running_broker(&self.shared_dir()) {
            if Instant::now() > end {
                return Err("the broker of our programs stays behind".into());
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Starts one of our own programs of `ferroce-lab`.
    pub(crate) fn ours(&self, ip: Ip, name: &str, args: &[&str]) -> Result<Proc, Error> {
        let mut command = self.sharing(&self.places.peer);
        command.args(["--addr", &self.host(ip)?.to_string()]);
        command.arg(self.datapath()).args(args);
        Proc::spawn(name, &mut command, &self.dir)
    }

    /// Starts the `ferroce` program.
    pub(crate) fn ferroce(&self, name: &str, args: &[&str]) -> Result<Proc, Error> {
        Proc::spawn(name, &mut self.command(args), &self.dir)
    }

    /// The `ferroce` program with these arguments.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.sharing(&self.places.ferroce);
        command.args(args);
        if let Some(&("serve" | "map")) = args.first() {
            command.arg(self.datapath());
        }
        command
    }

    /// The option for the sockets of our programs.
    fn datapath(&self) -> String {
        format!("--datapath={}", self.datapath)
    }

    /// Starts it for [`Proc::ask`].
    pub(crate) fn steered(&self, name: &str, args: &[&str]) -> Result<Proc, Error> {
        let mut command = self.command(args);
        command.args(["--control", "-"]);
        Proc::spawn_with_input(name, &mut command, &self.dir, Stdio::piped())
    }

    /// Starts a program on the other end.
    pub(crate) fn theirs(&self, name: &str, program: &[&str], seconds: u32) -> Result<Proc, Error> {
        self.far.start(name, program, seconds, &self.dir)
    }

    /// Runs a program here to its end.
    pub(crate) fn tool(&self, name: &str, program: &str, args: &[&str], seconds: u64) -> Result<String, Error> {
        Proc::spawn(name, Command::new(program).args(args), &self.dir)?.finish(Duration::from_secs(seconds))
    }

    /// The frames of the capture so far, a line each.
    pub(crate) fn frames(&self) -> Result<String, Error> {
        let mut command = Command::new(&self.places.ferroce);
        command
            .args(["pcap", "check", "--frames"])
            .arg(self.dir.join("wire.pcap"));
        let mut check = Proc::spawn("frames", &mut command, &self.dir)?;
        // The capture's end may be missing: it is still being written.
        check.wait_gone(Duration::from_secs(60))?;
        Ok(check.text())
    }

    /// A path in the scenario's folder.
    pub(crate) fn path(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }

    /// A path for a socket.
    pub(crate) fn socket(&self, name: &str) -> String {
        self.places.run.join(name).display().to_string()
    }
}

/// When a frame of [`Ctx::frames`] was captured, s.
fn frame_time(line: &str) -> Option<f64> {
    line.split_whitespace().nth(1)?.parse().ok()
}

/// The lines of a program's output that a report keeps; an error if none says "passed".
fn verdict(text: &str) -> Result<String, Error> {
    if text.contains("passed") {
        Ok(key_lines(text))
    } else {
        Err(format!("nothing says that it passed:\n{text}").into())
    }
}

/// The lines of a program's output that a report keeps.
fn key_lines(text: &str) -> String {
    text.lines()
        .filter(|l| l.contains("passed") || l.contains("iters") || l.contains("usec"))
        .collect::<Vec<_>>()
        .join("; ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{Direction, Kernel, Scenario, all};

    #[test]
    fn the_short_set_has_every_kind_direction_and_fault() {
        let all: Vec<_> = all().into_iter().filter(|s| !s.peer_only).collect();
        let of = |what: &dyn Fn(&Scenario) -> Option<String>, ci: bool| -> BTreeSet<String> {
            let counted = all
                .iter()
                .filter(|s| s.elsewhere.is_none() && s.guests == 1 && (s.ci || !ci));
            counted.filter_map(what).collect()
        };
        let kind = |s: &Scenario| {
            let one = [Direction::OursToKernel, Direction::KernelToOurs].contains(&s.direction);
            one.then(|| format!("{} {}", s.number, s.direction.text()))
        };
        // One that reorders also delays.
        let fault = |s: &Scenario| Some((*NETEM.iter().find(|w| s.netem.is_some_and(|n| n.contains(**w)))?).to_owned());
        // What both directions are in counts for each.
        let in_both = |ci: bool| -> BTreeSet<String> {
            let both = all
                .iter()
                .filter(|s| s.elsewhere.is_none() && s.direction == Direction::Both && (s.ci || !ci));
            let each = [Direction::OursToKernel, Direction::KernelToOurs];
            both.flat_map(|s| each.map(|d| format!("{} {}", s.number, d.text())))
                .collect()
        };
        let kinds = |ci: bool| &of(&kind, ci) | &in_both(ci);
        assert_eq!(kinds(true), kinds(false));
        assert_eq!(of(&fault, true), of(&fault, false));
        assert_eq!(of(&fault, true).len(), NETEM.len());
        for service in ["uc", "ud", "srq"] {
            let name = format!("program-ibv_{service}_pingpong");
            assert!(all.iter().any(|s| s.ci && s.name.starts_with(&name)), "{name}");
        }
        for fault in ["link-down", "killed", "strangers"] {
            assert!(all.iter().any(|s| s.ci && s.name.contains(fault)), "{fault}");
        }
    }

    #[test]
    fn names_tell_scenarios_and_their_kernels_apart() {
        let all = all();
        let names: BTreeSet<&str> = all.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names.len(), all.len());
        for s in &all {
            for kernel in [Kernel::V6_12, Kernel::V7_3] {
                let named = s.name.ends_with(&format!("-{}", kernel.series()));
                assert_eq!(named, s.shape.kernel == kernel, "{}", s.name);
            }
        }
        // Whatever there is of a later kernel there is of the first, unless it is about what the first lacks.
        for kernel in [Kernel::V6_12, Kernel::V7_3] {
            let of_it = all.iter().filter(|s| s.shape.kernel == kernel);
            assert!(of_it.clone().count() > 50);
            let tail = format!("-{}", kernel.series());
            for s in of_it {
                let first = s.name.strip_suffix(&tail).is_some_and(|n| names.contains(n));
                assert_eq!(first, s.kernels.contains(&Kernel::V6_1), "{}", s.name);
            }
        }
    }

    /// Faults of netem.
    const NETEM: [&str; 4] = ["loss", "duplicate", "reorder", "delay"];
}
