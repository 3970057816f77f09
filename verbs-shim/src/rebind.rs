//! Programs that loaded this library after the C library, so that its file and signal calls are not in front of libc's: those that found
//! libibverbs.so.1 by `dlopen` or in LD_LIBRARY_PATH, without LD_PRELOAD.
//!
//! The calls that go through an object's global offset table are led to ours there, as GOTCHA and other wrappers of
//! functions do it. Ours go on to what the calls were bound to, be it libc's or another library's in front of that
//! (librspreload).

use std::{
    ffi::{CStr, CString, OsStr, c_int, c_void},
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::PathBuf,
    ptr,
    sync::{
        Mutex, Once,
        atomic::{AtomicPtr, AtomicU8, Ordering},
    },
};

use libc::{Elf64_Phdr, Elf64_Rela, Elf64_Sym, dl_phdr_info};
use roce::environment;

use crate::{
    interpose::{self, Call},
    rdmacm::ffi,
    signals, table,
};

/// SONAME of this library.
pub(crate) const REAL: &str = "libferroce_verbs.so";
/// Relocations of a table's entries: `R_*_GLOB_DAT`, `R_*_JUMP_SLOT`.
const SLOTS: [u64; 2] = if cfg!(target_arch = "aarch64") {
    [1025, 1026]
} else {
    [6, 7]
};
const DT_NULL: i64 = 0;
const DT_PLTRELSZ: i64 = 2;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_RELA: i64 = 7;
const DT_RELASZ: i64 = 8;
const DT_PLTREL: i64 = 20;
const DT_JMPREL: i64 = 23;
const PT_GNU_RELRO: u32 = 0x6474_e552;

/// An entry of an object's dynamic section (`Elf64_Dyn`).
#[repr(C)]
struct Dynamic {
    tag: i64,
    value: u64,
}

/// Whether an address is in this library.
pub(crate) fn is_ours(address: *const c_void) -> bool {
    static BASE: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let mut own = BASE.load(Ordering::Relaxed);
    if own.is_null() {
        own = object_of(table::inside());
        BASE.store(own, Ordering::Relaxed);
    }
    object_of(address) == own
}

/// The file of this library; none when it is part of a program, as in its tests.
pub(crate) fn own_path() -> Option<PathBuf> {
    // SAFETY: plain data, which the call fills; the name lives as long as the library.
    let path: PathBuf = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let known = libc::dladdr(table::inside(), &raw mut info) != 0 && !info.dli_fname.is_null();
        known.then(|| OsStr::from_bytes(CStr::from_ptr(info.dli_fname).to_bytes()).into())?
    };
    let path = path.canonicalize().ok()?;
    (path.file_name() == Some(REAL.as_ref())).then_some(path)
}

/// Returns the beginning of the object that has an address, or null.
fn object_of(address: *const c_void) -> *mut c_void {
    // SAFETY: plain data, which the call fills; any address may be asked for.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        match libc::dladdr(address, &raw mut info) {
            0 => ptr::null_mut(),
            _ => info.dli_fbase,
        }
    }
}

/// Whether our calls are behind libc's, in the order in which the dynamic linker looks. Nothing changes that.
pub(crate) fn is_late() -> bool {
    const NO: u8 = 1;
    const YES: u8 = 2;
    static KNOWN: AtomicU8 = AtomicU8::new(0);
    match KNOWN.load(Ordering::Relaxed) {
        NO => false,
        YES => true,
        _ => {
            // SAFETY: a C string.
            let first = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"write".as_ptr()) };
            let late = !is_ours(first) && is_behind_libc();
            KNOWN.store(if late { YES } else { NO }, Ordering::Relaxed);
            late
        }
    }
}

/// Whether the dynamic linker has loaded this library after libc; somebody else may be in front of both.
fn is_behind_libc() -> bool {
    let mut behind = false;
    // SAFETY: `first_of_two` gets what it expects.
    unsafe { libc::dl_iterate_phdr(Some(first_of_two), (&raw mut behind).cast()) };
    behind
}

/// Ends at the first object that is libc or this library, in the order of loading.
unsafe extern "C" fn first_of_two(info: *mut dl_phdr_info, _size: usize, behind: *mut c_void) -> c_int {
    // SAFETY: what the dynamic linker passes, of a loaded object.
    let Some(object) = (unsafe { Object::of(&*info) }) else {
        return 0;
    };
    let libc = object.has(ffi::inside_libc());
    // SAFETY: what `is_behind_libc` passes.
    unsafe { *behind.cast::<bool>() = libc };
    c_int::from(libc || object.has(table::inside()))
}

/// A call, and what it is bound to without us.
struct Target {
    name: &'static str,
    ours: *const c_void,
    /// Null: whatever it is.
    theirs: *const c_void,
}

