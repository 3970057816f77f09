//! A broker that follows another, before all members have told it what they had.

use roce_broker::proto::{Reply, Request, ToBroker};

use super::*;
use crate::raw::Raw;

#[test]
fn a_request_for_a_connection_waits_until_all_have_said_what_they_had() {
    const ADDR: &str = "127.45.0.13";
    let place = Place::new();
    let mut client = open(&place, ADDR);
    let mut member = Raw::at(&place.broker_dir());
    let mut given = member.hello(None);
    // Members are waited for 5 s, which a busy machine may take until the request comes.
    for round in 0.. {
        let old = place.statistics().pid;
        kill(old);
        place.until("the client at another broker", |s| {
            s.pid != old && s.processes.len() == 1
        });
        member = Raw::at(&place.broker_dir());
        given = member.hello(Some(given));
        client.say(&format!("connect {ADDR} 7000"));
        let seen = place.until("an answer", |s| {
            ["drop_settling", "answered_mads"]
                .iter()
                .any(|name| s.counters.contains_key(*name))
        });
        let waits = seen.counters.contains_key("drop_settling");
        if waits {
            assert!(
                client.lines.try_recv().is_err(),
                "it was refused before everybody was heard"
            );
        }
        let request = Request::Restored;
        member.say(&ToBroker::Request { seq: 2, request });
        assert!(matches!(member.reply(), Reply::Done));
        assert!(client.expect("event").starts_with("Rejected"));
        if waits {
            return;
        }
        assert!(round < 10, "it never waited");
    }
}
