//! Declarations that rdma-sys does not have: its list of functions to translate leaves out names that begin with an underscore, and
//! `ibv_query_gid_table` is a function of C's header around such a one.

use rdma_sys::{ibv_context, ibv_gid_entry};

// SAFETY: the declaration is that of <infiniband/verbs.h>; rdma-sys links the library.
unsafe extern "C" {
    /// Fills in the entries of the GID tables of all ports that are in use; returns how many, or a negative error number.
    pub(super) fn _ibv_query_gid_table(
        context: *mut ibv_context,
        entries: *mut ibv_gid_entry,
        max_entries: usize,
        flags: u32,
        entry_size: usize,
    ) -> isize;
}

/// `enum ibv_gid_type`: RoCE v2.
pub(super) const GID_TYPE_ROCE_V2: u32 = 2;
/// `RDMA_OPTION_ID`, `RDMA_OPTION_ID_TOS`.
pub(super) const OPTION_TOS: (i32, i32) = (0, 0);
