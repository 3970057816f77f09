//! 11: a virtual machine with disks of ours, whose server is reached over two networks.

use std::time::Duration;

use serde_json::Value;

use super::{
    super::{Ctx, Direction, Scenario, rnbd::Mapping},
    Cut,
    our_client::{paths, server_down, server_up},
};
use crate::{Error, far::Ip, guest::Guest, lab::check_stop};

pub(super) fn list() -> Vec<Scenario> {
    let disk = Scenario::new(11, "vm-disk-our-client", Direction::OursToKernel, |c| {
        server_up(c)?;
        let result = disk(c);
        let down = server_down(c);
        let result = result?;
        down.map(|()| result)
    });
    vec![disk.guests(2).nets(2).waits()]
}

/// The disk by vhost-user-blk, and the one by NBD, as the mapping calls them.
const DISK: &str = "newroot/dev/ram0";
const BESIDE: &str = "newroot/dev/ram1";

/// Disks by their serial numbers; a file system on one, with trees that come and go and are compared. `/tmp/rounds` has how often.
const WORK: &str = "\
    set -e; exec >/tmp/work.log 2>&1; D=/dev/$(disk \"$1\"); mkdir -p /mnt/v\n\
    mkfs.ext4 -q $D; mount -t ext4 $D /mnt/v; n=0\n\
    while [ ! -e /tmp/enough ]; do\n\
        cp -a /usr/include/linux /mnt/v/linux.$n; sync; echo 3 > /proc/sys/vm/drop_caches\n\
        diff -r --no-dereference /usr/include/linux /mnt/v/linux.$n\n\
        [ $n = 0 ] || rm -rf /mnt/v/linux.$((n - 1)); n=$((n + 1)); echo $n > /tmp/rounds\n\
    done\n\
    umount /mnt/v; fsck.ext4 -fn $D; echo 'trees equal: passed'\n";

/// The machine with its disks.
struct Machine<'a> {
    guest: &'a Guest,
}

impl Machine<'_> {
    /// The functions of all scripts.
    fn run(&self, script: &str, seconds: u32) -> Result<String, Error> {
        let functions =
            "disk() { for d in /sys/block/vd*; do [ \"$(cat $d/serial)\" = \"$1\" ] && basename $d; done; true; }\n";
        let text = format!("{functions}{script}");
        let ran = self.guest.run(&text, seconds);
        ran.map_err(|e| format!("{e}\ndmesg:\n{}", self.guest.dmesg()).into())
    }

    /// Rounds of the work so far.
    fn rounds(&self) -> Result<u32, Error> {
        let text = self.run("cat /tmp/rounds 2>/dev/null || echo 0", 60)?;
        Ok(text.trim().parse()?)
    }

    /// Waits until the work has done so many rounds more.
    fn goes_on(&self, rounds: u32) -> Result<u32, Error> {
        let before = self.rounds()?;
        for _ in 0..240 {
            check_stop()?;
            std::thread::sleep(Duration::from_secs(1));
            let now = self.rounds()?;
            if now >= before + rounds {
                return Ok(now);
            }
            self.run("[ ! -e /tmp/work.rc ] || { cat /tmp/work.log; false; }", 60)?;
        }
        Err(format!("no {rounds} rounds after {before}").into())
    }

    /// fio on a disk past the guest's cache; requests in a second.
    fn fio(&self, disk: &str, name: &str, options: &str) -> Result<f64, Error> {
        let text = self.run(
            &format!(
                "fio --name={name} --filename=/dev/$(disk '{disk}') --size=32M --direct=1 --ioengine=libaio {options} \
                 --time_based --runtime=15 --output-format=json 2>/dev/null"
            ),
            180,
        )?;
        let json = text.find('{').map_or("", |at| &text[at..]);
        let report: Value = serde_json::from_str(json).map_err(|e| format!("fio left no report: {e}: {text}"))?;
        let job = &report["jobs"][0];
        let sum = ["read", "write"].map(|way| job[way]["iops"].as_f64().unwrap_or_default());
        match job["error"] == 0 && sum.iter().sum::<f64>() > 0.0 {
            true => Ok(sum.iter().sum()),
            false => Err(format!("fio: {text}").into()),
        }
    }
}

/// Options that give qemu the two disks.
fn options(vhost: &str, nbd: &str) -> Vec<String> {
    let memory = Guest::MEMORY;
    [
        "-object".to_owned(),
        format!("memory-backend-memfd,id=ram,size={memory},share=on"),
        "-machine".to_owned(),
        "memory-backend=ram".to_owned(),
        "-chardev".to_owned(),
        format!("socket,id=vhost,path={vhost}"),
        "-device".to_owned(),
        "vhost-user-blk-pci,chardev=vhost,num-queues=2".to_owned(),
        "-blockdev".to_owned(),
        format!("driver=nbd,node-name=nbd,server.type=unix,server.path={nbd},export={BESIDE}"),
        "-device".to_owned(),
        format!("virtio-blk-pci,drive=nbd,serial={BESIDE}"),
    ]
    .to_vec()
}

