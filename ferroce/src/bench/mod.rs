//! `ferroce bench`: bandwidth and latency of the transport, within one process or between two.

mod bandwidth;
mod ceiling;
mod client;
mod driven;
mod latency;
mod on_device;
mod report;
mod rtrs;
mod rtrs_server;
mod server;
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

use ::rtrs::{proto::MAX_HDR_SIZE, server::ServerConfig};
use clap::{Args, ValueEnum};
use roce::{Device, DeviceConfig, Faults, LocalDevice, Mtu, VerbsError, WindowConfig, iface};
use roce_reactor::{ReactorConfig, SpinMode};

use crate::{
    fault::{Demanded, FaultArgs},
    names::{Endpoint, Resolver},
    output::{self, Failure},
    rdma::RdmaArgs,
    signals::Stop,
    units,
};
use report::Measurement;
use serde_json::json;

/// RDMA_CM port that the passive side listens on.
const PORT: u16 = 4792;
/// Within one process the measurement alternates with that of the ceiling so many times, so that both see the same
/// machine.
const ROUNDS: u32 = 4;

/// What to measure.
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
    /// The server, at this address.
    Server(SocketAddr),
    /// The side that measures against a server.
    Client { from: IpAddr, server: SocketAddr },
    /// Both sides, at the address that is named and the next one.
    Both(Option<IpAddr>),
}

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Amount {
    Time(Duration),
    Count(u64),
}

pub(crate) fn failed(what: &str) -> impl Fn(VerbsError) -> Failure {
    move |e| Failure::failed(format!("{what}: {e}"))
}

impl BenchArgs {
    /// The same in software.
    fn in_software(&self) -> Self {
        Self {
            rdma: RdmaArgs::soft(),
            ..self.clone()
        }
    }

