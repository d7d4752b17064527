//! A volume: the state of chunks on several drives, as one space of records.
//!
//! A **volume** has **members**, on a drive each: a file in a folder, or a block device. It has a
//! fixed list of **records**, each of a fixed size. A record is the state of one chunk
//! ([`crate::state::layout`]); to the volume it is opaque bytes. Records are cut into **stripes**,
//! which go to the members in proportion to their weights ([`geometry`]).
//!
//! ```text
//! Volume::create -> write, wait (several in flight) -> commit(step) -> write ... -> close
//! Volume::open   -> at the last committed step, whatever has happened since
//! ```
//!
//! Any number of threads read and write. Each has a buffer and a ticket per record in flight:
//!
//! ```text
//! let buffer = volume.buffer(timeout)           one of the volume's, as soon as one is free
//! let mut ticket = volume.read(record, buffer)  the request owns the buffer
//! let buffer = ticket.wait(timeout)             verified; none yet: wait again
//! ...                                           a step, in the buffer
//! let mut ticket = volume.write(record, step, buffer)
//! ticket.wait(timeout)                          the buffer again, or dropped: it is free
//! volume.commit(step)                           when all tickets of writes are over
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

pub mod block_device;
mod buffers;
mod commit;
mod config;
mod flushes;
mod format;
pub mod found;
pub mod geometry;
mod headers;
mod ledger;
mod make;
mod member;
pub mod passes;
mod request;
mod ticket;

use std::{
    collections::VecDeque,
    fmt,
    ops::Range,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        mpsc,
    },
    time::Duration,
};

use rustix::io::Errno;

use self::{
    buffers::Buffers,
    flushes::Flushes,
    format::{Entry, Head},
    geometry::STRIPE_BYTES_MAX,
    ledger::Ledger,
    member::Member,
    request::{Purpose, Request},
    ticket::About,
};
pub use self::{
    buffers::RecordBuffer,
    config::{Durability, Location, Options, QUEUE_DEPTH, STRIPE_BYTES, Shape, unique_name},
    make::check_records,
    ticket::Ticket,
};
pub use crate::tier::io::EngineKind;
use crate::{
    Error, Result,
    host::memory::Buffer,
    tier::io::{
        engine::Engine,
        queue::{Kind, Operation, lock},
    },
};

/// See the [module](self).
pub struct Volume {
    about: Arc<About>,
    durability: Durability,
    members: Vec<Member>,
    ledger: Arc<Mutex<Ledger>>,
    buffers: Arc<Buffers>,
    engine: Engine,
    /// Memory for one copy of the index.
    image: Arc<Mutex<Buffer>>,
    /// With [`Durability::Commit`].
    flushes: Option<Flushes>,
    /// Of one that was opened: the committed step before the one that it was opened at.
    step_before: Option<u64>,
    /// Whether members are flushed while a step writes.
    flushes_now: AtomicBool,
    keep: AtomicBool,
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

    /// Of one that was opened: the committed step before the one that it was opened at, whole until
    /// the first write. None: there is none, or it was made.
    #[must_use]
    pub fn step_before(&self) -> Option<u64> {
        self.step_before
    }

    /// Whether a record was written, also by a write that failed.
    ///
    /// # Errors
    /// [`Error::Value`] for a record that there is not.
    pub fn is_written(&self, record: usize) -> Result<bool> {
        lock(&self.ledger).is_written(record)
    }

    /// Bytes of all buffers.
    #[must_use]
    pub fn buffers_nbytes(&self) -> usize {
        self.buffers.all().map(|(_, nbytes)| nbytes).sum()
    }

    /// Whether members are flushed while they are written, from now on: before a commit, which then
    /// has less to flush.
    pub fn set_flushes(&self, flushes: bool) {
        self.flushes_now.store(flushes, Relaxed);
    }

    /// Whether the files stay when it is closed or dropped, from now on.
    pub fn set_keep(&self, keep: bool) {
        self.keep.store(keep, Relaxed);
    }

