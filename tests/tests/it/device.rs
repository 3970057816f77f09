//! An image that is served by one process and used through another.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    thread,
};

use ferroce_tests::{
    device::{Pair, map, serve},
    fresh_address,
    nbd::{Command, EPERM, Error, FLAG_READ_ONLY, FLAG_SEND_FLUSH},
    pattern,
    process::run,
};

const MIB: usize = 1 << 20;

#[test]
fn what_is_read_is_the_image_and_what_is_written_gets_there() {
    let mut want = pattern(1, 24 * MIB);
    let pair = Pair::start(&want, "", &[], &[]);
    assert_eq!(pair.mapped["bytes"], want.len());
    assert_eq!(pair.mapped["read_only"], false);
    let mut client = pair.client();
    assert_eq!(client.size, want.len() as u64);
    assert_ne!(client.flags & FLAG_SEND_FLUSH, 0);
    // Pieces of all sizes: one sector, odd numbers of them, more than one RTRS chunk.
    for (offset, len) in [
        (0, 512),
        (512, 4096 + 512),
        (7 * 512, 513 * 512),
        (5 * MIB, 2 * MIB),
        (24 * MIB - 512, 512),
    ] {
        assert!(
            client.read(offset as u64, len).unwrap() == want[offset..offset + len],
            "{len} bytes at {offset}"
        );
    }
    for (seed, (offset, len)) in [(0, 512), (512 * 9, 512 * 7), (9 * MIB, 3 * MIB), (23 * MIB, MIB)]
        .iter()
        .enumerate()
    {
        let data = pattern(100 + seed as u64, *len);
        client.write(*offset as u64, &data).unwrap();
        want[*offset..offset + len].copy_from_slice(&data);
    }
    client.write_fua(4096, &pattern(7, 4096)).unwrap();
    want[4096..8192].copy_from_slice(&pattern(7, 4096));
    client.clear(Command::WriteZeroes, 12 * MIB as u64, MIB as u32).unwrap();
    want[12 * MIB..13 * MIB].fill(0);
    client.flush().unwrap();
    assert!(fs::read(&pair.image).unwrap() == want, "the image is what was written");
    for offset in (0..want.len()).step_by(2 * MIB) {
        assert!(
            client.read(offset as u64, 2 * MIB).unwrap() == want[offset..offset + 2 * MIB],
            "reads back at {offset}"
        );
    }
    client.disconnect().unwrap();
    let (map, serve) = (pair.map.stop(), pair.serve.stop());
    assert_eq!(
        (map.code, serve.code),
        (Some(0), Some(0)),
        "{}\n{}",
        map.stderr,
        serve.stderr
    );
    for done in [&map, &serve] {
        let events = done.json();
        let summary = events
            .iter()
            .find(|e| e["event"] == "summary")
            .expect("a summary at the end");
        assert!(summary["bytes_read"].as_u64().unwrap() >= 24 * MIB as u64, "{summary}");
        assert!(
            summary["bytes_written"].as_u64().unwrap() >= 4 * MIB as u64,
            "{summary}"
        );
        assert!(summary["packets_sent"].as_u64().unwrap() > 0, "{summary}");
        assert_eq!(summary["icrc_errors"], 0, "{summary}");
    }
    assert!(!pair.socket.exists(), "the NBD socket is removed");
}

#[test]
fn many_requests_in_flight_on_several_connections() {
    let want = pattern(2, 16 * MIB);
    let pair = Pair::start(&want, "", &["--queue-depth", "32"], &["--connections", "3"]);
    thread::scope(|scope| {
        for part in 0..4_usize {
            let (mut client, want) = (pair.client(), &want);
            scope.spawn(move || {
                let base = part * 4 * MIB;
                let len = 64 << 10;
                let cookies: Vec<u64> = (0..64)
                    .map(|n| {
                        let data: Vec<u8> = want[base + n * len..][..len].iter().map(|b| !b).collect();
                        client
                            .send(Command::Write, 0, (base + n * len) as u64, len as u32, &data)
                            .unwrap()
                    })
                    .collect();
                let mut answered: Vec<u64> = cookies
                    .iter()
                    .map(|_| {
                        let (cookie, error) = client.reply().unwrap();
                        assert_eq!(error, 0);
                        cookie
                    })
                    .collect();
                answered.sort_unstable();
                assert_eq!(answered, cookies, "every request is answered once");
                client.flush().unwrap();
                let inverted: Vec<u8> = want[base..base + 4 * MIB].iter().map(|b| !b).collect();
                assert!(client.read(base as u64, 4 * MIB).unwrap() == inverted, "part {part}");
            });
        }
    });
    let inverted: Vec<u8> = want.iter().map(|b| !b).collect();
    assert!(fs::read(&pair.image).unwrap() == inverted);
}

