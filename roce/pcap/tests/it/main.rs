//! Capture files and the frames in them.

mod anonymize;
mod common;
mod compressed;
mod copies;
mod damage;
mod files;
mod fixtures;
mod flows;
mod frames;
mod gaps;
mod judge;
mod judged;
mod many;
mod pairing;
#[path = "../support/sent.rs"]
mod sent;
mod survey;
mod tunnels;
