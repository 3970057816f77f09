//! Owners of places.
//!
//! A process gets a whole slot, or one generation of a slot where its user may not have more whole ones or too much rests. When it ends,
//! the generations that it has used rest: peers may still send to its queue pairs. Of a whole slot that is one, unless the process had very
//! many queue pairs. A slot of which some generations rest may have another owner at once, who uses others. Those of processes that said
//! goodbye may be used again early when nothing else is free.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::proto::{ALL_GENERATIONS, GENERATIONS, Parts, Place, SLOTS};

/// Quarantine of a place, milliseconds: longer than packets live and than peers retry (8 times 4.3 s) in general.
pub(super) const REST: u64 = 60_000;

/// Generations that the owner of a whole slot can use at least: as many queue pairs as a device can have.
const ENOUGH: usize = GENERATIONS / 2;

/// A process, told apart from later ones with the same id.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Process {
    /// Process id; 0 if it is in a namespace that can't be seen.
    pub(super) pid: u32,
    /// Start time (`/proc/PID/stat`, field 22).
    pub(super) start: u64,
}

/// Process that a place is given to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Tenant {
    pub(super) process: Process,
    /// Its user.
    pub(super) uid: u32,
    /// Secret of this member. A process that can't be seen is recognised by nothing else.
    pub(super) token: u64,
}

/// Owner of a slot, or of one generation of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Owner {
    generation: u8,
    tenant: Tenant,
    parts: Parts,
    /// A member of a former broker that has not come back yet.
    absent: bool,
}

/// A generation that rests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Rest {
    until: u64,
    clean: bool,
    uid: u32,
    token: u64,
}

impl Rest {
    /// Returns whether it has ended. A clock that was set back does not extend it.
    fn is_over(&self, now: u64) -> bool {
        self.until <= now || self.until > now + REST
    }

    /// Returns the end of a generation's rest, 0 if it does not rest; `None` if it may not be used. `early`: one that was left cleanly
    /// may.
    fn end(rest: Option<Self>, now: u64, early: bool) -> Option<u64> {
        match rest.filter(|r| !r.is_over(now)) {
            None => Some(0),
            Some(r) => (early && r.clean).then_some(r.until),
        }
    }
}

/// A slot, and its generations that rest.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
struct Slot {
    owner: Option<Owner>,
    rests: [Option<Rest>; GENERATIONS],
}

impl Slot {
    /// Returns the quarantines of a set of generations.
    fn rests_in(&mut self, set: u16) -> impl Iterator<Item = &mut Option<Rest>> {
        let all = self.rests.iter_mut().enumerate();
        all.filter(move |(generation, _)| set & (1 << generation) != 0)
            .map(|(_, rest)| rest)
    }

    fn give(&mut self, place: Place, tenant: Tenant, parts: Parts) {
        self.rests_in(parts.usable(place)).for_each(|rest| *rest = None);
        self.owner = Some(Owner {
            generation: place.generation,
            tenant,
            parts,
            absent: false,
        });
    }

    /// Returns whether all of it belongs to a user, or blocks of generations that its processes have used.
    fn is_whole_of(&self, now: u64, uid: u32) -> bool {
        match &self.owner {
            Some(owner) => owner.tenant.uid == uid && owner.generation == ALL_GENERATIONS,
            None => {
                let its = self.rests.iter().flatten();
                its.filter(|r| r.uid == uid && !r.is_over(now)).count() > GENERATIONS - ENOUGH
            }
        }
    }

    /// Returns the generations that the owner of the whole slot may use, if they are enough. `early`: of those that were left cleanly
    /// as many as that takes, too, the longest first.
    fn usable_parts(&self, now: u64, early: bool) -> Option<Parts> {
        let ends = self.rests.iter().enumerate();
        let mut ends: Vec<(u64, usize)> = ends
            .filter_map(|(n, rest)| Some((Rest::end(*rest, now, early)?, n)))
            .collect();
        ends.sort_unstable();
        let rested = ends.iter().take_while(|(end, _)| *end == 0).count();
        ends.truncate(rested.max(ENOUGH));
        let usable = ends.iter().fold(0u16, |set, (_, n)| set | (1 << n));
        let home = ends.first().filter(|_| ends.len() >= ENOUGH)?.1;
        Some(Parts {
            home: home as u8,
            resting: !usable,
            spread: false,
        })
    }
}

