//! Open files and directories.

use std::{collections::HashMap, sync::Arc};

use fuser::FileType;
use parking_lot::Mutex;

use crate::quota::{Full, Limits, Quota, User};

/// Open files and directories.
const LIMITS: Limits = Limits {
    all: 4096,
    reserved: 1024,
    each: 1024,
};

/// An entry of a directory that is read.
pub(crate) struct Name {
    pub(crate) number: u64,
    pub(crate) kind: FileType,
    pub(crate) name: String,
}

/// An open file or directory.
pub(crate) struct Open {
    pub(crate) path: Arc<str>,
    user: User,
    /// A file's text, from the first read on.
    pub(crate) text: Mutex<Option<Arc<str>>>,
    /// The entries of a directory at the first read.
    pub(crate) names: Mutex<Arc<[Name]>>,
}

/// All of them.
pub(crate) struct Handles {
    last: u64,
    open: HashMap<u64, Arc<Open>>,
    quota: Quota,
}

impl Default for Handles {
    fn default() -> Self {
        Self {
            last: 0,
            open: HashMap::new(),
            quota: Quota::new(LIMITS),
        }
    }
}

impl Handles {
    /// A handle of what is at this path, for this user.
    pub(crate) fn open(&mut self, user: User, path: Arc<str>) -> Result<u64, Full> {
        self.quota.take(user)?;
        self.last += 1;
        let open = Open {
            path,
            user,
            text: Mutex::default(),
            names: Mutex::new([].into()),
        };
        self.open.insert(self.last, Arc::new(open));
        Ok(self.last)
    }

    pub(crate) fn get(&self, handle: u64) -> Option<Arc<Open>> {
        self.open.get(&handle).cloned()
    }

    pub(crate) fn close(&mut self, handle: u64) {
        if let Some(open) = self.open.remove(&handle) {
            self.quota.give_back(open.user);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_bounded_and_come_back() {
        let mut handles = Handles::default();
        let [root, one] = [true, false].map(|trusted| User { id: 1, trusted });
        let all: Vec<u64> = (0..LIMITS.each)
            .map(|_| handles.open(one, "x".into()).unwrap())
            .collect();
        assert_eq!(handles.open(one, "x".into()), Err(Full::User));
        assert!(handles.open(root, "x".into()).is_ok());
        handles.close(all[0]);
        handles.close(all[0]);
        assert!(handles.get(all[0]).is_none());
        let next = handles.open(one, "y".into()).unwrap();
        assert!(!all.contains(&next), "a number is not given twice");
        assert_eq!(&*handles.get(next).unwrap().path, "y");
        assert_eq!(handles.open(one, "x".into()), Err(Full::User));
    }
}
