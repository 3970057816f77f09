//! The RoCEv2 invariant CRC: seal, verify, recover a hidden IPv4 Identification (no_std, no I/O).
