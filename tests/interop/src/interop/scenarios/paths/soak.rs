//! Networks that go and are bad at random for some minutes, under load.

use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng as _, rngs::StdRng};

use super::{
    super::{
        Ctx, Direction, Scenario,
        faults::same_on_image,
        rnbd::{self, RMMOD_SERVER, Server, image},
    },
    kernel_client::{BY_TURNS, CLIENT_UP, client_down, head},
    longest,
    our_client::{Fio, Load, both_carry, map, paths, same_in_guest, server_down, server_up},
    script,
};
use crate::{Error, far::Ip, lab::check_stop};

pub(super) fn list() -> Vec<Scenario> {
    let ours = Scenario::new(10, "paths-soak-our-client", Direction::OursToKernel, our_client);
    let kernels = Scenario::new(10, "paths-soak-kernel-client", Direction::KernelToOurs, kernel_client);
    vec![ours.nets(2).waits(), kernels.nets(2).waits()]
}

const LENGTH: Duration = Duration::from_secs(180);

/// The same trouble each time; what it meets is another matter.
const SEED: u64 = 7;

/// What happens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Trouble {
    /// A network no longer forwards.
    Port(u8),
    /// The guest's cable of a network is pulled.
    Carrier(u8),
    /// No network forwards.
    Both,
    /// A network is bad.
    Netem(u8, &'static str),
    /// The kernel's server is unloaded, and loaded again.
    Reload,
}

/// What it is made of, and how often.
struct Trial {
    rng: StdRng,
    seen: Vec<(Trouble, Duration)>,
    /// How often rdma_rxe stopped a queue pair of its own accord.
    stopped: usize,
    /// How often it did not end an invalidation.
    hung: usize,
}

impl Trial {
    fn new() -> Self {
        Self {
            rng: StdRng::seed_from_u64(SEED),
            seen: Vec::new(),
            stopped: 0,
            hung: 0,
        }
    }

    /// The next trouble, and how long it lasts. `everything`: also what leaves no path.
    fn draw(&mut self, everything: bool) -> (Trouble, Duration) {
        const NETEM: [&str; 4] = ["loss 1%", "delay 20ms 10ms", "duplicate 2%", "delay 2ms reorder 90%"];
        let network = self.rng.random_range(0..2);
        let trouble = match self.rng.random_range(0..10) {
            0..3 => Trouble::Port(network),
            3..6 => Trouble::Carrier(network),
            6 if everything => Trouble::Both,
            7 if everything => Trouble::Reload,
            _ => Trouble::Netem(network, NETEM[self.rng.random_range(0..NETEM.len())]),
        };
        let lasts = Duration::from_millis(self.rng.random_range(200..12_000));
        self.seen.push((trouble, lasts));
        (trouble, lasts)
    }

    /// Some calm.
    fn rest(&mut self) {
        std::thread::sleep(Duration::from_millis(self.rng.random_range(500..6000)));
    }

    /// How often networks were cut, and bad, and the server was loaded.
    fn told(&self) -> String {
        let count = |is: fn(Trouble) -> bool| self.seen.iter().filter(|(trouble, _)| is(*trouble)).count();
        format!(
            "a network was cut {} times, both {}, one was bad {}, the server loaded anew {}",
            count(|t| matches!(t, Trouble::Port(_) | Trouble::Carrier(_))),
            count(|t| t == Trouble::Both),
            count(|t| matches!(t, Trouble::Netem(..))),
            count(|t| t == Trouble::Reload),
        )
    }
}

/// Does it, and undoes it after that time.
fn happen(c: &mut Ctx<'_>, trouble: Trouble, lasts: Duration) -> Result<(), Error> {
    if trouble == Trouble::Reload {
        let load = rnbd::server_modules("N");
        return script(c, &format!("{RMMOD_SERVER}\nsleep 1\n{load}"), 180).map(drop);
    }
    set(c, trouble, false)?;
    std::thread::sleep(lasts);
    set(c, trouble, true)
}

