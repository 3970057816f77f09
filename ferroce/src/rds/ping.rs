//! `ferroce rds ping`: messages to port 0.

use std::{
    net::IpAddr,
    thread,
    time::{Duration, Instant},
};

use clap::Args;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rds_local::{Control, RecvKind, Socket};
use roce::iface;
use rustix::net::{RecvFlags, SendFlags};

use crate::{
    output::{self, Failure},
    units,
};

#[derive(Args)]
#[command(after_help = "\
One line for each ping: its number and the round trip in microseconds. The first one includes connecting. Without an answer the line says \
so; the exit status is 1 if none came at all.")]
pub(crate) struct PingArgs {
    /// Address to ping
    address: IpAddr,
    /// Pings to send; without it they go on until ctrl-C
    #[arg(short, long, value_name = "N")]
    count: Option<u64>,
    /// Time from one to the next, in seconds
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = units::seconds)]
    interval: Duration,
    /// Time to wait for an answer, in seconds
    #[arg(short = 'W', long, value_name = "SECONDS", default_value = "5", value_parser = units::seconds)]
    timeout: Duration,
    /// Address to send from [default: that of the route]
    #[arg(short = 'I', long, value_name = "ADDRESS")]
    source: Option<IpAddr>,
}

/// Pings.
pub(super) fn run(args: &PingArgs) -> Result<(), Failure> {
    let route = || iface::route_to(args.address);
    let source = args.source.map_or_else(route, Ok);
    let source = source.map_err(|e| Failure::failed(format!("no way to {}: {e}", args.address)))?;
    let control = Control::open().map_err(Failure::of)?;
    let mut answered = false;
    for number in 1..=args.count.unwrap_or(u64::MAX) {
        let begun = Instant::now();
        // A late answer is for a socket that is gone.
        let socket = control.socket().map_err(Failure::of)?;
        socket
            .bind((source, 0).into())
            .map_err(|e| Failure::failed(format!("{source} can't be used: {e}; the log of the node says more")))?;
        let line = match ping(&socket, args) {
            Ok(Some(time)) => {
                answered = true;
                format!("{number:4}: {} usec", time.as_micros())
            }
            Ok(None) => format!("{number:4}: no answer within {} s", args.timeout.as_secs_f32()),
            Err(e) => format!("{number:4}: ERROR: {e}"),
        };
        output::line(&line)?;
        drop(socket);
        if args.count != Some(number) {
            thread::sleep(args.interval.saturating_sub(begun.elapsed()));
        }
    }
    match answered {
        true => Ok(()),
        false => Err(Failure::reported(1)),
    }
}

/// Sends one, and returns the time until its answer.
fn ping(socket: &Socket<'_>, args: &PingArgs) -> std::io::Result<Option<Duration>> {
    let begun = Instant::now();
    socket.send_to(&[], Some((args.address, 0).into()), SendFlags::empty())?;
    loop {
        let left = args.timeout.saturating_sub(begun.elapsed());
        let mut fds = [PollFd::new(std::os::fd::AsFd::as_fd(socket), PollFlags::POLLIN)];
        let wait = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        if poll(&mut fds, wait)? == 0 {
            return Ok(None);
        }
        match socket.recv(RecvFlags::DONTWAIT) {
            Ok(received) if matches!(received.kind, RecvKind::Message(_)) => return Ok(Some(begun.elapsed())),
            Ok(_) => {}
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
    }
}
