//! Attacks by strangers on the network: forged packets with a sound ICRC, from ordinary UDP sockets at loopback
//! addresses, or in a network namespace from any address. For tests and measurements of `ferroce` under attack.
//!
//! Nothing leaves the host: [`aim::Aim`] refuses every address that is neither loopback nor in a network namespace that was
//! made for the attack.

pub mod aim;
pub mod attack;
pub mod forge;
pub mod load;
pub mod origin;
pub mod planted;
