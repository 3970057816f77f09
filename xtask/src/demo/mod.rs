//! The demo: perftest under `ferroce run`, then a real ext4 image that is served, mapped over two paths, copied while one of them
//! is cut, checked, changed and written back.

mod hosts;
mod image;
mod record;
mod screen;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use clap::Args;

use self::{
    hosts::{Host, Hosts, LINKS},
    screen::{Kind, Screen, bar},
};
use crate::{
    Result,
    cargo::{self, Profile},
    peers::{Counters, Ferroce},
    process,
    tally::Tally,
    tools::{self, Tool},
};

const MB: u64 = 1_000_000;
/// Address of perftest's server.
const PERFTEST_PORT: u16 = 18515;
/// Time for perftest's server to listen, and for a path to go down or come up.
const START: Duration = Duration::from_secs(30);
/// The picture in README.
const RECORD: &str = "docs/demo.svg";

#[derive(Args)]
pub(crate) struct DemoArgs {
    /// Megabytes of files in the image, as far as there are so many
    #[arg(long, default_value_t = 256)]
    megabytes: u64,
    /// Loopback addresses instead of network namespaces, as without root
    #[arg(long)]
    loopback: bool,
    /// The program to show, with its libraries beside it, instead of one that is built now
    #[arg(long, value_name = "FERROCE")]
    program: Option<PathBuf>,
    /// Write the terminal's picture for README, docs/demo.svg
    #[arg(long)]
    record: bool,
    /// Keep the images afterwards
    #[arg(long)]
    keep: bool,
}

impl DemoArgs {
    /// Without a build, for tests.
    fn of(program: &Path, loopback: bool) -> Self {
        Self {
            megabytes: 64,
            loopback,
            program: Some(program.to_owned()),
            record: false,
            keep: false,
        }
    }
}

/// A folder that is removed with this.
struct WorkDir {
    path: PathBuf,
    keep: bool,
}

