//! RDS message whose fragments are coming.

use rds::proto::Header;

use crate::exchange::ExchangeId;

/// Header of the first fragment, and how many have come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RdsPart {
    pub(crate) first: Header,
    pub(crate) fragments: u32,
    pub(crate) exchange: Option<ExchangeId>,
}
