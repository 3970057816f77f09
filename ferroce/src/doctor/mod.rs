//! `ferroce doctor`: problems of this host with RoCEv2, each with a remedy.

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
    /// Address or name of this host to check [default: all addresses]
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

/// Finding of a check.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct Finding {
    status: Status,
    summary: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

fn ok(summary: impl Into<String>) -> Finding {
    Finding {
        status: Status::Ok,
        summary: summary.into(),
        advice: None,
    }
}

fn found(status: Status, summary: impl Into<String>, advice: impl Into<String>) -> Finding {
    Finding {
        status,
        summary: summary.into(),
        advice: Some(advice.into()),
    }
}

fn note(summary: impl Into<String>, advice: impl Into<String>) -> Finding {
    found(Status::Note, summary, advice)
}

fn warn(summary: impl Into<String>, advice: impl Into<String>) -> Finding {
    found(Status::Warn, summary, advice)
}

fn fail(summary: impl Into<String>, advice: impl Into<String>) -> Finding {
    found(Status::Fail, summary, advice)
}

#[derive(Serialize)]
struct Check {
    /// Stable name.
    id: &'static str,
    #[serde(flatten)]
    finding: Finding,
}

#[derive(Default, Serialize)]
struct Diagnosis {
    ok: bool,
    checks: Vec<Check>,
}

impl Diagnosis {
    /// Adds the findings of a check.
    fn add(&mut self, id: &'static str, findings: impl IntoIterator<Item = Finding>) {
        let checks = findings.into_iter().map(|finding| Check { id, finding });
        self.checks.extend(checks);
    }
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

    /// Names in a folder, sorted; none if it isn't there.
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
    let mut all = Diagnosis::default();
    all.add("port-4791", [port::check(own)]);
    all.add("broker", [port::broker()]);
    all.add("translated", port::translated());
    all.add("rdma-devices", host::rdma(&system, crate::rdma::is_built_in()));
    let addrs = own.map_or_else(host::own_addrs, |addr| vec![addr]);
    rdma::check(&mut all, &system, &addrs);
    all.add("socket-buffers", [host::socket_buffers(&system)]);
    all.add("mtu", host::interfaces(&system));
    all.add("devices", [devices::check()]);
    all.add("gso-gro", [offload::check()]);
    if let Some(peer) = peer {
        path::check(&mut all, &system, own, peer);
    }
    all.ok = all.checks.iter().all(|c| c.finding.status < Status::Fail);
    match args.json {
        true => output::json(&all)?,
        false => print(&all)?,
    }
    if all.ok { Ok(()) } else { Err(Failure::reported(1)) }
}

fn print(diagnosis: &Diagnosis) -> Result<(), Failure> {
    for Check { id, finding } in &diagnosis.checks {
        let word = match finding.status {
            Status::Ok => "ok  ",
            Status::Note => "note",
            Status::Warn => "WARN",
            Status::Fail => "FAIL",
        };
        output::line(&format!("{word}  {id:<16} {}", finding.summary))?;
        if let Some(advice) = &finding.advice {
            output::line(&format!("      {:<16} -> {advice}", ""))?;
        }
    }
    let all = &diagnosis.checks;
    let count = |status| all.iter().filter(|c| c.finding.status == status).count();
    output::line(&format!(
        "{} failed, {} warnings, {} checks",
        count(Status::Fail),
        count(Status::Warn),
        all.len()
    ))
}
