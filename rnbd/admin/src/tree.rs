//! Directories, files and links, made as they are looked at.

use std::sync::Arc;

use rnbd::Errno;
use rnbd_host::control::Refused;

use crate::Names;

/// Links that a path may lead through, as in the kernel (`MAXSYMLINKS`).
const MAX_LINKS: usize = 40;

/// Kind of node that a name stands for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A directory.
    Dir,
    /// A file with a text.
    File,
    /// A link to somewhere else in the tree, relative to its own directory.
    Link(String),
}

/// Status of a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stat {
    /// Kind.
    pub kind: Kind,
    /// Permissions, as of `chmod`: 0644 of what can be written, 0444 of what can't, 0755 of directories, 0777 of links.
    pub mode: u32,
}

/// A name in a directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The name.
    pub name: String,
    /// Status.
    pub stat: Stat,
}

impl From<(String, Node)> for Entry {
    fn from((name, node): (String, Node)) -> Self {
        Self {
            name,
            stat: node.stat(),
        }
    }
}

/// Entries of a directory.
pub(crate) type Entries = Vec<(String, Node)>;
/// Finds out what a directory has in it.
pub(crate) type Children = Box<dyn FnOnce() -> Result<Entries, Refused>>;

/// Gives a file's text.
type Show = Box<dyn FnOnce() -> Result<String, Refused>>;
/// Does what was written to a file.
type Store = Box<dyn FnOnce(&str) -> Result<(), Refused>>;
/// The same of a kind of files.
type StoreOf<T> = fn(&T, &str) -> Result<(), Refused>;

/// A file.
pub(crate) struct File {
    pub(crate) show: Show,
    pub(crate) store: Option<Store>,
}

/// A place in the tree.
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

/// A file of something.
pub(crate) struct Attr<T: 'static> {
    name: &'static str,
    names: Names,
    show: fn(&T) -> Result<String, Refused>,
    store: Option<StoreOf<T>>,
}

impl<T> Attr<T> {
    /// Only to be read.
    pub(crate) const fn ro(name: &'static str, show: fn(&T) -> Result<String, Refused>) -> Self {
        Self {
            name,
            names: Names::Mainline,
            show,
            store: None,
        }
    }

    /// To be read and written.
    pub(crate) const fn rw(name: &'static str, show: fn(&T) -> Result<String, Refused>, store: StoreOf<T>) -> Self {
        Self {
            name,
            names: Names::Mainline,
            show,
            store: Some(store),
        }
    }

    /// Only the documents know it.
    pub(crate) const fn of_documents(self) -> Self {
        Self {
            names: Names::All,
            ..self
        }
    }
}

/// The files of something.
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

/// Finds the node at a path; a link at its end is followed if `follow` says so.
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
