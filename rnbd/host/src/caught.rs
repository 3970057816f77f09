//! The end of a loop, also by a panic.

use core::{any::Any, fmt::Display};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a loop. A panic is an error of it, so that whoever waits for the end hears of it. Nothing of the loop is used again.
pub(crate) fn caught<T, E: Display>(run: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
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
        assert_eq!(caught(|| well), Ok(1));
        assert_eq!(caught(|| Err::<(), _>("no")), Err("no".into()));
        let panicked = caught(|| -> Result<(), &str> { panic!("chunk {}", 7) });
        assert_eq!(panicked, Err("the loop panicked: chunk 7".into()));
    }
}
