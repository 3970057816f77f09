//! `ferroce` as it is with the feature `hardware`, which is not that of the workspace's build.

use std::process::ExitCode;

fn main() -> ExitCode {
    ferroce::use_rdma(roce_hw::open);
    ferroce::run()
}
