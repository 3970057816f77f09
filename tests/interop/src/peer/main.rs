//! `ferroce-lab`: small programs that are the other half of programs on an RDMA host.

mod again;
mod agent;
mod annex;
mod cm;
mod disk;
mod errors;
mod far;
mod handshakes;
mod held;
mod jump;
mod late_ack;
mod link;
mod ops;
mod packets;
mod pingpong;
mod rds;
mod rds_odd;
mod rping;
mod serve;
mod ucmatose;
mod vanish;
mod wrap;

use std::{net::IpAddr, path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use roce::{DatapathKind, Device, DeviceConfig};

/// Whatever ends a test.
pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// Speaks to ibv_rc_pingpong, rping, ucmatose, verbs-agent and cm-agent on another host over our own transport.
#[derive(Parser, Debug)]
#[command(version)]
struct Cli {
    /// Our address; needed by all that open a device.
    #[arg(long)]
    addr: Option<IpAddr>,
    /// Sockets to use.
    #[arg(long, value_name = "udp|raw|packet", default_value = "udp")]
    datapath: DatapathKind,
    /// Write every packet into this capture.
    #[arg(long)]
    pcap: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// The other half of ibv_rc_pingpong.
    Pingpong(pingpong::Args),
    /// The other half of rping.
    Rping(rping::Args),
    /// Every RC operation, in both directions, against a verbs-agent.
    Ops(ops::Args),
    /// The other half of ucmatose.
    Ucmatose(ucmatose::Args),
    /// One connection of the connection manager, event by event.
    Cm(cm::Args),
    /// Our own verbs-agent.
    Agent(serve::Args),
    /// How things end that go wrong, between two agents.
    Errors(errors::Args),
    /// ATOMIC WRITE and FLUSH between two agents.
    Annex(annex::Args),
    /// A requester whose peer goes away.
    Vanish(vanish::Args),
    /// A few operations each way between two agents.
    Exchange(vanish::Args),
    /// A READ of no bytes that comes again.
    Again(again::Args),
    /// A late acknowledgement amid the answer to a READ.
    LateAck(again::Args),
    /// An acknowledgement of more than a requester that goes back has sent again.
    Jump(again::Args),
    /// Handshakes with an RTRS server, proper and improper ones.
    Handshakes(handshakes::Args),
    /// An RNBD server whose disk holds a request until it is told to go on.
    Held(held::Args),
    /// A node of RDS that sends messages or sends back what comes.
    Rds(rds::Args),
    /// A peer of RDS that offers other versions and rejects connections.
    RdsOdd(rds_odd::Args),
    /// Work on a device at an NBD socket, or a look at the image behind it.
    Disk(disk::Args),
    /// Runs a program on a host with host-agent.
    Far(far::Args),
}

fn run(cli: Cli) -> Result<(), Error> {
    match &cli.command {
        Command::Errors(args) => return errors::run(args),
        Command::Annex(args) => return annex::run(args),
        Command::Far(args) => return far::run(args),
        Command::Disk(args) => return disk::run(args),
        Command::Vanish(args) => return vanish::run(args),
        Command::Exchange(args) => return vanish::exchange(args),
        _ => {}
    }
    let addr = cli.addr.ok_or("--addr is missing")?;
    match &cli.command {
        Command::Again(args) => return again::run(addr, args),
        Command::LateAck(args) => return late_ack::run(addr, args),
        Command::Jump(args) => return jump::run(addr, args),
        Command::Held(args) => return held::run(addr, args),
        Command::Rds(args) => return rds::run(addr, cli.datapath, args),
        _ => {}
    }
    let device = Device::open(DeviceConfig {
        pcap: cli.pcap,
        datapath: cli.datapath,
        ..DeviceConfig::new(addr)
    })?;
    let result = match cli.command {
        Command::Pingpong(args) => pingpong::run(&device, addr, &args),
        Command::Rping(args) => rping::run(&device, addr, &args),
        Command::Ops(args) => ops::run(&device, addr, &args),
        Command::Ucmatose(args) => ucmatose::run(&device, addr, &args),
        Command::Cm(args) => cm::run(&device, addr, &args),
        Command::Agent(args) => serve::run(&device, addr, &args),
        Command::Handshakes(args) => handshakes::run(&device, &args),
        Command::Errors(args) => errors::run(&args),
        Command::Annex(args) => annex::run(&args),
        Command::Far(args) => far::run(&args),
        Command::Disk(args) => disk::run(&args),
        Command::Vanish(args) => vanish::run(&args),
        Command::Exchange(args) => vanish::exchange(&args),
        Command::Again(args) => again::run(addr, &args),
        Command::LateAck(args) => late_ack::run(addr, &args),
        Command::Jump(args) => jump::run(addr, &args),
        Command::Held(args) => held::run(addr, &args),
        Command::Rds(args) => rds::run(addr, cli.datapath, &args),
        Command::RdsOdd(args) => rds_odd::run(&device, addr, &args),
    };
    println!("counters: {:?}", device.stats());
    result
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .init();
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("ferroce-lab: failed: {e}");
            ExitCode::FAILURE
        }
    }
}
