//! 5: lost, doubled, reordered and late packets; ends that die; a cable that is pulled.

use std::time::{Duration, Instant};

use super::{
    Ctx, Direction, Scenario, cm, ops,
    rnbd::{self, Mapping, Server, image, with_client},
    verdict,
};
use crate::{
    Error,
    far::Ip,
    guest::Kernel,
    lab::{Proc, check_stop},
};

const NETEM: [(&str, &str); 5] = [
    ("loss1", "loss 1%"),
    ("loss5", "loss 5%"),
    ("duplicate", "duplicate 5%"),
    ("reorder", "delay 3ms reorder 75% 50%"),
    ("delay", "delay 8ms"),
];

/// With these the kernel's client reads, too. Each packet that comes too early costs it time, so few do.
const WHOLE_TREE: [(&str, &str); 3] = [
    ("duplicate", "duplicate 5%"),
    ("reorder", "delay 3ms reorder 97% 50%"),
    ("delay", "delay 8ms"),
];

pub(super) fn list() -> Vec<Scenario> {
    use Direction::{Both, KernelToOurs, OursToKernel};
    let mut all = Vec::new();
    for (tag, netem) in NETEM {
        let mut add = |name: &str, direction, ci, run: fn(&mut Ctx<'_>) -> Result<String, Error>| {
            let s = Scenario::new(5, format!("{name}-{tag}"), direction, run);
            all.push(s.netem(netem).ci_if(ci));
        };
        let one = tag == "loss1";
        add("ops", Both, one, |c| ops::ops(c, Ip::V4));
        if one {
            add("ops-v6", Both, false, |c| ops::ops(c, Ip::V6));
        }
        add("pingpong-our-server", KernelToOurs, false, |c| {
            ops::pingpong_server(c, Ip::V4)
        });
        add("pingpong-our-client", OursToKernel, false, |c| {
            ops::pingpong_client(c, Ip::V4)
        });
        add("rping-our-server", KernelToOurs, tag == "duplicate", |c| {
            cm::rping_server(c, Ip::V4)
        });
        add("rping-our-client", OursToKernel, tag == "reorder", |c| {
            cm::rping_client(c, Ip::V4)
        });
        // always_invalidate=Y: see `kernel_stalls`.
        add("rnbd-our-client", OursToKernel, one, |c| {
            rnbd::our_client(c, Ip::V4, "ram0", false)
        });
        let s = Scenario::new(5, format!("rnbd-kernel-client-{tag}"), KernelToOurs, move |c| {
            lossy_kernel_client(c, netem, Ip::V4, "on", 64)
        });
        all.push(s.netem_later(netem).ci_if(one));
    }
    // Less data.
    for (tail, ip, invalidate) in [("inv-off-loss1", Ip::V4, "off"), ("v6-loss1", Ip::V6, "on")] {
        let s = Scenario::new(5, format!("rnbd-kernel-client-{tail}"), KernelToOurs, move |c| {
            lossy_kernel_client(c, "loss 1%", ip, invalidate, 32)
        });
        all.push(s.netem_later("loss 1%"));
    }
    for (tag, netem) in WHOLE_TREE {
        let tree = Scenario::new(5, format!("rnbd-kernel-client-tree-{tag}"), KernelToOurs, |c| {
            rnbd::file_system(c, rnbd::Serving::on(Ip::V4, "on"), rnbd::SMALL_TREE, 16)
        });
        let tree = tree.netem(netem).ci_if(tag == "delay");
        // There a session ends when a registration is repeated: see `kernel_stalls`.
        all.push(if tag == "reorder" {
            tree.only_on(&[Kernel::V6_1])
        } else {
            tree
        });
    }
    for (tag, netem) in NETEM
        .into_iter()
        .filter(|(tag, _)| ["duplicate", "delay"].contains(tag))
    {
        let read = Scenario::new(5, format!("rnbd-our-client-inv-on-{tag}"), OursToKernel, |c| {
            rnbd::our_client(c, Ip::V4, "ram0", true)
        });
        all.push(read.netem(netem));
    }
    let stalls = Scenario::new(5, "rnbd-our-client-inv-on-loss5", OursToKernel, kernel_stalls);
    all.push(stalls.netem_later("loss 5%"));
    let mut add = |name: &str, direction, ci, run: fn(&mut Ctx<'_>) -> Result<String, Error>| {
        all.push(Scenario::new(5, name, direction, run).ci_if(ci));
    };
    add("link-down-3s-ops", Both, false, link_down_ops);
    add(
        "link-down-3s-rnbd-kernel-client",
        KernelToOurs,
        true,
        link_down_kernel_client,
    );
    add(
        "link-down-3s-rnbd-our-client",
        OursToKernel,
        false,
        link_down_our_client,
    );
    add(
        "carrier-lost-3s-rnbd-kernel-client",
        KernelToOurs,
        false,
        carrier_lost_kernel_client,
    );
    add("killed-our-server", KernelToOurs, false, our_server_killed);
    add("killed-our-client", OursToKernel, false, our_client_killed);
    add("killed-guest-client", KernelToOurs, false, guest_client_killed);
    add("killed-guest-server", OursToKernel, false, guest_server_killed);
    all.into_iter().map(Scenario::waits).collect()
}

