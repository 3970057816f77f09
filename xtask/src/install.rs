//! `cargo xtask install`, and the tree of files that all packages are made of: program, libraries, header, pkg-config file, manual pages,
//! completions and units of systemd, where distributions have them.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use clap::Args;

use crate::{
    Result,
    cargo::{self, Profile},
    dist::notices,
    files::{self, copy, link, put},
    process,
};

/// Of `lib/ferroce`, where the dynamic linker finds the library as libibverbs and librdmacm.
pub(crate) const LIBRARIES: [&str; 3] = ["libferroce_verbs.so", "libibverbs.so.1", "librdmacm.so.1"];
/// Links that linkers find by `-l`: folder, name, target.
const LINKS: [(&str, &str, &str); 3] = [
    ("lib", "libferroce_verbs.so", "ferroce/libferroce_verbs.so"),
    ("lib/ferroce", "libibverbs.so", "libibverbs.so.1"),
    ("lib/ferroce", "librdmacm.so", "librdmacm.so.1"),
];
const HEADER: &str = "verbs-shim/include/ferroce_verbs.h";
const PKG_CONFIG: &str = "verbs-shim/ferroce-verbs.pc.in";
/// Units of systemd and their users: source, and where it is put.
const UNITS: [(&str, &str); 3] = [
    ("ferroce-broker.service", "lib/systemd/system/ferroce-broker.service"),
    ("ferroce.service", "lib/systemd/system/ferroce.service"),
    ("ferroce.sysusers", "lib/sysusers.d/ferroce.conf"),
];
const DIST_FOLDER: &str = "ferroce/dist";
/// Files for Wireshark: source, where they are put, and mode.
const WIRESHARK: [(&str, &str, u32); 2] = [
    ("wireshark/ferroce.lua", "share/ferroce/wireshark/ferroce.lua", 0o644),
    (
        "wireshark/extcap/ferroce",
        "share/ferroce/wireshark/extcap/ferroce",
        0o755,
    ),
];
/// Completions: shell, and where it looks for them.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "share/bash-completion/completions/ferroce"),
    ("zsh", "share/zsh/site-functions/_ferroce"),
    ("fish", "share/fish/vendor_completions.d/ferroce.fish"),
];
/// Files of the project that every package has.
const DOCUMENTS: [&str; 3] = ["CHANGELOG.md", "LICENSE-APACHE", "LICENSE-MIT"];
pub(crate) const NOTICES: &str = "THIRD-PARTY-LICENSES";

#[derive(Args)]
pub(crate) struct InstallArgs {
    /// Folder that gets bin, lib, include and share
    #[arg(long, default_value = "/usr/local")]
    prefix: PathBuf,
    /// Put everything below this folder instead of /, for packages
    #[arg(long, value_name = "DIR")]
    destdir: Option<PathBuf>,
}

/// Built programs and libraries.
pub(crate) struct Programs {
    /// The program as it is to be installed.
    pub(crate) ferroce: PathBuf,
    /// The folder of [`LIBRARIES`].
    pub(crate) libraries: PathBuf,
    /// Licences of others' crates in both.
    pub(crate) notices: PathBuf,
}

impl Programs {
    /// A program and the folder of the libraries.
    pub(crate) fn new(ferroce: PathBuf, libraries: PathBuf) -> Result<Self> {
        let notices = cargo::target_dir()?.join(NOTICES);
        notices::write(&notices)?;
        Ok(Self {
            ferroce,
            libraries,
            notices,
        })
    }

    /// The programs in cargo's folder of a profile.
    pub(crate) fn built(ferroce: PathBuf) -> Result<Self> {
        let libraries = ferroce.with_file_name("lib").join("ferroce");
        Self::new(ferroce, libraries)
    }
}

/// An installed tree.
pub(crate) struct Tree {
    /// Path of the tree for its users.
    pub(crate) prefix: PathBuf,
    /// Path of the tree now.
    pub(crate) root: PathBuf,
}

impl Tree {
    /// The tree of a prefix, below another folder than `/` for packages.
    pub(crate) fn new(prefix: &Path, destdir: Option<&Path>) -> Self {
        let root = match destdir {
            None => prefix.to_owned(),
            Some(dir) => dir.join(prefix.strip_prefix("/").unwrap_or(prefix)),
        };
        Self {
            prefix: prefix.to_owned(),
            root,
        }
    }

    fn place(&self, inside: &str) -> PathBuf {
        self.root.join(inside)
    }

    /// Puts everything there.
    pub(crate) fn fill(&self, programs: &Programs) -> Result<()> {
        copy(&programs.ferroce, &self.place("bin/ferroce"), 0o755)?;
        for name in LIBRARIES {
            copy(
                &programs.libraries.join(name),
                &self.place("lib/ferroce").join(name),
                0o644,
            )?;
        }
        for (folder, name, target) in LINKS {
            link(target, &self.place(folder).join(name))?;
        }
        copy(Path::new(HEADER), &self.place("include/ferroce_verbs.h"), 0o644)?;
        let pc = files::text(Path::new(PKG_CONFIG))?.replace("@VERSION@", &cargo::version()?);
        put(&self.place("lib/pkgconfig/ferroce-verbs.pc"), pc.as_bytes(), 0o644)?;
        let program = self.prefix.join("bin/ferroce").display().to_string();
        for (name, at) in UNITS {
            let unit = files::text(&Path::new(DIST_FOLDER).join(name))?;
            let unit = unit.replace("/usr/bin/ferroce", &program);
            put(&self.place(at), unit.as_bytes(), 0o644)?;
        }
        for (name, at, mode) in WIRESHARK {
            copy(&Path::new(DIST_FOLDER).join(name), &self.place(at), mode)?;
        }
        for name in DOCUMENTS {
            copy(Path::new(name), &self.place("share/doc/ferroce").join(name), 0o644)?;
        }
        copy(&programs.notices, &self.place("share/doc/ferroce").join(NOTICES), 0o644)?;
        self.generated(&programs.ferroce)
    }

    /// Manual pages and completions, by the program itself.
    fn generated(&self, ferroce: &Path) -> Result<()> {
        for (shell, at) in COMPLETIONS {
            let mut command = Command::new(ferroce);
            let script = process::capture("ferroce completions", command.args(["completions", shell]))?;
            put(&self.place(at), &script.stdout, 0o644)?;
        }
        let pages = self.place("share/man/pages");
        files::empty(&pages)?;
        process::capture("ferroce man", Command::new(ferroce).arg("man").arg(&pages))?;
        for page in files::below(&pages)? {
            let section = page.extension().unwrap_or_default().to_string_lossy();
            copy(
                &pages.join(&page),
                &self.place(&format!("share/man/man{section}")).join(&page),
                0o644,
            )?;
        }
        std::fs::remove_dir_all(&pages).map_err(files::failed(&pages))
    }
}

pub(crate) fn run(args: &InstallArgs) -> Result<()> {
    if !args.prefix.is_absolute() {
        return Err(format!("--prefix {}: it must begin with /", args.prefix.display()));
    }
    let tree = Tree::new(&args.prefix, args.destdir.as_deref());
    tree.fill(&Programs::built(cargo::build_product(Profile::Release)?)?)?;
    println!("installed below {}", tree.root.display());
    Ok(())
}
