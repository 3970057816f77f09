//! 3 and 4: block devices, with the kernel as client and as server.

use std::{
    collections::BTreeMap,
    fs,
    net::IpAddr,
    path::Path,
    time::{Duration, Instant},
};

use super::{Ctx, Direction, JUMBO, JUMBO_SMP, SMALL, SMP, Scenario, frame_time, stall, verdict};
use crate::{
    Error,
    far::Ip,
    guest::{Kernel, STILL_RUNS},
    lab::{Proc, check_stop},
};

pub(super) fn list() -> Vec<Scenario> {
    use Direction::{KernelToOurs, OursToKernel};
    let mut all = Vec::new();
    let shapes = [SMALL, JUMBO_SMP, SMP, JUMBO];
    for shape in shapes {
        for inv in ["on", "off"] {
            let tail = format!("{}cpu-mtu{}-inv-{inv}", shape.cpus, shape.mtu);
            let client = Scenario::new(3, format!("rnbd-kernel-client-{tail}"), KernelToOurs, move |c| {
                kernel_client(c, Serving::on(Ip::V4, inv))
            });
            all.push(
                client
                    .shape(shape)
                    // On a small MTU the short set has a smaller tree, of late packets.
                    .ci_if(shape == JUMBO && inv == "off"),
            );
            // The kernel's server answers many reads at once, with which it stalls on several CPUs: see `JUMBO_SMP`.
            if shape == SMALL || shape == JUMBO {
                let server = Scenario::new(4, format!("rnbd-our-client-{tail}"), OursToKernel, move |c| {
                    our_client(c, Ip::V4, "ram0", inv == "on")
                });
                all.push(server.shape(shape).ci_if((shape == SMALL) == (inv == "on")));
            }
        }
    }
    let mut add = |number, name: &str, direction, ci, run: fn(&mut Ctx<'_>) -> Result<String, Error>| {
        all.push(Scenario::new(number, name, direction, run).ci_if(ci));
    };
    add(6, "rnbd-kernel-client-v6", KernelToOurs, false, |c| {
        kernel_client(c, Serving::on(Ip::V6, "on"))
    });
    add(3, "rnbd-kernel-client-read-only", KernelToOurs, true, read_only);
    add(3, "rnbd-kernel-client-wrong-name", KernelToOurs, true, wrong_name);
    add(3, "rnbd-kernel-client-two-devices", KernelToOurs, false, two_devices);
    add(4, "rnbd-our-client-loop-device", OursToKernel, false, |c| {
        our_client(c, Ip::V4, "loop0", true)
    });
    add(4, "rnbd-our-client-wrong-name", OursToKernel, false, our_wrong_name);
    add(4, "rnbd-our-client-read-only", OursToKernel, false, our_read_only);
    add(
        4,
        "rnbd-our-client-three-devices",
        OursToKernel,
        false,
        our_three_devices,
    );
    add(6, "rnbd-our-client-v6", OursToKernel, true, |c| {
        our_client(c, Ip::V6, "ram0", true)
    });
    all.push(
        Scenario::new(3, "rnbd-kernel-client-idle", KernelToOurs, idle)
            .waits()
            .ci(),
    );
    let jumbo = Scenario::new(6, "rnbd-kernel-client-v6-mtu9000-inv-off", KernelToOurs, |c| {
        file_system(c, Serving::on(Ip::V6, "off"), SMALL_TREE, 16)
    });
    all.push(jumbo.shape(JUMBO));
    let loops = Scenario::new(3, "rnbd-kernel-client-4cpu-threads2", KernelToOurs, two_loops);
    all.push(loops.shape(SMP));
    all
}

pub(super) const INSMOD_CLIENT: &str = "modprobe -q rdma_cm; modprobe -q ib_core\n\
    for m in rtrs/rtrs-core rtrs/rtrs-client rnbd/rnbd-client; do insmod $LINUX/$m.ko || exit 1; done\n";
pub(super) const RMMOD_CLIENT: &str = "for d in /sys/block/rnbd*/rnbd; do [ -e $d ] && echo force >$d/unmap_device; done; sleep 0.5\n\
    rmmod rnbd_client; rmmod rtrs_client; rmmod rtrs_core; true";
pub(super) const RMMOD_SERVER: &str = "rmmod rnbd_server; rmmod rtrs_server; rmmod rtrs_core; losetup -D; true";

/// Shell functions that the scripts of all scenarios with the kernel's client use. The number of a device that was just
/// unmapped may not be free yet: then the first device is not rnbd0, and is mapped again.
pub(super) const FUNCTIONS: &str = "\
    set -e\n\
    map() { for t in $(seq 10); do \
        echo \"sessname=$1 path=ip:$HOST device_path=$2 $3\" > /sys/class/rnbd-client/ctl/map_device || return 1; \
        for i in $(seq 100); do [ -b /dev/rnbd0 ] && return 0; [ -b /dev/rnbd1 ] && break; sleep 0.1; done; \
        [ -b /dev/rnbd1 ] && unmap rnbd1 || return 1; sleep 1; done; return 1; }\n\
    unmap() { for i in $(seq 50); do echo normal > /sys/block/$1/rnbd/unmap_device && return 0; sleep 0.2; done; \
        echo \"$1 can't be unmapped\"; return 1; }\n";

