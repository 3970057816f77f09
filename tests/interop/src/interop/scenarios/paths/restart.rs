//! Our server ends under the kernel's client, and another one begins in its place.

use super::{
    super::{
        Ctx, Direction, Scenario,
        faults::same_on_image,
        rnbd::{self, Server, image},
    },
    kernel_client::{CLIENT_UP, client_down, head},
    script,
};
use crate::{Error, far::Ip};

pub(super) fn list() -> Vec<Scenario> {
    let new = |name: &str, run: fn(&mut Ctx<'_>) -> Result<String, Error>| {
        Scenario::new(10, name, Direction::KernelToOurs, run).nets(2).waits()
    };
    vec![
        new("restart-our-server-kernel-client", killed),
        new("restart-our-server-kernel-client-other-chunks", other_chunks),
        new("restart-our-server-kernel-client-other-depth", other_depth),
    ]
}

/// Maps with two paths; the first 4 MiB are written and flushed.
const START: &str = "\
    map_by path=$P0 path=$P1; up 2 100; head -c 4194304 /dev/urandom > /tmp/a\n\
    dd if=/tmp/a of=/dev/rnbd0 bs=32k oflag=direct conv=fsync status=none\n";

/// Writes behind that until a write fails.
const WRITER: &str = "\
    rm -f /tmp/writer; (n=0; while dd if=/tmp/a of=/dev/rnbd0 bs=32k seek=128 oflag=direct conv=notrunc status=none 2>/tmp/err; \
        do n=$((n+1)); echo $n > /tmp/rounds; done; cat /tmp/err > /tmp/writer) >/dev/null 2>&1 &\n\
    for i in $(seq 300); do [ -s /tmp/rounds ] && break; sleep 0.1; done; cat /tmp/rounds\n";

/// `equal` holds if what was flushed is there.
const EQUAL: &str = "\
    equal() { dd if=/dev/rnbd0 of=/tmp/b bs=32k count=128 iflag=direct status=none; cmp /tmp/a /tmp/b; }\n\
    other() { dd if=/dev/urandom of=/tmp/a bs=1M count=4 status=none; \
        dd if=/tmp/a of=/dev/rnbd0 bs=32k oflag=direct conv=fsync status=none; equal; }\n";

/// The writer fails; both paths and the device come back by themselves, and what was flushed is there.
const BACK: &str = "\
    start=$(at); for i in $(seq 1200); do [ -e /tmp/writer ] && break; sleep 0.1; done; cat /tmp/writer\n\
    grep -q 'Input/output error' /tmp/writer; failed=$(at)\n\
    for i in $(seq 1800); do [ $(cat $B/state) = open ] && break; sleep 0.1; done\n\
    state open; open=$(at); up 2 1200\n\
    echo times: failed after $((failed-start)) s, open after $((open-start)) s, both paths after $(($(at)-start)) s\n\
    for p in $P0 $P1; do echo reconnects $(cat $S/$p/stats/reconnects)\n\
        [ \"$(cut -d' ' -f1 < $S/$p/stats/reconnects)\" = 1 ]; done\n\
    equal; other; sum 64; echo normal > $B/unmap_device\n";

/// The server is killed with both paths under load. The client's requests fail when it has noticed, and it connects again
/// 30 s later.
fn killed(c: &mut Ctx<'_>) -> Result<String, Error> {
    let out = with_server(c, |c, server, head| {
        script(c, &format!("{head}{WRITER}"), 60)?;
        server.kill_and_restart(c)?;
        script(c, &format!("{head}{BACK}"), 400)
    })?;
    let times = out.lines().find(|l| l.starts_with("times: ")).unwrap_or_default();
    Ok(format!("{times}; what was flushed is there: passed"))
}

