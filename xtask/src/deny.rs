//! Rules for dependencies: `deny.toml`, checked by cargo-deny for each of our two lock files.

use std::{path::PathBuf, process::Command};

use crate::{Result, cargo, process, tally::Tally};

/// Another version may understand `deny.toml` otherwise.
const VERSION: &str = "0.20.2";
/// The workspace, and what is a workspace of its own. Not `tests/ublk`: one measurement in the lab builds it, and nobody gets it.
const MANIFESTS: [&str; 2] = ["Cargo.toml", "fuzz/Cargo.toml"];

/// Licences, sources and bans; known vulnerabilities where their database can be reached. Without cargo-deny nothing is
/// checked, and the result says so.
pub(crate) fn check() -> Tally {
    let deny = match cargo::installed("cargo-deny", VERSION) {
        Ok(deny) => deny,
        Err(why) => return Tally::not_run(format!("rules for dependencies: {why}")),
    };
    let mut tally = Tally::default();
    for manifest in MANIFESTS {
        tally.expect(run(&deny, manifest, &["check", "licenses", "sources", "bans"]));
    }
    let mut fetch = Command::new(&deny);
    if let Err(why) = process::capture("cargo deny fetch", fetch.args(["fetch", "db"])) {
        let why = why.lines().rfind(|l| !l.trim().is_empty());
        println!("advisories: not checked: {}", why.unwrap_or_default());
        return tally;
    }
    for manifest in MANIFESTS {
        tally.expect(run(&deny, manifest, &["check", "advisories"]));
    }
    println!("advisories: checked");
    tally
}

fn run(deny: &PathBuf, manifest: &str, what: &[&str]) -> Result<()> {
    let args = ["--locked", "--manifest-path", manifest, "--config", "deny.toml"];
    let line = format!("cargo deny --manifest-path {manifest} {}", what.join(" "));
    println!("+ {line}");
    process::run(&line, Command::new(deny).args(args).args(what))
}
