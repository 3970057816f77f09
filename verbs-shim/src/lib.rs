//! C ABI of libibverbs and librdmacm over ferroce.
