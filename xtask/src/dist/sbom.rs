//! The bill of materials: every crate that is in the program and the libraries, as CycloneDX, by cargo-cyclonedx.

use std::{path::Path, process::Command};

use super::Release;
use crate::{
    Result, cargo,
    files::{copy, failed},
    process,
};

/// Another version may write something else.
const VERSION: &str = "0.5.9";
/// Packages whose dependencies are delivered.
const PACKAGES: [(&str, &str); 2] = [("ferroce", "ferroce"), ("verbs-shim", "verbs-shim")];

/// Writes one bill for the program and one for the libraries.
pub(super) fn write(release: &Release) -> Result<()> {
    let tool = cargo::installed("cargo-cyclonedx", VERSION)?;
    for (package, folder) in PACKAGES {
        let name = format!("{package}-{}", release.version);
        let mut command = Command::new(&tool);
        command.args([
            "cyclonedx",
            "--format",
            "json",
            "--spec-version",
            "1.5",
            "--no-build-deps",
            "--quiet",
        ]);
        command.arg("--manifest-path").arg(Path::new(folder).join("Cargo.toml"));
        command.args(["--target", &format!("{}-unknown-linux-gnu", std::env::consts::ARCH)]);
        command.args(["--override-filename", &format!("{name}.cdx")]);
        command.env("SOURCE_DATE_EPOCH", release.epoch.to_string());
        command.env("CARGO_TARGET_DIR", cargo::target_dir()?);
        process::capture("cargo cyclonedx", &mut command)?;
        // It writes beside the manifests of other packages, too.
        let file = format!("{name}.cdx.json");
        copy(&Path::new(folder).join(&file), &release.out.join(&file), 0o644)?;
        for made in cargo::folders()?
            .iter()
            .map(|folder| folder.join(&file))
            .filter(|made| made.exists())
        {
            std::fs::remove_file(&made).map_err(failed(&made))?;
        }
    }
    Ok(())
}
