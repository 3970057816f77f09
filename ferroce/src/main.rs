//! The ferroce command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    ferroce::run()
}
