//! Licences of the crates that are in the program and the libraries, whose texts go with every copy.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{
    Result, cargo,
    files::{self, failed},
    process,
};

/// Beginnings of the names of files with licences, in lower case.
const NAMES: [&str; 5] = ["licen", "copying", "copyright", "notice", "unlicense"];

/// Writes one file with all licences, each text once.
pub(crate) fn write(to: &Path) -> Result<()> {
    let contained = contained()?;
    let mut list = String::new();
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in cargo::dependencies()? {
        let word = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
        let name = format!("{} {}", word("name"), word("version"));
        // Our own have no source.
        if package["source"].is_null() || !contained.contains(&name) {
            continue;
        }
        list += &format!("{name}: {}\n", license(&package));
        let folder = PathBuf::from(word("manifest_path"));
        for text in licences(folder.parent().unwrap_or(&folder))? {
            texts.entry(text).or_default().push(name.clone());
        }
    }
    let mut all = format!("ferroce contains these crates, under their licences:\n\n{list}");
    for (text, crates) in &texts {
        all += &format!("\n{}\n{}:\n\n{}\n", "-".repeat(72), crates.join(", "), text.trim_end());
    }
    files::put(to, all.as_bytes(), 0o644)
}

fn license(package: &Value) -> &str {
    package["license"].as_str().unwrap_or("see below")
}

/// The crates that are linked, as `name version`: neither build scripts' nor macros.
fn contained() -> Result<BTreeSet<String>> {
    let mut tree = cargo::command();
    let args = [
        "tree",
        "--locked",
        "-p",
        "ferroce",
        "-p",
        "verbs-shim",
        "-e",
        "normal",
        "--prefix",
        "none",
    ];
    let out = process::capture("cargo tree", tree.args(args))?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let linked = text.lines().filter(|line| !line.contains("(proc-macro)"));
    Ok(linked.filter_map(name).collect())
}

/// The name and version in a line of `cargo tree`.
fn name(line: &str) -> Option<String> {
    let mut words = line.split_whitespace();
    let (name, version) = (words.next()?, words.next()?);
    Some(format!("{name} {}", version.strip_prefix('v')?))
}

/// The texts of a crate, by the names of their files.
fn licences(folder: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed(folder))?.flatten() {
        let name = entry.file_name().to_string_lossy().to_lowercase();
        if entry.path().is_file() && NAMES.iter().any(|known| name.starts_with(known)) {
            found.push(entry.path());
        }
    }
    found.sort();
    found.iter().map(|path| files::text(path)).collect()
}

#[cfg(test)]
mod tests {
    use super::name;

    #[test]
    fn names_and_versions_are_read() {
        assert_eq!(name("libc v0.2.191"), Some("libc 0.2.191".to_owned()));
        assert_eq!(name("roce v0.1.0 (/work/roce) (*)"), Some("roce 0.1.0".to_owned()));
        assert_eq!(name(""), None);
    }
}
