//! Listening sockets that a program is started with, as systemd does and libnbd for its tests: the variables `LISTEN_PID`,
//! `LISTEN_FDS` and `LISTEN_FDNAMES` (sd_listen_fds(3)).

use std::{
    ffi::OsString,
    io,
    os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd},
    process,
};

use parking_lot::Mutex;
use roce::environment;

use crate::listen::{self, Inherited};

/// The first of the descriptors.
const FIRST: RawFd = 3;
/// More than anybody has.
const MOST: RawFd = 1024;
/// The name of a descriptor that was given none.
const UNNAMED: &str = "unknown";

/// Sockets that the process was started with, once somebody has asked for them: a descriptor has one owner.
static SOCKETS: Mutex<Option<Vec<Inherited>>> = Mutex::new(None);

/// Why the sockets can't be had.
#[derive(Debug, thiserror::Error)]
pub enum ActivationError {
    /// A variable makes no sense.
    #[error("{variable}={value:?} makes no sense")]
    Variable {
        /// Its name.
        variable: &'static str,
        /// Its value.
        value: OsString,
    },
    /// A descriptor is no socket to listen at.
    #[error("descriptor {descriptor} ({name}) of LISTEN_FDS: {error}")]
    Descriptor {
        /// Its number.
        descriptor: RawFd,
        /// Name of the socket.
        name: String,
        /// Its error.
        error: io::Error,
    },
}

/// The sockets that this process was started with, the same at each call; none if the variables are not there, or are for another
/// process. They are closed when the process runs another program. The first call comes before the program opens descriptors of its own.
///
/// # Errors
/// When the variables, or what they announce, make no sense. That is said once; from then on there are none.
pub fn sockets() -> Result<Vec<Inherited>, ActivationError> {
    let mut sockets = SOCKETS.lock();
    if sockets.is_none() {
        // Whatever comes of it, nobody takes these descriptors once more.
        *sockets = Some(Vec::new());
        let names = announced(process::id(), |name| environment::var_os(name))?;
        let taken: Result<Vec<_>, _> = (FIRST..).zip(names).map(|(at, name)| take(at, name)).collect();
        *sockets = Some(taken?);
    }
    Ok(sockets.clone().unwrap_or_default())
}

/// The names of the descriptors that are announced to this process.
fn announced(pid: u32, get: impl Fn(&str) -> Option<OsString>) -> Result<Vec<String>, ActivationError> {
    let number = |variable| match get(variable) {
        None => Ok(None),
        Some(value) => match value.to_str().and_then(|text| text.parse::<i64>().ok()) {
            Some(number) => Ok(Some(number)),
            None => Err(ActivationError::Variable { variable, value }),
        },
    };
    let (Some(for_pid), Some(count)) = (number("LISTEN_PID")?, number("LISTEN_FDS")?) else {
        return Ok(Vec::new());
    };
    if for_pid != i64::from(pid) {
        return Ok(Vec::new());
    }
    let wrong = |variable, value| ActivationError::Variable { variable, value };
    let count = usize::try_from(count).ok().filter(|count| *count <= MOST as usize);
    let count = count.ok_or_else(|| wrong("LISTEN_FDS", get("LISTEN_FDS").unwrap_or_default()))?;
    let Some(names) = get("LISTEN_FDNAMES") else {
        return Ok(vec![UNNAMED.into(); count]);
    };
    let list: Vec<String> = names.to_string_lossy().split(':').map(str::to_owned).collect();
    match list.len() == count {
        true => Ok(list),
        false => Err(wrong("LISTEN_FDNAMES", names)),
    }
}

fn take(descriptor: RawFd, name: String) -> Result<Inherited, ActivationError> {
    let wrong = |name: String, error| ActivationError::Descriptor {
        descriptor,
        name,
        error,
    };
    // SAFETY: a plain call, which says so if there is no such descriptor.
    if unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) } != 0 {
        return Err(wrong(name, io::Error::last_os_error()));
    }
    // SAFETY: it is open, as was just seen.
    let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
    if let Err(error) = listen::check(borrowed) {
        return Err(wrong(name, error));
    }
    // SAFETY: it is open, a listening socket that this process was started with and that its variables say is for it; it is taken
    // once (`SOCKETS`), so nobody else here owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
    Inherited::new(name.clone(), socket).map_err(|error| wrong(name, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(variables: &[(&str, &str)]) -> Result<Vec<String>, String> {
        let get = |name: &str| {
            variables
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, value)| value.into())
        };
        announced(42, get).map_err(|e| e.to_string())
    }

    #[test]
    fn descriptors_are_for_the_process_that_is_named() {
        assert_eq!(names(&[]), Ok(vec![]));
        assert_eq!(names(&[("LISTEN_FDS", "2")]), Ok(vec![]), "for nobody");
        assert_eq!(names(&[("LISTEN_PID", "42")]), Ok(vec![]));
        assert_eq!(names(&[("LISTEN_PID", "41"), ("LISTEN_FDS", "2")]), Ok(vec![]));
        let two = [("LISTEN_PID", "42"), ("LISTEN_FDS", "2")];
        assert_eq!(names(&two), Ok(vec!["unknown".into(); 2]));
        let named = [&two[..], &[("LISTEN_FDNAMES", "nbd:")]].concat();
        assert_eq!(names(&named), Ok(vec!["nbd".into(), String::new()]));
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let fds = |n| [("LISTEN_PID", "42"), ("LISTEN_FDS", n)];
        for wrong in ["two", "-1", "", "99999"] {
            assert_eq!(names(&fds(wrong)), Err(format!("LISTEN_FDS={wrong:?} makes no sense")));
        }
        assert_eq!(
            names(&[("LISTEN_PID", "me"), ("LISTEN_FDS", "1")]),
            Err("LISTEN_PID=\"me\" makes no sense".into())
        );
        let few = [&fds("3")[..], &[("LISTEN_FDNAMES", "a:b")]].concat();
        assert_eq!(names(&few), Err("LISTEN_FDNAMES=\"a:b\" makes no sense".into()));
    }
}
