//! Real NBD clients against the server: qemu-img, qemu-io, nbdinfo, nbdcopy, libnbd's Python binding, fio.
//!
//! They need those programs, so they are ignored by default. To run them (Debian: `apt-get install qemu-utils
//! libnbd-bin python3-libnbd fio`):
//!
//! ```sh
//! cargo test -p rnbd-host --test it nbd_tools -- --include-ignored
//! ```

use std::{fs, os::unix::fs::MetadataExt, process::Command};

use crate::common::{Lab, MIB, Mapped, Served, serve, serve_sparse};
use rnbd::proto::AccessMode;

/// Runs a program that must succeed, and returns what it prints.
fn run(program: &str, args: &[&str]) -> String {
    let out = Command::new(program)
        .args(args)
        .output()
        .unwrap_or_else(|e| panic!("{program}: {e}"));
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{program} {args:?}: {text}");
    text
}

fn uri(s: &Served) -> String {
    format!("nbd+unix:///?socket={}", s.socket.display())
}

/// A device that can be written, and a read-only one behind it, in one session.
fn two_devices(lab: &Lab) -> Mapped {
    let mut config = lab.config("several", "disk");
    let read_only = lab.config_for("several", "ro", AccessMode::ReadOnly);
    config.devices.extend(read_only.devices);
    lab.try_map(config).unwrap()
}

#[test]
#[ignore = "needs nbdinfo"]
fn nbdinfo_reads_the_export() {
    let s = serve(8 * MIB, true);
    let text = run("nbdinfo", &[&uri(&s)]);
    for want in [
        "export-size: 8388608",
        "can_flush: true",
        "can_fua: true",
        "can_trim: true",
        "can_zero: true",
        "can_multi_conn: true",
        "is_read_only: false",
        "block_size_minimum: 512",
        "using structured packets",
        "base:allocation",
        "can_cache: true",
        "can_df: true",
        "can_fast_zero: true",
    ] {
        assert!(text.contains(want), "{want} in {text}");
    }
    run("nbdinfo", &["--list", &uri(&s)]);
}

#[test]
#[ignore = "needs nbdinfo"]
fn nbdinfo_lists_all_devices_of_a_session() {
    let lab = Lab::new();
    let map = two_devices(&lab);
    let socket = map.socket.display();
    let text = run("nbdinfo", &["--list", &format!("nbd+unix:///?socket={socket}")]);
    let at = ["export=\"disk\":", "export=\"ro\":"].map(|export| text.find(export).unwrap_or_else(|| panic!("{text}")));
    assert!(at[0] < at[1], "{text}");
    assert!(
        text[..at[1]].contains("is_read_only: false") && text[at[1]..].contains("is_read_only: true"),
        "{text}"
    );
    let text = run("nbdinfo", &[&format!("nbd+unix:///ro?socket={socket}")]);
    assert!(text.contains("is_read_only: true"), "{text}");
    map.end().unwrap();
}

#[test]
#[ignore = "needs Debian's python3-libnbd"]
fn libnbd_finds_what_its_tests_ask_of_a_server() {
    let lab = Lab::new();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/nbdsh.py");
    let map = two_devices(&lab);
    // The system's Python: another one that comes first in PATH would not find the package.
    let text = run("/usr/bin/python3", &[script, map.socket.to_str().unwrap()]);
    assert_eq!(text, "done\n");
    map.end().unwrap();
}

#[test]
#[ignore = "needs nbdinfo"]
fn nbdinfo_maps_the_export() {
    let s = serve(8 * MIB, true);
    let text = run("nbdinfo", &["--map", &uri(&s)]);
    let extent: Vec<_> = text.split_whitespace().collect();
    assert_eq!(extent, ["0", "8388608", "0", "data"]);
}

#[test]
#[ignore = "needs nbdinfo and qemu-img"]
fn holes_of_the_servers_image_are_seen() {
    for writable in [true, false] {
        let s = serve_sparse(writable);
        let text = run("nbdinfo", &["--map", &uri(&s)]);
        let rows: Vec<Vec<_>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            rows,
            [
                ["0", "8388608", "3", "hole,zero"],
                ["8388608", "1048576", "0", "data"],
                ["9437184", "56623104", "3", "hole,zero"],
                ["66060288", "1048576", "0", "data"],
            ]
        );
        // QEMU asks for one extent at a time.
        let text = run("qemu-img", &["map", "--output=json", "-f", "raw", &uri(&s)]);
        let zero = text.matches("\"zero\": true, \"data\": false").count();
        let data = text.matches("\"zero\": false, \"data\": true").count();
        assert_eq!((zero, data), (2, 2), "{text}");
    }
}

