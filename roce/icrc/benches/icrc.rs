//! Seal, verify and recover at the two path MTUs that matter.

use std::{hint::black_box, net::Ipv4Addr};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use roce_icrc::{Flow, IdSolver, IpPair, Recovery};

fn bench(c: &mut Criterion) {
    let flow = Flow {
        ip: IpPair::V4 {
            src: Ipv4Addr::new(127, 0, 0, 1),
            dst: Ipv4Addr::new(127, 0, 0, 2),
        },
        src_port: 49152,
        dst_port: 4791,
    };
    let mut group = c.benchmark_group("icrc");
    for payload in [1024usize, 4096] {
        let mut packet: Vec<u8> = (0..payload + 16).map(|i| (i * 31) as u8).collect();
        group.throughput(Throughput::Bytes(packet.len() as u64));
        group.bench_function(BenchmarkId::new("seal", payload), |b| {
            b.iter(|| flow.seal(7, black_box(&mut packet)));
        });
        flow.seal(7, &mut packet);
        group.bench_function(BenchmarkId::new("verify", payload), |b| {
            b.iter(|| assert!(flow.verify(7, black_box(&packet))));
        });
        group.bench_function(BenchmarkId::new("recover, right hint", payload), |b| {
            b.iter(|| assert_eq!(flow.recover(black_box(&packet), 7), Recovery::Exact(7)));
        });
        group.bench_function(BenchmarkId::new("recover, wrong hint", payload), |b| {
            b.iter(|| assert_eq!(flow.recover(black_box(&packet), 8), Recovery::Exact(7)));
        });
        let mut solver = IdSolver::new();
        group.bench_function(BenchmarkId::new("recover, wrong hint, cached", payload), |b| {
            b.iter(|| {
                assert_eq!(
                    flow.recover_with(&mut solver, black_box(&packet), 8),
                    Recovery::Exact(7)
                )
            });
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
