//! A path that asks for the chunks while another, of which the server does not know that it is lost, has a request at work.

use core::time::Duration;

use rtrs::{PACKET_LIFETIME, proto::Imm, server::request::Request};

use crate::{
    bed::{Bed, config},
    hand::{Client, name},
};

const SOON: Duration = Duration::from_millis(1);

/// A path with a request at work, and one that asks.
fn asks() -> (Bed, Client, Request, Client) {
    let mut bed = Bed::new(config());
    let first = Client::opened(&mut bed, 1, "s1");
    first.send_write(&mut bed, 4, b"data", b"first");
    let request = bed.request();
    let mut next = first.second_path(2);
    next.connect_all(&mut bed);
    next.inform(&mut bed, &name("s1"));
    (bed, first, request, next)
}

fn questions(bed: &mut Bed, client: &Client) -> usize {
    client.messages(bed, 0).len()
}

#[test]
fn it_waits_until_the_request_is_over() {
    let (mut bed, first, request, mut next) = asks();
    assert!(!next.informed(&mut bed));
    bed.wait(PACKET_LIFETIME + SOON);
    assert_eq!(questions(&mut bed, &first), 1);
    assert!(
        !next.informed(&mut bed),
        "nobody has said that the client knows of the request"
    );
    // What comes by the first meanwhile is not waited for.
    first.send_write(&mut bed, 5, b"data", b"later");
    assert_eq!(&bed.request().header[..], b"later");
    bed.answer(request.key, 0);
    assert!(next.informed(&mut bed));
}

#[test]
fn it_does_not_wait_for_what_its_client_has_not_given_up() {
    let (mut bed, first, _, mut next) = asks();
    first.imm(&mut bed, 0, Imm::HbAck.encode());
    assert!(
        !next.informed(&mut bed),
        "this may have been sent before the path asked"
    );
    bed.wait(PACKET_LIFETIME + SOON);
    assert!(!next.informed(&mut bed));
    assert_eq!(questions(&mut bed, &first), 1);
    first.imm(&mut bed, 0, Imm::HbAck.encode());
    assert!(next.informed(&mut bed));
}

#[test]
fn it_waits_for_a_request_whose_path_is_lost_meanwhile() {
    let (mut bed, first, request, mut next) = asks();
    first.leave(&mut bed);
    bed.wait(PACKET_LIFETIME + SOON);
    assert!(!next.informed(&mut bed));
    bed.answer(request.key, 0);
    assert!(next.informed(&mut bed));
}

#[test]
fn without_requests_it_does_not_wait() {
    let mut bed = Bed::new(config());
    let first = Client::opened(&mut bed, 1, "s1");
    first.send_write(&mut bed, 4, b"data", b"first");
    let request = bed.request();
    bed.answer(request.key, 0);
    let mut next = first.second_path(2);
    next.open(&mut bed, "s1");
    bed.wait(PACKET_LIFETIME + SOON);
    assert_eq!(questions(&mut bed, &first), 0);
}
