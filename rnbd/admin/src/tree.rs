//! Directories, files and links, created on access.

use std::sync::Arc;

use rnbd::Errno;
use rnbd_host::control::{Kind, Refused, Stat};

use crate::{host::Names, text::one};

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
/// Reads the file of a `T`.
type ShowOf<T> = fn(&T) -> Result<String, Refused>;
/// Executes a write to the file of a `T`.
type StoreOf<T> = fn(&T, &str) -> Result<(), Refused>;
/// Executes the order that a `1` is.
type RunOf<T> = fn(&T) -> Result<(), Refused>;

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
    /// `None`: its usage.
    show: Option<ShowOf<T>>,
    write: Write<T>,
}

enum Write<T> {
    Refused,
    Text(StoreOf<T>),
    /// Only a `1` can be written.
    Order(RunOf<T>),
}

impl<T> Attr<T> {
    /// A read-only attribute.
    pub(crate) const fn ro(name: &'static str, show: ShowOf<T>) -> Self {
        Self::new(name, Some(show), Write::Refused)
    }

    /// A writable attribute.
    pub(crate) const fn rw(name: &'static str, show: ShowOf<T>, store: StoreOf<T>) -> Self {
        Self::new(name, Some(show), Write::Text(store))
    }

    /// An attribute that executes an order when a `1` is written, and shows its usage.
    pub(crate) const fn order(name: &'static str, run: RunOf<T>) -> Self {
        Self::new(name, None, Write::Order(run))
    }

    /// The same, but it shows something else.
    pub(crate) const fn order_with(name: &'static str, show: ShowOf<T>, run: RunOf<T>) -> Self {
        Self::new(name, Some(show), Write::Order(run))
    }

    const fn new(name: &'static str, show: Option<ShowOf<T>>, write: Write<T>) -> Self {
        Self {
            name,
            names: Names::Mainline,
            show,
            write,
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
        let show = Box::new(move || match attr.show {
            Some(show) => show(&shown),
            None => Ok(format!("Usage: echo 1 > {}\n", attr.name)),
        });
        let store: Option<Store> = match attr.write {
            Write::Refused => None,
            Write::Text(store) => Some(Box::new(move |text| store(&stored, text))),
            Write::Order(run) => Some(Box::new(move |text| one(text).and_then(|()| run(&stored)))),
        };
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
