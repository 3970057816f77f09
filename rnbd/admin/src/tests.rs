//! The registry over mappings and servers that only note what they are asked for.

use std::{
    net::IpAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use rnbd::{
    Errno,
    client::{OnLoss, device::DeviceCounters, state::DeviceState},
    proto::AccessMode,
    server::{disk::StoreId, listing::DeviceListing},
};
use rnbd_host::control::{
    Kind, MapAnswer, MapListing, MapOrder, MapRequest, MappedDevice, MappedPath, Refused, ServeAnswer, ServeRequest,
    Stat,
};
use roce_verbs::provider::{DeviceIx, KeyStrategy};
use rtrs::{
    admission::PathKey,
    client::{PathCounters, PathStats, Policy, state::PathState},
    proto::Uuid,
    server::{
        listing::{PathListing, SessionListing},
        request::SessionKey,
        state::PathState as ServedState,
    },
    stats::RdmaStats,
};

use crate::{Client, Host, Names, Parameters, Registry, Server};

/// A mapping that notes what it is asked for, and refuses it if it is to.
struct Noting {
    listing: Mutex<MapListing>,
    asked: Mutex<Vec<MapRequest>>,
    refusal: Mutex<Option<Errno>>,
}

impl Client for Noting {
    fn ask(&self, request: MapRequest) -> Result<MapAnswer, Refused> {
        if request == (MapRequest::List {}) {
            return Ok(MapAnswer::Listing(Box::new(self.listing.lock().unwrap().clone())));
        }
        self.asked.lock().unwrap().push(request);
        match *self.refusal.lock().unwrap() {
            Some(errno) => Err(errno.into()),
            None => Ok(MapAnswer::Done),
        }
    }
}

struct NotingServer(Mutex<Vec<ServeRequest>>);

impl Server for NotingServer {
    fn ask(&self, request: ServeRequest) -> Result<ServeAnswer, Refused> {
        match request {
            ServeRequest::Sessions => Ok(ServeAnswer::Sessions(vec![served(1, "db"), served(2, "")])),
            ServeRequest::Devices => Ok(ServeAnswer::Devices(vec![opened(1, "db"), opened(3, "web")])),
            request => {
                self.0.lock().unwrap().push(request);
                Ok(ServeAnswer::Done)
            }
        }
    }

    fn parameters(&self) -> Parameters {
        Parameters {
            max_chunk_size: 131_072,
            sess_queue_depth: 512,
            always_invalidate: true,
            dev_search_path: "/images".into(),
            port: 1234,
        }
    }
}

struct Two {
    client: Arc<Noting>,
    server: Arc<NotingServer>,
    opened: Mutex<Vec<MapOrder>>,
}

impl Host for Two {
    fn clients(&self) -> Vec<Arc<dyn Client>> {
        vec![self.client.clone()]
    }

    fn servers(&self) -> Vec<Arc<dyn Server>> {
        vec![self.server.clone()]
    }

    fn hca_name(&self, addr: IpAddr) -> String {
        format!("ferroce{}", u8::from(addr.is_ipv6()))
    }

    fn open(&self, _session: &str, order: &MapOrder) -> Result<(), Refused> {
        self.opened.lock().unwrap().push(order.clone());
        Ok(())
    }
}

fn served(key: u64, name: &str) -> SessionListing {
    let path = PathListing {
        path: PathKey::of(7),
        uuid: Uuid([1; 16]),
        client: "[::ffff:10.0.0.1]:4791".parse().unwrap(),
        server: "10.0.0.2".parse().unwrap(),
        device: DeviceIx(0),
        hca: None,
        keys: KeyStrategy::FastRegistration,
        state: ServedState::Connected,
        connections: 3,
        made: 3,
        requests: 0,
        rdma: RdmaStats {
            reads: 1,
            read_bytes: 4096,
            writes: 2,
            write_bytes: 8192,
        },
    };
    SessionListing {
        session: SessionKey(key),
        uuid: Uuid([2; 16]),
        name: name.into(),
        paths: vec![path],
    }
}

fn opened(session: u64, name: &str) -> DeviceListing {
    DeviceListing {
        session: SessionKey(session),
        session_name: name.into(),
        peer: "10.0.0.1:4791".parse().unwrap(),
        id: 5,
        name: "vg/disk".into(),
        mode: AccessMode::ReadOnly,
        read_only: true,
        label: "/images/vg/disk".into(),
        store: StoreId(0),
        size: 1 << 20,
    }
}

fn path(id: u32, addr: &str) -> MappedPath {
    let mut stats = PathStats::default();
    stats.rdma.reads = 3;
    stats.rdma.read_bytes = 12_000;
    stats.failovers = 9;
    stats.reconnects = -1;
    stats.failed_reconnects = 2;
    stats.cpu_migration.from = vec![4];
    MappedPath {
        id,
        addr: addr.parse().unwrap(),
        state: PathState::Connected,
        device: None,
        keys: None,
        latency: Some(Duration::from_nanos(1234)),
        in_flight: 1,
        stats,
    }
}

fn device(name: &str) -> MappedDevice {
    MappedDevice {
        name: name.into(),
        mode: AccessMode::ReadWrite,
        block: None,
        state: DeviceState::Mapped,
        bytes: Some(1 << 20),
        block_size: Some(512),
        read_only: Some(false),
        on_loss: OnLoss::Error,
        counters: DeviceCounters {
            completed: 3,
            reads: 1,
            read_bytes: 512,
            writes: 2,
            written_bytes: 8192,
            ..DeviceCounters::default()
        },
        waiting: 0,
        clients: 1,
    }
}

fn host() -> Arc<Two> {
    let listing = MapListing {
        session: "many".into(),
        port: 1300,
        queue_depth: None,
        max_io_bytes: None,
        new_rkeys: None,
        policy: Policy::MinInflight,
        max_reconnects: -1,
        reconnect_delay: Duration::from_secs(2),
        paths: vec![
            path(0, "10.0.0.1,10.0.0.2:1300"),
            path(1, "10.0.0.1,10.0.0.2:1301"),
            path(2, "fe80::1,fe80::2"),
        ],
        devices: vec![device("vg/disk"), device("b")],
    };
    Arc::new(Two {
        client: Arc::new(Noting {
            listing: Mutex::new(listing),
            asked: Mutex::default(),
            refusal: Mutex::default(),
        }),
        server: Arc::new(NotingServer(Mutex::default())),
        opened: Mutex::default(),
    })
}

fn registry(names: Names) -> (Arc<Two>, Registry) {
    let host = host();
    (host.clone(), Registry::new(host, names))
}

const SESSION: &str = "class/rtrs-client/many";
const PATH: &str = "class/rtrs-client/many/paths/ip:10.0.0.1@ip:10.0.0.2";
const DEVICE: &str = "block/rnbd0/rnbd";

fn read(registry: &Registry, dir: &str, file: &str) -> String {
    registry.read(&format!("{dir}/{file}")).unwrap()
}

/// Everything, as `find` prints it.
fn tree(registry: &Registry, dir: &str, found: &mut Vec<String>) {
    for entry in registry.list(dir).unwrap() {
        let path = format!("{dir}/{}", entry.name);
        let Stat { kind, mode } = &entry.stat;
        assert_eq!(registry.stat(&path).unwrap(), entry.stat, "{path}");
        match kind {
            Kind::Dir => tree(registry, &path, found),
            Kind::File => {
                let text = registry.read(&path).unwrap();
                assert!(text.ends_with('\n') && text.len() < 4096, "{path}: {text:?}");
                found.push(format!("{} {mode:o}", &path[1..]));
            }
            // A link leads somewhere.
            Kind::Link(to) => {
                assert!(registry.list(&path).is_ok() || registry.read(&path).is_ok(), "{path}");
                found.push(format!("{} -> {to}", &path[1..]));
            }
        }
    }
}

#[test]
fn the_tree_is_the_kernels() {
    let (_, registry) = registry(Names::Mainline);
    let mut found = Vec::new();
    tree(&registry, "", &mut found);
    let of_path = |path: &str| {
        let at = format!("class/rtrs-client/many/paths/{path}");
        let read_only = ["hca_name", "hca_port", "src_addr", "dst_addr", "state", "cur_latency"];
        let writable = ["reconnect", "disconnect", "remove_path"];
        let stats = [
            "rdma",
            "reconnects",
            "cpu_migration_from",
            "cpu_migration_to",
            "reset_all",
        ];
        let mut all: Vec<String> = read_only.iter().map(|name| format!("{at}/{name} 444")).collect();
        all.extend(writable.iter().map(|name| format!("{at}/{name} 644")));
        all.extend(stats.iter().map(|name| format!("{at}/stats/{name} 644")));
        all
    };
    let mut expected: Vec<String> = [
        "ip:10.0.0.1@ip:10.0.0.2",
        "ip:10.0.0.1@ip:10.0.0.2:1301",
        "ip:fe80::1@ip:fe80::2",
    ]
    .into_iter()
    .flat_map(of_path)
    .collect();
    expected.extend(["add_path", "max_reconnect_attempts", "mpath_policy"].map(|name| format!("{SESSION}/{name} 644")));
    for n in 0..2 {
        expected.extend(["ro", "size", "stat"].map(|name| format!("block/rnbd{n}/{name} 444")));
        let shown = ["state", "session", "mapping_path", "access_mode", "nr_poll_queues"];
        expected.extend(shown.map(|name| format!("block/rnbd{n}/rnbd/{name} 444")));
        expected
            .extend(["unmap_device", "resize", "remap_device"].map(|name| format!("block/rnbd{n}/rnbd/{name} 644")));
    }
    let served = "class/rtrs-server/db/paths/ip:10.0.0.1@ip:10.0.0.2";
    expected.extend(["hca_name", "hca_port", "src_addr", "dst_addr"].map(|name| format!("{served}/{name} 444")));
    expected.extend(["disconnect", "stats/rdma"].map(|name| format!("{served}/{name} 644")));
    for session in ["db", "web"] {
        let at = format!("class/rnbd-server/ctl/devices/vg!disk/sessions/{session}");
        expected.extend(["read_only", "access_mode", "mapping_path"].map(|name| format!("{at}/{name} 444")));
        expected.push(format!("{at}/force_close 644"));
    }
    expected.extend(
        [
            "class/rnbd-server/ctl/devices/vg!disk/block_dev -> ../../../../../block/vg!disk",
            "block/vg!disk/ro 444",
            "block/vg!disk/size 444",
            "class/rnbd-client/ctl/map_device 644",
            "class/rnbd-client/ctl/devices/vg!disk@many -> ../../../../block/rnbd0",
            "class/rnbd-client/ctl/devices/b@many -> ../../../../block/rnbd1",
            "module/rtrs_server/parameters/max_chunk_size 444",
            "module/rtrs_server/parameters/sess_queue_depth 444",
            "module/rtrs_server/parameters/always_invalidate 444",
            "module/rnbd_server/parameters/dev_search_path 444",
            "module/rnbd_server/parameters/port_nr 444",
        ]
        .map(str::to_owned),
    );
    found.sort();
    expected.sort();
    assert_eq!(found, expected);
}

#[test]
fn names_of_the_documents_are_there_unless_only_the_kernels_are_wanted() {
    let (_, all) = registry(Names::All);
    let (_, strict) = registry(Names::Mainline);
    let served = "class/rtrs-server/db/paths/ip:10.0.0.1@ip:10.0.0.2/stats/reset_all";
    for path in [
        format!("{SESSION}/mp_policy"),
        format!("{PATH}/stats/cpu_migration"),
        served.into(),
    ] {
        assert!(all.read(&path).is_ok(), "{path}");
        assert_eq!(strict.stat(&path).unwrap_err().errno, Errno::ENOENT, "{path}");
    }
    let link = all.stat(&format!("{SESSION}/mp_policy")).unwrap();
    assert_eq!((link.kind, link.mode), (Kind::Link("mpath_policy".into()), 0o777));
    let table = read(&all, PATH, "stats/cpu_migration");
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].trim_start().starts_with("CPU0"), "{table}");
    assert!(
        lines[1].starts_with("from:        4") && lines[2].starts_with("to  :        0"),
        "{table}"
    );
}

