//! Text of a packet script: an error with a place in the text, or a script that plays to its end.

use roce_script::Script;

/// Longest script that is played, bytes: the time of a run grows with the steps.
const MAX_PLAYED: usize = 1 << 10;

/// See the module.
pub fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let lines: Vec<&str> = text.lines().collect();
    match Script::parse(&text) {
        Ok(script) if data.len() <= MAX_PLAYED => {
            let outcome = script.play();
            for mismatch in outcome.mismatches {
                assert!((1..=lines.len().max(1)).contains(&mismatch.line), "{mismatch:?}");
                assert!(!mismatch.text.is_empty());
            }
            assert!(outcome.records.iter().all(|record| !record.text.is_empty()));
        }
        Ok(_) => {}
        Err(e) => {
            // An error about what is missing is behind the last line, or behind the last character of one.
            assert!((1..=lines.len() + 1).contains(&e.line()), "{e}");
            let line = lines.get(e.line() - 1).map_or(0, |line| line.chars().count());
            assert!((1..=line + 1).contains(&e.column()), "{e}");
            assert!(!e.expected().is_empty());
        }
    }
}
