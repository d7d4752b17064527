//! A volume: the state of chunks on several drives, as one space of records.
//!
//! A **volume** has **members**: folders, on a drive each, with one file of the volume. It has a
//! fixed list of **records**, each of a fixed size. A record is the state of one chunk
//! ([`crate::state::layout`]); to the volume it is opaque bytes. Records are cut into **stripes**,
//! which go to the members in proportion to their weights ([`geometry`]).
//!
//! ```text
//! Volume::create -> write, wait (several in flight) -> commit(step) -> write ... -> close
//! Volume::open   -> at the last committed step, whatever has happened since
//! ```
//!
//! - VOL-1 A crash, a kill or a power cut at any moment leaves the last committed step whole
//!   (`commit.rs` argues the order). With [`Durability::None`] nothing is left.
//! - VOL-2 A read gives the bytes of the record's last write, or an error that says volume, member,
//!   offset and step. Whatever else is at the place (changed bits, a stale record, zeros, another
//!   volume's) is found by its checksum.
//! - VOL-3 All space is taken when the volume is made, all memory when it is made or opened.
//! - VOL-4 One process uses a volume. What a killed one had submitted has landed before the next
//!   one uses it (`member.rs`).
//! - VOL-5 After an outcome that is not known (a flush that failed, a drive that does not answer)
//!   the volume is not used any more.
//! - VOL-6 The files are removed when the volume is closed or dropped, unless they are kept. Those
//!   of [`Durability::None`] have no name from the beginning, so a kill leaves nothing either.
//!
//! Cost. On the members: twice each record (once with [`Durability::None`]) with 64 B rounded up to
//! the block (4 KiB), four indices of 32 B per record, 128 KiB. In memory: the buffers, 32 B per
//! record for the index's bytes, 76 B per record and 16 B per stripe. A step that writes all
//! records writes each once, and two indices; a thread that reads or writes computes one checksum
//! (CRC-64, tens of GB/s on one core) over the record.

mod buffers;
mod commit;
pub mod disk;
mod engine;
mod format;
pub mod geometry;
mod ledger;
mod make;
mod member;
mod request;
mod ticket;
mod uring;

use std::{
    fmt,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc,
    },
    time::Duration,
};

use rustix::io::Errno;

use self::{
    buffers::Buffers,
    commit::Image,
    disk::Between,
    engine::{Engine, Kind, Operation},
    format::{Entry, Head},
    ledger::Ledger,
    member::Member,
    request::{Purpose, Request, lock},
    ticket::About,
};
pub use self::{buffers::RecordBuffer, engine::EngineKind, ticket::Ticket};
use crate::{Error, Result, host::memory::Buffer};

/// What a step is after a crash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// The last committed step is whole. Takes two slots per record.
    #[default]
    Commit,
    /// Steps are written in place, and nothing is left of them.
    None,
}

/// Which volume: its name, and the folders of its members in their order.
#[derive(Clone, Debug)]
pub struct Location {
    /// Letters, digits, `.`, `_` and `-`. [`unique_name`] makes one.
    pub name: String,
    /// One for each member.
    pub folders: Vec<PathBuf>,
}

/// What a volume is when it is made, and stays.
#[derive(Clone, Debug)]
pub struct Shape {
    /// The bytes of each record.
    pub record_nbytes: Vec<usize>,
    /// The bandwidth of each member, in any unit; empty where all are alike.
    pub weights: Vec<u32>,
    /// The most bytes of a record that lie together on one member; rounded up to the block.
    pub stripe_bytes: usize,
    /// What a step is after a crash.
    pub durability: Durability,
}

impl Shape {
    /// Of these records, on members that are alike, in stripes of 1 MiB, with commits.
    #[must_use]
    pub fn new(record_nbytes: Vec<usize>) -> Self {
        Self {
            record_nbytes,
            weights: Vec::new(),
            stripe_bytes: 1 << 20,
            durability: Durability::Commit,
        }
    }
}

/// How a process uses a volume.
#[derive(Clone)]
pub struct Options {
    /// What moves the bytes.
    pub engine: EngineKind,
    /// Operations that each drive is given at once.
    pub queue_depth: usize,
    /// Buffers for records, each for the largest: the most records in flight, or with the caller.
    pub num_buffers: usize,
    /// Whether the files stay when the volume is closed or dropped.
    pub keep: bool,
    /// How long a drive may take to answer where the volume waits by itself: in a commit, at the
    /// end.
    pub io_timeout: Duration,
    /// How long [`Volume::open`] waits for the last writes of a process that was killed.
    pub lock_timeout: Duration,
    /// What stands between the volume and its files. It has positional calls.
    pub between: Option<Between>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            engine: EngineKind::Auto,
            queue_depth: 32,
            num_buffers: 16,
            keep: false,
            io_timeout: Duration::from_secs(60),
            lock_timeout: Duration::from_secs(60),
            between: None,
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("engine", &self.engine)
            .field("queue_depth", &self.queue_depth)
            .field("num_buffers", &self.num_buffers)
            .field("keep", &self.keep)
            .finish_non_exhaustive()
    }
}

