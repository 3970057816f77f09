//! Running mappings and servers as a tree of attributes: what `rtrs` and `rnbd` of Linux have in sysfs, with the same relative paths,
//! file texts, modes and error numbers.
//!
//! A [`Registry`] is made of a [`Host`], which says what runs, and has four calls: [`list`](Registry::list), [`stat`](Registry::stat),
//! [`read`](Registry::read) and [`write`](Registry::write). It knows nothing of sockets or of file systems; each of these is a view of it.
//!
//! ```text
//! class/rtrs-client/SESSION/{add_path,max_reconnect_attempts,mpath_policy}
//! class/rtrs-client/SESSION/paths/ip:SRC@ip:DST/{hca_name,hca_port,src_addr,dst_addr,state,cur_latency}
//! class/rtrs-client/SESSION/paths/ip:SRC@ip:DST/{reconnect,disconnect,remove_path}
//! class/rtrs-client/SESSION/paths/ip:SRC@ip:DST/stats/{rdma,reconnects,cpu_migration_from,cpu_migration_to,reset_all}
//! class/rtrs-server/SESSION/paths/ip:CLIENT@ip:SERVER/{hca_name,hca_port,src_addr,dst_addr,disconnect}
//! class/rtrs-server/SESSION/paths/ip:CLIENT@ip:SERVER/stats/rdma
//! class/rnbd-client/ctl/map_device
//! class/rnbd-client/ctl/devices/DEVICE@SESSION -> ../../../../block/rnbdN
//! class/rnbd-server/ctl/devices/EXPORT/block_dev -> ../../../../../block/EXPORT
//! class/rnbd-server/ctl/devices/EXPORT/sessions/SESSION/{access_mode,read_only,mapping_path,force_close}
//! block/rnbdN/{size,ro,stat}
//! block/rnbdN/rnbd/{state,session,mapping_path,access_mode,nr_poll_queues,resize,remap_device,unmap_device}
//! block/EXPORT/{size,ro}
//! module/rtrs_server/parameters/{max_chunk_size,sess_queue_depth,always_invalidate}
//! module/rnbd_server/parameters/{dev_search_path,port_nr}
//! ```
//!
//! With [`Names::All`] there are also names that only the documents have: `mp_policy` (a link to `mpath_policy`), `stats/cpu_migration`
//! (both tables in one) of a client's path, and `stats/reset_all` of a server's. A reset is a written `1`, as the kernel's code has it; the documents'
//! `0` is refused as there. What the documents name and nothing counts (`sg_entries`, `rdma_lat`, `wc_completion`) is left out.

mod client;
mod device;
mod order;
mod server;
#[cfg(test)]
mod tests;
mod text;
mod tree;

use std::{net::IpAddr, sync::Arc};

use device::Numbers;
use parking_lot::Mutex;
use rnbd::Errno;
use rnbd::server::listing::DeviceListing;
use rnbd_host::control::{
    Refused,
    map::{MapAnswer, MapControl, MapListing, MapRequest},
    serve::{ServeAnswer, ServeRequest},
};
use rtrs::server::listing::SessionListing;

pub use device::state_name;
pub use order::MapOrder;
pub use tree::{Entry, Kind, Stat};
use tree::{File, Node, dir};

/// Bytes of what is written to a file at most; the kernel takes a page.
pub const MAX_WRITE: usize = 4096;

/// A mapping that runs.
pub trait Client: Send + Sync {
    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// Says why not; [`MapRequest`] has the reasons.
    fn ask(&self, request: MapRequest) -> Result<MapAnswer, Refused>;

    /// How everything is.
    ///
    /// # Errors
    /// ENODEV when it has ended.
    fn listing(&self) -> Result<MapListing, Refused> {
        match self.ask(MapRequest::List)? {
            MapAnswer::Listing(listing) => Ok(*listing),
            MapAnswer::Done | MapAnswer::Stats(_) => Err(Errno::EIO.into()),
        }
    }
}

impl Client for MapControl {
    fn ask(&self, request: MapRequest) -> Result<MapAnswer, Refused> {
        Self::ask(self, request)
    }
}

/// A server that runs.
pub trait Server: Send + Sync {
    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// Says why not; [`ServeRequest`] has the reasons.
    fn ask(&self, request: ServeRequest) -> Result<ServeAnswer, Refused>;

    /// How it was started.
    fn parameters(&self) -> Parameters;

    /// Its sessions and their paths.
    ///
    /// # Errors
    /// ENODEV when it has ended.
    fn sessions(&self) -> Result<Vec<SessionListing>, Refused> {
        match self.ask(ServeRequest::Sessions)? {
            ServeAnswer::Sessions(sessions) => Ok(sessions),
            _ => Err(Errno::EIO.into()),
        }
    }

    /// The devices that are open.
    ///
    /// # Errors
    /// ENODEV when it has ended.
    fn devices(&self) -> Result<Vec<DeviceListing>, Refused> {
        match self.ask(ServeRequest::Devices)? {
            ServeAnswer::Devices(devices) => Ok(devices),
            _ => Err(Errno::EIO.into()),
        }
    }
}

/// Parameters of the kernel's modules `rtrs_server` and `rnbd_server`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Parameters {
    /// Bytes of a chunk.
    pub max_chunk_size: u32,
    /// Requests in flight of a session.
    pub sess_queue_depth: u32,
    /// Keys are taken back while a request is worked on.
    pub always_invalidate: bool,
    /// The folder of what is offered by the names of its files; empty if there is none.
    pub dev_search_path: String,
    /// The port.
    pub port: u16,
}

