//! A task of the daemon: a server, a mapping, an RDS node or an LNet node, as arguments of its command.

use std::fmt;

use clap::{Args, Command, FromArgMatches, parser::ValueSource};

use crate::{lnet, map::MapArgs, output::Failure, rds::node::NodeArgs, serve::ServeArgs};

/// Kind of a task: its command.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Kind {
    Serve,
    Map,
    Rds,
    Lnet,
}

impl Kind {
    pub(super) const ALL: [Self; 4] = [Self::Serve, Self::Map, Self::Rds, Self::Lnet];

    /// Subcommands of `ferroce` that are the command.
    pub(crate) const fn subcommands(&self) -> &'static [&'static str] {
        match self {
            Self::Serve => &["serve"],
            Self::Map => &["map"],
            Self::Rds => &["rds", "node"],
            Self::Lnet => &["lnet", "serve"],
        }
    }

    /// Name of the table.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Serve => "serve",
            Self::Map => "map",
            Self::Rds => "rds",
            Self::Lnet => "lnet",
        }
    }

    /// Finds a kind by its name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    pub(super) fn parse(&self, command: Command, words: &[String]) -> Result<Job, clap::Error> {
        let matches = command.try_get_matches_from(words)?;
        Ok(match self {
            Self::Serve => Job::Serve(Box::new(ServeArgs::from_arg_matches(&matches)?)),
            Self::Map => Job::Map(Box::new(MapArgs::from_arg_matches(&matches)?)),
            Self::Rds => Job::Rds(Box::new(NodeArgs::from_arg_matches(&matches)?)),
            Self::Lnet => Job::Lnet(Box::new(lnet::serve::ServeArgs::from_arg_matches(&matches)?)),
        })
    }

    pub(super) fn command(&self) -> Command {
        let command = Command::new(self.name()).no_binary_name(true);
        match self {
            Self::Serve => ServeArgs::augment_args(command),
            Self::Map => MapArgs::augment_args(command),
            Self::Rds => NodeArgs::augment_args(command),
            // Its place on the command line is a key of a table.
            Self::Lnet => lnet::serve::ServeArgs::augment_args(command).mut_arg("nid", |nid| nid.long("nid")),
        }
    }

    /// Names of the options in the arguments.
    pub(super) fn given(&self, words: &[String]) -> Result<Vec<String>, Failure> {
        let command = self.command();
        let matches = command.clone().try_get_matches_from(words);
        let matches = matches.map_err(|e| failure(&e))?;
        let named = command.get_arguments().filter(|arg| {
            let id = arg.get_id().as_str();
            matches.try_contains_id(id).is_ok() && matches.value_source(id) == Some(ValueSource::CommandLine)
        });
        Ok(named.map(|arg| arg.get_long().unwrap_or("").to_owned()).collect())
    }
}

/// Name of a task: its kind and its name in the file.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct TaskName {
    pub(crate) kind: Kind,
    pub(crate) name: String,
}

impl fmt::Display for TaskName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.kind.name(), self.name)
    }
}

/// A task: arguments of its command, each in one word. Tasks with equal arguments are the same.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Task {
    pub(crate) words: Vec<String>,
}

impl Task {
    /// Parses the arguments.
    ///
    /// # Errors
    /// When they are not the command's arguments.
    pub(crate) fn job(&self, kind: &Kind) -> Result<Job, Failure> {
        let job = kind.parse(kind.command(), &self.words);
        job.map_err(|e| failure(&e))
    }

    /// The arguments without those of these options.
    pub(crate) fn without(&self, options: &[&str]) -> Vec<&str> {
        let is = |word: &str| options.iter().any(|option| word.starts_with(&format!("--{option}=")));
        self.words.iter().map(String::as_str).filter(|word| !is(word)).collect()
    }
}

/// Parsed arguments of a task.
pub(crate) enum Job {
    Serve(Box<ServeArgs>),
    Map(Box<MapArgs>),
    Rds(Box<NodeArgs>),
    Lnet(Box<lnet::serve::ServeArgs>),
}

/// Converts an error of the arguments to a failure.
fn failure(e: &clap::Error) -> Failure {
    Failure::usage(described(e))
}

/// Describes an error of the arguments.
pub(super) fn described(e: &clap::Error) -> String {
    let text = e.to_string();
    let mut parts = text.split("\n\n");
    let message = parts.next().unwrap_or(&text);
    let message = message.strip_prefix("error: ").unwrap_or(message);
    let tip = parts.find(|part| part.starts_with("  tip: "));
    match tip {
        Some(tip) => format!("{message}\n{tip}"),
        None => message.to_owned(),
    }
}