/// How a server of ours serves.
#[derive(Clone, Copy)]
pub(super) struct Serving {
    ip: Ip,
    invalidate: &'static str,
    threads: u8,
}

impl Serving {
    /// With one loop.
    pub(super) const fn on(ip: Ip, invalidate: &'static str) -> Self {
        Self {
            ip,
            invalidate,
            threads: 1,
        }
    }
}

/// What a server of ours is started with.
pub(super) struct Orders {
    /// Of its log.
    name: String,
    listen: String,
    exports: Vec<String>,
    invalidate: String,
    threads: u8,
    /// To be asked for things while it runs.
    steered: bool,
    /// Further options.
    more: Vec<String>,
}

impl Orders {
    /// Serves images of the scenario's folder (names, perhaps with `,ro`) with one loop.
    pub(super) fn new(listen: &str, exports: &[&str], invalidate: &str) -> Self {
        Self {
            name: "serve".to_owned(),
            listen: listen.to_owned(),
            exports: exports.iter().map(|&e| e.to_owned()).collect(),
            invalidate: invalidate.to_owned(),
            threads: 1,
            steered: false,
            more: Vec::new(),
        }
    }

    /// A second server needs a name of its own.
    pub(super) fn named(self, name: &str) -> Self {
        Self {
            name: name.to_owned(),
            ..self
        }
    }

    /// With several loops.
    pub(super) fn threads(self, threads: u8) -> Self {
        Self { threads, ..self }
    }

    /// Its process can be [asked](Proc::ask).
    pub(super) fn steered(self) -> Self {
        Self { steered: true, ..self }
    }

    fn spawn(&self, c: &Ctx<'_>) -> Result<Proc, Error> {
        let threads = self.threads.to_string();
        let mut args = vec!["serve", "--addr", &self.listen, "--threads", &threads, "--json"];
        args.extend(["--always-invalidate", &self.invalidate]);
        args.extend(self.more.iter().map(String::as_str));
        let exports = self.exports.iter().map(|e| {
            let (name, ro) = e.split_once(',').map_or((e.as_str(), ""), |(name, _)| (name, ",ro"));
            format!("{name}={}{ro}", c.path(&format!("{name}.img")))
        });
        let specs: Vec<String> = exports.collect();
        for spec in &specs {
            args.extend(["--export", spec]);
        }
        let mut process = match self.steered {
            true => c.steered(&self.name, &args)?,
            false => c.ferroce(&self.name, &args)?,
        };
        process.wait_for("\"listening\"", Duration::from_secs(30))?;
        Ok(process)
    }
}

/// A server of ours.
pub(super) struct Server {
    pub(super) process: Proc,
    orders: Orders,
    /// Of each of the guest's sessions: one for each of its CPUs, and one for the session's own messages.
    connections: Option<u64>,
}

impl Server {
    /// Serves images of the scenario's folder: names, perhaps with `,ro`.
    pub(super) fn start(c: &Ctx<'_>, ip: Ip, exports: &[&str], invalidate: &str) -> Result<Self, Error> {
        Self::start_at(c, &c.host(ip)?.to_string(), exports, invalidate)
    }

    /// The same at another address.
    pub(super) fn start_at(c: &Ctx<'_>, listen: &str, exports: &[&str], invalidate: &str) -> Result<Self, Error> {
        Self::start_as(c, Orders::new(listen, exports, invalidate))
    }

    /// The same as ordered.
    pub(super) fn start_as(c: &Ctx<'_>, orders: Orders) -> Result<Self, Error> {
        Ok(Self {
            process: orders.spawn(c)?,
            orders,
            connections: c.guest.as_ref().map(|g| u64::from(g.shape.cpus) + 1),
        })
    }

    /// Kills the process and starts another one on the same images.
    pub(super) fn kill_and_restart(&mut self, c: &Ctx<'_>) -> Result<(), Error> {
        self.process.kill();
        self.process = self.orders.spawn(c)?;
        Ok(())
    }

    /// The same with other options than before.
    pub(super) fn restart_otherwise(&mut self, c: &Ctx<'_>, invalidate: &str, more: &[&str]) -> Result<(), Error> {
        self.orders.invalidate = invalidate.to_owned();
        self.orders.more = more.iter().map(|&m| m.to_owned()).collect();
        self.kill_and_restart(c)
    }

    /// What was reported so far under this name.
    fn events(&self, event: &str) -> Vec<serde_json::Value> {
        self.process.events(event)
    }

    /// How often an event was reported so far.
    pub(super) fn count(&self, event: &str) -> usize {
        self.events(event).len()
    }

    /// Ends it the regular way. The guest must have opened sessions, with as many connections as it has to.
    pub(super) fn stop(self) -> Result<(), Error> {
        self.summary().map(drop)
    }

