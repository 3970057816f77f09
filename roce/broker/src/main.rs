//! The broker as a program of its own, for tests: `ferroce broker` is what users have.

use std::process::ExitCode;

fn main() -> ExitCode {
    roce_broker::server::main(std::env::args_os().skip(1))
}
