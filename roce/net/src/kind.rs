//! Kinds of datapaths, as users choose them.

use std::{fmt, num::NonZeroU16, str::FromStr};

use roce_port::Steering;

use crate::{
    datapath::Datapath,
    raw::{RawDatapath, Wires},
    socket::{OpenError, UdpConfig},
    udp::UdpDatapath,
};

/// Number of a VLAN (IEEE 802.1Q): 1 to 4094.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VlanId(NonZeroU16);

impl VlanId {
    /// Returns the VLAN with this number, if it can be one.
    pub fn new(number: u16) -> Option<Self> {
        NonZeroU16::new(number).filter(|id| id.get() < 0xfff).map(Self)
    }

    /// Returns the number.
    pub fn get(self) -> u16 {
        self.0.get()
    }
}

/// Sockets that carry packets.
///
/// The text is `udp`, `raw`, `packet`, or `packet,vlan=ID`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DatapathKind {
    /// UDP sockets, which need no privilege. Processes can share an address.
    #[default]
    Udp,
    /// Raw IP sockets. They show and set the IPv4 Identification, so that all 32 bits of each ICRC count. Needs CAP_NET_RAW.
    Raw,
    /// Packet sockets: Ethernet frames, past routing's output, firewall and reverse path filter. Needs CAP_NET_RAW.
    Packet {
        /// VLAN of all frames, both ways; `None`: untagged.
        vlan: Option<VlanId>,
    },
}

/// A text that names no kind of datapath.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0:?} is not a datapath: udp, raw, packet or packet,vlan=ID (1 to 4094)")]
pub struct UnknownDatapath(String);

impl FromStr for DatapathKind {
    type Err = UnknownDatapath;

    fn from_str(text: &str) -> Result<Self, UnknownDatapath> {
        let vlan = |id: &str| id.parse().ok().and_then(VlanId::new);
        match text {
            "udp" => Ok(Self::Udp),
            "raw" => Ok(Self::Raw),
            "packet" => Ok(Self::Packet { vlan: None }),
            _ => match text.strip_prefix("packet,vlan=").and_then(vlan) {
                Some(vlan) => Ok(Self::Packet { vlan: Some(vlan) }),
                None => Err(UnknownDatapath(text.to_owned())),
            },
        }
    }
}

impl fmt::Display for DatapathKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Udp => f.write_str("udp"),
            Self::Raw => f.write_str("raw"),
            Self::Packet { vlan: None } => f.write_str("packet"),
            Self::Packet { vlan: Some(vlan) } => write!(f, "packet,vlan={}", vlan.get()),
        }
    }
}

/// Opens the datapaths of several loops that share an address; the kernel gives each the packets of its queue pairs. Without steering
/// there is one.
///
/// # Errors
/// When the port is taken, the address is not ours, or the process lacks CAP_NET_RAW.
pub fn open_shards(
    kind: DatapathKind,
    config: &UdpConfig,
    steering: Option<Steering>,
) -> Result<Vec<Box<dyn Datapath>>, OpenError> {
    fn boxed<P: Datapath + 'static>(paths: Vec<P>) -> Vec<Box<dyn Datapath>> {
        paths
            .into_iter()
            .map(|path| Box::new(path) as Box<dyn Datapath>)
            .collect()
    }
    let wires = match kind {
        DatapathKind::Udp => return UdpDatapath::open_shards(config, steering).map(boxed),
        DatapathKind::Raw => Wires::Ip,
        DatapathKind::Packet { vlan } => Wires::Link(vlan.map(VlanId::get)),
    };
    RawDatapath::open_shards(wires, config, steering).map(boxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_name_datapaths() {
        for text in ["udp", "raw", "packet", "packet,vlan=1", "packet,vlan=4094"] {
            assert_eq!(text.parse::<DatapathKind>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "UDP",
            "packet,",
            "packet,vlan=0",
            "packet,vlan=4095",
            "packet,vlan=x",
            "raw,vlan=5",
        ] {
            let error = text.parse::<DatapathKind>().unwrap_err();
            assert!(error.to_string().contains("packet,vlan=ID"), "{text}");
        }
    }
}
