//! 8: programs of others that were written for libibverbs and librdmacm, as Debian has them: one end runs under
//! `ferroce run` here, the other over rdma_rxe in the guest.

use std::{
    fs,
    net::IpAddr,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use roce::DatapathKind;

use super::{Ctx, Direction, JUMBO, SMALL, Scenario, stall};
use crate::{
    Error,
    far::Ip,
    guest::Shape,
    lab::{self, Proc, check_stop},
};

/// How long a program may take, on a host that does much else.
const TIMEOUT: Duration = Duration::from_secs(180);
/// What a server gets to end after its client.
const LINGER: Duration = Duration::from_secs(20);
/// How long a server gets to be ready.
const START: Duration = Duration::from_secs(30);
/// What a client prints when nobody listens where it connects to. Then a run is tried again whose server could not be seen to
/// listen ([`Pair::unseen`]), and no other: there it is a fault of ours. The third and fourth are what programs say of
/// rdma_connect and rconnect, the last how perftest says it of its first connection.
const REFUSED: [&str; 5] = [
    "CM_EVENT_REJECTED",
    "CM_EVENT_UNREACHABLE",
    "rdma_connect: Connection refused",
    "rpoll: Connection refused",
    "Unexpected CM event bl blka 8",
];
/// How often such a run is tried.
const TRIES: usize = 6;
/// Runs of a program that may fail before the others are left out.
const FAILURES: usize = 3;

/// How the client knows that the server is ready.
#[derive(Clone, Copy)]
enum Ready {
    /// It listens at the TCP port.
    Tcp,
    /// It listens at the port of the connection manager.
    Cm,
    /// It prints this.
    Says(&'static str),
}

/// How a server ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// By itself, with status 0.
    Zero,
    /// By itself, with any status: its output counts.
    Any,
    /// It serves for ever, and is stopped when the client is done.
    Stopped,
}

/// What shows that a run went well, beside exit statuses.
#[derive(Clone, Copy)]
struct Proof {
    /// Must be in what the server prints, so many times at least.
    server: (&'static str, usize),
    /// The same of the client.
    client: (&'static str, usize),
}

/// A program against itself. In commands `{server}` is the address of the server in the run's family, `{own}` that of the
/// side that runs it, `{tcp}` the server's IPv4 address (sockets that only arrange things), `{gid}` the index of the side's
/// GID, `{port}` a port, `{group}` a multicast address, `{copy}` a file to be, `{yielding}` puts the kernel's side behind the
/// kernel's own threads.
struct Pair {
    /// What it adds to the program's name; empty: nothing.
    label: &'static str,
    server: String,
    client: String,
    ready: Ready,
    end: End,
    proof: Proof,
    /// Only over this protocol, because the program can't do the other.
    only: Option<Ip>,
    /// The server writes a file that must equal the one that the client sends.
    copies: Option<&'static str>,
    /// The kernel can't do it: the guest's end, run alone, fails and prints this.
    lacking: Option<&'static str>,
}

/// A program with all that it is run with.
struct Program {
    name: &'static str,
    ci: [bool; 2],
    /// Of the guest.
    shape: Shape,
    pairs: Vec<Pair>,
}

/// Something in what a program prints that is never there when all is well.
const NEVER: [&str; 4] = ["invalid data", "data mismatch", "Failed status", "Segmentation"];

/// Which end is ours.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ours {
    Server,
    Client,
}

pub(super) fn list() -> Vec<Scenario> {
    let mut all = Vec::new();
    for n in 0..programs().len() {
        for ours in [Ours::Server, Ours::Client] {
            let program = &programs()[n];
            let (side, direction, ci) = match ours {
                Ours::Server => ("server", Direction::KernelToOurs, program.ci[0]),
                Ours::Client => ("client", Direction::OursToKernel, program.ci[1]),
            };
            let name = format!("program-{}-our-{side}", program.name);
            let run = move |c: &mut Ctx<'_>| run_program(c, &programs()[n], ours);
            all.push(Scenario::new(8, name, direction, run).ci_if(ci).shape(program.shape));
        }
    }
    all
}

impl Pair {
    /// With both IP versions, and a server that ends with status 0.
    fn new(label: &'static str, server: String, client: String, ready: Ready, proof: Proof) -> Self {
        Self {
            label,
            server,
            client,
            ready,
            end: End::Zero,
            proof,
            only: None,
            copies: None,
            lacking: None,
        }
    }

    /// Whether the client may come before its server listens. A server of ours can't be seen to listen at a port of the
    /// connection manager; perftest's servers listen a second time when their client may already have come (`-R`: once for
    /// the parameters, once for the test).
    fn unseen(&self, ours: Ours) -> bool {
        let second = self.server.starts_with("ib_") && self.server.split(' ').any(|word| word == "-R");
        second || matches!(self.ready, Ready::Cm) && ours == Ours::Server
    }

    /// Whether the program itself may wait for ever. `ib_send_lat -e` of perftest 4.5 has one channel for the events of both
    /// its completion queues and looks at one queue after each: when they come the other way round, it waits for an event
    /// that it has taken (later versions have a channel for each).
    fn takes_events_for_others(&self) -> bool {
        self.server.starts_with("ib_send_lat") && self.server.split(' ').any(|word| word == "-e")
    }

    /// Whether to try again after a failure.
    fn again(&self, ours: Ours, e: &Error) -> bool {
        self.unseen(ours) && refused(e) || self.takes_events_for_others() && e.to_string().contains(lab::STILL_RUNS)
    }

    fn ready(mut self, ready: Ready) -> Self {
        self.ready = ready;
        self
    }

    fn end(mut self, end: End) -> Self {
        self.end = end;
        self
    }

    fn proof(mut self, server: (&'static str, usize), client: (&'static str, usize)) -> Self {
        self.proof = Proof { server, client };
        self
    }

    fn only(mut self, ip: Ip) -> Self {
        self.only = Some(ip);
        self
    }

    fn lacking(mut self, text: &'static str) -> Self {
        self.lacking = Some(text);
        self
    }

    fn copies(mut self, file: &'static str) -> Self {
        self.copies = Some(file);
        self
    }
}

fn program(name: &'static str, pairs: Vec<Pair>) -> Program {
    Program {
        name,
        ci: [false; 2],
        shape: SMALL,
        pairs,
    }
}

/// With the short set, too: our server, our client.
fn ci(mut program: Program, ci: [bool; 2]) -> Program {
    program.ci = ci;
    program
}

fn programs() -> Vec<Program> {
    let mut all = pingpongs();
    all.extend(perftest());
    all.extend(rdmacm());
    all.push(jumbo());
    all
}

const IBVERBS: [(&str, &[&str]); 4] = [
    (
        "ibv_rc_pingpong",
        &["-c -s 20000", "-e", "-N -s 100", "-m 256 -s 5000", "-s 1048576 -n 5"],
    ),
    ("ibv_uc_pingpong", &["-c", "-e"]),
    ("ibv_ud_pingpong", &["-c -s 1000", "-e -s 1000"]),
    ("ibv_srq_pingpong", &["-c", "-e"]),
];

fn pingpong(program: &'static str, options: &'static str) -> Pair {
    let command = format!("{program} -g {{gid}} -p {{port}} -n 50 {options}");
    let proof = Proof {
        server: ("iters in", 1),
        client: ("iters in", 1),
    };
    let client = format!("{command} {{tcp}}");
    Pair::new(options, command, client, Ready::Tcp, proof)
}

fn pingpongs() -> Vec<Program> {
    let of = |(name, options): (&'static str, &[&'static str])| {
        program(name, options.iter().map(|o| pingpong(name, o)).collect())
    };
    let mut all: Vec<Program> = IBVERBS.into_iter().map(of).collect();
    // Each service; shared queues are of RC.
    for (program, ci) in all
        .iter_mut()
        .zip([[false; 2], [false, true], [true, false], [false, true]])
    {
        program.ci = ci;
    }
    all
}

/// Programs of perftest with what they are run with. Writes have no completions to sleep on: perftest refuses -e with them.
const PERFTEST: [(&str, &[&str]); 8] = [
    (
        "ib_send_bw",
        &[
            "",
            "-c UC",
            "-c UD -s 1000",
            "-e",
            "--use-srq",
            "-q 8",
            "-b",
            "-s 1048576 -n 5",
            "-a -n 5",
            "-D 3",
            "-R",
            "-R -c UD -s 1000",
        ],
    ),
    (
        "ib_send_lat",
        &[
            "",
            "-c UC",
            "-c UD -s 1000",
            "-e",
            "--use-srq",
            "-I 64 -s 64",
            "-a -n 5",
            "-D 3",
            "-R",
        ],
    ),
    ("ib_write_bw", &["", "-c UC", "-q 8", "-b", "-a -n 5", "-D 3", "-R"]),
    ("ib_write_lat", &["", "-c UC", "-I 64 -s 64", "-a -n 5", "-D 3", "-R"]),
    (
        "ib_read_bw",
        &["", "-e", "-q 8", "-b", "-s 1048576 -n 5", "-a -n 5", "-D 3", "-R"],
    ),
    ("ib_read_lat", &["", "-e", "-a -n 5", "-D 3", "-R"]),
    (
        "ib_atomic_bw",
        &["", "-A CMP_AND_SWAP", "-e", "-q 8", "-b", "-D 3", "-R"],
    ),
    ("ib_atomic_lat", &["", "-e", "-D 3", "-R"]),
];

fn one_perftest(program: &'static str, options: &'static str) -> Pair {
    let has = |option: &str| options.split(' ').any(|o| o == option);
    let cm = has("-R");
    let size = match has("-s") || has("-a") || program.starts_with("ib_atomic") {
        true => "",
        false => "-s 5000",
    };
    let count = if has("-n") || has("-D") { "" } else { "-n 100" };
    let place = if cm { "" } else { "-x {gid}" };
    let command = format!("{program} -F {place} -p {{port}} {count} {size} {options}");
    let row = match program.ends_with("_bw") {
        true => "BW average[MB/sec]",
        false if has("-D") => "t_avg[usec]",
        false => "t_typical[usec]",
    };
    let (ready, peer) = if cm {
        (Ready::Cm, "{server}")
    } else {
        (Ready::Tcp, "{tcp}")
    };
    let client = format!("{command} {peer}");
    let proof = Proof {
        server: ("---", 1),
        client: (row, 1),
    };
    Pair {
        // Its RDMA_CM knows IPv4 only ("Address family for hostname not supported"); all sizes and three seconds take long.
        only: (cm || has("-a") || has("-D")).then_some(Ip::V4),
        ..Pair::new(options, command, client, ready, proof)
    }
}

fn perftest() -> Vec<Program> {
    let of = |(name, options): (&'static str, &[&'static str])| {
        program(name, options.iter().map(|o| one_perftest(name, o)).collect())
    };
    PERFTEST.into_iter().map(of).collect()
}

