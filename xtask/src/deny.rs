//! Rules for dependencies: `deny.toml`, checked by cargo-deny for each of our two lock files.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

use crate::{Result, cargo, process, tally::Tally, tools};

/// Another version may understand `deny.toml` otherwise.
const VERSION: &str = "0.20.2";
/// The workspace, and what is a workspace of its own.
const MANIFESTS: [&str; 2] = ["Cargo.toml", "fuzz/Cargo.toml"];

/// Licences, sources and bans; known vulnerabilities where their database can be reached. Without cargo-deny nothing is
/// checked, and the result says so.
pub(crate) fn check() -> Tally {
    let deny = match ensure() {
        Ok(deny) => deny,
        Err(why) => return Tally::not_run(format!("rules for dependencies: {why}")),
    };
    let mut tally = Tally::default();
    let mut count = |result| match result {
        Ok(()) => tally.passed += 1,
        Err(text) => tally.fail(text),
    };
    for manifest in MANIFESTS {
        count(run(&deny, manifest, &["check", "licenses", "sources", "bans"]));
    }
    let mut fetch = Command::new(&deny);
    if let Err(why) = process::capture("cargo deny fetch", fetch.args(["fetch", "db"])) {
        let why = why.lines().rfind(|l| !l.trim().is_empty());
        println!("advisories: not checked: {}", why.unwrap_or_default());
        return tally;
    }
    for manifest in MANIFESTS {
        count(run(&deny, manifest, &["check", "advisories"]));
    }
    println!("advisories: checked");
    tally
}

fn run(deny: &PathBuf, manifest: &str, what: &[&str]) -> Result<()> {
    let args = ["--locked", "--manifest-path", manifest, "--config", "deny.toml"];
    let line = format!("cargo deny --manifest-path {manifest} {}", what.join(" "));
    println!("+ {line}");
    let mut command = Command::new(deny);
    let status = process::Guard::spawn("cargo deny", command.args(args).args(what))?.wait()?;
    match status.success() {
        true => Ok(()),
        false => Err(format!("{line} ended with {status}")),
    }
}

/// Where cargo-deny is. It is built if it is missing, and stays in cargo's folder of programs.
fn ensure() -> Result<PathBuf> {
    if let Some(found) = found() {
        return Ok(found);
    }
    println!("building cargo-deny {VERSION}: some two minutes on two processors, once");
    let mut install = cargo::command();
    // Quick to build rather than quick: it has a few hundred packages to look at.
    install
        .args([
            "install",
            "cargo-deny",
            "--version",
            VERSION,
            "--locked",
            "--debug",
            "--force",
            "--quiet",
        ])
        .env("CARGO_PROFILE_DEV_DEBUG", "0");
    let status = process::Guard::spawn("cargo install", &mut install)?.wait()?;
    found()
        .filter(|_| status.success())
        .ok_or_else(|| format!("cargo install cargo-deny --version {VERSION} --locked --debug ended with {status}"))
}

fn found() -> Option<PathBuf> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let own = home.map(|home| home.join("bin/cargo-deny")).filter(|p| p.is_file());
    let is_ours = |deny: &PathBuf| {
        let out = Command::new(deny).arg("--version").stderr(Stdio::null()).output();
        out.is_ok_and(|out| String::from_utf8_lossy(&out.stdout).split_whitespace().nth(1) == Some(VERSION))
    };
    own.into_iter().chain(tools::find("cargo-deny")).find(is_ours)
}
