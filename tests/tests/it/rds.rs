//! RDS sockets of unmodified programs under `ferroce run`, compared with what they are on the kernel's module.

use std::{
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use ferroce_tests::{
    compiled, ferroce, fresh_address,
    process::{Finished, Running, run},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// The facts on `rds_rdma` and rdma_rxe, which `cargo xtask interop --only rds-conformance` records of 6.1 and 6.12.
const KERNEL: &str = include_str!("../../interop/expect/rds-rxe.txt");
/// Facts that are otherwise here: fact, what it is here, and why.
const DIFFERENCES: &str = include_str!("../../../specs/rds-differences.tsv");

/// Compiles `tests/interop/lab/rds-conformance.c`.
fn conformance(dir: &Path) -> PathBuf {
    compiled(dir, "tests/interop/lab/rds-conformance.c")
}

/// Runs a program under `ferroce run`.
fn under_run(own: Ipv4Addr, program: &Path, args: &[&str]) -> Finished {
    let (own, program) = (own.to_string(), program.display().to_string());
    run(&[&["run", "--addr", &own, "--", &program], args].concat())
}

/// A fact and its result.
fn fact(line: &str) -> (&str, &str) {
    line.split_once(": ").unwrap_or((line, ""))
}

/// Facts of a program that are otherwise than the kernel's and not so as the list says, and listed ones that are not otherwise.
fn unexpected(said: &str, kernel: &str, differences: &str) -> Vec<String> {
    let known: Vec<[&str; 3]> = differences
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let columns: Vec<&str> = line.split('\t').collect();
            <[&str; 3]>::try_from(columns).unwrap_or_else(|_| panic!("not three columns: {line}"))
        })
        .collect();
    // `*` at the end stands for all facts whose names begin so, which are not compared.
    let prefixes: Vec<&str> = known
        .iter()
        .filter_map(|difference| difference[0].strip_suffix('*'))
        .collect();
    let is_compared = |line: &&str| !prefixes.iter().any(|prefix| fact(line).0.starts_with(prefix));
    let mut out = Vec::new();
    let mut rest: Vec<&str> = said.lines().filter(is_compared).collect();
    for line in kernel.lines().filter(is_compared) {
        let (name, result) = fact(line);
        let here = rest
            .iter()
            .position(|line| fact(line).0 == name)
            .map(|at| fact(rest.remove(at)).1);
        let listed = known
            .iter()
            .find(|difference| difference[0] == name)
            .map(|difference| difference[1]);
        // Facts with one name, such as those about counters, are compared in their order.
        let wanted = listed.unwrap_or(result);
        if here != Some(wanted) {
            out.push(format!("{name}: {}, not {wanted}", here.unwrap_or("nothing")));
        }
        if listed == Some(result) {
            out.push(format!("{name}: listed, and not otherwise"));
        }
    }
    out.extend(
        rest.into_iter()
            .map(|line| format!("{line}: not a fact of the kernel's")),
    );
    out.extend(
        known
            .iter()
            .filter(|difference| !difference[0].ends_with('*'))
            .filter(|difference| !kernel.lines().any(|line| fact(line).0 == difference[0]))
            .map(|difference| format!("{}: no such fact", difference[0])),
    );
    out
}

#[test]
fn sockets_do_what_the_kernel_s_do() {
    let dir = tempfile::tempdir().unwrap();
    let program = conformance(dir.path());
    let (own, absent) = (fresh_address(), fresh_address());
    let said = under_run(own, &program, &[&own.to_string(), &absent.to_string()]);
    fs::write(dir.path().join("said"), &said.stdout).unwrap();
    let wrong = unexpected(&said.stdout, KERNEL, DIFFERENCES);
    assert!(wrong.is_empty(), "{}\n{}", wrong.join("\n"), said.stderr);
    assert_eq!((said.code, said.stderr.as_str()), (Some(0), ""));
}

