//! Peer of the kernel's RDS that offers other versions, and rejects what the kernel asks for: what the kernel makes of either.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use roce::{CmEventKind, ConnParams, Device};
use roce_verbs::QpCaps;

use crate::{Error, link::Link};

const PORT: u16 = 18_634;
/// Offset of the type of service in a request's private data.
const TOS: usize = 12;
/// Type of service of the first connection that is to be rejected; those before are of the versions.
const FIRST_REJECTED: u8 = 101;
/// Bytes that a node rejects with; the kernel takes them for a version that is not compatible, and asks again.
const REJECT: [u8; 4] = [1, 0, 0, 0];
/// Time in which the kernel asks again, if it does: it waits a second at most.
const AGAIN: Duration = Duration::from_secs(4);
const TIMEOUT: Duration = Duration::from_secs(60);

/// Version and minor versions of a request, version of the answer; `None`: rejected.
const VERSIONS: [([u8; 2], u16, Option<[u8; 2]>); 12] = [
    ([3, 1], 0x3, Some([3, 1])),
    ([3, 1], 0, Some([3, 1])),
    ([4, 1], 0x3, Some([4, 1])),
    ([4, 1], 0x2, Some([4, 1])),
    ([4, 7], 0xff, Some([4, 1])),
    ([4, 0], 0x1, Some([4, 0])),
    ([0, 0], 0, Some([4, 0])),
    ([4, 1], 0x4, None),
    ([3, 0], 0x3, None),
    ([3, 2], 0x3, None),
    ([2, 0], 0x3, None),
    ([5, 1], 0x3, None),
];

/// Private data of a reject, and whether the kernel asks again: it reads a number of its own byte order, which 1 is the most of.
const REJECTS: [(&[u8], bool); 7] = [
    (&REJECT, true),
    (&[0; 4], true),
    (&[0xff; 4], true),
    (&[], true),
    (&[1], true),
    (&[2, 0, 0, 0], false),
    (&[0, 0, 0, 1], false),
];

/// Arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The kernel's address
    #[arg(long)]
    to: std::net::Ipv4Addr,
}

/// Offers each version, then waits for a request of each type of service from [`FIRST_REJECTED`] on.
pub(crate) fn run(device: &Device, local: IpAddr, args: &Args) -> Result<(), Error> {
    let IpAddr::V4(own) = local else {
        return Err("--addr is not an IPv4 address".into());
    };
    for (tos, (version, minors, answer)) in (1..).zip(VERSIONS) {
        let mut data = [own.octets(), args.to.octets()].concat();
        data.extend(version);
        data.extend(minors.to_be_bytes());
        data.push(tos);
        data.resize(32, 0);
        let found = offer(device, local, args, data)?;
        if found != answer {
            return Err(format!(
                "{version:?} of minor versions {minors:x}: the answer is {found:?}, expected {answer:?}"
            )
            .into());
        }
    }
    reject_all(device, local)?;
    println!("passed: {} versions, {} rejects", VERSIONS.len(), REJECTS.len());
    Ok(())
}

/// Connects with this private data. Returns the version of the answer; `None` if the kernel rejects as a node does.
fn offer(device: &Device, local: IpAddr, args: &Args, private_data: Vec<u8>) -> Result<Option<[u8; 2]>, Error> {
    let channel = device.create_cm_channel()?;
    let link = Link::unconnected(device, caps())?;
    let params = ConnParams {
        private_data,
        ..ConnParams::default()
    };
    let far = SocketAddr::new(args.to.into(), PORT);
    let id = device.connect(&channel, Some(local), far, &link.qp, params)?;
    match channel.wait(Some(TIMEOUT))?.map(|event| event.kind) {
        Some(CmEventKind::Established { private_data, .. }) => {
            id.disconnect()?;
            Ok(private_data.get(8..10).and_then(|version| version.try_into().ok()))
        }
        Some(CmEventKind::Rejected {
            reason, private_data, ..
        }) if reason.0 == 28 && private_data.starts_with(&REJECT) => Ok(None),
        other => Err(format!("{other:?}").into()),
    }
}

fn caps() -> QpCaps {
    QpCaps {
        max_send_wr: 2,
        max_recv_wr: 2,
        ..QpCaps::default()
    }
}

/// Rejects the first request of each type of service as [`REJECTS`] says, and all others so that the kernel stays silent.
fn reject_all(device: &Device, local: IpAddr) -> Result<(), Error> {
    let channel = device.create_cm_channel()?;
    let _listener = device.listen(&channel, SocketAddr::new(local, PORT), 64)?;
    println!("waiting");
    let silent = REJECTS[REJECTS.len() - 1].0;
    let mut requests: BTreeMap<u8, u32> = BTreeMap::new();
    let mut until = Instant::now() + TIMEOUT;
    while let Some(left) = until.checked_duration_since(Instant::now()) {
        let Some(event) = channel.wait(Some(left))? else { break };
        let CmEventKind::Request { private_data, .. } = event.kind else {
            continue;
        };
        let tos = private_data.get(TOS).copied().ok_or("a request without private data")?;
        *requests.entry(tos).or_default() += 1;
        let is_first = requests[&tos] == 1;
        let case = tos
            .checked_sub(FIRST_REJECTED)
            .and_then(|case| REJECTS.get(usize::from(case)));
        match case {
            Some((bytes, _)) if is_first => event.id.reject(bytes)?,
            _ => event.id.reject(silent)?,
        }
        let of_all = (FIRST_REJECTED..)
            .take(REJECTS.len())
            .all(|tos| requests.contains_key(&tos));
        if of_all && is_first {
            until = Instant::now() + AGAIN;
        }
    }
    for (tos, (bytes, again)) in (FIRST_REJECTED..).zip(REJECTS) {
        let count = requests.get(&tos).copied().unwrap_or_default();
        if count == 0 || (count > 1) != again {
            return Err(format!("rejected with {bytes:?}: {count} requests").into());
        }
    }
    Ok(())
}