/// What a path MTU of 4096 bytes changes for: one program of each service and operation.
fn jumbo() -> Program {
    let pairs = vec![
        pingpong("ibv_rc_pingpong", "-m 4096 -c -s 20000"),
        pingpong("ibv_uc_pingpong", "-m 4096 -c -s 20000"),
        pingpong("ibv_ud_pingpong", "-c -s 4000"),
        pingpong("ibv_srq_pingpong", "-m 4096 -c"),
        one_perftest("ib_send_bw", "-m 4096 -s 1048576 -n 5"),
        one_perftest("ib_send_bw", "-c UD -s 4096"),
        one_perftest("ib_write_bw", "-m 4096 -s 1048576 -n 5"),
        one_perftest("ib_read_bw", "-m 4096 -s 1048576 -n 5"),
        one_perftest("ib_atomic_lat", "-R"),
    ];
    Program {
        shape: JUMBO,
        ..program("mtu9000", pairs)
    }
}

fn rdmacm() -> Vec<Program> {
    let nothing = Proof {
        server: ("", 0),
        client: ("", 0),
    };
    let pair = |label: &'static str, server: &str, client: &str| {
        Pair::new(label, server.to_owned(), client.to_owned(), Ready::Cm, nothing)
    };
    let rping = |label| {
        // The server's status says nothing: it depends on who is faster with the disconnect.
        pair(
            label,
            &format!("rping -s -a {{own}} -p {{port}} -C 10 -V -v {label}"),
            &format!("rping -c -a {{server}} -p {{port}} -C 10 -V -v {label}"),
        )
        .end(End::Any)
        .proof(("ping data", 10), ("ping data", 10))
    };
    let zero = ("return status 0", 1);
    let ucmatose = pair(
        "-c 5 -C 12 -S 3000",
        "ucmatose -b {own} -p {port} -c 5 -C 12 -S 3000",
        "ucmatose -s {server} -p {port} -c 5 -C 12 -S 3000",
    );
    let udaddy = pair(
        "-c 3",
        "udaddy -b {own} -c 3 -C 10 -S 900",
        "udaddy -s {server} -c 3 -C 10 -S 900",
    );
    // Its sender waits for no completion before it destroys address handle and queue pair. 6.12's rdma_rxe sends from a
    // work queue, and what that has not sent by then is dropped: with one CPU a sender of idle priority lets it go first.
    let mckey = |label| {
        pair(
            label,
            "mckey -m {group} -b {own} -C 10 -S 900",
            "{yielding} mckey -m {group} -b {own} -s -C 10 -S 900",
        )
    };
    let cmtime = pair(
        "-c 10",
        "cmtime -b {own} -p {port} -c 10",
        "cmtime -s {server} -p {port} -c 10",
    );
    let rstream = pair(
        "-T v",
        "rstream -b {own} -p {port} -S 5000 -I 2 -C 20 -T v",
        "rstream -s {server} -p {port} -S 5000 -I 2 -C 20 -T v",
    );
    vec![
        program("rping", vec![rping("-S 100"), rping("-S 20000"), rping("-q")]),
        program("ucmatose", vec![ucmatose.proof(zero, zero)]),
        ci(program("udaddy", vec![udaddy.proof(zero, zero)]), [false, true]),
        program(
            "mckey",
            vec![
                mckey("").ready(Ready::Says("joined")).proof(zero, zero).only(Ip::V4),
                mckey("(no IPv6 groups in the kernel)")
                    .lacking("failure joining: Unknown error 524")
                    .only(Ip::V6),
            ],
        ),
        program(
            "rdma_client",
            vec![
                pair(
                    "",
                    "rdma_server -s {own} -p {port}",
                    "rdma_client -s {server} -p {port}",
                )
                .proof(("end 0", 1), ("end 0", 1)),
            ],
        ),
        program(
            "rdma_xclient",
            vec![
                // The server takes the first wildcard address, which is IPv4's.
                pair(
                    "-c r",
                    "rdma_xserver -p {port} -c r",
                    "rdma_xclient -s {server} -p {port} -c r",
                )
                .proof(("end 0", 1), ("end 0", 1))
                .only(Ip::V4),
            ],
        ),
        program("cmtime", vec![cmtime.end(End::Stopped)]),
        program(
            "rcopy",
            vec![
                pair("", "rcopy -p {port}", "rcopy /bin/ls {server}:{copy} -p {port}")
                    .end(End::Stopped)
                    .copies("/bin/ls")
                    .only(Ip::V4),
            ],
        ),
        program("rstream", vec![rstream]),
    ]
}

