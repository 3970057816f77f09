//! Runs test programs that are built already.
//!
//! A program counts as run only if every test that it lists has a result.

use std::{
    fs::{self, File},
    process::Stdio,
    time::{Duration, Instant},
};

use crate::{Result, cargo, process, tally::Tally, test_program::TestProgram};

/// Longest run of a program.
const LIMIT: Duration = Duration::from_secs(30 * 60);

/// Run of a program.
pub(crate) struct Job<'a> {
    program: &'a TestProgram,
    /// Full names of ignored tests; `None`: all tests that are not ignored.
    ignored: Option<Vec<String>>,
    expected: u64,
    one_by_one: bool,
}

impl<'a> Job<'a> {
    /// Selects all tests that are not ignored.
    pub(crate) fn all(program: &'a TestProgram) -> Result<Self> {
        let expected = program.list(&[])?.len() - program.ignored()?.len();
        Ok(Self {
            program,
            ignored: None,
            expected: expected as u64,
            one_by_one: false,
        })
    }

    /// Selects ignored tests by name.
    pub(crate) fn ignored(program: &'a TestProgram, names: Vec<String>) -> Self {
        Self {
            program,
            expected: names.len() as u64,
            ignored: Some(names),
            one_by_one: false,
        }
    }

    /// Runs one test at a time.
    pub(crate) fn one_by_one(self) -> Self {
        Self {
            one_by_one: true,
            ..self
        }
    }

    /// Runs the program to its end. Shows the output of a failure.
    fn run(&self, env: &[(&str, &str)]) -> Result<Tally> {
        let logs = cargo::target_dir()?.join("test-logs");
        let ignored = if self.ignored.is_some() { "-ignored" } else { "" };
        let log = logs.join(format!("{}-{}{ignored}.log", self.program.package, self.program.target));
        let named = |e: std::io::Error| format!("{}: {e}", log.display());
        fs::create_dir_all(&logs).map_err(named)?;
        let out = File::create(&log).map_err(named)?;
        let mut command = self.program.command();
        command.envs(env.iter().copied()).stdin(Stdio::null());
        command.stderr(out.try_clone().map_err(named)?).stdout(out);
        if let Some(names) = &self.ignored {
            command.args(["--ignored", "--exact"]).args(names);
        }
        if self.one_by_one {
            command.args(["--test-threads", "1"]);
        }
        let begin = Instant::now();
        let name = self.program.name();
        let mut child = process::Guard::spawn(&name, &mut command)?;
        let status = child.wait_for(LIMIT)?;
        drop(child);
        let text = String::from_utf8_lossy(&fs::read(&log).map_err(named)?).into_owned();
        let mut tally = count(&text);
        tally.failures.iter_mut().for_each(|f| *f = format!("{name}: {f}"));
        let ran = tally.passed + tally.failed;
        if ran != self.expected {
            tally.fail(format!("{name}: {ran} tests have a result, of {}", self.expected));
        }
        match status {
            None => tally.fail(format!(
                "{name} ran for {LIMIT:?} and was stopped at: {}",
                hanging(&text).join(", ")
            )),
            Some(status) if !status.success() && tally.failed == 0 => tally.fail(format!("{name} ended with {status}")),
            Some(_) => {}
        }
        let took = begin.elapsed().as_secs_f64();
        let shown = if tally.failed > 0 {
            format!("\n{text}")
        } else {
            String::new()
        };
        println!(
            "{name}: {} passed, {} failed  [{took:.1} s]{shown}",
            tally.passed, tally.failed
        );
        Ok(tally)
    }
}

/// Runs programs one after the other; each has as many threads as there are processors.
pub(crate) fn run(jobs: Vec<Job<'_>>, env: &[(&str, &str)]) -> Result<Tally> {
    let mut jobs = jobs.into_iter().filter(|j| j.expected > 0).peekable();
    if jobs.peek().is_none() {
        return Err("there is no such test".into());
    }
    let mut tally = Tally::default();
    for job in jobs {
        tally.add(job.run(env)?);
    }
    Ok(tally)
}

