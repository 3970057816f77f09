//! RTRS 2.0 (RDMA transport), client and server, generic over a verbs Provider.
