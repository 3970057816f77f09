//! Source text of the rules' enumeration.

use super::rules::Rule;

/// Widest line, as in rustfmt.toml.
const WIDTH: usize = 120;
/// Text before the rules.
const HEAD: &str = include_str!("rule_head.txt");

/// Returns the text of the generated file.
pub(super) fn text(rules: &[Rule]) -> String {
    let mut text = format!("{HEAD}\nrules! {{\n");
    for rule in rules {
        for line in wrapped(&format!("{} ({})", rule.text.trim(), rule.source.trim()), "    /// ") {
            text.push_str(&line);
            text.push('\n');
        }
        let line = format!(
            "    {} = {:?}, {:?}, {:?};\n",
            rule.variant(),
            rule.id,
            rule.severity,
            rule.fault
        );
        text.push_str(&line);
    }
    text.push_str("}\n");
    text
}

/// Lines of `text` that begin with `indent` and are no wider than [`WIDTH`], but for single words.
fn wrapped(text: &str, indent: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split_whitespace() {
        let wide = indent.len() + line.chars().count() + 1 + word.chars().count() > WIDTH;
        if wide && !line.is_empty() {
            lines.push(format!("{indent}{line}"));
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(format!("{indent}{line}"));
    lines
}

#[cfg(test)]
mod tests {
    use super::{WIDTH, wrapped};

    #[test]
    fn lines_are_as_long_as_they_may_be() {
        let words = "word ".repeat(100);
        let lines = wrapped(&words, "    /// ");
        assert!(lines.iter().all(|line| line.len() <= WIDTH));
        assert!(lines[..lines.len() - 1].iter().all(|line| line.len() + 5 > WIDTH));
        assert_eq!(lines.concat().matches("word").count(), 100);
    }

    #[test]
    fn a_word_longer_than_a_line_stays_whole() {
        let long = "x".repeat(WIDTH + 1);
        assert_eq!(wrapped(&format!("a {long} b"), "").len(), 3);
    }
}
