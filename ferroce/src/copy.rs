//! `ferroce copy`: the program and its libraries into a folder that other containers see.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use clap::Args;

use crate::{
    output::{self, Failure},
    run::libraries,
};

/// Libraries of the folder `lib/ferroce`.
const LIBRARIES: [&str; 3] = ["libferroce_verbs.so", "libibverbs.so.1", "librdmacm.so.1"];

#[derive(Args)]
#[command(after_help = "\
Examples:
  ferroce copy /shared
  /shared/bin/ferroce run -- ib_write_bw

For the init container of a pod: the folder is a volume that the other containers mount, whose images need nothing of ferroce. \
They need glibc 2.28 or later. Files of an earlier version are replaced, each in one step.")]
pub(crate) struct CopyArgs {
    /// Folder that gets bin/ferroce and lib/ferroce
    dir: PathBuf,
}

/// Copies the program that runs, and the libraries that belong to it.
pub(crate) fn run(args: &CopyArgs) -> Result<(), Failure> {
    let own = std::env::current_exe().map_err(|e| Failure::failed(format!("this program's own file: {e}")))?;
    let libraries = libraries()?;
    for name in LIBRARIES {
        put(
            &libraries.join(name),
            &args.dir.join("lib/ferroce"),
            OsStr::new(name),
            0o644,
        )?;
    }
    put(&own, &args.dir.join("bin"), OsStr::new("ferroce"), 0o755)?;
    output::line(&format!("copied to {}", args.dir.display()))
}

/// Copies a file in one step, so that programs that run the old one go on with it.
fn put(from: &Path, dir: &Path, name: &OsStr, mode: u32) -> Result<(), Failure> {
    let named = |path: &Path| {
        let path = path.display().to_string();
        move |e: io::Error| Failure::failed(format!("{path}: {e}"))
    };
    fs::create_dir_all(dir).map_err(named(dir))?;
    let to = dir.join(name);
    let fresh = dir.join(format!("{}.new", name.display()));
    // Of a copy that was interrupted.
    let _ = fs::remove_file(&fresh);
    let mut source = File::open(from).map_err(named(from))?;
    let mut copy = File::create_new(&fresh).map_err(named(&fresh))?;
    io::copy(&mut source, &mut copy)
        .and_then(|_| copy.set_permissions(fs::Permissions::from_mode(mode)))
        .map_err(|e| Failure::failed(format!("{} to {}: {e}", from.display(), fresh.display())))?;
    fs::rename(&fresh, &to).map_err(named(&to))
}
