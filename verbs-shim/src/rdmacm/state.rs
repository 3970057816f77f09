//! States of an id (`enum rdma_cm_state`) and what may be done in each.

/// State of an id. Routes are resolved within the call here, so the kernel's state of waiting for one does not exist.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum State {
    /// Just created.
    #[default]
    Idle,
    /// Has a local address or at least a port.
    AddrBound,
    /// Waits for the address resolution of the next hop towards the peer.
    AddrQuery,
    /// Knows the peer's address and the way there.
    AddrResolved,
    /// Has a path.
    RouteResolved,
    /// Connects, is connected, or is an unanswered request.
    Connect,
    /// Was connected.
    Disconnect,
    /// Listens.
    Listen,
}

/// Operation that changes the state, or depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Op {
    Bind,
    ResolveAddr,
    /// Address resolution has succeeded.
    AddrResolved,
    /// Address resolution has failed.
    AddrFailed,
    ResolveRoute,
    Connect,
    Listen,
    Accept,
    Join,
    /// The connection ended, by either side.
    Disconnected,
    /// Timewait has expired.
    TimewaitExit,
    /// Any other event of a connection.
    Progress,
}

/// Legal transitions: the operation, the states it may be done in, and the state after it.
const LEGAL: [(Op, &[State], State); 13] = [
    (Op::Bind, &[State::Idle], State::AddrBound),
    (Op::ResolveAddr, &[State::Idle, State::AddrBound], State::AddrQuery),
    (Op::AddrResolved, &[State::AddrQuery], State::AddrResolved),
    (Op::AddrFailed, &[State::AddrQuery], State::AddrBound),
    (Op::ResolveRoute, &[State::AddrResolved], State::RouteResolved),
    (Op::Connect, &[State::RouteResolved], State::Connect),
    (Op::Listen, &[State::Idle, State::AddrBound], State::Listen),
    (Op::Accept, &[State::Connect], State::Connect),
    (Op::Join, &[State::AddrBound], State::AddrBound),
    (Op::Join, &[State::AddrResolved], State::AddrResolved),
    (Op::Disconnected, &[State::Connect], State::Disconnect),
    (Op::TimewaitExit, &[State::Disconnect], State::Disconnect),
    (Op::Progress, &[State::Connect], State::Connect),
];

impl State {
    /// All states.
    #[cfg(test)]
    pub(crate) const ALL: [Self; 8] = [
        Self::Idle,
        Self::AddrBound,
        Self::AddrQuery,
        Self::AddrResolved,
        Self::RouteResolved,
        Self::Connect,
        Self::Disconnect,
        Self::Listen,
    ];

    /// The state after `op`; `None`: not allowed in this one.
    pub(crate) fn after(self, op: Op) -> Option<Self> {
        LEGAL
            .iter()
            .find(|(o, from, _)| *o == op && from.contains(&self))
            .map(|(_, _, to)| *to)
    }
}

#[cfg(test)]
mod tests {
    use super::{Op, State};

    /// The active side's, the passive side's and the listener's way; everything else is refused.
    #[test]
    fn only_the_ways_of_cma_are_legal() {
        let route = [
            Op::Bind,
            Op::ResolveAddr,
            Op::AddrFailed,
            Op::ResolveAddr,
            Op::AddrResolved,
            Op::ResolveRoute,
            Op::Connect,
            Op::Disconnected,
        ];
        let end = route.into_iter().try_fold(State::Idle, State::after);
        assert_eq!(end, Some(State::Disconnect));
        assert_eq!(State::Idle.after(Op::Listen), Some(State::Listen));
        for state in State::ALL {
            assert_eq!(state.after(Op::Bind).is_some(), state == State::Idle, "{state:?}");
            assert_eq!(
                state.after(Op::Connect).is_some(),
                state == State::RouteResolved,
                "{state:?}"
            );
            assert_eq!(state.after(Op::Accept).is_some(), state == State::Connect, "{state:?}");
            assert_eq!(
                state.after(Op::TimewaitExit).is_some(),
                state == State::Disconnect,
                "{state:?}"
            );
        }
        assert_eq!(State::Listen.after(Op::Connect), None);
        assert_eq!(State::Connect.after(Op::Listen), None);
    }
}
