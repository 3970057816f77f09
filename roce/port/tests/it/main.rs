//! Ports and fabrics without sockets.

mod bounds;
mod captures;
mod chaos;
mod common;
mod datagrams;
mod fabric;
mod farewell;
mod fields;
mod hostile;
mod limits;
mod manager;
mod races;
mod undeliverable;
mod wire;