impl Target {
    fn of(call: &Call) -> Option<Self> {
        let name = CString::new(call.name).ok()?;
        // SAFETY: a C string.
        let theirs = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        (!theirs.is_null()).then_some(Self {
            name: call.name,
            ours: call.ours,
            theirs,
        })
    }
}

/// How many objects the process had loaded and unloaded when it was last looked at.
static SEEN: Mutex<(u64, u64)> = Mutex::new((0, 0));

/// Leads the file and signal calls of all objects that the process has loaded to ours, if it loaded us too late. Cheap when nothing
/// was loaded since.
pub(crate) fn run() {
    if !is_late() {
        return;
    }
    // Who comes meanwhile, even in a child that was forked at this moment, goes on without.
    let Ok(mut seen) = SEEN.try_lock() else {
        return;
    };
    let mut now = (0, 0);
    // SAFETY: `count` gets what it expects.
    unsafe { libc::dl_iterate_phdr(Some(count), (&raw mut now).cast()) };
    if *seen == now {
        return;
    }
    *seen = now;
    let calls = interpose::CALLS.iter().chain(&ffi::CALLS).chain(&signals::CALLS);
    // Not from within the walk, which holds a lock of the dynamic linker.
    let targets = calls.filter_map(Target::of).collect();
    walk(targets, ptr::null_mut());
    static CHILDREN: Once = Once::new();
    CHILDREN.call_once(preload_children);
}

/// Has the programs that this one starts find the devices' files too (rdma-core's tests ask `ls`), as under `ferroce run`.
fn preload_children() {
    const PRELOAD: &CStr = c"LD_PRELOAD";
    let Some(path) = own_path().filter(|_| !environment::is_secure()) else {
        return;
    };
    let mut list = path.into_os_string().into_vec();
    if list.iter().any(|b| b": \t\n".contains(b)) {
        return;
    }
    if let Some(others) = environment::var_os("LD_PRELOAD") {
        list.push(b':');
        list.extend(others.into_vec());
    }
    if let Ok(list) = CString::new(list) {
        // SAFETY: C strings. Programs list devices before they have threads that look at the environment.
        unsafe { libc::setenv(PRELOAD.as_ptr(), list.as_ptr(), 1) };
    }
}

/// Leads the event channels of a librdmacm that we have loaded to ours.
pub(crate) fn librdmacm(handle: *mut c_void) {
    // SAFETY: a handle, and a C string.
    let inside = unsafe { libc::dlsym(handle, c"rdma_create_id".as_ptr()) };
    let targets = ffi::CHANNEL_CALLS.iter().map(|call| Target {
        name: call.name,
        ours: call.ours,
        theirs: ptr::null(),
    });
    walk(targets.collect(), object_of(inside));
}

/// Changes one object, or all.
fn walk(targets: Vec<Target>, only: *mut c_void) {
    let mut walk = Walk { targets, only };
    // SAFETY: `visit` gets what it expects.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut walk).cast()) };
}

/// Takes how many objects were loaded and unloaded so far.
unsafe extern "C" fn count(info: *mut dl_phdr_info, _size: usize, now: *mut c_void) -> c_int {
    // SAFETY: what `run` passes, and what the dynamic linker does.
    unsafe { *now.cast::<(u64, u64)>() = ((*info).dlpi_adds, (*info).dlpi_subs) };
    1
}

struct Walk {
    targets: Vec<Target>,
    /// The object to change; null: every one but libc and this.
    only: *mut c_void,
}

/// Takes one object; the dynamic linker keeps it from being unloaded meanwhile.
unsafe extern "C" fn visit(info: *mut dl_phdr_info, _size: usize, walk: *mut c_void) -> c_int {
    // SAFETY: what `walk` passes, and what the dynamic linker does.
    let (walk, info) = unsafe { (&*walk.cast::<Walk>(), &*info) };
    // SAFETY: a loaded object's headers and tables.
    let done = unsafe { Object::of(info) };
    if let Some(object) = done
        && object.is_wanted(walk)
    {
        // SAFETY: as above.
        unsafe { object.rebind(&walk.targets) };
    }
    0
}

/// A loaded object, as far as it is needed.
struct Object {
    base: usize,
    /// Its memory.
    start: usize,
    end: usize,
    /// Part that is read-only after relocation: first address and bytes.
    relro: (usize, usize),
    symbols: *const Elf64_Sym,
    strings: *const libc::c_char,
    /// Relocations: address and bytes.
    tables: [(usize, usize); 2],
}

