//! `Debug` of types that show some of their values.

/// Implements `Debug` for a type: `debug!(Name<T>, "Name" [T: Bound], |this| field: this.value())`.
macro_rules! debug {
    ($type:ty, $name:literal $([$($generics:tt)*])? $(, |$this:ident| $($field:ident: $value:expr),+)?) => {
        impl $(<$($generics)*>)? core::fmt::Debug for $type {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                $(let $this = self;)?
                f.debug_struct($name)$($(.field(stringify!($field), &$value))+)?.finish_non_exhaustive()
            }
        }
    };
}