#[test]
fn texts_are_the_kernels() {
    let (_, registry) = registry(Names::Mainline);
    for (file, text) in [
        ("mpath_policy", "min-inflight (MI: 1)\n"),
        ("max_reconnect_attempts", "-1\n"),
        (
            "add_path",
            "Usage: echo [<source addr>@]<destination addr> > add_path\n\n*addr ::= [ ip:<ipv4|ipv6> | gid:<gid> ]\n",
        ),
    ] {
        assert_eq!(read(&registry, SESSION, file), text, "{file}");
    }
    for (file, text) in [
        ("hca_name", "ferroce0\n"),
        ("hca_port", "1\n"),
        ("src_addr", "ip:10.0.0.1\n"),
        ("dst_addr", "ip:10.0.0.2\n"),
        ("state", "connected\n"),
        ("cur_latency", "1234 ns\n"),
        ("reconnect", "Usage: echo 1 > reconnect\n"),
        ("remove_path", "Usage: echo 1 > remove_path\n"),
        ("stats/rdma", "3 12000 0 0 1 9\n"),
        ("stats/reconnects", "-1 2\n"),
        ("stats/reset_all", "echo 1 to reset all statistics\n"),
    ] {
        assert_eq!(read(&registry, PATH, file), text, "{file}");
    }
    let migrated = read(&registry, PATH, "stats/cpu_migration_from");
    assert!(migrated.starts_with("4 ") && migrated.ends_with(" \n"), "{migrated:?}");
    for (file, text) in [
        ("state", "open\n"),
        ("session", "many\n"),
        ("mapping_path", "vg/disk\n"),
        ("access_mode", "rw\n"),
        ("nr_poll_queues", "0\n"),
        ("unmap_device", "Usage: echo <normal|force> > unmap_device\n"),
        ("resize", "Usage: echo <new size in sectors> > resize\n"),
        ("remap_device", "Usage: echo <1> > remap_device\n"),
        ("../size", "2048\n"),
    ] {
        assert_eq!(read(&registry, DEVICE, file), text, "{file}");
    }
    // Third and seventh: sectors read and written.
    let stat = read(&registry, "block/rnbd0", "stat");
    let numbers: Vec<&str> = stat.split_whitespace().collect();
    assert_eq!((numbers.len(), numbers[2], numbers[6]), (17, "1", "16"), "{stat}");
    let served = "class/rtrs-server/db/paths/ip:10.0.0.1@ip:10.0.0.2";
    assert_eq!(read(&registry, served, "src_addr"), "ip:10.0.0.1\n");
    assert_eq!(read(&registry, served, "stats/rdma"), "1 4096 2 8192\n");
    let opened = "class/rnbd-server/ctl/devices/vg!disk/sessions/db";
    assert_eq!(read(&registry, opened, "read_only"), "1\n");
    assert_eq!(read(&registry, opened, "access_mode"), "ro\n");
    assert_eq!(
        read(&registry, "module/rtrs_server/parameters", "always_invalidate"),
        "Y\n"
    );
}

