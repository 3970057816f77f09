//! Addresses of LNet.

use core::{fmt, net::Ipv4Addr, str::FromStr};

/// Network type of TCP (`SOCKLND`).
pub const NET_TCP: u16 = 2;
/// Network type of o2iblnd.
pub const NET_O2IB: u16 = 5;
/// Network type of the loopback interface.
pub const NET_LO: u16 = 9;

/// Names of network types.
const NETS: [(u16, &str); 3] = [(NET_TCP, "tcp"), (NET_O2IB, "o2ib"), (NET_LO, "lo")];

/// Network identifier (`lnet_nid_t`): network type, network number, and an IPv4 address. `10.1.0.2@o2ib` is 0x00050000_0a010002.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Nid(pub u64);

impl Nid {
    /// Returns the identifier of an address in a network.
    pub const fn new(net_type: u16, net_number: u16, address: Ipv4Addr) -> Self {
        Self((net_type as u64) << 48 | (net_number as u64) << 32 | address.to_bits() as u64)
    }

    /// Returns the identifier of an address in network 0 of o2iblnd.
    pub const fn o2ib(address: Ipv4Addr) -> Self {
        Self::new(NET_O2IB, 0, address)
    }

    /// Type of the network.
    pub const fn net_type(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// Number of the network among those of its type.
    pub const fn net_number(self) -> u16 {
        (self.0 >> 32) as u16
    }

    /// Returns whether it is of a network of o2iblnd.
    pub const fn is_o2ib(self) -> bool {
        self.net_type() == NET_O2IB
    }

    /// Address.
    pub const fn address(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.0 as u32)
    }
}

impl fmt::Display for Nid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.net_type() {
            // The loopback's address is a number.
            NET_LO => write!(f, "{}@", self.0 as u32)?,
            _ => write!(f, "{}@", self.address())?,
        }
        match NETS.iter().find(|(number, _)| *number == self.net_type()) {
            Some((_, name)) => f.write_str(name)?,
            None => write!(f, "<{}>", self.net_type())?,
        }
        match self.net_number() {
            0 => Ok(()),
            number => write!(f, "{number}"),
        }
    }
}

impl fmt::Debug for Nid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nid({self})")
    }
}

impl FromStr for Nid {
    type Err = String;

    /// Reads `ADDRESS@NET`, where `NET` is `o2ib` or `tcp` with or without a number. Without `@NET` it is `o2ib`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (address, net) = text.split_once('@').unwrap_or((text, "o2ib"));
        let address: Ipv4Addr = address
            .parse()
            .map_err(|_| format!("{address:?} is not an IPv4 address"))?;
        let named = NETS[..2]
            .iter()
            .find_map(|(number, name)| Some((*number, net.strip_prefix(name)?)));
        let (net_type, number) = named.ok_or_else(|| format!("network {net:?} is neither o2ib nor tcp"))?;
        let number = match number {
            "" => 0,
            digits => digits
                .parse()
                .map_err(|_| format!("{digits:?} is not the number of a network"))?,
        };
        Ok(Self::new(net_type, number, address))
    }
}
