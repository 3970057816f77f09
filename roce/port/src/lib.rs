//! One RoCE port: framing, demultiplexing, GSI, counters (sans-IO).