#[test]
fn what_is_written_is_asked_for() {
    let (host, registry) = registry(Names::All);
    let of = |at: &str, file: &str| format!("{at}/{file}");
    let path = "10.0.0.1,10.0.0.2:1300".parse().unwrap();
    let writes = [
        (
            of(SESSION, "mpath_policy"),
            "rr\n",
            MapRequest::SetPolicy {
                policy: Policy::RoundRobin,
            },
        ),
        (
            of(SESSION, "mp_policy"),
            "2",
            MapRequest::SetPolicy {
                policy: Policy::MinLatency,
            },
        ),
        (
            of(SESSION, "mpath_policy"),
            "Min-Inflight, please",
            MapRequest::SetPolicy {
                policy: Policy::MinInflight,
            },
        ),
        (
            of(SESSION, "mpath_policy"),
            "+1\n",
            MapRequest::SetPolicy {
                policy: Policy::MinInflight,
            },
        ),
        (
            of(SESSION, "max_reconnect_attempts"),
            "17\n",
            MapRequest::SetReconnects {
                attempts: Some(17),
                delay: None,
            },
        ),
        // The port is the session's.
        (
            of(SESSION, "add_path"),
            "ip:10.1.0.1@ip:10.1.0.2\n",
            MapRequest::AddPath {
                path: "10.1.0.1,10.1.0.2:1300".parse().unwrap(),
            },
        ),
        (of(PATH, "reconnect"), "1\n", MapRequest::Reconnect { path }),
        (of(PATH, "disconnect"), "1", MapRequest::Disconnect { path }),
        (of(PATH, "remove_path"), "1\n", MapRequest::RemovePath { path }),
        (
            of(PATH, "stats/rdma"),
            "1\n",
            MapRequest::ResetPathStats {
                path,
                which: PathCounters::Rdma,
            },
        ),
        (
            of(DEVICE, "resize"),
            "0x10\n",
            MapRequest::Resize {
                device: "vg/disk".into(),
                sectors: 16,
            },
        ),
        (
            of(DEVICE, "remap_device"),
            "1\n",
            MapRequest::Remap {
                device: "vg/disk".into(),
            },
        ),
        (
            of("class/rnbd-client/ctl/devices/vg!disk@many/rnbd", "unmap_device"),
            "force\n",
            MapRequest::Unmap {
                device: "vg/disk".into(),
                force: true,
            },
        ),
    ];
    for (file, text, request) in writes {
        registry.write(&file, text.as_bytes()).unwrap();
        assert_eq!(host.client.asked.lock().unwrap().pop(), Some(request), "{file}");
    }
    let served = "class/rtrs-server/db/paths/ip:10.0.0.1@ip:10.0.0.2";
    registry.write(&of(served, "disconnect"), b"1").unwrap();
    let close = of("class/rnbd-server/ctl/devices/vg!disk/sessions/web", "force_close");
    registry.write(&close, b"1\n").unwrap();
    let asked = host.server.0.lock().unwrap().clone();
    let expected = [
        ServeRequest::ClosePath {
            session: SessionKey(1),
            path: PathKey::of(7),
        },
        ServeRequest::ForceClose {
            session: SessionKey(3),
            device: 5,
        },
    ];
    assert_eq!(asked, expected);
}

