//! The C ABI of librdmacm.
