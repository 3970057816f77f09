//! The scenarios, as data and the functions that run them.

use std::{fs, path::PathBuf, process::Command, time::Duration};

use crate::{
    Error,
    guest::{Guest, Shape},
    lab::{HOST_V4, HOST_V6, Proc},
};

/// What a scenario works with.
pub(crate) struct Ctx<'a> {
    pub(crate) guest: &'a Guest,
    /// Logs, captures and images of this scenario.
    pub(crate) dir: PathBuf,
    pub(crate) lab: PathBuf,
    pub(crate) ferroce: PathBuf,
    pub(crate) peer: PathBuf,
    pub(crate) lossy: bool,
}

/// A scenario.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// Part of the short set.
    pub(crate) ci: bool,
    pub(crate) shape: Shape,
    /// Arguments of netem, both ways.
    pub(crate) netem: Option<&'static str>,
    pub(crate) run: fn(&mut Ctx<'_>) -> Result<String, Error>,
}

const SMALL: Shape = Shape { cpus: 1, mtu: 1500 };
const JUMBO: Shape = Shape { cpus: 4, mtu: 9000 };
const LOSS: Option<&str> = Some("loss 1%");

const fn row(
    name: &'static str,
    ci: bool,
    shape: Shape,
    netem: Option<&'static str>,
    run: fn(&mut Ctx<'_>) -> Result<String, Error>,
) -> Scenario {
    Scenario {
        name,
        ci,
        shape,
        netem,
        run,
    }
}

/// All scenarios; those of one guest shape stand together, so that a guest is booted once.
pub(crate) const ALL: &[Scenario] = &[
    row("ops-v4-1024", true, SMALL, None, |c| ops(c, HOST_V4)),
    row("ops-v6-1024", true, SMALL, None, |c| ops(c, HOST_V6)),
    row("ops-v4-1024-loss", true, SMALL, LOSS, |c| ops(c, HOST_V4)),
    row("pingpong-our-server", true, SMALL, None, pingpong_server),
    row("pingpong-our-client", true, SMALL, None, pingpong_client),
    row("pingpong-our-server-loss", false, SMALL, LOSS, pingpong_server),
    row("pingpong-our-client-loss", false, SMALL, LOSS, pingpong_client),
    row("rping-our-server", true, SMALL, None, |c| rping_server(c, HOST_V4)),
    row("rping-our-client", true, SMALL, None, |c| rping_client(c, HOST_V4)),
    row("rping-our-server-v6", false, SMALL, None, |c| rping_server(c, HOST_V6)),
    row("rping-our-client-v6", false, SMALL, None, |c| rping_client(c, HOST_V6)),
    row("rping-our-server-loss", false, SMALL, LOSS, |c| {
        rping_server(c, HOST_V4)
    }),
    row("rping-our-client-loss", false, SMALL, LOSS, |c| {
        rping_client(c, HOST_V4)
    }),
    row("rnbd-kernel-client-inv-on", true, SMALL, None, |c| {
        rnbd_kernel_client(c, "on")
    }),
    row("rnbd-kernel-client-inv-off", false, SMALL, None, |c| {
        rnbd_kernel_client(c, "off")
    }),
    row("rnbd-kernel-server-inv-on", true, SMALL, None, |c| {
        rnbd_kernel_server(c, "Y")
    }),
    row("rnbd-kernel-server-inv-off", false, SMALL, None, |c| {
        rnbd_kernel_server(c, "N")
    }),
    row("ops-v4-4096", true, JUMBO, None, |c| ops(c, HOST_V4)),
    row("ops-v6-4096", false, JUMBO, None, |c| ops(c, HOST_V6)),
    row("rnbd-kernel-client-4cpu", true, JUMBO, None, |c| {
        rnbd_kernel_client(c, "on")
    }),
    row("rnbd-kernel-client-4cpu-inv-off", false, JUMBO, None, |c| {
        rnbd_kernel_client(c, "off")
    }),
    row("rnbd-kernel-server-4cpu", false, JUMBO, None, |c| {
        rnbd_kernel_server(c, "Y")
    }),
];

fn family(host: &str, guest: u8) -> String {
    if host.contains(':') {
        format!("fd77::{guest}")
    } else {
        format!("10.77.0.{guest}")
    }
}

impl Ctx<'_> {
    fn mtu(&self) -> &'static str {
        if self.guest.shape.mtu > 4200 { "4096" } else { "1024" }
    }

    fn peer(&self, host: &str, name: &str, args: &[&str]) -> Result<Proc, Error> {
        Proc::spawn(
            name,
            Command::new(&self.peer).args(["--addr", host]).args(args),
            &self.dir,
        )
    }

    fn ferroce(&self, name: &str, args: &[&str]) -> Result<Proc, Error> {
        Proc::spawn(name, Command::new(&self.ferroce).args(args), &self.dir)
    }

    fn tool(&self, name: &str, program: &str, args: &[&str], seconds: u64) -> Result<String, Error> {
        Proc::spawn(name, Command::new(program).args(args), &self.dir)?.finish(Duration::from_secs(seconds))
    }
}

