//! Rules for pages: links lead to files and headings that exist, the book lists every page, and generated text is current.

use std::{
    collections::{BTreeSet, HashMap},
    path::{Component, Path, PathBuf},
};

use super::none;
use crate::{Result, pages, results};

/// Folder of the book.
const BOOK: &str = "docs";
/// Table of contents of the book.
const SUMMARY: &str = "docs/SUMMARY.md";
/// Files in the book's folder that are parts of other pages.
const PARTS: [&str; 2] = [SUMMARY, "docs/bench/notes.md"];

/// Checks links, the table of contents, and generated text of all pages.
pub(crate) fn check() -> Result<()> {
    let pages = pages::all()?;
    let mut findings = Vec::new();
    for (page, text) in &pages {
        for (line, link) in links(text) {
            if let Err(why) = resolve(page, &link, &pages) {
                findings.push(format!("{}:{line}: {link}: {why}", page.display()));
            }
        }
    }
    findings.extend(incomplete(&pages));
    findings.extend(results::stale()?);
    none(&findings)
}

/// Targets of links and pictures outside of code, with their lines.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut links = Vec::new();
    for (number, line) in prose(text) {
        let mut rest = line.as_str();
        while let Some(at) = rest.find("](") {
            rest = &rest[at + 2..];
            let Some(end) = rest.find(')') else { break };
            let target = rest[..end].split_whitespace().next().unwrap_or_default();
            links.push((number, target.to_owned()));
        }
    }
    links
}

/// Lines outside of fenced blocks, numbered from 1, without code spans.
fn prose(text: &str) -> impl Iterator<Item = (usize, String)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            return None;
        }
        let spans = line.split('`').step_by(2).collect::<Vec<_>>().join("`");
        (!fenced).then_some((index + 1, spans))
    })
}

/// Checks where a link leads. Other hosts are not asked.
fn resolve(page: &Path, link: &str, pages: &HashMap<PathBuf, String>) -> Result<()> {
    if link.contains("://") || link.starts_with("mailto:") {
        return Ok(());
    }
    let (path, heading) = link
        .split_once('#')
        .map_or((link, None), |(path, heading)| (path, Some(heading)));
    let target = match path {
        "" => page.to_path_buf(),
        path => normal(&page.parent().unwrap_or(Path::new("")).join(path)),
    };
    if !target.exists() {
        return Err(format!("{} is not there", target.display()));
    }
    let (Some(heading), Some(text)) = (heading, pages.get(&target)) else {
        return Ok(());
    };
    if anchors(text).contains(heading) {
        Ok(())
    } else {
        Err(format!("{} has no such heading", target.display()))
    }
}

/// A path without `.` and `..`.
pub(crate) fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => _ = normal.pop(),
            Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

/// Anchors that GitHub and mdBook give to a page's headings, and those that the page sets with `<a id="…">`.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    let mut fenced = false;
    for line in text.lines() {
        fenced ^= line.trim_start().starts_with("```");
        if fenced {
            continue;
        }
        let ids = line.split("<a id=\"").skip(1);
        anchors.extend(ids.filter_map(|id| id.split('"').next().map(str::to_owned)));
        let heading = line.trim_start_matches('#');
        if heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let slug: String = heading.trim().to_lowercase().chars().filter_map(slug).collect();
        // A heading that is there twice gets a number.
        let numbered = (1..).map(|n| format!("{slug}-{n}"));
        let free = std::iter::once(slug.clone())
            .chain(numbered)
            .find(|name| !anchors.contains(name));
        anchors.extend(free);
    }
    anchors
}

fn slug(letter: char) -> Option<char> {
    match letter {
        ' ' => Some('-'),
        '-' | '_' => Some(letter),
        letter => letter.is_alphanumeric().then_some(letter),
    }
}

/// Pages of the book that its table of contents lacks, or has twice.
fn incomplete(pages: &HashMap<PathBuf, String>) -> Vec<String> {
    let Some(summary) = pages.get(Path::new(SUMMARY)) else {
        return vec![format!("{SUMMARY} is not there")];
    };
    let listed: Vec<PathBuf> = links(summary)
        .iter()
        .map(|(_, link)| Path::new(BOOK).join(link))
        .collect();
    let in_book = |page: &&PathBuf| page.starts_with(BOOK) && !PARTS.iter().any(|part| Path::new(part) == *page);
    let mut findings: Vec<_> = pages
        .keys()
        .filter(in_book)
        .filter_map(|page| match listed.iter().filter(|listed| *listed == page).count() {
            0 => Some(format!("{SUMMARY} lacks {}", page.display())),
            1 => None,
            _ => Some(format!("{SUMMARY} has {} twice", page.display())),
        })
        .collect();
    findings.sort();
    findings
}

#[cfg(test)]
mod tests {
    use std::{
        collections::HashMap,
        path::{Path, PathBuf},
    };

    use super::{anchors, incomplete, links, resolve};

    #[test]
    fn links_in_code_are_none() {
        let text = "a [b](c.md#d), ![e](f.svg \"g\") and `[h](i)`\n```text\n[j](k)\n```\n[l](m)\n";
        let expected = [(1, "c.md#d"), (1, "f.svg"), (5, "m")].map(|(line, link)| (line, link.to_owned()));
        assert_eq!(links(text), expected);
    }

    #[test]
    fn headings_have_the_anchors_of_github() {
        let text = "# A `b`: c-d\n```sh\n# comment\n```\n## Twice\n## Twice\n<a id=\"own\"></a>\n#no heading\n";
        let expected = ["a-b-c-d", "twice", "twice-1", "own"].map(str::to_owned);
        assert_eq!(anchors(text), expected.into());
    }

    #[test]
    fn a_page_a_heading_or_a_chapter_that_is_missing_is_found() {
        // Tests run in the crate's folder.
        let page = Path::new("src/page.md");
        let pages = HashMap::from([(PathBuf::from("src/main.rs"), "# Here\n".to_owned())]);
        for link in ["main.rs", "main.rs#here", "../Cargo.toml", "https://example.com/#x"] {
            assert_eq!(resolve(page, link, &pages), Ok(()), "{link}");
        }
        for link in ["none.rs", "main.rs#elsewhere"] {
            assert!(resolve(page, link, &pages).is_err(), "{link}");
        }
        let book = [
            ("docs/SUMMARY.md", "[a](a.md)\n- [b](b/b.md)\n- [b](b/b.md)\n"),
            ("docs/a.md", ""),
            ("docs/b/b.md", ""),
            ("docs/c.md", ""),
            ("README.md", ""),
        ];
        let book = book.map(|(page, text)| (PathBuf::from(page), text.to_owned())).into();
        let expected = [
            "docs/SUMMARY.md has docs/b/b.md twice",
            "docs/SUMMARY.md lacks docs/c.md",
        ];
        assert_eq!(incomplete(&book), expected);
    }
}
