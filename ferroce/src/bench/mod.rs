//! `ferroce bench`: bandwidth and latency of the transport, within one process or between two.

mod active;
mod ceiling;
mod endpoint;
mod looped;
mod passive;
mod report;
mod rtrs;
mod rtrs_server;
mod threads;
mod udp;
mod usage;
mod wire;

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use clap::{Args, ValueEnum};
use roce::reactor::{ReactorConfig, SpinMode};
use roce::{Device, DeviceConfig, Faults, LocalDevice, Mtu, VerbsError, WindowConfig, iface};
use serde_json::json;

use crate::{
    fault::{Demanded, FaultArgs},
    names::{Endpoint, Resolver},
    output::{self, Failure},
    rdma::RdmaArgs,
    signals::Stop,
    units,
};
use active::{Bandwidth, Load, Stopped};
use ceiling::Ceiling;
use endpoint::Endpoint as Connections;
use passive::Passive;
use report::Measurement;

/// RDMA_CM port that the passive side listens on.
const PORT: u16 = 4792;
/// Alternations between the measurement and its ceiling within one process, so that both see the same machine.
const ROUNDS: u32 = 4;

/// Measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Operation {
    /// RDMA WRITE bandwidth, and its ratio to the ceiling
    Write,
    /// RDMA READ bandwidth
    Read,
    /// SEND bandwidth
    Send,
    /// Round trips of WRITE and SEND, 64 bytes unless --size is given, with both sides polling or (--events) sleeping; next to those of plain
    /// UDP if the size fits in a datagram
    Latency,
    /// RTRS without a block device, client and server in two processes: IOPS, latency, CPU time and system calls
    Rtrs,
    /// The same packets through the same sockets, with ICRC and copies but without a protocol
    Ceiling,
}

impl Operation {
    /// Returns the name of a bandwidth measurement.
    fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Send => "send",
            Self::Write | Self::Latency | Self::Rtrs | Self::Ceiling => "write",
        }
    }
}

/// Options of `ferroce bench`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  ferroce bench write
  ferroce bench read --size 4K,64K,1M --qps 4 --json
  ferroce bench write --fault loss=1%,seed=7

Without --server and --connect both sides run in this process, on 127.0.0.1 and 127.0.0.2. With --rdma NAME both are on that
device, and the same in software follows, with the ratio:
  ferroce bench write --rdma mlx5_0
Between two processes or hosts, first on the one, then on the other:
  ferroce bench --server --addr 192.0.2.1
  ferroce bench write --connect 192.0.2.1
RTRS, with a server in a process of its own, or on another host:
  ferroce bench rtrs --size 512,4K,128K,1M --depth 32
  ferroce bench rtrs --server --addr 192.0.2.1
  ferroce bench rtrs --connect 192.0.2.1 --write")]
