//! The lab leaves nothing behind: no process (and so no namespace, bridge or tap, which go with them), no mount, no file
//! but logs; however it ends.
//!
//! These tests need root and Debian's package archive: `cargo test -p ferroce-interop --test cleanup -- --ignored
//! --test-threads 1`. They use the lab in `target/lab`, or in the folder that `FERROCE_LAB` names.

use std::{
    cell::RefCell,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

/// Environment variable by which a run's processes are found.
const MARK: &str = "FERROCE_CLEANUP_TEST";
/// For whatever must happen in the end, on however slow a machine.
const TIMEOUT: Duration = Duration::from_secs(300);

fn lab() -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/lab");
    std::env::var_os("FERROCE_LAB").map_or_else(default, PathBuf::from)
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + TIMEOUT;
    while !done() {
        assert!(Instant::now() < until, "not within {TIMEOUT:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A folder for a test's runs, and the processes with its mark.
struct Ground {
    dir: tempfile::TempDir,
    mark: String,
    /// Process ids of the runs.
    runs: RefCell<Vec<u32>>,
}

impl Ground {
    fn new(name: &str) -> Self {
        let dir = tempfile::tempdir().expect("tempdir");
        for sub in ["temp", "logs"] {
            fs::create_dir(dir.path().join(sub)).expect("mkdir");
        }
        Self {
            mark: format!("{MARK}={name}-{}", std::process::id()),
            dir,
            runs: RefCell::default(),
        }
    }

    fn logs(&self) -> PathBuf {
        self.dir.path().join("logs")
    }

    fn temp(&self) -> PathBuf {
        self.dir.path().join("temp")
    }

    fn start_in(&self, lab: &Path, args: &[&str]) -> Run {
        let (key, value) = self.mark.split_once('=').expect("a mark");
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferroce-interop"));
        command
            .arg("--lab")
            .arg(lab)
            .arg("--logs")
            .arg(self.logs())
            // Only the check of the captures needs it: without it a scenario fails when it is over.
            .args(["--ferroce", "/bin/false"])
            .args(args)
            .env(key, value)
            .env("TMPDIR", self.temp())
            .stdin(Stdio::null());
        let run = Run(command.spawn().expect("ferroce-interop"));
        self.runs.borrow_mut().push(run.0.id());
        run
    }

    fn start(&self, args: &[&str]) -> Run {
        self.start_in(&lab(), args)
    }

    /// Command lines of its processes.
    fn processes(&self) -> Vec<String> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").expect("proc").flatten() {
            let Ok(environment) = fs::read(entry.path().join("environ")) else {
                continue;
            };
            if environment.split(|b| *b == 0).any(|e| e == self.mark.as_bytes()) {
                let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
                found.push(String::from_utf8_lossy(&line).replace('\0', " "));
            }
        }
        found
    }

    fn runs_program(&self, name: &str) -> bool {
        self.processes().iter().any(|line| line.starts_with(name))
    }

    fn temp_files(&self) -> Vec<String> {
        let names = fs::read_dir(self.temp()).expect("temp").flatten();
        names.map(|e| e.file_name().to_string_lossy().into_owned()).collect()
    }

    /// File systems that are mounted where the runs may work, or under their names.
    fn mounts(&self) -> Vec<String> {
        let mut marks = vec![self.dir.path().display().to_string()];
        marks.extend(self.runs.borrow().iter().map(|id| format!("ferroce-lab-{id} ")));
        let text = fs::read_to_string("/proc/self/mounts").expect("mounts");
        let ours = |line: &&str| marks.iter().any(|m| line.contains(m));
        text.lines().filter(ours).map(str::to_owned).collect()
    }

    /// Nothing is left at the time of this call.
    fn assert_clean(&self) {
        assert_eq!(self.processes(), Vec::<String>::new(), "processes");
        assert_eq!(self.temp_files(), Vec::<String>::new(), "temporary files");
        assert_eq!(self.mounts(), Vec::<String>::new(), "mounts");
    }
}

/// A run; a test that fails takes it along.
struct Run(Child);

impl Run {
    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.0.id().to_string()]).status();
        assert!(sent.expect("kill").success());
    }

    fn end(&mut self) -> ExitStatus {
        let mut status = None;
        wait_until("the run ends", || {
            status = self.0.try_wait().expect("wait");
            status.is_some()
        });
        status.expect("a status")
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const SHORT: [&str; 4] = ["--only", "rping-our-client-v4", "--kernel", "6.1"];
const LONG: [&str; 4] = ["--only", "ops-v6-mtu1500", "--kernel", "6.1"];

/// In the long scenario.
fn started_long(ground: &Ground) -> Run {
    let run = ground.start(&LONG);
    let log = ground.logs().join("ops-v6-mtu1500/ops.log");
    wait_until("the scenario starts", || log.exists());
    assert!(ground.runs_program("qemu-system") && ground.runs_program("tcpdump"));
    run
}

#[test]
#[ignore = "needs root and the lab"]
fn ctrl_c_while_a_guest_boots() {
    let ground = Ground::new("boot");
    let mut run = ground.start(&SHORT);
    wait_until("the guest boots", || ground.runs_program("qemu-system"));
    run.signal("-INT");
    assert_eq!(run.end().code(), Some(130));
    ground.assert_clean();
}

#[test]
#[ignore = "needs root and the lab"]
fn termination_in_a_scenario() {
    let ground = Ground::new("scenario");
    for signal in ["-INT", "-TERM", "-HUP"] {
        let mut run = started_long(&ground);
        run.signal(signal);
        assert_eq!(run.end().code(), Some(130), "{signal}");
        ground.assert_clean();
        fs::remove_dir_all(ground.logs()).expect("logs");
    }
}

#[test]
#[ignore = "needs root and the lab"]
fn ctrl_c_while_the_lab_is_prepared() {
    let ground = Ground::new("setup");
    let lab = ground.dir.path().join("lab");
    let mut run = ground.start_in(&lab, &SHORT);
    wait_until("setup.sh runs", || {
        ground.processes().iter().any(|line| line.contains("setup.sh"))
    });
    run.signal("-INT");
    assert_eq!(run.end().code(), Some(130));
    ground.assert_clean();
    assert!(!lab.join("ready").exists(), "what is half done is not taken for ready");
}

#[test]
#[ignore = "needs root and the lab"]
fn a_scenario_that_fails() {
    let ground = Ground::new("failure");
    let mut run = ground.start(&SHORT);
    assert_eq!(run.end().code(), Some(1));
    ground.assert_clean();
    let kept = |name: &str| {
        let file = ground.logs().join("rping-our-client-v4").join(name);
        fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()))
    };
    assert!(!kept("dmesg.log").is_empty() && !kept("console.log").is_empty());
    assert!(ground.logs().join("rping-our-client-v4/wire.pcap").exists());
    assert!(
        kept("guest-1.log").contains("--- exit code 0"),
        "scripts and what they print"
    );
    assert!(kept("detail.log").contains("pcap check"), "why it failed");
}

