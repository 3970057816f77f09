//! 12: the provider contract over roce-hw in a guest: libibverbs, librdmacm and rdma_rxe, and nothing of our transport.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{Ctx, Direction, Scenario};
use crate::{Error, far::Ip, lab::Places};

/// How long the suite may take, seconds. Emulated processors need a minute, if they have the machine's for themselves.
const PATIENCE: u32 = 900;

pub(super) fn list() -> Vec<Scenario> {
    let contract = Scenario::new(12, "provider-contract", Direction::KernelToKernel, contract);
    vec![contract.lacks(not_built)]
}

fn not_built(places: &Places) -> Option<String> {
    let program = &places.contract;
    let why = || format!("no {}: roce-hw was not built", program.display());
    (!program.exists()).then(why)
}

/// A program in the lab's folder, which guests see.
struct Shown(PathBuf);

impl Shown {
    fn new(program: &Path, places: &Places) -> Result<Self, Error> {
        // Of this run alone, and not in the way of those that share the folder.
        let shown = Self(places.lab.join(format!("provider-contract-{}", std::process::id())));
        fs::copy(program, &shown.0)?;
        Ok(shown)
    }

    /// Its path there.
    fn path(&self) -> String {
        let name = self.0.file_name().unwrap_or_default();
        format!("$LAB/{}", name.to_string_lossy())
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn contract(c: &mut Ctx<'_>) -> Result<String, Error> {
    let program = Shown::new(&c.places.contract, c.places)?;
    // Both hosts are on one device: what one rdma_rxe sends to another of the same kernel goes by `lo`, which neither has.
    let addr = c.far.addr(Ip::V4)?;
    let script = format!("ulimit -l unlimited; {} {addr}", program.path());
    let said = c.guest()?.run(&script, PATIENCE)?;
    let cases = said.lines().filter(|line| line.starts_with("ok ")).count();
    match cases {
        0 => Err(format!("no case passed:\n{said}").into()),
        n => Ok(format!("passed: {n} cases")),
    }
}
