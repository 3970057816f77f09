//! Faults on demand, by seeded rules such as `loss=1%,dir=tx,seed=7`: packets that are lost, repeated, delayed or damaged, and verbs
//! that fail.
//!
//! [`Impairment`] is one direction of a network: it decides packet by packet. The emulated network between two namespaces
//! (`tests/wire`) is made of it, and so are rules about packets: each queue pair has a stream of random numbers of its own in each
//! direction, so that the n-th packet of a queue pair meets the same fate in every run, whatever other queue pairs do meanwhile.
//!
//! It knows rules, random numbers and queue pair numbers. It parses no packet and sends none: its callers ask for the fate of a packet,
//! and carry it out. Time is an argument, and nothing here does I/O.

mod faults;
mod impairment;
mod network;
mod rule;
mod value;

pub use faults::{Faults, PostStep, Posted, RuleReport};
pub use impairment::{Burst, Conditions, Counters, Impairment, Line, Passage, Passages, UnderWay, flip};
pub use network::{Fate, Network, Packet};
pub use rule::{Direction, Kind, MAX_RULES, Posting, QpRef, Rule, RuleError, SYNTAX, rules};
