//! Packets with descriptors.

use std::{
    io::IoSlice,
    os::fd::{AsFd, OwnedFd},
};

use rds_local::{Answer, Page, receive, send};
use rustix::{
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, socketpair},
};

fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

#[test]
fn an_answer_brings_a_socket_and_its_page() {
    let (program, node) = pair();
    let (page, file) = Page::create().unwrap();
    let (end, _other) = pair();
    let answer = Answer {
        value: 7,
        ..Answer::default()
    };
    send(
        &node,
        &[IoSlice::new(&answer.to_bytes())],
        &[end.as_fd(), file.as_fd()],
        SendFlags::empty(),
    )
    .unwrap();
    let mut buffer = [0; 64];
    let record = receive(&program, &mut buffer, RecvFlags::empty()).unwrap().unwrap();
    assert_eq!(Answer::parse(&buffer[..record.len]), Ok(answer));
    assert!(!record.is_cut && record.fds.len() == 2);
    page.add_received(3);
    assert_eq!(Page::map(&record.fds[1]).unwrap().received(), 3);
}

#[test]
fn a_packet_longer_than_the_buffer_is_told_and_so_is_the_end() {
    let (a, b) = pair();
    send(&a, &[IoSlice::new(&[1; 9])], &[], SendFlags::empty()).unwrap();
    let record = receive(&b, &mut [0; 8], RecvFlags::empty()).unwrap().unwrap();
    assert!(record.is_cut && record.len == 8);
    assert_eq!(receive(&b, &mut [0; 8], RecvFlags::DONTWAIT).unwrap_err(), Errno::AGAIN);
    drop(a);
    assert!(receive(&b, &mut [0; 8], RecvFlags::DONTWAIT).unwrap().is_none());
    // Not a signal that kills.
    assert_eq!(
        send(&b, &[IoSlice::new(b"x")], &[], SendFlags::empty()),
        Err(Errno::PIPE)
    );
}

#[test]
fn what_was_not_read_is_counted() {
    let (a, b) = pair();
    assert_eq!(rds_local::unread(&a), Ok(0));
    send(&a, &[IoSlice::new(&[1; 1000])], &[], SendFlags::empty()).unwrap();
    assert!(rds_local::unread(&a).unwrap() >= 1000);
    receive(&b, &mut [0; 8], RecvFlags::empty()).unwrap();
    assert_eq!(rds_local::unread(&a), Ok(0));
}

#[test]
fn a_memory_file_has_its_bytes_and_keeps_them() {
    let bytes: Vec<u8> = (0..100_000).map(|n| n as u8).collect();
    let file = rds_local::memory_file(&bytes).unwrap();
    assert_eq!(rds_local::read_memory_file(&file, bytes.len()).unwrap(), bytes);
    assert_eq!(rds_local::read_memory_file(&file, bytes.len() + 9).unwrap(), bytes);
    assert!(rustix::io::pwrite(&file, b"x", 0).is_err());
}

#[test]
fn a_node_is_found_at_its_file_or_there_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(rds_local::SOCKET);
    assert!(rds_local::connect(&path).unwrap().is_none());
    let listener =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    assert!(rds_local::connect(&path).unwrap().is_none(), "nobody listens");
    rustix::net::listen(&listener, 1).unwrap();
    assert!(rds_local::connect(&path).unwrap().is_some());
}
