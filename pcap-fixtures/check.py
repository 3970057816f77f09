#!/usr/bin/env python3
"""Checks the counts of manifest.toml, here and in the folders, with nothing but Python's standard library.

The ICRC is zlib's crc32 over eight 0xff bytes and the IP datagram with its variable fields set to ones. Written apart
from the Rust code, so that one of the two being wrong shows. Plain Ethernet, IP without options and classic
little-endian pcap only: what the captures are. Usage: python3 pcap-fixtures/check.py
"""

import gzip
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


def icrc_ok(ip, head):
    masked = bytearray(ip)
    if head == 20:
        masked[1] = 0xFF  # TOS
        masked[8] = 0xFF  # TTL
        masked[10:12] = b"\xff\xff"  # header checksum
    else:
        masked[0] |= 0x0F  # traffic class and flow label
        masked[1:4] = b"\xff\xff\xff"
        masked[7] = 0xFF  # hop limit
    masked[head + 6 : head + 8] = b"\xff\xff"  # UDP checksum
    masked[head + 12] = 0xFF  # FECN, BECN and reserved bits of the BTH
    want = zlib.crc32(b"\xff" * 8 + bytes(masked[:-4]))
    return struct.pack("<I", want) == ip[-4:]


def datagram(frame):
    """The IP datagram and its header's length, if UDP is in it."""
    ip = frame[14:]
    if frame[12:14] == b"\x08\x00" and ip[0] == 0x45 and ip[9] == 17:
        return ip[: struct.unpack_from(">H", ip, 2)[0]], 20
    if frame[12:14] == b"\x86\xdd" and ip[6] == 17:
        return ip[: 40 + struct.unpack_from(">H", ip, 4)[0]], 40
    return None, 0


def count(data):
    result = dict(frames=0, roce_frames=0, icrc_ok=0, icrc_bad=0)
    for frame in frames(data):
        result["frames"] += 1
        ip, head = datagram(frame)
        if ip is None or struct.unpack_from(">H", ip, head + 2)[0] != 4791:
            continue
        result["roce_frames"] += 1
        result["icrc_ok" if icrc_ok(ip, head) else "icrc_bad"] += 1
    return result


def main():
    wrong = 0
    for manifest in [HERE / "manifest.toml", *sorted(HERE.glob("*/manifest.toml"))]:
        for capture in tomllib.loads(manifest.read_text())["capture"]:
            if not capture["file"].endswith((".pcap", ".pcap.gz")):
                continue
            path = manifest.parent / capture["file"]
            data = path.read_bytes()
            got = count(gzip.decompress(data) if path.suffix == ".gz" else data)
            want = {key: capture[key] for key in got}
            wrong += got != want
            print(f"{path.relative_to(HERE)}: {got}" + ("" if got == want else f", but the manifest says {want}"))
    sys.exit(wrong != 0)


main()
