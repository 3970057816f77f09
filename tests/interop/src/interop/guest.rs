//! A virtual machine with the kernel peer in it.

use std::{
    fs::File,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpStream},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use clap::ValueEnum;

use crate::{
    Error,
    far::{Far, Ip},
    lab::{NETS, Places, Proc, check_stop, run_quiet, tap},
};

/// A series of kernels that Debian has.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Debug)]
pub(crate) enum Kernel {
    #[value(name = "6.1")]
    V6_1,
    #[value(name = "6.12")]
    V6_12,
    #[value(name = "7.3")]
    V7_3,
}

impl Kernel {
    pub(crate) const ALL: [Self; 3] = [Self::V6_1, Self::V6_12, Self::V7_3];

    pub(crate) const fn series(self) -> &'static str {
        match self {
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
            Self::V7_3 => "7.3",
        }
    }
}

/// What a guest is booted with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Shape {
    pub(crate) cpus: u8,
    pub(crate) mtu: u32,
    pub(crate) kernel: Kernel,
}

/// How the error about a script begins that did not come to its end.
pub(crate) const STILL_RUNS: &str = "guest script still ran";

/// A running guest.
pub(crate) struct Guest {
    pub(crate) shape: Shape,
    pub(crate) far: Far,
    /// The folder of the scenario that it serves: `guest-N.log` there gets its scripts and what they print.
    pub(crate) logs: Option<PathBuf>,
    id: u8,
    places: Places,
    console: Proc,
    monitor: PathBuf,
}

/// How long a boot may take (8 s on an idle machine).
const BOOT: Duration = Duration::from_secs(240);

impl Guest {
    /// Boots guest `id` (its addresses are `10.77.0.id` and `fd77::id`, on the second network 78) and waits until it takes scripts.
    pub(crate) fn boot(id: u8, shape: Shape, places: &Places) -> Result<Self, Error> {
        Self::boot_with(id, shape, places, &[])
    }

    /// The same with further options of qemu's.
    pub(crate) fn boot_with(id: u8, shape: Shape, places: &Places, more: &[String]) -> Result<Self, Error> {
        let monitor = places.run.join(format!("monitor-{id}"));
        let guest = Self {
            shape,
            far: Far {
                device: None,
                v4: Some(addr(0, id, Ip::V4)),
                v6: Some(addr(0, id, Ip::V6)),
                port: 7001,
                peer: places.peer.clone(),
            },
            logs: None,
            id,
            places: places.clone(),
            console: start(id, shape, places, &monitor, more)?,
            monitor,
        };
        guest.up()
    }

    fn up(mut self) -> Result<Self, Error> {
        self.wait_up()?;
        Ok(self)
    }

    /// Boots the guest again after [`Guest::kill`].
    pub(crate) fn reboot(&mut self) -> Result<(), Error> {
        self.reboot_with(&[])
    }

    /// The same with further options of qemu's.
    pub(crate) fn reboot_with(&mut self, more: &[String]) -> Result<(), Error> {
        self.kill();
        self.console = start(self.id, self.shape, &self.places, &self.monitor, more)?;
        self.wait_up()
    }

    /// Bytes of its memory, as qemu is told.
    pub(crate) const MEMORY: &str = "1536M";

