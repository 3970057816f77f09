//! `ib_write_bw` under `ferroce run`, both sides (Debian: perftest).

use std::net::Ipv4Addr;

use ferroce_loopback::tcp::{free_port, listens};

use crate::{eventually, process::Running};

/// How many writes it makes when it shall end.
const WRITES: &str = "500";

/// How `ferroce` is started.
pub type Start<'a> = &'a dyn Fn(&[String]) -> Running;

/// Where the sides are.
#[derive(Clone, Copy)]
pub struct Sides {
    /// The address that the server has, and that the client asks.
    pub server: Ipv4Addr,
    /// The client's; `None`: both sides have all addresses.
    pub client: Option<Ipv4Addr>,
}

/// A server and its client.
pub struct WriteBw {
    /// The former.
    pub server: Running,
    /// The latter.
    pub client: Running,
}

impl WriteBw {
    fn begin(start: Start<'_>, sides: Sides, how: &[&str]) -> Self {
        let port = free_port().expect("a TCP port").to_string();
        let side = |addr: Option<Ipv4Addr>, to: Option<Ipv4Addr>| {
            let addr = addr.map(|addr| ["--addr".to_owned(), addr.to_string()]);
            let program = ["--", "stdbuf", "-oL", "ib_write_bw", "-F", "-p", &port];
            let mut args = vec!["run".to_owned()];
            args.extend(addr.into_iter().flatten());
            args.extend(program.iter().chain(how).map(|word| (*word).to_owned()));
            args.extend(to.map(|to| to.to_string()));
            start(&args)
        };
        let mut server = side(sides.client.map(|_| sides.server), None);
        let (process, number) = (server.id().to_string(), port.parse().expect("a number"));
        eventually("ib_write_bw listens", || {
            assert!(!server.has_ended(), "ib_write_bw has ended\n{}", server.stderr());
            listens(&process, number)
        });
        let client = side(sides.client, Some(sides.server));
        Self { server, client }
    }

    /// It writes without end, and says so every second.
    ///
    /// # Panics
    /// When it does not start.
    pub fn endless(start: Start<'_>, sides: Sides) -> Self {
        Self::begin(start, sides, &["--run_infinitely", "-D", "1"])
    }

    /// It writes for a moment, and ends well.
    ///
    /// # Panics
    /// When not.
    pub fn once(start: Start<'_>, sides: Sides) {
        let Self { server, client } = Self::begin(start, sides, &["-n", WRITES]);
        for side in [client, server] {
            let end = side.end();
            assert_eq!(end.code, Some(0), "{}\n{}", end.stdout, end.stderr);
        }
    }

    /// What it writes from now on arrives.
    ///
    /// # Panics
    /// When not.
    pub fn works(&mut self) {
        while self.client.new_line().is_some() {}
        // The first second may have been before.
        for _ in 0..2 {
            eventually("ib_write_bw tells of its writes", || {
                assert!(
                    !self.client.has_ended(),
                    "ib_write_bw has ended\n{}",
                    self.client.stderr()
                );
                self.client.new_line().is_some_and(|line| iterations(&line) > Some(0))
            });
        }
    }
}

/// Of a line with results: `#bytes #iterations BW peak …`.
fn iterations(line: &str) -> Option<u64> {
    let mut words = line.split_whitespace();
    words.next()?.parse::<u64>().ok()?;
    words.next()?.parse().ok()
}
