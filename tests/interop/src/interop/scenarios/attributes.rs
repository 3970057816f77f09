//! The attributes of sessions, paths and devices: those of the kernel in sysfs beside ours.
//!
//! In the guest the kernel's client uses our server, and its server serves our client, so that each of the four has something to
//! show. What there is, with modes and texts, and how wrong writes are refused, is recorded on both sides and compared; names, addresses
//! and counters are not.

use std::collections::BTreeSet;

use ferroce_tests::attributes::{Names, ROOTS, TAKEN, WRITES, is_known, without_numbers};
use serde_json::{Value, json};

use super::{
    Ctx, Direction, Scenario,
    rnbd::{Mapping, Orders, Server, image, server_modules},
};
use crate::{
    Error,
    far::Ip,
    lab::{HOST_V4, Proc},
};

pub(super) fn list() -> Vec<Scenario> {
    vec![Scenario::new(3, "attributes", Direction::Both, attributes).nets(2).ci()]
}

fn attributes(c: &mut Ctx<'_>) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let server = Server::start_as(c, Orders::new(HOST_V4[0], &["disk"], "off").steered())?;
    let up = format!(
        "rdma link add rxe1 type rxe netdev eth1\n{}{CLIENT}",
        server_modules("N")
    );
    c.guest()?.run(&up.replace("$HOST", HOST_V4[0]), 120)?;
    let result = side_by_side(c, server);
    c.guest()?.try_run(DOWN, 120)?;
    result
}

/// The kernel's client of our server.
const CLIENT: &str = "\
    insmod $L/rtrs/rtrs-client.ko; insmod $L/rnbd/rnbd-client.ko\n\
    echo 'sessname=kern path=ip:$HOST device_path=disk' > /sys/class/rnbd-client/ctl/map_device\n\
    for i in $(seq 100); do [ -b /dev/rnbd0 ] && break; sleep 0.1; done; [ -b /dev/rnbd0 ]\n";

const DOWN: &str = "echo force > /sys/block/rnbd0/rnbd/unmap_device; sleep 0.5; rmmod rnbd_client; rmmod rtrs_client\n\
    rmmod rnbd_server; rmmod rtrs_server; rmmod rtrs_core; rdma link delete rxe1; true";

fn side_by_side(c: &mut Ctx<'_>, mut server: Server) -> Result<String, Error> {
    let guest = [c.guest()?.addr(0, Ip::V4), c.guest()?.addr(1, Ip::V4)];
    let over = format!("{},{}", HOST_V4[1], guest[1]);
    let mut mapping = Mapping::steered_over(c, &[over], "ram0", &["--json"])?;
    mapping.wait_more("mapped", 0, std::time::Duration::from_secs(90))?;
    let path = |from: &dyn std::fmt::Display, to: &dyn std::fmt::Display| format!("ip:{from}@ip:{to}");
    let (to_us, to_them) = (path(&guest[0], &HOST_V4[0]), path(&HOST_V4[1], &guest[1]));
    let theirs = Names {
        session: "kern",
        path: to_us.clone(),
        device: "disk",
        served: "ours",
        served_path: to_them.clone(),
        export: "ram0",
        asked: "newroot/dev/ram0",
    };
    let ours = Names {
        session: "ours",
        path: to_them,
        device: "newroot/dev/ram0",
        served: "kern",
        served_path: to_us,
        export: "disk",
        asked: "disk",
    };
    let kernel = of_kernel(c, &theirs)?;
    let own = of_ours(&mut mapping.process, &mut server.process, &ours)?;
    mapping.process.interrupt();
    mapping.process.finish(std::time::Duration::from_secs(30))?;
    std::fs::write(c.path("kernel.txt"), joined(&kernel))?;
    std::fs::write(c.path("ours.txt"), joined(&own))?;
    let only = |a: &BTreeSet<String>, b: &BTreeSet<String>, who: &str| {
        let lines = a.difference(b).filter(|line| !is_known(line));
        lines.map(|line| format!("{who} only: {line}\n")).collect::<String>()
    };
    let found = only(&kernel, &own, "kernel") + &only(&own, &kernel, "ours");
    if !found.is_empty() {
        return Err(format!("the attributes differ:\n{found}").into());
    }
    let of = |kind: &str| kernel.iter().filter(|line| line.starts_with(kind)).count();
    Ok(format!(
        "{} files, {} texts, {} refused and {} accepted writes are the kernel's: passed",
        of("file "),
        of("text "),
        WRITES.len(),
        TAKEN.len()
    ))
}

