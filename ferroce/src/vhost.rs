//! Disks of virtual machines: the options of `ferroce map`.

use std::path::PathBuf;

use clap::Args;
use rnbd_host::map::{MapDevice, VhostSocket};

use crate::output::Failure;

#[derive(Args)]
pub(crate) struct VhostArgs {
    /// Unix socket to create for a virtual machine, which gets a device as a disk (vhost-user-blk; QEMU's vhost-user-blk-pci). Mode 0600,
    /// removed at the end, in a folder that others can't write to. With several devices name one: DEVICE=SOCKET. Repeat it for several
    /// sockets
    #[arg(long = "vhost-user", value_name = "[DEVICE=]SOCKET", value_parser = VhostArg::parse)]
    vhost_user: Vec<VhostArg>,
}

impl VhostArgs {
    /// Whether no socket is named.
    pub(crate) fn is_empty(&self) -> bool {
        self.vhost_user.is_empty()
    }

    /// The sockets, of these devices.
    pub(crate) fn sockets(&self, devices: &[MapDevice]) -> Result<Vec<VhostSocket>, Failure> {
        self.vhost_user.iter().map(|arg| arg.socket(devices)).collect()
    }
}

/// A socket on the command line.
#[derive(Clone, PartialEq, Eq, Debug)]
struct VhostArg(String);

impl VhostArg {
    fn parse(text: &str) -> Result<Self, String> {
        match text.is_empty() || text.ends_with('=') {
            true => Err("no socket".into()),
            false => Ok(Self(text.into())),
        }
    }

    /// `DEVICE=SOCKET` if there is such a device: both may have signs of equality in them. With one device its name may be left out.
    fn socket(&self, devices: &[MapDevice]) -> Result<VhostSocket, Failure> {
        let text = self.0.as_str();
        let named = devices.iter().filter_map(|device| {
            let path = text.strip_prefix(device.name.as_str())?.strip_prefix('=')?;
            Some((device, path))
        });
        let longest = named.max_by_key(|(device, _)| device.name.len());
        match (longest, devices) {
            (Some((device, path)), _) => Ok(socket(device, path)),
            (None, [one]) => Ok(socket(one, text)),
            (None, _) => {
                let text = format!("--vhost-user {text}: with several devices it is DEVICE=SOCKET, of one of them");
                Err(Failure::usage(text))
            }
        }
    }
}

fn socket(device: &MapDevice, path: &str) -> VhostSocket {
    VhostSocket {
        device: device.name.clone(),
        path: PathBuf::from(path),
    }
}

#[cfg(test)]
mod tests {
    use rnbd::proto::AccessMode;

    use super::*;

    #[test]
    fn sockets_are_those_of_devices() {
        let devices = |names: &[&str]| -> Vec<MapDevice> {
            let device = |name: &&str| MapDevice {
                name: (*name).to_owned(),
                mode: AccessMode::ReadWrite,
            };
            names.iter().map(device).collect()
        };
        let (one, two) = (devices(&["disk"]), devices(&["a", "a=b"]));
        for (text, devices, want) in [
            ("/run/v.sock", &one, Some(("disk", "/run/v.sock"))),
            ("disk=/run/v.sock", &one, Some(("disk", "/run/v.sock"))),
            ("d=v.sock", &one, Some(("disk", "d=v.sock"))),
            ("a=v", &two, Some(("a", "v"))),
            ("a=b=v", &two, Some(("a=b", "v"))),
            ("v", &two, None),
            ("c=v", &two, None),
        ] {
            let socket = VhostArg::parse(text).unwrap().socket(devices).ok();
            let want = want.map(|(device, path)| VhostSocket {
                device: device.into(),
                path: path.into(),
            });
            assert_eq!(socket, want, "{text}");
        }
        assert!(VhostArg::parse("").is_err() && VhostArg::parse("disk=").is_err());
    }
}
