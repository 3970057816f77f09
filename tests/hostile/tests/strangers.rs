//! Forged packets of strangers to `ferroce serve` and `ferroce map`: sessions go on, others get in, nothing is
//! taken up for who has not shown his address, and nobody is hit with more than was sent.
//!
//! Figures are printed (`--nocapture`); asserted are counts, and ratios within one run, with wide bounds.

use std::{
    io,
    net::Ipv4Addr,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use ferroce_hostile::{
    aim::Aim,
    attack::{Background, Control, Reflections, between, flood, reflect},
    forge::{Forger, Identifications, Kind},
    load::Load,
    origin::Origin,
};
use ferroce_loopback::addresses;
use ferroce_tests::{
    device::{Pair, map_args, serve},
    fresh_address,
    nbd::Client,
    process::Running,
    usage::Usage,
};
use roce_bth::Opcode;

const MIB: u64 = 1 << 20;
const DISK: usize = 64 << 20;
/// How long a rate is measured where there is no attack.
const CALM: Duration = Duration::from_secs(1);
/// A sixth of the speed is far more than what a broken session has, and far less than what a busy host takes away.
const FAR_FROM_STOPPED: f64 = 1.0 / 6.0;

/// The speed of the device, measured up to three times until it is far from stopped: a host that is busy with something else
/// has better moments, a session that is broken has none.
fn rate_of(load: &Load, over: Duration, calm: f64) -> f64 {
    let measured = (0..3).map(|_| load.rate(over));
    let mut best = 0.0_f64;
    for rate in measured {
        best = best.max(rate);
        if best > calm * FAR_FROM_STOPPED || load.error().is_some() {
            break;
        }
    }
    best
}

/// Paths that a server keeps at a time for who has not shown his address.
const HALF_OPEN: u64 = 256;

/// One measurement at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends both processes; the one session must have lived all the time.
fn end_well(pair: Pair) {
    let map = pair.map.stop();
    assert_eq!(map.code, Some(0), "{}", map.stderr);
    let serve = pair.serve.stop();
    assert_eq!(serve.code, Some(0), "{}", serve.stderr);
    let events = serve.json();
    let of_test = |event: &str| {
        events
            .iter()
            .filter(|e| e["event"] == event && e["session"] == "test")
            .count()
    };
    assert_eq!(
        (of_test("session_opened"), of_test("session_closed")),
        (1, 1),
        "{events:?}"
    );
}

/// A mapped device is worked on while both ends get forged MADs from the other's address.
fn forged_mads(rate: f64, seconds: u64) {
    let _alone = alone();
    let pair = Pair::start_sparse(DISK);
    let load = Load::start(&pair.socket, 2).unwrap();
    let calm = load.rate(CALM);
    let ends = [pair.server, pair.client].map(|a| Origin::bind(Aim::LOOPBACK, a.into()).unwrap());
    let attack = Background::start(move |control| {
        // Where the receiver's belief is led: a counter, which no ferroce peer has.
        let mut forger = Forger::new(1, Identifications::Counter(40_000));
        between(ends, &[Kind::Drep, Kind::Mra], &mut forger, rate, control)
    });
    let under = rate_of(&load, Duration::from_secs(seconds), calm);
    let sent = attack.stop().unwrap();
    println!(
        "{rate} MADs a second to each end ({} in all): {:.0} MB/s, before that {:.0} MB/s, a ratio of {:.2}",
        sent.packets,
        under / 1e6,
        calm / 1e6,
        under / calm
    );
    load.finish()
        .unwrap_or_else(|e| panic!("{e}\n{}\n{}", pair.map.stderr(), pair.serve.stderr()));
    assert!(under > calm * FAR_FROM_STOPPED, "the session crawls");
    end_well(pair);
}

#[test]
fn a_session_survives_fifty_forged_mads_a_second() {
    forged_mads(50.0, 6);
}

#[test]
fn a_session_survives_five_thousand_forged_mads_a_second() {
    forged_mads(5000.0, 5);
}

/// A client that was not there before maps the device and reads from it.
fn new_client(server: Ipv4Addr, from: Ipv4Addr, pair: &Pair) -> Result<Duration, String> {
    let socket = pair.dir.path().join("new.sock");
    let more = ["--session", "new", "--ro"];
    let started = Instant::now();
    let mut map = Running::start(&map_args(from, &server.to_string(), &socket, &more));
    let event = map.next_event();
    if event["event"] != "mapped" {
        return Err(format!("{event}\n{}", map.stderr()));
    }
    let mut client = Client::connect(&socket).map_err(|e| e.to_string())?;
    client.read(0, 4096).map_err(|e| format!("{e:?}"))?;
    let took = started.elapsed();
    match map.stop() {
        done if done.code == Some(0) => Ok(took),
        done => Err(done.stderr),
    }
}

/// The most that a process takes as long as `lasts`, and a second longer.
fn most(pid: u32, lasts: impl Fn() -> bool) -> Usage {
    let mut until = Instant::now() + Duration::from_secs(1);
    let mut most = Usage::default();
    while Instant::now() < until {
        most = most.max(Usage::of(pid).unwrap());
        if lasts() {
            until = Instant::now() + Duration::from_secs(1);
        }
        thread::sleep(Duration::from_millis(20));
    }
    most
}

/// `count` REQs from `crowd` addresses, of whose senders nothing is heard again; `near`: from the address that the new
/// client has; `shared`: for paths and connections of few sessions.
fn forged_requests(count: u64, crowd: u8, near: bool, shared: bool) {
    let _alone = alone();
    let pair = Pair::start_sparse(DISK);
    let load = Load::start(&pair.socket, 2).unwrap();
    let calm = load.rate(CALM);
    let before = most(pair.serve.id(), || false);
    let first = addresses(crowd);
    let origins = Origin::crowd(Aim::LOOPBACK, first, crowd.into()).unwrap();
    let mut forger = Forger::new(count, Identifications::Fixed(0));
    forger.shared = shared;
    // A few at once; more of them at a rate that the server's backlog lets through.
    let rate = if count > 64 { 400.0 } else { 0.0 };
    let to = [pair.server.into()];
    let attack =
        Background::start(move |control| flood(&to, &origins, &[Kind::Req], &mut forger, rate, Some(count), control));
    let during = most(pair.serve.id(), || attack.packets() < count);
    attack.stop().unwrap();
    let from = if near { first } else { fresh_address() };
    let client = new_client(pair.server, from, &pair);
    let under = rate_of(&load, CALM, calm);
    let what = if shared { ", for few sessions" } else { "" };
    let took = client
        .as_ref()
        .map_or("DID NOT GET IN".into(), |t| format!("took {:.2} s", t.as_secs_f64()));
    println!(
        "{count} REQs from {crowd} addresses{what}: a new client {took}; threads {} -> {}, descriptors {} -> {}, memory \
         {} -> {} MiB, address space {} -> {} MiB; {:.0} MB/s, before that {:.0} MB/s, a ratio of {:.2}",
        before.threads,
        during.threads,
        before.descriptors,
        during.descriptors,
        before.anonymous / MIB,
        during.anonymous / MIB,
        before.address_space / MIB,
        during.address_space / MIB,
        under / 1e6,
        calm / 1e6,
        under / calm,
    );
    load.finish().unwrap();
    client.unwrap();
    // Nothing is made for who has not shown his address, but a queue pair each, which has a descriptor, for some.
    assert!(during.threads <= before.threads + 4, "threads");
    assert!(
        during.descriptors <= before.descriptors + HALF_OPEN.min(count) + 16,
        "descriptors"
    );
    assert!(during.anonymous <= before.anonymous + 32 * MIB, "memory");
    assert!(
        during.address_space <= before.address_space + 256 * MIB,
        "address space"
    );
    assert!(under > calm * FAR_FROM_STOPPED, "the session crawls");
    end_well(pair);
}

#[test]
fn sixteen_forged_requests_do_not_lock_their_address_out() {
    forged_requests(16, 1, true, false);
}

#[test]
fn sixty_four_forged_requests_do_not_lock_everybody_out() {
    forged_requests(64, 64, false, false);
}

#[test]
fn five_hundred_forged_requests_take_no_descriptors() {
    forged_requests(512, 250, false, false);
}

#[test]
fn five_hundred_forged_requests_for_paths_of_few_sessions_take_none_either() {
    forged_requests(512, 250, false, true);
}

#[test]
fn fifteen_hundred_forged_requests_take_no_regions() {
    forged_requests(1536, 250, false, false);
}

#[test]
fn fifteen_hundred_forged_requests_for_connections_of_few_sessions_take_none_either() {
    forged_requests(1536, 250, false, true);
}

/// Counts the packets that one of each kind and opcode brings upon the address that it seems to come from.
fn reflections(to: Ipv4Addr, timeout: u8) -> io::Result<Reflections> {
    let count = u8::try_from(Kind::ALL.len() + Opcode::ALL.len()).expect("few kinds");
    let mut forger = Forger::new(timeout.into(), Identifications::Fixed(0));
    forger.timeout = Some(timeout);
    // Longer than a handshake may take.
    let wait = Duration::from_secs(20);
    reflect(
        Aim::LOOPBACK,
        to.into(),
        addresses(count),
        &mut forger,
        wait,
        &Control::default(),
    )
}

#[test]
fn a_forged_packet_brings_little_upon_its_false_sender() {
    let pair = Pair::start(&[0; 4096], "", &[], &[]);
    // The shortest time within which requests may promise an answer, the kernel's, and the longest.
    let cases = [(pair.server, 0), (pair.server, 20), (pair.server, 31), (pair.client, 0)];
    let found: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = cases
            .map(|(to, timeout)| scope.spawn(move || reflections(to, timeout)))
            .into();
        threads.into_iter().map(|t| t.join().unwrap().unwrap()).collect()
    });
    let mut worst = Vec::new();
    for ((to, timeout), found) in cases.iter().zip(&found) {
        for (name, r) in found.iter().filter(|(_, r)| r.packets > 0) {
            let text = format!("{name} to {to}, timeout code {timeout}: {r:?}");
            println!("{text}");
            if r.packets > 5 || r.bytes > 3 * r.sent {
                worst.push(text);
            }
        }
    }
    assert!(
        worst.is_empty(),
        "more than 5 packets or 3 times the bytes:\n{}",
        worst.join("\n")
    );
    end_well(pair);
}

