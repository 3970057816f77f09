//! Completions and events as futures, for programs on [tokio] (feature `tokio`).
//!
//! The device's own thread moves packets; a future waits for a descriptor, so that one thread of the runtime serves any
//! number of queue pairs. All types are made within a runtime that has I/O enabled.
//!
//! ```
//! use std::net::{IpAddr, SocketAddr};
//!
//! use roce::{
//!     AccessFlags, CmEventKind, ConnParams, Device, DeviceConfig, Payload, QpInit, RecvWr, SendFlags, SendOp, SendWr,
//!     aio::{AsyncCq, AsyncEventChannel},
//! };
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let addr: IpAddr = "127.0.0.1".parse()?;
//! # let addr: IpAddr = ferroce_loopback::address().into();
//! let device = Device::open(DeviceConfig::new(addr))?;
//! let pd = device.alloc_pd()?;
//! let cq = AsyncCq::new(&device, 16)?;
//! let init = || QpInit::new(cq.cq());
//! let (server, client) = (device.create_qp(&pd, &init())?, device.create_qp(&pd, &init())?);
//! let memory = device.alloc_mr(&pd, 4096, AccessFlags::LOCAL_WRITE)?;
//! server.post_recv(&[RecvWr { wr_id: 7, sges: &[memory.sge(0, 4096)] }]).map_err(|(_, e)| e)?;
//!
//! // Connect the two, one task for each side.
//! let to = SocketAddr::new(addr, 7000);
//! let accepted = AsyncEventChannel::new(&device)?;
//! let _listener = device.listen(accepted.channel(), to, 1)?;
//! let accept = async {
//!     let request = accepted.next().await?;
//!     request.id.accept(&server, ConnParams::default())
//! };
//! let connected = AsyncEventChannel::new(&device)?;
//! let id = device.connect(connected.channel(), None, to, &client, ConnParams::default())?;
//! let (accept, event) = tokio::join!(accept, connected.next());
//! accept?;
//! assert!(matches!(event?.kind, CmEventKind::Established { .. }));
//!
//! let send = SendWr {
//!     wr_id: 8,
//!     op: SendOp::Send,
//!     flags: SendFlags::SIGNALED,
//!     payload: Payload::Inline(b"hello"),
//! };
//! client.post_send(&[send]).map_err(|(_, e)| e)?;
//! let mut completions = Vec::new();
//! while completions.len() < 2 {
//!     cq.poll(&mut completions, 16).await?;
//! }
//! assert!(completions.iter().all(|wc| wc.is_ok()));
//! let mut hello = [0; 5];
//! memory.read(0, &mut hello)?;
//! assert_eq!(&hello, b"hello");
//! id.disconnect()?;
//! # Ok(())
//! # }
//! ```
//!
//! [tokio]: https://docs.rs/tokio

use std::{
    os::fd::{AsFd, AsRawFd, RawFd},
    time::Duration,
};

use roce_verbs::{AsyncEvent, Completion, provider::VerbsError};
use tokio::io::{Interest, unix::AsyncFd};

use crate::{
    cm::{CmEvent, EventChannel},
    cq::{Channel, Cq},
    device::Device,
    error::io_error,
};

/// Source of events whose descriptor the runtime watches.
#[derive(Debug)]
struct Watched<T> {
    source: T,
    fd: RawFd,
}

impl<T> AsRawFd for Watched<T> {
    fn as_raw_fd(&self) -> RawFd {
        // Open as long as the source, which is next to it.
        self.fd
    }
}

/// Watches a source for reading.
fn watch<T>(source: T, fd: impl FnOnce(&T) -> RawFd) -> Result<AsyncFd<Watched<T>>, VerbsError> {
    let fd = fd(&source);
    // SAFETY: the source owns the descriptor, which neither changes nor is closed before the source is dropped; the result owns the
    // source.
    let watched = unsafe { AsyncFd::register_with_interest(Watched { source, fd }, Interest::READABLE) };
    watched.map_err(|e| io_error("watching a descriptor")(e.into()))
}

