//! Files of tensors: reads and writes of whole tensors at any offset of any file, many at once.
//!
//! ```text
//! let files = Files::new(&options)
//! let transfer = files.read(path, offset, memory)    several in flight, on several files
//! transfer.wait(timeout)                             none yet: wait again
//! ```
//!
//! A transfer is cut into pieces of at most a block. Whole pages of the file bypass
//! the page cache where file system and address allow it. The rest goes through the page cache:
//! what is before the first whole page and behind the last, and all of a tensor whose address does
//! not fit.
//!
//! - FIL-1 Every result is looked at. A call that does a part is followed by others for the rest. A
//!   file that ends before what is read, a full drive and any error of the system fail the
//!   transfer, with path and offset.
//! - FIL-2 What is written through the page cache is on the drive when the transfer is over
//!   (`O_DSYNC`): an error of the drive is this transfer's, too. What bypasses the cache has been
//!   given to the drive; it is durable with an `fsync` of the file.
//! - FIL-3 A page of the file is written by one way only within a transfer, and by the page cache
//!   where two transfers share it. So neighbours in flight leave each other's bytes alone.
//! - FIL-4 Memory is the caller's. The caller keeps it until the transfer is over, also after a
//!   wait that timed out.
//!
//! Cost: 100 B per block in flight. Nothing is copied but through the page cache.

use std::{
    fmt,
    fs::{File, OpenOptions},
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rustix::{fs::OFlags, io::Errno};

use super::{
    EngineKind,
    direct::{self, Alignment},
    disk::{BLOCK_BYTES, Between, Disk},
    engine::{Engine, QUEUE_DEPTH_MAX},
    queue::{Failure, Kind, Operation, Outcome, Target, lock},
};
use crate::{Error, Result};

/// The largest block: what one call moves at most.
pub const TRANSFER_BYTES_MAX: usize = 1 << 30;

/// How files are read and written.
#[derive(Clone)]
pub struct Options {
    /// What moves the bytes.
    pub engine: EngineKind,
    /// The most bytes of one call.
    pub block_bytes: usize,
    /// Calls that are in flight at most.
    pub queue_depth: usize,
    /// What stands between a transfer and its file. It has positional calls.
    pub between: Option<Between>,
}

/// See the [module](self).
pub struct Files {
    engine: Engine,
    block_bytes: usize,
    between: Option<Between>,
    /// The process that may use it.
    pid: u32,
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Files(blocks of {} bytes, rings {})", self.block_bytes, self.engine.has_rings)
    }
}