/// A name that no other job has: of this process, and random.
///
/// # Errors
/// [`Error::Os`] where the system gives no random bits.
pub fn unique_name() -> Result<String> {
    Ok(format!("{}-{:016x}", std::process::id(), random()? as u64))
}

fn random() -> Result<u128> {
    let mut bytes = [0; 16];
    // SAFETY: the kernel writes up to 16 bytes, which there are. Requests this small are not cut
    // short once the kernel has seeded its generator.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got != bytes.len() as isize {
        return Err(Error::os("cannot get random bits", std::io::Error::last_os_error()));
    }
    Ok(u128::from_le_bytes(bytes))
}

/// See the [module](self).
pub struct Volume {
    about: Arc<About>,
    durability: Durability,
    members: Vec<Member>,
    ledger: Arc<Mutex<Ledger>>,
    buffers: Arc<Buffers>,
    engine: Engine,
    /// Memory for one copy of the index.
    image: Mutex<Buffer>,
    keep: bool,
    io_timeout: Duration,
    /// The process that may use it.
    pid: u32,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
}

impl fmt::Debug for Volume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Volume({}, {} members, {} records, step {:?})",
            self.about.name,
            self.members.len(),
            self.num_records(),
            self.step()
        )
    }
}

impl Volume {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.about.name
    }

    /// The files of its members.
    #[must_use]
    pub fn paths(&self) -> &[PathBuf] {
        &self.about.paths
    }

    /// How many records it has.
    #[must_use]
    pub fn num_records(&self) -> usize {
        lock(&self.ledger).num_records()
    }

    /// Bytes of a record.
    ///
    /// # Errors
    /// [`Error::Value`] for a record that there is not.
    pub fn record_nbytes(&self, record: usize) -> Result<usize> {
        Ok(lock(&self.ledger).nbytes(record)? as usize)
    }

    /// The committed step; none before the first commit.
    #[must_use]
    pub fn step(&self) -> Option<u64> {
        lock(&self.ledger).step()
    }

    /// Whether io_uring moves the bytes.
    #[must_use]
    pub fn has_rings(&self) -> bool {
        self.engine.has_rings
    }

    /// Whether the page cache is bypassed on every member.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.members.iter().all(Member::is_direct)
    }

    /// Bytes that reads and writes of records have moved since it was made or opened, with trailers
    /// and padding, without indices.
    #[must_use]
    pub fn bytes_moved(&self) -> (u64, u64) {
        (self.bytes_read.load(Relaxed), self.bytes_written.load(Relaxed))
    }

    /// A buffer that is free, at latest after `timeout`; nothing where there is none.
    #[must_use]
    pub fn buffer(&self, timeout: Duration) -> Option<RecordBuffer> {
        self.buffers.take(timeout)
    }

    /// Begins to read the last write of a record, committed or not, to the beginning of the buffer.
    ///
    /// # Errors
    /// [`Error::Value`] for a record that there is not, was never written or is being written, or a
    /// buffer of another volume; [`Error::Os`] where its last write has failed, or the volume is
    /// not used any more (VOL-5).
    pub fn read(&self, record: usize, buffer: RecordBuffer) -> Result<Ticket> {
        self.check_caller(&buffer)?;
        let entry = lock(&self.ledger).begin_read(record)?;
        let nbytes = self.about.stored_nbytes(record) as u64;
        self.bytes_read.fetch_add(nbytes, Relaxed);
        Ok(self.submit(Kind::Read, record, entry, buffer))
    }

    /// Begins to write a record of step `step` from the beginning of the buffer. It is what reads
    /// find once the ticket is over, and what the state is with the commit of that step.
    ///
    /// # Errors
    /// As [`Volume::read`]; [`Error::Value`] for a record that is being read, or during a commit.
    pub fn write(&self, record: usize, step: u64, mut buffer: RecordBuffer) -> Result<Ticket> {
        self.check_caller(&buffer)?;
        let mut entry = lock(&self.ledger).begin_write(record, step)?;
        let nbytes = self.about.stored_nbytes(record);
        let stored = &mut buffer.as_mut_slice()[..nbytes];
        entry.checksum = format::checksum(&stored[..entry.nbytes as usize]);
        format::encode_trailer(stored, self.about.id, record, &entry);
        self.bytes_written.fetch_add(nbytes as u64, Relaxed);
        Ok(self.submit(Kind::Write, record, entry, buffer))
    }

    /// Makes the records that were written since the last commit, all of step `step`, and that step
    /// the state: all of them or none. Durable when it returns. Blocks as long as the drives take,
    /// `io_timeout` at most.
    ///
    /// # Errors
    /// [`Error::Value`] where writes are in flight or have failed, or are of another step: nothing
    /// has changed then. [`Error::Os`] where a drive failed: it is not known which step is durable,
    /// and the volume is not used any more. The one that is, is whole.
    pub fn commit(&self, step: u64) -> Result<()> {
        self.check_process()?;
        let head = lock(&self.ledger).begin_commit(step)?;
        let outcome = match self.durability {
            Durability::None => Ok(head),
            Durability::Commit => self.make_durable(head),
        };
        lock(&self.ledger).end_commit(&outcome);
        outcome.map(|_| ())
    }

    fn make_durable(&self, head: Head) -> Result<Head> {
        let sync = Purpose::Sync;
        let request = Request::new(sync, self.members.len(), None, Arc::clone(&self.ledger));
        for (member, queue) in self.engine.queues.iter().enumerate() {
            queue.push(Operation {
                kind: Kind::Sync,
                offset: 0,
                memory: std::ptr::null_mut(),
                nbytes: 0,
                buffer: 0,
                member: member as u16,
                request: Arc::clone(&request),
            });
        }
        match request.wait(self.io_timeout) {
            None => return Err(self.no_answer()),
            Some(Err(failure)) => return Err(self.about.failed("sync", head.step, failure)),
            Some(Ok(_)) => {}
        }
        let mut image = lock(&self.image);
        // A copy: the ledger answers other threads while the index is written.
        let entries: Vec<Entry> = lock(&self.ledger).after_commit().collect();
        let mut image = Image {
            bytes: bytes_of(&mut image),
            volume_name: &self.about.name,
            members: &self.members,
            extents: &self.about.extents,
        };
        image.write(head, entries.into_iter())?;
        Ok(head)
    }

    fn no_answer(&self) -> Error {
        let paths: Vec<String> =
            self.about.paths.iter().map(|path| path.display().to_string()).collect();
        Error::os(
            format!(
                "the drives of volume `{}` ({}) have not answered for `{}` s",
                self.about.name,
                paths.join(", "),
                self.io_timeout.as_secs_f64()
            ),
            Errno::TIMEDOUT,
        )
    }

    /// Forgets what was written since the last commit.
    ///
    /// # Errors
    /// [`Error::Value`] while writes are in flight, or with [`Durability::None`].
    pub fn revert(&self) -> Result<()> {
        self.check_process()?;
        lock(&self.ledger).revert()
    }

    /// Ends the volume once what is in flight has ended, and removes its files unless they are
    /// kept. Dropping it does the same, and says nothing.
    ///
    /// # Errors
    /// [`Error::Os`] where a drive has not answered for `io_timeout`. The files are removed all the
    /// same, and what was in flight owns all that it uses.
    pub fn close(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        if self.pid != std::process::id() {
            // A forked child: threads, files and their lock are its parent's.
            std::mem::forget(std::mem::take(&mut self.members));
            self.engine.forget();
            return Ok(());
        }
        let Some(ended) = self.engine.close() else { return Ok(()) };
        let have_ended = matches!(
            ended.recv_timeout(self.io_timeout),
            Err(mpsc::RecvTimeoutError::Disconnected)
        );
        if !self.keep {
            self.members.iter().for_each(Member::remove);
        }
        if !have_ended {
            return Err(self.no_answer());
        }
        self.members.iter().for_each(Member::unlock);
        Ok(())
    }

    fn check_process(&self) -> Result<()> {
        if self.pid == std::process::id() {
            return Ok(());
        }
        Err(Error::value(format!(
            "volume `{}` is used in process `{}`, expected `{}`, which it belongs to\nhint: a \
             forked child opens another one",
            self.about.name,
            std::process::id(),
            self.pid
        )))
    }

    fn check_caller(&self, buffer: &RecordBuffer) -> Result<()> {
        self.check_process()?;
        if buffer.is_of(&self.buffers) {
            return Ok(());
        }
        Err(Error::value(format!(
            "a buffer of another volume is given to volume `{}`\nhint: `buffer` gives its own",
            self.about.name
        )))
    }

    fn submit(&self, kind: Kind, record: usize, entry: Entry, buffer: RecordBuffer) -> Ticket {
        let (begin, index) = (buffer.as_ptr(), buffer.index());
        let pieces = self.about.geometry.pieces(record);
        let purpose = match kind {
            Kind::Read => Purpose::Read { record, entry },
            _ => Purpose::Write { record, entry },
        };
        let ledger = Arc::clone(&self.ledger);
        let request = Request::new(purpose, pieces.len(), Some(buffer), ledger);
        let mut done = 0;
        for piece in pieces {
            let member = usize::from(piece.member);
            let slot_offset = self.about.extents[member].slot_offset(entry.slot);
            self.engine.queues[member].push(Operation {
                kind,
                offset: slot_offset + piece.offset,
                // SAFETY: the pieces of a record add up to its stored bytes (GEO-1), for which
                // every buffer has room.
                memory: unsafe { begin.add(done) },
                nbytes: piece.nbytes as usize,
                buffer: index,
                member: piece.member,
                request: Arc::clone(&request),
            });
            done += piece.nbytes as usize;
        }
        Ticket { about: Arc::clone(&self.about), request: Some(request) }
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        // Nobody is there to be told.
        let _ = self.end();
    }
}

/// The bytes of a buffer that is the caller's alone.
fn bytes_of(buffer: &mut Buffer) -> &mut [u8] {
    // SAFETY: `nbytes` zeroed bytes from there on are mapped as long as the buffer, which is
    // borrowed alone.
    unsafe { std::slice::from_raw_parts_mut(buffer.as_ptr(), buffer.nbytes()) }
}
