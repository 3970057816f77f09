//! Sessions, their messages and their admission.

mod admission;
mod capture;
mod proto;
mod sessions;
#[path = "../support/mod.rs"]
mod support;
