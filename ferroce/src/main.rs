//! The ferroce command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    #[cfg(feature = "hardware")]
    ferroce::use_rdma(roce_hw::open);
    ferroce::run()
}
