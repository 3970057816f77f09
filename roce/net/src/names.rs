//! Names of the devices that programs see, as users choose them.

use std::str::FromStr;

/// Longest name of a device, bytes (`IBV_SYSFS_NAME_MAX`, without the final zero).
const MAX_LEN: usize = 63;

/// Names that a user gives to devices: `mlx5_0`, or `eth0=mlx5_0,eth1=mlx5_1`.
///
/// Scripts hard-code the names of their hardware. A name alone goes to the first device without one, in the order of
/// [`device_names`](crate::gids::device_names); a name with an interface goes to the device of that interface.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceNames {
    /// Interface, if one was given, and name.
    all: Vec<(Option<String>, String)>,
}

impl DeviceNames {
    /// Returns the interfaces that were given with a name.
    pub fn interfaces(&self) -> impl Iterator<Item = &str> {
        self.all.iter().filter_map(|(interface, _)| interface.as_deref())
    }

    /// Returns the name of each of these interfaces' devices; `None`: the usual one.
    pub fn assign(&self, interfaces: &[&str]) -> Vec<Option<&str>> {
        let mut in_order = self.all.iter().filter(|(interface, _)| interface.is_none());
        let of = |interface: &str| self.all.iter().find(|(i, _)| i.as_deref() == Some(interface));
        let name = |interface: &&str| of(interface).or_else(|| in_order.next());
        interfaces
            .iter()
            .map(name)
            .map(|found| found.map(|(_, name)| &**name))
            .collect()
    }

    /// Returns the name of each of these interfaces' devices: `ferroce0`, `ferroce1`, … where none was given.
    pub fn all(&self, interfaces: &[&str]) -> Vec<String> {
        let mut out: Vec<String> = Vec::new();
        let given = self.assign(interfaces);
        for (index, name) in given.iter().enumerate() {
            let taken = |name: &str| given.contains(&Some(name)) || out.iter().any(|other| other == name);
            let name = name.map_or_else(|| usual_name(index, taken), str::to_owned);
            out.push(name);
        }
        out
    }

    /// Returns the list as [`DeviceNames::from_str`] reads it.
    pub fn to_list(&self) -> String {
        let text = |(interface, name): &(Option<String>, String)| match interface {
            Some(interface) => format!("{interface}={name}"),
            None => name.clone(),
        };
        self.all.iter().map(text).collect::<Vec<_>>().join(",")
    }

    /// Adds the names of another list.
    ///
    /// # Errors
    /// If a name or an interface is given twice.
    pub fn add(&mut self, other: Self) -> Result<(), String> {
        for (interface, name) in other.all {
            if self.all.iter().any(|(_, known)| *known == name) {
                return Err(format!("the device name {name} is given twice"));
            }
            if interface.is_some() && self.all.iter().any(|(known, _)| *known == interface) {
                return Err(format!("{} has two device names", interface.unwrap_or_default()));
            }
            self.all.push((interface, name));
        }
        Ok(())
    }
}

/// Returns the usual name of the device at this place in the list, or the next one that is not `taken`.
pub fn usual_name(index: usize, taken: impl Fn(&str) -> bool) -> String {
    let mut names = (index..).map(|n| format!("ferroce{n}"));
    names.find(|name| !taken(name)).unwrap_or_default()
}

fn check(name: &str) -> Result<(), String> {
    let fits = (1..=MAX_LEN).contains(&name.len()) && name.starts_with(|c: char| c.is_ascii_alphanumeric());
    let known = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    match fits && name.chars().all(known) {
        true => Ok(()),
        false => Err(format!(
            "{name:?} is no name of a device: expected up to {MAX_LEN} letters, digits, '_', '-' and '.', such as mlx5_0"
        )),
    }
}

impl FromStr for DeviceNames {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut out = Self::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (interface, name) = match part.split_once('=') {
                Some((interface, name)) => (Some(interface.to_owned()), name),
                None => (None, part),
            };
            check(name)?;
            if interface.as_deref() == Some("") {
                return Err(format!("{part:?} names no interface: expected INTERFACE=NAME or NAME"));
            }
            out.add(Self {
                all: vec![(interface, name.to_owned())],
            })?;
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(text: &str, interfaces: &[&str]) -> Vec<String> {
        text.parse::<DeviceNames>().unwrap().all(interfaces)
    }

    #[test]
    fn names_go_to_interfaces_and_else_in_order() {
        let all = ["eth0", "eth1", "lo"];
        assert_eq!(named("", &all), ["ferroce0", "ferroce1", "ferroce2"]);
        assert_eq!(named("mlx5_0", &all), ["mlx5_0", "ferroce1", "ferroce2"]);
        assert_eq!(named("eth1=mlx5_1, mlx5_0", &all), ["mlx5_0", "mlx5_1", "ferroce2"]);
        assert_eq!(named("lo=rxe0", &all), ["ferroce0", "ferroce1", "rxe0"]);
        assert_eq!(named("eth9=rxe0", &all), ["ferroce0", "ferroce1", "ferroce2"]);
        assert_eq!(named("ferroce1", &all), ["ferroce1", "ferroce2", "ferroce3"]);
    }

    #[test]
    fn what_can_be_no_name_is_refused() {
        for (text, reason) in [
            ("a b", "no name"),
            ("../x", "no name"),
            (".x", "no name"),
            ("eth0=", "no name"),
            ("=mlx5_0", "no interface"),
            ("a,a", "twice"),
            ("eth0=a,eth0=b", "two"),
        ] {
            let e = text.parse::<DeviceNames>().unwrap_err();
            assert!(e.contains(reason), "{text}: {e}");
        }
        assert!("x".repeat(64).parse::<DeviceNames>().is_err());
        let list = "eth0=mlx5_0,mlx5_1";
        assert_eq!(list.parse::<DeviceNames>().unwrap().to_list(), list);
    }
}
