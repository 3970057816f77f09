//! The ext4 image: made from real files, checked and changed without mounting.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

use super::{bar, done};
use crate::{Result, process, tools};

/// Folders of the workspace that are not source.
const NOT_SOURCE: [&str; 2] = [".git", "node_modules"];
/// Written into the image by [`change`].
const NOTE: &str = "written through ferroce\n";
/// So that the same files give the same file system.
const FIXED_UUID: &str = "66657272-6f63-4e65-8000-726f63657632";
const FIXED_TIME: &str = "1700000000";

/// What [`build`] made.
pub(super) struct Image {
    pub(super) bytes: u64,
    pub(super) files: usize,
}

/// Collects files into `tree` and makes a file system image of it: the sources, the built documentation, and then as
/// many build products as it takes for `want` bytes.
pub(super) fn build(tree: &Path, image: &Path, target: &Path, want: u64) -> Result<Image> {
    let mut collector = Collector::new(tree, want);
    collector.add(Path::new("."), "ferroce", u64::MAX, &|p| !is_target(p))?;
    collector.add(&target.join("doc"), "doc", u64::MAX, &|_| true)?;
    for profile in ["release", "debug"] {
        collector.add(&target.join(profile).join("deps"), profile, want, &|_| true)?;
    }
    collector.fill()?;
    let (bytes, files) = (collector.bytes, collector.files);
    done(
        &collector.bar,
        "collecting files",
        &format!("{files} files, {} MB", bytes / 1_000_000),
    );

    // Room for the journal, inodes and the last block of every file, and for the change.
    let size = (bytes + files as u64 * 4096 + bytes / 10 + (64 << 20)).next_multiple_of(1 << 20);
    let mut command = tool("mke2fs");
    command
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-U", FIXED_UUID])
        .args(["-E", &format!("hash_seed={},root_owner=0:0", FIXED_UUID)])
        .arg("-d")
        .arg(tree)
        .arg(image)
        .arg(format!("{}k", size / 1024))
        .env("SOURCE_DATE_EPOCH", FIXED_TIME)
        .env("E2FSPROGS_FAKE_TIME", FIXED_TIME);
    process::capture("mke2fs", &mut command)?;
    fs::remove_dir_all(tree).map_err(|e| format!("{}: {e}", tree.display()))?;
    fsck("the new image", image)?;
    Ok(Image { bytes: size, files })
}

/// A forced check that changes nothing.
pub(super) fn fsck(what: &str, image: &Path) -> Result<()> {
    process::capture(&format!("e2fsck of {what}"), tool("e2fsck").arg("-fn").arg(image))?;
    println!("{:24} clean", format!("e2fsck {what}"));
    Ok(())
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

/// Copies files and counts them.
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
            bar: bar("collecting files", want),
        }
    }

    /// Copies a folder, in the order of names, until `limit` bytes are collected in total.
    fn add(&mut self, from: &Path, name: &str, limit: u64, enter: &dyn Fn(&Path) -> bool) -> Result<()> {
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
                if self.bytes >= limit {
                    return Ok(());
                }
                process::check_interrupt()?;
                let (path, to) = (entry.path(), copy.join(entry.file_name()));
                let Ok(kind) = entry.file_type() else { continue };
                let skip = NOT_SOURCE.iter().any(|n| entry.file_name() == **n);
                if kind.is_dir() && !skip && enter(&path) {
                    folders.push((path, to));
                } else if kind.is_file() {
                    self.copy(&path, &to)?;
                }
            }
        }
        Ok(())
    }

    fn copy(&mut self, from: &Path, to: &Path) -> Result<()> {
        match fs::copy(from, to) {
            Ok(n) => {
                self.bytes += n;
                self.files += 1;
                self.bar.set_position(self.bytes.min(self.want));
                Ok(())
            }
            // A build beside us may take its files away.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && !from.exists() => Ok(()),
            Err(e) => Err(format!("copying {} to {}: {e}", from.display(), to.display())),
        }
    }

    /// Makes up what is missing with bytes that do not compress or repeat.
    fn fill(&mut self) -> Result<()> {
        if self.bytes >= self.want {
            return Ok(());
        }
        let path = self.tree.join("filler.bin");
        let fail = |e: std::io::Error| format!("{}: {e}", path.display());
        let mut file = std::io::BufWriter::new(fs::File::create(&path).map_err(fail)?);
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        while self.bytes < self.want {
            // xorshift64
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            file.write_all(&state.to_le_bytes()).map_err(fail)?;
            self.bytes += 8;
        }
        file.flush().map_err(fail)?;
        self.files += 1;
        Ok(())
    }
}
