//! Failures in words, and their remedies.

use lnet_host::{Error, Failure, Rejected, Why};
use roce_verbs::provider::{NoAnswer, RejectReason};

/// Failure of a ping, for users.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Explained {
    /// Its name in JSON.
    pub(super) cause: &'static str,
    /// Next step for the user.
    pub(super) remedy: &'static str,
}

const fn explained(cause: &'static str, remedy: &'static str) -> Explained {
    Explained { cause, remedy }
}

/// Explains why a ping has failed.
pub(super) fn explain(error: &Error) -> Explained {
    let Error::Failed(failure) = error else {
        return explained("local", "look at the log of this program (-v)");
    };
    match failure {
        Failure::Unreachable(NoAnswer::Timeout) => explained(
            "no_answer",
            "the host is down, a firewall drops UDP port 4791 there or here, or its RDMA device has another address: `ping` it, and look at \
             `rdma link` there",
        ),
        Failure::Unreachable(NoAnswer::PortUnreachable) => explained(
            "no_roce",
            "the host is up and has no RoCEv2 device at this address: look at `rdma link` there",
        ),
        Failure::Unreachable(NoAnswer::Prohibited) => explained(
            "prohibited",
            "a firewall has to let UDP port 4791 pass, in both directions",
        ),
        Failure::Rejected(rejected) => explain_reject(rejected),
        Failure::Timeout => explained(
            "timeout",
            "it accepts the connection, or asks to try again, and does not answer: look at its kernel log, and whether LNet is stopping there",
        ),
        Failure::Disconnected | Failure::Restarted => {
            explained("disconnected", "it has ended the connection: its kernel log says why")
        }
        Failure::Answer(_) | Failure::Message(_) | Failure::Credits(_) | Failure::Peer(_) | Failure::TooLong => {
            explained(
                "protocol",
                "what it sends is not LNet as this side knows it: a capture (`ferroce pcap`) has the message",
            )
        }
        Failure::Completion(_) => explained(
            "connection_lost",
            "packets get lost on the way: compare the MTUs of all switches and hosts, and look at the counters of drops",
        ),
        Failure::Status(_) => explained(
            "peer_error",
            "it knows the request and can't answer it: look at its kernel log",
        ),
        Failure::Full | Failure::Stopping | Failure::Local(_) => {
            explained("local", "look at the log of this program (-v)")
        }
    }
}

fn explain_reject(rejected: &Rejected) -> Explained {
    match rejected {
        Rejected::Cm(RejectReason::INVALID_SERVICE_ID) => explained(
            "no_listener",
            "RoCE works there, and nobody listens on port 987: load ko2iblnd and add the network (`lnetctl net add --net o2ib --if …`); \
             `lnetctl net show` lists networks",
        ),
        Rejected::Cm(_) => explained(
            "rejected",
            "the connection manager there refuses: look at its kernel log",
        ),
        Rejected::Version1 => explained("version", "it has to be updated to Lustre 2.0 or later"),
        Rejected::Node { incarnation: 0, .. } => explained(
            "wrong_nid",
            "it has o2iblnd, and not this NID: compare address and network number (`o2ib`, `o2ib1`, …) with `lctl list_nids` there",
        ),
        Rejected::Node { why, .. } => explain_why(*why),
    }
}

fn explain_why(why: Why) -> Explained {
    match why {
        Why::NO_RESOURCES => explained(
            "no_resources",
            "it has no memory, queue pair or connection left: look at its kernel log, and at how many peers it has",
        ),
        Why::MSG_QUEUE_SIZE => explained(
            "queue_depth",
            "set --peer-credits to the queue depth that it takes (`peer_credits` of its ko2iblnd)",
        ),
        Why::RDMA_FRAGS => explained("fragments", "set --fragments to the number that it takes"),
        Why::EARLY => explained("early", "its network is not up yet: try again in a few seconds"),
        _ => explained(
            "refused",
            "it knows the NID and refuses the request: its kernel log says why",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cause(failure: impl Into<Failure>) -> &'static str {
        explain(&Error::Failed(failure.into())).cause
    }

    fn node(why: Why, incarnation: u64) -> Rejected {
        Rejected::Node {
            why,
            incarnation,
            params: Default::default(),
        }
    }

    #[test]
    fn each_reason_has_its_own_remedy() {
        let all = [
            cause(Failure::Unreachable(NoAnswer::Timeout)),
            cause(Failure::Unreachable(NoAnswer::PortUnreachable)),
            cause(Failure::Unreachable(NoAnswer::Prohibited)),
            cause(Rejected::Cm(RejectReason::INVALID_SERVICE_ID)),
            cause(node(Why::FATAL, 0)),
            cause(node(Why::FATAL, 7)),
            cause(node(Why::NO_RESOURCES, 7)),
            cause(node(Why::MSG_QUEUE_SIZE, 7)),
            cause(node(Why::RDMA_FRAGS, 7)),
            cause(node(Why::EARLY, 7)),
            cause(Rejected::Version1),
            cause(Failure::Timeout),
        ];
        let expected = [
            "no_answer",
            "no_roce",
            "prohibited",
            "no_listener",
            "wrong_nid",
            "refused",
            "no_resources",
            "queue_depth",
            "fragments",
            "early",
            "version",
            "timeout",
        ];
        assert_eq!(all, expected);
    }
}