/// A session with two paths and [`START`] done, which `work` ends with the line `sum`; what it returns. Its server is new at
/// the end, and has one session.
fn with_server(
    c: &mut Ctx<'_>,
    work: impl FnOnce(&mut Ctx<'_>, &mut Server, &str) -> Result<String, Error>,
) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let mut server = Server::start_at(c, "0.0.0.0", &["disk"], "on")?;
    let head = format!("{}{EQUAL}", head(c, Ip::V4)?);
    let start = format!("{}{head}{CLIENT_UP}{START}", rnbd::INSMOD_CLIENT);
    let result = script(c, &start, 120).and_then(|_| work(c, &mut server, &head));
    client_down(c)?;
    let out = result?;
    let opened = server.count("session_opened");
    server.stop()?;
    if opened != 1 {
        return Err(format!("the new server opened {opened} sessions").into());
    }
    same_on_image(c, &out, 4 << 20)?;
    Ok(out)
}

/// What an administrator orders who does not want to wait: both paths away, and back.
const ORDERED: &str = "\
    for p in $P0 $P1; do echo 1 > $S/$p/disconnect; done; state closed\n\
    for p in $P0 $P1; do echo 1 > $S/$p/reconnect; done; up 2 0; state open; equal\n";

/// Requests longer than the smaller chunks fail, at once; the session goes on.
const TOO_LONG: &str = "\
    if timeout 20 dd if=/dev/rnbd0 of=/dev/null bs=96k count=1 iflag=direct 2>/tmp/err; then echo 'not too long'; exit 1; fi\n\
    cat /tmp/err; grep -q 'Input/output error' /tmp/err; up 2 0; state open; other\n";

const ENOUGH: &str = "\
    dd if=/dev/rnbd0 of=/dev/null bs=96k count=8 iflag=direct status=none; other; sum 64; echo normal > $B/unmap_device\n";

/// The new server's chunks are smaller, with their keys kept; then larger, with their keys taken back.
fn other_chunks(c: &mut Ctx<'_>) -> Result<String, Error> {
    with_server(c, |c, server, head| {
        server.restart_otherwise(c, "off", &["--max-chunk-size", "64K"])?;
        script(c, &format!("{head}{ORDERED}{TOO_LONG}"), 240)?;
        server.restart_otherwise(c, "on", &["--max-chunk-size", "256K"])?;
        script(c, &format!("{head}{ORDERED}{ENOUGH}"), 240)
    })?;
    Ok("smaller chunks: long requests fail, others do not; larger chunks, and other keys: passed".to_owned())
}

/// The client does not take another queue depth, and does not try again by itself.
const REFUSED: &str = "\
    dmesg -C; for p in $P0 $P1; do echo 1 > $S/$p/disconnect; done; state closed\n\
    for p in $P0 $P1; do refused 'not connected' 1 $S/$p/reconnect; done\n\
    [ $(dmesg | grep -c 'Disabling auto-reconnect') = 2 ]\n\
    if timeout 20 dd if=/dev/rnbd0 of=/dev/null bs=4k count=1 iflag=direct; then echo 'it is open'; exit 1; fi\n\
    sleep 36; up 0 0; state closed; [ $(dmesg | grep -c 'Disabling auto-reconnect') = 2 ]\n";

const AS_BEFORE: &str = "\
    for p in $P0 $P1; do echo 1 > $S/$p/reconnect; done; up 2 0; state open; equal; other; sum 64\n\
    echo normal > $B/unmap_device\n";

/// With another queue depth the paths stay down until the server has the old one and somebody orders to reconnect.
fn other_depth(c: &mut Ctx<'_>) -> Result<String, Error> {
    with_server(c, |c, server, head| {
        server.restart_otherwise(c, "on", &["--queue-depth", "128"])?;
        script(c, &format!("{head}{REFUSED}"), 240)?;
        server.restart_otherwise(c, "on", &[])?;
        script(c, &format!("{head}{AS_BEFORE}"), 240)
    })?;
    Ok("another queue depth is refused and not tried again; the old one is taken by order: passed".to_owned())
}
