//! LNet without the kernel's modules: one program offers memory, another one writes and reads it.
//!
//! ```text
//! transfer serve 192.0.2.1@o2ib
//! transfer call 192.0.2.2@o2ib 192.0.2.1@o2ib some words
//! ```

use std::{error::Error, io::Write};

use lnet_host::{Buffer, Entry, EntryOptions, Get, LnetNode, Nid, NodeOptions, Put};

/// Portal and match bits, of which both sides know.
const PORTAL: u32 = 60;
const MATCH_BITS: u64 = 7;
/// Bytes that are offered.
const LEN: usize = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["serve", own] => serve(own.parse()?),
        ["call", own, peer, ref words @ ..] => call(own.parse()?, peer.parse()?, &words.join(" ")),
        _ => Err("usage: transfer serve NID | transfer call NID PEER WORD...".into()),
    }
}

/// Offers memory, and prints what is written there.
fn serve(own: Nid) -> Result<(), Box<dyn Error>> {
    let node = LnetNode::open(NodeOptions::new(own))?;
    let memory = Buffer::allocate(LEN).ok_or("no memory")?;
    let attached = node.attach(Entry {
        portal: PORTAL,
        from: None,
        match_bits: MATCH_BITS,
        ignore_bits: 0,
        options: EntryOptions::PUT | EntryOptions::GET | EntryOptions::MANAGE_REMOTE,
        memory: memory.clone(),
        uses: None,
    })?;
    println!("{own} offers {LEN} bytes");
    std::io::stdout().flush()?;
    while let Some(event) = attached.next()? {
        let (from, len) = (event.served.from, event.result?);
        match event.served.is_put {
            true => {
                let written = memory.part(event.served.offset, len as usize).ok_or("outside")?;
                println!("{from} wrote: {}", String::from_utf8_lossy(&written.to_vec()));
            }
            false => println!("{from} read {len} bytes"),
        }
    }
    Ok(())
}

fn call(own: Nid, peer: Nid, text: &str) -> Result<(), Box<dyn Error>> {
    let node = LnetNode::open(NodeOptions::new(own))?;
    let source = Buffer::allocate(text.len()).ok_or("no words")?;
    source.write(text.as_bytes());
    let put = Put {
        peer,
        portal: PORTAL,
        match_bits: MATCH_BITS,
        hdr_data: 0,
        offset: 100,
        source,
        // Else nobody knows whether the peer offers such memory.
        ack: true,
    };
    println!("{} bytes written", node.put(&put)?.wait()?);
    let sink = Buffer::allocate(text.len()).ok_or("no words")?;
    let get = Get {
        peer,
        portal: PORTAL,
        match_bits: MATCH_BITS,
        offset: 100,
        sink: sink.clone(),
    };
    node.get(&get)?.wait()?;
    println!("read back: {}", String::from_utf8_lossy(&sink.to_vec()));
    Ok(())
}