/// What one run of a pair needs to know.
struct Setting<'a> {
    pair: &'a Pair,
    ip: Ip,
    ours: Ours,
    port: u16,
    /// GID index there.
    gid: &'a str,
    /// Names of logs start with it.
    log: String,
}

/// First of the ports; each run has its own, so that none meets what is left of another.
const PORTS: u16 = 21000;

/// The broker of our programs. If one of them started it, it would stay some seconds after the last, with the address.
fn broker(c: &Ctx<'_>) -> Result<Proc, Error> {
    let dir = c.broker_dir();
    let _ = fs::remove_dir_all(&dir);
    let mut command = Command::new(&c.places.ferroce);
    command.args(["broker", "--stay", "--dir"]).arg(&dir);
    let mut broker = Proc::spawn("broker", &mut command, &c.dir)?;
    broker.wait_until(START, || dir.join("broker.sock").exists())?;
    Ok(broker)
}

fn run_program(c: &mut Ctx<'_>, program: &Program, ours: Ours) -> Result<String, Error> {
    let _broker = broker(c)?;
    let gids = [c.far.gid(Ip::V4, &c.dir)?.index, c.far.gid(Ip::V6, &c.dir)?.index];
    let (mut done, mut wrong) = (Vec::new(), Vec::new());
    let mut port = PORTS;
    // Lines of the capture that have excused a run.
    let mut judged = 0;
    for (n, pair) in program.pairs.iter().enumerate() {
        let mut over = Vec::new();
        let setting = |port, gid, ip| Setting {
            pair,
            ip,
            ours,
            port,
            gid,
            log: format!("{n}-{}", ip.tag()),
        };
        for (ip, gid) in Ip::BOTH.into_iter().zip(&gids) {
            if pair.only.is_some_and(|only| only != ip) || wrong.len() >= FAILURES {
                continue;
            }
            let t0 = Instant::now();
            let mut attempt = |c: &mut Ctx<'_>| {
                port += 1;
                setting(port, gid, ip).run(c)
            };
            let mut result = attempt(c);
            let mut tries = 1;
            while tries < TRIES
                && result
                    .as_ref()
                    .is_err_and(|e| pair.again(ours, e) || kernel_stopped(c, e, &mut judged))
            {
                tries += 1;
                result = attempt(c);
            }
            let tried = match tries {
                1 => String::new(),
                n => format!(", {n} tries"),
            };
            match result {
                Ok(()) => over.push(format!("{} {:.1} s{tried}", ip.tag(), t0.elapsed().as_secs_f64())),
                Err(e) => {
                    check_stop()?;
                    wrong.push(format!("{} over IP{}{tried}: {e}", name(pair), ip.tag()));
                }
            }
        }
        done.push(format!("{} ({})", name(pair), over.join(", ")));
    }
    match wrong.is_empty() {
        true => Ok(done.join("; ")),
        false => Err(wrong.join("\n").into()),
    }
}

