//! Copies a device of a server to a file, with several threads.
//!
//! `cargo run -p rnbd-client --example copy -- 192.0.2.7 copy disk disk.img`: server, session, device, file.

use std::{env, error::Error, fs::File, os::unix::fs::FileExt, thread};

use rnbd_client::DiskOptions;

/// Bytes of a read.
const STEP: usize = 1 << 20;
const THREADS: u64 = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [server, session, device, file] = &args[..] else {
        return Err("usage: copy SERVER SESSION DEVICE FILE".into());
    };
    let disk = DiskOptions::new(server.parse()?, session, device).read_only().open()?;
    let file = File::create(file)?;
    file.set_len(disk.size())?;
    let (disk, file) = (&disk, &file);
    let part = |n: u64| -> std::io::Result<()> {
        let mut at = n * STEP as u64;
        let mut buffer = vec![0; STEP];
        while at < disk.size() {
            let len = (disk.size() - at).min(STEP as u64) as usize;
            disk.read_at(&mut buffer[..len], at)?;
            file.write_all_at(&buffer[..len], at)?;
            at += THREADS * STEP as u64;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|n| scope.spawn(move || part(n))).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().expect("no panic"))
    })?;
    disk.clone().close()?;
    file.sync_all()?;
    Ok(())
}
