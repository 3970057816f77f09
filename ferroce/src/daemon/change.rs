//! Changes of a task by a reload, while it runs if possible.

use rnbd_host::control::{MapDevice, MapRequest, signed_attempts};

use super::task::{Job, Kind, Task};
use crate::{
    map::{Changeable, MapArgs},
    names::Resolver,
    output::Failure,
};

/// Steps that turn a task into another.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// These requests to the mapping, in their order.
    Map(Vec<MapRequest>),
    /// Another table of exports of the server.
    Exports,
    /// More addresses or other limits of the RDS node.
    Node,
    /// A restart.
    Restart,
}

/// Options of a server that can change while it runs.
const OF_SERVERS: [&str; 1] = ["export"];

/// Options of an RDS node that can change while it runs. It can get addresses, and lose none: sockets are bound to them.
const OF_NODES: [&str; 3] = ["addr", "max-sockets", "max-buffers"];

/// Finds the steps from `old` to `new`. Blocks while it resolves names that are not in `resolver` yet.
///
/// # Errors
/// When a name of a path can't be resolved, or there is no route to a server.
pub(crate) fn change(kind: &Kind, old: &Task, new: &Task, resolver: &Resolver) -> Result<Change, Failure> {
    let same_but_for = |options: &[&str]| old.without(options) == new.without(options);
    match (kind, old.job(kind)?, new.job(kind)?) {
        (Kind::Map, Job::Map(old), Job::Map(new)) if same_but_for(&Changeable::OPTIONS) => {
            mapping(&old, &new, resolver)
        }
        (Kind::Rds, Job::Rds(old), Job::Rds(new)) if same_but_for(&OF_NODES) => {
            let keeps = old.addrs().iter().all(|addr| new.addrs().contains(addr));
            Ok(if keeps { Change::Node } else { Change::Restart })
        }
        (Kind::Serve, ..) if same_but_for(&OF_SERVERS) => Ok(Change::Exports),
        _ => Ok(Change::Restart),
    }
}

fn mapping(old: &MapArgs, new: &MapArgs, resolver: &Resolver) -> Result<Change, Failure> {
    let (old, new) = (old.changeable(resolver)?, new.changeable(resolver)?);
    // The default device stays the same as long as the mapping runs.
    let first = |c: &Changeable| c.devices.first().cloned();
    if first(&old) != first(&new) {
        return Ok(Change::Restart);
    }
    Ok(Change::Map(requests(&old, &new)))
}

fn requests(old: &Changeable, new: &Changeable) -> Vec<MapRequest> {
    let mut requests = Vec::new();
    if old.lasting.policy != new.lasting.policy {
        requests.push(MapRequest::SetPolicy {
            policy: new.lasting.policy,
        });
    }
    let reconnects = |c: &Changeable| (c.lasting.max_reconnects, c.lasting.reconnect_delay);
    if reconnects(old) != reconnects(new) {
        requests.push(MapRequest::SetReconnects {
            attempts: Some(signed_attempts(new.lasting.max_reconnects)),
            delay: Some(new.lasting.reconnect_delay),
        });
    }
    if old.lasting.on_loss != new.lasting.on_loss {
        requests.push(MapRequest::SetOnLoss {
            on_loss: new.lasting.on_loss,
        });
    }
    // New paths first, so that one is always up. Old devices first, as others may take their places.
    let more = new.paths.iter().filter(|path| !old.paths.contains(path));
    requests.extend(more.map(|path| MapRequest::AddPath { path: *path }));
    let less = old.paths.iter().filter(|path| !new.paths.contains(path));
    requests.extend(less.map(|path| MapRequest::RemovePath { path: *path }));
    let less = old.devices.iter().filter(|device| !new.devices.contains(device));
    requests.extend(less.map(|device| MapRequest::Unmap {
        device: device.name.clone(),
        force: false,
    }));
    let more = new.devices.iter().filter(|device| !old.devices.contains(device));
    requests.extend(more.map(|device| MapRequest::Map(device.clone())));
    requests
}

/// Drops requests for devices that are already as requested.
pub(crate) fn still_to_do(mut requests: Vec<MapRequest>, mapped: &[MapDevice]) -> Vec<MapRequest> {
    let mut as_wanted = mapped.to_vec();
    as_wanted.retain(|device| requests.contains(&MapRequest::Map(device.clone())));
    let is = |devices: &[MapDevice], name: &str| devices.iter().any(|device| device.name == name);
    requests.retain(|request| match request {
        MapRequest::Unmap { device, .. } => is(mapped, device) && !is(&as_wanted, device),
        MapRequest::Map(device) => !is(&as_wanted, &device.name),
        _ => true,
    });
    requests
}

#[cfg(test)]
mod tests {
    use rnbd::proto::AccessMode;
    use rtrs::client::Policy;

