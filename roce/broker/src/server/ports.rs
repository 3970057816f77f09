//! The ports of RDMA_CM's port spaces, and who takes requests for a service ID.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
};

use roce_cm::overlap;

use super::slots::Process;
use crate::proto::{Binding, Place};

/// Ports that are given to whoever wants any (`ip_local_port_range`).
const EPHEMERAL: std::ops::RangeInclusive<u16> = 32_768..=60_999;
/// Ports of one member; beyond, it gets no more.
const MAX_PER_PLACE: usize = 65_536;

/// The port is taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct InUse;

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
    /// Gives a port to a member; port 0: any that is free. Returns the service ID with it.
    pub(super) fn bind(
        &mut self,
        place: Place,
        process: Process,
        service: u64,
        addr: Option<IpAddr>,
        reuse: bool,
        start: u16,
    ) -> Result<u64, InUse> {
        if self.is_full(place) {
            return Err(InUse);
        }
        let service = match port_of(service) {
            0 => self.find_free(service, start).ok_or(InUse)?,
            _ => service,
        };
        // As `cma_check_port`: two that both allow it may share a port that nobody listens on.
        let all = self.by_service.get(&service);
        let clash = |e: &Entry| overlap(e.binding.addr, addr) && !(e.binding.reuse && reuse && !e.binding.listening);
        if all.is_some_and(|all| all.iter().any(clash)) {
            return Err(InUse);
        }
        let binding = Binding {
            service,
            addr,
            reuse,
            bound: true,
            listening: false,
        };
        self.add(place, process, binding);
        Ok(service)
    }

    fn find_free(&self, space: u64, start: u16) -> Option<u64> {
        let (first, last) = (*EPHEMERAL.start(), *EPHEMERAL.end());
        let count = last - first + 1;
        (0..count)
            .map(|i| space | u64::from(first + (start % count + i) % count))
            .find(|service| !self.by_service.contains_key(service))
    }

    /// Restores the bindings that a member had with a former broker. False: another process has it, or the member has too many.
    pub(super) fn restore(&mut self, place: Place, process: Process, binding: Binding) -> bool {
        let shared = |e: &Entry| e.binding.reuse && binding.reuse && !e.binding.listening && !binding.listening;
        let clash = |e: &Entry| e.process != process && overlap(e.binding.addr, binding.addr) && !shared(e);
        let all = self.by_service.get(&binding.service);
        if self.is_full(place) || all.is_some_and(|all| all.iter().any(clash)) {
            return false;
        }
        self.add(place, process, binding);
        true
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

    /// Gives a port back, if the member has it.
    pub(super) fn unbind(&mut self, place: Place, service: u64, addr: Option<IpAddr>) {
        self.change(place, service, addr, |b| b.bound, |b| b.bound = false);
    }

    /// A member takes the requests for a service ID from now on. Within a process any number may: each of its devices
    /// has requests of its own.
    pub(super) fn listen(
        &mut self,
        place: Place,
        process: Process,
        service: u64,
        addr: Option<IpAddr>,
    ) -> Result<(), InUse> {
        if self.is_full(place) {
            return Err(InUse);
        }
        let all = self.by_service.get_mut(&service).map_or(&mut [][..], Vec::as_mut_slice);
        // A listener shares its port with nobody, whatever was allowed while it was only bound.
        let clash = |e: &Entry| e.process != process && overlap(e.binding.addr, addr);
        if all.iter().any(clash) {
            return Err(InUse);
        }
        let ours = |e: &&mut Entry| e.place == place && e.binding.addr == addr && !e.binding.listening;
        if let Some(entry) = all.iter_mut().find(ours) {
            entry.binding.listening = true;
            return Ok(());
        }
        let binding = Binding {
            service,
            addr,
            reuse: false,
            bound: false,
            listening: true,
        };
        self.add(place, process, binding);
        Ok(())
    }

    /// A member no longer takes them.
    pub(super) fn unlisten(&mut self, place: Place, service: u64, addr: Option<IpAddr>) {
        self.change(place, service, addr, |b| b.listening, |b| b.listening = false);
    }

    fn change(
        &mut self,
        place: Place,
        service: u64,
        addr: Option<IpAddr>,
        which: impl Fn(&Binding) -> bool,
        change: impl Fn(&mut Binding),
    ) {
        let Some(all) = self.by_service.get_mut(&service) else {
            return;
        };
        let found = all
            .iter()
            .position(|e| e.place == place && e.binding.addr == addr && which(&e.binding));
        if let Some(index) = found {
            change(&mut all[index].binding);
            if !all[index].binding.bound && !all[index].binding.listening {
                all.remove(index);
                if let Some(count) = self.counts.get_mut(&place) {
                    *count -= 1;
                }
            }
        }
        if all.is_empty() {
            self.by_service.remove(&service);
        }
    }

    /// A member is gone, and all of its ports are free.
    pub(super) fn remove_all(&mut self, place: Place) {
        self.counts.remove(&place);
        self.by_service.retain(|_, all| {
            all.retain(|e| e.place != place);
            !all.is_empty()
        });
    }

    /// Whether a member has a port.
    pub(super) fn has(&self, place: Place, service: u64, addr: Option<IpAddr>) -> bool {
        let ours = |e: &Entry| e.place == place && e.binding.addr == addr;
        self.by_service.get(&service).is_some_and(|all| all.iter().any(ours))
    }

    /// Member that keeps a port from a process: another process's, if one has it.
    pub(super) fn holder(&self, process: Process, service: u64, addr: Option<IpAddr>) -> Option<Place> {
        let all = self.by_service.get(&service)?.iter();
        let clashing = all.filter(|e| overlap(e.binding.addr, addr));
        clashing.max_by_key(|e| e.process != process).map(|e| e.place)
    }

    /// How many a member has.
    pub(super) fn count(&self, place: Place) -> usize {
        self.counts.get(&place).copied().unwrap_or(0)
    }

    /// Returns the bindings of a member.
    pub(super) fn of(&self, place: Place) -> Vec<Binding> {
        let all = self.by_service.values().flatten();
        all.filter(|e| e.place == place).map(|e| e.binding.clone()).collect()
    }

    /// Returns the member that takes a request for a service ID at an address. `has`: whether a member receives at that address.
    pub(super) fn listener(&self, service: u64, to: IpAddr, has: impl Fn(Place) -> bool) -> Option<Place> {
        let all = self.by_service.get(&service)?;
        let mut fitting: Vec<&Entry> = all
            .iter()
            .filter(|e| e.binding.listening && overlap(e.binding.addr, Some(to)) && has(e.place))
            .collect();
        // One for the address goes before one for all of its IP version, and that before one for all.
        fitting.sort_by_key(|e| e.binding.addr.map_or(2, |a| u8::from(a.is_unspecified())));
        fitting.first().map(|e| e.place)
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

    fn bind(ports: &mut Ports, place: Place, service: u64, addr: Option<IpAddr>, reuse: bool) -> Result<u64, InUse> {
        ports.bind(place, process(place), service, addr, reuse, 60_000)
    }

    #[test]
    fn two_processes_do_not_get_one_port() {
        let mut p = Ports::default();
        assert_eq!(bind(&mut p, A, TCP | 80, ip(1), false), Ok(TCP | 80));
        assert_eq!(bind(&mut p, B, TCP | 80, ip(1), false), Err(InUse));
        assert_eq!(bind(&mut p, B, TCP | 80, None, true), Err(InUse));
        assert_eq!(
            bind(&mut p, A, TCP | 80, ip(1), false),
            Err(InUse),
            "nor does one twice"
        );
        assert_eq!(bind(&mut p, B, TCP | 80, ip(2), false), Ok(TCP | 80));
        assert_eq!(
            bind(&mut p, B, 0x0111_0000 | 80, ip(1), false),
            Ok(0x0111_0050),
            "another port space"
        );
        p.unbind(A, TCP | 80, ip(1));
        assert_eq!(bind(&mut p, B, TCP | 80, ip(1), false), Ok(TCP | 80));
        p.remove_all(B);
        assert_eq!(bind(&mut p, A, TCP | 80, None, false), Ok(TCP | 80));
    }

    #[test]
    fn each_ip_version_has_its_ports() {
        let (v4, v6) = (Some(Ipv4Addr::UNSPECIFIED.into()), Some(Ipv6Addr::UNSPECIFIED.into()));
        let mut p = Ports::default();
        assert!(bind(&mut p, A, TCP | 80, v4, false).is_ok());
        assert!(bind(&mut p, B, TCP | 80, v6, false).is_ok());
        for taken in [None, v4, v6, ip(1), Some(Ipv6Addr::LOCALHOST.into())] {
            assert_eq!(bind(&mut p, B, TCP | 80, taken, false), Err(InUse), "{taken:?}");
        }
        assert_eq!(p.listen(A, process(A), TCP | 80, v4), Ok(()));
        assert_eq!(p.listen(B, process(B), TCP | 80, v6), Ok(()));
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
        assert_eq!(bind(&mut p, B, TCP, None, false), Err(InUse));
    }

    #[test]
    fn a_process_has_no_more_than_a_bound_and_others_have_room() {
        let mut p = Ports::default();
        for service in 1..=MAX_PER_PLACE as u64 {
            assert!(p.listen(A, process(A), service << 16 | 1, None).is_ok());
        }
        let binding = Binding {
            service: TCP | 7,
            addr: None,
            reuse: false,
            bound: true,
            listening: false,
        };
        assert_eq!(p.listen(A, process(A), TCP | 7, None), Err(InUse));
        assert_eq!(bind(&mut p, A, TCP | 7, None, false), Err(InUse));
        assert!(!p.restore(A, process(A), binding.clone()));
        assert_eq!(p.of(A).len(), MAX_PER_PLACE);
        assert!(p.restore(B, process(B), binding));
        p.unlisten(A, 1 << 16 | 1, None);
        assert_eq!(bind(&mut p, A, TCP | 8, None, false), Ok(TCP | 8));
    }

    #[test]
    fn a_port_may_be_shared_until_somebody_listens() {
        let mut p = Ports::default();
        assert!(bind(&mut p, A, TCP | 7, None, true).is_ok());
        assert!(bind(&mut p, B, TCP | 7, None, true).is_ok());
        assert_eq!(p.listen(A, process(A), TCP | 7, None), Err(InUse));
        p.remove_all(B);
        assert_eq!(p.listen(A, process(A), TCP | 7, None), Ok(()));
        assert_eq!(bind(&mut p, B, TCP | 7, None, true), Err(InUse));
        // Bound and listening end one by one.
        p.unlisten(A, TCP | 7, None);
        assert_eq!(p.of(A).len(), 1);
        p.unbind(A, TCP | 7, None);
        assert!(p.of(A).is_empty() && p.by_service.is_empty());
    }

    #[test]
    fn nobody_is_given_back_what_another_has() {
        let mut p = Ports::default();
        p.listen(A, process(A), TCP | 7, None).unwrap();
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
        p.listen(B, process(B), TCP | 7, None).unwrap();
        p.listen(C, process(C), TCP | 7, None).unwrap();
        assert_eq!(p.listen(A, process(A), TCP | 7, ip(1)), Err(InUse));
        assert_eq!(
            p.listener(TCP | 7, [127, 0, 0, 1].into(), |place| place == C),
            Some(C),
            "only C is there"
        );
        assert_eq!(p.listener(TCP | 8, [127, 0, 0, 1].into(), all), None);
        p.remove_all(B);
        p.listen(C, process(C), TCP | 7, ip(1)).unwrap();
        p.listen(B, process(B), TCP | 7, ip(2)).unwrap();
        assert_eq!(
            p.listener(TCP | 7, [127, 0, 0, 2].into(), all),
            Some(B),
            "the address goes before all"
        );
        assert_eq!(p.listener(TCP | 7, [127, 0, 0, 3].into(), all), Some(C));
        p.unlisten(C, TCP | 7, None);
        assert_eq!(p.listener(TCP | 7, [127, 0, 0, 3].into(), all), None);
    }
}