fn joined(lines: &BTreeSet<String>) -> String {
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// What the kernel has, as lines without names and numbers.
fn of_kernel(c: &mut Ctx<'_>, names: &Names) -> Result<BTreeSet<String>, Error> {
    let mut script = String::from(
        "cd /sys\n\
         show() { [ -e $1 ] || { echo \"missing $1\"; return; }\n\
             for f in $(find $1/ -type f -o -type l 2>/dev/null || true; [ -f $1 ] && echo $1); do \
             f=$(echo $f | sed 's,//*,/,g'); case $f in */power/*|*/uevent|*/subsystem|*/device) continue;; esac\n\
             if [ -L $f ]; then echo \"file link $f $(readlink $f)\"; continue; fi\n\
             echo \"file $(stat -c %a $f) $f\"; echo \"text $f $(cat $f | tr '\\n' '|')\"; done; }\n\
         try() { if echo \"$2\" 2>/tmp/err >$1; then e=taken; else e=$(tail -n 1 /tmp/err | sed 's/.*: //'); fi; echo \"write $1 [$2] $e\"; }\n",
    );
    for root in ROOTS {
        script += &format!("show {}\n", names.fill(root));
    }
    for (file, text) in WRITES {
        script += &format!("try {} '{}'\n", names.fill(file), names.fill(text));
    }
    for (file, text) in TAKEN {
        let file = names.fill(file);
        script += &format!("try {file} '{text}'; echo \"then {file} [{text}] $(cat {file} | tr '\\n' '|')\"\n");
    }
    let out = c.guest()?.run(&script, 240)?;
    let kinds = ["file ", "text ", "write ", "then ", "missing "];
    let lines = out
        .lines()
        .filter(|line| kinds.iter().any(|kind| line.starts_with(kind)));
    Ok(lines
        .map(|line| without_numbers(&names.plain(line.trim_end())))
        .collect())
}

/// The same of our two processes.
fn of_ours(map: &mut Proc, serve: &mut Proc, names: &Names) -> Result<BTreeSet<String>, Error> {
    let mut lines = Vec::new();
    for root in ROOTS {
        let process = owner(map, serve, root);
        tree(process, &names.fill(root), &mut lines)?;
    }
    for (file, text) in WRITES.into_iter().chain(TAKEN) {
        let process = owner(map, serve, file);
        let (file, text) = (names.fill(file), names.fill(text));
        let request = json!({ "do": "write", "file": file, "text": format!("{text}\n"), "strict": true });
        let answer = process.ask(request)?;
        let how = match answer["errno"].as_i64() {
            None => "taken".to_owned(),
            Some(errno) => {
                let text = std::io::Error::from_raw_os_error(errno as i32).to_string();
                text.split(" (os error").next().unwrap_or_default().to_owned()
            }
        };
        lines.push(format!("write {file} [{text}] {how}"));
        if TAKEN
            .iter()
            .any(|(f, t)| (names.fill(f), names.fill(t)) == (file.clone(), text.clone()))
        {
            lines.push(format!("then {file} [{text}] {}", read(process, &file)?));
        }
    }
    Ok(lines
        .iter()
        .map(|line| without_numbers(&names.plain(line.trim_end())))
        .collect())
}

/// Whose attributes these are.
fn owner<'a>(map: &'a mut Proc, serve: &'a mut Proc, file: &str) -> &'a mut Proc {
    let of_server = ["class/rtrs-server", "class/rnbd-server", "module/", "$V"];
    match of_server.iter().any(|begin| file.starts_with(begin)) {
        true => serve,
        false => map,
    }
}

fn read(process: &mut Proc, file: &str) -> Result<String, Error> {
    let answer = process.done(json!({ "do": "read", "file": file, "strict": true }))?;
    Ok(answer["text"].as_str().unwrap_or_default().replace('\n', "|"))
}

/// Files, links and texts from here on.
fn tree(process: &mut Proc, at: &str, lines: &mut Vec<String>) -> Result<(), Error> {
    let stat = process.ask(json!({ "do": "stat", "file": at, "strict": true }))?;
    let mode = stat["mode"].as_str().unwrap_or_default().trim_start_matches('0');
    match stat["kind"].as_str() {
        Some("dir") => {
            let answer = process.done(json!({ "do": "ls", "file": at, "strict": true }))?;
            let entries: Vec<Value> = answer["entries"].as_array().cloned().unwrap_or_default();
            for entry in entries {
                tree(
                    process,
                    &format!("{at}/{}", entry["name"].as_str().unwrap_or_default()),
                    lines,
                )?;
            }
        }
        Some("file") => {
            lines.push(format!("file {mode} {at}"));
            lines.push(format!("text {at} {}", read(process, at)?));
        }
        Some(_) => lines.push(format!(
            "file link {at} {}",
            stat["target"].as_str().unwrap_or_default()
        )),
        None => lines.push(format!("missing {at}")),
    }
    Ok(())
}