    /// Resolves the options that say where to measure. Blocks while names are resolved.
    fn role(&self) -> Result<Role, Failure> {
        let resolver = Resolver::default();
        let own = |endpoint: &Endpoint| Ok::<_, Failure>(resolver.own(endpoint, PORT)?[0]);
        if let Some(endpoint) = self.listen.as_ref().or(self.addr.as_ref().filter(|_| self.server)) {
            return Ok(Role::Server(own(endpoint)?));
        }
        if let Some(Endpoint { port: Some(_), .. }) = self.addr {
            return Err(Failure::usage("--addr has a port with --server only: leave it away"));
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

    /// Settings of a device; `near`: of the side that measures, or of the only one here.
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

    fn device(&self, addr: IpAddr, near: bool) -> Result<Device, Failure> {
        Device::open(self.config(addr, near)).map_err(|e| Failure::failed(e.to_string()))
    }

    /// The device of a loop of ours at an address.
    fn devices(&self, addr: IpAddr) -> Result<LocalDevice, Failure> {
        let soft = |addrs: &[IpAddr]| {
            let configs: Vec<_> = addrs.iter().map(|addr| self.config(*addr, true)).collect();
            let opened = LocalDevice::open(&configs).map_err(|e| Failure::failed(e.to_string()));
            Ok(vec![opened?])
        };
        let mut opened = self.rdma.open(&[addr], soft, 1)?;
        opened.pop().ok_or_else(|| Failure::failed("no device has been opened"))
    }

    /// What the server of RTRS is told.
    fn server_options(&self) -> Vec<String> {
        let on_off = if self.always_invalidate { "on" } else { "off" };
        let mut options = vec![
            "--until-eof".to_owned(),
            "--always-invalidate".to_owned(),
            on_off.to_owned(),
        ];
        options.extend(["--spin".to_owned(), self.spin.to_string()]);
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

    fn waiting(&self) -> latency::Waiting {
        match self.events {
            true => latency::Waiting::Sleeping,
            false => latency::Waiting::Polling,
        }
    }

    fn shape(&self, operation: Operation, bytes: u32) -> bandwidth::Shape {
        bandwidth::Shape {
            operation,
            bytes,
            depth: self.depth,
            qps: self.qps,
            idle: self.idle_qps,
            threads: self.threads,
        }
    }

    fn ceiling(&self, from: IpAddr, to: IpAddr, bytes: u32, mtu: Mtu, duration: Duration) -> ceiling::CeilingConfig {
        ceiling::CeilingConfig {
            from,
            to,
            mtu: mtu.bytes(),
            bytes: bytes.max(1) as usize,
            window: 512 << 10,
            gso: !self.no_gso,
            gro: !self.no_gro,
            duration,
        }
    }
}

/// Runs `ferroce bench`.
pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    let stop = Stop::on_signals()?;
    let role = args.role()?;
    let demanded = args.fault.start("bench")?;
    let args = &BenchArgs {
        faults: demanded.as_ref().map(Demanded::faults),
        ..args.clone()
    };
    if args.operation == Some(Operation::Rtrs) {
        return run_rtrs(args, role, &stop);
    }
    let mut emit = |m: &Measurement| match args.json {
        true => output::json(m),
        false => output::line(&m.to_string()),
    };
    match (role, args.operation) {
        (Role::Server(addr), None) => serve(args, addr, &stop),
        (Role::Server(_), Some(_)) => Err(Failure::usage(
            "--server serves any operation: leave the operation away, unless it is rtrs",
        )),
        (_, None) => Err(Failure::usage(
            "say what to measure: write, read, send, latency, rtrs or ceiling",
        )),
        (Role::Client { from, server }, Some(operation)) => remote(args, operation, (from, server), &stop, &mut emit),
        (Role::Both(own), Some(operation)) => match args.rdma.first_addr()? {
            Some(addr) => on_device::both(args, operation, own.unwrap_or(addr), &stop, &mut emit),
            None => local(args, operation, own, &stop, &mut emit),
        },
    }
}

/// Serves the measurements of other processes.
fn serve(args: &BenchArgs, addr: SocketAddr, stop: &Stop) -> Result<(), Failure> {
    if args.rdma.owns(addr.ip())? {
        return on_device::listen(args, addr, stop);
    }
    let device = args.device(addr.ip(), true)?;
    let server = server::Server::new(&device, addr)?;
    let mtu = device.mtu().bytes();
    match args.json {
        true => output::json(&json!({ "event": "listening", "address": addr.to_string(), "mtu": mtu }))?,
        false => output::line(&format!("listening on {addr}, path MTU {mtu}; ctrl-C ends it"))?,
    }
    server.run(&|| stop.requested())
}

type Emit<'a> = &'a mut dyn FnMut(&Measurement) -> Result<(), Failure>;

/// Room behind the largest request for its headers.
const CHUNK_HEADERS: u32 = MAX_HDR_SIZE;

/// Measures RTRS, or serves it.
fn run_rtrs(args: &BenchArgs, role: Role, stop: &Stop) -> Result<(), Failure> {
    let reactor = ReactorConfig {
        spin: args.spin,
        ..ReactorConfig::default()
    };
    let (from, server, _process) = match role {
        Role::Server(addr) => return serve_rtrs(args, addr, reactor, stop),
        Role::Client { from, server } => (from, server, None),
        Role::Both(own) => {
            let (from, next) = on_one_host(own)?;
            let server = SocketAddr::new(next(1), PORT);
            let process = rtrs::ServerProcess::start(server, &args.server_options())?;
            (from, server, Some(process))
        }
    };
    let client = rtrs::Rtrs::connect(args.devices(from)?, (from, server), args.connections, reactor)?;
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
        if stop.requested() {
            break;
        }
    }
    Ok(())
}

/// Serves RTRS.
fn serve_rtrs(args: &BenchArgs, addr: SocketAddr, reactor: ReactorConfig, stop: &Stop) -> Result<(), Failure> {
    let config = ServerConfig {
        addr: addr.ip(),
        port: addr.port(),
        queue_depth: 128,
        max_chunk_size: ((1 << 20) + CHUNK_HEADERS).next_power_of_two(),
        always_invalidate: args.always_invalidate,
        ..ServerConfig::default()
    };
    let ready = || match args.json {
        true => output::json(&json!({ "event": "listening", "address": addr.to_string() })),
        false => output::line(&format!("listening on {addr}; ctrl-C ends it")),
    };
    let device = args.devices(addr.ip())?;
    rtrs_server::run(device, config, reactor, args.until_eof, &|| stop.requested(), ready)
}

/// The address to use where both sides are on this host, and the addresses after it.
fn on_one_host(own: Option<IpAddr>) -> Result<(IpAddr, impl Fn(u32) -> IpAddr), Failure> {
    let IpAddr::V4(first) = own.unwrap_or(Ipv4Addr::LOCALHOST.into()) else {
        return Err(Failure::usage(
            "without --connect both sides are on this host and need an IPv4 address and the next ones: leave --addr away",
        ));
    };
    let next = move |n: u32| Ipv4Addr::from(u32::from(first).wrapping_add(n)).into();
    Ok((first.into(), next))
}

/// Measures against a server in another process.
fn remote(
    args: &BenchArgs,
    operation: Operation,
    (addr, peer): (IpAddr, SocketAddr),
    stop: &Stop,
    emit: Emit<'_>,
) -> Result<(), Failure> {
    if operation == Operation::Ceiling {
        return Err(Failure::usage(
            "the ceiling is measured within one process: leave --connect away",
        ));
    }
    if args.rdma.owns(addr)? {
        return on_device::measure(args, operation, (addr, peer), stop, emit);
    }
    let device = args.device(addr, true)?;
    let stopped = || stop.requested();
    if operation == Operation::Latency {
        for &bytes in &args.sizes(64) {
            latency::run(&device, peer, bytes, (args.waiting(), args.amount()), &stopped, emit)?;
        }
        return Ok(());
    }
    for &bytes in &args.sizes(1 << 20) {
        let mut load = bandwidth::Loads::connect(&device, peer, args.shape(operation, bytes))?;
        load.run(args.amount(), &stopped)?;
        emit(&load.measurement())?;
    }
    tracing::debug!(stats = ?device.stats(), "counters");
    Ok(())
}

/// Measures between two devices of this process.
fn local(
    args: &BenchArgs,
    operation: Operation,
    own: Option<IpAddr>,
    stop: &Stop,
    emit: Emit<'_>,
) -> Result<(), Failure> {
    let (from, next) = on_one_host(own)?;
    if operation == Operation::Ceiling {
        for &bytes in &args.sizes(1 << 20) {
            let mtu = args.mtu.unwrap_or(Mtu::B4096);
            let config = args.ceiling(from, next(1), bytes, mtu, args.seconds);
            let result = ceiling::run(&config).map_err(|e| Failure::failed(e.to_string()))?;
            emit(&Measurement::of_ceiling(bytes, mtu, &result))?;
        }
        return Ok(());
    }
    let (near, far) = (args.device(from, true)?, args.device(next(1), false)?);
    let peer = SocketAddr::new(next(1), PORT);
    let server = server::Server::new(&far, peer)?;
    let stopped = || stop.requested();
    with_passive(
        move |done| server.run(done),
        || {
            let result = match operation {
                Operation::Latency => args.sizes(64).iter().try_for_each(|&bytes| {
                    let how = (args.waiting(), args.amount());
                    if bytes <= udp::LONGEST {
                        udp::run(from, next(1), bytes, how, &stopped, emit)?;
                    }
                    latency::run(&near, peer, bytes, how, &stopped, emit)
                }),
                _ => args.sizes(1 << 20).iter().try_for_each(|&bytes| {
                    let mut load = bandwidth::Loads::connect(&near, peer, args.shape(operation, bytes))?;
                    if operation == Operation::Send {
                        // Its passive side polls without pause, beside which no ceiling can be measured.
                        load.run(args.amount(), &stopped)?;
                        return emit(&load.measurement());
                    }
                    let m = beside_ceiling(args, &mut load, [next(2), next(3)], &stopped)?;
                    emit(&m)
                }),
            };
            tracing::debug!(near = ?near.stats(), far = ?far.stats(), "counters");
            result
        },
    )
}

/// Measures beside a passive side in a thread of this process, which runs until it is told that the measurement is done.
fn with_passive(
    serve: impl FnOnce(&dyn Fn() -> bool) -> Result<(), Failure> + Send + 'static,
    measure: impl FnOnce() -> Result<(), Failure>,
) -> Result<(), Failure> {
    let done = Arc::new(AtomicBool::new(false));
    let flag = done.clone();
    let passive = thread::Builder::new()
        .name("passive side".into())
        .spawn(move || serve(&|| flag.load(Ordering::Relaxed)))
        .map_err(|e| Failure::failed(format!("starting a thread: {e}")))?;
    let measured = measure();
    done.store(true, Ordering::Relaxed);
    let passive = passive
        .join()
        .unwrap_or_else(|_| Err(Failure::failed("the passive side panicked")));
    measured.and(passive)
}

/// Measures in turns with the ceiling.
fn beside_ceiling(
    args: &BenchArgs,
    load: &mut bandwidth::Loads<'_>,
    [from, to]: [IpAddr; 2],
    stopped: bandwidth::Stopped<'_>,
) -> Result<Measurement, Failure> {
    let Amount::Time(total) = args.amount() else {
        load.run(args.amount(), stopped)?;
        return Ok(load.measurement());
    };
    let slice = total / ROUNDS;
    let mut best = 0f64;
    let mut sum = 0f64;
    for _ in 0..ROUNDS {
        let config = args.ceiling(from, to, load.bytes(), load.mtu(), slice);
        let ceiling = ceiling::run(&config).map_err(|e| Failure::failed(e.to_string()))?;
        best = best.max(ceiling.gbytes_per_s);
        sum += ceiling.gbytes_per_s;
        load.run(Amount::Time(slice), stopped)?;
    }
    let mut m = load.measurement();
    m.set_ceiling(sum / f64::from(ROUNDS), best);
    Ok(m)
}
