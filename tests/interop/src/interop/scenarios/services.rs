//! 7: what the kernel does with services other than RC, and shared queues, as `specs/kernel.md` says it: between queue pairs
//! of one guest, without us.

use super::{Ctx, Direction, Scenario, verdict};
use crate::{Error, far::Ip};

const SOURCE: &str = include_str!("../../../lab/services.c");

pub(super) fn list() -> Vec<Scenario> {
    vec![Scenario::new(7, "kernel-services", Direction::KernelToKernel, services)]
}

fn services(c: &mut Ctx<'_>) -> Result<String, Error> {
    let addr = c.far.addr(Ip::V4)?;
    let script = format!(
        "set -e; cat > /tmp/services.c <<'END_OF_SOURCE'\n{SOURCE}END_OF_SOURCE\n\
         gcc -o /tmp/services /tmp/services.c -libverbs; /tmp/services -g {addr}\n"
    );
    verdict(&c.guest()?.run(&script, 120)?)
}
