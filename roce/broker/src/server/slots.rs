//! Who has which place.
//!
//! While few share the numbers a process gets a whole slot, later ones one generation of a slot. When a process ends, its place
//! rests: peers may still send to its queue pairs. A slot of which only some generations rest may have another owner at once, of
//! another generation. Places of processes that said goodbye may be used again early when nothing else is free.

use std::{collections::BTreeSet, ops::Range};

use serde::{Deserialize, Serialize};

use crate::proto::{ALL_GENERATIONS, GENERATIONS, Place, SLOTS};

/// How long a place rests, milliseconds: longer than packets live and than peers retry (8 times 4.3 s) in general.
pub(super) const REST: u64 = 60_000;

/// Slots that are free and without a generation at rest, of which none is given away whole: so there is room for many processes,
/// also right after some were killed.
const SPARE: usize = 96;

/// A process, told apart from later ones with the same id.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Process {
    /// Process id; 0 if it is in a namespace that can't be seen.
    pub(super) pid: u32,
    /// When it was started (`/proc/PID/stat`, field 22).
    pub(super) start: u64,
}

/// Who a place is given to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Tenant {
    pub(super) process: Process,
    /// Its user.
    pub(super) uid: u32,
    /// What only this member knows. Processes that can't be seen are recognised by nothing else.
    pub(super) token: u64,
}

/// Who has a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
enum Owner {
    Nobody,
    /// A member that is connected.
    Member(u8, Tenant),
    /// A member of a former broker that has not come back yet.
    Absent(u8, Tenant),
}

/// A place that rests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Rest {
    until: u64,
    clean: bool,
    uid: u32,
    token: u64,
}

impl Rest {
    /// A clock that was set back is no reason to rest for longer.
    fn is_over(&self, now: u64) -> bool {
        self.until <= now || self.until > now + REST
    }
}

/// See the module. Times are milliseconds of a clock that goes on while the machine sleeps.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Slots {
    owners: Vec<Owner>,
    rests: Vec<Option<Rest>>,
    next: u32,
    /// The process id namespace that process ids are of (its inode).
    namespace: u64,
}

impl Slots {
    /// All free; `start` says where the search begins.
    pub(super) fn new(start: u32, namespace: u64) -> Self {
        Self {
            owners: vec![Owner::Nobody; SLOTS],
            rests: vec![None; SLOTS * GENERATIONS],
            next: start,
            namespace,
        }
    }

    /// Whether a state that was read has the right shape.
    pub(super) fn is_sound(&self) -> bool {
        self.owners.len() == SLOTS && self.rests.len() == SLOTS * GENERATIONS
    }

    /// The generations of a place, if any: an entry each.
    fn rests_of(&mut self, place: Place) -> &mut [Option<Rest>] {
        let Range { start, end } = place.generations();
        let slot = usize::from(place.slot) * GENERATIONS;
        self.rests.get_mut(slot + start..slot + end).unwrap_or_default()
    }

    /// A place for a new member, a whole slot if its user has less than `whole` of them; `None` when all are taken or rest.
    pub(super) fn allocate(&mut self, now: u64, tenant: Tenant, whole: usize) -> Option<Place> {
        let place = self
            .find_whole(now, tenant.uid, whole)
            .or_else(|| self.find_rested(now))
            .or_else(|| self.find_clean())?;
        self.give(place, tenant);
        Some(place)
    }

    /// The rests of each slot but the broker's, with who has it.
    fn by_slot(&self) -> impl Iterator<Item = (u8, &Owner, &[Option<Rest>])> {
        let all = self.owners.iter().zip(self.rests.chunks(GENERATIONS));
        let all = all.enumerate().skip(1);
        all.map(|(slot, (owner, rests))| (slot as u8, owner, rests))
    }

    fn find_whole(&mut self, now: u64, uid: u32, most: usize) -> Option<Place> {
        let rested = |r: &Option<Rest>| r.is_none_or(|r| r.is_over(now));
        let (mut has, mut free) = (0, vec![]);
        for (slot, owner, rests) in self.by_slot() {
            has += usize::from(match owner {
                Owner::Member(generation, t) | Owner::Absent(generation, t) => {
                    *generation == ALL_GENERATIONS && t.uid == uid
                }
                Owner::Nobody => rests.iter().all(|r| r.is_some_and(|r| r.uid == uid && !r.is_over(now))),
            });
            if *owner == Owner::Nobody && rests.iter().all(rested) {
                free.push(slot);
            }
        }
        if has >= most || free.len() <= SPARE {
            return None;
        }
        // The next one in turn, as below.
        let slots = (SLOTS - 1) as u32;
        let start = self.next % slots;
        let slot = *free.iter().find(|slot| u32::from(**slot) > start).or(free.first())?;
        self.next = self.next - start + u32::from(slot);
        Some(Place::whole(slot))
    }

