//! Execution of requests.

use rnbd_admin::{Host, Names, Server};
use rnbd_host::control::{
    Answer, ClientSession, Entries, LnetNodes, MapAnswer, MapListing, MapOrder, MapRequest, MappedDevice, Mappings,
    OpenDevice, OpenDevices, ProcessRequest, Refused, Request, ServeAnswer, Sessions, Text,
};

use super::{lnet, metrics, peer::Authority, shared::Shared};

/// Executes a request, and returns when it is done.
pub(super) fn execute(shared: &Shared, request: Request, authority: Authority) -> Result<Answer, Refused> {
    let services = &shared.services;
    match request {
        Request::Process(request) => of_process(shared, request, authority),
        Request::Mapping { session, request } => {
            let answer = services.client(session.as_deref())?.ask(request)?;
            Ok(match answer {
                MapAnswer::Done => Answer::Done {},
                MapAnswer::Listing(mut listing) => {
                    name_block_devices(shared, std::slice::from_mut(&mut *listing))?;
                    Answer::Mapping(listing)
                }
                MapAnswer::Stats(stats) => Answer::Totals((&stats.turns).into()),
            })
        }
        Request::Server { server, request } => Ok(match services.server(server)?.ask(request)? {
            ServeAnswer::Stats(stats) => Answer::Totals((&stats.turns).into()),
            _ => Answer::Done {},
        }),
    }
}

fn of_process(shared: &Shared, request: ProcessRequest, authority: Authority) -> Result<Answer, Refused> {
    let services = &shared.services;
    let tree = |strict| {
        let names = if strict { Names::Mainline } else { Names::All };
        shared.registry.with_names(names)
    };
    Ok(match request {
        ProcessRequest::Ls(at) => Answer::Entries(Entries {
            entries: tree(at.strict).list(&at.file)?,
        }),
        ProcessRequest::Stat(at) => Answer::Stat(tree(at.strict).stat(&at.file)?),
        ProcessRequest::Read(at) => Answer::Text(Text {
            text: tree(at.strict).read(&at.file)?,
        }),
        ProcessRequest::Write { file, strict, text } => tree(strict).write(&file, text.as_bytes()).map(done)?,
        ProcessRequest::Metrics {} => Answer::Text(Text {
            text: metrics::text(services),
        }),
        ProcessRequest::Mappings {} => Answer::Mappings(mappings(shared)?),
        ProcessRequest::Sessions {} => Answer::Sessions(Sessions {
            sessions: of_servers(shared, |server| server.sessions(), ClientSession::new)?,
        }),
        ProcessRequest::Devices {} => Answer::Devices(OpenDevices {
            devices: of_servers(shared, |server| server.devices(), OpenDevice::new)?,
        }),
        ProcessRequest::Map(order) => map(shared, &order).map(done)?,
        ProcessRequest::Reload {} => Answer::Reloaded(services.reload()?),
        ProcessRequest::Lnet {} => Answer::Lnet(LnetNodes {
            lnet_nodes: lnet::listings(&services.lnet_nodes()),
        }),
        ProcessRequest::Tasks {} => Answer::Tasks(services.supervisor()?.tasks()),
        ProcessRequest::Start { task, options } => {
            let started = services.supervisor()?.start(&task, options, authority);
            started.map(done)?
        }
        ProcessRequest::Stop { task } => services.supervisor()?.stop(&task).map(done)?,
        // Answered by the connection.
        ProcessRequest::Hello { .. } | ProcessRequest::Subscribe {} => Answer::Done {},
    })
}

fn done((): ()) -> Answer {
    Answer::Done {}
}

fn map(shared: &Shared, order: &MapOrder) -> Result<(), Refused> {
    match &order.session {
        Some(session) => shared.registry.map(session, order),
        None => {
            let client = shared.services.client(None)?;
            client.ask(MapRequest::Map(order.device())).map(|_| ())
        }
    }
}

fn mappings(shared: &Shared) -> Result<Mappings, Refused> {
    let clients = shared.services.clients();
    let mut mappings: Vec<_> = clients.iter().filter_map(|client| client.listing().ok()).collect();
    name_block_devices(shared, &mut mappings)?;
    Ok(Mappings { mappings })
}

/// Fills the names of block devices in the tree.
fn name_block_devices(shared: &Shared, mappings: &mut [MapListing]) -> Result<(), Refused> {
    let numbers = shared.registry.block_devices()?;
    for mapping in mappings {
        let number = |device: &MappedDevice| {
            let is = |(_, s, d): &&(u32, String, String)| *s == mapping.session && *d == device.name;
            numbers.iter().find(is).map(|(number, ..)| format!("rnbd{number}"))
        };
        for device in &mut mapping.devices {
            device.block = number(device);
        }
    }
    Ok(())
}