pub(crate) struct BenchArgs {
    /// What to measure
    #[arg(value_enum, required_unless_present_any = ["server", "listen"])]
    operation: Option<Operation>,
    /// Serve `ferroce bench --connect` at --addr until ctrl-C: rtrs, or without an operation all others
    #[arg(long, requires = "addr", conflicts_with = "connect")]
    server: bool,
    /// Measure between this host and a server, `ferroce bench --server`
    #[arg(long, value_name = "HOST[:4792]")]
    connect: Option<Endpoint>,
    /// Address or name of this host; with --server optionally with a port [default: 127.0.0.1, or the route's source address]
    #[arg(long, alias = "local", value_name = "HOST[:4792]")]
    addr: Option<Endpoint>,
    /// Former spelling of --server --addr
    #[arg(long, hide = true, conflicts_with_all = ["addr", "server", "connect"])]
    listen: Option<Endpoint>,
    /// Message size; a list gives one measurement for each [default: 1M, for latency 64, for rtrs 4K]
    #[arg(short, long, value_name = "BYTES", value_delimiter = ',', value_parser = units::size32)]
    size: Vec<u32>,
    /// Messages in flight on each queue pair; rtrs: requests in flight
    #[arg(short, long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    depth: u32,
    /// Queue pairs; not for rtrs
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    qps: u32,
    /// Shards of each software device here, with a socket, a lock and a thread each; queue pairs are distributed over them; not for rtrs
    #[arg(long, default_value_t = 1, value_parser = units::shards)]
    shards: usize,
    /// write, read, send: threads of this side, with --qps queue pairs each
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: u32,
    /// write, read, send: additional queue pairs that are connected and idle
    #[arg(long, value_name = "QPS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=16_000))]
    idle_qps: u32,
    /// latency: both sides sleep until their completion queues have events (the WRITEs have immediate data)
    #[arg(long)]
    events: bool,
    /// Largest path MTU: 256, 512, 1024, 2048 or 4096 [default: the largest that the interface carries]
    #[arg(long, value_name = "BYTES")]
    mtu: Option<Mtu>,
    /// Duration of each measurement
    #[arg(long, default_value = "2", value_parser = units::seconds)]
    seconds: Duration,
    /// Number of messages to send, instead of a duration (latency: round trips); not for rtrs
    #[arg(short = 'n', long, conflicts_with = "seconds")]
    iters: Option<u64>,
    /// Send one packet per system call (no UDP segmentation offload)
    #[arg(long)]
    no_gso: bool,
    /// Receive one packet per system call (no UDP receive offload)
    #[arg(long)]
    no_gro: bool,
    /// Receive buffer of each socket
    #[arg(long, value_name = "BYTES", default_value = "8M", value_parser = units::memory)]
    socket_buffer: usize,
    /// Most bytes in flight towards the peer [default: by the receive buffer]
    #[arg(long, value_name = "BYTES", value_parser = units::memory)]
    window: Option<usize>,
    /// Write all packets of this side to this capture file; only its owner may read it
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    #[command(flatten)]
    fault: FaultArgs,
    /// The faults of `fault`, once started.
    #[arg(skip)]
    faults: Option<Faults>,
    /// rtrs: write instead of reading
    #[arg(long)]
    write: bool,
    /// rtrs: connections for I/O
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=4095))]
    connections: u16,
    /// rtrs: whether the server invalidates a chunk's key with every request
    #[arg(long, value_name = "on|off", value_parser = crate::serve::on_off, default_value = "on", action = clap::ArgAction::Set)]
    always_invalidate: bool,
    /// Longest busy polling of loops (rtrs) and waiting threads (latency --events) before they sleep: microseconds, which the devices' own
    /// threads do as well, auto (up to 50 as long as that finds work), or off
    #[arg(long, value_name = "US|auto|off", default_value = "auto")]
    spin: SpinMode,
    #[command(flatten)]
    rdma: RdmaArgs,
    /// With --rdma and both sides here: first address to measure at in software, with the next ones
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1", conflicts_with_all = ["server", "listen", "connect"])]
    beside: Ipv4Addr,
    /// The passive side ends with its standard input
    #[arg(long, hide = true, requires = "server")]
    until_eof: bool,
    /// Print one JSON object per measurement; with --server one event when ready
    #[arg(long)]
    json: bool,
}

/// Part of this process in a measurement.
#[derive(Clone, Copy, Debug)]
enum Role {
    /// Server at this address.
    Server(SocketAddr),
    /// Side that measures against a server.
    Client { from: IpAddr, server: SocketAddr },
    /// Both sides, at the given address and the next one.
    Both(Option<IpAddr>),
}

/// Length of a measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Amount {
    Time(Duration),
    Count(u64),
}

pub(crate) fn failed(what: &str) -> impl Fn(VerbsError) -> Failure {
    move |e| Failure::failed(format!("{what}: {e}"))
}