    fn find_rested(&mut self, now: u64) -> Option<Place> {
        let all = ((SLOTS - 1) * GENERATIONS) as u32;
        for _ in 0..all {
            // Slot by slot, so that a slot's generations take long to come round.
            let n = self.next % all;
            self.next = (n + 1) % all;
            let slots = (SLOTS - 1) as u32;
            let place = Place {
                slot: (n % slots) as u8 + 1,
                generation: (n / slots) as u8,
            };
            let free = self.owners.get(usize::from(place.slot)) == Some(&Owner::Nobody);
            let rested = |r: &Option<Rest>| r.is_none_or(|r| r.is_over(now));
            if free && self.rests_of(place).iter().all(rested) {
                return Some(place);
            }
        }
        None
    }

    /// The place that has rested longest among those that a process left cleanly.
    fn find_clean(&self) -> Option<Place> {
        let all = self.rests.iter().enumerate().filter_map(|(i, r)| Some((i, (*r)?)));
        all.filter(|(i, r)| r.clean && self.owners.get(i / GENERATIONS) == Some(&Owner::Nobody))
            .min_by_key(|(_, r)| r.until)
            .map(|(i, _)| Place {
                slot: (i / GENERATIONS) as u8,
                generation: (i % GENERATIONS) as u8,
            })
    }

    fn give(&mut self, place: Place, tenant: Tenant) {
        self.rests_of(place).fill(None);
        if let Some(owner) = self.owners.get_mut(usize::from(place.slot)) {
            *owner = Owner::Member(place.generation, tenant);
        }
    }

    /// A member of a former broker wants its place again. False: it is another's. `unknown`: it may have one that nobody is
    /// known to have, which a broker says that has lost its state and has members of its own user only.
    pub(super) fn reclaim(&mut self, place: Place, tenant: Tenant, unknown: bool) -> bool {
        if !place.is_valid() {
            return false;
        }
        // It was taken for dead, or nobody is known to have had it.
        let mut rests = self.rests_of(place).iter();
        let rests_for = rests.all(|r| r.map_or(unknown, |r| (r.uid, r.token) == (tenant.uid, tenant.token)));
        let right = match self.owners.get(usize::from(place.slot)) {
            Some(Owner::Absent(generation, t)) => {
                *generation == place.generation && (t.uid, t.token) == (tenant.uid, tenant.token)
            }
            Some(Owner::Nobody) => rests_for,
            _ => false,
        };
        if right {
            self.give(place, tenant);
        }
        right
    }

    /// A member is gone.
    pub(super) fn release(&mut self, now: u64, place: Place, clean: bool) {
        let Some(owner) = self.owners.get_mut(usize::from(place.slot)) else {
            return;
        };
        let (Owner::Member(_, Tenant { uid, token, .. }) | Owner::Absent(_, Tenant { uid, token, .. })) = *owner else {
            return;
        };
        *owner = Owner::Nobody;
        let until = now + REST;
        self.rests_of(place).fill(Some(Rest {
            until,
            clean,
            uid,
            token,
        }));
    }

    /// How many places a user has, and how many rest that its processes left without a goodbye.
    pub(super) fn of_user(&self, now: u64, uid: u32) -> (usize, usize) {
        let has = |o: &&Owner| matches!(o, Owner::Member(_, t) | Owner::Absent(_, t) if t.uid == uid);
        let rests = |r: &&Rest| r.uid == uid && !r.clean && !r.is_over(now);
        let resting = self.by_slot().map(|(_, _, rests_of_slot)| {
            // Those of a whole slot are one.
            let tokens = rests_of_slot.iter().flatten().filter(rests).map(|r| r.token);
            tokens.collect::<BTreeSet<_>>().len()
        });
        let resting = resting.sum();
        (self.owners.iter().filter(has).count(), resting)
    }

    /// What a former broker left behind: its members may come back, unless they are dead. Process ids of another
    /// namespace than ours say nothing.
    pub(super) fn inherit(&mut self, now: u64, namespace: u64, is_alive: impl Fn(Process) -> bool) {
        let foreign = std::mem::replace(&mut self.namespace, namespace) != namespace;
        for owner in &mut self.owners {
            if let Owner::Member(generation, mut tenant) | Owner::Absent(generation, mut tenant) = *owner {
                if foreign {
                    tenant.process.pid = 0;
                }
                *owner = Owner::Absent(generation, tenant);
            }
        }
        self.bury(now, is_alive);
    }

