//! BENCHMARKS.md, its plots and README's table, from the figures of a measurement.

use std::{fmt::Write as _, fs, path::Path};

use serde::{Deserialize, Serialize};

use super::{
    PARTS,
    figure::{Environment, Figure, Form, Part, Spread},
    plot,
};
use crate::{Result, pages};

const PAGE: &str = "BENCHMARKS.md";
const README: &str = "README.md";
pub(super) const PLOTS: &str = "docs/bench";
/// Measured figures. Page, plots and README's table follow from them.
pub(super) const FIGURES: &str = "docs/bench/figures.json";
/// Handwritten notes on the figures below target.
const NOTES: &str = "docs/bench/notes.md";
/// Version of the JSON schema. Incremented by changes that break readers.
const SCHEMA: u32 = 2;

/// Parts with lines, which together are README's plot.
const OVERVIEW: [&str; 2] = ["recovery", "sizes"];
/// Figures of README's table: part, figure, and the row's name.
const SHOWN: [(&str, &str, &str); 8] = [
    ("bulk", "WRITE", "1 MiB RDMA WRITEs, 16 outstanding"),
    ("tcp", "WRITE of 1 MiB", "the same"),
    ("latency", "WRITE p50", "64-byte WRITE, round trip, both sides polling"),
    (
        "latency",
        "WRITE p50, asleep",
        "the same, both sides waiting for events",
    ),
    (
        "programs",
        "ib_write_lat",
        "`ib_write_lat` under `ferroce run`, 64 bytes",
    ),
    ("operations", "64 B WRITE, depth 512", "64-byte WRITEs, 512 outstanding"),
    (
        "block",
        "4K randread, depth 32",
        "4 KiB random reads of a mapped device, 32 outstanding",
    ),
    (
        "block",
        "128K read, depth 16",
        "128 KiB reads of a mapped device, 16 outstanding",
    ),
];

/// Figures of a part as they are stored, or why there are none.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    environment: Option<Environment>,
    #[serde(default)]
    figures: Vec<Figure>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    not_run: Option<String>,
}

/// A measurement as it is stored.
#[derive(Serialize, Deserialize)]
struct File {
    schema: u32,
    environment: Environment,
    parts: Vec<Stored>,
}

/// A measurement of parts.
pub(super) struct Measurement {
    pub(super) environment: Environment,
    pub(super) parts: Vec<Part>,
}

impl Measurement {
    /// Reads a file that [`Measurement::write`] wrote.
    pub(super) fn read(file: &Path) -> Result<Self> {
        let named = |e: &dyn std::fmt::Display| format!("{}: {e}", file.display());
        let text = fs::read_to_string(file).map_err(|e| named(&e))?;
        let stored: File = serde_json::from_str(&text).map_err(|e| named(&e))?;
        if stored.schema != SCHEMA {
            return Err(named(&format!("expected schema {SCHEMA}, found {}", stored.schema)));
        }
        let part = |(name, title, about, form): (&'static str, &'static str, &'static str, Form)| {
            let found = stored.parts.iter().find(|part| part.name == name)?;
            let figures = found.not_run.clone().map_or_else(|| Ok(found.figures.clone()), Err);
            Some(Part {
                name,
                title,
                about,
                form,
                environment: found.environment.clone(),
                figures,
            })
        };
        Ok(Self {
            environment: stored.environment.clone(),
            parts: PARTS.into_iter().filter_map(part).collect(),
        })
    }

    /// Replaces parts of an earlier measurement by these.
    pub(super) fn merged_into(self, mut earlier: Self) -> Self {
        for mut part in self.parts {
            part.environment = Some(self.environment.clone());
            earlier.parts.retain(|former| former.name != part.name);
            earlier.parts.push(part);
        }
        earlier
            .parts
            .sort_by_key(|part| PARTS.iter().position(|(name, ..)| *name == part.name));
        earlier
    }

    pub(super) fn write(&self, file: &Path) -> Result<()> {
        let part = |part: &Part| Stored {
            name: part.name.to_owned(),
            environment: part.environment.clone(),
            figures: part.figures.clone().unwrap_or_default(),
            not_run: part.figures.clone().err(),
        };
        let stored = File {
            schema: SCHEMA,
            environment: self.environment.clone(),
            parts: self.parts.iter().map(part).collect(),
        };
        let text = serde_json::to_string(&stored).map_err(|e| e.to_string())?;
        // A line for each figure, for readable differences.
        let text = text
            .replace("{\"name\"", "\n{\"name\"")
            .replace("\"reference\":\n", "\"reference\":");
        fs::write(file, text + "\n").map_err(|e| format!("{}: {e}", file.display()))
    }

