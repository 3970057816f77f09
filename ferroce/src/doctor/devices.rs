//! Devices that a program sees under `ferroce run`.

use super::{Check, Status};
use crate::sharing::link::{self, Link};

const ID: &str = "devices";

/// Lists the devices in their order.
pub(super) fn check() -> Check {
    match link::links(&[]) {
        Ok(links) if links.is_empty() => Check::found(
            ID,
            Status::Fail,
            "no interface is up and has an address: programs under `ferroce run` see no device",
            "configure one: `ip link set … up`, `ip addr add …`",
        ),
        Ok(links) => Check::ok(ID, summary(&links)),
        Err(e) => Check::found(
            ID,
            Status::Note,
            format!("the devices can't be listed: {e}"),
            "look at `ip addr`",
        ),
    }
}

fn summary(links: &[Link]) -> String {
    let text = |link: &Link| {
        let addrs: Vec<String> = link.gids.iter().map(|gid| gid.addr.to_string()).collect();
        format!("{} = {} ({})", link.ifname, link.netdev, addrs.join(", "))
    };
    let all: Vec<String> = links.iter().map(text).collect();
    format!(
        "programs under `ferroce run` see {}; told no device, they take the first",
        all.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_device_is_named_with_its_interface() {
        let check = check();
        assert_eq!(check.status, Status::Ok);
        let first = link::links(&[]).unwrap().remove(0);
        assert!(
            check
                .summary
                .contains(&format!("see {} = {} (", first.ifname, first.netdev)),
            "{}",
            check.summary
        );
        assert!(check.summary.contains("= lo (127.0.0.1"), "{}", check.summary);
    }
}
