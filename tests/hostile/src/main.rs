//! `ferroce-hostile`: the attacks from the command line.

mod soak;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    process::ExitCode,
    str::FromStr,
    sync::{Arc, atomic::AtomicBool},
    thread,
    time::{Duration, Instant},
};

use clap::{Args, Parser, Subcommand};
use ferroce_hostile::{
    aim::Aim,
    attack::{self, Control, Sent},
    forge::{Forger, Identifications, Kind},
    origin::Origin,
};
use ferroce_tests::signals::stop_flag;
use rand::Rng;
use serde_json::json;

/// Attacks a RoCE device, or `ferroce serve`, with forged packets, to see what it makes of them.
///
/// Packets go to loopback addresses only, or, with --in-namespace, anywhere within a network namespace that was made for
/// this. Prints one line of JSON at the end. Ctrl-C ends an attack early.
#[derive(Parser)]
#[command(
    name = "ferroce-hostile",
    version,
    max_term_width = 100,
    after_help = "Examples:\n  ferroce-hostile mads --between 127.0.0.1,127.0.0.2 --rate 50 --seconds 20\n  \
                  ferroce-hostile req --to 127.0.0.1 --from 127.66.0.0+64 --count 64\n  \
                  ferroce-hostile reflect --to 127.0.0.1 --victims 127.66.0.1\n\n\
                  Exit status: 0 all well, 1 sending failed or (soak) the verdict is bad, 2 wrong usage."
)]
struct Cli {
    #[command(subcommand)]
    task: Task,
    /// Any address is allowed, because this network namespace is not that of the processes above
    #[arg(long, global = true)]
    in_namespace: bool,
    /// Senders are written by a raw socket (CAP_NET_RAW), whosever address that is, with this source port
    #[arg(long, global = true, value_name = "PORT", num_args = 0..=1, require_equals = true, default_missing_value = "49152")]
    spoof: Option<u16>,
    /// Which Identification ICRCs are made with: a number, `counter` (from anywhere), `random`; default: `counter`, and 0
    /// with `soak`
    #[arg(long, global = true, value_name = "HOW", value_parser = identifications)]
    identification: Option<Identifications>,
    /// Makes the same packets again
    #[arg(long, global = true, value_name = "N", default_value_t = 1)]
    seed: u64,
}

#[derive(Subcommand)]
enum Task {
    /// Each end of a session gets management datagrams from the other's address
    Mads {
        /// The ends
        #[arg(long, value_name = "ADDR,ADDR", value_parser = pair)]
        between: (Ipv4Addr, Ipv4Addr),
        #[command(flatten)]
        flow: FlowArgs,
        /// Kinds of packets
        #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Kind::Drep, Kind::Mra])]
        kinds: Vec<Kind>,
    },
    /// Connect requests, each for a session of its own, whose sender never answers
    Req {
        /// The server
        #[arg(long, value_name = "ADDR[:1234]", value_parser = server)]
        to: SocketAddr,
        /// Addresses in a row
        #[arg(long, value_name = "ADDR[+N]")]
        from: Row,
        /// Requests of eight neighbouring addresses are for paths of one session, those of one address for connections of
        /// its path
        #[arg(long)]
        shared: bool,
        #[command(flatten)]
        flow: FlowArgs,
    },
    /// One packet of each kind and opcode from addresses of which each counts what comes back
    Reflect {
        /// The device
        #[arg(long, value_name = "ADDR[:1234]", value_parser = server)]
        to: SocketAddr,
        /// First of the addresses in a row that the packets come from
        #[arg(long, value_name = "ADDR")]
        victims: Ipv4Addr,
        /// How long to count
        #[arg(long, value_name = "SECONDS", default_value_t = 20.0)]
        seconds: f64,
        /// Code of the time within which requests promise answers: 0 is 4 us, 20 is 4.3 s
        #[arg(long, value_name = "CODE", default_value_t = 0)]
        timeout: u8,
    },
    /// Replies that nobody asked for
    Rep {
        /// The device, or the address that processes share
        #[arg(long, value_name = "ADDR")]
        to: IpAddr,
        /// Addresses that they seem to come from
        #[arg(long, value_name = "ADDR[+N]")]
        from: Row,
        /// First bits of the communication IDs, and how many: the place of a process that shares an address (11 bits)
        #[arg(long, value_name = "TOP/BITS", value_parser = place)]
        place: Option<(u32, u32)>,
        #[command(flatten)]
        flow: FlowArgs,
    },
    /// Packets of many kinds from many addresses
    Flood {
        /// Each gets the whole rate; may be given several times
        #[arg(long, value_name = "ADDR", required = true)]
        to: Vec<IpAddr>,
        /// Addresses in a row
        #[arg(long, value_name = "ADDR[+N]", default_value = "127.255.0.1+1000")]
        from: Row,
        /// Kinds of packets
        #[arg(long, value_enum, value_delimiter = ',', default_values_t = Kind::FLOOD)]
        kinds: Vec<Kind>,
        #[command(flatten)]
        flow: FlowArgs,
    },
    /// Floods both ends of a mapped device for minutes, and judges whether that shows (`cargo xtask flood`)
    Soak(soak::SoakArgs),
}

#[derive(Args)]
struct FlowArgs {
    /// Packets a second (to each target); 0: as many as possible
    #[arg(long, value_name = "N", default_value_t = 1000.0)]
    rate: f64,
    /// Packets (to each target)
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// How long, if no number is given
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    seconds: f64,
}

/// IPv4 addresses in a row.
#[derive(Clone, Copy)]
struct Row {
    first: Ipv4Addr,
    count: u32,
}

