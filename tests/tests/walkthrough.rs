//! docs/block/two-hosts.md does what it says, command by command.

use std::{
    fs,
    os::unix::{fs::symlink, process::CommandExt as _},
    process::Command,
};

use ferroce_tests::{ferroce, root};

/// The commands of a document.
fn commands(document: &str) -> String {
    let blocks = document.split("```sh\n").skip(1);
    blocks
        .map(|block| block.split("```").next().unwrap_or_default())
        .collect()
}

#[test]
#[ignore = "needs root, nbdinfo and qemu-img"]
fn two_hosts_with_two_networks_between_them() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().display().to_string();
    let bin = dir.path().join("bin");
    fs::create_dir(&bin).unwrap();
    symlink(ferroce(), bin.join("ferroce")).unwrap();
    let document = fs::read_to_string(root().join("docs/block/two-hosts.md")).unwrap();
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
