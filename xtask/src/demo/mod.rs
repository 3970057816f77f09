//! The demo: a real ext4 image, served by one process, mapped by another, copied, checked, changed, written back.

mod image;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum};
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

use crate::{
    Result,
    cargo::{self, Profile},
    peers::{Counters, Ferroce},
    process, tools,
};

const SERVER: &str = "127.0.0.1";
const CLIENT: &str = "127.0.0.2";
const MB: u64 = 1_000_000;

#[derive(Args)]
pub(crate) struct DemoArgs {
    /// Megabytes of files in the image, at least
    #[arg(long, default_value_t = 220)]
    megabytes: u64,
    /// The NBD client that copies
    #[arg(long, value_enum, default_value_t = Client::Nbdcopy)]
    client: Client,
    /// Keep the images afterwards
    #[arg(long)]
    keep: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Client {
    Nbdcopy,
    QemuImg,
}

impl Client {
    const fn program(self) -> &'static str {
        match self {
            Self::Nbdcopy => "nbdcopy",
            Self::QemuImg => "qemu-img",
        }
    }

    /// A copy from one file or NBD address to another.
    fn command(self, from: &str, to: &str) -> Command {
        let mut command = Command::new(tools::find(self.program()).unwrap_or_else(|| self.program().into()));
        match self {
            Self::Nbdcopy => command.args(["--flush", from, to]),
            // -n: the target exists; for a file it is made first, by `copy`.
            Self::QemuImg => command.args(["convert", "-n", "-f", "raw", "-O", "raw", from, to]),
        };
        command
    }
}

/// A folder that goes away with this.
struct WorkDir {
    path: PathBuf,
    keep: bool,
}

