//! The transport engine (IBA chapters 9 and 10): queue pairs of every service with their lifecycle, requester, completer,
//! responder and timers, completion queues, shared receive queues, and the window of bytes in flight towards a peer.
//!
//! It is sans-IO: time comes in with every call ([`Ctx::now`]), packets come in parsed ([`QueuePair::handle_packet`])
//! and go out into buffers that the caller lends ([`QueuePair::poll_transmit`] and [`TxSink`]), timers are a value
//! ([`QueuePair::next_timeout`]). Nothing here knows sockets, clocks, threads or random numbers.
#![forbid(unsafe_code)]

mod ack_policy;
mod completer;
mod congestion;
mod counters;
mod cq;
mod ctx;
mod datagram;
mod dcqcn;
mod expect;
mod failure;
mod pace;
mod persist;
mod qp;
mod recovery;
mod recvq;
mod reorder;
mod replies;
mod requester;
mod responder;
mod selective;
mod sendq;
mod seq;
mod source;
mod srq;
mod state;
mod timers;
mod tx;
mod unreliable;
mod window;

pub use congestion::{Acked, CongestionControl, DelayAware, Loss};
pub use counters::Counters;
pub use cq::{CompletionQueue, CqOverflow, CqResizeError, Notify};
pub use ctx::{CreateError, Ctx, ModifyError, QpConfig, WaitReason};
pub use datagram::{DatagramSource, GRH_LEN};
pub use failure::Failure;
pub use pace::FreePaces;
pub use persist::PersistJob;
pub use qp::{NO_RECEIVE_QUEUE, QueuePair};
pub use recvq::ReceiveQueue;
pub use reorder::ReorderBudget;
pub use responder::HiddenReceives;
pub use source::Origin;
pub use srq::{SharedReceiveQueue, SrqConfig, SrqError, XrcDomain};
pub use tx::{Poll, TxKind, TxSink};
pub use window::{Window, WindowConfig};
