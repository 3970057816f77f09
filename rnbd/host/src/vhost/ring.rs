//! A ring of a front end: requests that the guest has made available, and answers that it has to look at.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use roce_verbs::Instant;

use virtio_queue::{Queue, QueueOwnedT as _, QueueT as _};
use vm_memory::{Address as _, Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, GuestRegionMmap};

use super::{MAX_RING, chain::Chain, inflight::RingInflight};

/// State of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// It has not been given what tells it of requests, or that was taken back.
    Stopped,
    Started,
    /// The guest has made nonsense of it.
    Broken,
}

/// How a ring is told of requests.
#[derive(Debug)]
enum Kick {
    Nothing,
    /// It becomes readable.
    Event(OwnedFd),
    /// The ring is looked at in each turn of the loop, and at times when there is none.
    Polled {
        /// From one of these times to the next.
        pause: Duration,
        next: Instant,
    },
}

/// The pause of a polled ring after a request. It doubles with each look that finds none.
const SHORTEST_PAUSE: Duration = Duration::from_micros(50);
/// The longest pause: what a request to an idle ring may wait, and 1000 looks a second.
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// Why a ring can't go on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RingError {
    #[error("it is not in the guest's memory")]
    Outside,
    #[error("{0}")]
    Queue(#[from] virtio_queue::Error),
    #[error("request {0} is under way already")]
    Twice(u16),
    #[error("request {0} is none of the ring's")]
    NoSuch(u16),
}

/// A ring.
#[derive(Debug)]
pub(crate) struct Ring {
    queue: Queue,
    state: State,
    enabled: bool,
    /// There may be requests.
    kicked: bool,
    kick: Kick,
    call: Option<OwnedFd>,
    err: Option<OwnedFd>,
    /// Requests that are under way, by head.
    heads: Vec<bool>,
    pub(crate) under_way: usize,
    /// Requests that were under way when the ring began: they come first, the first at the end.
    again: Vec<u16>,
    inflight: Option<RingInflight>,
    /// Answers that the guest has not been notified of.
    unnotified: bool,
}

impl Ring {
    /// # Errors
    /// Never for this size.
    pub(crate) fn new() -> Result<Self, RingError> {
        Ok(Self {
            queue: Queue::new(MAX_RING)?,
            state: State::Stopped,
            enabled: false,
            kicked: false,
            kick: Kick::Nothing,
            call: None,
            err: None,
            heads: Vec::new(),
            under_way: 0,
            again: Vec::new(),
            inflight: None,
            unnotified: false,
        })
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.state == State::Stopped
    }

    pub(crate) fn size(&self) -> u16 {
        self.queue.size()
    }

    /// # Errors
    /// When it is no power of two up to [`MAX_RING`].
    pub(crate) fn set_size(&mut self, size: u32) -> Result<(), RingError> {
        let size = u16::try_from(size).map_err(|_| virtio_queue::Error::InvalidSize)?;
        Ok(self.queue.try_set_size(size)?)
    }

    /// # Errors
    /// When one is not aligned.
    pub(crate) fn set_addresses(
        &mut self,
        table: GuestAddress,
        available: GuestAddress,
        used: GuestAddress,
    ) -> Result<(), RingError> {
        self.queue.try_set_desc_table_address(table)?;
        self.queue.try_set_avail_ring_address(available)?;
        Ok(self.queue.try_set_used_ring_address(used)?)
    }

    /// The next request is this one.
    pub(crate) fn set_base(&mut self, base: u16) {
        self.queue.set_next_avail(base);
    }

    /// Returns the index of the next request.
    pub(crate) fn base(&self) -> u16 {
        self.queue.next_avail()
    }

    pub(crate) fn set_event_idx(&mut self, on: bool) {
        self.queue.set_event_idx(on);
    }

    pub(crate) fn enable(&mut self, on: bool) {
        self.enabled = on;
        self.kicked |= on;
    }

    pub(crate) fn kicked(&mut self) {
        self.kicked = true;
    }

    /// Takes another descriptor to be told by, or none: then the ring is polled. The former comes back. The ring begins with what
    /// lies in it.
    ///
    /// # Errors
    /// When the ring can't begin. It is stopped then.
    pub(crate) fn start(
        &mut self,
        memory: &GuestMemoryMmap,
        kick: Option<OwnedFd>,
        inflight: Option<RingInflight>,
    ) -> (Option<OwnedFd>, Result<(), RingError>) {
        let former = self.replace_kick(kick.map_or(
            Kick::Polled {
                pause: SHORTEST_PAUSE,
                next: Instant::ZERO,
            },
            Kick::Event,
        ));
        let begun = match self.state {
            State::Started => Ok(()),
            State::Stopped | State::Broken => self.begin(memory, inflight),
        };
        self.kicked = true;
        (former, begun)
    }

