//! Ports under a virtual clock and a faulty network.
