//! Lines of `ferroce run -v` about failures: programs in C make mistakes, and each must be explained by one line, on both sides of a
//! connection where two have to do with it.
//!
//! The programs need a C compiler and the headers of rdma-core (Debian: gcc, librdmacm-dev).

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    thread::{self, JoinHandle},
};

use ferroce_tests::{ferroce, fresh_address, root};

/// Beginning of a line that says which mistake comes next.
const MARK: &str = "## ";
/// Beginning of each of our lines.
const OURS: &str = "ferroce: ";

/// Folder with programs and a broker.
struct Lab(tempfile::TempDir);

impl Lab {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// Builds a program beside this file.
    fn build(&self, name: &str, options: &[&str]) -> PathBuf {
        let (program, tests) = (self.0.path().join(name), root().join("tests"));
        let built = Command::new("cc")
            .args(["-Wall", "-Werror", "-O1"])
            .args(options)
            .arg("-I")
            .arg(tests.join("apps/c"))
            .arg("-o")
            .arg(&program)
            .arg(tests.join("tests/it/explain").join(name).with_extension("c"))
            .args(["-libverbs", "-lrdmacm"])
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&built.stderr).into_owned();
        assert!(
            built.status.success(),
            "cc and the headers of librdmacm-dev are needed: {errors}"
        );
        program
    }

    /// `ferroce run` with these options.
    fn command(&self, options: &[&str], program: &Path) -> Command {
        let mut command = Command::new(ferroce());
        command.arg("run").args(options).arg("--").arg(program);
        command.env("FERROCE_BROKER_DIR", self.0.path().join("broker"));
        for name in ["FERROCE_LOG", "FERROCE_PCAP", "FERROCE_ADDR", "FERROCE_DEVICE_NAME"] {
            command.env_remove(name);
        }
        command
    }
}

/// Lines of ours by mistake.
fn explained(stderr: &str) -> BTreeMap<String, Vec<String>> {
    let mut out = BTreeMap::new();
    let mut current = String::new();
    for line in stderr.lines() {
        if let Some(name) = line.strip_prefix(MARK) {
            name.clone_into(&mut current);
            out.entry(current.clone()).or_insert_with(Vec::new);
        } else if let Some(text) = line.strip_prefix(OURS) {
            out.entry(current.clone()).or_default().push(text.to_owned());
        }
    }
    out
}

/// Each mistake has one line, with all of these texts in it; without texts it has none.
fn check(stderr: &str, expected: &[(&str, &[&str])]) {
    let lines = explained(stderr);
    assert!(lines.contains_key("end"), "{stderr}");
    for (name, texts) in expected {
        let of = lines
            .get(*name)
            .unwrap_or_else(|| panic!("{name} was not tried:\n{stderr}"));
        assert_eq!(of.len(), usize::from(!texts.is_empty()), "{name}: {of:#?}");
        for text in *texts {
            assert!(of[0].contains(text), "{name}: no {text:?} in {:?}", of[0]);
        }
    }
    let known = |name: &str| name.is_empty() || name == "end" || expected.iter().any(|(other, _)| *other == name);
    assert!(lines.keys().all(|name| known(name)), "{:?}", lines.keys());
}

const VERBS: &[(&str, &[&str])] = &[
    (
        "post in RESET",
        &["ibv_post_send failed", "state Reset", "Invalid argument"],
    ),
    ("RESET to RTS", &["ibv_modify_qp failed", "can't go from Reset to Rts"]),
    (
        "INIT without a port",
        &["ibv_modify_qp failed", "attributes are missing", "PORT"],
    ),
    (
        "RTR without GRH",
        &["ibv_modify_qp failed", "RoCE needs a GRH", "-g or -x"],
    ),
    (
        "RTR with an unused GID",
        &["ibv_modify_qp failed", "sgid_index 100", "no such GID"],
    ),
    (
        "RTR with MTU 1500",
        &["ibv_modify_qp failed", "path_mtu 1500", "IBV_MTU_4096"],
    ),
    ("two elements", &["ibv_post_send failed", "num_sge 2", "at most 1"]),
    (
        "full queue",
        &[
            "ibv_post_send failed",
            "the work queue is full",
            "Cannot allocate memory",
        ],
    ),
    (
        "destroyed twice",
        &["ibv_destroy_qp failed", "no QP of this library", "destroyed"],
    ),
    (
        "memory that ends early",
        &[
            "ibv_reg_mr failed",
            "not all of 8192 bytes",
            "mapped and writable",
            "Bad address",
        ],
    ),
    (
        "remote write alone",
        &["ibv_reg_mr failed", "need the local write right"],
    ),
    ("no entries", &["ibv_create_cq failed", "cqe 0", "1 or more entries"]),
    (
        "raw packets",
        &["ibv_create_qp failed", "qp_type 8", "RC, UC, UD and XRC"],
    ),
    ("a billion sends", &["ibv_create_qp failed"]),
    ("domain in use", &["ibv_dealloc_pd failed", "exist", "busy"]),
    ("port 2", &["ibv_query_port failed", "port 2", "port 1 alone"]),
    (
        "foreign address",
        &["rdma_bind_addr failed", "no interface has the address 192.0.2.1"],
    ),
    (
        "bound twice",
        &["rdma_bind_addr failed", "not possible in the id's state"],
    ),
    (
        "nobody listens",
        &["RDMA_CM_EVENT_REJECTED", " from 127.", " to 127.", ":7471: "],
    ),
];

