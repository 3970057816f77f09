//! RNBD 2.0 (network block device over RTRS): server back ends and client front ends.