#[test]
fn a_flood_of_everything_is_survived() {
    let _alone = alone();
    let pair = Pair::start_sparse(DISK);
    let load = Load::start(&pair.socket, 2).unwrap();
    let calm = load.rate(CALM);
    let before = most(pair.serve.id(), || false);
    let origins = Origin::crowd(Aim::LOOPBACK, addresses(250), 250).unwrap();
    let targets = [pair.server, pair.client].map(Into::into);
    let attack = Background::start(move |control| {
        let mut forger = Forger::new(7, Identifications::Random);
        forger.timeout = None;
        flood(&targets, &origins, &Kind::ALL, &mut forger, 2000.0, None, control)
    });
    let under = rate_of(&load, Duration::from_secs(5), calm);
    let client = new_client(pair.server, fresh_address(), &pair);
    let during = most(pair.serve.id(), || false);
    let sent = attack.stop().unwrap();
    println!(
        "{} packets of all kinds: a new client {client:?}; {before:?} -> {during:?}; a ratio of {:.2}",
        sent.packets,
        under / calm
    );
    load.finish().unwrap();
    client.unwrap();
    assert!(during.threads <= before.threads + 8 && during.descriptors <= before.descriptors + HALF_OPEN + 16);
    assert!(during.anonymous <= before.anonymous + 64 * MIB);
    assert!(under > calm * FAR_FROM_STOPPED, "the session crawls");
    let lines = pair.serve.stderr().lines().count() + pair.map.stderr().lines().count();
    assert!(lines <= 60, "{lines} lines were logged for {} packets", sent.packets);
    end_well(pair);
}

#[test]
fn a_server_that_was_flooded_ends_well() {
    let dir = tempfile::tempdir().unwrap();
    let disk = ferroce_tests::device::image(dir.path(), "i", &[0; 4096]);
    let server = fresh_address();
    let (serve, _) = serve(server, &[format!("disk={}", disk.display())], &[]);
    let origins = Origin::crowd(Aim::LOOPBACK, addresses(100), 100).unwrap();
    let mut forger = Forger::new(9, Identifications::Fixed(0));
    let control = Control::default();
    flood(
        &[server.into()],
        &origins,
        &[Kind::Req],
        &mut forger,
        0.0,
        Some(200),
        &control,
    )
    .unwrap();
    let done = serve.stop();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert!(!done.stderr.contains("panicked"), "{}", done.stderr);
}
