//! `ferroce run`: programs written for libibverbs and librdmacm, over our stack.

mod capture;
mod elf;
mod tree;

use std::{
    ffi::{OsStr, OsString},
    io,
    os::unix::{ffi::OsStrExt, fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf, absolute},
    process::Command,
};

use clap::{Args, ValueHint};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use roce::{DatapathKind, Mtu, SpinMode, environment, gids, iface, names::DeviceNames};

use crate::{
    LOG_VARIABLE,
    fault::FaultArgs,
    names::{Host, Resolver},
    output::Failure,
    ring::RingArgs,
    units,
};

/// The library that takes the place of libibverbs and librdmacm.
const LIBRARY: &str = "libferroce_verbs.so";
/// Variable for the library's path, if it is in an unusual place.
const SHIM_VARIABLE: &str = "FERROCE_SHIM";
const ADDR_VARIABLE: &str = "FERROCE_ADDR";
const DATAPATH_VARIABLE: &str = "FERROCE_DATAPATH";
const MTU_VARIABLE: &str = "FERROCE_MTU";
const RATE_VARIABLE: &str = "FERROCE_UNRELIABLE_RATE";
const SHARDS_VARIABLE: &str = "FERROCE_SHARDS";
const SPIN_VARIABLE: &str = "FERROCE_SPIN";
const PCAP_VARIABLE: &str = "FERROCE_PCAP";
const RING_VARIABLE: &str = "FERROCE_PCAP_RING";
const RING_ON_VARIABLE: &str = "FERROCE_PCAP_ON";
/// Names of devices.
pub(crate) const DEVICE_NAME_VARIABLE: &str = "FERROCE_DEVICE_NAME";
const FAULT_VARIABLE: &str = "FERROCE_FAULT";
const BROKER_VARIABLE: &str = "FERROCE_BROKER";
const SYS_VARIABLE: &str = "FERROCE_SYS";
const PRELOAD: &str = "LD_PRELOAD";
/// Options of ThreadSanitizer, of which later ones win.
const TSAN_OPTIONS: &str = "TSAN_OPTIONS";
/// Variable for the dynamic linker's first search path.
const SEARCH: &str = "LD_LIBRARY_PATH";
/// A file of the directory with which the library is found as libibverbs, by programs that ask the dynamic linker for that.
const STUB: &str = "libibverbs.so.1";

#[derive(Args)]
#[command(after_help = "\
Examples:
  ferroce run -- ibv_devinfo
  ferroce run -- ib_write_bw
  ferroce run --addr 192.0.2.7 --mtu 1024 -- rping -s -v
  ferroce run --device-name mlx5_0 -- ib_write_bw -d mlx5_0
  ferroce run -v -- ibv_rc_pingpong -g 0 192.0.2.8
  ferroce run -- rnbd list
  ferroce run --fault loss=1%,seed=7 -- ib_write_bw 192.0.2.8
  ferroce run --pcap /tmp/wire-%p.pcap -- ibv_rc_pingpong -g 0 192.0.2.8

The program, and what it starts in turn, uses ferroce instead of RDMA hardware: one device for each interface that is up and \
has an address (ferroce0, ferroce1, …), whose GIDs are the interface's addresses. Interfaces that lead to other hosts come first, \
then lo, last interfaces without a link. A program that names no device gets the first. `ferroce link` lists them; \
`rdma link` of iproute2 does not, as it asks the kernel.

With -v, one line on standard error says why a verb failed, a work request completed with an error, a queue pair failed (on \
both sides: what the peer asked for, and how far it was beyond the region), or RDMA_CM reported an error.

The library is preloaded (LD_PRELOAD), and found as libibverbs.so.1 and librdmacm.so.1 (LD_LIBRARY_PATH); for most programs either \
is enough. A program that is built with AddressSanitizer or ThreadSanitizer, whose runtime must be loaded first, gets the second alone. \
No privilege is needed. Any number of processes share the addresses through a small broker, which the first one starts and which exits \
after the last (`ferroce stat` lists them). `ferroce daemon`, `serve` and `map` share them, too.

