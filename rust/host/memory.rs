//! Page-aligned host memory of an exact size, in huge pages where the kernel gives them, faulted in
//! by all workers at once.
//!
//! - MEM-1 A buffer is zeroed, and `nbytes` rounded up to a page is all it takes (no power of two);
//!   nothing is left to fault in later.
//! - MEM-2 Worker `w` of `n` touches the `w`-th part first, so those pages lie on its NUMA node.
//! - MEM-3 The pages before and after a buffer are not accessible: an overrun is a fault, not a
//!   corruption.
//! - MEM-4 A buffer of megabytes that is more than what is free, less what other processes have
//!   claimed, is refused before it is taken: the kernel grants it all the same, and kills the
//!   process that touches it.
//!
//! Cost: the kernel zeroes every page once, at the memory bandwidth of all workers; address space
//! for one huge page and two pages beside it.

use std::ffi::c_void;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};

use crate::host::claims;
use crate::host::pool::Pool;
use crate::{Error, Result};

const HUGE_PAGE_FOLDER: &str = "/sys/kernel/mm/transparent_hugepage";

/// Size of a transparent huge page where the kernel does not say.
const HUGE_PAGE_BYTES_USUAL: usize = 2 << 20;

/// From this size on, asking what is free costs less than faulting in.
const CHECKED_BYTES_MIN: usize = 2 << 20;

/// How much a worker faults in before it says so: whole huge pages.
const NOTED_BYTES: usize = 256 << 20;

/// How a buffer is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BufferConfig {
    /// Keep it in RAM (`mlock`): never swapped out. Counts against `RLIMIT_MEMLOCK`.
    pub lock: bool,
}

/// Checks that so much memory is free, before lists of so many bytes are made: an allocation that
/// fails ends the process.
///
/// # Errors
/// [`Error::Os`] where it is not, or others have claimed it.
pub fn check_free(nbytes: u64) -> Result<()> {
    if nbytes >= CHECKED_BYTES_MIN as u64 {
        drop(claims::take(nbytes)?);
    }
    Ok(())
}

/// Host memory of its own. See the [module](self).
#[derive(Debug)]
pub struct Buffer {
    mapping: Mapping,
    nbytes: usize,
    huge_page_bytes: usize,
    locked: bool,
}

impl Buffer {
    /// Maps `nbytes` of zeroed memory and faults it in on the workers of `pool`. Of zero bytes one
    /// page is held.
    ///
    /// # Errors
    /// [`Error::Os`] where there is not so much free memory, or others have claimed it, or the
    /// system does not give it, or does not let this process lock it (the message names
    /// `RLIMIT_MEMLOCK`); [`Error::Value`] for a size beyond the address space.
    pub fn new(nbytes: usize, config: &BufferConfig, pool: &Pool) -> Result<Self> {
        let huge_page = huge_page_size();
        let extent = Extent::new(nbytes, huge_page)?;
        let taking =
            if nbytes >= CHECKED_BYTES_MIN { Some(claims::take(nbytes as u64)?) } else { None };
        let mapping = Mapping::new(&extent)?;
        let room = mapping.len / huge_page * huge_page;
        if room > 0 {
            // Refused only by a kernel without huge pages; what was given is measured below.
            let _ = mapping.advise(0, mapping.len, Advice::LinuxHugepage);
        }
        mapping.populate(pool, huge_page, &|nbytes| {
            if let Some(taking) = &taking {
                taking.touched(nbytes as u64);
            }
        })?;
        drop(taking);
        if config.lock {
            mapping.lock()?;
        }
        let huge_page_bytes = if room > 0 { mapping.huge_page_bytes() } else { 0 };
        if huge_page_bytes < room / 2 {
            warn_without_huge_pages(huge_page_bytes, room);
        }
        Ok(Self { mapping, nbytes, huge_page_bytes, locked: config.lock })
    }

