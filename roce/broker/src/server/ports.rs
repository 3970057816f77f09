//! The ports of RDMA_CM's port spaces, and the members that take requests for a service ID.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
};

use roce_port::cm::overlap;

use super::slots::Process;
use crate::proto::{Binding, Place};

/// Ports for members that request any (`ip_local_port_range`).
const EPHEMERAL: std::ops::RangeInclusive<u16> = 32_768..=60_999;
/// Largest number of ports of one member.
const MAX_PER_PLACE: usize = 65_536;

struct Entry {
    place: Place,
    process: Process,
    binding: Binding,
}

/// Port numbers and services of all members.
#[derive(Default)]
pub(super) struct Ports {
    by_service: BTreeMap<u64, Vec<Entry>>,
    counts: HashMap<Place, usize>,
}

const fn port_of(service: u64) -> u16 {
    service as u16
}

impl Ports {
    /// Gives a port to a member; port 0: any that is free. Returns the service ID with it. `None`: it is taken, or the member has too many.
    pub(super) fn bind(
        &mut self,
        place: Place,
        process: Process,
        service: u64,
        addr: Option<IpAddr>,
        reuse: bool,
        start: u16,
    ) -> Option<u64> {
        let service = match port_of(service) {
            0 => self.find_free(service, start)?,
            _ => service,
        };
        let binding = Binding::new(service, addr, reuse, true);
        if self.is_full(place) || self.clashing(&binding).next().is_some() {
            return None;
        }
        self.add(place, process, binding);
        Some(service)
    }

    fn find_free(&self, space: u64, start: u16) -> Option<u64> {
        let (first, last) = (*EPHEMERAL.start(), *EPHEMERAL.end());
        let count = last - first + 1;
        (0..count)
            .map(|i| space | u64::from(first + (start % count + i) % count))
            .find(|service| !self.by_service.contains_key(service))
    }

    /// Restores a binding that a member had with a former broker. Returns false if it is none, another process has it, or the member has
    /// too many.
    pub(super) fn restore(&mut self, place: Place, process: Process, binding: Binding) -> bool {
        let is_none = !binding.bound && !binding.listening;
        if is_none || self.is_full(place) || self.clashing(&binding).any(|e| e.process != process) {
            return false;
        }
        self.add(place, process, binding);
        true
    }

    /// Returns the bindings that are in the way of another. As `cma_check_port`: those that both allow it may share a port that nobody
    /// listens on.
    fn clashing(&self, binding: &Binding) -> impl Iterator<Item = &Entry> {
        let all = self.by_service.get(&binding.service).into_iter().flatten();
        let shares = |b: &Binding| b.reuse && !b.listening;
        let shared = shares(binding);
        let addr = binding.addr;
        all.filter(move |e| overlap(e.binding.addr, addr) && !(shared && shares(&e.binding)))
    }

    fn is_full(&self, place: Place) -> bool {
        self.counts.get(&place).is_some_and(|n| *n >= MAX_PER_PLACE)
    }

    fn add(&mut self, place: Place, process: Process, binding: Binding) {
        *self.counts.entry(place).or_default() += 1;
        self.by_service.entry(binding.service).or_default().push(Entry {
            place,
            process,
            binding,
        });
    }

    /// Gives the requests for a service ID to a member from now on. Within a process any number may have them: each of its devices
    /// has requests of its own. Returns false if another process has the port, or the member has too many.
    pub(super) fn listen(&mut self, place: Place, process: Process, service: u64, addr: Option<IpAddr>) -> bool {
        // A listener shares its port with nobody, whatever was allowed while it was only bound.
        let binding = Binding::new(service, addr, false, false);
        if self.is_full(place) || self.clashing(&binding).any(|e| e.process != process) {
            return false;
        }
        let ours = |e: &&mut Entry| e.place == place && e.binding.addr == addr && !e.binding.listening;
        match self.by_service.entry(service).or_default().iter_mut().find(ours) {
            Some(entry) => entry.binding.listening = true,
            None => self.add(place, process, binding),
        }
        true
    }

    /// Gives a port back, or no longer takes requests, if the member has that.
    pub(super) fn release(&mut self, place: Place, service: u64, addr: Option<IpAddr>, listening: bool) {
        let Some(all) = self.by_service.get_mut(&service) else {
            return;
        };
        let has = |b: &Binding| if listening { b.listening } else { b.bound };
        let ours = |e: &Entry| e.place == place && e.binding.addr == addr && has(&e.binding);
        let Some(at) = all.iter().position(ours) else {
            return;
        };
        let b = &mut all[at].binding;
        *if listening { &mut b.listening } else { &mut b.bound } = false;
        if !b.bound && !b.listening {
            all.remove(at);
            if let Some(count) = self.counts.get_mut(&place) {
                *count -= 1;
            }
        }
        if all.is_empty() {
            self.by_service.remove(&service);
        }
    }