/// Lists what all servers have.
fn of_servers<T, U>(
    shared: &Shared,
    list: impl Fn(&dyn Server) -> Result<Vec<T>, Refused>,
    of: impl Fn(usize, T) -> U,
) -> Result<Vec<U>, Refused> {
    // Refuses if there is no server.
    shared.services.server(Some(0))?;
    let mut all = Vec::new();
    for (place, server) in shared.services.servers().iter().enumerate() {
        all.extend(list(&**server)?.into_iter().map(|listed| of(place, listed)));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rnbd::Errno;
    use rnbd_admin::Client;
    use rnbd_host::control::MapListing;
    use rtrs::client::Policy;
    use serde_json::{Map, Value, json};

    use super::*;
    use crate::control::ServiceRegistry;

    /// A mapping that does whatever it is asked for.
    struct Willing;

    impl Client for Willing {
        fn ask(&self, request: MapRequest) -> Result<MapAnswer, Refused> {
            Ok(match request {
                MapRequest::List {} => MapAnswer::Listing(Box::new(MapListing {
                    session: "s".into(),
                    port: 1234,
                    queue_depth: None,
                    max_io_bytes: None,
                    new_rkeys: None,
                    policy: Policy::default(),
                    max_reconnects: 0,
                    reconnect_delay: std::time::Duration::ZERO,
                    paths: Vec::new(),
                    devices: Vec::new(),
                })),
                MapRequest::Stats {} => MapAnswer::Stats(Box::default()),
                _ => MapAnswer::Done,
            })
        }
    }

    fn shared() -> Shared {
        let services = Arc::new(ServiceRegistry::default());
        // Listed forever.
        std::mem::forget(services.add_client(Willing));
        Shared::new(services)
    }

    fn ask(shared: &Shared, request: &Value) -> Result<Value, Refused> {
        let fields: Map<String, Value> = serde_json::from_value(request.clone()).unwrap();
        let answer = execute(shared, Request::try_from(fields)?, Authority::Full)?;
        Ok(serde_json::to_value(answer).unwrap())
    }

    #[test]
    fn every_request_is_executed_or_refused() {
        let shared = shared();
        let odd = [
            json!(null),
            json!(true),
            json!(-1),
            json!(1e300),
            json!(u64::MAX),
            json!(""),
            json!("\u{0}"),
            json!("../.."),
            json!("127.0.0.1,127.0.0.2"),
            json!([]),
            json!(["x"]),
            json!({ "a": 1 }),
        ];
        let keys = [
            "session", "path", "paths", "which", "policy", "attempts", "delay", "on_loss", "device", "mode", "sectors",
            "file", "text", "server", "force", "strict",
        ];
        let names = [
            "add_path",
            "remove_path",
            "disconnect",
            "reconnect",
            "reset_path_stats",
            "policy",
            "reconnects",
            "on_loss",
            "map",
            "resize",
            "remap",
            "unmap",
            "list",
            "stats",
            "sessions",
            "devices",
            "server_stats",
            "close_session",
            "close_path",
            "reset_server_path_stats",
            "force_close",
            "ls",
            "stat",
            "read",
            "write",
            "metrics",
            "mappings",
            "nothing",
            "",
        ];
        for name in names {
            for key in keys {
                for (n, value) in odd.iter().enumerate() {
                    // Unknown fields are refused before anything else is looked at.
                    let mut request = json!({ "do": name });
                    request[key] = value.clone();
                    request[keys[(n * 7 + key.len()) % keys.len()]] = odd[(n + 5) % odd.len()].clone();
                    if let Err(refused) = ask(&shared, &request) {
                        assert!(!refused.text.is_empty(), "{request}");
                    }
                }
            }
        }
        for (name, more) in [
            ("resize", json!({ "device": "d" })),
            ("add_path", json!({})),
            ("read", json!({ "strict": true })),
            ("unmap", json!({ "device": "d" })),
            ("map", json!({ "device": "d" })),
        ] {
            for (key, value) in keys.iter().flat_map(|key| odd.iter().map(move |value| (key, value))) {
                let mut request = more.clone();
                request["do"] = name.into();
                request[*key] = value.clone();
                if let Err(refused) = ask(&shared, &request) {
                    assert!(!refused.text.is_empty(), "{request}");
                }
            }
        }
    }

    #[test]
    fn requests_to_a_server_need_one() {
        let shared = shared();
        assert!(ask(&shared, &json!({ "do": "stats" })).is_ok());
        for request in [json!({ "do": "server_stats" }), json!({ "do": "sessions" })] {
            assert_eq!(ask(&shared, &request).unwrap_err().errno, Errno::ENODEV, "{request}");
        }
        let reset = json!({ "do": "reset_path_stats", "path": "127.0.0.1" });
        assert_eq!(ask(&shared, &reset), Ok(json!({})));
        let other = ask(&shared, &json!({ "do": "list", "session": "t" }));
        assert_eq!(other.unwrap_err().errno, Errno::ENOENT);
    }
}
