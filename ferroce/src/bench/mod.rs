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
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use clap::{Args, ValueEnum};
use roce::{Device, DeviceConfig, LocalDevice, Mtu, VerbsError, WindowConfig, iface};
use serde_json::json;

use crate::{
    names::{Endpoint, Resolver},
    output::{self, Failure},
    rdma::RdmaArgs,
    signals::Stop,
    transport::{DeviceArgs, Instruments},
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
    /// Round trips of WRITE and SEND, 64 bytes unless --size is given, with both sides polling or (--events) sleeping; compared with plain
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

Without --server and --connect both sides run in this process, on 127.0.0.1 and 127.0.0.2. With --rdma NAME both are on that device; \
the same measurement in software follows, with the ratio:
  ferroce bench write --rdma mlx5_0
Between two processes or hosts, first on the one, then on the other:
  ferroce bench --server --addr 192.0.2.1
  ferroce bench write --connect 192.0.2.1
RTRS, with a server in a process of its own, or on another host:
  ferroce bench rtrs --size 512,4K,128K,1M --depth 32
  ferroce bench rtrs --server --addr 192.0.2.1
  ferroce bench rtrs --connect 192.0.2.1 --write")]
pub(crate) struct BenchArgs {
    /// Measurement
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
    /// Duration of each measurement
    #[arg(long, default_value = "2", value_parser = units::seconds)]
    seconds: Duration,
    /// Number of messages to send, instead of a duration (latency: round trips); not for rtrs
    #[arg(short = 'n', long, conflicts_with = "seconds")]
    iters: Option<u64>,
    /// Most bytes in flight towards the peer [default: by the receive buffer]
    #[arg(long, value_name = "BYTES", value_parser = units::memory)]
    window: Option<usize>,
    /// rtrs: write instead of reading
    #[arg(long)]
    write: bool,
    /// rtrs: connections for I/O
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=4095))]
    connections: u16,
    /// rtrs: whether the server invalidates a chunk's key with every request
    #[arg(long, value_name = "on|off", value_parser = crate::serve::on_off, default_value = "on", action = clap::ArgAction::Set)]
    always_invalidate: bool,
    /// With --rdma and both sides here: first of the addresses for the same measurement in software
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1", conflicts_with_all = ["server", "listen", "connect"])]
    beside: Ipv4Addr,
    /// The passive side ends with its standard input
    #[arg(long, hide = true, requires = "server")]
    until_eof: bool,
    /// Print one JSON object per measurement; with --server one event when ready
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
    /// The instruments of `device`, once started.
    #[arg(skip)]
    instruments: Option<Arc<Instruments>>,
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
        let usual = self.device.config(addr, self.instruments.as_deref().filter(|_| near));
        DeviceConfig {
            shards: self.shards,
            spin: self.device.spin,
            window: self.window.map(|max| WindowConfig {
                max,
                ..WindowConfig::default()
            }),
            pcap: usual.pcap.filter(|_| near),
            ..usual
        }
    }

    /// Opens the device of a loop.
    fn local_device(&self, addr: IpAddr) -> Result<LocalDevice, Failure> {
        let soft = |addrs: &[IpAddr]| {
            let configs: Vec<_> = addrs.iter().map(|addr| self.config(*addr, true)).collect();
            let opened = LocalDevice::open(&configs).map_err(Failure::of);
            Ok(vec![opened?])
        };
        let mut opened = self.device.rdma.open(&[addr], soft, 1)?;
        opened.pop().ok_or_else(|| Failure::failed("no device has been opened"))
    }

    /// Opens the device at an address, for some threads.
    fn endpoints(&self, addr: IpAddr, near: bool, threads: u32) -> Result<Vec<Box<dyn Connections>>, Failure> {
        if !self.device.rdma.owns(addr)? {
            let device = Device::open(self.config(addr, near)).map_err(Failure::of)?;
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
        let DeviceArgs { no_gso, no_gro, .. } = self.device;
        let on_off = if self.always_invalidate { "on" } else { "off" };
        let mut options = vec![
            "--until-eof".to_owned(),
            format!("--always-invalidate={on_off}"),
            format!("--spin={}", self.device.spin),
            format!("--datapath={}", self.device.datapath),
        ];
        options.extend(self.device.rdma.options());
        options.extend(
            self.device
                .socket_buffer
                .map(|bytes| format!("--socket-buffer={bytes}")),
        );
        options.extend(self.device.mtu.map(|mtu| format!("--mtu={}", mtu.bytes())));
        let flags = [(no_gso, "--no-gso"), (no_gro, "--no-gro")];
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
            datapath: self.device.datapath,
            gso: !self.device.no_gso,
            gro: !self.device.no_gro,
            duration,
        };
        ceiling::run(&config).map_err(Failure::of)
    }
}

