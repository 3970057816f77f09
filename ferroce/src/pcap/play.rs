//! `ferroce pcap play`.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Read as _, Write},
    net::{IpAddr, SocketAddr, ToSocketAddrs as _, UdpSocket},
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;
use roce_bth::ROCE_UDP_PORT;
use roce_pcap::Writer;
use roce_script::{Direction, Live, LiveConfig, Outcome, Script};

use crate::{output::Failure, units};

/// Play scripts of packets on ferroce's transport or on a live host, and compare the answers
///
/// A script is a text: a step a line, `#` begins a comment. The script is one end of a connection; the other end, the host, is ferroce's
/// transport, in virtual time and without a network, or with --to the queue pair of a live host, in real time. Prints a line for each
/// script, and for one that fails its line, what was expected and what came. After a step that fails the script goes on at its next
/// `restart`.
#[derive(Args)]
#[command(after_help = "\
Steps:
  qp KEY=VALUE…           settings of the host's queue pair, before the first step: type=rc|uc ip=4|6 mtu= psn= (of its first request)
                          peer-psn= (of the script's) depth= timeout= retry= rnr-retry= rnr-timer= access=rwafp source-port=
                          reorder=on|off state=reset|init|rtr|rts recv=[COUNTx]LEN region=NAME:LEN:rwafp
  > PACKET FIELD=VALUE…   the script sends a packet
  < PACKET FIELD=VALUE…   the host's next packet; fields that are not named, or are *, may have any value
  ignore PACKET…|none     such packets of the host are passed over from now on
  silence TIME            the host sends nothing for so long (us, ms, s)
  after TIME, at TIME     time goes by: so much, or until so long after the start
  timeout TIME            time that `<`, `completion` and `event` wait (1s)
  restart                 the host starts again, as the qp lines say
  post OP KEY=VALUE…      the host posts recv, send, write, read, compare-swap or fetch-add: id= len= local=REGION+N va= rkey= imm= …
  completion send|recv    the host's next completion: id= status= len= imm= payload=; `completion none`
  event NAME|none         the host's next asynchronous event, as QP_ACCESS_ERR
  memory REGION+N payload=DATA
                          bytes of the host's memory
  revoke REGION           the host deregisters a region
  modify STATE            the host changes its queue pair's state
  state STATE             the state of the host's queue pair

Packets:
  ack, nak CODE, rnr, and opcodes by their names: send-first, write-only-imm, read-request, read-response-last, fetch-add …;
  only to send: opcode=CODE (a BTH with it), raw HEX (the UDP payload); only to expect: * (any)

Fields:
  psn qp pkey pad version ackreq se fecn becn migreq msn credits timer syndrome va rkey len imm inv swap compare add value
  placement selectivity source-port payload=DATA; only to send: from=ADDRESS to=ADDRESS corrupt=icrc icrc=none cut=BYTES
  DATA is LEN (the script's own bytes, different in each PSN), LEN:psnN (its bytes from PSN N on), LEN:REGION+N (those that the
  region had in the beginning), LEN:0xNN or hex:DIGITS

Examples:
  ferroce pcap play gap.play
  ferroce pcap play --packets --pcap gap.pcap gap.play
  ferroce pcap play --to 192.0.2.7 gap.play                  # where `verbs-agent -g 192.0.2.7` runs there

  # A gap is reported once, and the missing packet closes it.
  qp mtu=1024 recv=2x64
  > send-only psn=0 payload=8 ackreq
  < ack psn=0 msn=1
  > send-only psn=2 payload=8
  < nak sequence psn=1 msn=1
  silence 10ms

Live hosts:
  With --to packets are sent by a raw IP socket, which needs CAP_NET_RAW; UDP port 4791 must be free at --from. `verbs-agent` on the host \
creates its queue pair, posts and polls (tests/interop/lab/verbs-agent.c, in the kit of docs/hardware/kit.md, also \
`ferroce run -- verbs-agent`). A script that the host or the network can't have, such as one with FLUSH or over the other IP version, \
is not run: its line says why.

Exit status:
  0  all scripts got what they expect
  1  a script did not, or the host can't be reached
  2  a script can't be read or is wrong, or wrong usage
  3  a script was not run, the others got what they expect")]
pub(super) struct PlayArgs {
    /// The scripts; `-` is standard input
    #[arg(required = true, value_name = "SCRIPT")]
    scripts: Vec<PathBuf>,
    /// Print the packets of both ends
    #[arg(long)]
    packets: bool,
    /// Write the packets of both ends to a capture
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    /// Play on the live host with this address
    #[arg(long, value_name = "ADDRESS")]
    to: Option<IpAddr>,
    /// TCP address of the live host's agent [default: port 18600 of --to]
    #[arg(long, requires = "to", value_name = "HOST:PORT")]
    agent: Option<String>,
    /// Address to send from [default: that of the route to --to]
    #[arg(long, requires = "to", value_name = "ADDRESS")]
    from: Option<IpAddr>,
    /// Time that the live host may be later than a script says; `silence` and `after` last as long as they say
    #[arg(long, requires = "to", default_value = "0.5", value_parser = units::seconds, value_name = "SECONDS")]
    late: Duration,
    /// The live host is ferroce (`ferroce run -- verbs-agent`): before each script it sends a WRITE of no bytes, which is answered, as it
    /// sends one request at a time until it knows the UDP source port of its peer. Scripts with `reorder=off` are not run
    #[arg(long, requires = "to")]
    ferroce: bool,
}

/// TCP port of the agent.
const AGENT_PORT: u16 = 18600;
/// Time between two scripts in a capture.
const BETWEEN: Duration = Duration::from_secs(1);

/// Runs the command.
pub(super) fn run(args: &PlayArgs) -> Result<(), Failure> {
    let mut live = args.to.map(|host| open(args, host)).transpose()?;
    let mut capture = args.pcap.as_deref().map(Captured::create).transpose()?;
    let (mut failed, mut not_run, mut unreadable, mut runs) = (false, false, false, 0);
    let mut out = BufWriter::new(io::stdout().lock());
    for path in &args.scripts {
        let name = path.display().to_string();
        let parsed = read(path).map_err(|e| format!("{name}: {e}"));
        let script = parsed.and_then(|text| Script::parse(&text).map_err(|e| format!("{name}:{e}")));
        let script = match script {
            Ok(script) => script,
            Err(text) => {
                unreadable = true;
                out.flush()?;
                let _ = writeln!(io::stderr(), "error: {text}");
                continue;
            }
        };
        let outcome = match &mut live {
            Some(live) => script.play_live(live),
            None => script.play_from(runs),
        };
        runs = runs.wrapping_add(outcome.runs);
        failed |= !outcome.mismatches.is_empty();
        not_run |= outcome.not_run.is_some();
        print(&mut out, args, &name, &outcome)?;
        if live.is_some() {
            out.flush()?;
        }
        if let Some(capture) = &mut capture {
            capture.write(&outcome)?;
        }
    }
    out.flush()?;
    if let Some(capture) = capture {
        capture.finish()?;
    }
    match (unreadable, failed, not_run) {
        (true, ..) => Err(Failure::reported(2)),
        (false, true, _) => Err(Failure::reported(1)),
        (false, false, true) => Err(Failure::reported(3)),
        (false, false, false) => Ok(()),
    }
}

/// Opens the way to a live host.
fn open(args: &PlayArgs, host: IpAddr) -> Result<Live, Failure> {
    let host = host.to_canonical();
    let script = args.from.map_or_else(|| source(host), |from| Ok(from.to_canonical()))?;
    if script.is_ipv4() != host.is_ipv4() || script == host {
        return Err(Failure::usage(format!(
            "--from {script} and --to {host}: two addresses of one IP version are needed"
        )));
    }
    let agent = match &args.agent {
        None => SocketAddr::new(host, AGENT_PORT),
        Some(text) => {
            let found = text.to_socket_addrs().map(|mut all| all.next());
            let found = found.map_err(|e| Failure::usage(format!("--agent {text}: {e}; give it as HOST:PORT")))?;
            found.ok_or_else(|| Failure::usage(format!("--agent {text}: the name has no address")))?
        }
    };
    let config = LiveConfig {
        host,
        script,
        agent,
        lateness: args.late,
        is_ferroce: args.ferroce,
    };
    Live::open(config).map_err(Failure::of)
}

/// Returns the address that packets to a host come from.
fn source(host: IpAddr) -> Result<IpAddr, Failure> {
    let any: SocketAddr = match host {
        IpAddr::V4(_) => ([0; 4], 0).into(),
        IpAddr::V6(_) => ([0; 16], 0).into(),
    };
    let found = UdpSocket::bind(any).and_then(|socket| {
        socket.connect((host, ROCE_UDP_PORT))?;
        socket.local_addr()
    });
    found
        .map(|addr| addr.ip())
        .map_err(|e| Failure::failed(format!("{host}: {e}")))
}

fn read(path: &Path) -> io::Result<String> {
    if path.as_os_str() != "-" {
        return fs::read_to_string(path);
    }
    let mut text = String::new();
    io::stdin().lock().read_to_string(&mut text)?;
    Ok(text)
}

fn print(out: &mut impl Write, args: &PlayArgs, name: &str, outcome: &Outcome) -> io::Result<()> {
    if args.packets {
        for record in &outcome.records {
            let sign = match record.direction {
                Direction::Sent => '>',
                Direction::Received => '<',
            };
            let at = record.datagram.at.as_secs_f64();
            writeln!(out, "{at:>12.6} {sign} {}", record.text)?;
        }
    }
    let (steps, packets) = (outcome.steps, outcome.records.len());
    for mismatch in &outcome.mismatches {
        writeln!(out, "{name}:{}: {}", mismatch.line, mismatch.text)?;
    }
    match &outcome.not_run {
        Some(why) => writeln!(out, "{name}: not run: {why}"),
        None if outcome.is_good() => writeln!(out, "{name}: good ({steps} steps, {packets} packets)"),
        None => Ok(()),
    }
}

/// Capture of what is played.
struct Captured {
    name: String,
    writer: Writer<BufWriter<File>>,
    /// Time of the next script.
    start: Duration,
}

impl Captured {
    fn create(path: &Path) -> Result<Self, Failure> {
        let name = path.display().to_string();
        let writer = Writer::create(path).map_err(|e| Failure::failed(format!("{name}: {e}")))?;
        let start = Duration::ZERO;
        Ok(Self { name, writer, start })
    }

    fn write(&mut self, outcome: &Outcome) -> Result<(), Failure> {
        let mut last = Duration::ZERO;
        for record in &outcome.records {
            let datagram = &record.datagram;
            last = datagram.at;
            let nanos = (self.start + last).as_nanos() as u64;
            let written = self.writer.write(
                nanos,
                datagram.src,
                datagram.dst,
                &datagram.bytes,
                datagram.identification,
            );
            match written {
                // A packet from an address of another IP version: no frame can have it.
                Err(e) if e.kind() == io::ErrorKind::InvalidInput => {}
                written => written.map_err(|e| Failure::failed(format!("{}: {e}", self.name)))?,
            }
        }
        self.start += last + BETWEEN;
        // After ctrl-C the scripts so far are there.
        self.writer
            .flush()
            .map_err(|e| Failure::failed(format!("{}: {e}", self.name)))
    }

    fn finish(self) -> Result<(), Failure> {
        let finished = self.writer.finish();
        finished
            .map(drop)
            .map_err(|e| Failure::failed(format!("{}: {e}", self.name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn live(to: &str, from: &str, agent: &str) -> String {
        let args = PlayArgs {
            scripts: Vec::new(),
            packets: false,
            pcap: None,
            to: to.parse().ok(),
            agent: Some(agent.to_owned()),
            from: from.parse().ok(),
            late: Duration::from_secs(1),
            ferroce: false,
        };
        format!("{:?}", run(&args).unwrap_err())
    }

    #[test]
    fn ends_that_make_no_connection_are_refused() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        for (to, from, agent, expected) in [
            (
                "127.0.0.1",
                "127.0.0.1",
                "127.0.0.1:1",
                "two addresses of one IP version",
            ),
            ("127.0.0.1", "::1", "127.0.0.1:1", "two addresses of one IP version"),
            ("127.0.0.1", "127.0.0.2", "127.0.0.1", "give it as HOST:PORT"),
            (
                "127.0.0.1",
                "127.0.0.2",
                &format!("127.0.0.1:{port}"),
                "no agent at 127.0.0.1",
            ),
        ] {
            let found = live(to, from, agent);
            assert!(found.contains(expected), "{found}");
        }
    }

    fn play(scripts: &[&str], dir: &Path) -> Result<(), Failure> {
        let write = |(index, text): (usize, &&str)| {
            let path = dir.join(format!("{index}.play"));
            fs::write(&path, text).unwrap();
            path
        };
        run(&PlayArgs {
            scripts: scripts.iter().enumerate().map(write).collect(),
            packets: true,
            pcap: Some(dir.join("played.pcap")),
            to: None,
            agent: None,
            from: None,
            late: Duration::ZERO,
            ferroce: false,
        })
    }

    #[test]
    fn what_is_played_can_be_judged_from_its_capture() {
        let dir = tempfile::tempdir().unwrap();
        let good = "qp recv=64\n> send-only psn=0 payload=8 ackreq\n< ack psn=0 msn=1\n";
        assert!(play(&[good, good], dir.path()).is_ok());
        let report = roce_pcap::check_file(dir.path().join("played.pcap")).unwrap();
        assert_eq!((report.icrc_ok, report.conversations.len()), (4, 2));
        assert!(report.conversations.iter().all(|c| c.errors == 0));
    }

    #[test]
    fn a_script_that_fails_and_one_that_is_wrong_are_told_apart() {
        let fails = "> send-only psn=0 payload=8 ackreq\n< ack psn=0\n";
        for (scripts, code) in [(&[fails][..], 1), (&[fails, "> sent psn=0\n"], 2)] {
            let dir = tempfile::tempdir().unwrap();
            let failure = play(scripts, dir.path()).unwrap_err();
            assert_eq!(format!("{failure:?}"), format!("{:?}", Failure::reported(code)));
        }
    }
}