Tools for rtrs and rnbd of Linux find what `ferroce serve`, `map` and `daemon` have mounted with --sysfs: paths below /sys/class/rnbd-client, \
rnbd-server, rtrs-client and rtrs-server, /sys/module/rnbd_server and rtrs_server, and /sys/block/DEVICE lead there. The mount point is that \
of the process behind the control socket ($FERROCE_CONTROL, or a daemon's), else /run/ferroce-daemon/sys or $XDG_RUNTIME_DIR/ferroce/sys.

Environment, also of programs that load the library without `ferroce run`. Programs with more rights than their user (set-uid, \
capabilities) ignore it:
  FERROCE_SHIM        path of libferroce_verbs.so; default: next to this program
  FERROCE_ADDR        addresses to use, separated by commas; default: all (--addr)
  FERROCE_DATAPATH    sockets that carry packets: udp, raw, packet or packet,vlan=ID (--datapath)
  FERROCE_DEVICE_NAME names of devices, separated by commas (--device-name)
  FERROCE_LOG         log level on standard error: error (default), warn, info (-v), debug (-vv),
                      trace (-vvv), or by part, such as `roce_port=trace,info`
  FERROCE_MTU         largest path MTU: 256, 512, 1024, 2048, 4096 (--mtu)
  FERROCE_UNRELIABLE_RATE
                      bytes per second of UC and UD towards one peer, or `off` (--unreliable-rate)
  FERROCE_SHARDS      shards of each device, 1 to 64 (--shards)
  FERROCE_SPIN        longest busy polling before sleeping: microseconds, `auto` or `off` (--spin)
  FERROCE_PCAP        capture file; %p stands for the process id (--pcap). If the file exists, it
                      is another process's: FILE.PID is written instead, and reported
  FERROCE_PCAP_RING   bytes of memory for the last packets, and with a comma behind it a file
                      to write them to (--pcap-ring)
  FERROCE_PCAP_ON     `bad`: write them when something goes wrong (--pcap-on)
  FERROCE_FAULT       rules of injected faults, separated by `;` (--fault)
  FERROCE_SYS         where attributes are mounted (`ferroce map --sysfs`)
  FERROCE_BROKER      the program to start as broker; `off`: use addresses exclusively
  FERROCE_BROKER_DIR  directory of the broker's socket; default: one for each network namespace
                      in $XDG_RUNTIME_DIR/ferroce or /tmp/ferroce-UID, or /run/ferroce if a
                      system broker runs

Exit status: the program's; 126 if it can't be run, 127 if it isn't found, 1 or 2 if ferroce fails")]
pub(crate) struct RunArgs {
    /// Address or name of this host for devices. Repeat it for several addresses [default: all addresses]
    #[arg(long, value_name = "HOST")]
    addr: Vec<Host>,
    /// Name of the first device, or of an interface's device, for scripts that hard-code one (mlx5_0). Repeat it, or separate names by
    /// commas, for several devices [default: ferroce0, ferroce1, …]
    #[arg(long, value_name = "[INTERFACE=]NAME")]
    device_name: Vec<DeviceNames>,
    /// Sockets that carry packets: `udp`, which needs no privilege; `raw`, raw IP; or `packet`, Ethernet frames of the interface that has the
    /// only --addr, with `packet,vlan=ID` in that VLAN. `raw` and `packet` need CAP_NET_RAW, and the first process has the addresses for
    /// itself [default: udp]
    #[arg(long, value_name = "udp|raw|packet[,vlan=ID]")]
    datapath: Option<DatapathKind>,
    /// Largest path MTU: 256, 512, 1024, 2048 or 4096 [default: the largest that the interface carries]
    #[arg(long, value_name = "BYTES")]
    mtu: Option<Mtu>,
    /// Most bytes per second of UC and UD towards one peer, or `off` for no limit. UC and UD have no flow control: what arrives faster than
    /// the receiver's process reads its socket is lost [default: 256M]
    #[arg(long, value_name = "BYTES", value_parser = rate)]
    unreliable_rate: Option<String>,
    /// Shards of each device, each with a socket, a lock and a thread, for programs with several busy threads. RC queue pairs are
    /// distributed over them; those of one completion queue without a channel stay together, as the thread that polls it drives them
    /// [default: 1]
    #[arg(long, value_name = "1..64", value_parser = units::shards)]
    shards: Option<usize>,
    /// Longest busy polling of each shard's thread before it sleeps, where the program doesn't poll itself: microseconds, `off`, or
    /// `auto`: 50 while that finds more packets, and off on a single processor [default: auto]
    #[arg(long, value_name = "US|auto|off")]
    spin: Option<SpinMode>,
    /// Write every packet to this file, which only its owner may read. The first process that uses a device writes it; others
    /// write FILE.PID, and report that. `%p` stands for the process id
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    #[command(flatten)]
    ring: RingArgs,
    #[command(flatten)]
    fault: FaultArgs,
    /// The program and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        value_name = "PROGRAM",
        value_hint = ValueHint::CommandWithArguments
    )]
    command: Vec<OsString>,
}

