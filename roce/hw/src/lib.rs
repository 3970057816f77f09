//! Reserved for the `Provider` over hardware verbs; there is nothing here yet.
