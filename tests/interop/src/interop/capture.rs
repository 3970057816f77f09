//! `ferroce-interop capture`: short captures of kernel-to-kernel traffic for `pcap-fixtures/`.
//!
//! Guest 1 is the server (responder), guest 2 the client. What each sends and gets is a capture of its own when packets
//! are lost, repeated or swapped between them (`NAME-server.pcap`, `NAME-client.pcap`); else both are the same.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use crate::{
    Error,
    guest::{Guest, Kernel, Shape},
    lab::{self, Net, Places},
    relay::{Fate, Fault, Relay},
    scenarios::SMALL,
};

/// Arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Only captures whose name contains this; may be given several times.
    #[arg(long)]
    only: Vec<String>,
    /// Where the captures and entries for a manifest go (default: `captures` in the lab's folder).
    #[arg(long)]
    out: Option<PathBuf>,
}

/// A capture to be made.
struct Recipe {
    name: &'static str,
    program: &'static str,
    shows: &'static str,
    faults: &'static [Fault],
    run: fn(&Pair<'_>) -> Result<(), Error>,
    /// Of both guests.
    kernel: Kernel,
}

const fn recipe(
    name: &'static str,
    program: &'static str,
    shows: &'static str,
    faults: &'static [Fault],
    run: fn(&Pair<'_>) -> Result<(), Error>,
) -> Recipe {
    Recipe {
        name,
        program,
        shows,
        faults,
        run,
        kernel: Kernel::V6_1,
    }
}

impl Recipe {
    const fn on(self, kernel: Kernel) -> Self {
        Self { kernel, ..self }
    }
}

const SEND_FIRST: u8 = 0x00;
const SEND_MIDDLE: u8 = 0x01;
const WRITE_FIRST: u8 = 0x06;
const WRITE_MIDDLE: u8 = 0x07;
const WRITE_LAST: u8 = 0x08;
const READ_REQUEST: u8 = 0x0c;
const READ_MIDDLE: u8 = 0x0e;
const ACK: u8 = 0x11;
const ATOMIC_ACK: u8 = 0x12;
const FETCH_ADD: u8 = 0x14;

const fn fault(from: u8, opcodes: &'static [u8], nth: u32, fate: Fate) -> Fault {
    Fault {
        from,
        opcodes,
        nth,
        fate,
    }
}

const VERBS: &str = "verbs-agent (tests/interop/lab)";

#[rustfmt::skip]
const RECIPES: &[Recipe] = &[
    recipe("verbs-ops", VERBS, "every RC operation, 0 to 5000 bytes, PSNs across the wrap", &[], verbs_ops),
    recipe("send-invalidate", VERBS, "SEND with Invalidate of a type-2 memory window, then a WRITE that the key no longer allows", &[], send_invalidate),
    recipe("loss-write", VERBS, "a WRITE's middle packet lost: NAK of the sequence gap, go-back-N", &[fault(2, &[WRITE_MIDDLE], 4, Fate::Drop)], write_20),
    recipe("loss-write-last", VERBS, "a WRITE's last packet lost: timeout", &[fault(2, &[WRITE_LAST], 1, Fate::Drop)], write_20),
    recipe("loss-write-twice", VERBS, "a WRITE's middle packet lost, and its retransmission too", &[fault(2, &[WRITE_MIDDLE], 18, Fate::Drop), fault(2, &[WRITE_MIDDLE], 19, Fate::Drop)], write_20),
    recipe("loss-write-ack", VERBS, "the acknowledgement of a WRITE lost: timeout, duplicates", &[fault(1, &[ACK], 1, Fate::Drop)], write_20),
    recipe("loss-send", VERBS, "a SEND's first packet lost", &[fault(2, &[SEND_FIRST], 1, Fate::Drop)], send_5),
    recipe("loss-nak", VERBS, "a SEND's middle packet lost, and the NAK too", &[fault(2, &[SEND_MIDDLE], 2, Fate::Drop), fault(1, &[ACK], 1, Fate::Drop)], send_5),
    recipe("loss-read-request", VERBS, "a READ request lost", &[fault(2, &[READ_REQUEST], 1, Fate::Drop)], read_12),
    recipe("loss-read-response", VERBS, "a READ's middle response lost: the rest asked for again", &[fault(1, &[READ_MIDDLE], 4, Fate::Drop)], read_12),
    recipe("loss-atomic-ack", VERBS, "an atomic's result lost: the duplicate gets the saved result", &[fault(1, &[ATOMIC_ACK], 2, Fate::Drop)], atomics),
    recipe("duplicates", VERBS, "a packet of each kind of request, and one ACK, delivered twice", &[
        fault(2, &[WRITE_FIRST], 1, Fate::Repeat), fault(2, &[READ_REQUEST], 1, Fate::Repeat), fault(2, &[FETCH_ADD], 1, Fate::Repeat),
        fault(2, &[SEND_MIDDLE], 1, Fate::Repeat), fault(1, &[ACK], 1, Fate::Repeat)], mixed),
    recipe("swapped", VERBS, "two WRITE packets swapped on the way", &[fault(2, &[WRITE_MIDDLE], 3, Fate::Swap)], write_20),
    recipe("rnr-send", VERBS, "SENDs that arrive before their receive is posted: RNR NAK, wait, again", &[], rnr_send),
    recipe("rnr-write-imm", VERBS, "a WRITE with immediate that arrives before its receive is posted", &[], rnr_write_imm),
    recipe("rnr-exceeded", VERBS, "SEND that never finds a receive: RNR retries used up", &[], rnr_exceeded),
    recipe("nak-write-rkey", VERBS, "WRITE with a wrong rkey: remote access error", &[], |p| refused(p, 0, 5000, Wrong::Key)),
    recipe("nak-write-range", VERBS, "WRITE beyond the end of the region: remote access error", &[], |p| refused(p, 0, 5000, Wrong::Range)),
    recipe("nak-read-rkey", VERBS, "READ with a wrong rkey: remote access error", &[], |p| refused(p, 4, 5000, Wrong::Key)),
    recipe("nak-read-permission", VERBS, "READ of a region that may only be written: remote access error", &[], |p| refused(p, 4, 100, Wrong::Permission)),
    recipe("nak-atomic-rkey", VERBS, "FetchAdd with a wrong rkey: remote access error", &[], |p| refused(p, 6, 8, Wrong::Key)),
    recipe("nak-send-too-long", VERBS, "SEND longer than the receive", &[], send_too_long),
    recipe("retry-exceeded", VERBS, "a SEND into the void: retries used up", &[
        fault(2, &[0x04], 1, Fate::Drop), fault(2, &[0x04], 2, Fate::Drop), fault(2, &[0x04], 3, Fate::Drop), fault(2, &[0x04], 4, Fate::Drop)], retry_exceeded),
    recipe("pingpong-v6", "ibv_rc_pingpong", "RC SEND of 3000 bytes over IPv6", &[], pingpong_v6),
    recipe("rping-v6", "rping", "rping over IPv6", &[], rping_v6),
    recipe("rping-loss", "rping", "rping; a READ request, a WRITE and an ACK lost", &[
        fault(1, &[READ_REQUEST], 2, Fate::Drop), fault(1, &[WRITE_LAST], 3, Fate::Drop), fault(2, &[ACK], 5, Fate::Drop)], rping_v4),
    recipe("rnbd-inv-off", "kernel RNBD over RTRS, always_invalidate=N", "RTRS session, 64 KiB written and read back, rkeys that stay", &[], |p| rnbd(p, "N", "ram0", IO)),
    recipe("rnbd-inv-on", "kernel RNBD over RTRS, always_invalidate=Y", "RTRS session from its start, 64 KiB written and read back, SEND with Invalidate", &[], |p| rnbd(p, "Y", "ram0", IO)),
    recipe("annex-a19", VERBS, "ATOMIC WRITE and FLUSH, of a range and of the whole region; a FLUSH to persistence that the key does not permit", &[], annex_a19).on(Kernel::V6_12),
    recipe("rnbd-zeroes", "kernel RNBD over RTRS, always_invalidate=N", "RNBD of a newer kernel: 64 KiB written, a flush, WRITE_ZEROES, a flush, read back", &[], |p| rnbd(p, "N", "loop0", ZEROES)).on(Kernel::V6_12),
    recipe("rnbd-zeroes-7.3", "kernel RNBD over RTRS, always_invalidate=N", "RNBD 2.2: 64 KiB written, a flush, WRITE_ZEROES, a flush, read back", &[], |p| rnbd(p, "N", "loop0", ZEROES)).on(Kernel::V7_3),
];

/// The two guests.
struct Pair<'a> {
    server: &'a Guest,
    client: &'a Guest,
}

/// Makes the captures, and replays them.
pub(crate) fn run(args: &Args, places: &Places) -> Result<(), Error> {
    let wanted = |r: &&Recipe| args.only.is_empty() || args.only.iter().any(|o| r.name.contains(o));
    let chosen: Vec<&Recipe> = RECIPES.iter().filter(wanted).collect();
    let out = args.out.clone().unwrap_or_else(|| places.lab.join("captures"));
    fs::create_dir_all(&out)?;
    let kernels: Vec<Kernel> = Kernel::ALL
        .into_iter()
        .filter(|k| chosen.iter().any(|r| r.kernel == *k))
        .collect();
    let _ready = lab::prepare(places, &kernels)?;
    let _net = Net::up(2)?;
    for tap in ["tap1", "tap2"] {
        let done = Command::new("bridge")
            .args(["link", "set", "dev", tap, "isolated", "on"])
            .status()?;
        if !done.success() {
            return Err("the bridge can't isolate its ports".into());
        }
    }
    let relay = Relay::start()?;
    let mut manifest = String::new();
    let mut failed = Vec::new();
    for kernel in kernels {
        if let Some(why) = places.missing(kernel) {
            failed.push(why);
            continue;
        }
        let recipes = chosen.iter().copied().filter(|r| r.kernel == kernel);
        on(kernel, recipes, &relay, places, &out, (&mut manifest, &mut failed))?;
    }
    fs::write(out.join("manifest.toml"), manifest)?;
    if !failed.is_empty() {
        return Err(failed.join("\n").into());
    }
    println!("captures and their manifest entries are in {}", out.display());
    replay(&out)
}

/// Makes those of one kernel; what they give for the manifest, and what went wrong, is added.
fn on<'a>(
    kernel: Kernel,
    recipes: impl Iterator<Item = &'a Recipe>,
    relay: &Relay,
    places: &Places,
    out: &Path,
    (manifest, failed): (&mut String, &mut Vec<String>),
) -> Result<(), Error> {
    let boot = |id| Guest::boot(id, Shape { kernel, ..SMALL }, places);
    let (server, client) = (boot(1)?, boot(2)?);
    let pair = Pair {
        server: &server,
        client: &client,
    };
    for (guest, id) in [(&server, 1), (&client, 2)] {
        guest.run(
            &format!("$LAB/verbs-agent -g 10.77.0.{id} >/tmp/agent.log 2>&1 &\nsleep 0.5"),
            20,
        )?;
    }
    // "#1 SMP PREEMPT_DYNAMIC Debian 6.1.192-1 (2026-…)"
    let version = client.run("uname -v", 10)?;
    let version = version
        .split_once("Debian ")
        .map_or("?", |(_, v)| v.split('-').next().unwrap_or(v));
    for recipe in recipes {
        lab::check_stop()?;
        match make(recipe, relay, &pair, out) {
            Ok(made) => {
                println!("{}: {}", recipe.name, made.join(", "));
                made.iter().for_each(|file| *manifest += &entry(recipe, file, version));
            }
            Err(e) => failed.push(format!("{}: {e}", recipe.name)),
        }
    }
    Ok(())
}

