//! QEMU migrates a guest from one process to another over RDMA. The guest is `c/guest.S`, which changes a third of its memory
//! for ever and checks it each time.
//!
//! What is checked: the migration is `completed` on one side and the guest is there on the other; all of its memory as the
//! source has it (`pmemsave`) is, byte for byte, what the destination has before it runs there; running there it goes on
//! checking its memory, and finds nothing wrong; both programs end with status 0. A guest that is busy has changed memory
//! that was sent before, so that there are at least three passes.
//!
//! Over IPv4 alone: with a RoCE device QEMU 7.2 refuses IPv6 addresses itself.

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use ferroce_loopback::tcp::free_port;
use serde_json::{Value, json};

use crate::{
    Result,
    cases::{Case, Migration, Plan},
    process::{Group, PAUSE, Setup, interrupted},
};

/// Of the guest, in MiB and bytes.
const MIB: u64 = 64;
const BYTES: u64 = MIB << 20;
/// Passes over the memory of a busy guest.
const PASSES: u64 = 3;
/// Bytes per second until then. A guest that gets little of the processor must have the time to change enough of its memory while
/// that is sent, and more than is sent in a millisecond: else it stands still.
const HELD_BACK: u64 = 16 << 20;
/// As good as no bound.
const UNBOUNDED: u64 = 1 << 40;
/// How long a guest may stand still at the end, in milliseconds: longer than a slow machine takes for all of its memory.
const DOWNTIME: u64 = 600_000;
/// Makes the guest from its source.
const BUILD: &str = concat!(
    "cc -m32 -nostdlib -static -no-pie -Wl,-Ttext=0x100000,-e,start,--build-id=none -o guest ",
    env!("CARGO_MANIFEST_DIR"),
    "/c/guest.S"
);

pub(crate) fn all() -> Vec<Case> {
    let case = |name: &str, pin, busy| {
        let command = format!("qemu-system-x86_64 -accel tcg -m {MIB} -nodefaults -display none -kernel guest");
        Case {
            plan: Plan::Migrate(Migration { pin, busy }),
            ..Case::alone(name, "qemu-system-x86", &command).within(600)
        }
    };
    vec![
        case("qemu migration", false, false),
        case("qemu migration, busy guest", false, true),
        case("qemu migration, rdma-pin-all, busy guest", true, true),
    ]
}

/// One QEMU and its control connection.
struct Machine {
    name: &'static str,
    group: Group,
    qmp: BufReader<UnixStream>,
}

impl Machine {
    fn start(
        setup: &Setup,
        case: &Case,
        dir: &Path,
        name: &'static str,
        more: &[&str],
        until: Instant,
    ) -> Result<Self> {
        let mut words = case.client.clone();
        words.extend(["-serial".into(), format!("file:{name}.serial")]);
        words.extend(["-qmp".into(), format!("unix:{name}.qmp,server=on,wait=off")]);
        words.extend(more.iter().map(|&w| w.to_owned()));
        let mut group = setup.start(case, &words, dir, name)?;
        let socket = dir.join(format!("{name}.qmp"));
        let stream = loop {
            if let Ok(stream) = UnixStream::connect(&socket) {
                break stream;
            }
            if let Ok(Some(status)) = group.wait(Instant::now()) {
                return Err(format!("{name} ended with {status}\n{}", group.text()));
            }
            pause(&format!("the control socket of {name}"), until)?;
        };
        let left = until
            .saturating_duration_since(Instant::now())
            .max(Duration::from_secs(1));
        let timed = stream.set_read_timeout(Some(left));
        timed.map_err(|e| format!("{name}: setting a timeout: {e}"))?;
        let qmp = BufReader::new(stream);
        let mut machine = Self { name, group, qmp };
        machine.line()?;
        machine.tell("qmp_capabilities", json!({}))?;
        Ok(machine)
    }

    /// The next message.
    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        let got = self.qmp.read_line(&mut line);
        match got {
            Ok(0) => Err(format!("{} has ended\n{}", self.name, self.group.text())),
            Ok(_) => serde_json::from_str(&line).map_err(|e| format!("{}: {e}: {line}", self.name)),
            Err(e) => Err(format!("{} does not answer: {e}\n{}", self.name, self.group.text())),
        }
    }

    /// Runs a command and returns its result; events in between are left out.
    fn tell(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let text = json!({ "execute": command, "arguments": arguments }).to_string();
        let sent = self.qmp.get_mut().write_all(text.as_bytes());
        sent.map_err(|e| format!("{}: {command}: {e}\n{}", self.name, self.group.text()))?;
        loop {
            let mut answer = self.line()?;
            if let Some(error) = answer.get("error") {
                return Err(format!("{}: {command}: {error}\n{}", self.name, self.group.text()));
            }
            if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            }
        }
    }

    /// Waits until the guest has checked that many rounds on this machine.
    fn rounds(&self, dir: &Path, count: usize, until: Instant) -> Result<()> {
        let file = dir.join(format!("{}.serial", self.name));
        loop {
            let told = fs::read(&file).map_err(|e| format!("{}: {e}", file.display()))?;
            if told.iter().any(|&byte| byte != b'R') {
                let text = String::from_utf8_lossy(&told);
                return Err(format!("the guest on {} found its memory changed: {text}", self.name));
            }
            if told.len() >= count {
                return Ok(());
            }
            pause(&format!("round {count} of the guest on {}", self.name), until)?;
        }
    }

    /// Waits for a state of the guest.
    fn state(&mut self, wanted: &str, until: Instant) -> Result<()> {
        loop {
            let answer = self.tell("query-status", json!({}))?;
            if answer["status"] == wanted {
                return Ok(());
            }
            pause(&format!("state {wanted} of {}, which says {answer}", self.name), until)?;
        }
    }

    /// Saves all of the guest's memory; returns the file.
    fn save(&mut self, dir: &Path) -> Result<File> {
        let name = format!("{}.memory", self.name);
        self.tell("pmemsave", json!({ "val": 0, "size": BYTES, "filename": name }))?;
        File::open(dir.join(&name)).map_err(|e| format!("{name}: {e}"))
    }

    fn quit(mut self, until: Instant) -> Result<()> {
        self.tell("quit", json!({}))?;
        match self.group.wait(until).map_err(|e| e.to_string())? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(format!("{} ended with {status}\n{}", self.name, self.group.text())),
            None => Err(format!("{} does not end\n{}", self.name, self.group.text())),
        }
    }
}

