//! See `ferroce_fuzz_targets::broker_records`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ferroce_fuzz_targets::broker_records::run(data));