/// Access to the running server and mappings.
pub trait Host: Send + Sync {
    /// Mappings, each with one session, in the order in which they came.
    fn clients(&self) -> Vec<Arc<dyn Client>>;

    /// Servers.
    fn servers(&self) -> Vec<Arc<dyn Server>>;

    /// The name of the RDMA device at this address of ours (`hca_name`).
    fn hca_name(&self, addr: IpAddr) -> String;

    /// Opens a session, and a device over it. EOPNOTSUPP where there can't be another session.
    ///
    /// # Errors
    /// That of opening either.
    fn open(&self, order: &MapOrder) -> Result<(), Refused>;
}

/// Choice of the names of files.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Names {
    /// Names of the kernel's code.
    Mainline,
    /// Also those that only its documents have, as far as there is something behind them.
    #[default]
    All,
}

/// The attributes of what runs.
pub struct Registry {
    host: Arc<dyn Host>,
    names: Names,
    numbers: Arc<Mutex<Numbers>>,
}

impl Registry {
    /// Returns the attributes of this host.
    pub fn new(host: Arc<dyn Host>, names: Names) -> Self {
        Self {
            host,
            names,
            numbers: Arc::default(),
        }
    }

    /// The same with these names.
    pub fn with_names(&self, names: Names) -> Self {
        Self {
            host: self.host.clone(),
            names,
            numbers: self.numbers.clone(),
        }
    }

    /// Returns the choice of names.
    pub fn names(&self) -> Names {
        self.names
    }

    /// Lists a directory in its order; `""` is the root.
    ///
    /// # Errors
    /// ENOENT, ENOTDIR, and ENODEV when what it shows ends meanwhile.
    pub fn list(&self, dir: &str) -> Result<Vec<Entry>, Refused> {
        match self.find(dir, true)? {
            Node::Dir(children) => Ok(children()?.into_iter().map(Entry::from).collect()),
            Node::File(_) | Node::Link(_) => Err(Errno::ENOTDIR.into()),
        }
    }

    /// Returns the node at a path; links are not followed.
    ///
    /// # Errors
    /// ENOENT, ENOTDIR, ELOOP.
    pub fn stat(&self, path: &str) -> Result<Stat, Refused> {
        Ok(self.find(path, false)?.stat())
    }

    /// A file's text.
    ///
    /// # Errors
    /// ENOENT, ENOTDIR, EISDIR.
    pub fn read(&self, path: &str) -> Result<String, Refused> {
        (self.file(path)?.show)()
    }

    /// Writes to a file. It waits for the end of what that asks for, which may be as long as connecting takes.
    ///
    /// # Errors
    /// ENOENT, ENOTDIR, EISDIR; EACCES when the file is only to be read; EINVAL when it does not take such a text; and what becomes of it.
    pub fn write(&self, path: &str, bytes: &[u8]) -> Result<(), Refused> {
        let file = self.file(path)?;
        let Some(store) = file.store else {
            let text = format!("{path} is only to be read");
            return Err(Refused::new(Errno::EACCES, text));
        };
        if bytes.len() > MAX_WRITE {
            let text = format!("{} bytes, at most {MAX_WRITE} can be written", bytes.len());
            return Err(Refused::new(Errno::EINVAL, text));
        }
        let text = std::str::from_utf8(bytes).map_err(|_| Refused::new(Errno::EINVAL, "it is no text"))?;
        store(text)
    }

    /// Maps a device, over the session of that name if there is one (`map_device`).
    ///
    /// # Errors
    /// EEXIST when it is mapped already; ENXIO when there is no such session, and no path to make one; and those of mapping.
    pub fn map(&self, order: &MapOrder) -> Result<(), Refused> {
        order.carry_out(&*self.host)
    }

    /// The names of block devices: number, session and device, in the order of their numbers.
    ///
    /// # Errors
    /// ENODEV when a mapping ends meanwhile.
    pub fn block_devices(&self) -> Result<Vec<(u32, String, String)>, Refused> {
        let mapped = device::mapped(&*self.host, &self.numbers)?;
        let named = mapped.iter();
        Ok(named
            .map(|d| (d.number, d.session.clone(), d.device.name.clone()))
            .collect())
    }

    fn file(&self, path: &str) -> Result<File, Refused> {
        match self.find(path, true)? {
            Node::File(file) => Ok(file),
            Node::Dir(_) => Err(Errno::EISDIR.into()),
            Node::Link(_) => Err(Errno::ELOOP.into()),
        }
    }

    fn find(&self, path: &str, follow: bool) -> Result<Node, Refused> {
        tree::find(|| self.root(), path, follow)
    }

    fn root(&self) -> Node {
        let (host, names, numbers) = (self.host.clone(), self.names, self.numbers.clone());
        dir(move || {
            let (of_class, of_module) = (host.clone(), host.clone());
            let of_block = numbers.clone();
            let class = move || {
                Ok(vec![
                    ("rtrs-client".into(), client::sessions(&of_class, names)),
                    ("rtrs-server".into(), server::sessions(&of_class, names)),
                    ("rnbd-client".into(), device::client_ctl(&of_class, &numbers)),
                    ("rnbd-server".into(), server::ctl(&of_class)),
                ])
            };
            let block = move || device::block(&host, &of_block);
            Ok(vec![
                ("block".into(), dir(block)),
                ("class".into(), dir(class)),
                ("module".into(), server::modules(&of_module)),
            ])
        })
    }
}
