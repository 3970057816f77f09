//! The wheel `ferroce`: the program and its libraries, and fixtures for pytest.

use std::{fs, path::Path, process::Command};

use super::{GLIBC, Release};
use crate::{
    Result,
    files::{self, copy, put},
    install::{LIBRARIES, NOTICES},
    process,
};

/// The Python package.
const SOURCE: &str = "python/ferroce";
/// Page of the project at PyPI.
const README: &str = "python/README.md";
/// Folders of the installed tree that go into the environment's: `bin` is of its own kind, and wheels have no links.
const SHARED: [&str; 3] = ["share/man", "share/bash-completion", "share/fish"];

pub(super) fn package(release: &Release) -> Result<()> {
    let (_, tree) = release.tree("wheel-tree", "/usr/local")?;
    let dir = release.work.join("wheel");
    files::empty(&dir)?;
    let named = format!("ferroce-{}", release.version);
    let data = dir.join(format!("{named}.data"));
    copy(&tree.join("bin/ferroce"), &data.join("scripts/ferroce"), 0o755)?;
    for name in LIBRARIES {
        let library = Path::new("lib/ferroce").join(name);
        copy(&tree.join(&library), &data.join("data").join(&library), 0o644)?;
    }
    for path in files::below(&tree)? {
        if SHARED.iter().any(|shared| path.starts_with(shared)) {
            copy(&tree.join(&path), &data.join("data").join(&path), 0o644)?;
        }
    }
    for path in files::below(Path::new(SOURCE))? {
        if path.extension().is_some_and(|e| e == "py" || e == "typed") {
            copy(&Path::new(SOURCE).join(&path), &dir.join("ferroce").join(&path), 0o644)?;
        }
    }
    let info = dir.join(format!("{named}.dist-info"));
    put(&info.join("METADATA"), metadata(release)?.as_bytes(), 0o644)?;
    put(&info.join("WHEEL"), tags().as_bytes(), 0o644)?;
    let plugin = "[pytest11]\nferroce = ferroce.pytest_plugin\n";
    put(&info.join("entry_points.txt"), plugin.as_bytes(), 0o644)?;
    for name in ["LICENSE-APACHE", "LICENSE-MIT"] {
        copy(Path::new(name), &info.join("licenses").join(name), 0o644)?;
    }
    copy(&release.programs.notices, &info.join("licenses").join(NOTICES), 0o644)?;
    let mut wheel = Command::new("/usr/bin/python3");
    wheel
        .args(["-m", "wheel", "pack"])
        .arg(&dir)
        .arg("-d")
        .arg(&release.out);
    wheel.env("SOURCE_DATE_EPOCH", release.epoch.to_string());
    process::capture("wheel pack", &mut wheel)?;
    fs::remove_dir_all(&dir).map_err(files::failed(&dir))
}

fn metadata(release: &Release) -> Result<String> {
    let readme = files::text(Path::new(README))?;
    Ok(format!(
        "Metadata-Version: 2.1\nName: ferroce\nVersion: {}\nSummary: {}\nHome-page: {}\nLicense: {}\n\
         License-File: LICENSE-APACHE\nLicense-File: LICENSE-MIT\nLicense-File: {NOTICES}\nClassifier: Framework :: Pytest\n\
         Classifier: Operating System :: POSIX :: Linux\nClassifier: Topic :: System :: Networking\nRequires-Python: >=3.8\n\
         Description-Content-Type: text/markdown\n\n{readme}",
        release.version, release.description, release.homepage, release.license
    ))
}

/// Any Python, and glibc from [`GLIBC`] on.
fn tags() -> String {
    let (major, minor) = GLIBC;
    let arch = std::env::consts::ARCH;
    format!(
        "Wheel-Version: 1.0\nGenerator: ferroce\nRoot-Is-Purelib: false\nTag: py3-none-manylinux_{major}_{minor}_{arch}\n"
    )
}
