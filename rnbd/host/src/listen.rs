//! Listeners for NBD clients: Unix sockets, TCP, and sockets made by another process.

use std::{
    fmt, io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use roce_net::socket_file::{Access, Kind, SocketFile};
use socket2::{Domain, Protocol, SockAddr, SockRef, Socket, TcpKeepalive, Type};

/// Connections that wait to be accepted. Beyond that the system drops them, and their hosts try again after a second.
const BACKLOG: i32 = 1024;
/// A client's host that is silent for so long is asked whether it is there,
const SILENCE: Duration = Duration::from_secs(60);
/// every so often,
const QUESTION: Duration = Duration::from_secs(10);
/// and so many times before the client is taken for gone.
const QUESTIONS: u32 = 6;

/// A way in.
#[derive(Clone, Debug)]
pub enum Listen {
    /// A Unix socket, which is made with mode 0600 and removed at the end.
    Unix(PathBuf),
    /// TCP at this address. Port 0 is any that is free.
    Tcp(SocketAddr),
    /// A socket that is there.
    Inherited(Inherited),
}

/// A listening socket that somebody else has made, such as systemd. It, and the file of a Unix socket, stay when we go.
#[derive(Clone, Debug)]
pub struct Inherited {
    /// Name that its maker gave it.
    pub name: String,
    socket: Arc<OwnedFd>,
}

impl Inherited {
    /// Takes a socket.
    ///
    /// # Errors
    /// When it is none that listens, for streams of the Unix or internet kind; says what it is.
    pub fn new(name: impl Into<String>, socket: OwnedFd) -> io::Result<Self> {
        check(socket.as_fd())?;
        let (name, socket) = (name.into(), Arc::new(socket));
        Ok(Self { name, socket })
    }
}

/// Whether NBD clients can come to a descriptor.
pub(crate) fn check(descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let socket = SockRef::from(&descriptor);
    let wrong = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, why.to_owned()));
    let known = [Domain::UNIX, Domain::IPV4, Domain::IPV6];
    match socket.r#type() {
        Err(e) if e.raw_os_error() == Some(libc::ENOTSOCK) => wrong("it is no socket"),
        Err(e) => Err(e),
        Ok(kind) if kind != Type::STREAM => wrong("it is no stream socket"),
        Ok(_) if !known.contains(&socket.domain()?) => wrong("it is neither a Unix socket nor TCP"),
        Ok(_) if !socket.is_listener()? => wrong("it does not listen"),
        Ok(_) => Ok(()),
    }
}

/// Address that a client connects to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NbdAddress {
    /// The file of a Unix socket.
    Unix(PathBuf),
    /// TCP.
    Tcp(SocketAddr),
    /// A Unix socket without a file, by its abstract name.
    Abstract(String),
}

impl NbdAddress {
    fn of(address: &SockAddr) -> Self {
        match (address.as_socket(), address.as_pathname()) {
            (Some(at), _) => Self::Tcp(at),
            (None, Some(path)) => Self::Unix(path.into()),
            (None, None) => {
                let name = address.as_abstract_namespace().unwrap_or_default();
                Self::Abstract(String::from_utf8_lossy(name).into_owned())
            }
        }
    }
}

impl fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(f),
            Self::Tcp(at) => at.fmt(f),
            Self::Abstract(name) => write!(f, "@{name}"),
        }
    }
}

/// A listening socket.
#[derive(Debug)]
enum Source {
    /// With a file of ours.
    File(SocketFile),
    Socket(Socket),
}

impl AsFd for Source {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::File(file) => file.as_fd(),
            Self::Socket(socket) => socket.as_fd(),
        }
    }
}

/// A listening socket, and where it is found.
#[derive(Debug)]
pub(crate) struct Listener {
    source: Source,
    address: NbdAddress,
}

impl Listener {
    /// Listens.
    ///
    /// # Errors
    /// Those of [`SocketFile::bind`], `bind` and `listen`; they say where.
    pub(crate) fn open(way: &Listen) -> io::Result<Self> {
        let (source, address) = match way {
            // As it was given.
            Listen::Unix(path) => (
                Source::File(SocketFile::bind(path, Kind::Stream, Access::Owner)?),
                Some(NbdAddress::Unix(path.clone())),
            ),
            Listen::Tcp(at) => {
                let listening = tcp(*at).map_err(|e| io::Error::new(e.kind(), format!("{at}: {e}")))?;
                (Source::Socket(listening), None)
            }
            Listen::Inherited(inherited) => (Source::Socket(inherited.socket.try_clone()?.into()), None),
        };
        let socket = SockRef::from(&source);
        socket.set_nonblocking(true)?;
        let address = match address {
            Some(address) => address,
            None => NbdAddress::of(&socket.local_addr()?),
        };
        Ok(Self { source, address })
    }