/// Puts our engine in the place of each side of what was captured.
fn replay(out: &Path) -> Result<(), Error> {
    let verdict = ferroce_replay::replay_folder(out)?;
    let (seen, wrong) = (&verdict.seen, &verdict.wrong);
    seen.iter().for_each(|line| println!("{line}"));
    println!("{} sides replayed, {} findings", seen.len(), wrong.len());
    match wrong.is_empty() {
        true => Ok(()),
        false => Err(format!("our engine differs:\n{}", wrong.join("\n")).into()),
    }
}

fn entry(recipe: &Recipe, file: &str, version: &str) -> String {
    let seen = match file {
        f if f.ends_with("-server.pcap") => ", as the server sends and gets it",
        f if f.ends_with("-client.pcap") => ", as the client sends and gets it",
        _ => "",
    };
    let Recipe {
        name, program, shows, ..
    } = recipe;
    format!(
        "\n[[capture]]\nfile = \"{file}\"\nsource = \"cargo xtask interop capture --only {name}: two guests over virtio-net, MTU 1500{seen}\"\n\
         program = \"{program}\"\nkernel = \"Debian {version} with rdma_rxe, both sides\"\nshows = \"{shows}\"\npath_mtu = 1024\n"
    )
}

fn make(recipe: &Recipe, relay: &Relay, pair: &Pair<'_>, out: &Path) -> Result<Vec<String>, Error> {
    let names = [
        format!("{}-server.pcap", recipe.name),
        format!("{}-client.pcap", recipe.name),
    ];
    let files = names.each_ref().map(|n| out.join(n));
    relay.record([&files[0], &files[1]], recipe.faults)?;
    let done = (recipe.run)(pair);
    // What is still under way.
    std::thread::sleep(Duration::from_millis(300));
    let faults = relay.finish();
    done.and(faults)?;
    if !recipe.faults.is_empty() {
        // A side that never got anything has nothing but a file header.
        let (empty, made): (Vec<_>, Vec<_>) = names
            .into_iter()
            .partition(|n| fs::metadata(out.join(n)).is_ok_and(|m| m.len() <= 24));
        for name in empty {
            fs::remove_file(out.join(name))?;
        }
        return Ok(made);
    }
    // Nothing happened on the way: one view is enough, the client's.
    fs::remove_file(&files[0])?;
    let name = format!("{}.pcap", recipe.name);
    fs::rename(&files[1], out.join(&name))?;
    Ok(vec![name])
}