    /// The first byte, aligned to a page, and to a huge page where the buffer holds one. Never
    /// null.
    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.begin.as_ptr()
    }

    /// The size asked for, in bytes.
    pub fn nbytes(&self) -> usize {
        self.nbytes
    }

    /// How many bytes lay in huge pages when the buffer had been faulted in, as the kernel reports
    /// it.
    pub fn huge_page_bytes(&self) -> usize {
        self.huge_page_bytes
    }

    /// Whether the memory is locked in RAM.
    pub fn locked(&self) -> bool {
        self.locked
    }
}

/// Addresses that nothing is at, and that nothing else gets: a name for state that is not in host
/// memory. An access to them is a fault. They take no memory, and none is accounted for.
#[derive(Debug)]
pub struct AddressSpace {
    begin: NonNull<c_void>,
    nbytes: usize,
    len: usize,
}

// SAFETY: no memory is behind the addresses; they are the same on all threads, and may be unmapped
// from any.
unsafe impl Send for AddressSpace {}
// SAFETY: as above.
unsafe impl Sync for AddressSpace {}

impl AddressSpace {
    /// `nbytes` of them, from a page on.
    ///
    /// # Errors
    /// [`Error::Os`] where there are not so many; [`Error::Value`] for a size beyond all.
    pub fn new(nbytes: usize) -> Result<Self> {
        let Extent { len, .. } = Extent::new(nbytes, rustix::param::page_size())?;
        let refused = |errno| {
            Error::os(format!("cannot reserve `{nbytes}` addresses; hint: see `ulimit -v`"), errno)
        };
        // SAFETY: a new private mapping at an address of the kernel's choice touches nothing that
        // exists.
        let begin = unsafe {
            rustix::mm::mmap_anonymous(
                ptr::null_mut(),
                len,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let begin = NonNull::new(begin.map_err(refused)?).ok_or_else(|| refused(Errno::NOMEM))?;
        Ok(Self { begin, nbytes, len })
    }

    /// The first of them.
    pub fn address(&self) -> usize {
        self.begin.as_ptr().expose_provenance()
    }

    /// How many were asked for.
    pub fn nbytes(&self) -> usize {
        self.nbytes
    }
}

impl Drop for AddressSpace {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nothing else unmaps it. Cannot fail for a whole mapping.
        let _ = unsafe { rustix::mm::munmap(self.begin.as_ptr(), self.len) };
    }
}

/// The most memory this process may lock, in bytes; `None` is unlimited. A privileged process
/// (`CAP_IPC_LOCK`) is not bound by it.
pub fn memlock_limit_bytes() -> Option<u64> {
    getrlimit(Resource::Memlock).current
}

/// The kernel's policy for huge pages, such as `always [madvise] never`; `None` where it has none.
pub fn huge_page_policy() -> Option<String> {
    fs::read_to_string(format!("{HUGE_PAGE_FOLDER}/enabled"))
        .ok()
        .map(|text| text.trim().to_owned())
}

fn huge_page_size() -> usize {
    fs::read_to_string(format!("{HUGE_PAGE_FOLDER}/hpage_pmd_size"))
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .filter(|size: &usize| size.is_power_of_two())
        .unwrap_or(HUGE_PAGE_BYTES_USUAL)
}

fn warn_without_huge_pages(huge_page_bytes: usize, room: usize) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if WARNED.swap(true, Ordering::Relaxed) {
        return;
    }
    let policy = huge_page_policy().unwrap_or_else(|| "none".to_owned());
    log::warn!(
        target: "stepwell",
        "huge pages for `{huge_page_bytes}` of `{room}` bytes only, the rest is in small pages \
         (slower); the kernel's policy is `{policy}`; \
         hint: `echo madvise > {HUGE_PAGE_FOLDER}/enabled`; where that is set, memory is \
         fragmented: `echo 1 > /proc/sys/vm/compact_memory`"
    );
}

/// Whole pages, and the address space in which they can be aligned and have a page on each side.
struct Extent {
    page: usize,
    len: usize,
    align: usize,
    reservation_len: usize,
}

