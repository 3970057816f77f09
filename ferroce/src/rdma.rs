//! `--rdma`: which of our addresses are RDMA devices of the host, and which are ours in software.

use std::{fmt, net::IpAddr, str::FromStr};

use clap::Args;
use roce::LocalDevice;
use roce_devices::Devices;

use crate::output::Failure;

/// What `--rdma` says, once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Rdma {
    /// RDMA devices where they own an address, software elsewhere.
    Auto,
    /// Software everywhere.
    Soft,
    /// This device, or one port of it, where it owns an address; software elsewhere.
    Device {
        /// As `rdma link` has it without the port.
        name: String,
        port: Option<u8>,
    },
}

impl FromStr for Rdma {
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
            return Ok(Self::Device {
                name: text.into(),
                port: None,
            });
        };
        let port = port.parse().ok().filter(|port| *port > 0);
        let port = port.ok_or_else(|| format!("{text:?} names no port of a device: NAME:1 to NAME:255"))?;
        Ok(Self::Device {
            name: name.into(),
            port: Some(port),
        })
    }
}

impl fmt::Display for Rdma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Soft => f.write_str("soft"),
            Self::Device { name, port: None } => f.write_str(name),
            Self::Device { name, port: Some(port) } => write!(f, "{name}:{port}"),
        }
    }
}

const fn usual() -> Rdma {
    match cfg!(feature = "hardware") {
        true => Rdma::Auto,
        false => Rdma::Soft,
    }
}

#[derive(Args, Clone, PartialEq, Eq, Debug)]
pub(crate) struct RdmaArgs {
    /// RDMA devices to use, at the addresses that are theirs; other addresses are in software. `auto`: all that there are; `soft`: none.
    /// Several times: as many devices. Of `bench` for rtrs only
    #[arg(long = "rdma", value_name = "NAME[:PORT]|auto|soft", default_values_t = [usual()])]
    wanted: Vec<Rdma>,
}

impl RdmaArgs {
    /// The same, for another process.
    pub(crate) fn options(&self) -> impl Iterator<Item = String> {
        self.wanted.iter().map(|rdma| format!("--rdma={rdma}"))
    }

    /// Which devices are named; `None`: none is to be used.
    #[cfg_attr(not(feature = "hardware"), allow(dead_code, reason = "there is nothing to open"))]
    fn named(&self) -> Result<Option<Vec<(&str, Option<u8>)>>, Failure> {
        match &self.wanted[..] {
            [Rdma::Soft] => Ok(None),
            [Rdma::Auto] => Ok(Some(Vec::new())),
            wanted => {
                let name = |rdma: &'_ Rdma| match rdma {
                    Rdma::Device { .. } => Ok(()),
                    alone => Err(Failure::usage(format!("--rdma {alone} stands alone"))),
                };
                wanted.iter().try_for_each(name)?;
                let named = wanted.iter().filter_map(|rdma| match rdma {
                    Rdma::Device { name, port } => Some((name.as_str(), *port)),
                    Rdma::Auto | Rdma::Soft => None,
                });
                Ok(Some(named.collect()))
            }
        }
    }

    /// The devices of each loop: RDMA devices where these own an address, and what `soft` opens for the other addresses.
    #[cfg(not(feature = "hardware"))]
    pub(crate) fn open(
        &self,
        addrs: &[IpAddr],
        soft: impl Fn(&[IpAddr]) -> Result<Vec<LocalDevice>, Failure>,
        _loops: usize,
    ) -> Result<Vec<Devices>, Failure> {
        if let Some(named) = self.named()?.filter(|named| !named.is_empty()) {
            return Err(Failure::usage(format!(
                "--rdma {}: this ferroce has no RDMA devices; it was built without the feature `hardware`",
                named[0].0
            )));
        }
        Ok(soft(addrs)?.into_iter().map(Devices::from).collect())
    }

    /// The devices of each loop: RDMA devices where these own an address, and what `soft` opens for the other addresses.
    #[cfg(feature = "hardware")]
    pub(crate) fn open(
        &self,
        addrs: &[IpAddr],
        soft: impl Fn(&[IpAddr]) -> Result<Vec<LocalDevice>, Failure>,
        loops: usize,
    ) -> Result<Vec<Devices>, Failure> {
        let all_soft = || Ok(soft(addrs)?.into_iter().map(Devices::from).collect());
        let Some(named) = self.named()? else {
            return all_soft();
        };
        let Some(hardware) = found::open(&named, addrs)? else {
            return all_soft();
        };
        if loops > 1 {
            return Err(Failure::usage(format!(
                "RDMA devices are driven by one loop: not with --threads {loops} (or with --rdma soft)"
            )));
        }
        let in_software: Vec<_> = addrs
            .iter()
            .copied()
            .filter(|addr| hardware.owner(*addr).is_none())
            .collect();
        let opened = match soft(&in_software) {
            // A kernel with devices of its own in software has their port at all addresses.
            Err(e) if in_software.iter().all(IpAddr::is_unspecified) => {
                tracing::warn!(
                    "RDMA devices only, at all of their addresses; in software not: {}",
                    e.text().unwrap_or_default()
                );
                soft(&[])?
            }
            opened => opened?,
        };
        let together = opened
            .into_iter()
            .next()
            .map(|soft| Devices::with_hardware(soft, hardware));
        Ok(together.into_iter().collect())
    }
}