    fn begin(&mut self, memory: &GuestMemoryMmap, inflight: Option<RingInflight>) -> Result<(), RingError> {
        self.queue.set_ready(true);
        if !self.queue.is_valid(memory) {
            return Err(RingError::Outside);
        }
        let used = self.queue.used_idx(memory, Ordering::Acquire)?.0;
        self.queue.set_next_used(used);
        self.heads = vec![false; self.queue.size().into()];
        self.inflight = inflight;
        self.again = match &mut self.inflight {
            Some(inflight) => inflight.begin(used),
            None => Vec::new(),
        };
        if self.inflight.is_some() {
            self.queue.set_next_avail(used.wrapping_add(self.again.len() as u16));
        }
        self.again.reverse();
        self.state = State::Started;
        Ok(())
    }

    fn replace_kick(&mut self, kick: Kick) -> Option<OwnedFd> {
        match core::mem::replace(&mut self.kick, kick) {
            Kick::Event(fd) => Some(fd),
            Kick::Nothing | Kick::Polled { .. } => None,
        }
    }

    /// No more requests are taken. Its descriptor comes back.
    pub(crate) fn stop(&mut self) -> Option<OwnedFd> {
        self.state = State::Stopped;
        self.queue.set_ready(false);
        self.replace_kick(Kick::Nothing)
    }

    /// When to look at a polled ring at the latest.
    pub(crate) fn next_look(&self) -> Option<Instant> {
        match self.kick {
            Kick::Polled { next, .. } if self.state == State::Started && self.enabled => Some(next),
            _ => None,
        }
    }

    /// Looks at a polled ring as if it had been kicked.
    pub(crate) fn begin_look(&mut self) {
        self.kicked |= matches!(self.kick, Kick::Polled { .. });
    }

    /// All requests of a polled ring, or as many as there is room for, have been taken: whether there were some.
    pub(crate) fn end_look(&mut self, now: Instant, found: bool) {
        let Kick::Polled { pause, next } = &mut self.kick else {
            return;
        };
        if found {
            *pause = SHORTEST_PAUSE;
        } else if *next <= now {
            *pause = (2 * *pause).min(LONGEST_PAUSE);
        } else {
            // A look of another turn in between.
            return;
        }
        *next = now + *pause;
    }

    /// The guest has made nonsense of the ring: it is told, and nothing more is taken or answered.
    pub(crate) fn broken(&mut self) {
        self.state = State::Broken;
        if let Some(err) = &self.err {
            raise(err.as_fd());
        }
    }

    /// By what the guest is notified of answers. If it missed one by that it is notified at once.
    pub(crate) fn set_call(&mut self, fd: Option<OwnedFd>) {
        self.call = fd;
        if let Some(call) = self.call.as_ref().filter(|_| self.state == State::Started) {
            raise(call.as_fd());
        }
    }

    pub(crate) fn set_err(&mut self, fd: Option<OwnedFd>) {
        self.err = fd;
    }

    /// Whether there may be a request that can be taken.
    pub(crate) fn has_work(&self) -> bool {
        let room = self.under_way < usize::from(self.queue.size());
        self.state == State::Started && self.enabled && room && (self.kicked || !self.again.is_empty())
    }

    /// The next request, which is under way from here on: its number, and the chain if it is one that can be answered. `None`: there
    /// is none, and we are told of the next.
    ///
    /// # Errors
    /// When the guest has made nonsense of the ring.
    pub(crate) fn next(&mut self, memory: &GuestMemoryMmap) -> Result<Option<(u16, Option<Chain>)>, RingError> {
        let next = match self.again.pop() {
            Some(head) => Some((head, self.read_again(memory, head)?)),
            None => self.available(memory)?,
        };
        let Some((head, chain)) = next else { return Ok(None) };
        match self.heads.get_mut(usize::from(head)) {
            Some(taken) if !*taken => *taken = true,
            Some(_) => return Err(RingError::Twice(head)),
            None => return Err(RingError::NoSuch(head)),
        }
        self.under_way += 1;
        if let Some(inflight) = &mut self.inflight {
            inflight.taken(head);
        }
        Ok(Some((head, chain)))
    }

