//! Operations that were begun, and the rules for their ends.

use std::collections::BTreeMap;

use roce_sim::Check;

/// Operation.
#[derive(Debug)]
struct Begun {
    len: usize,
    /// The peer has reported it.
    is_served: bool,
    /// It has ended at its own side.
    is_over: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    operations: BTreeMap<u64, Begun>,
    next: u64,
    pub(crate) done: u64,
}

/// Returns the bytes of an operation, or of a host's memory for GETs.
pub(crate) fn content(number: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|i| (number.wrapping_mul(31).wrapping_add(i * 7 + i / 251)) as u8)
        .collect()
}

impl Ledger {
    /// Returns the number of a new operation.
    pub(crate) fn begin(&mut self, len: usize) -> u64 {
        self.next += 1;
        let begun = Begun {
            len,
            is_served: false,
            is_over: false,
        };
        self.operations.insert(self.next, begun);
        self.next
    }

    /// Operations that were begun.
    pub(crate) fn begun(&self) -> u64 {
        self.next
    }

    /// A PUT has come, with these bytes.
    pub(crate) fn put(&mut self, number: u64, data: &[u8]) -> Check {
        let Some(begun) = self.operations.get_mut(&number) else {
            return Err(format!("PUT {number} was never begun"));
        };
        if core::mem::replace(&mut begun.is_served, true) {
            return Err(format!("PUT {number} comes twice"));
        }
        if data != content(number, begun.len) {
            return Err(format!(
                "PUT {number} comes with {} bytes, not its own {}",
                data.len(),
                begun.len
            ));
        }
        Ok(())
    }

    /// An operation has ended well. `is_told`: its peer has said so.
    pub(crate) fn done(&mut self, number: u64, len: u32, is_told: bool) -> Check {
        self.over(number)?;
        self.done += 1;
        let begun = &self.operations[&number];
        if len as usize != begun.len {
            return Err(format!("operation {number} of {} bytes ends with {len}", begun.len));
        }
        match is_told && !begun.is_served {
            true => Err(format!("PUT {number} is acknowledged, and has not come")),
            false => Ok(()),
        }
    }

    /// An operation has ended.
    pub(crate) fn over(&mut self, number: u64) -> Check {
        let Some(begun) = self.operations.get_mut(&number) else {
            return Err(format!("operation {number} was never begun"));
        };
        match core::mem::replace(&mut begun.is_over, true) {
            true => Err(format!("operation {number} ends twice")),
            false => Ok(()),
        }
    }
}