/// Slots of a broker and their owners. Times are milliseconds of a clock that goes on while the machine sleeps.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Slots {
    /// Slot 0 is the broker's.
    slots: Vec<Slot>,
    next: u32,
    /// The process id namespace that process ids are of (its inode).
    namespace: u64,
}

impl Slots {
    /// Creates slots that are all free. The search begins at `start`.
    pub(super) fn new(start: u32, namespace: u64) -> Self {
        Self {
            slots: vec![Slot::default(); SLOTS],
            next: start,
            namespace,
        }
    }

    /// Returns whether a state that was read has the right shape.
    pub(super) fn is_sound(&self) -> bool {
        self.slots.len() == SLOTS
    }

    /// Returns the members' slots with their numbers.
    fn numbered(&self) -> impl Iterator<Item = (u8, &Slot)> {
        (0..).zip(&self.slots).skip(1)
    }

    fn slot_mut(&mut self, place: Place) -> Option<&mut Slot> {
        self.slots.get_mut(usize::from(place.slot))
    }

    /// Allocates a place for a new member, a whole slot if its user has less than `whole` of them, and what the member may use of it;
    /// `None` when all are taken or rest.
    pub(super) fn allocate(&mut self, now: u64, tenant: Tenant, whole: usize) -> Option<(Place, Parts)> {
        let one = |place| (place, Parts::default());
        let (place, parts) = self
            .find_whole(now, tenant.uid, whole)
            .or_else(|| self.find_one(now).map(one))?;
        self.slot_mut(place)?.give(place, tenant, parts);
        Some((place, parts))
    }

    fn find_whole(&mut self, now: u64, uid: u32, most: usize) -> Option<(Place, Parts)> {
        if self.numbered().filter(|(_, slot)| slot.is_whole_of(now, uid)).count() >= most {
            return None;
        }
        // Generations that were left cleanly are used again early only if there is no other way.
        [false, true].into_iter().find_map(|early| {
            let free = self.numbered().filter(|(_, slot)| slot.owner.is_none());
            let usable = free.filter_map(|(n, slot)| Some((n, slot.usable_parts(now, early)?)));
            let usable: Vec<(u8, Parts)> = usable.collect();
            // The next one in turn, as below.
            let start = self.next % (SLOTS - 1) as u32;
            let after = usable.iter().find(|(n, _)| u32::from(*n) > start);
            let (n, parts) = *after.or(usable.first())?;
            self.next = (self.next - start).wrapping_add(n.into());
            Some((Place::whole(n), parts))
        })
    }

    /// Returns the next place in turn that does not rest, or else the one that has rested longest of those that were left cleanly.
    fn find_one(&mut self, now: u64) -> Option<Place> {
        let slots = (SLOTS - 1) as u32;
        let all = slots * GENERATIONS as u32;
        let start = self.next % all;
        let usable = (start..start + all).filter_map(|n| {
            // Slot by slot, so that a slot's generations take long to come round.
            let (slot, generation) = ((n % slots) as u8 + 1, (n % all / slots) as u8);
            let of = &self.slots[usize::from(slot)];
            let end = Rest::end(of.rests[usize::from(generation)], now, true)?;
            of.owner.is_none().then_some((end, n, Place { slot, generation }))
        });
        let (_, n, place) = usable.min_by_key(|(end, ..)| *end)?;
        self.next = (n + 1) % all;
        Some(place)
    }

    /// Notes that a member uses all that it may of its place. Returns false if that is known.
    pub(super) fn spread(&mut self, place: Place) -> bool {
        let owner = self.slot_mut(place).and_then(|slot| slot.owner.as_mut());
        owner.is_some_and(|o| !o.absent && !std::mem::replace(&mut o.parts.spread, true))
    }

    /// Gives a member of a former broker its place again. Returns false if it is another's. `unknown`: it may have one that nobody is
    /// known to have had, as a broker says that has lost its state and has members of its own user only.
    pub(super) fn reclaim(&mut self, place: Place, tenant: Tenant, parts: Parts, unknown: bool) -> bool {
        let Some(slot) = self.slot_mut(place).filter(|_| place.is_valid()) else {
            return false;
        };
        let same = |uid, token| (uid, token) == (tenant.uid, tenant.token);
        let parts = match &slot.owner {
            Some(o) if o.absent && o.generation == place.generation && same(o.tenant.uid, o.tenant.token) => Parts {
                spread: o.parts.spread || parts.spread,
                ..o.parts
            },
            Some(_) => return false,
            // It was taken for dead, or nobody is known to have had it.
            None => {
                let own = |r: &mut Option<Rest>| r.is_none_or(|r| same(r.uid, r.token));
                let known = |r: &mut Option<Rest>| r.is_some() || unknown;
                let is_free = slot.rests_in(parts.usable(place)).all(own);
                if !is_free || !slot.rests_in(parts.used(place)).all(known) {
                    return false;
                }
                parts
            }
        };
        slot.give(place, tenant, parts);
        true
    }

