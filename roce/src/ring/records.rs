//! Bytes of a ring: records of packets, the oldest of which make room for new ones.

use std::{
    collections::TryReserveError,
    net::{IpAddr, Ipv6Addr, SocketAddr},
};

/// Bytes of a record in front of its packet.
pub(super) const HEADER: usize = 48;

/// Packet of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Record<'a> {
    /// Nanoseconds since 1970.
    pub(super) time_ns: u64,
    pub(super) from: SocketAddr,
    pub(super) to: SocketAddr,
    /// Position in a segmented send or merged buffer.
    pub(super) index: u16,
    /// UDP payload.
    pub(super) bytes: &'a [u8],
}

fn octets(addr: IpAddr) -> [u8; 16] {
    match addr {
        IpAddr::V4(addr) => addr.to_ipv6_mapped().octets(),
        IpAddr::V6(addr) => addr.octets(),
    }
}

impl<'a> Record<'a> {
    /// Encodes all but the packet: time, addresses, ports, index and length.
    fn header(&self, len: u16) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[..8].copy_from_slice(&self.time_ns.to_ne_bytes());
        out[8..24].copy_from_slice(&octets(self.from.ip()));
        out[24..40].copy_from_slice(&octets(self.to.ip()));
        let numbers = [self.from.port(), self.to.port(), self.index, len].map(u16::to_ne_bytes);
        out[40..].copy_from_slice(numbers.as_flattened());
        out
    }

    /// Takes the first record out of copied ones.
    pub(super) fn take(copied: &mut &'a [u8]) -> Option<Self> {
        let (header, rest) = copied.split_first_chunk::<HEADER>()?;
        let (bytes, rest) = rest.split_at_checked(usize::from(number(header, 46)))?;
        *copied = rest;
        let (time, addrs) = header.split_first_chunk::<8>()?;
        let (from, addrs) = addrs.split_first_chunk::<16>()?;
        let (to, _) = addrs.split_first_chunk::<16>()?;
        let end = |addr: &[u8; 16], port| SocketAddr::new(Ipv6Addr::from(*addr).to_canonical(), port);
        Some(Self {
            time_ns: u64::from_ne_bytes(*time),
            from: end(from, number(header, 40)),
            to: end(to, number(header, 42)),
            index: number(header, 44),
            bytes,
        })
    }
}

fn number(header: &[u8; HEADER], at: usize) -> u16 {
    u16::from_ne_bytes([header[at], header[at + 1]])
}

/// Records, and a copy of them that is under way.
///
/// While records are copied, new ones replace only those that are copied already. If there is no room, the copy goes on to the newest
/// record, new packets are left out until it is done, and then the ring starts again: neither a copy nor the ring has a gap.
#[derive(Debug)]
pub(super) struct Records {
    /// Grows to `size`, which it has the capacity of.
    bytes: Vec<u8>,
    size: usize,
    /// Bytes written since the beginning; the place of a byte is its number modulo `size`.
    head: u64,
    /// Begin of the oldest record.
    tail: u64,
    copy: Option<Copy>,
}

/// Copy of records that is under way.
#[derive(Debug)]
struct Copy {
    /// Begin of the next record.
    next: u64,
    /// Records that begin before this are skipped.
    from: u64,
    end: u64,
    /// Packets were left out: the copy goes on to the newest record.
    has_gap: bool,
}

