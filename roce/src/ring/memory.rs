//! Ring of packets in memory, and the report of trouble to the thread that writes it.

use std::{
    io::{self, Write},
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use parking_lot::Mutex;
use roce_icrc::{Flow, Recovery};
use roce_net::{EventFd, Tap, Trouble};
use roce_pcap::Writer;

use super::{
    cause::Cause,
    records::{Record, Records},
};

/// Bytes that are copied at a time while the ring is locked, about.
const CHUNK: usize = 64 << 10;

/// Ring of the last packets of devices. Cheap to clone.
#[derive(Clone)]
pub struct Ring(Arc<Inner>);

debug!(Ring, "Ring", |this| bytes: this.0.size);

struct Inner {
    size: usize,
    records: Mutex<Records>,
    alarm: Alarm,
}

/// Report of trouble to the thread that writes the ring.
struct Alarm {
    /// Bits of the causes that it wants to know of.
    armed: AtomicU8,
    /// Bits of those that have come.
    raised: AtomicU8,
    wake: EventFd,
}

impl Ring {
    /// Smallest size, bytes: several packets of the largest path MTU.
    pub const MIN_SIZE: usize = 64 << 10;

    /// Reserves memory for a ring. Of `size` bytes each packet takes its length, from the BTH to the ICRC, and 48 bytes.
    ///
    /// # Errors
    /// `InvalidInput` for less than [`MIN_SIZE`](Self::MIN_SIZE), and when there is not so much memory or no descriptor left.
    pub fn new(size: usize) -> io::Result<Self> {
        if size < Self::MIN_SIZE {
            let text = format!("a ring of {size} bytes: {} are the least", Self::MIN_SIZE);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(Self(Arc::new(Inner {
            size,
            records: Mutex::new(Records::new(size).map_err(io::Error::other)?),
            alarm: Alarm {
                armed: AtomicU8::new(0),
                raised: AtomicU8::new(0),
                wake: EventFd::new()?,
            },
        })))
    }

    /// Reports trouble to the thread that writes the ring. Does not wait. Other causes than trouble have no effect.
    pub fn note(&self, cause: Cause) {
        let (alarm, bit) = (&self.0.alarm, cause.bit());
        if alarm.armed.load(Ordering::Relaxed) & bit != 0 && alarm.raised.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            alarm.wake.raise();
        }
    }

    /// Returns a descriptor that is readable after a report, until [`take_raised`](Self::take_raised).
    pub(super) fn reports(&self) -> BorrowedFd<'_> {
        self.0.alarm.wake.as_fd()
    }

    /// Has reports of these causes taken, and no others.
    pub(super) fn arm(&self, causes: impl Iterator<Item = Cause>) {
        let bits = causes.fold(0, |bits, cause| bits | cause.bit());
        self.0.alarm.armed.store(bits, Ordering::Relaxed);
    }

    /// Makes the [descriptor](Self::reports) readable.
    pub(super) fn wake(&self) {
        self.0.alarm.wake.raise();
    }

    /// Returns the worst trouble that was reported since the last call.
    pub(super) fn take_raised(&self) -> Option<Cause> {
        self.0.alarm.wake.clear();
        let raised = self.0.alarm.raised.swap(0, Ordering::Relaxed);
        Cause::BAD.into_iter().find(|cause| raised & cause.bit() != 0)
    }

    /// Writes the records of the last `last` bytes as a pcap file. Returns the number of packets.
    ///
    /// # Errors
    /// `ResourceBusy` while another thread writes the ring, and those of `out`.
    pub(super) fn write(&self, out: impl Write, last: u64) -> io::Result<u64> {
        let records = &self.0.records;
        if !records.lock().begin_copy(last) {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        let done = write_copy(records, out);
        records.lock().end_copy();
        done
    }
}

fn write_copy(records: &Mutex<Records>, out: impl Write) -> io::Result<u64> {
    let mut writer = Writer::new(io::BufWriter::with_capacity(CHUNK, out))?;
    let (mut copied, mut packets) = (Vec::new(), 0);
    loop {
        // A statement of its own: the lock is not held while the copy is written.
        let more = records.lock().copy(&mut copied, CHUNK);
        if !more {
            writer.flush()?;
            return Ok(packets);
        }
        let mut rest = &copied[..];
        while let Some(record) = Record::take(&mut rest) {
            let Record {
                time_ns,
                from,
                to,
                index,
                bytes,
            } = record;
            let id = identification(from, to, index, bytes);
            writer.write(time_ns, from, to, bytes, id)?;
            packets += 1;
        }
    }
}

/// Returns the IPv4 Identification of a packet. That of a received one is not seen: it follows from the ICRC.
pub(crate) fn identification(from: SocketAddr, to: SocketAddr, index: u16, bytes: &[u8]) -> u16 {
    match Flow::try_from((from, to)).map(|flow| flow.recover(bytes, index)) {
        Ok(Recovery::Exact(id)) => id,
        _ => index,
    }
}

impl Tap for Ring {
    fn packet(&mut self, from: SocketAddr, to: SocketAddr, index: u16, bytes: &[u8]) {
        let mut records = self.0.records.lock();
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let time_ns = since.as_nanos() as u64;
        records.push(&Record {
            time_ns,
            from,
            to,
            index,
            bytes,
        });
    }

    fn trouble(&mut self, what: Trouble) {
        self.note(match what {
            Trouble::QueuePair => Cause::QueuePair,
            Trouble::Icrc => Cause::Icrc,
        });
    }
}