/// Whether a run failed because the kernel stopped in the middle of a message: see [`stall::kernel_stopped`].
fn kernel_stopped(c: &Ctx<'_>, e: &Error, judged: &mut usize) -> bool {
    e.to_string().contains(lab::STILL_RUNS) && stall::kernel_stopped(c, judged)
}

/// Whether a run failed because its server did not listen yet.
fn refused(e: &Error) -> bool {
    let text = e.to_string();
    REFUSED.iter().any(|word| text.contains(word))
}

/// The client's program, with what it is run with.
fn name(pair: &Pair) -> String {
    let mut words = pair.client.split_whitespace();
    let program = words.find(|word| !word.starts_with('{')).unwrap_or_default();
    format!("{program} {}", pair.label).trim().to_owned()
}

impl Setting<'_> {
    /// The command of a side, its words filled in.
    fn words(&self, c: &Ctx<'_>, command: &str, here: bool) -> Result<Vec<String>, Error> {
        let addr = |here: bool, ip: Ip| -> Result<IpAddr, Error> { if here { c.host(ip) } else { c.far.addr(ip) } };
        let server_here = self.ours == Ours::Server;
        // Ours has the addresses of both families as GIDs, IPv4's first.
        let own_gid = if self.ip == Ip::V4 { "0" } else { "1" };
        let group = match self.ip {
            Ip::V4 => "239.77.1.2",
            Ip::V6 => "ff0e::77:1:2",
        };
        let filled = command
            .replace("{server}", &addr(server_here, self.ip)?.to_string())
            .replace("{own}", &addr(here, self.ip)?.to_string())
            .replace("{tcp}", &addr(server_here, Ip::V4)?.to_string())
            .replace("{gid}", if here { own_gid } else { self.gid })
            .replace("{port}", &self.port.to_string())
            .replace("{group}", group)
            .replace("{yielding}", if here { "" } else { "chrt -i 0" })
            .replace("{copy}", &self.copy(c));
        Ok(filled.split_whitespace().map(str::to_owned).collect())
    }

    /// Where the server writes a file.
    fn copy(&self, c: &Ctx<'_>) -> String {
        match self.ours {
            Ours::Server => c.path(&format!("{}-copy", self.log)),
            Ours::Client => format!("/tmp/copy-{}", self.port),
        }
    }

    fn start(&self, c: &Ctx<'_>, server: bool) -> Result<Proc, Error> {
        let (name, command) = match server {
            true => (format!("{}-server", self.log), &self.pair.server),
            false => (format!("{}-client", self.log), &self.pair.client),
        };
        let here = server == (self.ours == Ours::Server);
        let words = self.words(c, command, here)?;
        if here {
            return c.preloaded(&name, &words, self.ip);
        }
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        c.theirs(&name, &words, TIMEOUT.as_secs() as u32)
    }

    /// The guest's end says that the kernel can't do it.
    fn lacks(&self, c: &Ctx<'_>, text: &str) -> Result<(), Error> {
        let mut theirs = self.start(c, self.ours == Ours::Client)?;
        theirs.wait_gone(TIMEOUT)?;
        match theirs.finish(TIMEOUT) {
            Err(e) if e.to_string().contains(text) => Ok(()),
            other => Err(format!("the kernel does not say {text:?}: {other:?}").into()),
        }
    }

    fn run(&self, c: &mut Ctx<'_>) -> Result<(), Error> {
        if let Some(text) = self.pair.lacking {
            return self.lacks(c, text);
        }
        let mut server = self.start(c, true)?;
        let mut client = self.ready(c, &mut server).and_then(|()| self.start(c, false))?;
        let both = |e: Error, server: &Proc| Error::from(format!("{e}\n--- its server:\n{}", server.text()));
        let said = client.finish(TIMEOUT).map_err(|e| both(e, &server))?;
        self.proven(&said, self.pair.proof.client)
            .map_err(|e| both(format!("the client printed {e}:\n{said}").into(), &server))?;
        match self.pair.end {
            End::Zero => drop(server.finish(LINGER)?),
            End::Any => server.wait_gone(LINGER)?,
            End::Stopped => {}
        }
        let said = server.text();
        self.proven(&said, self.pair.proof.server)
            .map_err(|e| format!("the server printed {e}:\n{said}"))?;
        self.compare(c)
    }

    fn proven(&self, text: &str, (wanted, times): (&str, usize)) -> Result<(), String> {
        if let Some(bad) = NEVER.iter().find(|bad| text.contains(*bad)) {
            return Err(format!("{bad:?}"));
        }
        match times > 0 && text.matches(wanted).count() < times {
            true => Err(format!("less than {times} times {wanted:?}")),
            false => Ok(()),
        }
    }

    /// The file that the server wrote is the one that it was sent.
    fn compare(&self, c: &mut Ctx<'_>) -> Result<(), Error> {
        let Some(file) = self.pair.copies else { return Ok(()) };
        let copy = self.copy(c);
        if self.ours == Ours::Client {
            return c.guest()?.run(&format!("cmp {file} {copy} && rm {copy}"), 60).map(drop);
        }
        match fs::read(file)? == fs::read(&copy)? {
            true => Ok(()),
            false => Err(format!("{copy} is not {file}").into()),
        }
    }

    /// Waits until the server is ready.
    fn ready(&self, c: &mut Ctx<'_>, server: &mut Proc) -> Result<(), Error> {
        let here = self.ours == Ours::Server;
        match self.pair.ready {
            Ready::Says(what) => server.wait_for(what, START),
            Ready::Tcp if here => server.wait_until(START, || listens(self.port)),
            // Nobody sees from outside where it listens: see `Pair::unseen`.
            Ready::Cm if here => server.still_runs(),
            Ready::Tcp => self.poll(
                c,
                &format!(
                    "grep -q ':{:04X} [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6",
                    self.port
                ),
            ),
            Ready::Cm => self.poll(c, "rdma resource show cm_id | grep -q LISTEN"),
        }
    }

    /// Waits until a command in the guest says yes.
    fn poll(&self, c: &mut Ctx<'_>, command: &str) -> Result<(), Error> {
        let seconds = START.as_secs();
        let script = format!(
            "for i in $(seq {}); do {command} && exit 0; sleep 0.05; done; exit 1",
            20 * seconds
        );
        c.guest()?.run(&script, seconds as u32 + 5).map(drop)
    }
}

