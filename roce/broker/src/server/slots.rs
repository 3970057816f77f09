//! Owners of places.
//!
//! A process gets a whole slot, or one generation of a slot where its user may not have more whole ones or too much rests. When it ends,
//! the generations that it has used rest: peers may still send to its queue pairs. Of a whole slot that is one, unless the process had very
//! many queue pairs. A slot of which some generations rest may have another owner at once, who uses others. Those of processes that said
//! goodbye may be used again early when nothing else is free.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::proto::{GENERATIONS, Parts, Place, SLOTS};

/// How long a place rests, milliseconds: longer than packets live and than peers retry (8 times 4.3 s) in general.
pub(super) const REST: u64 = 60_000;

/// Generations that the owner of a whole slot can use at least: as many queue pairs as a device can have.
const ENOUGH: usize = GENERATIONS / 2;

/// A process, told apart from later ones with the same id.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Process {
    /// Process id; 0 if it is in a namespace that can't be seen.
    pub(super) pid: u32,
    /// When it was started (`/proc/PID/stat`, field 22).
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

/// Owner of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
enum Owner {
    Nobody,
    /// A member that is connected.
    Member(Holding),
    /// A member of a former broker that has not come back yet.
    Absent(Holding),
}

/// Part of a slot that an owner has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Holding {
    generation: u8,
    tenant: Tenant,
    parts: Parts,
}

impl Holding {
    const fn place(&self, slot: usize) -> Place {
        Place {
            slot: slot as u8,
            generation: self.generation,
        }
    }
}

impl Owner {
    fn holding(&self) -> Option<&Holding> {
        match self {
            Self::Nobody => None,
            Self::Member(holding) | Self::Absent(holding) => Some(holding),
        }
    }
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
    /// A clock that was set back is no reason to rest for longer.
    fn is_over(&self, now: u64) -> bool {
        self.until <= now || self.until > now + REST
    }
}