impl BenchArgs {
    /// Resolves the addresses of both sides. Blocks while names are resolved.
    fn role(&self) -> Result<Role, Failure> {
        let resolver = Resolver::default();
        let own = |endpoint: &Endpoint| Ok::<_, Failure>(resolver.own(endpoint, PORT)?[0]);
        if let Some(endpoint) = self.listen.as_ref().or(self.addr.as_ref().filter(|_| self.server)) {
            return Ok(Role::Server(own(endpoint)?));
        }
        if let Some(Endpoint { port: Some(_), .. }) = self.addr {
            return Err(Failure::usage("--addr has a port with --server only: omit the port"));
        }
        let own = self.addr.as_ref().map(own).transpose()?.map(|addr| addr.ip());
        let Some(connect) = &self.connect else {
            return Ok(Role::Both(own));
        };
        let path = resolver.path(&connect.clone().into(), PORT, own.as_slice())?;
        let (server, ip) = (path.dst, path.dst.ip());
        let route = || iface::route_to(ip).map_err(|e| Failure::failed(format!("no route to {ip}: {e}")));
        let from = path.src.or(own).map_or_else(route, Ok)?;
        Ok(Role::Client { from, server })
    }

    /// Returns the settings of a software device; `near`: of the side that measures, or of the only side here.
    fn config(&self, addr: IpAddr, near: bool) -> DeviceConfig {
        DeviceConfig {
            addr,
            mtu: self.mtu,
            socket_buffer: self.socket_buffer,
            shards: self.shards,
            spin: self.spin,
            gso: !self.no_gso,
            gro: !self.no_gro,
            window: self.window.map(|max| WindowConfig {
                max,
                ..WindowConfig::default()
            }),
            pcap: self.pcap.clone().filter(|_| near),
            faults: self.faults.clone().filter(|_| near),
            ..DeviceConfig::default()
        }
    }

    /// Opens the device of a loop.
    fn local_device(&self, addr: IpAddr) -> Result<LocalDevice, Failure> {
        let soft = |addrs: &[IpAddr]| {
            let configs: Vec<_> = addrs.iter().map(|addr| self.config(*addr, true)).collect();
            let opened = LocalDevice::open(&configs).map_err(|e| Failure::failed(e.to_string()));
            Ok(vec![opened?])
        };
        let mut opened = self.rdma.open(&[addr], soft, 1)?;
        opened.pop().ok_or_else(|| Failure::failed("no device has been opened"))
    }

    /// Opens the device at an address, for some threads.
    fn endpoints(&self, addr: IpAddr, near: bool, threads: u32) -> Result<Vec<Box<dyn Connections>>, Failure> {
        if !self.rdma.owns(addr)? {
            let device = Device::open(self.config(addr, near)).map_err(|e| Failure::failed(e.to_string()))?;
            let endpoint = |_| Ok(Box::new(threads::Threads::new(&device)?) as Box<dyn Connections>);
            return (0..threads).map(endpoint).collect();
        }
        Ok(vec![Box::new(looped::Loop::new(self.local_device(addr)?, addr)?)])
    }

    /// Opens the device of the passive side.
    fn passive(&self, addr: SocketAddr, near: bool) -> Result<Passive, Failure> {
        Passive::listen(self.endpoints(addr.ip(), near, 1)?.remove(0), addr)
    }

    /// Returns the options of the server of RTRS.
    fn server_options(&self) -> Vec<String> {
        let on_off = if self.always_invalidate { "on" } else { "off" };
        let mut options: Vec<_> = ["--until-eof", "--always-invalidate", on_off, "--spin"]
            .map(str::to_owned)
            .into();
        options.push(self.spin.to_string());
        options.extend(self.rdma.options());
        options.extend(["--socket-buffer".to_owned(), self.socket_buffer.to_string()]);
        if let Some(mtu) = self.mtu {
            options.extend(["--mtu".to_owned(), mtu.bytes().to_string()]);
        }
        let flags = [(self.no_gso, "--no-gso"), (self.no_gro, "--no-gro")];
        options.extend(flags.iter().filter(|(set, _)| *set).map(|(_, flag)| (*flag).to_owned()));
        options
    }

