//! See `ferroce_fuzz_targets::lnet_codec`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ferroce_fuzz_targets::lnet_codec::run(data));
