//! The ext4 image: made from real files, checked and changed without mounting.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use super::screen::{Screen, bar};
use crate::{Result, cargo, process, tools};

/// Folders of the workspace that are not source.
const NOT_SOURCE: [&str; 2] = [".git", "node_modules"];
/// Written into the image by [`change`].
const NOTE: &str = "written through ferroce\n";

/// Result of [`build`].
pub(super) struct Image {
    /// Size of the image.
    pub(super) bytes: u64,
    pub(super) files: usize,
    /// Bytes of the files.
    pub(super) content: u64,
}

/// Collects files into `tree` and makes a file system image of it: the sources, and then of what cargo has built as much as it
/// takes for `want` bytes.
pub(super) fn build(screen: &Screen, tree: &Path, image: &Path, want: u64) -> Result<Image> {
    let target = cargo::target_dir()?;
    let mut collector = Collector::new(tree, want);
    let root = cargo::workspace_root();
    collector.add(&root, "ferroce", &|p| p != target && !is_target(p))?;
    for profile in ["demo", "release", "debug"] {
        collector.add(&target.join(profile).join("deps"), profile, &|_| true)?;
    }
    collector.bar.finish_and_clear();
    let (bytes, files) = (collector.bytes, collector.files);

    // Room for the journal, inodes and the last block of every file, and for the change.
    let size = (bytes + files as u64 * 4096 + bytes / 10 + (64 << 20)).next_multiple_of(1 << 20);
    screen.command("server", "mke2fs -t ext4 -d tree demo.img");
    let mut command = tool("mke2fs");
    command
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-E", "root_owner=0:0", "-d"])
        .arg(tree)
        .arg(image)
        .arg(format!("{}k", size / 1024));
    process::capture("mke2fs", &mut command)?;
    fs::remove_dir_all(tree).map_err(|e| format!("{}: {e}", tree.display()))?;
    fsck(image)?;
    Ok(Image {
        bytes: size,
        files,
        content: bytes,
    })
}

/// A forced check that changes nothing.
pub(super) fn fsck(image: &Path) -> Result<()> {
    let name = format!("e2fsck -fn {}", image.display());
    process::capture(&name, tool("e2fsck").arg("-fn").arg(image)).map(|_| ())
}

/// Writes a file and a folder into the image and removes a file, as a user of the mounted file system would.
pub(super) fn change(image: &Path, note: &Path) -> Result<()> {
    fs::write(note, NOTE).map_err(|e| format!("{}: {e}", note.display()))?;
    let commands = note.with_extension("debugfs");
    let script = format!(
        "mkdir changed\nwrite {} changed/note.txt\nrm ferroce/README.md\n",
        note.display()
    );
    fs::write(&commands, script).map_err(|e| format!("{}: {e}", commands.display()))?;
    process::capture("debugfs", tool("debugfs").arg("-w").arg("-f").arg(&commands).arg(image))?;
    contains_note(image)
}

/// Whether the change is in the image.
pub(super) fn contains_note(image: &Path) -> Result<()> {
    let output = process::capture(
        "debugfs",
        tool("debugfs").args(["-R", "cat changed/note.txt"]).arg(image),
    )?;
    if output.stdout == NOTE.as_bytes() {
        return Ok(());
    }
    Err(format!(
        "{}: changed/note.txt is not what was written: {:?}",
        image.display(),
        String::from_utf8_lossy(&output.stdout)
    ))
}

fn tool(name: &str) -> Command {
    Command::new(tools::find(name).unwrap_or_else(|| name.into()))
}

/// Whether this is a cargo output folder, whatever its name.
fn is_target(path: &Path) -> bool {
    path.join("CACHEDIR.TAG").exists()
}

/// Gathers files and counts them.
struct Collector {
    tree: PathBuf,
    want: u64,
    bytes: u64,
    files: usize,
    bar: indicatif::ProgressBar,
}

impl Collector {
    fn new(tree: &Path, want: u64) -> Self {
        Self {
            tree: tree.to_path_buf(),
            want,
            bytes: 0,
            files: 0,
            bar: bar("collecting", want),
        }
    }

    /// Adds a folder, in the order of names, until there are as many bytes as wanted.
    fn add(&mut self, from: &Path, name: &str, enter: &dyn Fn(&Path) -> bool) -> Result<()> {
        if !from.is_dir() {
            return Ok(());
        }
        let mut folders = vec![(from.to_path_buf(), self.tree.join(name))];
        while let Some((source, copy)) = folders.pop() {
            let fail = |e: std::io::Error| format!("{}: {e}", source.display());
            fs::create_dir_all(&copy).map_err(|e| format!("{}: {e}", copy.display()))?;
            let mut entries: Vec<_> = fs::read_dir(&source).map_err(fail)?.filter_map(Result::ok).collect();
            entries.sort_by_key(fs::DirEntry::file_name);
            for entry in entries {
                if self.bytes >= self.want {
                    return Ok(());
                }
                process::check_interrupt()?;
                let (path, to) = (entry.path(), copy.join(entry.file_name()));
                let Ok(kind) = entry.file_type() else { continue };
                let skip = NOT_SOURCE.iter().any(|n| entry.file_name() == **n);
                if kind.is_dir() && !skip && enter(&path) {
                    folders.push((path, to));
                } else if kind.is_file() {
                    self.link(&path, &to)?;
                }
            }
        }
        Ok(())
    }

    /// Adds a file. It is read only once, by mke2fs, so that a link will do; across file systems it is copied.
    fn link(&mut self, from: &Path, to: &Path) -> Result<()> {
        let linked = fs::hard_link(from, to).and_then(|()| to.metadata()).map(|m| m.len());
        match linked.or_else(|_| fs::copy(from, to)) {
            Ok(n) => {
                self.bytes += n;
                self.files += 1;
                self.bar.set_position(self.bytes.min(self.want));
                Ok(())
            }
            // A build may remove its files meanwhile.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && !from.exists() => Ok(()),
            Err(e) => Err(format!("copying {} to {}: {e}", from.display(), to.display())),
        }
    }
}
