//! See `ferroce_fuzz_targets::pcap_check`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ferroce_fuzz_targets::pcap_check::run(data));