/// A connection to a guest's verbs-agent, with a queue pair and two buffers of 64 KiB.
struct Agent {
    lines: BufReader<TcpStream>,
    qpn: u32,
    mems: [(u64, u32); 2],
}

const BUFFER: u32 = 65536;
const CLIENT_PSN: u32 = 0x00ff_fff0;
const SERVER_PSN: u32 = 0x0012_3456;
const SIGNALED: u32 = 2;
const SOLICITED: u32 = 4;

impl Agent {
    /// `permits` is what a peer of the queue pair may do, `memory` what it may do with the buffers.
    fn new(guest: u8, permits: u32, memory: [u32; 2]) -> Result<Self, Error> {
        let stream = TcpStream::connect(SocketAddr::from((Ipv4Addr::new(10, 77, 0, guest), 18600)))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let mut agent = Self {
            lines: BufReader::new(stream),
            qpn: 0,
            mems: [(0, 0); 2],
        };
        let created = agent.call(&format!("create 64 64 1 64 {permits}"))?;
        agent.qpn = created.first().ok_or("no QP number")?.parse()?;
        for (i, access) in memory.into_iter().enumerate() {
            let mem = agent.call(&format!("mem {BUFFER} {access}"))?;
            let [_, addr, rkey] = &mem[..] else {
                return Err(format!("mem answered {mem:?}").into());
            };
            agent.mems[i] = (addr.parse()?, rkey.parse()?);
            agent.call(&format!("fill {i} 0 {BUFFER} {}", u32::from(guest) * 10 + i as u32))?;
        }
        Ok(agent)
    }

