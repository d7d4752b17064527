//! What of a step is in flight: which chunks have buffers, which are read, stepped and written.
//!
//! It does no I/O, and waits for nothing.
//!
//! Memory: 82 B per chunk.

use std::{collections::VecDeque, num::NonZeroU64};

use super::super::volume::{RecordBuffer, Ticket};
use crate::error::{Error, Result};

/// What a chunk has.
enum Flight {
    /// No buffer.
    Idle,
    /// Its state is being read, into its buffer.
    Reading(Ticket, Option<RecordBuffer>),
    /// A worker waits for that.
    Awaited(Option<RecordBuffer>),
    /// Its state is in its buffer, or comes there with the step. The second one is for its weight.
    Given(RecordBuffer, Option<RecordBuffer>),
}

/// What of a chunk a commit would not have as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Behind {
    /// Its weight, where that has a record.
    pub(super) weight: bool,
    /// Its state, where that is in host memory.
    pub(super) state: bool,
}

/// See the [module](self).
pub(super) struct Pipeline {
    /// The chunks of the step that need buffers, in its order, and whether they are read.
    order: Vec<(u32, bool)>,
    /// The first of them that has not been given its own.
    next: usize,
    flights: Box<[Flight]>,
    writes: VecDeque<Ticket>,
    /// Buffers for the next chunk, which needs more of them.
    pub(super) spare: Vec<RecordBuffer>,
    /// Whether a step has written the state of a chunk, to a record or in host memory.
    has_state: Box<[bool]>,
    /// Whether a chunk's weight, and its state in host memory, have changed since they were written
    /// to records that a commit would have.
    is_behind: Box<[Behind]>,
    /// The count of updates of each tensor.
    counts: Box<[u64]>,
    /// The number of the step.
    step: u64,
    /// Steps from one commit to the next.
    commit_interval: NonZeroU64,
    is_any_written: bool,
    failure: Option<String>,
}

impl Pipeline {
    pub(super) fn new(chunks: usize, tensors: usize, commit_interval: NonZeroU64) -> Self {
        Self {
            order: Vec::with_capacity(chunks),
            next: 0,
            flights: (0..chunks).map(|_| Flight::Idle).collect(),
            writes: VecDeque::new(),
            spare: Vec::with_capacity(2),
            has_state: vec![false; chunks].into(),
            is_behind: vec![Behind::default(); chunks].into(),
            counts: vec![0; tensors].into(),
            step: 1,
            commit_interval,
            is_any_written: false,
            failure: None,
        }
    }

    /// Remembers the first failure.
    pub(super) fn fail(&mut self, error: &Error) {
        self.failure.get_or_insert_with(|| error.to_string());
    }

    /// Checks that nothing has failed.
    ///
    /// # Errors
    /// [`Error::Os`] with the first failure.
    pub(super) fn check(&self) -> Result<()> {
        self.failure.as_ref().map_or(Ok(()), |failure| {
            Err(Error::os("a step failed before", std::io::Error::other(failure.as_str())))
        })
    }

    // ---- what is planned ----

    pub(super) fn begin(&mut self) {
        self.order.clear();
        self.next = 0;
        self.is_any_written = false;
    }

    pub(super) fn plan(&mut self, number: usize, is_read: bool) {
        self.order.push((number as u32, is_read));
        self.is_any_written = true;
    }

    pub(super) fn set_tensor(&mut self, tensor: usize, count: u64) {
        self.counts[tensor] = count;
        self.is_any_written = true;
    }

    /// The next chunk that needs a buffer, and whether it is read.
    pub(super) fn next(&self) -> Option<(usize, bool)> {
        self.order.get(self.next).map(|&(number, is_read)| (number as usize, is_read))
    }

    // ---- a chunk's buffers ----

    pub(super) fn reading(&mut self, number: usize, ticket: Ticket, weight: Option<RecordBuffer>) {
        self.flights[number] = Flight::Reading(ticket, weight);
        self.next += 1;
    }

    pub(super) fn given(
        &mut self,
        number: usize,
        state: RecordBuffer,
        weight: Option<RecordBuffer>,
    ) {
        self.flights[number] = Flight::Given(state, weight);
        self.next += 1;
    }

