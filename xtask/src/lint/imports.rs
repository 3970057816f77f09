//! Checks that no two files of a crate import each other, directly or through others, so that each can be read alone.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use crate::Result;

/// Files that each file imports, by module path (`client::path`; the crate's root is empty).
type Graph = BTreeMap<String, BTreeSet<String>>;

/// Returns the cycles of a crate.
pub(super) fn cycles(krate: &str, files: Vec<(PathBuf, String)>) -> Result<Vec<String>> {
    let src = Path::new(krate).join("src");
    let mut texts = BTreeMap::new();
    for (file, text) in files {
        let inside = file.strip_prefix(&src).map_err(|e| e.to_string())?;
        texts.insert(module(inside), text);
    }
    let cycles = components(&graph(&texts)).into_iter();
    Ok(cycles
        .map(|files| format!("{krate}: these import each other: {}", files.join(", ")))
        .collect())
}

/// `client/path.rs` is `client::path`, `client/mod.rs` is `client`, `lib.rs` nothing.
fn module(file: &Path) -> String {
    let mut parts: Vec<String> = file
        .with_extension("")
        .components()
        .map(|part| part.as_os_str().to_string_lossy().into_owned())
        .collect();
    if matches!(parts.last().map(String::as_str), Some("mod" | "lib" | "main")) {
        parts.pop();
    }
    parts.join("::")
}

fn graph(texts: &BTreeMap<String, String>) -> Graph {
    let edges = |(module, text): (&String, &String)| {
        let all = paths(module, text);
        let found: BTreeSet<String> = all.iter().filter_map(|path| target(texts, path)).collect();
        (module.clone(), found.into_iter().filter(|to| to != module).collect())
    };
    texts.iter().map(edges).collect()
}

/// Returns the file of a path: its longest prefix that is a file.
fn target(texts: &BTreeMap<String, String>, path: &[String]) -> Option<String> {
    (0..=path.len())
        .rev()
        .map(|n| path[..n].join("::"))
        .find(|module| texts.contains_key(module))
}

/// Returns all paths of a file that begin in its crate, as segments from the root.
fn paths(module: &str, text: &str) -> Vec<Vec<String>> {
    let code = without_comments(text);
    let here: Vec<String> = module
        .split("::")
        .filter(|s| !s.is_empty())
        .map(str::to_owned)
        .collect();
    let mut found = Vec::new();
    for (at, word) in code.match_indices("\npub use ") {
        // Of a module of its own, as module files write it.
        tree(&code[at + word.len()..], &here, &mut found);
    }
    for (word, base) in [
        ("crate::", Some(Vec::new())),
        ("super::", here.split_last().map(|(_, up)| up.to_vec())),
    ] {
        let Some(base) = base else { continue };
        for (at, _) in code.match_indices(word) {
            let before = &code[..at];
            // Part of another path, as `$crate::`, or of a module inside the file, whose parent is the file.
            let joined = before.ends_with(|c: char| c.is_alphanumeric() || matches!(c, '_' | ':' | '$'));
            let line = &before[before.rfind('\n').map_or(0, |n| n + 1)..];
            let inner = word == "super::" && line.starts_with(char::is_whitespace);
            if !joined && !inner {
                tree(&code[at + word.len()..], &base, &mut found);
            }
        }
    }
    found
}

/// Reads a path, or a tree of paths in braces. Returns the remaining text.
fn tree<'a>(text: &'a str, base: &[String], found: &mut Vec<Vec<String>>) -> &'a str {
    let text = text.trim_start();
    if let Some(mut rest) = text.strip_prefix('{') {
        loop {
            rest = rest.trim_start().trim_start_matches(',').trim_start();
            if let Some(end) = rest.strip_prefix('}') {
                return end;
            }
            let left = tree(rest, base, found);
            if left.len() == rest.len() {
                return left;
            }
            rest = left;
        }
    }
    let end = text
        .find(|c: char| !(c.is_alphanumeric() || c == '_'))
        .unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    let mut path = base.to_vec();
    if !name.is_empty() && name != "self" {
        path.push(name.to_owned());
    }
    match rest.strip_prefix("::") {
        Some(rest) => tree(rest, &path, found),
        None => {
            found.push(path);
            // `as other`
            let rest = rest.trim_start();
            match rest.strip_prefix("as ") {
                Some(rest) => rest
                    .trim_start()
                    .trim_start_matches(|c: char| c.is_alphanumeric() || c == '_'),
                None => rest.strip_prefix('*').unwrap_or(rest),
            }
        }
    }
}

fn without_comments(text: &str) -> String {
    let mut code = String::with_capacity(text.len() + 1);
    code.push('\n');
    for line in text.lines() {
        code.push_str(line.split("//").next().unwrap_or_default());
        code.push('\n');
    }
    code
}

/// Returns groups of files that reach each other.
fn components(graph: &Graph) -> Vec<Vec<String>> {
    let reached: BTreeMap<&String, BTreeSet<&String>> = graph.keys().map(|from| (from, reach(graph, from))).collect();
    let mut seen = BTreeSet::new();
    let mut groups = Vec::new();
    for (from, to) in &reached {
        let group: Vec<String> = to
            .iter()
            .filter(|other| *other != from && reached.get(*other).is_some_and(|back| back.contains(*from)))
            .chain([from])
            .map(|name| {
                if name.is_empty() {
                    "lib".to_owned()
                } else {
                    (*name).clone()
                }
            })
            .collect();
        if group.len() > 1 && group.iter().all(|name| seen.insert(name.clone())) {
            groups.push(group);
        }
    }
    groups
}

fn reach<'a>(graph: &'a Graph, from: &'a String) -> BTreeSet<&'a String> {
    let mut seen = BTreeSet::new();
    let mut left = vec![from];
    while let Some(module) = left.pop() {
        for to in graph.get(module).into_iter().flatten() {
            if seen.insert(to) {
                left.push(to);
            }
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let texts = files
            .iter()
            .map(|(name, text)| (module(Path::new(name)), (*text).to_owned()));
        components(&graph(&texts.collect()))
    }

    #[test]
    fn files_that_import_each_other_are_found_however_they_write_it() {
        let a = "use crate::{\n    b::{self, Thing},\n    c::Other as That,\n};";
        for b in [
            "use crate::a::X;",
            "use super::a;",
            "fn f(x: crate::a::X) {}",
            "pub use crate::a::*;",
        ] {
            assert_eq!(found(&[("a.rs", a), ("b.rs", b), ("c.rs", "")]), [["b", "a"]], "{b}");
        }
    }

    #[test]
    fn a_longer_way_round_is_one_too() {
        let files = [
            ("one/mod.rs", "mod part;\npub use part::X;"),
            ("one/part.rs", "use crate::two::Y;"),
            ("two.rs", "use crate::one::X;"),
        ];
        assert_eq!(found(&files), [["one::part", "two", "one"]]);
        let files = [
            files[0],
            files[1],
            // Past the module file.
            ("two.rs", "use crate::one::other::X;"),
            ("one/other.rs", ""),
        ];
        assert!(found(&files).is_empty());
    }

    #[test]
    fn what_only_looks_like_an_import_is_none() {
        let a = "// use crate::b::Y;\nmacro_rules! m { () => { $crate::b::Y } }\nmod tests {\n    use super::*;\n}\nuse other::b;";
        assert!(found(&[("a.rs", a), ("b.rs", "use crate::a::X;")]).is_empty());
        assert!(found(&[("a.rs", "use crate::b::Y;"), ("b.rs", "")]).is_empty());
    }
}
