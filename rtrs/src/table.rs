//! State machines as tables: which event is legal in which state, where it leads, and what is to be done.

/// A transition: state, event, next state, and the actions in their order.
pub type Row<S, E, A> = (S, E, S, &'static [A]);

/// All legal transitions of a machine.
pub type Table<S, E, A> = &'static [Row<S, E, A>];

/// The next state and what is to be done; `None`: the event is not legal in this state.
pub fn step<S: Copy + PartialEq, E: Copy + PartialEq, A>(
    table: Table<S, E, A>,
    state: S,
    event: E,
) -> Option<(S, &'static [A])> {
    let row = table.iter().find(|(from, on, ..)| *from == state && *on == event)?;
    Some((row.2, row.3))
}

/// Helpers that tests of tables share.
#[cfg(test)]
pub(crate) mod check {
    use core::fmt::Debug;

    use super::Table;

    /// The transitions as pairs of states, each once, without those that stay.
    pub(crate) fn edges<S: Copy + Ord, E, A>(table: Table<S, E, A>) -> Vec<(S, S)> {
        let mut edges: Vec<_> = table.iter().map(|(from, _, to, _)| (*from, *to)).collect();
        edges.retain(|(from, to)| from != to);
        edges.sort_unstable();
        edges.dedup();
        edges
    }

    /// One row for a state and an event at most, and a way from the first state to each other one.
    pub(crate) fn is_sound<S, E, A>(table: Table<S, E, A>, first: S, all: &[S])
    where
        S: Copy + PartialEq + Debug,
        E: Copy + PartialEq + Debug,
    {
        for (i, (state, event, ..)) in table.iter().enumerate() {
            let twice = table[..i].iter().any(|(s, e, ..)| s == state && e == event);
            assert!(!twice, "{event:?} in {state:?} stands twice");
        }
        let mut reached = vec![first];
        while let Some((.., next, _)) = table
            .iter()
            .find(|(from, _, to, _)| reached.contains(from) && !reached.contains(to))
        {
            reached.push(*next);
        }
        for state in all {
            assert!(reached.contains(state), "{state:?} is never reached");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::step;

    #[test]
    fn what_stands_in_no_row_is_refused() {
        const TABLE: super::Table<u8, char, &str> = &[(1, 'a', 2, &["go"]), (2, 'a', 2, &[])];
        assert_eq!(step(TABLE, 1, 'a'), Some((2, &["go"][..])));
        assert_eq!(step(TABLE, 2, 'a'), Some((2, &[][..])));
        assert_eq!(step(TABLE, 1, 'b'), None);
        assert_eq!(step(TABLE, 3, 'a'), None);
    }
}