    /// Its read, which is waited for.
    pub(super) fn take_reading(&mut self, number: usize) -> Option<Ticket> {
        match std::mem::replace(&mut self.flights[number], Flight::Idle) {
            Flight::Reading(ticket, weight) => {
                self.flights[number] = Flight::Awaited(weight);
                Some(ticket)
            }
            other => {
                self.flights[number] = other;
                None
            }
        }
    }

    /// Its read is over. Where its state is.
    pub(super) fn read(&mut self, number: usize, state: RecordBuffer) -> usize {
        let address = state.as_ptr().expose_provenance();
        let weight = match std::mem::replace(&mut self.flights[number], Flight::Idle) {
            Flight::Awaited(weight) => weight,
            _ => None,
        };
        self.flights[number] = Flight::Given(state, weight);
        address
    }

    /// Where its state is, or comes to; None: it has no buffer yet.
    pub(super) fn address(&self, number: usize) -> Option<usize> {
        match &self.flights[number] {
            Flight::Given(state, _) => Some(state.as_ptr().expose_provenance()),
            _ => None,
        }
    }

    /// Its buffers, to be written.
    ///
    /// # Errors
    /// [`Error::Value`] where it has none.
    pub(super) fn take_given(
        &mut self,
        number: usize,
    ) -> Result<(RecordBuffer, Option<RecordBuffer>)> {
        match std::mem::replace(&mut self.flights[number], Flight::Idle) {
            Flight::Given(state, weight) => Ok((state, weight)),
            _ => Err(Error::value(format!(
                "chunk `{number}` is to be stored, expected it to be fetched before"
            ))),
        }
    }

    // ---- writes ----

    pub(super) fn stored(
        &mut self,
        number: usize,
        writes: impl IntoIterator<Item = Ticket>,
        is_behind: Behind,
    ) {
        self.has_state[number] = true;
        self.is_behind[number] = is_behind;
        self.writes.extend(writes);
    }

    /// A write that is ended with those of the step.
    pub(super) fn writing(&mut self, write: Ticket) {
        self.writes.push_back(write);
    }

    /// The oldest write, if it is over.
    pub(super) fn pop_written(&mut self) -> Option<Ticket> {
        if self.writes.front()?.is_over() { self.writes.pop_front() } else { None }
    }

    /// The oldest write, over or not.
    pub(super) fn pop_oldest_write(&mut self) -> Option<Ticket> {
        self.writes.pop_front()
    }

    // ---- steps ----

    pub(super) fn has_state(&self, number: usize) -> bool {
        self.has_state[number]
    }

    pub(super) fn set_has_state(&mut self, number: usize) {
        self.has_state[number] = true;
    }

    /// The number of the step that is under way, or comes next.
    pub(super) fn step(&self) -> u64 {
        self.step
    }

    /// Whether a commit ends the step that is under way, or comes next (SWAP-6).
    pub(super) fn commits(&self) -> bool {
        self.step == 1 || self.step.is_multiple_of(self.commit_interval.get())
    }

    pub(super) fn is_behind(&self, number: usize) -> Behind {
        self.is_behind[number]
    }

    pub(super) fn behind(&mut self, number: usize) -> &mut Behind {
        &mut self.is_behind[number]
    }

    /// Whether the step changes anything here.
    pub(super) fn is_any_written(&self) -> bool {
        self.is_any_written
    }

    /// The step is over, and committed where one commits it.
    pub(super) fn ended(&mut self) {
        self.step += 1;
        self.is_any_written = false;
    }

    pub(super) fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// As after the commit of `step`.
    pub(super) fn resume(&mut self, step: u64, counts: &[u64]) {
        self.step = step + 1;
        self.counts.copy_from_slice(counts);
    }

    /// Checks that no step is under way.
    ///
    /// # Errors
    /// [`Error::Value`] where one is.
    pub(super) fn check_idle(&self) -> Result<()> {
        self.check()?;
        if self.is_any_written {
            return Err(Error::value(
                "state is to be copied while a step is under way, expected it to be finished first",
            ));
        }
        Ok(())
    }
}