impl WorkDir {
    fn new(parent: &Path, keep: bool) -> Result<Self> {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = parent.join(format!("ferroce-demo-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(Self { path, keep })
    }

    fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        if self.keep {
            println!("kept: {}", self.path.display());
        } else if let Err(e) = fs::remove_dir_all(&self.path) {
            eprintln!("warning: {} was not removed: {e}", self.path.display());
        }
    }
}

/// Programs that the demo needs.
fn needed(loopback: bool) -> Vec<Tool> {
    let namespaces = !loopback && tools::may_make_namespaces();
    let ip = namespaces.then_some(Tool::new("ip", "iproute2"));
    let others = [Tool::new("nbdcopy", "libnbd-bin"), tools::PERFTEST];
    tools::EXT4.into_iter().chain(others).chain(ip).collect()
}

/// Runs the demo.
pub(crate) fn run(args: &DemoArgs) -> Result<()> {
    tools::ensure(&needed(args.loopback))?;
    let ferroce = match &args.program {
        Some(program) => program.clone(),
        None => cargo::build_product(Profile::Demo)?,
    };
    let screen = Screen::new();
    screen.show(Kind::Command, "$ cargo xtask demo");
    let hosts = Hosts::new(args.loopback)?;
    screen.show(Kind::Table, hosts.described());
    let work = WorkDir::new(&cargo::target_dir()?, args.keep)?;
    // Unix socket paths are short: not in the target folder.
    let sockets = WorkDir::new(&std::env::temp_dir(), false)?;
    let demo = Demo {
        screen: &screen,
        hosts,
        ferroce,
        work: &work,
        sockets: &sockets,
    };
    let report = demo.steps(args.megabytes * MB)?;
    report.print(&screen);
    if args.record {
        let picture = record::svg(&screen.lines());
        fs::write(RECORD, picture).map_err(|e| format!("{RECORD}: {e}"))?;
        println!("wrote {RECORD}");
    }
    Ok(())
}

/// Runs the demo with programs that are built already: on both kinds of hosts, and interrupted.
pub(crate) fn suite(ferroce: &Path) -> Result<Tally> {
    let mut tally = Tally::default();
    tally.expect(run(&DemoArgs::of(ferroce, true)).map_err(|e| format!("demo on loopback: {e}")));
    if !tools::may_make_namespaces() {
        tally.not_run.push((2, format!("demo: {}", tools::NO_NAMESPACES)));
        return Ok(tally);
    }
    tally.expect(run(&DemoArgs::of(ferroce, false)).map_err(|e| format!("demo in namespaces: {e}")));
    tally.expect(interrupted(ferroce).map_err(|e| format!("interrupted demo: {e}")));
    Ok(tally)
}

/// Interrupts a demo while its device is mapped, and looks for what it left behind.
fn interrupted(ferroce: &Path) -> Result<()> {
    // By its path it may be another one: CI builds this program again while it runs.
    let own = "/proc/self/exe";
    let temp = WorkDir::new(&std::env::temp_dir(), false)?;
    let mut command = Command::new(own);
    command
        .args(["demo", "--megabytes", "64", "--program"])
        .arg(ferroce)
        .env("TMPDIR", &temp.path)
        .stdout(Stdio::piped());
    let mut demo = process::Guard::spawn("cargo xtask demo", &mut command)?;
    let (id, lines) = (demo.id(), demo.stdout_lines());
    let mapped = lines.iter().any(|line| line.contains("ferroce map"));
    let children = children(id);
    process::terminate(id);
    let status = demo.wait()?;
    if !mapped || children.len() < 3 {
        return Err(format!("the device was not mapped: processes {children:?}"));
    }
    if status.code() != Some(130) {
        return Err(format!("exit status 130 was expected, not {status}"));
    }
    let target = cargo::target_dir()?;
    let prefix = format!("ferroce-demo-{id}-");
    for folder in [&target, &temp.path] {
        let entries = fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        let left = entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned());
        if let Some(name) = left.into_iter().find(|name| name.starts_with(&prefix)) {
            return Err(format!("{} was left behind", folder.join(name).display()));
        }
    }
    match children.iter().find(|id| Path::new("/proc").join(id).exists()) {
        Some(id) => Err(format!("process {id} was left behind")),
        None => Ok(()),
    }
}

/// The children of all threads of a process.
fn children(id: u32) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
    tasks
        .filter_map(|task| fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|text| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        .collect()
}

/// Figures of the summary.
struct Report {
    perftest: Perftest,
    out: Leg,
    failover: Failover,
    back: Leg,
    server: Counters,
    client: Counters,
}

/// Result of ib_write_bw.
struct Perftest {
    message_bytes: u64,
    bytes_per_second: f64,
}

/// One copy through the mapped device.
struct Leg {
    bytes: u64,
    took: Duration,
}

impl Leg {
    /// The bytes moved since `base`: holes are not. The second report is certainly of the end.
    fn new(mapped: &mut Mapped, base: u64, took: Duration) -> Result<Self> {
        mapped.map.wait_for("stats")?;
        mapped.map.wait_for("stats")?;
        let bytes = mapped.map.moved() - base;
        Ok(Self { bytes, took })
    }

    fn rate(&self) -> String {
        let per_second = self.bytes as f64 / self.took.as_secs_f64().max(1e-9);
        format!(
            "{:.0} MB in {:.1} s, {:.0} MB/s",
            self.bytes as f64 / 1e6,
            self.took.as_secs_f64(),
            per_second / 1e6
        )
    }
}

/// How a path was lost under load.
#[derive(Default)]
struct Failover {
    /// Between the cut and the event that reports it.
    noticed: Option<Duration>,
    /// Requests that another path took over.
    requests: u64,
}

