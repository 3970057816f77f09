//! Metadata contexts: what a client may ask of the state of ranges.

use crate::nbd::{
    proto::{BASE_ALLOCATION, MAX_NAME, opt},
    reply::ALLOCATION_ID,
};

/// LIST_META_CONTEXT or SET_META_CONTEXT.
#[derive(Debug)]
pub(crate) struct MetaQuery<'a> {
    /// The export that is meant.
    pub(crate) name: &'a [u8],
    queries: Vec<&'a [u8]>,
}

impl<'a> MetaQuery<'a> {
    /// Parses the option's data: the export's name, then queries, each with its length before it. `None` unless they fill it exactly.
    pub(crate) fn parse(data: &'a [u8]) -> Option<Self> {
        let (name, rest) = text(data)?;
        let (count, mut rest) = rest.split_first_chunk::<4>()?;
        let count = u32::from_be_bytes(*count) as usize;
        // Each takes four bytes at least.
        if name.len() > MAX_NAME || count > rest.len() / 4 {
            return None;
        }
        let mut queries = Vec::with_capacity(count);
        for _ in 0..count {
            let (query, behind) = text(rest)?;
            queries.push(query);
            rest = behind;
        }
        rest.is_empty().then_some(Self { name, queries })
    }

    /// Whether `base:allocation` is meant. A list may be asked for by the name space, or for all there is.
    pub(crate) fn means_allocation(&self, option: u32) -> bool {
        let listing = option == opt::LIST_META_CONTEXT;
        let exact = |q: &&[u8]| *q == BASE_ALLOCATION.as_bytes() || listing && *q == b"base:";
        listing && self.queries.is_empty() || self.queries.iter().any(exact)
    }
}

/// The reply that names the context.
pub(crate) fn allocation(option: u32) -> Vec<u8> {
    // In a list there are no numbers.
    let id = if option == opt::SET_META_CONTEXT {
        ALLOCATION_ID
    } else {
        0
    };
    let mut data = id.to_be_bytes().to_vec();
    data.extend(BASE_ALLOCATION.as_bytes());
    data
}

/// Bytes with their length before them, and what follows.
fn text(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = data.split_first_chunk::<4>()?;
    rest.split_at_checked(u32::from_be_bytes(*len) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(name: &str, queries: &[&str]) -> Vec<u8> {
        let mut b = (name.len() as u32).to_be_bytes().to_vec();
        b.extend(name.as_bytes());
        b.extend((queries.len() as u32).to_be_bytes());
        for q in queries {
            b.extend((q.len() as u32).to_be_bytes());
            b.extend(q.as_bytes());
        }
        b
    }

    #[test]
    fn a_list_may_be_asked_for_by_name_space() {
        let means = |option, queries: &[&str]| {
            let data = data("disk", queries);
            let query = MetaQuery::parse(&data).unwrap();
            assert_eq!(query.name, b"disk");
            query.means_allocation(option)
        };
        let (list, set) = (opt::LIST_META_CONTEXT, opt::SET_META_CONTEXT);
        for (queries, in_list, in_set) in [
            (&[][..], true, false),
            (&["base:"], true, false),
            (&["base:allocation"], true, true),
            (&["qemu:dirty-bitmap:x", "base:allocation"], true, true),
            (&["base"], false, false),
            (&["base:allocation "], false, false),
            (&[""], false, false),
        ] {
            assert_eq!(
                (means(list, queries), means(set, queries)),
                (in_list, in_set),
                "{queries:?}"
            );
        }
    }

    #[test]
    fn what_is_not_exact_is_malformed() {
        let good = data("disk", &["base:allocation", "x"]);
        assert!(MetaQuery::parse(&good).is_some());
        for n in 0..good.len() {
            assert!(MetaQuery::parse(&good[..n]).is_none(), "{n}");
        }
        assert!(MetaQuery::parse(&[good.as_slice(), b"x"].concat()).is_none());
        let mut many = data("", &[]);
        many[4..].copy_from_slice(&u32::MAX.to_be_bytes());
        assert!(MetaQuery::parse(&many).is_none());
        assert!(MetaQuery::parse(&data(&"x".repeat(MAX_NAME + 1), &[])).is_none());
    }
}
