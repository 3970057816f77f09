//! RDMA_CM private data.
