//! Abilities of a device, and the handling of keys that follows from them.

use core::{fmt, net::IpAddr};
use std::sync::Arc;

use crate::attr::DeviceLimits;

/// Abilities of a device.
#[derive(Clone, Debug)]
pub struct DeviceCaps {
    /// Name in the system, if it is one of the system's RDMA devices.
    pub name: Option<Arc<str>>,
    /// Sizes and numbers.
    pub limits: DeviceLimits,
    /// A key that a work request opens for every queue pair of the protection domain, and that SEND_WITH_INV closes
    /// (`IB_WR_REG_MR`): the software device, and kernels.
    pub fast_registration: bool,
    /// Type 1 memory windows: for every queue pair of the protection domain; no peer can close them.
    pub window_1: bool,
    /// Type 2 memory windows: for one queue pair; SEND_WITH_INV closes them.
    pub window_2: bool,
    /// A receive that a SEND_WITH_INV took tells which key it has closed. Where it does not (rdma_rxe, to programs), a peer must not
    /// be asked to close keys: nobody would know that it has.
    pub tells_invalidated: bool,
    /// Granting and revoking are done at once instead of by work requests.
    pub instant_keys: bool,
    /// A fast registration can open several pieces of memory, wherever they begin and end, as one range
    /// ([`Provider::grant_list`](super::Provider::grant_list)).
    pub scattered_keys: bool,
    /// Registrations whose addresses begin at zero.
    pub zero_based: bool,
    /// Registrations at an address of the caller's choice.
    pub iova: bool,
    /// Its addresses now.
    pub addrs: Vec<IpAddr>,
}

/// By what a peer gets at memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum KeyStrategy {
    /// A fast registration for each request.
    FastRegistration,
    /// A type 1 window for each request.
    Window1,
    /// A type 2 window for each request.
    Window2,
    /// The registration's own key, for as long as the memory is registered.
    Static,
}

impl fmt::Display for KeyStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::FastRegistration => "fast registrations",
            Self::Window1 => "type 1 memory windows",
            Self::Window2 => "type 2 memory windows",
            Self::Static => "static",
        })
    }
}

impl KeyStrategy {
    /// For a server's chunks, which a client may write through any connection: a type 2 window, which belongs to one queue
    /// pair, won't do. `wanted`: keys are to be taken back while a request is worked on (`always_invalidate`).
    pub const fn for_chunks(caps: &DeviceCaps, wanted: bool) -> Self {
        match (wanted, caps.fast_registration, caps.window_1) {
            (false, ..) => Self::Static,
            (true, true, _) => Self::FastRegistration,
            (true, false, true) => Self::Window1,
            (true, false, false) => Self::Static,
        }
    }

    /// For the buffer of a client's read, which the server writes through one connection. `wanted`: the key is to end with the
    /// request.
    pub const fn for_reads(caps: &DeviceCaps, wanted: bool) -> Self {
        match wanted {
            false => Self::Static,
            true if caps.fast_registration => Self::FastRegistration,
            true if caps.window_2 => Self::Window2,
            true if caps.window_1 => Self::Window1,
            true => Self::Static,
        }
    }

    /// Whether the peer may be asked to close the key (SEND_WITH_INV); else whoever granted it does.
    pub const fn peer_can_invalidate(self) -> bool {
        matches!(self, Self::FastRegistration | Self::Window2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caps(fast_registration: bool, window_1: bool, window_2: bool) -> DeviceCaps {
        DeviceCaps {
            name: None,
            limits: DeviceLimits::software(1),
            fast_registration,
            window_1,
            window_2,
            tells_invalidated: true,
            instant_keys: false,
            scattered_keys: false,
            zero_based: false,
            iova: false,
            addrs: Vec::new(),
        }
    }

    #[test]
    fn keys_follow_what_the_device_can_do() {
        use KeyStrategy::{FastRegistration, Static, Window1, Window2};
        for (fast, one, two, chunks, reads) in [
            (true, true, true, FastRegistration, FastRegistration),
            (false, true, true, Window1, Window2),
            (false, true, false, Window1, Window1),
            (false, false, true, Static, Window2),
            (false, false, false, Static, Static),
        ] {
            let caps = caps(fast, one, two);
            assert_eq!(KeyStrategy::for_chunks(&caps, true), chunks, "{caps:?}");
            assert_eq!(KeyStrategy::for_reads(&caps, true), reads, "{caps:?}");
            assert_eq!(KeyStrategy::for_chunks(&caps, false), Static);
            assert_eq!(KeyStrategy::for_reads(&caps, false), Static);
        }
    }

    #[test]
    fn a_window_of_one_queue_pair_never_opens_a_chunk() {
        for n in 0..8 {
            let caps = caps(n & 1 != 0, n & 2 != 0, n & 4 != 0);
            assert_ne!(KeyStrategy::for_chunks(&caps, true), KeyStrategy::Window2);
        }
    }
}
