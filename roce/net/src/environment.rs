//! Environment variables, as far as this process may trust them.
//!
//! A program with rights that its user hasn't (set-uid, set-gid, file capabilities) must not do what that user's environment
//! says: start a broker of his, join one, write a capture where he wants. The C library leaves `LD_PRELOAD` aside there; we
//! do the same with every variable. All of ferroce's libraries ask here, and nowhere else.

use std::{
    ffi::{OsStr, OsString},
    path::PathBuf,
};

use crate::sys;

/// Search path for programs, when the environment is not to be believed.
const SAFE_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// Whether the process has rights that whoever started it may not have (`AT_SECURE`, see getauxval(3)).
pub fn is_secure() -> bool {
    sys::is_secure()
}

/// A variable's value; `None` if it is not set, empty, or not to be believed.
pub fn var_os(name: impl AsRef<OsStr>) -> Option<OsString> {
    believed(is_secure(), std::env::var_os(name))
}

/// A variable's value as text; also `None` if it is no UTF-8.
pub fn var(name: impl AsRef<OsStr>) -> Option<String> {
    var_os(name).and_then(|v| v.into_string().ok())
}

/// The folders of the search path.
pub fn search_path() -> Vec<PathBuf> {
    let path = match is_secure() {
        true => Some(SAFE_PATH.into()),
        false => var_os("PATH"),
    };
    path.map(|p| std::env::split_paths(&p).collect()).unwrap_or_default()
}

fn believed(secure: bool, value: Option<OsString>) -> Option<OsString> {
    value.filter(|v| !secure && !v.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_privileged_process_believes_nothing() {
        let set = || Some(OsString::from("x"));
        assert_eq!(believed(false, set()), set());
        assert_eq!(believed(true, set()), None);
        assert_eq!(believed(false, Some(OsString::new())), None);
        assert!(!is_secure(), "a test is run with its user's rights");
    }
}