    /// Releases the place of a member that is gone.
    pub(super) fn release(&mut self, now: u64, place: Place, clean: bool) {
        let Some(slot) = self.slot_mut(place) else { return };
        let Some(Owner { tenant, parts, .. }) = slot.owner.take() else {
            return;
        };
        let rest = Rest {
            until: now + REST,
            clean,
            uid: tenant.uid,
            token: tenant.token,
        };
        slot.rests_in(parts.used(place)).for_each(|entry| *entry = Some(rest));
    }

    /// Returns the number of a user's places, and of places in quarantine that its processes left without a goodbye.
    pub(super) fn of_user(&self, now: u64, uid: u32) -> (usize, usize) {
        let has = |(_, slot): &(u8, &Slot)| slot.owner.is_some_and(|o| o.tenant.uid == uid);
        let rests = |r: &&Rest| r.uid == uid && !r.clean && !r.is_over(now);
        let resting = self.numbered().map(|(_, slot)| {
            // Those of a whole slot are one.
            let tokens = slot.rests.iter().flatten().filter(rests).map(|r| r.token);
            tokens.collect::<BTreeSet<_>>().len()
        });
        (self.numbered().filter(has).count(), resting.sum())
    }

    /// Takes over the places of a former broker: its members may come back, unless they are dead. Process ids of another
    /// namespace than ours say nothing.
    pub(super) fn inherit(&mut self, now: u64, namespace: u64, is_alive: impl Fn(Process) -> bool) {
        let foreign = std::mem::replace(&mut self.namespace, namespace) != namespace;
        for owner in self.slots.iter_mut().filter_map(|slot| slot.owner.as_mut()) {
            owner.absent = true;
            if foreign {
                owner.tenant.process.pid = 0;
            }
        }
        self.bury(now, is_alive);
    }

    /// Lets the places of absent members that are dead rest. Returns those places.
    pub(super) fn bury(&mut self, now: u64, is_alive: impl Fn(Process) -> bool) -> Vec<Place> {
        let dead = self.absent().into_iter().filter(|(_, p)| !is_alive(*p));
        let dead: Vec<Place> = dead.map(|(place, _)| place).collect();
        for place in &dead {
            self.release(now, *place, false);
        }
        dead
    }

