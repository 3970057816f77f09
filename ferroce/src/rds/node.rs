//! `ferroce rds node`: the process that owns RDS addresses.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use rds_node::{Config, Limits};

use crate::{output::Failure, signals::Stop, units};

#[derive(Args)]
#[command(after_help = "\
RDS peers know a connection by its addresses, so one process has to have all connections of an address. The first program with an RDS \
socket starts it, and it exits some seconds after the last (FERROCE_BROKER_LINGER sets how many), up to 30 s later while peers have not \
acknowledged all messages. It opens an address when a socket is bound to it. There is one for each user; an address belongs to the user \
who binds a socket first, and others get EADDRINUSE.

For each address a file rds-ADDRESS.state in its folder keeps the sequence numbers of the connections. After it was killed \
messages come neither twice nor in another order. A file that can't be used is renamed to rds-ADDRESS.state.corrupt.

The --max options limit programs: beyond them `socket` and `setsockopt` fail with ENOBUFS. Buffers count as large as they are set \
(SO_SNDBUF, SO_RCVBUF), whatever they hold.")]
pub(crate) struct NodeArgs {
    /// Folder of the socket and the state files
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Keep running when no program uses it
    #[arg(long)]
    stay: bool,
    /// Seconds before it exits without programs [default: 5]
    #[arg(long, value_name = "SECONDS", value_parser = units::seconds)]
    linger: Option<Duration>,
    /// Most sockets of one process
    #[arg(long, value_name = "N", default_value_t = Limits::default().process_sockets)]
    max_sockets: usize,
    /// Most bytes of the buffers of one process's sockets
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = units::memory)]
    max_buffers: usize,
    /// Go to the background: leave the terminal and close what the starting program left open
    #[arg(long, hide = true)]
    detach: bool,
    /// Say `ready` on standard output, and close it
    #[arg(long, hide = true)]
    announce: bool,
}

/// Serves until no program uses it.
pub(super) fn run(args: &NodeArgs) -> Result<(), Failure> {
    let usual = Config::new(args.dir.clone().unwrap_or_else(rds_local::directory));
    let config = Config {
        linger: if args.stay { None } else { args.linger.or(usual.linger) },
        limits: Limits {
            process_sockets: args.max_sockets,
            process_buffers: args.max_buffers,
            ..usual.limits
        },
        detach: args.detach,
        announce: args.announce,
        ..usual
    };
    let stop = Stop::on_signals()?;
    rds_node::run(config, || stop.requested()).map_err(Failure::of)
}
