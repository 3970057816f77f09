//! The C ABI of libibverbs and librdmacm (Debian 12, rdma-core 44) over ferroce: preloaded by `ferroce run`, or linked.

pub mod rdmacm;
