//! Integration tests.

mod language;
mod scripts;