fn disk(c: &mut Ctx<'_>) -> Result<String, Error> {
    let paths = paths(c, Ip::V4)?;
    let (vhost, nbd) = (c.socket("vhost.sock"), c.socket("nbd.sock"));
    let socket = format!("{DISK}={vhost}");
    let more = [
        "--json",
        "--device",
        BESIDE,
        "--vhost-user",
        &socket,
        "--on-loss",
        "queue",
    ];
    let mut mapping = Mapping::spawn_over(c, &paths, "ram0", &more)?;
    mapping.wait_more("mapped", 1, Duration::from_secs(90))?;
    let second = c.second.as_deref_mut().ok_or("needs a second guest")?;
    second.reboot_with(&options(&vhost, &nbd))?;
    let result = work(c, &mut mapping);
    // Whatever has come of it, the next scenario gets a guest without these disks.
    let calm = Cut::Port.set(c, true);
    let second = c.second.as_deref_mut().ok_or("needs a second guest")?;
    let stopped = second.reboot();
    let text = result?;
    calm?;
    stopped?;
    mapping.process.interrupt();
    mapping.process.finish(Duration::from_secs(30))?;
    let summary = mapping.events("summary").pop().unwrap_or_default();
    if summary["vhost_malformed"] != 0 {
        return Err(format!("no request of a kernel's driver is malformed: {summary}").into());
    }
    Ok(text)
}

fn work(c: &mut Ctx<'_>, mapping: &mut Mapping) -> Result<String, Error> {
    let machine = |c: &Ctx<'_>, script: &str, seconds| {
        let guest = c.second.as_deref().ok_or("needs a second guest")?;
        Machine { guest }.run(script, seconds)
    };
    let start = format!(
        "modprobe virtio_blk; for i in $(seq 100); do [ -n \"$(disk {DISK})\" ] && break; sleep 0.1; done\n\
         cat > /tmp/work.sh <<'W'\n{WORK}W\n\
         declare -f disk > /tmp/all.sh; cat /tmp/work.sh >> /tmp/all.sh; rm -f /tmp/rounds /tmp/enough /tmp/work.rc\n\
         (bash /tmp/all.sh {DISK}; echo $? > /tmp/work.rc) </dev/null >/dev/null 2>&1 &\n\
         cat /sys/block/$(disk {DISK})/size; ls /sys/block/$(disk {DISK})/mq | wc -w\n"
    );
    let text = machine(c, &start, 120)?;
    // A driver uses no more rings than it has processors.
    let rings = c.second.as_ref().map_or(0, |guest| guest.shape.cpus.min(2)).to_string();
    if text.split_whitespace().collect::<Vec<_>>() != ["131072", &rings] {
        return Err(format!("131072 sectors and {rings} rings are right: {text}").into());
    }
    let goes_on = |c: &Ctx<'_>, rounds| {
        let guest = c.second.as_deref().ok_or("needs a second guest")?;
        Machine { guest }.goes_on(rounds)
    };
    goes_on(c, 1)?;
    let (down, up) = (mapping.count("path_down"), mapping.count("path_up"));
    Cut::Port.set(c, false)?;
    mapping.wait_more("path_down", down, Duration::from_secs(60))?;
    goes_on(c, 1)?;
    Cut::Port.set(c, true)?;
    mapping.wait_more("path_up", up, Duration::from_secs(120))?;
    let rounds = goes_on(c, 1)?;
    let end = machine(
        c,
        "touch /tmp/enough; for i in $(seq 1800); do [ -e /tmp/work.rc ] && break; sleep 0.1; done; cat /tmp/work.log; cat /tmp/work.rc",
        240,
    )?;
    if !end.contains("trees equal: passed") || !end.trim_end().ends_with('0') {
        return Err(format!("the guest's work: {end}").into());
    }
    // What the guest has left is in order on the server's side as well.
    let check = c.guest()?.run("e2fsck -fn /dev/ram0", 120)?;
    let check = check.lines().last().unwrap_or_default().to_owned();
    let guest = c.second.as_deref().ok_or("needs a second guest")?;
    let ratios = beside(&Machine { guest })?;
    Ok(format!(
        "{rounds} rounds of trees equal over a cut, fsck clean in the guest and at the server ({check}): passed; {ratios}"
    ))
}

/// The same load on either disk, one after the other.
fn beside(machine: &Machine<'_>) -> Result<String, Error> {
    let mut told = Vec::new();
    for (name, options) in [
        ("reads of 4k", "--rw=randread --bs=4k --iodepth=32"),
        ("writes of 4k", "--rw=randwrite --bs=4k --iodepth=32"),
        ("reads of 4k one by one", "--rw=randread --bs=4k --iodepth=1"),
        ("reads of 128k", "--rw=read --bs=128k --iodepth=8"),
    ] {
        let label = name.replace(' ', "-");
        let (vhost, nbd) = (
            machine.fio(DISK, &label, options)?,
            machine.fio(BESIDE, &label, options)?,
        );
        told.push(format!(
            "{name}: vhost-user {vhost:.0}/s, NBD {nbd:.0}/s, ratio {:.2}",
            vhost / nbd
        ));
    }
    Ok(told.join("; "))
}
