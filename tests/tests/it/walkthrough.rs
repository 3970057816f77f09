//! Commands of README and of the book run as they stand.

use std::{
    fs,
    os::unix::{fs::symlink, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    thread,
};

use ferroce_tests::{ferroce, root};

/// Example that runs as a test of its own, since its output is looked at.
const TWO_HOSTS: &str = "docs/block/two-hosts.md";
/// Page that explains marks of blocks.
const MARKS: &str = "docs/contributing/contributing.md";
/// Longest time that the commands of a page take, seconds.
const LIMIT: &str = "180";
/// Pages at a time. Most of their time they sleep.
const PAGES: usize = 4;
/// Mark of commands that a page takes for done: a comment, which readers don't see.
const SETUP: &str = "setup";

/// Begin of a script: folders and addresses of the examples, in a namespace of their own.
const PREPARE: &str = r#"set -e
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=755 tmpfs /srv
ip link set lo up
for addr in 192.0.2.{1,7,8} 198.51.100.{1,7,8} 203.0.113.{1,7}; do ip addr add $addr/32 dev lo; done
ip addr add 2001:db8::8/128 dev lo
background=()
trap '[ $? = 0 ] || tail -n 30 background.* >&2' EXIT
"#;
/// End of a script: background commands must still run, and end well.
const FINISH: &str = r#"
for ((i = ${#background[@]}; i--;)); do kill ${background[i]}; wait ${background[i]}; done
"#;

/// A block of a page.
struct Block {
    line: usize,
    /// Text after the fence.
    mark: String,
    text: String,
}

fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<(Block, &str)> = None;
    for (index, line) in page.lines().enumerate() {
        match &mut open {
            Some((_, end)) if line.trim() == *end => blocks.extend(open.take().map(|(block, _)| block)),
            Some((block, _)) => block.text.extend([line, "\n"]),
            None => {
                let fence = line.trim().strip_prefix("```").map(|mark| (mark, "```"));
                let comment = line.trim().strip_prefix("<!-- ").map(|mark| (mark, "-->"));
                let setup = comment.filter(|(mark, _)| mark.starts_with(SETUP));
                open = fence.or(setup).map(|(mark, end)| {
                    let (line, mark, text) = (index + 1, mark.to_owned(), String::new());
                    (Block { line, mark, text }, end)
                });
            }
        }
    }
    blocks
}

/// The commands of a page, or nothing if none of them run.
fn script(page: &str) -> String {
    let blocks = blocks(page);
    let mut script = String::new();
    if !blocks
        .iter()
        .any(|block| ["sh", "sh background"].contains(&&*block.mark))
    {
        return script;
    }
    for (number, Block { mark, text, .. }) in blocks.iter().enumerate() {
        match &**mark {
            "sh" | SETUP => script += text,
            // Others wait for its first line.
            "sh background" | "setup background" => script.extend([
                text.trim_end(),
                &format!(" > background.{number} 2>&1 &\nbackground+=($!)\n"),
                &format!(
                    "for ((waited = 0; ; waited++)); do\n[ ! -s background.{number} ] || break\nsleep 0.1\nkill -0 $!\n"
                ),
                &format!("[ $waited -lt 600 ] || {{ echo 'block {number} prints nothing' >&2; exit 1; }}\ndone\n"),
            ]),
            _ => {}
        }
    }
    script
}

/// Commands that sleep longer, for a machine that runs several pages at a time.
fn slower(commands: &str) -> String {
    commands.replace("\nsleep ", "\nsleep 2 ")
}

/// Returns the mistake in a block's mark. `explained`: whether contributors find a reason for not running commands explained.
fn wrong(mark: &str, explained: impl Fn(&str) -> bool) -> Option<&'static str> {
    match mark.split_once(' ').unwrap_or((mark, "")) {
        ("", _) => Some("has no language"),
        ("sh", "" | "background") => None,
        ("sh" | "console", mark) => match mark.strip_prefix("no_run,") {
            Some(reason) if explained(reason) => None,
            Some(_) => Some("has a reason that contributing.md lacks"),
            None => Some("has to run, or to say why not: `sh no_run,REASON`"),
        },
        ("bash" | "shell" | "sh,no_run", _) => Some("is `sh` otherwise"),
        _ => None,
    }
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

/// Runs a script in a folder that has only the captures, and in namespaces of its own, with `ferroce` in the path.
fn run(script: &str, dir: &Path) -> Output {
    let bin = dir.join("bin");
    fs::create_dir(&bin).unwrap();
    symlink(ferroce(), bin.join("ferroce")).unwrap();
    let work = dir.join("work");
    fs::create_dir(&work).unwrap();
    symlink(root().join("pcap-fixtures"), work.join("pcap-fixtures")).unwrap();
    let script = [PREPARE, script, FINISH].concat();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--net", "timeout", LIMIT, "bash", "-c", &script]);
    command.env("PATH", format!("{}:{}", bin.display(), std::env::var("PATH").unwrap()));
    command.envs([("XDG_RUNTIME_DIR", dir), ("HOME", work.as_path())]);
    command.current_dir(work).process_group(0).output().unwrap()
}

/// Runs the commands of a page, if it has some. The error has their output.
fn page_runs(page: &Path) -> Result<bool, String> {
    let script = script(&fs::read_to_string(page).unwrap());
    if script.is_empty() || page.ends_with(TWO_HOSTS) {
        return Ok(false);
    }
    let dir = tempfile::tempdir().unwrap();
    let output = run(&slower(&script), dir.path());
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    match output.status.success() {
        true => Ok(true),
        false => Err(format!("{}: {}\n{out}\n{err}", page.display(), output.status)),
    }
}

#[test]
#[ignore = "needs root, perftest, ibv_devinfo, nbdinfo, qemu-io, openssl and valgrind"]
fn commands_of_pages_run() {
    let pages = pages();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut results = Vec::new();
        while let Some(page) = pages.get(next.fetch_add(1, Relaxed)) {
            results.push(page_runs(page));
        }
        results
    };
    let results: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..PAGES).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    let failed: Vec<_> = results
        .iter()
        .filter_map(|result| result.as_ref().err().cloned())
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    let ran = results.iter().filter(|result| **result == Ok(true)).count();
    assert!(ran >= 15, "{ran} pages have commands that run");
}

#[test]
fn commands_of_pages_run_or_say_why_not() {
    let explanations = fs::read_to_string(root().join(MARKS)).unwrap();
    let explained = |reason: &str| explanations.contains(&format!("| `{reason}` |"));
    let mut findings = String::new();
    for page in pages() {
        for block in blocks(&fs::read_to_string(&page).unwrap()) {
            if let Some(what) = wrong(&block.mark, explained) {
                findings += &format!("{}:{}: the block {what}\n", page.display(), block.line);
            }
        }
    }
    assert!(findings.is_empty(), "{findings}");
}

#[test]
fn a_block_that_does_not_run_has_an_explained_reason() {
    let explained = |reason: &str| reason == "needs-docker";
    for mark in [
        "sh",
        "sh background",
        "sh no_run,needs-docker",
        "console no_run,needs-docker",
        "text",
        SETUP,
    ] {
        assert_eq!(wrong(mark, explained), None, "{mark}");
    }
    for mark in [
        "",
        "sh no_run",
        "sh no_run,",
        "sh no_run,needs-luck",
        "sh ignore",
        "console",
        "bash",
        "shell",
    ] {
        assert!(wrong(mark, explained).is_some(), "{mark}");
    }
}

#[test]
fn commands_of_a_page_are_its_blocks_in_their_order() {
    let page = "a\n<!-- setup\none\n-->\n```sh\ntwo\n```\n```text\nunseen\n```\n```sh background\nthree \\\n  four\n```\n```sh no_run,y\nskipped\n```\n";
    let commands = script(page);
    assert!(
        commands.starts_with("one\ntwo\nthree \\\n  four > background.3 2>&1 &\n"),
        "{commands}"
    );
    assert!(
        !commands.contains("unseen") && !commands.contains("skipped"),
        "{commands}"
    );
    assert_eq!(script("```sh no_run,y\nz\n```\n<!-- setup\none\n-->\n"), "");
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
    let mut script = script(&document).replace("/tmp/", &format!("{place}/"));
    assert!(script.contains("ip netns add") && script.contains("ip netns del"));
    // Whatever the machine's load, paths are up by then, and requests are in flight when the cable is pulled: the server answers none
    // meanwhile.
    let until = |what: &str| format!("until {what}; do sleep 0.1; done\n");
    let control = format!("ferroce ctl --socket {place}/client/ctl");
    let up = |paths| {
        until(&format!(
            r#"[ "$({control} list paths | grep -c ' connected')" = {paths} ]"#
        ))
    };
    let in_flight = until(&format!(
        "{control} metrics | grep -q '^ferroce_path_in_flight{{.*ip:10.9.1.2@.*}} [1-9]'"
    ));
    for (commands, instead) in [
        (
            "\nsleep 3\nexport FERROCE_CONTROL",
            format!("\n{}export FERROCE_CONTROL", up(2)),
        ),
        (
            "ip -n client link set net1 down\n",
            format!(
                "kill -STOP %1\n{in_flight}ip -n client link set net1 down\n{}kill -CONT %1\n",
                up(1)
            ),
        ),
        ("sleep 5\n", up(2)),
    ] {
        assert_eq!(script.matches(commands).count(), 1, "{commands}");
        script = script.replace(commands, &instead);
    }
    // Names of namespaces are of this test alone, where they are mounts of its own.
    let script = format!("set -e\nmkdir -p /run/netns\nmount -t tmpfs tmpfs /run/netns\n{script}");
    let mut command = Command::new("unshare");
    command.args(["--mount", "timeout", LIMIT, "bash", "-c", &script]);
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
