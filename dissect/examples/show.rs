//! Prints the packets of captures, one a line, with their exchanges: `cargo run -p ferroce-dissect --example show -- FILE`.

use std::error::Error;

use ferroce_dissect::{Dissector, Meta};
use roce_bth::{Packet, ROCE_UDP_PORT};
use roce_pcap::{Capture, decode};

fn main() -> Result<(), Box<dyn Error>> {
    for path in std::env::args_os().skip(1) {
        let (mut capture, mut dissector) = (Capture::open(path)?, Dissector::new());
        while let Some(frame) = capture.next_frame() {
            let frame = frame?;
            let Ok(datagram) = decode(frame.link, frame.data) else {
                continue;
            };
            if datagram.dst.port() != ROCE_UDP_PORT {
                continue;
            }
            let meta = Meta {
                frame: frame.index,
                time_ns: frame.time_ns,
                src: datagram.src,
                dst: datagram.dst,
            };
            match Packet::parse(datagram.payload) {
                Ok(packet) => {
                    let dissection = dissector.packet(&meta, &packet);
                    let exchange = dissection.exchange.map(|id| id.to_string()).unwrap_or_default();
                    println!("{:>5} {exchange:>5} {}", frame.index, dissection.summary());
                    for field in dissection.not_understood() {
                        println!("            ! {}", field.value);
                    }
                }
                Err(why) => println!("{:>5}       {why}", frame.index),
            }
        }
    }
    Ok(())
}
