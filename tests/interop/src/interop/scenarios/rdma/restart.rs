//! Ours over roce-hw is killed and begins again, its only device goes and comes back, or it may lock too little memory.

use std::time::Duration;

use super::{
    super::{
        Ctx, Direction, Scenario,
        paths::our_client::{self, Fio, Load},
        rnbd::{FUNCTIONS as KERNELS, INSMOD_CLIENT, Mapping, Server, client_down, image},
    },
    Other, Ours,
    paths::LOAD,
};
use crate::{Error, far::Ip, lab::HOST_V4};

pub(super) fn list() -> Vec<Scenario> {
    use Direction::{KernelToKernel, KernelToOurs, OursToKernel};
    let mut all = Vec::new();
    let mut add = |name: &str, direction, other: Other, run: fn(&mut Ctx<'_>) -> Result<String, Error>| {
        all.push(Scenario::new(12, name, direction, run).guests(other.guests()));
    };
    add(
        "rdma-server-killed-our-client",
        OursToKernel,
        Other::Ours,
        server_killed,
    );
    add(
        "rdma-server-killed-kernel-client",
        KernelToKernel,
        Other::Kernel,
        server_killed_under_kernel,
    );
    add("rdma-client-killed-our-server", KernelToOurs, Other::Ours, |c| {
        client_killed(c, Other::Ours)
    });
    add("rdma-client-killed-kernel-server", KernelToKernel, Other::Kernel, |c| {
        client_killed(c, Other::Kernel)
    });
    add(
        "rdma-server-only-device-deleted",
        OursToKernel,
        Other::Ours,
        server_without_device,
    );
    add(
        "rdma-client-only-device-deleted",
        KernelToOurs,
        Other::Ours,
        client_without_device,
    );
    add("rdma-locked-memory", KernelToOurs, Other::Ours, locked_memory);
    let mixed = Scenario::new(12, "rdma-mixed-paths-kernel-server", OursToKernel, mixed);
    all.push(mixed.nets(2));
    all.push(Scenario::new(12, "rdma-doctor", KernelToOurs, doctor).nets(0));
    all
}

/// Begins the server, with what is in its image.
fn serve(c: &Ctx<'_>, ours: &Ours) -> Result<(), Error> {
    let begin = format!(
        "begin serve serve --json --rdma rxe0 --addr {} --export disk=/tmp/disk.img\ntold serve '\"listening\"' 60",
        Ours::addr(c, 0)?
    );
    ours.run(c, &begin, 90).map(drop)
}

const FRESH: &str = "rm -f /tmp/disk.img; truncate -s 64M /tmp/disk.img";

/// Our client here waits for a server that is away.
fn patient_client(c: &Ctx<'_>, ours: &Ours) -> Result<(Mapping, Fio), Error> {
    ours.run(c, FRESH, 30)?;
    serve(c, ours)?;
    let path = format!("{},{}", HOST_V4[0], Ours::addr(c, 0)?);
    let more = ["--json", "--on-loss", "queue", "--reconnect-delay", "0.5"];
    let mut mapping = Mapping::of_ours(c, &[path], "disk", &more)?;
    mapping.wait_more("mapped", 0, Duration::from_secs(90))?;
    Fio::fill(c, &mapping)?;
    let fio = Fio::start_with(c, &mapping, Load::Both, &["--verify_backlog=8", "--rate=1m,1m"])?;
    std::thread::sleep(Duration::from_secs(1));
    Ok((mapping, fio))
}

/// Ends load, client and server; what is there is right.
fn all_end(c: &Ctx<'_>, ours: &Ours, (mapping, fio): (Mapping, Fio)) -> Result<Duration, Error> {
    std::thread::sleep(Duration::from_secs(1));
    let longest = fio.stop().map_err(|e| format!("{e}\n{}", mapping.process.text()))?;
    Fio::verify(c, &mapping)?;
    mapping.stop()?;
    ours.run(c, "ends serve; ! grep panicked /tmp/serve.err", 90)?;
    Ok(longest)
}