/// Waits until `take` returns something. Cancel safe: what is not returned stays where it is.
async fn next<T, E>(
    fd: &AsyncFd<Watched<T>>,
    take: impl Fn(&T) -> Result<Option<E>, VerbsError>,
) -> Result<E, VerbsError> {
    loop {
        if let Some(event) = take(&fd.get_ref().source)? {
            return Ok(event);
        }
        let mut ready = fd.readable().await.map_err(io_error("waiting for an event"))?;
        if let Some(event) = take(&fd.get_ref().source)? {
            return Ok(event);
        }
        // Does nothing if the descriptor became ready again since `ready` was made.
        ready.clear_ready();
    }
}

/// Completion queue that a task waits for.
#[derive(Debug)]
pub struct AsyncCq {
    cq: Cq,
    channel: AsyncFd<Watched<Channel>>,
}

impl AsyncCq {
    /// Creates a completion queue for `entries` completions with a channel of its own.
    ///
    /// # Errors
    /// If a limit of the device is reached, or the system has no descriptor left.
    ///
    /// # Panics
    /// Outside of a tokio runtime with I/O enabled.
    pub fn new(device: &Device, entries: u32) -> Result<Self, VerbsError> {
        let channel = device.create_channel()?;
        let cq = device.create_cq(entries, Some(&channel), 0)?;
        let channel = watch(channel, |channel| channel.as_fd().as_raw_fd())?;
        Ok(Self { cq, channel })
    }

    /// Returns the queue, to create queue pairs with and to poll without waiting.
    pub fn cq(&self) -> &Cq {
        &self.cq
    }

    /// Waits for completions and appends at most `max` to `out`, oldest first. Returns how many: at least one, unless
    /// `max` is 0.
    ///
    /// Cancel safe. One task at a time should call it: the completion event wakes one.
    ///
    /// # Errors
    /// If the queue has overflowed, or the device is closed.
    pub async fn poll(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize, VerbsError> {
        loop {
            let taken = self.cq.poll(out, max)?;
            if taken > 0 || max == 0 {
                return Ok(taken);
            }
            self.cq.arm(false)?;
            // Completions that came before the queue was armed are not reported.
            let taken = self.cq.poll(out, max)?;
            if taken > 0 {
                return Ok(taken);
            }
            next(&self.channel, |channel| channel.wait(Some(Duration::ZERO))).await?;
        }
    }
}

/// Event channel of connections that a task waits for.
#[derive(Debug)]
pub struct AsyncEventChannel {
    channel: AsyncFd<Watched<EventChannel>>,
    device: Device,
}

impl AsyncEventChannel {
    /// Creates an event channel.
    ///
    /// # Errors
    /// If the system has no descriptor left.
    ///
    /// # Panics
    /// Outside of a tokio runtime with I/O enabled.
    pub fn new(device: &Device) -> Result<Self, VerbsError> {
        let channel = watch(device.create_cm_channel()?, |channel| channel.as_fd().as_raw_fd())?;
        Ok(Self {
            channel,
            device: device.clone(),
        })
    }

    /// Returns the channel, for [`Device::listen`] and [`Device::connect`].
    pub fn channel(&self) -> &EventChannel {
        &self.channel.get_ref().source
    }

    /// Waits for the next event. Cancel safe.
    ///
    /// # Errors
    /// If the device is closed.
    pub async fn next(&self) -> Result<CmEvent, VerbsError> {
        // No thread of the program advances the ports while this one waits.
        self.device.0.engines.stop_polling();
        next(&self.channel, |channel| channel.wait(Some(Duration::ZERO))).await
    }
}

/// Asynchronous events of a device (`ibv_get_async_event`) that a task waits for.
#[derive(Debug)]
pub struct AsyncEvents(AsyncFd<Watched<Device>>);

impl AsyncEvents {
    /// Watches the events of a device.
    ///
    /// # Errors
    /// If the runtime can't watch the descriptor.
    ///
    /// # Panics
    /// Outside of a tokio runtime with I/O enabled.
    pub fn new(device: &Device) -> Result<Self, VerbsError> {
        watch(device.clone(), |device| device.async_fd().as_fd().as_raw_fd()).map(Self)
    }

    /// Waits for the next event. Cancel safe.
    ///
    /// # Errors
    /// If the device is closed and no event is left.
    pub async fn next(&self) -> Result<AsyncEvent, VerbsError> {
        next(&self.0, Device::async_event).await
    }
}
