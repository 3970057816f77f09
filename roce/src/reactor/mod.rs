//! One event loop for everything of a thread: the packets of [`LocalDevice`](crate::LocalDevice)s, the descriptors of a service,
//! its timers, commands of other threads, and results of jobs that they do for it.
//!
//! A [`Service`] runs on it: state machines, and the sockets and files that they need. The loop knows when they have work, and
//! nothing of what they do. A [`Reactor`] is created in one thread and run in another:
//!
//! ```no_run
//! # use roce::{Completion, DeviceConfig, LocalDevice, verbs::provider::{Event, QpId}};
//! # use roce::reactor::{Reactor, ReactorConfig, Service, TurnCx};
//! struct Quiet;
//!
//! impl Service for Quiet {
//!     type Command = ();
//!     type Output = ();
//!
//!     fn command(&mut self, cx: &mut TurnCx<'_, ()>, _: ()) {
//!         cx.stop();
//!     }
//!     fn completions(&mut self, _: &mut TurnCx<'_, ()>, _: &[(QpId, Completion)]) {}
//!     fn event(&mut self, _: &mut TurnCx<'_, ()>, _: Event) {}
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let reactor = Reactor::<Quiet>::new(ReactorConfig::default())?;
//! let handle = reactor.handle();
//! let device = LocalDevice::open(&[DeviceConfig::new("192.0.2.1".parse()?)])?;
//! let thread = std::thread::spawn(move || reactor.run(device, |_| Quiet));
//! handle.command(());
//! thread.join().expect("no panic")?;
//! # Ok(())
//! # }
//! ```
//!
//! A turn takes messages, packets and ready descriptors, passes on their completions and events in a few short rounds, and then
//! sends everything that was posted at once. It never waits: work that may wait is a [job](Jobs) of another thread. Between turns the loop
//! spins for a moment, as long as that pays ([`SpinMode`]), and sleeps until a descriptor, a message or a timer.
//!
//! A service that listens:
//!
//! ```no_run
//! # use roce::{Completion, verbs::provider::{CmKind, Event, QpId, RejectReason}};
//! # use roce::reactor::{Service, TurnCx};
//! /// Rejects all requests.
//! struct Closed;
//!
//! impl Service for Closed {
//!     type Command = ();
//!     type Output = ();
//!
//!     fn command(&mut self, cx: &mut TurnCx<'_, ()>, _: ()) {
//!         cx.stop();
//!     }
//!
//!     fn completions(&mut self, _: &mut TurnCx<'_, ()>, _: &[(QpId, Completion)]) {}
//!
//!     fn event(&mut self, cx: &mut TurnCx<'_, ()>, event: Event) {
//!         if let Event::Cm { id, kind: CmKind::ConnectRequest { .. } } = event {
//!             // Leaves with the turn.
//!             let _ = cx.provider().cm_reject(id, RejectReason::CONSUMER, b"closed");
//!         }
//!     }
//! }
//!
//! # fn start(cx: &mut TurnCx<'_, ()>) -> Result<Closed, Box<dyn std::error::Error>> {
//! // In the closure that `Reactor::run` makes the service with:
//! cx.provider().cm_listen("192.0.2.1:1234".parse()?, 16)?;
//! # Ok(Closed)
//! # }
//! ```

mod counters;
mod jobs;
mod mailbox;
mod service;
mod stats;
mod turn;

pub use crate::{Spin, SpinMode};
pub use counters::Counters;
pub use jobs::{JobResult, JobTicket, Jobs, Panicked, StartedJob};
pub use mio::{Interest, Token};
pub use service::{Readiness, Service, Sockets, TurnCx};
pub use stats::LoopStats;
pub use turn::{Driven, Handle, Reactor, ReactorConfig, ReactorError, Turned};
