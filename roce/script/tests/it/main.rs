//! Integration tests.

mod scripts;
