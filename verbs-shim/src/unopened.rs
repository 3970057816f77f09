//! A line at the end of a program that has listed the devices, opened none, and failed: as a rule it was given the name of another
//! device. Programs compare names themselves, so that no verb fails.

use std::{
    io::Write as _,
    ptr,
    sync::{
        Once,
        atomic::{AtomicBool, Ordering},
    },
};

use libc::{c_int, c_void};

use crate::{errno, log};

/// Whether this process or a parent has opened a device.
static OPENED: AtomicBool = AtomicBool::new(false);

unsafe extern "C" {
    /// Has a function called by `exit`, with the status and an argument (on_exit(3)).
    fn on_exit(function: unsafe extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// Notes that a device is being opened.
pub(crate) fn opened() {
    OPENED.store(true, Ordering::Relaxed);
}

/// Prepares the line, with the first list of devices, if failures are logged.
pub(crate) fn listed(names: impl FnOnce() -> Vec<String>) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if errno::is_logged() {
            let line: *mut String = Box::into_raw(Box::new(line(&names())));
            // SAFETY: the library, and so the function, is never unloaded (`-z nodelete`). The line is never freed.
            if unsafe { on_exit(at_exit, line.cast()) } != 0 {
                tracing::debug!("no memory for a function at exit");
            }
        }
    });
}

fn line(names: &[String]) -> String {
    let there_are = match names.is_empty() {
        true => return "there is no device: no interface is up and has an address (`ferroce doctor`)\n".to_owned(),
        false => names.join(", "),
    };
    format!(
        "no device was opened; the devices are {there_are}: give the program one of these names, or them the name that it wants \
         (`ferroce run --device-name NAME`)\n"
    )
}

/// Writes the line if the program has failed without a device.
///
/// # Safety
/// The argument is a text of [`listed`].
unsafe extern "C" fn at_exit(status: c_int, line: *mut c_void) {
    if status == 0 || OPENED.load(Ordering::Relaxed) {
        return;
    }
    // SAFETY: the caller's promise; nobody changes it.
    if let Some(line) = unsafe { ptr::NonNull::new(line.cast::<String>()).map(|line| line.as_ref()) } {
        // Not by `tracing`: the thread's variables, which it needs, are destroyed. What can't be written is lost.
        let _ = log::Stderr.write(line.as_bytes());
    }
}