/// Becomes the program. `level` is what it logs, if -v asks for that.
pub(crate) fn run(args: &RunArgs, level: Option<&str>) -> Result<(), Failure> {
    let addrs = addresses(&args.addr)?;
    let (program, rest) = args
        .command
        .split_first()
        .ok_or_else(|| Failure::usage("no program is given"))?;
    let mut command = Command::new(program);
    command.args(rest);
    let file = elf::find(program);
    add_library(&mut command, file.as_deref())?;
    add_settings(&mut command, args, addrs, level)?;
    if let Some(path) = file {
        elf::check(&path).map_err(|e| Failure::with_status(126, e))?;
    }
    unlimit_locked_memory();
    point_to_link(program);
    let e = command.exec();
    let name = program.to_string_lossy();
    Err(match e.kind() {
        io::ErrorKind::NotFound => Failure::with_status(127, format!("{name}: there is no such program")),
        _ => Failure::with_status(126, format!("{name} can't be run: {e}")),
    })
}

/// Has the dynamic linker find our library. Programs that bring a copy of libibverbs have what is preloaded, those that look for
/// one by name have the directory.
fn add_library(command: &mut Command, program: Option<&Path>) -> Result<(), Failure> {
    let shim = find_shim()?;
    let dir = find_directory(&shim);
    if let Some(dir) = &dir {
        command.env(SEARCH, search(dir, std::env::var_os(SEARCH).as_deref())?);
    }
    match (program.and_then(elf::sanitizer), dir) {
        // Its runtime ends the program unless it is loaded first, and takes for data races what it does not see synchronized.
        (Some(sanitizer), Some(_)) => {
            tracing::info!("the program has {sanitizer}: nothing is preloaded, {SEARCH} has the library");
            let given = std::env::var_os(TSAN_OPTIONS).unwrap_or_default();
            let options = [OsStr::new("ignore_noninstrumented_modules=1"), &given];
            command.env(TSAN_OPTIONS, options.join(OsStr::new(":")));
        }
        (Some(sanitizer), None) => {
            return Err(Failure::failed(format!(
                "the program has {sanitizer}, with which nothing can be preloaded, and {STUB} is not beside {}",
                shim.display()
            )));
        }
        (None, found) => {
            if found.is_none() {
                tracing::warn!(
                    "{STUB} is not beside {}: programs that load it by name will find no device",
                    shim.display()
                );
            }
            command.env(PRELOAD, preload(&shim, std::env::var_os(PRELOAD).as_deref())?);
        }
    }
    Ok(())
}

