use std::fs;

use rnbd::block::BlockOp;

use super::*;

fn exports(named: impl IntoIterator<Item = ExportSpec>, folder: Option<&FolderSpec>) -> io::Result<Arc<Exports>> {
    Exports::new(named, folder, Caching::PageCache)
}

fn image(path: &Path, len: u64) {
    fs::File::create(path).unwrap().set_len(len).unwrap();
}

fn spec(name: &str, path: &Path, read_only: bool) -> ExportSpec {
    ExportSpec {
        name: name.into(),
        path: path.into(),
        read_only,
        migrate: false,
        within: None,
    }
}

fn migrating(name: &str, path: &Path) -> ExportSpec {
    ExportSpec {
        migrate: true,
        ..spec(name, path, false)
    }
}

#[test]
fn specs_parse() {
    let s: ExportSpec = "disk=/a/b=c.img,ro".parse().unwrap();
    assert_eq!(s, spec("disk", Path::new("/a/b=c.img"), true));
    assert_eq!(
        "d=x,rw".parse::<ExportSpec>().unwrap(),
        spec("d", Path::new("x"), false)
    );
    for text in ["d=x,migrate", "d=x,rw,migrate", "d=x,migrate,rw"] {
        assert_eq!(
            text.parse::<ExportSpec>().unwrap(),
            migrating("d", Path::new("x")),
            "{text}"
        );
    }
    assert_eq!(
        "d=a,,b,,,ro".parse::<ExportSpec>().unwrap(),
        spec("d", Path::new("a,b,"), true)
    );
    for bad in [
        "disk",
        "=x",
        "disk=",
        "a..b=x",
        "d=,ro",
        "d=x,ro,migrate",
        "d=x,ro,rw",
        "d=x,",
    ] {
        assert!(bad.parse::<ExportSpec>().is_err(), "{bad}");
    }
    let e = "d=x,ro,exclusive".parse::<ExportSpec>().unwrap_err();
    assert!(e.contains("\"exclusive\"") && e.contains("migrate"), "{e}");
    let folder: FolderSpec = "/images,migrate".parse().unwrap();
    assert!(folder.migrate && !folder.read_only && folder.path == Path::new("/images"));
    assert!("/images,migrate,ro".parse::<FolderSpec>().is_err());
    assert!("/images,x".parse::<FolderSpec>().is_err() && ",ro".parse::<FolderSpec>().is_err());
}

/// The second writer, in mode "migration" beside one in mode `first`.
fn second_writer(first: AccessMode, migrate: [bool; 2]) -> Result<(), Errno> {
    let t = tempfile::tempdir().unwrap();
    let path = t.path().join("i");
    image(&path, 4096);
    let [a, b] = [("a", migrate[0]), ("b", migrate[1])].map(|(name, migrate)| ExportSpec {
        migrate,
        ..spec(name, &path, false)
    });
    let ex = exports([a, b], None).unwrap();
    let w = ex.open("s", b"a", first).unwrap();
    let second = ex.open("t", b"b", AccessMode::Migration).map(drop);
    assert_eq!(ex.open("t", b"b", AccessMode::ReadWrite).unwrap_err(), Errno::EPERM);
    drop(w);
    ex.open("t", b"b", AccessMode::Migration)
        .expect("alone it is read-write");
    second
}

#[test]
fn a_second_writer_needs_an_export_that_migrates() {
    for first in [AccessMode::ReadWrite, AccessMode::Migration] {
        assert_eq!(second_writer(first, [false, false]), Err(Errno::EPERM));
        assert_eq!(second_writer(first, [true, true]), Ok(()));
        // Both names of the file have to allow it.
        assert_eq!(second_writer(first, [true, false]), Err(Errno::EPERM));
        assert_eq!(second_writer(first, [false, true]), Err(Errno::EPERM));
    }
}