impl Report {
    fn print(&self, screen: &Screen) {
        let both = |f: fn(&Counters) -> u64| f(&self.server) + f(&self.client);
        let noticed = self.failover.noticed.unwrap_or_default().as_secs_f64();
        let rows = [
            (
                "ib_write_bw under ferroce run",
                format!(
                    "{:.2} GB/s, {}-byte WRITEs",
                    self.perftest.bytes_per_second / 1e9,
                    self.perftest.message_bytes
                ),
            ),
            ("copied out, one of two paths cut", self.out.rate()),
            (
                "failover",
                format!("after {noticed:.1} s, {} requests, no error", self.failover.requests),
            ),
            ("written back over both paths", self.back.rate()),
            ("packets sent, of them again", {
                format!("{}, {}", both(|c| c.packets_sent), both(|c| c.retransmits))
            }),
            ("wrong checksums (ICRC)", both(|c| c.icrc_errors).to_string()),
        ];
        screen.table(("what", "result"), &rows);
        let took = screen.elapsed().as_secs_f64();
        screen.show(Kind::Done, &format!("demo passed in {took:.1} s"));
    }
}

/// State shared by the steps.
struct Demo<'a> {
    screen: &'a Screen,
    hosts: Hosts,
    ferroce: PathBuf,
    work: &'a WorkDir,
    sockets: &'a WorkDir,
}

/// The mapped device.
struct Mapped {
    serve: Ferroce,
    map: Ferroce,
    uri: String,
    /// Bytes of the files in it.
    content: u64,
}

