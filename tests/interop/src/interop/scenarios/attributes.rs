//! The attributes of sessions, paths and devices: those of the kernel in sysfs beside ours.
//!
//! In the guest the kernel's client uses our server, and its server serves our client, so that each of the four has something to
//! show. What there is, with modes and texts, and how wrong writes are refused, is recorded on both sides and compared; names, addresses
//! and counters are not.

use std::collections::BTreeSet;

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

/// Where attributes are.
const ROOTS: [&str; 8] = [
    "class/rtrs-client/$S",
    "class/rtrs-server/$S",
    "class/rnbd-client/ctl",
    "class/rnbd-server/ctl",
    "block/rnbd0/rnbd",
    "block/rnbd0/size",
    "module/rtrs_server/parameters",
    "module/rnbd_server/parameters",
];

/// What is written, and refused unless it is one of the last.
const WRITES: [(&str, &str); 50] = [
    ("$C/mpath_policy", ""),
    ("$C/mpath_policy", "3"),
    ("$C/mpath_policy", "-1"),
    ("$C/mpath_policy", "r"),
    ("$C/mpath_policy", "rrr"),
    ("$C/mpath_policy", "best"),
    ("$C/mpath_policy", "99999999999"),
    ("$C/max_reconnect_attempts", ""),
    ("$C/max_reconnect_attempts", "x"),
    ("$C/max_reconnect_attempts", "-2"),
    ("$C/max_reconnect_attempts", "10000"),
    ("$C/max_reconnect_attempts", "0x10"),
    ("$C/max_reconnect_attempts", "1 "),
    ("$C/max_reconnect_attempts", "99999999999"),
    ("$C/add_path", "nowhere"),
    ("$C/add_path", "ip:300.0.0.1"),
    ("$C/add_path", "$P"),
    ("$C/paths/$P/reconnect", "0"),
    ("$C/paths/$P/reconnect", "11"),
    ("$C/paths/$P/reconnect", "x"),
    ("$C/paths/$P/disconnect", "0"),
    ("$C/paths/$P/disconnect", " 1"),
    ("$C/paths/$P/remove_path", "2"),
    ("$C/paths/$P/remove_path", "yes"),
    ("$C/paths/$P/state", "1"),
    ("$C/paths/$P/cur_latency", "1"),
    ("$C/paths/$P/hca_name", "x"),
    ("$C/paths/$P/stats/rdma", "0"),
    ("$C/paths/$P/stats/rdma", "2"),
    ("$C/paths/$P/stats/reconnects", "x"),
    ("$C/paths/$P/stats/cpu_migration_from", "0"),
    ("$C/paths/$P/stats/cpu_migration_to", "11"),
    ("$C/paths/$P/stats/reset_all", "0"),
    ("class/rnbd-client/ctl/map_device", ""),
    ("class/rnbd-client/ctl/map_device", "disk"),
    ("class/rnbd-client/ctl/map_device", "sessname=$S"),
    (
        "class/rnbd-client/ctl/map_device",
        "sessname=$S device_path=x access_mode=wr",
    ),
    (
        "class/rnbd-client/ctl/map_device",
        "sessname=$S device_path=x surprise=1",
    ),
    (
        "class/rnbd-client/ctl/map_device",
        "sessname=$S path=nowhere device_path=x",
    ),
    ("class/rnbd-client/ctl/map_device", "sessname=$S device_path=$D"),
    ("class/rnbd-client/ctl/map_device", "sessname=other device_path=x"),
    ("block/rnbd0/rnbd/resize", "x"),
    ("block/rnbd0/rnbd/resize", "1K"),
    ("block/rnbd0/rnbd/resize", "99999999999999999999"),
    ("block/rnbd0/rnbd/remap_device", "0"),
    ("block/rnbd0/rnbd/remap_device", "1"),
    ("block/rnbd0/rnbd/unmap_device", "maybe"),
    ("$V/paths/$Q/disconnect", "0"),
    ("$V/paths/$Q/stats/rdma", "0"),
    ("class/rnbd-server/ctl/devices/$E/sessions/$T/force_close", "0"),
];

/// What is written and taken, and the file in which that shows.
const TAKEN: [(&str, &str); 12] = [
    ("$C/mpath_policy", "round-robin"),
    ("$C/mpath_policy", "MI"),
    ("$C/mpath_policy", "ml"),
    ("$C/mpath_policy", "0"),
    ("$C/mpath_policy", "Min-Latency"),
    ("$C/mpath_policy", "1"),
    ("$C/max_reconnect_attempts", "0"),
    ("$C/max_reconnect_attempts", "9999"),
    ("$C/max_reconnect_attempts", "-1"),
    ("$C/paths/$P/stats/reconnects", "1"),
    ("$C/paths/$P/stats/reset_all", "1"),
    ("$V/paths/$Q/stats/rdma", "1"),
];

