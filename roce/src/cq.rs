//! Completion queues and channels.

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use roce_net::{Driver, Spin, Waiter};
use roce_qp::{CompletionQueue as Queue, Notify};
use roce_verbs::{Completion, Qpn, provider::VerbsError};

use crate::{
    device::{Counted, Device, DeviceInner},
    engines::EngineSet,
    error::io_error,
    faults::replace_statuses,
    queue::{EventQueue, deadline},
};

/// Interval at which a waiting thread polls the ports of a device without a background thread.
const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// Completion queue.
#[derive(Clone, Debug)]
pub struct Cq(Arc<CqInner>);

#[derive(Debug)]
struct CqInner {
    queue: Arc<Queue>,
    device: Arc<DeviceInner>,
    has_channel: bool,
    /// Engines whose queue pairs complete into the queue.
    engine_set: EngineSet,
    _counted: Arc<Counted>,
}

/// Pushes a completion queue's cookie to its channel.
struct ChannelNotify {
    events: Arc<EventQueue<u64>>,
    cookie: u64,
}

impl Notify for ChannelNotify {
    fn notify(&self, _handle: u32) {
        // Ignore a closed channel: no thread waits for its events.
        let _ = self.events.push(self.cookie);
    }
}

/// Rounds requested entries up to one less than a power of two, at most `max`, as mlx5 and rdma_rxe do.
///
/// Programs rely on the entries that hardware grants beyond their request.
fn granted_entries(entries: u32, max: u32) -> Result<u32, VerbsError> {
    match (1..=max).contains(&entries) {
        true => Ok((u32::MAX >> entries.leading_zeros()).min(max)),
        false => Err(VerbsError::Invalid(format!(
            "completion queue of {entries} entries requested: 1 to {max} are possible"
        ))),
    }
}

impl Cq {
    fn notifying(device: &Device, entries: u32, notify: Option<Arc<dyn Notify>>) -> Result<Self, VerbsError> {
        let limits = &device.0.limits;
        let entries = granted_entries(entries, limits.max_cqe)?;
        let counted = device.0.cqs.take(limits.max_cq, "completion queues")?;
        let has_channel = notify.is_some();
        let handle = device.0.next_cq.fetch_add(1, Ordering::Relaxed);
        Ok(Self(Arc::new(CqInner {
            queue: Queue::new(handle, entries, notify),
            device: device.0.clone(),
            has_channel,
            engine_set: EngineSet::default(),
            _counted: counted,
        })))
    }

    /// Returns the handle that identifies the queue in asynchronous events.
    pub fn handle(&self) -> u32 {
        self.0.queue.handle()
    }

    /// Returns the number of completions in the queue.
    pub fn len(&self) -> usize {
        self.0.queue.len()
    }

    /// Returns whether the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of completions that fit into the queue.
    pub fn capacity(&self) -> u32 {
        self.0.queue.capacity()
    }

    /// Changes the capacity to at least `entries` (`ibv_resize_cq`). The queue keeps its completions.
    ///
    /// # Errors
    /// If the queue holds more than `entries` completions, or `entries` is 0 or exceeds the device's limit.
    pub fn resize(&self, entries: u32) -> Result<(), VerbsError> {
        let granted = granted_entries(entries, self.0.device.limits.max_cqe)?;
        let held = self.len() as u32;
        if entries < held {
            let asked = entries;
            return Err(VerbsError::Invalid(roce_qp::CqResizeError { held, asked }.to_string()));
        }
        let resized = self.0.queue.resize(granted);
        resized.map_err(|e| VerbsError::Invalid(e.to_string()))
    }

    /// Returns the number of completions in the queue, counted up to `max`. Removes none.
    pub fn peek(&self, max: usize) -> usize {
        self.0.queue.peek(max)
    }

    /// Drops the completions of a queue pair that moves to RESET.
    ///
    /// Otherwise the program would take them for completions of later work requests.
    pub fn forget(&self, qpn: Qpn) {
        self.0.queue.forget(qpn);
    }

    pub(crate) fn check(&self, device: &Arc<DeviceInner>) -> Result<(), VerbsError> {
        device.check(&self.0.device, "completion queue")
    }

    pub(crate) fn engine_set(&self) -> &EngineSet {
        &self.0.engine_set
    }

    /// Returns whether the queue has no channel, so that the program must poll it.
    pub(crate) fn is_polled(&self) -> bool {
        !self.0.has_channel
    }

    pub(crate) fn queue(&self) -> &Arc<Queue> {
        &self.0.queue
    }

