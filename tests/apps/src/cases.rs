//! What a case is.

use std::path::{Path, PathBuf};

use roce_pcap::Rule;

use crate::{memcheck, site::Net};

/// Debian packages of several modules' programs.
pub(crate) const IBVERBS: &str = "ibverbs-utils";
pub(crate) const PERFTEST: &str = "perftest";
pub(crate) const RDMACM: &str = "rdmacm-utils";

/// How the client knows that the server is ready.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ready {
    /// It listens at the case's TCP port.
    Listens,
    /// It can't be seen from outside (it listens in RDMA_CM): the client is started again until it gets through.
    Retry,
    /// It reads nothing before the client is there.
    AtOnce,
}

/// How a server ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ServerEnd {
    /// By itself, with status 0.
    Zero,
    /// It serves for ever, and is stopped when the client is done.
    Stopped,
}

/// A server beside the client.
#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) command: Vec<String>,
    pub(crate) ready: Ready,
    pub(crate) end: ServerEnd,
}

/// Side of a case.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    Server,
    Client,
}

/// Moment of the kill.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// The server, before the client starts.
    BeforeConnect,
    /// On the way to a connection: several times, a little later each time.
    Connecting,
    /// When the victim has printed this.
    Says(&'static str),
}

/// Killing of one side.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kill {
    pub(crate) victim: Side,
    pub(crate) moment: Moment,
    /// Texts of which the other side prints one. They show that it noticed the end of a connection in progress, if it does not exit.
    pub(crate) says: &'static [&'static str],
}

/// Migration of a guest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Migration {
    /// All memory is registered beforehand (`rdma-pin-all`), instead of piece by piece.
    pub(crate) pin: bool,
    /// The guest keeps running.
    pub(crate) busy: bool,
}

/// Crate, and the targets that cargo builds of it.
pub(crate) struct Source {
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
    pub(crate) targets: &'static [&'static str],
}

/// How a case goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plan {
    /// The server, if there is one, and the client; both end well.
    Programs,
    /// The suite of rdma-core's python tests: those that must pass, or those of them with one of these texts in their
    /// names.
    Python(&'static [&'static str]),
    /// One side is killed.
    Kill(Kill),
    /// As [`Plan::Programs`]; in the captures that they leave, each answer comes after the acknowledgement of what it answers.
    Captured,
    /// A virtual machine moves from one QEMU to another.
    Migrate(Migration),
}

/// Something to run. `{addr}` in commands is the address of both sides, `{port}` a free TCP port, `{dir}` a fresh
/// directory.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) name: String,
    /// In the short set.
    pub(crate) ci: bool,
    /// Debian's package of the program.
    pub(crate) package: &'static str,
    pub(crate) server: Option<Server>,
    pub(crate) client: Vec<String>,
    /// Must be in what the client prints.
    pub(crate) says: Option<&'static str>,
    /// Environment of both sides.
    pub(crate) env: Vec<(&'static str, &'static str)>,
    /// How long it may take on a busy machine.
    pub(crate) seconds: u64,
    /// The network of both sides.
    pub(crate) net: Net,
    /// Files that it finds in its directory, by name.
    pub(crate) files: Vec<(&'static str, &'static str)>,
    /// What it needs of PyPI, by name and version.
    pub(crate) wheels: &'static [&'static str],
    /// The crate whose tests it runs; `{programs}` in commands is where they are.
    pub(crate) source: Option<&'static Source>,
    pub(crate) plan: Plan,
    /// Rules that its programs break on purpose.
    pub(crate) breaks: &'static [Rule],
    /// Under valgrind, which must find nothing.
    pub(crate) memcheck: bool,
    /// Without `ferroce run`: LD_LIBRARY_PATH names the directory of the libraries, and that is all.
    pub(crate) directory: bool,
}