    /// Writes page and plots below a directory, and README's plot and table if it has a README.
    pub(super) fn draw(&self, dir: &Path) -> Result<()> {
        let write = |name: &str, text: &str| {
            let file = dir.join(name);
            fs::write(&file, text).map_err(|e| format!("{}: {e}", file.display()))
        };
        for (part, figures) in self.measured() {
            write(&format!("{PLOTS}/{}.svg", part.name), &plot::draw(part, figures))?;
        }
        let of_overview = OVERVIEW
            .iter()
            .filter_map(|name| self.measured().find(|(part, _)| part.name == *name));
        let panels: Vec<_> = of_overview.flat_map(|(_, figures)| plot::panels(figures)).collect();
        if !panels.is_empty() {
            write(&format!("{PLOTS}/overview.svg"), &plot::lines(&panels))?;
        }
        let notes = fs::read_to_string(dir.join(NOTES)).unwrap_or_default();
        write(PAGE, &self.markdown(&notes))?;
        match fs::read_to_string(dir.join(README)) {
            Ok(readme) => write(README, &pages::between(&readme, "speed", &self.table())?),
            Err(_) => Ok(()),
        }
    }

    fn measured(&self) -> impl Iterator<Item = (&Part, &[Figure])> {
        self.parts
            .iter()
            .filter_map(|part| Some((part, part.figures.as_deref().ok()?)))
    }

    fn figure(&self, part: &str, name: &str) -> Option<&Figure> {
        let (_, figures) = self.measured().find(|(measured, _)| measured.name == part)?;
        figures.iter().find(|figure| figure.name == name)
    }

    /// README's plot, and a table of those figures that were measured.
    fn table(&self) -> String {
        let mut table = String::new();
        if self.measured().any(|(part, _)| OVERVIEW.contains(&part.name)) {
            let _ = write!(
                table,
                "![Goodput over loss, latency and bandwidth over size]({PLOTS}/overview.svg)\n\n"
            );
        }
        table += "| | ferroce | compared with | better |\n| --- | --: | --- | --- |\n";
        for (part, name, row) in SHOWN {
            let Some(f) = self.figure(part, name) else { continue };
            let [ferroce, reference] =
                [&f.ferroce, &f.reference.values].map(|values| f.with_unit(Spread::of(values).median));
            let _ = writeln!(
                table,
                "| {row} | {ferroce} | {}: {reference} | {} |",
                f.reference.name,
                f.better()
            );
        }
        let Environment {
            commit,
            date,
            processors,
            rounds,
            ..
        } = &self.environment;
        let _ = write!(
            table,
            "\nMedians of {rounds} rounds on {processors} processors of a virtual machine, loopback; {date}, commit {commit}.\n"
        );
        table
    }

    fn markdown(&self, notes: &str) -> String {
        let environment = &self.environment;
        let mut page = format!(
            "# Benchmarks\n\nWritten by `cargo xtask bench` from `{FIGURES}`: measured on {} at commit {}, {} ({} processors), {}. \
             Machines and their load differ, so each figure has a reference that is measured alternately with it: {} rounds of \
             {} s. Figures are medians. A ratio is the median over the rounds, with minimum and maximum. Targets are in the \
             [appendix](#appendix-targets).\n",
            environment.date,
            environment.commit,
            environment.processor,
            environment.processors,
            environment.kernel,
            environment.rounds,
            environment.seconds,
        );
        for part in &self.parts {
            let _ = write!(page, "\n## {}\n\n{}\n", part.title, part.about);
            if let Some(own) = &part.environment {
                let _ = write!(
                    page,
                    "\nMeasured on {} at commit {}: {} rounds of {} s.\n",
                    own.date, own.commit, own.rounds, own.seconds
                );
            }
            match &part.figures {
                Err(reason) => {
                    let _ = write!(page, "\nnot run: {}\n", reason.lines().next().unwrap_or_default());
                }
                Ok(figures) => page += &table(part, figures),
            }
        }
        page += &self.targets();
        if !notes.trim().is_empty() {
            let _ = write!(page, "\n{}\n", notes.trim());
        }
        page
    }

    /// Figures with a target, those below it first.
    fn targets(&self) -> String {
        let mut text = "\n## Appendix: targets\n\nTargets are for the ratio of a figure to its reference.\n\n\
                        | part | figure | ratio | target | |\n| --- | --- | --: | --- | --- |\n"
            .to_owned();
        let figures = self
            .measured()
            .flat_map(|(part, figures)| figures.iter().map(move |figure| (part, figure)));
        let (met, below): (Vec<_>, Vec<_>) = figures
            .filter(|(_, figure)| !figure.target.text().is_empty())
            .partition(|(_, figure)| figure.meets_target());
        for (part, f) in below.into_iter().chain(met) {
            let verdict = if f.meets_target() { "met" } else { "**below target**" };
            let (ratio, target) = (f.ratio().median, f.target.text());
            let _ = writeln!(
                text,
                "| {} | {} | {ratio:.2} | {target} | {verdict} |",
                part.title, f.name
            );
        }
        text
    }
}