#[cfg(feature = "hardware")]
mod found {
    use std::net::IpAddr;

    use roce_devices::hw::{DeviceName, HwConfig, HwDevice};

    use crate::output::Failure;

    /// The named devices, which have to own some of these addresses, or those of all that do. `None`: none does.
    pub(super) fn open(named: &[(&str, Option<u8>)], addrs: &[IpAddr]) -> Result<Option<HwDevice>, Failure> {
        let devices = named.iter().map(|(name, port)| DeviceName {
            name: (*name).to_owned(),
            port: *port,
        });
        let config = HwConfig {
            devices: devices.collect(),
        };
        let all = named.is_empty();
        let hardware = match HwDevice::open(&config) {
            Ok(hardware) => hardware,
            Err(e) if all => {
                tracing::info!("in software: {e}");
                return Ok(None);
            }
            Err(e) => return Err(Failure::failed(e.to_string())),
        };
        let owns = |addr: &IpAddr| addr.is_unspecified() || hardware.owner(*addr).is_some();
        if addrs.iter().any(owns) {
            tell(&hardware, addrs);
            return Ok(Some(hardware));
        }
        match all {
            true => Ok(None),
            false => Err(none_is_theirs(named, &hardware, addrs)),
        }
    }

    fn tell(hardware: &HwDevice, addrs: &[IpAddr]) {
        for addr in addrs {
            if let Some(name) = hardware.owner(*addr).and_then(|device| hardware.name(device)) {
                tracing::info!("{addr} is the RDMA device {name}");
            }
        }
    }

    fn list(addrs: impl Iterator<Item = IpAddr>) -> String {
        let text: Vec<_> = addrs.map(|addr| addr.to_string()).collect();
        match text.is_empty() {
            true => "none".to_owned(),
            false => text.join(", "),
        }
    }

    fn none_is_theirs(named: &[(&str, Option<u8>)], hardware: &HwDevice, addrs: &[IpAddr]) -> Failure {
        let names: Vec<_> = named.iter().map(|(name, _)| *name).collect();
        Failure::failed(format!(
            "{} of {} is an address of {}, whose addresses (RoCE v2) are: {}",
            if addrs.len() == 1 { "not the one" } else { "none" },
            list(addrs.iter().copied()),
            names.join(" or "),
            list(hardware.addrs())
        ))
    }
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
            let device = Rdma::Device {
                name: name.into(),
                port,
            };
            assert_eq!(text.parse(), Ok(device));
        }
        assert_eq!("auto".parse(), Ok(Rdma::Auto));
        assert_eq!("soft".parse(), Ok(Rdma::Soft));
        for wrong in ["", "mlx5_0:", "mlx5_0:0", "mlx5_0:x", "mlx5_0:256"] {
            assert!(wrong.parse::<Rdma>().is_err(), "{wrong}");
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
        assert_eq!(two.named().unwrap(), Some(vec![("rxe0", None), ("rxe1", Some(1))]));
    }
}