#[test]
fn programs_read_and_write_each_other_s_memory() {
    let dir = tempfile::tempdir().unwrap();
    let program = compiled(dir.path(), "tests/interop/lab/rds-rdma.c");
    let [own, peer] = [fresh_address(), fresh_address()];
    let (peer, path) = (peer.to_string(), program.display().to_string());
    let mut answering = Running::start(&["run", "--addr", &peer, "--", &path, &peer, "4000"]);
    while answering.new_line().is_none() {
        assert!(!answering.has_ended(), "{}", answering.stderr());
        thread::sleep(Duration::from_millis(10));
    }
    let called = under_run(own, &program, &[&own.to_string(), &peer, "4000"]);
    let answered = answering.end();
    let bytes = "WRITE of the peer: 60000 bytes\nREAD: 60000 bytes\nWRITE: 60000 bytes\n";
    assert_eq!(
        (called.code, called.stdout.as_str(), called.stderr.as_str()),
        (Some(0), bytes, "")
    );
    assert!(
        answered
            .stdout
            .ends_with("READ: 60000 bytes\nWRITE of the peer: 60000 bytes\n"),
        "{answered:?}"
    );
    assert_eq!((answered.code, answered.stderr.as_str()), (Some(0), ""));
}

#[test]
fn differences_are_noticed_new_gone_and_unknown() {
    let kernel = "a x: 1\na y: 2\n";
    assert!(unexpected(kernel, kernel, "# comment").is_empty());
    assert_eq!(unexpected("a x: 1\na y: 3\n", kernel, "a y\t3\twhy"), [""; 0]);
    assert_eq!(unexpected("a x: 1\na y: 3\n", kernel, ""), ["a y: 3, not 2"]);
    assert_eq!(unexpected("a x: 1\n", kernel, ""), ["a y: nothing, not 2"]);
    assert_eq!(unexpected(kernel, kernel, "a y\t3\twhy"), ["a y: 2, not 3"]);
    assert_eq!(
        unexpected(kernel, kernel, "a y\t2\twhy"),
        ["a y: listed, and not otherwise"]
    );
    assert!(unexpected("b x: 1\na x: 1\n", "b y: 2\na x: 1\n", "b*\t-\twhy").is_empty());
    assert_eq!(unexpected(kernel, kernel, "b z\t2\twhy"), ["b z: no such fact"]);
    assert_eq!(
        unexpected("a x: 1\na y: 2\na z: 1\n", kernel, ""),
        ["a z: 1: not a fact of the kernel's"]
    );
}

/// A command of a user, who has a broker and a node of their own.
fn of_user(home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(ferroce());
    command.args(args).env("XDG_RUNTIME_DIR", home);
    command
}

fn run_of_user(home: &Path, args: &[&str]) -> Finished {
    let mut running = Running::start_command(of_user(home, args), format!("ferroce {args:?}"));
    running.wait();
    running.end()
}

