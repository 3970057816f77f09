//! Data and holes of an image file, asked of the file system seek by seek. It is a snapshot: others write meanwhile, and a part
//! that was a hole may have data when it is told. Where nobody knows, all is data.

use rnbd::{
    Errno,
    block::{self, Extent},
};

/// Next seek.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Seek {
    /// The first data from a position on.
    Data(u64),
    /// The first hole.
    Hole(u64),
    /// The end of the file, as there is no data up to it.
    End,
}

/// A walk over a range, with the extents that are found. They begin and end at multiples of the unit: a unit that has any data is
/// data.
#[derive(Debug)]
pub(crate) struct Walk {
    /// Extents found so far reach from the beginning of the range to here.
    at: u64,
    end: u64,
    unit: u64,
    most: usize,
    seek: Seek,
    /// Seeks that are left: a file that is changed all the time would lead nowhere.
    left: usize,
    found: Vec<Extent>,
}

impl Walk {
    /// Over `len` bytes from `offset` on, which are whole units, until there are `most` extents.
    pub(crate) fn new(offset: u64, len: u64, unit: u64, most: u32) -> Self {
        let most = most as usize;
        Self {
            at: offset,
            end: offset + len,
            unit: unit.max(1),
            most,
            seek: Seek::Data(offset),
            // Two for each extent, and as many again for those that are too small to count.
            left: 4 * most + 16,
            found: Vec::new(),
        }
    }

    /// The position and the kind of the next seek.
    pub(crate) fn next(&self) -> (u64, i32) {
        match self.seek {
            Seek::Data(from) => (from, libc::SEEK_DATA),
            Seek::Hole(from) => (from, libc::SEEK_HOLE),
            Seek::End => (0, libc::SEEK_END),
        }
    }

    /// Takes what it has returned. True: that was the last one.
    pub(crate) fn returned(&mut self, result: Result<usize, Errno>) -> bool {
        self.left = self.left.saturating_sub(1);
        match (self.seek, result) {
            (Seek::Data(_), Ok(data)) => {
                let data = data as u64;
                let whole = data / self.unit * self.unit;
                let over = self.reach(if data < self.end { whole } else { self.end }, Extent::hole);
                self.seek = Seek::Hole(data.max(self.at));
                over || self.gives_up()
            }
            (Seek::Hole(_), Ok(hole)) => {
                let hole = (hole as u64).min(self.end).next_multiple_of(self.unit);
                let over = self.reach(hole.min(self.end), Extent::data);
                self.seek = Seek::Data(self.at);
                over || self.gives_up()
            }
            // A hole up to the end of the file, if the range is inside it still.
            (Seek::Data(_), Err(Errno::ENXIO)) => {
                self.seek = Seek::End;
                false
            }
            (Seek::End, Ok(size)) if size as u64 >= self.end => self.reach(self.end, Extent::hole) || self.give_up(),
            // It was cut, or the file system has no seeks of this kind (EINVAL).
            (_, Ok(_) | Err(_)) => self.give_up(),
        }
    }

    /// Extends the next extent up to here. True: there is no room for it, or it is the last.
    fn reach(&mut self, to: u64, extent: impl FnOnce(u64) -> Extent) -> bool {
        if to > self.at {
            let next = extent(to - self.at);
            if self.found.len() == self.most && !self.found.last().is_some_and(|last| last.is_like(&next)) {
                return true;
            }
            block::append(&mut self.found, next);
            self.at = to;
        }
        self.at >= self.end
    }

    fn gives_up(&mut self) -> bool {
        self.left == 0 && self.give_up()
    }

    /// The rest is data.
    fn give_up(&mut self) -> bool {
        self.reach(self.end, Extent::data);
        true
    }

