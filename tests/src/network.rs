//! Two network namespaces with cables between them, for tests with the right to make them. Everything goes when they do.

use std::{
    ffi::OsStr,
    fmt::Debug,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
};

use crate::process::Running;

/// A namespace; it ends with its holder.
pub struct Namespace(Child);

impl Namespace {
    /// With loopback up, and what this shell script does in it.
    ///
    /// # Panics
    /// When there can be none.
    pub fn new(script: &str) -> Self {
        let script = format!("ip link set lo up && {script} && echo ready && exec sleep 3600");
        let mut holder = Command::new("unshare")
            .args(["-n", "sh", "-c", &script])
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare starts");
        let mut line = String::new();
        let out = holder.stdout.take().expect("piped");
        BufReader::new(out).read_line(&mut line).expect("readable");
        assert_eq!(
            line, "ready\n",
            "no network namespace: is this root, and is iproute2 there?"
        );
        Self(holder)
    }

    fn command(&self, program: &OsStr) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-n", "-t", &self.0.id().to_string()]).arg(program);
        command
    }

    /// Starts `ferroce` in it.
    ///
    /// # Panics
    /// When it can't be started.
    pub fn run<S: AsRef<OsStr> + Debug>(&self, args: &[S]) -> Running {
        let mut command = self.command(crate::ferroce().as_ref());
        command.args(args);
        Running::start_command(command, format!("ferroce {args:?}"))
    }

    /// Starts `ferroce-steered`, which is this program, in it.
    ///
    /// # Panics
    /// When it can't be started.
    pub fn steered<S: AsRef<OsStr> + Debug>(&self, program: &Path, args: &[S]) -> Running {
        let mut command = self.command(program.as_ref());
        command.args(args);
        Running::steered_by(command, format!("ferroce-steered {args:?}"))
    }

    /// Runs `ip` in it, with arguments that have a space between them.
    ///
    /// # Panics
    /// When it fails.
    pub fn ip(&self, args: &str) {
        let status = self.command("ip".as_ref()).args(args.split(' ')).status();
        assert!(status.is_ok_and(|status| status.success()), "ip {args}");
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
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
    /// It is pulled: both ends lose their carrier, A's interface being taken down.
    Carrier,
}

/// Two namespaces, A and B, and cables between them: number n from 10.78.n.1 to 10.78.n.2.
pub struct Network {
    /// One end.
    pub a: Namespace,
    /// The other.
    pub b: Namespace,
}

impl Network {
    /// With so many cables.
    ///
    /// # Panics
    /// When the right is missing, or iproute2.
    pub fn new(cables: usize) -> Self {
        let network = Self {
            a: Namespace::new("true"),
            b: Namespace::new("true"),
        };
        for n in 0..cables {
            let peer = network.b.0.id();
            network.a.ip(&format!(
                "link add wire{n} address {} type veth peer name wire{n} address {} netns {peer}",
                mac(n, 1),
                mac(n, 2)
            ));
            for (namespace, end) in [(&network.a, 1), (&network.b, 2)] {
                namespace.ip(&format!("addr add 10.78.{n}.{end}/24 dev wire{n}"));
                namespace.ip(&format!("link set wire{n} up"));
            }
            network.mend(n);
        }
        network
    }

    /// A's and B's addresses at a cable.
    pub fn ends(cable: usize) -> [String; 2] {
        [1, 2].map(|end| format!("10.78.{cable}.{end}"))
    }

    /// Cuts a cable that is whole.
    ///
    /// # Panics
    /// When `ip` fails.
    pub fn cut(&self, cable: usize, how: Cut) {
        // What is sent to a stranger's address comes there and is dropped, as the sender is told by nothing.
        if matches!(how, Cut::Silently | Cut::FromA) {
            neighbour(&self.a, cable, 2, "02:00:00:00:00:99");
        }
        if matches!(how, Cut::Silently | Cut::FromB) {
            neighbour(&self.b, cable, 1, "02:00:00:00:00:99");
        }
        if how == Cut::Carrier {
            self.a.ip(&format!("link set wire{cable} down"));
        }
    }

    /// Makes a cable whole again, however it was cut.
    ///
    /// # Panics
    /// When `ip` fails.
    pub fn mend(&self, cable: usize) {
        self.a.ip(&format!("link set wire{cable} up"));
        neighbour(&self.a, cable, 2, &mac(cable, 2));
        neighbour(&self.b, cable, 1, &mac(cable, 1));
    }
}

fn mac(cable: usize, end: u8) -> String {
    format!("02:00:00:00:{cable:02x}:{end:02x}")
}

/// The other end has this address on the wire.
fn neighbour(namespace: &Namespace, cable: usize, end: u8, mac: &str) {
    namespace.ip(&format!(
        "neigh replace 10.78.{cable}.{end} lladdr {mac} dev wire{cable} nud permanent"
    ));
}
