//! The version that `ferroce --version` prints, with the commit that the program is built from.

use std::{env, fs, path::Path, process::Command};

/// Names the commit where the source is no git repository, such as in a distribution's build.
const COMMIT: &str = "FERROCE_COMMIT";
/// File that `cargo package` puts next to the manifest.
const PACKAGED: &str = ".cargo_vcs_info.json";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={COMMIT}");
    let given = env::var(COMMIT).ok().filter(|text| !text.is_empty());
    let commit = given.or_else(packaged).or_else(checked_out);
    let version = env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let version = match commit {
        Some(commit) => format!("{version} ({commit})"),
        None => version,
    };
    println!("cargo::rustc-env=VERSION_AND_COMMIT={version}");
}

/// The commit that a package of crates.io was made from.
fn packaged() -> Option<String> {
    let text = fs::read_to_string(PACKAGED).ok()?;
    let (_, rest) = text.split_once("\"sha1\": \"")?;
    rest.get(..12).map(str::to_owned)
}

/// The commit of the repository that the source is in. A debug build has none: it would be compiled again after every commit.
fn checked_out() -> Option<String> {
    if env::var("PROFILE").as_deref() != Ok("release") {
        return Some("debug build".to_owned());
    }
    // It grows with each commit and each checkout.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    for path in ["src", &log].into_iter().filter(|path| Path::new(path).exists()) {
        println!("cargo::rerun-if-changed={path}");
    }
    git(&["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"])
}

fn git(args: &[&str]) -> Option<String> {
    let out = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(out.stdout).ok()?.trim().to_owned();
    (out.status.success() && !text.is_empty()).then_some(text)
}
