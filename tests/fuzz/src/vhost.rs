//! What a front end of vhost-user-blk sends, and what its guest has in its memory: nothing of it panics, no request has data outside the
//! guest's memory, each ends, and nothing is left in the end.

use std::sync::Arc;

use rnbd_host::fuzz::{self, Memories};
use roce_verbs::Instant;
use roce_verbs::mem::Pages;
use rtrs::{
    Cx,
    client::{Buffer, Buffers, LentId},
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
    play(&data[..data.len().min(MAX_INPUT)]);
}

/// How many operations have reached the device.
fn play(data: &[u8]) -> usize {
    let mut lent = Lent {
        provider: Scripted::new(&[]),
        buffers: Buffers::new(0),
    };
    fuzz::run(data, &mut lent)
}

#[cfg(test)]
mod tests {
    use super::play;

    #[test]
    fn what_a_decent_guest_asks_for_reaches_the_device() {
        const WORK: u8 = 7;
        // A header of this kind for sector 8 at the first place; header, two sectors of data and status as a chain.
        let request = |kind: u8, data: u8| {
            let header = [3, 0, kind, 8];
            let chain = [4, 0, 3, 0x03, 0x00, data, 0x10, 0x02, 0x2b, 0xf0];
            [&header[..], &chain, &[WORK]].concat()
        };
        let (read, write) = (request(0, 0x27), request(1, 0x07));
        let begin = |config: u8| vec![config, WORK];
        let end = [6, 0, 0];
        for config in [0x3a, 0x3b, 0, 0xff] {
            let input = [&begin(config)[..], &read, &end, &write].concat();
            assert_eq!(play(&input), 2, "{config:x}");
        }
        // What has no place for a status does not.
        assert_eq!(play(&[&begin(0x3a)[..], &request(1, 0x07)[..12], &[WORK]].concat()), 0);
    }
}
