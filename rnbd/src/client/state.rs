//! The states of a mapped device, with every legal transition.

use rtrs::table::Table;

/// A device of a [`Client`](super::Client). No other has had the number; the default is none's.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct DeviceKey(pub(super) u64);

/// States of a device (`enum rnbd_clt_dev_state`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum DeviceState {
    /// Has not been opened yet.
    Init,
    /// Takes operations.
    Mapped,
    /// Was mapped, and its session is lost, or the server has not opened it again since.
    MappedDisconnected,
    /// Takes no more operations, and is closed when those under way have ended.
    Unmapped,
}

/// Event of a device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DeviceEvent {
    /// The session is up, and the protocol version agreed on.
    LinkUp,
    /// The server has opened it.
    Opened,
    /// It could not be opened.
    Refused,
    /// The session has no path any more, or the server has closed its devices: it has none open for it.
    LinkDown,
    /// The session is over for good.
    SessionGone,
    /// The user wants it opened again.
    RemapAsked,
    /// The user unmaps it.
    UnmapAsked,
    /// The server has it open, and nothing of it is under way.
    Idle,
    /// The server does not have it open (any more), and nothing of it is under way.
    Closed,
}

/// Action of a device's state machine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DeviceAction {
    /// Ask the server to open it.
    SendOpen,
    /// Ask the server to close it.
    SendClose,
    /// From here on it has the number and the geometry that the server says.
    TakeOpen,
    /// Tell the user that it is mapped.
    TellMapped,
    /// Tell the user its state.
    TellState,
    /// Tell the user that it was not opened, and why.
    TellFailed,
    /// The same, if the user waits for it to be opened again.
    TellLost,
    /// Tell the user that it is unmapped.
    TellUnmapped,
    /// Operations begin to wait for it, if they are to.
    Wait,
    /// Operations that wait for it go on.
    Resume,
    /// Operations that wait for it fail.
    GiveUp,
    /// Open it again some time later, if operations wait for it.
    TryLater,
    /// It goes.
    Forget,
}

/// The life of a device, from [`DeviceState::Init`].
pub const DEVICE: Table<DeviceState, DeviceEvent, DeviceAction> = {
    use DeviceAction as A;
    use DeviceEvent as E;
    use DeviceState as S;
    &[
        (S::Init, E::LinkUp, S::Init, &[A::SendOpen]),
        (S::Init, E::Opened, S::Mapped, &[A::TakeOpen, A::TellMapped]),
        (S::Init, E::Refused, S::Unmapped, &[A::TellFailed, A::Forget]),
        (S::Init, E::LinkDown, S::Unmapped, &[A::TellFailed, A::Forget]),
        (S::Init, E::SessionGone, S::Unmapped, &[A::TellFailed, A::Forget]),
        (S::Init, E::UnmapAsked, S::Unmapped, &[]),
        (S::Mapped, E::LinkDown, S::MappedDisconnected, &[A::Wait, A::TellState]),
        (S::Mapped, E::SessionGone, S::Unmapped, &[A::GiveUp]),
        (S::Mapped, E::UnmapAsked, S::Unmapped, &[A::GiveUp]),
        (S::MappedDisconnected, E::LinkUp, S::MappedDisconnected, &[A::SendOpen]),
        (
            S::MappedDisconnected,
            E::RemapAsked,
            S::MappedDisconnected,
            &[A::SendOpen],
        ),
        (
            S::MappedDisconnected,
            E::Opened,
            S::Mapped,
            &[A::TakeOpen, A::TellState, A::Resume],
        ),
        (
            S::MappedDisconnected,
            E::Refused,
            S::MappedDisconnected,
            &[A::TellFailed, A::TryLater],
        ),
        (
            S::MappedDisconnected,
            E::LinkDown,
            S::MappedDisconnected,
            &[A::TellLost],
        ),
        (S::MappedDisconnected, E::SessionGone, S::Unmapped, &[A::GiveUp]),
        (S::MappedDisconnected, E::UnmapAsked, S::Unmapped, &[A::GiveUp]),
        // An open was under way when the user unmapped it.
        (S::Unmapped, E::Opened, S::Unmapped, &[A::TakeOpen]),
        (S::Unmapped, E::Refused, S::Unmapped, &[]),
        (S::Unmapped, E::LinkDown, S::Unmapped, &[]),
        (S::Unmapped, E::SessionGone, S::Unmapped, &[]),
        (S::Unmapped, E::Idle, S::Unmapped, &[A::SendClose]),
        (S::Unmapped, E::Closed, S::Unmapped, &[A::TellUnmapped, A::Forget]),
    ]
};

