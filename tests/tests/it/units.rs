//! The units of systemd (`ferroce/dist`): whose rights they have, and how much of the host they leave out.

use std::{fs, path::PathBuf, process::Command};

const UNITS: [&str; 2] = ["ferroce.service", "ferroce-broker.service"];

fn path(name: &str) -> PathBuf {
    ferroce_tests::root().join("ferroce/dist").join(name)
}

/// The values of a key, in words.
fn words(unit: &str, key: &str) -> Vec<String> {
    let text = fs::read_to_string(path(unit)).unwrap();
    let values = text
        .lines()
        .filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    values.flat_map(str::split_whitespace).map(str::to_owned).collect()
}

/// The value of an option of the program.
fn option(unit: &str, name: &str) -> String {
    let command = words(unit, "ExecStart");
    let at = command.iter().position(|word| word == name).unwrap();
    command[at + 1].clone()
}

#[test]
fn daemon_and_broker_have_users_groups_and_folders_of_their_own() {
    let [daemon, broker] = UNITS;
    for key in ["User", "Group", "RuntimeDirectory"] {
        let (one, other) = (words(daemon, key), words(broker, key));
        assert!(
            one.len() == 1 && other.len() == 1 && one != other,
            "{key}: {one:?} {other:?}"
        );
    }
    // The group that gets the control socket is nothing but that, and not the group that gets the broker's.
    let admins = option(daemon, "--control-group");
    for key in ["User", "Group"] {
        assert!(!words(broker, key).contains(&admins) && !words(daemon, key).contains(&admins));
    }
    assert!(
        words(daemon, "SupplementaryGroups").contains(&admins),
        "to give it the socket"
    );
    let folder = format!("/run/{}", words(daemon, "RuntimeDirectory")[0]);
    assert_eq!(option(daemon, "--control"), format!("{folder}/control.sock"));
    let help = Command::new(ferroce_tests::ferroce())
        .args(["ctl", "--help"])
        .output()
        .unwrap();
    assert!(
        String::from_utf8_lossy(&help.stdout).contains(&folder),
        "ferroce ctl looks there"
    );
    // All of them are made.
    let made = fs::read_to_string(path("ferroce.sysusers")).unwrap();
    let made = |kinds: &[&str], name: &str| {
        let mut lines = made.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        lines.any(|words| words.len() > 1 && kinds.contains(&words[0]) && words[1] == name)
    };
    for unit in UNITS {
        assert!(words(unit, "User").iter().all(|user| made(&["u"], user)), "{unit}");
        let groups = [words(unit, "Group"), words(unit, "SupplementaryGroups")].concat();
        assert!(
            groups.iter().all(|group| made(&["u", "g"], group)),
            "{unit}: {groups:?}"
        );
    }
}

#[test]
#[ignore = "needs systemd-analyze of systemd 252 or later"]
fn units_are_hardened() {
    for unit in UNITS {
        let mut command = Command::new("systemd-analyze");
        // 3.0 of 10.
        command.args(["security", "--no-pager", "--offline=true", "--threshold=30"]);
        let out = command.arg(path(unit)).output().unwrap();
        assert!(out.status.success(), "{unit}: {}", String::from_utf8_lossy(&out.stdout));
    }
}