#[test]
fn what_has_to_be_within_a_folder_leads_out_of_it_by_no_link() {
    let t = tempfile::tempdir().unwrap();
    let [root, secret, inside, out] = ["root", "secret", "root/inside", "root/out"].map(|name| t.path().join(name));
    fs::create_dir(&root).unwrap();
    image(&secret, 4096);
    image(&inside, 4096);
    std::os::unix::fs::symlink("../secret", &out).unwrap();
    std::os::unix::fs::symlink("inside", root.join("link")).unwrap();
    let within = |path: PathBuf, root: &Path| ExportSpec {
        within: Some(root.into()),
        ..spec("disk", &path, false)
    };
    for path in [&inside, &root.join("link"), &root.join("./link")] {
        exports([within(path.clone(), &root)], None).unwrap();
    }
    exports([within(secret.clone(), &secret)], None).unwrap();
    for path in [&secret, &out, &root.join("../secret"), &root.join("link/../../secret")] {
        assert!(
            exports([within(path.clone(), &root)], None).is_err(),
            "{}",
            path.display()
        );
    }
    // Nor by one that is put there later.
    let ex = exports([within(inside.clone(), &root)], None).unwrap();
    fs::rename(&out, &inside).unwrap();
    assert_eq!(ex.find("s", b"disk").unwrap_err(), Errno::EXDEV);
    std::os::unix::fs::symlink("..", root.join("up")).unwrap();
    for path in [root.join("up"), t.path().into(), inside.clone()] {
        let folder = FolderSpec {
            path,
            within: Some(root.clone()),
            ..FolderSpec::default()
        };
        assert!(exports([], Some(&folder)).is_err(), "{}", folder.path.display());
    }
    let folder = FolderSpec {
        path: root.clone(),
        within: Some(root.clone()),
        ..FolderSpec::default()
    };
    exports([], Some(&folder)).unwrap();
}

#[test]
fn all_spellings_are_one_export() {
    let t = tempfile::tempdir().unwrap();
    let path = t.path().join("disk");
    image(&path, 4096);
    fs::hard_link(&path, t.path().join("link")).unwrap();
    std::os::unix::fs::symlink(".", t.path().join("self")).unwrap();
    let folder = FolderSpec {
        path: t.path().into(),
        ..FolderSpec::default()
    };
    let id = |ex: &Exports, name: &str| ex.find("s", name.as_bytes()).unwrap().id().clone();
    let ex = exports([], Some(&folder)).unwrap();
    let spellings = [
        "disk",
        "/disk",
        "//disk",
        "./disk",
        "disk/",
        "disk/.",
        "link",
        "self/self/disk",
    ];
    for name in spellings {
        assert_eq!(id(&ex, name), id(&ex, "disk"), "{name}");
    }
    assert_eq!(ex.find("s", b"a/../disk").unwrap_err(), Errno::EINVAL);
    let ex = exports([spec("disk", &path, false), spec("other", &path, true)], Some(&folder)).unwrap();
    assert_eq!(id(&ex, "//disk"), id(&ex, "disk"));
    assert_ne!(id(&ex, "disk"), id(&ex, "other"), "what they allow differs");
}

#[test]
fn one_writer_many_readers_two_for_migration() {
    let t = tempfile::tempdir().unwrap();
    let path = t.path().join("i");
    image(&path, 1 << 20);
    fs::hard_link(&path, t.path().join("j")).unwrap();
    let folder = FolderSpec {
        path: t.path().into(),
        migrate: true,
        ..FolderSpec::default()
    };
    let ex = exports([migrating("disk", &path)], Some(&folder)).unwrap();
    let w = ex.open("s", b"disk", AccessMode::ReadWrite).unwrap();
    assert_eq!(w.image().geometry().size, 1 << 20);
    for same in [&b"disk"[..], b"/disk", b"i", b"j"] {
        assert_eq!(ex.open("t", same, AccessMode::ReadWrite).unwrap_err(), Errno::EPERM);
        ex.open("t", same, AccessMode::ReadOnly).unwrap();
    }
    let m = ex.open("t", b"j", AccessMode::Migration).unwrap();
    assert_eq!(ex.open("u", b"disk", AccessMode::Migration).unwrap_err(), Errno::EPERM);
    drop(w);
    assert_eq!(ex.open("u", b"disk", AccessMode::ReadWrite).unwrap_err(), Errno::EPERM);
    drop(m);
    ex.open("u", b"disk", AccessMode::ReadWrite).unwrap();
    assert!(ex.writers.is_empty());
}

