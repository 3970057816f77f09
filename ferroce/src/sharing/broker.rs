//! `ferroce broker`: programs start it on their own; a system broker is started by systemd.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use roce::broker::server::{self, Config};

use crate::output::Failure;

#[derive(Args)]
#[command(after_help = "\
One broker per user serves all of its processes and addresses. The first process that needs it starts it, and it ends \
some seconds after the last (FERROCE_BROKER_LINGER: how many). If it is killed, connections go on, and a process that is \
left starts another.

Users who share addresses with each other need a system broker: `systemctl enable --now ferroce-broker`, which runs \
`ferroce broker --shared --stay --dir /run/ferroce` as a user of its own; members of the group `ferroce` may use it. They \
all trust that user, and it gives each process its own socket only.")]
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
    /// Seconds to stay when nobody needs it [default: 5]
    #[arg(long, value_name = "SECONDS", conflicts_with = "stay")]
    linger: Option<u32>,
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
    let config = Config {
        linger: if args.stay { None } else { given.or(usual.linger) },
        shared: args.shared.then_some(args.socket_mode),
        detach: args.detach,
        announce: args.announce,
        ..usual
    };
    server::run(&config).map_err(|e| Failure::failed(e.to_string()))
}
