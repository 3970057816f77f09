//! What a front end of vhost-user-blk sends, and what its guest has in its memory: nothing of it panics, no request has data outside the
//! guest's memory, each ends, and nothing is left in the end.

use std::sync::Arc;

use rnbd_host::fuzz::{self, Memories};
use roce_mem::Pages;
use roce_verbs::Instant;
use rtrs::{
    client::{Buffer, Buffers, LentId},
    cx::Cx,
};

use crate::provider::Scripted;

const MAX_INPUT: usize = 8 << 10;

/// Buffers of a session without devices.
struct Lent {
    provider: Scripted,
    buffers: Buffers,
}

impl Lent {
    fn with<R>(&mut self, f: impl FnOnce(&mut Buffers, &mut Cx<'_>) -> R) -> R {
        let cx = &mut Cx {
            now: Instant::from_nanos(0),
            provider: &mut self.provider,
            random: &mut |out: &mut [u8]| out.fill(7),
        };
        f(&mut self.buffers, cx)
    }
}

impl Memories for Lent {
    fn lend(&mut self, memory: Arc<Pages>) -> LentId {
        let lent = self.with(|buffers, cx| buffers.lend(cx, memory));
        lent.expect("without devices nothing is in the way")
    }

    fn take_back(&mut self, id: LentId) {
        self.with(|buffers, cx| buffers.take_back(cx, id));
    }

    fn check(&self, buffer: &Buffer) {
        let mut out = vec![0; buffer.len()];
        self.buffers
            .read(buffer, 0, &mut out)
            .expect("all of it is in the memory");
    }
}

/// The target.
///
/// # Panics
/// When something does not hold.
pub fn run(data: &[u8]) {
    let data = &data[..data.len().min(MAX_INPUT)];
    let mut lent = Lent {
        provider: Scripted::new(&[]),
        buffers: Buffers::new(0),
    };
    fuzz::run(data, &mut lent);
}