/// Waits a little; an error when it is too late, or when somebody wants us to end.
fn pause(what: &str, until: Instant) -> Result<()> {
    if interrupted() {
        return Err("interrupted".into());
    }
    if Instant::now() >= until {
        return Err(format!("too late: {what}"));
    }
    thread::sleep(PAUSE);
    Ok(())
}

/// Where two memories differ first; there has to be all of both.
fn compare(from: File, to: File) -> Result<()> {
    let (mut from, mut to) = (BufReader::new(from), BufReader::new(to));
    let (mut left, mut right) = ([0; 4096], [0; 4096]);
    for at in (0..BYTES).step_by(left.len()) {
        let read = from.read_exact(&mut left).and_then(|()| to.read_exact(&mut right));
        read.map_err(|e| format!("reading the memory at {at:#x}: {e}"))?;
        if left != right {
            return Err(format!("the page at {at:#x} is another one at the destination"));
        }
    }
    Ok(())
}

fn build(setup: &Setup, dir: &Path) -> Result<()> {
    let mut command = Command::new("sh");
    command.args(["-c", BUILD]).current_dir(dir).stdin(Stdio::null());
    setup.confine(&mut command, dir);
    let out = command.output().map_err(|e| format!("building the guest: {e}"))?;
    match out.status.success() {
        true => Ok(()),
        false => Err(format!("building the guest: {}", String::from_utf8_lossy(&out.stderr))),
    }
}

/// Waits until the migration is completed; returns how many passes there were over the memory. A guest that is busy may
/// stand still only after so many that some of its memory was sent more than once.
fn follow(from: &mut Machine, busy: bool, until: Instant) -> Result<u64> {
    let mut held = busy;
    loop {
        let told = from.tell("query-migrate", json!({}))?;
        let passes = told["ram"]["dirty-sync-count"].as_u64().unwrap_or_default();
        match told["status"].as_str() {
            Some("completed") => return Ok(passes),
            Some("failed" | "cancelled") => return Err(format!("the migration failed: {told}\n{}", from.group.text())),
            _ if held && passes >= PASSES => {
                let free = json!({ "downtime-limit": DOWNTIME, "max-bandwidth": UNBOUNDED });
                from.tell("migrate-set-parameters", free)?;
                held = false;
            }
            _ => pause(&format!("the migration, which says {told}"), until)?,
        }
    }
}

pub(crate) fn run(setup: &Setup, case: &Case, dir: &Path, how: Migration) -> Result<()> {
    build(setup, dir)?;
    let until = Instant::now() + Duration::from_secs(case.seconds);
    let port = free_port().map_err(|e| format!("finding a port: {e}"))?;
    let host = if case.net.v6 { "[{addr}]" } else { "{addr}" };
    let at = setup
        .fill(case, &[format!("rdma:{host}:{{port}}")], port, dir)?
        .concat();
    let mut from = Machine::start(setup, case, dir, "from", &[], until)?;
    let mut to = Machine::start(setup, case, dir, "to", &["-S", "-incoming", "defer"], until)?;
    from.rounds(dir, 2, until)?;
    if !how.busy {
        from.tell("stop", json!({}))?;
    }
    let capability = json!({ "capabilities": [{ "capability": "rdma-pin-all", "state": how.pin }] });
    for machine in [&mut to, &mut from] {
        machine.tell("migrate-set-capabilities", capability.clone())?;
    }
    // A limit of none would be no limit.
    let (downtime, rate) = match how.busy {
        true => (1, HELD_BACK),
        false => (DOWNTIME, UNBOUNDED),
    };
    let bounds = json!({ "downtime-limit": downtime, "max-bandwidth": rate });
    from.tell("migrate-set-parameters", bounds)?;
    to.tell("migrate-incoming", json!({ "uri": at }))?;
    from.tell("migrate", json!({ "uri": at }))?;
    let passes = follow(&mut from, how.busy, until).map_err(|e| format!("{e}\n--- to\n{}", to.group.text()))?;
    if how.busy && passes < PASSES {
        return Err(format!("the busy guest's memory was gone over {passes} times only"));
    }
    from.state("postmigrate", until)?;
    to.state("paused", until)?;
    compare(from.save(dir)?, to.save(dir)?)?;
    to.tell("cont", json!({}))?;
    to.rounds(dir, 2, until)?;
    from.quit(until)?;
    to.quit(until)
}