#[test]
#[ignore = "needs nbdcopy"]
fn nbdcopy_leaves_holes_where_they_are() {
    let mut s = serve_sparse(true);
    let out = s.lab.dir.path().join("out");
    run("nbdcopy", &["--connections=4", &uri(&s), out.to_str().unwrap()]);
    assert!(fs::read(&out).unwrap() == fs::read(&s.image).unwrap());
    let blocks = fs::metadata(&out).unwrap().blocks();
    assert!((2 * MIB / 512..4 * MIB / 512).contains(&blocks), "{blocks} blocks");
    // What is not read is not asked for.
    let read = s.map.mapping.stats().device.read_bytes;
    assert!(read < 4 * MIB, "{read} bytes are read");
}

#[test]
#[ignore = "needs qemu-img"]
fn qemu_img_maps_the_export() {
    let s = serve(8 * MIB, true);
    let text = run("qemu-img", &["map", "--output=json", "-f", "raw", &uri(&s)]);
    for want in [
        "\"start\": 0",
        "\"length\": 8388608",
        "\"data\": true",
        "\"zero\": false",
    ] {
        assert!(text.contains(want), "{want} in {text}");
    }
}

#[test]
#[ignore = "needs nbdcopy"]
fn nbdcopy_copies_both_ways_with_several_connections() {
    let s = serve(64 * MIB, true);
    let out = s.lab.dir.path().join("out");
    run("nbdcopy", &["--connections=4", &uri(&s), out.to_str().unwrap()]);
    assert!(fs::read(&out).unwrap() == fs::read(&s.image).unwrap());
    let data: Vec<u8> = (0..64 * MIB)
        .map(|i| if i / MIB % 3 == 1 { 0 } else { (i * 7 % 255) as u8 })
        .collect();
    fs::write(&out, &data).unwrap();
    run(
        "nbdcopy",
        &["--flush", "--connections=4", out.to_str().unwrap(), &uri(&s)],
    );
    assert!(fs::read(&s.image).unwrap() == data);
}

#[test]
#[ignore = "needs qemu-img"]
fn qemu_img_converts_and_compares() {
    let s = serve(64 * MIB, true);
    let out = s.lab.dir.path().join("out.raw");
    let out = out.to_str().unwrap();
    run("qemu-img", &["convert", "-p", "-f", "raw", "-O", "raw", &uri(&s), out]);
    assert!(fs::read(out).unwrap() == fs::read(&s.image).unwrap());
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", out, &uri(&s)]);
    let mut data = fs::read(out).unwrap();
    data[MIB as usize..20 * MIB as usize].fill(0);
    data[30 * MIB as usize..][..4].copy_from_slice(b"here");
    fs::write(out, &data).unwrap();
    run(
        "qemu-img",
        &[
            "convert",
            "-n",
            "-W",
            "-m",
            "8",
            "-f",
            "raw",
            "-O",
            "raw",
            out,
            &uri(&s),
        ],
    );
    assert!(fs::read(&s.image).unwrap() == data);
}

#[test]
#[ignore = "needs qemu-io"]
fn qemu_io_commands() {
    let s = serve(16 * MIB, true);
    let text = run(
        "qemu-io",
        &[
            "-f",
            "raw",
            "-t",
            "none",
            &uri(&s),
            "-c",
            "write -P 0xab 1M 2M",
            "-c",
            "read -P 0xab 1M 2M",
            "-c",
            "write -f -P 0xcd 512 1536",
            "-c",
            "write -z -u 1M 1M",
            "-c",
            "read -P 0 1M 1M",
            "-c",
            "write -z 2M 64k",
            "-c",
            "discard 4M 1M",
            "-c",
            "read -P 0 4M 1M",
            "-c",
            "aio_write -P 1 8M 4M",
            "-c",
            "aio_write -P 2 12M 4M",
            "-c",
            "aio_flush",
            "-c",
            "read -P 1 8M 4M",
            "-c",
            "read -P 2 12M 4M",
            "-c",
            "flush",
        ],
    );
    assert!(!text.contains("failed") && !text.contains("rror"), "{text}");
    let all = fs::read(&s.image).unwrap();
    assert!(all[512..2048].iter().all(|b| *b == 0xcd));
    assert!(
        all[2 * MIB as usize + 65536..3 * MIB as usize]
            .iter()
            .all(|b| *b == 0xab)
    );
}

#[test]
#[ignore = "needs fio with the nbd engine"]
fn fio_verifies_random_writes() {
    let s = serve(64 * MIB, true);
    let uri = format!("--uri={}", uri(&s));
    let text = run(
        "fio",
        &[
            "--name=v",
            "--ioengine=nbd",
            &uri,
            "--rw=randwrite",
            "--bsrange=512-256k",
            "--size=64m",
            "--iodepth=32",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--do_verify=1",
            "--fsync=64",
            "--verify_state_save=0",
        ],
    );
    assert!(text.contains("err= 0"), "{text}");
}
