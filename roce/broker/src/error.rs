//! Errors of members, of the start of a broker, and of brokers.

use std::{io, path::PathBuf};

use crate::proto::Refusal;

/// Message of a helper that found another one alive.
pub(crate) const RUNS_ALREADY: &str = "another one runs";

/// Reason why a process is no member, or why there is no broker.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The broker's directory can't be used.
    #[error("the broker's directory {}: {text}", dir.display())]
    Directory {
        /// The directory.
        dir: PathBuf,
        /// The fault, and how to mend it.
        text: String,
    },
    /// The broker is another user's.
    #[error("the broker at {} is run by user {uid}, whom user {own} does not trust", socket.display())]
    WrongUser {
        /// Its socket.
        socket: PathBuf,
        /// Its user.
        uid: u32,
        /// Our user.
        own: u32,
    },
    /// No broker runs, and there is no program to start.
    #[error("no broker runs, and the program `ferroce` that would be one is not found: set FERROCE_BROKER to its path")]
    NoProgram,
    /// The broker, or another helper, did not start.
    #[error("`{command}` did not start: {text}")]
    Failed {
        /// The program and its subcommand.
        command: String,
        /// Its message.
        text: String,
    },
    /// Another one has the directory.
    #[error("{RUNS_ALREADY} in {}", .0.display())]
    Runs(PathBuf),
    /// The broker refuses.
    #[error("{text}")]
    Refused {
        /// Reason for programs.
        why: Refusal,
        /// Reason for people.
        text: String,
    },
    /// The broker does not answer.
    #[error("the broker does not answer")]
    Timeout,
    /// The broker sent an answer to another question, or a malformed one.
    #[error("the broker sent an unexpected answer")]
    Protocol,
    /// The connection belongs to the process that this one was forked from.
    #[error("joined by the parent process, not by this one")]
    Forked,
    /// A system call failed.
    #[error("{context}: {source}")]
    Io {
        /// Operation that failed.
        context: String,
        /// Error of the system.
        source: io::Error,
    },
}

/// Adds the operation that failed to an error of the system.
pub(crate) fn context(context: impl Into<String>) -> impl Fn(io::Error) -> Error {
    let context = context.into();
    move |source| Error::Io {
        context: context.clone(),
        source,
    }
}