#[test]
fn what_can_not_be_written_is_refused_as_by_the_kernel() {
    let (host, registry) = registry(Names::All);
    let refused = |file: &str, text: &[u8]| registry.write(file, text).unwrap_err().errno;
    for (file, text, errno) in [
        ("mpath_policy", "3", Errno::EINVAL),
        ("mpath_policy", "", Errno::EINVAL),
        ("mpath_policy", "rrr", Errno::EINVAL),
        ("max_reconnect_attempts", "10000", Errno::EINVAL),
        ("max_reconnect_attempts", "-2", Errno::EINVAL),
        ("max_reconnect_attempts", "x", Errno::EINVAL),
        ("max_reconnect_attempts", "99999999999", Errno::ERANGE),
        ("add_path", "nowhere", Errno::EINVAL),
        ("add_path", "gid:fe80::1", Errno::EINVAL),
        ("nothing", "1", Errno::ENOENT),
        ("paths", "1", Errno::EISDIR),
        ("mpath_policy/x", "1", Errno::ENOTDIR),
    ] {
        assert_eq!(
            refused(&format!("{SESSION}/{file}"), text.as_bytes()),
            errno,
            "{file} {text:?}"
        );
    }
    for (file, text) in [
        ("reconnect", "0"),
        ("reconnect", "11"),
        ("disconnect", "1\n\n"),
        ("remove_path", " 1"),
        ("stats/rdma", "0"),
        ("stats/reset_all", ""),
    ] {
        assert_eq!(
            refused(&format!("{PATH}/{file}"), text.as_bytes()),
            Errno::EINVAL,
            "{file} {text:?}"
        );
    }
    assert_eq!(refused(&format!("{PATH}/state"), b"1"), Errno::EACCES);
    assert_eq!(refused(&format!("{DEVICE}/unmap_device"), b"maybe"), Errno::EINVAL);
    assert_eq!(refused(&format!("{DEVICE}/resize"), b"1K"), Errno::EINVAL);
    assert_eq!(refused(&format!("{DEVICE}/resize"), &[b'1'; 4097]), Errno::EINVAL);
    assert_eq!(refused(&format!("{DEVICE}/resize"), b"\xff"), Errno::EINVAL);
    assert!(host.client.asked.lock().unwrap().is_empty());
    // And what it is refused with goes to who has asked.
    *host.client.refusal.lock().unwrap() = Some(Errno::EALREADY);
    assert_eq!(refused(&format!("{DEVICE}/remap_device"), b"1"), Errno::EALREADY);
    assert_eq!(registry.read(SESSION).unwrap_err().errno, Errno::EISDIR);
    assert_eq!(
        registry.list(&format!("{PATH}/state")).unwrap_err().errno,
        Errno::ENOTDIR
    );
    assert_eq!(registry.list("class/x").unwrap_err().errno, Errno::ENOENT);
}