/// The kernel's client writes while packets get lost, and reads back when none do: under loss its reads run into
/// [`kernel_stalls`], of whatever server. A lost packet costs the kernel up to 4 s, so the requests are few (of 16 KiB).
fn lossy_kernel_client(
    c: &mut Ctx<'_>,
    netem: &str,
    ip: Ip,
    invalidate: &str,
    requests: usize,
) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let bytes = requests << 14;
    let server = Server::start(c, ip, &["disk"], invalidate)?;
    let mut work = || {
        more_over(c, ip, &format!("{}map s1 disk\n", rnbd::INSMOD_CLIENT), 180)?;
        c.guest()?.netem(Some(netem))?;
        let write = format!(
            "head -c {bytes} /dev/urandom > /tmp/a; dd if=/tmp/a of=/dev/rnbd0 bs=16k oflag=direct status=none; \
             sync /dev/rnbd0\n"
        );
        more_over(c, ip, &write, 900)?;
        c.guest()?.netem(None)?;
        let read = format!(
            "echo 3 > /proc/sys/vm/drop_caches; cmp -n {bytes} /tmp/a /dev/rnbd0; echo sum $(md5sum < /tmp/a); \
             unmap rnbd0; echo 'written, read back equal: passed'\n"
        );
        more_over(c, ip, &read, 300)
    };
    let result = work();
    rnbd::client_down(c)?;
    let out = result?;
    server.stop()?;
    same_on_image(c, &out, bytes)?;
    verdict(&out)
}

/// A fault of rdma_rxe: when one of its packets is lost it repeats fast registrations that were done already, and finds
/// "lkey … not free". With 6.1 that queue pair never sends again, while the session's heartbeats go on on another; with 6.12 it
/// goes into error, and RTRS ends the session. RTRS's server registers with every answer if always_invalidate=Y, its client
/// with every read. What we read until then must be right, whether the fault shows or not.
fn kernel_stalls(c: &mut Ctx<'_>) -> Result<String, Error> {
    const TRIES: usize = 5;
    for n in 1..=TRIES {
        rnbd::server_up(c, true)?;
        let stalled = stalls(c);
        c.guest()?.netem(None)?;
        rnbd::server_down(c)?;
        if stalled? {
            return Ok(format!(
                "the kernel repeated a registration at try {n}, what was read before is right: passed"
            ));
        }
    }
    Ok(format!(
        "the kernel repeated no registration in {TRIES} tries, all that was read is right: passed"
    ))
}

/// Whether the kernel's server stalls before a reader of ours is done. It reads much at a time: a registration that is
/// repeated must have another answer's behind it.
fn stalls(c: &mut Ctx<'_>) -> Result<bool, Error> {
    c.guest()?.run("dmesg -C", 30)?;
    let mut mapping = Mapping::start(c, Ip::V4, "ram0", Duration::ZERO)?;
    mapping.io(c, "write", &["write -P 0x77 0 4M", "flush"], 60)?;
    let reads: Vec<String> = (0..32).map(|n| format!("aio_read -P 0x77 {}k 128k", n * 128)).collect();
    let mut args = vec!["-f", "raw"];
    for read in &reads {
        args.extend(["-c", read]);
    }
    args.extend(["-c", "aio_flush", &mapping.url]);
    c.guest()?.netem(Some("loss 5%"))?;
    let mut reader = Proc::spawn("reader", std::process::Command::new("qemu-io").args(args), &c.dir)?;
    let until = Instant::now() + Duration::from_secs(60);
    let stalled = loop {
        check_stop()?;
        let running = reader.running();
        if rnbd::repeated_registration(c)? {
            break true;
        }
        if !running {
            break false;
        }
        if Instant::now() > until {
            return Err(format!("neither done nor stalled:\n{}", c.guest()?.dmesg()).into());
        }
        std::thread::sleep(Duration::from_millis(500));
    };
    let text = reader.text();
    c.guest()?.netem(None)?;
    if stalled && c.kernel()? > Kernel::V6_1 {
        mapping
            .process
            .wait_for("the peer disconnected", Duration::from_secs(60))?;
    }
    reader.kill();
    match stalled {
        // It would wait for the requests under way.
        true => mapping.process.kill(),
        false => mapping.stop()?,
    }
    if text.contains("verification failed") || !stalled && (text.contains("failed") || text.contains("rror")) {
        return Err(text.into());
    }
    Ok(stalled)
}

