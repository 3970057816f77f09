//! Commands written to `map_device`.

use rnbd::{Errno, proto::AccessMode};
use rnbd_host::{
    control::{Refused, map::MapRequest},
    map::MapDevice,
};
use rtrs::{addr::PathAddr, proto::DEFAULT_PORT};

use crate::{Host, text::invalid};

/// Usage text of `map_device` (`rnbd_clt_map_device_show`).
pub(crate) const USAGE: &str = "Usage: echo \"[dest_port=server port number] sessname=<name of the rtrs session> \
    path=<[srcaddr@]dstaddr> [path=<[srcaddr@]dstaddr>] device_path=<full path on remote side> \
    [access_mode=<ro|rw|migration>] [nr_poll_queues=<number of queues>]\" > map_device\n\n\
    addr ::= [ ip:<ipv4> | ip:<ipv6> | gid:<gid> ]\n";

/// Bytes of a name at most (`NAME_MAX`).
const MAX_NAME: usize = 255;
/// Paths at most, as in `rnbd_clt_map_device_store`. More can be added to a session that is open.
const MAX_PATHS: usize = 6;

/// A device that is to be mapped.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MapOrder {
    /// The session's name.
    pub session: String,
    /// Its paths, if it is to be opened. Those for a session that there is already are not looked at, as in the kernel.
    pub paths: Vec<PathAddr>,
    /// The device, as the server calls it.
    pub device: String,
    /// How it is opened.
    pub mode: AccessMode,
}

/// A path; what does not even begin as an address has an errno of its own (`rtrs_str_to_sockaddr`).
fn path(value: &str, port: u16) -> Result<PathAddr, Refused> {
    PathAddr::parse(value, port, &|_| None).map_err(|e| {
        let address = ["ip:", "gid:"].iter().any(|kind| value.starts_with(kind));
        let digits = value.starts_with(|c: char| c.is_ascii_hexdigit() || c == '[') && value.contains(['.', ':']);
        match address || digits {
            true => invalid(e.to_string()),
            false => Refused::new(Errno::EPROTONOSUPPORT, e.to_string()),
        }
    })
}

impl MapOrder {
    /// Reads what is written to `map_device` (`rnbd_clt_parse_map_options`): words with `=`, in any order, but that `dest_port` is for the
    /// paths after it.
    ///
    /// # Errors
    /// EINVAL, and what is wrong; ENOMEM for too many paths, as there.
    pub fn parse(text: &str) -> Result<Self, Refused> {
        let (mut session, mut device, mut mode) = (None, None, AccessMode::ReadWrite);
        let (mut paths, mut port) = (Vec::new(), DEFAULT_PORT);
        for word in text.trim().split(' ').filter(|word| !word.is_empty()) {
            let (key, value) = word
                .split_once('=')
                .filter(|(_, value)| !value.is_empty())
                .ok_or_else(|| invalid(format!("{word:?}: an option is NAME=VALUE")))?;
            match key {
                "sessname" | "device_path" if value.len() > MAX_NAME => {
                    return Err(invalid(format!("{key} has more than {MAX_NAME} bytes")));
                }
                "sessname" => session = Some(value.to_owned()),
                "device_path" => device = Some(value.to_owned()),
                "access_mode" => mode = value.parse().map_err(|e: String| invalid(e))?,
                "dest_port" => {
                    let number = value.parse().ok().filter(|port| *port > 0);
                    port = number.ok_or_else(|| invalid(format!("{value:?} is no port")))?;
                }
                "path" if paths.len() >= MAX_PATHS => {
                    let text = format!("there are more than {MAX_PATHS} paths");
                    return Err(Refused::new(Errno::ENOMEM, text));
                }
                "path" => paths.push(path(value, port)?),
                // Loops look for work, whoever waits.
                "nr_poll_queues" => {
                    let number: i32 = value.parse().map_err(|_| invalid(format!("{value:?} is no number")))?;
                    if number < -1 {
                        return Err(invalid("nr_poll_queues is -1 or more"));
                    }
                }
                other => return Err(invalid(format!("there is no option {other:?}"))),
            }
        }
        Ok(Self {
            session: session.ok_or_else(|| invalid("sessname= is missing"))?,
            paths,
            device: device.ok_or_else(|| invalid("device_path= is missing"))?,
            mode,
        })
    }

    /// Over the session of this name, or over a new one.
    pub(crate) fn carry_out(&self, host: &dyn Host) -> Result<(), Refused> {
        for client in host.clients() {
            // One that has ended has no session.
            if client.listing().is_ok_and(|listing| listing.session == self.session) {
                let device = MapDevice {
                    name: self.device.clone(),
                    mode: self.mode,
                };
                return client.ask(MapRequest::Map(device)).map(|_| ());
            }
        }
        if self.paths.is_empty() {
            let text = format!("there is no session {:?}, and no path to open it", self.session);
            return Err(Refused::new(Errno::ENXIO, text));
        }
        host.open(self)
    }
}
