//! Faults on demand of the command line: `--fault` of `run`, `serve`, `map` and the daemon's tasks, `ferroce fault`, and the worked example
//! of docs/verbs/faults.md.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use ferroce_tests::{
    checked::Checked,
    device::{image, map, serve},
    eventually, ferroce, fresh_address,
    perftest::{Sides, WriteBw},
    process::{Finished, Running, run},
    root,
};
use serde_json::Value;

const MIB: usize = 1 << 20;

/// Compiles the worked example, with its mistake or without.
fn compile(dir: &Path, fixed: bool) -> PathBuf {
    let program = dir.join(if fixed { "fixed" } else { "mistaken" });
    let mut command = Command::new("cc");
    command.args(["-Wall", "-Wextra", "-Werror", "-O1"]);
    if fixed {
        command.arg("-DFIXED");
    }
    let status = command
        .arg("-o")
        .args([&program, &root().join("docs/examples/ring.c")])
        .arg("-libverbs")
        .status();
    assert!(
        status.is_ok_and(|status| status.success()),
        "a C compiler, and libibverbs-dev"
    );
    program
}

fn under(program: &Path, faults: &[&str]) -> Finished {
    let addr = fresh_address().to_string();
    let mut args = vec!["run", "--addr", &addr];
    args.extend(faults.iter().flat_map(|rule| ["--fault", rule]));
    let program = program.to_str().unwrap();
    args.extend(["--", program]);
    run(&args)
}

/// The counts of the only rule of a process.
fn counts(pid: u32) -> Value {
    let shown = run(&["fault", "show", "--json", "--pid", &pid.to_string()]);
    assert_eq!(shown.code, Some(0), "{}", shown.stderr);
    let all: Value = serde_json::from_str(&shown.stdout).unwrap();
    all[0]["rules"][0]["counts"].clone()
}

fn counted(pid: u32, name: &str) -> u64 {
    counts(pid)[name]
        .as_u64()
        .unwrap_or_else(|| panic!("{name}: {}", counts(pid)))
}

fn change(what: &[&str], pid: u32) {
    let pid = pid.to_string();
    let (verb, rules) = what.split_first().unwrap();
    let done = run(&[&["fault", verb, "--pid", &pid], rules].concat());
    assert_eq!(done.code, Some(0), "{}", done.stderr);
}

#[test]
fn the_worked_example_has_a_mistake_that_only_lost_packets_show() {
    let dir = tempfile::tempdir().unwrap();
    let [mistaken, fixed] = [false, true].map(|fixed| compile(dir.path(), fixed));
    let loss = "loss=2%,dir=tx,kind=send,seed=7";
    let arrived = "2000 messages arrived\n";
    // On a busy machine packets may be late, or lost, by themselves.
    let works = || under(&mistaken, &[]).stdout == arrived;
    assert!((0..20).any(|_| works()));
    let end = under(&mistaken, &[loss]);
    assert_eq!(end.code, Some(1), "{}{}", end.stdout, end.stderr);
    assert!(end.stdout.contains(" has the data of message "), "{}", end.stdout);
    let end = under(&fixed, &[loss]);
    assert_eq!((end.code, &*end.stdout), (Some(0), arrived), "{}", end.stderr);
}

#[test]
fn verbs_fail_for_c_programs_as_rules_say() {
    let dir = tempfile::tempdir().unwrap();
    let program = compile(dir.path(), true);
    for (rule, words) in [
        ("post_send=ENOMEM,nth=100", "posting a send failed"),
        ("post_recv=EINVAL,nth=70", "posting a receive failed"),
        ("reg_mr=ENOMEM,nth=2", "registering memory failed"),
        ("wc=RETRY_EXC_ERR,kind=send,nth=5", "transport retry counter exceeded"),
        ("qp_error=50,qp=#1", "Work Request Flushed Error"),
    ] {
        let end = under(&program, &[rule]);
        assert_eq!(end.code, Some(2), "{rule}: {}{}", end.stdout, end.stderr);
        assert!(end.stderr.contains(words), "{rule}: {}", end.stderr);
    }
}

#[test]
fn rules_change_while_a_program_runs() {
    let sides = Sides {
        server: fresh_address(),
        client: Some(fresh_address()),
    };
    let start = |args: &[String]| {
        let mut args = args.to_vec();
        args.splice(1..1, ["--fault".to_owned(), "none".to_owned()]);
        Running::start(&args)
    };
    let mut test = WriteBw::endless(&start, sides);
    let pid = test.client.id();
    // It opens the device in its own time.
    let show = || run(&["fault", "show", "--pid", &pid.to_string()]);
    eventually("the program takes rules", || show().code == Some(0));
    assert_eq!(show().stdout, format!("process {pid} ib_write_bw\n  none\n"));
    change(&["set", "loss=0.1%,dir=tx,seed=7"], pid);
    eventually("packets are lost", || counted(pid, "lost") > 0);
    test.works();
    change(&["clear"], pid);
    test.works();
    change(&["set", "qp_error=1"], pid);
    assert_ne!(test.client.end().code, Some(0));
}

