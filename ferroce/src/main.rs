//! ferroce

fn main() {}