/// What is written to.
#[derive(Clone, Copy, Debug)]
pub enum Place<'a> {
    /// Made if it is not there; never truncated.
    Path(&'a Path),
    /// The file of a descriptor that is open for writing. It stays the caller's, and may be closed
    /// meanwhile. Its own offset and `O_APPEND` have no effect.
    Descriptor(BorrowedFd<'a>),
}

impl Files {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`Error::Value`] for options that cannot work; [`Error::Os`] where io_uring is asked for and
    /// not there, or no thread can be had.
    pub fn new(options: &Options) -> Result<Self> {
        let Options { engine, block_bytes, queue_depth, ref between } = *options;
        if !(1..=TRANSFER_BYTES_MAX).contains(&block_bytes) {
            return Err(Error::value(format!(
                "block_bytes is `{block_bytes}`, expected 1 to {TRANSFER_BYTES_MAX}"
            )));
        }
        if !(1..=QUEUE_DEPTH_MAX).contains(&queue_depth) {
            return Err(Error::value(format!(
                "queue_depth is `{queue_depth}`, expected 1 to {QUEUE_DEPTH_MAX}"
            )));
        }
        // Only calls can be stood between.
        let kind = if between.is_some() { EngineKind::Positional } else { engine };
        let engine = Engine::start(kind, "files of tensors", &[None], &[], queue_depth, 0)?;
        let block_bytes = block_bytes.next_multiple_of(page_bytes());
        Ok(Self { engine, block_bytes, between: between.clone(), pid: std::process::id() })
    }

    /// Whether io_uring moves the bytes.
    #[must_use]
    pub fn has_rings(&self) -> bool {
        self.engine.has_rings
    }

    /// Begins to read `nbytes` from `offset` of a file on.
    ///
    /// # Errors
    /// [`Error::Os`] where the file cannot be opened, [`Error::Value`] in another process.
    ///
    /// # Safety
    /// `nbytes` initialised bytes at `memory` are nobody else's until the transfer is over.
    pub unsafe fn read(
        &self,
        path: &Path,
        offset: u64,
        memory: *mut u8,
        nbytes: usize,
    ) -> Result<Transfer> {
        self.check_process()?;
        let opened = Opened::of_path(path, OpenOptions::new().read(true))?;
        self.begin(Kind::Read, opened, offset, memory, nbytes)
    }

    /// Begins to write `nbytes` to `offset` of a file on.
    ///
    /// # Errors
    /// As [`Files::read`].
    ///
    /// # Safety
    /// `nbytes` initialised bytes at `memory` are not written to until the transfer is over.
    pub unsafe fn write(
        &self,
        place: Place<'_>,
        offset: u64,
        memory: *const u8,
        nbytes: usize,
    ) -> Result<Transfer> {
        self.check_process()?;
        let opened = match place {
            Place::Path(path) => {
                let mut how = OpenOptions::new();
                how.write(true).create(true).truncate(false).mode(0o600);
                Opened::of_path(path, &how)?
            }
            Place::Descriptor(descriptor) => Opened::of_descriptor(descriptor)?,
        };
        self.begin(Kind::Write, opened, offset, memory.cast_mut(), nbytes)
    }

    fn begin(
        &self,
        kind: Kind,
        opened: Opened,
        offset: u64,
        memory: *mut u8,
        nbytes: usize,
    ) -> Result<Transfer> {
        let is_write = kind == Kind::Write;
        if offset.checked_add(nbytes as u64).is_none_or(|end| i64::try_from(end).is_err()) {
            return Err(Error::value(format!(
                "offset is `{offset}` for `{nbytes}` bytes, expected a place within a file"
            )));
        }
        let (pieces, targets) = self.plan(kind, &opened, offset, memory.addr(), nbytes)?;
        let transfer = Arc::new(InFlight {
            what: if is_write { "write" } else { "read" },
            path: opened.path,
            state: Mutex::new(State {
                remaining: pieces.len(),
                is_abandoned: false,
                failure: None,
            }),
            ended: Condvar::new(),
        });
        for piece in pieces {
            let target = if piece.is_direct { &targets.direct } else { &targets.cached };
            self.engine.queues[0].push(Operation {
                kind,
                offset: offset + piece.begin as u64,
                // SAFETY: pieces are within the `nbytes` that the caller vouches for.
                memory: unsafe { memory.add(piece.begin) },
                nbytes: piece.nbytes,
                buffer: None,
                queue: 0,
                target: target.clone(),
                request: Arc::clone(&transfer) as _,
            });
        }
        Ok(Transfer { in_flight: transfer, pid: self.pid })
    }

    /// The pieces of a transfer, and what they are done on: each way is a description of the file
    /// of its own.
    fn plan(
        &self,
        kind: Kind,
        opened: &Opened,
        offset: u64,
        address: usize,
        nbytes: usize,
    ) -> Result<(Vec<Piece>, Targets)> {
        let [access, synced] = match kind {
            Kind::Write => [OFlags::WRONLY, OFlags::DSYNC],
            _ => [OFlags::RDONLY, OFlags::empty()],
        };
        let plan = |alignment| pieces(offset, nbytes, address, alignment, self.block_bytes);
        let mut pieces = plan(direct::alignment(&opened.file));
        let mut direct = None;
        if pieces.iter().any(|piece| piece.is_direct) {
            match opened.again(access | OFlags::DIRECT) {
                Ok(file) => direct = Some(self.target(file, page_bytes())),
                // A file system that has no direct I/O, and says so here only.
                Err(Error::Os { source, .. })
                    if source.raw_os_error() == Some(Errno::INVAL.raw_os_error()) =>
                {
                    pieces = plan(None);
                }
                Err(error) => return Err(error),
            }
        }
        let cached = if pieces.iter().all(|piece| piece.is_direct) {
            None
        } else {
            Some(self.target(opened.again(access | synced)?, 1))
        };
        Ok((pieces, Targets { direct, cached }))
    }

    fn target(&self, file: File, unit_bytes: usize) -> Arc<Target> {
        let file = Arc::new(file);
        let disk: Arc<dyn Disk> = match &self.between {
            Some(between) => between(0, Arc::clone(&file)),
            None => Arc::clone(&file) as _,
        };
        Arc::new(Target { file, disk, unit_bytes })
    }

    fn check_process(&self) -> Result<()> {
        check_process(self.pid)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // In a forked child the threads are its parent's.
        if self.pid != std::process::id() {
            self.engine.forget();
        }
    }
}