    /// The same; what it counted until then.
    pub(super) fn summary(self) -> Result<serde_json::Value, Error> {
        let opened = self.events("session_opened");
        let connections = self.connections;
        let summary = self.end()?;
        let right = |e: &serde_json::Value| connections.is_none_or(|n| e["connections"] == n);
        if opened.is_empty() || !opened.iter().all(right) {
            return Err(format!("sessions with {connections:?} connections are right, opened were {opened:?}").into());
        }
        Ok(summary)
    }

    /// Ends it the regular way, whoever was there; what it counted until then.
    pub(super) fn end(mut self) -> Result<serde_json::Value, Error> {
        self.process.interrupt();
        self.process.finish(Duration::from_secs(30))?;
        let summary = self.events("summary").pop();
        summary.ok_or_else(|| format!("no summary:\n{}", self.process.text()).into())
    }
}

/// Makes an empty image.
pub(super) fn image(c: &Ctx<'_>, name: &str, mib: u64) -> Result<(), Error> {
    fs::File::create(c.path(&format!("{name}.img")))?.set_len(mib << 20)?;
    Ok(())
}

/// Checks the image's file system on our side.
pub(super) fn fsck(c: &Ctx<'_>, name: &str) -> Result<String, Error> {
    let text = c.tool("e2fsck", "e2fsck", &["-fn", &c.path(&format!("{name}.img"))], 120)?;
    Ok(text.lines().last().unwrap_or_default().to_owned())
}

/// Runs a script in the guest with the client modules loaded; they are unloaded afterwards in any case.
pub(super) fn with_client(c: &mut Ctx<'_>, ip: Ip, script: &str, seconds: u32) -> Result<String, Error> {
    let host = c.host(ip)?;
    with_client_of(c, host, script, seconds)
}

/// The same with a server at this address.
pub(super) fn with_client_of(c: &mut Ctx<'_>, host: IpAddr, script: &str, seconds: u32) -> Result<String, Error> {
    let text = format!("HOST={host}\n{INSMOD_CLIENT}{FUNCTIONS}{script}");
    let guest = c.guest()?;
    let out = guest
        .run(&text, seconds)
        .map_err(|e| format!("{e}\ndmesg:\n{}", guest.dmesg()));
    let clean = client_down(c);
    let out = out?;
    clean.map(|()| out)
}

/// Unmaps what is left and unloads the client modules.
pub(super) fn client_down(c: &mut Ctx<'_>) -> Result<(), Error> {
    let (_, text) = c.guest()?.try_run(RMMOD_CLIENT, 120)?;
    if text.contains("rmmod: ERROR") {
        return Err(format!("the kernel's modules can't be unloaded: {text}").into());
    }
    Ok(())
}

/// mkfs, copy, fsck, compare, unmap, map again, compare.
pub(super) const TREE: &str = "\
    map s1 disk; ls /sys/class/rtrs-client/s1/paths; blockdev --getsize64 /dev/rnbd0; mkdir -p /mnt/r\n\
    mkfs.ext4 -q /dev/rnbd0; mount -t ext4 /dev/rnbd0 /mnt/r\n\
    cp -a /usr/include/linux /usr/include/rdma /mnt/r/; sync; umount /mnt/r\n\
    fsck.ext4 -fn /dev/rnbd0; echo 3 > /proc/sys/vm/drop_caches\n\
    mount -t ext4 /dev/rnbd0 /mnt/r\n\
    diff -r --no-dereference /usr/include/linux /mnt/r/linux; diff -r /usr/include/rdma /mnt/r/rdma; umount /mnt/r\n\
    unmap rnbd0; map s1 disk; mount -o ro -t ext4 /dev/rnbd0 /mnt/r\n\
    diff -r /usr/include/rdma /mnt/r/rdma; umount /mnt/r; unmap rnbd0; echo 'trees equal: passed'\n";

/// The kernel's RNBD client maps our server. One of several CPUs may stall (`specs/kernel.md`): if the capture proves that
/// every request was answered, it gets a second chance, in a guest that is booted again.
pub(super) fn kernel_client(c: &mut Ctx<'_>, how: Serving) -> Result<String, Error> {
    let first = file_system(c, how, TREE, 64);
    let smp = c.guest()?.shape.cpus > 1;
    match first {
        Err(e) if smp && e.to_string().contains(STILL_RUNS) => {
            let answered = stall::all_answered(&c.frames()?).map_err(|owed| format!("{e}\n{owed}"))?;
            c.guest()?.reboot()?;
            let again = file_system(c, how, TREE, 64)?;
            Ok(format!(
                "{again}; at the second try: in the first the kernel's client sent nothing any more after {answered} requests, all answered"
            ))
        }
        other => other,
    }
}

/// A script that works on a file system on `disk` in the guest, which is checked here afterwards.
pub(super) fn file_system(c: &mut Ctx<'_>, how: Serving, script: &str, mib: u64) -> Result<String, Error> {
    image(c, "disk", mib)?;
    let listen = c.host(how.ip)?.to_string();
    let orders = Orders::new(&listen, &["disk"], how.invalidate).threads(how.threads);
    let server = Server::start_as(c, orders)?;
    let out = with_client(c, how.ip, script, 300)?;
    let connections = server.connections.unwrap_or_default();
    server.stop()?;
    let image = fsck(c, "disk")?;
    Ok(format!(
        "{}; {connections} connections; image on the server: {image}",
        verdict(&out)?
    ))
}