impl Demo<'_> {
    fn steps(&self, want: u64) -> Result<Report> {
        let screen = self.screen;
        let perftest = self.perftest()?;

        screen.step("An ext4 file system of the sources and what cargo has built");
        let image_path = self.work.join("demo.img");
        let image = image::build(screen, &self.work.join("tree"), &image_path, want)?;
        let original = hash(&image_path)?;
        screen.done(&format!(
            "{} files, {} MB, in an image of {} MB",
            image.files,
            image.content / MB,
            image.bytes / MB
        ));

        let mut mapped = self.map(&image_path, image.content)?;
        let copy = self.work.join("copy.img");
        let (out, failover) = self.copy_out(&mut mapped, &copy)?;

        screen.step("The copy is checked");
        screen.command("client", "sha256sum copy.img; e2fsck -fn copy.img");
        same("the copy", &hash(&copy)?, &original)?;
        image::fsck(&copy)?;
        screen.done("every byte is the server's, and the file system is clean");

        let (back, changed) = self.write_back(&mut mapped, &copy, &original)?;

        screen.step("The served image is checked");
        screen.command(
            "server",
            "sha256sum demo.img; e2fsck -fn demo.img; debugfs -R 'cat changed/note.txt' demo.img",
        );
        same("the served image", &hash(&image_path)?, &changed)?;
        image::fsck(&image_path)?;
        image::contains_note(&image_path)?;
        let client = mapped.map.finish()?;
        let server = mapped.serve.finish()?;
        screen.done("every byte is the client's, the file system is clean and has the change");
        Ok(Report {
            perftest,
            out,
            failover,
            back,
            server,
            client,
        })
    }

    /// Measures bandwidth between two processes of a program that knows nothing of ferroce.
    fn perftest(&self) -> Result<Perftest> {
        let screen = self.screen;
        screen.step("A program for RDMA hardware, unmodified: perftest under `ferroce run`");
        let mut server = self.ib_write_bw(Host::Server, &[])?;
        let end = Instant::now() + START;
        while !hosts::listens(server.id(), PERFTEST_PORT) {
            if server.try_wait()?.is_some() || Instant::now() > end {
                return finished(server, "ib_write_bw (server)").and(Err("ib_write_bw does not listen".into()));
            }
            process::check_interrupt()?;
            std::thread::sleep(Duration::from_millis(20));
        }
        let client = self.ib_write_bw(Host::Client, &[self.hosts.address(Host::Server, 1)])?;
        let output = finished(client, "ib_write_bw (client)")?;
        finished(server, "ib_write_bw (server)")?;
        let (table, result) = perftest_result(&output)?;
        screen.output(&table);
        screen.done(&format!(
            "{:.2} GB/s without RDMA hardware",
            result.bytes_per_second / 1e9
        ));
        Ok(result)
    }

    fn ib_write_bw(&self, host: Host, args: &[String]) -> Result<process::Guard> {
        let program = tools::find("ib_write_bw").unwrap_or_else(|| "ib_write_bw".into());
        let own = self.hosts.own_addresses(host);
        let (options, peer) = (own.join(" "), args.join(" "));
        let shown = ["ferroce run", &options, "-- ib_write_bw -F", &peer];
        let shown: Vec<_> = shown.into_iter().filter(|part| !part.is_empty()).collect();
        self.screen.command(host.name(), &shown.join(" "));
        let mut command = self.hosts.command(host, &self.ferroce);
        command.arg("run").args(own).arg("--").arg(program).arg("-F").args(args);
        let name = format!("ib_write_bw ({})", host.name());
        process::Guard::spawn(&name, command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    }

    /// Starts `ferroce serve` and `ferroce map`.
    fn map(&self, image: &Path, content: u64) -> Result<Mapped> {
        let screen = self.screen;
        let socket = self.sockets.join("demo.sock").display().to_string();
        screen.step("The image as a block device on another host, over two paths");
        let own = (1..=LINKS).map(|link| format!("--addr {}", self.hosts.address(Host::Server, link)));
        let own = own.collect::<Vec<_>>().join(" ");
        screen.command("server", &format!("ferroce serve {own} --export demo=demo.img"));
        let mut command = self.hosts.command(Host::Server, &self.ferroce);
        command.arg("serve").args(own.split_whitespace());
        command.args(["--json", "--export", &format!("demo={}", image.display())]);
        let mut serve = Ferroce::spawn("ferroce serve", &mut command)?;
        serve.wait_for("listening")?;

        let paths: Vec<_> = (1..=LINKS)
            .map(|link| format!("--path {}", self.hosts.path(link)))
            .collect();
        let options = format!("--session demo {}", paths.join(" "));
        screen.command("client", &format!("ferroce map {options} \\"));
        screen.show(Kind::Command, "             --device demo --nbd demo.sock");
        let mut command = self.hosts.command(Host::Client, &self.ferroce);
        command.arg("map").args(options.split_whitespace());
        command.args(["--device", "demo", "--nbd", &socket, "--control", &self.control()]);
        command.args(["--json", "--stats-interval", "0.02", "--reconnect-delay", "0.5"]);
        let mut map = Ferroce::spawn("ferroce map", &mut command)?;
        map.wait_for("mapped")?;
        screen.done("mapped");
        Ok(Mapped {
            serve,
            map,
            uri: format!("nbd+unix:///?socket={socket}"),
            content,
        })
    }

    fn control(&self) -> String {
        self.sockets.join("ctl").display().to_string()
    }

    /// Copies the device to a file, and cuts the second path in the middle of it.
    fn copy_out(&self, mapped: &mut Mapped, copy: &Path) -> Result<(Leg, Failover)> {
        let screen = self.screen;
        screen.step("The device is copied, and a path cut meanwhile");
        screen.command("client", "nbdcopy 'nbd+unix:///?socket=demo.sock' copy.img");
        let (mut cut, mut failover) = (None, Failover::default());
        let half = mapped.content / 2;
        let (uri, to) = (mapped.uri.clone(), copy.display().to_string());
        let (mut base, mut took) = (0, Duration::ZERO);
        // A small device may be copied between two reports of how far it is.
        let end = Instant::now() + START;
        while cut.is_none() && Instant::now() < end {
            base = mapped.map.moved();
            took = self.transfer(mapped, &uri, &to, &mut |map, moved| {
                // By then the session knows how fast the path usually answers.
                if cut.is_none() && moved >= half {
                    self.set_second_path(false)?;
                    cut = Some(Instant::now());
                }
                self.take_events(map, cut, &mut failover);
                Ok(())
            })?;
        }
        let cut = cut.ok_or("the device was copied again and again, each time too fast to cut a path meanwhile")?;
        let end = cut + START;
        while failover.noticed.is_none() {
            if Instant::now() > end {
                return Err("a path was cut, and `ferroce map` has not noticed".into());
            }
            process::check_interrupt()?;
            mapped.map.check()?;
            self.take_events(&mut mapped.map, Some(cut), &mut failover);
            std::thread::sleep(Duration::from_millis(20));
        }
        let leg = Leg::new(mapped, base, took)?;
        screen.output(&format!(
            "{} requests went over to the other path; nbdcopy saw no error",
            failover.requests
        ));
        screen.done(&leg.rate());
        Ok((leg, failover))
    }

    /// Shows and notes what `ferroce map` reports of its paths.
    fn take_events(&self, map: &mut Ferroce, cut: Option<Instant>, failover: &mut Failover) {
        while let Some(event) = map.next_event() {
            let text = |key: &str| event[key].as_str().unwrap_or_default().to_owned();
            match event["event"].as_str() {
                Some("path_down") => {
                    failover.noticed = failover.noticed.or(cut.map(|cut| cut.elapsed()));
                    let (path, why) = (text("path"), text("why"));
                    self.screen.output(&format!("path {path} is down: {why}"));
                }
                Some("failover") => failover.requests += event["requests"].as_u64().unwrap_or(0),
                _ => {}
            }
        }
    }

    /// Cuts or mends the second link; without links the path is disconnected and connected.
    fn set_second_path(&self, up: bool) -> Result<()> {
        if self.hosts.have_links() {
            let name = format!("link{LINKS}");
            let args = ["link", "set", &name, if up { "up" } else { "down" }];
            self.screen.command("client", &format!("ip {}", args.join(" ")));
            return self.hosts.ip(Host::Client, &args).map(|_| ());
        }
        let order = if up { "reconnect" } else { "disconnect" };
        let path = self.hosts.path(LINKS);
        self.screen
            .command("client", &format!("ferroce ctl path {order} {path}"));
        let mut command = Command::new(&self.ferroce);
        command.args(["ctl", "--socket", &self.control(), "path", order, &path]);
        process::capture("ferroce ctl", &mut command).map(|_| ())
    }

    /// Changes the copy, mends the path and copies it to the device. Returns the hash of what was written too.
    fn write_back(&self, mapped: &mut Mapped, copy: &Path, original: &str) -> Result<(Leg, String)> {
        let screen = self.screen;
        screen.step("The path is mended, the copy changed and written back");
        self.set_second_path(true)?;
        let up = mapped.map.wait_for("path_up")?;
        screen.output(&format!("path {} is up again", up["path"].as_str().unwrap_or_default()));
        screen.command("client", "debugfs -w -f changes copy.img");
        image::change(copy, &self.work.join("note.txt"))?;
        let changed = hash(copy)?;
        if changed == *original {
            return Err("the changed copy is equal to the original".into());
        }
        image::fsck(copy)?;
        screen.command("client", "nbdcopy --flush copy.img 'nbd+unix:///?socket=demo.sock'");
        let (from, uri) = (copy.display().to_string(), mapped.uri.clone());
        let base = mapped.map.moved();
        let took = self.transfer(mapped, &from, &uri, &mut |_, _| Ok(()))?;
        let leg = Leg::new(mapped, base, took)?;
        screen.done(&leg.rate());
        Ok((leg, changed))
    }

    /// Copies with nbdcopy, its progress taken from what the mapping process reports; `watch` gets the bytes so far.
    fn transfer(
        &self,
        mapped: &mut Mapped,
        from: &str,
        to: &str,
        watch: &mut dyn FnMut(&mut Ferroce, u64) -> Result<()>,
    ) -> Result<Duration> {
        let base = mapped.map.moved();
        let bar = bar("copying", mapped.content);
        let started = Instant::now();
        let mut command = Command::new(tools::find("nbdcopy").unwrap_or_else(|| "nbdcopy".into()));
        command
            .args(["--flush", from, to])
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = process::Guard::spawn("nbdcopy", &mut command)?;
        let errors = child.stderr_lines();
        let status = loop {
            mapped.serve.check()?;
            mapped.map.check()?;
            let moved = mapped.map.moved() - base;
            bar.set_position(moved.min(mapped.content));
            bar.suspend(|| watch(&mut mapped.map, moved))?;
            if let Some(status) = child.try_wait()? {
                break status;
            }
            process::check_interrupt()?;
            std::thread::sleep(Duration::from_millis(5));
        };
        let took = started.elapsed();
        bar.finish_and_clear();
        if !status.success() {
            let text: Vec<String> = errors.iter().collect();
            return Err(format!("nbdcopy {from} {to} ended with {status}\n{}", text.join("\n")));
        }
        Ok(took)
    }
}

