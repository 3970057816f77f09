//! Files that tasks make.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use serde::de::DeserializeOwned;

use crate::Result;

/// An error with the file that it is about.
pub(crate) fn failed(path: &Path) -> impl FnOnce(std::io::Error) -> String {
    move |e| format!("{}: {e}", path.display())
}

/// Writes a file in one step, so that programs that run the old one go on with it. Makes its folder.
pub(crate) fn put(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    let dir = path.parent().ok_or("no folder")?;
    fs::create_dir_all(dir).map_err(failed(dir))?;
    let fresh = fresh(path);
    fs::write(&fresh, bytes).map_err(failed(&fresh))?;
    fs::set_permissions(&fresh, fs::Permissions::from_mode(mode)).map_err(failed(&fresh))?;
    fs::rename(&fresh, path).map_err(failed(path))
}

/// Copies a file as [`put`] writes it.
pub(crate) fn copy(from: &Path, to: &Path, mode: u32) -> Result<()> {
    put(to, &fs::read(from).map_err(failed(from))?, mode)
}

/// Makes a symbolic link in one step, and the folder that it is in.
pub(crate) fn link(target: &str, at: &Path) -> Result<()> {
    let dir = at.parent().ok_or("no folder")?;
    fs::create_dir_all(dir).map_err(failed(dir))?;
    let fresh = fresh(at);
    let _ = fs::remove_file(&fresh);
    symlink(target, &fresh).map_err(failed(&fresh))?;
    fs::rename(&fresh, at).map_err(failed(at))
}

fn fresh(path: &Path) -> PathBuf {
    path.with_extension("new")
}

/// Makes an empty folder, whatever was there.
pub(crate) fn empty(dir: &Path) -> Result<()> {
    if dir.exists() {
        fs::remove_dir_all(dir).map_err(failed(dir))?;
    }
    fs::create_dir_all(dir).map_err(failed(dir))
}

/// The files and links below a folder, sorted, relative to it.
pub(crate) fn below(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![dir.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(failed(&folder))? {
            let entry = entry.map_err(failed(&folder))?;
            match entry.file_type().map_err(failed(&entry.path()))?.is_dir() {
                true => folders.push(entry.path()),
                false => found.extend(entry.path().strip_prefix(dir).map(Path::to_owned)),
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Reads a file as text.
pub(crate) fn text(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(failed(path))
}

/// Reads a file in TOML.
pub(crate) fn toml<T: DeserializeOwned>(path: &Path) -> Result<T> {
    toml::from_str(&text(path)?).map_err(|e| format!("{}: {e}", path.display()))
}