/// Slots of a broker and their owners. Times are milliseconds of a clock that goes on while the machine sleeps.
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

    /// The generations of a slot, an entry each.
    fn rests_of(&mut self, slot: u8) -> &mut [Option<Rest>] {
        let start = usize::from(slot) * GENERATIONS;
        self.rests.get_mut(start..start + GENERATIONS).unwrap_or_default()
    }

    /// Returns the quarantines of a set of generations.
    fn rests_in(&mut self, slot: u8, set: u16) -> impl Iterator<Item = &mut Option<Rest>> {
        let all = self.rests_of(slot).iter_mut().enumerate();
        all.filter(move |(generation, _)| set & (1 << generation) != 0)
            .map(|(_, rest)| rest)
    }

    /// A place for a new member, a whole slot if its user has less than `whole` of them, and what the member may use of it; `None` when
    /// all are taken or rest.
    pub(super) fn allocate(&mut self, now: u64, tenant: Tenant, whole: usize) -> Option<(Place, Parts)> {
        let one = |place| (place, Parts::default());
        let (place, parts) = self
            .find_whole(now, tenant.uid, whole)
            .or_else(|| self.find_rested(now).map(one))
            .or_else(|| self.find_clean().map(one))?;
        self.give(place, tenant, parts);
        Some((place, parts))
    }

    /// The rests of each slot but the broker's, with who has it.
    fn by_slot(&self) -> impl Iterator<Item = (u8, &Owner, &[Option<Rest>])> {
        let all = self.owners.iter().zip(self.rests.chunks(GENERATIONS));
        let all = all.enumerate().skip(1);
        all.map(|(slot, (owner, rests))| (slot as u8, owner, rests))
    }

    /// Returns how many whole slots a user has, or blocks by generations that its processes have used.
    fn whole_of(&self, now: u64, uid: u32) -> usize {
        let taken = |(_, owner, rests): &(u8, &Owner, &[Option<Rest>])| match owner.holding() {
            Some(h) => h.tenant.uid == uid && h.place(0).is_whole(),
            None => {
                let its = rests.iter().flatten().filter(|r| r.uid == uid && !r.is_over(now));
                its.count() > GENERATIONS - ENOUGH
            }
        };
        self.by_slot().filter(taken).count()
    }

    fn find_whole(&mut self, now: u64, uid: u32, most: usize) -> Option<(Place, Parts)> {
        if self.whole_of(now, uid) >= most {
            return None;
        }
        // What was left cleanly is used again early only if there is no other way.
        [false, true].into_iter().find_map(|early| {
            let usable = self.by_slot().filter(|(_, owner, _)| **owner == Owner::Nobody);
            let usable = usable.filter_map(|(slot, _, rests)| Some((slot, usable_parts(now, rests, early)?)));
            let free: Vec<(u8, Parts)> = usable.collect();
            // The next one in turn, as below.
            let slots = (SLOTS - 1) as u32;
            let start = self.next % slots;
            let after = free.iter().find(|(slot, _)| u32::from(*slot) > start);
            let (slot, parts) = *after.or(free.first())?;
            self.next = self.next - start + u32::from(slot);
            Some((Place::whole(slot), parts))
        })
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
            let rested = |r: &mut Option<Rest>| r.is_none_or(|r| r.is_over(now));
            if free && self.rests_in(place.slot, 1 << place.generation).all(rested) {
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

    fn give(&mut self, place: Place, tenant: Tenant, parts: Parts) {
        self.rests_in(place.slot, parts.usable(place))
            .for_each(|rest| *rest = None);
        if let Some(owner) = self.owners.get_mut(usize::from(place.slot)) {
            *owner = Owner::Member(Holding {
                generation: place.generation,
                tenant,
                parts,
            });
        }
    }

    /// A member uses all that it may of its place. False: that is known.
    pub(super) fn spread(&mut self, place: Place) -> bool {
        match self.owners.get_mut(usize::from(place.slot)) {
            Some(Owner::Member(holding)) => !std::mem::replace(&mut holding.parts.spread, true),
            _ => false,
        }
    }

    /// A member of a former broker wants its place again. False: it is another's. `unknown`: it may have one that nobody is
    /// known to have, which a broker says that has lost its state and has members of its own user only.
    pub(super) fn reclaim(&mut self, place: Place, tenant: Tenant, parts: Parts, unknown: bool) -> bool {
        if !place.is_valid() {
            return false;
        }
        let same = |t: &Tenant| (t.uid, t.token) == (tenant.uid, tenant.token);
        let parts = match self.owners.get(usize::from(place.slot)) {
            Some(Owner::Absent(h)) if h.generation == place.generation && same(&h.tenant) => Parts {
                spread: h.parts.spread || parts.spread,
                ..h.parts
            },
            // It was taken for dead, or nobody is known to have had it.
            Some(Owner::Nobody) => {
                let own = |r: &mut Option<Rest>| r.is_none_or(|r| (r.uid, r.token) == (tenant.uid, tenant.token));
                let known = |r: &mut Option<Rest>| r.is_some() || unknown;
                let is_free = self.rests_in(place.slot, parts.usable(place)).all(own);
                if !is_free || !self.rests_in(place.slot, parts.used(place)).all(known) {
                    return false;
                }
                parts
            }
            _ => return false,
        };
        self.give(place, tenant, parts);
        true
    }

    /// A member is gone.
    pub(super) fn release(&mut self, now: u64, place: Place, clean: bool) {
        let Some(owner) = self.owners.get_mut(usize::from(place.slot)) else {
            return;
        };
        let Some(Holding { tenant, parts, .. }) = owner.holding().copied() else {
            return;
        };
        *owner = Owner::Nobody;
        let rest = Rest {
            until: now + REST,
            clean,
            uid: tenant.uid,
            token: tenant.token,
        };
        self.rests_in(place.slot, parts.used(place))
            .for_each(|entry| *entry = Some(rest));
    }

    /// How many places a user has, and how many rest that its processes left without a goodbye.
    pub(super) fn of_user(&self, now: u64, uid: u32) -> (usize, usize) {
        let has = |o: &&Owner| o.holding().is_some_and(|h| h.tenant.uid == uid);
        let rests = |r: &&Rest| r.uid == uid && !r.clean && !r.is_over(now);
        let resting = self.by_slot().map(|(_, _, rests_of_slot)| {
            // Those of a whole slot are one.
            let tokens = rests_of_slot.iter().flatten().filter(rests).map(|r| r.token);
            tokens.collect::<BTreeSet<_>>().len()
        });
        let resting = resting.sum();
        (self.owners.iter().filter(has).count(), resting)
    }

    /// Takes over the places of a former broker: its members may come back, unless they are dead. Process ids of another
    /// namespace than ours say nothing.
    pub(super) fn inherit(&mut self, now: u64, namespace: u64, is_alive: impl Fn(Process) -> bool) {
        let foreign = std::mem::replace(&mut self.namespace, namespace) != namespace;
        for owner in &mut self.owners {
            if let Some(mut holding) = owner.holding().copied() {
                if foreign {
                    holding.tenant.process.pid = 0;
                }
                *owner = Owner::Absent(holding);
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
            Owner::Absent(holding) => Some((holding.place(slot), holding.tenant.process)),
            _ => None,
        })
        .collect()
    }
}

/// Returns the generations that the owner of a whole slot may use, if they are enough. `early`: of what was left cleanly as much as is needed for that, too,
/// the longest first.
fn usable_parts(now: u64, rests: &[Option<Rest>], early: bool) -> Option<Parts> {
    let ends = |r: Option<Rest>| match r.filter(|r| !r.is_over(now)) {
        None => Some(0),
        Some(r) => Some(r.until).filter(|_| early && r.clean),
    };
    let ends = rests.iter().enumerate().filter_map(|(n, r)| Some((ends(*r)?, n)));
    let mut ends: Vec<(u64, usize)> = ends.collect();
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
        slots.give(part, tenant(2), Parts::default());
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