    fn available(&mut self, memory: &GuestMemoryMmap) -> Result<Option<(u16, Option<Chain>)>, RingError> {
        for _ in 0..2 {
            // Asked this way, it tells of nonsense.
            if let Some(chain) = self.queue.iter(memory)?.next() {
                return Ok(Some((chain.head_index(), Chain::read(chain))));
            }
            self.kicked = false;
            if matches!(self.kick, Kick::Polled { .. }) {
                return Ok(None);
            }
            if !self.queue.enable_notification(memory)? {
                return Ok(None);
            }
            self.kicked = true;
        }
        // Something is available, but can't be read.
        Err(RingError::Outside)
    }

    /// A request that was under way when the ring began. It may not stand in the ring of available ones any more, so it is read as if it
    /// stood in another, behind the guest's memory.
    fn read_again(&self, memory: &GuestMemoryMmap, head: u16) -> Result<Option<Chain>, RingError> {
        const RING: usize = 4096;
        let end = memory.last_addr().checked_align_up(RING as u64);
        let at = end
            .and_then(|end| end.checked_add(RING as u64))
            .ok_or(RingError::Outside)?;
        let region = GuestRegionMmap::from_range(at, RING, None).map_err(|_| RingError::Outside)?;
        let memory = memory.insert_region(Arc::new(region)).map_err(|_| RingError::Outside)?;
        let mut queue = Queue::new(MAX_RING)?;
        queue.try_set_size(self.queue.size())?;
        queue.try_set_desc_table_address(GuestAddress(self.queue.desc_table()))?;
        queue.try_set_avail_ring_address(at)?;
        queue.set_ready(true);
        // Its index, and its first entry.
        for (offset, value) in [(2, 1), (4, head)] {
            let at = at.unchecked_add(offset);
            memory
                .write_obj(u16::to_le(value), at)
                .map_err(virtio_queue::Error::GuestMemory)?;
        }
        let chain = queue.iter(&memory)?.next().ok_or(RingError::NoSuch(head))?;
        Ok(Chain::read(chain))
    }

    /// A request is answered, with so many bytes in its room.
    ///
    /// # Errors
    /// When the guest has made nonsense of the ring.
    pub(crate) fn answer(&mut self, memory: &GuestMemoryMmap, head: u16, written: u32) -> Result<(), RingError> {
        if self.state != State::Started {
            return Ok(());
        }
        if let Some(inflight) = &self.inflight {
            inflight.answering(head);
        }
        self.queue.add_used(memory, head, written)?;
        if let Some(inflight) = &self.inflight {
            inflight.answered(head, self.queue.next_used());
        }
        self.unnotified = true;
        Ok(())
    }

    /// A request is not under way any more.
    pub(crate) fn ended(&mut self, head: u16) {
        self.under_way = self.under_way.saturating_sub(1);
        if let Some(taken) = self.heads.get_mut(usize::from(head)) {
            *taken = false;
        }
    }

    /// The guest's memory is another one.
    ///
    /// # Errors
    /// When the ring is not in it.
    pub(crate) fn look(&self, memory: &GuestMemoryMmap) -> Result<(), RingError> {
        let fit = self.state != State::Started || self.queue.is_valid(memory);
        fit.then_some(()).ok_or(RingError::Outside)
    }

    /// Notifies the guest of its answers, if it wants that.
    ///
    /// # Errors
    /// When the guest has made nonsense of the ring.
    pub(crate) fn notify(&mut self, memory: &GuestMemoryMmap) -> Result<(), RingError> {
        if !core::mem::take(&mut self.unnotified) || self.state != State::Started {
            return Ok(());
        }
        if self.queue.needs_notification(memory)?
            && let Some(call) = &self.call
        {
            raise(call.as_fd());
        }
        Ok(())
    }
}

/// Makes an event descriptor readable.
fn raise(fd: BorrowedFd<'_>) {
    // One that is full is readable.
    if let Err(e) = rustix::io::write(fd, &1u64.to_ne_bytes())
        && e != rustix::io::Errno::AGAIN
    {
        tracing::debug!("a guest can't be notified: {e}");
    }
}

/// Whether a descriptor is an event descriptor, which is told never to wait.
///
/// # Errors
/// When it is something else; those of `fcntl`.
pub(crate) fn check_event(fd: &OwnedFd) -> io::Result<()> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    if link.as_os_str() != "anon_inode:[eventfd]" {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no event descriptor"));
    }
    let flags = rustix::fs::fcntl_getfl(fd)?;
    rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?;
    Ok(())
}