/// The lines of a program's output that a report keeps.
fn key_lines(text: &str) -> String {
    text.lines()
        .filter(|l| l.contains("passed") || l.contains("iters") || l.contains("usec"))
        .collect::<Vec<_>>()
        .join("; ")
}

fn ops(c: &mut Ctx<'_>, host: &str) -> Result<String, Error> {
    let guest = family(host, c.guest.id);
    let agent = c.lab.join("verbs-agent");
    c.guest
        .run(&format!("{} -g {guest} >/tmp/agent.log 2>&1 &", agent.display()), 10)?;
    let at = if host.contains(':') {
        format!("[{guest}]:18600")
    } else {
        format!("{guest}:18600")
    };
    let largest = if c.lossy { "65536" } else { "8388608" };
    let args = ["ops", "--agent", &at, "--mtu", c.mtu(), "--largest", largest];
    let out = c.peer(host, "ops", &args)?.finish(Duration::from_secs(400));
    c.guest.try_run("pkill verbs-agent; cat /tmp/agent.log", 10)?;
    Ok(key_lines(&out?))
}

const PINGPONG: &str = "ibv_rc_pingpong -d rxe0 -g $(for i in 0 1 2 3 4 5; do \
    grep -q '0000:0000:0000:0000:0000:ffff:0a4d' /sys/class/infiniband/rxe0/ports/1/gids/$i && echo $i && break; done)";

fn pingpong_server(c: &mut Ctx<'_>) -> Result<String, Error> {
    let mut ours = c.peer(HOST_V4, "pingpong", &["pingpong", "--size", "20000", "--iters", "300"])?;
    let theirs = c
        .guest
        .run(&format!("sleep 1; {PINGPONG} -s 20000 -n 300 {HOST_V4}"), 150)?;
    let ours = ours.finish(Duration::from_secs(60))?;
    Ok(format!("{}; kernel: {}", key_lines(&ours), key_lines(&theirs)))
}

fn pingpong_client(c: &mut Ctx<'_>) -> Result<String, Error> {
    c.guest.run(
        &format!("({PINGPONG} -s 20000 -n 300; echo rc $?) >/tmp/pp.log 2>&1 &"),
        10,
    )?;
    let host = family(HOST_V4, c.guest.id);
    let args = ["pingpong", "--connect", &host, "--size", "20000", "--iters", "300"];
    let ours = c.peer(HOST_V4, "pingpong", &args)?.finish(Duration::from_secs(150))?;
    let theirs = c.guest.run("for i in $(seq 50); do grep -q '^rc' /tmp/pp.log && break; sleep 0.2; done; cat /tmp/pp.log; grep -q '^rc 0' /tmp/pp.log", 60)?;
    Ok(format!("{}; kernel: {}", key_lines(&ours), key_lines(&theirs)))
}

