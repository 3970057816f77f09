//! What runs in this process, for those who look at it and steer it.

use std::{net::IpAddr, sync::Arc};

use parking_lot::RwLock;
use rnbd::Errno;
use rnbd_admin::{Client, Host, MapOrder, Parameters, Server};
use rnbd_host::control::{
    Refused,
    serve::{ServeAnswer, ServeControl, ServeRequest},
};

use crate::sharing::link;

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

/// Mappings and servers.
#[derive(Default)]
pub(crate) struct Roster {
    clients: RwLock<Vec<Arc<dyn Client>>>,
    servers: RwLock<Vec<Arc<dyn Server>>>,
}

impl Roster {
    pub(crate) fn add_client(&self, client: impl Client + 'static) {
        self.clients.write().push(Arc::new(client));
    }

    pub(crate) fn add_server(&self, server: impl Server + 'static) {
        self.servers.write().push(Arc::new(server));
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
                _ => Err(Refused::new(Errno::EINVAL, "there are several sessions: say which")),
            };
        };
        let has_name = |client: &Arc<dyn Client>| client.listing().is_ok_and(|l| l.session == wanted);
        let found = clients.into_iter().find(has_name);
        found.ok_or_else(|| {
            Refused::new(
                Errno::ENOENT,
                format!("there is no session {wanted:?} of a mapping here"),
            )
        })
    }

    /// The server, if this process has one.
    pub(crate) fn server(&self) -> Result<Arc<dyn Server>, Refused> {
        let server = self.servers().into_iter().next();
        server.ok_or_else(|| Refused::new(Errno::ENODEV, "nothing is served by this process"))
    }
}

impl Host for Roster {
    fn clients(&self) -> Vec<Arc<dyn Client>> {
        self.clients.read().clone()
    }

    fn servers(&self) -> Vec<Arc<dyn Server>> {
        self.servers.read().clone()
    }

    fn hca_name(&self, addr: IpAddr) -> String {
        link::device_at(addr).unwrap_or_default()
    }

    fn open(&self, order: &MapOrder) -> Result<(), Refused> {
        let sessions: Vec<_> = self.clients().iter().filter_map(|c| c.listing().ok()).collect();
        let has = match sessions.first() {
            Some(listing) => format!("this process has the session {:?} alone", listing.session),
            None => "this process maps nothing".to_owned(),
        };
        let text = format!("{has}: start `ferroce map` for the session {:?}", order.session);
        Err(Refused::new(Errno::EOPNOTSUPP, text))
    }
}
