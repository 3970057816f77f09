//! What is open.

use std::{collections::HashMap, sync::Arc};

use fuser::FileType;
use parking_lot::Mutex;

/// Open files and directories at most.
const MAX_OPEN: usize = 4096;

/// A name in a directory that is read.
pub(crate) struct Name {
    pub(crate) number: u64,
    pub(crate) kind: FileType,
    pub(crate) name: String,
}

/// An open file or directory.
pub(crate) struct Open {
    pub(crate) path: Arc<str>,
    /// A file's text, since somebody began to read it.
    pub(crate) text: Mutex<Option<Arc<str>>>,
    /// What a directory had in it when somebody began to read it.
    pub(crate) names: Mutex<Arc<[Name]>>,
}

/// All of them.
#[derive(Default)]
pub(crate) struct Handles {
    last: u64,
    open: HashMap<u64, Arc<Open>>,
}

impl Handles {
    /// A handle of what is at this path; `None` if there are too many.
    pub(crate) fn open(&mut self, path: Arc<str>) -> Option<u64> {
        if self.open.len() >= MAX_OPEN {
            return None;
        }
        self.last += 1;
        let open = Open {
            path,
            text: Mutex::default(),
            names: Mutex::new([].into()),
        };
        self.open.insert(self.last, Arc::new(open));
        Some(self.last)
    }

    pub(crate) fn get(&self, handle: u64) -> Option<Arc<Open>> {
        self.open.get(&handle).cloned()
    }

    pub(crate) fn close(&mut self, handle: u64) {
        self.open.remove(&handle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_bounded_and_come_back() {
        let mut handles = Handles::default();
        let all: Vec<u64> = (0..MAX_OPEN).map(|_| handles.open("x".into()).unwrap()).collect();
        assert_eq!(handles.open("x".into()), None);
        handles.close(all[0]);
        assert!(handles.get(all[0]).is_none());
        let next = handles.open("y".into()).unwrap();
        assert!(!all.contains(&next), "a number is not given twice");
        assert_eq!(&*handles.get(next).unwrap().path, "y");
    }
}
