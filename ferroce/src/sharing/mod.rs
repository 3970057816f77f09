//! Many processes on one address: the broker, and what it knows.

pub(crate) mod broker;
pub(crate) mod link;
pub(crate) mod stat;

use std::path::PathBuf;

use roce::{JoinConfig, broker::Statistics};

use crate::output::Failure;

/// Returns the directory of the broker's socket: as the environment says.
pub(crate) fn directory() -> PathBuf {
    JoinConfig::from_env().map_or_else(roce::broker::runtime_dir, |how| how.dir)
}

/// Returns the statistics of a running broker; `None` when none runs.
pub(crate) fn statistics() -> Result<Option<Statistics>, Failure> {
    roce::broker::statistics(&directory()).map_err(Failure::of)
}
