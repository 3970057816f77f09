//! Control of running mappings and servers: requests, answers, and handles that send them.
//!
//! A handle can be cloned and used from any thread. A request gets one answer, when it is done or has failed. Events report
//! all other changes, as always.

mod answer;
pub mod map;
mod names;
mod refused;
mod reply;
mod request;
pub mod serve;
mod wire;

pub(crate) use self::reply::Reply;
pub use self::{
    answer::{
        Answer, ClientPath, ClientSession, Entries, Entry, Greeting, Kind, LnetConnection, LnetNode, LnetNodes,
        LoopTotals, MapListing, MappedDevice, MappedPath, Mappings, OpenDevice, OpenDevices, Reloaded, Sessions, Stat,
        TaskStatus, Tasks, Text,
    },
    names::{Named, TaskState},
    refused::Refused,
    reply::{MapAnswer, Pending, ServeAnswer},
    request::{AttributePath, MapDevice, MapOrder, MapRequest, ProcessRequest, Request, ServeRequest},
    wire::{on_loss_text, path_text, read_on_loss, read_path, signed_attempts},
};

/// Version of the control socket's protocol, with each release frozen: it changes with the first request, answer or field changed after one.
pub const VERSION: u32 = 1;
