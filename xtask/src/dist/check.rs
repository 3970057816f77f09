//! Packages installed in fresh roots, used and removed (`tests/packages`).

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::{
    Result,
    cargo::{self, Built},
    files::{self, failed},
    install::Programs,
    process,
    tally::Tally,
    tools,
};

const SCRIPTS: &str = "tests/packages";
/// The Debian that packages are tried in, and what is in it besides.
const SUITE: &str = "bookworm";
const ARCHIVE: &str = "http://deb.debian.org/debian";
const INCLUDED: &str = "ibverbs-utils,rdmacm-utils,libnbd-bin,man-db,procps,systemd-sysv,zsh,fish";
/// Packages that are tried in a root: name in the script, and the end of the file's name.
const IN_ROOTS: [(&str, &str); 3] = [("deb", ".deb"), ("tarball", ".tar.gz"), ("oci", ".oci.tar")];
const WHEEL: &str = ".whl";
const BILL: &str = ".cdx.json";
/// The Python package that has the schemas of CycloneDX.
const CYCLONEDX: &str = "cyclonedx-python-lib[json-validation]";
/// The page that says how packages are installed.
const PAGE: &str = "docs/install.md";

/// The suite `packages`: packages of the programs under test, without what only released ones promise.
pub(crate) fn suite(built: &Built) -> Result<Tally> {
    let tools = tools::ensure(&tools::OF_PACKAGES).and_then(|()| tools::ensure(&tools::OF_FRESH_ROOTS));
    if let Err(why) = tools {
        return Ok(Tally::not_run(why));
    }
    if !tools::may_make_namespaces() {
        return Ok(Tally::not_run(tools::NO_NAMESPACES.to_owned()));
    }
    let programs = Programs::built(built.program("ferroce")?.to_owned())?;
    let (out, work) = folders()?;
    super::make(programs, &out, &work)?;
    let mut tally = all(&out)?;
    tally.expect(crates());
    tally.expect(cargo::run(&["check", "--lib", "-p", "roce", "--no-default-features"]));
    Ok(tally)
}

/// Packs the crates as `cargo publish` does: each has what crates.io wants, and needs nothing that isn't published.
fn crates() -> Result<()> {
    let mut package = cargo::command();
    package.args(["package", "--locked", "--no-verify", "--allow-dirty"]);
    for name in cargo::published()? {
        package.args(["-p", &name]);
    }
    let out = process::capture("cargo package", &mut package)?;
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    match text.contains("warning:") {
        true => Err(format!("cargo package warns:\n{text}")),
        false => Ok(()),
    }
}

/// Tries what [`super::run`] has made.
pub(super) fn run(out: &Path) -> Result<()> {
    tools::ensure(&tools::OF_FRESH_ROOTS)?;
    tools::ensure(&tools::OF_BOOTED_ROOTS)?;
    let mut tally = all(out)?;
    tally.add(units(out)?);
    // Packages of the dev profile have none.
    if find(out, BILL).is_ok() {
        tally.add(bills(out)?);
    }
    match tally.failures.is_empty() {
        true => Ok(()),
        false => Err(tally.failures.join("\n")),
    }
}

/// Folders of the suite's packages, and of what they are made of.
fn folders() -> Result<(PathBuf, PathBuf)> {
    let target = cargo::target_dir()?;
    Ok((target.join("packages"), target.join("packages-work")))
}

/// Each package of a folder.
fn all(out: &Path) -> Result<Tally> {
    let out = out.canonicalize().map_err(failed(out))?;
    let base = base()?;
    let mut tally = Tally::default();
    tally.expect(documented(&out));
    for (kind, end) in IN_ROOTS {
        let mut command = Command::new(Path::new(SCRIPTS).join("fresh-root.sh"));
        command.arg(&base).arg(kind).arg(find(&out, end)?);
        tally.add(lines(kind, &mut command)?);
    }
    tally.add(wheel(&out)?);
    Ok(tally)
}

/// The units of the Debian package under a systemd of their own.
fn units(out: &Path) -> Result<Tally> {
    let out = out.canonicalize().map_err(failed(out))?;
    let mut command = Command::new(Path::new(SCRIPTS).join("booted.sh"));
    command.arg(base()?).arg(find(&out, ".deb")?);
    lines("units", &mut command)
}

