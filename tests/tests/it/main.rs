//! The program as its users see it.

mod addresses;
mod cli;
mod containers;
mod cuts;
mod datapaths;
mod device;
mod devices;
mod explain;
mod failures;
mod faults;
mod ipv6;
mod jobs;
mod lost;
mod names;
mod nbd_front;
mod paths;
mod pcap;
mod pcap_copies;
mod pcap_flows;
mod pcap_plot;
mod pcap_show;
mod restarts;
mod units;
mod vhost;
mod walkthrough;
mod wireshark;
