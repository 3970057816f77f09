//! The suite over roce-hw with our own verbs library in the place of libibverbs and librdmacm, under `ferroce run`: it needs no right
//! and no device. The program is `$FERROCE_BIN`, or that of the same build.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, chown},
    path::{Path, PathBuf},
    process::Command,
};

const SUITE: &str = env!("CARGO_BIN_EXE_provider-contract");
const SUITE_NAME: &str = "provider-contract";
/// How long a run may take, seconds: some twenty times as long as it does.
const TIME_LIMIT: &str = "600";
/// User without rights, if we have some: `nobody`.
const NOBODY: u32 = 65534;
/// Leaks and errors end it with this status.
const FAULTS: &str = "99";

/// A directory with copies of the programs, where every user can run them.
struct Place(tempfile::TempDir);

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Runs the program in its arguments, as [`NOBODY`] if that can be had. Who may make a network namespace has one of his own: a
/// program of his that takes all addresses, of another test, would keep this user from any.
fn as_nobody() -> Command {
    let apart = Command::new("unshare")
        .args(["--net", "ip", "link", "set", "lo", "up"])
        .output();
    let mut command = match apart.is_ok_and(|out| out.status.success()) {
        true => {
            let mut command = Command::new("unshare");
            command.args(["--net", "sh", "-c", "ip link set lo up && exec \"$@\"", "sh"]);
            command
        }
        false => Command::new("env"),
    };
    if is_root() {
        let to = [format!("--reuid={NOBODY}"), format!("--regid={NOBODY}")];
        command.arg("setpriv").args(to).arg("--clear-groups");
    }
    command
}

fn open(path: &Path) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("permissions");
}

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().expect("a directory"));
        open(place.0.path());
        fs::create_dir(place.home()).expect("a directory");
        let ferroce = match std::env::var_os("FERROCE_BIN") {
            Some(path) => PathBuf::from(path),
            None => Path::new(SUITE).with_file_name("ferroce"),
        };
        let library = ferroce.with_file_name("libferroce_verbs.so");
        for from in [&ferroce, &library, &PathBuf::from(SUITE)] {
            let to = place.0.path().join(from.file_name().expect("a name"));
            let copied = fs::copy(from, to);
            copied.unwrap_or_else(|e| {
                panic!(
                    "{}: {e}: `cargo build -p ferroce -p verbs-shim` makes it",
                    from.display()
                )
            });
        }
        place
    }

    /// Folder that the processes write to.
    fn home(&self) -> PathBuf {
        self.0.path().join("home")
    }

    /// Runs the suite between devices of these addresses, as a user without rights, and under another program.
    fn run(&self, under: &[&str], addrs: &[String]) {
        let mut command = as_nobody();
        command
            .args(["timeout", TIME_LIMIT])
            .arg(self.0.path().join("ferroce"))
            .arg("run")
            .args(addrs.iter().flat_map(|addr| ["--addr", addr]))
            .arg("--")
            .args(under)
            .arg(self.0.path().join(SUITE_NAME))
            .args(addrs);
        let home = self.home();
        command
            .env("HOME", &home)
            .env("XDG_RUNTIME_DIR", &home)
            .env("FERROCE_BROKER_DIR", &home)
            .current_dir(&home);
        if is_root() {
            chown(&home, Some(NOBODY), Some(NOBODY)).expect("an owner");
        }
        let out = command.output().expect("the suite starts");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (said, errors) = (text(&out.stdout), text(&out.stderr));
        assert!(out.status.success(), "{}\n{said}\n{errors}", out.status);
        let passed = said.lines().filter(|line| line.starts_with("ok ")).count();
        let cases: usize = ferroce_contract::CASES.iter().map(|cases| cases.len()).sum();
        assert_eq!(passed, cases, "{said}\n{errors}");
    }
}

fn addresses<const N: usize>() -> [String; N] {
    [(); N].map(|()| ferroce_loopback::address().to_string())
}

#[test]
fn between_two_devices() {
    Place::new().run(&[], &addresses::<2>());
}

#[test]
fn between_two_users_of_one_device() {
    Place::new().run(&[], &addresses::<1>());
}

#[test]
fn under_valgrind() {
    let exit = format!("--error-exitcode={FAULTS}");
    let valgrind = [
        "valgrind",
        "--quiet",
        &exit,
        // Memory that is still reachable at the end is no leak; what is found only through inner pointers is threads'.
        "--leak-check=full",
        "--show-leak-kinds=definite",
        "--errors-for-leak-kinds=definite",
        "--num-callers=30",
        // Its scheduler lets a spinning thread have the processor for ever otherwise.
        "--fair-sched=try",
    ];
    Place::new().run(&valgrind, &addresses::<2>());
}
