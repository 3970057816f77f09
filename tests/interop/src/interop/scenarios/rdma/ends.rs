//! A device over roce-hw at one end of a session.

use std::time::Duration;

use super::{
    super::{
        Ctx, Direction, Scenario,
        rnbd::{self, Mapping, Server, TREE, checksum_here, checksum_in_guest, image, with_client_of, work_on},
        verdict,
    },
    Other, Ours,
};
use crate::{Error, far::Ip};

pub(super) fn list() -> Vec<Scenario> {
    let mut all = Vec::new();
    for inv in ["on", "off"] {
        let mut add =
            |name: &str, direction, other, run: fn(&mut Ctx<'_>, Other, &'static str) -> Result<String, Error>| {
                let s = Scenario::new(12, format!("{name}-inv-{inv}"), direction, move |c| run(c, other, inv));
                // The short set has both directions, and both kinds of keys.
                let ci = other == Other::Ours && (direction == Direction::OursToKernel) == (inv == "on");
                all.push(s.guests(other.guests()).ci_if(ci));
            };
        add("rdma-server-our-client", Direction::OursToKernel, Other::Ours, serve);
        add("rdma-client-our-server", Direction::KernelToOurs, Other::Ours, map);
        add(
            "rdma-server-kernel-client",
            Direction::KernelToKernel,
            Other::Kernel,
            serve,
        );
        add(
            "rdma-client-kernel-server",
            Direction::KernelToKernel,
            Other::Kernel,
            map,
        );
    }
    all
}

/// A server over roce-hw.
fn serve(c: &mut Ctx<'_>, other: Other, invalidate: &str) -> Result<String, Error> {
    let (ours, addr) = (Ours::new(c)?, Ours::addr(c, 0)?);
    let begin = format!(
        "rm -f /tmp/disk.img; truncate -s 64M /tmp/disk.img\n\
         begin serve serve --json --rdma rxe0 --addr {addr} --export disk=/tmp/disk.img --always-invalidate {invalidate} \
         --control /tmp/serve.sock\ntold serve '\"listening\"' 60"
    );
    ours.run(c, &begin, 120)?;
    let worked = match other {
        Other::Kernel => with_client_of(c, addr, TREE, 300).and_then(|out| verdict(&out)),
        Other::Ours => our_client(c, &ours, invalidate),
    };
    let ended = ours.run(c, "ends serve; cat /tmp/serve.out", 120);
    let (worked, ended) = (worked?, ended?);
    if !ended.contains("\"session_opened\"") || !ended.contains("\"summary\"") {
        return Err(format!("no session, or no summary: {ended}").into());
    }
    if other == Other::Kernel {
        ours.run(c, "e2fsck -fn /tmp/disk.img", 120)?;
    }
    Ok(format!("{worked}, chunks by {}", chunk_keys(invalidate)))
}

/// By what rdma_rxe has clients write chunks.
fn chunk_keys(invalidate: &str) -> &'static str {
    match invalidate {
        "on" => "type 1 memory windows",
        _ => "static",
    }
}

/// By what it has servers write buffers of reads, which the client takes back itself.
const READ_KEYS: &str = "type 2 memory windows";

/// A path of the process is on `rxe0`, by keys of this kind.
fn on_device(paths: &str, keys: &str) -> Result<(), Error> {
    let parts = ["\"rxe0\"".to_owned(), format!("\"{keys}\"")];
    match parts.iter().find(|part| !paths.contains(part.as_str())) {
        None => Ok(()),
        Some(part) => Err(format!("no {part} in {paths}").into()),
    }
}

/// Our client in software.
fn our_client(c: &mut Ctx<'_>, ours: &Ours, invalidate: &str) -> Result<String, Error> {
    let path = format!("{},{}", c.host(Ip::V4)?, Ours::addr(c, 0)?);
    let mut mapping = Mapping::of_ours(c, &[path], "disk", &["--json", "--max-reconnects", "0"])?;
    mapping.wait_more("mapped", 0, Duration::from_secs(60))?;
    on_device(&ours.paths(c, "/tmp/serve.sock")?, chunk_keys(invalidate))?;
    work_on(c, mapping, true, |size| {
        let sum = ours.run(c, &format!("head -c {size} /tmp/disk.img | md5sum"), 60)?;
        Ok(sum.split_whitespace().next().unwrap_or_default().to_owned())
    })
}