/// The line `sum MD5` of a guest's output is that of the image's start.
pub(super) fn same_on_image(c: &Ctx<'_>, out: &str, len: usize) -> Result<(), Error> {
    let script = format!("head -c {len} {} | md5sum", c.path("disk.img"));
    let ours = c.tool("md5sum", "bash", &["-c", &script], 60)?;
    let ours = ours.split_whitespace().next().unwrap_or_default();
    let theirs = out.lines().find_map(|l| l.strip_prefix("sum ")).unwrap_or_default();
    if theirs.split_whitespace().next() == Some(ours) {
        Ok(())
    } else {
        Err(format!("the image has {ours}, the guest wrote {theirs}").into())
    }
}

/// Pulls the guest's cable for 3 s.
fn unplug(c: &mut Ctx<'_>) -> Result<(), Error> {
    c.guest()?.set_link(false)?;
    std::thread::sleep(Duration::from_secs(3));
    c.guest()?.set_link(true)
}

/// The switch between us is out of service for 3 s.
fn cut(c: &mut Ctx<'_>) -> Result<(), Error> {
    c.guest()?.set_port(false)?;
    std::thread::sleep(Duration::from_secs(3));
    c.guest()?.set_port(true)?;
    // The next script must find its way to the guest.
    c.far.wait_up(Duration::from_secs(60))
}

fn link_down_ops(c: &mut Ctx<'_>) -> Result<String, Error> {
    let (mut agent, at) = c.far.agent("verbs-agent", Ip::V4, &c.dir)?;
    let at = at.to_string();
    let mut args = vec![
        "ops",
        "--agent",
        &at,
        "--mtu",
        c.path_mtu(),
        "--timeout",
        "19",
        "--rounds",
        "3",
        "--largest",
        "1048576",
    ];
    args.extend(ops::of_nothing(c)?);
    let mut ops = c.ours(Ip::V4, "ops", &args)?;
    std::thread::sleep(Duration::from_secs(1));
    if !ops.running() {
        return Err("it was done before the cable was pulled".into());
    }
    unplug(c)?;
    let out = ops.finish(Duration::from_secs(600))?;
    agent.finish(Duration::from_secs(60))?;
    verdict(&out)
}

/// In the guest: writes a file over and over again, until that fails. /tmp/rounds counts, /tmp/writer has the end.
const WRITER: &str = "\
    map s1 disk; head -c 1048576 /dev/urandom > /tmp/a; echo 0 > /tmp/rounds; rm -f /tmp/writer /tmp/stop\n\
    (n=0; while [ ! -e /tmp/stop ] && dd if=/tmp/a of=/dev/rnbd0 bs=64k oflag=direct conv=notrunc status=none 2>/tmp/dd-error; \
        do n=$((n+1)); echo $n > /tmp/rounds; done; echo ended after $n rounds: $(cat /tmp/dd-error) > /tmp/writer) >/dev/null 2>&1 &\n\
    rounds 2\n";
/// `rounds N` waits until the writer has done N more.
const ROUNDS: &str = "\
    rounds() { want=$(($(cat /tmp/rounds)+$1)); for i in $(seq 1200); do [ $(cat /tmp/rounds) -ge $want ] && return; \
        [ -e /tmp/writer ] && break; sleep 0.1; done; echo \"the writer is stuck\"; cat /tmp/writer; return 1; }\n";

/// Runs a script in the guest whose modules are loaded already.
fn more(c: &mut Ctx<'_>, script: &str, seconds: u32) -> Result<String, Error> {
    more_over(c, Ip::V4, script, seconds)
}

