//! `ferroce rds`: RDS sockets of programs, and the node that has their connections.

pub(crate) mod info;
pub(crate) mod node;
mod ping;

use clap::{Args, Subcommand};

use crate::output::Failure;

#[derive(Args)]
pub(crate) struct RdsCommand {
    #[command(subcommand)]
    command: Rds,
}

#[derive(Subcommand)]
enum Rds {
    /// Own the addresses of RDS sockets; programs start it on demand
    Node(node::NodeArgs),
    /// Show sockets, connections, queues and counters, as rds-info does
    Info(info::InfoArgs),
    /// Measure the round trip to another host's RDS, as rds-ping does
    Ping(ping::PingArgs),
}

impl RdsCommand {
    /// Name of the task that it is to hand over to the daemon, if it is.
    pub(crate) fn handed_over(&self) -> Option<String> {
        match &self.command {
            Rds::Node(args) if args.daemon => Some(args.task_name()),
            _ => None,
        }
    }
}

/// Runs a command.
pub(crate) fn run(args: &RdsCommand) -> Result<(), Failure> {
    match &args.command {
        Rds::Node(args) => node::run(args),
        Rds::Info(args) => info::run(args),
        Rds::Ping(args) => ping::run(args),
    }
}
