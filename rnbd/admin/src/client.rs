//! `class/rtrs-client`: sessions of mappings, and their paths (`rtrs-clt-sysfs.c`, `rtrs-clt-stats.c`).

use std::{fmt::Write, sync::Arc};

use rnbd_host::control::{MapListing, MapRequest, MappedPath, Refused};
use rtrs::{
    addr::PathAddr,
    client::{CpuMigration, PathCounters, Policy, SessionConfig, state::PathState},
};

use crate::{
    host::{Client, Host, Names},
    text::{invalid, line, signed},
    tree::{Attr, Entries, Node, dir, files},
};

struct Session {
    client: Arc<dyn Client>,
    host: Arc<dyn Host>,
    listing: MapListing,
}

struct Path {
    session: Arc<Session>,
    status: MappedPath,
}

/// `class/rtrs-client`.
pub(crate) fn sessions(host: &Arc<dyn Host>, names: Names) -> Node {
    let host = host.clone();
    dir(move || {
        let mut entries = Entries::new();
        for client in host.clients() {
            // One that has just ended is not there.
            let Ok(listing) = client.listing() else { continue };
            let name = listing.session.clone();
            let host = host.clone();
            let session = Arc::new(Session { client, host, listing });
            entries.push((name, dir(move || Ok(session_entries(&session, names)))));
        }
        Ok(entries)
    })
}

fn session_entries(session: &Arc<Session>, names: Names) -> Entries {
    let mut entries = files(session, SESSION, names);
    if names == Names::All {
        entries.push(("mp_policy".into(), Node::Link("mpath_policy".into())));
    }
    let session = session.clone();
    entries.push(("paths".into(), dir(move || Ok(path_entries(&session, names)))));
    entries
}

fn path_entries(session: &Arc<Session>, names: Names) -> Entries {
    let mut entries = Entries::new();
    for status in &session.listing.paths {
        let mut name = status.addr.to_string();
        // The kernel's names have no port, and its paths no two of them.
        if entries.iter().any(|(taken, _)| *taken == name) {
            let _ = write!(name, ":{}", status.addr.dst.port());
        }
        let path = Arc::new(Path {
            session: session.clone(),
            status: status.clone(),
        });
        let children = move || {
            let mut entries = files(&path, PATH, names);
            entries.push(("stats".into(), dir(move || Ok(files(&path, STATS, names)))));
            Ok(entries)
        };
        entries.push((name, dir(children)));
    }
    entries
}

const SESSION: &[Attr<Session>] = &[
    Attr::rw("add_path", |_| Ok(ADD_PATH.into()), add_path),
    Attr::rw("max_reconnect_attempts", max_reconnects, set_max_reconnects),
    Attr::rw("mpath_policy", policy, set_policy),
];

const PATH: &[Attr<Path>] = &[
    Attr::ro("hca_name", |path| {
        let software = || path.status.addr.src.map(|src| path.session.host.hca_name(src));
        let name = path.status.device.clone();
        Ok(format!("{}\n", name.or_else(software).unwrap_or_default()))
    }),
    Attr::ro("hca_port", |_| Ok("1\n".into())),
    Attr::ro("src_addr", |path| {
        let src = path.status.addr.src.map(|src| format!("ip:{src}"));
        Ok(format!("{}\n", src.unwrap_or_default()))
    }),
    Attr::ro("dst_addr", |path| Ok(format!("ip:{}\n", path.status.addr.dst.ip()))),
    Attr::ro("state", |path| {
        let state = match path.status.state {
            PathState::Connected => "connected",
            _ => "disconnected",
        };
        Ok(format!("{state}\n"))
    }),
    Attr::order("reconnect", |path| {
        path.ask(MapRequest::Reconnect { path: path.status.addr })
    }),
    Attr::order("disconnect", |path| {
        path.ask(MapRequest::Disconnect { path: path.status.addr })
    }),
    Attr::order("remove_path", |path| {
        path.ask(MapRequest::RemovePath { path: path.status.addr })
    }),
    Attr::ro("cur_latency", |path| {
        let latency = path.status.latency.unwrap_or_default();
        Ok(format!("{} ns\n", latency.as_nanos()))
    }),
];

const STATS: &[Attr<Path>] = &[
    Attr::order_with("rdma", rdma, |path| path.reset(PathCounters::Rdma)),
    Attr::order_with("reconnects", reconnects, |path| path.reset(PathCounters::Reconnects)),
    Attr::order_with(
        "cpu_migration_from",
        |path| Ok(per_cpu(&path.status.stats.cpu_migration.from)),
        |path| path.reset(PathCounters::CpuMigration),
    ),
    Attr::order_with(
        "cpu_migration_to",
        |path| Ok(per_cpu(&path.status.stats.cpu_migration.to)),
        |path| path.reset(PathCounters::CpuMigration),
    ),
    Attr::order_with(
        "cpu_migration",
        |path: &Path| Ok(migration_table(&path.status.stats.cpu_migration)),
        |path| path.reset(PathCounters::CpuMigration),
    )
    .of_documents(),
    Attr::order_with(
        "reset_all",
        |_| Ok(RESET_ALL.into()),
        |path| path.reset(PathCounters::All),
    ),
];

