//! Devices, loops and connections over sockets.

mod aio;
#[path = "../common/mod.rs"]
mod common;
mod connections;
mod datagrams;
mod datapaths;
mod engines;
mod examples;
mod faults;
mod links;
mod local;
mod objects;
mod operations;
mod raw_cm;
#[path = "../../examples/rc_client.rs"]
mod rc_client;
mod reactor;
mod ring;
mod services;
mod shards;
mod sharing;
mod waiting;