fn server_killed(c: &mut Ctx<'_>) -> Result<String, Error> {
    let ours = Ours::new(c)?;
    let (mut mapping, mut fio) = patient_client(c, &ours)?;
    for round in 0..2 {
        ours.run(c, "killed serve", 60)?;
        mapping.wait_more("path_down", round, Duration::from_secs(60))?;
        serve(c, &ours)?;
        mapping.wait_more("session_back", round, Duration::from_secs(60))?;
        fio.still_runs()?;
    }
    let longest = all_end(c, &ours, (mapping, fio))?;
    Ok(format!(
        "killed twice under load, no error, all blocks right, the longest request took {:.1} s: passed",
        longest.as_secs_f64()
    ))
}

/// The kernel's client is told of errors until it has connected again, 30 s later.
fn server_killed_under_kernel(c: &mut Ctx<'_>) -> Result<String, Error> {
    const START: &str = "\
        map s1 disk; head -c 4194304 /dev/urandom > /tmp/a\n\
        dd if=/tmp/a of=/dev/rnbd0 bs=32k oflag=direct conv=fsync status=none\n";
    const BACK: &str = "\
        for i in $(seq 1200); do [ $(cat /sys/class/rtrs-client/s1/paths/*/state) = connected ] \
            && [ $(cat /sys/block/rnbd0/rnbd/state) = open ] && break; sleep 0.1; done\n\
        dd if=/dev/rnbd0 of=/tmp/b bs=32k count=128 iflag=direct status=none; cmp /tmp/a /tmp/b\n\
        dd if=/tmp/a of=/dev/rnbd0 bs=32k seek=128 oflag=direct conv=fsync status=none; unmap rnbd0; echo passed\n";
    let (ours, host) = (Ours::new(c)?, Ours::addr(c, 0)?);
    ours.run(c, FRESH, 30)?;
    serve(c, &ours)?;
    let begun = c
        .guest()?
        .run(&format!("HOST={host}\n{INSMOD_CLIENT}{KERNELS}{START}"), 120);
    let result = begun.and_then(|_| {
        ours.run(c, "killed serve", 60)?;
        std::thread::sleep(Duration::from_secs(2));
        serve(c, &ours)?;
        c.guest()?.run(&format!("HOST={host}\n{KERNELS}{BACK}"), 240)
    });
    client_down(c)?;
    ours.run(c, "ends serve; ! grep panicked /tmp/serve.err", 90)?;
    result.map(|_| "killed, connected anew, what was flushed is there: passed".to_owned())
}

/// A client's arguments with the only path.
fn map(c: &Ctx<'_>, host: &str, device: &str, more: &str) -> Result<String, Error> {
    Ok(format!(
        "begin map map --json --rdma rxe0 --session ours --path {},{host} --device {device} --nbd /tmp/nbd.sock \
         --control /tmp/map.sock {more}\n",
        Ours::addr(c, 0)?
    ))
}

fn client_killed(c: &mut Ctx<'_>, other: Other) -> Result<String, Error> {
    let ours = Ours::new(c)?;
    let server = match other {
        Other::Ours => {
            image(c, "disk", 64)?;
            Some(Server::start(c, Ip::V4, &["disk"], "on")?)
        }
        Other::Kernel => our_client::server_up(c).map(|()| None)?,
    };
    let (host, device) = match other {
        Other::Ours => (HOST_V4[0].to_owned(), "disk"),
        Other::Kernel => (c.guest()?.addr(0, Ip::V4).to_string(), "newroot/dev/ram0"),
    };
    // A server may take 35 s to notice that somebody is gone, and refuse a second writer until then.
    let start = map(c, &host, device, "--connect-timeout 5")?;
    let script = format!(
        "mapped() {{ for t in $(seq 12); do {start} told map '\"mapped\"' 30 >/tmp/why && return; killed map || true; sleep 4; done; \
             cat /tmp/why; return 1; }}\n\
         {LOAD}for round in 1 2 3; do mapped; [ $round = 3 ] && break; load; sleep 2; runs; killed map; kill -KILL $(pidof fio); sleep 0.2; done\n\
         fio --thread --name=job --ioengine=nbd --uri=$U --size=8M --rw=write --bs=64k --iodepth=4 --verify=crc32c --verify_fatal=1 \
             --output=/tmp/fio.log || {{ cat /tmp/fio.log; exit 1; }}\n\
         ends map; ! grep panicked /tmp/map.err"
    );
    let result = ours.run(c, &script, 400);
    match server {
        Some(server) => server.end().map(drop)?,
        None => our_client::server_down(c)?,
    }
    result.map(|_| "killed twice under load, mapped again, blocks written and verified: passed".to_owned())
}