impl Records {
    /// Reserves `size` bytes.
    ///
    /// # Errors
    /// When there is not so much memory.
    pub(super) fn new(size: usize) -> Result<Self, TryReserveError> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(size)?;
        Ok(Self {
            bytes,
            size,
            head: 0,
            tail: 0,
            copy: None,
        })
    }

    /// Adds a packet. The oldest ones make room.
    pub(super) fn push(&mut self, record: &Record<'_>) {
        let need = HEADER + record.bytes.len();
        let len = u16::try_from(record.bytes.len());
        let fits = need <= self.size && self.make_room(need);
        match (len, fits) {
            (Ok(len), true) => {
                self.put(&record.header(len));
                self.put(record.bytes);
            }
            _ => self.leave_out(),
        }
    }

    fn leave_out(&mut self) {
        match &mut self.copy {
            Some(copy) if !copy.has_gap => (copy.has_gap, copy.end) = (true, self.head),
            Some(_) => {}
            None => self.tail = self.head,
        }
    }

    /// Removes the oldest records until there is room. False: they are yet to be copied.
    fn make_room(&mut self, need: usize) -> bool {
        if self.copy.as_ref().is_some_and(|copy| copy.has_gap) {
            return false;
        }
        while self.head - self.tail + need as u64 > self.size as u64 {
            if self
                .copy
                .as_ref()
                .is_some_and(|copy| (copy.next..copy.end).contains(&self.tail))
            {
                return false;
            }
            self.tail += self.len_at(self.tail);
        }
        true
    }

    fn put(&mut self, mut part: &[u8]) {
        while !part.is_empty() {
            let at = self.place(self.head);
            let (now, later) = part.split_at(part.len().min(self.size - at));
            match self.bytes.get_mut(at..at + now.len()) {
                Some(place) => place.copy_from_slice(now),
                // In the first round.
                None => self.bytes.extend_from_slice(now),
            }
            self.head += now.len() as u64;
            part = later;
        }
    }

    fn place(&self, at: u64) -> usize {
        (at % self.size as u64) as usize
    }

    /// Returns the length of the record that begins here, bytes.
    fn len_at(&self, at: u64) -> u64 {
        let byte = |n: u64| self.bytes[self.place(at + n)];
        let len = u16::from_ne_bytes([byte(46), byte(47)]);
        HEADER as u64 + u64::from(len)
    }

    /// Begins to copy the records, or those that begin in the last `last` bytes. False: a copy is under way.
    pub(super) fn begin_copy(&mut self, last: u64) -> bool {
        if self.copy.is_some() {
            return false;
        }
        self.copy = Some(Copy {
            next: self.tail,
            from: self.head.saturating_sub(last),
            end: self.head,
            has_gap: false,
        });
        true
    }

    /// Copies whole records to `out`, which is emptied first: about `most` bytes, the skipped ones included. False: there are no more.
    pub(super) fn copy(&mut self, out: &mut Vec<u8>, most: usize) -> bool {
        out.clear();
        let Some(copy) = &self.copy else { return false };
        let (mut next, from, end) = (copy.next, copy.from, copy.end);
        let stop = next + most as u64;
        while next < end && next < stop {
            let after = next + self.len_at(next);
            if next >= from {
                let (begin, len) = (self.place(next), (after - next) as usize);
                let first = len.min(self.size - begin);
                out.extend_from_slice(&self.bytes[begin..begin + first]);
                out.extend_from_slice(&self.bytes[..len - first]);
            }
            next = after;
        }
        if let Some(copy) = &mut self.copy {
            copy.next = next;
        }
        next < end || !out.is_empty()
    }

    /// Ends the copy.
    pub(super) fn end_copy(&mut self) {
        if self.copy.take().is_some_and(|copy| copy.has_gap) {
            self.tail = self.head;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = HEADER + 10;
    const NONE: [u8; 0] = [];

    fn push(ring: &mut Records, n: u8, len: usize) {
        ring.push(&Record {
            time_ns: n.into(),
            from: "192.0.2.1:49152".parse().unwrap(),
            to: "[2001:db8::1]:4791".parse().unwrap(),
            index: n.into(),
            bytes: &vec![n; len],
        });
    }

    fn numbers(mut copied: &[u8]) -> Vec<u8> {
        let records = std::iter::from_fn(|| Record::take(&mut copied));
        let numbers = records.map(|record| {
            let n = record.bytes[0];
            assert!(record.bytes.iter().all(|byte| *byte == n));
            assert_eq!((record.time_ns, record.index), (n.into(), n.into()));
            assert_eq!(record.from.to_string(), "192.0.2.1:49152");
            assert_eq!(record.to.to_string(), "[2001:db8::1]:4791");
            n
        });
        numbers.collect()
    }

    fn copied(ring: &mut Records, last: u64, most: usize) -> Vec<u8> {
        assert!(ring.begin_copy(last));
        let (mut all, mut part) = (Vec::new(), Vec::new());
        while ring.copy(&mut part, most) {
            all.extend(numbers(&part));
        }
        ring.end_copy();
        all
    }

    fn all(ring: &mut Records) -> Vec<u8> {
        copied(ring, u64::MAX, 1 << 20)
    }

    #[test]
    fn the_oldest_make_room_wherever_the_end_is() {
        for size in [3 * LEN, 3 * LEN + 1, 4 * LEN - 1] {
            let mut ring = Records::new(size).unwrap();
            assert_eq!(all(&mut ring), NONE);
            for n in 0..100 {
                push(&mut ring, n, 10);
                let expected: Vec<u8> = (n.saturating_sub(2)..=n).collect();
                assert_eq!(all(&mut ring), expected, "{size}");
                assert!(ring.bytes.len() <= size);
            }
            assert_eq!(ring.bytes.len(), size);
        }
    }

    #[test]
    fn a_packet_may_fill_the_ring_and_a_larger_one_is_left_out() {
        let mut ring = Records::new(2 * LEN).unwrap();
        push(&mut ring, 1, 10);
        push(&mut ring, 2, 2 * LEN - HEADER);
        assert_eq!(all(&mut ring), [2]);
        push(&mut ring, 3, 10);
        push(&mut ring, 4, 2 * LEN - HEADER + 1);
        assert_eq!(all(&mut ring), NONE, "no gap in the ring");
        push(&mut ring, 5, 10);
        assert_eq!(all(&mut ring), [5]);
        for n in 6..60 {
            push(&mut ring, n, usize::from(n));
        }
        assert_eq!(all(&mut ring), [59]);
    }

    #[test]
    fn a_packet_longer_than_any_datagram_is_left_out() {
        let mut ring = Records::new(1 << 20).unwrap();
        push(&mut ring, 1, 65_535);
        push(&mut ring, 2, 65_536);
        assert_eq!(all(&mut ring), NONE);
    }

    #[test]
    fn the_last_bytes_alone() {
        let mut ring = Records::new(5 * LEN).unwrap();
        (0..7).for_each(|n| push(&mut ring, n, 10));
        let last = |ring: &mut Records, bytes: usize| copied(ring, bytes as u64, LEN);
        assert_eq!(last(&mut ring, 2 * LEN), [5, 6]);
        assert_eq!(last(&mut ring, 2 * LEN - 1), [6]);
        assert_eq!(last(&mut ring, 1), NONE);
        assert_eq!(last(&mut ring, 100 * LEN), [2, 3, 4, 5, 6], "all are still there");
    }

    #[test]
    fn what_comes_during_a_copy_replaces_what_is_copied() {
        let mut ring = Records::new(4 * LEN).unwrap();
        (0..4).for_each(|n| push(&mut ring, n, 10));
        let mut part = Vec::new();
        assert!(ring.begin_copy(u64::MAX) && !ring.begin_copy(u64::MAX));
        for n in 0..4 {
            assert!(ring.copy(&mut part, 1));
            assert_eq!(numbers(&part), [n]);
            push(&mut ring, 10 + n, 10);
        }
        assert!(!ring.copy(&mut part, 1), "those that came later are not of the copy");
        ring.end_copy();
        assert_eq!(all(&mut ring), [10, 11, 12, 13]);
    }

    #[test]
    fn a_copy_that_does_not_keep_up_goes_on_to_the_gap() {
        let mut ring = Records::new(4 * LEN).unwrap();
        (0..4).for_each(|n| push(&mut ring, n, 10));
        let mut part = Vec::new();
        assert!(ring.begin_copy(u64::MAX) && ring.copy(&mut part, 1));
        (10..20).for_each(|n| push(&mut ring, n, 10));
        let mut rest = Vec::new();
        while ring.copy(&mut part, 1) {
            rest.extend(numbers(&part));
        }
        assert_eq!(rest, [1, 2, 3, 10], "nothing is missing before the gap");
        ring.end_copy();
        assert_eq!(all(&mut ring), NONE);
        push(&mut ring, 20, 10);
        assert_eq!(all(&mut ring), [20]);
    }
}
