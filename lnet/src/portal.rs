//! Portals: memory of users that operations of peers reach by match bits.

use std::collections::BTreeMap;

use bitflags::bitflags;

use crate::{buffer::Buffer, event::EntryId, proto::Nid};

bitflags! {
    /// Rights of peers to an entry, and their manner.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct EntryOptions: u8 {
        /// PUTs find it.
        const PUT = 1;
        /// GETs find it.
        const GET = 1 << 1;
        /// The peer says where in the memory; else each operation goes on where the last one ended.
        const MANAGE_REMOTE = 1 << 2;
        /// An operation on more than there is left is cut; else it does not find the entry.
        const TRUNCATE = 1 << 3;
        /// PUTs find it only with their data (IMMEDIATE): none keeps it in use until its data comes.
        const AT_ONCE = 1 << 4;
    }
}

/// Memory for operations of peers.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Portal.
    pub portal: u32,
    /// The only peer that may use it, if there is one.
    pub from: Option<Nid>,
    /// Match bits.
    pub match_bits: u64,
    /// Bits of these that may differ.
    pub ignore_bits: u64,
    /// Rights.
    pub options: EntryOptions,
    /// The memory.
    pub memory: Buffer,
    /// Operations after which it is gone.
    pub uses: Option<u32>,
}

/// Operation of a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Wanted {
    pub(crate) from: Nid,
    pub(crate) portal: u32,
    pub(crate) match_bits: u64,
    pub(crate) offset: usize,
    pub(crate) len: usize,
    pub(crate) is_put: bool,
    /// The data is there.
    pub(crate) has_data: bool,
}

/// Part of an entry's memory that an operation has.
#[derive(Clone, Debug)]
pub(crate) struct Matched {
    pub(crate) entry: EntryId,
    pub(crate) offset: usize,
    pub(crate) memory: Buffer,
}

/// Entry, and what has become of it.
#[derive(Debug)]
struct Linked {
    entry: Entry,
    /// First byte of the next operation.
    next: usize,
    /// Operations that have not ended.
    in_use: u32,
    /// It is to be found.
    is_linked: bool,
}

impl Linked {
    /// Returns the part that an operation would have.
    fn part(&self, wanted: &Wanted) -> Option<(usize, Buffer)> {
        let Entry {
            portal,
            from,
            match_bits,
            ignore_bits,
            options,
            ref memory,
            ..
        } = self.entry;
        let right = match wanted.is_put {
            true => EntryOptions::PUT,
            false => EntryOptions::GET,
        };
        let is_meant = portal == wanted.portal
            && from.is_none_or(|from| from == wanted.from)
            && (match_bits ^ wanted.match_bits) & !ignore_bits == 0;
        if options.contains(EntryOptions::AT_ONCE) && !wanted.has_data {
            return None;
        }
        if !self.is_linked || !is_meant || !options.contains(right) {
            return None;
        }
        let offset = match options.contains(EntryOptions::MANAGE_REMOTE) {
            true => wanted.offset,
            false => self.next,
        };
        let room = memory.len().checked_sub(offset)?;
        let len = wanted.len.min(room);
        let fits = len == wanted.len || options.contains(EntryOptions::TRUNCATE);
        fits.then(|| memory.part(offset, len))
            .flatten()
            .map(|part| (offset, part))
    }
}

/// All entries, in the order in which operations look for theirs.
#[derive(Debug, Default)]
pub(crate) struct Portals {
    entries: BTreeMap<EntryId, Linked>,
    next: u64,
}

impl Portals {
    /// Adds an entry behind all others.
    pub(crate) fn attach(&mut self, entry: Entry) -> EntryId {
        let id = EntryId(self.next);
        self.next += 1;
        let linked = Linked {
            entry,
            next: 0,
            in_use: 0,
            is_linked: true,
        };
        self.entries.insert(id, linked);
        id
    }

    /// No operation finds it from here on. Returns whether it is gone; else its last operation takes it away.
    pub(crate) fn detach(&mut self, id: EntryId) -> bool {
        let Some(linked) = self.entries.get_mut(&id) else {
            return false;
        };
        linked.is_linked = false;
        let is_gone = linked.in_use == 0;
        if is_gone {
            self.entries.remove(&id);
        }
        is_gone
    }