/// A command that has the shell run this.
pub(crate) fn shell(text: &str) -> Vec<String> {
    vec!["sh".into(), "-c".into(), text.into()]
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

impl Case {
    /// A program by itself.
    pub(crate) fn alone(name: &str, package: &'static str, command: &str) -> Self {
        Self {
            name: name.to_owned(),
            ci: false,
            package,
            server: None,
            client: words(command),
            says: None,
            env: Vec::new(),
            seconds: 120,
            net: Net {
                ethernet: false,
                v6: false,
                link_local: false,
                everywhere: false,
            },
            files: Vec::new(),
            wheels: &[],
            source: None,
            plan: Plan::Programs,
            breaks: &[],
            memcheck: false,
            directory: false,
        }
    }

    /// What a shell does.
    pub(crate) fn script(name: &str, package: &'static str, text: &str) -> Self {
        Self {
            client: shell(text),
            ..Self::alone(name, package, "sh")
        }
    }

    /// A server that listens at a TCP port, and a client that ends it.
    pub(crate) fn pair(name: &str, package: &'static str, server: &str, client: &str) -> Self {
        Self {
            server: Some(Server {
                command: words(server),
                ready: Ready::Listens,
                end: ServerEnd::Zero,
            }),
            ..Self::alone(name, package, client)
        }
    }

    /// The same, and a shell does what either side is.
    pub(crate) fn scripts(name: &str, package: &'static str, server: &str, client: &str) -> Self {
        Self {
            server: Some(Server {
                command: shell(server),
                ready: Ready::Listens,
                end: ServerEnd::Zero,
            }),
            ..Self::script(name, package, client)
        }
    }

    pub(crate) fn ready(mut self, ready: Ready) -> Self {
        if let Some(server) = &mut self.server {
            server.ready = ready;
        }
        self
    }

    pub(crate) fn stopped(mut self) -> Self {
        if let Some(server) = &mut self.server {
            server.end = ServerEnd::Stopped;
        }
        self
    }

    pub(crate) fn says(mut self, text: &'static str) -> Self {
        self.says = Some(text);
        self
    }

    pub(crate) fn with(mut self, name: &'static str, value: &'static str) -> Self {
        self.env.push((name, value));
        self
    }

    /// Its programs break these rules on purpose.
    pub(crate) fn breaks(mut self, rules: &'static [Rule]) -> Self {
        self.breaks = rules;
        self
    }

    /// UCX has these of its transports alone, and our device.
    pub(crate) fn over_ucx(self, transports: &'static str) -> Self {
        self.with("UCX_TLS", transports)
            .with("UCX_NET_DEVICES", "ferroce0:1")
            .with("UCX_IB_GID_INDEX", "0")
    }

    pub(crate) fn within(mut self, seconds: u64) -> Self {
        self.seconds = seconds;
        self
    }

    /// The same over IPv6.
    pub(crate) fn v6(mut self) -> Self {
        self.name += " (IPv6)";
        self.net.v6 = true;
        self
    }

    /// The same over link-local addresses.
    pub(crate) fn link_local(mut self) -> Self {
        self.name += " (link-local)";
        self.net.link_local = true;
        self.on_ethernet()
    }

    /// On an Ethernet interface: the program leaves `lo` out.
    pub(crate) fn on_ethernet(mut self) -> Self {
        self.net.ethernet = true;
        self
    }

    /// Without an address: every interface is a device.
    pub(crate) fn everywhere(mut self) -> Self {
        self.net.everywhere = true;
        self.on_ethernet()
    }

    /// The same with the directory of the libraries alone.
    pub(crate) fn by_directory(mut self) -> Self {
        self.name += " (directory)";
        self.directory = true;
        self
    }

    pub(crate) fn file(mut self, name: &'static str, text: &'static str) -> Self {
        self.files.push((name, text));
        self
    }

    pub(crate) fn wheels(mut self, wheels: &'static [&'static str]) -> Self {
        self.wheels = wheels;
        self
    }

    /// It needs these programs or files too, of these packages of Debian's.
    pub(crate) fn needs(self, needs: &[(&str, &'static str)]) -> Self {
        match needs.iter().find(|(program, _)| find(program).is_none()) {
            Some((program, package)) => Self::alone(&self.name, package, program),
            None => self,
        }
    }

    pub(crate) fn ci(mut self) -> Self {
        self.ci = true;
        self
    }

    /// One line for the list.
    pub(crate) fn summary(&self) -> String {
        match &self.server {
            Some(server) => format!("{} | {}", server.command.join(" "), self.client.join(" ")),
            None => self.client.join(" "),
        }
    }

    /// Why it can't be run here.
    pub(crate) fn missing(&self) -> Option<String> {
        let server = self.server.iter().filter_map(|s| s.command.first());
        let mut programs = server.chain(self.client.first());
        if self.memcheck && find(memcheck::VALGRIND).is_none() {
            return Some(format!("{0} is not installed (Debian package {0})", memcheck::VALGRIND));
        }
        let lacking = programs.find(|p| find(p).is_none())?;
        Some(format!("{lacking} is not installed (Debian package {})", self.package))
    }
}

/// The full path of a program.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    if program.contains('/') {
        return Some(PathBuf::from(program)).filter(|p| p.is_file());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(program))
        .find(|p| Path::is_file(p))
}

/// Returns a pingpong of ibverbs-utils with options.
pub(crate) fn one_pingpong(kind: &str, options: &str) -> Case {
    let command = format!("ibv_{kind}_pingpong -g 0 -p {{port}} {options}");
    let name = format!("ibv_{kind}_pingpong {options}");
    Case::pair(name.trim(), IBVERBS, &command, &format!("{command} {{addr}}"))
}
