//! `cargo xtask dist`: what users install, made of one tree of files: a tarball, a .deb, a wheel and an OCI image layout, with a bill of
//! materials and checksums.

pub(crate) mod check;
mod deb;
pub(crate) mod notices;
mod oci;
mod sbom;
mod tar;
mod wheel;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use clap::Args;
use sha2::{Digest, Sha256};

use crate::{
    Result,
    cargo::{self, Profile},
    files::{self, failed},
    install::{LIBRARIES, Programs, Tree},
    process, readelf, tools,
};

/// The oldest glibc that the libraries run with: Debian 10, RHEL 8.
const GLIBC: (u32, u32) = (2, 28);
/// Libraries that ours may load: parts of glibc, and of the compiler.
const MAY_LOAD: [&str; 8] = [
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libferroce_verbs.so",
    "libgcc_s.so.1",
    "libibverbs.so.1",
    "libm.so.6",
    "libpthread.so.0",
];
/// Architectures: as Rust, and as Debian and OCI call them.
const ARCHITECTURES: [(&str, &str); 2] = [("x86_64", "amd64"), ("aarch64", "arm64")];
const SUMS: &str = "SHA256SUMS";

#[derive(Args)]
pub(crate) struct DistArgs {
    /// Folder of the packages; emptied first
    #[arg(long, value_name = "DIR", default_value = "target/dist")]
    out: PathBuf,
    /// Install each package in a fresh root, use it and remove it (needs root)
    #[arg(long)]
    check: bool,
    /// Pack programs of the dev profile, for trying the packages: not static, and without a bill of materials
    #[arg(long)]
    dev: bool,
}

/// Facts that all packages have in common.
struct Release {
    version: String,
    /// Seconds since 1970 of the commit: the same source makes the same packages.
    epoch: u64,
    description: String,
    homepage: String,
    license: String,
    /// As Debian and OCI call it.
    architecture: &'static str,
    programs: Programs,
    /// Small packages, or quickly made ones.
    small: bool,
    /// Folder for what is packed.
    work: PathBuf,
    out: PathBuf,
}

impl Release {
    fn new(programs: Programs, small: bool, out: &Path, work: &Path) -> Result<Self> {
        let package = cargo::package("ferroce")?;
        let text = |key: &str| {
            let text = package[key].as_str().map(str::to_owned);
            text.ok_or_else(|| format!("the manifest of ferroce has no {key}"))
        };
        let arch = std::env::consts::ARCH;
        let known = ARCHITECTURES.iter().find(|(rust, _)| *rust == arch);
        let (_, architecture) = known.ok_or_else(|| format!("no packages are made for {arch}"))?;
        files::empty(out)?;
        files::empty(work)?;
        Ok(Self {
            version: text("version")?,
            epoch: epoch()?,
            description: text("description")?,
            homepage: text("repository")?,
            license: text("license")?,
            architecture,
            programs: stripped(&programs, &work.join("stripped"))?,
            small,
            work: work.to_owned(),
            out: out.to_owned(),
        })
    }

    /// How strongly gzip compresses.
    const fn gzip(&self) -> &'static str {
        if self.small { "-9" } else { "-1" }
    }

    /// The installed tree of a prefix, below a folder of this name.
    fn tree(&self, name: &str, prefix: &str) -> Result<(PathBuf, PathBuf)> {
        let dir = self.work.join(name);
        files::empty(&dir)?;
        let tree = Tree::new(Path::new(prefix), Some(&dir));
        tree.fill(&self.programs)?;
        Ok((dir, tree.root))
    }

    /// All packages but for the bill of materials.
    fn packages(&self) -> Result<()> {
        tools::ensure(&tools::OF_PACKAGES)?;
        tar::tarball(self)?;
        deb::package(self)?;
        wheel::package(self)?;
        oci::layout(self)
    }
}

/// Makes packages of programs under test.
fn make(programs: Programs, out: &Path, work: &Path) -> Result<()> {
    let release = Release::new(programs, false, out, work)?;
    release.packages()?;
    sums(out)
}