fn rping_server(c: &mut Ctx<'_>, host: &str) -> Result<String, Error> {
    let mut ours = c.peer(host, "rping", &["rping", "--size", "5000"])?;
    let theirs = c.guest.run(
        &format!("sleep 1; rping -c -V -v -C 20 -S 5000 -a {host} | cut -c1-60"),
        120,
    )?;
    if theirs.lines().filter(|l| l.contains("ping data")).count() != 20 {
        return Err(format!("rping -c printed:\n{theirs}").into());
    }
    let ours = ours.finish(Duration::from_secs(60))?;
    Ok(format!("{}; kernel: 20 pings validated", key_lines(&ours)))
}

fn rping_client(c: &mut Ctx<'_>, host: &str) -> Result<String, Error> {
    let guest = family(host, c.guest.id);
    c.guest.run(
        &format!("(rping -s -V -v -C 20 -S 5000 -a {guest}; echo rc $?) >/tmp/rp.log 2>&1 &"),
        10,
    )?;
    let args = ["rping", "--connect", &guest, "--size", "5000", "--iters", "20"];
    let ours = c.peer(host, "rping", &args)?.finish(Duration::from_secs(150))?;
    let theirs = c.guest.run(
        "for i in $(seq 50); do grep -q '^rc' /tmp/rp.log && break; sleep 0.2; done; cut -c1-60 /tmp/rp.log",
        60,
    )?;
    if theirs.lines().filter(|l| l.contains("ping data")).count() != 20 {
        return Err(format!("rping -s printed:\n{theirs}").into());
    }
    Ok(format!("{}; kernel: 20 pings seen", key_lines(&ours)))
}

const INSMOD_CLIENT: &str =
    "set -e\nfor m in rtrs/rtrs-core rtrs/rtrs-client rnbd/rnbd-client; do insmod $LAB/$m.ko; done\n";
const RMMOD_CLIENT: &str = "rmmod rnbd_client; rmmod rtrs_client; rmmod rtrs_core; true";

/// The kernel's RNBD client maps our server: mkfs, copy, fsck, compare.
fn rnbd_kernel_client(c: &mut Ctx<'_>, invalidate: &str) -> Result<String, Error> {
    let image = c.dir.join("disk.img");
    fs::File::create(&image)?.set_len(96 << 20)?;
    let export = format!("disk={}", image.display());
    let mut server = c.ferroce(
        "serve",
        &[
            "serve",
            "--listen",
            HOST_V4,
            "--export",
            &export,
            "--always-invalidate",
            invalidate,
        ],
    )?;
    server.wait_for("listening", Duration::from_secs(10))?;
    let lab = c.lab.display();
    let script = format!(
        "LAB={lab}\n{INSMOD_CLIENT}\
         echo 'sessname=s1 path=ip:{HOST_V4} device_path=disk' > /sys/class/rnbd-client/ctl/map_device\n\
         for i in $(seq 50); do [ -b /dev/rnbd0 ] && break; sleep 0.1; done\n\
         ls /sys/class/rtrs-client/s1/paths; blockdev --getsize64 /dev/rnbd0\n\
         mkfs.ext4 -q /dev/rnbd0; mkdir -p /mnt/r; mount -t ext4 /dev/rnbd0 /mnt/r\n\
         cp -a /usr/share/perl /usr/include /mnt/r/; sync; umount /mnt/r\n\
         fsck.ext4 -fn /dev/rnbd0\n\
         echo 3 > /proc/sys/vm/drop_caches; mount -t ext4 /dev/rnbd0 /mnt/r\n\
         diff -r --no-dereference /usr/include /mnt/r/include && echo 'trees equal: passed'; umount /mnt/r\n\
         echo normal > /sys/block/rnbd0/rnbd/unmap_device\n"
    );
    let out = c.guest.run(&script, 300);
    let clean = c.guest.try_run(RMMOD_CLIENT, 60);
    let dmesg = c.guest.try_run("dmesg | tail -30", 10)?.1;
    let out = out.map_err(|e| format!("{e}\ndmesg:\n{dmesg}\nserver:\n{}", server.text()))?;
    clean?;
    server.interrupt();
    server.finish(Duration::from_secs(10))?;
    let ours = c.tool("e2fsck", "e2fsck", &["-fn", &image.display().to_string()], 60)?;
    let last = ours.lines().last().unwrap_or_default();
    fs::remove_file(&image)?;
    Ok(format!("{}; image on the server: {last}", key_lines(&out)))
}