fn more_over(c: &mut Ctx<'_>, ip: Ip, script: &str, seconds: u32) -> Result<String, Error> {
    let host = c.host(ip)?;
    let text = format!("HOST={host}\n{}{ROUNDS}{script}", rnbd::FUNCTIONS);
    let guest = c.guest()?;
    guest
        .run(&text, seconds)
        .map_err(|e| format!("{e}\ndmesg:\n{}", guest.dmesg()).into())
}

fn start_writer(c: &mut Ctx<'_>) -> Result<(), Error> {
    let script = format!("{}{ROUNDS}{WRITER}", rnbd::INSMOD_CLIENT);
    more(c, &script, 180).map(drop)
}

/// Ends the writer, which must not have failed, and compares what it wrote.
const STOP_WRITER: &str = "\
    rounds 2; touch /tmp/stop; for i in $(seq 600); do [ -e /tmp/writer ] && break; sleep 0.1; done; cat /tmp/writer\n\
    cmp -n 1048576 /tmp/a /dev/rnbd0; echo sum $(md5sum < /tmp/a); unmap rnbd0\n";

fn link_down_kernel_client(c: &mut Ctx<'_>) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let server = Server::start(c, Ip::V4, &["disk"], "on")?;
    let result = start_writer(c)
        .and_then(|()| cut(c))
        .and_then(|()| more(c, STOP_WRITER, 300));
    rnbd::client_down(c)?;
    let out = result?;
    server.stop()?;
    same_on_image(c, &out, 1 << 20)?;
    if !out.contains("rounds:\n") {
        return Err(format!("the writer failed: {out}").into());
    }
    Ok("no write failed, data equal: passed".to_owned())
}

/// qemu-io writing and reading as much at a time, so many times, through our client.
fn start_our_writer(c: &Ctx<'_>, mapping: &Mapping, size: &str, rounds: usize) -> Result<Proc, Error> {
    let [write, read] = ["write", "read"].map(|what| format!("{what} -P 0x77 0 {size}"));
    // Line by line: into a file it would tell of its first write after some twenty rounds.
    let mut args = vec!["-oL", "qemu-io", "-f", "raw"];
    for _ in 0..rounds {
        args.extend(["-c", &write, "-c", &read]);
    }
    args.push(&mapping.url);
    let mut writer = Proc::spawn("writer", std::process::Command::new("stdbuf").args(args), &c.dir)?;
    writer.wait_for("wrote", Duration::from_secs(60))?;
    Ok(writer)
}

fn link_down_our_client(c: &mut Ctx<'_>) -> Result<String, Error> {
    rnbd::server_up(c, false)?;
    let result = Mapping::start(c, Ip::V4, "ram0", Duration::ZERO).and_then(|mapping| {
        let mut writer = start_our_writer(c, &mapping, "8M", 30)?;
        unplug(c)?;
        let text = writer.finish(Duration::from_secs(300))?;
        if text.contains("failed") || text.contains("rror") {
            return Err(text.into());
        }
        mapping.stop()
    });
    rnbd::server_down(c)?;
    result.map(|()| "no request failed, data equal: passed".to_owned())
}

/// The writer ends with an I/O error; the kernel's client connects again by itself, and the device works.
const COMES_BACK: &str = "\
    at() { cut -d. -f1 /proc/uptime; }; start=$(at)\n\
    for i in $(seq 1200); do [ -e /tmp/writer ] && break; sleep 0.1; done; cat /tmp/writer\n\
    grep -q 'Input/output error' /tmp/writer; failed=$(at)\n\
    for i in $(seq 1800); do [ $(cat /sys/block/rnbd0/rnbd/state) = open ] && \
        [ $(cat /sys/class/rtrs-client/s1/paths/*/state) = connected ] && break; sleep 0.1; done\n\
    echo times: failed after $((failed-start)) s, connected after $(($(at)-start)) s\n\
    head -c 1048576 /dev/urandom > /tmp/a; dd if=/tmp/a of=/dev/rnbd0 bs=64k oflag=direct status=none\n\
    echo 3 > /proc/sys/vm/drop_caches; cmp -n 1048576 /tmp/a /dev/rnbd0; echo sum $(md5sum < /tmp/a); unmap rnbd0\n";

