//! Sockets and buffers of processes.

use std::collections::BTreeMap;

use crate::config::Limits;

/// Share of a process, or of all.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    sockets: usize,
    buffers: usize,
    connections: usize,
}

/// Shares of all processes.
#[derive(Debug, Default)]
pub(crate) struct Quotas {
    processes: BTreeMap<u32, Use>,
    all: Use,
}

impl Quotas {
    fn change(&mut self, process: u32, f: impl Fn(&mut Use)) {
        let one = self.processes.entry(process).or_default();
        f(one);
        if one.sockets + one.connections == 0 {
            self.processes.remove(&process);
        }
        f(&mut self.all);
    }

    fn of(&self, process: u32) -> Use {
        self.processes.get(&process).copied().unwrap_or_default()
    }

    /// Adds a control connection, if the process may have one more.
    pub(crate) fn add_connection(&mut self, process: u32, limits: &Limits) -> bool {
        let fits = self.of(process).connections < limits.process_connections;
        if fits {
            self.change(process, |share| share.connections += 1);
        }
        fits
    }

    /// Removes one.
    pub(crate) fn remove_connection(&mut self, process: u32) {
        self.change(process, |share| share.connections -= 1);
    }

    /// Adds a socket with so many bytes of buffers, if the process may have it.
    pub(crate) fn add_socket(&mut self, process: u32, buffers: usize, limits: &Limits) -> bool {
        let one = self.of(process);
        let fits = one.sockets < limits.process_sockets
            && self.all.sockets < limits.sockets
            && one.buffers + buffers <= limits.process_buffers
            && self.all.buffers + buffers <= limits.buffers;
        if fits {
            self.change(process, |share| {
                share.sockets += 1;
                share.buffers += buffers;
            });
        }
        fits
    }

    /// Removes one.
    pub(crate) fn remove_socket(&mut self, process: u32, buffers: usize) {
        self.change(process, |share| {
            share.buffers -= buffers;
            share.sockets -= 1;
        });
    }

    /// A socket's buffers change, if they may.
    pub(crate) fn resize(&mut self, process: u32, (old, new): (usize, usize), limits: &Limits) -> bool {
        let one = self.of(process);
        let fits = new <= old
            || (one.buffers - old).saturating_add(new) <= limits.process_buffers
                && (self.all.buffers - old).saturating_add(new) <= limits.buffers;
        if fits {
            self.change(process, |share| share.buffers = share.buffers - old + new);
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_its_share_and_all_have_theirs() {
        let limits = Limits {
            process_sockets: 2,
            sockets: 3,
            process_buffers: 100,
            buffers: 150,
            process_connections: 1,
            ..Limits::default()
        };
        let mut quotas = Quotas::default();
        assert!(quotas.add_connection(7, &limits) && !quotas.add_connection(7, &limits));
        assert!(quotas.add_socket(7, 60, &limits));
        assert!(!quotas.add_socket(7, 60, &limits), "bytes of the process");
        assert!(quotas.add_socket(7, 40, &limits));
        assert!(!quotas.add_socket(7, 0, &limits), "sockets of the process");
        assert!(!quotas.add_socket(8, 60, &limits), "bytes of all");
        assert!(quotas.add_socket(8, 10, &limits));
        assert!(!quotas.add_socket(9, 0, &limits), "sockets of all");
        assert!(!quotas.resize(8, (10, 60), &limits) && !quotas.resize(8, (10, usize::MAX), &limits));
        assert!(quotas.resize(8, (10, 50), &limits) && quotas.resize(7, (60, 1), &limits));
        quotas.remove_socket(7, 1);
        quotas.remove_socket(7, 40);
        quotas.remove_socket(8, 50);
        quotas.remove_connection(7);
        assert!(quotas.processes.is_empty() && quotas.all.sockets == 0 && quotas.all.buffers == 0);
    }
}