/// Our server has two loops; the connections of the kernel's session are spread over them, by their queue pairs' numbers.
fn two_loops(c: &mut Ctx<'_>) -> Result<String, Error> {
    let how = Serving {
        threads: 2,
        ..Serving::on(Ip::V4, "on")
    };
    let out = kernel_client(c, how)?;
    let to_us = format!("> {}:", c.host(Ip::V4)?);
    // The kernel puts a request and its data into one message. Each loop is a member of the broker, whose slot is in the upper seven
    // bits of its queue pairs' numbers (`roce_broker::Place`).
    let mut by_slot = BTreeMap::<u32, usize>::new();
    for line in c
        .frames()?
        .lines()
        .filter(|l| l.contains(&to_us) && l.contains(" imm 0x"))
    {
        let qpn = line.split(" qp 0x").nth(1).and_then(|s| s.get(..6));
        let qpn = qpn.and_then(|digits| u32::from_str_radix(digits, 16).ok());
        *by_slot
            .entry(qpn.ok_or("a request without a queue pair")? >> 17)
            .or_default() += 1;
    }
    let requests: Vec<usize> = by_slot.into_values().collect();
    if requests.len() != 2 || requests.iter().any(|n| *n < 50) {
        return Err(format!("messages by loop: {requests:?}").into());
    }
    Ok(format!("{out}; messages by loop: {requests:?}"))
}

/// The same with little data, while packets are doubled or late.
pub(super) const SMALL_TREE: &str = "\
    map s1 disk; mkdir -p /mnt/r; mkfs.ext4 -q -O ^has_journal /dev/rnbd0; mount -t ext4 /dev/rnbd0 /mnt/r\n\
    cp -a /usr/include/rdma /mnt/r/; sync; umount /mnt/r; echo 3 > /proc/sys/vm/drop_caches\n\
    mount -o ro -t ext4 /dev/rnbd0 /mnt/r; diff -r /usr/include/rdma /mnt/r/rdma\n\
    umount /mnt/r; unmap rnbd0; echo 'trees equal: passed'\n";

fn read_only(c: &mut Ctx<'_>) -> Result<String, Error> {
    image(c, "disk", 16)?;
    image(c, "other", 16)?;
    let disk = c.path("disk.img");
    c.tool("mkfs", "mkfs.ext4", &["-q", "-d", "/usr/include/rdma", &disk], 60)?;
    let server = Server::start(c, Ip::V4, &["disk,ro", "other"], "on")?;
    let script = "\
        if map s1 disk 2>/tmp/err; then echo 'read-write of a read-only export was granted'; exit 1; fi; cat /tmp/err\n\
        map s1 disk access_mode=ro; cat /sys/block/rnbd0/rnbd/access_mode; mkdir -p /mnt/r\n\
        [ $(blockdev --getro /dev/rnbd0) = 1 ]\n\
        if dd if=/dev/zero of=/dev/rnbd0 bs=4k count=1 oflag=direct; then echo 'a write got through'; exit 1; fi\n\
        mount -o ro -t ext4 /dev/rnbd0 /mnt/r; diff -r -x lost+found /usr/include/rdma /mnt/r\n\
        umount /mnt/r; unmap rnbd0\n\
        map s1 other access_mode=ro; [ $(blockdev --getro /dev/rnbd0) = 1 ]; unmap rnbd0\n\
        echo 'read-only tree equal, writes refused: passed'\n";
    let before = fs::read(&disk)?;
    let out = with_client(c, Ip::V4, script, 120)?;
    server.stop()?;
    if fs::read(&disk)? != before {
        return Err("the image has changed".into());
    }
    verdict(&out)
}

fn wrong_name(c: &mut Ctx<'_>) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let server = Server::start(c, Ip::V4, &["disk"], "on")?;
    let script = "\
        for name in nothing ../disk di disk2; do\n\
            errno=2; text='No such file or directory'\n\
            case $name in */*) errno=22; text='Invalid argument';; esac\n\
            dmesg -C\n\
            if echo \"sessname=s1 path=ip:$HOST device_path=$name\" 2>/tmp/err > /sys/class/rnbd-client/ctl/map_device; \
                then echo \"$name was mapped\"; exit 1; fi\n\
            cat /tmp/err; dmesg | grep map_device\n\
            grep -q \"$text\" /tmp/err; dmesg | grep -q \"can't open remote device, err: -$errno$\"\n\
        done\n\
        map s1 disk; dd if=/dev/rnbd0 of=/dev/null bs=1M count=4 iflag=direct; unmap rnbd0; echo 'refused, then mapped: passed'\n";
    let out = with_client(c, Ip::V4, script, 120)?;
    server.stop()?;
    verdict(&out)
}