    fn line(&mut self) -> Result<Vec<String>, Error> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        Ok(line.split_whitespace().map(str::to_owned).collect())
    }

    fn call(&mut self, command: &str) -> Result<Vec<String>, Error> {
        self.lines.get_mut().write_all(format!("{command}\n").as_bytes())?;
        let mut words = self.line()?;
        if words.first().is_none_or(|w| w != "ok") {
            return Err(format!("{command}: {}", words.join(" ")).into());
        }
        words.remove(0);
        Ok(words)
    }

    /// Takes `count` completions and returns their status numbers.
    fn poll(&mut self, queue: char, count: u32) -> Result<Vec<u32>, Error> {
        self.lines
            .get_mut()
            .write_all(format!("poll {queue} {count} 20000\n").as_bytes())?;
        let mut statuses = Vec::new();
        loop {
            match &self.line()?[..] {
                [word, _, status, ..] if word == "wc" => statuses.push(status.parse()?),
                [word] if word == "end" && statuses.len() == count as usize => return Ok(statuses),
                other => return Err(format!("{} of {count} completions, then {other:?}", statuses.len()).into()),
            }
        }
    }

    fn recv(&mut self, len: u32) -> Result<(), Error> {
        self.call(&format!("recv 1 0 0 {len}")).map(drop)
    }

    /// Posts a send work request: `op` as in `ibv_wr_opcode`; from the start of buffer 0.
    fn post(&mut self, op: u32, len: u32, flags: u32, (addr, rkey): (u64, u32)) -> Result<(), Error> {
        self.call(&format!(
            "post 7 {op} {flags} 0 0 {len} {addr} {rkey} {} 5 1000",
            0xfeed_beefu32
        ))
        .map(drop)
    }

    /// The same, and waits for its success.
    fn done(&mut self, op: u32, len: u32, to: (u64, u32)) -> Result<(), Error> {
        self.post(op, len, SIGNALED, to)?;
        self.expect('s', &[0])
    }

    fn expect(&mut self, queue: char, statuses: &[u32]) -> Result<(), Error> {
        let got = self.poll(queue, statuses.len() as u32)?;
        if got == statuses {
            return Ok(());
        }
        Err(format!("completed with {got:?}, not {statuses:?}").into())
    }
}

