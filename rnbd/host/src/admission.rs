//! Admission to a server on one or several loops.

use std::sync::Arc;

use roce::{Arrival, Placement};
use rtrs::{
    admission::{Admission, shared::SharedAdmission},
    proto::ConnReq,
    server::ServerConfig,
};

/// Admission of a server's loops, which places each session on one of them: the first loop, to which all connection requests come,
/// asks it where each belongs.
#[derive(Clone, Debug)]
pub struct ServerAdmission {
    pub(crate) shared: SharedAdmission,
}

impl ServerAdmission {
    /// Admission of a server on so many loops, at least one.
    pub fn new(config: &ServerConfig, loops: usize) -> Arc<Self> {
        let admission = Admission::on_loops(config.limits(), config.allow.clone(), loops.max(1));
        let shared = SharedAdmission::new(admission);
        Arc::new(Self { shared })
    }

    /// How many loops it is for.
    pub fn loops(&self) -> usize {
        self.loads().len()
    }

    /// Sessions of each loop, half-open and expected ones included.
    pub fn loads(&self) -> Vec<usize> {
        self.shared.with(|admission| admission.loads())
    }
}

impl Placement for ServerAdmission {
    fn place(&self, arrival: &Arrival<'_>) -> usize {
        // A malformed request is refused by any loop.
        let Ok(req) = ConnReq::parse(arrival.private_data) else {
            return 0;
        };
        let may_be_new = req.cid.get() == 0;
        self.shared
            .with(|admission| admission.place(roce::now(), req.session_uuid, may_be_new))
    }
}
