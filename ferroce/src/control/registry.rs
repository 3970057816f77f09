//! Registry of this process's mappings, servers, RDS nodes and LNet nodes.

use std::{
    net::IpAddr,
    sync::{Arc, OnceLock},
};

use lnet_host::LnetNode;
use parking_lot::RwLock;
use rds_node::NodeControl;
use rnbd::Errno;
use rnbd_admin::{Client, Host, Parameters, Server};
use rnbd_host::{
    control::{MapOrder, Refused, Reloaded, ServeAnswer, ServeRequest, Tasks, serve::ServeControl},
    tls::{Tls, TlsError},
};

use super::peer::Authority;
use crate::sharing::link;

/// Text of a failure to load other certificates.
pub(crate) fn not_renewed(e: &TlsError) -> String {
    format!("TLS: {e}; the previous certificates stay in use")
}

/// A running server.
pub(crate) struct Served {
    pub(crate) control: ServeControl,
    pub(crate) parameters: Parameters,
}

impl Server for Served {
    fn ask(&self, request: ServeRequest) -> Result<ServeAnswer, Refused> {
        self.control.ask(request)
    }

    fn parameters(&self) -> Parameters {
        self.parameters.clone()
    }
}

/// Runner of several tasks in this process: the daemon.
pub(crate) trait Supervisor: Send + Sync {
    /// Reads the configuration again.
    fn reload(&self) -> Result<Reloaded, Refused>;
    /// Lists the tasks.
    fn tasks(&self) -> Tasks;
    /// Starts a task, if this authority suffices: `map.NAME`, `serve.NAME`, `rds.NAME` or `lnet.NAME`, with the arguments of the command.
    fn start(&self, name: &str, words: Vec<String>, authority: Authority) -> Result<(), Refused>;
    /// Stops a task.
    fn stop(&self, name: &str) -> Result<(), Refused>;
    /// Opens a session and a device over it.
    fn open(&self, session: &str, order: &MapOrder) -> Result<(), Refused>;
}

/// Registry of the mappings, servers and nodes of this process.
#[derive(Default)]
pub(crate) struct ServiceRegistry {
    supervisor: OnceLock<Arc<dyn Supervisor>>,
    /// Whether there is a supervisor, or will be at once.
    supervised: bool,
    /// The TLS of a mapping in the foreground.
    tls: OnceLock<Tls>,
    clients: RwLock<Vec<Arc<dyn Client>>>,
    servers: RwLock<Vec<Arc<dyn Server>>>,
    nodes: RwLock<Vec<Arc<NodeControl>>>,
    lnet_nodes: RwLock<Vec<Arc<LnetNode>>>,
}

/// The entry of a mapping, a server or a node, until it is dropped.
pub(crate) struct Listed {
    services: Arc<ServiceRegistry>,
    what: What,
}

enum What {
    Client(Arc<dyn Client>),
    Server(Arc<dyn Server>),
    Node(Arc<NodeControl>),
    Lnet(Arc<LnetNode>),
}

impl Drop for Listed {
    fn drop(&mut self) {
        match &self.what {
            What::Client(this) => self.services.clients.write().retain(|other| !Arc::ptr_eq(this, other)),
            What::Node(this) => self.services.nodes.write().retain(|other| !Arc::ptr_eq(this, other)),
            What::Lnet(this) => self
                .services
                .lnet_nodes
                .write()
                .retain(|other| !Arc::ptr_eq(this, other)),
            What::Server(this) => self.services.servers.write().retain(|other| !Arc::ptr_eq(this, other)),
        }
    }
}

impl ServiceRegistry {
    /// The registry of a daemon. Requests for its supervisor wait until [`supervise`](Self::supervise) is called.
    pub(crate) fn of_daemon() -> Self {
        Self {
            supervised: true,
            ..Self::default()
        }
    }

    /// Sets the supervisor.
    pub(crate) fn supervise(&self, supervisor: Arc<dyn Supervisor>) {
        let _ = self.supervisor.set(supervisor);
    }

    /// The daemon.
    pub(crate) fn supervisor(&self) -> Result<&dyn Supervisor, Refused> {
        match self.supervised {
            true => Ok(&**self.supervisor.wait()),
            false => Err(Refused::new(Errno::EOPNOTSUPP, "this process is no daemon")),
        }
    }

    /// Sets the certificates of a mapping in the foreground, for [`reload`](Self::reload).
    pub(crate) fn renewable(&self, tls: Tls) {
        let _ = self.tls.set(tls);
    }

