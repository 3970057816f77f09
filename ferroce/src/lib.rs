//! The ferroce command line: block devices over RTRS over RoCEv2, and programs written for verbs, in userspace.
//!
//! A library so that its tests and its documentation are as those of other crates; the program is [`run`].

mod attach;
mod bench;
mod completions;
mod control;
mod copy;
mod ctl;
mod daemon;
mod doctor;
mod event;
mod fault;
mod lnet;
mod man;
mod map;
mod names;
mod nbd;
mod output;
mod paths;
mod pcap;
mod place;
mod printer;
mod rdma;
mod rds;
#[cfg(test)]
mod reference;
mod report;
mod ring;
mod run;
mod serve;
mod sharing;
mod signals;
mod transport;
mod units;
mod vhost;

use std::{io::IsTerminal, process::ExitCode};

use clap::{ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand};
use output::Failure;
use tracing_subscriber::EnvFilter;

/// The environment variable with a log filter.
const LOG_VARIABLE: &str = "FERROCE_LOG";

#[derive(Parser)]
#[command(
    name = "ferroce",
    version = env!("VERSION_AND_COMMIT"),
    about = "RDMA without RDMA hardware: RoCEv2, RTRS and RNBD block devices in userspace",
    after_help = output::AFTER_HELP,
    max_term_width = 100
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Log more: -v progress, -vv details, -vvv every packet decision
    #[arg(short, long, action = ArgAction::Count, global = true, display_order = 900)]
    verbose: u8,
    /// Log errors only
    #[arg(short, long, global = true, conflicts_with = "verbose", display_order = 901)]
    quiet: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Serve image files and block devices to RNBD clients: ferroce or Linux
    Serve(serve::ServeArgs),
    /// Map a server's devices: as NBD exports, disks of virtual machines, or /dev/nbdN
    Map(map::MapArgs),
    /// Run servers, mappings and nodes of RDS and LNet of a configuration file in one process
    Daemon(daemon::DaemonArgs),
    /// Inspect and control a running server, mapping or daemon
    Ctl(ctl::CtlArgs),
    /// Run a program for libibverbs or librdmacm without RDMA hardware
    Run(run::RunArgs),
    /// List the devices that programs see under `run`
    Link(sharing::link::LinkArgs),
    /// Show counters of the processes that share addresses
    Stat(sharing::stat::StatArgs),
    /// RDS sockets: show them, ping others, and the node that has their connections
    Rds(rds::RdsCommand),
    /// LNet over RDMA, as Lustre has it: check NIDs, and answer others
    Lnet(lnet::LnetCommand),
    /// Share addresses among processes; programs start it on demand
    Broker(sharing::broker::BrokerArgs),
    /// Show and change the injected faults of running processes (--fault), for tests
    Fault(fault::FaultCommand),
    /// Measure bandwidth and latency of the transport or of RTRS, within this process or between two
    Bench(bench::BenchArgs),
    /// Check this host for problems with RoCEv2, and name remedies
    Doctor(doctor::DoctorArgs),
    /// Judge, show, measure and copy packet captures
    Pcap(pcap::PcapArgs),
    /// Print completions for a shell
    Completions(completions::CompletionsArgs),
    /// Copy this program and its libraries into a folder that containers share
    Copy(copy::CopyArgs),
    /// Write manual pages into a folder
    #[command(hide = true)]
    Man(man::ManArgs),
}

pub use rdma::OpenRdma;

/// Sets the function that opens RDMA devices of the host. Call it before [`run`].
pub fn use_rdma(open: OpenRdma) {
    rdma::open_by(open);
}

/// Runs the command of the process's arguments.
pub fn run() -> ExitCode {
    let command = Cli::command();
    let matches = command.clone().get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|e| e.exit());
    let hand_over = |kind: daemon::Kind, name: &str| daemon::hand_over(&kind, name, &command, &matches);
    let outcome = start_log(cli.verbose, cli.quiet).and_then(|()| match cli.command {
        Command::Serve(args) if args.daemon => hand_over(daemon::Kind::Serve, &args.task_name()),
        Command::Map(args) if args.daemon => hand_over(daemon::Kind::Map, args.task_name()),
        Command::Rds(args) if args.handed_over().is_some() => {
            hand_over(daemon::Kind::Rds, &args.handed_over().unwrap_or_default())
        }
        Command::Lnet(args) if args.handed_over().is_some() => {
            hand_over(daemon::Kind::Lnet, &args.handed_over().unwrap_or_default())
        }
        Command::Serve(args) => serve::run(&args),
        Command::Map(args) => map::run(&args),
        Command::Daemon(args) => daemon::run(&args, matches.subcommand_matches("daemon")),
        Command::Ctl(args) => ctl::run(&args),
        Command::Run(args) => run::run(&args, (cli.verbose > 0).then(|| level(cli.verbose, false))),
        Command::Link(args) => sharing::link::run(&args),
        Command::Stat(args) => sharing::stat::run(&args),
        Command::Rds(args) => rds::run(&args),
        Command::Lnet(args) => lnet::run(&args),
        Command::Broker(args) => sharing::broker::run(&args),
        Command::Fault(args) => fault::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Pcap(args) => pcap::run(&args),
        Command::Completions(args) => completions::run(&args, Cli::command()),
        Command::Copy(args) => copy::run(&args),
        Command::Man(args) => man::run(&args, Cli::command()),
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

/// Log level of -v and -q.
const fn level(verbose: u8, quiet: bool) -> &'static str {
    match (quiet, verbose) {
        (true, _) => "error",
        (false, 0) => "warn",
        (false, 1) => "info",
        (false, 2) => "debug",
        (false, _) => "trace",
    }
}

/// Logs go to standard error; `FERROCE_LOG` (like `debug` or `roce_port=trace,info`) wins over -v and -q.
fn start_log(verbose: u8, quiet: bool) -> Result<(), Failure> {
    let filter = match roce::environment::var(LOG_VARIABLE) {
        Some(text) => EnvFilter::try_new(&text).map_err(|e| Failure::usage(format!("{LOG_VARIABLE}={text}: {e}")))?,
        None => EnvFilter::new(level(verbose, quiet)),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
    Ok(())
}