/// Runs the documentation's examples of all crates, with the libraries of [`cargo::build_tests`].
pub(crate) fn doc_tests() -> Result<Tally> {
    let mut command = cargo::compiling();
    let args = [
        &["test", "--locked", "--workspace", "--doc", "--no-fail-fast"],
        cargo::with_contract(),
    ]
    .concat();
    println!("+ cargo {}", args.join(" "));
    command.args(args);
    let mut child = process::Guard::spawn("cargo test --doc", command.stdout(Stdio::piped()))?;
    let mut text = String::new();
    let status = child.for_each_line(|line| {
        text.push_str(line);
        text.push('\n');
    })?;
    let mut tally = count(&text);
    if !status.success() && tally.failed == 0 {
        tally.fail(format!("cargo test --doc ended with {status}"));
    }
    if tally.passed + tally.failed == 0 {
        tally.fail("the documentation has no example that runs".to_owned());
    }
    if tally.failed > 0 {
        println!("{text}");
    }
    Ok(tally)
}

/// Returns the tests that libtest has reported as slow, and that have no result.
fn hanging(output: &str) -> Vec<&str> {
    let slow = output.lines().filter_map(|line| {
        let rest = line.strip_prefix("test ")?;
        rest.strip_suffix(" has been running for over 60 seconds")
    });
    slow.filter(|name| !output.contains(&format!("test {name} ... ")))
        .collect()
}

/// Counts libtest's results. Ignored tests are not counted: they run by name.
fn count(output: &str) -> Tally {
    let mut tally = Tally::default();
    for line in output.lines() {
        if let Some(rest) = line.strip_prefix("test result: ") {
            let number = |word: &str| {
                let before = rest
                    .split([';', '.'])
                    .map(str::trim)
                    .find_map(|p| p.strip_suffix(word))?;
                before.trim().parse::<u64>().ok()
            };
            tally.passed += number("passed").unwrap_or(0);
            tally.failed += number("failed").unwrap_or(0);
        } else if let Some(name) = line.strip_prefix("test ").and_then(|l| l.strip_suffix(" ... FAILED")) {
            tally.failures.push(name.to_owned());
        }
    }
    tally
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::{Job, TestProgram, count, hanging, run};

    #[test]
    fn results_are_counted() {
        let tally = count(
            "running 3 tests\n\
             test a::b ... ok\n\
             test a::c ... FAILED\n\
             test result: FAILED. 12 passed; 1 failed; 2 ignored; 0 measured; 7 filtered out; finished in 0.01s\n\
             test result: ok. 5 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n",
        );
        assert_eq!(
            (tally.passed, tally.failed, tally.failures),
            (17, 1, vec!["a::c".to_owned()])
        );
    }

    #[test]
    fn hanging_tests_are_named() {
        let text = "test a has been running for over 60 seconds\n\
                    test b::c has been running for over 60 seconds\n\
                    test a ... ok\n";
        assert_eq!(hanging(text), ["b::c"]);
    }

    /// A program that lists two tests, one of them ignored, and prints `result` when it is to run them.
    fn program(dir: &std::path::Path, result: &str) -> TestProgram {
        let path = dir.join("program");
        let script = format!(
            "#!/bin/sh\ncase \"$*\" in\n*--list*--ignored*) echo 'b: test';;\n*--list*) echo 'a: test'; echo 'b: test';;\n\
             *) {result};;\nesac\n"
        );
        // Not written here and executed at once: another thread may fork while it is open.
        let file = dir.join("text");
        fs::write(&file, script).unwrap();
        assert!(
            std::process::Command::new("cp")
                .args([&file, &path])
                .status()
                .unwrap()
                .success()
        );
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        TestProgram {
            package: "xtask".to_owned(),
            target: format!("harness-{}", dir.file_name().unwrap().to_string_lossy()),
            dir: dir.to_owned(),
            path,
        }
    }

    #[test]
    fn a_program_that_runs_less_than_it_lists_fails() {
        let passed = |n| format!("echo 'test result: ok. {n} passed; 0 failed; 0 ignored; 0 measured; 1 filtered out'");
        let base = std::env::temp_dir().join(format!("ferroce-xtask-{}", std::process::id()));
        for (i, (result, wanted)) in [
            (passed(1), (1, 0)),
            (passed(0), (0, 1)),
            ("exit 0".to_owned(), (0, 1)),
            (passed(1) + "; exit 3", (1, 1)),
        ]
        .into_iter()
        .enumerate()
        {
            let dir = base.join(i.to_string());
            fs::create_dir_all(&dir).unwrap();
            let program = program(&dir, &result);
            for job in [
                Job::all(&program).unwrap(),
                Job::ignored(&program, program.ignored().unwrap()),
            ] {
                let tally = run(vec![job], &[]).unwrap();
                assert_eq!((tally.passed, tally.failed), wanted, "{result}");
            }
        }
        fs::remove_dir_all(&base).unwrap();
    }
}
