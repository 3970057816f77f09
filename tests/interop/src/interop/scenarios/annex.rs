//! 1: ATOMIC WRITE and FLUSH (IBTA Annex A19), which rdma_rxe has since Linux 6.2 and 6.3.

use std::{net::SocketAddr, time::Duration};

use super::{Ctx, Direction, Scenario, errors::our_agent, verdict};
use crate::{Error, far::Ip, guest::Kernel};

pub(super) fn list() -> Vec<Scenario> {
    let add = |name: &str, direction, run: fn(&mut Ctx<'_>) -> Result<String, Error>| {
        Scenario::new(1, name, direction, run)
            .only_on(&[Kernel::V6_12, Kernel::V7_3])
            .wrong_icrc("RC Flush")
    };
    vec![
        add("ops-annex-a19", Direction::Both, with_ours),
        add("ops-annex-a19-two-kernels", Direction::KernelToKernel, two_kernels).guests(2),
    ]
}

/// `ferroce-lab annex` between two agents.
fn annex(c: &Ctx<'_>, name: &str, requester: SocketAddr, responder: SocketAddr, how: &[&str]) -> Result<String, Error> {
    let (requester, responder) = (requester.to_string(), responder.to_string());
    let ends = ["--requester", &requester, "--responder", &responder];
    let args = [&["annex", "--mtu", c.path_mtu()][..], &ends, how].concat();
    verdict(&c.tool(name, &c.places.peer.display().to_string(), &args, 300)?)
}

/// Our agent and the kernel's, each as requester.
fn with_ours(c: &mut Ctx<'_>) -> Result<String, Error> {
    let (mut ours, here) = our_agent(c, Ip::V4, "our-agent")?;
    let (mut theirs, there) = c.far.agent("verbs-agent", Ip::V4, &c.dir)?;
    let ours_asks = annex(c, "ours-asks", here, there, &["--rxe", "responder", "--stay"])?;
    let kernel_asks = annex(c, "kernel-asks", there, here, &["--rxe", "requester"])?;
    ours.finish(Duration::from_secs(30))?;
    theirs.finish(Duration::from_secs(30))?;
    Ok(format!("ours asks: {ours_asks}; the kernel asks: {kernel_asks}"))
}

/// FLUSH, too.
fn two_kernels(c: &mut Ctx<'_>) -> Result<String, Error> {
    let second = c.second.as_deref().ok_or("needs two guests")?.far.clone();
    let (mut a, requester) = second.agent("agent-2", Ip::V4, &c.dir)?;
    let (mut b, responder) = c.far.agent("agent-1", Ip::V4, &c.dir)?;
    let done = annex(c, "annex", requester, responder, &["--rxe", "both"])?;
    a.finish(Duration::from_secs(30))?;
    b.finish(Duration::from_secs(30))?;
    Ok(done)
}