    fn sizes(&self, default: u32) -> Vec<u32> {
        match self.size.is_empty() {
            true => vec![default],
            false => self.size.clone(),
        }
    }

    fn amount(&self) -> Amount {
        match self.iters {
            Some(n) => Amount::Count(n),
            None => Amount::Time(self.seconds),
        }
    }

    fn ceiling(&self, [from, to]: [IpAddr; 2], bytes: u32, mtu: Mtu, duration: Duration) -> Result<Ceiling, Failure> {
        let config = ceiling::CeilingConfig {
            from,
            to,
            mtu: mtu.bytes(),
            bytes: bytes.max(1) as usize,
            window: 512 << 10,
            gso: !self.no_gso,
            gro: !self.no_gro,
            duration,
        };
        ceiling::run(&config).map_err(|e| Failure::failed(e.to_string()))
    }
}

type Emit<'a> = &'a mut dyn FnMut(&Measurement) -> Result<(), Failure>;

/// Runs `ferroce bench`.
pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    let stop = Stop::on_signals()?;
    let stopped: Stopped<'_> = &|| stop.requested();
    let role = args.role()?;
    let demanded = args.fault.start("bench")?;
    let args = &BenchArgs {
        faults: demanded.as_ref().map(Demanded::faults),
        ..args.clone()
    };
    let mut emit = |m: &Measurement| match args.json {
        true => output::json(m),
        false => output::line(&m.to_string()),
    };
    match (role, args.operation) {
        (role, Some(Operation::Rtrs)) => run_rtrs(args, role, stopped),
        (Role::Server(addr), None) => {
            let server = args.passive(addr, true)?;
            listening(args, addr, Some(server.endpoint()))?;
            server.run(stopped)
        }
        (Role::Server(_), Some(_)) => Err(Failure::usage(
            "--server serves any operation: omit the operation, unless it is rtrs",
        )),
        (_, None) => Err(Failure::usage(
            "say what to measure: write, read, send, latency, rtrs or ceiling",
        )),
        (Role::Client { .. }, Some(Operation::Ceiling)) => Err(Failure::usage(
            "the ceiling is measured within one process: omit --connect",
        )),
        (Role::Client { from, server }, Some(operation)) => {
            let endpoints = args.endpoints(from, true, args.threads)?;
            measure(args, operation, endpoints, (from, server), None, stopped, &mut emit)
        }
        (Role::Both(own), Some(operation)) => match args.rdma.first_addr()? {
            Some(addr) => on_rdma(args, operation, own.unwrap_or(addr), stopped, &mut emit),
            None => in_software(args, operation, own, stopped, &mut emit),
        },
    }
}

fn listening(args: &BenchArgs, addr: SocketAddr, endpoint: Option<&dyn Connections>) -> Result<(), Failure> {
    let (mut event, mut text) = (
        json!({ "event": "listening", "address": addr.to_string() }),
        String::new(),
    );
    if let Some(name) = endpoint.and_then(Connections::name) {
        event["device"] = name.into();
        text = format!(", RDMA device {name}");
    }
    if let Some(mtu) = endpoint.map(|e| e.mtu().bytes()) {
        event["mtu"] = mtu.into();
        text += &format!(", path MTU {mtu}");
    }
    match args.json {
        true => output::json(&event),
        false => output::line(&format!("listening on {addr}{text}; ctrl-C ends it")),
    }
}

/// Returns the first address of both sides on this host, and the addresses after it.
fn on_one_host(own: Option<IpAddr>) -> Result<(IpAddr, impl Fn(u32) -> IpAddr), Failure> {
    let IpAddr::V4(first) = own.unwrap_or(Ipv4Addr::LOCALHOST.into()) else {
        return Err(Failure::usage(
            "without --connect both sides are on this host and need an IPv4 address and the next ones: omit --addr",
        ));
    };
    let next = move |n: u32| Ipv4Addr::from(u32::from(first).wrapping_add(n)).into();
    Ok((first.into(), next))
}

