//! RDMA between sockets of nodes on loopback addresses.

use std::{io::ErrorKind, net::SocketAddr, time::Duration};

use rds_host::{Buffer, Rdma, RdmaCookie, RegionRights, Socket};

use crate::{errno, node};

const WRITABLE: RegionRights = RegionRights {
    writable: true,
    use_once: false,
};

fn bytes(buffer: &Buffer, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    buffer.read(offset, &mut bytes).unwrap();
    bytes
}

/// Offers memory to a socket, which returns the cookie that it got.
fn offer(from: (&Socket, &Buffer), to: (&Socket, SocketAddr), rights: RegionRights) -> (rds_host::Region, RdmaCookie) {
    let region = from.0.register(from.1, rights).unwrap();
    from.0.send_cookie_to(b"offer", region.cookie(), to.1).unwrap();
    let cookie = to.0.recv().unwrap().cookie.unwrap();
    assert_eq!(cookie, region.cookie());
    (region, cookie)
}

#[test]
fn memory_is_written_and_read_before_the_message_comes() {
    let (_a, near, at_near) = node(4000);
    let (_b, far, at_far) = node(4001);
    let (theirs, mine) = (Buffer::new(1 << 20).unwrap(), Buffer::new(2 << 20).unwrap());
    let (_offered, cookie) = offer((&far, &theirs), (&near, at_near), WRITABLE);
    let data: Vec<u8> = (0..1 << 20).map(|i: u32| (i * 7 + i / 256) as u8).collect();
    mine.write(0, &data).unwrap();
    let write = Rdma::write(&mine, 0..1 << 20, cookie);
    near.operate(&write, Some(b"written"), at_far).unwrap().wait().unwrap();
    assert_eq!(far.recv().unwrap().data, b"written");
    assert!(bytes(&theirs, 0, 1 << 20) == data);
    // Without a message, at an offset.
    let read = Rdma::read(&mine, 1 << 20..(1 << 20) + 5000, cookie).at(77);
    near.operate(&read, None, at_far).unwrap().wait().unwrap();
    assert!(bytes(&mine, 1 << 20, 5000) == data[77..5077]);
    assert_eq!(errno(far.try_recv()), Some(11));
    // The other way, at the same time.
    let small = Buffer::new(100).unwrap();
    let (_region, back) = offer((&near, &small), (&far, at_far), WRITABLE);
    theirs.write(0, &[9; 100]).unwrap();
    let there = near.operate(&read, None, at_far).unwrap();
    let back = Rdma::write(&theirs, 0..100, back);
    far.operate(&back, None, at_near).unwrap().wait().unwrap();
    there.wait().unwrap();
    assert_eq!(bytes(&small, 0, 100), [9; 100]);
}

#[test]
fn words_are_counted_and_swapped() {
    let (_a, near, at_near) = node(4000);
    let (_b, far, at_far) = node(4001);
    let (word, found) = (Buffer::new(16).unwrap(), Buffer::new(16).unwrap());
    let (_region, cookie) = offer((&far, &word), (&near, at_near), WRITABLE);
    let additions: Vec<_> = (0..20)
        .map(|_| {
            let add = Rdma::fetch_add(3, &found, 0, cookie).at(8);
            near.operate(&add, None, at_far).unwrap()
        })
        .collect();
    additions.into_iter().for_each(|addition| addition.wait().unwrap());
    assert_eq!(bytes(&word, 8, 8), 60u64.to_ne_bytes());
    for (compare, now) in [(1, 60), (60, 5)] {
        let swap = Rdma::compare_swap(compare, 5, &found, 8, cookie).at(8);
        near.operate(&swap, Some(b"x"), at_far).unwrap().wait().unwrap();
        assert_eq!(bytes(&found, 8, 8), 60u64.to_ne_bytes());
        assert_eq!(bytes(&word, 8, 8), u64::to_ne_bytes(now));
        far.recv().unwrap();
    }
    let unaligned = Rdma::fetch_add(1, &found, 0, cookie).at(1);
    let refused = near.operate(&unaligned, None, at_far).unwrap().wait().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
}

/// An operation that the peer refuses ends the connection, whose other messages come again, and no other connection.
#[test]
fn a_bad_cookie_ends_one_connection_only() {
    let (_a, near, at_near) = node(4000);
    let (_b, far, at_far) = node(4001);
    let (third_node, third, at_third) = node(4002);
    let (theirs, mine) = (Buffer::new(4096).unwrap(), Buffer::new(8192).unwrap());
    let (region, cookie) = offer((&far, &theirs), (&near, at_near), RegionRights::default());
    third.send_to(b"before", at_far).unwrap();
    assert_eq!(far.recv().unwrap().data, b"before");
    for bad in [
        Rdma::read(&mine, 0..8, RdmaCookie::new(!cookie.rkey(), 0)),
        Rdma::read(&mine, 0..8, cookie).at(4090),
        Rdma::read(&mine, 0..8, cookie).at(u64::MAX),
        // It is not writable.
        Rdma::write(&mine, 0..8, cookie),
    ] {
        let refused = near.operate(&bad, Some(b"never"), at_far).unwrap();
        near.send_to(b"behind it", at_far).unwrap();
        assert_eq!(
            refused.wait().unwrap_err().kind(),
            ErrorKind::PermissionDenied,
            "{bad:?}"
        );
        assert_eq!(far.recv().unwrap().data, b"behind it");
    }
    let good = Rdma::read(&mine, 0..8, cookie);
    near.operate(&good, None, at_far).unwrap().wait().unwrap();
    drop(region);
    far.send_to(b"freed", at_near).unwrap();
    near.recv().unwrap();
    let late = near.operate(&good, None, at_far).unwrap().wait().unwrap_err();
    assert_eq!(late.kind(), ErrorKind::PermissionDenied);
    third.flush(Duration::from_secs(5)).unwrap();
    let connections = third_node.connections().unwrap();
    assert!(connections.iter().all(|c| c.is_up), "{connections:?}");
    assert_eq!(errno(near.try_send_to(b"x", at_third)), None);
}

