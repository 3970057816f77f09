//! Choice of the path of a request.

use core::time::Duration;

use crate::client::{path::Path, policy::Policy};

/// The choice of a session.
#[derive(Debug, Default)]
pub(super) struct Picker {
    /// Path whose turn it is.
    next: usize,
}

impl Picker {
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
                all.filter(fits).min_by_key(load)
            }
            Policy::MinLatency => {
                let latency = |index: &usize| paths[*index].latency.unwrap_or(Duration::MAX);
                all.filter(fits).min_by_key(latency)
            }
        }
    }
}