    /// Reads a daemon's configuration again, or the certificates of a mapping in the foreground.
    pub(crate) fn reload(&self) -> Result<Reloaded, Refused> {
        if let Ok(supervisor) = self.supervisor() {
            return supervisor.reload();
        }
        let Some(tls) = self.tls.get() else {
            let text = "this process is no daemon, and has no certificates";
            return Err(Refused::new(Errno::EOPNOTSUPP, text));
        };
        let renewed = tls.renew().map_err(|e| Refused::new(Errno::EINVAL, not_renewed(&e)))?;
        let mut done = Reloaded::default();
        let list = if renewed {
            &mut done.changed
        } else {
            &mut done.unchanged
        };
        list.push("certificates".to_owned());
        Ok(done)
    }

    pub(crate) fn add_client(self: &Arc<Self>, client: impl Client + 'static) -> Listed {
        let client: Arc<dyn Client> = Arc::new(client);
        self.clients.write().push(client.clone());
        self.listed(What::Client(client))
    }

    pub(crate) fn add_server(self: &Arc<Self>, server: impl Server + 'static) -> Listed {
        let server: Arc<dyn Server> = Arc::new(server);
        self.servers.write().push(server.clone());
        self.listed(What::Server(server))
    }

    /// Adds an RDS node.
    pub(crate) fn add_node(self: &Arc<Self>, control: NodeControl) -> Listed {
        let node = Arc::new(control);
        self.nodes.write().push(node.clone());
        self.listed(What::Node(node))
    }

    /// The RDS nodes.
    pub(crate) fn nodes(&self) -> Vec<Arc<NodeControl>> {
        self.nodes.read().clone()
    }

    pub(crate) fn add_lnet_node(self: &Arc<Self>, node: LnetNode) -> Listed {
        let node = Arc::new(node);
        self.lnet_nodes.write().push(node.clone());
        self.listed(What::Lnet(node))
    }

    /// The LNet nodes.
    pub(crate) fn lnet_nodes(&self) -> Vec<Arc<LnetNode>> {
        self.lnet_nodes.read().clone()
    }

    fn listed(self: &Arc<Self>, what: What) -> Listed {
        let services = self.clone();
        Listed { services, what }
    }

    /// Whether there are mappings, and servers.
    pub(crate) fn kinds(&self) -> (bool, bool) {
        (!self.clients.read().is_empty(), !self.servers.read().is_empty())
    }

    /// The mapping with this session, or the only one.
    pub(crate) fn client(&self, session: Option<&str>) -> Result<Arc<dyn Client>, Refused> {
        let clients = self.clients();
        if clients.is_empty() {
            return Err(Refused::new(Errno::ENODEV, "nothing is mapped by this process"));
        }
        let Some(wanted) = session else {
            let mut all = clients.into_iter();
            return match (all.next(), all.next()) {
                (Some(client), None) => Ok(client),
                _ => Err(Refused::new(Errno::EINVAL, "there are several sessions: name one")),
            };
        };
        let has_name = |client: &Arc<dyn Client>| client.listing().is_ok_and(|l| l.session == wanted);
        let found = clients.into_iter().find(has_name);
        found.ok_or_else(|| {
            Refused::new(
                Errno::ENOENT,
                format!("no mapping of this process has the session {wanted:?}"),
            )
        })
    }

    /// The server at this place, or the only one.
    pub(crate) fn server(&self, place: Option<usize>) -> Result<Arc<dyn Server>, Refused> {
        let servers = self.servers();
        match (place, servers.len()) {
            (_, 0) => Err(Refused::new(Errno::ENODEV, "nothing is served by this process")),
            (None, 2..) => Err(Refused::new(Errno::EINVAL, "there are several servers: name one")),
            (place, _) => {
                let found = servers.into_iter().nth(place.unwrap_or_default());
                found.ok_or_else(|| Refused::new(Errno::ENOENT, "no such server"))
            }
        }
    }
}

impl Host for ServiceRegistry {
    fn clients(&self) -> Vec<Arc<dyn Client>> {
        self.clients.read().clone()
    }

    fn servers(&self) -> Vec<Arc<dyn Server>> {
        self.servers.read().clone()
    }

    fn hca_name(&self, addr: IpAddr) -> String {
        link::device_at(addr).unwrap_or_default()
    }

    fn open(&self, session: &str, order: &MapOrder) -> Result<(), Refused> {
        if let Ok(supervisor) = self.supervisor() {
            return supervisor.open(session, order);
        }
        let sessions: Vec<_> = self.clients().iter().filter_map(|c| c.listing().ok()).collect();
        let has = match sessions.first() {
            Some(listing) => format!("this process has only the session {:?}", listing.session),
            None => "this process maps nothing".to_owned(),
        };
        let text = format!("{has}: start `ferroce map` for the session {session:?}");
        Err(Refused::new(Errno::EOPNOTSUPP, text))
    }
}
