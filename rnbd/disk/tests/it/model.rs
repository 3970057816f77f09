//! Images against a model that is a piece of memory, over every way.

use crate::common::{Case, everywhere};
use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use rnbd::block::BlockOp;

const LEN: usize = 128 << 10;

/// An operation, its range on the device and the place of its data in the memory; most are aligned to something.
#[derive(Clone, Debug)]
struct Op {
    op: BlockOp,
    offset: usize,
    len: usize,
    at: usize,
    value: u8,
}

fn op() -> impl Strategy<Value = BlockOp> {
    prop_oneof![
        4 => Just(BlockOp::Read),
        4 => any::<bool>().prop_map(|fua| BlockOp::Write { fua }),
        1 => Just(BlockOp::Flush),
        1 => Just(BlockOp::Discard),
        2 => any::<(bool, bool)>().prop_map(|(fua, may_unmap)| BlockOp::WriteZeroes { fua, may_unmap }),
        2 => (1u32..4).prop_map(|most| BlockOp::BlockStatus { most }),
    ]
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let unit = prop_oneof![3 => Just(4096usize), 2 => Just(512), 1 => Just(1)];
    let one = (op(), unit, 0..LEN, 0..LEN, 0..4096usize, 1..=255u8);
    let one = one.prop_map(|(op, unit, a, b, at, value)| {
        let (begin, end) = (a.min(b) / unit * unit, a.max(b) / unit * unit);
        Op {
            op,
            offset: begin,
            len: end - begin,
            at: at / unit.min(4096) * unit.min(4096),
            value,
        }
    });
    prop::collection::vec(one, 1..16)
}

/// Does one operation on both.
fn step(rig: &mut crate::common::Rig, model: &mut [u8], o: &Op) -> Result<(), TestCaseError> {
    let range = o.offset..o.offset + o.len;
    let (offset, len) = (o.offset as u64, o.len as u64);
    match o.op {
        BlockOp::Read => {
            let read = rig.read_to(o.at, offset, o.len).unwrap();
            prop_assert!(read == model[range]);
        }
        BlockOp::Write { fua } => {
            let data: Vec<u8> = (0..o.len).map(|i| (i % 251) as u8 ^ o.value).collect();
            rig.write_from(o.at, offset, &data, fua).unwrap();
            model[range].copy_from_slice(&data);
        }
        BlockOp::Flush => rig.flush().unwrap(),
        // In a file what is discarded reads as zeroes.
        BlockOp::Discard => {
            rig.discard(offset, len).unwrap();
            model[range].fill(0);
        }
        BlockOp::WriteZeroes { fua, may_unmap } => {
            rig.zero(offset, len, fua, may_unmap).unwrap();
            model[range].fill(0);
        }
        BlockOp::BlockStatus { most } => {
            let (mut at, len) = (offset.next_multiple_of(512), len / 512 * 512);
            if len == 0 || at + len > LEN as u64 {
                return Ok(());
            }
            for extent in rig.extents(at, len, most).unwrap() {
                let mut there = model[at as usize..(at + extent.len) as usize].iter();
                prop_assert!(!extent.zero || there.all(|b| *b == 0));
                at += extent.len;
            }
        }
    }
    Ok(())
}

fn agree(case: &Case, ops: &[Op]) -> Result<(), TestCaseError> {
    let mut rig = case.image(LEN as u64);
    let mut model = vec![0; LEN];
    for o in ops {
        step(&mut rig, &mut model, o)?;
    }
    prop_assert!(rig.read(0, LEN).unwrap() == model);
    drop(rig);
    prop_assert!(std::fs::read(case.path()).unwrap() == model);
    Ok(())
}

#[test]
fn whatever_is_done_the_bytes_are_as_in_memory() {
    everywhere(|case| {
        let config = Config {
            cases: 24,
            failure_persistence: None,
            ..Config::default()
        };
        let tried = TestRunner::new(config).run(&ops(), |ops| agree(case, &ops));
        tried.unwrap_or_else(|e| panic!("{:?}, {:?}: {e}", case.way, case.caching));
    });
}
