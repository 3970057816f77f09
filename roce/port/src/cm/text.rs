//! Texts of events, for logs and error messages.

use core::fmt;

use crate::cm::types::Event;

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request { remote, .. } => write!(f, "connect request of {remote}"),
            Self::SidrRequest { remote, .. } => write!(f, "request of {remote} for a datagram service"),
            Self::Resolved { status: 0, qpn, .. } => write!(f, "resolved to queue pair {qpn}"),
            Self::Resolved { status, .. } => write!(f, "not resolved: SIDR status {status}"),
            Self::Reply { .. } => f.write_str("accepted by the peer"),
            Self::Established { .. } => f.write_str("established"),
            Self::Failed { text, .. } => write!(f, "the queue pair could not be moved to RTS: {text}"),
            Self::Rejected { reason, .. } => write!(f, "rejected: {reason}"),
            Self::Unreachable { why, .. } => write!(f, "unreachable: {why}"),
            Self::Disconnected { timed_out: false, .. } => f.write_str("disconnected"),
            Self::Disconnected { timed_out: true, .. } => f.write_str("disconnected: the peer did not answer"),
            Self::TimewaitExit { .. } => f.write_str("timewait has ended"),
        }
    }
}

#[cfg(test)]
mod tests {
    use roce_verbs::provider::{NoAnswer, RejectReason};

    use super::*;
    use crate::cm::types::ConnId;

    #[test]
    fn the_reason_of_a_failure_is_told_in_words() {
        let conn = ConnId(0);
        let rejected = Event::Rejected {
            conn,
            reason: RejectReason::INVALID_SERVICE_ID,
            info: Vec::new(),
            private_data: vec![0; 148],
        };
        let unreachable = Event::Unreachable {
            conn,
            why: NoAnswer::PortUnreachable,
        };
        assert_eq!(
            rejected.to_string(),
            "rejected: nothing listens at the service ID (CM reject reason 8)"
        );
        assert!(unreachable.to_string().contains("nobody receives RoCE there"));
    }
}