#[test]
fn a_node_owns_its_address_and_answers_pings() {
    let (home, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (own, absent) = (fresh_address().to_string(), fresh_address().to_string());
    let start = |home: &Path| {
        let args = ["rds", "node", "--json", "--stay", "--addr", &own];
        Running::start_command(of_user(home, &args), "ferroce rds node".into())
    };
    let mut node = start(home.path());
    assert_eq!(node.event("rds_opened")["address"], own);
    for (home, why) in [(home.path(), "runs already"), (other.path(), "another RDS node has it")] {
        let mut second = start(home);
        second.wait();
        let second = second.end();
        let error = &second.json().pop().unwrap();
        assert!(second.code == Some(1) && error["event"] == "error", "{error}");
        assert!(error["message"].as_str().unwrap().contains(why), "{error}");
    }
    let ping = |to: &str, count: &str| {
        let args = ["rds", "ping", "-c", count, "-i", "0.01", "-W", "2", "-I", &own, to];
        run_of_user(home.path(), &args)
    };
    let answered = ping(&own, "3");
    assert_eq!(answered.code, Some(0), "{}", answered.stderr);
    let lines: Vec<_> = answered.stdout.lines().collect();
    assert!(
        lines.len() == 3 && lines.iter().all(|line| line.ends_with(" usec")),
        "{lines:?}"
    );
    let unanswered = ping(&absent, "1");
    assert_eq!(unanswered.code, Some(1), "{}", unanswered.stderr);
    assert!(unanswered.stdout.contains("no answer"), "{}", unanswered.stdout);
    assert_eq!(node.event("rds_connect_failed")["remote"], absent);

    let tables = run_of_user(home.path(), &["rds", "info"]).stdout;
    for head in [
        "\nCounters:\n              CounterName            Value\n               conn_reset ",
        "\nRDS Sockets:\n      BoundAddr BPort        ConnAddr CPort     SndBuf     RcvBuf    Inode\n",
        "\nRDS Connections:\n      LocalAddr      RemoteAddr Tos ",
        "\nReceive Message Queue:\n      LocalAddr LPort      RemoteAddr RPort Tos ",
        "\nRDS IB Connections:\n",
    ] {
        assert!(tables.contains(head), "{head}: {tables}");
    }
    let counters = run_of_user(home.path(), &["rds", "info", "-c", "--json"]);
    let counters = &counters.json()[0]["counters"];
    assert_eq!((&counters["recv_ping"], &counters["send_pong"]), (&3.into(), &3.into()));
    node.signal(Signal::SIGTERM);
    node.wait();
    let ended = node.end();
    let summary = ended.json().pop().unwrap();
    assert_eq!(
        (ended.code, &summary["event"]),
        (Some(0), &"summary".into()),
        "{}",
        ended.stderr
    );
    assert_eq!(summary["recv_ping"], 3);
}

#[test]
fn a_node_in_the_background_holds_nothing_of_the_program_that_started_it() {
    let home = tempfile::tempdir().unwrap();
    let own = fresh_address().to_string();
    // It stays until it is ended here.
    let script = format!(
        "export FERROCE_BROKER_LINGER=1000; ({0} rds ping -c 1 -I {own} {own}; {0} rds info -k) 2>&1 | cat",
        ferroce().display()
    );
    let mut command = Command::new("sh");
    command.args(["-c", &script]).env("XDG_RUNTIME_DIR", home.path());
    let mut pipe = Running::start_command(command, "a pipeline".into());
    pipe.wait();
    // Its readers have seen the end of both streams.
    let ended = pipe.end();
    assert!(
        ended.stdout.contains(" usec") && ended.stdout.contains("RDS Sockets"),
        "{}",
        ended.stdout
    );
    let home = home.path().display().to_string();
    let helpers: Vec<i32> = fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok())
        .filter(|pid| {
            fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| String::from_utf8_lossy(&line).contains(&home))
        })
        .collect();
    assert_eq!(helpers.len(), 2, "a node and a broker");
    helpers
        .into_iter()
        .for_each(|pid| kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap());
}

#[test]
#[ignore = "needs root"]
fn a_link_local_address_is_of_an_interface() {
    let home = tempfile::tempdir().unwrap();
    let program = compiled(home.path(), "tests/apps/c/rds-link-local.c");
    let script = format!(
        "ip link set lo up; ip link add near type veth peer name far; ip link set near up; ip link set far up
         ip addr add fe80::1/64 dev near nodad; {} run -- {} fe80::1 near far",
        ferroce().display(),
        program.display()
    );
    let mut command = Command::new("unshare");
    command
        .args(["--net", "sh", "-c", &script])
        .env("XDG_RUNTIME_DIR", home.path());
    let mut run = Running::start_command(command, "a namespace".into());
    run.wait();
    let run = run.end();
    let expected = "bind 4000: done\nbind 4000: Address already in use\nbind 4001: Cannot assign requested address\n\
                    bind 4002: done\n5 bytes from port 4002, its interface\n";
    assert_eq!(run.stdout, expected, "{}", run.stderr);
}