/// Waits for a program's success and returns its output.
fn finished(mut child: process::Guard, name: &str) -> Result<String> {
    let (out, err) = (child.stdout_lines(), child.stderr_lines());
    let status = child.wait()?;
    let text = |lines: std::sync::mpsc::Receiver<String>| lines.iter().collect::<Vec<_>>().join("\n");
    let (out, err) = (text(out), text(err));
    match status.success() {
        true => Ok(out),
        false => Err(format!("{name} ended with {status}\n{out}\n{err}")),
    }
}

/// The two lines of perftest's table, and what they say. Its MB are 2^20 bytes.
fn perftest_result(output: &str) -> Result<(String, Perftest)> {
    let mut lines = output
        .lines()
        .skip_while(|line| !line.trim_start().starts_with("#bytes"));
    let found = lines.next().zip(lines.next());
    let (head, row) = found.ok_or_else(|| format!("ib_write_bw printed no result:\n{output}"))?;
    let mut fields = row.split_whitespace();
    let bytes = fields.next().and_then(|f| f.parse().ok());
    let average = fields.nth(2).and_then(|f| f.parse::<f64>().ok());
    match bytes.zip(average) {
        Some((message_bytes, average)) if average > 0.0 => Ok((
            format!("{}\n{}", head.trim(), row.trim()),
            Perftest {
                message_bytes,
                bytes_per_second: average * f64::from(1 << 20),
            },
        )),
        _ => Err(format!("ib_write_bw printed no result:\n{output}")),
    }
}

