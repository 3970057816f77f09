//! Pages, and generated text in them between `<!-- NAME -->` and `<!-- end of NAME -->`.

use std::{collections::HashMap, fs, path::PathBuf, process::Command};

use crate::Result;

/// Reads all pages under version control, and new ones that are not ignored.
pub(crate) fn all() -> Result<HashMap<PathBuf, String>> {
    let listing = ["ls-files", "--cached", "--others", "--exclude-standard", "*.md"];
    let output = Command::new("git").args(listing).output();
    let output = output.map_err(|e| format!("git {}: {e}", listing.join(" ")))?;
    if !output.status.success() {
        return Err(format!("git {}: {}", listing.join(" "), output.status));
    }
    let names = String::from_utf8_lossy(&output.stdout);
    let files = names.lines().map(PathBuf::from).filter(|file| file.exists());
    files
        .map(|file| {
            let text = fs::read_to_string(&file).map_err(|e| format!("{}: {e}", file.display()))?;
            Ok((file, text))
        })
        .collect()
}

/// Replaces the text between the markers of `name`, in a line or on lines of its own.
pub(crate) fn between(page: &str, name: &str, text: &str) -> Result<String> {
    let (begin, end) = (format!("<!-- {name} -->"), format!("<!-- end of {name} -->"));
    let (before, rest) = page
        .split_once(&begin)
        .ok_or_else(|| format!("the page has no {begin}"))?;
    let (_, after) = rest.split_once(&end).ok_or_else(|| format!("the page has no {end}"))?;
    let line_end = if rest.starts_with('\n') { "\n" } else { "" };
    Ok(format!(
        "{before}{begin}{line_end}{}{line_end}{end}{after}",
        text.trim()
    ))
}

#[cfg(test)]
mod tests {
    #[test]
    fn text_between_markers_is_replaced() {
        let page = "a\n<!-- x -->\nold\n<!-- end of x -->\nb\n";
        let new = "a\n<!-- x -->\nnew\n<!-- end of x -->\nb\n";
        assert_eq!(super::between(page, "x", "new\n").as_deref(), Ok(new));
        assert_eq!(super::between(new, "x", "new\n").as_deref(), Ok(new));
        assert!(super::between(page, "y", "").is_err() && super::between("<!-- x -->", "x", "").is_err());
    }
}