    fn take(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize, VerbsError> {
        self.0
            .queue
            .poll(out, max)
            .map_err(|e| VerbsError::State(format!("{e}: create it with more entries")))
    }

    /// Appends at most `max` completions to `out`, oldest first. Returns how many.
    ///
    /// If the queue is empty, the calling thread makes progress on the device first.
    ///
    /// # Errors
    /// If the queue has overflowed, or the device is closed.
    pub fn poll(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize, VerbsError> {
        let engines = self.0.device.live()?;
        let before = out.len();
        let mut taken = self.take(out, max)?;
        if taken == 0 && max > 0 {
            if engines.is_closed() {
                return Err(VerbsError::Closed);
            }
            engines.of(&self.0.engine_set).for_each(Driver::poll);
            taken = self.take(out, max)?;
        }
        if let Some(faults) = self.0.device.verb_faults() {
            replace_statuses(faults, engines, &mut out[before..]);
        }
        Ok(taken)
    }

    /// Requests one event on the channel for the next completion, or the next solicited one (`ibv_req_notify_cq`).
    ///
    /// Completions that came before are not reported: poll again after arming.
    ///
    /// # Errors
    /// If the queue has no channel.
    pub fn arm(&self, solicited_only: bool) -> Result<(), VerbsError> {
        if !self.0.has_channel {
            return Err(VerbsError::State(
                "the completion queue has no channel: create it with one to arm it".into(),
            ));
        }
        self.0.queue.arm(solicited_only);
        let engines = &self.0.device.engines;
        engines.of(&self.0.engine_set).for_each(Driver::stop_polling);
        Ok(())
    }
}

impl Device {
    /// Creates a completion channel.
    ///
    /// # Errors
    /// If the system has no descriptor left.
    pub fn create_channel(&self) -> Result<Channel, VerbsError> {
        let events = Arc::new(EventQueue::new().map_err(io_error("creating a completion channel"))?);
        self.0.router.closes(&events);
        Ok(Channel {
            events,
            device: self.0.clone(),
            spin: Arc::new(Mutex::new(Spin::new(self.0.config.spin))),
        })
    }

    /// Creates a completion queue for `entries` completions. Its events carry `cookie`.
    ///
    /// # Errors
    /// If a limit of the device is reached.
    pub fn create_cq(&self, entries: u32, channel: Option<&Channel>, cookie: u64) -> Result<Cq, VerbsError> {
        let notify = channel.map(|c| {
            let events = c.events.clone();
            Arc::new(ChannelNotify { events, cookie }) as Arc<dyn Notify>
        });
        Cq::notifying(self, entries, notify)
    }

    /// Creates a completion queue that calls `notify` for events, for programs with their own event queues.
    ///
    /// `notify` is called under the device's lock and must neither block nor call verbs.
    ///
    /// # Errors
    /// If a limit of the device is reached.
    pub fn create_cq_notifying(&self, entries: u32, notify: Option<Arc<dyn Notify>>) -> Result<Cq, VerbsError> {
        Cq::notifying(self, entries, notify)
    }
}

/// Completion channel.
#[derive(Clone, Debug)]
pub struct Channel {
    events: Arc<EventQueue<u64>>,
    device: Arc<DeviceInner>,
    spin: Arc<Mutex<Spin>>,
}

impl Channel {
    /// Returns the descriptor, for poll, epoll and mio. It is readable (level-triggered) while events wait.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        AsFd::as_fd(&*self.events)
    }

    /// Takes one event: the cookie of the completion queue. Returns `None` when the time is over. A timeout of `None` waits for ever,
    /// zero does not wait.
    ///
    /// # Errors
    /// If waiting fails, or the device is closed.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Option<u64>, VerbsError> {
        wait(&self.device, &self.events, timeout, Some(&self.spin), || {
            self.events.pop()
        })
    }
}

/// Polls the ports and `take` before the thread sleeps, for as long as [`Spin`] permits. Returns the event received, if any.
fn poll_for_a_while<E>(
    spin: &Mutex<Spin>,
    until: Option<Instant>,
    ports: &mut [Waiter<'_>],
    take: &mut impl FnMut() -> Result<Option<E>, VerbsError>,
) -> Result<Option<E>, VerbsError> {
    let left = until.map(|at| at.saturating_duration_since(Instant::now()));
    let Some(spinning) = spin.lock().begin(left) else {
        return Ok(None);
    };
    let event = loop {
        let owns = ports.iter_mut().fold(false, |any, port| port.advance() | any);
        if !owns {
            return Ok(None);
        }
        let event = take()?;
        if event.is_some() || !spinning.goes_on() {
            break event;
        }
    };
    spin.lock().end(&spinning, event.is_some());
    Ok(event)
}

/// Waits for an event that `take` returns, up to `timeout`. With `spin` the thread advances the ports, and may poll before it sleeps.
pub(crate) fn wait<Q, E>(
    device: &DeviceInner,
    queue: &EventQueue<Q>,
    timeout: Option<Duration>,
    spin: Option<&Mutex<Spin>>,
    mut take: impl FnMut() -> Result<Option<E>, VerbsError>,
) -> Result<Option<E>, VerbsError> {
    let engines = device.live()?;
    if let Some(event) = take()? {
        return Ok(Some(event));
    }
    let background = device.config.background;
    if timeout == Some(Duration::ZERO) {
        // A zero timeout polls once and does not count as waiting.
        if !background {
            engines.progress();
        }
        return take();
    }
    let until = deadline(timeout);
    let mut ports = Vec::new();
    match spin.filter(|_| background) {
        Some(spin) => {
            ports = engines.begin_wait();
            if let Some(event) = poll_for_a_while(spin, until, &mut ports, &mut take)? {
                return Ok(Some(event));
            }
        }
        None => engines.stop_polling(),
    }
    let slice = (!background).then_some(POLL_INTERVAL);
    loop {
        if !background {
            engines.progress();
        }
        if let Some(event) = take()? {
            return Ok(Some(event));
        }
        if !queue.sleep(until, slice, &mut ports)? {
            return take();
        }
    }
}
