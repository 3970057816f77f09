//! The corpora of the fuzz targets once more, without libFuzzer, and whether each target has what belongs to it.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use ferroce_fuzz_targets::{TARGETS, Target, for_each_target};

/// A corpus is kept small: it is replayed in every run of the tests, and in the repository for ever.
const MAX_FILES: usize = 100;
const MAX_BYTES: u64 = 200 << 10;

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
}

fn names_in(dir: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let stem = |e: fs::DirEntry| e.path().file_stem().unwrap().to_str().unwrap().to_owned();
    entries.map(|e| stem(e.unwrap())).collect()
}

/// Gives a target every file of its corpus. The name of the file is in the panic's output.
fn replay(name: &str) {
    let target = TARGETS.iter().find(|(n, _)| *n == name).expect("a target").1;
    let dir = fuzz().join("seeds").join(name);
    let mut files: Vec<PathBuf> = fs::read_dir(&dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|e| e.unwrap().path())
        .collect();
    files.sort();
    assert!(!files.is_empty(), "{}: no inputs", dir.display());
    assert!(files.len() <= MAX_FILES, "{}: {} files", dir.display(), files.len());
    let mut bytes = 0;
    for file in &files {
        let data = fs::read(file).unwrap();
        bytes += data.len() as u64;
        run(target, &data, file);
    }
    assert!(bytes <= MAX_BYTES, "{}: {bytes} bytes", dir.display());
    println!("{name}: {} inputs replayed, {bytes} bytes", files.len());
}

fn run(target: Target, data: &[u8], file: &Path) {
    struct Named<'a>(&'a Path);
    impl Drop for Named<'_> {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("with the input {}", self.0.display());
            }
        }
    }
    let _named = Named(file);
    target(data);
    // What the first bytes alone lead to, too: it is not in the corpus, and ends in the middle of something.
    target(&data[..data.len() / 2]);
}

macro_rules! replays {
    ($($name:ident),* $(,)?) => {
        $(#[test] fn $name() { replay(stringify!($name)); })*

        #[test]
        fn every_target_is_replayed_and_registered() {
            let targets: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
            let replayed: BTreeSet<String> = [$(stringify!($name)),*].map(str::to_owned).into();
            assert_eq!(replayed, targets, "replayed here");
            assert_eq!(names_in(&fuzz().join("fuzz_targets")), targets, "fuzz/fuzz_targets");
            assert_eq!(names_in(&fuzz().join("seeds")), targets, "fuzz/seeds");
            let manifest = fs::read_to_string(fuzz().join("Cargo.toml")).unwrap();
            let readme = fs::read_to_string(fuzz().join("README.md")).unwrap();
            for name in &targets {
                assert!(manifest.contains(&format!("name = \"{name}\"")), "{name} in fuzz/Cargo.toml");
                assert!(readme.contains(&format!("| `{name}` |")), "{name} in fuzz/README.md");
            }
        }
    };
}

for_each_target!(replays);