impl Extent {
    fn new(nbytes: usize, huge_page: usize) -> Result<Self> {
        let page = rustix::param::page_size();
        let sizes = || {
            let len = nbytes.max(1).checked_next_multiple_of(page)?;
            let align = if len >= huge_page { huge_page } else { page };
            let reservation_len = len.checked_add(align)?.checked_add(page)?;
            isize::try_from(reservation_len).ok()?;
            Some(Self { page, len, align, reservation_len })
        };
        sizes().ok_or_else(|| {
            Error::value(format!("buffer of `{nbytes}` bytes is beyond the address space"))
        })
    }
}

/// An accessible range of whole pages inside an inaccessible reservation.
#[derive(Debug)]
struct Mapping {
    reservation: NonNull<c_void>,
    reservation_len: usize,
    begin: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone and may be unmapped from any thread; its
// addresses are the same on all of them.
unsafe impl Send for Mapping {}
// SAFETY: nothing reads or writes the memory through a shared mapping but `populate`, before any
// other code has seen it; users of the raw pointer answer for their own accesses.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(&Extent { page, len, align, reservation_len }: &Extent) -> Result<Self> {
        let refused = |errno: Errno| {
            Error::os(
                format!(
                    "cannot map `{len}` bytes of host memory; hint: see `free -h`, `ulimit -v` and \
                     `sysctl vm.overcommit_memory`"
                ),
                errno,
            )
        };
        // SAFETY: a new private mapping at an address of the kernel's choice touches nothing that
        // exists.
        let reservation = unsafe {
            rustix::mm::mmap_anonymous(
                ptr::null_mut(),
                reservation_len,
                ProtFlags::empty(),
                MapFlags::PRIVATE,
            )
        }
        .map_err(refused)?;
        let reservation = NonNull::new(reservation).ok_or_else(|| refused(Errno::NOMEM))?;
        // At least one page stays before, and one after: with `skip <= align` the range ends a page
        // before the reservation does, or earlier.
        let skip = page + (reservation.addr().get() + page).next_multiple_of(align)
            - (reservation.addr().get() + page);
        debug_assert!(skip <= align && skip + len + page <= reservation_len);
        // SAFETY: `skip + len` is within the reservation.
        let begin = unsafe { reservation.cast::<u8>().add(skip) };
        let mapping = Self { reservation, reservation_len, begin, len };
        // SAFETY: the range lies inside the reservation made above, which only `mapping` knows.
        unsafe {
            rustix::mm::mprotect(
                begin.as_ptr().cast(),
                len,
                MprotectFlags::READ | MprotectFlags::WRITE,
            )
        }
        .map_err(refused)?;
        Ok(mapping)
    }

    fn advise(&self, offset: usize, len: usize, advice: Advice) -> rustix::io::Result<()> {
        debug_assert!(offset + len <= self.len);
        // SAFETY: the range is inside this mapping. The advice used here (huge pages, populate)
        // keeps the contents.
        unsafe { rustix::mm::madvise(self.begin.as_ptr().add(offset).cast(), len, advice) }
    }

    /// Faults every page in, each worker its part, cut at huge pages. `note` is told how many bytes
    /// more are there.
    fn populate(&self, pool: &Pool, huge_page: usize, note: &(dyn Fn(usize) + Sync)) -> Result<()> {
        let failure = Mutex::new(None);
        let populate = |begin: usize, end: usize| {
            for begin in (begin..end).step_by(NOTED_BYTES) {
                let end = end.min(begin + NOTED_BYTES);
                if let Err(errno) = self.populate_range(begin, end) {
                    *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(errno);
                    return;
                }
                note(end - begin);
            }
        };
        let num_units = self.len.div_ceil(huge_page);
        if num_units < 2 {
            populate(0, self.len);
        } else {
            let num_workers = pool.threads();
            let edge = |worker: usize| {
                ((worker as u128 * num_units as u128 / num_workers as u128) as usize * huge_page)
                    .min(self.len)
            };
            pool.run_on_each_worker(&|worker| populate(edge(worker), edge(worker + 1)));
        }
        match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            None => Ok(()),
            Some(errno) => Err(Error::os(
                format!(
                    "cannot fault in `{}` bytes of host memory; hint: see `free -h` and the \
                     container's limit",
                    self.len
                ),
                errno,
            )),
        }
    }

    fn populate_range(&self, begin: usize, end: usize) -> rustix::io::Result<()> {
        loop {
            match self.advise(begin, end - begin, Advice::LinuxPopulateWrite) {
                Err(Errno::INTR | Errno::AGAIN) => {}
                // A kernel before 5.14.
                Err(Errno::INVAL) => break,
                done => return done,
            }
        }
        for offset in (begin..end).step_by(rustix::param::page_size()) {
            // SAFETY: inside the mapping, which no other code has seen yet; ranges of
            // different workers do not overlap.
            unsafe { self.begin.as_ptr().add(offset).write_volatile(0) };
        }
        Ok(())
    }

    fn lock(&self) -> Result<()> {
        // SAFETY: the range is this mapping; locking does not change its contents. It ends with the
        // mapping.
        unsafe { rustix::mm::mlock(self.begin.as_ptr().cast(), self.len) }.map_err(|errno| {
            let limit = memlock_limit_bytes()
                .map_or("unlimited".to_owned(), |bytes| format!("{bytes} bytes"));
            Error::os(
                format!(
                    "cannot lock `{}` bytes of host memory: RLIMIT_MEMLOCK is `{limit}`; hint: \
                     raise it with `ulimit -l unlimited` \
                     (`--ulimit memlock=-1` for a container, `LimitMEMLOCK=infinity` for a \
                     service, /etc/security/limits.conf for a login), \
                     or do without the lock",
                    self.len
                ),
                errno,
            )
        })
    }

    fn huge_page_bytes(&self) -> usize {
        let Ok(file) = File::open("/proc/self/smaps") else { return 0 };
        // The inaccessible pages around the range keep the kernel from merging it with others: its
        // entry is its own.
        anon_huge_page_bytes(BufReader::new(file), self.begin.addr().get())
            .unwrap_or(None)
            .unwrap_or(0)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the reservation was mapped by `new` and nothing else unmaps it; a `Buffer` that
        // hands out its pointer asks users not to outlive it. Cannot fail for a whole mapping.
        let _ = unsafe { rustix::mm::munmap(self.reservation.as_ptr(), self.reservation_len) };
    }
}

