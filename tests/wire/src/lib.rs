//! A wire between two network namespaces, in user space: a TAP device at each end and one thread that carries Ethernet frames
//! between them. It loses, repeats, reorders, delays and marks them and has a rate and a queue, each way apart, and all of that can be
//! changed while it runs. There may be several networks between the same two namespaces, as for RTRS sessions with several paths.
//!
//! A frame is what would be on a real wire: the TAP devices offer no offloads, so the kernel has cut what a program sent with GSO into
//! packets before the wire sees it. Loss and marks hit single packets.
//!
//! The namespaces have no names. They go with the wire and with the processes in them. A command at an end, with what it
//! starts, is a [`group::Group`].

pub mod direction;
pub mod group;
pub mod namespace;
pub mod tap;
pub mod wire;
