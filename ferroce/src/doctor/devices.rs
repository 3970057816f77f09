//! Devices that a program sees under `ferroce run`.

use super::{Finding, fail, note, ok};
use crate::sharing::link::{self, Link};

/// Lists the devices in their order.
pub(super) fn check() -> Finding {
    match link::links(&[]) {
        Ok(links) if links.is_empty() => fail(
            "no interface is up and has an address: programs under `ferroce run` see no device",
            "configure one: `ip link set … up`, `ip addr add …`",
        ),
        Ok(links) => ok(summary(&links)),
        Err(e) => note(format!("the devices can't be listed: {e}"), "look at `ip addr`"),
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
    use super::{super::Status, *};

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
