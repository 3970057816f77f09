//! Counters of a server.

use crate::{PathError, admission::Refusal};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Events since the server was started.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct ServerCounters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl ServerCounters {
            /// All of them, with their names.
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }
    };
}

counters! {
    /// Sessions announced to the user.
    sessions_opened,
    /// Connections accepted.
    connections_accepted,
    /// Connection requests refused, for whatever reason.
    connections_refused,
    /// Refused requests from addresses that no rule allows.
    refused_address,
    /// Sessions, or further paths of sessions, whose name is not for their address.
    refused_name,
    /// As many sessions as allowed.
    refused_sessions,
    /// As many sessions of one client as allowed.
    refused_sessions_of_client,
    /// As many paths as allowed.
    refused_paths,
    /// More connections than a path may have, or as many of all paths as allowed.
    refused_connections,
    /// Clients that have to wait because their sessions ended with access errors.
    refused_slowed_down,
    /// Clients that had not answered and were evicted for new ones.
    half_open_evicted,
    /// Requests for further connections that waited until the first was known to stand.
    requests_held,
    /// Requests that waited for one that had come in the same chunk by another path.
    requests_parked,
    /// Paths whose handshake waited for requests of the session's lost paths to be answered.
    paths_held,
    /// Paths that their client connected again before it was noticed that it had lost them.
    paths_given_up,
    /// Paths closed because memory, queue pairs or other resources ran out.
    no_resources,
    /// Paths closed because the client broke the protocol.
    protocol_errors,
    /// Paths closed because the client used a key that it had no right to.
    access_errors,
    /// Paths closed because the client gave no sign of life.
    heartbeats_lost,
    /// Paths closed because the handshake was not finished in time.
    handshakes_lost,
    /// Paths closed because a transfer failed.
    transfer_errors,
}

impl ServerCounters {
    /// Counts a connection request that is refused.
    pub(crate) fn denied(&mut self, refusal: Option<Refusal>) {
        self.connections_refused += 1;
        if let Some(refusal) = refusal {
            self.refused(refusal);
        }
    }

    fn refused(&mut self, refusal: Refusal) {
        let counter = match refusal {
            Refusal::Address => &mut self.refused_address,
            Refusal::Name => &mut self.refused_name,
            Refusal::Sessions => &mut self.refused_sessions,
            Refusal::SessionsOfClient => &mut self.refused_sessions_of_client,
            Refusal::Paths | Refusal::PathsOfSession => &mut self.refused_paths,
            Refusal::Connections | Refusal::ConnectionsOfPath => &mut self.refused_connections,
            Refusal::SlowedDown => &mut self.refused_slowed_down,
            // What the client should know better.
            Refusal::NoIoConnection
            | Refusal::NoSession
            | Refusal::NoPath
            | Refusal::Unexpected
            | Refusal::SamePath
            | Refusal::NameTaken
            | Refusal::Held => return,
        };
        *counter += 1;
    }

    /// Counts the end of a path.
    pub(crate) fn ended(&mut self, why: &PathError) {
        let counter = match why {
            PathError::Protocol(_) | PathError::Unexpected(_) => &mut self.protocol_errors,
            PathError::HeartbeatLost(_) => &mut self.heartbeats_lost,
            PathError::HandshakeTimeout(_) => &mut self.handshakes_lost,
            PathError::AccessError => &mut self.access_errors,
            PathError::Refused(refusal) => return self.refused(*refusal),
            PathError::Completion { .. } | PathError::Flushed | PathError::Post(_) => &mut self.transfer_errors,
            _ => return,
        };
        *counter += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_refusal_is_counted_among_all_and_perhaps_by_itself() {
        let mut counters = ServerCounters::default();
        counters.denied(Some(Refusal::PathsOfSession));
        counters.denied(Some(Refusal::SamePath));
        counters.denied(None);
        counters.ended(&PathError::Refused(Refusal::Name));
        let expected = ServerCounters {
            connections_refused: 3,
            refused_paths: 1,
            refused_name: 1,
            ..ServerCounters::default()
        };
        assert_eq!(counters, expected);
        assert_eq!(counters.named().len(), 21);
        assert!(counters.named().contains(&("connections_refused", 3)));
    }

    #[test]
    fn a_path_that_is_closed_in_good_order_is_no_error() {
        let mut counters = ServerCounters::default();
        for why in [
            PathError::Closed,
            PathError::PeerDisconnected,
            PathError::Cm("gone".into()),
        ] {
            counters.ended(&why);
        }
        assert_eq!(counters, ServerCounters::default());
        counters.ended(&PathError::Flushed);
        counters.ended(&PathError::Unexpected("nonsense"));
        assert_eq!((counters.transfer_errors, counters.protocol_errors), (1, 1));
    }
}
