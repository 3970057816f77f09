//! Programs with a device of several engines: what they do and see is the same.

use crate::cases::Case;

/// Cases of the matrix that are run in this way too: with many queue pairs or few, polling and waiting, connected by either library,
/// and with what queue pairs have in common.
pub(crate) const ALSO: [&str; 18] = [
    "ibv_rc_pingpong -e",
    "ibv_srq_pingpong -e",
    "ibv_xsrq_pingpong",
    "ibv_ud_pingpong",
    "ib_write_bw -q 8",
    "ib_send_bw -e",
    "ib_send_bw --use-srq -q 4",
    "ib_read_bw -R",
    "ib_atomic_lat",
    "rping",
    "ucmatose -c 10",
    "rdma_xserver + rdma_xclient -c x",
    "mckey",
    "rstream",
    "qperf rc_bw",
    "ucx_perftest rc_v tag_bw",
    "fi_pingpong verbs;ofi_rxm rdm",
    "mpi over ucx, 4 ranks",
];
/// Of these, what the short set has.
pub(crate) const SHORT: [&str; 2] = ["ib_send_bw -e", "ucmatose -c 10"];

pub(crate) fn all(matrix: &[Case]) -> Vec<Case> {
    let named = |name: &&str| matrix.iter().find(|case| case.name == **name).cloned();
    let cases = ALSO.iter().filter_map(named);
    let several = cases.map(|case| {
        let short = SHORT.contains(&&*case.name);
        let mut case = case.with("FERROCE_SHARDS", "3");
        case.name += " (3 engines)";
        case.ci = short;
        case
    });
    several.collect()
}