const RDMA_WRITE: u32 = 0;
const RDMA_WRITE_IMM: u32 = 1;
const SEND: u32 = 2;
const SEND_IMM: u32 = 3;
const RDMA_READ: u32 = 4;
const COMPARE_SWAP: u32 = 5;
const FETCH_AND_ADD: u32 = 6;
const SEND_INV: u32 = 9;
const ATOMIC_WRITE: u32 = 15;

// What peers may do, as in `ibv_access_flags`.
const READ_WRITE_ATOMIC: u32 = 0xe;
const FLUSH_GLOBAL: u32 = 1 << 8;
const FLUSH_PERSISTENT: u32 = 1 << 9;

/// Server and client, connected; retries as given. All may be done with buffer 0, buffer 1 may only be written.
fn connect(timeout: u32, retry: u32, rnr_retry: u32) -> Result<(Agent, Agent), Error> {
    let agent = |guest| Agent::new(guest, READ_WRITE_ATOMIC, [31, 3]);
    join(agent(1)?, agent(2)?, timeout, retry, rnr_retry)
}

fn join(
    mut server: Agent,
    mut client: Agent,
    timeout: u32,
    retry: u32,
    rnr_retry: u32,
) -> Result<(Agent, Agent), Error> {
    // RNR timer 12 is 0.64 ms, 20 is 10.24 ms.
    server.call(&format!("rtr {} ::ffff:10.77.0.2 {CLIENT_PSN} 3 20 16", client.qpn))?;
    client.call(&format!("rtr {} ::ffff:10.77.0.1 {SERVER_PSN} 3 20 16", server.qpn))?;
    server.call(&format!("rts {SERVER_PSN} {timeout} {retry} {rnr_retry} 16"))?;
    client.call(&format!("rts {CLIENT_PSN} {timeout} {retry} {rnr_retry} 16"))?;
    Ok((server, client))
}