#[test]
fn a_failed_sync_is_known_to_all_who_have_the_file_open() {
    let t = tempfile::tempdir().unwrap();
    let (path, other) = (t.path().join("i"), t.path().join("o"));
    image(&path, 4096);
    image(&other, 4096);
    let ex = exports(
        [
            migrating("disk", &path),
            spec("same", &path, true),
            spec("other", &other, false),
        ],
        None,
    )
    .unwrap();
    let writer = ex.open("s", b"disk", AccessMode::ReadWrite).unwrap();
    let second = ex.open("t", b"disk", AccessMode::Migration).unwrap();
    let elsewhere = ex.open("t", b"other", AccessMode::ReadWrite).unwrap();
    second.image().sync().sync_failed();
    for open in [&writer, &second, &ex.open("u", b"same", AccessMode::ReadOnly).unwrap()] {
        assert_eq!(open.image().sync().check(BlockOp::Flush), Err(Errno::EIO));
    }
    assert_eq!(elsewhere.image().sync().check(BlockOp::Flush), Ok(()));
    // Who comes next, while one of them is there, can't rely on what was written either.
    drop(second);
    let next = ex.open("t", b"disk", AccessMode::Migration).unwrap();
    assert_eq!(next.image().sync().check(BlockOp::Flush), Err(Errno::EIO));
    drop((writer, next));
    let reopened = ex.open("t", b"disk", AccessMode::ReadWrite).unwrap();
    assert_eq!(reopened.image().sync().check(BlockOp::Flush), Ok(()));
}

/// Instance of a server on a machine with this boot ID, which has what was written to an image and not flushed.
fn instance(boot: &Boot, path: &Path) -> Option<Instance> {
    let ex = Exports::on(boot.clone(), [spec("disk", path, false)], None, Caching::PageCache).unwrap();
    let open = ex.open("s", b"disk", AccessMode::ReadWrite).unwrap();
    open.instance()
}

#[test]
fn an_instance_is_a_file_in_one_boot() {
    let t = tempfile::tempdir().unwrap();
    let (path, other) = (t.path().join("i"), t.path().join("o"));
    image(&path, 4096);
    image(&other, 4096);
    let [one, two] = ["1", "2"].map(Boot::named);
    let known = instance(&one, &path);
    assert!(known.is_some());
    // Another process, and another size: nothing is lost.
    File::options().write(true).open(&path).unwrap().set_len(8192).unwrap();
    assert_eq!(instance(&one, &path), known);
    assert_ne!(instance(&two, &path), known, "another boot, or another machine");
    assert_ne!(instance(&one, &other), known, "another file");
    // The file keeps its identity under another name; one in its place has another, though it may have the same number.
    let moved = t.path().join("m");
    fs::rename(&path, &moved).unwrap();
    assert_eq!(instance(&one, &moved), known);
    fs::remove_file(&moved).unwrap();
    image(&path, 8192);
    assert_ne!(instance(&one, &path), known);
    let system = Boot::of_system();
    assert_eq!(
        (system.clone(), instance(&system, &path)),
        (Boot::of_system(), instance(&system, &path))
    );
    assert!(instance(&system, &path).is_some());
}

#[test]
fn without_a_boot_there_is_no_instance() {
    let t = tempfile::tempdir().unwrap();
    let path = t.path().join("i");
    image(&path, 4096);
    assert_eq!(instance(&Boot::named(""), &path), None);
}

