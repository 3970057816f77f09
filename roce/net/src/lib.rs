//! Datapaths that drive a port: UDP sockets, raw IP and AF_PACKET.
