//! Off-path attacker: it knows the addresses of all hosts, their programs' port, the numbers of connected queue pairs, where
//! their PSN streams are, and the protocol. It receives nothing, and may send any packet from any address at any rate: also ICMP
//! errors that quote packets of its making, and connect requests that look as if they had passed address translation.
//!
//! Its packets take no room on links and in socket buffers, and the port processes each burst at once: the ports are under
//! test, not the network's capacity. A run in which its packets have no effect is the same run as without it, to the
//! nanosecond.

mod attack;
mod copies;
mod knowledge;
pub(crate) mod live;
mod observer;
pub(crate) mod packets;
pub(crate) mod state;
mod strays;