    /// Frees all ports of a member.
    pub(super) fn remove_all(&mut self, place: Place) {
        self.counts.remove(&place);
        self.by_service.retain(|_, all| {
            all.retain(|e| e.place != place);
            !all.is_empty()
        });
    }

    /// Returns whether a member has a port.
    pub(super) fn has(&self, place: Place, service: u64, addr: Option<IpAddr>) -> bool {
        let ours = |e: &Entry| e.place == place && e.binding.addr == addr;
        self.by_service.get(&service).is_some_and(|all| all.iter().any(ours))
    }

    /// Returns the member that keeps a port from a process: another process's, if one has it.
    pub(super) fn holder(&self, process: Process, service: u64, addr: Option<IpAddr>) -> Option<Place> {
        let wanted = Binding::new(service, addr, false, true);
        let clashing = self.clashing(&wanted);
        clashing.max_by_key(|e| e.process != process).map(|e| e.place)
    }

    /// Returns the number of a member's ports.
    pub(super) fn count(&self, place: Place) -> usize {
        self.counts.get(&place).copied().unwrap_or(0)
    }

    /// Returns the bindings of a member.
    pub(super) fn of(&self, place: Place) -> Vec<Binding> {
        let all = self.by_service.values().flatten();
        all.filter(|e| e.place == place).map(|e| e.binding.clone()).collect()
    }

