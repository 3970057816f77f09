//! Open files and directories.

use std::{collections::HashMap, sync::Arc, time::Instant};

use fuser::FileType;
use parking_lot::Mutex;
use roce_net::places::{Full, Limits, Peer, Places};

/// Limits of open files and directories.
const LIMITS: Limits = Limits {
    all: 4096,
    open: 4096,
    reserved: 1024,
    each: 1024,
};

/// An entry of a listed directory.
pub(crate) struct Name {
    pub(crate) number: u64,
    pub(crate) kind: FileType,
    pub(crate) name: String,
}

/// An open file or directory.
pub(crate) struct Open {
    pub(crate) path: Arc<str>,
    /// A file's text, from the first read on.
    pub(crate) text: Mutex<Option<Arc<str>>>,
    /// The entries of a directory at the first read.
    pub(crate) names: Mutex<Arc<[Name]>>,
}

/// Open files and directories by their handles.
pub(crate) struct Handles {
    open: HashMap<u64, Arc<Open>>,
    places: Places<Instant>,
}

impl Default for Handles {
    fn default() -> Self {
        Self {
            open: HashMap::new(),
            places: Places::new(LIMITS),
        }
    }
}

impl Handles {
    /// Opens the node at this path for this user; returns its handle.
    pub(crate) fn open(&mut self, user: Peer, path: Arc<str>) -> Result<u64, Full> {
        let handle = self.places.take(user)?;
        let open = Open {
            path,
            text: Mutex::default(),
            names: Mutex::new([].into()),
        };
        self.open.insert(handle, Arc::new(open));
        Ok(handle)
    }

    pub(crate) fn get(&self, handle: u64) -> Option<Arc<Open>> {
        self.open.get(&handle).cloned()
    }

    pub(crate) fn close(&mut self, handle: u64) {
        self.open.remove(&handle);
        self.places.leave(handle);
    }
}

#[cfg(test)]
mod tests {
    use roce_net::places::Identity;

    use super::*;

    #[test]
    fn handles_are_bounded_and_come_back() {
        let mut handles = Handles::default();
        let identity = Identity::User(1);
        let [root, one] = [true, false].map(|trusted| Peer { identity, trusted });
        let all: Vec<u64> = (0..LIMITS.each)
            .map(|_| handles.open(one, "x".into()).unwrap())
            .collect();
        assert_eq!(handles.open(one, "x".into()), Err(Full::Peer(identity, LIMITS.each)));
        assert!(handles.open(root, "x".into()).is_ok());
        handles.close(all[0]);
        handles.close(all[0]);
        assert!(handles.get(all[0]).is_none());
        let next = handles.open(one, "y".into()).unwrap();
        assert!(!all.contains(&next), "a number is not given twice");
        assert_eq!(&*handles.get(next).unwrap().path, "y");
        assert_eq!(handles.open(one, "x".into()), Err(Full::Peer(identity, LIMITS.each)));
    }
}