/// It may be at its close that a sync fails, when no client is left who could be told.
#[test]
fn a_failed_sync_makes_another_instance() {
    let t = tempfile::tempdir().unwrap();
    let path = t.path().join("i");
    image(&path, 4096);
    let boot = Boot::named("1");
    let before = instance(&boot, &path);
    let ex = exports([spec("disk", &path, false)], None).unwrap();
    let open = ex.open("s", b"disk", AccessMode::ReadWrite).unwrap();
    open.image().sync().sync_failed();
    open.close();
    let after = instance(&boot, &path);
    assert_ne!(after, before);
    assert_eq!(instance(&boot, &path), after);
}

#[test]
fn two_servers_do_not_write_to_one_image() {
    let t = tempfile::tempdir().unwrap();
    let path = t.path().join("i");
    image(&path, 4096);
    let [a, b] = [(); 2].map(|()| exports([migrating("disk", &path)], None).unwrap());
    let w = a.open("s", b"disk", AccessMode::ReadWrite).unwrap();
    let m = a.open("s", b"disk", AccessMode::Migration).unwrap();
    drop(w);
    assert_eq!(b.open("s", b"disk", AccessMode::ReadWrite).unwrap_err(), Errno::EBUSY);
    b.open("s", b"disk", AccessMode::ReadOnly).unwrap();
    drop(m);
    b.open("s", b"disk", AccessMode::ReadWrite).unwrap();
}

#[test]
fn read_only_exports_and_folders() {
    let t = tempfile::tempdir().unwrap();
    let path = t.path().join("i");
    image(&path, 4096);
    let folder = FolderSpec {
        path: t.path().into(),
        read_only: true,
        ..FolderSpec::default()
    };
    let ex = exports([spec("disk", &path, true)], Some(&folder)).unwrap();
    for name in [&b"disk"[..], b"i"] {
        assert_eq!(ex.open("s", name, AccessMode::ReadWrite).unwrap_err(), Errno::EACCES);
        assert_eq!(ex.open("s", name, AccessMode::Migration).unwrap_err(), Errno::EACCES);
        assert!(
            ex.open("s", name, AccessMode::ReadOnly)
                .unwrap()
                .image()
                .geometry()
                .read_only
        );
    }
    assert_eq!(ex.open("s", b"other", AccessMode::ReadOnly).unwrap_err(), Errno::ENOENT);
    assert_eq!(ex.open("s", b"..", AccessMode::ReadOnly).unwrap_err(), Errno::EINVAL);
}

#[test]
fn each_session_sees_its_own_folder() {
    let t = tempfile::tempdir().unwrap();
    for s in ["a", "b"] {
        fs::create_dir(t.path().join(s)).unwrap();
    }
    image(&t.path().join("a/disk"), 4096);
    std::os::unix::fs::symlink("../a/disk", t.path().join("b/theirs")).unwrap();
    let folder = FolderSpec {
        path: t.path().join("%SESSNAME%/ignored"),
        ..FolderSpec::default()
    };
    let ex = exports([], Some(&folder)).unwrap();
    ex.open("a", b"/disk", AccessMode::ReadOnly).unwrap();
    assert_eq!(ex.open("b", b"disk", AccessMode::ReadOnly).unwrap_err(), Errno::ENOENT);
    assert!(ex.open("b", b"theirs", AccessMode::ReadOnly).is_err());
    for bad in ["..", ".", "a/../a", "", "a/"] {
        assert_eq!(
            ex.open(bad, b"disk", AccessMode::ReadOnly).unwrap_err(),
            Errno::EINVAL,
            "{bad}"
        );
    }
}

#[test]
fn a_missing_image_is_told_at_start() {
    let e = exports([spec("d", Path::new("/nonexistent/i"), false)], None).unwrap_err();
    assert!(e.to_string().contains("/nonexistent/i"), "{e}");
    let e = exports([spec("d", Path::new("/dev/null"), false)], None).unwrap_err();
    assert!(e.to_string().contains("/dev/null: neither an image"), "{e}");
    let f = FolderSpec {
        path: "/nonexistent".into(),
        ..FolderSpec::default()
    };
    assert!(exports([], Some(&f)).is_err());
}
