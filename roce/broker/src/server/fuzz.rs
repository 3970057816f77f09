//! Readers of the broker's formats, over bytes of other processes or of a file, for fuzzing.

use serde::{Serialize, de::DeserializeOwned};

use super::{gsi, slots, state};
use crate::{
    proto::{ToBroker, ToClient},
    wire,
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

/// Finds the receiver of a packet that reached the broker's socket, or was handed over.
pub fn packet(bytes: &[u8]) {
    if let gsi::Target::Gsi(mad) = gsi::target(bytes) {
        let _ = roce_port::cm::mad::Mad::parse(mad);
    }
}

/// Reads the state file that a former broker left, and does with it what a broker does. True: it is one.
pub fn state(bytes: &[u8]) -> bool {
    let Some(mut slots) = state::parse(bytes) else {
        return false;
    };
    slots.inherit(0, 0, |p| p.pid % 2 == 0);
    slots.bury(0, |_| false);
    let tenant = slots::Tenant {
        process: slots::Process { pid: 1, start: 1 },
        uid: 1,
        token: 1,
    };
    let _ = slots.allocate(0, tenant, 0);
    true
}
