//! Host names in place of addresses: in a network namespace, where `localhost` is free and nothing else can be resolved.

use ferroce_tests::{device::image, nbd::Client, network::Namespace, pattern};

#[test]
#[ignore = "needs the right to make a network namespace"]
fn hosts_have_names() {
    let namespace = Namespace::new(&[]);
    let dir = tempfile::tempdir().unwrap();
    let want = pattern(1, 1 << 20);
    let export = format!("disk={}", image(dir.path(), "disk.img", &want).display());
    let serve = ["serve", "--json", "--addr", "localhost", "--export", &export];
    let mut serve = namespace.run(&serve);
    let listening = serve.event("listening");
    // Where the host's files have it, [::1] is another one.
    let listens = listening["addresses"].as_array().unwrap();
    assert!(
        listens.iter().any(|at| at["address"] == "127.0.0.1:1234"),
        "{listening}"
    );

    let socket = dir.path().join("nbd.sock");
    let nbd = socket.to_str().unwrap();
    let map = ["map", "--json", "--session", "s", "--device", "disk", "--nbd", nbd];
    // The destination has the IP version of the source, wherever that is from.
    for (path, paths) in [
        (
            &["--path", "localhost", "--addr", "127.0.0.1"][..],
            "ip:127.0.0.1@ip:127.0.0.1",
        ),
        (&["--path", "127.0.0.1,localhost:1234"], "ip:127.0.0.1@ip:127.0.0.1"),
        (&["--path", "localhost,127.0.0.1"], "ip:127.0.0.1@ip:127.0.0.1"),
    ] {
        let mut map = namespace.run(&[&map[..], path].concat());
        let mapped = map.event("mapped");
        assert_eq!(mapped["paths"][0], paths, "{path:?}");
        let mut client = Client::connect(&socket).unwrap();
        assert!(client.read(0, want.len()).unwrap() == want);
        drop(client);
        assert_eq!(map.stop().code, Some(0));
    }
    assert_eq!(serve.stop().code, Some(0));

    let unknown = "no-such-host.invalid";
    for args in [
        &[&map[..], &["--path", unknown]].concat()[..],
        &["serve", "--addr", unknown, "--export", &export],
        &["bench", "write", "--connect", unknown],
        &["run", "--addr", unknown, "--", "true"],
        &["doctor", "--peer", unknown],
    ] {
        let mut running = namespace.run(args);
        running.wait();
        let done = running.end();
        assert_eq!(done.code, Some(1), "{args:?}: {}", done.stderr);
        let error = format!("can't resolve {unknown}: ");
        assert!(done.stderr.contains(&error), "{args:?}: {}", done.stderr);
        assert!(done.stderr.contains("getent hosts"), "{args:?}: {}", done.stderr);
    }
}
