//! Choice of the path of a request.

use core::time::Duration;

use crate::client::{path::Path, policy::Policy};

/// The choice of a share.
#[derive(Debug)]
pub(super) struct Picker {
    /// Path whose turn it is.
    next: usize,
    /// Path that wins among those with equally many requests in flight. Each share begins with another, as each counts only its own.
    first: usize,
}

impl Picker {
    /// Choice of the share with this number.
    pub(super) fn of_share(share: u16) -> Self {
        Self {
            next: 0,
            first: share.into(),
        }
    }

    /// A path that is up and has this permit's chunk. `loads` are the requests in flight of each.
    pub(super) fn pick(&mut self, policy: Policy, paths: &[Path], loads: &[u32], permit: u16) -> Option<usize> {
        let fits = |index: &usize| paths[*index].is_up() && usize::from(permit) < paths[*index].chunks.len();
        if paths.len() == 1 {
            return Some(0).filter(fits);
        }
        let all = 0..paths.len();
        match policy {
            Policy::RoundRobin => {
                let next = self.next.min(paths.len());
                let found = (next..paths.len()).chain(0..next).find(fits)?;
                self.next = found + 1;
                Some(found)
            }
            Policy::MinInflight => {
                let load = |index: &usize| loads.get(*index).copied().unwrap_or(0);
                let first = self.first % paths.len().max(1);
                (first..paths.len()).chain(0..first).filter(fits).min_by_key(load)
            }
            Policy::MinLatency => {
                let latency = |index: &usize| paths[*index].questions.latency.unwrap_or(Duration::MAX);
                all.filter(fits).min_by_key(latency)
            }
        }
    }
}
