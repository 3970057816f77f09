//! The attribute tree of a host.

use std::sync::Arc;

use parking_lot::Mutex;
use rnbd::Errno;
use rnbd_host::control::{Entry, MapOrder, Refused, Stat};

use super::{
    client,
    device::{self, Numbers},
    host::{Host, Names},
    order, server,
    tree::{self, File, Node, dir},
};

/// Bytes of a write at most, a page as in the kernel; EINVAL beyond.
pub const MAX_WRITE: usize = 4096;

/// Attribute tree of a host.
pub struct Registry {
    host: Arc<dyn Host>,
    names: Names,
    numbers: Arc<Mutex<Numbers>>,
}

impl Registry {
    /// Returns the attribute tree of this host.
    pub fn new(host: Arc<dyn Host>, names: Names) -> Self {
        Self {
            host,
            names,
            numbers: Arc::default(),
        }
    }

    /// Returns the same tree with these names.
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
    /// ENOENT, ENOTDIR, and ENODEV when its mapping or server has just ended.
    pub fn list(&self, dir: &str) -> Result<Vec<Entry>, Refused> {
        match self.find(dir, true)? {
            Node::Dir(children) => {
                let entry = |(name, node): (String, Node)| Entry {
                    name,
                    stat: node.stat(),
                };
                Ok(children()?.into_iter().map(entry).collect())
            }
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

    /// Reads a file.
    ///
    /// # Errors
    /// ENOENT, ENOTDIR, EISDIR.
    pub fn read(&self, path: &str) -> Result<String, Refused> {
        (self.file(path)?.show)()
    }

    /// Writes to a file, and waits until the request is done, which may take as long as connecting.
    ///
    /// # Errors
    /// ENOENT, ENOTDIR, EISDIR; EACCES for a read-only file; EINVAL for a malformed text; and those of the request.
    pub fn write(&self, path: &str, bytes: &[u8]) -> Result<(), Refused> {
        let file = self.file(path)?;
        let Some(store) = file.store else {
            let text = format!("{path} is read-only");
            return Err(Refused::new(Errno::EACCES, text));
        };
        if bytes.len() > MAX_WRITE {
            let text = format!("{} bytes, at most {MAX_WRITE} can be written", bytes.len());
            return Err(Refused::new(Errno::EINVAL, text));
        }
        let text = std::str::from_utf8(bytes).map_err(|_| Refused::new(Errno::EINVAL, "not valid UTF-8"))?;
        store(text)
    }

    /// Maps a device, over the session of that name or a new one (`map_device`).
    ///
    /// # Errors
    /// EEXIST when it is mapped already; ENXIO when there is no such session, and no path for a new one; and those of mapping.
    pub fn map(&self, session: &str, order: &MapOrder) -> Result<(), Refused> {
        order::execute(session, order, &*self.host)
    }

    /// Returns the names of block devices: number, session and device, in the order of their numbers.
    ///
    /// # Errors
    /// ENODEV when a mapping has just ended.
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
