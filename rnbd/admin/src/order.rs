//! Commands written to `map_device`.

use rnbd::{Errno, proto::AccessMode};
use rnbd_host::control::{MapOrder, MapRequest, Refused};
use rtrs::{addr::PathAddr, proto::DEFAULT_PORT};

use crate::{host::Host, text::invalid};

/// Usage text of `map_device` (`rnbd_clt_map_device_show`).
pub(crate) const USAGE: &str = "Usage: echo \"[dest_port=server port number] sessname=<name of the rtrs session> \
    path=<[srcaddr@]dstaddr> [path=<[srcaddr@]dstaddr>] device_path=<full path on remote side> \
    [access_mode=<ro|rw|migration>] [nr_poll_queues=<number of queues>]\" > map_device\n\n\
    addr ::= [ ip:<ipv4> | ip:<ipv6> | gid:<gid> ]\n";

/// Bytes of a name at most (`NAME_MAX`); EINVAL beyond.
const MAX_NAME: usize = 255;
/// Paths at most, as in `rnbd_clt_map_device_store`; ENOMEM beyond. More can be added to an open session.
const MAX_PATHS: usize = 6;

/// Reads a path. A text that does not start like an address has an errno of its own (`rtrs_str_to_sockaddr`).
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

/// Reads what is written to `map_device` (`rnbd_clt_parse_map_options`): words with `=`, in any order, but that `dest_port` is for the
/// paths after it.
///
/// # Errors
/// EINVAL, and what is wrong; ENOMEM for too many paths, as there.
pub(crate) fn parse(text: &str) -> Result<(String, MapOrder), Refused> {
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
                port = number.ok_or_else(|| invalid(format!("{value:?} is not a port")))?;
            }
            "path" if paths.len() >= MAX_PATHS => {
                let text = format!("there are more than {MAX_PATHS} paths");
                return Err(Refused::new(Errno::ENOMEM, text));
            }
            "path" => paths.push(path(value, port)?),
            // Loops poll for all requests alike.
            "nr_poll_queues" => {
                let number: i32 = value
                    .parse()
                    .map_err(|_| invalid(format!("{value:?} is not a number")))?;
                if number < -1 {
                    return Err(invalid("nr_poll_queues is -1 or more"));
                }
            }
            other => return Err(invalid(format!("there is no option {other:?}"))),
        }
    }
    let session = session.ok_or_else(|| invalid("sessname= is missing"))?;
    let order = MapOrder {
        session: Some(session.clone()),
        paths,
        device: device.ok_or_else(|| invalid("device_path= is missing"))?,
        mode,
    };
    Ok((session, order))
}

/// Maps the device over the session of this name, or over a new one.
pub(crate) fn execute(session: &str, order: &MapOrder, host: &dyn Host) -> Result<(), Refused> {
    for client in host.clients() {
        // One that has just ended has no session.
        if client.listing().is_ok_and(|listing| listing.session == session) {
            return client.ask(MapRequest::Map(order.device())).map(|_| ());
        }
    }
    if order.paths.is_empty() {
        let text = format!("no session {session:?}, and no path to open it");
        return Err(Refused::new(Errno::ENXIO, text));
    }
    host.open(session, order)
}
