//! `cargo xtask kit`: what a host with an RDMA device is tried with, as a tarball that needs neither Rust nor our source there.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use clap::Args;

use crate::{
    Result, cargo,
    files::{self, failed, put},
    process, readelf, tools,
};

#[derive(Args)]
pub(crate) struct KitArgs {
    /// The tarball [default: target/kit/ferroce-kit-COMMIT-ARCHITECTURE.tar.gz]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Programs of ours without an RDMA device: package and name. They are linked statically.
const SOFTWARE: [(&str, &str); 3] = [
    ("ferroce", "ferroce"),
    ("ferroce-interop", "ferroce-interop"),
    ("ferroce-interop", "ferroce-lab"),
];
/// Programs of ours for RDMA devices, which load libibverbs and librdmacm.
const HARDWARE: [&str; 2] = ["ferroce-rdma", "provider-contract"];
/// Programs in C, and the libraries that they are linked with.
const AGENTS: [(&str, &[&str]); 3] = [
    ("verbs-agent", &["-libverbs"]),
    ("cm-agent", &["-lrdmacm", "-libverbs"]),
    ("host-agent", &[]),
];
/// Scripts of the lab.
const SCRIPTS: [&str; 2] = ["rdma-end", "host-facts"];
const LAB: &str = "tests/interop/lab";
/// Packet scripts to play on the device.
const PACKET_SCRIPTS: &str = "specs/scripts";
const INSTRUCTIONS: &str = "docs/hardware/kit.md";
/// The other half of a run, as a script.
const PEER_SCRIPT: &str = "ferroce-peer.sh";
/// Libraries that programs may load: of rdma-core, and of each system.
const MAY_LOAD: [&str; 6] = [
    "libibverbs.so.1",
    "librdmacm.so.1",
    "libc.so.6",
    "libm.so.6",
    "libgcc_s.so.1",
    "ld-linux-x86-64.so.2",
];

/// Makes the tarball.
pub(crate) fn run(args: &KitArgs) -> Result<()> {
    make(args.out.clone()).map(drop)
}

/// Makes the tarball, and says where it is.
pub(crate) fn make(out: Option<PathBuf>) -> Result<PathBuf> {
    tools::ensure(&tools::of_kit())?;
    let commit = commit()?;
    let name = format!("ferroce-kit-{commit}-{}", std::env::consts::ARCH);
    let dir = Path::new("target/kit").join(&name);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).map_err(failed(&dir))?;

    let (software, hardware) = build()?;
    for program in &software {
        copy(program, &dir)?;
    }
    for program in &hardware {
        copy(program, &dir)?;
    }
    for (agent, libraries) in AGENTS {
        compile(agent, libraries, &dir)?;
    }
    for script in SCRIPTS {
        copy(&Path::new(LAB).join(script), &dir)?;
    }
    let instructions = dir.join("README.md");
    fs::copy(INSTRUCTIONS, &instructions).map_err(failed(&instructions))?;
    let mut print = Command::new(dir.join("ferroce-interop"));
    let script = process::capture("ferroce-interop", print.arg("--peer-script"))?;
    put(&dir.join(PEER_SCRIPT), &script.stdout, 0o755)?;
    let glibc = check(&dir)?;
    let scripts = dir.join("scripts");
    fs::create_dir(&scripts).map_err(failed(&scripts))?;
    for entry in fs::read_dir(PACKET_SCRIPTS)
        .map_err(failed(PACKET_SCRIPTS.as_ref()))?
        .flatten()
    {
        if entry.path().extension().is_some_and(|extension| extension == "play") {
            files::copy(&entry.path(), &scripts.join(entry.file_name()), 0o644)?;
        }
    }
    let version = format!("{commit}, {}, glibc {glibc} or later\n", std::env::consts::ARCH);
    put(&dir.join("VERSION"), version.as_bytes(), 0o644)?;

    let out = out.unwrap_or_else(|| dir.with_file_name(format!("{name}.tar.gz")));
    pack(&name, &out)?;
    println!("{}: {}", out.display(), version.trim());
    Ok(out)
}

/// The commit that is built, `-dirty` after it where files have changed.
pub(crate) fn commit() -> Result<String> {
    let mut git = Command::new("git");
    git.args(["describe", "--always", "--dirty", "--exclude=*"]);
    let said = process::capture("git", &mut git)?;
    let text = String::from_utf8_lossy(&said.stdout).trim().to_owned();
    match text.is_empty() {
        true => Err("git describe says nothing".into()),
        false => Ok(text),
    }
}

/// Builds our programs, those in software statically.
fn build() -> Result<(Vec<PathBuf>, Vec<PathBuf>)> {
    let software = cargo::build_static(&SOFTWARE)?;
    let features = ["-p", "ferroce-contract", "--features", "ferroce-contract/hardware"];
    cargo::run(&[&["build", "--release", "--bins"], &features[..]].concat())?;
    let release = cargo::target_dir()?.join("release");
    Ok((software, HARDWARE.map(|program| release.join(program)).into()))
}

fn copy(from: &Path, dir: &Path) -> Result<()> {
    files::copy(from, &dir.join(from.file_name().ok_or("no file")?), 0o755)
}

fn compile(agent: &str, libraries: &[&str], dir: &Path) -> Result<()> {
    let mut gcc = Command::new("gcc");
    gcc.args(["-O2", "-o"]).arg(dir.join(agent));
    gcc.arg(Path::new(LAB).join(format!("{agent}.c"))).args(libraries);
    process::capture("gcc", &mut gcc).map(drop)
}

/// Checks that programs load only allowed libraries. Returns the oldest glibc that they run with.
fn check(dir: &Path) -> Result<String> {
    let mut glibc = (0, 0);
    for entry in fs::read_dir(dir).map_err(failed(dir))?.flatten() {
        let path = entry.path();
        let head = fs::read(&path).map_err(failed(&path))?;
        if !head.starts_with(b"\x7fELF") {
            continue;
        }
        let loads = readelf::needed(&path)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_static = SOFTWARE.iter().any(|(_, program)| *program == name);
        let wrong = loads.iter().find(|l| is_static || !MAY_LOAD.contains(&l.as_str()));
        if let Some(library) = wrong {
            return Err(format!("{name} needs {library}"));
        }
        glibc = glibc.max(readelf::glibc(&path)?);
    }
    Ok(format!("{}.{}", glibc.0, glibc.1))
}

fn pack(name: &str, out: &Path) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.args(["-C", "target/kit", "--sort=name", "--owner=0", "--group=0", "-czf"]);
    process::capture("tar", tar.arg(out).arg(name)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_is_in_the_source() {
        let root = cargo::workspace_root();
        let lab = root.join(LAB);
        assert!(root.join(INSTRUCTIONS).is_file());
        for script in SCRIPTS {
            assert!(lab.join(script).is_file(), "{script}");
        }
        for (agent, _) in AGENTS {
            assert!(lab.join(format!("{agent}.c")).is_file(), "{agent}");
        }
    }
}
