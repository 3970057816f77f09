//! LNet nodes of this host's processes.

use rnbd_host::control::{LnetNode, LnetNodes, ProcessRequest};

use super::client::Client;
use crate::{control::address::of_lnet_nodes, output::Failure};

/// Returns the LNet nodes that this user may inspect, with their processes. Processes that exit meanwhile, or don't have this request, are
/// missing.
pub(crate) fn nodes() -> Result<Vec<(u32, LnetNode)>, Failure> {
    let mut found: Vec<(u32, LnetNode)> = Vec::new();
    for socket in of_lnet_nodes() {
        let Ok(mut client) = Client::connect(Some(&socket)) else {
            continue;
        };
        let pid = client.greeting.pid;
        // It may have two of the sockets.
        if found.iter().any(|(other, _)| *other == pid) {
            continue;
        }
        if let Ok(listed) = client.try_ask::<LnetNodes>(ProcessRequest::Lnet {})? {
            found.extend(listed.lnet_nodes.into_iter().map(|node| (pid, node)));
        }
    }
    Ok(found)
}