/// Plot and table of a part.
fn table(part: &Part, figures: &[Figure]) -> String {
    let mut text = format!(
        "\n![{}]({PLOTS}/{}.svg)\n\n| | ferroce | compared with | | ratio | better |\n| --- | --: | --- | --: | --: | --- |\n",
        part.title, part.name
    );
    for f in figures {
        let ratio = f.ratio();
        let [ferroce, reference] =
            [&f.ferroce, &f.reference.values].map(|values| f.with_unit(Spread::of(values).median));
        let _ = writeln!(
            text,
            "| {} | {ferroce} | {} | {reference} | {:.2} ({:.2} to {:.2}) | {} |",
            f.name,
            f.reference.name,
            ratio.median,
            ratio.least,
            ratio.most,
            f.better(),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{
        super::figure::{Columns, Target},
        *,
    };
    use crate::bench::Scratch;

    fn measurement() -> Measurement {
        let mut columns = Columns::default();
        for (ferroce, reference) in [(0.8, 1.0), (0.95, 1.0), (0.9, 1.2)] {
            columns.add("WRITE", ferroce);
            columns.add("ceiling", reference);
        }
        let figures = vec![columns.figure("WRITE", "GB/s", "WRITE", "ceiling", Target::AtLeast(0.9))];
        let part = |at: usize, figures| {
            let (name, title, about, form) = PARTS[at];
            Part {
                name,
                title,
                about,
                form,
                environment: None,
                figures,
            }
        };
        Measurement {
            environment: Environment {
                commit: "abc".into(),
                ..Environment::default()
            },
            parts: vec![part(0, Ok(figures)), part(1, Err("needs root".into()))],
        }
    }

    #[test]
    fn the_page_has_absolute_figures_and_targets_at_its_end() {
        let text = measurement().markdown("## Notes\n");
        assert!(
            text.contains("| WRITE | 0.900 GB/s | ceiling | 1.00 GB/s | 0.80 (0.75 to 0.95) | more |"),
            "{text}"
        );
        assert!(text.contains("not run: needs root") && text.contains("docs/bench/bulk.svg"));
        let appendix = &text[text.find("## Appendix").unwrap()..];
        assert!(
            appendix.contains("| Bandwidth | WRITE | 0.80 | at least 0.9 | **below target** |"),
            "{appendix}"
        );
        assert!(text.ends_with("## Notes\n"));
    }

    #[test]
    fn a_page_is_redrawn_from_its_file() {
        let dir = Scratch::new(&std::env::temp_dir()).unwrap();
        let file = dir.0.join("figures.json");
        let measured = measurement();
        measured.write(&file).unwrap();
        let read = Measurement::read(&file).unwrap();
        assert_eq!(read.markdown(""), measured.markdown(""));
        let former = fs::read_to_string(&file)
            .unwrap()
            .replace("\"schema\":2", "\"schema\":1");
        fs::write(&file, former).unwrap();
        assert!(
            Measurement::read(&file)
                .err()
                .unwrap()
                .contains("expected schema 2, found 1")
        );
    }

    #[test]
    fn a_part_that_is_measured_again_has_its_own_date() {
        let mut again = measurement();
        again.environment.commit = "def".into();
        again.parts.truncate(1);
        let merged = again.merged_into(measurement());
        let text = merged.markdown("");
        assert_eq!(merged.parts.len(), 2);
        assert!(
            text.contains("at commit abc,") && text.contains("at commit def: 0 rounds"),
            "{text}"
        );
    }

    #[test]
    fn page_and_readme_follow_from_the_figures_of_this_commit() {
        let root = crate::cargo::workspace_root();
        let text = |name: &str| fs::read_to_string(root.join(name)).unwrap();
        let measured = Measurement::read(&root.join(FIGURES)).unwrap();
        assert!(
            measured.markdown(&text(NOTES)) == text(PAGE),
            "`cargo xtask bench --redraw` writes {PAGE}"
        );
        let readme = text(README);
        let table = measured.table();
        assert!(table.contains(" GB/s |"), "{table}");
        assert!(
            pages::between(&readme, "speed", &table).unwrap() == readme,
            "`cargo xtask bench --redraw` writes {README}"
        );
    }
}
