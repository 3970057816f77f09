//! Metrics by HTTP: `GET /metrics`, one request a connection.

use std::{
    io::{self, Read},
    sync::Arc,
    time::Duration,
};

use roce_net::places::{Full, Identity, Limits, Peer};
use socket2::Socket;

use super::{
    metrics,
    shared::Shared,
    sockets::{Place, Service, write_within},
};

/// Bytes of a request at most.
const MAX_REQUEST: usize = 8 << 10;
/// Time for a request to arrive, and again for its answer to be taken.
const TIME: Duration = Duration::from_secs(5);

/// The metrics of what runs in this process.
#[derive(Clone)]
pub(super) struct Metrics(pub(super) Arc<Shared>);

impl Service for Metrics {
    /// Many enough that a request arrives before a peer that connects again and again has evicted its connection.
    const LIMITS: Limits = Limits {
        all: 128,
        open: 128,
        reserved: 0,
        each: 64,
    };
    const FIRST_REQUEST: Duration = TIME;

    fn identify(&self, stream: &Socket) -> Result<Peer, String> {
        // A peer that is gone needs no answer.
        let addr = stream.peer_addr().ok().and_then(|addr| addr.as_socket());
        let addr = addr.ok_or_else(String::new)?;
        Ok(Peer {
            identity: Identity::host(addr.ip()),
            trusted: false,
        })
    }

    fn serve(&self, stream: &Socket, place: &Place) {
        // A client that is too slow, or has gone, gets no answer.
        let _ = read_request(stream).and_then(|request| {
            if !place.opened() {
                return Ok(());
            }
            let answer = answer_to(request.as_deref(), || metrics::text(&self.0.services));
            write_within(stream, answer.as_bytes(), TIME)
        });
    }

    fn full(&self, _full: &Full) -> String {
        empty("503 Service Unavailable")
    }

    fn late(&self) -> String {
        empty("408 Request Timeout")
    }

    fn evicted(&self) -> String {
        empty("503 Service Unavailable")
    }
}

fn empty(status: &str) -> String {
    format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
}

/// The first line of a request whose head is complete; `None`: it is too long. Until the deadline of its place.
fn read_request(mut stream: &Socket) -> io::Result<Option<String>> {
    let mut head = Vec::new();
    let mut part = [0; 1024];
    loop {
        if let Some(line) = first_line(&head) {
            return Ok(Some(line));
        }
        if head.len() > MAX_REQUEST {
            return Ok(None);
        }
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