    pub(crate) fn address(&self) -> &NbdAddress {
        &self.address
    }

    /// The next client.
    ///
    /// # Errors
    /// Those of `accept`; `WouldBlock` when there is none.
    pub(crate) fn accept(&self) -> io::Result<Socket> {
        let (client, _) = SockRef::from(&self.source).accept()?;
        client.set_nonblocking(true)?;
        if matches!(self.address, NbdAddress::Tcp(_)) {
            // Several replies leave together as it is.
            client.set_tcp_nodelay(true)?;
            // A host that is gone without a word holds no place for ever.
            let keepalive = TcpKeepalive::new()
                .with_time(SILENCE)
                .with_interval(QUESTION)
                .with_retries(QUESTIONS);
            client.set_tcp_keepalive(&keepalive)?;
        }
        Ok(client)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.source.as_fd()
    }
}

fn tcp(at: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(at), Type::STREAM, Some(Protocol::TCP))?;
    // Connections of a server that was here may still be on their way out.
    socket.set_reuse_address(true)?;
    if at.is_ipv6() {
        // IPv4 has addresses of its own here.
        socket.set_only_v6(true)?;
    }
    socket.bind(&at.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::{
        net::{TcpListener, TcpStream, UdpSocket},
        os::unix::net::{UnixListener, UnixStream},
    };

    use super::*;

    #[test]
    fn only_what_listens_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let why = |fd: OwnedFd| Inherited::new("x", fd).unwrap_err().to_string();
        assert_eq!(
            why(std::fs::File::open(folder.path()).unwrap().into()),
            "it is no socket"
        );
        assert_eq!(
            why(UdpSocket::bind("127.0.0.1:0").unwrap().into()),
            "it is no stream socket"
        );
        assert_eq!(why(UnixStream::pair().unwrap().0.into()), "it does not listen");
        assert!(Inherited::new("x", TcpListener::bind("[::1]:0").unwrap().into()).is_ok());
        let file = folder.path().join("socket");
        assert!(Inherited::new("x", UnixListener::bind(file).unwrap().into()).is_ok());
    }

    #[test]
    fn the_file_of_a_socket_stays_with_who_has_made_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("socket");
        let made = UnixListener::bind(&file).unwrap();
        let inherited = Inherited::new("x", made.try_clone().unwrap().into()).unwrap();
        let listener = Listener::open(&Listen::Inherited(inherited)).unwrap();
        assert_eq!(listener.address(), &NbdAddress::Unix(file.clone()));
        drop(listener);
        assert!(file.exists());

        let ours = folder.path().join("ours");
        let listener = Listener::open(&Listen::Unix(ours.clone())).unwrap();
        assert_eq!(listener.address(), &NbdAddress::Unix(ours.clone()));
        assert!(ours.exists());
        drop(listener);
        assert!(!ours.exists());
    }

    #[test]
    fn ipv4_and_ipv6_have_one_port_each_for_itself() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = Listener::open(&Listen::Tcp(address.parse().unwrap())).unwrap();
            let NbdAddress::Tcp(at) = *listener.address() else {
                panic!("{listener:?}")
            };
            assert_ne!(at.port(), 0);
            assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
            let _client = TcpStream::connect(at).unwrap();
            let accepted = listener.accept().unwrap();
            assert!(accepted.tcp_nodelay().unwrap());
            let taken = Listener::open(&Listen::Tcp(at)).unwrap_err();
            assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
            assert!(taken.to_string().starts_with(&at.to_string()), "{taken}");
        }
        let any = Listener::open(&Listen::Tcp("0.0.0.0:0".parse().unwrap())).unwrap();
        let NbdAddress::Tcp(at) = *any.address() else { panic!() };
        let v6 = format!("[::]:{}", at.port()).parse().unwrap();
        assert!(
            Listener::open(&Listen::Tcp(v6)).is_ok(),
            "the other kind is somebody else's"
        );
    }
}
