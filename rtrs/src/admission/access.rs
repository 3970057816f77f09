//! Access list: which addresses may connect, and which session names they may use.

use core::{fmt, net::IpAddr, str::FromStr};

use crate::{
    addr::{AddrError, Cidr},
    proto::InfoReq,
};

/// `[NAME=]CIDR`: a range of addresses that may connect, or one that a session of this name may come from.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct AccessRule {
    /// The session name; `None`: any that has no rule of its own.
    pub name: Option<String>,
    /// The addresses.
    pub range: Cidr,
}

/// Why a text is no rule.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AccessError {
    /// No range.
    #[error(transparent)]
    Range(#[from] AddrError),
    /// No session has such a name.
    #[error("{0:?}: no session can have this name ({1})")]
    Name(String, String),
}

impl From<Cidr> for AccessRule {
    fn from(range: Cidr) -> Self {
        Self { name: None, range }
    }
}

impl FromStr for AccessRule {
    type Err = AccessError;

    fn from_str(s: &str) -> Result<Self, AccessError> {
        // A name may have a '=' in it, a range has none.
        let Some((name, range)) = s.rsplit_once('=') else {
            return Ok(s.parse::<Cidr>()?.into());
        };
        InfoReq::new(name).map_err(|e| AccessError::Name(name.into(), e.to_string()))?;
        Ok(Self {
            name: Some(name.into()),
            range: range.parse()?,
        })
    }
}

impl fmt::Display for AccessRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = &self.name {
            write!(f, "{name}=")?;
        }
        self.range.fmt(f)
    }
}

/// Rules without a name say who may connect (none: everybody). Rules with a name say where alone a session of that name
/// may come from, and let those addresses connect as well.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct AccessList(Vec<AccessRule>);

impl AccessList {
    /// A list of these rules.
    pub fn new(rules: impl IntoIterator<Item = AccessRule>) -> Self {
        Self(rules.into_iter().collect())
    }

    /// The rules.
    pub fn rules(&self) -> &[AccessRule] {
        &self.0
    }

    fn plain(&self, ip: IpAddr) -> bool {
        let mut plain = self.0.iter().filter(|r| r.name.is_none()).peekable();
        plain.peek().is_none() || plain.any(|r| r.range.contains(ip))
    }

    /// Whether the address may connect at all.
    pub fn may_connect(&self, ip: IpAddr) -> bool {
        self.plain(ip) || self.0.iter().any(|r| r.range.contains(ip))
    }

    /// Whether a session of this name may come, or be joined, from the address.
    pub fn may_be(&self, name: &str, ip: IpAddr) -> bool {
        let mut own = self.0.iter().filter(|r| r.name.as_deref() == Some(name)).peekable();
        match own.peek() {
            Some(_) => own.any(|r| r.range.contains(ip)),
            None => self.plain(ip),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(rules: &[&str]) -> AccessList {
        AccessList::new(rules.iter().map(|r| r.parse().unwrap()))
    }

    fn ip(s: &str) -> IpAddr {
        s.parse().unwrap()
    }

    #[test]
    fn a_name_is_only_for_its_ranges() {
        let all = list(&[]);
        assert!(all.may_connect(ip("10.0.0.1")) && all.may_be("db", ip("10.0.0.1")));

        let named = list(&["db=10.0.0.0/24", "db=2001:db8::/64"]);
        assert!(named.may_be("db", ip("10.0.0.7")) && named.may_be("db", ip("2001:db8::7")));
        assert!(named.may_be("db", ip("::ffff:10.0.0.7")));
        assert!(!named.may_be("db", ip("10.0.1.7")));
        // Without plain ranges everybody may connect, by any other name.
        assert!(named.may_connect(ip("10.0.1.7")) && named.may_be("web", ip("10.0.1.7")));

        let both = list(&["192.0.2.0/24", "db=10.0.0.1"]);
        assert!(both.may_connect(ip("192.0.2.1")) && both.may_connect(ip("10.0.0.1")));
        assert!(!both.may_connect(ip("10.0.0.2")));
        assert!(both.may_be("web", ip("192.0.2.1")) && !both.may_be("db", ip("192.0.2.1")));
        // Where the database may come from, nothing else may.
        assert!(both.may_be("db", ip("10.0.0.1")) && !both.may_be("web", ip("10.0.0.1")));
    }

    #[test]
    fn rules_are_read_and_shown() {
        for text in ["10.0.0.0/8", "db=10.0.0.0/8", "a=b=fe80::/10"] {
            assert_eq!(text.parse::<AccessRule>().unwrap().to_string(), text);
        }
        assert_eq!("a=b=::1".parse::<AccessRule>().unwrap().name.as_deref(), Some("a=b"));
        for bad in [
            "",
            "db=",
            "=10.0.0.0/8",
            "a/b=10.0.0.1",
            "db=10.0.0.0/33",
            "10.0.0.1=db",
        ] {
            assert!(bad.parse::<AccessRule>().is_err(), "{bad}");
        }
    }
}