/// Measures against a passive side. If that is in this process, in software, `ceiling` has the addresses for the ceiling.
fn measure(
    args: &BenchArgs,
    operation: Operation,
    mut endpoints: Vec<Box<dyn Connections>>,
    (from, peer): (IpAddr, SocketAddr),
    ceiling: Option<[IpAddr; 2]>,
    stopped: Stopped<'_>,
    emit: Emit<'_>,
) -> Result<(), Failure> {
    let in_software = args.events || args.idle_qps > 0 || args.shards > 1 || args.threads > 1;
    if endpoints[0].name().is_some() && in_software {
        return Err(Failure::usage(
            "--events, --idle-qps, --shards and --threads are measured in software: use --rdma soft",
        ));
    }
    if operation == Operation::Latency {
        for &bytes in &args.sizes(64) {
            let how = (args.events, args.amount());
            if ceiling.is_some() && bytes <= udp::LONGEST {
                udp::run(from, peer.ip(), bytes, how, stopped, emit)?;
            }
            active::latency(&mut *endpoints[0], peer, bytes, how, stopped, emit)?;
        }
    } else {
        for &bytes in &args.sizes(1 << 20) {
            let load = Load {
                operation,
                bytes,
                depth: args.depth,
                qps: args.qps,
                idle: args.idle_qps,
            };
            let mut run = Bandwidth::connect(&mut endpoints, peer, load)?;
            emit(&match (ceiling, args.amount()) {
                // The passive side of SENDs polls all the time, next to which no ceiling can be measured.
                (Some(addrs), Amount::Time(total)) if operation != Operation::Send => {
                    with_ceiling(args, &mut run, (addrs, bytes, total), stopped)?
                }
                (_, amount) => {
                    run.run(amount, stopped)?;
                    run.measurement()
                }
            })?;
        }
    }
    tracing::debug!(stats = ?endpoints[0].stats(), "counters");
    Ok(())
}

/// Measures in turns with the ceiling.
fn with_ceiling(
    args: &BenchArgs,
    run: &mut Bandwidth<'_>,
    (addrs, bytes, total): ([IpAddr; 2], u32, Duration),
    stopped: Stopped<'_>,
) -> Result<Measurement, Failure> {
    let slice = total / ROUNDS;
    let (mut best, mut sum) = (0f64, 0f64);
    for _ in 0..ROUNDS {
        let ceiling = args.ceiling(addrs, bytes, run.mtu(), slice)?;
        best = best.max(ceiling.gbytes_per_s);
        sum += ceiling.gbytes_per_s;
        run.run(Amount::Time(slice), stopped)?;
    }
    let mut m = run.measurement();
    m.set_ceiling(sum / f64::from(ROUNDS), best);
    Ok(m)
}

/// Measures between two software devices of this process.
fn in_software(
    args: &BenchArgs,
    operation: Operation,
    own: Option<IpAddr>,
    stopped: Stopped<'_>,
    emit: Emit<'_>,
) -> Result<(), Failure> {
    let (from, next) = on_one_host(own)?;
    if operation == Operation::Ceiling {
        for &bytes in &args.sizes(1 << 20) {
            let mtu = args.mtu.unwrap_or(Mtu::B4096);
            let result = args.ceiling([from, next(1)], bytes, mtu, args.seconds)?;
            emit(&Measurement::of_ceiling(bytes, mtu, &result))?;
        }
        return Ok(());
    }
    let peer = SocketAddr::new(next(1), PORT);
    let args = &BenchArgs {
        rdma: RdmaArgs::soft(),
        ..args.clone()
    };
    // Before the other side's, whose address is not the user's.
    let endpoints = args.endpoints(from, true, args.threads)?;
    let addrs = Some([next(2), next(3)]);
    with_passive(args.passive(peer, false)?, || {
        measure(args, operation, endpoints, (from, peer), addrs, stopped, emit)
    })
}