impl WorkDir {
    fn new(parent: &Path, keep: bool) -> Result<Self> {
        let path = parent.join(format!("ferroce-demo-{}", std::process::id()));
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

/// Runs the demo.
pub(crate) fn run(args: &DemoArgs) -> Result<()> {
    tools::ensure(&[&tools::EXT4[..], &tools::NBD_CLIENTS[..2]].concat())?;
    let ferroce = cargo::build("ferroce", "ferroce", Profile::Release)?;
    cargo::run(&["doc", "--workspace", "--no-deps", "--quiet"])?;
    let started = Instant::now();
    let target = cargo::target_dir()?;
    let work = WorkDir::new(&target, args.keep)?;
    // Unix socket paths are short: not in the target folder.
    let sockets = WorkDir::new(&std::env::temp_dir(), false)?;
    let report = steps(args, &ferroce, &target, &work, &sockets.join("demo.sock"))?;
    report.print(started.elapsed());
    Ok(())
}

/// What the summary shows.
struct Report {
    image_bytes: u64,
    files: usize,
    out: Leg,
    back: Leg,
    server: Counters,
    client: Counters,
}

/// One copy through the mapped device.
struct Leg {
    bytes: u64,
    took: Duration,
}

impl Leg {
    fn rate(&self) -> String {
        let per_second = self.bytes as f64 / self.took.as_secs_f64().max(1e-9);
        format!(
            "{:.0} MB/s ({} in {:.2} s)",
            per_second / 1e6,
            HumanBytes(self.bytes),
            self.took.as_secs_f64()
        )
    }
}

impl Report {
    fn print(&self, took: Duration) {
        let both = |f: fn(&Counters) -> u64| f(&self.server) + f(&self.client);
        println!("\ndemo passed in {:.1} s", took.as_secs_f64());
        println!(
            "  image            {} ({} files)",
            HumanBytes(self.image_bytes),
            self.files
        );
        println!("  copied out       {}", self.out.rate());
        println!("  written back     {}", self.back.rate());
        println!(
            "  moved over RTRS  {}",
            HumanBytes(self.client.bytes_read + self.client.bytes_written)
        );
        println!("  packets sent     {}", both(|c| c.packets_sent));
        println!("  retransmissions  {}", both(|c| c.retransmits));
        println!("  ICRC errors      {}", both(|c| c.icrc_errors));
    }
}

fn steps(args: &DemoArgs, ferroce: &Path, target: &Path, work: &WorkDir, socket: &Path) -> Result<Report> {
    let image = work.join("demo.img");
    let built = image::build(&work.join("tree"), &image, target, args.megabytes * MB)?;
    let original = hash("hashing the image", &image)?;

    let mut serve = Ferroce::start(
        "ferroce serve",
        ferroce,
        &[
            "serve",
            "--json",
            "--addr",
            SERVER,
            "--export",
            &format!("demo={}", image.display()),
        ],
    )?;
    serve.wait_for("listening")?;
    let mut map = Ferroce::start(
        "ferroce map",
        ferroce,
        &[
            "map",
            "--json",
            "--stats-interval",
            "0.2",
            "--session",
            "demo",
            "--path",
            &format!("{CLIENT},{SERVER}"),
            "--device",
            "demo",
            "--nbd",
            &socket.to_string_lossy(),
        ],
    )?;
    map.wait_for("mapped")?;
    println!("serving on {SERVER}, mapped on {CLIENT}: {}", socket.display());

    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let copy = work.join("copy.img");
    let out = transfer(
        args.client,
        "copying out",
        &uri,
        &copy.to_string_lossy(),
        built.bytes,
        &mut serve,
        &mut map,
    )?;
    same("the copy", &hash("hashing the copy", &copy)?, &original)?;
    image::fsck("the copy", &copy)?;

    image::change(&copy, &work.join("note.txt"))?;
    let changed = hash("hashing the changed copy", &copy)?;
    if changed == original {
        return Err("the changed copy is equal to the original".into());
    }
    image::fsck("the changed copy", &copy)?;
    let back = transfer(
        args.client,
        "writing back",
        &copy.to_string_lossy(),
        &uri,
        built.bytes,
        &mut serve,
        &mut map,
    )?;
    same("the served image", &hash("hashing the served image", &image)?, &changed)?;

    let again = work.join("again.img");
    transfer(
        args.client,
        "copying out again",
        &uri,
        &again.to_string_lossy(),
        built.bytes,
        &mut serve,
        &mut map,
    )?;
    same("the second copy", &hash("hashing the second copy", &again)?, &changed)?;
    image::fsck("the second copy", &again)?;
    image::contains_note(&again)?;

    let client = map.finish()?;
    let server = serve.finish()?;
    Ok(Report {
        image_bytes: built.bytes,
        files: built.files,
        out,
        back,
        server,
        client,
    })
}

/// Copies with the NBD client, its progress taken from what the mapping process reports.
fn transfer(
    client: Client,
    what: &str,
    from: &str,
    to: &str,
    bytes: u64,
    serve: &mut Ferroce,
    map: &mut Ferroce,
) -> Result<Leg> {
    if client == Client::QemuImg && !to.starts_with("nbd") {
        let file = fs::File::create(to).map_err(|e| format!("{to}: {e}"))?;
        file.set_len(bytes).map_err(|e| format!("{to}: {e}"))?;
    }
    let base = map.moved();
    let bar = bar(what, bytes);
    let started = Instant::now();
    let mut command = client.command(from, to);
    let mut child = process::Guard::spawn(client.program(), command.stdout(Stdio::null()).stderr(Stdio::piped()))?;
    let errors = child.stderr_lines();
    let status = loop {
        serve.check()?;
        map.check()?;
        bar.set_position((map.moved() - base).min(bytes));
        if let Some(status) = child.try_wait()? {
            break status;
        }
        process::check_interrupt()?;
        std::thread::sleep(Duration::from_millis(20));
    };
    let took = started.elapsed();
    if !status.success() {
        let text: Vec<String> = errors.iter().collect();
        return Err(format!(
            "{what}: {} ended with {status}\n{}",
            client.program(),
            text.join("\n")
        ));
    }
    bar.set_position(bytes);
    done(&bar, what, &format!("{:.2} s", took.as_secs_f64()));
    Ok(Leg { bytes, took })
}

/// A bar with bytes, hidden when there is no terminal.
fn bar(what: &str, bytes: u64) -> ProgressBar {
    let template = "{msg:24} [{bar:40}] {bytes:>10} / {total_bytes} {bytes_per_sec}";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(bytes)
        .with_style(style.progress_chars("=> "))
        .with_message(what.to_owned())
}

/// Replaces a bar by one line, which is also there without a terminal.
fn done(bar: &ProgressBar, what: &str, result: &str) {
    bar.finish_and_clear();
    println!("{what:24} {result}");
}

/// SHA-256 of a file, in hexadecimal.
fn hash(what: &str, path: &Path) -> Result<String> {
    use sha2::{Digest, Sha256};
    use std::io::Read;

    let fail = |e: std::io::Error| format!("{}: {e}", path.display());
    let mut file = fs::File::open(path).map_err(fail)?;
    let bar = bar(what, file.metadata().map_err(fail)?.len());
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
    let hex: String = hasher.finalize().iter().map(|b| format!("{b:02x}")).collect();
    done(&bar, what, &format!("sha256 {}", &hex[..16]));
    Ok(hex)
}

fn same(what: &str, got: &str, want: &str) -> Result<()> {
    if got == want {
        Ok(())
    } else {
        Err(format!("{what} differs: sha256 {got}, expected {want}"))
    }
}