/// Bytes that a guest's client copies to a device.
const COPIED: usize = 8 << 20;

/// What a guest's client does: blocks with checksums, a copy, discard and zeroes, and all read back.
const WORK: &str = "\
    U='nbd+unix:///?socket=/tmp/nbd.sock'\n\
    fio --thread --name=job --ioengine=nbd --uri=$U --size=32M --rw=randwrite --bsrange=4k-128k --iodepth=8 --verify=crc32c \
        --verify_interval=4096 --verify_fatal=1 --io_size=16M --output=/tmp/fio.log || { cat /tmp/fio.log; exit 1; }\n\
    head -c $COPIED /dev/urandom > /tmp/a; qemu-img convert -n -f raw -O raw /tmp/a $U\n\
    qemu-img dd -O raw bs=64k count=$(($COPIED>>16)) if=$U of=/tmp/b; cmp /tmp/a /tmp/b\n\
    qemu-io -f raw -c 'write -P 0x5a 40M 64k' -c flush -c 'read -P 0x5a 40M 64k' -c 'discard 41M 64k' -c 'write -z 40M 64k' \
        -c 'read -P 0 40M 64k' $U > /tmp/io.log; ! grep -i -e failed -e error /tmp/io.log\n";

/// A client over roce-hw.
fn map(c: &mut Ctx<'_>, other: Other, invalidate: &'static str) -> Result<String, Error> {
    let ours = Ours::new(c)?;
    match other {
        Other::Ours => {
            image(c, "disk", 64)?;
            let server = Server::start(c, Ip::V4, &["disk"], invalidate)?;
            let host = c.host(Ip::V4)?.to_string();
            let sum = work_in_guest(c, &ours, &host, "disk")?;
            server.stop()?;
            let copy = c.path("copied.img");
            let (from, to) = (format!("if={}", c.path("disk.img")), format!("of={copy}"));
            c.tool(
                "head",
                "dd",
                &[&from, &to, "bs=1M", &format!("count={}", COPIED >> 20)],
                60,
            )?;
            same(&sum, &checksum_here(c, &copy)?)?;
        }
        Other::Kernel => {
            rnbd::server_up(c, invalidate == "on")?;
            let host = c.guest()?.addr(0, Ip::V4).to_string();
            let worked = work_in_guest(c, &ours, &host, "newroot/dev/ram0");
            let there = worked.and_then(|sum| same(&sum, &checksum_in_guest(c, "ram0", COPIED)?));
            rnbd::server_down(c)?;
            there?;
        }
    }
    Ok(format!(
        "blocks verified, {COPIED} bytes copied, equal where they are, discard, zeroes, reads by {}: passed",
        READ_KEYS
    ))
}

fn same(here: &str, there: &str) -> Result<(), Error> {
    if here == there {
        return Ok(());
    }
    Err(format!("copied was MD5 {here}, the device has {there}").into())
}

/// Maps a server's device in our guest and works on it; the MD5 of its first [`COPIED`] bytes.
fn work_in_guest(c: &Ctx<'_>, ours: &Ours, host: &str, device: &str) -> Result<String, Error> {
    let begin = format!(
        "begin map map --json --rdma rxe0 --session ours --path {},{host} --device {device} --nbd /tmp/nbd.sock \
         --control /tmp/map.sock --max-reconnects 0\ntold map '\"mapped\"' 90",
        Ours::addr(c, 0)?
    );
    ours.run(c, &begin, 120)?;
    let keys = ours
        .paths(c, "/tmp/map.sock")
        .and_then(|paths| on_device(&paths, READ_KEYS));
    let worked = keys.and_then(|()| ours.run(c, &format!("COPIED={COPIED}\n{WORK}"), 300));
    let ended = ours.run(c, "ends map; md5sum </tmp/a", 120);
    worked?;
    Ok(ended?.split_whitespace().next().unwrap_or_default().to_owned())
}
