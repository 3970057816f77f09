//! A set-uid program joins no broker of its user's choice, and starts none.

use std::{
    fs,
    os::unix::{
        fs::{PermissionsExt, chown},
        process::CommandExt,
    },
    process::Command,
};

use roce_broker::JoinConfig;

const NOBODY: u32 = 65_534;

/// Not a test of its own: what the copy runs.
#[test]
fn say_what_would_be_joined() {
    match JoinConfig::from_env() {
        Some(how) => println!("joins {} by {:?}", how.dir.display(), how.program),
        None => println!("joins nothing"),
    }
}

#[test]
#[ignore = "only root can make set-uid programs of root"]
fn set_uid_programs_do_not_believe_their_users() {
    let dir = tempfile::Builder::new()
        .permissions(fs::Permissions::from_mode(0o755))
        .tempdir()
        .unwrap();
    let copy = dir.path().join("copy");
    fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    chown(&copy, Some(0), Some(0)).expect("only root can make set-uid programs of root");
    let run = |mode| {
        fs::set_permissions(&copy, fs::Permissions::from_mode(mode)).unwrap();
        let out = Command::new(&copy)
            .args(["--exact", "environment::say_what_would_be_joined", "--nocapture"])
            .env_clear()
            .env("FERROCE_BROKER", "/evil/program")
            .env("FERROCE_BROKER_DIR", "/evil/dir")
            .env("XDG_RUNTIME_DIR", "/evil")
            .uid(NOBODY)
            .gid(NOBODY)
            .current_dir("/")
            .output()
            .unwrap();
        String::from_utf8(out.stdout).unwrap()
    };
    let plain = run(0o755);
    assert!(plain.contains("joins /evil/dir by Some(\"/evil/program\")"), "{plain}");
    let privileged = run(0o4755);
    assert!(
        !is_nosuid(dir.path()),
        "{} is mounted nosuid: set TMPDIR to a directory that is not",
        dir.path().display()
    );
    assert!(
        privileged.contains("joins /") && !privileged.contains("evil") && privileged.contains("by None"),
        "{privileged}"
    );
}

fn is_nosuid(dir: &std::path::Path) -> bool {
    rustix::fs::statvfs(dir).is_ok_and(|s| s.f_flag.contains(rustix::fs::StatVfsMountFlags::NOSUID))
}