impl Object {
    /// # Safety
    /// `info` is the dynamic linker's, of an object that is loaded.
    unsafe fn of(info: &dl_phdr_info) -> Option<Self> {
        let base = info.dlpi_addr as usize;
        // SAFETY: the caller's promise.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        let address = |p: &Elf64_Phdr| base.wrapping_add(p.p_vaddr as usize);
        let loads = || headers.iter().filter(|p| p.p_type == libc::PT_LOAD);
        let dynamic = headers.iter().find(|p| p.p_type == libc::PT_DYNAMIC).map(address)?;
        let relro = headers.iter().find(|p| p.p_type == PT_GNU_RELRO);
        let mut out = Self {
            base,
            start: loads().map(address).min()?,
            end: loads().map(|p| address(p) + p.p_memsz as usize).max()?,
            relro: relro.map_or((0, 0), |p| (address(p), p.p_memsz as usize)),
            symbols: ptr::null(),
            strings: ptr::null(),
            tables: [(0, 0); 2],
        };
        let mut entry = dynamic as *const Dynamic;
        // SAFETY: the section ends with DT_NULL.
        while let Dynamic { tag, value } = unsafe { &*entry }
            && *tag != DT_NULL
        {
            let value = *value as usize;
            // The dynamic linker has made most of them addresses already.
            let at = if value < base { value + base } else { value };
            match *tag {
                DT_SYMTAB => out.symbols = at as *const _,
                DT_STRTAB => out.strings = at as *const _,
                DT_RELA => out.tables[0].0 = at,
                DT_RELASZ => out.tables[0].1 = value,
                DT_JMPREL => out.tables[1].0 = at,
                DT_PLTRELSZ => out.tables[1].1 = value,
                // Without addends, as no 64-bit machine of ours has them.
                DT_PLTREL if value as i64 != DT_RELA => return None,
                _ => {}
            }
            // SAFETY: as above.
            entry = unsafe { entry.add(1) };
        }
        let whole = !out.symbols.is_null() && !out.strings.is_null();
        whole.then_some(out)
    }

    fn has(&self, address: *const c_void) -> bool {
        (self.start..self.end).contains(&(address as usize))
    }

    fn is_wanted(&self, walk: &Walk) -> bool {
        match walk.only.is_null() {
            // libc's own calls are not for us: it has the functions themselves.
            true => !self.has(table::inside()) && !walk.targets.iter().any(|t| self.has(t.theirs)),
            false => self.has(walk.only),
        }
    }

    /// # Safety
    /// The object is loaded.
    unsafe fn rebind(&self, targets: &[Target]) {
        for (at, bytes) in self.tables.iter().filter(|t| t.0 != 0) {
            let count = bytes / size_of::<Elf64_Rela>();
            // SAFETY: the table's own length.
            let relocations = unsafe { std::slice::from_raw_parts(*at as *const Elf64_Rela, count) };
            for relocation in relocations {
                let (kind, symbol) = (relocation.r_info & 0xffff_ffff, (relocation.r_info >> 32) as usize);
                if !SLOTS.contains(&kind) || symbol == 0 {
                    continue;
                }
                // SAFETY: an index of the object's own tables.
                let name = unsafe {
                    let symbol = &*self.symbols.add(symbol);
                    CStr::from_ptr(self.strings.add(symbol.st_name as usize)).to_bytes()
                };
                if let Some(target) = targets.iter().find(|t| t.name.as_bytes() == name) {
                    // SAFETY: a slot of the table, by the relocation.
                    unsafe { self.lead(self.base.wrapping_add(relocation.r_offset as usize), target) };
                }
            }
        }
    }

    /// Leads one slot to ours, if it is bound to the first of its name or not yet bound (it points to the object itself then).
    ///
    /// # Safety
    /// `slot` is an entry of the object's global offset table, for this function.
    unsafe fn lead(&self, slot: usize, target: &Target) {
        // SAFETY: the caller's promise. Other threads may call through it at any time.
        let entry = unsafe { AtomicPtr::from_ptr(slot as *mut *mut c_void) };
        let bound = entry.load(Ordering::Relaxed).cast_const();
        if !target.theirs.is_null() && bound != target.theirs && !self.has(bound) {
            return;
        }
        let page = page_size();
        let (first, len) = self.relro;
        // Whole pages are protected, and the last one only if it is whole.
        let protected = (first & !(page - 1)..(first + len) & !(page - 1)).contains(&slot);
        let at = (slot & !(page - 1)) as *mut c_void;
        // SAFETY: a page of the object's data.
        if protected && unsafe { libc::mprotect(at, page, libc::PROT_READ | libc::PROT_WRITE) } != 0 {
            return;
        }
        entry.store(target.ours.cast_mut(), Ordering::Relaxed);
        if protected {
            // SAFETY: as it was.
            unsafe { libc::mprotect(at, page, libc::PROT_READ) };
        }
    }
}

/// Bytes of a page.
fn page_size() -> usize {
    // SAFETY: no pointers.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}
