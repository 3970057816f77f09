//! What an operator sees of a server, and does to it.

use rtrs::{
    admission::PathKey,
    proto::Imm,
    server::{listing::PathListing, state::PathState},
    stats::RdmaStats,
};

use crate::{
    bed::{Bed, config},
    hand::{Client, name},
};

fn paths(bed: &Bed) -> Vec<PathListing> {
    let mut sessions = bed.server.listing();
    assert_eq!(sessions.len(), 1, "{sessions:?}");
    sessions.remove(0).paths
}

#[test]
fn sessions_are_listed_with_their_paths() {
    let mut bed = Bed::new(config());
    assert!(bed.server.listing().is_empty());
    let mut first = Client::new(1);
    first.ask(&mut bed, 0, first.request(0)).unwrap();
    assert!(bed.server.listing().is_empty(), "there may be nobody");
    let mut first = Client {
        connections: 3,
        ..Client::new(2)
    };
    first.connect(&mut bed, 0).unwrap();
    let path = &paths(&bed)[0];
    assert_eq!((path.state, path.connections, path.made), (PathState::Connecting, 3, 1));
    first.connect(&mut bed, 1).unwrap();
    first.connect(&mut bed, 2).unwrap();
    first.inform(&mut bed, &name("s1"));
    assert!(first.informed(&mut bed));
    let mut second = first.second_path(3);
    second.open(&mut bed, "s1");

    let listed = &bed.server.listing()[0];
    assert_eq!((listed.name.as_str(), listed.uuid), ("s1", first.session));
    let [one, two] = &listed.paths[..] else {
        panic!("{listed:?}")
    };
    for (path, client) in [(one, &first), (two, &second)] {
        assert_eq!(
            (path.uuid, path.client.ip(), path.server),
            (client.path, client.peer, client.local.ip())
        );
        assert_eq!(
            (path.state, path.made),
            (PathState::Connected, usize::from(client.connections))
        );
        assert_eq!((path.rdma, path.requests), (RdmaStats::default(), 0));
    }
    assert_ne!(one.path, two.path);
}

#[test]
fn each_path_counts_what_comes_by_it() {
    let mut bed = Bed::new(config());
    let mut first = Client::opened(&mut bed, 1, "s1");
    let mut second = first.second_path(2);
    second.open(&mut bed, "s1");
    bed.outputs.clear();
    first.send_write(&mut bed, 1, &[7; 100], b"header");
    first.send_read(&mut bed, 2, 512, b"header", true);
    second.send_read(&mut bed, 3, 64, b"h", true);
    let (requests, session) = (bed.requests(), bed.session());
    let counted = paths(&bed);
    assert_eq!([counted[0].requests, counted[1].requests], [2, 1]);
    let expected = RdmaStats {
        reads: 1,
        read_bytes: 518,
        writes: 1,
        write_bytes: 106,
    };
    assert_eq!(counted[0].rdma, expected);
    let expected = RdmaStats {
        reads: 1,
        read_bytes: 65,
        ..RdmaStats::default()
    };
    assert_eq!(counted[1].rdma, expected);
    // Neither the answer nor a heartbeat counts.
    requests.iter().for_each(|request| bed.answer(request.key, 0));
    first.imm(&mut bed, 0, Imm::HbMsg.encode());
    assert_eq!(paths(&bed)[1].rdma, expected);
    assert!(bed.server.reset_stats(session, counted[0].path));
    assert_eq!(paths(&bed)[0].rdma, RdmaStats::default());
    assert_eq!(paths(&bed)[1].rdma, expected, "only that one's");
    first.answers(&mut bed, 1);
    first.send_write(&mut bed, 1, b"", b"h");
    let request = bed.request();
    bed.answer(request.key, 5);
    assert_eq!((paths(&bed)[0].rdma.writes, paths(&bed)[0].rdma.write_bytes), (1, 1));
}

#[test]
fn a_path_is_disconnected_and_its_client_may_come_again() {
    let mut bed = Bed::new(config());
    let first = Client::opened(&mut bed, 1, "s1");
    let mut second = first.second_path(2);
    second.open(&mut bed, "s1");
    bed.outputs.clear();
    let session = bed.session();
    let keys: Vec<PathKey> = paths(&bed).iter().map(|p| p.path).collect();
    first.send_write(&mut bed, 4, b"data", b"header");
    let request = bed.request();
    assert!(bed.call(|server, cx| server.close_path(cx, session, keys[0])));
    // It ends when its requests are answered, and the session goes on.
    assert_eq!(paths(&bed)[0].state, PathState::Closing);
    assert!(bed.news().is_empty());
    bed.answer(request.key, 0);
    assert_eq!(bed.news(), ["path down: closed"]);
    assert_eq!(paths(&bed).len(), 1);
    assert!(
        !bed.call(|server, cx| server.close_path(cx, session, keys[0])),
        "it is gone"
    );
    assert!(!bed.server.reset_stats(session, keys[0]));
    let mut again = first.once_more();
    again.open(&mut bed, "s1");
    assert_eq!(bed.news(), ["path up"]);
    assert!(bed.call(|server, cx| server.close_path(cx, session, keys[1])));
    let key = paths(&bed)[0].path;
    assert!(bed.call(|server, cx| server.close_path(cx, session, key)));
    assert_eq!(bed.news(), ["path down: closed", "path down: closed", "closed: closed"]);
    bed.is_clean();
}