fn check_process(pid: u32) -> Result<()> {
    if pid == std::process::id() {
        return Ok(());
    }
    Err(Error::value(format!(
        "files are read and written in process `{}`, expected `{pid}`, whose threads do it\nhint: \
         a forked child makes a handle of its own",
        std::process::id()
    )))
}

struct Targets {
    direct: Option<Arc<Target>>,
    cached: Option<Arc<Target>>,
}

/// A file, open, from which descriptions of its own are made for each way of writing.
struct Opened {
    file: File,
    path: PathBuf,
}

impl Opened {
    fn of_path(path: &Path, how: &OpenOptions) -> Result<Self> {
        match how.open(path) {
            Ok(file) => Ok(Self { file, path: path.to_owned() }),
            Err(error) => Err(Error::os(format!("cannot open {}", path.display()), error)),
        }
    }

    fn of_descriptor(descriptor: BorrowedFd<'_>) -> Result<Self> {
        let number = descriptor.as_raw_fd();
        let path = PathBuf::from(format!("/proc/self/fd/{number}"));
        let path = std::fs::read_link(&path).unwrap_or(path);
        let file = descriptor.try_clone_to_owned().map_err(|error| {
            Error::os(format!("cannot use the descriptor `{number}` ({})", path.display()), error)
        })?;
        Ok(Self { file: file.into(), path })
    }

    /// The same file, also where its name is another one's by now.
    fn again(&self, flags: OFlags) -> Result<File> {
        let refused = |error: std::io::Error| {
            let path = self.path.display();
            Error::os(format!("cannot open {path} again; hint: it takes /proc"), error)
        };
        let own = format!("/proc/self/fd/{}", self.file.as_fd().as_raw_fd());
        let flags = flags | OFlags::CLOEXEC;
        let opened = rustix::fs::open(own, flags, rustix::fs::Mode::empty());
        let file = File::from(opened.map_err(|error| refused(error.into()))?);
        let inode = |file: &File| file.metadata().map(|found| (found.dev(), found.ino()));
        match (inode(&file), inode(&self.file)) {
            (Ok(this), Ok(other)) if this == other => Ok(file),
            (Err(error), _) | (_, Err(error)) => Err(refused(error)),
            _ => Err(refused(Errno::STALE.into())),
        }
    }
}

/// A run of a transfer's bytes that one operation moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    /// From the first byte of the transfer on.
    begin: usize,
    nbytes: usize,
    /// Whether it bypasses the page cache.
    is_direct: bool,
}

/// What is read and written by one way only: pages of memory, and blocks of drives.
fn page_bytes() -> usize {
    rustix::param::page_size().max(BLOCK_BYTES)
}

/// How `nbytes` at `address` and at `offset` of a file are moved, in order and without a gap.
/// `block_bytes` is a multiple of a page.
fn pieces(
    offset: u64,
    nbytes: usize,
    address: usize,
    alignment: Option<Alignment>,
    block_bytes: usize,
) -> Vec<Piece> {
    // Whole pages of the file, also where less would do (FIL-3).
    let page = page_bytes();
    let head = (offset.next_multiple_of(page as u64) - offset) as usize;
    let fits = alignment.is_some_and(|Alignment { memory_bytes, offset_bytes }| {
        memory_bytes.max(offset_bytes) <= page
            && address.wrapping_add(head).is_multiple_of(memory_bytes)
    });
    let direct_nbytes = if fits { nbytes.saturating_sub(head) / page * page } else { 0 };
    let [first, last] = if direct_nbytes > 0 { [head, head + direct_nbytes] } else { [0, 0] };
    let mut found = Vec::new();
    for (run, is_direct) in [(0..first, false), (first..last, true), (last..nbytes, false)] {
        found.extend(run.clone().step_by(block_bytes).map(|begin| Piece {
            begin,
            nbytes: block_bytes.min(run.end - begin),
            is_direct,
        }));
    }
    found
}

