//! `ferroce daemon`: any number of servers and mappings in one process.

mod config;
