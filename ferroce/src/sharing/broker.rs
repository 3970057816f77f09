//! `ferroce broker`: programs start it on their own; a system broker is started by systemd.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use roce::broker::server::{self, Config, Quotas};

use crate::output::Failure;

#[derive(Args)]
#[command(after_help = "\
A broker that serves other users (--shared) keeps them apart only if it may load a BPF program (CAP_BPF, which the unit grants, \
or root): without that all of its users, the group `ferroce`, are one trust domain, and each can read what the others send \
and receive. It says at its start which it is; `ferroce stat` and `ferroce doctor` show it.

One broker per user serves all of its processes and addresses. The first process that needs it starts it, and it ends \
some seconds after the last (FERROCE_BROKER_LINGER: how many). If it is killed, connections go on, and a process that is \
left starts another.

Users who share addresses with each other need a system broker: `systemctl enable --now ferroce-broker`, which runs \
`ferroce broker --shared --stay --dir /run/ferroce` as a user of its own; members of the group `ferroce` may use it. They \
all trust that user. It gives each process its own socket only, with a filter that lets nothing through but packets to that \
process. Users of it can't read what is another's, but they can disturb each other: Linux lets a process with a socket of the \
group detach the steering program (it is attached again within a second), or connect its socket and so keep a sender's \
packets from the others.

What one user may have at a time is limited by the --max options; what is refused for that is counted (refused_places, \
refused_addresses, refused_ports, refused_connections in `ferroce stat`) and logged, one line in 10 seconds of each kind.")]
pub(crate) struct BrokerArgs {
    /// Folder of the socket
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Serve other users too
    #[arg(long)]
    shared: bool,
    /// Permissions of the socket with --shared, octal
    #[arg(long, value_name = "MODE", default_value = "0660", value_parser = mode, requires = "shared")]
    socket_mode: u32,
    /// Don't end when nobody needs it
    #[arg(long)]
    stay: bool,
    /// Seconds to stay when nobody needs it, and to keep an address open that nobody uses [default: 5]
    #[arg(long, value_name = "SECONDS")]
    linger: Option<u32>,
    /// Processes of one user [default: 64 with --shared, otherwise 127]
    #[arg(long, value_name = "N")]
    max_places: Option<usize>,
    /// Addresses that are open for one user [default: 16 with --shared, otherwise 64]
    #[arg(long, value_name = "N")]
    max_addresses: Option<usize>,
    /// RDMA_CM ports of one user's processes [default: 8192 with --shared, otherwise 131072]
    #[arg(long, value_name = "N")]
    max_ports: Option<usize>,
    /// Connections of one user's processes whose peers are told when a process dies [default: 16384 with --shared, otherwise
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

/// Serves until nobody needs it.
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
    server::run(&config).map_err(|e| Failure::failed(e.to_string()))
}