/// Differences that are meant: the beginning of a line of either side, and why.
const KNOWN: [(&str, &str); 3] = [
    (
        "text module/rnbd_server/parameters/dev_search_path",
        "ours is a folder of images, and there is none",
    ),
    (
        "file link class/rnbd-client/ctl/devices/",
        "the kernel's `ctl` stands below /sys/devices, and its links lead from there",
    ),
    ("file link class/rnbd-server/ctl/devices/", "likewise"),
];

/// What is called how on one side.
struct Names {
    /// The client's session and path,
    session: &'static str,
    path: String,
    /// and its device.
    device: &'static str,
    /// The server's session and path,
    served: &'static str,
    served_path: String,
    /// and its device, by its own name and by that under which the client asks for it.
    export: &'static str,
    asked: &'static str,
}

impl Names {
    fn fill(&self, text: &str) -> String {
        text.replace("$C", "class/rtrs-client/$S")
            .replace("$V", "class/rtrs-server/$T")
            .replace("class/rtrs-server/$S", "class/rtrs-server/$T")
            .replace("$S", self.session)
            .replace("$P", &self.path)
            .replace("$D", self.device)
            .replace("$T", self.served)
            .replace("$Q", &self.served_path)
            .replace("$E", self.export)
    }

    /// A line without the names, so that both sides have the same.
    fn plain(&self, line: &str) -> String {
        let escaped = |device: &str| device.replace('/', "!");
        let names = [
            (self.path.clone(), "PATH"),
            (self.served_path.clone(), "PATH"),
            (escaped(self.device), "DEVICE"),
            (self.device.to_owned(), "DEVICE"),
            (self.asked.to_owned(), "DEVICE"),
            (format!("devices/{}", self.export), "devices/DEVICE"),
            (format!("block/{}", self.export), "block/DEVICE"),
            (format!("rtrs-client/{}", self.session), "rtrs-client/SESSION"),
            (format!("rtrs-server/{}", self.served), "rtrs-server/SESSION"),
            (format!("sessions/{}", self.served), "sessions/SESSION"),
            (format!("@{}", self.session), "@SESSION"),
            (format!("sessname={}", self.session), "sessname=SESSION"),
            (format!("session {}|", self.session), "session SESSION|"),
        ];
        let mut line = line.to_owned();
        for (name, plain) in names {
            line = line.replace(&name, plain);
        }
        line
    }
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
    let known = |line: &&String| KNOWN.iter().any(|(begin, _)| line.starts_with(begin));
    let only = |a: &BTreeSet<String>, b: &BTreeSet<String>, who: &str| {
        let lines = a.difference(b).filter(|line| !known(line));
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

/// Counters, addresses and sizes are each side's own, and so are the names of adapters and the number of processors.
fn without_numbers(line: &str) -> String {
    let Some(("text", rest)) = line.split_once(' ') else {
        return line.to_owned();
    };
    let (file, text) = rest.split_once(' ').unwrap_or((rest, ""));
    let name = file.rsplit('/').next().unwrap_or_default();
    let text = match name {
        "hca_name" => "NAME|".to_owned(),
        "src_addr" | "dst_addr" => "ADDRESS|".to_owned(),
        "cpu_migration_from" | "cpu_migration_to" => numbers_as_n(text).replace("N N", "N").replace("N N", "N"),
        "rdma" | "reconnects" | "cur_latency" | "size" => numbers_as_n(text),
        _ => text.to_owned(),
    };
    format!("text {file} {text}")
}

/// Each number is an N.
fn numbers_as_n(text: &str) -> String {
    let mut plain = String::new();
    let mut in_number = false;
    for c in text.chars() {
        match (c.is_ascii_digit(), in_number) {
            (true, false) => plain.push('N'),
            (true, true) => {}
            (false, _) => plain.push(c),
        }
        in_number = c.is_ascii_digit();
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_each_sides_own_is_left_out() {
        let ours = "text class/rtrs-client/SESSION/paths/PATH/stats/cpu_migration_to 0 12 3 |";
        assert!(
            without_numbers(ours).ends_with("cpu_migration_to N |"),
            "{}",
            without_numbers(ours)
        );
        let kernel = "text class/rtrs-client/SESSION/paths/PATH/stats/cpu_migration_to 0 |";
        assert_eq!(without_numbers(ours), without_numbers(kernel));
        assert_eq!(without_numbers("text a/rdma 1 22 3 0|"), "text a/rdma N N N N|");
        assert_eq!(without_numbers("text a/hca_port 1|"), "text a/hca_port 1|");
        assert_eq!(without_numbers("file 644 a/rdma"), "file 644 a/rdma");
    }
}
