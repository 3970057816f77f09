//! The loops of a server or a mapping: a thread for each.

use core::{
    any::Any,
    fmt::{self, Display},
};
use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    thread::{Builder, JoinHandle},
};

use roce::reactor::Handle;

/// Loops that take commands `C`, have jobs with results `J`, and end with a `T`.
pub(crate) struct Loops<C, J, T> {
    handles: Vec<Handle<C, J>>,
    threads: Vec<JoinHandle<T>>,
}

impl<C, J, T> Default for Loops<C, J, T> {
    fn default() -> Self {
        Self {
            handles: Vec::new(),
            threads: Vec::new(),
        }
    }
}

impl<C, J, T: Send + 'static> Loops<C, J, T> {
    /// Starts the next loop, which has this handle, in a thread of its own.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub(crate) fn spawn(&mut self, handle: Handle<C, J>, run: impl FnOnce() -> T + Send + 'static) -> io::Result<()> {
        let name = match self.threads.len() {
            0 => "ferroce-io".to_owned(),
            index => format!("ferroce-io-{index}"),
        };
        self.threads.push(Builder::new().name(name).spawn(run)?);
        self.handles.push(handle);
        Ok(())
    }

    /// Their handles, in the order of their starts.
    pub(crate) fn handles(&self) -> impl Iterator<Item = &Handle<C, J>> {
        self.handles.iter()
    }

    /// Sends a command to each.
    pub(crate) fn command(&self, command: impl Fn() -> C) {
        self.handles.iter().for_each(|handle| handle.command(command()));
    }

    /// Whether all have ended.
    pub(crate) fn have_ended(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }

    /// Waits for their ends. Returns the results of those that did not panic; a second call returns none.
    pub(crate) fn join(&mut self) -> Vec<T> {
        self.threads.drain(..).filter_map(|thread| thread.join().ok()).collect()
    }
}

impl<C, J, T> fmt::Debug for Loops<C, J, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Loops").field(&self.threads).finish()
    }
}

/// Runs a loop. A panic is an error of it, so that those who wait for its end are notified. Nothing of the loop is used again.
pub(crate) fn catch_panic<T, E: Display>(run: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(ended) => ended.map_err(|e| e.to_string()),
        Err(panic) => Err(format!("the loop panicked: {}", message(&*panic))),
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("without a message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_with_its_message() {
        let well: Result<u8, &str> = Ok(1);
        assert_eq!(catch_panic(|| well), Ok(1));
        assert_eq!(catch_panic(|| Err::<(), _>("no")), Err("no".into()));
        let panicked = catch_panic(|| -> Result<(), &str> { panic!("chunk {}", 7) });
        assert_eq!(panicked, Err("the loop panicked: chunk 7".into()));
    }
}
