//! 1: ATOMIC WRITE and FLUSH (IBTA Annex A19), which rdma_rxe has since Linux 6.2 and 6.3.

use super::{Ctx, Direction, Scenario, errors::our_agent, verdict};
use crate::{Error, far::Ip, guest::Kernel};

pub(super) fn list() -> Vec<Scenario> {
    vec![Scenario::new(1, "ops-annex-a19", Direction::Both, annex).only_on(Kernel::V6_12)]
}

/// `ferroce-lab annex` between our agent and the kernel's, each as requester.
fn annex(c: &mut Ctx<'_>) -> Result<String, Error> {
    let (mut ours, here) = our_agent(c, Ip::V4, "our-agent")?;
    let (mut theirs, there) = c.far.agent("verbs-agent", Ip::V4, &c.dir)?;
    let (here, there) = (here.to_string(), there.to_string());
    let peer = c.places.peer.display().to_string();
    let run = |name, args: &[&str]| {
        let common = ["annex", "--mtu", c.path_mtu()];
        verdict(&c.tool(name, &peer, &[&common, args].concat(), 300)?)
    };
    let ours_asks = run(
        "ours-asks",
        &[
            "--requester",
            &here,
            "--responder",
            &there,
            "--rxe",
            "responder",
            "--stay",
        ],
    )?;
    let kernel_asks = run(
        "kernel-asks",
        &["--requester", &there, "--responder", &here, "--rxe", "requester"],
    )?;
    ours.finish(std::time::Duration::from_secs(30))?;
    theirs.finish(std::time::Duration::from_secs(30))?;
    Ok(format!("ours asks: {ours_asks}; the kernel asks: {kernel_asks}"))
}