/// Gives the library the settings of the command line.
fn add_settings(command: &mut Command, args: &RunArgs, addrs: String, level: Option<&str>) -> Result<(), Failure> {
    if let Some(level) = level
        && environment::var_os(LOG_VARIABLE).is_none()
    {
        command.env(LOG_VARIABLE, level);
    }
    let [ring, ring_on] = args.ring.texts()?;
    let given = [
        (RING_VARIABLE, ring),
        (RING_ON_VARIABLE, ring_on),
        (DEVICE_NAME_VARIABLE, Some(device_names(&args.device_name)?)),
        (ADDR_VARIABLE, Some(addrs)),
        (DATAPATH_VARIABLE, args.datapath.map(|datapath| datapath.to_string())),
        (MTU_VARIABLE, args.mtu.map(|mtu| mtu.bytes().to_string())),
        (RATE_VARIABLE, args.unreliable_rate.clone()),
        (SHARDS_VARIABLE, args.shards.map(|shards| shards.to_string())),
        (SPIN_VARIABLE, args.spin.map(|spin| spin.to_string())),
        (FAULT_VARIABLE, args.fault.text()),
    ];
    for (name, value) in given {
        command.envs(value.filter(|value| !value.is_empty()).map(|value| (name, value)));
    }
    if let Some(file) = &args.pcap {
        // The program may change its directory.
        let file = absolute(file).map_err(|e| Failure::usage(format!("{}: {e}", file.display())))?;
        let folder = file.parent().filter(|folder| !folder.to_string_lossy().contains("%p"));
        if let Some(missing) = folder.filter(|folder| !folder.is_dir()) {
            return Err(Failure::usage(format!(
                "--pcap: there is no folder {}",
                missing.display()
            )));
        }
        command.env(PCAP_VARIABLE, capture::prepare(file));
    }
    if environment::var_os(BROKER_VARIABLE).is_none()
        && let Ok(own) = std::env::current_exe()
    {
        command.env(BROKER_VARIABLE, own);
    }
    if environment::var_os(SYS_VARIABLE).is_none()
        && let Some(dir) = tree::find()
    {
        command.env(SYS_VARIABLE, dir);
    }
    Ok(())
}

/// Says where devices are shown if the program is iproute2's `rdma`.
fn point_to_link(program: &OsStr) {
    if Path::new(program).file_name() == Some(OsStr::new("rdma")) {
        eprintln!(
            "ferroce: `rdma` asks the kernel, which does not know the devices of ferroce: `ferroce link` shows them, `ferroce stat` \
             their counters"
        );
    }
}

/// Names of devices as the library reads them.
fn device_names(given: &[DeviceNames]) -> Result<String, Failure> {
    let mut all = DeviceNames::default();
    for names in given {
        all.add(names.clone()).map_err(Failure::usage)?;
    }
    for interface in all.interfaces() {
        if iface::mtu_of(interface).is_err() {
            return Err(Failure::usage(format!(
                "--device-name: there is no interface {interface}; devices are made of {}",
                interfaces()
            )));
        }
    }
    Ok(all.to_list())
}

/// Names of the interfaces that devices are made of, for messages.
fn interfaces() -> String {
    let all = iface::interfaces().unwrap_or_default();
    let names = gids::device_names(&all);
    match names.is_empty() {
        true => "interfaces that are up and have an address, and there is none".to_owned(),
        false => names.join(", "),
    }
}

/// Finds the library: as the environment says, beside this program, where packages put it, or where cargo does.
fn find_shim() -> Result<PathBuf, Failure> {
    if let Some(given) = environment::var_os(SHIM_VARIABLE) {
        let given = absolute(&given).map_err(|e| Failure::usage(format!("{SHIM_VARIABLE}: {e}")))?;
        return match given.is_file() {
            true => Ok(given),
            false => Err(Failure::usage(format!(
                "{SHIM_VARIABLE}={}: there is no such file",
                given.display()
            ))),
        };
    }
    let own = std::env::current_exe().and_then(|p| p.canonicalize());
    let own = own.map_err(|e| Failure::failed(format!("can't find out where this program is: {e}")))?;
    let dir = own.parent().unwrap_or(Path::new("/"));
    let places = [".", "../lib/ferroce", "../lib", "deps"];
    let found = places.iter().map(|p| dir.join(p).join(LIBRARY)).find(|p| p.is_file());
    found.and_then(|p| p.canonicalize().ok()).ok_or_else(|| {
        Failure::failed(format!(
            "{LIBRARY} is not beside this program ({}), nor in ../lib: build it (`cargo build -p verbs-shim`) or set \
             {SHIM_VARIABLE}",
            dir.display()
        ))
    })
}

