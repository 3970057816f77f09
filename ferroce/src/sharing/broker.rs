//! `ferroce broker`: programs start it on their own; a system broker is started by systemd.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use roce::broker::server::{self, Config, Quotas};

use crate::output::Failure;

#[derive(Args)]
#[command(after_help = "\
One broker per user serves all of the user's processes and addresses. The first process that needs it starts it, and it exits \
some seconds after the last (FERROCE_BROKER_LINGER sets how many). If it is killed, connections continue, and one of the processes \
starts another.

Users who share addresses with each other need a system broker: `systemctl enable --now ferroce-broker`, which runs \
`ferroce broker --shared --stay --dir /run/ferroce` as a user of its own; members of the group `ferroce` may use it. They \
all trust that user. It gives each process only the process's own socket, with a filter that passes only packets to that \
process. Users can't read each other's packets, but they can disturb each other: Linux lets a process with a socket of the \
group detach the steering program (it is attached again within a second), or connect its socket and so keep a sender's \
packets from the others.

A broker with --shared isolates users only if it may load a BPF program (CAP_BPF, which the unit grants, or root). Without \
that all members of the group `ferroce` are one trust domain, and each can read what the others send \
and receive. It reports at its start which it is; so do `ferroce stat` and `ferroce doctor`.

The --max options limit each user. Refusals are counted (refused_places, refused_addresses, refused_ports and \
refused_connections in `ferroce stat`) and logged, at most one line in 10 seconds of each kind.")]
pub(crate) struct BrokerArgs {
    /// Folder of the socket
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Serve other users, too
    #[arg(long)]
    shared: bool,
    /// Permissions of the socket with --shared, octal
    #[arg(long, value_name = "MODE", default_value = "0660", value_parser = mode, requires = "shared")]
    socket_mode: u32,
    /// Keep running when no process uses it
    #[arg(long)]
    stay: bool,
    /// Seconds before it exits without processes, and before it closes an unused address [default: 5]
    #[arg(long, value_name = "SECONDS")]
    linger: Option<u32>,
    /// Most processes of one user [default: 64 with --shared, otherwise 127]
    #[arg(long, value_name = "N")]
    max_places: Option<usize>,
    /// Most open addresses of one user [default: 16 with --shared, otherwise 64]
    #[arg(long, value_name = "N")]
    max_addresses: Option<usize>,
    /// Most RDMA_CM ports of one user's processes [default: 8192 with --shared, otherwise 131072]
    #[arg(long, value_name = "N")]
    max_ports: Option<usize>,
    /// Most connections of one user's processes, whose peers are notified when a process dies [default: 16384 with --shared, otherwise
    /// 131072]
    #[arg(long, value_name = "N")]
    max_connections: Option<usize>,
    /// Go to the background: leave the terminal and close what the starting program left open
    #[arg(long, hide = true)]
    detach: bool,
    /// Say `ready` on standard output, and close it
    #[arg(long, hide = true)]
    announce: bool,
}

fn mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("not permissions such as 0660".into()),
    }
}

/// Serves until no process uses it.
pub(crate) fn run(args: &BrokerArgs) -> Result<(), Failure> {
    let dir = args.dir.clone().unwrap_or_else(super::directory);
    let usual = Config::new(dir);
    let given = args.linger.map(|s| Duration::from_secs(s.into()));
    let quotas = if args.shared { Quotas::SHARED } else { Quotas::PRIVATE };
    let config = Config {
        idle: given.unwrap_or(usual.idle),
        quotas: Quotas {
            places: args.max_places.unwrap_or(quotas.places),
            addresses: args.max_addresses.unwrap_or(quotas.addresses),
            ports: args.max_ports.unwrap_or(quotas.ports),
            connections: args.max_connections.unwrap_or(quotas.connections),
        },
        linger: if args.stay { None } else { given.or(usual.linger) },
        shared: args.shared.then_some(args.socket_mode),
        detach: args.detach,
        announce: args.announce,
        ..usual
    };
    server::run(&config).map_err(Failure::of)
}