type Emit<'a> = &'a mut dyn FnMut(&Measurement) -> Result<(), Failure>;

/// Runs `ferroce bench`.
pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    let stop = Stop::on_signals()?;
    let stopped: Stopped<'_> = &|| stop.requested();
    let role = args.role()?;
    let args = &BenchArgs {
        instruments: Some(Arc::new(args.device.instruments("bench")?)),
        ..args.clone()
    };
    let mut emit = |m: &Measurement| match args.json {
        true => output::json(m),
        false => output::line(&m.to_string()),
    };
    let run = |operation| Run {
        args,
        operation,
        stopped,
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
            "name a measurement: write, read, send, latency, rtrs or ceiling",
        )),
        (Role::Client { .. }, Some(Operation::Ceiling)) => Err(Failure::usage(
            "the ceiling is measured within one process: omit --connect",
        )),
        (Role::Client { from, server }, Some(operation)) => {
            let endpoints = args.endpoints(from, true, args.threads)?;
            run(operation).measure(endpoints, (from, server), None, &mut emit)
        }
        (Role::Both(own), Some(operation)) => match args.device.rdma.first_addr()? {
            Some(addr) => run(operation).on_rdma(own.unwrap_or(addr), &mut emit),
            None => run(operation).in_software(own, &mut emit),
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

/// A measurement by this process.
#[derive(Clone, Copy)]
struct Run<'a> {
    args: &'a BenchArgs,
    operation: Operation,
    stopped: Stopped<'a>,
}

impl Run<'_> {
    /// Measures against a passive side. If that is in this process, in software, `ceiling` has the addresses for the ceiling.
    fn measure(
        &self,
        mut endpoints: Vec<Box<dyn Connections>>,
        (from, peer): (IpAddr, SocketAddr),
        ceiling: Option<[IpAddr; 2]>,
        emit: Emit<'_>,
    ) -> Result<(), Failure> {
        let Self {
            args,
            operation,
            stopped,
        } = *self;
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
                        self.with_ceiling(&mut run, (addrs, bytes, total))?
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
        &self,
        run: &mut Bandwidth<'_>,
        (addrs, bytes, total): ([IpAddr; 2], u32, Duration),
    ) -> Result<Measurement, Failure> {
        let slice = total / ROUNDS;
        let (mut best, mut sum) = (0f64, 0f64);
        for _ in 0..ROUNDS {
            let ceiling = self.args.ceiling(addrs, bytes, run.mtu(), slice)?;
            best = best.max(ceiling.gbytes_per_s);
            sum += ceiling.gbytes_per_s;
            run.run(Amount::Time(slice), self.stopped)?;
        }
        let mut m = run.measurement();
        m.set_ceiling(sum / f64::from(ROUNDS), best);
        Ok(m)
    }

    /// Measures between two software devices of this process.
    fn in_software(&self, own: Option<IpAddr>, emit: Emit<'_>) -> Result<(), Failure> {
        let mut args = self.args.clone();
        let (from, next) = on_one_host(own)?;
        if self.operation == Operation::Ceiling {
            for &bytes in &args.sizes(1 << 20) {
                let mtu = args.device.mtu.unwrap_or(Mtu::B4096);
                let result = args.ceiling([from, next(1)], bytes, mtu, args.seconds)?;
                emit(&Measurement::of_ceiling(bytes, mtu, &result))?;
            }
            return Ok(());
        }
        let peer = SocketAddr::new(next(1), PORT);
        args.device.rdma = RdmaArgs::soft();
        let run = Run { args: &args, ..*self };
        // Before the other side's, whose address is not the user's.
        let endpoints = args.endpoints(from, true, args.threads)?;
        let addrs = Some([next(2), next(3)]);
        with_passive(args.passive(peer, false)?, || {
            run.measure(endpoints, (from, peer), addrs, emit)
        })
    }

    /// Measures between two ends on one RDMA device, and then in software, with the ratio.
    fn on_rdma(&self, addr: IpAddr, emit: Emit<'_>) -> Result<(), Failure> {
        let Self { args, operation, .. } = *self;
        if operation == Operation::Ceiling {
            return Err(Failure::usage("the ceiling is that of software: omit --rdma"));
        }
        if !args.device.rdma.owns(addr)? {
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
            self.measure(endpoints, (addr, peer), None, &mut keep)
        })?;
        let mut keep = |m: &Measurement| {
            software.push(m.clone());
            Ok(())
        };
        if let Err(e) = self.in_software(Some(args.beside.into()), &mut keep) {
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
    let reactor = args.device.reactor();
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
