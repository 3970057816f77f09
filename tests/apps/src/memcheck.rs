//! Programs under valgrind's memcheck, which shall find no error of ours and nothing lost.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::Result;

pub(crate) const VALGRIND: &str = "valgrind";
/// Errors of libraries that are not ours, each with the reason.
const SUPPRESSIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/memcheck.supp");
/// How the names of its reports begin.
const REPORT: &str = "memcheck.";
/// What a report says at the end of a process without errors.
const CLEAN: &str = "ERROR SUMMARY: 0 errors";
const SUMMARY: &str = "ERROR SUMMARY: ";
/// Lines of a report that are shown.
const LINES: usize = 60;

/// Programs that send memory which they have never written to. What is done with undefined bytes is not asked there.
const SEND_UNDEFINED: [&str; 2] = ["ucmatose", "udaddy"];

/// A command under memcheck, but not what it starts, such as the broker. Reports go to files in the case's directory.
pub(crate) fn under(dir: &Path, words: &[String]) -> Vec<String> {
    let report = format!("--log-file={}/{REPORT}%p", dir.display());
    let suppressions = format!("--suppressions={SUPPRESSIONS}");
    let options = [
        VALGRIND,
        // Memory that is still reachable at the end is no leak; what is found only through inner pointers is threads'.
        "--leak-check=full",
        "--show-leak-kinds=definite",
        "--errors-for-leak-kinds=definite",
        "--num-callers=30",
        // Its scheduler lets a spinning thread have the processor for ever otherwise.
        "--fair-sched=try",
        &suppressions,
        &report,
    ];
    let undefined = words.first().is_some_and(|w| SEND_UNDEFINED.contains(&w.as_str()));
    let more = undefined.then_some("--undef-value-errors=no");
    options
        .into_iter()
        .chain(more)
        .map(str::to_owned)
        .chain(words.iter().cloned())
        .collect()
}

fn reports(dir: &Path) -> Vec<(PathBuf, String)> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let ours = entries.filter(|e| e.file_name().to_string_lossy().starts_with(REPORT));
    ours.filter_map(|e| Some((e.path(), fs::read_to_string(e.path()).ok()?)))
        .collect()
}

/// Errors that are no leaks. A program that fails leaks by itself.
const SERIOUS: [&str; 6] = [
    "Invalid read",
    "Invalid write",
    "Invalid free",
    "Mismatched free",
    "uninitialised",
    "overlap",
];
/// How a program, or we, say that something took too long: under valgrind it is twenty times slower, but its timeouts are
/// not.
const TOO_SLOW: [&str; 7] = [
    "retry counter exceeded",
    "CM_EVENT_UNREACHABLE",
    "CM_EVENT_REJECTED",
    "is not done after",
    "does not end",
    "does not listen",
    "imed out",
];
/// How often a program may try.
pub(crate) const TRIES: usize = 3;

/// Why to try again, if the last run was too slow and its reports say nothing about memory. Removes them then.
pub(crate) fn try_again(dir: &Path, done: &Result<()>) -> Option<&'static str> {
    let text = done.as_ref().err()?;
    let why = TOO_SLOW.into_iter().find(|words| text.contains(words))?;
    let reports = reports(dir);
    if reports.iter().any(|(_, text)| SERIOUS.iter().any(|s| text.contains(s))) {
        return None;
    }
    reports.iter().for_each(|(path, _)| drop(fs::remove_file(path)));
    Some(why)
}

/// What came of a case: its own outcome, and what the reports say.
pub(crate) fn judge(dir: &Path, done: Result<()>) -> Result<()> {
    let reports = reports(dir);
    let found = reports
        .iter()
        .find(|(_, text)| text.contains(SUMMARY) && !text.contains(CLEAN));
    if let Some((path, text)) = found {
        let text: Vec<&str> = text.lines().take(LINES).collect();
        let program = done.err().unwrap_or_default();
        return Err(format!("errors in {}\n{program}\n{}", path.display(), text.join("\n")));
    }
    done?;
    match reports.iter().any(|(_, text)| text.contains(CLEAN)) {
        true => Ok(()),
        false => Err("valgrind has written no report".into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::try_again;

    #[test]
    fn only_what_was_too_slow_is_tried_again() {
        let dir = tempfile::tempdir().expect("tempdir");
        let report = dir.path().join("memcheck.1");
        let slow = Err("the client is not done after 600 s".to_owned());
        let again = |text: &str, done: &crate::Result<()>| {
            fs::write(&report, text).expect("a report");
            try_again(dir.path(), done)
        };
        assert_eq!(again("leaks", &slow), Some("is not done after"));
        assert!(!report.exists(), "the next run has reports of its own");
        assert_eq!(again("Invalid read of size 8", &slow), None);
        assert!(report.exists());
        assert_eq!(again("leaks", &Err("data mismatch".to_owned())), None);
        assert_eq!(again("leaks", &Ok(())), None);
    }
}