    /// Whether the files stay when it is closed or dropped.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.keep.load(Relaxed)
    }

    /// Removes the files now, unless they are kept: for a process that ends without dropping it.
    pub fn remove_files(&self) {
        if !self.keep.load(Relaxed) && self.pid == std::process::id() {
            self.members.iter().rev().for_each(Member::remove);
        }
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
    /// find once the ticket is over, and what the state is with the next commit.
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

    /// Makes the records that were written since the last commit, of steps up to `step`, and that
    /// step the state: all of them or none. Durable when it returns. Blocks as long as the drives
    /// take: for each flush and each write of the index `io_timeout` at most.
    ///
    /// # Errors
    /// [`Error::Value`] where writes are in flight or have failed, or are of steps that do not lie
    /// between the last commit and this one: nothing has changed then. [`Error::Os`] where a drive
    /// failed: it is not known which step is durable, and the volume is not used any more. The one
    /// that is, is whole. Also where a member's file was removed meanwhile: nobody would find that
    /// step again.
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

    /// The order of `commit.rs`, line by line.
    fn make_durable(&self, head: Head) -> Result<Head> {
        for (number, member) in self.members.iter().enumerate() {
            member.check_name(&self.about.name, number)?;
        }
        for flush in self.flushes.iter().flat_map(Flushes::take) {
            self.end_of(&flush, "sync", head)?;
        }
        self.sync(0..self.members.len(), head)?;
        let (memory, nbytes) = {
            let mut image = lock(&self.image);
            let bytes = bytes_of(&mut image);
            format::encode_index(&head, lock(&self.ledger).after_commit(), bytes);
            (bytes.as_mut_ptr(), bytes.len())
        };
        for (member, begin) in commit::places(&self.about.extents, head.generation) {
            let purpose = Purpose::Index { _memory: Arc::clone(&self.image) };
            let num = nbytes.div_ceil(STRIPE_BYTES_MAX);
            let request = Request::new(purpose, num, None, Arc::clone(&self.ledger));
            for done in (0..nbytes).step_by(STRIPE_BYTES_MAX) {
                self.engine.queues[member].push(Operation {
                    kind: Kind::Write,
                    offset: begin + done as u64,
                    // SAFETY: within the index's memory, which the request owns as well. Only a
                    // commit writes to it. There is one at a time, and none after one that has not
                    // ended (LED-4).
                    memory: unsafe { memory.add(done) },
                    nbytes: STRIPE_BYTES_MAX.min(nbytes - done),
                    buffer: None,
                    queue: member as u16,
                    target: None,
                    request: Arc::clone(&request) as _,
                });
            }
            self.end_of(&request, "write the index of", head)?;
            self.sync(member..member + 1, head)?;
        }
        Ok(head)
    }

    /// Makes durable what was written to these members.
    fn sync(&self, members: Range<usize>, head: Head) -> Result<()> {
        self.end_of(&self.begin_sync(members), "sync", head)
    }

    fn begin_sync(&self, members: Range<usize>) -> Arc<Request> {
        let request = Request::new(Purpose::Sync, members.len(), None, Arc::clone(&self.ledger));
        for member in members {
            self.engine.queues[member].push(Operation {
                kind: Kind::Sync,
                offset: 0,
                memory: std::ptr::null_mut(),
                nbytes: 0,
                buffer: None,
                queue: member as u16,
                target: None,
                request: Arc::clone(&request) as _,
            });
        }
        request
    }

    fn end_of(&self, request: &Request, what: &str, head: Head) -> Result<()> {
        match request.wait(self.io_timeout) {
            None => Err(self.no_answer()),
            Some(Err(failure)) => Err(self.about.failed(what, head.step, failure)),
            Some(Ok(_)) => Ok(()),
        }
    }

    /// What a wait of `io_timeout` ends with.
    pub(crate) fn no_answer(&self) -> Error {
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

    /// Reads these records, several at once, and says which are not what they have to be. Those
    /// that were never written are left out.
    ///
    /// # Errors
    /// [`Error::Value`] for records that there are not, or while one of them is written;
    /// [`Error::Os`] where a drive does not answer for `io_timeout`, or the caller has all buffers.
    pub fn check(&self, records: Range<usize>) -> Result<Vec<Error>> {
        if let Some(last) = records.clone().last() {
            self.record_nbytes(last)?;
        }
        let mut found = Vec::new();
        let mut tickets: VecDeque<Ticket> = VecDeque::new();
        for record in records {
            if !lock(&self.ledger).is_written(record)? {
                continue;
            }
            let buffer = match self.buffers.take(Duration::ZERO) {
                Some(buffer) => buffer,
                None => {
                    tickets
                        .pop_front()
                        .map(|ticket| self.check_end(ticket, &mut found))
                        .transpose()?;
                    self.buffers.take(self.io_timeout).ok_or_else(|| self.no_answer())?
                }
            };
            tickets.push_back(self.read(record, buffer)?);
        }
        tickets.into_iter().try_for_each(|ticket| self.check_end(ticket, &mut found))?;
        Ok(found)
    }

    fn check_end(&self, mut ticket: Ticket, found: &mut Vec<Error>) -> Result<()> {
        match ticket.wait(self.io_timeout) {
            Ok(None) => return Err(self.no_answer()),
            Ok(Some(_)) => {}
            Err(error) => found.push(error),
        }
        Ok(())
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
        if !self.keep.load(Relaxed) {
            self.members.iter().rev().for_each(Member::remove);
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
            // First: no commit is under way while this write is.
            let flushes = self.flushes.as_ref().filter(|_| self.flushes_now.load(Relaxed));
            if let (Kind::Write, Some(flushes)) = (kind, flushes) {
                flushes.note_write(member, u64::from(piece.nbytes), || {
                    self.begin_sync(member..member + 1)
                });
            }
            let slot_offset = self.about.extents[member].slot_offset(entry.slot);
            self.engine.queues[member].push(Operation {
                kind,
                offset: slot_offset + piece.offset,
                // SAFETY: the pieces of a record add up to its stored bytes (GEO-1), for which
                // every buffer has room.
                memory: unsafe { begin.add(done) },
                nbytes: piece.nbytes as usize,
                buffer: Some(index),
                queue: piece.member,
                target: None,
                request: Arc::clone(&request) as _,
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
