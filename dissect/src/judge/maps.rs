//! Congestion maps that one side has sent, and which of them its peer has.

use std::collections::VecDeque;

use ::rds::proto::{BITMAP_FRAGMENTS, BitmapFragment};

/// Congested ports of a map that are remembered; a map with more of them is not judged by.
const MAX_PORTS: usize = 256;
/// Maps on their way that are remembered.
const MAX_SENT: usize = 4;
/// Time in which the peer may send messages that were queued before it got the map, nanoseconds.
const QUEUED_NS: u64 = 1_000_000_000;

/// Congested ports, ascending; `None`: too many.
type Ports = Option<Vec<u16>>;

/// Map that was sent.
#[derive(Debug)]
struct Sent {
    /// Last PSN.
    psn: i64,
    frame: u64,
    ports: Ports,
}

/// Map that the peer has.
#[derive(Debug)]
struct Acknowledged {
    frame: u64,
    /// Time of the acknowledgement since which all maps have had its ports.
    time_ns: u64,
    ports: Vec<u16>,
}

/// Maps of one side.
#[derive(Default, Debug)]
pub(super) struct Maps {
    /// Ports in the fragments so far, and how many these are.
    part: Option<(u32, Ports)>,
    /// On their way, the oldest first.
    sent: VecDeque<Sent>,
    /// Ports that maps have had since the time of each: those that became congested later have their own entry.
    shown: Vec<Acknowledged>,
}

impl Maps {
    /// Forgets everything: a map may be missing in the capture.
    pub(super) fn lost(&mut self) {
        *self = Self::default();
    }

    /// Takes a fragment of a map.
    pub(super) fn fragment(&mut self, index: u32, data: &[u8], psn: i64, frame: u64) {
        let Ok(fragment) = BitmapFragment::parse(index, data) else {
            self.lost();
            return;
        };
        let before = match index {
            0 => Some(Vec::new()),
            _ => match self.part.take() {
                Some((count, ports)) if count == index => ports,
                _ => None,
            },
        };
        let ports = before.and_then(|mut ports| {
            ports.extend(fragment.ports().take(MAX_PORTS + 1));
            (ports.len() <= MAX_PORTS).then_some(ports)
        });
        if index + 1 < BITMAP_FRAGMENTS {
            self.part = Some((index + 1, ports));
            return;
        }
        // It is there from now on: a port that it frees may be sent to.
        self.keep(&ports);
        if self.sent.len() >= MAX_SENT {
            self.sent.pop_front();
        }
        self.sent.push_back(Sent { psn, frame, ports });
    }

    /// Forgets ports that are not in a newer map.
    fn keep(&mut self, ports: &Ports) {
        let in_newer = |port: &u16| ports.as_ref().is_some_and(|ports| ports.binary_search(port).is_ok());
        for shown in &mut self.shown {
            shown.ports.retain(in_newer);
        }
        for sent in &mut self.sent {
            if let Some(ports) = &mut sent.ports {
                ports.retain(in_newer);
            }
        }
        self.shown.retain(|shown| !shown.ports.is_empty());
    }

    /// Notes that the peer has everything up to this PSN.
    pub(super) fn acknowledged(&mut self, psn: i64, time_ns: u64) {
        while self.sent.front().is_some_and(|sent| sent.psn <= psn)
            && let Some(sent) = self.sent.pop_front()
        {
            let mut ports = sent.ports.unwrap_or_default();
            let known = |port: &u16| self.shown.iter().any(|shown| shown.ports.contains(port));
            ports.retain(|port| !known(port));
            if !ports.is_empty() && self.shown.len() < MAX_PORTS {
                self.shown.push(Acknowledged {
                    frame: sent.frame,
                    time_ns,
                    ports,
                });
            }
        }
    }

    /// Returns the frame of the map by which a port has been congested for so long that no new message goes there. `trouble_ns` is when
    /// the peer last had to send something again.
    pub(super) fn congested(&self, port: u16, now_ns: u64, trouble_ns: u64) -> Option<u64> {
        let since = |shown: &&Acknowledged| shown.ports.binary_search(&port).is_ok();
        let shown = self.shown.iter().find(since)?;
        let quiet = now_ns.saturating_sub(shown.time_ns.max(trouble_ns)) >= QUEUED_NS;
        quiet.then_some(shown.frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Sends a map with these ports, the last PSN of which is `psn`.
    fn send(maps: &mut Maps, psn: i64, ports: &[u16]) {
        let mut map = ::rds::proto::CongestionMap::default();
        for port in ports {
            map.set(*port, true);
        }
        for index in 0..BITMAP_FRAGMENTS {
            let fragment = map.fragment(index).unwrap();
            maps.fragment(index, fragment.bytes(), psn, psn as u64);
        }
    }

    #[test]
    fn a_port_is_congested_from_the_acknowledgement_of_a_map_until_another_frees_it() {
        let mut maps = Maps::default();
        send(&mut maps, 2, &[7, 40_000]);
        assert_eq!(maps.congested(7, 10 * SECOND, 0), None, "the peer may not have it");
        maps.acknowledged(1, SECOND);
        assert_eq!(maps.congested(7, 10 * SECOND, 0), None);
        maps.acknowledged(2, SECOND);
        assert_eq!(maps.congested(7, 2 * SECOND - 1, 0), None, "messages may be queued");
        assert_eq!(maps.congested(7, 2 * SECOND, 0), Some(2));
        assert_eq!(maps.congested(7, 2 * SECOND, SECOND + 1), None, "packets came again");
        send(&mut maps, 4, &[7, 8]);
        assert_eq!(
            maps.congested(40_000, 9 * SECOND, 0),
            None,
            "it was freed, whether the peer knows or not"
        );
        assert_eq!(maps.congested(7, 9 * SECOND, 0), Some(2));
        maps.acknowledged(4, 3 * SECOND);
        assert_eq!(maps.congested(7, 3 * SECOND, 0), Some(2), "since the first map");
        assert_eq!(maps.congested(8, 4 * SECOND, 0), Some(4));
    }

    #[test]
    fn maps_with_many_ports_and_lost_ones_are_not_judged_by() {
        let mut maps = Maps::default();
        let ports: Vec<u16> = (0..300).collect();
        send(&mut maps, 2, &ports);
        maps.acknowledged(2, 0);
        assert_eq!(maps.congested(7, 10 * SECOND, 0), None);
        for n in 0..100 {
            send(&mut maps, n, &ports[..MAX_PORTS]);
            assert!(maps.sent.len() <= MAX_SENT);
        }
        maps.acknowledged(100, 0);
        assert_eq!(maps.congested(7, 10 * SECOND, 0), Some(96));
        let kept: usize = maps.shown.iter().map(|shown| shown.ports.len()).sum();
        assert_eq!(kept, MAX_PORTS);
        maps.lost();
        assert_eq!(maps.congested(7, 10 * SECOND, 0), None);
    }
}