fn set(c: &mut Ctx<'_>, trouble: Trouble, well: bool) -> Result<(), Error> {
    let guest = c.guest()?;
    match trouble {
        Trouble::Port(network) => guest.set_port_on(network, well),
        Trouble::Carrier(network) => guest.set_link_on(network, well),
        Trouble::Both => (0..2).try_for_each(|network| guest.set_port_on(network, well)),
        // Over the console: it does not need the network.
        Trouble::Netem(network, what) => guest.netem_on(network, (!well).then_some(what)),
        Trouble::Reload => Ok(()),
    }
}

/// Everything as it should be, whatever happened.
fn mend(c: &mut Ctx<'_>) -> Result<(), Error> {
    for network in 0..2 {
        set(c, Trouble::Port(network), true)?;
        set(c, Trouble::Carrier(network), true)?;
        set(c, Trouble::Netem(network, ""), true)?;
    }
    Ok(())
}

/// Our client over two paths to the kernel's server. Requests wait while there is no path.
fn our_client(c: &mut Ctx<'_>) -> Result<String, Error> {
    server_up(c)?;
    let result = our_client_under_trouble(c);
    mend(c)?;
    server_down(c)?;
    result
}

fn our_client_under_trouble(c: &mut Ctx<'_>) -> Result<String, Error> {
    let mut mapping = map(
        c,
        Ip::V4,
        &[
            "--policy",
            "round-robin",
            "--on-loss",
            "queue",
            "--reconnect-delay",
            "1",
        ],
    )?;
    Fio::fill(c, &mapping)?;
    let mut fio = Fio::start_with(c, &mapping, Load::Both, &["--rate=128k,128k"])?;
    both_carry(c, 20)?;
    let mut trial = Trial::new();
    let until = Instant::now() + LENGTH;
    while Instant::now() < until {
        let (trouble, lasts) = trial.draw(true);
        happen(c, trouble, lasts)?;
        trial.rest();
        check_stop()?;
        fio.still_runs().map_err(|e| format!("after {:?}: {e}", trial.seen))?;
    }
    mend(c)?;
    let paths = paths(c, Ip::V4)?;
    // The kernel's server refuses a path until it knows that it is lost (`specs/kernel.md`).
    let timeout = Duration::from_secs(180);
    let log = mapping.process.log.clone();
    mapping.process.wait_until(timeout, || all_up(&log, &paths))?;
    both_carry(c, 20)?;
    let longest = fio.stop()?;
    same_in_guest(c, &mapping)?;
    let count = |event| mapping.count(event);
    let told = format!(
        "{}; {} times a path went down, {} failovers, no path {} times; no error, all blocks right, the longest request took {:.1} s: \
         passed",
        trial.told(),
        count("path_down"),
        count("failover"),
        count("session_lost"),
        longest.as_secs_f64()
    );
    mapping.stop()?;
    Ok(told)
}

/// Whether each path that went down has come up again.
fn all_up(log: &std::path::Path, paths: &[String]) -> bool {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    paths.iter().all(|path| {
        let mut of_path = text.lines().filter(|line| line.contains(path.as_str()));
        let last = of_path.rfind(|line| line.contains("\"path_up\"") || line.contains("\"path_down\""));
        last.is_none_or(|line| line.contains("\"path_up\""))
    })
}

/// fio runs until it is told to end.
const START: &str = "map_by path=$P0 path=$P1; up 2 100; load 4M 1800 100; carried $P0; carried $P1\n";

/// What is down is connected by order, as the client waits 30 s before it does that by itself. It may not know yet that it is down,
/// and our server not that a path is; so the orders are repeated. rdma_rxe may stop a queue pair while its path lives on, over a
/// repeated registration, or with a local invalidation that never completes (`specs/kernel.md`). If nothing goes by a path, both are
/// connected again, and what they held goes over; it is forgiven only if the kernel's log then names one of the two. The client
/// invalidates when the answer has come, so an invalidation that is flushed after such a silence is of a request that we answered.
const BACK: &str = "\
    moves() { for p in $P0 $P1; do echo 1 > $S/$p/stats/rdma; done\n\
        for i in $(seq 100); do sleep 0.1; [ $(cat $S/*/stats/rdma | cut -d' ' -f3 | grep -c '^[1-9]') = 2 ] && return; done; return 1; }\n\
    order() { for i in $(seq 100); do echo 1 2>/tmp/err > $S/$1/reconnect && return; sleep 0.3; done; cat /tmp/err; return 1; }\n\
    for i in $(seq 240); do [ $(connected) = 2 ] && sleep 1 && [ $(connected) = 2 ] && break; neighbours\n\
        for p in $P0 $P1; do [ $(cat $S/$p/state) = connected ] || echo 1 2>/tmp/err > $S/$p/reconnect || true; done; sleep 0.5; done\n\
    up 2 1; pidof fio >/dev/null\n\
    flushed() { dmesg | grep -c 'Failed IB_WR_LOCAL_INV' || true; }\n\
    if ! moves; then paths; F=$(flushed)\n\
        for p in $P0 $P1; do order $p; up 2 100; done\n\
        if dmesg | grep 'rxe_reg_fast_mr.*not free'; then echo stopped by rdma_rxe; else [ $(flushed) -gt $F ]; echo invalidation hung; fi\n\
        moves; fi\n";