impl FromStr for Row {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (first, count) = text.split_once('+').unwrap_or((text, "1"));
        Ok(Self {
            first: first.parse().map_err(|e| format!("{first}: {e}"))?,
            count: count.parse().map_err(|e| format!("{count}: {e}"))?,
        })
    }
}

fn identifications(text: &str) -> Result<Identifications, String> {
    match text {
        "counter" => Ok(Identifications::Counter(rand::rng().random())),
        "random" => Ok(Identifications::Random),
        number => number
            .parse()
            .map(Identifications::Fixed)
            .map_err(|e| format!("{number}: {e}")),
    }
}

fn pair(text: &str) -> Result<(Ipv4Addr, Ipv4Addr), String> {
    let (a, b) = text.split_once(',').ok_or("two addresses")?;
    let parse = |s: &str| s.parse().map_err(|e| format!("{s}: {e}"));
    Ok((parse(a)?, parse(b)?))
}

fn server(text: &str) -> Result<SocketAddr, String> {
    let with_port = |ip: IpAddr| SocketAddr::new(ip, rtrs::proto::DEFAULT_PORT);
    text.parse()
        .or_else(|_| text.parse().map(with_port))
        .map_err(|e| e.to_string())
}

fn place(text: &str) -> Result<(u32, u32), String> {
    let (top, bits) = text.split_once('/').ok_or("TOP/BITS")?;
    let parse = |s: &str| s.parse::<u32>().map_err(|e| format!("{s}: {e}"));
    match (parse(top)?, parse(bits)?) {
        (top, bits @ 1..32) if top >> bits == 0 => Ok((top, bits)),
        _ => Err("1 to 31 bits".to_owned()),
    }
}

impl Cli {
    fn origins(&self, aim: Aim, row: Row) -> io::Result<Vec<Origin>> {
        match self.spoof {
            Some(port) => Origin::spoof(aim, row.first, row.count, port),
            None => Origin::crowd(aim, row.first, row.count),
        }
    }

    fn end(&self, aim: Aim, addr: Ipv4Addr) -> io::Result<Origin> {
        let one = Row { first: addr, count: 1 };
        self.origins(aim, one)?
            .pop()
            .ok_or_else(|| io::Error::other("no sender"))
    }

    fn forger(&self) -> Forger {
        let identifications = self
            .identification
            .unwrap_or_else(|| Identifications::Counter(rand::rng().random()));
        Forger::new(self.seed, identifications)
    }
}

/// Stops the attack after its time, unless it counts.
fn end_in_time(flow: &FlowArgs, control: &Control) {
    if flow.count.is_none() {
        let (control, after) = (control.clone(), Duration::from_secs_f64(flow.seconds));
        thread::spawn(move || {
            thread::sleep(after);
            control.stop();
        });
    }
}

fn tell(sent: Sent, since: Instant) {
    let seconds = since.elapsed().as_secs_f64();
    println!(
        "{}",
        json!({ "packets": sent.packets, "bytes": sent.bytes, "seconds": seconds })
    );
}

fn run(cli: &Cli, stop: &Arc<AtomicBool>) -> io::Result<bool> {
    let aim = if cli.in_namespace {
        Aim::in_namespace()?
    } else {
        Aim::LOOPBACK
    };
    let control = Control::of(stop.clone());
    let mut forger = cli.forger();
    let since = Instant::now();
    let sent = match &cli.task {
        Task::Soak(args) => return soak::run(args, stop).map_err(io::Error::other),
        Task::Mads { between, flow, kinds } => {
            let ends = [cli.end(aim, between.0)?, cli.end(aim, between.1)?];
            end_in_time(flow, &control);
            attack::between(ends, kinds, &mut forger, flow.rate, &control)?
        }
        Task::Req { to, from, shared, flow } => {
            forger.shared = *shared;
            forger.port = to.port();
            let origins = cli.origins(aim, *from)?;
            end_in_time(flow, &control);
            attack::flood(
                &[to.ip()],
                &origins,
                &[Kind::Req],
                &mut forger,
                flow.rate,
                flow.count,
                &control,
            )?
        }
        Task::Reflect {
            to,
            victims,
            seconds,
            timeout,
        } => {
            forger.port = to.port();
            forger.timeout = Some(*timeout & 31);
            let wait = Duration::from_secs_f64(*seconds);
            return reflect(&attack::reflect(aim, to.ip(), *victims, &mut forger, wait, &control)?);
        }
        Task::Rep { to, from, place, flow } => {
            forger.place = *place;
            let origins = cli.origins(aim, *from)?;
            end_in_time(flow, &control);
            attack::flood(
                &[*to],
                &origins,
                &[Kind::Rep],
                &mut forger,
                flow.rate,
                flow.count,
                &control,
            )?
        }
        Task::Flood { to, from, kinds, flow } => {
            let origins = cli.origins(aim, *from)?;
            end_in_time(flow, &control);
            attack::flood(to, &origins, kinds, &mut forger, flow.rate, flow.count, &control)?
        }
    };
    tell(sent, since);
    Ok(true)
}

fn reflect(found: &attack::Reflections) -> io::Result<bool> {
    for (name, r) in found.iter().filter(|(_, r)| r.packets > 0) {
        println!(
            "{}",
            json!({ "sent": name, "bytes": r.sent, "packets_back": r.packets, "bytes_back": r.bytes, "messages": r.messages })
        );
    }
    let most = found.iter().map(|(_, r)| r.packets).max().unwrap_or(0);
    println!("{}", json!({ "kinds": found.len(), "most_packets_back": most }));
    Ok(true)
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let stop = stop_flag();
    match run(&cli, &stop) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}