    /// Lets the places of absent members that are dead rest. Returns those places.
    pub(super) fn bury(&mut self, now: u64, is_alive: impl Fn(Process) -> bool) -> Vec<Place> {
        let absent = self.absent();
        let dead: Vec<Place> = absent
            .into_iter()
            .filter(|(_, p)| !is_alive(*p))
            .map(|(place, _)| place)
            .collect();
        for place in &dead {
            self.release(now, *place, false);
        }
        dead
    }

    /// Members of a former broker that have not come back.
    pub(super) fn absent(&self) -> Vec<(Place, Process)> {
        let all = self.owners.iter().enumerate();
        all.filter_map(|(slot, owner)| match owner {
            Owner::Absent(generation, tenant) => {
                let place = Place {
                    slot: slot as u8,
                    generation: *generation,
                };
                Some((place, tenant.process))
            }
            _ => None,
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn process(pid: u32) -> Process {
        Process { pid, start: 7 }
    }

    fn tenant(pid: u32) -> Tenant {
        Tenant {
            process: process(pid),
            uid: 1000,
            token: u64::from(pid) << 40,
        }
    }

    /// Its name changes with every connection, as that of a process which the broker can't see.
    #[test]
    fn a_member_is_known_by_its_token_whatever_its_process_is_called() {
        let mut slots = Slots::new(0, 1);
        let unseen = |start, token| Tenant {
            process: Process { pid: 0, start },
            uid: 1000,
            token,
        };
        let a = slots.allocate(0, unseen(1, 70), 0).unwrap();
        slots.inherit(1, 1, |_| true);
        assert!(!slots.reclaim(a, unseen(2, 71), true));
        assert!(slots.reclaim(a, unseen(2, 70), true));
        slots.release(2, a, false);
        assert!(!slots.reclaim(a, unseen(3, 71), true), "it rests");
        assert!(slots.reclaim(a, unseen(3, 70), true), "it was only taken for dead");
    }

    #[test]
    fn process_ids_of_another_namespace_say_nothing() {
        let mut slots = Slots::new(0, 1);
        let a = slots.allocate(0, tenant(5), 0).unwrap();
        slots.inherit(1, 2, |p| p.pid == 0);
        assert_eq!(slots.absent(), [(a, Process { pid: 0, start: 7 })]);
        assert!(slots.reclaim(a, tenant(5), true));
    }

    #[test]
    fn a_place_is_not_had_by_claim_or_by_another_users_process() {
        let mut slots = Slots::new(0, 1);
        let place = Place { slot: 9, generation: 3 };
        assert!(
            !slots.reclaim(place, tenant(1), false),
            "nobody is known to have had it"
        );
        let a = slots.allocate(0, tenant(1), 0).unwrap();
        slots.inherit(1, 1, |_| true);
        let thief = Tenant { uid: 1001, ..tenant(1) };
        assert!(!slots.reclaim(a, thief, true));
        slots.release(2, a, false);
        assert!(!slots.reclaim(a, thief, true));
        assert!(slots.reclaim(a, tenant(1), false));
    }

    #[test]
    fn places_are_counted_by_user() {
        let mut slots = Slots::new(0, 1);
        let other = |pid| Tenant { uid: 7, ..tenant(pid) };
        let all: Vec<Place> = (0..6).map(|pid| slots.allocate(0, tenant(pid), 0).unwrap()).collect();
        slots.allocate(0, other(9), 0).unwrap();
        slots.inherit(0, 1, |_| true);
        assert_eq!(
            (slots.of_user(0, 1000), slots.of_user(0, 7), slots.of_user(0, 8)),
            ((6, 0), (1, 0), (0, 0))
        );
        slots.release(5, all[0], false);
        slots.release(5, all[1], true);
        assert_eq!(
            (slots.of_user(5, 1000), slots.of_user(5 + REST, 1000)),
            ((4, 1), (4, 0))
        );
    }

    #[test]
    fn every_slot_can_be_had_once() {
        let mut slots = Slots::new(12345, 1);
        let places: Vec<Place> = (0..127).map(|i| slots.allocate(0, tenant(i), 0).unwrap()).collect();
        let distinct: HashSet<u8> = places.iter().map(|p| p.slot).collect();
        assert_eq!(distinct.len(), 127);
        assert!(places.iter().all(|p| p.is_valid()));
        assert_eq!(slots.allocate(0, tenant(999), 0), None);
    }

    #[test]
    fn while_few_share_the_numbers_they_have_whole_slots() {
        const MOST: usize = 127 - SPARE;
        let mut slots = Slots::new(77, 1);
        let mut used = HashSet::new();
        let places: Vec<Place> = (0..127)
            .map(|pid| {
                let place = slots.allocate(0, tenant(pid), usize::MAX).unwrap();
                assert!(place.is_valid() && used.insert(place.slot), "{place:?}");
                place
            })
            .collect();
        assert!(places[..MOST].iter().all(|p| p.is_whole()));
        assert!(places[MOST..].iter().all(|p| !p.is_whole()));
        assert_eq!(
            slots.allocate(0, tenant(999), usize::MAX),
            None,
            "all slots have an owner"
        );
        // Numbers of a whole slot rest, all of them.
        let whole = places[3];
        slots.release(10, whole, false);
        assert_eq!(slots.allocate(11, tenant(999), usize::MAX), None);
        let next = slots.allocate(10 + REST, tenant(999), usize::MAX).unwrap();
        assert_eq!((next.slot, next.is_whole()), (whole.slot, false));
    }

    #[test]
    fn one_user_of_several_has_so_many_whole_slots_and_killed_processes_count() {
        let mut slots = Slots::new(0, 1);
        let a = slots.allocate(0, tenant(1), 2).unwrap();
        let b = slots.allocate(0, tenant(2), 2).unwrap();
        assert!(a.is_whole() && b.is_whole());
        slots.release(1, a, true);
        assert!(!slots.allocate(2, tenant(3), 2).unwrap().is_whole());
        let other = Tenant { uid: 7, ..tenant(4) };
        assert!(slots.allocate(2, other, 2).unwrap().is_whole());
        assert!(slots.allocate(1 + REST, tenant(5), 2).unwrap().is_whole());
    }

    #[test]
    fn a_whole_slot_is_one_place_of_its_user_and_is_got_again_whole() {
        let mut slots = Slots::new(0, 1);
        let a = slots.allocate(0, tenant(1), 9).unwrap();
        slots.inherit(1, 1, |_| true);
        assert!(!slots.reclaim(Place { generation: 0, ..a }, tenant(1), false));
        assert!(slots.reclaim(a, tenant(1), false));
        slots.release(2, a, false);
        assert_eq!(slots.of_user(3, 1000), (0, 1));
        assert!(!slots.reclaim(a, tenant(2), true), "it rests");
        assert!(slots.reclaim(a, tenant(1), false), "it was only taken for dead");
        // Somebody else has had a part of it since.
        slots.release(3, a, true);
        slots.rests_of(Place { generation: 5, ..a }).fill(None);
        slots.give(Place { generation: 5, ..a }, tenant(2));
        slots.release(4, Place { generation: 5, ..a }, true);
        assert!(!slots.reclaim(a, tenant(1), true));
    }

    #[test]
    fn numbers_of_a_killed_process_rest() {
        let mut slots = Slots::new(0, 1);
        let mut used = HashSet::new();
        let mut now = 0;
        for pid in 0..(127 * GENERATIONS as u32) {
            let place = slots.allocate(now, tenant(pid), 0).unwrap();
            assert!(used.insert(place), "{place:?} came back at {now}");
            slots.release(now, place, false);
            now += 1;
        }
        assert_eq!(slots.allocate(now, tenant(1), 0), None, "all rest");
        assert!(slots.allocate(REST, tenant(1), 0).is_some(), "the first has rested");
    }

    #[test]
    fn a_place_left_cleanly_comes_back_early_when_nothing_else_is_free() {
        let mut slots = Slots::new(0, 1);
        let first = slots.allocate(0, tenant(0), 0).unwrap();
        slots.release(5, first, true);
        for pid in 1..(127 * GENERATIONS as u32) {
            let place = slots.allocate(10, tenant(pid), 0).unwrap();
            assert_ne!(place, first);
            slots.release(10, place, false);
        }
        assert_eq!(slots.allocate(11, tenant(1), 0), Some(first));
        assert_eq!(slots.allocate(11, tenant(1), 0), None);
    }

    #[test]
    fn members_of_a_former_broker_get_their_places_again_and_nobody_else_does() {
        let mut slots = Slots::new(0, 1);
        let a = slots.allocate(0, tenant(1), 0).unwrap();
        let b = slots.allocate(0, tenant(2), 0).unwrap();
        let text = serde_json::to_string(&slots).unwrap();
        let mut slots: Slots = serde_json::from_str(&text).unwrap();
        assert!(slots.is_sound());
        slots.inherit(100, 1, |p| p.pid == 1);
        assert_eq!(slots.absent(), [(a, process(1))]);
        assert!(!slots.reclaim(a, tenant(9), true));
        assert!(slots.reclaim(a, tenant(1), true));
        assert!(!slots.reclaim(a, tenant(1), true), "it has it");
        for pid in 10..136 {
            let place = slots.allocate(200, tenant(pid), 0).unwrap();
            assert!(place != a && place != b, "one is in use, the other rests");
        }
        assert!(!slots.reclaim(Place { slot: 0, generation: 0 }, tenant(1), true));
        assert!(!slots.reclaim(
            Place {
                slot: 200,
                generation: 0
            },
            tenant(1),
            true
        ));
    }
}
