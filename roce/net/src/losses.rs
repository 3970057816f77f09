//! Packets that the system refuses to send: they count as lost, as a network may lose them.

use std::io;

use roce_port::Train;

use crate::datapath::DatapathCounters;

/// Reports each kind of send error once in the log.
#[derive(Debug, Default)]
pub(crate) struct Losses {
    /// Kinds of send errors that were already reported.
    warned: u32,
}

impl Losses {
    /// Counts a train, or a packet of it, as lost.
    pub(crate) fn count(&mut self, counters: &mut DatapathCounters, train: &Train<'_>, error: &io::Error) {
        let code = error.raw_os_error().unwrap_or(0);
        let (counter, hint) = match code {
            libc::EMSGSIZE => (
                &mut counters.tx_too_long,
                "the path MTU is larger than the interface's MTU less 96 bytes",
            ),
            libc::ENOBUFS | libc::ENOMEM | libc::EAGAIN => {
                (&mut counters.tx_no_buffers, "the system's buffers are exhausted")
            }
            libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ENETDOWN | libc::EADDRNOTAVAIL | libc::EHOSTDOWN => (
                &mut counters.tx_unreachable,
                "check routes and that the interface is up",
            ),
            libc::EPERM | libc::EACCES => (
                &mut counters.tx_forbidden,
                "a firewall rule forbids it: UDP port 4791 must be open",
            ),
            _ => (&mut counters.tx_errors, "the packets count as lost"),
        };
        *counter += 1;
        let bit = 1u32 << (code.unsigned_abs() % 32);
        if self.warned & bit == 0 {
            self.warned |= bit;
            tracing::warn!(
                "sending to {} from {} failed: {error}; {hint}",
                train.remote,
                train.local
            );
        }
    }
}