fn reliable() -> Result<(Agent, Agent), Error> {
    // 134 ms
    connect(15, 7, 7)
}

const fn at((addr, rkey): (u64, u32), offset: u64) -> (u64, u32) {
    (addr + offset, rkey)
}

fn verbs_ops(_: &Pair<'_>) -> Result<(), Error> {
    let (mut server, mut client) = reliable()?;
    let to = at(server.mems[0], 4096);
    for len in [0, 1, 1023, 1024, 1025, 5000] {
        for op in [SEND, SEND_IMM, RDMA_WRITE, RDMA_WRITE_IMM, RDMA_READ] {
            let receives = matches!(op, SEND | SEND_IMM | RDMA_WRITE_IMM);
            if receives {
                server.recv(BUFFER)?;
            }
            client.done(op, len, to)?;
            if receives {
                server.expect('r', &[0])?;
            }
        }
    }
    client.done(COMPARE_SWAP, 8, to)?;
    client.done(FETCH_AND_ADD, 8, to)?;
    server.recv(BUFFER)?;
    client.post(SEND, 100, SIGNALED | SOLICITED, to)?;
    client.expect('s', &[0])?;
    // And the other way.
    let back = at(client.mems[0], 8192);
    client.recv(BUFFER)?;
    server.done(SEND, 3000, back)?;
    server.done(RDMA_WRITE, 3000, back)?;
    server.done(RDMA_READ, 3000, back)
}

fn send_invalidate(_: &Pair<'_>) -> Result<(), Error> {
    let (mut server, mut client) = reliable()?;
    let key = server.call("mw 0 0 8192 7")?;
    let key = key.first().ok_or("no key")?.parse()?;
    let window = (server.mems[0].0, key);
    client.done(RDMA_WRITE, 2000, window)?;
    client.done(RDMA_READ, 2000, window)?;
    server.recv(BUFFER)?;
    client.done(SEND_INV, 2000, window)?;
    server.expect('r', &[0])?;
    client.post(RDMA_WRITE, 100, SIGNALED, window)?;
    client.expect('s', &[10])
}

fn annex_a19(_: &Pair<'_>) -> Result<(), Error> {
    // Numbers of the FETH.
    const VISIBLE: u32 = 1;
    const PERSISTENT: u32 = 2;
    let permits = READ_WRITE_ATOMIC | FLUSH_GLOBAL | FLUSH_PERSISTENT;
    let agent = |guest| Agent::new(guest, permits, [31 | FLUSH_GLOBAL, 31]);
    // 134 ms
    let (server, mut client) = join(agent(1)?, agent(2)?, 15, 7, 7)?;
    let (addr, key) = at(server.mems[0], 4096);
    for n in 0..3 {
        client.done(ATOMIC_WRITE, 8, (addr + 8 * n, key))?;
    }
    client.done(RDMA_WRITE, 3000, (addr, key))?;
    for (placement, whole, status) in [(VISIBLE, 0, 0), (VISIBLE, 1, 0), (PERSISTENT, 0, 10)] {
        client.call(&format!("flush 8 {placement} {whole} {addr} 3000 {key}"))?;
        client.expect('s', &[status])?;
    }
    Ok(())
}

fn write_20(_: &Pair<'_>) -> Result<(), Error> {
    let (server, mut client) = reliable()?;
    client.done(RDMA_WRITE, 20 * 1024, server.mems[0])?;
    client.done(RDMA_WRITE, 2000, at(server.mems[0], 32768))
}