/// Our RNBD client uses the kernel's server.
fn rnbd_kernel_server(c: &mut Ctx<'_>, invalidate: &str) -> Result<String, Error> {
    let lab = c.lab.display();
    let up = format!(
        "set -e; modprobe -q brd rd_size=65536 rd_nr=2 || true; L={lab}; insmod $L/rtrs/rtrs-core.ko; \
         insmod $L/rtrs/rtrs-server.ko always_invalidate={invalidate}; insmod $L/rnbd/rnbd-server.ko; ls /dev/ram0"
    );
    let down = "rmmod rnbd_server; rmmod rtrs_server; rmmod rtrs_core; true";
    c.guest.run(&up, 30)?;
    let result = rnbd_our_client(c);
    let dmesg = c.guest.try_run("dmesg | tail -30", 10)?.1;
    c.guest.try_run(down, 60)?;
    result.map_err(|e| format!("{e}\ndmesg:\n{dmesg}").into())
}

fn rnbd_our_client(c: &mut Ctx<'_>) -> Result<String, Error> {
    let socket = c.dir.join("nbd.sock");
    let path = format!("{HOST_V4},10.77.0.{}", c.guest.id);
    let nbd = socket.display().to_string();
    let args = [
        "map",
        "--session",
        "ours",
        "--path",
        &path,
        "--device",
        "newroot/dev/ram0",
        "--nbd",
        &nbd,
    ];
    let mut map = c.ferroce("map", &args)?;
    map.wait_for("ready", Duration::from_secs(30))?;
    let size = 16 << 20;
    let (a, b) = (c.dir.join("a.img"), c.dir.join("b.img"));
    let mut data = vec![0u8; size];
    let mut x = 88_172_645_463_325_252u64;
    for word in data.chunks_exact_mut(8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        word.copy_from_slice(&x.to_le_bytes());
    }
    fs::write(&a, &data)?;
    let url = format!("nbd+unix:///?socket={nbd}");
    let io = format!(
        "write -P 0x5a 40M 64k\nflush\nread -P 0x5a 40M 64k\ndiscard 41M 64k\nwrite -z 40M 64k\nread -P 0 40M 64k\n"
    );
    let (a_s, b_s) = (a.display().to_string(), b.display().to_string());
    c.tool(
        "dd-in",
        "qemu-io",
        &[
            "-f",
            "raw",
            "-c",
            &format!("write -s {a_s} 0 {size}"),
            "-c",
            "flush",
            &url,
        ],
        120,
    )?;
    c.tool(
        "qemu-img-out",
        "qemu-img",
        &["convert", "-f", "raw", "-O", "raw", &url, &b_s],
        120,
    )?;
    let mut qemu_io = vec!["-f", "raw"];
    for command in io.lines() {
        qemu_io.extend(["-c", command]);
    }
    qemu_io.push(&url);
    let text = c.tool("qemu-io", "qemu-io", &qemu_io, 60)?;
    if text.contains("failed") || text.contains("error") {
        return Err(format!("qemu-io: {text}").into());
    }
    if fs::read(&b)?.get(..size) != Some(&data[..]) {
        return Err("what was read back differs".into());
    }
    map.interrupt();
    map.finish(Duration::from_secs(10))?;
    fs::remove_file(&a)?;
    fs::remove_file(&b)?;
    Ok(format!(
        "{size} bytes written and read back equal, flush, discard, zeroes: passed"
    ))
}