fn two_devices(c: &mut Ctx<'_>) -> Result<String, Error> {
    image(c, "one", 16)?;
    image(c, "two", 24)?;
    let server = Server::start(c, Ip::V4, &["one", "two"], "on")?;
    let script = "\
        map s1 one; map s1 two; for i in $(seq 100); do [ -b /dev/rnbd1 ] && break; sleep 0.1; done\n\
        [ $(blockdev --getsize64 /dev/rnbd0) = $((16<<20)) ]; [ $(blockdev --getsize64 /dev/rnbd1) = $((24<<20)) ]\n\
        [ $(ls /sys/class/rtrs-client | grep -c s1) = 1 ]\n\
        if map s1 one; then echo 'mapped twice'; exit 1; fi\n\
        head -c 6000000 /dev/urandom > /tmp/a; head -c 6000000 /dev/urandom > /tmp/b\n\
        dd if=/tmp/a of=/dev/rnbd0 bs=64k conv=fsync status=none & dd if=/tmp/b of=/dev/rnbd1 bs=64k conv=fsync status=none; wait\n\
        echo 3 > /proc/sys/vm/drop_caches\n\
        cmp -n 6000000 /tmp/a /dev/rnbd0; cmp -n 6000000 /tmp/b /dev/rnbd1\n\
        unmap rnbd0; cmp -n 6000000 /tmp/b /dev/rnbd1; unmap rnbd1; echo 'both devices kept their data: passed'\n";
    let out = with_client(c, Ip::V4, script, 240)?;
    let sessions = server.count("session_opened");
    server.stop()?;
    if sessions != 1 {
        return Err(format!("{sessions} sessions were opened").into());
    }
    verdict(&out)
}

/// Both sides keep the session alive while nothing else goes on.
fn idle(c: &mut Ctx<'_>) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let server = Server::start(c, Ip::V4, &["disk"], "on")?;
    let script = "\
        map s1 disk; dd if=/dev/urandom of=/dev/rnbd0 bs=64k count=4 oflag=direct status=none; sleep 22\n\
        [ $(cat /sys/block/rnbd0/rnbd/state) = open ]; [ $(cat /sys/class/rtrs-client/s1/paths/*/state) = connected ]\n\
        cat /sys/class/rtrs-client/s1/paths/*/stats/reconnects; [ \"$(cat /sys/class/rtrs-client/s1/paths/*/stats/reconnects)\" = '0 0' ]\n\
        dd if=/dev/rnbd0 of=/dev/null bs=64k count=4 iflag=direct status=none; unmap rnbd0; echo 'alive after 22 s: passed'\n";
    let out = with_client(c, Ip::V4, script, 120)?;
    let (opened, closed) = (server.count("session_opened"), server.count("error"));
    server.stop()?;
    if (opened, closed) != (1, 0) {
        return Err(format!("{opened} sessions were opened, {closed} errors reported").into());
    }
    let (ours, theirs) = heartbeats(c)?;
    let gaps = theirs.windows(2).map(|w| w[1] - w[0]);
    if ours == 0 || theirs.len() < 3 || gaps.min_by(f64::total_cmp).is_some_and(|gap| gap < 4.0) {
        return Err(format!("{ours} heartbeats and answers from us, heartbeats from the kernel at {theirs:?}").into());
    }
    Ok(format!(
        "{}; {ours} heartbeats and answers from us, {} heartbeats from the kernel, every 5 s",
        verdict(&out)?,
        theirs.len()
    ))
}

/// Heartbeats (immediate type 8 of rtrs-pri.h) and their answers (type 9) in the capture so far: how many are ours, and
/// when the kernel's heartbeats came, s.
fn heartbeats(c: &Ctx<'_>) -> Result<(usize, Vec<f64>), Error> {
    let host = c.host(Ip::V4)?.to_string();
    let text = c.frames()?;
    let from_us = |l: &&str| l.contains(&format!(" {host}:")) && l.find(&host) < l.find('>');
    let asks = |l: &&str| l.contains("imm 0x8000");
    let ours = text.lines().filter(|l| asks(l) || l.contains("imm 0x9000"));
    let theirs = text.lines().filter(|l| asks(l) && !from_us(l));
    // One that was sent twice is one.
    let mut theirs: Vec<&str> = theirs.collect();
    theirs.dedup_by_key(|l| l.split_once(" psn ").and_then(|(_, rest)| rest.split(' ').next()));
    let times = theirs.into_iter().filter_map(frame_time).collect();
    Ok((ours.filter(from_us).count(), times))
}

/// Loads the kernel's server.
pub(super) fn server_modules(invalidate: &str) -> String {
    format!(
        "set -e; L=$LINUX; modprobe -q rdma_cm; modprobe -q ib_core\n\
         insmod $L/rtrs/rtrs-core.ko; insmod $L/rtrs/rtrs-server.ko always_invalidate={invalidate}; insmod $L/rnbd/rnbd-server.ko\n"
    )
}

