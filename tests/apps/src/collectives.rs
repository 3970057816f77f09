//! Libraries of collective operations, whose processes all talk to all.
//!
//! What is checked: `c/gloo.cc`, in four processes, compares every element of what Gloo's ibverbs transport brings: broadcasts,
//! reductions by four algorithms, gathering, scattering, and messages between neighbours, once with pairs that sleep for their
//! completions and once with pairs that poll.

use crate::cases::Case;

/// Four ranks, which meet in a directory; the first that fails is the result.
const GLOO_RANKS: &str = "mkdir store; for rank in 0 1 2 3; do ./gloo $rank 4 store & all=\"$all $!\"; done; \
                          for one in $all; do wait $one || exit; done";

/// Gloo of Debian.
fn gloo() -> Case {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/c/gloo.cc");
    let script = format!("c++ -Wall -Werror -O1 -o gloo {source} -lgloo -libverbs && {{ {GLOO_RANKS}; }}");
    Case::script("gloo over ibverbs, 4 ranks", "libgloo-dev", &script)
        .says("all compared")
        .within(300)
        .needs(&[("/usr/include/gloo/context.h", "libgloo-dev"), ("c++", "g++")])
}

pub(crate) fn all() -> Vec<Case> {
    vec![gloo()]
}