#[test]
fn memory_for_use_once_is_freed_by_the_message() {
    let (_a, near, at_near) = node(4000);
    let (_b, far, at_far) = node(4001);
    let (theirs, mine) = (Buffer::new(64).unwrap(), Buffer::new(64).unwrap());
    let once = RegionRights {
        writable: true,
        use_once: true,
    };
    let (_region, cookie) = offer((&far, &theirs), (&near, at_near), once);
    // Without a message it stays.
    let write = Rdma::write(&mine, 0..64, cookie);
    near.operate(&write, None, at_far).unwrap().wait().unwrap();
    near.operate(&write, Some(b"x"), at_far).unwrap().wait().unwrap();
    far.recv().unwrap();
    let again = near.operate(&write, None, at_far).unwrap().wait().unwrap_err();
    assert_eq!(again.kind(), ErrorKind::PermissionDenied);
}

#[test]
fn a_node_operates_on_its_own_memory() {
    let (node, near, at_near) = node(4000);
    let far = node.socket().unwrap();
    let at_far = far.bind((node.addr(), 4001).into()).unwrap();
    let (theirs, mine) = (Buffer::new(100_000).unwrap(), Buffer::new(200_000).unwrap());
    let (_region, cookie) = offer((&far, &theirs), (&near, at_near), WRITABLE);
    mine.write(0, &[3; 100_000]).unwrap();
    let write = Rdma::write(&mine, 0..99_999, cookie).at(1);
    near.operate(&write, Some(b"written"), at_far).unwrap().wait().unwrap();
    assert_eq!(far.recv().unwrap().data, b"written");
    assert_eq!(bytes(&theirs, 0, 3), [0, 3, 3]);
    let read = Rdma::read(&mine, 100_000..200_000, cookie);
    near.operate(&read, None, at_far).unwrap().wait().unwrap();
    assert!(bytes(&mine, 100_000, 100_000) == bytes(&theirs, 0, 100_000));
    let outside = near
        .operate(&write.at(2), Some(b"x"), at_far)
        .unwrap()
        .wait()
        .unwrap_err();
    assert_eq!(outside.kind(), ErrorKind::PermissionDenied);
    let atomic = Rdma::fetch_add(1, &mine, 0, cookie);
    assert_eq!(errno(near.operate(&atomic, None, at_far)), Some(95));
    assert_eq!(errno(far.try_recv()), Some(11), "no message of what was refused");
}

#[test]
fn what_can_not_be_is_refused_at_once() {
    let (node, near, at_near) = node(4000);
    let buffer = Buffer::new(2 << 20).unwrap();
    let cookie = RdmaCookie::new(1, 0);
    for (range, error) in [(0..0, 22), (0..(2 << 20) + 1, 14), (0..(1 << 20) + 1, 90)] {
        let read = Rdma::read(&buffer, range, cookie);
        assert_eq!(errno(near.try_operate(&read, None, at_near)), Some(error));
    }
    assert_eq!(errno(near.register(&buffer, WRITABLE)), Some(90));
    assert_eq!(errno(near.register(&Buffer::new(0).unwrap(), WRITABLE)), Some(22));
    assert_eq!(errno(node.socket().unwrap().register(&buffer, WRITABLE)), Some(107));
}

#[test]
fn operations_to_nobody_are_canceled() {
    let (_a, near, at_near) = node(4000);
    let buffer = Buffer::new(8).unwrap();
    // Another loopback address, where no node is.
    let nobody: SocketAddr = (ferroce_loopback::address(), 4000).into();
    let read = Rdma::read(&buffer, 0..8, RdmaCookie::new(1, 0));
    let mut pending = near.operate(&read, Some(b"x"), nobody).unwrap();
    assert!(pending.try_wait().unwrap().is_none());
    near.cancel_sent_to(nobody).unwrap();
    assert_eq!(pending.wait().unwrap_err().to_string(), "canceled");
    assert_eq!(at_near.port(), 4000);
}

#[tokio::test]
async fn tasks_operate() {
    let (_a, near, at_near) = node(4000);
    let (_b, far, at_far) = node(4001);
    let (theirs, mine) = (Buffer::new(4096).unwrap(), Buffer::new(8192).unwrap());
    let region = far.register(&theirs, WRITABLE).unwrap();
    far.send_cookie_to_async(b"offer", region.cookie(), at_near)
        .await
        .unwrap();
    let cookie = near.recv_async().await.unwrap().cookie.unwrap();
    mine.write(0, &[5; 4096]).unwrap();
    let write = Rdma::write(&mine, 0..4096, cookie);
    let written = near.operate_async(&write, Some(b"written"), at_far).await.unwrap();
    written.await.unwrap();
    far.recv_async().await.unwrap();
    assert_eq!(bytes(&theirs, 0, 4096), [5; 4096]);
    let bad = Rdma::read(&mine, 0..8, RdmaCookie::new(!cookie.rkey(), 0));
    let refused = near.operate_async(&bad, None, at_far).await.unwrap().await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::PermissionDenied);
}
