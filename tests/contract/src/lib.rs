//! Contract of [`Provider`], as one suite of cases.
//!
//! A case has two hosts at hand ([`Pair`]), connects them, and looks at what the trait promises: [`CASES`]. The suite is run over
//! our engine in two shapes ([`wire`], [`sockets`]), over fabrics of a software and an RDMA device ([`halves`]) and, with the feature
//! `hardware`, over libibverbs and librdmacm (`hardware`): those of the host, or ours in their place under `ferroce run`.

mod bed;
mod card;
pub mod cases;
pub mod halves;
#[cfg(feature = "hardware")]
pub mod hardware;
pub mod sockets;
pub mod wire;

use std::{
    any::Any,
    net::IpAddr,
    panic::{AssertUnwindSafe, catch_unwind},
};

use roce_verbs::provider::Provider;

pub use bed::{Bed, End, LEN, Link, RIGHTS};
pub use cases::CASES;

/// One of two hosts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Side {
    /// Connects.
    A,
    /// Listens.
    B,
}

impl Side {
    /// Both.
    pub const ALL: [Self; 2] = [Self::A, Self::B];

    /// The other one.
    pub const fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

/// Two hosts and what is between them.
pub trait Pair {
    /// A host's devices.
    fn provider(&mut self, side: Side) -> &mut dyn Provider;
    /// The address of a host by which the other reaches it.
    fn addr(&self, side: Side) -> IpAddr;
    /// Moves what is under way, and waits a moment if nothing is.
    fn turn(&mut self);
}

/// A case.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Claim that it shows.
    pub name: &'static str,
    /// Panics when that is not so.
    pub run: fn(&mut Bed),
}

impl Case {
    /// Runs it between two hosts.
    ///
    /// # Errors
    /// The difference that it has found.
    pub fn run(&self, pair: Box<dyn Pair>) -> Result<(), String> {
        let run = || {
            let mut bed = Bed::new(pair);
            (self.run)(&mut bed);
            bed.end();
        };
        catch_unwind(AssertUnwindSafe(run)).map_err(|e| said(&*e))
    }
}

/// Returns the text of a panic.
fn said(e: &(dyn Any + Send)) -> String {
    let text = e.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| e.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a text").to_owned()
}

/// Runs all cases whose names contain one of `only` (none: all), each between hosts of its own, and prints how each went. Returns
/// how many failed.
pub fn run_all(only: &[String], mut make: impl FnMut() -> Result<Box<dyn Pair>, String>) -> usize {
    let wanted = |case: &&Case| only.is_empty() || only.iter().any(|part| case.name.contains(part.as_str()));
    let mut failed = 0;
    for case in CASES.iter().copied().flatten().filter(wanted) {
        match make().and_then(|pair| case.run(pair)) {
            Ok(()) => println!("ok      {}", case.name),
            Err(why) => {
                failed += 1;
                println!("FAILED  {}: {why}", case.name);
            }
        }
    }
    failed
}
