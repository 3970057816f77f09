//! Packet-script tests of the engine through its public API.

#[macro_use]
mod harness;
mod answers;
mod caution;
mod connections;
mod counts;
mod datagrams;
mod expected;
mod extended;
mod failures;
mod faults;
mod hidden_receives;
mod hostile;
mod lifecycle;
mod local_memory;
mod long_paths;
mod losses;
mod memory_placement;
mod missing_pages;
mod operations;
mod queries;
mod quiet;
mod recovery;
mod refusals;
mod reports;
mod requests;
mod retries;
mod selective;
mod services;
mod shared_queues;
mod sharing;
mod slow_flush;
mod windows;
