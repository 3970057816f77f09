//! Transport engine (IBA chapters 9 and 10): queue pairs of every service, completion queues, shared receive queues, and
//! the window of bytes in flight towards a peer.
//!
//! It is sans-IO: each call passes the time ([`Ctx::now`]), packets arrive parsed ([`QueuePair::handle_packet`]) and are
//! written into the caller's buffers ([`QueuePair::poll_transmit`] and [`TxSink`]), and timers are a value
//! ([`QueuePair::next_timeout`]). It knows no sockets, clocks, threads or random numbers.
//!
//! # Who may change what
//!
//! A [`QueuePair`] has three parts, and the responder one of its own. Their fields are private: only the module in the second
//! column writes them. The others call its methods or get a value of it.
//!
//! | part | written in | contents | other parts that it is passed |
//! | --- | --- | --- | --- |
//! | `QpContext` | `context.rs` | configuration, attributes, state, negotiated options, DCQCN, the failure | none |
//! | `Requester` | `requester/` | send queue, PSNs of requests, retries, recovery, round trips | the context |
//! | `Responder` | `responder/` | receive queue, expected PSN, message being received, gap, reorder buffer, FLUSH | the context |
//! | `Replies` of the responder | `replies.rs` | acknowledgement that is due, its delay, READs and atomics to answer | the context, and a view of the responder (`Acknowledgement`) |
//!
//! Requester and responder get a `Call`: the context, and what the caller passes in [`Ctx`].
//!
//! `QueuePair` (`qp.rs`) changes attributes and state, and decides the order of packets. A part that fails the queue pair
//! calls `QpContext::fail`. `QueuePair` flushes both queues at the end of that call.
#![forbid(unsafe_code)]

mod ack_policy;
mod congestion;
mod context;
mod counters;
mod cq;
mod ctx;
mod datagram;
mod dcqcn;
mod expect;
mod failure;
mod pace;
mod post;
mod qp;
mod recvq;
mod refusal;
mod reorder;
mod replies;
mod requester;
mod responder;
mod ring;
mod sendq;
mod seq;
mod slots;
mod source;
mod srq;
mod tx;
mod window;

pub use congestion::{Loss, WindowConfig};
pub use counters::Counters;
pub use cq::{CompletionQueue, CqOverflow, CqResizeError, Notify};
pub use ctx::{CreateError, Ctx, ModifyError, QpConfig, WaitReason};
pub use datagram::{DatagramSource, GRH_LEN};
pub use failure::Failure;
pub use pace::FreePaces;
pub use qp::{NO_RECEIVE_QUEUE, QueuePair};
pub use recvq::ReceiveQueue;
pub use reorder::ReorderBudget;
pub use responder::PersistJob;
pub use sendq::PACKET_OVERHEAD;
pub use source::Origin;
pub use srq::{SharedReceiveQueue, SrqConfig, SrqError, XrcDomain};
pub use tx::{Poll, TxKind, TxSink};
pub use window::Window;
