//! `--rdma`: which of our addresses are RDMA devices of the host, and which are ours in software.

use std::{fmt, net::IpAddr, str::FromStr, sync::OnceLock};

use clap::Args;
use roce::{DeviceName, Hardware, LocalDevice, VerbsError};

use crate::output::Failure;

/// Value of one `--rdma`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Wanted {
    /// RDMA devices where they own an address, software elsewhere.
    Auto,
    /// Software everywhere.
    Soft,
    /// This device where it owns an address; software elsewhere.
    Device(DeviceName),
}

impl FromStr for Wanted {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => return Ok(Self::Auto),
            "soft" => return Ok(Self::Soft),
            "" => return Err("the name of an RDMA device, auto or soft".into()),
            _ => {}
        }
        // `rdma link` separates the port with a slash, others with a colon.
        let Some((name, port)) = text.split_once([':', '/']) else {
            return Ok(Self::Device(DeviceName {
                name: text.into(),
                port: None,
            }));
        };
        let port = port.parse().ok().filter(|port| *port > 0);
        let port = port.ok_or_else(|| format!("{text:?} names no port of a device: NAME:1 to NAME:255"))?;
        Ok(Self::Device(DeviceName {
            name: name.into(),
            port: Some(port),
        }))
    }
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Soft => f.write_str("soft"),
            Self::Device(DeviceName { name, port: None }) => f.write_str(name),
            Self::Device(DeviceName { name, port: Some(port) }) => write!(f, "{name}:{port}"),
        }
    }
}

#[derive(Args, Clone, PartialEq, Eq, Debug)]
pub(crate) struct RdmaArgs {
    /// RDMA device of this host to use for its addresses; other addresses are in software. `auto`: all devices, if this ferroce was
    /// built with the feature `hardware`; `soft`: none. Repeat it for several devices
    #[arg(long = "rdma", value_name = "NAME[:PORT]|auto|soft", default_value = "auto")]
    wanted: Vec<Wanted>,
}

impl RdmaArgs {
    /// No RDMA devices.
    pub(crate) fn soft() -> Self {
        Self {
            wanted: vec![Wanted::Soft],
        }
    }

    /// The same, for another process.
    pub(crate) fn options(&self) -> impl Iterator<Item = String> {
        self.wanted.iter().map(|wanted| format!("--rdma={wanted}"))
    }

    /// Which devices are named; `None`: none is to be used.
    fn named(&self) -> Result<Option<Vec<DeviceName>>, Failure> {
        match &self.wanted[..] {
            [Wanted::Soft] => Ok(None),
            [Wanted::Auto] => Ok(Some(Vec::new())),
            wanted => {
                let name = |wanted: &Wanted| match wanted {
                    Wanted::Device(name) => Ok(name.clone()),
                    alone => Err(Failure::usage(format!("--rdma {alone} stands alone"))),
                };
                Ok(Some(wanted.iter().map(name).collect::<Result<_, _>>()?))
            }
        }
    }

    /// Whether an RDMA device that may be used owns the address.
    pub(crate) fn owns(&self, addr: IpAddr) -> Result<bool, Failure> {
        Ok(self.devices(addr)?.is_some_and(|rdma| rdma.owner(addr).is_some()))
    }

    /// Opens the RDMA devices, if one that may be used owns the address, or, if that is not specified, if there are any.
    pub(crate) fn devices(&self, addr: IpAddr) -> Result<Option<Box<dyn Hardware>>, Failure> {
        match self.named()? {
            None => Ok(None),
            Some(named) => found(&named, &[addr]),
        }
    }

    /// An address of the devices that are named, if some are.
    pub(crate) fn first_addr(&self) -> Result<Option<IpAddr>, Failure> {
        let (Some(named), Some(open)) = (self.named()?.filter(|named| !named.is_empty()), OPEN.get()) else {
            return Ok(None);
        };
        let rdma = open(&named).map_err(Failure::of)?;
        Ok(rdma.addrs().first().copied())
    }

    /// The devices of each loop: RDMA devices where these own an address, and what `soft` opens for the other addresses.
    pub(crate) fn open(
        &self,
        addrs: &[IpAddr],
        soft: impl Fn(&[IpAddr]) -> Result<Vec<LocalDevice>, Failure>,
        loops: usize,
    ) -> Result<Vec<LocalDevice>, Failure> {
        let Some(named) = self.named()? else {
            return soft(addrs);
        };
        let Some(rdma) = found(&named, addrs)? else {
            return soft(addrs);
        };
        if loops > 1 {
            return Err(Failure::usage(format!(
                "RDMA devices are driven by one loop: not with --threads {loops} (or with --rdma soft)"
            )));
        }
        let in_software: Vec<_> = addrs
            .iter()
            .copied()
            .filter(|addr| rdma.owner(*addr).is_none())
            .collect();
        let opened = match soft(&in_software) {
            // A kernel with devices of its own in software has their port at all addresses.
            Err(e) if !in_software.is_empty() && in_software.iter().all(IpAddr::is_unspecified) => {
                let why = e.text().unwrap_or_default();
                tracing::warn!("RDMA devices only, at all of their addresses; in software not: {why}");
                soft(&[])?
            }
            opened => opened?,
        };
        let with_rdma = opened.into_iter().next().map(|device| device.with_hardware(rdma));
        Ok(with_rdma.into_iter().collect())
    }
}

