//! The layouts of `infiniband/verbs.h` (rdma-core 44, LP64 machines), by their C names.
//!
//! Structures and constants are declared once; the test in `headers.rs` compares them with the installed headers. Enumerations
//! are plain integers here: their values come from the program.
#![allow(non_camel_case_types)]

/// Declares structures of C, and what is true of them in C. Names are those of Rust unless another is given; `A..B` stands for the
/// fields from `A` to `B`, and `until` names the first field that is left out. Several names before a type are so many fields.
macro_rules! c_types {
    (derive $derive:tt; $($(#[$attr:meta])* struct $name:ident $(= $c:literal)? $(until $end:literal)? {
        $($($(#[$field_attr:meta])* $field:ident $(= $c_field:literal)?)+: $ty:ty,)*
    })*) => {
        $(
            $(#[$attr])*
            #[derive $derive]
            #[repr(C)]
            pub(crate) struct $name { $($($(#[$field_attr])* pub(crate) $field: $ty,)+)* }
        )*

        #[cfg(test)]
        pub(crate) fn types() -> Vec<String> {
            use std::mem::offset_of;
            let mut out = Vec::new();
            $({
                let c = [$($c,)? concat!("struct ", stringify!($name))][0];
                let size = [$(format!("offsetof({c}, {})", $end),)? format!("sizeof({c})")];
                out.push(format!("{} == {}", size[0], size_of::<$name>()));
                $($(
                    let field = [$($c_field,)? stringify!($field)][0];
                    let (first, last) = field.split_once("..").unwrap_or((field, field));
                    out.push(format!("offsetof({c}, {first}) == {}", offset_of!($name, $field)));
                    let end = offset_of!($name, $field) + size_of::<$ty>();
                    out.push(format!("offsetof({c}, {last}) + sizeof((({c} *)0)->{last}) == {end}"));
                )+)*
            })*
            out
        }
    };
}
pub(crate) use c_types;

/// Declares constants of C, and what is true of them in C: some by their names, then modules whose names have a prefix there.
macro_rules! c_consts {
    ({ $($(#[$attr:meta])* $name:ident: $ty:ty = $value:expr,)* }
     $($(#[$mod_attr:meta])* mod $module:ident: $mod_ty:ty = $prefix:literal {
        $($(#[$item_attr:meta])* $item:ident = $item_value:expr,)*
    })*) => {
        $($(#[$attr])* pub(crate) const $name: $ty = $value;)*
        $(
            $(#[$mod_attr])*
            pub(crate) mod $module { $($(#[$item_attr])* pub(crate) const $item: $mod_ty = $item_value;)* }
        )*

        #[cfg(test)]
        pub(crate) fn constants() -> Vec<String> {
            vec![
                $(format!("{} == {}", stringify!($name), $name),)*
                $($(format!("{}{} == {}", $prefix, stringify!($item), $module::$item),)*)*
            ]
        }
    };
}
pub(crate) use c_consts;

mod attr;
mod consts;
mod context;
#[cfg(test)]
mod headers;
mod objects;
mod wr;

pub(crate) use attr::*;
pub(crate) use consts::*;
pub(crate) use context::*;
pub(crate) use objects::*;
pub(crate) use wr::*;

use libc::c_int;

// Sizes in rdma-core 44, for machines without its headers.
#[cfg(target_arch = "x86_64")]
const _: () = {
    assert!(size_of::<ibv_device>() == 664);
    assert!(size_of::<verbs_context>() == 648);
    assert!(size_of::<ibv_qp_ex>() == 352);
    assert!(size_of::<ibv_cq_ex>() == 288);
};

/// A C enumeration.
pub(crate) type c_enum = c_int;
