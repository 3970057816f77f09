//! TCP ports, at which programs of perftest and others agree on their connections.

use std::{
    fs, io,
    net::{Ipv4Addr, TcpListener},
};

/// A TCP port that nobody listens at.
///
/// # Errors
/// When there is none.
pub fn free_port() -> io::Result<u16> {
    TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?
        .local_addr()
        .map(|a| a.port())
}

/// Whether somebody listens at a TCP port in the network of a process, a number or `self`: by the kernel's tables, so that no
/// connection disturbs the server.
pub fn listens(process: &str, port: u16) -> bool {
    const LISTEN: &str = "0A";
    let suffix = format!(":{port:04X}");
    ["tcp", "tcp6"].iter().any(|table| {
        let text = fs::read_to_string(format!("/proc/{process}/net/{table}")).unwrap_or_default();
        text.lines().any(|line| {
            let mut fields = line.split_whitespace().skip(1);
            fields.next().is_some_and(|local| local.ends_with(&suffix)) && fields.nth(1) == Some(LISTEN)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_listens_is_seen() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(listens("self", port) && listens(&std::process::id().to_string(), port));
        drop(listener);
        assert!(!listens("self", port));
        assert_ne!(free_port().unwrap(), 0);
    }
}
