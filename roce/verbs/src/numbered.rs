//! Enumerations with the numbers of the C library.

/// Declares an enumeration, and its list.
macro_rules! numbered {
    ($(#[$meta:meta])* pub enum $name:ident { $( $(#[$doc:meta])* $variant:ident = $number:literal, )* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u32)]
        #[allow(missing_docs)]
        pub enum $name {
            $( $(#[$doc])* $variant = $number, )*
        }

        impl $name {
            /// All, by number.
            pub const ALL: [Self; [$( Self::$variant ),*].len()] = [$( Self::$variant ),*];
        }
    };
}
pub(crate) use numbered;
