//! The kernel's table of Unix sockets (`/proc/net/unix`).

use std::{fs, io};

/// Flag of a listening socket (`__SO_ACCEPTCON` of `linux/net.h`).
const LISTENS: u32 = 1 << 16;

/// Reads the table of this network namespace. Names may be no UTF-8.
pub(crate) fn read() -> io::Result<String> {
    Ok(String::from_utf8_lossy(&fs::read("/proc/net/unix")?).into_owned())
}

/// Returns inodes and paths of the sockets that listen. Lines are: Num RefCount Protocol Flags Type St Inode Path. Paths with spaces are
/// left out.
pub(crate) fn listening(table: &str) -> impl Iterator<Item = (u64, &str)> {
    table.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let [_, _, _, flags, _, _, inode, path] = *fields else {
            return None;
        };
        let listens = u32::from_str_radix(flags, 16).ok()? & LISTENS != 0;
        listens.then_some((inode.parse().ok()?, path))
    })
}
