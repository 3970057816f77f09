//! The lists of symbols in `symbols`.

/// Implementation of a symbol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The function of this name.
    Own,
    /// A function of `src/unsupported.rs`.
    By(String),
    /// A variable, which begins as zero.
    Object,
    /// The system's librdmacm, of whose functions it is this one.
    System(usize),
}

/// A symbol of one version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Symbol {
    /// Its name.
    pub(crate) name: String,
    /// Its version.
    pub(crate) version: String,
    /// Whether a name without a version means this one.
    pub(crate) default: bool,
    /// Its implementation.
    pub(crate) answer: Answer,
}

impl Symbol {
    /// As linkers write it.
    pub(crate) fn versioned(&self) -> String {
        let at = if self.default { "@@" } else { "@" };
        format!("{}{at}{}", self.name, self.version)
    }
}

fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .map(str::trim)
        .filter(|l| !l.is_empty() && !l.starts_with('#'))
}

fn answer(word: Option<&str>, none: Answer) -> Answer {
    match word {
        None => none,
        Some("object") => Answer::Object,
        Some(function) => Answer::By(function.to_owned()),
    }
}

/// Reads `NAME@VERSION` and `NAME@@VERSION`; what has no second word is answered by `none`.
///
/// # Errors
/// The line that makes no sense.
pub(crate) fn public(text: &str, none: Answer) -> Result<Vec<Symbol>, String> {
    lines(text)
        .map(|line| {
            let mut words = line.split_whitespace();
            let (name, version) = words.next().and_then(|w| w.split_once('@')).ok_or(line)?;
            Ok(Symbol {
                name: name.to_owned(),
                version: version.trim_start_matches('@').to_owned(),
                default: version.starts_with('@'),
                answer: answer(words.next(), none.clone()),
            })
        })
        .collect()
}

/// Reads librdmacm's: `here` is ours, the others are the system's.
///
/// # Errors
/// As [`public`].
pub(crate) fn rdmacm(text: &str) -> Result<Vec<Symbol>, String> {
    let mut all = public(text, Answer::System(0))?;
    let mut count = 0;
    for symbol in &mut all {
        symbol.answer = match &symbol.answer {
            Answer::System(_) => {
                count += 1;
                Answer::System(count - 1)
            }
            _ => Answer::Own,
        };
    }
    Ok(all)
}

/// The private version that names without a version mean.
const USUAL: u32 = 34;

/// Reads the private ones: `NAME FIRST-LAST [ANSWER]`, after a line `versions N…`.
///
/// # Errors
/// As [`public`].
pub(crate) fn private(text: &str) -> Result<Vec<Symbol>, String> {
    let mut all = lines(text);
    let head = all
        .next()
        .and_then(|l| l.strip_prefix("versions "))
        .ok_or("no versions")?;
    let numbers: Vec<u32> = head.split(' ').filter_map(|n| n.parse().ok()).collect();
    let mut out = Vec::new();
    for line in all {
        let mut words = line.split_whitespace();
        let (name, range) = (words.next().ok_or(line)?, words.next().ok_or(line)?);
        let (first, last) = range.split_once('-').ok_or(line)?;
        let number = |text: &str| text.parse::<u32>().map_err(|_| line);
        let (first, last) = (number(first)?, number(last)?);
        let answer = answer(words.next(), Answer::Own);
        for n in numbers.iter().filter(|n| (first..=last).contains(*n)) {
            let numbered = name.strip_suffix('@').map(|stem| format!("{stem}{n}"));
            out.push(Symbol {
                default: *n == USUAL || numbered.is_some() || !(first..=last).contains(&USUAL) && *n == last,
                name: numbered.unwrap_or_else(|| name.to_owned()),
                version: format!("IBVERBS_PRIVATE_{n}"),
                answer: answer.clone(),
            });
        }
    }
    Ok(out)
}

/// All versions, in the order in which each contains what is before it.
pub(crate) fn versions(symbols: &[Symbol]) -> Vec<&str> {
    let mut out: Vec<&str> = Vec::new();
    for symbol in symbols {
        if !out.contains(&symbol.version.as_str()) {
            out.push(&symbol.version);
        }
    }
    out.sort_by_key(|v| v.contains("PRIVATE"));
    out
}