#[test]
fn servers_and_mappings_go_on_under_faults() {
    let dir = tempfile::tempdir().unwrap();
    let (here, far) = (fresh_address(), fresh_address());
    let export = format!("disk={}", image(dir.path(), "disk", &vec![0; MIB]).display());
    let rule = "loss=2%,dup=2%,reorder=2%,corrupt=1%,seed=7";
    let (server, _) = serve(far, &[export], &["--fault", rule, "--threads", "2"]);
    let socket = dir.path().join("disk.sock");
    let more = [
        "--session",
        "faulty",
        "--device",
        "disk",
        "--fault",
        "delay=1ms,jitter=1ms",
    ];
    let (mapping, _) = map(here, &far.to_string(), &socket, &more);
    let mut disk = Checked::new(&socket, "", &dir.path().join("disk"));
    (0..30).for_each(|_| disk.works());
    for name in ["lost", "duplicated", "reordered", "corrupted"] {
        assert!(counted(server.id(), name) > 0, "{name}: {}", counts(server.id()));
    }
    assert!(counted(mapping.id(), "delayed") > 0);
    let shown = run(&["fault", "show", "--name", "faulty"]).stdout;
    assert!(
        shown.contains("delay=1ms,jitter=1ms") && shown.contains("delayed "),
        "{shown}"
    );
    change(&["clear"], mapping.id());
    disk.works();
    let listed = run(&["fault", "show", "--pid", &mapping.id().to_string()]).stdout;
    assert!(listed.ends_with("faulty\n  none\n"), "{listed}");
}

#[test]
fn tasks_of_a_daemon_have_faults() {
    let dir = tempfile::tempdir().unwrap();
    let (here, far) = (fresh_address(), fresh_address());
    let disk = image(dir.path(), "disk", &vec![0; MIB]);
    let config = dir.path().join("ferroce.toml");
    let text = format!(
        "[serve.images]\naddr = \"{far}\"\nexport = \"disk={}\"\nfault = [\"loss=5%,dir=tx\", \"post_recv=ENOMEM,nth=1000000\"]\n\
         [map.db]\npath = \"{here},{far}\"\ndevice = \"disk\"\nnbd = \"{}\"\nfault = \"dup=50%\"\n",
        disk.display(),
        dir.path().join("db.sock").display()
    );
    fs::write(&config, text).unwrap();
    let control = dir.path().join("control.sock");
    let [config, control] = [config, control].map(|path| path.to_str().unwrap().to_owned());
    let daemon = Running::start(&["daemon", "--config", &config, "--control", &control]);
    let pid = daemon.id().to_string();
    let count = |name: &str, rule: usize, count: &str| {
        let shown = run(&["fault", "show", "--json", "--pid", &pid, "--name", name]);
        let all: Value = serde_json::from_str(&shown.stdout).ok()?;
        all[0]["rules"][rule]["counts"][count].as_u64()
    };
    eventually("packets are lost and duplicated", || {
        let lost = count(&far.to_string(), 0, "lost");
        lost.or_else(|| count(&format!("{far}:1234"), 0, "lost"))
            .is_some_and(|n| n > 0)
            && count("db", 0, "duplicated").is_some_and(|n| n > 0)
    });
}

#[test]
fn mistakes_in_rules_are_explained() {
    let addr = fresh_address().to_string();
    for args in [
        &["run", "--fault", "lose=1%", "--", "true"][..],
        &[
            "serve",
            "--addr",
            &addr,
            "--export",
            "a=/dev/null",
            "--fault",
            "lose=1%",
        ],
        &["fault", "set", "lose=1%"],
    ] {
        let end = run(args);
        assert_eq!(end.code, Some(2), "{args:?}");
        for words in [
            "unknown key \"lose\"",
            "packets: loss=P",
            "verbs:   post_send=",
            "which:   dir=tx|rx",
        ] {
            assert!(end.stderr.contains(words), "{}", end.stderr);
        }
    }
    // By the environment alone nobody has looked at the rules before.
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(ferroce());
    command
        .args(["run", "--addr", &addr, "--"])
        .arg(compile(dir.path(), true));
    command.env("FERROCE_FAULT", "loss=1%;lose=1%");
    let end = Running::start_command(command, "a program with a wrong rule".into()).end();
    assert!(
        end.code == Some(2) && end.stderr.contains("FERROCE_FAULT: fault \"lose=1%\""),
        "{}",
        end.stderr
    );
    let nobody = run(&["fault", "show", "--pid", "1"]);
    assert!(
        nobody.code == Some(1) && nobody.stderr.contains("--fault none"),
        "{}",
        nobody.stderr
    );
}
