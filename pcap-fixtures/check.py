#!/usr/bin/env python3
"""Checks the counts of manifest.toml with nothing but Python's standard library.

The ICRC is zlib's crc32 over eight 0xff bytes and the IPv4 datagram with its variable fields set to ones. Written apart
from the Rust code, so that one of the two being wrong shows. Plain Ethernet, IPv4 and classic little-endian pcap only:
what the kernel captures are. Usage: python3 pcap-fixtures/check.py
"""

import pathlib
import struct
import sys
import tomllib
import zlib

HERE = pathlib.Path(__file__).parent


def frames(data):
    magic = struct.unpack_from("<I", data)[0]
    assert magic in (0xA1B2C3D4, 0xA1B23C4D), "not a little-endian pcap"
    assert struct.unpack_from("<I", data, 20)[0] == 1, "not Ethernet"
    at = 24
    while at < len(data):
        captured, original = struct.unpack_from("<II", data, at + 8)
        assert captured == original, "a cut frame"
        yield data[at + 16 : at + 16 + captured]
        at += 16 + captured
    assert at == len(data), "the file ends within a frame"


def icrc_ok(ip):
    masked = bytearray(ip)
    masked[1] = 0xFF  # TOS
    masked[8] = 0xFF  # TTL
    masked[10:12] = b"\xff\xff"  # header checksum
    masked[26:28] = b"\xff\xff"  # UDP checksum
    masked[32] = 0xFF  # FECN, BECN and reserved bits of the BTH
    want = zlib.crc32(b"\xff" * 8 + bytes(masked[:-4]))
    return struct.pack("<I", want) == ip[-4:]


def count(data):
    result = dict(frames=0, roce_frames=0, icrc_ok=0, icrc_bad=0)
    for frame in frames(data):
        result["frames"] += 1
        ip = frame[14:]
        if frame[12:14] != b"\x08\x00" or ip[0] != 0x45 or ip[9] != 17:
            continue
        ip = ip[: struct.unpack_from(">H", ip, 2)[0]]
        if struct.unpack_from(">H", ip, 22)[0] != 4791:
            continue
        result["roce_frames"] += 1
        result["icrc_ok" if icrc_ok(ip) else "icrc_bad"] += 1
    return result


def main():
    manifest = tomllib.loads((HERE / "manifest.toml").read_text())
    wrong = 0
    for capture in manifest["capture"]:
        if not capture["file"].endswith(".pcap"):
            continue
        got = count((HERE / capture["file"]).read_bytes())
        want = {key: capture[key] for key in got}
        wrong += got != want
        print(f"{capture['file']}: {got}" + ("" if got == want else f", but the manifest says {want}"))
    sys.exit(wrong != 0)


main()
