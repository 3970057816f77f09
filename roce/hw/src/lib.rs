//! The Provider over hardware verbs (cargo feature hardware).