#[test]
fn each_failed_verb_is_one_line_that_says_why() {
    let lab = Lab::new();
    let addr = fresh_address().to_string();
    let program = lab.build("verbs", &[]);
    let out = lab
        .command(&["-v", "--addr", &addr], &program)
        .arg(&addr)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{stderr}");
    check(&stderr, VERBS);

    let silent = lab.command(&["--addr", &addr], &program).arg(&addr).output().unwrap();
    let stderr = String::from_utf8_lossy(&silent.stderr);
    assert!(
        silent.status.success() && !stderr.contains(OURS),
        "without -v: {stderr}"
    );
}

/// Each mistake with the requester's line and the responder's.
const WIRE: &[(&str, &[&str], &[&str])] = &[
    (
        "beyond",
        &[
            "WRITE of QP",
            "(wr_id 0x77) refused by 127.",
            "remote access error: rkey 0x",
            "4096 bytes at 0x",
        ],
        &[
            "refused WRITE of 127.",
            "remote access error: key 0x",
            "4096 bytes at 0x",
            "are beyond the region by 96 (4096 bytes at 0x",
        ],
    ),
    (
        "no right to the region",
        &["READ of QP", "remote access error"],
        &["refused READ", "registered without IBV_ACCESS_REMOTE_READ"],
    ),
    (
        "unknown key",
        &["WRITE of QP", "remote access error"],
        &["refused WRITE", "64 bytes at 0x", "unknown key"],
    ),
    (
        "no right to the queue pair",
        &["WRITE of QP", "remote invalid request error", "qp_access_flags"],
        &[
            "refused WRITE",
            "qp_access_flags IBV_ACCESS_REMOTE_READ, needed IBV_ACCESS_REMOTE_WRITE",
        ],
    ),
    (
        "misaligned",
        &["atomic of QP", "remote invalid request error", "not a multiple of 8"],
        &["refused atomic", "is not a multiple of 8"],
    ),
    (
        "receive too short",
        &[
            "SEND of QP",
            "remote invalid request error: 200 bytes",
            "more than the peer's receive holds",
        ],
        &["refused SEND", "beyond the receive by 136 (wr_id 0x99, 64 bytes)"],
    ),
    (
        "receive of a wrong key",
        &["SEND of QP", "remote operation error"],
        &[
            "can't receive SEND",
            "local protection error",
            "wr_id 0x99",
            "wrong lkey",
        ],
    ),
    (
        "no receive",
        &["SEND of QP", "RNR retry counter exceeded", "had no receive posted"],
        &[],
    ),
    (
        "wrong local key",
        &["SEND of QP", "local protection error: key 0x", "unknown key"],
        &[],
    ),
    (
        "nobody there",
        &[
            "SEND of QP",
            "transport retry counter exceeded",
            "no acknowledgement from 127.",
            "ferroce doctor --peer 127.",
        ],
        &[],
    ),
];

/// One of two programs, whose output is the other's input.
struct Side {
    child: Child,
    stderr: JoinHandle<String>,
}

impl Side {
    fn start(mut command: Command) -> (Self, ChildStdout) {
        let piped = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = piped.spawn().unwrap();
        let (stdout, mut errors) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let stderr = thread::spawn(move || {
            let mut text = String::new();
            errors.read_to_string(&mut text).unwrap();
            text
        });
        (Self { child, stderr }, stdout)
    }

    fn end(mut self) -> String {
        let status = self.child.wait().unwrap();
        let stderr = self.stderr.join().unwrap();
        assert!(status.success(), "{status}\n{stderr}");
        stderr
    }
}

/// Hands lines from one program to the other.
fn relay(from: ChildStdout, to: &mut Child) -> JoinHandle<()> {
    let mut to = to.stdin.take().unwrap();
    thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            // A side that has ended reads no more.
            let _ = writeln!(to, "{line}");
        }
    })
}

#[test]
fn each_error_completion_is_one_line_on_both_sides() {
    let lab = Lab::new();
    let program = lab.build("wire", &[]);
    let start = |addr: Ipv4Addr, what: &str| {
        let addr = addr.to_string();
        let mut command = lab.command(&["-v", "--addr", &addr], &program);
        command.arg(what);
        Side::start(command)
    };
    let (mut asks, asked) = start(fresh_address(), "ask");
    let (mut answers, answered) = start(fresh_address(), "answer");
    let relays = [relay(asked, &mut answers.child), relay(answered, &mut asks.child)];
    let (asks, answers) = (asks.end(), answers.end());
    for relay in relays {
        relay.join().unwrap();
    }
    let requester: Vec<_> = WIRE.iter().map(|(name, line, _)| (*name, *line)).collect();
    let responder: Vec<_> = WIRE.iter().map(|(name, _, line)| (*name, *line)).collect();
    check(&asks, &requester);
    check(&answers, &responder);
}

