//! Limits of what each user may have at a time.

use std::collections::HashMap;

/// Limits of something that users take and give back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) all: usize,
    /// Part of the limit that only root and the owner get.
    pub(crate) reserved: usize,
    /// Limit of each other user.
    pub(crate) each: usize,
}

/// The user of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct User {
    pub(crate) id: u32,
    /// Root or the owner.
    pub(crate) trusted: bool,
}

/// Why a user gets nothing more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Full {
    /// The user has all that it may have.
    User,
    /// All is taken.
    All,
}

/// Number of things taken, by user.
#[derive(Debug)]
pub(crate) struct Quota {
    limits: Limits,
    taken: HashMap<User, usize>,
}

impl Quota {
    pub(crate) fn new(limits: Limits) -> Self {
        let taken = HashMap::new();
        Self { limits, taken }
    }

    pub(crate) fn take(&mut self, user: User) -> Result<(), Full> {
        let count = |trusted: Option<bool>| -> usize {
            let counted = self
                .taken
                .iter()
                .filter(|(user, _)| trusted.is_none_or(|t| t == user.trusted));
            counted.map(|(_, n)| n).sum()
        };
        let own = self.taken.get(&user).copied().unwrap_or_default();
        let Limits { all, reserved, each } = self.limits;
        if !user.trusted && own >= each {
            return Err(Full::User);
        }
        if count(None) >= all || (!user.trusted && count(Some(false)) >= all - reserved) {
            return Err(Full::All);
        }
        self.taken.insert(user, own + 1);
        Ok(())
    }

    pub(crate) fn give_back(&mut self, user: User) {
        if let Some(own) = self.taken.get_mut(&user) {
            *own -= 1;
            if *own == 0 {
                self.taken.remove(&user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_leaves_something_for_others_and_all_for_root() {
        let mut quota = Quota::new(Limits {
            all: 10,
            reserved: 3,
            each: 4,
        });
        let user = |id| User { id, trusted: id == 0 };
        let mut takes = |id, times: usize| (0..times).try_for_each(|_| quota.take(user(id)));
        assert_eq!((takes(7, 4), takes(7, 1)), (Ok(()), Err(Full::User)));
        assert_eq!((takes(8, 3), takes(8, 1)), (Ok(()), Err(Full::All)));
        assert_eq!((takes(0, 3), takes(0, 1)), (Ok(()), Err(Full::All)));
        quota.give_back(user(7));
        assert_eq!((quota.take(user(8)), quota.take(user(7))), (Ok(()), Err(Full::All)));
        // A user who has nothing is forgotten.
        (0..4).for_each(|_| quota.give_back(user(8)));
        assert!(!quota.taken.contains_key(&user(8)));
        quota.give_back(user(8));
    }
}
