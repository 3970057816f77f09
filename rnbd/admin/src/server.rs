//! `class/rtrs-server`, `class/rnbd-server` and `module` (`rtrs-srv-sysfs.c`, `rtrs-srv-stats.c`, `rnbd-srv-sysfs.c`).

use std::{net::IpAddr, sync::Arc};

use rnbd::server::listing::DeviceListing;
use rnbd_host::control::{Refused, ServeRequest};
use rtrs::{
    addr::PathAddr,
    server::{
        listing::{PathListing, SessionListing},
        request::SessionKey,
    },
};

use crate::{
    client::RESET_ALL,
    host::{Host, Names, Parameters, Server},
    tree::{Attr, Entries, Node, dir, files},
};

struct Path {
    server: Arc<dyn Server>,
    host: Arc<dyn Host>,
    session: SessionKey,
    listing: PathListing,
}

/// `class/rtrs-server`.
pub(crate) fn sessions(host: &Arc<dyn Host>, names: Names) -> Node {
    let host = host.clone();
    dir(move || {
        let mut entries = Entries::new();
        for server in host.servers() {
            let Ok(sessions) = server.sessions() else { continue };
            for session in sessions {
                // A session has no name until its client has sent it. A closing session may have the name of a new one.
                let name = session.name.clone();
                if name.is_empty() || entries.iter().any(|(taken, _)| *taken == name) {
                    continue;
                }
                let (server, host) = (server.clone(), host.clone());
                let paths = move || Ok(paths(&server, &host, session, names));
                entries.push((name, dir(move || Ok(vec![("paths".into(), dir(paths))]))));
            }
        }
        Ok(entries)
    })
}

