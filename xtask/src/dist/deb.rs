//! The Debian package, made by dpkg-deb of the tree that all packages have.

use std::{fs, path::Path, process::Command};

use super::{GLIBC, Release, tar};
use crate::{
    Result,
    files::{self, failed, put},
    process,
};

/// Scripts that dpkg runs.
const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];
const SCRIPTS_FOLDER: &str = "xtask/src/dist/debian";
/// Folder in which zsh of Debian looks for completions of packages.
const ZSH: [&str; 2] = ["share/zsh/site-functions", "share/zsh/vendor-completions"];

/// Folder in which Debian's Wireshark looks for what packages bring, below that of the machine's libraries.
const WIRESHARK: &str = "wireshark";
/// Links in it, and the files that all packages have.
const WIRESHARK_LINKS: [(&str, &str); 2] = [
    ("plugins/ferroce.lua", "/usr/share/ferroce/wireshark/ferroce.lua"),
    ("extcap/ferroce", "/usr/share/ferroce/wireshark/extcap/ferroce"),
];

pub(super) fn package(release: &Release) -> Result<()> {
    let (dir, usr) = release.tree("deb", "/usr")?;
    let [from, to] = ZSH.map(|folder| usr.join(folder));
    fs::create_dir_all(usr.join("share/zsh")).map_err(failed(&usr))?;
    fs::rename(&from, &to).map_err(failed(&to))?;
    documents(release, &usr)?;
    let libraries = usr.join(format!("lib/{}-linux-gnu", std::env::consts::ARCH));
    for (name, target) in WIRESHARK_LINKS {
        files::link(target, &libraries.join(WIRESHARK).join(name))?;
    }
    let control = dir.join("DEBIAN");
    for name in SCRIPTS {
        files::copy(&Path::new(SCRIPTS_FOLDER).join(name), &control.join(name), 0o755)?;
    }
    put(
        &control.join("control"),
        self::control(release, &usr)?.as_bytes(),
        0o644,
    )?;
    put(&control.join("md5sums"), &md5sums(&dir)?, 0o644)?;
    let name = format!("ferroce_{}_{}.deb", release.version, release.architecture);
    let mut deb = Command::new("dpkg-deb");
    let compressed = if release.small {
        ["-Zxz", "-z9"]
    } else {
        ["-Zgzip", "-z1"]
    };
    deb.arg("--root-owner-group").args(compressed).arg("--build").arg(&dir);
    deb.arg(release.out.join(name))
        .env("SOURCE_DATE_EPOCH", release.epoch.to_string());
    process::capture("dpkg-deb", &mut deb).map(drop)
}

/// Manual pages and changes are compressed, and licences are named as Debian wants it.
fn documents(release: &Release, usr: &Path) -> Result<()> {
    let pages = usr.join("share/man");
    for page in files::below(&pages)? {
        tar::gzip(&pages.join(page), "-9")?;
    }
    let doc = usr.join("share/doc/ferroce");
    let changes = doc.join("changelog");
    fs::rename(doc.join("CHANGELOG.md"), &changes).map_err(failed(&changes))?;
    tar::gzip(&changes, "-9")?;
    let mit = files::text(&doc.join("LICENSE-MIT"))?;
    for name in ["LICENSE-MIT", "LICENSE-APACHE"] {
        fs::remove_file(doc.join(name)).map_err(failed(&doc))?;
    }
    let copyright = format!(
        "{} is licensed under {}, as you like.\n\nThe Apache License, Version 2.0, is in \
         /usr/share/common-licenses/Apache-2.0. The MIT license:\n\n{mit}",
        release.homepage, release.license
    );
    put(&doc.join("copyright"), copyright.as_bytes(), 0o644)
}

fn control(release: &Release, usr: &Path) -> Result<String> {
    let mut bytes = 0;
    for path in files::below(usr)? {
        bytes += fs::symlink_metadata(usr.join(&path)).map_err(failed(&path))?.len();
    }
    let (major, minor) = GLIBC;
    let from = |name: &str, other: &str| std::env::var(name).unwrap_or_else(|_| other.to_owned());
    Ok(format!(
        "Package: ferroce\nVersion: {}\nArchitecture: {}\nMaintainer: {} <{}>\nInstalled-Size: {}\n\
         Depends: libc6 (>= {major}.{minor}), libgcc-s1 | libgcc1\nSuggests: ibverbs-utils, perftest, rdmacm-utils, libnbd-bin, nbd-client\n\
         Section: net\nPriority: optional\nHomepage: {}\n\
         Description: RDMA over Converged Ethernet (RoCEv2) in userspace\n {}\n .\n \
         Programs for libibverbs and librdmacm run unmodified under \"ferroce run\",\n without RDMA hardware, kernel module or privilege. \"ferroce serve\" and\n \
         \"ferroce map\" export and use block devices by RNBD over RTRS, also with a\n Linux kernel as the peer.\n",
        release.version,
        release.architecture,
        // As Debian's own tools take them.
        from("DEBFULLNAME", "The ferroce developers"),
        from("DEBEMAIL", "ferroce@localhost"),
        bytes.div_ceil(1024),
        release.homepage,
        release.description,
    ))
}

/// Checksums of all files, for `dpkg --verify`.
fn md5sums(dir: &Path) -> Result<Vec<u8>> {
    let files = files::below(dir)?;
    let regular = |path: &&std::path::PathBuf| !path.starts_with("DEBIAN") && !dir.join(path).is_symlink();
    let mut md5sum = Command::new("md5sum");
    md5sum.current_dir(dir).args(files.iter().filter(regular));
    Ok(process::capture("md5sum", &mut md5sum)?.stdout)
}
