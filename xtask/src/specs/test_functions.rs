//! Tests of the sources, by file and function.

use std::{
    collections::{BTreeSet, HashMap},
    path::Path,
};

use crate::{Result, files};

/// Test functions of the files that were asked for.
#[derive(Default)]
pub(super) struct Tests {
    functions: HashMap<String, BTreeSet<String>>,
}

impl Tests {
    /// Returns whether `FILE::FUNCTION` is a test.
    pub(super) fn exists(&mut self, name: &str) -> bool {
        let Some((file, function)) = name.split_once("::") else {
            return false;
        };
        let read = || files::text(Path::new(file)).map_or_else(|_| BTreeSet::new(), |text| functions(&text));
        let functions = self.functions.entry(file.to_owned()).or_insert_with(read);
        functions.contains(function)
    }

    /// Returns the variants of `Rule` that sources in a folder name.
    pub(super) fn rules_named_in(folder: &str) -> Result<BTreeSet<String>> {
        let folder = Path::new(folder);
        let mut found = BTreeSet::new();
        for file in files::below(folder)? {
            if file.extension().is_some_and(|e| e == "rs") {
                found.extend(variants(&files::text(&folder.join(file))?));
            }
        }
        Ok(found)
    }
}

/// Names behind `Rule::`, but not in comments.
fn variants(text: &str) -> BTreeSet<String> {
    let code = text.lines().filter_map(|line| line.split("//").next());
    let names = code.flat_map(|line| line.split("Rule::").skip(1).map(word).collect::<Vec<_>>());
    names.filter(|name| !name.is_empty()).collect()
}

/// Names of test functions: those with `#[test]`, and those that a macro of the file makes with it from its first argument.
fn functions(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut macros = BTreeSet::new();
    let mut current_macro = None;
    let mut is_test = false;
    for line in text.lines() {
        let code = line.trim();
        if let Some(name) = line.strip_prefix("macro_rules! ") {
            current_macro = Some(word(name));
        } else if line == "}" {
            current_macro = None;
        }
        match code.strip_prefix("fn ") {
            Some(name) if is_test && name.starts_with('$') => macros.extend(current_macro.clone()),
            Some(name) if is_test => _ = found.insert(word(name)),
            _ => {}
        }
        // Further attributes and comments may stand between.
        is_test = code == "#[test]" || (is_test && (code.starts_with('#') || code.starts_with("//")));
    }
    for line in text.lines() {
        if let Some((name, arguments)) = line.split_once("!(")
            && macros.contains(name)
        {
            found.insert(word(arguments));
        }
    }
    found
}

/// Returns the identifier at the beginning.
fn word(text: &str) -> String {
    text.chars()
        .take_while(|c| c.is_ascii_alphanumeric() || *c == '_')
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{functions, variants};

    fn set(names: &[&str]) -> std::collections::BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn only_functions_with_the_attribute_are_tests() {
        let text = "#[test]\nfn a() {}\nfn b() {}\n    #[test]\n    // why\n    #[ignore]\n    fn c(x in 0..2) {}\n";
        assert_eq!(functions(text), set(&["a", "c"]));
    }

    #[test]
    fn a_macro_of_the_file_makes_tests() {
        let text = "macro_rules! t {\n    ($n:ident) => {\n        #[test]\n        fn $n() {}\n    };\n}\nt!(a, 1);\nu!(b);\n";
        assert_eq!(functions(text), set(&["a"]));
    }

    #[test]
    fn comments_name_no_rules() {
        assert_eq!(variants("f(Rule::A, Rule::B2) // Rule::C\nRule::\n"), set(&["A", "B2"]));
    }

    #[test]
    fn files_and_functions_that_are_not_there_are_none() {
        // Tests run in the crate's folder.
        let mut tests = super::Tests::default();
        assert!(tests.exists("src/specs/test_functions.rs::comments_name_no_rules"));
        for name in [
            "src/specs/test_functions.rs::word",
            "src/none.rs::a",
            "src/specs/test_functions.rs",
        ] {
            assert!(!tests.exists(name), "{name}");
        }
    }
}