#[test]
fn the_same_without_batches_invalidation_and_large_chunks() {
    let want = pattern(3, 4 * MIB);
    let pair = Pair::start(
        &want,
        "",
        &[
            "--no-gso",
            "--no-gro",
            "--always-invalidate",
            "off",
            "--max-chunk-size",
            "65536",
        ],
        &["--no-gso", "--no-gro"],
    );
    let mut client = pair.client();
    assert!(client.read(0, want.len()).unwrap() == want);
    client.write(MIB as u64, &pattern(4, MIB)).unwrap();
    client.flush().unwrap();
    assert!(fs::read(&pair.image).unwrap()[MIB..2 * MIB] == pattern(4, MIB));
}

#[test]
fn small_socket_buffers_make_it_slow_and_nothing_else() {
    let want = pattern(8, 4 * MIB);
    let small = ["--socket-buffer", "16K"];
    let pair = Pair::start(&want, "", &small, &small);
    thread::scope(|scope| {
        for part in 0..4 {
            let (mut client, want) = (pair.client(), &want);
            scope.spawn(move || {
                let at = part * MIB;
                assert!(client.read(at as u64, MIB).unwrap() == want[at..at + MIB]);
                client.write(at as u64, &pattern(50 + part as u64, MIB)).unwrap();
                client.flush().unwrap();
            });
        }
    });
    let image = fs::read(&pair.image).unwrap();
    for part in 0..4 {
        assert!(
            image[part * MIB..][..MIB] == pattern(50 + part as u64, MIB),
            "part {part}"
        );
    }
}

#[test]
fn a_capture_of_it_has_nothing_but_good_frames() {
    let dir = tempfile::tempdir().unwrap();
    let (served, mapped) = (dir.path().join("serve.pcap"), dir.path().join("map.pcap"));
    let want = pattern(9, MIB);
    let pair = Pair::start(
        &want,
        "",
        &["--pcap", served.to_str().unwrap()],
        &["--pcap", mapped.to_str().unwrap()],
    );
    let mut client = pair.client();
    assert!(client.read(0, MIB).unwrap() == want);
    client.write(0, &pattern(10, MIB)).unwrap();
    client.flush().unwrap();
    assert_eq!(pair.map.stop().code, Some(0));
    assert_eq!(pair.serve.stop().code, Some(0));
    let done = run(&[
        "pcap".as_ref(),
        "check".as_ref(),
        "--json".as_ref(),
        served.as_os_str(),
        mapped.as_os_str(),
    ]);
    assert_eq!(done.code, Some(0), "{}", done.stdout);
    for report in done.json() {
        // Two MiB in packets of 4 KiB at most.
        assert!(report["roce_frames"].as_u64().unwrap() > 512, "{report}");
        assert_eq!(report["icrc_ok"], report["roce_frames"]);
    }
}

/// RTRS's client of Linux 6.1 takes a failed write for a done one if the answer comes first (`specs/kernel.md`).
#[test]
fn a_request_is_acknowledged_before_an_answer_that_says_it_failed() {
    let dir = tempfile::tempdir().unwrap();
    let served = dir.path().join("serve.pcap");
    for threads in ["1", "2"] {
        let more = ["--threads", threads, "--pcap", served.to_str().unwrap()];
        let pair = Pair::start(&pattern(9, MIB), "", &more, &[]);
        let mut client = pair.client();
        client.write(0, &pattern(1, 4096)).unwrap();
        // What lies beyond the end of the image, as it is by then, is refused.
        File::options()
            .write(true)
            .open(&pair.image)
            .unwrap()
            .set_len(4096)
            .unwrap();
        for n in 1..20 {
            assert!(client.write(n * 4096, &pattern(n, 4096)).is_err());
        }
        drop(client);
        assert_eq!(pair.map.stop().code, Some(0));
        assert_eq!(pair.serve.stop().code, Some(0));
        let shown = run(&[
            "pcap".as_ref(),
            "check".as_ref(),
            "--frames".as_ref(),
            served.as_os_str(),
        ]);
        let from_server = format!("{}:", pair.server);
        let (mut asked, mut acknowledged, mut failed) = (None, None, 0);
        for line in shown.stdout.lines() {
            let after = |name: &str| line.split_once(name)?.1.split_whitespace().next();
            let is_sent = line
                .split_once('>')
                .is_some_and(|(from, _)| from.contains(&from_server));
            // By its type an immediate value is a request, 0, or an answer, 1 or 2, with the error number behind it.
            match (is_sent, after("imm 0x")) {
                (false, Some(imm)) if imm.starts_with('0') => asked = after(" psn "),
                (true, Some(imm)) if imm.starts_with(['1', '2']) => {
                    let imm = u32::from_str_radix(imm.trim_end_matches(','), 16).unwrap();
                    if imm >> 19 & 0x1ff != 0 {
                        failed += 1;
                        assert_eq!(acknowledged, asked, "{threads} loops: {line}\n{}", shown.stdout);
                    }
                }
                (true, None) if line.contains("Acknowledge") => acknowledged = after(" psn "),
                _ => {}
            }
        }
        assert!(failed >= 19, "{}", shown.stdout);
    }
}

