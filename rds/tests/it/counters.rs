//! Counters, and the table of what they count.

use rds::Counters;

/// Name, and what it counts; or `-`, and why it is always 0.
const TABLE: &str = include_str!("../../../specs/rds-counters.tsv");
/// Facts of the kernel.
const KERNEL: &str = include_str!("../../../tests/interop/expect/rds-rxe.txt");

#[test]
fn counters_are_the_kernels_in_its_order_and_the_table_has_all() {
    let ours: Vec<_> = Counters::default().of_kernel().map(|(name, _)| name).collect();
    let kernel = KERNEL.lines().filter_map(|line| line.strip_prefix("info counter: "));
    assert_eq!(ours, kernel.collect::<Vec<_>>());
    let rows = TABLE.lines().filter(|line| !line.starts_with('#'));
    let names = rows.map(|row| row.split('\t').next().unwrap());
    assert_eq!(ours, names.collect::<Vec<_>>());
}
