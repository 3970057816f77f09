//! Formatting, clippy, documentation, dependencies, the rules that engine and state machines are sans-IO and that socket files are created
//! in one way, imports, lengths, first words of docstrings, links of pages, and names in `specs/`.

use std::path::{Path, PathBuf};

use crate::{Result, cargo, deny, files, fuzz, specs, tally::Tally, tools};

mod docstrings;
mod imports;
pub(crate) mod pages;

/// Sans-IO crates: they take time and randomness as arguments, and their output is polled.
const SANS_IO: [&str; 13] = [
    "roce/fault",
    "roce/bth",
    "roce/icrc",
    "roce/verbs",
    "roce/qp",
    "roce/port",
    "roce/script",
    "roce/replay",
    "rds",
    "lnet",
    "dissect",
    "rtrs",
    "rnbd",
];
/// The only folder of theirs with I/O, for scripts that are played on a host of the network.
const LIVE_HOSTS: &str = "roce/script/src/live";
/// Sans-IO crates with state machines only, which need no locks and nothing of random order.
const MACHINES: [&str; 5] = ["rds", "lnet", "dissect", "rtrs", "rnbd"];
/// The only file of theirs with a lock, for what the servers of several loops share.
const SHARED_BY_LOOPS: &str = "rtrs/src/admission/shared.rs";
/// Words that [`MACHINES`] must not contain.
const FORBIDDEN_TO_MACHINES: [&str; 14] = [
    "parking_lot",
    "Mutex",
    "RwLock",
    "Condvar",
    "mpsc",
    "crossbeam",
    "std::os::fd",
    "UnixStream",
    "UnixListener",
    "libc::",
    "io_uring",
    "HashMap",
    "HashSet",
    "thread::",
];
/// Folders of the crates that are installed.
const PRODUCT: [&str; 8] = [
    "roce",
    "rds",
    "lnet",
    "dissect",
    "rtrs",
    "rnbd",
    "verbs-shim",
    "ferroce",
];
/// The only file that creates socket files: elsewhere the owner of a folder could redirect them, and their modes.
const SOCKET_FILES: &str = "roce/net/src/socket_file.rs";
/// Calls that only [`SOCKET_FILES`] may make.
const BY_PATH: [&str; 2] = ["UnixListener::bind(", "fs::set_permissions"];
/// Folders of all crates.
const CRATES: [&str; 10] = [
    "roce",
    "rds",
    "lnet",
    "dissect",
    "rtrs",
    "rnbd",
    "verbs-shim",
    "ferroce",
    "xtask",
    "tests",
];
/// Longest file, in lines.
const LONGEST: usize = 1000;
/// Words that [`SANS_IO`] crates must not contain.
const FORBIDDEN: [&str; 9] = [
    "std::thread",
    "std::time::Instant",
    "SystemTime",
    "Instant::now",
    "UdpSocket",
    "TcpStream",
    "std::fs",
    "std::process",
    "getrandom",
];

/// Runs all lints but clippy.
pub(crate) fn beside_clippy() -> Tally {
    let mut tally = Tally::default();
    for lint in [
        format,
        fuzz::check,
        sans_io,
        socket_files,
        import_cycles,
        lengths,
        docstrings::check,
        pages::check,
        specs::check,
    ] {
        tally.expect(lint());
    }
    tally.add(documentation_and_hardware());
    tally.add(deny::check());
    tally
}

/// Lints the documentation, and the code over libibverbs and librdmacm, which is compiled only where they are installed.
fn documentation_and_hardware() -> Tally {
    let mut tally = Tally::default();
    if let Err(why) = tools::ensure(&tools::of_hardware()).and_then(|()| tools::may_build_hardware()) {
        tally.expect(documentation(&[]));
        tally.not_run.push((1, format!("roce-hw: {why}")));
        return tally;
    }
    tally.expect(published("clippy", &cargo::HARDWARE, &["--", "-D", "warnings"], &[]));
    tally.expect(documentation(&cargo::HARDWARE));
    tally
}

/// Has cargo do something with all packages that others may use.
fn published(task: &str, features: &[&str], more: &[&str], env: &[(&str, &str)]) -> Result<()> {
    let packages = cargo::published()?;
    let names = packages.iter().flat_map(|name| ["-p", name]);
    let args: Vec<&str> = [task].into_iter().chain(names).collect();
    cargo::run_with(&[&args[..], features, more].concat(), env)
}

/// `cargo xtask lint`.
pub(crate) fn run() -> Result<()> {
    let mut tally = beside_clippy();
    tally.expect(clippy());
    let not_run = tally.not_run.iter().map(|(_, why)| format!("not run: {why}"));
    let wrong: Vec<String> = tally.failures.iter().cloned().chain(not_run).collect();
    if wrong.is_empty() {
        println!("lint: passed");
        return Ok(());
    }
    Err(format!("lint failed:\n{}", wrong.join("\n")))
}

