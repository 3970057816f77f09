//! A virtual machine with the kernel peer in it.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use crate::{
    Error,
    lab::{Proc, check_stop},
};

/// What a guest is booted with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Shape {
    pub(crate) cpus: u8,
    pub(crate) mtu: u32,
}

/// A running guest.
pub(crate) struct Guest {
    pub(crate) id: u8,
    pub(crate) shape: Shape,
    console: Proc,
}

impl Guest {
    /// Boots guest `id` (its address is `10.77.0.id`) and waits until it takes scripts.
    pub(crate) fn boot(
        id: u8,
        shape: Shape,
        lab: &Path,
        script: &Path,
        daemon: &Path,
        logs: &Path,
    ) -> Result<Self, Error> {
        let kernel = std::fs::read_to_string(lab.join("kernel-version"))?;
        let kernel = kernel.trim();
        let append = format!(
            "console=ttyS0 panic=-1 quiet mitigations=off guest={} gid={id} gmtu={} daemon={}",
            script.display(),
            shape.mtu,
            daemon.display()
        );
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args([
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "max",
            "-m",
            "1536",
            "-nographic",
            "-no-reboot",
        ])
        .args(["-smp", &shape.cpus.to_string()])
        .arg("-kernel")
        .arg(lab.join("kernel/boot").join(format!("vmlinuz-{kernel}")))
        .arg("-initrd")
        .arg(lab.join("initramfs.gz"))
        .args(["-append", &append])
        .args([
            "-virtfs",
            "local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap",
        ])
        .args(["-netdev", &format!("tap,id=n0,ifname=tap{id},script=no,downscript=no,sndbuf=0")])
        .args([
            "-device",
            &format!("virtio-net-pci,netdev=n0,mac=52:54:00:00:00:{id:02x}"),
        ]);
        let console = Proc::spawn(&format!("console-{id}-{}-{}", shape.cpus, shape.mtu), &mut qemu, logs)?;
        let mut guest = Self { id, shape, console };
        guest.wait_up()?;
        Ok(guest)
    }

    fn daemon_addr(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::new(10, 77, 0, self.id), 7001))
    }

    fn wait_up(&mut self) -> Result<(), Error> {
        let until = Instant::now() + Duration::from_secs(90);
        while TcpStream::connect_timeout(&self.daemon_addr(), Duration::from_secs(1)).is_err() {
            check_stop()?;
            if !self.console.running() || Instant::now() > until {
                return Err(format!("guest {} does not come up:\n{}", self.id, self.console.text()).into());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Runs a bash script in the guest and returns its output; an error unless it exits with 0.
    pub(crate) fn run(&self, script: &str, seconds: u32) -> Result<String, Error> {
        let (code, text) = self.try_run(script, seconds)?;
        match code {
            0 => Ok(text),
            124 => Err(format!("guest script still ran after {seconds} s:\n{script}\n{text}").into()),
            _ => Err(format!("guest script exited with {code}:\n{script}\n{text}").into()),
        }
    }

    /// Runs a bash script in the guest and returns exit code and output.
    pub(crate) fn try_run(&self, script: &str, seconds: u32) -> Result<(i32, String), Error> {
        let mut stream = TcpStream::connect_timeout(&self.daemon_addr(), Duration::from_secs(10))?;
        stream.set_read_timeout(Some(Duration::from_millis(500)))?;
        stream.write_all(format!("run {seconds} {}\n{script}", script.len()).as_bytes())?;
        let until = Instant::now() + Duration::from_secs(u64::from(seconds) + 30);
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
                }
                ["exit", code] => return Ok((code.parse()?, String::from_utf8_lossy(&text).into_owned())),
                _ => return Err(format!("guest {} answered {line:?}:\n{}", self.id, self.console.text()).into()),
            }
        }
    }

    /// Drops, duplicates … packets in both directions; `None` stops that.
    pub(crate) fn netem(&self, what: Option<&str>) -> Result<(), Error> {
        let clear = "tc qdisc del dev eth0 root; tc qdisc del dev eth0 ingress; ip link del ifb0; true";
        let set = |what: &str| {
            format!(
                "{clear}\nset -e\nip link add ifb0 type ifb; ip link set ifb0 up mtu $(cat /sys/class/net/eth0/mtu)\n\
                 tc qdisc add dev eth0 handle ffff: ingress\n\
                 tc filter add dev eth0 parent ffff: protocol all matchall action mirred egress redirect dev ifb0\n\
                 tc qdisc add dev eth0 root netem limit 100000 {what}\n\
                 tc qdisc add dev ifb0 root netem limit 100000 {what}\n"
            )
        };
        self.run(&what.map_or_else(|| clear.to_owned(), set), 30).map(drop)
    }

    /// What the guest's console said so far.
    pub(crate) fn console(&self) -> String {
        self.console.text()
    }

    /// Pulls the plug.
    pub(crate) fn kill(&mut self) {
        self.console.kill();
    }
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