#[test]
#[ignore = "needs root and the lab"]
fn kill_9_beside_another_run() {
    let ground = Ground::new("killed");
    let mut killed = started_long(&ground);
    killed.signal("-KILL");
    killed.end();
    wait_until("its processes end", || ground.processes().is_empty());
    assert_eq!(ground.temp_files().len(), 1, "the killed run's sockets");
    let left = ground.temp_files();

    // The next run removes that, and a third one nothing of the second.
    fs::remove_dir_all(ground.logs()).expect("logs");
    let mut second = started_long(&ground);
    let live = ground.temp_files();
    assert!(live.len() == 1 && live != left, "{live:?} after {left:?}");
    let mut third = ground.start(&["--peer", "127.0.0.1", "--peer-port", "1", "--peer-wait", "0"]);
    assert_eq!(third.end().code(), Some(1), "nobody is there");
    assert_eq!(ground.temp_files(), live);
    assert!(ground.runs_program("qemu-system"), "the second run goes on");
    let log = ground.logs().join("ops-v6-mtu1500/ops.log");
    second.end();
    let text = fs::read_to_string(log).expect("its log");
    assert!(text.contains("passed"), "{text}");
    ground.assert_clean();
}

#[test]
#[ignore = "needs root and the lab"]
fn two_runs_side_by_side() {
    let grounds = [Ground::new("left"), Ground::new("right")];
    let mut runs = [started_long(&grounds[0]), started_long(&grounds[1])];
    for (ground, run) in grounds.iter().zip(&mut runs) {
        run.end();
        let text = fs::read_to_string(ground.logs().join("ops-v6-mtu1500/ops.log")).expect("its log");
        assert!(text.contains("passed"), "{text}");
        ground.assert_clean();
    }
}