/// Without carrier the kernel forgets its neighbours, and `cma_netevent_callback` takes the new entry, which has no
/// address yet, for another host: its connections end as unreachable, of whatever server.
fn carrier_lost_kernel_client(c: &mut Ctx<'_>) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let server = Server::start(c, Ip::V4, &["disk"], "on")?;
    let result = start_writer(c)
        .and_then(|()| unplug(c))
        .and_then(|()| more(c, COMES_BACK, 400));
    rnbd::client_down(c)?;
    let out = result?;
    server.stop()?;
    same_on_image(c, &out, 1 << 20)?;
    Ok("writes failed with an I/O error, the session came back, data equal: passed".to_owned())
}

/// The kernel's client notices by missing heartbeats (25 s), fails what was under way, and connects again by itself.
fn our_server_killed(c: &mut Ctx<'_>) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let mut server = Server::start(c, Ip::V4, &["disk"], "on")?;
    let result = start_writer(c)
        .and_then(|()| server.kill_and_restart(c))
        .and_then(|()| more(c, COMES_BACK, 400));
    rnbd::client_down(c)?;
    let out = result?;
    let again = server.count("session_opened");
    server.stop()?;
    same_on_image(c, &out, 1 << 20)?;
    if again == 0 {
        return Err("no session with the new server".into());
    }
    Ok("writes failed with an I/O error, the session came back, data equal: passed".to_owned())
}

/// Our server notices that the guest is gone; when the guest comes back it maps under the same name.
fn guest_client_killed(c: &mut Ctx<'_>) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let server = Server::start(c, Ip::V4, &["disk"], "on")?;
    start_writer(c)?;
    c.guest()?.kill();
    let until = Instant::now() + Duration::from_secs(60);
    while server.count("session_closed") == 0 {
        check_stop()?;
        if Instant::now() > until {
            return Err(format!("the server still holds the session:\n{}", server.process.text()).into());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    c.guest()?.reboot()?;
    let script = "\
        map s1 disk; head -c 1048576 /dev/urandom > /tmp/a; dd if=/tmp/a of=/dev/rnbd0 bs=64k oflag=direct status=none\n\
        cmp -n 1048576 /tmp/a /dev/rnbd0; echo sum $(md5sum < /tmp/a); unmap rnbd0; echo 'mapped again: passed'\n";
    let out = with_client(c, Ip::V4, script, 240)?;
    server.stop()?;
    same_on_image(c, &out, 1 << 20)?;
    Ok(format!("session ended; {}", verdict(&out)?))
}

/// Our client reports an error and ends; when the guest comes back a new one works.
fn guest_server_killed(c: &mut Ctx<'_>) -> Result<String, Error> {
    rnbd::server_up(c, true)?;
    let mut mapping = Mapping::start(c, Ip::V4, "ram0", Duration::ZERO)?;
    let mut writer = start_our_writer(c, &mapping, "8M", 200)?;
    c.guest()?.kill();
    // qemu-io says so and goes on, or exits with an error.
    let _ = writer.finish(Duration::from_secs(120));
    let text = writer.text();
    let ended = mapping.process.finish(Duration::from_secs(120)).is_err();
    let said = mapping.process.text();
    c.guest()?.reboot()?;
    if !text.contains("failed") || !ended {
        return Err(format!("qemu-io said: {text}\nmap said: {said}").into());
    }
    drop(mapping);
    let again = rnbd::our_client(c, Ip::V4, "ram0", true)?;
    Ok(format!("requests failed, the client ended with an error; then {again}"))
}

/// The kernel's server notices that our client is gone (25 s) and gives the device to the next.
fn our_client_killed(c: &mut Ctx<'_>) -> Result<String, Error> {
    rnbd::server_up(c, true)?;
    let result = Mapping::start(c, Ip::V4, "ram0", Duration::ZERO).and_then(|mut mapping| {
        let mut writer = start_our_writer(c, &mapping, "8M", 200)?;
        mapping.process.kill();
        let killed = Instant::now();
        // qemu-io says so and goes on, or exits with an error.
        let _ = writer.finish(Duration::from_secs(120));
        let text = writer.text();
        if !text.contains("failed: Input/output error") {
            return Err(format!("the writer did not fail: {text}").into());
        }
        let again = Mapping::start(c, Ip::V4, "ram0", Duration::from_secs(120))?;
        let after = killed.elapsed().as_secs();
        again.io(c, "again", &["write -P 0x11 0 1M", "flush", "read -P 0x11 0 1M"], 120)?;
        again.stop().map(|()| after)
    });
    rnbd::server_down(c)?;
    let after = result?;
    Ok(format!(
        "the kernel gave the device away {after} s later, data equal: passed"
    ))
}