    use super::*;

    fn task(words: &[&str]) -> Task {
        Task {
            words: words.iter().map(|word| (*word).to_owned()).collect(),
        }
    }

    const MAP: [&str; 5] = [
        "--session=s",
        "--nbd=/s",
        "--path=127.0.0.1,127.0.0.2",
        "--device=a",
        "--device=b",
    ];

    fn to(words: &[&str]) -> Change {
        change(&Kind::Map, &task(&MAP), &task(words), &Resolver::default()).unwrap()
    }

    #[test]
    fn a_mapping_is_asked_for_what_differs() {
        assert_eq!(to(&MAP), Change::Map(vec![]));
        let new = [
            "--session=s",
            "--nbd=/s",
            "--path=127.0.0.1,127.0.0.3",
            "--device=a",
            "--device=c,ro",
            "--policy=rr",
        ];
        let Change::Map(requests) = to(&new) else { panic!() };
        assert!(
            requests.contains(&MapRequest::SetPolicy {
                policy: Policy::RoundRobin
            }),
            "{requests:?}"
        );
        let kinds: Vec<&str> = requests
            .iter()
            .map(|request| match request {
                MapRequest::SetPolicy { .. } => "policy",
                MapRequest::AddPath { .. } => "add",
                MapRequest::RemovePath { .. } => "remove",
                MapRequest::Unmap { device, force: false } if device == "b" => "unmap b",
                MapRequest::Map(device) if device.name == "c" => "map c",
                _ => "?",
            })
            .collect();
        assert_eq!(kinds, ["policy", "add", "remove", "unmap b", "map c"]);
    }

    #[test]
    fn paths_may_be_from_other_addresses_of_ours() {
        let mut other = MAP;
        other[2] = "--path=127.0.0.9,127.0.0.2";
        let path = |text: &str| text.parse().unwrap();
        let requests = vec![
            MapRequest::AddPath {
                path: path("127.0.0.9,127.0.0.2"),
            },
            MapRequest::RemovePath {
                path: path("127.0.0.1,127.0.0.2"),
            },
        ];
        assert_eq!(to(&other), Change::Map(requests));
    }

    #[test]
    fn what_is_so_already_is_not_asked_for_again() {
        let device = |name: &str, mode| MapDevice {
            name: name.to_owned(),
            mode,
        };
        let unmap = |name: &str| MapRequest::Unmap {
            device: name.to_owned(),
            force: false,
        };
        let (b, d) = (device("b", AccessMode::ReadOnly), device("d", AccessMode::ReadWrite));
        let [map_b, map_d] = [&b, &d].map(|device| MapRequest::Map(device.clone()));
        let requests = vec![unmap("b"), unmap("c"), map_b.clone(), map_d.clone()];
        let left = |mapped: &[MapDevice]| still_to_do(requests.clone(), mapped);
        let [b_before, c] = ["b", "c"].map(|name| device(name, AccessMode::ReadWrite));
        assert_eq!(left(&[b_before.clone(), c.clone()]), requests);
        assert_eq!(left(&[b_before]), [unmap("b"), map_b, map_d.clone()]);
        assert_eq!(left(&[b.clone(), c]), [unmap("c"), map_d]);
        assert_eq!(left(&[b, d]), []);
    }

    #[test]
    fn what_can_t_be_changed_is_restarted() {
        let mut other = MAP;
        other[1] = "--nbd=/t";
        assert_eq!(to(&other), Change::Restart);
        assert_eq!(to(&["--session=s", "--nbd=/s", MAP[2], "--device=b"]), Change::Restart);
        let serve = ["--addr=127.0.0.1", "--export=a=/a"];
        let of = |words: &[&str]| change(&Kind::Serve, &task(&serve), &task(words), &Resolver::default()).unwrap();
        assert_eq!(of(&[serve[0], "--export=b=/b"]), Change::Exports);
        assert_eq!(of(&["--addr=127.0.0.2", serve[1]]), Change::Restart);
        let rds = ["--addr=127.0.0.1"];
        let of = |words: &[&str]| change(&Kind::Rds, &task(&rds), &task(words), &Resolver::default()).unwrap();
        assert_eq!(
            of(&["--addr=127.0.0.2", rds[0], "--max-buffers=1G", "--max-sockets=5"]),
            Change::Node
        );
        assert_eq!(of(&["--addr=127.0.0.2"]), Change::Restart);
        assert_eq!(of(&[rds[0], "--dir=/x"]), Change::Restart);
        let lnet = ["--nid=192.0.2.1@o2ib"];
        let of = |words: &[&str]| change(&Kind::Lnet, &task(&lnet), &task(words), &Resolver::default()).unwrap();
        assert_eq!(of(&[lnet[0], "--sink=60"]), Change::Restart);
    }
}
