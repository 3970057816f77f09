//! Location of a port's GSI.

use std::collections::VecDeque;

use super::Gsi;
use crate::message::FromShard;

/// Way to the GSI of a port's address.
pub(crate) enum GsiLink {
    /// The port has it.
    Here(Box<Gsi>),
    /// Another port has it: messages for that.
    Elsewhere(VecDeque<FromShard>),
}

impl GsiLink {
    pub(crate) fn get(&self) -> Option<&Gsi> {
        match self {
            Self::Here(gsi) => Some(gsi),
            Self::Elsewhere(_) => None,
        }
    }

    pub(crate) fn get_mut(&mut self) -> Option<&mut Gsi> {
        match self {
            Self::Here(gsi) => Some(gsi),
            Self::Elsewhere(_) => None,
        }
    }
}
