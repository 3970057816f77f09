"""What the scripts of two sides have in common. Their arguments: server|client ADDRESS PORT"""
import socket
import sys


def pattern(seed, size):
    """Others for every seed below 256."""
    block = bytes((i * seed + (i >> 8)) & 255 for i in range(65536))
    return block * (size // len(block)) + block[: size % len(block)]


def exactly(sock, count):
    out = b""
    while len(out) < count:
        part = sock.recv(count - len(out))
        assert part, "the other side is gone"
        out += part
    return out


class Lines:
    """Lines over a connection. It has a file for each direction: one for both drops what it has read ahead when it writes."""

    def __init__(self, sock):
        self.reader, self.writer = sock.makefile("r"), sock.makefile("w")

    def tell(self, line):
        self.writer.write(line + "\n")
        self.writer.flush()

    def hear(self):
        line = self.reader.readline()
        assert line, "the other side is gone"
        return line.strip()


def connected():
    """Which side this is, and its connection: the server listens, and takes one client."""
    role, addr, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if role == "server":
        with socket.create_server((addr, port)) as listener:
            return role, listener.accept()[0]
    return role, socket.create_connection((addr, port))
