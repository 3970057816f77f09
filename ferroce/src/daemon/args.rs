//! Arguments of `ferroce daemon`.

use std::path::PathBuf;

use clap::{ArgMatches, Args, Command, FromArgMatches};

use super::{handover::words, task::described};
use crate::{
    control::{ControlArgs, address::SYSTEM},
    output::Failure,
    report::ReportArgs,
};

#[derive(Args)]
#[command(after_help = "\
The file is TOML. It has a table for each server, mapping, RDS node and LNet node, whose keys are the options of `ferroce serve`, `ferroce map`, \
`ferroce rds node` and `ferroce lnet serve`:

  [serve.images]
  addr = [\"192.0.2.7\", \"198.51.100.7\"]
  export = \"disk=/images/disk.img\"
  threads = 2

  [map.db]                         # `session` is db by default
  path = [\"192.0.2.1,192.0.2.8\", \"198.51.100.1,198.51.100.8\"]
  device = [\"data\", \"log\"]
  nbd = \"/run/ferroce-daemon/db.sock\"
  on-loss = \"queue\"

  [rds.node]                       # for AF_RDS sockets of this user's programs
  addr = \"192.0.2.1\"

  [lnet.fs]
  nid = \"192.0.2.1@o2ib\"          # the argument of the command

Flags are true or false, as are options with the values on and off; repeatable options take an array.

The table [daemon] has options of `ferroce daemon` itself; the command line overrides them:

  [daemon]
  control = \"/run/ferroce-daemon/control.sock\"
  control-group = \"ferroce-admin\"
  metrics = 9100
  sysfs = \"/run/ferroce-daemon/sys\"

The table [control] limits the tasks that members of the control socket's group start (`ferroce serve --daemon`, `map --daemon`). Without it their \
tasks can't export files, write captures, or accept NBD clients over TCP:

  [control]
  export = [\"/images\", \"/dev/sdb,ro\"]   # export only these, and files below them
  pcap = \"/var/lib/ferroce-daemon\"      # write captures only in this folder
  tls-certificates = \"/etc/pki/nbd\"     # use only this folder of certificates
  nbd-listen = true                     # accept NBD clients over TCP

Sockets of their tasks are in --nbd-dir. Root and the daemon's own user may start anything.

SIGHUP or `ferroce ctl reload` reads the file again. Unchanged tasks keep running. A mapping changes its devices, paths, policy, reconnect settings and \
--on-loss while it runs, a server its exports (clients keep those that they have open), an RDS node its limits, and it can get addresses. Tasks with other changes are restarted. An invalid file is \
rejected as a whole; check it first with `ferroce daemon --config FILE --check`. Changes of [daemon] need a restart of the daemon.

Failed tasks are restarted with a backoff from 1 s to 30 s. SIGINT and SIGTERM stop all tasks as they stop `serve` and `map`, then the daemon exits. \
With systemd (Type=notify) it reports readiness when each task is up or has failed once, and serves the watchdog.")]
pub(crate) struct DaemonArgs {
    /// Configuration file with servers, mappings and nodes of RDS and LNet [default: none; `ferroce serve --daemon`, for example, starts tasks]
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// Check the file and print its commands without running them. Exit status 0: valid; 1: a task could not start on this host, such as for
    /// a missing image or certificate; 2: invalid. Host names are not resolved
    #[arg(long, requires = "config")]
    pub(super) check: bool,
    /// Folder for NBD sockets of sessions that `ferroce ctl map` opens (SESSION.sock), and for all sockets of tasks that members of the
    /// control socket's group start
    #[arg(long, value_name = "DIR", default_value = SYSTEM)]
    pub(super) nbd_dir: PathBuf,
    #[command(flatten)]
    pub(super) control: ControlArgs,
    #[command(flatten)]
    pub(super) report: ReportArgs,
}

impl DaemonArgs {
    pub(super) fn command() -> Command {
        Self::augment_args(Command::new("daemon").no_binary_name(true))
    }

    /// Merges the options of the command line and of the file; the command line overrides the file.
    pub(super) fn merged(given: &ArgMatches, of_file: &[String]) -> Result<Self, Failure> {
        let given = words(&Self::command(), given)?;
        let option = |word: &str| word.split('=').next().map(str::to_owned);
        let is_given = |word: &&String| given.iter().any(|given| option(given) == option(word));
        let words = of_file.iter().filter(|word| !is_given(word)).chain(&given);
        let matches = Self::command().try_get_matches_from(words);
        let merged = matches.and_then(|matches| Self::from_arg_matches(&matches));
        merged.map_err(|e| Failure::usage(described(&e)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_takes_precedence_over_the_file() {
        let given = ["--control=/c", "--json"];
        let given = DaemonArgs::command().try_get_matches_from(given).unwrap();
        let of_file = ["--control=/a", "--control=/b", "--metrics=9100", "--nbd-dir=/n"].map(str::to_owned);
        let merged = DaemonArgs::merged(&given, &of_file).unwrap();
        let expected = ["--control=/c", "--json", "--metrics=9100", "--nbd-dir=/n"];
        let expected = DaemonArgs::command().try_get_matches_from(expected).unwrap();
        let words = |args: &DaemonArgs| format!("{:?} {:?} {:?}", args.nbd_dir, args.control, args.report);
        assert_eq!(words(&merged), words(&DaemonArgs::from_arg_matches(&expected).unwrap()));
    }
}