/// Whether somebody listens at a TCP port here: the kernel's tables, so that no connection disturbs the server.
fn listens(port: u16) -> bool {
    const LISTEN: &str = "0A";
    let suffix = format!(":{port:04X}");
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
        let text = fs::read_to_string(table).unwrap_or_default();
        text.lines().any(|line| {
            let mut fields = line.split_whitespace().skip(1);
            fields.next().is_some_and(|local| local.ends_with(&suffix)) && fields.nth(1) == Some(LISTEN)
        })
    })
}

impl Ctx<'_> {
    fn broker_dir(&self) -> PathBuf {
        self.places.run.join("broker")
    }

    /// Starts a program under `ferroce run`, with the broker of [`broker`].
    fn preloaded(&self, name: &str, words: &[String], ip: Ip) -> Result<Proc, Error> {
        Proc::spawn(
            name,
            self.run_command(words, ip)?
                .env("FERROCE_BROKER_DIR", self.broker_dir()),
            &self.dir,
        )
    }

    /// Starts a program under `ferroce run`. What it starts in the background goes with the last of them.
    pub(super) fn under_run(&self, name: &str, words: &[String], ip: Ip) -> Result<Proc, Error> {
        let mut command = self.run_command(words, ip)?;
        command
            .env("FERROCE_BROKER_DIR", self.shared_dir())
            .env("FERROCE_BROKER_LINGER", "0.5");
        Proc::spawn(name, &mut command, &self.dir)
    }

    /// `ferroce run` with a program, on our addresses of both families; by packet sockets on the one that it uses.
    fn run_command(&self, words: &[String], ip: Ip) -> Result<Command, Error> {
        // Lines shall come when they are written, as they do from the guest.
        let mut command = Command::new("stdbuf");
        command.args(["-o", "L"]).arg(&self.places.ferroce).arg("run");
        let single = matches!(self.datapath, DatapathKind::Packet { .. });
        for ip in Ip::BOTH.into_iter().filter(|each| !single || *each == ip) {
            command.args(["--addr", &self.host(ip)?.to_string()]);
        }
        command
            .arg("--")
            .args(words)
            .env("FERROCE_DATAPATH", self.datapath.to_string());
        Ok(command)
    }
}

#[cfg(test)]
mod tests {
    use super::{Ours, programs};

    #[test]
    fn only_a_server_that_was_not_seen_to_listen_excuses_a_refusal() {
        for (program, label, unseen) in [
            ("ib_send_bw", "-R", [true, true]),
            ("ib_send_bw", "-e", [false, false]),
            ("ibv_rc_pingpong", "-e", [false, false]),
            ("rping", "-S 100", [true, false]),
            ("ucmatose", "-c 5 -C 12 -S 3000", [true, false]),
            ("rdma_xclient", "-c r", [true, false]),
            ("mckey", "", [false, false]),
        ] {
            let all = programs();
            let pairs = all.iter().filter(|p| p.name == program).flat_map(|p| &p.pairs);
            let pair = pairs.into_iter().find(|p| p.label == label).expect(program);
            assert_eq!(
                [Ours::Server, Ours::Client].map(|o| pair.unseen(o)),
                unseen,
                "{program} {label}"
            );
        }
    }
}