#[test]
fn a_program_with_a_sanitizer_finds_devices() {
    let lab = Lab::new();
    let addr = fresh_address().to_string();
    for sanitizer in ["address", "thread"] {
        let program = lab.build("verbs", &[&format!("-fsanitize={sanitizer}")]);
        let run = lab.command(&["-v", "--addr", &addr], &program);
        // Thread sanitizer ends programs whose memory is laid out at random in ways that it does not know.
        let mut fixed = Command::new("setarch");
        fixed.arg("-R").arg(run.get_program()).args(run.get_args()).arg(&addr);
        for (name, value) in run.get_envs() {
            match value {
                Some(value) => fixed.env(name, value),
                None => fixed.env_remove(name),
            };
        }
        let out = fixed.output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{sanitizer}: {stderr}");
        assert!(stderr.contains("nothing is preloaded"), "{stderr}");
    }
}

#[test]
fn a_capture_is_in_the_file_that_was_asked_for() {
    let lab = Lab::new();
    let addr = fresh_address().to_string();
    let program = lab.build("verbs", &[]);
    let file = lab.0.path().join("wire.pcap");
    let options = ["--addr", &addr, "--pcap", file.to_str().unwrap()];
    // An earlier capture is replaced.
    fs::write(&file, "not a capture").unwrap();
    let out = lab.command(&options, &program).arg(&addr).output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && !stderr.contains(OURS), "{stderr}");
    let checked = Command::new(ferroce())
        .args(["pcap", "check"])
        .arg(&file)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&checked.stdout);
    // 3: of some queue pairs it may have one direction.
    assert!(matches!(checked.status.code(), Some(0 | 3)), "{text}");
    assert!(text.contains("RoCEv2") && text.contains(" 0 bad"), "{text}");
    assert_eq!(names(lab.0.path(), "wire.pcap"), ["wire.pcap"], "{text}");

    // The second process of a run writes another file.
    let twice = Path::new("sh");
    let script = format!("{0} {addr} && {0} {addr}", program.display());
    let out = lab.command(&options, twice).args(["-c", &script]).output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{stderr}");
    let all = names(lab.0.path(), "wire.pcap");
    assert_eq!(all.len(), 2, "{all:?}");
    let told = stderr.lines().find(|line| line.contains("another process's capture"));
    assert!(told.is_some_and(|line| line.contains(&all[1])), "{stderr}");
}

fn names(dir: &Path, prefix: &str) -> Vec<String> {
    let all = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = all
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with(prefix))
        .collect();
    names.sort();
    names
}

#[test]
fn devices_are_listed_for_a_program_that_looks_for_another_one() {
    let lab = Lab::new();
    let (program, addr) = (lab.build("named", &[]), fresh_address().to_string());
    let run = |options: &[&str], name: &str| {
        let options = [&["--addr", &addr, "--device-name", "rdma0"], options].concat();
        let out = lab.command(&options, &program).arg(name).output().unwrap();
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    let (code, stderr) = run(&["-v"], "mlx5_0");
    let line = "ferroce: no device was opened; the devices are rdma0 (lo): ";
    assert!(
        code == Some(1) && stderr.contains(line) && stderr.contains("--device-name NAME"),
        "{stderr}"
    );
    let told = |stderr: &str| stderr.contains(OURS);
    let (code, stderr) = run(&[], "mlx5_0");
    assert!(code == Some(1) && !told(&stderr), "without -v: {stderr}");
    let (code, stderr) = run(&["-v"], "rdma0");
    assert!(code == Some(0) && !told(&stderr), "{stderr}");
}

#[test]
fn a_process_without_a_broker_is_told_so() {
    let lab = Lab::new();
    let addr = fresh_address().to_string();
    let program = lab.build("verbs", &[]);
    let mut command = lab.command(&["-v", "--addr", &addr], &program);
    let out = command.arg(&addr).env("FERROCE_BROKER", "off").output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(stderr.contains("ferroce: no broker (FERROCE_BROKER=off)"), "{stderr}");
}

#[test]
fn a_capture_that_finds_no_space_is_reported() {
    let lab = Lab::new();
    let addr = fresh_address().to_string();
    let program = lab.build("verbs", &[]);
    let out = lab
        .command(&["--addr", &addr, "--pcap", "/dev/full"], &program)
        .arg(&addr)
        .output();
    let stderr = String::from_utf8_lossy(&out.unwrap().stderr).into_owned();
    assert!(stderr.contains("No space left on device"), "{stderr}");
}
