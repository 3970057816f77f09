//! Structures of counters.

/// Defines a structure of counters that have names and can be added up.
#[macro_export]
macro_rules! counters {
    ($(#[$doc:meta])* $vis:vis struct $type:ident; $($(#[$field_doc:meta])* $name:ident,)*) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        $vis struct $type {
            $($(#[$field_doc])* pub $name: u64,)*
        }

        #[allow(dead_code, unreachable_pub, reason = "some are never added up, or have no names to the outside")]
        impl $type {
            /// Adds what another one has counted.
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }

            /// Returns the counts with their names.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }
    };
}
