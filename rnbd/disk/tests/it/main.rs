//! Disks in files and block devices.

mod backend;
mod block_device;
mod block_status;
mod common;
mod disk;
mod in_a_loop;
mod model;