    fn wait_up(&mut self) -> Result<(), Error> {
        let until = Instant::now() + BOOT;
        while !self.far.is_up() {
            check_stop()?;
            if !self.console.running() || Instant::now() > until {
                return Err(format!("guest {} does not come up:\n{}", self.id, self.console.text()).into());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// The tap behind one of its network cards.
    pub(crate) fn tap(&self, net: u8) -> String {
        tap(net, self.id)
    }

    /// Its address on a network.
    pub(crate) fn addr(&self, net: u8, ip: Ip) -> IpAddr {
        addr(net, self.id, ip)
    }

    /// Runs a bash script in the guest and returns its output; an error unless it exits with 0.
    pub(crate) fn run(&self, script: &str, seconds: u32) -> Result<String, Error> {
        let (code, text) = self.try_run(script, seconds)?;
        match code {
            0 => Ok(text),
            124 => Err(format!("{STILL_RUNS} after {seconds} s:\n{text}\nthe script:\n{script}").into()),
            _ => Err(format!("guest script exited with {code}:\n{text}\nthe script:\n{script}").into()),
        }
    }

    /// Runs a bash script in the guest and returns exit code and output.
    pub(crate) fn try_run(&self, script: &str, seconds: u32) -> Result<(i32, String), Error> {
        let mut log = Log::open(self.logs.as_deref(), self.id)?;
        log.add(format!("=== script, {seconds} s at most\n{}\n--- prints\n", script.trim_end()).as_bytes())?;
        let result = self.exchange(script, seconds, &mut log);
        let end = match &result {
            Ok((code, _)) => format!("\n--- exit code {code}\n"),
            Err(e) => format!("\n--- no exit code: {e}\n"),
        };
        log.add(end.as_bytes())?;
        result
    }

    /// Gives the guest a script and takes what it prints.
    fn exchange(&self, script: &str, seconds: u32, log: &mut Log) -> Result<(i32, String), Error> {
        let mut stream = TcpStream::connect_timeout(&self.far.daemon()?, Duration::from_secs(20))?;
        stream.set_read_timeout(Some(Duration::from_millis(500)))?;
        stream.write_all(format!("run {seconds} {}\n{script}", script.len()).as_bytes())?;
        let until = Instant::now() + Duration::from_secs(u64::from(seconds) + 60);
        let mut from = BufReader::new(Patient { stream, until });
        let mut text = Vec::new();
        loop {
            let mut line = String::new();
            from.read_line(&mut line)?;
            match line.split_whitespace().collect::<Vec<_>>()[..] {
                ["out", n] => {
                    let at = text.len();
                    text.resize(at + n.parse::<usize>()?, 0);
                    from.read_exact(&mut text[at..])?;
                    log.add(&text[at..])?;
                }
                ["exit", code] => return Ok((code.parse()?, String::from_utf8_lossy(&text).into_owned())),
                _ => return Err(format!("guest {} answered {line:?}:\n{}", self.id, self.console.text()).into()),
            }
        }
    }

    /// The end of the kernel's log.
    pub(crate) fn dmesg(&self) -> String {
        self.try_run("dmesg | tail -30", 30)
            .map_or_else(|e| e.to_string(), |(_, text)| text)
    }

    /// Drops, duplicates … packets of the first network in both directions; `None` stops that.
    pub(crate) fn netem(&self, what: Option<&str>) -> Result<(), Error> {
        self.netem_on(0, what)
    }

    /// The same on either network.
    pub(crate) fn netem_on(&self, net: u8, what: Option<&str>) -> Result<(), Error> {
        let (eth, ifb) = (format!("eth{net}"), format!("ifb{net}"));
        let clear = format!("tc qdisc del dev {eth} root; tc qdisc del dev {eth} ingress; ip link del {ifb}; true");
        let set = |what: &str| {
            format!(
                "{clear}\nset -e\nip link add {ifb} type ifb; ip link set {ifb} up mtu $(cat /sys/class/net/{eth}/mtu)\n\
                 tc qdisc add dev {eth} handle ffff: ingress\n\
                 tc filter add dev {eth} parent ffff: protocol all matchall action mirred egress redirect dev {ifb}\n\
                 tc qdisc add dev {eth} root netem limit 100000 {what}\n\
                 tc qdisc add dev {ifb} root netem limit 100000 {what}\n"
            )
        };
        self.run(&what.map_or_else(|| clear.clone(), set), 60).map(drop)
    }

    /// Takes the guest's port of the first bridge out of service, or back in. Nobody's carrier changes.
    pub(crate) fn set_port(&self, up: bool) -> Result<(), Error> {
        self.set_port_on(0, up)
    }

    /// The same on either network.
    pub(crate) fn set_port_on(&self, net: u8, up: bool) -> Result<(), Error> {
        let state = if up { "forwarding" } else { "disabled" };
        run_quiet("bridge", &["link", "set", "dev", &self.tap(net), "state", state])
    }

    /// Pulls the cable of the first network, or plugs it in again: the guest's card loses its carrier.
    pub(crate) fn set_link(&self, up: bool) -> Result<(), Error> {
        self.set_link_on(0, up)
    }

    /// The same on either network.
    pub(crate) fn set_link_on(&self, net: u8, up: bool) -> Result<(), Error> {
        let mut monitor = UnixStream::connect(&self.monitor)?;
        monitor.set_read_timeout(Some(Duration::from_secs(20)))?;
        let state = if up { "on" } else { "off" };
        // The network card, not the backend: the guest sees the carrier go.
        monitor.write_all(format!("set_link card{net} {state}\n").as_bytes())?;
        let mut seen = Vec::new();
        let mut buf = [0; 512];
        // The command is done when its prompt is followed by the next one.
        while String::from_utf8_lossy(&seen).matches("(qemu)").count() < 2 {
            match monitor.read(&mut buf)? {
                0 => return Err("qemu's monitor closed".into()),
                n => seen.extend_from_slice(&buf[..n]),
            }
        }
        Ok(())
    }

    /// What the guest's console said so far.
    pub(crate) fn console(&self) -> String {
        self.console.text()
    }

    /// Whether it takes scripts.
    pub(crate) fn answers(&self) -> bool {
        self.try_run("true", 20).is_ok()
    }

    /// What its kernel has said on the console, if something is wrong with it.
    pub(crate) fn complaint(&self) -> Option<String> {
        complaint(&self.console()).map(str::to_owned)
    }

    /// Pulls the plug.
    pub(crate) fn kill(&mut self) {
        self.console.kill();
        let _ = std::fs::remove_file(&self.monitor);
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What a kernel says when something is wrong with it.
fn complaint(console: &str) -> Option<&str> {
    const WORDS: [&str; 7] = [
        "Kernel panic",
        "BUG:",
        "Oops",
        "Call Trace",
        "WARNING:",
        "soft lockup",
        "blocked for more than",
    ];
    console
        .lines()
        .find(|line| WORDS.iter().any(|word| line.contains(word)))
}

fn addr(net: u8, guest: u8, ip: Ip) -> IpAddr {
    match ip {
        Ip::V4 => Ipv4Addr::new(10, 77 + net, 0, guest).into(),
        Ip::V6 => Ipv6Addr::new(0xfd77 + u16::from(net), 0, 0, 0, 0, 0, 0, guest.into()).into(),
    }
}

/// Where a guest's scripts and their output go.
struct Log(Option<File>);

impl Log {
    /// `guest-ID.log` in the folder, or nothing without one.
    fn open(folder: Option<&Path>, id: u8) -> Result<Self, Error> {
        let Some(folder) = folder else { return Ok(Self(None)) };
        let path = folder.join(format!("guest-{id}.log"));
        let open = File::options().create(true).append(true).open(&path);
        Ok(Self(Some(open.map_err(|e| format!("{}: {e}", path.display()))?)))
    }

    fn add(&mut self, text: &[u8]) -> std::io::Result<()> {
        self.0.as_mut().map_or(Ok(()), |file| file.write_all(text))
    }
}

fn start(id: u8, shape: Shape, places: &Places, monitor: &Path, more: &[String]) -> Result<Proc, Error> {
    let linux = places.linux(shape.kernel);
    let version = std::fs::read_to_string(linux.join("version"))?;
    let Shape { cpus, mtu, .. } = shape;
    // On a busy machine the timer may seem broken to a kernel that tests it, which then panics.
    let append =
        format!("console=ttyS0 panic=-1 quiet mitigations=off no_timer_check nr_cpus={cpus} gid={id} gmtu={mtu}");
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args([
        "-accel",
        "tcg,thread=multi",
        "-cpu",
        "max",
        "-m",
        Guest::MEMORY,
        "-no-reboot",
        "-display",
        "none",
    ])
    .args([
        "-serial",
        "stdio",
        "-smp",
        &format!("{cpus},maxcpus={}", max_cpus(cpus)),
    ])
    .args(["-monitor", &format!("unix:{},server=on,wait=off", monitor.display())])
    .arg("-kernel")
    .arg(linux.join("kernel/boot").join(format!("vmlinuz-{}", version.trim())))
    .arg("-initrd")
    .arg(linux.join("initramfs.gz"))
    .args(["-append", &append])
    .args(["-virtfs", &share(Path::new("/"), "root")])
    // The lab may be anywhere, also where the guest has a file system of its own.
    .args(["-virtfs", &share(&places.lab, "lab")]);
    for net in 0..NETS {
        let tap = tap(net, id);
        qemu.args([
            "-netdev",
            &format!("tap,id=n{net},ifname={tap},script=no,downscript=no,sndbuf=0"),
            "-device",
            &format!(
                "virtio-net-pci,id=card{net},netdev=n{net},mac=52:54:00:00:{net:02x}:{id:02x},{}",
                receive(shape.mtu)
            ),
        ]);
    }
    qemu.args(more);
    Proc::spawn(
        &format!("console-{id}-{}-{}-{}", shape.kernel.series(), shape.cpus, shape.mtu),
        &mut qemu,
        &places.logs,
    )
}

/// How many processors qemu could give the guest. For one that can have only one, it leaves the memory barriers out
/// (`CF_PARALLEL`; its commit c914d46d0a64 mends a part), though its own threads work the rings of the cards: a notification may be
/// lost, and the card stands still for ever.
fn max_cpus(cpus: u8) -> u8 {
    cpus.max(2)
}

/// How a card takes packets. With mergeable buffers qemu before 9.1 may wait for ever for a guest that has run out of them under
/// load (qemu's commit f937309fbdbb): the guest then hears nothing any more. Without offloads they are as small as packets.
fn receive(mtu: u32) -> &'static str {
    match mtu {
        ..=1500 => "mrg_rxbuf=off,guest_tso4=off,guest_tso6=off,guest_ecn=off,guest_ufo=off",
        _ => "mrg_rxbuf=off",
    }
}

/// A folder of ours that the guest may read. In qemu's options commas are doubled.
fn share(folder: &Path, tag: &str) -> String {
    let path = folder.display().to_string().replace(',', ",,");
    format!("local,path={path},mount_tag={tag},security_model=none,readonly=on,multidevs=remap")
}

/// A stream whose reads survive short timeouts, so that ctrl-C is noticed.
struct Patient {
    stream: TcpStream,
    until: Instant,
}

impl std::io::Read for Patient {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        loop {
            match self.stream.read(buf) {
                Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {
                    if check_stop().is_err() || Instant::now() > self.until {
                        return Err(e);
                    }
                }
                other => return other,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::complaint;

    #[test]
    fn a_kernel_in_trouble_is_told_from_a_silent_one() {
        assert_eq!(complaint("[    0.5] 8250: ttyS0\nlogin:"), None);
        let text = "[  9.1] eth0: up\n[ 10.2] BUG: kernel NULL pointer dereference, address: 0\n";
        assert_eq!(
            complaint(text),
            Some("[ 10.2] BUG: kernel NULL pointer dereference, address: 0")
        );
    }
}
