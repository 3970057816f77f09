//! A disk with a thread of its own: blocking calls, and futures.

use std::{
    fs,
    io::ErrorKind,
    thread,
    time::{Duration, Instant},
};

use crate::common::{SIZE, Server, TIMEOUT, pattern};
use rnbd_client::{AsyncDisk, Disk, Errno, OpenError};

#[test]
fn what_is_written_is_read_and_lands_in_the_image() {
    let server = Server::new();
    let disk = Disk::open(server.path(), "s", "disk").unwrap();
    assert_eq!((disk.size(), disk.geometry().logical_block_size), (SIZE, 512));
    let mut all = vec![0; SIZE as usize];
    // Many times what one request moves, and what all buffers hold.
    disk.read_at(&mut all, 0).unwrap();
    assert!(all == pattern(SIZE as usize));
    let data = pattern((3 << 20) + 512);
    disk.write_at(&data, 512).unwrap();
    disk.flush().unwrap();
    assert!(fs::read(server.image()).unwrap()[512..512 + data.len()] == data);
    disk.write_durable_at(&[9; 1024], 4096).unwrap();
    let mut back = [0; 1536];
    disk.read_at(&mut back, 3584).unwrap();
    assert_eq!(back[512..], [9; 1024]);
    disk.write_zeroes(4096, 1024).unwrap();
    disk.read_at(&mut back, 4096).unwrap();
    assert_eq!(back[..1024], [0; 1024]);
    disk.discard(1 << 20, 1 << 20).unwrap();
    disk.read_at(&mut [], 0).unwrap();
    disk.close().unwrap();
    server.has_sessions(0);
    assert_eq!(fs::read(server.image()).unwrap()[4096..5120], [0; 1024]);
}

#[test]
fn refusals_say_why() {
    let server = Server::new();
    let unknown = server.options("s", "no-such").open().unwrap_err();
    assert!(
        matches!(&unknown, OpenError::Map(e) if e.errno() == Errno::ENOENT),
        "{unknown}"
    );
    let disk = server.options("s", "ro").read_only().open().unwrap();
    let text = |e: std::io::Error| (e.kind(), e.to_string());
    let (kind, why) = text(disk.write_at(&[0; 512], 0).unwrap_err());
    assert!(
        kind == ErrorKind::ReadOnlyFilesystem && why.contains("read-only"),
        "{why}"
    );
    let (kind, why) = text(disk.read_at(&mut [0; 100], 7).unwrap_err());
    assert!(
        kind == ErrorKind::InvalidInput && why.contains("block size of 512"),
        "{why}"
    );
    let (kind, why) = text(disk.read_at(&mut [0; 1024], SIZE - 512).unwrap_err());
    assert!(
        kind == ErrorKind::InvalidInput && why.contains("beyond the end"),
        "{why}"
    );
    // The name of a session is one client's.
    let again = server.options("s", "disk").open().unwrap_err();
    assert!(matches!(again, OpenError::Session { .. }), "{again}");
    assert!(
        again.to_string().ends_with("another client's session has this name"),
        "{again}"
    );
    // Nobody serves there.
    let nobody = format!("{},{}", ferroce_loopback::address(), ferroce_loopback::address());
    let options = rnbd_client::DiskOptions::new(nobody.parse().unwrap(), "s", "disk");
    let why = options.connect_timeout(Duration::from_secs(1)).open().unwrap_err();
    let server = nobody.split_once(',').unwrap().1;
    assert!(
        why.to_string().starts_with(&format!("no session with {server}:1234: ")),
        "{why}"
    );
    // No address of this host.
    let elsewhere = "192.0.2.77,192.0.2.78".parse().unwrap();
    let why = Disk::open(elsewhere, "s", "disk").unwrap_err().to_string();
    assert!(why.contains("192.0.2.77 is not an address of this host"), "{why}");
}

#[test]
fn threads_share_a_disk_and_its_end_waits_for_none_of_them() {
    let server = Server::new();
    let disk = server.options("s", "disk").open().unwrap();
    thread::scope(|scope| {
        for n in 0..8u8 {
            let disk = disk.clone();
            scope.spawn(move || {
                let at = u64::from(n) << 18;
                for round in 0..20 {
                    let data = vec![n ^ round; 64 << 10];
                    disk.write_at(&data, at).unwrap();
                    let mut back = vec![0; data.len()];
                    disk.read_at(&mut back, at).unwrap();
                    assert!(back == data);
                }
            });
        }
    });
    let other = disk.clone();
    disk.close().unwrap();
    let why = other.read_at(&mut [0; 512], 0).unwrap_err();
    assert!(why.to_string().contains("closed"), "{why}");
    assert!(matches!(other.close(), Err(OpenError::Closed)));
    // The last handle closes as well.
    drop(server.options("s", "disk").open().unwrap());
    server.has_sessions(0);
}

#[test]
fn a_server_that_ends_ends_operations_and_says_so() {
    let mut server = Server::new();
    let options = server.options("s", "disk").heartbeat(Duration::from_millis(100));
    let disk = options.max_reconnects(0).open().unwrap();
    server.end();
    let until = Instant::now() + TIMEOUT;
    let why = loop {
        match disk.write_at(&[1; 512], 0) {
            Err(why) => break why,
            Ok(()) => assert!(Instant::now() < until),
        }
    };
    assert_eq!(why.kind(), ErrorKind::ConnectionAborted, "{why}");
    // For good, with the reason.
    while !disk
        .read_at(&mut [0; 512], 0)
        .unwrap_err()
        .to_string()
        .contains("session was lost")
    {
        assert!(Instant::now() < until);
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(disk.close().unwrap_err().errno(), Errno::ECONNABORTED);
}

#[test]
fn tasks_wait_for_many_operations_at_a_time() {
    let server = Server::new();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .build()
        .unwrap();
    runtime.block_on(async {
        let disk: AsyncDisk = server.options("s", "disk").open_async().await.unwrap();
        let writes: Vec<_> = (0..64u8)
            .map(|n| tokio::spawn(disk.write_at(vec![n; 4096], u64::from(n) * 4096)))
            .collect();
        for (n, write) in writes.into_iter().enumerate() {
            assert_eq!(
                write.await.unwrap().unwrap(),
                vec![n as u8; 4096],
                "the buffer comes back"
            );
        }
        // One that nobody waits for is done nevertheless.
        drop(disk.write_at(vec![99; 4096], 0));
        disk.flush().await.unwrap();
        let data = disk.read_at(64 * 4096, 0).await.unwrap();
        assert!(data.chunks(4096).enumerate().all(|(n, block)| {
            let want = if n == 0 { 99 } else { n as u8 };
            block.iter().all(|byte| *byte == want)
        }));
        disk.discard(0, 4096).await.unwrap();
        disk.write_durable_at(vec![1; 512], 0).await.unwrap();
        disk.write_zeroes(0, 512).await.unwrap();
        assert_eq!(disk.read_at(3, 0).await.unwrap_err().kind(), ErrorKind::InvalidInput);
        disk.close().await.unwrap();
        let refused = server.options("s", "no-such").open_async().await.unwrap_err();
        assert!(matches!(refused, OpenError::Map(_)), "{refused}");
    });
    server.has_sessions(0);
}
