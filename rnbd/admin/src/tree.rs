//! Directories, files and links, created on access.

use std::sync::Arc;

use rnbd::Errno;
use rnbd_host::control::{Kind, Refused, Stat};

use crate::host::Names;

/// Links that a path may pass, as in the kernel (`MAXSYMLINKS`); ELOOP beyond.
const MAX_LINKS: usize = 40;

/// Entries of a directory.
pub(crate) type Entries = Vec<(String, Node)>;
/// Lists a directory.
pub(crate) type Children = Box<dyn FnOnce() -> Result<Entries, Refused>>;

/// Reads a file.
type Show = Box<dyn FnOnce() -> Result<String, Refused>>;
/// Executes a write to a file.
type Store = Box<dyn FnOnce(&str) -> Result<(), Refused>>;
/// Executes a write to the file of a `T`.
type StoreOf<T> = fn(&T, &str) -> Result<(), Refused>;

/// A file.
pub(crate) struct File {
    pub(crate) show: Show,
    pub(crate) store: Option<Store>,
}

/// A node of the tree.
pub(crate) enum Node {
    Dir(Children),
    File(File),
    Link(String),
}

impl Node {
    pub(crate) fn stat(&self) -> Stat {
        let (kind, mode) = match self {
            Self::Dir(_) => (Kind::Dir, 0o755),
            Self::File(File { store: Some(_), .. }) => (Kind::File, 0o644),
            Self::File(File { store: None, .. }) => (Kind::File, 0o444),
            Self::Link(to) => (Kind::Link(to.clone()), 0o777),
        };
        Stat { kind, mode }
    }
}

/// A directory.
pub(crate) fn dir(children: impl FnOnce() -> Result<Entries, Refused> + 'static) -> Node {
    Node::Dir(Box::new(children))
}

/// An attribute of a `T`, which is a file.
pub(crate) struct Attr<T: 'static> {
    name: &'static str,
    names: Names,
    show: fn(&T) -> Result<String, Refused>,
    store: Option<StoreOf<T>>,
}

impl<T> Attr<T> {
    /// A read-only attribute.
    pub(crate) const fn ro(name: &'static str, show: fn(&T) -> Result<String, Refused>) -> Self {
        Self {
            name,
            names: Names::Mainline,
            show,
            store: None,
        }
    }

    /// A writable attribute.
    pub(crate) const fn rw(name: &'static str, show: fn(&T) -> Result<String, Refused>, store: StoreOf<T>) -> Self {
        Self {
            name,
            names: Names::Mainline,
            show,
            store: Some(store),
        }
    }

    /// An attribute that only the kernel's documents have.
    pub(crate) const fn of_documents(self) -> Self {
        Self {
            names: Names::All,
            ..self
        }
    }
}

/// The attributes of a `T` as files.
pub(crate) fn files<T: 'static>(of: &Arc<T>, attrs: &'static [Attr<T>], names: Names) -> Entries {
    let known = attrs.iter().filter(|attr| attr.names <= names);
    let file = |attr: &'static Attr<T>| {
        let (shown, stored) = (of.clone(), of.clone());
        let show = Box::new(move || (attr.show)(&shown));
        let store = attr
            .store
            .map(|store| -> Store { Box::new(move |text: &str| store(&stored, text)) });
        (attr.name.to_owned(), Node::File(File { show, store }))
    };
    known.map(file).collect()
}

/// Finds the node at a path; `follow`: a link at its end is followed, too.
pub(crate) fn find(root: impl Fn() -> Node, path: &str, follow: bool) -> Result<Node, Refused> {
    let mut at: Vec<String> = Vec::new();
    let mut ahead: Vec<String> = parts(path).rev().map(str::to_owned).collect();
    let mut node = root();
    let mut links = 0;
    while let Some(name) = ahead.pop() {
        let Node::Dir(children) = node else {
            return Err(Errno::ENOTDIR.into());
        };
        if name == ".." {
            at.pop();
            ahead.extend(at.drain(..).rev());
            node = root();
            continue;
        }
        let found = children()?.into_iter().find(|(n, _)| *n == name);
        node = match found {
            None => return Err(missing(path)),
            Some((_, Node::Link(to))) if follow || !ahead.is_empty() => {
                links += 1;
                if links > MAX_LINKS {
                    return Err(Errno::ELOOP.into());
                }
                ahead.extend(parts(&to).rev().map(str::to_owned));
                ahead.extend(at.drain(..).rev());
                root()
            }
            Some((_, node)) => {
                at.push(name);
                node
            }
        };
    }
    Ok(node)
}

fn parts(path: &str) -> impl DoubleEndedIterator<Item = &str> {
    path.split('/').filter(|part| !part.is_empty() && *part != ".")
}

fn missing(path: &str) -> Refused {
    Refused::new(Errno::ENOENT, format!("there is no {path:?}"))
}
