//! Protection domains, memory regions and windows, key and range checks, SGE cursors.