pub(crate) fn run(args: &DistArgs) -> Result<()> {
    tools::ensure(&tools::OF_PACKAGES)?;
    let programs = match args.dev {
        true => Programs::built(cargo::build_product(Profile::Dev)?)?,
        false => build()?,
    };
    let work = cargo::target_dir()?.join("dist-work");
    let release = Release::new(programs, !args.dev, &args.out, &work)?;
    release.packages()?;
    if !args.dev {
        sbom::write(&release)?;
    }
    sums(&args.out)?;
    report(&args.out)?;
    let others = ARCHITECTURES.iter().filter(|(_, name)| *name != release.architecture);
    for (rust, name) in others {
        println!("{name}: not made here; run `cargo xtask dist` on a machine of it (no cross build for {rust})");
    }
    match args.check {
        true => check::run(&args.out),
        false => Ok(()),
    }
}

/// Builds the program, which loads nothing, and the libraries, optimized.
fn build() -> Result<Programs> {
    let ferroce = cargo::build_static(&[("ferroce", "ferroce")])?.remove(0);
    cargo::run(&["build", "--release", "-p", "verbs-shim"])?;
    let libraries = cargo::target_dir()?.join("release/lib/ferroce");
    let programs = Programs::new(ferroce, libraries)?;
    verify(&programs)?;
    Ok(programs)
}

/// Checks the promises of released programs: the program loads nothing, the libraries run with [`GLIBC`], and the commit is known.
fn verify(programs: &Programs) -> Result<()> {
    if let Some(library) = readelf::needed(&programs.ferroce)?.first() {
        return Err(format!(
            "{} is not static: it loads {library}",
            programs.ferroce.display()
        ));
    }
    for name in LIBRARIES {
        let path = programs.libraries.join(name);
        let (major, minor) = readelf::glibc(&path)?;
        if (major, minor) > GLIBC {
            return Err(format!(
                "{name} needs glibc {major}.{minor}, not {}.{}",
                GLIBC.0, GLIBC.1
            ));
        }
        let loads = readelf::needed(&path)?;
        if let Some(other) = loads.iter().find(|l| !MAY_LOAD.contains(&l.as_str())) {
            return Err(format!("{name} loads {other}"));
        }
    }
    let mut version = Command::new(&programs.ferroce);
    let out = process::capture("ferroce --version", version.arg("--version"))?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    println!("{}", text.trim());
    match text.contains('(') {
        true => Ok(()),
        false => Err(format!("{}: no commit (is this a git repository?)", text.trim())),
    }
}

/// Copies of the programs without symbols.
fn stripped(programs: &Programs, dir: &Path) -> Result<Programs> {
    let strip = |from: &Path, to: &Path, what: &str| {
        files::copy(from, to, 0o755)?;
        process::capture("strip", Command::new("strip").arg(what).arg(to)).map(drop)
    };
    let made = Programs {
        ferroce: dir.join("ferroce"),
        libraries: dir.to_owned(),
        notices: programs.notices.clone(),
    };
    strip(&programs.ferroce, &made.ferroce, "--strip-all")?;
    for name in LIBRARIES {
        strip(&programs.libraries.join(name), &dir.join(name), "--strip-unneeded")?;
    }
    Ok(made)
}

/// The time of the commit, unless `SOURCE_DATE_EPOCH` says another.
fn epoch() -> Result<u64> {
    let given = std::env::var("SOURCE_DATE_EPOCH").ok();
    let text = match given {
        Some(text) => text,
        None => {
            let mut git = Command::new("git");
            let out = process::capture("git", git.args(["log", "-1", "--format=%ct"]))?;
            String::from_utf8_lossy(&out.stdout).into_owned()
        }
    };
    text.trim()
        .parse()
        .map_err(|e| format!("time of the commit {text:?}: {e}"))
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The checksums of all packages, for `sha256sum -c`.
fn sums(out: &Path) -> Result<()> {
    let mut text = String::new();
    for path in files::below(out)? {
        let bytes = fs::read(out.join(&path)).map_err(failed(&path))?;
        text += &format!("{}  {}\n", sha256(&bytes), path.display());
    }
    files::put(&out.join(SUMS), text.as_bytes(), 0o644)
}

/// Prints the packages and their sizes.
fn report(out: &Path) -> Result<()> {
    for path in files::below(out)? {
        let bytes = fs::metadata(out.join(&path)).map_err(failed(&path))?.len();
        println!("{:>10.1} MB  {}", bytes as f64 / 1e6, out.join(&path).display());
    }
    Ok(())
}
