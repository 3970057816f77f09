//! Metrics by HTTP: `GET /metrics`, one request a connection.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use super::{Shared, metrics};

/// Bytes of a request at most.
const MAX_REQUEST: usize = 8 << 10;
/// A request and its answer take no longer.
const PATIENCE: Duration = Duration::from_secs(5);
/// To whom there is no room for.
pub(super) const BUSY: &str = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

/// Answers a request.
pub(super) fn answer(shared: &Shared, mut stream: &TcpStream) {
    // A client that is too slow, or has gone, has no answer.
    let _ = read_request(stream).and_then(|request| {
        let answer = answer_to(request.as_deref(), || metrics::text(&shared.roster));
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.write_all(answer.as_bytes())
    });
}

/// The first line of a request whose head is complete; `None`: it is too long.
fn read_request(mut stream: &TcpStream) -> io::Result<Option<String>> {
    let end = Instant::now() + PATIENCE;
    let mut head = Vec::new();
    let mut part = [0; 1024];
    loop {
        if let Some(line) = first_line(&head) {
            return Ok(Some(line));
        }
        if head.len() > MAX_REQUEST {
            return Ok(None);
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut part)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => head.extend(&part[..n]),
        }
    }
}

fn first_line(head: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(head);
    let complete = text.contains("\r\n\r\n") || text.contains("\n\n");
    complete.then(|| text.lines().next().unwrap_or_default().to_owned())
}

fn answer_to(request: Option<&str>, text: impl FnOnce() -> String) -> String {
    let plain = "text/plain; charset=utf-8";
    let (status, kind, body, has_body) = match request.map(|line| line.split(' ').collect::<Vec<_>>()).as_deref() {
        None => (
            "431 Request Header Fields Too Large",
            plain,
            "too long\n".to_owned(),
            true,
        ),
        Some([method @ ("GET" | "HEAD"), target, version]) if version.starts_with("HTTP/1.") => {
            let path = target.split('?').next().unwrap_or_default();
            let (status, kind, body) = match path {
                "/metrics" => ("200 OK", "text/plain; version=0.0.4; charset=utf-8", text()),
                _ => ("404 Not Found", plain, "there is /metrics\n".to_owned()),
            };
            (status, kind, body, *method == "GET")
        }
        Some([_, _, version]) if version.starts_with("HTTP/") => {
            ("405 Method Not Allowed", plain, "GET or HEAD\n".to_owned(), true)
        }
        Some(_) => ("400 Bad Request", plain, "this is not HTTP\n".to_owned(), true),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    if has_body { head + &body } else { head }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_metrics_are_served() {
        let answer = |request| answer_to(request, || "a 1\n".into());
        let found = answer(Some("GET /metrics?x=1 HTTP/1.1"));
        assert!(
            found.starts_with("HTTP/1.1 200 OK\r\n") && found.ends_with("\r\n\r\na 1\n"),
            "{found}"
        );
        let head = answer(Some("HEAD /metrics HTTP/1.0"));
        assert!(
            head.contains("Content-Length: 4\r\n") && head.ends_with("\r\n\r\n"),
            "{head}"
        );
        for (request, status) in [
            (Some("GET / HTTP/1.1"), "404"),
            (Some("POST /metrics HTTP/1.1"), "405"),
            (Some("GET /metrics"), "400"),
            (Some(""), "400"),
            (None, "431"),
        ] {
            let answer = answer(request);
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status} ")),
                "{request:?}: {answer}"
            );
        }
    }

    #[test]
    fn a_request_is_complete_with_an_empty_line() {
        assert_eq!(first_line(b"GET / HTTP/1.1\r\nHost: x\r\n"), None);
        assert_eq!(
            first_line(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").as_deref(),
            Some("GET / HTTP/1.1")
        );
    }
}
