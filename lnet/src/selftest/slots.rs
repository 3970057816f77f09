//! Memory for requests of peers.

use std::collections::BTreeMap;

use super::proto::{MESSAGE_LEN, Message, Service};
use crate::{
    buffer::Buffer,
    event::{EntryId, Failure, Served},
    node::Node,
    portal::{Entry, EntryOptions},
};

/// Request that has come, or what has come in the place of one.
pub(super) enum Arrived {
    /// Not in memory for requests.
    Elsewhere,
    /// No request of the service that it was sent to.
    Nonsense,
    /// A request.
    Request(Message),
}

/// Places for a request each. A place is free for the next one as soon as its request was read.
#[derive(Debug)]
pub(super) struct Slots(BTreeMap<EntryId, (Service, Buffer)>);

impl Slots {
    /// Places for `framework` requests to each service of the framework, and `tests` to each other one. `None`: there is no memory.
    pub(super) fn attach(node: &mut Node, framework: usize, tests: usize) -> Option<Self> {
        let count = |service: Service| match service {
            Service::Bulk | Service::Ping => tests,
            _ => framework,
        };
        let services = Service::ALL.into_iter();
        let services: Vec<Service> = services
            .flat_map(|service| core::iter::repeat_n(service, count(service)))
            .collect();
        let memory = Buffer::allocate(MESSAGE_LEN * services.len())?;
        let mut slots = Self(BTreeMap::new());
        for (index, service) in services.into_iter().enumerate() {
            slots.add(node, service, memory.part(index * MESSAGE_LEN, MESSAGE_LEN)?);
        }
        Some(slots)
    }

    fn add(&mut self, node: &mut Node, service: Service, memory: Buffer) {
        let entry = node.attach(Entry {
            portal: service.portal(),
            from: None,
            match_bits: service.number().into(),
            ignore_bits: 0,
            options: EntryOptions::PUT | EntryOptions::AT_ONCE,
            memory: memory.clone(),
            uses: Some(1),
        });
        self.0.insert(entry, (service, memory));
    }

    /// Reads the request that a peer has PUT.
    pub(super) fn take(&self, served: &Served, result: &Result<u32, Failure>) -> Arrived {
        let Some((service, memory)) = self.0.get(&served.entry) else {
            return Arrived::Elsewhere;
        };
        let Ok(len) = result else { return Arrived::Nonsense };
        let bytes = memory.to_vec();
        match Message::parse(&bytes[..bytes.len().min(*len as usize)]) {
            Ok(request) if request.body.service() == Some(*service) => Arrived::Request(request),
            _ => Arrived::Nonsense,
        }
    }

    /// A place is not in use any more: it is for the next request. Returns whether it is one of these.
    pub(super) fn unlinked(&mut self, node: &mut Node, entry: EntryId) -> bool {
        let Some((service, memory)) = self.0.remove(&entry) else {
            return false;
        };
        self.add(node, service, memory);
        true
    }
}