const END: &str = "for p in $P0 $P1; do echo 1 > $S/$p/stats/rdma; done; carried $P0; carried $P1; unload\n";
const CHECKED: &str = "sum 64; echo normal > $B/unmap_device\n";

/// The kernel's client over two paths to our server, one of which is always well: without any its requests fail.
fn kernel_client(c: &mut Ctx<'_>) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let server = Server::start_at(c, "0.0.0.0", &["disk"], "on")?;
    let mut trial = Trial::new();
    let result = kernel_client_under_trouble(c, &mut trial);
    mend(c)?;
    client_down(c)?;
    let (report, out) = result.map_err(|e| format!("after {:?}: {e}", trial.seen))?;
    let (opened, summary) = (server.count("session_opened"), server.summary()?);
    same_on_image(c, &out, 4 << 20)?;
    if opened != 1 || summary["failed_requests"] != 0 || summary["access_errors"] != 0 {
        return Err(format!("{opened} sessions were opened; the server counted {summary}").into());
    }
    Ok(format!(
        "{}; {} times rdma_rxe stopped, {} times it did not end an invalidation, and its path was connected anew; \
         no error, all blocks right, the longest request took {:.1} s, one session: passed",
        trial.told(),
        trial.stopped,
        trial.hung,
        longest(&report)?.as_secs_f64()
    ))
}

/// fio's report, and what was printed after that.
fn kernel_client_under_trouble(c: &mut Ctx<'_>, trial: &mut Trial) -> Result<(String, String), Error> {
    let head = head(c, Ip::V4)?;
    let start = format!("{}{head}{CLIENT_UP}{START}{BY_TURNS}", rnbd::INSMOD_CLIENT);
    script(c, &start, 120)?;
    let until = Instant::now() + LENGTH;
    while Instant::now() < until {
        let (trouble, lasts) = trial.draw(false);
        happen(c, trouble, lasts)?;
        let said = script(c, &format!("{head}{BACK}"), 400)?;
        trial.stopped += usize::from(said.contains("stopped by rdma_rxe"));
        trial.hung += usize::from(said.contains("invalidation hung"));
        trial.rest();
    }
    let report = script(c, &format!("{head}{END}"), 240)?;
    Ok((report, script(c, &format!("{head}{CHECKED}"), 120)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_up_unless_it_went_down_last() {
        const A: &str = "ip:10.77.0.1@ip:10.77.0.254";
        const B: &str = "ip:10.78.0.1@ip:10.78.0.254";
        let log = tempfile::NamedTempFile::new().unwrap();
        let paths = [A.to_owned(), B.to_owned()];
        let event = |event: &str, path: &str| format!("{{\"event\":\"{event}\",\"path\":\"{path}\"}}\n");
        let mut text = event("path_down", A);
        for (more, up) in [
            (event("path_down", B), false),
            (event("path_up", B), false),
            (event("path_up", A), true),
            (event("path_down", B), false),
        ] {
            text += &more;
            std::fs::write(log.path(), &text).unwrap();
            assert_eq!(all_up(log.path(), &paths), up, "{text}");
        }
    }

    #[test]
    fn without_everything_a_network_stays_well() {
        let mut trial = Trial::new();
        let one = |trouble| !matches!(trouble, Trouble::Both | Trouble::Reload);
        assert!((0..200).all(|_| one(trial.draw(false).0)));
        assert!((0..200).any(|_| !one(trial.draw(true).0)));
    }
}
