//! Tar archives that are the same for the same files, and the tarball.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use super::Release;
use crate::{Result, files::failed, process};

/// Makes an uncompressed archive of some entries of a folder. Names, times and owners depend on nothing else.
pub(super) fn archive(dir: &Path, entries: &[&str], out: &Path, epoch: u64) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.args([
        "--sort=name",
        "--owner=0",
        "--group=0",
        "--numeric-owner",
        "--format=gnu",
    ]);
    tar.arg(format!("--mtime=@{epoch}")).arg("-C").arg(dir);
    tar.arg("--mode=u+rw,go+r,go-w,a+X").arg("-cf").arg(out).args(entries);
    process::capture("tar", &mut tar).map(drop)
}

/// Compresses a file with neither its name nor its time in it; it gets the extension `.gz`.
pub(super) fn gzip(path: &Path, strength: &str) -> Result<PathBuf> {
    let mut gzip = Command::new("gzip");
    process::capture("gzip", gzip.args(["-n", strength, "-f"]).arg(path))?;
    let mut name = path.as_os_str().to_owned();
    name.push(".gz");
    Ok(name.into())
}

/// The tarball, which works in any folder: the program finds its libraries beside it.
pub(super) fn tarball(release: &Release) -> Result<()> {
    let name = format!("ferroce-{}-{}-linux", release.version, std::env::consts::ARCH);
    let (dir, root) = release.tree("tarball", "/usr/local")?;
    let renamed = dir.join(&name);
    fs::rename(&root, &renamed).map_err(failed(&renamed))?;
    let out = release.out.join(format!("{name}.tar"));
    archive(&dir, &[&name], &out, release.epoch)?;
    gzip(&out, release.gzip()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_files_make_the_same_archive() {
        let base = std::env::temp_dir().join(format!("ferroce-xtask-{}-tar", std::process::id()));
        let made: Vec<_> = ["one", "two"]
            .into_iter()
            .map(|name| {
                let dir = base.join(name);
                fs::create_dir_all(dir.join("x/lib")).unwrap();
                // In another order, and at other times.
                let mut files = ["x/b", "x/lib/a", "x/c"];
                if name == "two" {
                    files.reverse();
                }
                files.iter().for_each(|file| fs::write(dir.join(file), file).unwrap());
                let out = base.join(format!("{name}.tar"));
                archive(&dir, &["x"], &out, 1_700_000_000).unwrap();
                fs::read(gzip(&out, "-1").unwrap()).unwrap()
            })
            .collect();
        assert!(!made[0].is_empty() && made[0] == made[1]);
        fs::remove_dir_all(&base).unwrap();
    }
}
