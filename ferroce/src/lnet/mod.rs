//! `ferroce lnet`: nodes of LNet over RDMA (o2iblnd), as Lustre has them.

mod explain;
mod ping;
mod portals;
mod selftest;
pub(crate) mod serve;

use std::{
    io,
    net::{IpAddr, Ipv4Addr},
};

use clap::{Args, Subcommand};
use lnet_host::{Config, LnetNode, Nid, NodeOptions};
pub(crate) use portals::source_file;
use roce::iface;

use crate::{output::Failure, rdma::RdmaArgs};

#[derive(Args)]
pub(crate) struct LnetCommand {
    #[command(subcommand)]
    command: Lnet,
}

#[derive(Subcommand)]
enum Lnet {
    /// Check whether NIDs of o2iblnd can be reached, and why not, as `lctl ping` does
    Ping(ping::PingArgs),
    /// Be a node of LNet: answer pings, discovery and lnet_selftest
    Serve(serve::ServeArgs),
    /// Measure LNet to other nodes by lnet_selftest, as `lst` of Lustre does
    Selftest(selftest::SelftestArgs),
}

impl LnetCommand {
    /// Name of the task that it is to hand over to the daemon, if it is.
    pub(crate) fn handed_over(&self) -> Option<String> {
        match &self.command {
            Lnet::Serve(args) if args.daemon => Some(args.nid().to_string()),
            _ => None,
        }
    }
}

/// Runs a command.
pub(crate) fn run(args: &LnetCommand) -> Result<(), Failure> {
    match &args.command {
        Lnet::Ping(args) => ping::run(args),
        Lnet::Serve(args) => serve::run(args),
        Lnet::Selftest(args) => selftest::run(args),
    }
}

/// Parameters of connections that are offered and accepted, and their device.
#[derive(Args)]
struct Offer {
    /// Queue depth of connections at most: `peer_credits` of ko2iblnd
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=255))]
    peer_credits: u16,
    /// Fragments of a descriptor at most
    #[arg(long, value_name = "N", default_value_t = 257, value_parser = clap::value_parser!(u16).range(1..=257))]
    fragments: u16,
    #[command(flatten)]
    rdma: RdmaArgs,
}

impl Offer {
    fn config(&self) -> Config {
        Config {
            peer_credits: self.peer_credits,
            high_water: (self.peer_credits / 2).max(1),
            max_frags: self.fragments,
            ..Config::default()
        }
    }
}

/// Opens a node.
fn open(options: NodeOptions, offer: &Offer) -> Result<LnetNode, Failure> {
    let nid = options.nid;
    let rdma = offer.rdma.devices(nid.address().into())?;
    LnetNode::open_on(options, rdma).map_err(|e| {
        let hint = match e.kind() {
            io::ErrorKind::AddrInUse => {
                "; another program has RoCE there (`ferroce lnet serve`, `ferroce run`, or the kernel's rdma_rxe)"
            }
            io::ErrorKind::AddrNotAvailable => "; it has to be an address of this host",
            _ => "",
        };
        Failure::failed(format!("{nid} can't be used: {e}{hint}"))
    })
}

/// Reads a NID of o2iblnd.
fn o2ib(text: &str) -> Result<Nid, String> {
    let nid: Nid = text.parse()?;
    match nid.is_o2ib() {
        true => Ok(nid),
        false => Err(format!("{nid} is not of o2iblnd, as 192.0.2.1@o2ib is")),
    }
}

/// NID to reach another one from: of the same network, at this address or that of the route.
fn source(addr: Option<Ipv4Addr>, nid: Nid) -> Result<Nid, Failure> {
    let route = || match iface::route_to(nid.address().into()) {
        Ok(IpAddr::V4(addr)) => Ok(addr),
        Ok(IpAddr::V6(addr)) => Err(Failure::failed(format!("the way to {nid} begins at {addr}"))),
        Err(e) => Err(Failure::failed(format!("no way to {nid}: {e}"))),
    };
    let addr = addr.map_or_else(route, Ok)?;
    match addr == nid.address() {
        true => Err(Failure::usage(format!(
            "{nid} is this host's own address: use another one (-I), or another host"
        ))),
        false => Ok(Nid::new(nid.net_type(), nid.net_number(), addr)),
    }
}
