//! Statistics for Prometheus.

use super::*;

/// Returns an HTTP server's answer to a request.
fn http(at: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn statistics_are_told_to_prometheus() {
    let at = SocketAddr::new(fresh_address().into(), 9100);
    let lab = Lab::with(&["--metrics", &at.to_string()], &[]);
    let mut client = lab.nbd();
    client.write(0, &pattern(1, BLOCK)).unwrap();
    client.disconnect().unwrap();
    let answer = http(at, "GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(
        head.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"),
        "{head}"
    );
    assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
    assert!(body.contains("\nferroce_server_written_bytes_total 4096\n"), "{body}");
    assert!(http(at, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
    // Connections that say nothing hold up no scrape, also if whoever has them makes more of them.
    let mut silent = Vec::new();
    for scrape in 0..50 {
        silent.extend((0..64).map(|_| TcpStream::connect(at).unwrap()));
        silent.drain(..silent.len().saturating_sub(256));
        let answer = http(at, "HEAD /metrics HTTP/1.1\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200 "), "scrape {scrape}: {answer}");
    }
    drop(silent);

    let body = lab.ctl("map", &["metrics"]);
    let path = lab.path();
    let line = |name: &str, labels: &str| {
        let begin = format!("{name}{{{labels}}} ");
        let found = body.lines().find_map(|line| line.strip_prefix(&begin));
        found
            .unwrap_or_else(|| panic!("{begin}: {body}"))
            .parse::<f64>()
            .unwrap()
    };
    let of_device = "session=\"test\",device=\"disk\"";
    assert_eq!(line("ferroce_device_written_bytes_total", of_device), 4096.0);
    assert_eq!(line("ferroce_device_up", of_device), 1.0);
    let of_path = format!("session=\"test\",path=\"{path}\",port=\"1234\"");
    assert_eq!(line("ferroce_path_up", &of_path), 1.0);
    assert!(line("ferroce_path_writes_total", &of_path) >= 1.0);
    assert!(line("ferroce_roce_rx_packets_total", &format!("address=\"{}\"", lab.client)) > 0.0);
    // Each has its type once, before its values.
    let mut types: Vec<&str> = body.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
    // The page of metrics has all of them.
    let page = std::fs::read_to_string(ferroce_tests::root().join("docs/reference/metrics.md")).unwrap();
    for name in types.iter().filter_map(|line| line.split(' ').next()) {
        let shown = name.starts_with("ferroce_roce_") || page.contains(&format!("| `{name}` |"));
        assert!(shown, "docs/reference/metrics.md lacks {name}");
    }
    let all = types.len();
    types.sort_unstable();
    types.dedup();
    assert_eq!(types.len(), all);
    lab.end();
}
