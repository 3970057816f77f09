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

    /// What the block has at last.
    fn last(self, block: usize) -> u8 {
        match PLACES.iter().position(|place| *place == block) {
            Some(0) if self == Self::Read => OLD,
            Some(n) => NEW[n],
            None => OLD,
        }
    }

    /// In the guest, it alone.
    const fn script(self) -> &'static str {
        match self {
            Self::Read => {
                "dd if=/dev/rnbd0 of=/tmp/read bs=4k skip=$AT1 count=1 iflag=direct status=none 2>/tmp/err &\n"
            }
            Self::Write => "dd if=/tmp/1 of=/dev/rnbd0 bs=4k seek=$AT1 oflag=direct status=none 2>/tmp/err &\n",
        }
    }
}

const BLOCK: usize = 4096;
/// Where the held request is, and those after it, blocks.
const PLACES: [usize; 3] = [100, 200, 300];
/// What the disk is full of.
const OLD: u8 = 7;
/// What is written at these places, if it is.
const NEW: [u8; 3] = [10, 20, 30];

/// `block BYTE FILE` makes a block; `put FILE PLACE` writes it. The first path of the list, over the second network, gets what comes
/// while nothing is under way; its count of requests in flight, the fifth, says that it has. The sixth is of requests taken over.
const HELPERS: &str = "\
    block() { head -c 4096 /dev/zero | tr '\\0' \"\\\\$(printf %o $1)\" > $2; }\n\
    put() { timeout 60 dd if=$1 of=/dev/rnbd0 bs=4k seek=$2 oflag=direct status=none; }\n\
    counts() { for i in $(seq 100); do [ \"$(cut -d' ' -f$2 < $S/$1/stats/rdma)\" = 1 ] && break; sleep 0.1; done; paths\n\
        [ \"$(cut -d' ' -f$2 < $S/$1/stats/rdma)\" = 1 ]; }\n";

const START: &str = "\
    block $NEW1 /tmp/1; block $NEW2 /tmp/2; block $NEW3 /tmp/3; rm -f /tmp/read /tmp/err\n\
    map_by path=$P1 path=$P0; up 2 100\n";

/// It has gone over to the other path, and waits there, while another is done. Client and server take the first chunk that is free: if
/// that of the held one were, the other would be there.
const OVER: &str = "up 1 100; counts $P0 6; put /tmp/2 $AT2; sleep 2; pidof dd\n";

/// The held request has ended. The next one takes its chunk.
const DONE: &str = "\
    for i in $(seq 600); do pidof dd >/dev/null || break; sleep 0.1; done; cat /tmp/err; paths\n\
    [ ! -s /tmp/err ]; ! pidof dd; put /tmp/3 $AT3\n";

/// What is read at all places, and what the held request has read.
const CHECKED: &str = "\
    bytes() { od -An -tu1 -v -w1 | sort -u; }\n\
    for at in $AT1 $AT2 $AT3; do dd if=/dev/rnbd0 bs=4k skip=$at count=1 iflag=direct status=none | bytes; done\n\
    if [ -e /tmp/read ]; then bytes < /tmp/read; fi\n";

fn hold(c: &mut Ctx<'_>, held: Held) -> Result<String, Error> {
    fs::write(c.path("disk.img"), vec![OLD; 16 << 20])?;
    let mut server = serve(c, held)?;
    let result = held_while_cut(c, &mut server, held);
    Cut::Carrier.set(c, true)?;
    if result.is_err() {
        // The client does not end before its requests have.
        let _ = server.tell("release");
    }
    let down = client_down(c);
    let took = result?;
    down?;
    server.tell("end")?;
    server.finish(Duration::from_secs(60))?;
    let image = fs::read(c.path("disk.img"))?;
    let blocks = image.chunks(BLOCK).enumerate();
    let wrong: Vec<usize> = blocks
        .filter(|(n, block)| block.iter().any(|byte| *byte != held.last(*n)))
        .map(|(n, _)| n)
        .collect();
    if !wrong.is_empty() {
        return Err(format!("the disk is not as it was written, in blocks {wrong:?}").into());
    }
    Ok(format!(
        "a {} was held, its path cut, sent again by the other: that did not reach the disk before it was released, and both were done \
         {:.1} s after that; a write beside it and one in its chunk: each is in its place alone: passed",
        held.name(),
        took.as_secs_f64()
    ))
}

fn serve(c: &Ctx<'_>, held: Held) -> Result<Proc, Error> {
    let mut command = Command::new(&c.places.peer);
    command.args(["--addr", "0.0.0.0", "held", "--image", &c.path("disk.img")]);
    let at = (PLACES[0] * BLOCK).to_string();
    command.args(["--hold", held.name(), "--at", &at]);
    let mut server = Proc::spawn_with_input("held", &mut command, &c.dir, Stdio::piped())?;
    server.wait_for("held: listening", Duration::from_secs(30))?;
    Ok(server)
}

/// How long it took after the release until both requests had ended.
fn held_while_cut(c: &mut Ctx<'_>, server: &mut Proc, held: Held) -> Result<Duration, Error> {
    let [at1, at2, at3] = PLACES;
    let [new1, new2, new3] = NEW;
    let values = format!("AT1={at1}; AT2={at2}; AT3={at3}; NEW1={new1}; NEW2={new2}; NEW3={new3}\n");
    let head = format!("{values}{}{HELPERS}", head(c, Ip::V4)?);
    let begin = format!("{}{head}{CLIENT_UP}{START}{}", rnbd::INSMOD_CLIENT, held.script());
    script(c, &format!("{begin}counts $P1 5\n"), 120)?;
    server.wait_for("held: it is held", Duration::from_secs(30))?;
    Cut::Carrier.set(c, false)?;
    script(c, &format!("{head}{OVER}"), 120)?;
    let arrived = [(held.operation(), at1), (Held::Write.operation(), at2)].map(|(op, at)| arrived(server, op, at));
    if arrived != [1, 1] {
        return Err(format!("the chunk is in use, but the disk got {arrived:?}:\n{}", server.text()).into());
    }
    server.tell("release")?;
    let start = Instant::now();
    script(c, &format!("{head}{DONE}"), 120)?;
    let took = start.elapsed();
    let out = script(c, &format!("{head}{CHECKED}"), 60)?;
    let bytes: Vec<u8> = out.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let mut right: Vec<u8> = PLACES.map(|place| held.last(place)).into();
    if held == Held::Read {
        right.push(OLD);
    }
    match bytes == right {
        true => Ok(took),
        false => Err(format!("{right:?} are right, read back was {bytes:?}").into()),
    }
}

/// How often the disk got the operation there.
fn arrived(server: &Proc, operation: u8, place: usize) -> usize {
    let line = format!("held: operation {operation} at {}", place * BLOCK);
    server.text().lines().filter(|l| **l == line).count()
}