#[cfg(test)]
mod tests {
    use rtrs::table::step;

    use super::*;

    const STATES: [DeviceState; 4] = [
        DeviceState::Init,
        DeviceState::Mapped,
        DeviceState::MappedDisconnected,
        DeviceState::Unmapped,
    ];

    #[test]
    fn one_row_for_a_state_and_an_event_and_a_way_to_each_state() {
        for (i, (state, event, ..)) in DEVICE.iter().enumerate() {
            let twice = DEVICE[..i].iter().any(|(s, e, ..)| s == state && e == event);
            assert!(!twice, "{event:?} in {state:?} stands twice");
        }
        for state in STATES {
            let reached = DEVICE.iter().any(|(from, _, to, _)| *to == state && *from != state);
            assert!(reached || state == DeviceState::Init, "{state:?} is never reached");
        }
    }

    #[test]
    fn the_transitions_of_a_device_are_the_kernels() {
        use DeviceState::{Init, Mapped, MappedDisconnected, Unmapped};
        let all = DEVICE.iter().map(|(from, _, to, _)| (*from, *to));
        let mut edges: Vec<_> = all.filter(|(from, to)| from != to).collect();
        edges.sort_unstable();
        edges.dedup();
        // `set_dev_states_to_disconnected`, `process_msg_open_rsp`, `rnbd_clt_unmap_device`, Linux 6.1. A device whose first open is
        // under way when the session is lost has failed: it is not opened again.
        let mut kernel = vec![
            (Init, Mapped),
            (Mapped, MappedDisconnected),
            (MappedDisconnected, Mapped),
            (Init, Unmapped),
            (Mapped, Unmapped),
            (MappedDisconnected, Unmapped),
        ];
        kernel.sort_unstable();
        assert_eq!(edges, kernel);
    }

    /// Sessions are lost and end whatever their devices do, and a user may unmap what is not unmapped at any time.
    #[test]
    fn no_state_is_surprised_by_its_session_or_its_user() {
        for state in STATES {
            for event in [DeviceEvent::LinkDown, DeviceEvent::SessionGone] {
                assert!(step(DEVICE, state, event).is_some(), "{event:?} in {state:?}");
            }
            let unmap = step(DEVICE, state, DeviceEvent::UnmapAsked);
            assert_eq!(unmap.is_none(), state == DeviceState::Unmapped);
        }
    }

    /// Else they would wait for ever.
    #[test]
    fn nothing_waits_for_a_device_that_is_unmapped() {
        let waits = [DeviceState::Mapped, DeviceState::MappedDisconnected];
        for (from, event, to, actions) in DEVICE {
            let ends = waits.contains(from) && *to == DeviceState::Unmapped;
            assert_eq!(actions.contains(&DeviceAction::GiveUp), ends, "{event:?} in {from:?}");
            let returns = *from == DeviceState::MappedDisconnected && *to == DeviceState::Mapped;
            assert_eq!(
                actions.contains(&DeviceAction::Resume),
                returns,
                "{event:?} in {from:?}"
            );
        }
    }

    #[test]
    fn a_device_goes_once_with_one_word_to_its_user() {
        let told = [DeviceAction::TellFailed, DeviceAction::TellUnmapped];
        for (from, event, to, actions) in DEVICE {
            if actions.contains(&DeviceAction::Forget) {
                assert_eq!(*to, DeviceState::Unmapped);
                let words = actions.iter().filter(|a| told.contains(a)).count();
                assert_eq!(words, 1, "{event:?} in {from:?}");
            }
            assert!(*from != DeviceState::Unmapped || *to == DeviceState::Unmapped);
        }
    }
}
