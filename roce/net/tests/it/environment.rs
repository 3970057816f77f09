//! The environment of programs that have rights which their users haven't.

use std::{
    fs,
    os::unix::{
        fs::{PermissionsExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::Command,
};

use roce_net::environment;

const PROBE: &str = "FERROCE_ENVIRONMENT_PROBE";
const NOBODY: u32 = 65_534;

/// Not a test of its own: what the copies run.
#[test]
fn say_what_is_believed() {
    let (plain, ours) = (std::env::var_os(PROBE), environment::var_os(PROBE));
    let path = environment::search_path();
    println!(
        "there {} believed {} secure {} path {}",
        plain.is_some(),
        ours.is_some(),
        environment::is_secure(),
        path.contains(&PathBuf::from("/evil"))
    );
}

fn run(program: &Path, uid: u32) -> String {
    let out = Command::new(program)
        .args(["--exact", "environment::say_what_is_believed", "--nocapture"])
        .env_clear()
        .env(PROBE, "x")
        .env("PATH", "/evil")
        .uid(uid)
        .gid(uid)
        .current_dir("/")
        .output()
        .unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let line = text.lines().find_map(|l| Some(&l[l.find("there ")?..]));
    line.unwrap_or_else(|| panic!("{text} {}", String::from_utf8_lossy(&out.stderr)))
        .to_owned()
}

/// A copy of this program that gives whoever runs it root's rights.
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
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(run(&copy, NOBODY), "there true believed true secure false path true");
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o4755)).unwrap();
    let said = run(&copy, NOBODY);
    assert_eq!(
        said,
        "there true believed false secure true path false",
        "if {} is mounted nosuid, set TMPDIR to a directory that is not",
        dir.path().display()
    );
    // For root itself it is an ordinary program.
    assert_eq!(run(&copy, 0), "there true believed true secure false path true");
}

/// Everything that a program may be linked with asks `roce_net::environment`.
#[test]
fn no_library_reads_the_environment_by_itself() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut todo: Vec<PathBuf> = ["roce", "rds", "lnet", "dissect", "rtrs", "rnbd", "verbs-shim"]
        .map(|c| root.join(c))
        .into();
    let mut found = Vec::new();
    while let Some(path) = todo.pop() {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if !["tests", "examples", "benches"].contains(&&*name) {
                todo.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
            }
            continue;
        }
        let not_linked = ["tests.rs", "build.rs"].contains(&&*name);
        if !name.ends_with(".rs") || not_linked || path.ends_with("net/src/environment.rs") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        let reads = [
            "env::var(",
            "env::var_os(",
            "env::vars",
            "libc::getenv(",
            "libc::secure_getenv(",
        ];
        if reads.iter().any(|r| code.contains(r)) {
            found.push(path);
        }
    }
    assert_eq!(found, Vec::<PathBuf>::new());
}
