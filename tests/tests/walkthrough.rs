//! Commands of README and of the book run as they stand.

use std::{
    fs,
    os::unix::{fs::symlink, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Command, Output},
};

use ferroce_tests::{ferroce, root};

/// Example that runs as a test of its own, since its output is looked at.
const TWO_HOSTS: &str = "docs/block/two-hosts.md";
/// Longest time that the commands of a page take, seconds.
const LIMIT: &str = "180";

/// The commands of a page: its blocks marked `sh`, without those marked `sh no_run`.
fn commands(page: &str) -> String {
    let blocks = page.split("```sh\n").skip(1);
    blocks
        .map(|block| block.split("```").next().unwrap_or_default())
        .collect()
}

/// README and the pages of the book.
fn pages() -> Vec<PathBuf> {
    let mut pages = vec![root().join("README.md")];
    let mut folders = vec![root().join("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false if path.extension().is_some_and(|e| e == "md") => pages.push(path),
                false => {}
            }
        }
    }
    pages.sort();
    pages
}

/// Runs a script in an empty folder and in namespaces of its own, with `ferroce` in the path.
fn run(script: &str, dir: &Path) -> Output {
    let bin = dir.join("bin");
    fs::create_dir(&bin).unwrap();
    symlink(ferroce(), bin.join("ferroce")).unwrap();
    let work = dir.join("work");
    fs::create_dir(&work).unwrap();
    let script = format!("set -e\nip link set lo up\n{script}");
    let mut command = Command::new("unshare");
    command.args(["--mount", "--net", "timeout", LIMIT, "bash", "-c", &script]);
    command.env("PATH", format!("{}:{}", bin.display(), std::env::var("PATH").unwrap()));
    command.env("XDG_RUNTIME_DIR", dir);
    command.current_dir(work).process_group(0).output().unwrap()
}

#[test]
#[ignore = "needs root, perftest, nbdinfo, qemu-io and valgrind"]
fn commands_of_pages_run() {
    let mut ran = 0;
    for page in pages() {
        let script = commands(&fs::read_to_string(&page).unwrap());
        if script.is_empty() || page.ends_with(TWO_HOSTS) {
            continue;
        }
        let dir = tempfile::tempdir().unwrap();
        let output = run(&script, dir.path());
        let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
        assert!(
            output.status.success(),
            "{}: {}\n{out}\n{err}",
            page.display(),
            output.status
        );
        ran += 1;
    }
    assert!(ran >= 5, "{ran} pages have commands that run");
}

#[test]
#[ignore = "needs root, nbdinfo and qemu-img"]
fn two_hosts_with_two_networks_between_them() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().display().to_string();
    let bin = dir.path().join("bin");
    fs::create_dir(&bin).unwrap();
    symlink(ferroce(), bin.join("ferroce")).unwrap();
    let document = fs::read_to_string(root().join(TWO_HOSTS)).unwrap();
    let script = commands(&document).replace("/tmp/", &format!("{place}/"));
    assert!(script.contains("ip netns add") && script.contains("ip netns del"));
    // Names of namespaces are of this test alone, where they are mounts of its own.
    let script = format!("set -e\nmkdir -p /run/netns\nmount -t tmpfs tmpfs /run/netns\n{script}");
    let mut command = Command::new("unshare");
    command.args(["--mount", "bash", "-c", &script]);
    command.env("PATH", format!("{}:{}", bin.display(), std::env::var("PATH").unwrap()));
    let output = command.process_group(0).output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    let all = format!("{out}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{all}");

    let paths = |state: &str| {
        let rows = out.lines().filter(|line| line.starts_with("ip:10.9."));
        rows.filter(|line| line.contains(state)).count()
    };
    // The client's list and the server's at first, and the last one; of the one with the cut one.
    assert_eq!(paths(" connected"), 2 + 2 + 1 + 2, "{all}");
    assert_eq!(out.matches("2 of 2 up").count(), 2, "{all}");
    assert!(out.contains("export-size: 1073741824 (1G)"), "{all}");
    for event in [
        "map.images: path ip:10.9.1.2@ip:10.9.1.1 is down",
        "map.images: path ip:10.9.2.2@ip:10.9.2.1 has taken over",
        "map.images: path ip:10.9.1.2@ip:10.9.1.1 is up again",
    ] {
        assert!(out.contains(event), "{event}: {all}");
    }
}