/// Deletes the device. The kernel waits, and can't be interrupted, as long as somebody has it open.
const DELETE: &str = "rdma link delete rxe0 & d=$!; for i in $(seq 200); do kill -0 $d 2>/dev/null || break; sleep 0.1; done\n\
    if kill -0 $d 2>/dev/null; then echo 'the device is held'; grep -h roce_hw /tmp/*.err | tail -n 20; exit 1; fi; wait $d\n";
const ADD: &str = "rdma link add rxe0 type rxe netdev eth0\n";

fn server_without_device(c: &mut Ctx<'_>) -> Result<String, Error> {
    let ours = Ours::new(c)?;
    let (mut mapping, mut fio) = patient_client(c, &ours)?;
    for round in 0..2 {
        ours.run(c, DELETE, 60)?;
        mapping.wait_more("path_down", round, Duration::from_secs(60))?;
        ours.run(c, ADD, 60)?;
        mapping.wait_more("session_back", round, Duration::from_secs(60))?;
        fio.still_runs()?;
    }
    let longest = all_end(c, &ours, (mapping, fio))?;
    Ok(format!(
        "deleted twice under load and taken up again, no error, all blocks right, the longest request took {:.1} s: passed",
        longest.as_secs_f64()
    ))
}

fn client_without_device(c: &mut Ctx<'_>) -> Result<String, Error> {
    let ours = Ours::new(c)?;
    image(c, "disk", 64)?;
    let server = Server::start(c, Ip::V4, &["disk"], "on")?;
    let waits = map(c, HOST_V4[0], "disk", "--on-loss queue --reconnect-delay 0.5")?;
    let waits = format!(
        "{waits}told map '\"mapped\"' 60\n{LOAD}load; sleep 2; runs\n\
         for n in 1 2; do\n{DELETE}sleep 2; runs\n{ADD}up 1 120; sleep 2; runs; done\nunload; ends map; ! grep panicked /tmp/map.err"
    );
    let waited = ours.run(c, &waits, 300);
    // Without retries it ends, and says why.
    let fails = map(c, HOST_V4[0], "disk", "--max-reconnects 0")?;
    let fails = format!("{fails}told map '\"mapped\"' 60\n{DELETE}ended map 60; cat /tmp/map.rc /tmp/map.err\n{ADD}");
    let failed = waited.and_then(|waited| Ok((waited, ours.run(c, &fails, 150)?)));
    server.end()?;
    let (waited, said) = failed?;
    super::super::paths::longest_of(&waited, &["read", "write"])?;
    if said.starts_with('0') || !said.contains("rxe0") || said.contains("panicked") {
        return Err(format!("a session without retries ended so: {said}").into());
    }
    Ok("deleted twice under load and taken up again, no error; without retries a clear error: passed".to_owned())
}

/// `ferroce doctor` says which addresses are the device's, and that nothing is in the way.
fn doctor(c: &mut Ctx<'_>) -> Result<String, Error> {
    let ours = Ours::new(c)?;
    let me = Ours::addr(c, 0)?;
    let said = ours.run(c, "$F doctor --json", 60)?;
    let report: serde_json::Value = serde_json::from_str(said.trim())?;
    let all = report["checks"].as_array().cloned().unwrap_or_default();
    let of = |id: &str| {
        all.iter()
            .filter(|check| check["id"] == id)
            .cloned()
            .collect::<Vec<_>>()
    };
    let says = |id: &str, text: &str| {
        let has = |check: &serde_json::Value| check["summary"].as_str().is_some_and(|s| s.contains(text));
        match of(id).iter().any(has) {
            true => Ok(()),
            false => Err(format!("{id} does not say {text:?}: {said}")),
        }
    };
    says("rdma-addresses", "rxe0:1: ")?;
    says("rdma-gids", &me.to_string())?;
    says("rdma-mtu", "path MTU 1024")?;
    says("rdma-files", "/dev/infiniband/rdma_cm may be used")?;
    says("rdma-devices", "rxe0")?;
    says("rdma-locked-memory", "")?;
    Ok(format!("{} checks, what is the device's is told: passed", all.len()))
}

