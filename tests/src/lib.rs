//! What the end-to-end tests share: `ferroce` processes and what they take of the host, loopback addresses of their own, an
//! NBD client, and a device that is checked with it, `ib_write_bw`. The attacks, the soak test and the lab use it too.
//!
//! The program under test is `$FERROCE_BIN` (cargo xtask sets it), or a debug build that is made on first use.

pub mod attributes;
pub mod checked;
pub mod device;
pub mod nbd;
pub mod network;
pub mod perftest;
pub mod preload;
pub mod process;
pub mod signals;
pub mod usage;
pub mod user;
pub mod vhost;

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

pub use ferroce_loopback::address as fresh_address;
pub use user::as_user;

/// The repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("tests/ is in the workspace")
}

/// The program under test.
///
/// # Panics
/// When it does not build.
pub fn ferroce() -> &'static Path {
    static BIN: OnceLock<PathBuf> = OnceLock::new();
    BIN.get_or_init(|| {
        if let Some(path) = std::env::var_os("FERROCE_BIN") {
            return path.into();
        }
        let out = Command::new(env!("CARGO"))
            .current_dir(root())
            .args([
                "build",
                "-q",
                "--locked",
                "-p",
                "ferroce",
                // Beside it, for `ferroce run`.
                "-p",
                "verbs-shim",
                "--message-format=json-render-diagnostics",
            ])
            .stderr(std::process::Stdio::inherit())
            .output()
            .expect("cargo starts");
        assert!(out.status.success(), "ferroce does not build");
        String::from_utf8_lossy(&out.stdout)
            .lines()
            .filter_map(|l| serde_json::from_str::<serde_json::Value>(l).ok())
            .filter(|m| m["target"]["name"] == "ferroce")
            .find_map(|m| m["executable"].as_str().map(PathBuf::from))
            .expect("cargo names the executable")
    })
}

/// Compiles a C file of the repository into `dir`.
///
/// # Panics
/// Without a C compiler.
pub fn compiled(dir: &Path, source: &str) -> PathBuf {
    let program = dir.join("program");
    let status = Command::new("cc")
        .args(["-Wall", "-O2", "-o"])
        .args([&program, &root().join(source)])
        .status();
    assert!(status.is_ok_and(|status| status.success()), "a C compiler");
    program
}

/// Waits until something is so.
///
/// # Panics
/// When it takes longer than anything should.
pub fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + process::TIMEOUT;
    while !is() {
        assert!(Instant::now() < end, "{what}: not in time");
        thread::sleep(Duration::from_millis(10));
    }
}

/// `len` bytes that differ from place to place and from seed to seed.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        // xorshift64
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