fn send_5(_: &Pair<'_>) -> Result<(), Error> {
    let (mut server, mut client) = reliable()?;
    let to = server.mems[0];
    for _ in 0..2 {
        server.recv(BUFFER)?;
        client.done(SEND, 5000, to)?;
    }
    server.expect('r', &[0, 0])
}

fn read_12(_: &Pair<'_>) -> Result<(), Error> {
    let (server, mut client) = reliable()?;
    client.done(RDMA_READ, 12 * 1024, server.mems[0])?;
    client.done(RDMA_READ, 2000, at(server.mems[0], 32768))
}

fn atomics(_: &Pair<'_>) -> Result<(), Error> {
    let (server, mut client) = reliable()?;
    for _ in 0..3 {
        client.done(FETCH_AND_ADD, 8, server.mems[0])?;
    }
    client.done(COMPARE_SWAP, 8, server.mems[0])
}

fn mixed(_: &Pair<'_>) -> Result<(), Error> {
    let (mut server, mut client) = reliable()?;
    let to = server.mems[0];
    server.recv(BUFFER)?;
    client.done(RDMA_WRITE, 3000, to)?;
    client.done(RDMA_READ, 3000, to)?;
    client.done(FETCH_AND_ADD, 8, to)?;
    client.done(SEND, 3000, to)?;
    client.done(RDMA_WRITE, 3000, to)
}

fn rnr_send(_: &Pair<'_>) -> Result<(), Error> {
    let (mut server, mut client) = reliable()?;
    let to = server.mems[0];
    for _ in 0..2 {
        client.post(SEND, 3000, SIGNALED, to)?;
        std::thread::sleep(Duration::from_millis(50));
        server.recv(BUFFER)?;
        client.expect('s', &[0])?;
    }
    Ok(())
}

fn rnr_write_imm(_: &Pair<'_>) -> Result<(), Error> {
    let (mut server, mut client) = reliable()?;
    client.post(RDMA_WRITE_IMM, 3000, SIGNALED, server.mems[0])?;
    std::thread::sleep(Duration::from_millis(50));
    server.recv(BUFFER)?;
    client.expect('s', &[0])
}

fn rnr_exceeded(_: &Pair<'_>) -> Result<(), Error> {
    let (server, mut client) = connect(15, 7, 2)?;
    client.post(SEND, 100, SIGNALED, server.mems[0])?;
    client.expect('s', &[13])
}

#[derive(Clone, Copy)]
enum Wrong {
    Key,
    Range,
    Permission,
}

/// A good WRITE, the refused operation, and one behind it that is flushed.
fn refused(_: &Pair<'_>, op: u32, len: u32, wrong: Wrong) -> Result<(), Error> {
    let (server, mut client) = reliable()?;
    let good = server.mems[0];
    let to = match wrong {
        Wrong::Key => (good.0, good.1 ^ 0x4200),
        Wrong::Range => at(good, u64::from(BUFFER) - 1000),
        Wrong::Permission => server.mems[1],
    };
    client.done(RDMA_WRITE, 100, good)?;
    client.post(op, len, SIGNALED, to)?;
    client.expect('s', &[10])?;
    client.post(RDMA_WRITE, 100, SIGNALED, good)?;
    client.expect('s', &[5])
}

fn send_too_long(_: &Pair<'_>) -> Result<(), Error> {
    let (mut server, mut client) = reliable()?;
    server.recv(1000)?;
    client.post(SEND, 3000, SIGNALED, server.mems[0])?;
    let status = client.poll('s', 1)?;
    println!(
        "  send-too-long: requester's status {status:?}, responder's {:?}",
        server.poll('r', 1)?
    );
    Ok(())
}

fn retry_exceeded(_: &Pair<'_>) -> Result<(), Error> {
    let (mut server, mut client) = connect(14, 3, 7)?;
    server.recv(BUFFER)?;
    client.post(SEND, 100, SIGNALED, server.mems[0])?;
    client.expect('s', &[12])
}