/// Brings the kernel's server up with its devices.
pub(super) fn server_up(c: &mut Ctx<'_>, invalidate: bool) -> Result<(), Error> {
    let modules = server_modules(if invalidate { "Y" } else { "N" });
    let script = format!(
        "{modules}[ -e /tmp/loop.img ] || truncate -s 64M /tmp/loop.img; losetup /dev/loop0 /tmp/loop.img; \
         blockdev --getsize64 /dev/ram0\n"
    );
    c.guest()?.run(&script, 120).map(drop)
}

pub(super) fn server_down(c: &mut Ctx<'_>) -> Result<(), Error> {
    c.guest()?.try_run(RMMOD_SERVER, 120).map(drop)
}

/// A mapping of ours: an NBD socket.
pub(super) struct Mapping {
    pub(super) process: Proc,
    pub(super) url: String,
}

impl Mapping {
    /// What is asked for is that it ends when it loses the kernel.
    fn spawn(c: &Ctx<'_>, ip: Ip, device: &str, more: &[&str]) -> Result<Self, Error> {
        let path = format!("{},{}", c.host(ip)?, c.far.addr(ip)?);
        let more = [&["--max-reconnects", "0"], more].concat();
        Self::spawn_over(c, &[path], device, &more)
    }

    /// Over these paths.
    pub(super) fn spawn_over(c: &Ctx<'_>, paths: &[String], device: &str, more: &[&str]) -> Result<Self, Error> {
        Self::spawn_by(paths, device, more, c, |args| c.ferroce("map", args))
    }

    /// The same, of which the process can be [asked](Proc::ask).
    pub(super) fn steered_over(c: &Ctx<'_>, paths: &[String], device: &str, more: &[&str]) -> Result<Self, Error> {
        Self::spawn_by(paths, device, more, c, |args| c.steered("map", args))
    }

    pub(super) fn spawn_by(
        paths: &[String],
        device: &str,
        more: &[&str],
        c: &Ctx<'_>,
        spawn: impl FnOnce(&[&str]) -> Result<Proc, Error>,
    ) -> Result<Self, Error> {
        let device = format!("newroot/dev/{device}");
        Self::spawn_of(paths, &device, more, c, spawn)
    }

    /// Over these paths a device that a server of ours has.
    pub(super) fn of_ours(c: &Ctx<'_>, paths: &[String], device: &str, more: &[&str]) -> Result<Self, Error> {
        Self::spawn_of(paths, device, more, c, |args| c.steered("map", args))
    }

    fn spawn_of(
        paths: &[String],
        device: &str,
        more: &[&str],
        c: &Ctx<'_>,
        spawn: impl FnOnce(&[&str]) -> Result<Proc, Error>,
    ) -> Result<Self, Error> {
        let nbd = c.socket("nbd.sock");
        let mut args = vec!["map", "--session", "ours", "--device", device, "--nbd", &nbd];
        args.extend(paths.iter().flat_map(|path| ["--path", path.as_str()]));
        args.extend(more);
        let process = spawn(&args)?;
        let url = format!("nbd+unix:///?socket={nbd}");
        Ok(Self { process, url })
    }

    /// What was reported so far under this name, with `--json`.
    pub(super) fn events(&self, event: &str) -> Vec<serde_json::Value> {
        self.process.events(event)
    }

    /// How often an event was reported so far.
    pub(super) fn count(&self, event: &str) -> usize {
        self.events(event).len()
    }

    /// Waits until an event was reported more often than `before`.
    pub(super) fn wait_more(&mut self, event: &str, before: usize, timeout: Duration) -> Result<(), Error> {
        let log = self.process.log.clone();
        let name = format!("\"event\":\"{event}\"");
        let seen = || fs::read_to_string(&log).is_ok_and(|text| text.matches(&name).count() > before);
        let waited = self.process.wait_until(timeout, seen);
        waited.map_err(|e| format!("no {event} after {before} of them: {e}").into())
    }

    /// Maps; tries again for a while when the server still holds the device for somebody who is gone.
    pub(super) fn start(c: &Ctx<'_>, ip: Ip, device: &str, timeout: Duration) -> Result<Self, Error> {
        let until = Instant::now() + timeout;
        loop {
            let mut mapping = Self::spawn(c, ip, device, &[])?;
            match mapping.process.wait_for("mapped ", Duration::from_secs(60)) {
                Ok(()) => return Ok(mapping),
                Err(e) if Instant::now() > until => return Err(e),
                Err(_) => std::thread::sleep(Duration::from_secs(2)),
            }
            check_stop()?;
        }
    }

    pub(super) fn stop(mut self) -> Result<(), Error> {
        self.process.interrupt();
        self.process.finish(Duration::from_secs(30)).map(drop)
    }

    /// qemu-io commands, all of which must succeed.
    pub(super) fn io(&self, c: &Ctx<'_>, name: &str, commands: &[&str], seconds: u64) -> Result<String, Error> {
        let mut args = vec!["-f", "raw"];
        for command in commands {
            args.extend(["-c", command]);
        }
        args.push(&self.url);
        let text = c.tool(name, "qemu-io", &args, seconds)?;
        if text.contains("failed") || text.contains("error") {
            return Err(format!("qemu-io: {text}").into());
        }
        Ok(text)
    }
}