const ADD_PATH: &str =
    "Usage: echo [<source addr>@]<destination addr> > add_path\n\n*addr ::= [ ip:<ipv4|ipv6> | gid:<gid> ]\n";
/// Also of a server's paths.
pub(crate) const RESET_ALL: &str = "echo 1 to reset all statistics\n";

impl Path {
    fn ask(&self, request: MapRequest) -> Result<(), Refused> {
        self.session.client.ask(request).map(|_| ())
    }

    fn reset(&self, which: PathCounters) -> Result<(), Refused> {
        let path = self.status.addr;
        self.ask(MapRequest::ResetPathStats { path, which })
    }
}

fn add_path(session: &Session, text: &str) -> Result<(), Refused> {
    let text = line(text).trim();
    let path = PathAddr::parse(text, session.listing.port, &|_| None).map_err(|e| invalid(e.to_string()))?;
    session.client.ask(MapRequest::AddPath { path }).map(|_| ())
}

fn max_reconnects(session: &Session) -> Result<String, Refused> {
    Ok(format!("{}\n", session.listing.max_reconnects))
}

fn set_max_reconnects(session: &Session, text: &str) -> Result<(), Refused> {
    let attempts = i64::from(signed(text)?);
    if !(-1..=i64::from(SessionConfig::MAX_RECONNECTS)).contains(&attempts) {
        return Err(invalid("attempts are -1 (no limit) to 9999"));
    }
    let (attempts, delay) = (Some(attempts), None);
    let request = MapRequest::SetReconnects { attempts, delay };
    session.client.ask(request).map(|_| ())
}

fn policy(session: &Session) -> Result<String, Refused> {
    let policy = session.listing.policy;
    let number = Policy::ALL.iter().position(|p| *p == policy).unwrap_or_default();
    Ok(format!(
        "{policy} ({}: {number})\n",
        policy.short().to_ascii_uppercase()
    ))
}

/// A number; a name, behind which there may be anything; or two letters (`mpath_policy_store`).
fn set_policy(session: &Session, text: &str) -> Result<(), Refused> {
    let number = signed(text).ok().and_then(|n| usize::try_from(n).ok());
    let text = line(text).to_ascii_lowercase();
    let is = |policy: &&Policy| text.starts_with(policy.name());
    let by_number = number.and_then(|n| Policy::ALL.get(n));
    let policy = match by_number.or_else(|| Policy::ALL.iter().find(is)) {
        Some(policy) => *policy,
        None => text.parse().map_err(|e| invalid(format!("{e}")))?,
    };
    session.client.ask(MapRequest::SetPolicy { policy }).map(|_| ())
}

fn rdma(path: &Path) -> Result<String, Refused> {
    let (stats, in_flight) = (&path.status.stats, path.status.in_flight);
    let r = &stats.rdma;
    Ok(format!(
        "{} {} {} {} {in_flight} {}\n",
        r.reads, r.read_bytes, r.writes, r.write_bytes, stats.failovers
    ))
}

fn reconnects(path: &Path) -> Result<String, Refused> {
    let stats = &path.status.stats;
    Ok(format!("{} {}\n", stats.reconnects, stats.failed_reconnects))
}

/// A number for each processor that there may be, as far as the counters know of it.
fn per_cpu(counts: &[u64]) -> String {
    let mut text = String::new();
    for cpu in 0..cpus().max(counts.len()) {
        let _ = write!(text, "{} ", counts.get(cpu).unwrap_or(&0));
    }
    text + "\n"
}

/// Both as one table, as the documents have it.
fn migration_table(migration: &CpuMigration) -> String {
    let cpus = cpus().max(migration.from.len()).max(migration.to.len());
    let mut text = String::from("    ");
    for cpu in 0..cpus {
        let _ = write!(text, "{:>10}", format!("CPU{cpu}"));
    }
    for (name, counts) in [("from", &migration.from), ("to  ", &migration.to)] {
        let _ = write!(text, "\n{name}:");
        for cpu in 0..cpus {
            let width = if cpu == 0 { 9 } else { 10 };
            let _ = write!(text, "{:>width$}", counts.get(cpu).unwrap_or(&0));
        }
    }
    text + "\n"
}

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