fn paths(server: &Arc<dyn Server>, host: &Arc<dyn Host>, session: SessionListing, names: Names) -> Entries {
    let mut entries = Entries::new();
    for listing in session.paths {
        let name = path_name(&listing);
        // A closing path may have the addresses of a new one.
        if entries.iter().any(|(taken, _)| *taken == name) {
            continue;
        }
        let path = Arc::new(Path {
            server: server.clone(),
            host: host.clone(),
            session: session.session,
            listing,
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

/// Name of a path, as its client names it.
fn path_name(path: &PathListing) -> String {
    let (client, server) = ends(path);
    PathAddr {
        src: Some(client),
        dst: (server, 0).into(),
    }
    .to_string()
}

fn ends(path: &PathListing) -> (IpAddr, IpAddr) {
    (path.client.ip().to_canonical(), path.server.to_canonical())
}

// The client's address is `src_addr` here, too.
const PATH: &[Attr<Path>] = &[
    Attr::ro("hca_name", |path| {
        let software = || path.host.hca_name(ends(&path.listing).1);
        let name = path.listing.hca.as_deref().map(str::to_owned);
        Ok(format!("{}\n", name.unwrap_or_else(software)))
    }),
    Attr::ro("hca_port", |_| Ok("1\n".into())),
    Attr::ro("src_addr", |path| Ok(format!("ip:{}\n", ends(&path.listing).0))),
    Attr::ro("dst_addr", |path| Ok(format!("ip:{}\n", ends(&path.listing).1))),
    Attr::order("disconnect", |of| {
        let (session, path) = (of.session, of.listing.path);
        of.ask(ServeRequest::ClosePath { session, path })
    }),
];

const STATS: &[Attr<Path>] = &[
    Attr::order_with(
        "rdma",
        |path| {
            let r = &path.listing.rdma;
            Ok(format!("{} {} {} {}\n", r.reads, r.read_bytes, r.writes, r.write_bytes))
        },
        Path::reset,
    ),
    Attr::order_with("reset_all", |_| Ok(RESET_ALL.into()), Path::reset).of_documents(),
];

impl Path {
    fn ask(&self, request: ServeRequest) -> Result<(), Refused> {
        self.server.ask(request).map(|_| ())
    }

    fn reset(&self) -> Result<(), Refused> {
        let (session, path) = (self.session, self.listing.path);
        self.ask(ServeRequest::ResetPathStats { session, path })
    }
}

struct Opened {
    server: Arc<dyn Server>,
    device: DeviceListing,
}

/// `class/rnbd-server`.
pub(crate) fn ctl(host: &Arc<dyn Host>) -> Node {
    let host = host.clone();
    let devices = dir(move || {
        let mut entries: Vec<(String, Vec<Arc<Opened>>)> = Vec::new();
        for opened in opened(&*host) {
            let name = export_name(&opened.device.name);
            match entries.iter_mut().find(|(taken, _)| *taken == name) {
                Some((_, all)) => all.push(opened),
                None => entries.push((name, vec![opened])),
            }
        }
        Ok(entries.into_iter().map(export).collect())
    });
    dir(move || Ok(vec![("ctl".into(), dir(move || Ok(vec![("devices".into(), devices)])))]))
}

fn opened(host: &dyn Host) -> Vec<Arc<Opened>> {
    let mut all = Vec::new();
    for server in host.servers() {
        let opened = |device| {
            Arc::new(Opened {
                server: server.clone(),
                device,
            })
        };
        // One that has just ended has nothing open.
        all.extend(server.devices().unwrap_or_default().into_iter().map(opened));
    }
    all
}

/// The name of a file can't have a slash; the kernel writes it so.
pub(crate) fn export_name(name: &str) -> String {
    name.replace('/', "!")
}

fn export((name, opened): (String, Vec<Arc<Opened>>)) -> (String, Node) {
    let target = format!("../../../../../block/{name}");
    let sessions = dir(move || {
        let mut entries = Entries::new();
        for opened in opened {
            let session = opened.device.session_name.clone();
            if entries.iter().all(|(taken, _)| *taken != session) {
                entries.push((session, dir(move || Ok(files(&opened, OPENED, Names::Mainline)))));
            }
        }
        Ok(entries)
    });
    let entries = move || {
        Ok(vec![
            ("block_dev".into(), Node::Link(target)),
            ("sessions".into(), sessions),
        ])
    };
    (name, dir(entries))
}

const OPENED: &[Attr<Opened>] = &[
    Attr::ro("read_only", |opened| {
        Ok(format!("{}\n", u8::from(opened.device.read_only)))
    }),
    Attr::ro("access_mode", |opened| Ok(format!("{}\n", opened.device.mode))),
    Attr::ro("mapping_path", |opened| Ok(format!("{}\n", opened.device.name))),
    Attr::order("force_close", |opened| {
        let (session, device) = (opened.device.session, opened.device.id);
        let close = ServeRequest::ForceClose { session, device };
        opened.server.ask(close).map(|_| ())
    }),
];

/// `block/EXPORT` of what is open.
pub(crate) fn block(host: &dyn Host) -> Entries {
    let mut entries = Entries::new();
    for opened in opened(host) {
        let name = export_name(&opened.device.name);
        if entries.iter().all(|(taken, _)| *taken != name) {
            entries.push((name, dir(move || Ok(files(&opened, EXPORT, Names::Mainline)))));
        }
    }
    entries
}

const EXPORT: &[Attr<Opened>] = &[
    Attr::ro("ro", |opened| Ok(format!("{}\n", u8::from(opened.device.read_only)))),
    Attr::ro("size", |opened| Ok(format!("{}\n", opened.device.size / 512))),
];

/// `module`: parameters of the server that came first.
pub(crate) fn modules(host: &Arc<dyn Host>) -> Node {
    let host = host.clone();
    dir(move || {
        let Some(server) = host.servers().into_iter().next() else {
            return Ok(Entries::new());
        };
        let parameters = Arc::new(server.parameters());
        let module = |attrs: &'static [Attr<Parameters>]| {
            let parameters = parameters.clone();
            let files = dir(move || Ok(files(&parameters, attrs, Names::Mainline)));
            dir(move || Ok(vec![("parameters".into(), files)]))
        };
        Ok(vec![
            ("rtrs_server".into(), module(RTRS_SERVER)),
            ("rnbd_server".into(), module(RNBD_SERVER)),
        ])
    })
}

const RTRS_SERVER: &[Attr<Parameters>] = &[
    Attr::ro("max_chunk_size", |p| Ok(format!("{}\n", p.max_chunk_size))),
    Attr::ro("sess_queue_depth", |p| Ok(format!("{}\n", p.sess_queue_depth))),
    // As of all parameters of the kernel's that are `bool`.
    Attr::ro("always_invalidate", |p| {
        Ok(if p.always_invalidate { "Y\n" } else { "N\n" }.into())
    }),
];

const RNBD_SERVER: &[Attr<Parameters>] = &[
    Attr::ro("dev_search_path", |p| Ok(format!("{}\n", p.dev_search_path))),
    Attr::ro("port_nr", |p| Ok(format!("{}\n", p.port))),
];