/// Opens RDMA devices; all that there are if none is named.
pub type OpenRdma = fn(&[DeviceName]) -> Result<Box<dyn Hardware>, VerbsError>;

/// How this program opens them, if it can.
static OPEN: OnceLock<OpenRdma> = OnceLock::new();

/// Has `--rdma` open RDMA devices so. To be called at most once, before anything else.
pub(crate) fn open_by(open: OpenRdma) {
    let _ = OPEN.set(open);
}

/// Whether this program can use RDMA devices.
pub(crate) fn is_built_in() -> bool {
    OPEN.get().is_some()
}

/// The named devices, which have to own some of these addresses, or those of all that do. `None`: none does.
fn found(named: &[DeviceName], addrs: &[IpAddr]) -> Result<Option<Box<dyn Hardware>>, Failure> {
    let all = named.is_empty();
    let Some(open) = OPEN.get() else {
        return match named.first() {
            None => Ok(None),
            Some(first) => Err(Failure::usage(format!(
                "--rdma {}: this ferroce can't use RDMA devices; it was built without the feature `hardware`",
                first.name
            ))),
        };
    };
    let rdma = match open(named) {
        Ok(rdma) => rdma,
        Err(e) if all => {
            tracing::info!("in software: {e}");
            return Ok(None);
        }
        Err(e) => return Err(Failure::of(e)),
    };
    let owns = |addr: &IpAddr| addr.is_unspecified() || rdma.owner(*addr).is_some();
    if addrs.iter().any(owns) {
        tell(&*rdma, addrs);
        return Ok(Some(rdma));
    }
    match all {
        true => Ok(None),
        false => Err(none_is_theirs(named, &*rdma, addrs)),
    }
}

fn tell(rdma: &dyn Hardware, addrs: &[IpAddr]) {
    for addr in addrs {
        let owner = rdma.owner(*addr);
        let name = owner.and_then(|index| rdma.devices().get(index)?.name.as_deref());
        if let Some(name) = name {
            tracing::info!("{addr} is the RDMA device {name}");
        }
    }
}

fn list(addrs: &[IpAddr]) -> String {
    let text: Vec<_> = addrs.iter().map(IpAddr::to_string).collect();
    match text.is_empty() {
        true => "none".to_owned(),
        false => text.join(", "),
    }
}

fn none_is_theirs(named: &[DeviceName], rdma: &dyn Hardware, addrs: &[IpAddr]) -> Failure {
    let names: Vec<_> = named.iter().map(|device| device.name.as_str()).collect();
    let (names, theirs) = (names.join(" or "), list(&rdma.addrs()));
    Failure::failed(match addrs {
        [addr] => format!("{addr} is no address of {names}, whose addresses (RoCE v2) are: {theirs}"),
        _ => format!(
            "none of {} is an address of {names}, whose addresses (RoCE v2) are: {theirs}",
            list(addrs)
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_with_or_without_a_port() {
        for (text, name, port) in [
            ("mlx5_0", "mlx5_0", None),
            ("mlx5_0:2", "mlx5_0", Some(2)),
            ("rxe0/1", "rxe0", Some(1)),
        ] {
            let name = name.into();
            assert_eq!(text.parse(), Ok(Wanted::Device(DeviceName { name, port })));
        }
        assert_eq!("auto".parse(), Ok(Wanted::Auto));
        assert_eq!("soft".parse(), Ok(Wanted::Soft));
        for wrong in ["", "mlx5_0:", "mlx5_0:0", "mlx5_0:x", "mlx5_0:256"] {
            assert!(wrong.parse::<Wanted>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn auto_and_soft_stand_alone() {
        let args = |wanted: &[&str]| RdmaArgs {
            wanted: wanted.iter().map(|text| text.parse().unwrap()).collect(),
        };
        assert!(args(&["auto", "rxe0"]).named().is_err());
        assert!(args(&["rxe0", "soft"]).named().is_err());
        assert_eq!(args(&["soft"]).named().unwrap(), None);
        assert_eq!(args(&["auto"]).named().unwrap(), Some(Vec::new()));
        let two = args(&["rxe0", "rxe1:1"]);
        let device = |name: &str, port| DeviceName {
            name: name.into(),
            port,
        };
        assert_eq!(
            two.named().unwrap(),
            Some(vec![device("rxe0", None), device("rxe1", Some(1))])
        );
    }
}
