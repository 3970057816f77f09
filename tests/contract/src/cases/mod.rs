//! The cases, by what they are about.

mod connections;
mod ends;
mod keys;
mod objects;
mod operations;

use crate::Case;

/// All of them.
pub const CASES: &[&[Case]] = &[
    connections::CASES,
    operations::CASES,
    keys::CASES,
    ends::CASES,
    objects::CASES,
];

/// A list of cases that are named like their functions.
macro_rules! cases {
    ($($name:ident),* $(,)?) => {
        /// Cases of this module.
        pub(super) const CASES: &[$crate::Case] = &[$($crate::Case {
            name: stringify!($name),
            run: $name,
        }),*];
    };
}
use cases;