struct State {
    /// Operations that have not ended.
    remaining: usize,
    /// Some of them never will.
    is_abandoned: bool,
    failure: Option<Failure>,
}

struct InFlight {
    what: &'static str,
    path: PathBuf,
    state: Mutex<State>,
    ended: Condvar,
}

impl InFlight {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Outcome for InFlight {
    fn end_operation(&self, failure: Option<Failure>) {
        let mut state = self.state();
        // Of several that were in flight, the first in the file.
        let is_first = |failure: &Failure| {
            state.failure.as_ref().is_none_or(|known| failure.offset < known.offset)
        };
        if let Some(failure) = failure.filter(is_first) {
            state.failure = Some(failure);
        }
        state.remaining -= 1;
        if state.remaining == 0 {
            self.ended.notify_all();
        }
    }

    // It never is over: a drive may still use the memory, which its caller keeps (FIL-4).
    fn abandon(&self, failure: Failure) {
        let mut state = self.state();
        state.failure.get_or_insert(failure);
        state.is_abandoned = true;
        drop(state);
        self.ended.notify_all();
    }
}

/// A read or write in flight.
pub struct Transfer {
    in_flight: Arc<InFlight>,
    pid: u32,
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let InFlight { what, path, .. } = &*self.in_flight;
        write!(f, "Transfer({what} {}, {} operations left)", path.display(), self.remaining())
    }
}

impl Transfer {
    /// Whether nothing uses its memory any more. Always in a forked child, where nothing does.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.pid != std::process::id() || self.in_flight.state().remaining == 0
    }

    /// How many operations have not ended.
    #[must_use]
    pub fn remaining(&self) -> usize {
        self.in_flight.state().remaining
    }

    /// Its outcome, once: when it is over, or cannot be any more, within `timeout`. Nothing where
    /// that takes longer, and the caller waits again.
    ///
    /// # Errors
    /// [`Error::Os`] where the file ends too early (`ENODATA`) or the system refuses, with path and
    /// offset; [`Error::Value`] in another process.
    pub fn wait(&self, timeout: Duration) -> Result<Option<()>> {
        check_process(self.pid)?;
        let InFlight { what, path, ended, .. } = &*self.in_flight;
        let (mut state, _) = ended
            .wait_timeout_while(self.in_flight.state(), timeout, |state| {
                state.remaining > 0 && !state.is_abandoned
            })
            .unwrap_or_else(PoisonError::into_inner);
        if state.remaining > 0 && !state.is_abandoned {
            return Ok(None);
        }
        match state.failure.take() {
            None => Ok(Some(())),
            Some(Failure { offset, error, .. }) => {
                Err(Error::os(format!("cannot {what} {}, offset `{offset}`", path.display()), {
                    let is_short = error.kind() == std::io::ErrorKind::UnexpectedEof;
                    if is_short { Errno::NODATA.into() } else { error }
                }))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_are_all_bytes_in_order_and_direct_ones_are_aligned(
            offset in 0_u64..20_000,
            nbytes in 0_usize..60_000,
            address in 0_usize..9000,
            block_pages in 1_usize..4,
            memory_bytes in prop::sample::select(vec![4, 512, 4096]),
            offset_bytes in prop::sample::select(vec![512, 4096]),
            has_direct: bool,
        ) {
            let page = page_bytes();
            let alignment = has_direct.then_some(Alignment { memory_bytes, offset_bytes });
            let found = pieces(offset, nbytes, address, alignment, block_pages * page);
            let mut end = 0;
            for piece in &found {
                prop_assert_eq!(piece.begin, end);
                prop_assert!((1..=block_pages * page).contains(&piece.nbytes));
                end += piece.nbytes;
                let at = offset as usize + piece.begin;
                if piece.is_direct {
                    prop_assert!(at.is_multiple_of(page) && piece.nbytes.is_multiple_of(page));
                    prop_assert!((address + piece.begin).is_multiple_of(memory_bytes));
                }
            }
            prop_assert_eq!(end, nbytes);
            let head = (offset as usize).next_multiple_of(page) - offset as usize;
            let can = has_direct
                && nbytes >= head + page
                && (address + head).is_multiple_of(memory_bytes);
            let direct: usize =
                found.iter().filter(|piece| piece.is_direct).map(|piece| piece.nbytes).sum();
            prop_assert_eq!(direct, if can { (nbytes - head) / page * page } else { 0 });
        }
    }
}
