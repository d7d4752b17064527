//! Passes over all records of a volume, to measure what it moves: as many in flight as there are
//! buffers. The bytes of the records are those that the buffers have.

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::{Duration, Instant},
};

use rustix::io::Errno;

use super::{RecordBuffer, Ticket, Volume};
use crate::{Error, Result};

/// What a pass does with each record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Writes it; a commit at the end.
    Write,
    /// Reads it, and verifies it.
    Read,
    /// Reads and writes it, as a step does; a commit at the end.
    Swap,
}

/// A volume that is measured.
pub struct Passes {
    volume: Volume,
    num_buffers: usize,
    tickets: VecDeque<Ticket>,
    step: u64,
    io_timeout: Duration,
    committing: Duration,
}

impl Passes {
    /// Over a volume of so many buffers, whose records are then written once: the first write of a
    /// block is slower than those after it.
    ///
    /// # Errors
    /// As [`Passes::pass`].
    pub fn new(
        volume: Volume,
        num_buffers: usize,
        io_timeout: Duration,
        is_interrupted: &AtomicBool,
    ) -> Result<Self> {
        let tickets = VecDeque::with_capacity(num_buffers);
        let committing = Duration::ZERO;
        let mut passes = Self { volume, num_buffers, tickets, step: 0, io_timeout, committing };
        passes.pass(Pattern::Write, is_interrupted)?;
        Ok(passes)
    }

    /// What is measured.
    #[must_use]
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// What commits have taken in all.
    #[must_use]
    pub fn committing(&self) -> Duration {
        self.committing
    }

    /// One pass.
    ///
    /// # Errors
    /// [`Error::Os`] where a drive fails, or does not answer, or the pass is interrupted (`EINTR`).
    pub fn pass(&mut self, pattern: Pattern, is_interrupted: &AtomicBool) -> Result<()> {
        // Reads run ahead by half of the buffers; writes have the other half.
        let ahead = if pattern == Pattern::Swap { (self.num_buffers / 2).max(1) } else { 0 };
        let num_records = self.volume.num_records();
        let mut reads = VecDeque::with_capacity(ahead);
        if pattern != Pattern::Read {
            self.step += 1;
        }
        for record in 0..num_records + ahead {
            if is_interrupted.load(Relaxed) {
                return Err(Error::os("a pass over a volume was interrupted", Errno::INTR));
            }
            if record < num_records {
                let buffer = self.buffer()?;
                match pattern {
                    Pattern::Write => {
                        self.tickets.push_back(self.volume.write(record, self.step, buffer)?);
                    }
                    Pattern::Read => self.tickets.push_back(self.volume.read(record, buffer)?),
                    Pattern::Swap => reads.push_back((record, self.volume.read(record, buffer)?)),
                }
            }
            if record >= ahead
                && let Some((record, mut ticket)) = reads.pop_front()
            {
                let buffer = self.finish(&mut ticket)?;
                self.tickets.push_back(self.volume.write(record, self.step, buffer)?);
            }
        }
        while let Some(mut ticket) = self.tickets.pop_front() {
            self.finish(&mut ticket)?;
        }
        if pattern != Pattern::Read {
            let begin = Instant::now();
            self.volume.commit(self.step)?;
            self.committing += begin.elapsed();
        }
        Ok(())
    }

    /// A buffer that is free, or that of what was begun first.
    fn buffer(&mut self) -> Result<RecordBuffer> {
        match self.volume.buffer(Duration::ZERO) {
            Some(buffer) => Ok(buffer),
            None => match self.tickets.pop_front() {
                Some(mut ticket) => self.finish(&mut ticket),
                None => self.volume.buffer(self.io_timeout).ok_or_else(|| self.volume.no_answer()),
            },
        }
    }

    fn finish(&self, ticket: &mut Ticket) -> Result<RecordBuffer> {
        ticket.wait(self.io_timeout)?.ok_or_else(|| self.volume.no_answer())
    }
}
