//! Requests of the kernel's client that our server's disk holds while their path is lost. The chunk of a request is one piece of
//! memory for all paths: what goes on by another path must not get at it before the disk is done with it.

use std::{
    fs,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use super::{
    super::{Ctx, Direction, Scenario, rnbd},
    Cut,
    kernel_client::{CLIENT_UP, client_down, head},
    script,
};
use crate::{Error, far::Ip, lab::Proc};

pub(super) fn list() -> Vec<Scenario> {
    let new = |name: &str, held: Held| {
        let s = Scenario::new(10, name, Direction::KernelToOurs, move |c| hold(c, held));
        s.nets(2).waits()
    };
    vec![
        new("paths-held-write-kernel-client", Held::Write).ci(),
        new("paths-held-read-kernel-client", Held::Read),
    ]
}

/// Which request is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Held {
    Read,
    Write,
}

impl Held {
    const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }

    /// Its number in RNBD's messages.
    const fn operation(self) -> u8 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
        }
    }

    /// In the guest, it alone.
    const fn script(self) -> &'static str {
        match self {
            Self::Read => {
                "dd if=/dev/rnbd0 of=/tmp/first bs=4k skip=$A count=1 iflag=direct status=none 2>/tmp/err1 &\n"
            }
            Self::Write => "dd if=/tmp/a of=/dev/rnbd0 bs=4k seek=$A oflag=direct status=none 2>/tmp/err1 &\n",
        }
    }
}

const BLOCK: usize = 4096;
/// Where the held request is, and the next one, blocks.
const PLACES: [usize; 2] = [100, 200];
/// Bytes of the disk as it was, of the first write and of the second.
const BYTES: [u8; 3] = [7, 10, 20];

/// The first path of the list, over the second network, gets what comes while nothing is under way; its count of requests in flight,
/// the fifth, says that it has.
const START: &str = "\
    fill() { head -c 4096 /dev/zero | tr '\\0' \"\\\\$(printf %o $1)\" > $2; }; fill $FIRST /tmp/a; fill $SECOND /tmp/b\n\
    map_by path=$P1 path=$P0; up 2 100; rm -f /tmp/first /tmp/err1 /tmp/err2\n";
const SENT: &str = "\
    for i in $(seq 100); do [ \"$(cut -d' ' -f5 < $S/$P1/stats/rdma)\" = 1 ] && break; sleep 0.1; done; paths\n\
    [ \"$(cut -d' ' -f5 < $S/$P1/stats/rdma)\" = 1 ]\n";

/// It has gone over to the other path. The next one waits for the only permit.
const OVER: &str = "\
    up 1 100; for i in $(seq 100); do [ \"$(cut -d' ' -f6 < $S/$P0/stats/rdma)\" = 1 ] && break; sleep 0.1; done; paths\n\
    [ \"$(cut -d' ' -f6 < $S/$P0/stats/rdma)\" = 1 ]\n\
    dd if=/tmp/b of=/dev/rnbd0 bs=4k seek=$B2 oflag=direct status=none 2>/tmp/err2 &\n\
    sleep 3; set -- $(pidof dd); [ $# = 2 ]\n";

const DONE: &str = "\
    for i in $(seq 600); do pidof dd >/dev/null || break; sleep 0.1; done; cat /tmp/err1 /tmp/err2; paths\n\
    [ ! -s /tmp/err1 ] && [ ! -s /tmp/err2 ] && ! pidof dd\n";
const CHECKED: &str = "\
    for place in $A $B2; do dd if=/dev/rnbd0 bs=4k skip=$place count=1 iflag=direct status=none | od -An -tu1 -v -w1 | sort -u; done\n\
    [ ! -e /tmp/first ] || od -An -tu1 -v -w1 /tmp/first | sort -u | sed 's/^/first/'\n";

