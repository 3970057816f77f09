//! Addresses for a mapping's NBD clients, and their TLS.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use rnbd_host::{
    listen::{Inherited, Listen, NbdAddress},
    tls::Tls,
};

use crate::{
    names::{Endpoint, Resolver},
    output::Failure,
};

/// The port of NBD that IANA has assigned.
const PORT: u16 = 10809;

#[derive(Args)]
#[command(next_help_heading = "NBD")]
pub(crate) struct NbdArgs {
    /// Unix socket to create for NBD clients (mode 0600, removed at the end), in a folder that others can't write to
    #[arg(long, value_name = "SOCKET")]
    nbd: Option<PathBuf>,
    /// TCP address or name of this host to listen at for NBD clients; 0.0.0.0 or [::] for all. Anyone who reaches it can use the
    /// devices, unless --tls require and --tls-verify-peer are given. Repeat it to listen at several addresses
    #[arg(long, value_name = "HOST[:10809]")]
    nbd_listen: Vec<Endpoint>,
    /// TLS for NBD clients at all sockets: refused, offered, or required [default: on with --tls-certificates, else off]
    #[arg(long, value_name = "off|on|require", hide_possible_values = true)]
    tls: Option<TlsArg>,
    /// Folder with server-cert.pem and server-key.pem, as for nbdkit
    #[arg(long, value_name = "DIR")]
    tls_certificates: Option<PathBuf>,
    /// Accept only clients whose certificate ca-cert.pem in that folder has issued, and ca-crl.pem, if present, does not revoke
    #[arg(long, requires = "tls_certificates")]
    tls_verify_peer: bool,
    /// Not supported: the TLS library, rustls, has no pre-shared keys. Use certificates
    #[arg(long, value_name = "FILE")]
    tls_psk: Option<PathBuf>,
}

/// TLS mode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum TlsArg {
    Off,
    On,
    Require,
}

impl NbdArgs {
    /// Whether there is a socket on the command line.
    pub(crate) fn is_named(&self) -> bool {
        self.nbd.is_some() || !self.nbd_listen.is_empty()
    }

    /// The file of the Unix socket.
    pub(crate) fn socket_file(&self) -> Option<&Path> {
        self.nbd.as_deref()
    }

    /// Whether it listens at TCP addresses.
    pub(crate) fn has_tcp(&self) -> bool {
        !self.nbd_listen.is_empty()
    }

    /// The folder of the certificates.
    pub(crate) fn certificates(&self) -> Option<&Path> {
        self.tls_certificates.as_deref()
    }

    /// The sockets of the command line, or these that are there.
    pub(crate) fn listen(&self, inherited: Vec<Inherited>, resolver: &Resolver) -> Result<Vec<Listen>, Failure> {
        let mut named: Vec<_> = self.nbd.iter().cloned().map(Listen::Unix).collect();
        for endpoint in &self.nbd_listen {
            named.extend(resolver.own(endpoint, PORT)?.into_iter().map(Listen::Tcp));
        }
        match (named.is_empty(), inherited.is_empty()) {
            (false, true) => Ok(named),
            (true, false) => Ok(inherited.into_iter().map(Listen::Inherited).collect()),
            (true, true) => Err(Failure::usage(
                "no socket for NBD clients: --nbd SOCKET, --nbd-listen ADDR, or socket activation",
            )),
            (false, false) => Err(Failure::usage(
                "started with sockets for NBD clients (LISTEN_FDS): leave out --nbd and --nbd-listen",
            )),
        }
    }

    /// Returns the TLS settings for clients.
    pub(crate) fn tls(&self) -> Result<Option<Tls>, Failure> {
        if self.tls_psk.is_some() {
            return Err(Failure::usage(
                "--tls-psk is not supported: rustls has no pre-shared keys that come from outside; use --tls-certificates",
            ));
        }
        let (required, folder) = match (self.tls, &self.tls_certificates) {
            (Some(TlsArg::Off), _) | (None, None) => return Ok(None),
            (Some(TlsArg::On | TlsArg::Require), None) => {
                return Err(Failure::usage("--tls on and --tls require need --tls-certificates"));
            }
            (mode, Some(folder)) => (mode == Some(TlsArg::Require), folder),
        };
        let tls = Tls::load(folder, self.tls_verify_peer, required);
        tls.map(Some).map_err(|e| Failure::failed(format!("TLS: {e}")))
    }

    /// Whether clients are offered TLS.
    fn has_tls(&self) -> bool {
        self.tls_certificates.is_some() && self.tls != Some(TlsArg::Off)
    }

    /// Returns the URIs of a device at these addresses: the first needs no name.
    pub(crate) fn uris(&self, addresses: &[NbdAddress], name: Option<&str>) -> Vec<String> {
        let scheme = if self.has_tls() { "nbds" } else { "nbd" };
        addresses
            .iter()
            .filter_map(|address| uri(scheme, address, name))
            .collect()
    }
}

/// None of an abstract name: clients have no way to write it.
fn uri(scheme: &str, address: &NbdAddress, name: Option<&str>) -> Option<String> {
    let mut path = String::from("/");
    for byte in name.unwrap_or_default().bytes() {
        match byte {
            b'/' | b'-' | b'.' | b'_' | b'~' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => path.push(byte.into()),
            other => path.push_str(&format!("%{other:02X}")),
        }
    }
    match address {
        NbdAddress::Tcp(at) => Some(format!("{scheme}://{at}{path}")),
        NbdAddress::Unix(_) => Some(format!("{scheme}+unix://{path}?socket={address}")),
        NbdAddress::Abstract(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_have_names_as_they_are_written_in_one() {
        let unix = NbdAddress::Unix("s".into());
        let tcp = |at: &str| NbdAddress::Tcp(at.parse().unwrap());
        for (scheme, address, name, is) in [
            ("nbd", &unix, None, "nbd+unix:///?socket=s"),
            (
                "nbds",
                &unix,
                Some("a/b,1 ä?"),
                "nbds+unix:///a/b%2C1%20%C3%A4%3F?socket=s",
            ),
            ("nbds", &tcp("192.0.2.1:10809"), None, "nbds://192.0.2.1:10809/"),
            ("nbd", &tcp("[::1]:7"), Some("a b"), "nbd://[::1]:7/a%20b"),
        ] {
            assert_eq!(uri(scheme, address, name).as_deref(), Some(is));
        }
    }
}