    /// Returns the extents.
    pub(crate) fn extents(&self) -> &[Extent] {
        &self.found
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Models `lseek` on a file of which each byte has data or not.
    fn lseek(file: &[bool], (from, whence): (u64, i32)) -> Result<usize, Errno> {
        let rest = file.get(from as usize..).unwrap_or_default();
        let first = |data| rest.iter().position(|has| *has == data).map(|at| from as usize + at);
        match whence {
            libc::SEEK_END => Ok(file.len()),
            _ if rest.is_empty() => Err(Errno::ENXIO),
            libc::SEEK_DATA => first(true).ok_or(Errno::ENXIO),
            _ => Ok(first(false).unwrap_or(file.len())),
        }
    }

    /// Walks to the end, asking as often as it may at most.
    fn walk(mut walk: Walk, mut answer: impl FnMut((u64, i32)) -> Result<usize, Errno>) -> Vec<Extent> {
        for _ in 0..=walk.left {
            if walk.returned(answer(walk.next())) {
                return walk.extents().to_vec();
            }
        }
        panic!("it does not end: {walk:?}");
    }

    proptest! {
        /// Against a model that knows of each unit whether it has any data.
        #[test]
        fn holes_are_what_has_no_data(
            parts in prop::collection::vec((1usize..40, any::<bool>()), 1..12),
            unit in 1u64..9,
            (begin, len) in (0u64..20, 1u64..40),
            most in 1u32..6,
        ) {
            let file: Vec<bool> = parts.iter().flat_map(|(len, data)| vec![*data; *len]).collect();
            let units = file.len() as u64 / unit;
            prop_assume!(begin < units);
            let (begin, len) = (begin * unit, len.min(units - begin) * unit);
            let mut want = Vec::new();
            for bytes in file[begin as usize..(begin + len) as usize].chunks(unit as usize) {
                let has_data = bytes.iter().any(|data| *data);
                block::append(&mut want, if has_data { Extent::data(unit) } else { Extent::hole(unit) });
            }
            let all = walk(Walk::new(begin, len, unit, 100), |seek| lseek(&file, seek));
            prop_assert_eq!(&all, &want);
            let some = walk(Walk::new(begin, len, unit, most), |seek| lseek(&file, seek));
            prop_assert_eq!(&some[..], &want[..want.len().min(most as usize)]);
        }

        /// Whatever a file system says, and however the file changes, the extents fit the range.
        #[test]
        fn nonsense_leads_to_an_end_and_stays_inside(
            answers in prop::collection::vec(prop_oneof![
                (0usize..200).prop_map(Ok),
                Just(Ok(usize::MAX >> 1)),
                prop::sample::select(vec![Errno::ENXIO, Errno::EINVAL, Errno::EIO]).prop_map(Err),
            ], 1..40),
            unit in 1u64..9,
            (offset, len) in (0u64..100, 1u64..100),
            most in 1u32..6,
        ) {
            let mut answers = answers.iter().cycle();
            let found = walk(Walk::new(offset, len, unit, most), |_| *answers.next().unwrap());
            prop_assert!((1..=most as usize).contains(&found.len()));
            prop_assert!(found.iter().all(|e| e.len > 0));
            prop_assert!(found.iter().map(|e| e.len).sum::<u64>() <= len);
            prop_assert!(found.windows(2).all(|pair| !pair[0].is_like(&pair[1])));
        }
    }

    #[test]
    fn what_nobody_knows_is_data() {
        let all = [Extent::data(4096)];
        assert_eq!(walk(Walk::new(0, 4096, 512, 8), |_| Err(Errno::EINVAL)), all);
        // The file was cut: there is nothing any more that could be told of as zeroes.
        assert_eq!(
            walk(Walk::new(0, 4096, 512, 8), |seek| lseek(&[false; 1024], seek)),
            all
        );
        let file = [vec![false; 1024], vec![true; 512]].concat();
        assert_eq!(
            walk(Walk::new(0, 4096, 512, 8), |seek| lseek(&file, seek)),
            [Extent::hole(1024), Extent::data(3072)]
        );
    }
}
