//! Datapaths, drivers and files of sockets.

mod driver;
mod environment;
mod raw;
mod socket_file;
mod udp;
mod undeliverable;
