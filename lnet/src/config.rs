//! Settings of a node.

use core::time::Duration;

use crate::{
    planted::Planted,
    proto::{ConnParams, MAX_FRAGS, MAX_MSG, Nid},
};

/// Rule for who accepts when two nodes connect to each other at once. Nodes of both rules meet, and then both may accept or both refuse.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TieBreak {
    /// The lower NID is refused: Lustre up to 2.15.
    Nid,
    /// The lower hash of the NID, in which the last byte of its address weighs most: Lustre from 2.16 on (LU-17743).
    #[default]
    Hash,
}

impl TieBreak {
    /// Returns whether `a` is lower than `b`.
    pub const fn is_lower(self, a: Nid, b: Nid) -> bool {
        match self {
            Self::Nid => a.0 < b.0,
            Self::Hash => hash(a) < hash(b),
        }
    }
}

/// The net and the bytes of the address as a little-endian processor reads them.
const fn hash(nid: Nid) -> u32 {
    (nid.0 >> 32) as u32 ^ (nid.0 as u32).swap_bytes()
}

/// Settings of a node. The defaults are the kernel's (`ko2iblnd`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Messages that a connection may have on its way each way, 1 to 255 (`peer_credits`).
    pub peer_credits: u16,
    /// Credits from which on a message of their own gives them back, at a connection of full depth (`peer_credits_hiw`).
    pub high_water: u16,
    /// Fragments that a descriptor may have, 1 to 257.
    pub max_frags: u16,
    /// Time that a message may wait, to be sent or for its answer, before its connection is given up (`timeout`).
    pub timeout: Duration,
    /// Time without a message after which one is sent that says nothing (`keepalive`); `None`: never.
    pub keepalive: Option<Duration>,
    /// Type of service of the packets (`tos`).
    pub tos: Option<u8>,
    /// Side that accepts when both connect at once.
    pub tie_break: TieBreak,
    /// Messages for a peer that wait to be sent, at most.
    pub max_queued: usize,
    /// Peers at most.
    pub max_peers: usize,
    /// Connections of a peer at most. It may have several (`conns_per_peer`).
    pub max_connections: usize,
    /// Bug for a simulator to find.
    #[cfg(feature = "planted")]
    pub planted: Planted,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            peer_credits: 8,
            high_water: 4,
            max_frags: MAX_FRAGS as u16,
            timeout: Duration::from_secs(50),
            keepalive: Some(Duration::from_secs(100)),
            tos: None,
            tie_break: TieBreak::default(),
            max_queued: 4096,
            max_peers: 1024,
            max_connections: 8,
            #[cfg(feature = "planted")]
            planted: Planted::Nothing,
        }
    }
}

impl Config {
    /// Checks the settings.
    ///
    /// # Errors
    /// Names the one that is not possible.
    pub fn check(&self) -> Result<(), &'static str> {
        match self {
            Self { peer_credits, .. } if !(1..=255).contains(peer_credits) => Err("credits of a peer: 1 to 255"),
            Self {
                high_water,
                peer_credits,
                ..
            } if *high_water == 0 || high_water > peer_credits => Err("high water: 1 to the credits of a peer"),
            Self { max_frags, .. } if !(1..=MAX_FRAGS).contains(&u32::from(*max_frags)) => {
                Err("fragments of a descriptor: 1 to 257")
            }
            Self { timeout, .. } if timeout.is_zero() => Err("the timeout is 0"),
            _ => Ok(()),
        }
    }

    /// Bug for a simulator to find.
    pub(crate) const fn planted(&self) -> Planted {
        #[cfg(feature = "planted")]
        return self.planted;
        #[cfg(not(feature = "planted"))]
        Planted::Nothing
    }

    /// Parameters that connections are offered.
    pub(crate) const fn offer(&self) -> ConnParams {
        ConnParams {
            queue_depth: self.peer_credits,
            max_frags: self.max_frags,
            max_msg_size: MAX_MSG as u32,
        }
    }

    /// High water of a connection of this depth.
    pub(crate) fn high_water(&self, depth: u16) -> u16 {
        (depth * self.high_water / self.peer_credits).max(1)
    }

    /// Time between two looks at all connections.
    pub(crate) fn interval(&self) -> Duration {
        self.timeout / 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nid(address: [u8; 4]) -> Nid {
        Nid::o2ib(address.into())
    }

    #[test]
    fn the_two_rules_disagree_where_the_last_byte_is_the_smaller_one() {
        let (a, b) = (nid([10, 1, 0, 2]), nid([10, 1, 1, 1]));
        assert!(TieBreak::Nid.is_lower(a, b) && !TieBreak::Hash.is_lower(a, b));
        let (a, b) = (nid([10, 1, 0, 1]), nid([10, 1, 0, 2]));
        assert!(TieBreak::Nid.is_lower(a, b) && TieBreak::Hash.is_lower(a, b));
    }

    #[test]
    fn high_water_goes_with_the_depth() {
        let config = Config::default();
        assert_eq!([8, 4, 2, 1].map(|depth| config.high_water(depth)), [4, 2, 1, 1]);
        let busy = Config {
            peer_credits: 128,
            high_water: 64,
            ..config
        };
        assert_eq!([128, 42, 8].map(|depth| busy.high_water(depth)), [64, 21, 4]);
        busy.check().unwrap();
    }
}
