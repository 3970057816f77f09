//! Capture files and the frames in them.

mod common;
mod files;
mod fixtures;
mod frames;
