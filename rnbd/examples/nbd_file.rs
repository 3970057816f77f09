//! Serves an image file or block device on a unix socket, without a network:
//!
//! ```sh
//! cargo run --release -p rnbd --example nbd_file -- disk.img /tmp/disk.sock
//! qemu-img info 'nbd+unix:///?socket=/tmp/disk.sock'
//! ```

use std::{error::Error, path::Path, sync::Arc};

use rnbd::{
    backend::{Image, LocalDevice, Pool},
    nbd::{NbdConfig, NbdServer},
};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let [_, image, socket] = &args[..] else {
        return Err("usage: nbd_file IMAGE SOCKET".into());
    };
    let pool = Arc::new(Pool::new(Pool::default_threads())?);
    let device = LocalDevice::new(Image::open(Path::new(image), true)?, pool);
    let server = NbdServer::start(NbdConfig::new(socket, Arc::new(device)))?;
    println!("serving {image} on {socket}");
    server.wait();
    Ok(())
}