/// Measures between two ends on one RDMA device, and then in software, with the ratio.
fn on_rdma(
    args: &BenchArgs,
    operation: Operation,
    addr: IpAddr,
    stopped: Stopped<'_>,
    emit: Emit<'_>,
) -> Result<(), Failure> {
    if operation == Operation::Ceiling {
        return Err(Failure::usage("the ceiling is that of software: omit --rdma"));
    }
    if !args.rdma.owns(addr)? {
        return Err(Failure::failed(format!("no RDMA device has {addr}")));
    }
    let peer = SocketAddr::new(addr, PORT);
    let (mut hardware, mut software) = (Vec::new(), Vec::new());
    let endpoints = args.endpoints(addr, true, args.threads)?;
    with_passive(args.passive(peer, false)?, || {
        let mut keep = |m: &Measurement| {
            hardware.push(m.clone());
            Ok(())
        };
        measure(args, operation, endpoints, (addr, peer), None, stopped, &mut keep)
    })?;
    let mut keep = |m: &Measurement| {
        software.push(m.clone());
        Ok(())
    };
    if let Err(e) = in_software(args, operation, Some(args.beside.into()), stopped, &mut keep) {
        // A kernel with rdma_rxe has the port at all addresses.
        tracing::warn!("not measured in software: {}", e.text().unwrap_or_default());
    }
    let of = |m: &Measurement| match operation {
        Operation::Latency => m.latency_us.p50,
        _ => m.gbytes_per_s,
    };
    for mut m in hardware {
        let same = software.iter().find(|s| (s.op, s.bytes) == (m.op, m.bytes));
        m.ratio_to_software = same.filter(|s| of(s) > 0.0).map(|s| of(&m) / of(s));
        emit(&m)?;
    }
    software.iter().try_for_each(emit)
}

/// Measures against a passive side in a thread of this process.
fn with_passive(passive: Passive, measure: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    let done = Arc::new(AtomicBool::new(false));
    let flag = done.clone();
    let passive = thread::Builder::new()
        .name("passive side".into())
        .spawn(move || passive.run(&|| flag.load(Ordering::Relaxed)))
        .map_err(|e| Failure::failed(format!("starting a thread: {e}")))?;
    let measured = measure();
    done.store(true, Ordering::Relaxed);
    let passive = passive
        .join()
        .unwrap_or_else(|_| Err(Failure::failed("the passive side panicked")));
    measured.and(passive)
}

/// Measures RTRS, or serves it.
fn run_rtrs(args: &BenchArgs, role: Role, stopped: Stopped<'_>) -> Result<(), Failure> {
    let reactor = ReactorConfig {
        spin: args.spin,
        ..ReactorConfig::default()
    };
    let (from, server, _process) = match role {
        Role::Server(addr) => {
            let device = args.local_device(addr.ip())?;
            let config = rtrs_server::config(addr, args.always_invalidate);
            let ready = || listening(args, addr, None);
            return rtrs_server::run(device, config, reactor, args.until_eof, stopped, ready);
        }
        Role::Client { from, server } => (from, server, None),
        Role::Both(own) => {
            let (from, next) = on_one_host(own)?;
            let server = SocketAddr::new(next(1), PORT);
            let process = rtrs::ServerProcess::start(server, &args.server_options())?;
            (from, server, Some(process))
        }
    };
    let client = rtrs::Rtrs::connect(args.local_device(from)?, (from, server), args.connections, reactor)?;
    for &bytes in &args.sizes(4096) {
        let m = client.run(rtrs::Load {
            bytes,
            depth: args.depth,
            write: args.write,
            time: args.seconds,
        })?;
        match args.json {
            true => output::json(&m)?,
            false => output::line(&m.to_string())?,
        }
        if stopped() {
            break;
        }
    }
    Ok(())
}
