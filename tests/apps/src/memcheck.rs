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
/// How often a program may try: under valgrind it is twenty times slower, but its timeouts are not.
pub(crate) const TRIES: usize = 3;

/// Whether the last run says nothing about memory: the program failed for another reason. Removes its reports then.
pub(crate) fn may_try_again(dir: &Path, done: &Result<()>) -> bool {
    let reports = reports(dir);
    if done.is_ok() || reports.iter().any(|(_, text)| SERIOUS.iter().any(|s| text.contains(s))) {
        return false;
    }
    reports.iter().for_each(|(path, _)| drop(fs::remove_file(path)));
    true
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