    /// Finds the memory of an operation, which is in use until [`released`](Self::released).
    pub(crate) fn find(&mut self, wanted: &Wanted) -> Option<Matched> {
        let mut found = self.entries.iter_mut();
        let (id, linked, (offset, memory)) = found.find_map(|(id, linked)| {
            let part = linked.part(wanted)?;
            Some((*id, linked, part))
        })?;
        linked.next = offset + memory.len();
        linked.in_use += 1;
        if let Some(uses) = &mut linked.entry.uses {
            *uses = uses.saturating_sub(1);
            linked.is_linked = *uses > 0;
        }
        Some(Matched {
            entry: id,
            offset,
            memory,
        })
    }

    /// An operation has ended. Returns whether the entry is gone with it.
    pub(crate) fn released(&mut self, id: EntryId) -> bool {
        let Some(linked) = self.entries.get_mut(&id) else {
            return false;
        };
        linked.in_use -= 1;
        let is_gone = linked.in_use == 0 && !linked.is_linked;
        if is_gone {
            self.entries.remove(&id);
        }
        is_gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(bits: u64, options: EntryOptions) -> Entry {
        Entry {
            portal: 9,
            from: None,
            match_bits: bits,
            ignore_bits: 0xf0,
            options,
            memory: Buffer::allocate(100).unwrap(),
            uses: None,
        }
    }

    fn wanted(bits: u64, len: usize) -> Wanted {
        Wanted {
            from: Nid::o2ib([192, 0, 2, 1].into()),
            portal: 9,
            match_bits: bits,
            offset: 30,
            len,
            is_put: true,
            has_data: true,
        }
    }

    fn found(portals: &mut Portals, wanted: &Wanted) -> Option<(u64, usize, usize)> {
        let matched = portals.find(wanted)?;
        Some((matched.entry.0, matched.offset, matched.memory.len()))
    }

    #[test]
    fn the_first_entry_that_fits_takes_an_operation() {
        let mut portals = Portals::default();
        portals.attach(entry(1, EntryOptions::GET));
        portals.attach(Entry {
            from: Some(Nid::o2ib([192, 0, 2, 9].into())),
            ..entry(1, EntryOptions::PUT)
        });
        portals.attach(entry(1, EntryOptions::PUT));
        portals.attach(entry(
            1,
            EntryOptions::PUT | EntryOptions::TRUNCATE | EntryOptions::MANAGE_REMOTE,
        ));
        assert_eq!(found(&mut portals, &wanted(0x71, 60)), Some((2, 0, 60)));
        assert_eq!(found(&mut portals, &wanted(1, 40)), Some((2, 60, 40)));
        assert_eq!(found(&mut portals, &wanted(1, 80)), Some((3, 30, 70)), "cut");
        assert_eq!(found(&mut portals, &wanted(2, 1)), None);
        assert_eq!(
            found(
                &mut portals,
                &Wanted {
                    portal: 8,
                    ..wanted(1, 1)
                }
            ),
            None
        );
        let beyond = Wanted {
            offset: 101,
            ..wanted(1, 1)
        };
        assert_eq!(found(&mut portals, &beyond), None);
    }

    #[test]
    fn an_entry_that_wants_data_at_once_is_not_found_without() {
        let mut portals = Portals::default();
        portals.attach(entry(1, EntryOptions::PUT | EntryOptions::AT_ONCE));
        let later = Wanted {
            has_data: false,
            ..wanted(1, 1)
        };
        assert_eq!(found(&mut portals, &later), None);
        assert_eq!(found(&mut portals, &wanted(1, 1)), Some((0, 0, 1)));
    }

    #[test]
    fn an_entry_is_gone_when_its_last_operation_has_ended() {
        let mut portals = Portals::default();
        let id = portals.attach(Entry {
            uses: Some(2),
            ..entry(1, EntryOptions::PUT)
        });
        assert!(found(&mut portals, &wanted(1, 1)).is_some() && !portals.released(id));
        assert!(found(&mut portals, &wanted(1, 1)).is_some() && found(&mut portals, &wanted(1, 1)).is_none());
        assert!(portals.released(id));
        let id = portals.attach(entry(1, EntryOptions::PUT));
        assert!(found(&mut portals, &wanted(1, 1)).is_some() && !portals.detach(id));
        assert!(found(&mut portals, &wanted(1, 1)).is_none() && portals.released(id));
        let id = portals.attach(entry(1, EntryOptions::PUT));
        assert!(portals.detach(id) && !portals.detach(id));
    }
}