/// Bytes that are not the same anywhere.
pub(super) fn random_file(path: &Path, size: usize, seed: u64) -> Result<Vec<u8>, Error> {
    let mut data = vec![0u8; size];
    let mut x = seed | 1;
    for word in data.chunks_mut(8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        word.copy_from_slice(&x.to_le_bytes()[..word.len()]);
    }
    fs::write(path, &data)?;
    Ok(data)
}

/// Our RNBD client uses the kernel's server. With always_invalidate=Y one lost packet may end the server's sending for ever: if
/// its log says that this happened, it gets a second chance, in a guest that is booted again.
pub(super) fn our_client(c: &mut Ctx<'_>, ip: Ip, device: &'static str, invalidate: bool) -> Result<String, Error> {
    c.guest()?.run("dmesg -C", 30)?;
    let first = our_client_once(c, ip, device, invalidate);
    match first {
        Err(_) if invalidate && repeated_registration(c)? => {
            c.guest()?.reboot()?;
            let again = our_client_once(c, ip, device, invalidate)?;
            Ok(format!(
                "{again}; at the second try: in the first the kernel repeated a registration and sent nothing any more"
            ))
        }
        other => other,
    }
}

/// Whether the kernel's log says that it repeated a fast registration that was done (`specs/kernel.md`).
pub(super) fn repeated_registration(c: &mut Ctx<'_>) -> Result<bool, Error> {
    Ok(c.guest()?.try_run("dmesg | grep 'rxe_reg_fast_mr.*not free'", 30)?.0 == 0)
}

fn our_client_once(c: &mut Ctx<'_>, ip: Ip, device: &'static str, invalidate: bool) -> Result<String, Error> {
    server_up(c, invalidate)?;
    // The RAM disk of 6.1 knows no discard: what is there stays. A loop device punches a hole.
    let punches = device.starts_with("loop") || c.kernel()? > Kernel::V6_1;
    let result = our_client_work(c, ip, device, punches);
    let result = result.map_err(|e| {
        format!(
            "{e}\ndmesg:\n{}",
            c.guest().map_or_else(|e| e.to_string(), |g| g.dmesg())
        )
    });
    server_down(c)?;
    Ok(result?)
}

fn our_client_work(c: &Ctx<'_>, ip: Ip, device: &str, punches: bool) -> Result<String, Error> {
    let map = Mapping::start(c, ip, device, Duration::ZERO)?;
    work_on(c, map, punches, |size| checksum_in_guest(c, device, size))
}

/// Writes, reads, flushes, discards and zeroes by a mapping of ours, and ends it. `checksum` is that of the device's first bytes where
/// it is; `punches`: what was discarded reads as zeroes.
pub(super) fn work_on(
    c: &Ctx<'_>,
    map: Mapping,
    punches: bool,
    checksum: impl FnOnce(usize) -> Result<String, Error>,
) -> Result<String, Error> {
    // Lost packets cost the kernel seconds each.
    let size = if c.lossy { 512 << 10 } else { 12 << 20 };
    let (a, b) = (c.dir.join("a.img"), c.dir.join("b.img"));
    let data = random_file(&a, size, 88_172_645_463_325_252)?;
    let from = a.display().to_string();
    c.tool(
        "write",
        "qemu-img",
        &["convert", "-n", "-f", "raw", "-O", "raw", &from, &map.url],
        600,
    )?;
    map.io(c, "flush", &["flush"], 60)?;
    let (here, there) = (checksum_here(c, &from)?, checksum(size)?);
    if here != there {
        return Err(format!("written were {size} bytes of MD5 {here}, the device has {there}").into());
    }
    let out = b.display().to_string();
    if c.lossy {
        let (url, count) = (format!("if={}", map.url), format!("count={}", size / 4096));
        c.tool(
            "read",
            "qemu-img",
            &["dd", "-O", "raw", &url, &format!("of={out}"), "bs=4096", &count],
            600,
        )?;
    } else {
        c.tool(
            "read",
            "qemu-img",
            &["convert", "-f", "raw", "-O", "raw", &map.url, &out],
            600,
        )?;
    }
    if fs::read(&b)?.get(..size) != Some(&data[..]) {
        return Err("what was read back differs".into());
    }
    let discarded = if punches {
        "read -P 0 41M 64k"
    } else {
        "read -P 0x33 41M 64k"
    };
    let io = [
        "write -P 0x5a 40M 64k",
        "write -P 0x33 41M 128k",
        "flush",
        "read -P 0x5a 40M 64k",
        "discard 41M 64k",
        discarded,
        "read -P 0x33 42048k 64k",
        "write -z 40M 64k",
        "read -P 0 40M 64k",
    ];
    map.io(c, "qemu-io", &io, 300)?;
    map.stop()?;
    for file in [a, b] {
        fs::remove_file(file)?;
    }
    Ok(format!(
        "{size} bytes written, equal where they are, read back equal, flush, discard, zeroes: passed"
    ))
}

