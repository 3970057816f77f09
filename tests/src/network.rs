//! Network namespaces, and two of them with cables in between, for tests with the right to make them. Everything goes when they do.

use std::{ffi::OsStr, fmt::Debug, process::Command};

use ferroce_wire::{
    direction::Conditions,
    namespace,
    wire::{End, Wire, WireConfig},
};

use crate::process::{BROKER, Running, kill_broker_of};

/// A namespace.
pub struct Namespace(namespace::Namespace);

impl Namespace {
    /// With loopback up, and what these runs of `ip` do in it.
    ///
    /// # Panics
    /// When there can be none.
    pub fn new(setup: &[&str]) -> Self {
        let made = namespace::Namespace::new();
        let namespace = Self(made.expect("no network namespace: is this root, and is iproute2 there?"));
        setup.iter().for_each(|args| namespace.ip(args));
        namespace
    }

    /// Runs `ip` in it.
    ///
    /// # Panics
    /// When that fails.
    pub fn ip(&self, args: &str) {
        self.0.ip(args).expect("ip does it");
    }

    /// Makes a pair of virtual Ethernet devices: `ours` here, `theirs` in another namespace.
    ///
    /// # Panics
    /// When `ip` fails.
    pub fn link_to(&self, other: &Self, ours: &str, theirs: &str) {
        self.0.link_to(&other.0, ours, theirs).expect("ip does it");
    }

    /// A command in it, such as `iptables`.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        self.0.command(program)
    }

    /// Starts `ferroce` in it.
    ///
    /// # Panics
    /// When it can't be started.
    pub fn run<S: AsRef<OsStr> + Debug>(&self, args: &[S]) -> Running {
        let mut command = self.0.command(crate::ferroce());
        command.args(args);
        Running::start_command(command, format!("ferroce {args:?}"))
    }

    /// Kills (SIGKILL) the broker in it.
    ///
    /// # Panics
    /// When there is none.
    pub fn kill_broker(&self) {
        kill_broker_of(&self.run(&BROKER).end());
    }

    /// Starts `ferroce` in it, steered by its standard input.
    ///
    /// # Panics
    /// When it can't be started.
    pub fn steered<S: AsRef<OsStr> + Debug>(&self, args: &[S]) -> Running {
        let mut command = self.0.command(crate::ferroce());
        command.args(args);
        Running::steered_by(command, format!("ferroce {args:?}"))
    }
}

/// How a cable is cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    /// Nothing comes through, and nobody is told.
    Silently,
    /// Nothing comes through from A to B.
    FromA,
    /// Nothing comes through from B to A.
    FromB,
    /// It is pulled: both ends lose their carrier.
    Carrier,
}

/// Two namespaces, A and B, and cables between them.
pub struct Network {
    /// One end.
    pub a: Namespace,
    /// The other.
    pub b: Namespace,
    wire: Wire,
}

impl Network {
    /// With so many cables.
    ///
    /// # Panics
    /// When the right is missing, or iproute2.
    pub fn new(cables: usize) -> Self {
        let config = WireConfig {
            networks: network(cables),
            ..WireConfig::default()
        };
        let wire = Wire::start(&config).expect("no wire: is this root, and is iproute2 there?");
        let [a, b] = End::BOTH.map(|end| Namespace(wire.namespace(end).clone()));
        Self { a, b, wire }
    }

    /// A's and B's addresses at a cable.
    pub fn ends(cable: usize) -> [String; 2] {
        End::BOTH.map(|end| Wire::address(network(cable), end).to_string())
    }

    /// Cuts a cable that is whole.
    ///
    /// # Panics
    /// When `ip` fails.
    pub fn cut(&self, cable: usize, how: Cut) {
        let silent: &[End] = match how {
            Cut::Silently => &End::BOTH,
            Cut::FromA => &[End::A],
            Cut::FromB => &[End::B],
            Cut::Carrier => return self.carrier(cable, "off"),
        };
        for from in silent {
            self.wire.set(network(cable), *from, Conditions::cut());
        }
    }

    /// Makes a cable whole again, however it was cut.
    ///
    /// # Panics
    /// When `ip` fails.
    pub fn mend(&self, cable: usize) {
        for from in End::BOTH {
            self.wire.set(network(cable), from, Conditions::default());
        }
        self.carrier(cable, "on");
    }

    fn carrier(&self, cable: usize, on: &str) {
        for end in [&self.a, &self.b] {
            end.ip(&format!("link set wire{cable} carrier {on}"));
        }
    }
}

/// As the wire has it.
fn network(number: usize) -> u8 {
    u8::try_from(number).expect("a few cables")
}
