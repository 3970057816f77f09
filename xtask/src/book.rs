//! Preprocessor of mdBook: links that lead out of the book lead to the repository.

use std::{io, path::Path};

use serde_json::Value;

use crate::{Result, lint::pages::normal};

/// Folder of the book.
const BOOK: &str = "docs";

/// Answers mdBook: with status 0 if it asks for `supports RENDERER`, else with the book that it writes to standard input.
pub(crate) fn preprocess(args: &[String]) -> Result<()> {
    if !args.is_empty() {
        return Ok(());
    }
    let (_, mut book): (Value, Value) = serde_json::from_reader(io::stdin())
        .map_err(|e| format!("mdbook runs this by itself, as book.toml says: {e}"))?;
    chapters(&mut book);
    println!("{book}");
    Ok(())
}

/// Changes the links of all chapters in a value.
fn chapters(value: &mut Value) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(chapters),
        Value::Object(fields) => {
            if let (Some(Value::String(page)), Some(Value::String(content))) =
                (fields.get("path"), fields.get("content"))
            {
                let content = with_links_to_the_repository(Path::new(page), content);
                fields.insert("content".to_owned(), content.into());
            }
            fields.values_mut().for_each(chapters);
        }
        _ => {}
    }
}

/// The text of a page, whose path in the book is `page`.
fn with_links_to_the_repository(page: &Path, text: &str) -> String {
    let folder = Path::new(BOOK).join(page.parent().unwrap_or(Path::new("")));
    let mut fenced = false;
    let mut out = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        fenced ^= line.trim_start().starts_with("```");
        let mut rest = line;
        while let Some(at) = rest.find("](../").filter(|_| !fenced) {
            let (before, link) = rest.split_at(at + 2);
            let (target, after) = link.split_at(link.find([')', ' ']).unwrap_or(link.len()));
            let file = normal(&folder.join(target));
            out += before;
            if file.starts_with(BOOK) {
                out += target;
            } else {
                out += concat!(env!("CARGO_PKG_REPOSITORY"), "/blob/main/");
                out += &file.to_string_lossy();
            }
            rest = after;
        }
        out += rest;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_out_of_the_book_lead_to_the_repository() {
        let mut book = serde_json::json!({"items": [{"Chapter": {
            "path": "a/b.md",
            "content": "[x](../c.md) and [y](../../README.md#z)\n```sh\n[y](../../README.md)\n```\n",
            "sub_items": [{"Chapter": {"path": "d.md", "content": "[x](../examples/)"}}],
        }}]});
        chapters(&mut book);
        let chapter = &book["items"][0]["Chapter"];
        let expected = "[x](../c.md) and [y](https://github.com/ferroce/ferroce/blob/main/README.md#z)\n\
                        ```sh\n[y](../../README.md)\n```\n";
        assert_eq!(chapter["content"], expected);
        let below = &chapter["sub_items"][0]["Chapter"]["content"];
        assert_eq!(below, "[x](https://github.com/ferroce/ferroce/blob/main/examples)");
    }
}
