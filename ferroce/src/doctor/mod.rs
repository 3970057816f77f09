//! `ferroce doctor`: what stands in the way of RoCEv2 here, each with what to do.

mod devices;
mod host;
mod offload;
mod path;
mod port;
mod rdma;

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use crate::{
    names::{Host, Resolver},
    output::{self, Failure},
};

#[derive(Args)]
#[command(after_help = "\
Examples:
  ferroce doctor
  ferroce doctor --peer 192.0.2.7
  ferroce doctor --json | jq '.checks[] | select(.status != \"ok\")'

With --json: one object with `ok` and `checks`, each with `id`, `status` (ok, note, warn, fail), `summary` and, where \
something can be done, `advice`.

Exit status:
  0  no check failed (there may be warnings)
  1  a check failed")]
pub(crate) struct DoctorArgs {
    /// Address or name of this host that ferroce is to use [default: all addresses]
    #[arg(long, value_name = "HOST")]
    addr: Option<Host>,
    /// Check the route to this host as well: path MTU, firewall, address translation
    #[arg(long, value_name = "HOST")]
    peer: Option<Host>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// How a check came out.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Status {
    /// Fine.
    Ok,
    /// Works; could be better, or could not be found out.
    Note,
    /// Works with a loss, or may not work.
    Warn,
    /// Does not work.
    Fail,
}

/// The result of one check.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct Check {
    /// Stable name.
    id: &'static str,
    status: Status,
    summary: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

impl Check {
    fn ok(id: &'static str, summary: impl Into<String>) -> Self {
        Self {
            id,
            status: Status::Ok,
            summary: summary.into(),
            advice: None,
        }
    }

    fn found(id: &'static str, status: Status, summary: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            id,
            status,
            summary: summary.into(),
            advice: Some(advice.into()),
        }
    }
}

#[derive(Serialize)]
struct Diagnosis {
    ok: bool,
    checks: Vec<Check>,
}

/// `/proc` and `/sys`, below a root that tests can choose.
struct System {
    root: PathBuf,
}

impl System {
    fn path(&self, name: &str) -> PathBuf {
        self.root.join(name.trim_start_matches('/'))
    }

    /// A file's text without the last line end, if it can be read.
    fn text(&self, name: &str) -> Option<String> {
        Some(std::fs::read_to_string(self.path(name)).ok()?.trim_end().to_owned())
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.trim().parse().ok()
    }

    fn exists(&self, name: &str) -> bool {
        self.path(name).exists()
    }

    /// Resolver in a folder, sorted; none if it isn't there.
    fn list(&self, name: &str) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.path(name)) else {
            return Vec::new();
        };
        let mut names: Vec<_> = entries
            .filter_map(|e| Some(e.ok()?.file_name().to_string_lossy().into_owned()))
            .collect();
        names.sort();
        names
    }
}

/// Runs all checks.
pub(crate) fn run(args: &DoctorArgs) -> Result<(), Failure> {
    let system = System {
        root: Path::new("/").to_path_buf(),
    };
    let resolver = Resolver::default();
    let own = args.addr.as_ref().map(|host| resolver.own_addr(host)).transpose()?;
    let peer = args.peer.as_ref().map(|host| resolver.peer(host)).transpose()?;
    let mut checks = vec![port::check(own), port::broker()];
    checks.extend(port::translated());
    checks.extend(host::rdma(&system, crate::rdma::is_built_in()));
    let addrs = own.map_or_else(host::own_addrs, |addr| vec![addr]);
    checks.extend(rdma::checks(&system, &addrs));
    checks.extend(host::socket_buffers(&system));
    checks.extend(host::interfaces(&system));
    checks.push(devices::check());
    checks.push(offload::check());
    if let Some(peer) = peer {
        checks.extend(path::check(&system, own, peer));
    }
    let ok = checks.iter().all(|c| c.status < Status::Fail);
    let diagnosis = Diagnosis { ok, checks };
    if args.json {
        output::json(&diagnosis)?;
    } else {
        print(&diagnosis)?;
    }
    if ok { Ok(()) } else { Err(Failure::reported(1)) }
}

fn print(diagnosis: &Diagnosis) -> Result<(), Failure> {
    for check in &diagnosis.checks {
        let word = match check.status {
            Status::Ok => "ok  ",
            Status::Note => "note",
            Status::Warn => "WARN",
            Status::Fail => "FAIL",
        };
        output::line(&format!("{word}  {:<16} {}", check.id, check.summary))?;
        if let Some(advice) = &check.advice {
            output::line(&format!("      {:<16} -> {advice}", ""))?;
        }
    }
    let count = |status| diagnosis.checks.iter().filter(|c| c.status == status).count();
    output::line(&format!(
        "{} failed, {} warnings, {} checks",
        count(Status::Fail),
        count(Status::Warn),
        diagnosis.checks.len()
    ))
}
