//! Errors of lower layers as errors of verbs.

use roce_verbs::mem::MemError;
use roce_verbs::provider::VerbsError;

pub(crate) fn mem_error(e: MemError) -> VerbsError {
    match e {
        MemError::Limit(what) => VerbsError::Limit(what),
        MemError::Busy(what) => VerbsError::Busy(what),
        other => VerbsError::Invalid(other.to_string()),
    }
}

pub(crate) fn io_error(context: &str) -> impl Fn(std::io::Error) -> VerbsError {
    move |source| VerbsError::Io {
        context: context.into(),
        source,
    }
}
