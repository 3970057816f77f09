//! Receives datagrams from the sockets of a datapath, several with one system call.

use std::{io, os::fd::BorrowedFd};

use roce_port::RxMeta;

use crate::{
    datapath::{DatapathCounters, Received, packets},
    sys::RecvRing,
};

/// Buffers of one receive call. Merged buffers fill all 64 KiB, so fewer of those are taken at a time.
const SLOTS: usize = 64;
/// As many merged buffers as stay in a second-level cache until they are handled.
const MERGED: usize = 4;

/// Receive buffers, which the sockets of a datapath use in turn.
pub(crate) struct Intake {
    ring: RecvRing,
    /// Messages to ask for at a time: fewer while merged buffers come.
    vlen: usize,
}

impl Intake {
    /// Allocates buffers for messages of up to `longest` bytes.
    ///
    /// # Errors
    /// Without memory.
    pub(crate) fn new(longest: usize) -> io::Result<Self> {
        Ok(Self {
            ring: RecvRing::new(SLOTS, longest)?,
            vlen: MERGED,
        })
    }

    /// Receives about `budget` packets from a socket. `read` returns the datagram of a message of the ring; `None`: it is malformed.
    pub(crate) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        budget: usize,
        counters: &mut DatapathCounters,
        handle: &mut dyn FnMut(&RxMeta, &[u8]),
        read: impl for<'r> Fn(&'r RecvRing, usize) -> Option<(RxMeta, &'r [u8])>,
    ) -> Received {
        let (mut datagrams, mut taken, mut emptied) = (0, 0, false);
        while taken < budget && !emptied {
            // Looking for a further one costs as much as finding that there is none.
            let asked = self.vlen.min(budget);
            let got = match self.ring.receive(socket, asked) {
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => 0,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => {
                    // An ICMP error can't come here (unconnected); whatever it is, the next call tells.
                    tracing::debug!("receiving failed: {e}");
                    counters.rx_errors += 1;
                    0
                }
            };
            emptied = got < asked;
            if got == 0 {
                break;
            }
            let mut merged = false;
            for i in 0..got {
                let Some((meta, bytes)) = read(&self.ring, i) else {
                    counters.rx_malformed += 1;
                    taken += 1;
                    continue;
                };
                merged |= meta.segment_len > 0;
                taken += packets(&meta, bytes).count().max(1);
                handle(&meta, bytes);
            }
            counters.rx_calls += 1;
            counters.rx_datagrams += got as u64;
            datagrams += got;
            self.vlen = if merged { MERGED } else { self.ring.slots() };
        }
        Received {
            datagrams,
            more: !emptied,
        }
    }
}