    /// Returns the members of a former broker that have not come back.
    pub(super) fn absent(&self) -> Vec<(Place, Process)> {
        let absent = self.numbered().filter_map(|(slot, s)| {
            let owner = s.owner.filter(|o| o.absent)?;
            let generation = owner.generation;
            Some((Place { slot, generation }, owner.tenant.process))
        });
        absent.collect()
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

    fn one(slots: &mut Slots, now: u64, tenant: Tenant, whole: usize) -> Option<Place> {
        slots.allocate(now, tenant, whole).map(|(place, _)| place)
    }

    fn again(slots: &mut Slots, place: Place, tenant: Tenant, unknown: bool) -> bool {
        slots.reclaim(place, tenant, Parts::default(), unknown)
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
        let a = one(&mut slots, 0, unseen(1, 70), 0).unwrap();
        slots.inherit(1, 1, |_| true);
        assert!(!again(&mut slots, a, unseen(2, 71), true));
        assert!(again(&mut slots, a, unseen(2, 70), true));
        slots.release(2, a, false);
        assert!(!again(&mut slots, a, unseen(3, 71), true), "it rests");
        assert!(again(&mut slots, a, unseen(3, 70), true), "it was only taken for dead");
    }

    #[test]
    fn process_ids_of_another_namespace_say_nothing() {
        let mut slots = Slots::new(0, 1);
        let a = one(&mut slots, 0, tenant(5), 0).unwrap();
        slots.inherit(1, 2, |p| p.pid == 0);
        assert_eq!(slots.absent(), [(a, Process { pid: 0, start: 7 })]);
        assert!(again(&mut slots, a, tenant(5), true));
    }

    #[test]
    fn a_place_is_not_had_by_claim_or_by_another_users_process() {
        let mut slots = Slots::new(0, 1);
        let place = Place { slot: 9, generation: 3 };
        assert!(
            !again(&mut slots, place, tenant(1), false),
            "nobody is known to have had it"
        );
        let a = one(&mut slots, 0, tenant(1), 0).unwrap();
        slots.inherit(1, 1, |_| true);
        let thief = Tenant { uid: 1001, ..tenant(1) };
        assert!(!again(&mut slots, a, thief, true));
        slots.release(2, a, false);
        assert!(!again(&mut slots, a, thief, true));
        assert!(again(&mut slots, a, tenant(1), false));
    }

    #[test]
    fn places_are_counted_by_user() {
        let mut slots = Slots::new(0, 1);
        let other = |pid| Tenant { uid: 7, ..tenant(pid) };
        let all: Vec<Place> = (0..6).map(|pid| one(&mut slots, 0, tenant(pid), 0).unwrap()).collect();
        one(&mut slots, 0, other(9), 0).unwrap();
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
        let places: Vec<Place> = (0..127).map(|i| one(&mut slots, 0, tenant(i), 0).unwrap()).collect();
        let distinct: HashSet<u8> = places.iter().map(|p| p.slot).collect();
        assert_eq!(distinct.len(), 127);
        assert!(places.iter().all(|p| p.is_valid()));
        assert_eq!(one(&mut slots, 0, tenant(999), 0), None);
    }

    #[test]
    fn every_process_has_a_whole_slot_unless_too_much_rests() {
        let mut slots = Slots::new(77, 1);
        let mut used = HashSet::new();
        let places: Vec<Place> = (0..127)
            .map(|pid| {
                let place = one(&mut slots, 0, tenant(pid), usize::MAX).unwrap();
                assert!(place.is_valid() && used.insert(place.slot), "{place:?}");
                place
            })
            .collect();
        assert!(places.iter().all(|p| p.is_whole()));
        assert_eq!(
            one(&mut slots, 0, tenant(999), usize::MAX),
            None,
            "all slots have an owner"
        );
        // What was used of a whole slot rests.
        slots.release(10, places[3], false);
        let (next, parts) = slots.allocate(11, tenant(999), usize::MAX).unwrap();
        assert_eq!((next, parts.resting, parts.home), (places[3], 1, 1));
        assert!(slots.spread(places[4]) && !slots.spread(places[4]));
        slots.release(10, places[4], false);
        assert_eq!(one(&mut slots, 11, tenant(999), usize::MAX), None, "all of it");
        assert_eq!(one(&mut slots, 10 + REST, tenant(999), usize::MAX), Some(places[4]));
        // With less than half of a slot the next one gets a generation.
        for _ in 0..9 {
            slots.release(20 + REST, places[5], false);
            assert_eq!(
                one(&mut slots, 20 + REST, tenant(5), usize::MAX).map(|p| p.slot),
                Some(places[5].slot)
            );
        }
        slots.release(20 + REST, places[5], false);
        assert!(!one(&mut slots, 20 + REST, tenant(5), usize::MAX).unwrap().is_whole());
    }

    /// Each has as many numbers as a device can have queue pairs.
    #[test]
    fn many_short_processes_get_whole_slots() {
        for clean in [true, false] {
            let mut slots = Slots::new(5, 1);
            let mut used: HashSet<(u8, u8)> = HashSet::new();
            // A server that stays, and 16 processes a second.
            assert!(one(&mut slots, 0, tenant(0), usize::MAX).unwrap().is_whole());
            for n in 1..if clean { 3000 } else { 900 } {
                let now = 1000 * u64::from(n) / 16;
                let (place, parts) = slots.allocate(now, tenant(n), usize::MAX).unwrap();
                assert!(place.is_whole(), "process {n}, clean {clean}");
                assert!(parts.usable(place).count_ones() as usize >= ENOUGH);
                assert_ne!(parts.usable(place) & parts.used(place), 0);
                if now < REST {
                    assert!(
                        used.insert((place.slot, parts.home)),
                        "process {n} has numbers that rest"
                    );
                }
                slots.release(now, place, clean);
            }
        }
    }

    #[test]
    fn what_was_left_cleanly_is_used_early_before_slots_are_divided() {
        let mut slots = Slots::new(5, 1);
        for n in 0..3000 {
            let (place, parts) = slots.allocate(1, tenant(n), usize::MAX).unwrap();
            assert!(place.is_whole() && parts.usable(place).count_ones() as usize >= ENOUGH);
            slots.release(1, place, true);
        }
        // Not so the numbers of killed processes.
        let mut slots = Slots::new(5, 1);
        let mut divided = 0;
        for n in 0..2000 {
            let Some((place, _)) = slots.allocate(1, tenant(n), usize::MAX) else {
                break;
            };
            divided += usize::from(!place.is_whole());
            slots.release(1, place, false);
        }
        assert!(divided > 0);
    }

    #[test]
    fn one_user_of_several_has_so_many_whole_slots_and_killed_processes_count() {
        let mut slots = Slots::new(0, 1);
        let a = one(&mut slots, 0, tenant(1), 2).unwrap();
        let b = one(&mut slots, 0, tenant(2), 2).unwrap();
        assert!(a.is_whole() && b.is_whole());
        slots.spread(a);
        slots.release(1, a, true);
        assert!(!one(&mut slots, 2, tenant(3), 2).unwrap().is_whole());
        let other = Tenant { uid: 7, ..tenant(4) };
        assert!(one(&mut slots, 2, other, 2).unwrap().is_whole());
        assert!(one(&mut slots, 1 + REST, tenant(5), 2).unwrap().is_whole());
    }

    #[test]
    fn a_whole_slot_is_one_place_of_its_user_and_is_got_again_whole() {
        let mut slots = Slots::new(0, 1);
        let a = one(&mut slots, 0, tenant(1), 9).unwrap();
        slots.inherit(1, 1, |_| true);
        assert!(!again(&mut slots, Place { generation: 0, ..a }, tenant(1), false));
        assert!(again(&mut slots, a, tenant(1), false));
        slots.release(2, a, false);
        assert_eq!(slots.of_user(3, 1000), (0, 1));
        assert!(!again(&mut slots, a, tenant(2), true), "it rests");
        assert!(again(&mut slots, a, tenant(1), false), "it was only taken for dead");
        // Somebody else has had a part of it since.
        slots.release(3, a, true);
        let part = Place { generation: 5, ..a };
        slots.slot_mut(part).unwrap().give(part, tenant(2), Parts::default());
        slots.release(4, part, true);
        assert!(!again(&mut slots, a, tenant(1), true));
    }

    #[test]
    fn numbers_of_a_killed_process_rest() {
        let mut slots = Slots::new(0, 1);
        let mut used = HashSet::new();
        let mut now = 0;
        for pid in 0..(127 * GENERATIONS as u32) {
            let place = one(&mut slots, now, tenant(pid), 0).unwrap();
            assert!(used.insert(place), "{place:?} came back at {now}");
            slots.release(now, place, false);
            now += 1;
        }
        assert_eq!(one(&mut slots, now, tenant(1), 0), None, "all rest");
        assert!(one(&mut slots, REST, tenant(1), 0).is_some(), "the first has rested");
    }

    #[test]
    fn a_place_left_cleanly_comes_back_early_when_nothing_else_is_free() {
        let mut slots = Slots::new(0, 1);
        let first = one(&mut slots, 0, tenant(0), 0).unwrap();
        slots.release(5, first, true);
        for pid in 1..(127 * GENERATIONS as u32) {
            let place = one(&mut slots, 10, tenant(pid), 0).unwrap();
            assert_ne!(place, first);
            slots.release(10, place, false);
        }
        assert_eq!(one(&mut slots, 11, tenant(1), 0), Some(first));
        assert_eq!(one(&mut slots, 11, tenant(1), 0), None);
    }

    #[test]
    fn members_of_a_former_broker_get_their_places_again_and_nobody_else_does() {
        let mut slots = Slots::new(0, 1);
        let a = one(&mut slots, 0, tenant(1), 0).unwrap();
        let b = one(&mut slots, 0, tenant(2), 0).unwrap();
        let text = serde_json::to_string(&slots).unwrap();
        let mut slots: Slots = serde_json::from_str(&text).unwrap();
        assert!(slots.is_sound());
        slots.inherit(100, 1, |p| p.pid == 1);
        assert_eq!(slots.absent(), [(a, process(1))]);
        assert!(!again(&mut slots, a, tenant(9), true));
        assert!(again(&mut slots, a, tenant(1), true));
        assert!(!again(&mut slots, a, tenant(1), true), "it has it");
        for pid in 10..136 {
            let place = one(&mut slots, 200, tenant(pid), 0).unwrap();
            assert!(place != a && place != b, "one is in use, the other rests");
        }
        assert!(!again(&mut slots, Place { slot: 0, generation: 0 }, tenant(1), true));
        assert!(!again(
            &mut slots,
            Place {
                slot: 200,
                generation: 0
            },
            tenant(1),
            true
        ));
    }
}
