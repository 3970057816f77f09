//! Readers of the broker's formats, over bytes of other processes or of a file, for fuzzing.

use serde::{Serialize, de::DeserializeOwned};

use crate::{
    proto::{ToBroker, ToClient},
    server, wire,
};

/// Reads a record as the broker does that a member has sent, and gives it as we would write it. `None`: it is no record.
pub fn from_member(bytes: &[u8]) -> Option<Vec<u8>> {
    again::<ToBroker>(bytes)
}

/// Reads a record as a member does that the broker has sent, and gives it as we would write it. `None`: it is no record.
pub fn from_broker(bytes: &[u8]) -> Option<Vec<u8>> {
    again::<ToClient>(bytes)
}

fn again<T: Serialize + DeserializeOwned>(bytes: &[u8]) -> Option<Vec<u8>> {
    let (message, payload) = wire::decode::<T>(bytes).ok()?;
    wire::encode(&message, &payload).ok()
}

/// Finds out whom a packet is for that reached the broker's socket, or was handed over.
pub fn packet(bytes: &[u8]) {
    server::classify(bytes);
}

/// Reads the state file that a former broker left, and does with it what a broker does. True: it is one.
pub fn state(bytes: &[u8]) -> bool {
    server::read_state(bytes)
}