/// The directory of the three libraries.
pub(crate) fn libraries() -> Result<PathBuf, Failure> {
    let shim = find_shim()?;
    find_directory(&shim).ok_or_else(|| Failure::failed(format!("{STUB} is not beside {}", shim.display())))
}

/// The directory of libibverbs.so.1 and librdmacm.so.1 that belong to a library: its own when it is installed, or the one
/// that cargo's build makes.
fn find_directory(shim: &Path) -> Option<PathBuf> {
    let dir = shim.parent()?;
    let places = [".", "ferroce", "lib/ferroce", "../lib/ferroce"];
    let found = places.iter().map(|p| dir.join(p)).find(|p| p.join(STUB).is_file());
    found.and_then(|p| p.canonicalize().ok())
}

/// Our directory first, then where libraries were to be looked for anyway.
fn search(dir: &Path, present: Option<&OsStr>) -> Result<OsString, Failure> {
    let name = dir.as_os_str();
    if name.as_bytes().iter().any(|b| b":;".contains(b)) {
        return Err(Failure::failed(format!(
            "the dynamic linker can't look for libraries in {}: its path must have no colons and semicolons",
            dir.display()
        )));
    }
    let mut out = name.to_owned();
    // An empty part is the directory that the program runs in; an empty variable is nothing.
    let others = present.filter(|p| !p.is_empty()).map(OsStr::as_bytes);
    for other in others.into_iter().flat_map(|p| p.split(|b| b":;".contains(b))) {
        if other != name.as_bytes() {
            out.push(":");
            out.push(OsStr::from_bytes(other));
        }
    }
    Ok(out)
}

/// Our library first, then what was to be preloaded anyway; the other way around if that has the runtime of a sanitizer, which must
/// be first.
fn preload(shim: &Path, present: Option<&OsStr>) -> Result<OsString, Failure> {
    let name = shim.as_os_str();
    if name.as_bytes().iter().any(|b| b": \t\n".contains(b)) {
        return Err(Failure::failed(format!(
            "the dynamic linker can't preload {}: its path must have no spaces and colons",
            shim.display()
        )));
    }
    // A program under `ferroce run` may be `ferroce run`.
    let others = present.unwrap_or_default().as_bytes().split(|b| b": \t\n".contains(b));
    let mut all: Vec<&OsStr> = others
        .filter(|o| !o.is_empty() && *o != name.as_bytes())
        .map(OsStr::from_bytes)
        .collect();
    let is_first = all.iter().any(|other| elf::is_sanitizer_runtime(other));
    all.insert(if is_first { all.len() } else { 0 }, name);
    Ok(all.join(OsStr::new(":")))
}

fn addresses(hosts: &[Host]) -> Result<String, Failure> {
    let resolver = Resolver::default();
    let mut all = Vec::new();
    for host in hosts {
        let addr = resolver.own_addr(host)?;
        if !addr.is_unspecified() && iface::interface_of(addr).is_err() {
            return Err(Failure::usage(format!(
                "{addr} is not an address of this host (`ip addr` lists them)"
            )));
        }
        all.push(addr.to_string());
    }
    Ok(all.join(","))
}

/// A rate as the library reads it.
fn rate(text: &str) -> Result<String, String> {
    match text {
        "off" => Ok(text.into()),
        _ => match units::size(text)? {
            0 => Err("a rate of 0 would send nothing; `off` is for no limit".into()),
            bytes => Ok(bytes.to_string()),
        },
    }
}

