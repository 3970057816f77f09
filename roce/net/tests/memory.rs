//! Memory that closed datapaths give back. A process of its own, in which nothing else allocates.

use std::thread;

use roce_net::{UdpConfig, UdpDatapath};

/// Anonymous resident memory of this process, bytes.
fn anonymous() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
    kib << 10
}

/// A daemon's mappings come and go, each with threads and datapaths of its own. What they have freed is the system's again, and not kept
/// in the allocator's arena of each thread.
#[test]
fn closed_datapaths_of_many_threads_leave_no_memory() {
    let addr = ferroce_loopback::address().into();
    let round = || {
        // Threads that live at the same time, so that each has an arena.
        let opened = std::sync::Barrier::new(8);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let config = UdpConfig {
                        addr,
                        port: 0,
                        ..UdpConfig::default()
                    };
                    let datapath = UdpDatapath::open(&config).unwrap();
                    opened.wait();
                    drop(datapath);
                });
            }
        });
    };
    round();
    let before = anonymous();
    for _ in 0..4 {
        round();
    }
    let after = anonymous();
    assert!(after < before + (2 << 20), "{before} bytes before, {after} after");
}
