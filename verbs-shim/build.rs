//! Beside the library itself, the directory `lib/ferroce` of the build tree: libibverbs.so.1 and librdmacm.so.1.
//!
//! A library that rustc links has no symbol versions: it passes the linker a version script of its own, and GNU ld takes no
//! second one. So these two are stubs made of assembly, as many jumps as there are symbols, each to the address that a
//! table of libferroce_verbs.so has for it (`src/table.rs`). They hold no state: however a process gets at them, what
//! they jump to is the one libferroce_verbs.so that it has loaded. `symbols` has names, versions and answers.

use std::{
    env,
    ffi::OsStr,
    fmt::Write as _,
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

#[path = "build/glibc.rs"]
mod glibc;
#[path = "build/symbols.rs"]
mod symbols;

use symbols::{Answer, Symbol};

/// Stub of libibverbs. `table`: the symbol that `src/table.rs` has in the library.
const VERBS: Stub = Stub {
    soname: "libibverbs.so.1",
    link: "libibverbs.so",
    table: "ferroce_ibverbs_table",
};
const RDMACM: Stub = Stub {
    soname: "librdmacm.so.1",
    link: "librdmacm.so",
    table: "ferroce_rdmacm_table",
};
const REAL: &str = "libferroce_verbs.so";

struct Stub {
    soname: &'static str,
    /// Name that the linker finds by `-l`.
    link: &'static str,
    table: &'static str,
}

type Result<T> = std::result::Result<T, String>;

fn failed(what: &Path) -> impl FnOnce(io::Error) -> String {
    move |e| format!("{}: {e}", what.display())
}

/// The instructions of one stub. All registers that carry arguments stay as they are, the number of a variadic function's
/// vector registers (`al`) included.
fn jump(arch: &str, table: &str, slot: usize) -> Result<String> {
    let at = slot * 8;
    match arch {
        "x86_64" => Ok(format!(
            "\tendbr64\n\tmovq {table}@GOTPCREL(%rip), %r11\n\tjmp *{at}(%r11)\n"
        )),
        "aarch64" => Ok(format!(
            "\thint #34\n\tadrp x16, :got:{table}\n\tldr x16, [x16, :got_lo12:{table}]\n\tldr x16, [x16, #{at}]\n\tbr x16\n"
        )),
        _ => Err(format!("no stubs are written for {arch}")),
    }
}

/// The assembly of a stub library.
fn assembly(arch: &str, table: &str, symbols: &[Symbol]) -> Result<String> {
    // The character before types differs, since `@` begins a comment on other machines.
    let mut out = String::from(".section .note.GNU-stack,\"\",%progbits\n");
    for (slot, symbol) in symbols.iter().enumerate() {
        let (label, versioned) = (format!("stub{slot}"), symbol.versioned());
        let body = match symbol.answer {
            Answer::Object => format!(
                ".bss\n.globl {label}\n.type {label},%object\n.size {label},8\n.balign 8\n{label}:\n\t.zero 8\n"
            ),
            _ => format!(
                ".text\n.globl {label}\n.type {label},%function\n.balign 16\n{label}:\n\t.cfi_startproc\n{}\t.cfi_endproc\n\
                 .size {label},.-{label}\n",
                jump(arch, table, slot)?
            ),
        };
        let _ = write!(out, "{body}.symver {label},{versioned}\n\n");
    }
    Ok(out)
}

/// The linker's version script.
fn script(symbols: &[Symbol]) -> String {
    let mut out = String::new();
    let mut before = None;
    for version in symbols::versions(symbols) {
        let names = symbols.iter().filter(|s| s.version == version);
        let names: Vec<&str> = names.map(|s| s.name.as_str()).collect();
        // Labels are not exported.
        let local = if before.is_none() { " local: *;" } else { "" };
        // Private versions inherit nothing.
        let parent = before.filter(|_| !version.contains("PRIVATE")).unwrap_or_default();
        let _ = writeln!(out, "{version} {{ global: {};{local} }} {parent};", names.join("; "));
        before = Some(version);
    }
    out
}

/// Links a library.
fn cc(args: &[&OsStr]) -> Result<()> {
    let mut all: Vec<&OsStr> = ["-shared", "-nostdlib", "-Wl,--hash-style=gnu", "-Wl,-z,noexecstack"]
        .map(OsStr::new)
        .into();
    all.extend(args);
    compiler(&all)
}

/// Assembles a file.
fn compile(source: &Path, object: &Path) -> Result<()> {
    compiler(&["-c".as_ref(), source.as_ref(), "-o".as_ref(), object.as_ref()])
}

/// Runs the C compiler, as the linker that it is for rustc.
fn compiler(args: &[&OsStr]) -> Result<()> {
    let given = env::var_os("RUSTC_LINKER").or_else(|| env::var_os("CC"));
    let program = given.unwrap_or_else(|| match env::var("TARGET") == env::var("HOST") {
        true => "cc".into(),
        false => format!(
            "{}-linux-gnu-gcc",
            env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default()
        )
        .into(),
    });
    let status = Command::new(&program)
        .args(args)
        .status()
        .map_err(failed(Path::new(&program)))?;
    match status.success() {
        true => Ok(()),
        false => Err(format!("{} ended with {status}", program.display())),
    }
}

fn put(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(failed(path))
}

/// Builds an object that has the tables' names, to link with: the library itself is linked after this.
fn stand_in(out: &Path) -> Result<PathBuf> {
    let (source, file) = (out.join("real.s"), out.join(REAL));
    let mut text = String::from(".section .note.GNU-stack,\"\",%progbits\n.data\n");
    for Stub { table, .. } in [VERBS, RDMACM] {
        let _ = write!(
            text,
            ".globl {table}\n.type {table},%object\n.size {table},8\n{table}:\n\t.quad 0\n"
        );
    }
    put(&source, &text)?;
    cc(&[
        source.as_ref(),
        format!("-Wl,-soname,{REAL}").as_ref(),
        "-o".as_ref(),
        file.as_ref(),
    ])?;
    Ok(file)
}

/// Replaces a link.
fn relink(target: &str, at: &Path) -> Result<()> {
    if fs::read_link(at).is_ok_and(|t| t.as_os_str() == target) {
        return Ok(());
    }
    let _ = fs::remove_file(at);
    symlink(target, at).map_err(failed(at))
}

/// Links a stub library and puts it into the directory, in one step for programs that run with the old one.
fn build(stub: &Stub, symbols: &[Symbol], needed: &[&Path], out: &Path, dir: &Path) -> Result<PathBuf> {
    let arch = env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    let (source, map, made) = (
        out.join(stub.soname).with_extension("s"),
        out.join(stub.soname).with_extension("map"),
        out.join(stub.soname),
    );
    put(&source, &assembly(&arch, stub.table, symbols)?)?;
    put(&map, &script(symbols))?;
    let (soname, map) = (
        format!("-Wl,-soname,{}", stub.soname),
        format!("-Wl,--version-script={}", map.display()),
    );
    let mut args: Vec<&OsStr> = vec![
        source.as_ref(),
        soname.as_ref(),
        map.as_ref(),
        // Never unloaded: the system's librdmacm, which forwarding loads, has the same SONAME, and would be taken by the next
        // library that needs this one.
        "-Wl,--no-as-needed,--enable-new-dtags,-rpath,$ORIGIN,-z,nodelete".as_ref(),
        "-o".as_ref(),
        made.as_ref(),
    ];
    args.extend(needed.iter().map(|n| n.as_os_str()));
    cc(&args)?;
    let (place, fresh) = (dir.join(stub.soname), dir.join(stub.soname).with_extension("new"));
    if fs::read(&place).ok() != fs::read(&made).ok() {
        fs::copy(&made, &fresh).map_err(failed(&fresh))?;
        fs::rename(&fresh, &place).map_err(failed(&place))?;
    }
    relink(stub.soname, &dir.join(stub.link))?;
    println!("cargo::rerun-if-changed={}", place.display());
    Ok(made)
}

/// The tables, for `src/table.rs`.
fn tables(verbs: &[Symbol], rdmacm: &[Symbol]) -> String {
    let mut out = String::new();
    let own = verbs.iter().chain(rdmacm).filter(|s| s.answer == Answer::Own);
    let mut ours: Vec<&str> = own.map(|s| s.name.as_str()).collect();
    ours.sort_unstable();
    ours.dedup();
    out.push_str("mod exported {\n    unsafe extern \"C\" {\n");
    for name in &ours {
        let _ = writeln!(out, "        pub(super) fn {name}();");
    }
    out.push_str("    }\n}\n");
    for (stub, symbols) in [(VERBS, verbs), (RDMACM, rdmacm)] {
        let _ = writeln!(
            out,
            "#[unsafe(no_mangle)]\n#[allow(non_upper_case_globals)]\nstatic {}: [Entry; {}] = [",
            stub.table,
            symbols.len()
        );
        for symbol in symbols {
            let entry = match &symbol.answer {
                Answer::Own => format!("exported::{} as *const c_void", symbol.name),
                Answer::By(function) => format!("crate::unsupported::{function} as *const c_void"),
                Answer::Object => "std::ptr::null()".to_owned(),
                Answer::System(index) => format!("forward::call::<{index}> as *const c_void"),
            };
            let _ = writeln!(out, "    Entry({entry}),");
        }
        out.push_str("];\n");
    }
    out
}

/// Functions of the system's librdmacm, for `src/rdmacm/forward.rs`.
fn system(rdmacm: &[Symbol]) -> String {
    let names: Vec<String> = rdmacm
        .iter()
        .filter(|s| matches!(s.answer, Answer::System(_)))
        .map(|s| format!("    c\"{}\",\n", s.name))
        .collect();
    format!(
        "/// Functions of the system's librdmacm, by the number of [`call`].\n\
         pub(crate) static SYSTEM: [&std::ffi::CStr; {}] = [\n{}];\n",
        names.len(),
        names.concat()
    )
}

/// The folder of the profile: `target/debug`, of which cargo gives a folder's folder.
fn profile_dir(out: &Path) -> Result<&Path> {
    let found = out.ancestors().nth(3);
    found.ok_or_else(|| format!("{} is not where cargo puts things", out.display()))
}

fn run() -> Result<()> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("no OUT_DIR")?);
    let read = |name: &str| {
        let path = Path::new("symbols").join(name);
        println!("cargo::rerun-if-changed={}", path.display());
        fs::read_to_string(&path).map_err(failed(&path))
    };
    let mut verbs = symbols::public(&read("libibverbs.txt")?, Answer::Own)?;
    verbs.extend(symbols::private(&read("private.txt")?)?);
    let rdmacm = symbols::rdmacm(&read("librdmacm.txt")?)?;
    put(&out.join("table.rs"), &tables(&verbs, &rdmacm))?;
    put(&out.join("system.rs"), &system(&rdmacm))?;

    let dir = profile_dir(&out)?.join("lib/ferroce");
    fs::create_dir_all(&dir).map_err(failed(&dir))?;
    relink(&format!("../../{REAL}"), &dir.join(REAL))?;
    let real = stand_in(&out)?;
    let libibverbs = build(&VERBS, &verbs, &[&real], &out, &dir)?;
    build(&RDMACM, &rdmacm, &[&libibverbs, &real], &out, &dir)?;

    // One object by this name, however it is loaded; its functions are its own, whatever else in the process has their
    // names (the tables would lead back to the stubs); and it is never unloaded, for it has threads.
    for arg in ["-soname,libferroce_verbs.so", "-Bsymbolic-functions", "-z,nodelete"] {
        println!("cargo::rustc-cdylib-link-arg=-Wl,{arg}");
    }
    let target = |name: &str| env::var(format!("CARGO_CFG_TARGET_{name}")).unwrap_or_default();
    if target("ARCH") == "x86_64" && target("ENV") == "gnu" {
        for arg in glibc::arguments(&out)? {
            println!("cargo::rustc-cdylib-link-arg={arg}");
        }
    }
    Ok(())
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build");
    println!("cargo::rerun-if-env-changed=CC");
    if env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        return;
    }
    if let Err(text) = run() {
        println!("cargo::error={text}");
    }
}
