//! Connections that are slow, silent or strange.

use super::*;

#[test]
fn a_connection_begins_with_hello_and_has_bounds() {
    let lab = Lab::new();
    let mut line = lab.connect("map").hello();
    for (request, errno) in [
        (json!({ "id": 1 }), EINVAL),
        (json!({ "id": 2, "do": "dance" }), EINVAL),
        (json!({ "id": 3, "do": "add_path" }), EINVAL),
        (json!({ "id": 4, "do": "add_path", "path": 7 }), EINVAL),
        (
            json!({ "id": 5, "do": "resize", "device": "disk", "sectors": -1 }),
            EINVAL,
        ),
        (
            json!({ "id": 6, "do": "map", "device": "x", "session": "y", "paths": ["127.0.0.1"] }),
            EOPNOTSUPP,
        ),
        (
            json!({ "id": 7, "do": "write", "file": "block/rnbd0/size", "text": "1" }),
            EACCES,
        ),
    ] {
        let answer = line.ask(request.clone());
        assert_eq!(
            (&answer["id"], &answer["errno"]),
            (&request["id"], &json!(errno)),
            "{request}: {answer}"
        );
    }
    // Several at once, in one write; empty lines are nothing.
    let two: String = (10..12)
        .map(|id| format!("\n{}\n", json!({ "id": id, "do": "list" })))
        .collect();
    line.send(two.as_bytes());
    let mut ids: Vec<_> = [line.next(), line.next()].iter().map(|a| a["id"].as_u64()).collect();
    ids.sort_unstable();
    assert_eq!(ids, [Some(10), Some(11)]);

    // What makes no sense ends the connection, with a word.
    let long = format!("{{\"do\": \"{}\"}}\n", "x".repeat(100_000));
    for (bytes, errno) in [
        (&b"{\"do\": \"list\"}\n"[..], EINVAL),
        (b"{\"do\": \"hello\", \"version\": 2}\n", EINVAL),
        (b"{\"do\": \"hello\"}\n", EINVAL),
        (b"GET / HTTP/1.1\n", EINVAL),
        (b"[]\n", EINVAL),
        (b"\xff\xfe\n", EINVAL),
        (long.as_bytes(), EMSGSIZE),
    ] {
        let mut line = lab.connect("map");
        line.send(bytes);
        let answer = line.next();
        assert_eq!(answer["errno"], errno, "{}: {answer}", String::from_utf8_lossy(bytes));
        assert_eq!(line.next(), Value::Null);
    }
    // Half a line.
    let mut line = lab.connect("map").hello();
    line.send(b"{\"do\": \"li");
    line.stream.get_ref().shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(line.next()["errno"], EINVAL);
    lab.end();
}

#[test]
fn who_says_nothing_and_who_reads_nothing_holds_up_nobody() {
    let lab = Lab::new();
    // Somebody who asks for much and takes nothing.
    let mut deaf = lab.connect("map").hello();
    deaf.stream.get_ref().set_nonblocking(true).unwrap();
    let request = format!("{}{}\n", json!({ "do": "metrics" }), " ".repeat(1000));
    let taken = (0..100_000).position(|_| deaf.stream.get_mut().write_all(request.as_bytes()).is_err());
    assert!(taken.is_some(), "all was read");
    // Many that never say hello.
    let silent: Vec<Line> = (0..100).map(|_| lab.connect("map")).collect();
    assert_eq!(lab.try_ctl("map", &["list"]).code, Some(0));
    drop(silent);
    // As many as may come, and one more. Those before may still be there for a moment.
    let mut open = Vec::new();
    eventually("31 connections", || {
        let mut line = lab.connect("map");
        let hello = line.ask(json!({ "do": "hello", "version": 1 }));
        open.extend((hello["ok"] == true).then_some(line));
        open.len() == 31
    });
    let mut line = lab.connect("map");
    let answer = line.next();
    assert_eq!(answer["errno"], EBUSY, "{answer}");
    lab.refused("map", &["list"], 1, "32 connections are open already");
    drop(open);
    eventually("there is room again", || lab.try_ctl("map", &["list"]).code == Some(0));
    let mut client = lab.nbd();
    client.write(0, &pattern(1, BLOCK)).unwrap();
    client.disconnect().unwrap();
    lab.end();
    drop(deaf);
}

#[test]
fn hello_has_a_deadline_whatever_is_said_instead() {
    let lab = Lab::new();
    let mut line = lab.connect("map");
    let begin = Instant::now();
    // A byte now and then, as of a long line.
    while line.stream.get_mut().write_all(b" ").is_ok() {
        thread::sleep(Duration::from_millis(200));
        assert!(begin.elapsed() < Duration::from_secs(40), "it is still connected");
    }
    assert_eq!(line.next()["errno"], ETIMEDOUT);
    assert_eq!(line.next(), Value::Null);
    lab.end();
}