/// With 64 KiB of memory that may be locked, and without the right to lock more, both ends say what to do.
fn locked_memory(c: &mut Ctx<'_>) -> Result<String, Error> {
    let ours = Ours::new(c)?;
    image(c, "disk", 16)?;
    let server = Server::start(c, Ip::V4, &["disk"], "on")?;
    let me = Ours::addr(c, 0)?;
    let script = format!(
        "ulimit -l 64; P='setpriv --bounding-set=-ipc_lock'\n{FRESH}\n\
         if timeout 60 $P $F map --rdma rxe0 --session ours --path {me},{} --device disk --nbd /tmp/nbd.sock --max-reconnects 0 \
             2>/tmp/err; then echo 'it maps'; exit 1; fi; cat /tmp/err\n",
        HOST_V4[0]
    );
    let said = ours.run(c, &script, 120);
    server.end()?;
    let said = said?;
    for part in ["64 KiB", "ulimit -l"] {
        if !said.contains(part) {
            return Err(format!("no {part:?} in: {said}").into());
        }
    }
    Ok(format!("{}: passed", said.trim()))
}

/// One path over roce-hw, with our own library in the place of the system's, and one in software, to the kernel's server.
fn mixed(c: &mut Ctx<'_>) -> Result<String, Error> {
    our_client::server_up(c)?;
    let result = mixed_session(c);
    for net in [0, 1] {
        c.guest()?.set_link_on(net, true)?;
    }
    our_client::server_down(c)?;
    result
}

fn mixed_session(c: &mut Ctx<'_>) -> Result<String, Error> {
    let to = [0, 1].map(|net| c.guest.as_ref().map(|g| g.addr(net, Ip::V4)));
    let mut paths = Vec::new();
    for (from, to) in HOST_V4.iter().zip(to) {
        paths.push(format!("{from},{}", to.ok_or("needs a guest of the lab")?));
    }
    let more = ["--json", "--policy", "round-robin", "--reconnect-delay", "1"];
    let rdma = c.places.rdma.display().to_string();
    let mut mapping = Mapping::spawn_by(&paths, our_client::DISK, &more, c, |args| {
        let run = ["run", "--addr", HOST_V4[0], "--", &rdma];
        c.steered("map", &[&run, args].concat())
    })?;
    mapping.wait_more("mapped", 0, Duration::from_secs(90))?;
    let listed = mapping.process.ask(serde_json::json!({ "do": "list" }))?;
    let devices: Vec<_> = (0..2).map(|n| listed["paths"][n]["device"].is_string()).collect();
    if devices != [true, false] {
        return Err(format!("not one path on a device and one in software: {listed}").into());
    }
    Fio::fill(c, &mapping)?;
    let mut fio = Fio::start(c, &mapping, Load::Both)?;
    for (round, net) in [0, 1].into_iter().enumerate() {
        std::thread::sleep(Duration::from_secs(2));
        c.guest()?.set_link_on(net, false)?;
        mapping.wait_more("path_down", round, our_client::TIMEOUT * 2)?;
        std::thread::sleep(Duration::from_secs(2));
        fio.still_runs()?;
        c.guest()?.set_link_on(net, true)?;
        mapping.wait_more("path_up", round, Duration::from_secs(120))?;
    }
    let longest = fio.stop().map_err(|e| format!("{e}\n{}", mapping.process.text()))?;
    our_client::same_in_guest(c, &mapping)?;
    mapping.stop()?;
    Ok(format!(
        "either cut under load, no error, all blocks right, the longest request took {:.1} s: passed",
        longest.as_secs_f64()
    ))
}