fn pingpong_v6(pair: &Pair<'_>) -> Result<(), Error> {
    let program = |id| {
        format!(
            "ibv_rc_pingpong -d rxe0 -s 3000 -n 6 -r 6 -g $(for i in 0 1 2 3 4 5; do grep -q '^fd77:.*:000{id}$' \
             /sys/class/infiniband/rxe0/ports/1/gids/$i && echo $i && break; done)"
        )
    };
    pair.server.run(&format!("{} >/tmp/pp.log 2>&1 &", program(1)), 10)?;
    pair.client
        .run(&format!("sleep 1; {} 10.77.0.1", program(2)), 60)
        .map(drop)
}

fn rping(pair: &Pair<'_>, server: &str) -> Result<(), Error> {
    pair.server
        .run(&format!("rping -s -C 4 -S 3000 -a {server} >/tmp/rp.log 2>&1 &"), 10)?;
    pair.client
        .run(&format!("sleep 1; rping -c -C 4 -S 3000 -a {server}"), 60)
        .map(drop)
}

fn rping_v4(pair: &Pair<'_>) -> Result<(), Error> {
    rping(pair, "10.77.0.1")
}

fn rping_v6(pair: &Pair<'_>) -> Result<(), Error> {
    rping(pair, "fd77::1")
}

/// On /dev/rnbd0.
const IO: &str = "\
    dd if=/tmp/data of=/dev/rnbd0 bs=32k count=2 oflag=direct status=none\n\
    dd if=/dev/rnbd0 of=/tmp/back bs=32k count=2 iflag=direct status=none\n";
/// The second half is made zeroes, then flushed. A loop device can do both.
const ZEROES: &str = "\
    [ $(cat /sys/block/rnbd0/queue/write_zeroes_max_bytes) -gt 0 ]\n\
    dd if=/tmp/data of=/dev/rnbd0 bs=32k count=2 oflag=direct status=none; sync /dev/rnbd0\n\
    blkdiscard -z -o 32768 -l 32768 /dev/rnbd0; sync /dev/rnbd0\n\
    truncate -s 32768 /tmp/data; truncate -s 65536 /tmp/data\n\
    dd if=/dev/rnbd0 of=/tmp/back bs=32k count=2 iflag=direct status=none\n";

/// `io` leaves in /tmp/back what the device has, and in /tmp/data what it has to have.
fn rnbd(pair: &Pair<'_>, invalidate: &str, device: &str, io: &str) -> Result<(), Error> {
    // A short queue: the server tells the client of every chunk.
    let up = format!(
        "set -e; truncate -s 1M /tmp/loop.img; losetup /dev/loop0 /tmp/loop.img; insmod $LINUX/rtrs/rtrs-core.ko; \
         insmod $LINUX/rtrs/rtrs-server.ko always_invalidate={invalidate} sess_queue_depth=32; insmod $LINUX/rnbd/rnbd-server.ko"
    );
    pair.server.run(&up, 30)?;
    let io = format!(
        "set -e; insmod $LINUX/rtrs/rtrs-core.ko; insmod $LINUX/rtrs/rtrs-client.ko; insmod $LINUX/rnbd/rnbd-client.ko\n\
         echo 'sessname=s1 path=ip:10.77.0.1 device_path=newroot/dev/{device}' > /sys/class/rnbd-client/ctl/map_device\n\
         for i in $(seq 50); do [ -b /dev/rnbd0 ] && break; sleep 0.1; done\n\
         head -c 65536 $LINUX/initramfs.gz > /tmp/data\n\
         {io}cmp /tmp/data /tmp/back\n\
         echo normal > /sys/block/rnbd0/rnbd/unmap_device\n\
         rmmod rnbd_client rtrs_client rtrs_core"
    );
    let done = pair.client.run(&io, 90);
    let down = pair
        .server
        .run("rmmod rnbd_server rtrs_server rtrs_core; losetup -D", 60);
    done.and(down).map(drop)
}