pub(super) fn checksum_here(c: &Ctx<'_>, file: &str) -> Result<String, Error> {
    let text = c.tool("md5sum", "md5sum", &[file], 60)?;
    Ok(text.split_whitespace().next().unwrap_or_default().to_owned())
}

/// Of the first bytes of a device of [`server_up`], past the guest's caches of it.
pub(super) fn checksum_in_guest(c: &Ctx<'_>, device: &str, size: usize) -> Result<String, Error> {
    let guest = c.guest.as_ref().ok_or("needs a guest of the lab")?;
    let source = match device {
        "loop0" => "dd if=/tmp/loop.img".to_owned(),
        _ => format!("dd if=/dev/{device} iflag=direct"),
    };
    let script = format!(
        "set -o pipefail; {source} bs=4k count={} status=none | md5sum",
        size / 4096
    );
    let text = guest.run(&script, 120)?;
    Ok(text.split_whitespace().next().unwrap_or_default().to_owned())
}

fn our_wrong_name(c: &mut Ctx<'_>) -> Result<String, Error> {
    server_up(c, true)?;
    let mut mapping = Mapping::spawn(c, Ip::V4, "no-such-device", &[])?;
    let refused = mapping.process.finish(Duration::from_secs(60)).is_err();
    let text = mapping.process.text();
    let again = our_client_work(c, Ip::V4, "ram0", c.kernel()? > Kernel::V6_1);
    server_down(c)?;
    if !refused || !text.contains("no-such-device") {
        return Err(format!("map said: {text}").into());
    }
    again.map(|text| format!("refused; then {text}"))
}

fn our_read_only(c: &mut Ctx<'_>) -> Result<String, Error> {
    server_up(c, true)?;
    let mut mapping = Mapping::spawn(c, Ip::V4, "ram1", &["--ro"])?;
    mapping.process.wait_for("mapped ", Duration::from_secs(60))?;
    c.tool(
        "read",
        "qemu-io",
        &["-r", "-f", "raw", "-c", "read 0 1M", &mapping.url],
        60,
    )?;
    let write = mapping.io(c, "write", &["write -P 1 0 4k"], 60);
    mapping.stop()?;
    server_down(c)?;
    if write.is_ok() {
        return Err("a write got through".into());
    }
    Ok("reads work, writes are refused: passed".to_owned())
}

/// Three devices on one session of ours: two are written at once, the third is read-only.
fn our_three_devices(c: &mut Ctx<'_>) -> Result<String, Error> {
    server_up(c, true)?;
    let result = our_three_devices_work(c);
    server_down(c)?;
    result
}

fn our_three_devices_work(c: &Ctx<'_>) -> Result<String, Error> {
    const SIZE: usize = 8 << 20;
    let more = [
        "--json",
        "--device",
        "newroot/dev/loop0",
        "--device",
        "newroot/dev/ram1,ro",
    ];
    let mut mapping = Mapping::spawn(c, Ip::V4, "ram0", &more)?;
    mapping.wait_more("mapped", 2, Duration::from_secs(60))?;
    let mapped = mapping.events("mapped");
    let urls: Vec<_> = mapped.iter().filter_map(|event| event["uri"].as_str()).collect();
    let [ram0, loop0, ram1] = urls[..] else {
        return Err(format!("not three devices: {mapped:?}").into());
    };
    let listed = c.tool("list", "nbdinfo", &["--list", &mapping.url], 60)?;
    for device in ["ram0", "loop0", "ram1"] {
        if !listed.contains(&format!("newroot/dev/{device}")) {
            return Err(format!("{device} is not listed: {listed}").into());
        }
    }
    let files = ["a.img", "b.img"].map(|name| c.dir.join(name));
    for (seed, file) in files.iter().enumerate() {
        random_file(file, SIZE, seed as u64 + 1000)?;
    }
    let [a, b] = files.each_ref().map(|file| file.display().to_string());
    let copy = |from: &str, to: &str| format!("qemu-img convert -n -f raw -O raw '{from}' '{to}'");
    let script = format!("{} & first=$!; {} && wait $first", copy(&a, ram0), copy(&b, loop0));
    c.tool("write", "bash", &["-c", &script], 600)?;
    c.tool("read", "qemu-io", &["-r", "-f", "raw", "-c", "read 0 1M", ram1], 60)?;
    let refused = c.tool("refused", "qemu-io", &["-f", "raw", "-c", "write 0 4k", ram1], 60);
    let said = refused.err().map(|e| e.to_string()).unwrap_or_default();
    if !said.contains("Permission denied") {
        return Err(format!("a write to the device that is read-only: {said}").into());
    }
    // At the end each is flushed.
    mapping.stop()?;
    for (device, file) in [("ram0", &a), ("loop0", &b)] {
        let (here, there) = (checksum_here(c, file)?, checksum_in_guest(c, device, SIZE)?);
        if here != there {
            return Err(format!("written to {device} was MD5 {here}, it has {there}").into());
        }
    }
    for file in files {
        fs::remove_file(file)?;
    }
    Ok(format!(
        "two devices of three written at once, {SIZE} bytes each, equal in the kernel, the third read-only: passed"
    ))
}