#[test]
fn devices_are_mapped_over_the_session_that_there_is_or_a_new_one() {
    let (host, registry) = registry(Names::Mainline);
    let map = |text: &str| registry.write("class/rnbd-client/ctl/map_device", text.as_bytes());
    map("sessname=many path=ip:10.9.9.9 device_path=new access_mode=migration\n").unwrap();
    let asked = host.client.asked.lock().unwrap().pop();
    let Some(MapRequest::Map(device)) = asked else {
        panic!("{asked:?}")
    };
    assert_eq!((device.name.as_str(), device.mode), ("new", AccessMode::Migration));
    // A port is for the paths after it.
    map("sessname=other path=ip:10.0.0.3 dest_port=99 path=ip:10.0.0.1@ip:10.0.0.4 device_path=d nr_poll_queues=-1")
        .unwrap();
    let order = host.opened.lock().unwrap().pop().unwrap();
    let paths: Vec<_> = order.paths.iter().map(|path| path.dst.to_string()).collect();
    assert_eq!(
        (order.session.as_deref(), paths),
        (Some("other"), vec!["10.0.0.3:1234".into(), "10.0.0.4:99".into()])
    );
    assert_eq!(map("sessname=other device_path=d").unwrap_err().errno, Errno::ENXIO);
    for wrong in [
        "",
        "sessname=many",
        "device_path=d",
        "sessname= device_path=d",
        "sessname=many device_path=d access_mode=wr",
        "sessname=many device_path=d path=ip:nowhere",
        "sessname=many device_path=d dest_port=0",
        "sessname=many device_path=d nr_poll_queues=-2",
        "sessname=many device_path=d surprise=1",
        "many d",
        "sessname=many\ndevice_path=d",
        &format!("sessname=many device_path={}", "d".repeat(256)),
    ] {
        assert_eq!(map(wrong).unwrap_err().errno, Errno::EINVAL, "{wrong}");
    }
    let nowhere = map("sessname=many device_path=d path=nowhere");
    assert_eq!(nowhere.unwrap_err().errno, Errno::EPROTONOSUPPORT);
    let seven = "path=10.0.0.3 ".repeat(7);
    let too_many = map(&format!("sessname=many device_path=d {seven}"));
    assert_eq!(too_many.unwrap_err().errno, Errno::ENOMEM);
}

#[test]
fn a_device_keeps_its_number_while_others_go() {
    let (host, registry) = registry(Names::Mainline);
    let numbers = || registry.block_devices().unwrap();
    let named = |n: u32, device: &str| (n, "many".to_owned(), device.to_owned());
    assert_eq!(numbers(), [named(0, "vg/disk"), named(1, "b")]);
    host.client.listing.lock().unwrap().devices.remove(0);
    assert_eq!(numbers(), [named(1, "b")]);
    host.client.listing.lock().unwrap().devices.push(device("c"));
    assert_eq!(numbers(), [named(0, "c"), named(1, "b")]);
    assert_eq!(registry.read("block/rnbd0/rnbd/mapping_path").unwrap(), "c\n");
}