/// Every file that was made is on the page about installing, which has those for amd64.
fn documented(out: &Path) -> Result<()> {
    let page = files::text(Path::new(PAGE))?;
    let arch = std::env::consts::ARCH;
    let missing: Vec<_> = files::below(out)?
        .iter()
        .map(|path| {
            path.display()
                .to_string()
                .replace(arch, "x86_64")
                .replace("arm64", "amd64")
        })
        .filter(|name| !page.contains(&format!("`{name}`")))
        .collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(format!("{PAGE} lacks {}", missing.join(", "))),
    }
}

fn find(out: &Path, end: &str) -> Result<PathBuf> {
    let found = files::below(out)?
        .into_iter()
        .find(|path| path.to_string_lossy().ends_with(end));
    found
        .map(|path| out.join(path))
        .ok_or_else(|| format!("{}: no {end}", out.display()))
}

/// The files of a fresh Debian. They stay for the next time.
fn base() -> Result<PathBuf> {
    let dir = cargo::target_dir()?.join("fresh-root");
    let made = dir.join("made");
    if fs::read_to_string(&made).is_ok_and(|text| text == INCLUDED) {
        return Ok(dir.join("root"));
    }
    files::empty(&dir)?;
    println!("making a fresh {SUITE} with {INCLUDED}");
    let mut debian = process::command("mmdebstrap");
    debian.args(["--quiet", "--variant=apt", "--aptopt=APT::Install-Recommends \"false\""]);
    debian
        .arg(format!("--include={INCLUDED}"))
        .arg(SUITE)
        .arg(dir.join("root"))
        .arg(ARCHIVE);
    process::capture("mmdebstrap", debian.stdin(Stdio::null()))?;
    files::put(&made, INCLUDED.as_bytes(), 0o644)?;
    Ok(dir.join("root"))
}

/// Counts the lines `ok NAME`, `FAILED NAME: WHY` and `NOT RUN NAME: WHY` of a script.
fn lines(kind: &str, command: &mut Command) -> Result<Tally> {
    let mut child = process::Guard::spawn(kind, command.stdout(Stdio::piped()).stdin(Stdio::null()))?;
    let mut tally = Tally::default();
    let status = child.for_each_line(|line| {
        println!("{line}");
        if line.starts_with("ok ") {
            tally.passed += 1;
        } else if let Some(text) = line.strip_prefix("FAILED ") {
            tally.fail(text.to_owned());
        } else if let Some(text) = line.strip_prefix("NOT RUN ") {
            tally.not_run.push((1, text.to_owned()));
        }
    })?;
    if !status.success() && tally.failed == 0 || tally.passed == 0 {
        tally.fail(format!("{kind}: the script ended with {status}"));
    }
    Ok(tally)
}

/// The wheel in a fresh environment, with pytest, and the examples by its program.
fn wheel(out: &Path) -> Result<Tally> {
    let wheel = find(out, WHEEL)?;
    in_environment(&[Path::new("pytest"), Path::new("pyyaml"), &wheel], |venv| {
        let mut command = Command::new(Path::new(SCRIPTS).join("wheel.sh"));
        lines("wheel", command.arg(venv).arg(out))
    })
}

/// The bills of materials, by the schema of CycloneDX.
fn bills(out: &Path) -> Result<Tally> {
    in_environment(&[Path::new(CYCLONEDX)], |venv| {
        let mut command = Command::new(venv.join("bin/python"));
        command.arg(Path::new(SCRIPTS).join("bills.py"));
        lines("bill of materials", command.arg(out))
    })
}

/// Runs something in a fresh environment of Python with these packages.
fn in_environment(packages: &[&Path], check: impl FnOnce(&Path) -> Result<Tally>) -> Result<Tally> {
    // Other users can read it.
    let venv = std::env::temp_dir().join(format!("ferroce-packages-{}", std::process::id()));
    let checked = install(packages, &venv).and_then(|()| check(&venv));
    let removed = fs::remove_dir_all(&venv).map_err(failed(&venv));
    let tally = checked?;
    removed.map(|()| tally)
}

fn install(packages: &[&Path], venv: &Path) -> Result<()> {
    let mut python = Command::new("/usr/bin/python3");
    process::capture("python3 -m venv", python.args(["-m", "venv"]).arg(venv))?;
    let mut pip = Command::new(venv.join("bin/pip"));
    process::capture("pip install", pip.args(["install", "--quiet"]).args(packages)).map(drop)
}