/// SHA-256 of a file, in hexadecimal.
fn hash(path: &Path) -> Result<String> {
    use sha2::{Digest, Sha256};
    use std::io::Read;

    let fail = |e: std::io::Error| format!("{}: {e}", path.display());
    let mut file = fs::File::open(path).map_err(fail)?;
    let bar = bar("sha256", file.metadata().map_err(fail)?.len());
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        process::check_interrupt()?;
        let n = file.read(&mut buffer).map_err(fail)?;
        if n == 0 {
            break;
        }
        hasher.update(&buffer[..n]);
        bar.inc(n as u64);
    }
    bar.finish_and_clear();
    Ok(hasher.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

fn same(what: &str, got: &str, want: &str) -> Result<()> {
    if got == want {
        Ok(())
    } else {
        Err(format!("{what} differs: sha256 {got}, expected {want}"))
    }
}

#[cfg(test)]
mod tests {
    use super::perftest_result;

    #[test]
    fn perftests_table_is_read() {
        let output = " local address: LID 0000\n #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n \
                      65536      5000             2110.11            2000.00\t\t   0.032000\n----\n";
        let (table, result) = perftest_result(output).unwrap();
        assert!(table.starts_with("#bytes") && table.lines().count() == 2, "{table}");
        assert_eq!(
            (result.message_bytes, result.bytes_per_second as u64),
            (65536, 2_097_152_000)
        );
        assert!(perftest_result("Couldn't connect\n").is_err());
        assert!(perftest_result("#bytes\n65536 5000 0.00 0.00 0.0\n").is_err());
    }
}
