//! Writes the captures of `pcap-fixtures` that are made and not captured: `cargo run -p ferroce-replay --example made`.

use std::{error::Error, fs};

use ferroce_replay::{fixtures, made, made_stall};

fn main() -> Result<(), Box<dyn Error>> {
    for (name, bytes) in [
        ("made-connectx.pcap", made::connectx()?),
        ("made-read-span.pcap", made_stall::read_span()?),
        ("scapy-cnp.pcap", made::cnp()),
    ] {
        fs::write(fixtures().join(name), bytes)?;
        println!("{name}");
    }
    Ok(())
}
