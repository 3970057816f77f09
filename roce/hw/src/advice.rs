//! Advice for errors whose cause is outside of the program.

use std::{io, path::Path};

use roce_verbs::provider::VerbsError;

use crate::sys::NODES;

pub(crate) fn failed(context: impl Into<String>, source: io::Error) -> VerbsError {
    VerbsError::Io {
        context: context.into(),
        source,
    }
}

/// Explains that none of the `wanted` devices exists, or no device at all if none is named. `there`: the devices that libibverbs lists.
pub(crate) fn no_device(wanted: &[String], there: &[String]) -> VerbsError {
    VerbsError::Address(lacking(wanted, there, Path::new(NODES).exists()))
}

fn lacking(wanted: &[String], there: &[String], has_files: bool) -> String {
    let names = wanted.join(" or ");
    let none = match wanted {
        [] => "no RDMA device".to_owned(),
        _ => format!("no RDMA device is called {names}"),
    };
    if !there.is_empty() {
        return format!("{none}; this host has {}", there.join(", "));
    }
    let found = match has_files {
        true => "libibverbs lists no device".to_owned(),
        false => format!("libibverbs lists no device and there is no {NODES}"),
    };
    format!(
        "{none}: {found}. The driver of the adapter and the module ib_uverbs have to be loaded, and the adapter's library installed \
         (Debian: ibverbs-providers). `rdma link` shows the devices of the kernel; `rdma link add rxe0 type rxe netdev ETH` makes one \
         in software"
    )
}

pub(crate) fn no_list(e: io::Error) -> VerbsError {
    failed(
        "listing the RDMA devices (is the module ib_uverbs loaded? `modprobe ib_uverbs`)",
        e,
    )
}

pub(crate) fn not_opened(name: &str, file: &str, e: io::Error) -> VerbsError {
    let hint = match e.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            format!(
                ": this user may not use {file}; it is usually open to all (`chmod a+rw {file}`, or a rule of udev), in containers \
                     it has to be passed in"
            )
        }
        Some(libc::ENOENT) => format!(": there is no {file}; is the module ib_uverbs loaded?"),
        _ => String::new(),
    };
    failed(format!("opening the RDMA device {name}{hint}"), e)
}

pub(crate) fn no_cm(e: io::Error) -> VerbsError {
    let hint = match e.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV) => ": there is no /dev/infiniband/rdma_cm; load it with `modprobe rdma_ucm`",
        Some(libc::EACCES | libc::EPERM) => ": this user may not use /dev/infiniband/rdma_cm",
        _ => "",
    };
    failed(format!("opening the connection manager{hint}"), e)
}

/// Formats a size with its unit.
fn size(bytes: u64) -> String {
    match bytes {
        n if n >= 1 << 20 => format!("{} MiB", n >> 20),
        n if n >= 1 << 10 => format!("{} KiB", n >> 10),
        n => format!("{n} bytes"),
    }
}

pub(crate) fn not_registered(name: &str, bytes: usize, e: io::Error) -> VerbsError {
    let lockable = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    not_registered_of(name, bytes, lockable, e)
}

fn not_registered_of(name: &str, bytes: usize, lockable: Option<u64>, e: io::Error) -> VerbsError {
    let what = format!("registering {} with {name}", size(bytes as u64));
    let pinned = matches!(e.raw_os_error(), Some(libc::ENOMEM | libc::EAGAIN));
    match lockable.filter(|_| pinned) {
        Some(limit) => failed(
            format!(
                "{what}: the process may lock {} of memory in all, which registered memory counts against. Raise that with `ulimit -l \
                 unlimited`, for good in /etc/security/limits.conf (memlock), or with LimitMEMLOCK=infinity in a service of systemd",
                size(limit)
            ),
            e,
        ),
        None => failed(what, e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn os(code: i32) -> io::Error {
        io::Error::from_raw_os_error(code)
    }

    #[test]
    fn a_limit_of_locked_memory_is_told_with_what_to_do() {
        let text = |lockable, code| not_registered_of("rxe0", 1 << 26, lockable, os(code)).to_string();
        let told = text(Some(1 << 16), libc::ENOMEM);
        for part in [
            "64 MiB with rxe0",
            "64 KiB of memory",
            "ulimit -l",
            "limits.conf",
            "LimitMEMLOCK",
        ] {
            assert!(told.contains(part), "{told}");
        }
        // Without a limit, or for another reason, it is not the limit's fault.
        assert!(!text(None, libc::ENOMEM).contains("ulimit"));
        assert!(!text(Some(1 << 16), libc::EINVAL).contains("ulimit"));
    }

    #[test]
    fn who_may_not_open_a_device_is_told_its_file() {
        let told = not_opened("mlx5_0", "/dev/infiniband/uverbs0", os(libc::EACCES)).to_string();
        assert!(
            told.contains("mlx5_0") && told.contains("chmod a+rw /dev/infiniband/uverbs0"),
            "{told}"
        );
        assert!(no_cm(os(libc::ENOENT)).to_string().contains("modprobe rdma_ucm"));
    }

    #[test]
    fn a_missing_device_is_told_with_those_that_exist() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let wanted = names(&["mlx5_7"]);
        assert_eq!(
            lacking(&wanted, &names(&["rxe0", "mlx5_0"]), true),
            "no RDMA device is called mlx5_7; this host has rxe0, mlx5_0"
        );
        let told = lacking(&wanted, &[], true);
        assert!(
            told.starts_with("no RDMA device is called mlx5_7: libibverbs lists no device. "),
            "{told}"
        );
        let told = lacking(&[], &[], false);
        assert!(
            told.starts_with("no RDMA device: libibverbs lists no device and there is no /dev/infiniband. "),
            "{told}"
        );
        assert!(told.contains("rdma link add"), "{told}");
    }
}
