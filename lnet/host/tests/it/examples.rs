//! The examples, as programs.

use std::{
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Command, Stdio},
};

use ferroce_loopback::address;
use lnet_host::Nid;

/// An example, which cargo builds with the tests.
fn example(name: &str, args: &[&str]) -> Command {
    let mut path: PathBuf = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    let mut command = Command::new(path.join("examples").join(name));
    command.args(args).stderr(Stdio::inherit());
    command
}

fn output(mut command: Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn one_program_writes_and_reads_memory_of_another() {
    let [own, peer, third] = [(); 3].map(|()| Nid::o2ib(address()).to_string());
    let mut serving = example("transfer", &["serve", &peer])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(serving.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), format!("{peer} offers 1048576 bytes"));
    let called = output(example("transfer", &["call", &own, &peer, "some", "words"]));
    assert_eq!(called, "10 bytes written\nread back: some words\n");
    assert_eq!(lines.next().unwrap().unwrap(), format!("{own} wrote: some words"));
    let pinged = output(example("pings_async", &[&third, &peer, &peer]));
    let is_answer = |line: &str| line.starts_with(&format!("{peer}: 2 interfaces, "));
    assert!(pinged.lines().count() == 2 && pinged.lines().all(is_answer), "{pinged}");
    serving.kill().unwrap();
    serving.wait().unwrap();
}