fn format() -> Result<()> {
    cargo::run(&["fmt", "--all", "--check"])
}

fn clippy() -> Result<()> {
    let args = [
        &["clippy", "--workspace", "--all-targets"],
        cargo::with_contract(),
        &["--", "-D", "warnings"],
    ];
    cargo::run(&args.concat())
}

/// Dependencies' declarations come from the clippy run of the same features, if there was one: it is the same compiler with the same
/// flags.
fn documentation(features: &[&str]) -> Result<()> {
    let clippy = cargo::clippy_driver()?.to_string_lossy().into_owned();
    let env = [
        ("RUSTDOCFLAGS", "-D warnings"),
        ("RUSTC_WORKSPACE_WRAPPER", &clippy),
        // As `cargo clippy -- -D warnings` hands it to its driver.
        ("CLIPPY_ARGS", "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__"),
    ];
    published("doc", features, &["--no-deps"], &env)
}

/// Checks that sans-IO crates don't use the standard library's I/O.
fn sans_io() -> Result<()> {
    let mut findings = Vec::new();
    for krate in SANS_IO {
        let all = sources(&[&format!("{krate}/src")])?;
        for (file, text) in all.into_iter().filter(|(file, _)| !file.starts_with(LIVE_HOSTS)) {
            let machine = match MACHINES.contains(&krate) && file != Path::new(SHARED_BY_LOOPS) {
                true => &FORBIDDEN_TO_MACHINES[..],
                false => &[],
            };
            // Tests may have threads.
            for (number, code) in code_lines(&text) {
                if let Some(word) = FORBIDDEN.iter().chain(machine).find(|w| code.contains(**w)) {
                    findings.push(format!("{}:{number}: {word} in a sans-IO crate", file.display()));
                }
            }
        }
    }
    none(&findings)
}

/// Checks that socket files are created in one way.
fn socket_files() -> Result<()> {
    let mut findings = Vec::new();
    for (file, text) in sources(&PRODUCT)? {
        let has = |name: &str| file.components().any(|part| part.as_os_str() == name);
        if file == Path::new(SOCKET_FILES) || !has("src") || has("tests") || has("tests.rs") {
            continue;
        }
        for (number, code) in code_lines(&text) {
            if let Some(word) = BY_PATH.iter().find(|word| code.contains(**word)) {
                findings.push(format!("{}:{number}: {word}: {SOCKET_FILES} does it", file.display()));
            }
        }
    }
    none(&findings)
}

/// Returns the lines before the tests, with their numbers and without comments.
fn code_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let tests = text
        .lines()
        .position(|line| line.trim_start_matches("pub(crate) ") == "mod tests {");
    let lines = text.lines().take(tests.unwrap_or(usize::MAX));
    lines
        .enumerate()
        .map(|(index, line)| (index + 1, line.split("//").next().unwrap_or_default()))
}

/// Returns the Rust files of folders with their texts.
fn sources(folders: &[&str]) -> Result<Vec<(PathBuf, String)>> {
    let mut found = Vec::new();
    for folder in folders.iter().map(Path::new) {
        for file in files::below(folder)? {
            if file.extension().is_some_and(|e| e == "rs") {
                let file = folder.join(file);
                let text = files::text(&file)?;
                found.push((file, text));
            }
        }
    }
    Ok(found)
}

/// Checks that no two files of a crate import each other.
fn import_cycles() -> Result<()> {
    let mut findings = Vec::new();
    for krate in crates()? {
        findings.extend(imports::cycles(&krate, sources(&[&format!("{krate}/src")])?)?);
    }
    none(&findings)
}

/// Returns the folders of all crates, in [`CRATES`].
fn crates() -> Result<Vec<String>> {
    let mut found = Vec::new();
    for folder in CRATES.map(Path::new) {
        let manifests = files::below(folder)?
            .into_iter()
            .filter(|file| file.ends_with("Cargo.toml"));
        let crates = manifests.map(|file| folder.join(file).with_file_name(""));
        found.extend(crates.filter(|dir| dir.join("src").exists()));
    }
    Ok(found
        .iter()
        .map(|dir| dir.to_string_lossy().trim_end_matches('/').to_owned())
        .collect())
}

/// Checks the length of files.
fn lengths() -> Result<()> {
    let mut findings = Vec::new();
    for (file, text) in sources(&CRATES)? {
        let lines = text.lines().count();
        if lines > LONGEST {
            findings.push(format!("{}: {lines} lines, at most {LONGEST}", file.display()));
        }
    }
    none(&findings)
}

fn none(findings: &[String]) -> Result<()> {
    match findings {
        [] => Ok(()),
        findings => Err(findings.join("\n")),
    }
}