    /// Returns the place of the member that takes a request for a service ID at an address. `has`: whether a place is a member's.
    pub(super) fn listener(&self, service: u64, to: IpAddr, has: impl Fn(Place) -> bool) -> Option<Place> {
        let all = self.by_service.get(&service)?;
        let mut fitting: Vec<&Entry> = all
            .iter()
            .filter(|e| e.binding.listening && overlap(e.binding.addr, Some(to)))
            .collect();
        // One for the address goes before one for all of its IP version, and that before one for all.
        fitting.sort_by_key(|e| e.binding.addr.map_or(2, |a| u8::from(a.is_unspecified())));
        // Asked last: a member may have listened very often, and looking for one takes as long as there are members.
        fitting.iter().map(|e| e.place).find(|place| has(*place))
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    const TCP: u64 = 0x0106_0000;
    const A: Place = Place { slot: 1, generation: 0 };
    const B: Place = Place { slot: 2, generation: 0 };
    const C: Place = Place { slot: 3, generation: 0 };

    fn process(place: Place) -> Process {
        // B and C are two devices of one process.
        let pid = if place == A { 1 } else { 2 };
        Process { pid, start: 1 }
    }

    fn ip(last: u8) -> Option<IpAddr> {
        Some([127, 0, 0, last].into())
    }

    fn bind(ports: &mut Ports, place: Place, service: u64, addr: Option<IpAddr>, reuse: bool) -> Option<u64> {
        ports.bind(place, process(place), service, addr, reuse, 60_000)
    }

    #[test]
    fn two_processes_do_not_get_one_port() {
        let mut p = Ports::default();
        assert_eq!(bind(&mut p, A, TCP | 80, ip(1), false), Some(TCP | 80));
        assert_eq!(bind(&mut p, B, TCP | 80, ip(1), false), None);
        assert_eq!(bind(&mut p, B, TCP | 80, None, true), None);
        assert_eq!(bind(&mut p, A, TCP | 80, ip(1), false), None, "nor does one twice");
        assert_eq!(bind(&mut p, B, TCP | 80, ip(2), false), Some(TCP | 80));
        assert_eq!(
            bind(&mut p, B, 0x0111_0000 | 80, ip(1), false),
            Some(0x0111_0050),
            "another port space"
        );
        p.release(A, TCP | 80, ip(1), false);
        assert_eq!(bind(&mut p, B, TCP | 80, ip(1), false), Some(TCP | 80));
        p.remove_all(B);
        assert_eq!(bind(&mut p, A, TCP | 80, None, false), Some(TCP | 80));
    }

    #[test]
    fn each_ip_version_has_its_ports() {
        let (v4, v6) = (Some(Ipv4Addr::UNSPECIFIED.into()), Some(Ipv6Addr::UNSPECIFIED.into()));
        let mut p = Ports::default();
        assert!(bind(&mut p, A, TCP | 80, v4, false).is_some());
        assert!(bind(&mut p, B, TCP | 80, v6, false).is_some());
        for taken in [None, v4, v6, ip(1), Some(Ipv6Addr::LOCALHOST.into())] {
            assert_eq!(bind(&mut p, B, TCP | 80, taken, false), None, "{taken:?}");
        }
        assert!(p.listen(A, process(A), TCP | 80, v4));
        assert!(p.listen(B, process(B), TCP | 80, v6));
        let listener = |to: IpAddr| p.listener(TCP | 80, to, |_| true);
        assert_eq!(listener([127, 0, 0, 1].into()), Some(A));
        assert_eq!(listener(Ipv6Addr::LOCALHOST.into()), Some(B));
    }

    #[test]
    fn ports_for_whoever_wants_any_are_distinct_and_run_out() {
        let mut p = Ports::default();
        let mut seen = std::collections::HashSet::new();
        for start in EPHEMERAL {
            let service = p
                .bind(A, process(A), TCP, None, false, start - EPHEMERAL.start())
                .unwrap();
            assert!(seen.insert(service) && EPHEMERAL.contains(&port_of(service)) && service >> 16 == TCP >> 16);
        }
        assert_eq!(bind(&mut p, B, TCP, None, false), None);
    }

    #[test]
    fn a_process_has_no_more_than_a_bound_and_others_have_room() {
        let mut p = Ports::default();
        for service in 1..=MAX_PER_PLACE as u64 {
            assert!(p.listen(A, process(A), service << 16 | 1, None));
        }
        let binding = Binding {
            service: TCP | 7,
            addr: None,
            reuse: false,
            bound: true,
            listening: false,
        };
        assert!(!p.listen(A, process(A), TCP | 7, None));
        assert_eq!(bind(&mut p, A, TCP | 7, None, false), None);
        assert!(!p.restore(A, process(A), binding.clone()));
        assert_eq!(p.of(A).len(), MAX_PER_PLACE);
        assert!(p.restore(B, process(B), binding));
        p.release(A, 1 << 16 | 1, None, true);
        assert_eq!(bind(&mut p, A, TCP | 8, None, false), Some(TCP | 8));
    }

    #[test]
    fn a_port_may_be_shared_until_somebody_listens() {
        let mut p = Ports::default();
        assert!(bind(&mut p, A, TCP | 7, None, true).is_some());
        assert!(bind(&mut p, B, TCP | 7, None, true).is_some());
        assert!(!p.listen(A, process(A), TCP | 7, None));
        p.remove_all(B);
        assert!(p.listen(A, process(A), TCP | 7, None));
        assert_eq!(bind(&mut p, B, TCP | 7, None, true), None);
        // Bound and listening end one by one.
        p.release(A, TCP | 7, None, true);
        assert_eq!(p.of(A).len(), 1);
        p.release(A, TCP | 7, None, false);
        assert!(p.of(A).is_empty() && p.by_service.is_empty());
    }

    #[test]
    fn what_is_neither_bound_nor_listening_is_not_restored_and_releasing_changes_the_own_count_alone() {
        let mut p = Ports::default();
        let nothing = Binding {
            service: TCP | 7,
            addr: None,
            reuse: true,
            bound: false,
            listening: false,
        };
        assert!(!p.restore(A, process(A), nothing));
        assert_eq!(p.count(A), 0);
        assert!(bind(&mut p, A, TCP | 7, None, true).is_some());
        assert!(bind(&mut p, B, TCP | 7, None, true).is_some());
        p.release(B, TCP | 7, None, true);
        assert_eq!((p.count(A), p.count(B)), (1, 1), "B doesn't listen");
        p.release(B, TCP | 7, None, false);
        assert_eq!((p.count(A), p.count(B)), (1, 0));
        p.release(B, TCP | 7, None, false);
        assert_eq!((p.count(A), p.count(B)), (1, 0), "it has nothing any more");
    }

    #[test]
    fn nobody_is_given_back_what_another_has() {
        let mut p = Ports::default();
        assert!(p.listen(A, process(A), TCP | 7, None));
        let binding = Binding {
            service: TCP | 7,
            addr: ip(1),
            reuse: true,
            bound: true,
            listening: true,
        };
        assert!(!p.restore(B, process(B), binding.clone()));
        assert!(p.of(B).is_empty());
        p.remove_all(A);
        assert!(p.restore(B, process(B), binding.clone()));
        assert!(p.restore(C, process(C), binding), "of the same process");
    }

    #[test]
    fn requests_go_to_who_listens_at_the_address() {
        let mut p = Ports::default();
        let all = |_| true;
        assert!(p.listen(B, process(B), TCP | 7, None));
        assert!(p.listen(C, process(C), TCP | 7, None));
        assert!(!p.listen(A, process(A), TCP | 7, ip(1)));
        assert_eq!(
            p.listener(TCP | 7, [127, 0, 0, 1].into(), |place| place == C),
            Some(C),
            "only C is there"
        );
        assert_eq!(p.listener(TCP | 8, [127, 0, 0, 1].into(), all), None);
        p.remove_all(B);
        assert!(p.listen(C, process(C), TCP | 7, ip(1)));
        assert!(p.listen(B, process(B), TCP | 7, ip(2)));
        assert_eq!(
            p.listener(TCP | 7, [127, 0, 0, 2].into(), all),
            Some(B),
            "the address goes before all"
        );
        assert_eq!(p.listener(TCP | 7, [127, 0, 0, 3].into(), all), Some(C));
        p.release(C, TCP | 7, None, true);
        assert_eq!(p.listener(TCP | 7, [127, 0, 0, 3].into(), all), None);
    }
}
