//! The provider contract over roce-hw: libibverbs, librdmacm and rdma_rxe, and nothing of our transport.

use super::{
    super::{Ctx, Direction, Scenario},
    Shown,
};
use crate::{Error, far::Ip};

/// How long the suite may take, seconds. Emulated processors need a minute, if they have the machine's for themselves.
const TIMEOUT: u32 = 900;

/// Cases that rdma_rxe does not pass, and how it fails them: faults of its own, of which `specs/kernel.md` tells.
const DIFFERENCES: [(&str, &str); 1] = [("a_key_opens_no_more_than_was_granted", "Window1 does not open 4092")];

pub(super) fn list() -> Vec<Scenario> {
    vec![Scenario::new(
        12,
        "provider-contract",
        Direction::KernelToKernel,
        contract,
    )]
}

fn contract(c: &mut Ctx<'_>) -> Result<String, Error> {
    let program = Shown::new(&c.places.contract, c.places)?;
    // Both hosts are on one device: what one rdma_rxe sends to another of the same kernel goes by `lo`, which neither has.
    let addr = c.far.addr(Ip::V4)?;
    let script = format!("ulimit -l unlimited; {} {addr}", program.path());
    let (code, said) = c.guest()?.try_run(&script, TIMEOUT)?;
    let cases = passed(code, &said)?;
    Ok(format!("passed: {cases} cases, {} fail as known", DIFFERENCES.len()))
}

/// How many cases passed; an error unless all others fail as they are known to.
pub(in super::super) fn passed(code: i32, said: &str) -> Result<usize, Error> {
    let failed = said.lines().filter_map(|line| line.strip_prefix("FAILED"));
    let known = |line: &&str| {
        let of = |(case, why): &(&str, &str)| line.trim_start().starts_with(case) && line.contains(why);
        DIFFERENCES.iter().any(of)
    };
    let (known, others): (Vec<_>, Vec<_>) = failed.partition(known);
    let passed = said.lines().filter(|line| line.starts_with("ok ")).count();
    let ended = said.lines().any(|line| line == format!("{} failed", DIFFERENCES.len()));
    match (code, passed, known.len(), others.is_empty(), ended) {
        (1, 1.., n, true, true) if n == DIFFERENCES.len() => Ok(passed),
        _ => Err(format!("exit code {code}, {passed} cases passed:\n{said}").into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_otherwise_than_known_is_a_failure() {
        let [(case, why)] = DIFFERENCES;
        let said = |case: &str, why: &str, count: usize| format!("ok      a\nFAILED  {case}: {why}\n{count} failed\n");
        assert_eq!(passed(1, &said(case, why, 1)).unwrap(), 1);
        for (code, said) in [
            (1, said(case, "another reason", 1)),
            (1, said("another_case", why, 1)),
            (1, said(case, why, 2)),
            (139, said(case, why, 1)),
            (0, "ok      a\n".to_owned()),
        ] {
            assert!(passed(code, &said).is_err(), "{code} {said}");
        }
    }

    #[test]
    fn every_difference_is_in_the_specification() {
        let specs = include_str!("../../../../../../specs/kernel.md");
        for (case, _) in DIFFERENCES {
            let told = |l: &str| l.contains("`provider-contract`") && l.contains(case);
            assert!(specs.lines().any(told), "{case}");
        }
    }
}