#[test]
fn doctor_gets_an_answer_of_the_server() {
    let pair = Pair::start(&[0; 4096], "", &[], &[]);
    let (us, peer) = (fresh_address().to_string(), pair.server.to_string());
    let done = run(&["doctor", "--json", "--addr", &us, "--peer", &peer]);
    let report = &done.json()[0];
    let check = report["checks"]
        .as_array()
        .unwrap()
        .iter()
        .find(|c| c["id"] == "peer")
        .unwrap();
    assert_eq!(check["status"], "ok", "{check}");
    assert!(check["summary"].as_str().unwrap().contains("RTRS server"), "{check}");
}

#[test]
fn statistics_come_while_it_runs() {
    let mut pair = Pair::start(
        &pattern(11, MIB),
        "",
        &["--stats-interval", "0.1"],
        &["--connections", "3"],
    );
    let opened = pair.serve.event("session_opened");
    assert_eq!(opened["session"], "test");
    // Three for I/O, one for the session's own messages.
    assert_eq!(opened["connections"], 4, "{opened}");
    let mut client = pair.client();
    client.read(0, MIB).unwrap();
    loop {
        let stats = pair.serve.event("stats");
        if stats["bytes_read"] == MIB {
            break;
        }
    }
    assert_eq!(pair.map.stop().code, Some(0));
    let gone = pair.serve.event("session_closed");
    assert_eq!(gone["session"], "test");
}

#[test]
fn a_read_only_export_refuses_writes() {
    let want = pattern(5, MIB);
    let pair = Pair::start(&want, ",ro", &[], &["--ro"]);
    assert_eq!(pair.mapped["read_only"], true);
    let mut client = pair.client();
    assert_ne!(client.flags & FLAG_READ_ONLY, 0);
    assert!(matches!(client.write(0, &[1; 512]), Err(Error::Refused(EPERM))));
    assert!(client.read(0, MIB).unwrap() == want);
    assert!(fs::read(&pair.image).unwrap() == want);
}

#[test]
fn a_device_of_a_folder_and_a_second_session() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("images");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("disk"), pattern(6, MIB)).unwrap();
    fs::write(dir.path().join("outside"), pattern(7, MIB)).unwrap();
    std::os::unix::fs::symlink("../outside", folder.join("link")).unwrap();
    let server = fresh_address();
    let (_serve, _) = serve(server, &[], &["--export-dir", folder.to_str().unwrap()]);
    let socket = dir.path().join("a.sock");
    let (first, _) = map(fresh_address(), &server.to_string(), &socket, &["--ro"]);
    let mut client = ferroce_tests::nbd::Client::connect(&socket).unwrap();
    assert!(client.read(0, MIB).unwrap() == pattern(6, MIB));
    // Another session beside it, and again after its end.
    for _ in 0..2 {
        let other = dir.path().join("b.sock");
        let (second, _) = map(
            fresh_address(),
            &server.to_string(),
            &other,
            &["--session", "other", "--ro"],
        );
        assert!(
            ferroce_tests::nbd::Client::connect(&other)
                .unwrap()
                .read(512, 512)
                .unwrap()
                == pattern(6, MIB)[512..1024]
        );
        assert_eq!(second.stop().code, Some(0));
    }
    assert_eq!(first.stop().code, Some(0));
    for escape in ["link", "../outside", "..", "no-such-device"] {
        let args = [
            "map",
            "--session",
            "x",
            "--ro",
            "--device",
            escape,
            "--nbd",
            socket.to_str().unwrap(),
            "--path",
        ];
        let mut args: Vec<String> = args.map(String::from).into();
        args.push(format!("{},{server}", fresh_address()));
        let done = ferroce_tests::process::run(&args);
        assert_eq!(done.code, Some(1), "{escape}: {}", done.stderr);
        assert!(done.stderr.contains(escape), "{escape} is not named: {}", done.stderr);
        assert!(!socket.exists(), "no socket for a device that is not there");
    }
}

#[test]
fn a_write_is_in_the_image_when_the_flush_is_answered() {
    let pair = Pair::start(&vec![0; MIB], "", &[], &[]);
    let file = fs::File::open(&pair.image).unwrap();
    let mut client = pair.client();
    for round in 0..32_u64 {
        let data = pattern(round, 4096);
        client.write(round * 4096, &data).unwrap();
        client.flush().unwrap();
        let mut there = vec![0; 4096];
        file.read_exact_at(&mut there, round * 4096).unwrap();
        assert!(there == data, "round {round}");
    }
}