/// The bytes in anonymous huge pages of the entry of `smaps` that begins at `address`; `None` if
/// there is no such entry.
fn anon_huge_page_bytes(smaps: impl BufRead, address: usize) -> io::Result<Option<usize>> {
    let mut inside = false;
    for line in smaps.lines() {
        let line = line?;
        if inside && let Some(value) = line.strip_prefix("AnonHugePages:") {
            let kib = value
                .trim()
                .strip_suffix("kB")
                .and_then(|number| number.trim().parse::<usize>().ok());
            return Ok(kib.map(|kib| kib << 10));
        }
        // A header is `begin-end permissions ...`; every other line begins with a name.
        if let Some((begin, _)) = line.split_once('-')
            && let Ok(begin) = usize::from_str_radix(begin, 16)
        {
            if inside {
                return Ok(None);
            }
            inside = begin == address;
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0000001000 rw-p 00000000 00:00 0 \n\
Size:                  4 kB\nAnonHugePages:         8 kB\n\
7f0000200000-7f0000800000 rw-p 00000000 00:00 0 \n\
Size:               6144 kB\nAnonHugePages:      4096 kB\nVmFlags: rd wr\n\
7f0000900000-7f0000a00000 ---p 00000000 00:00 0 \n\
Size:               1024 kB\n\
7f0000a00000-7f0000b00000 ---p 00000000 00:00 0 \n\
AnonHugePages:      1024 kB\n";

    #[test]
    fn smaps_entry_is_found_by_its_begin() {
        let read = |address| anon_huge_page_bytes(SMAPS.as_bytes(), address).expect("readable");
        assert_eq!(read(0x7f00_0020_0000), Some(4 << 20));
        assert_eq!(read(0x7f00_0000_0000), Some(8 << 10));
        assert_eq!(read(0x7f00_0020_1000), None);
        // Its entry has no such line; the next one's is not its own.
        assert_eq!(read(0x7f00_0090_0000), None);
    }
}