fn hold(c: &mut Ctx<'_>, held: Held) -> Result<String, Error> {
    fs::write(c.path("disk.img"), vec![BYTES[0]; 16 << 20])?;
    let mut server = serve(c, held)?;
    let result = held_while_cut(c, &mut server, held);
    Cut::Carrier.set(c, true)?;
    if result.is_err() {
        // Nothing that waits for it keeps the client.
        let _ = server.tell("release");
    }
    client_down(c)?;
    let took = result?;
    server.tell("end")?;
    server.finish(Duration::from_secs(60))?;
    let image = fs::read(c.path("disk.img"))?;
    let block = |n: usize| image[n * BLOCK..][..BLOCK].iter().copied();
    let first = if held == Held::Write { BYTES[1] } else { BYTES[0] };
    let right = block(PLACES[0]).all(|b| b == first) && block(PLACES[1]).all(|b| b == BYTES[2]);
    let changed = image.iter().filter(|b| **b != BYTES[0]).count();
    if !right || changed != BLOCK * (1 + usize::from(held == Held::Write)) {
        return Err(
            format!("blocks {PLACES:?} are not as written, or others are: {changed} bytes were changed").into(),
        );
    }
    Ok(format!(
        "a {} was held, its path cut, sent again by the other: neither that nor a write behind it reached the disk before it was \
         released, both were done {:.1} s after that, each in its place: passed",
        held.name(),
        took.as_secs_f64()
    ))
}

fn serve(c: &Ctx<'_>, held: Held) -> Result<Proc, Error> {
    let mut command = Command::new(&c.places.peer);
    command.args(["--addr", "0.0.0.0", "held", "--image", &c.path("disk.img")]);
    let at = (PLACES[0] * BLOCK).to_string();
    // Each request has the only chunk.
    command.args(["--hold", held.name(), "--at", &at, "--queue-depth", "1"]);
    let mut server = Proc::spawn_with_input("held", &mut command, &c.dir, Stdio::piped())?;
    server.wait_for("held: listening", Duration::from_secs(30))?;
    Ok(server)
}

/// How long it took after the release until both requests had ended.
fn held_while_cut(c: &mut Ctx<'_>, server: &mut Proc, held: Held) -> Result<Duration, Error> {
    let [a, b] = PLACES;
    let [_, first, second] = BYTES;
    let head = format!("A={a}; B2={b}; FIRST={first}; SECOND={second}\n{}", head(c, Ip::V4)?);
    let begin = format!("{}{head}{CLIENT_UP}{START}{}{SENT}", rnbd::INSMOD_CLIENT, held.script());
    script(c, &begin, 120)?;
    server.wait_for("held: it is held", Duration::from_secs(30))?;
    let before = arrived(server, held);
    Cut::Carrier.set(c, false)?;
    script(c, &format!("{head}{OVER}"), 120)?;
    let after = arrived(server, held);
    if (before, after) != ([1, 0], [1, 0]) {
        return Err(format!(
            "the chunk is in use, but the disk got {before:?}, then {after:?}:\n{}",
            server.text()
        )
        .into());
    }
    server.tell("release")?;
    let start = Instant::now();
    script(c, &format!("{head}{DONE}"), 120)?;
    let took = start.elapsed();
    let out = script(c, &format!("{head}{CHECKED}"), 60)?;
    let bytes: Vec<&str> = out.split_whitespace().collect();
    let right: &[&str] = match held {
        Held::Read => &["7", "20", "first", "7"],
        Held::Write => &["10", "20"],
    };
    match bytes == right {
        true => Ok(took),
        false => Err(format!("read back, of both places, and at first: {out}").into()),
    }
}

/// How often the disk got the held request, and the write behind it.
fn arrived(server: &Proc, held: Held) -> [usize; 2] {
    let text = server.text();
    let count = |operation: u8, place: usize| {
        let line = format!("held: operation {operation} at {}", place * BLOCK);
        text.lines().filter(|l| **l == line).count()
    };
    [
        count(held.operation(), PLACES[0]),
        count(Held::Write.operation(), PLACES[1]),
    ]
}
