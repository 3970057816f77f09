//! `class/rnbd-client` and `block`: mapped devices (`rnbd-clt-sysfs.c`).

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use rnbd_host::control::{MapRequest, MappedDevice, Named, Refused};

use crate::{
    host::{Client, Host, Names},
    order::{self, USAGE},
    server::{self, export_name},
    text::{invalid, line, unsigned},
    tree::{Attr, Entries, File, Node, dir, files},
};

/// The numbers of `rnbdN`, by session and device. A device gets the smallest free number when it is first seen, and keeps it until
/// it is unmapped.
#[derive(Default)]
pub(crate) struct Numbers(BTreeMap<(String, String), u32>);

impl Numbers {
    /// Returns the numbers of all devices, in their order.
    fn of(&mut self, all: Vec<(String, String)>) -> Vec<u32> {
        self.0.retain(|name, _| all.contains(name));
        let number = |name: (String, String)| {
            let free = (0..).find(|n| self.0.values().all(|taken| taken != n));
            *self.0.entry(name).or_insert(free.unwrap_or_default())
        };
        all.into_iter().map(number).collect()
    }
}

/// A mapped device.
pub(crate) struct Mapped {
    client: Arc<dyn Client>,
    pub(crate) number: u32,
    pub(crate) session: String,
    pub(crate) device: MappedDevice,
}

/// Returns all mapped devices, by their numbers.
pub(crate) fn mapped(host: &dyn Host, numbers: &Mutex<Numbers>) -> Result<Vec<Arc<Mapped>>, Refused> {
    let mut found = Vec::new();
    // Held until the numbers are assigned, so that a later caller sees no fewer devices.
    let mut numbers = numbers.lock();
    for client in host.clients() {
        let Ok(listing) = client.listing() else { continue };
        let session = listing.session;
        found.extend(
            listing
                .devices
                .into_iter()
                .map(|d| (client.clone(), session.clone(), d)),
        );
    }
    let names = found.iter().map(|(_, s, d)| (s.clone(), d.name.clone())).collect();
    let numbered = numbers.of(names).into_iter().zip(found);
    let mut all: Vec<_> = numbered
        .map(|(number, (client, session, device))| {
            Arc::new(Mapped {
                client,
                number,
                session,
                device,
            })
        })
        .collect();
    all.sort_by_key(|mapped| mapped.number);
    Ok(all)
}

/// `class/rnbd-client`.
pub(crate) fn client_ctl(host: &Arc<dyn Host>, numbers: &Arc<Mutex<Numbers>>) -> Node {
    let (host, numbers, at) = (host.clone(), numbers.clone(), host.clone());
    let devices = dir(move || {
        let mapped = mapped(&*host, &numbers)?;
        let link = |mapped: &Arc<Mapped>| {
            let name = format!("{}@{}", export_name(&mapped.device.name), mapped.session);
            (name, Node::Link(format!("../../../../block/rnbd{}", mapped.number)))
        };
        Ok(mapped.iter().map(link).collect())
    });
    let map_device = Node::File(File {
        show: Box::new(|| Ok(USAGE.into())),
        store: Some(Box::new(move |text| {
            let (session, order) = order::parse(text)?;
            order::execute(&session, &order, &*at)
        })),
    });
    let entries = vec![("map_device".into(), map_device), ("devices".into(), devices)];
    dir(move || Ok(vec![("ctl".into(), dir(move || Ok(entries)))]))
}

/// `block`: mapped devices and exports.
pub(crate) fn block(host: &Arc<dyn Host>, numbers: &Arc<Mutex<Numbers>>) -> Result<Entries, Refused> {
    let mut entries = Entries::new();
    for mapped in mapped(&**host, numbers)? {
        let name = format!("rnbd{}", mapped.number);
        let children = move || {
            let mut entries = files(&mapped, BLOCK, Names::Mainline);
            entries.push(("rnbd".into(), dir(move || Ok(files(&mapped, RNBD, Names::Mainline)))));
            Ok(entries)
        };
        entries.push((name, dir(children)));
    }
    for (name, export) in server::block(&**host) {
        if entries.iter().all(|(taken, _)| *taken != name) {
            entries.push((name, export));
        }
    }
    Ok(entries)
}

const BLOCK: &[Attr<Mapped>] = &[
    Attr::ro("ro", |mapped| {
        let read_only = mapped.device.read_only == Some(true);
        Ok(format!("{}\n", u8::from(read_only)))
    }),
    Attr::ro("size", |mapped| {
        Ok(format!("{}\n", mapped.device.bytes.unwrap_or(0) / 512))
    }),
    Attr::ro("stat", stat),
];

const RNBD: &[Attr<Mapped>] = &[
    Attr::rw(
        "unmap_device",
        |_| Ok(UNMAP.into()),
        |mapped, text| {
            let force = match line(text) {
                "normal" => false,
                "force" => true,
                other => return Err(invalid(format!("{other:?} is neither normal nor force"))),
            };
            let device = mapped.device.name.clone();
            mapped.ask(MapRequest::Unmap { device, force })
        },
    ),
    Attr::rw(
        "resize",
        |_| Ok(RESIZE.into()),
        |mapped, text| {
            let (device, sectors) = (mapped.device.name.clone(), unsigned(text)?);
            mapped.ask(MapRequest::Resize { device, sectors })
        },
    ),
    Attr::order_with(
        "remap_device",
        |_| Ok(REMAP.into()),
        |mapped| {
            let device = mapped.device.name.clone();
            mapped.ask(MapRequest::Remap { device })
        },
    ),
    Attr::ro("state", |mapped| Ok(format!("{}\n", mapped.device.state.name()))),
    Attr::ro("session", |mapped| Ok(format!("{}\n", mapped.session))),
    Attr::ro("mapping_path", |mapped| Ok(format!("{}\n", mapped.device.name))),
    Attr::ro("access_mode", |mapped| Ok(format!("{}\n", mapped.device.mode))),
    // Loops poll for all requests alike.
    Attr::ro("nr_poll_queues", |_| Ok("0\n".into())),
];

const UNMAP: &str = "Usage: echo <normal|force> > unmap_device\n";
const RESIZE: &str = "Usage: echo <new size in sectors> > resize\n";
const REMAP: &str = "Usage: echo <1> > remap_device\n";

impl Mapped {
    fn ask(&self, request: MapRequest) -> Result<(), Refused> {
        self.client.ask(request).map(|_| ())
    }
}

/// Statistics of a block device (`part_stat_show`): requests, merges, sectors and milliseconds of reads, then of writes; requests
/// in progress. Nothing is merged here, and times are not measured.
fn stat(mapped: &Mapped) -> Result<String, Refused> {
    let c = &mapped.device.counters;
    let (read, written) = (c.read_bytes / 512, c.written_bytes / 512);
    let numbers = [c.reads, 0, read, 0, c.writes, 0, written, 0];
    let mut text = String::new();
    for number in numbers {
        text.push_str(&format!("{number:8} "));
    }
    text.push_str(&format!("{:8} {:8} {:8}", mapped.device.waiting, 0, 0));
    // Discards and flushes are not counted apart.
    text.push_str(&format!(" {:8}", 0).repeat(6));
    Ok(text + "\n")
}
