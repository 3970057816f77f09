//! Programs that loaded this library after the C library, so that its file and signal calls are not in front of libc's: those that found
//! libibverbs.so.1 by `dlopen` or in LD_LIBRARY_PATH, without LD_PRELOAD.
//!
//! The calls that go through an object's global offset table are led to ours there, as GOTCHA and other wrappers of
//! functions do it. Ours go on to what the calls were bound to, be it libc's or another library's in front of that
//! (librspreload).

use std::{
    ffi::{CStr, CString, c_void},
    os::unix::ffi::OsStringExt,
    ptr,
    sync::{
        Mutex, Once,
        atomic::{AtomicPtr, Ordering},
    },
};

use libc::{Elf64_Rela, Elf64_Sym, dl_phdr_info};
use roce::environment;

use crate::{
    interpose,
    rdmacm::ffi,
    signals,
    symbols::{self, Call, Segment},
};

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

/// A call, and what it is bound to without us: null, whatever that is.
struct Target<'a> {
    call: &'a Call,
    theirs: *const c_void,
}

impl<'a> Target<'a> {
    fn of(call: &'a Call) -> Option<Self> {
        let name = CString::new(call.name).ok()?;
        // SAFETY: a C string.
        let theirs = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        (!theirs.is_null()).then_some(Self { call, theirs })
    }
}

/// How many objects the process had loaded and unloaded when it was last looked at.
static SEEN: Mutex<(u64, u64)> = Mutex::new((0, 0));

/// Leads the file and signal calls of all objects that the process has loaded to ours, if it loaded us too late. Cheap when nothing
/// was loaded since.
pub(crate) fn run() {
    if !symbols::is_late() {
        return;
    }
    // Another thread is at it, or was when this child was forked: go on without.
    let Ok(mut seen) = SEEN.try_lock() else {
        return;
    };
    let mut now = (0, 0);
    symbols::each_object(|info| {
        now = (info.dlpi_adds, info.dlpi_subs);
        true
    });
    if *seen == now {
        return;
    }
    *seen = now;
    let calls = interpose::CALLS.iter().chain(ffi::CALLS).chain(signals::CALLS);
    // Not from within the walk, which holds a lock of the dynamic linker.
    let targets: Vec<Target<'_>> = calls.filter_map(Target::of).collect();
    // libc's own calls are not for us: it has the functions themselves.
    let left = |object: &Object| object.has(symbols::inside()) || targets.iter().any(|t| object.has(t.theirs));
    walk(&targets, |object| !left(object));
    static CHILDREN: Once = Once::new();
    CHILDREN.call_once(preload_children);
}

/// Makes programs that this one starts find the devices' files too (rdma-core's tests run `ls`), as under `ferroce run`.
fn preload_children() {
    const PRELOAD: &CStr = c"LD_PRELOAD";
    let Some(path) = symbols::own_path().filter(|_| !environment::is_secure()) else {
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

/// Leads calls of the librdmacm that this library has loaded to ours.
pub(crate) fn librdmacm(handle: *mut c_void, calls: &[Call]) {
    // SAFETY: a handle, and a C string.
    let inside = unsafe { libc::dlsym(handle, c"rdma_create_id".as_ptr()) };
    let theirs = ptr::null();
    let targets: Vec<Target<'_>> = calls.iter().map(|call| Target { call, theirs }).collect();
    walk(&targets, |object| object.has(inside));
}

/// Changes the objects that are wanted.
fn walk(targets: &[Target<'_>], is_wanted: impl Fn(&Object) -> bool) {
    symbols::each_object(|info| {
        // SAFETY: a loaded object's headers and tables.
        unsafe {
            if let Some(object) = Object::of(info).filter(&is_wanted) {
                object.rebind(targets);
            }
        }
        false
    });
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
        // SAFETY: the caller's promise.
        let segments = unsafe { symbols::segments(info) };
        let find = |kind: u32| segments.clone().find(|s| s.kind == kind);
        let loads = || segments.clone().filter(|s| s.kind == libc::PT_LOAD);
        let base = info.dlpi_addr as usize;
        let dynamic = find(libc::PT_DYNAMIC)?.at;
        let mut out = Self {
            base,
            start: loads().map(|s| s.at).min()?,
            end: loads().map(|s| s.at + s.len).max()?,
            relro: find(PT_GNU_RELRO).map_or((0, 0), |Segment { at, len, .. }| (at, len)),
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

    /// # Safety
    /// The object is loaded.
    unsafe fn rebind(&self, targets: &[Target<'_>]) {
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
                if let Some(target) = targets.iter().find(|t| t.call.name.as_bytes() == name) {
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
    unsafe fn lead(&self, slot: usize, target: &Target<'_>) {
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
        entry.store(target.call.ours.cast_mut(), Ordering::Relaxed);
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
