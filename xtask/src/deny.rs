//! Rules for dependencies: `deny.toml`, checked by cargo-deny for each of our two lock files. Its answer on licences, sources and bans
//! depends on these three files only, so [`PASSED`] keeps their checksum of the last time that it passed: a fresh machine builds
//! cargo-deny, which takes two minutes, only when one of them has changed.

use std::{fs, path::PathBuf, process::Command};

use crate::{Result, cargo, dist, files, process, tally::Tally};

/// Another version may understand `deny.toml` otherwise.
const VERSION: &str = "0.20.2";
/// The workspace, and what is a workspace of its own. Not `tests/ublk`: one measurement in the lab builds it, and nobody gets it.
const MANIFESTS: [&str; 2] = ["Cargo.toml", "fuzz/Cargo.toml"];
const INPUTS: [&str; 3] = ["deny.toml", "Cargo.lock", "fuzz/Cargo.lock"];
/// The version of cargo-deny, and the checksum of [`INPUTS`], that passed; `cargo xtask lint` writes it.
const PASSED: &str = "xtask/deny.passed";

/// Licences, sources and bans; known vulnerabilities where cargo-deny is installed and their database can be reached.
pub(crate) fn check() -> Tally {
    let mut tally = Tally::default();
    tally.expect(rules());
    tally
}

fn rules() -> Result<()> {
    let inputs = checksum()?;
    let passed = fs::read_to_string(PASSED).is_ok_and(|text| text == inputs);
    let deny = match cargo::subcommand("cargo-deny", VERSION) {
        Some(deny) => deny,
        None if passed => {
            println!(
                "rules for dependencies: passed, and unchanged since; advisories: not checked (cargo install cargo-deny)"
            );
            return Ok(());
        }
        None => cargo::installed("cargo-deny", VERSION).map_err(|why| format!("rules for dependencies: {why}"))?,
    };
    for manifest in MANIFESTS {
        run(&deny, manifest, &["check", "licenses", "sources", "bans"])?;
    }
    if !passed {
        fs::write(PASSED, inputs).map_err(|e| format!("{PASSED}: {e}"))?;
        println!("{PASSED} is new: commit it with the lock files");
    }
    advisories(&deny)
}

fn advisories(deny: &PathBuf) -> Result<()> {
    let mut fetch = Command::new(deny);
    if let Err(why) = process::capture("cargo deny fetch", fetch.args(["fetch", "db"])) {
        let why = why.lines().rfind(|l| !l.trim().is_empty());
        println!("advisories: not checked: {}", why.unwrap_or_default());
        return Ok(());
    }
    for manifest in MANIFESTS {
        run(deny, manifest, &["check", "advisories"])?;
    }
    println!("advisories: checked");
    Ok(())
}

fn checksum() -> Result<String> {
    let texts: Vec<String> = INPUTS
        .iter()
        .map(|file| files::text(file.as_ref()))
        .collect::<Result<_>>()?;
    Ok(format!("{VERSION} {}\n", dist::sha256(texts.concat().as_bytes())))
}

fn run(deny: &PathBuf, manifest: &str, what: &[&str]) -> Result<()> {
    let args = ["--locked", "--manifest-path", manifest, "--config", "deny.toml"];
    let line = format!("cargo deny --manifest-path {manifest} {}", what.join(" "));
    println!("+ {line}");
    process::run(&line, Command::new(deny).args(args).args(what))
}