/// Nothing is locked in memory here, but programs look at the limit before they register memory.
fn unlimit_locked_memory() {
    let raised =
        getrlimit(Resource::RLIMIT_MEMLOCK).and_then(|(_, hard)| setrlimit(Resource::RLIMIT_MEMLOCK, hard, hard));
    if let Err(e) = raised {
        tracing::debug!("the limit of locked memory stays as it is: {e}");
    }
}

/// Whether a file can be run.
fn is_program(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_preloaded_stays() {
        let shim = Path::new("/x/libferroce_verbs.so");
        let list = |present: Option<&str>| preload(shim, present.map(OsStr::new)).unwrap().into_string().unwrap();
        assert_eq!(list(None), "/x/libferroce_verbs.so");
        assert_eq!(list(Some("")), "/x/libferroce_verbs.so");
        assert_eq!(
            list(Some("/a.so:b.so /c.so")),
            "/x/libferroce_verbs.so:/a.so:b.so:/c.so"
        );
        assert_eq!(
            list(Some("/a.so:/x/libferroce_verbs.so")),
            "/x/libferroce_verbs.so:/a.so",
            "not twice"
        );
        assert_eq!(
            list(Some("/usr/lib/libasan.so.8:/c.so")),
            "/usr/lib/libasan.so.8:/c.so:/x/libferroce_verbs.so",
            "a sanitizer's runtime is first"
        );
        assert!(preload(Path::new("/with space/l.so"), None).is_err());
    }

    #[test]
    fn where_libraries_are_looked_for_stays() {
        let dir = Path::new("/x/lib/ferroce");
        let list = |present: Option<&str>| search(dir, present.map(OsStr::new)).unwrap().into_string().unwrap();
        assert_eq!(list(None), "/x/lib/ferroce");
        assert_eq!(list(Some("")), "/x/lib/ferroce");
        assert_eq!(list(Some("/a:/with space;/b")), "/x/lib/ferroce:/a:/with space:/b");
        assert_eq!(list(Some("/a:")), "/x/lib/ferroce:/a:", "the current directory");
        assert_eq!(list(Some("/x/lib/ferroce:/a")), "/x/lib/ferroce:/a", "not twice");
        assert!(search(Path::new("/a:b"), None).is_err());
    }

    #[test]
    fn the_directory_is_found_in_an_installation_and_in_a_build_tree() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let dir = root.join("lib/ferroce");
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::create_dir_all(root.join("deps")).unwrap();
        let shims = ["lib/ferroce", "lib", ".", "deps"].map(|d| root.join(d).join(LIBRARY));
        assert!(shims.iter().all(|shim| find_directory(shim).is_none()));
        std::fs::write(dir.join(STUB), "").unwrap();
        for shim in shims {
            assert_eq!(find_directory(&shim).as_ref(), Some(&dir), "{}", shim.display());
        }
    }

    #[test]
    fn arguments_that_make_no_sense_are_refused() {
        assert!(addresses(&["192.0.2.1".parse().unwrap()]).is_err());
        assert_eq!(
            addresses(&["127.0.0.1", "::"].map(|host| host.parse().unwrap())).unwrap(),
            "127.0.0.1,::"
        );
        let names = |all: &[&str]| device_names(&all.iter().map(|text| text.parse().unwrap()).collect::<Vec<_>>());
        assert_eq!(names(&["mlx5_0", "lo=rxe0"]).unwrap(), "mlx5_0,lo=rxe0");
        assert!(names(&["a", "a"]).is_err() && names(&["no-such-interface=a"]).is_err());
        assert_eq!(rate("off").as_deref(), Ok("off"));
        assert_eq!(rate("1G").as_deref(), Ok("1073741824"));
        assert!(rate("0").is_err());
        assert!(rate("fast").is_err());
    }
}
