//! `cargo xtask install`: program, library, header, pkg-config file and manual pages, where distributions have them.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use clap::Args;

use crate::{
    Result,
    cargo::{self, Profile},
};

/// Of `lib/ferroce`, where the dynamic linker finds the library as libibverbs and librdmacm.
const LIBRARIES: [&str; 3] = ["libferroce_verbs.so", "libibverbs.so.1", "librdmacm.so.1"];
/// What a linker finds by `-l`: in which folder, by which name, what.
const LINKS: [(&str, &str, &str); 3] = [
    ("lib", "libferroce_verbs.so", "ferroce/libferroce_verbs.so"),
    ("lib/ferroce", "libibverbs.so", "libibverbs.so.1"),
    ("lib/ferroce", "librdmacm.so", "librdmacm.so.1"),
];
const HEADER: &str = "verbs-shim/include/ferroce_verbs.h";
const PKG_CONFIG: &str = "verbs-shim/ferroce-verbs.pc.in";
/// Units of systemd, and their users.
const UNITS: [&str; 3] = ["ferroce-broker.service", "ferroce.service", "ferroce.sysusers"];
const UNITS_FOLDER: &str = "ferroce/dist";

#[derive(Args)]
pub(crate) struct InstallArgs {
    /// Folder that gets bin, lib, include and share
    #[arg(long, default_value = "/usr/local")]
    prefix: PathBuf,
    /// Put everything below this folder instead of /, for packages
    #[arg(long, value_name = "DIR")]
    destdir: Option<PathBuf>,
}

impl InstallArgs {
    /// Where something of the prefix is put.
    fn place(&self, inside: &str) -> PathBuf {
        let full = self.prefix.join(inside);
        match &self.destdir {
            None => full,
            Some(dir) => dir.join(full.strip_prefix("/").unwrap_or(&full)),
        }
    }
}

fn failed(path: &Path) -> impl FnOnce(std::io::Error) -> String {
    move |e| format!("{}: {e}", path.display())
}

/// Writes a file in one step, so that programs that run the old one go on with it.
fn put(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    let dir = path.parent().ok_or("no folder")?;
    fs::create_dir_all(dir).map_err(failed(dir))?;
    let fresh = path.with_extension("new");
    fs::write(&fresh, bytes).map_err(failed(&fresh))?;
    fs::set_permissions(&fresh, fs::Permissions::from_mode(mode)).map_err(failed(&fresh))?;
    fs::rename(&fresh, path).map_err(failed(path))?;
    println!("{}", path.display());
    Ok(())
}

fn copy(from: &Path, to: &Path, mode: u32) -> Result<()> {
    put(to, &fs::read(from).map_err(failed(from))?, mode)
}

/// Makes a symbolic link in one step.
fn link(target: &str, at: &Path) -> Result<()> {
    let fresh = at.with_extension("new");
    let _ = fs::remove_file(&fresh);
    symlink(target, &fresh).map_err(failed(&fresh))?;
    fs::rename(&fresh, at).map_err(failed(at))?;
    println!("{}", at.display());
    Ok(())
}

/// The version of the workspace, as the program tells it (`ferroce 0.1.0`).
fn version(ferroce: &Path) -> Result<String> {
    let out = Command::new(ferroce)
        .arg("--version")
        .output()
        .map_err(failed(ferroce))?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let version = text.split_whitespace().nth(1);
    version
        .map(str::to_owned)
        .ok_or_else(|| format!("{} tells no version", ferroce.display()))
}

pub(crate) fn run(args: &InstallArgs) -> Result<()> {
    if !args.prefix.is_absolute() {
        return Err(format!("--prefix {}: it must begin with /", args.prefix.display()));
    }
    let ferroce = cargo::build_product(Profile::Release)?;
    let built = ferroce.with_file_name("lib").join("ferroce");
    copy(&ferroce, &args.place("bin/ferroce"), 0o755)?;
    for name in LIBRARIES {
        copy(&built.join(name), &args.place("lib/ferroce").join(name), 0o644)?;
    }
    for (folder, name, target) in LINKS {
        link(target, &args.place(folder).join(name))?;
    }
    copy(Path::new(HEADER), &args.place("include/ferroce_verbs.h"), 0o644)?;
    let template = fs::read_to_string(PKG_CONFIG).map_err(failed(Path::new(PKG_CONFIG)))?;
    let pc = template
        .replace("@PREFIX@", &args.prefix.display().to_string())
        .replace("@VERSION@", &version(&ferroce)?);
    put(&args.place("lib/pkgconfig/ferroce-verbs.pc"), pc.as_bytes(), 0o644)?;
    for name in UNITS {
        let source = Path::new(UNITS_FOLDER).join(name);
        let unit = fs::read_to_string(&source).map_err(failed(&source))?;
        let program = args.prefix.join("bin/ferroce").display().to_string();
        let unit = unit.replace("/usr/bin/ferroce", &program);
        put(
            &args.place(&format!("share/doc/ferroce/{name}")),
            unit.as_bytes(),
            0o644,
        )?;
    }
    let pages = args.place("share/man/man1");
    fs::create_dir_all(&pages).map_err(failed(&pages))?;
    let status = Command::new(&ferroce)
        .arg("man")
        .arg(&pages)
        .status()
        .map_err(failed(&ferroce))?;
    match status.success() {
        true => Ok(()),
        false => Err(format!("ferroce man ended with {status}")),
    }
}
